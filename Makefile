PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test test-all test-long lint

install: .venv/installed

# torch comes first and pinned, so that no later requirement chooses another build.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hybridflow needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	$(BIN)/hybridflow demo

test: install
	$(BIN)/python -m pytest -m 'not slow'

test-all: install
	$(BIN)/python -m pytest -m 'not long'

test-long: install
	$(BIN)/python -m pytest -m long

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
