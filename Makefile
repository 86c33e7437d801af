# Everything runs in .venv, which the first target that needs it creates.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin

.PHONY: help venv quickstart hard tiny test check test-long clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

venv: ## Create .venv and install everything into it (does nothing when it is up to date)
	@scripts/setup_env.sh

quickstart: venv ## Train a real language model on this machine: about 10 minutes on 2 cores
	$(BIN)/python examples/smollm2/prepare.py
	$(BIN)/s2rl train --config examples/smollm2/quickstart.yaml

hard: venv ## The same model on harder sums: up to 40 minutes on 2 cores
	$(BIN)/python examples/smollm2/prepare.py --task hard
	$(BIN)/s2rl train --config examples/smollm2/hard.yaml

tiny: venv ## Build, warm-start and train the tiny model: about 4 minutes on 2 cores
	$(BIN)/python examples/tiny/prepare.py
	$(BIN)/s2rl train --config examples/tiny/tiny.yaml

test: check ## Static checks and the default tests
	$(BIN)/python -m pytest

check: venv ## Lint, formatting, types and the import rules of the design
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-long: venv ## The tests that take minutes each
	$(BIN)/python -m pytest -m "slow and not cuda and not npu" --timeout 3600

clean: ## Remove .venv and caches; runs/ and prepared models stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
