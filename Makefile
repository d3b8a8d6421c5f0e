# `make demo` and `make test` do all the set-up. They need Python 3.11 to 3.13 and make.
PYTHON ?= python3
BIN := .venv/bin
# What umbel needs to run, and what its tests and checks need besides.
RUNTIME := .venv/.runtime
READY := .venv/.ready
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command "make pins"
# PyTorch's build for CUDA pins these by itself. Other builds need none of them.
NO_CUDA = $(patsubst %,--no-emit-package %,triton cuda-bindings cuda-pathfinder cuda-toolkit $(patsubst %,nvidia-%,\
  cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 \
  nvjitlink nvshmem-cu13 nvtx))
SCHEMA = $(BIN)/check-jsonschema --quiet --builtin-schema
# Two processes at once, each with whole files.
PARALLEL = -n 2 --dist loadfile --no-loadscope-reorder
# The environment for another Flower than the pinned one.
NEWEST := build/flower
FLOWER ?= flwr[simulation]
CYCLONEDX = $(BIN)/uvx --quiet --from cyclonedx-bom cyclonedx-py
# Only their owner may read private keys, and the image's user is their owner.
export IMAGE_UID ?= $(patsubst 0,1000,$(shell id -u))
# Tests and runs start many processes; without bytecode each would compile the same again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo run test test-all mutants newest-flower docs bench coverage check config pins dist sbom image certs compose-demo clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'

demo: $(RUNTIME) ## Learn hospital payments from 2,062 hospitals, with a guarantee, in half a minute
	$(BIN)/umbel demo

run: $(RUNTIME) ## Run another experiment in simulation: make run CONFIG=configs/hospital.toml
	$(BIN)/umbel run $(CONFIG)

test: $(READY) ## Run the tests that guard every promise, and say how much processor time they took
	$(BIN)/python tools/suite.py $(PARALLEL)

test-all: $(READY) ## Run all tests: also faults, a simulated year, experiments, pages, wheels, and ten times the examples
	TEST_EXAMPLES=10 $(BIN)/python -m pytest $(PARALLEL) -m ""

mutants: $(READY) ## Check that make test notices each of the mistakes in tools/mutants.toml (ten minutes)
	$(BIN)/python tools/mutants.py

newest-flower: ## Run the tests of make test with Flower's newest release, or the one that FLOWER names, in build/flower
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python tools/install.py ".[dev]" lab
	$(NEWEST)/bin/uv pip install --quiet --python $(NEWEST)/bin/python --upgrade "$(FLOWER)"
	$(NEWEST)/bin/python -c 'from importlib.metadata import version; print("Flower", version("flwr"))'
	$(NEWEST)/bin/python tools/suite.py $(PARALLEL)

docs: $(READY) ## Build the documentation site in docs/_build/html, and check its links
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs docs/_build/html

bench: $(READY) ## Time the short benchmarks, and compare them with what was saved (five minutes)
	$(BIN)/python -m benchmarks

coverage: $(READY) ## Show which lines `make test` runs
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term --cov-fail-under=90

check: $(READY) ## Lint, check types, spelling, workflows, imports, the size of each room, and what is private in Flower
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tools/budget.py
	$(BIN)/python tools/private.py
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) custom.github-workflows-require-timeout .github/workflows/*.yml
	$(SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(SCHEMA) vendor.dependabot .github/dependabot.yml
	$(SCHEMA) vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --no-progress --quiet .github

config: $(READY) ## Write the run config's defaults into pyproject.toml, after a change in umbel/protocol/run_config.py
	$(BIN)/python tools/defaults.py pyproject.toml

pins: $(READY) ## Write constraints.txt and requirements/, with hashes: make pins, or make pins UPGRADE=--upgrade
	$(LOCK) pyproject.toml --all-extras $(UPGRADE) $(NO_CUDA) --output-file constraints.txt
	$(LOCK) pyproject.toml --constraint constraints.txt --generate-hashes $(NO_CUDA) --no-emit-package torch --output-file requirements/site.txt
	echo torch | $(LOCK) - --constraint constraints.txt --generate-hashes --output-file requirements/cuda.txt

dist: $(READY) ## Build the wheels and sdists of umbel and its lab into dist/, in isolation, and check them
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	$(BIN)/uv build --quiet --out-dir dist lab
	$(BIN)/uvx --quiet twine check --strict dist/*

sbom: dist ## Write dist/*.cdx.json, CycloneDX lists of what the wheel needs and, if it is built, what the image holds
	{ cat requirements/site.txt; grep '^torch==' constraints.txt; } | $(CYCLONEDX) requirements - \
	  --pyproject pyproject.toml --output-file dist/umbel-wheel.cdx.json
	if docker image inspect umbel:$${TORCH:-cpu} >/dev/null 2>&1; then \
	  docker run --rm --network none umbel:$${TORCH:-cpu} python -m pip freeze --all | $(CYCLONEDX) requirements - \
	    --pyproject pyproject.toml --output-file dist/umbel-image.cdx.json; \
	else echo "There is no image: make image, then make sbom, lists it as well."; fi

image: $(READY) ## Build the container image: make image, or make image TORCH=cuda for a GPU
	$(BIN)/docker-compose build image

certs: $(RUNTIME) ## Make certificates and node keys: make certs NAMES=umbel.example.org NODES="site-1 site-2"
	$(BIN)/umbel certs --server "$(NAMES)" $(NODES:%=--node %)

compose-demo: $(RUNTIME) ## Hospital payments over three sites in containers
	$(BIN)/python -m tools.compose_demo

clean: ## Remove the virtual environment and caches
	rm -rf .venv $(NEWEST) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage docs/_build

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "umbel needs Python 3.11 to 3.13: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python tools/install.py .
	touch $@

$(READY): pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python tools/install.py ".[dev]" lab
	touch $(RUNTIME) $@
