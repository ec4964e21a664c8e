# Everything runs out of .venv, which is made on first use from pyproject.toml and constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CLIENTS := .venv/.ready-clients
SHIM := .venv/shim# a folder of its own: only what asks for it finds our `deepspeed` there
CODE := src tests benchmarks examples

# What `make quickstart` trains: on this Python's own library, because every machine has that text.
TEXT ?= $(shell $(PYTHON) -c "import sysconfig; print(sysconfig.get_path('stdlib'))")
RUN ?= runs/quickstart
QUICKSTART_FLAGS ?= --suffix .py --max-tokens 5000000 --nproc 2 --zero-stage 3 --steps 300 --out $(RUN) --overwrite
PYTEST_FLAGS ?=
WORKERS ?= 2
BENCH ?= $(wildcard benchmarks/*.py)

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-exhaustive test-clients lint types bench docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trilithon needs Python 3.11 or newer; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,fast,dev]'
	@touch $@

quickstart: $(READY) ## train a small GPT on two processes with ZeRO stage 3, from nothing to a falling loss
	$(BIN)/trilithon train --data "$(TEXT)" $(QUICKSTART_FLAGS)

test: $(READY) ## run the tests, whole matrices apart; PYTEST_FLAGS=tests/unit runs a part, WORKERS=1 one at a time
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true $(PYTEST_FLAGS)

test-exhaustive: $(READY) ## run the whole matrices of which `make test` takes covering parts, in plain interpreters
	@OMP_NUM_THREADS=1 TRILITHON_COLD_TESTS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "exhaustive or not exhaustive" $(PYTEST_FLAGS)

$(CLIENTS): $(READY) $(wildcard shim/*.toml shim/deepspeed/*.py)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,fast,dev,clients]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(SHIM) ./shim
	@touch $@

test-clients: $(CLIENTS) ## run scripts of transformers, accelerate, peft, trl, lightning and DeepSpeed's own as published
	@OMP_NUM_THREADS=1 CLIENTS_SHIM=$(abspath $(SHIM)) timeout --kill-after=20 1500 $(BIN)/python -m pytest tests/clients -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

lint: $(READY) ## check style, format, types, and that imports point down
	$(BIN)/ruff check $(wildcard $(CODE))
	$(BIN)/ruff format --check $(wildcard $(CODE))
	$(BIN)/lint-imports
	$(BIN)/mypy

types: $(READY) ## check types only (mypy, strict)
	$(BIN)/mypy

bench: $(READY) ## run every benchmark, or BENCH=benchmarks/one.py; each prints one row per measurement
	@test -n "$(strip $(BENCH))" || { echo "there is no benchmark to run"; exit 1; }
	@for script in $(BENCH); do echo "== $$script"; OMP_NUM_THREADS=1 $(BIN)/python "$$script" || exit 1; done

docs: $(READY) ## run the examples that the documentation shows
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/docs

clean: ## remove everything that was built, .venv included; keeps runs/
	rm -rf .venv build dist .mypy_cache .ruff_cache .import_linter_cache .pytest_cache
	find $(wildcard $(CODE)) \( -name __pycache__ -o -name '*.egg-info' \) -type d -prune -exec rm -rf {} +
