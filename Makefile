# Two commands do all the set-up: `make demo` and `make test`. Each needs Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

DEV_PACKAGES := pytest hypothesis pytest-xdist syrupy ruff "pyright[nodejs]" xxhash transformers

.PHONY: help demo test test-all lint bench install clean
help:
	@echo "make demo      plant a fault in a small model and let Driftline name it"
	@echo "make test      lint, types and the test suite (under 10 minutes on 2 cores)"
	@echo "make test-all  the same and the long sets: fuzzing, big models, 50 kills"
	@echo "make bench     print every speed figure against its goal"
	@echo "make clean     remove what the above made"

# torch comes first and by plain pip: with the pin satisfied nothing later pulls the CUDA build.
$(STAMP): pyproject.toml CMakeLists.txt constraints.txt Makefile src/driftline/numerics/kernel.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "driftline needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt $(DEV_PACKAGES)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[torch]'
	touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo/run.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: lint
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" -q

test-all: lint
	$(BIN)/python -m pytest -n $(JOBS) -q

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .bench-venv build demo-output bench-output src/driftline/numerics/_kernel.so
