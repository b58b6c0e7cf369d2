# make race    train a small network with all fourteen optimizers       (sets up .venv, no torch)
# make test    the test suite                                            (sets up .venv with torch and jax)
# make test-all   the tests, the slow ones included
# make test-integrations   accelerate, Hugging Face Trainer and Lightning (installs them into .venv)
# make test-gpu   the tests that need a GPU, from source, nothing installed
# make lint    ruff and mypy
# make setup   the full development environment

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: race test test-all test-gpu test-integrations lint setup clean

race: $(VENV)/.run
	$(BIN)/python -m rlx_optim.race $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

# on a machine with a GPU, from source, with whatever Python has torch and Triton there
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(ARGS)

test-integrations: $(VENV)/.integrations
	$(BIN)/python -m pytest tests/integrations "tests/test_docs.py" $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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

$(VENV)/.integrations: constraints.txt requirements-integrations.txt | $(VENV)/.dev
	$(PIP) --requirement requirements-integrations.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
