# Needs Python 3.11+ and make; everything else goes into .venv.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help install demo dev test test-fast lint bench chaos docs clean

CANDIDATES := python3.11 python3.12 python3.13 python3.14 python3 python
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: no Python 3.11 or later with its venv module was found; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 2; fi
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

install: $(STAMP) ## make .venv and install everything into it; again when pyproject.toml is newer

demo: $(STAMP) ## play one turn through every process, with a human's correction; leaves nothing behind
	@$(BIN)/python -m examples.demo

dev: $(STAMP) ## run everything and keep it, with Flower, reloading the agents on change, until Ctrl-C
	@$(BIN)/turnmill dev --model-server examples.model_server

test: $(STAMP) ## run all tests, the chaos run last; they start the servers that they need
	$(BIN)/python -m tests.run

test-fast: $(STAMP) ## run the unit tests: no server, no process, seconds
	$(BIN)/python -m pytest tests/unit

lint: $(STAMP) ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## measure; ratios against something in the same run
	$(BIN)/python -m benchmarks

chaos: $(STAMP) ## kill processes at random from a printed seed for 5 minutes (TURNMILL_CHAOS_S=…) and check the books
	TURNMILL_CHAOS_S=$${TURNMILL_CHAOS_S:-300} $(BIN)/python -m pytest tests/chaos

docs: $(STAMP) ## make docs/settings.md from the settings
	$(BIN)/python -m docs.settings_page

clean: ## remove .venv and what tools left
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache celerybeat-schedule*
