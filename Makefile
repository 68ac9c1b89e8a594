# Two commands on a fresh machine: `make train` and `make test`. Each makes .venv first if it is missing.
PYTHON ?= python3
BIN := .venv/bin
# What exchanges by itself; the other packages exchange through these.
THROUGH_SOCKETS := tests/comm tests/sync
# Test processes side by side; each has ranks of its own. A file stays in one of them, which keeps its ranks from test to test.
WORKERS ?= 2
BESIDE := -n $(WORKERS) --dist loadfile

.PHONY: train test test-long test-full test-timing check format clean

train: .venv
	$(BIN)/weft train

test: .venv
	$(BIN)/pytest $(BESIDE)

test-long: .venv
	$(BIN)/pytest $(BESIDE) -m 'long and not full and not timing'
	$(BIN)/pytest $(BESIDE) --transport c10d -m 'ranks and not long and not timing' $(THROUGH_SOCKETS)

# The cases that test-long leaves out: for a release, or a change to what they are about.
test-full: .venv
	$(BIN)/pytest $(BESIDE) -m 'full and not timing'

# Depends on how fast and how idle the machine is, so continuous integration leaves it out.
test-timing: .venv
	$(BIN)/pytest -m timing

check: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_layers.py
	$(BIN)/python tests/file_lengths.py

format: .venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The stamp is written last, so an interrupted install is done again instead of being taken for whole.
.venv: .venv/installed
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
