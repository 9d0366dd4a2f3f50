# make demo   fit two flows, print their likelihoods, write pictures to demo/
# make test   lint, types, doctests and tests
# make lint | types | clean
# Each sets up .venv by itself and needs Python >= 3.11 (name one with PYTHON=...).

PYTHON ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint types clean

help:
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile

demo: $(VENV)/.demo-ready
	$(BIN)/python -m quarflow.demo --out demo

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

lint: $(VENV)/.dev-ready
	$(BIN)/ruff check

types: $(VENV)/.dev-ready
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info demo .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are newer than what they were installed from, so a second run installs nothing. `dev` holds all of
# `demo`, hence it sets both.
$(VENV)/.demo-ready: pyproject.toml constraints.txt $(BIN)/python
	@echo 'installing quarflow and what it needs into $(VENV): a few minutes the first time'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[plots,sklearn]'
	@touch $@

$(VENV)/.dev-ready: pyproject.toml constraints.txt $(BIN)/python
	@echo 'installing quarflow and what it needs into $(VENV): a few minutes the first time'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.demo-ready $@

# The version that constraints.txt was tested with comes first. A candidate is run, not just looked up: version
# managers leave names on the path that start nothing.
$(BIN)/python:
	@for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python); do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "setting up $(VENV) with $$("$$python" --version)"; \
	        exec "$$python" -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo "quarflow needs Python >= 3.11 with venv and ensurepip; none of these is one:" \
	     "$(or $(PYTHON),python3.11 python3.12 python3.13 python3 python)." >&2; \
	echo "Install it (on Debian and Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3" >&2; \
	exit 1
