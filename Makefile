# make race    train a small network with all the optimizers            (sets up .venv, no torch)
# make test    the test suite                                            (sets up .venv with torch and jax)
# make test-all   the tests, the slow ones, the browser and the integrations included
# make test-browser   the race report and the documentation in chromium (which it does not install)
# make test-integrations   accelerate, flax, Hugging Face Trainer, Lightning, libraries of optimizers (installs them into .venv)
# make test-gpu   the tests that need a GPU, from source, nothing installed
# make lint    ruff and mypy
# make types   mypy and pyright over a user's program for each front end (pyright fetches itself with npm)
# make docs    the documentation site, into site/                        (sets up .venv, no torch; needs npm once, for KaTeX)
# make docs-serve   the same, on http://localhost:8000, renewed as files change
# make setup   the full development environment

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

PYRIGHT := 1.1.414

# a process for each core; BLAS and torch on one thread each, since more would only wait for each other
ALONE := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
SPREAD := --numprocesses auto --maxprocesses 8
# the tests of a file stay together, since they share what they compile
FILES := --dist loadfile --no-loadscope-reorder
# the slow ones of one file take longer than all others: processes get a run of neighbours each, and who is done
# takes from the end of another's
STEAL := --dist worksteal

.PHONY: race test test-all test-browser chromium test-gpu test-integrations lint types setup clean docs docs-serve tables

race: $(VENV)/.run
	$(BIN)/python -m rlx_optim.race $(ARGS)

test: $(VENV)/.dev
	$(ALONE) $(BIN)/python -m pytest $(SPREAD) $(FILES) -m "not slow and not gpu and not browser" $(ARGS)

test-all: chromium $(VENV)/.browser $(VENV)/.integrations
	$(ALONE) $(BIN)/python -m pytest $(SPREAD) $(STEAL) -m "not gpu" $(ARGS)

test-browser: chromium $(VENV)/.browser
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

chromium:
	@for p in chromium chromedriver; do command -v $$p >/dev/null || \
		{ echo "make: the browser tests need $$p: apt-get install -y chromium chromium-driver"; exit 2; }; done

# on a machine with a GPU, from source, with whatever Python has torch and Triton there, in JOBS processes
JOBS ?= 8
test-gpu:
	$(ALONE) PYTHONPATH=src $(PYTHON) lab/gpu_tests.py --jobs $(JOBS) $(ARGS)

test-integrations: $(VENV)/.integrations
	$(BIN)/python -m pytest tests/integrations "tests/test_docs.py" $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

types: $(VENV)/.dev
	$(PIP) pyright==$(PYRIGHT)
	$(BIN)/mypy --strict --ignore-missing-imports tests/types
	$(BIN)/pyright --pythonpath $(BIN)/python tests/types

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

docs-serve: $(VENV)/.docs
	$(BIN)/mkdocs serve

# the tables of README.md, from the committed results
tables: $(VENV)/.run
	$(BIN)/python -m lab.readme

setup: $(VENV)/.dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet "pip==26.3"

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[cli]"
	@touch $@

# torch by itself and first: see constraints.txt
$(VENV)/.dev: pyproject.toml constraints.txt requirements-dev.txt | $(VENV)/.run
	$(PIP) torch==2.13.0
	$(PIP) --editable ".[all]" --requirement requirements-dev.txt
	@touch $@

$(VENV)/.browser: constraints.txt requirements-browser.txt requirements-docs.txt | $(VENV)/.dev
	$(PIP) --requirement requirements-browser.txt --requirement requirements-docs.txt
	@touch $@

$(VENV)/.docs: constraints.txt requirements-docs.txt | $(VENV)/.run
	$(PIP) --requirement requirements-docs.txt
	@touch $@

# the libraries of optimizers without what they depend on: timm wants torchvision, which the tests do not need
$(VENV)/.integrations: constraints.txt requirements-integrations.txt requirements-libraries.txt | $(VENV)/.dev
	$(PIP) --requirement requirements-integrations.txt
	$(PIP) --no-deps --requirement requirements-libraries.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
