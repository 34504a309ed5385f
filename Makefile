# Every target sets up what it needs: the first one on a fresh machine creates .venv.
#   PYTHON=python3.12   the interpreter that .venv is made from (3.10 or newer)
#   NAME=balance        the benchmark that `make bench` runs;  ARGS="..." is handed to it

PYTHON ?= python3
NAME   ?= balance
ARGS   ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo test lint bench clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## the environment, in .venv; again when pyproject.toml or constraints.txt changed

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once, some minutes where torch has to be downloaded) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -c constraints.txt -e ".[dev,examples]"
	@touch $@

demo: $(STAMP) ## the main job: stock Trainer, balanced Trainer and the bound on a real model; results in demo/
	@rm -rf demo
	$(BIN)/python examples/embed_text.py --out demo
	@echo
	@echo "Results and logs are in demo/. To see the run in TensorBoard:"
	@echo "    $(BIN)/tensorboard --logdir demo/tensorboard        then open http://localhost:6006"

test: $(STAMP) ## all tests, one process per core;  ARGS="-k queue -x" is handed to pytest
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: $(STAMP) ## style, format, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## one benchmark, NAME=balance unless told otherwise; its last line is one JSON object
	$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

clean: ## everything that the other targets have made, the environment too
	rm -rf $(VENV) build dist demo benchmarks/out lightning_logs .pytest_cache .hypothesis .mypy_cache .ruff_cache \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
