# One command per target. Behaviour lives in the programs: `.venv/bin/kiln --help`.
PYTHON ?= python3
ARCH ?= sm90
TP ?= 8
EP ?= 1
WORLD ?= $(TP)
MODEL ?=
DRAFT ?=
OUT ?=
AGAINST ?=

BIN := .venv/bin
FLAGS = --arch $(ARCH) --world $(WORLD) --tp $(TP) --ep $(EP) $(foreach d,$(DRAFT),--draft "$(d)")

DEST = $(or $(OUT),build/$(if $(MODEL),$(notdir $(patsubst %/,%,$(firstword $(subst @, ,$(MODEL))))),demo)/w$(WORLD)-tp$(TP)-ep$(EP))

.DEFAULT_GOAL := help
.PHONY: help install plan convert verify fmt lint type test test-fast test-slow test-gpu bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  make convert ARCH=sm90 TP=8 [EP=8] [WORLD=8] [MODEL=path-or-hub-id[@revision]] [OUT=...]"

install:  ## .venv with everything, CPU torch where there is no GPU
	@$(PYTHON) install.py

plan: install  ## what a conversion would write: MODEL=... ARCH= TP= EP= WORLD=
	$(BIN)/kiln plan "$(MODEL)" $(FLAGS)

convert: install  ## MODEL (or the embedded demo) -> artifact, kernels for ARCH compiled
	$(BIN)/kiln convert $(if $(MODEL),"$(MODEL)") $(FLAGS) --out "$(DEST)"
	$(BIN)/kiln-run compile "$(DEST)" --arch $(ARCH)

verify: install  ## check the artifact OUT, with AGAINST=MODEL bit for bit
	$(BIN)/kiln verify "$(OUT)" $(if $(AGAINST),--against "$(AGAINST)")

fmt: install
	$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .

type: install
	$(BIN)/mypy

test: lint type test-fast  ## lint, types and tests

test-fast: install
	$(BIN)/pytest -q -n 2

test-slow: install  ## the exhaustive tier
	$(BIN)/pytest -q -n 2 -m "slow or not slow"

test-gpu: install  ## tests that need a GPU
	$(BIN)/pytest -q -m gpu

bench: install  ## convert throughput on this machine, into benchmarks/results
	$(BIN)/python -m convert.bench

clean:  ## remove build/
	rm -rf build
