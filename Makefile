# Everything starts here: `make train` and `make test` work on a fresh clone.
# They need Python 3.11 or newer with its venv module, and make.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Made with the environment, when the packages of a training are installed, and when those of tests and tools are, too.
MADE := $(VENV)/.made
TRAINS := $(VENV)/.installed-to-train
STAMP := $(VENV)/.installed
# uv where it is there, else pip.
INSTALL = $(if $(shell command -v uv),uv pip install --quiet --python $(RUN),$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile) -c constraints.txt
# What `make train` trains on; by default every GPU, or two ranks on the CPU where there is none.
DEVICES ?=
ARGS ?=
# Test processes (one more than cores, since many tests wait for other processes), and further arguments of pytest:
# make test TESTS=tests/planning PYTEST_ARGS=-x
CORES = $(shell $(PYTHON) -c "import os; print(os.cpu_count() or 1)")
JOBS ?= $(shell expr $(CORES) + 1)
PARALLEL = -n $(JOBS) --maxprocesses 4 --maxschedchunk 8
TESTS ?= tests
PYTEST_ARGS ?=

# Hundreds of processes of the tests would each compile the sources of torch.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup train test slow check coverage lint types names texts docs drills clean browser smoke-oldest compat

help: ## show this list
	@echo "make train    set up, then train the HAR task on every GPU, or on two CPU ranks without one"
	@echo "              (make train DEVICES=gpu:0 ARGS='--epochs 5')"
	@echo "make test     set up, then run the tests"
	@echo "make slow     the tests that take several seconds each: faults, engines, long journeys (CI runs them, too)"
	@echo "make check    lint, and the short tests that start no other process"
	@echo "make coverage the test suite, with the coverage of every process that a test starts"
	@echo "make setup    make $(VENV) and install Lockstep with the tested versions, and the tools of its tests"
	@echo "make lint     ruff (rules and format), mypy, words, names and spelling"
	@echo "make docs     the documentation as a site, in build/site"
	@echo "make drills   the long repetitions of fault drills and fuzzing"
	@echo "make smoke-oldest  tests/compat on the oldest supported torch and Lightning, in $(OLDEST)"
	@echo "make compat   the tests on each torch of COMPAT ($(COMPAT)), CPU builds, in .venv-torch-VERSION"
	@echo "make clean    remove $(VENV), caches and builds; never a run"

setup: $(STAMP) ## make .venv and install, with the packages of tests and tools

$(MADE):
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON) here. fix: install Python 3.11 or newer, or say where it is: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), Lockstep needs 3.11 or newer. fix: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) lacks the venv module. fix: install it (Debian, Ubuntu: apt install python3-venv), or make PYTHON=/path/to/another/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(TRAINS): pyproject.toml constraints.txt | $(MADE)
	$(INSTALL) -e .
	@touch $@

$(STAMP): pyproject.toml constraints.txt | $(MADE)
	$(INSTALL) -e '.[dev]'
	@touch $(TRAINS) $@

train: $(TRAINS) ## train on what the machine has
	@devices="$(DEVICES)"; \
	[ -n "$$devices" ] || devices=$$($(RUN) -c 'from lockstep.hardware import get_available_gpus as gpus; print("all" if gpus() else "cpu,cpu")') || exit; \
	set -x; exec $(RUN) -m lockstep train har --devices "$$devices" $(ARGS)

# Without a network it is to give up soon.
APT := apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=30

# For the browser tests. Only root on Debian may install it here: nobody is asked for a password, and nothing fails.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get && echo "installing chromium for the browser tests" >&3 && \
	  $(APT) update && DEBIAN_FRONTEND=noninteractive $(APT) install -y chromium; } 3>&1 </dev/null >/dev/null \
	|| echo "no chromium here: the browser tests are skipped, with CI=true they fail (Debian: apt-get install chromium)"

test: setup browser ## the tests
	$(RUN) -m pytest $(PARALLEL) -m "not drill and not slow" $(PYTEST_ARGS) $(TESTS)

slow: setup browser ## the tests that take several seconds each
	$(RUN) -m pytest $(PARALLEL) -m "slow and not drill" $(PYTEST_ARGS) $(TESTS)

# One test process a core: few of these tests wait, and each process imports torch and collects for seconds.
check: JOBS = $(CORES)
check: lint ## lint, and the tests without ranks, commands or a browser
	$(RUN) -m pytest $(PARALLEL) -m "not drill and not processes and not long and not slow" $(PYTEST_ARGS) $(TESTS)

coverage: setup browser ## coverage of every process that the tests start
	$(RUN) -m pytest $(PARALLEL) -m "not drill" --cov=lockstep --cov-report=term $(PYTEST_ARGS) $(TESTS)

lint: setup ## ruff, mypy, words, names and spelling of the documentation
	@$(MAKE) --no-print-directory --jobs=4 types names texts

types:
	$(RUN) -m mypy

names:
	$(RUN) scripts/names.py --check

texts:
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) scripts/words.py
	$(RUN) -m codespell_lib README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md CODE_OF_CONDUCT.md docs examples src/lockstep

docs: setup ## the site, in build/site
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet
	@echo "build/site/index.html is built; to read it with search: $(RUN) -m mkdocs serve"

# The lower bounds of pyproject.toml. From PyTorch's index of CPU builds: PyPI's wheels bring gigabytes of CUDA.
OLDEST := .venv-oldest
OLDEST_VERSIONS := torch==2.9.0+cpu lightning==2.6.6 torchmetrics==1.4.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

smoke-oldest: ## the private names that are used, on the oldest supported versions
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --extra-index-url $(TORCH_INDEX) \
	  $(OLDEST_VERSIONS) -e '.[lightning]' hypothesis pytest pytest-timeout
	$(OLDEST)/bin/python -m pytest tests/compat

# Needs PyTorch's index of CPU builds. The other packages have the versions of constraints.txt.
COMPAT ?= 2.9.0 2.11.0 2.13.0 2.15.0

compat: ## the tests on each supported torch
	@failed=; for version in $(COMPAT); do \
	  venv=.venv-torch-$$version; echo "torch $$version, in $$venv"; \
	  $(PYTHON) -m venv $$venv && $$venv/bin/python scripts/gpu/requirements.py --pins >$$venv/pins.txt && \
	  $$venv/bin/python -m pip install --quiet --disable-pip-version-check --extra-index-url $(TORCH_INDEX) \
	    -c $$venv/pins.txt "torch==$$version+cpu" -e '.[dev]' && \
	  $$venv/bin/python -m pytest $(PARALLEL) -m "not drill" $(PYTEST_ARGS) $(TESTS) || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "error: failed on torch$$failed"; exit 1; }

drills: setup ## long repetitions
	$(RUN) -m pytest -m drill --timeout 3600 $(PYTEST_ARGS) $(TESTS)

clean: ## remove what can be made again
	rm -rf $(VENV) $(OLDEST) .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis htmlcov .coverage .coverage.*
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
