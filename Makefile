# `make demo` and `make test` do all their own set-up: Python 3.11+, pip and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Said before pip works, which is quiet.
INSTALLING := @echo "installing forerun and what it needs in $(VENV); pip may take some minutes"

.PHONY: demo test test-all test-browser lint format clean

demo: $(VENV)/installed
	$(BIN)/forerun demo

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# CHROMIUM=/path, else one on PATH, else playwright downloads its own; without any it fails and says what to do.
test-browser: $(VENV)/installed-browser
	OMP_NUM_THREADS=1 FORERUN_BROWSER_TESTS=1 $(BIN)/python -m pytest tests/browser

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# A stamp is written only after a complete installation, so an interrupted one is done again.
$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(INSTALLING)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(INSTALLING)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@ $(VENV)/installed

$(VENV)/installed-browser: $(VENV)/installed-dev
	$(INSTALLING)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,browser]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
