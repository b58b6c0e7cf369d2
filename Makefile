# make race    train a small network with all fourteen optimizers       (sets up .venv, no torch)
# make test    the test suite                                            (sets up .venv with torch and jax)
# make test-all   the tests, the slow ones included
# make lint    ruff and mypy
# make setup   the full development environment

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: race test test-all lint setup clean

race: $(VENV)/.run
	$(BIN)/python -m rlx_optim.race $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

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

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
