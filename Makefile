# `make demo` and `make test` do all the set-up. They need Python 3.11 to 3.13 and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CONFIG ?= configs/synthetic.toml
# Only their owner may read private keys, and the image's user is their owner.
export IMAGE_UID ?= $(patsubst 0,1000,$(shell id -u))
# Tests and runs start many processes; without bytecode each would compile the same again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo run test bench coverage faults quick check config image certs compose-demo clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(READY) ## Learn two models from 100 clients, privately, in a simulation on this machine
	$(BIN)/umbel run

run: $(READY) ## Run another experiment in simulation: make run CONFIG=configs/hospital.toml
	$(BIN)/umbel run $(CONFIG)

test: $(READY) ## Run all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

bench: $(READY) ## Time the short benchmarks, and compare them with what was saved (five minutes; needs the hospital data)
	$(BIN)/python -m benchmarks

coverage: $(READY) ## Show which lines the tests of a few seconds run
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" --cov --cov-report=term --cov-fail-under=90

faults: $(READY) ## Run the tests in which processes die, lie or are cut off (some minutes, mostly waiting)
	$(BIN)/python -m pytest -m faults -n 2 --dist loadfile

quick: $(READY) ## Run the tests that take no longer than a few seconds each
	$(BIN)/python -m pytest -m "not slow"

check: $(READY) ## Lint, check types, and check that imports follow the layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

config: $(READY) ## Write the run config's defaults into pyproject.toml, after a change in umbel/protocol/run_config.py
	$(BIN)/python -m umbel.protocol.pyproject pyproject.toml

image: $(READY) ## Build the container image: make image, or make image TORCH=cuda for a GPU
	$(BIN)/docker-compose build image

certs: $(READY) ## Make certificates and node keys: make certs NAMES=umbel.example.org NODES="site-1 site-2"
	$(BIN)/umbel certs --server "$(NAMES)" $(NODES:%=--node %)

compose-demo: $(READY) ## Hospital charges over three sites in containers: make compose-demo CSV=... GEONAMES=...
	$(BIN)/python -m umbel.deploy.demo $(if $(CSV),--csv "$(CSV)") $(if $(GEONAMES),--geonames "$(GEONAMES)")

clean: ## Remove the virtual environment and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "umbel needs Python 3.11 to 3.13: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
