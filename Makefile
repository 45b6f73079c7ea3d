# make demo      two ranks train a small GPT (about a minute; the first time, some more to install)
# make test      one test of each kind over every transport, in five minutes. Four at a time, as
#                most of them wait, or: make test WORKERS=0
# make test-all  every test
# make flaky     do tests depend on order or speed? one core, load, late ranks (ten minutes)
# make soak      generated programs for 10 minutes, or: make soak MINUTES=60 SEED=7
# make faults    ranks that are killed or stop at random, or: make faults FAULTS=1200 SEED=7
# make mutate    puts small defects into a copy, one at a time: do the tests notice?
# make lint      every static check
# make docs      the documentation as a site, in build/docs
# make bench     the benchmarks, with their defaults
# make sanitize  the C core, the kernels and the extensions under sanitizers
# make format    rewrite the sources the way `make lint` wants them
# make clean     remove what was built, but not the virtual environment
#
# Targets that need Python create the virtual environment if it is missing, install what is missing
# in it, and rebuild what changed.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= ci/constraints.txt
MINUTES ?= 10
FAULTS ?= 300
SEED ?= random
WORKERS ?= 4
python := $(VENV)/bin/python
# Python compiles a module when it is first imported, which most of them never are.
pip_install := $(python) -m pip --disable-pip-version-check install --quiet --no-compile \
    --constraint $(CONSTRAINTS)
# Without bytecode each rank would compile what it imports, and each worker rewrite all tests.
unexport PYTHONDONTWRITEBYTECODE

# Always run: setup.py knows which extensions are older than their sources, for this interpreter.
# Takes a second if nothing changed.
rebuild := $(python) setup.py --quiet build_ext --inplace

python_sources := setup.py fastcomm_autoload.py fastcomm tests bench examples
cython_folders := fastcomm/* fastcomm/*/*
cython_sources := $(wildcard $(foreach one,$(cython_folders),$(one)/*.pyx $(one)/*.pxd))
kernel_sources := $(wildcard kernels/*/*.[ch] kernels/*/*.cu kernels/*/*.cuh \
    tests/*/*.[ch] tests/*/*.cpp tests/transports/*/*.[ch])
all_text := $(wildcard fastcomm kernels tests bench ci docs examples *.md *.toml *.py Makefile)

.PHONY: test test-all flaky soak faults mutate demo bench lint docs sanitize format clean
.NOTPARALLEL:

test: chosen := -m "not thorough"
test test-all: $(VENV)/.installed-dev
	$(rebuild)
	$(python) -m pytest --quiet --numprocesses $(WORKERS) --no-loadscope-reorder $(chosen) tests

flaky: $(VENV)/.installed-dev
	$(rebuild)
	PYTHON=$(python) bash ci/flaky.sh

soak: $(VENV)/.installed-dev
	$(rebuild)
	$(python) -m tests.programs --minutes $(MINUTES) --seed $(SEED)

faults: $(VENV)/.installed-dev
	$(rebuild)
	$(python) -m tests.faults --faults $(FAULTS) --seed $(SEED)

mutate: $(VENV)/.installed-dev
	$(rebuild)
	$(python) -m tests.mutations

demo: $(VENV)/.installed-demo
	$(rebuild)
	$(python) -m fastcomm demo

bench: $(VENV)/.installed-bench
	$(rebuild)
	$(python) bench/allreduce.py
	$(python) bench/step.py

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check $(python_sources)
	$(VENV)/bin/ruff format --check $(python_sources)
	$(VENV)/bin/mypy
	PATH="$(VENV)/bin:$$PATH" cython-lint $(cython_sources)
	$(VENV)/bin/clang-format --dry-run -Werror $(kernel_sources)
	$(CC) -std=gnu11 -Wall -Wextra -Werror -fsyntax-only -Ikernels $(filter %.c,$(kernel_sources))
	PATH="$(VENV)/bin:$$PATH" bash ci/kernels.sh build/kernels
	$(VENV)/bin/codespell $(all_text)

# A link or an anchor that leads nowhere is an error, and so is a page that needs the network.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

sanitize: $(VENV)/.installed-dev
	$(rebuild)
	PYTHON=$(python) bash ci/sanitize.sh

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix $(python_sources)
	$(VENV)/bin/ruff format $(python_sources)
	$(VENV)/bin/clang-format -i $(kernel_sources)

clean:
	rm -rf build dist *.egg-info fastcomm/*/*.so fastcomm/*/*/*.so kernels/cuda/*.fatbin

# Editable, so that scripts and ranks started from anywhere import the package from this tree.
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/pip
	@echo 'Installing what is missing, then building: some minutes the first time'
	$(pip_install) 'setuptools>=77' Cython
	FASTCOMM_BUILD=later $(pip_install) --no-build-isolation --editable '.[$*]'
	touch $@

# pip is installed last into a new environment: an environment without it is incomplete.
$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)
