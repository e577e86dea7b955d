# Two commands on a fresh machine: `make demo` and `make test`. Both set themselves up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Installed once and again only when one of these changes.
STAMP  := $(VENV)/.installed
export RAY_USAGE_STATS_ENABLED = 0

.PHONY: demo test lint faults fuzz clean

demo: $(STAMP)
	$(BIN)/lattqe demo --to demo

test: $(STAMP) lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[cpu,extract,test]"
	touch $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info
