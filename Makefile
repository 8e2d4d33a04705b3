# make quickstart   set up .venv, then train on several learners, with faults
# make test         set up .venv, then run the tests
# make lint         check style and formatting
# make clean        remove .venv and caches, never runs/
#
# PYTHON=python3.12   the interpreter of a new .venv (make clean to change it)
# VENV=DIR            where the environment is
# WORKDIR=DIR         where the quickstart writes
# ARGS="..."          more flags for the launcher or for pytest
# FAST=1              leave out tests that are slow or start processes

SHELL := bash
PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/quickstart
ARGS ?=

BIN := $(VENV)/bin
# Made last, so an interrupted install leaves none and is taken up again.
STAMP := $(VENV)/.installed

.PHONY: help quickstart test lint clean

help:
	@sed -n '/^# \{0,1\}/!q; s///p' Makefile

$(STAMP): setup.py pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  2>/dev/null || { \
	  echo "ddiloco needs Python 3.11 or newer, but $(PYTHON) is" \
	    "$$("$(PYTHON)" -c 'import platform as p; print(p.python_version())' \
	    2>/dev/null || echo "no Python that runs")." \
	    "Name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module." \
	    "On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV): a minute or two, about 1 GB."
	@"$(PYTHON)" -m venv "$(VENV)"
	@set -o pipefail; "$(BIN)/python" -m pip install --progress-bar off \
	  --disable-pip-version-check --editable '.[test]' | \
	  sed -n -E 's/^(Collecting [^ ]+|Installing collected).*/  \1/p' || { \
	  echo "The install failed (see above). make takes it up again." >&2; \
	  exit 1; }
	@touch "$@"

quickstart: $(STAMP)
	"$(BIN)/python" -m launch.local \
	  --config=experiments/quickstart/config.py --workdir="$(WORKDIR)" $(ARGS)

# The environment is the one that tests/conftest.py sets.
test: export JAX_PLATFORMS := cpu
test: export PJRT_NPROC := 2
test: $(STAMP)
	@# 5: of what ARGS selects, none is of this kind.
	"$(BIN)/python" -m pytest -n 2 --dist loadfile \
	  -m "not live$(if $(FAST), and not slow)" $(ARGS) || [ $$? -eq 5 ]
	$(if $(FAST),@true,"$(BIN)/python" -m pytest -m live $(ARGS) || [ $$? -eq 5 ])

lint: $(STAMP)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .

clean:
	rm -rf "$(VENV)" build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find ddiloco launch experiments tests -name __pycache__ -prune \
	  -exec rm -rf {} + 2>/dev/null || true
