# `make demo` and `make test` work on a fresh clone: each creates .venv and installs what it needs.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
# Worker processes of the test suite, one thread each: more threads per worker only make them compete.
JOBS   ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)

# On Linux the default torch wheel brings gigabytes of CUDA, and `+cpu` can only be matched by the CPU build.
# Override for another version: make test TORCH=torch==2.9.1+cpu
ifeq ($(shell uname -s)-$(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu),Linux-)
TORCH       ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
else
TORCH       ?= torch>=2.9
endif

HAS_TORCH := import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test native lint format types clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.demo  ## run the main job on real input; writes onchip-demo/report.html
	$(VENV)/bin/onchip demo

test: $(VENV)/.test $(VENV)/.triton $(VENV)/.native  ## run the whole test suite (PYTEST_ARGS="-k mask" to select)
	if $(PY) -c 'import triton' 2>/dev/null; then \
	  OMP_NUM_THREADS=1 $(PY) -m pytest tests/gpu -n $(JOBS) --maxprocesses 8 --maxschedchunk 1 $(PYTEST_ARGS); fi
	if command -v chromium >/dev/null; then $(PY) -m pytest tests/page $(PYTEST_ARGS); fi
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --maxprocesses 8 $(PYTEST_ARGS)

native: $(VENV)/.test $(VENV)/.native  ## more checks of the native CPU kernels: wheel, instruction sets, sanitizers
	$(PY) tests/native_checks.py wheel isas sanitize driver $(NATIVE_ARGS)

lint: $(VENV)/.dev  ## ruff: rules and formatting
	$(VENV)/bin/ruff check src tests benchmarks shims
	$(VENV)/bin/ruff format --check src tests benchmarks shims

format: $(VENV)/.dev  ## apply ruff's fixes and formatting
	$(VENV)/bin/ruff check --fix src tests benchmarks shims
	$(VENV)/bin/ruff format src tests benchmarks shims

types: $(VENV)/.dev  ## pyright on src
	$(VENV)/bin/pyright

clean:  ## remove everything that make created
	rm -rf $(VENV) build src/onchip/backends/cpu/lib onchip-demo .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A torch that the base Python already has (a CUDA build, say) is used as it is.
$(PY):
	if $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; then \
	  $(PYTHON) -m venv --system-site-packages $(VENV); else $(PYTHON) -m venv $(VENV); fi

# Torch alone first, without its dependencies: the extra index is asked for nothing else.
$(VENV)/.torch: | $(PY)
	$(PY) -c '$(HAS_TORCH)' 2>/dev/null || \
	  $(PIP) install --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
	touch $@

# A CUDA torch brings its own triton. Beside the CPU build one is installed where there are wheels of it, and the newest
# in a folder of its own: kernels must compile with both.
$(VENV)/.triton: $(VENV)/.test
	if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  $(PY) -c 'import triton' 2>/dev/null || $(PIP) install 'triton==3.6.0'; \
	  $(PIP) install --no-deps --upgrade --target $(VENV)/triton-newest triton; fi
	touch $@

# The native CPU kernels, in place, where a C++ compiler is; without one the tiled loop serves everything.
$(VENV)/.native: CMakeLists.txt $(wildcard src/onchip/backends/cpu/kernels/*) $(VENV)/.test
	if command -v c++ >/dev/null; then \
	  PATH="$(abspath $(VENV))/bin:$$PATH"; cmake -S . -B build/native -G Ninja && cmake --build build/native && \
	  rm -rf src/onchip/backends/cpu/lib && cmake --install build/native --prefix src; else echo "no C++ compiler: no native CPU kernels"; fi
	touch $@

$(VENV)/.demo: EXTRAS := demo
$(VENV)/.test: EXTRAS := demo,test
$(VENV)/.dev: EXTRAS := demo,test,dev
$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) install --config-settings=wheel.cmake=false --editable '.[$(EXTRAS)]'
	touch $@
