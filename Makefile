# Each target is the only command needed on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint figures clean
.DEFAULT_GOAL := demo

# One environment with everything; made again when the requirements change.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@

# Trains a tiny policy to repair programs: two CPU cores, under three minutes.
demo: $(VENV)/.installed
	$(BIN)/python -m examples.bugfix.train

test: lint
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)
