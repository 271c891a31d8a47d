# Two commands do everything: `make research` runs the main job, `make test` passes the tests. Both set up what they need.
# PIP_ARGS goes to pip, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for PyTorch's CPU build.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
QUESTION ?= Does a group size of 8 learn tic-tac-toe faster than 4 at the same number of episodes?
TESTS ?= tests
# Each starts processes of its own, which take up to 2 GB beside it.
TEST_PROCESSES ?= $(shell $(PYTHON) -c 'import os; print(max(2, min(os.cpu_count() or 1, 8)))')

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt

FRAMEWORKS := $(VENV)-frameworks
VLLM := $(VENV)-vllm
RAY := $(VENV)-ray
TRL := $(VENV)-trl
CLIENTS := $(VENV)-clients
OPENHANDS := $(VENV)-openhands
# OpenHands' SDK needs a newer Python than A3R does, pyenv's too; where there is none its test is skipped.
OPENHANDS_PYTHON ?= $(shell for python in python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[23].*/bin/python); \
	do $$python -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)

.PHONY: install frameworks vllm ray trl clients research test test-heavy check format clean

install: $(VENV)/installed-engine

frameworks: $(FRAMEWORKS)/installed

vllm: $(VLLM)/installed

ray: $(RAY)/installed

trl: $(TRL)/installed

clients: $(CLIENTS)/installed $(if $(OPENHANDS_PYTHON),$(OPENHANDS)/installed)

research: $(VENV)/installed-engine
	$(BIN)/a3r research --yes "$(QUESTION)"

test: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup -m "not heavy and not gpu" $(TESTS)

# What needs more than the core environment: a PostgreSQL server (Debian's package, installed where it is missing),
# agents in the frameworks that people use, clients that people run, Node's among them, vLLM, a Ray cluster on this
# machine and TRL, the last five in environments of their own. vLLM's has an older transformers, so what depends on that
# runs there too.
test-heavy: $(VENV)/installed-dev $(FRAMEWORKS)/installed clients $(VLLM)/installed $(RAY)/installed $(TRL)/installed
	OMP_NUM_THREADS=1 scripts/with_postgres $(BIN)/pytest -m heavy tests/experiments_db
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/pytest -m heavy tests/frameworks
	A3R_CLIENTS=$(abspath $(CLIENTS)) A3R_OPENHANDS_PYTHON=$(abspath $(wildcard $(OPENHANDS)/bin/python)) \
		OMP_NUM_THREADS=1 $(BIN)/pytest -m heavy tests/clients
	A3R_VLLM_PYTHON=$(abspath $(VLLM))/bin/python OMP_NUM_THREADS=1 $(BIN)/pytest -m heavy tests/vllm
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/engine_worker/test_models.py tests/engine_worker/test_tree.py
	A3R_VLLM_PYTHON=$(abspath $(VLLM))/bin/python OMP_NUM_THREADS=1 $(RAY)/bin/pytest -m heavy tests/ray
	OMP_NUM_THREADS=1 $(TRL)/bin/pytest -m heavy tests/trl

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -x -m "not heavy and not gpu and not slow" $(TESTS)

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(VLLM) $(RAY) $(TRL) $(CLIENTS) $(OPENHANDS) tests/clients/node_modules build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "A3R needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); run make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-engine: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing A3R and PyTorch into $(VENV); this takes a few minutes the first time."
	$(PIP_INSTALL) --editable ".[engine]"
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed-engine
	$(PIP_INSTALL) --editable ".[engine,postgres,dev]"
	@touch $@

# Each has an extra of its name in pyproject.toml and its own constraints.
$(FRAMEWORKS)/installed $(RAY)/installed $(TRL)/installed: $(VENV)-%/installed: pyproject.toml constraints-%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint constraints-$*.txt --editable ".[engine,$*,dev]"
	@touch $@

# The list is whole, so nothing is looked up but PyTorch's own needs, which are others for a CUDA build.
$(VLLM)/installed: constraints-vllm.txt
	@echo "Installing vLLM into $(VLLM): 2.5 GB."
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint constraints-vllm.txt torch
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--no-deps --requirement constraints-vllm.txt
	@touch $@

# The lists are whole. Node comes as a wheel, so that no machine has another one. Not `npm ci`, which asks for packages of
# other platforms in the lock too.
$(CLIENTS)/installed: constraints-clients.txt tests/clients/package-lock.json
	@echo "Installing clients into $(CLIENTS) and tests/clients/node_modules: 2 GB."
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--no-deps --requirement constraints-clients.txt
	PATH=$(abspath $(CLIENTS))/bin:$$PATH npm install --no-save --prefix tests/clients --no-audit --no-fund --loglevel=error
	@touch $@

$(OPENHANDS)/installed: constraints-openhands.txt
	$(OPENHANDS_PYTHON) -m venv $(OPENHANDS)
	$(OPENHANDS)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--no-deps --requirement constraints-openhands.txt
	@touch $@
