# Every chore of the project. Each target sets up what it needs and re-does nothing that is done.
SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN  := $(VENV)/bin
PY   := $(BIN)/python
ARGS ?=
SOAK_MINUTES ?= 60
# One process of tests waits a good part of its time; a free one takes tests over from a busy one.
TESTERS ?= 2
SPREAD := -n $(TESTERS) --dist worksteal
LOCKS := server all

.PHONY: help setup run demo test test-slow soak check format bench mutants proto reference lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | column -t -s $$'\t'

# --- the environment ---------------------------------------------------------------------------
$(PY):
	@tools/make-venv $(VENV)

$(VENV)/.server: requirements/server.lock pyproject.toml | $(PY)
	@if [ ! $(VENV)/.all -nt requirements/all.lock ]; then tools/install $(VENV) server; fi
	@touch $@

$(VENV)/.all: requirements/all.lock pyproject.toml | $(PY)
	@tools/install $(VENV) all
	@touch $@ $(VENV)/.server

setup: $(VENV)/.all  ## install every extra into .venv

# --- using it ----------------------------------------------------------------------------------
run: $(VENV)/.server  ## start one node on http://127.0.0.1:8000 (HOST=… PORT=… ARGS=…)
	@exec $(BIN)/sdstore serve $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(ARGS)

demo: $(VENV)/.server  ## two nodes that diverge and heal
	@exec $(BIN)/sdstore demo $(ARGS)

# --- keeping it right --------------------------------------------------------------------------
check: setup  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: setup  ## the test suite (some 15 minutes on two cores; TESTERS=… processes)
	$(PY) -m pytest -m "not slow and not soak" $(SPREAD) --durations=25 $(ARGS)

test-slow: setup  ## the slow tier (some 30 minutes on two cores)
	$(PY) -m pytest -m "slow and not soak" $(SPREAD) --timeout 1800 --durations=25 $(ARGS)

soak: setup  ## full counts for the record (SOAK_MINUTES=…)
	SOAK_MINUTES=$(SOAK_MINUTES) $(PY) -m pytest -m soak --timeout 0 $(ARGS)

mutants: setup  ## planted faults, each must be caught by a test
	$(PY) -m tests.mutants $(ARGS)

bench: setup  ## measure; writes bench/results/*.csv and *.png and prints the tables
	$(PY) -m bench $(ARGS)

# --- generated files ---------------------------------------------------------------------------
proto: setup  ## regenerate sdstore/wire from proto/
	$(PY) -m tools.proto sdstore/wire

reference: setup  ## write the reference pages of docs/ anew, from the code
	$(PY) -m tools.reference

lock: $(PY)  ## resolve requirements/*.lock anew (versions and hashes, no hosts)
	@tools/lock $(VENV) $(LOCKS)

clean:  ## remove what can be made again (not ./data)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache bench/results
