# Every target does its own set-up, so on a fresh machine `make test` is enough. integration/setup.sh lists what is
# installed and its settings (PYTHON, RELIABLE_MQ_BROKER_IMAGE, ...). ARGS is passed on to the program that runs.
SHELL := /bin/bash
SETUP := integration/setup.sh
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
ARGS ?=
# Tests mostly wait for a broker or a timeout, so several processes run in parallel, each with separate brokers.
JOBS ?= 6
# Several hundred processes reuse the bytecode that earlier processes compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup venv compiled image images databases prometheus chromium check test test-unit test-core test-rest test-fast t \
	test-integration test-brokers test-spark test-pythons docs demo demo-cluster dashboards pictures demo-spark java bench bench-recovery soak soak-integration soak-unit soak-tests fmt clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: venv images databases prometheus chromium  ## set up all that the other targets need: .venv, docker, the images

venv:
	@$(SETUP) venv

compiled:
	@$(SETUP) compiled

image:
	@$(SETUP) image newest

images: image
	@$(SETUP) image 4.0

databases:
	@$(SETUP) databases

prometheus:
	@$(SETUP) prometheus

chromium:
	@$(SETUP) chromium

check: venv  ## check lint, format, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Every part runs, even if an earlier one has failed. The last lines show the result of each.
test:  ## run all tests: without a broker, then against real ones
	@tests/parts.sh test-core test-rest test-integration

test-unit:  ## run the tests that need no broker, and check the coverage of the core
	@tests/parts.sh test-core test-rest

# Every branch of the core and the codec is covered by their own tests. Coverage by other tests does not count.
test-core: venv
	$(PYTEST) tests/core tests/codec -m traced -n auto --cov=reliable_mq.core --cov=reliable_mq.codec --cov-report=term-missing --cov-fail-under=100 $(ARGS)

# Six at a time, because many of these tests wait for a timeout. Each process needs ten seconds to collect all tests.
test-rest: compiled
	$(PYTEST) tests -m "not traced" -n 6 --dist worksteal $(ARGS)

# Each process collects all tests, so more than three processes take longer.
test-fast: compiled  ## run most tests that need no broker (under a minute)
	$(PYTEST) tests -q -m "not slow" -n 3 $(ARGS)

T ?= tests/core
t: venv  ## run some tests in this process: make t T=tests/core/test_confirms.py
	$(PYTEST) -q -n 0 $(T) $(ARGS)

# Not in parallel: Spark gives a Python process 10 s to start, which is often too little during the other tests.
test-integration: venv images java databases prometheus chromium  ## run the tests that need brokers, databases and Spark
	@tests/parts.sh test-brokers test-spark

test-brokers: compiled images databases prometheus chromium
	$(PYTEST) integration --ignore=integration/spark -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-spark: compiled images java
	$(PYTEST) integration/spark -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-pythons:  ## run the tests that need no broker on every Python found, and on those of Debian sid
	@tests/pythons.sh

docs: venv  ## build the manual into docs/_build/html; every warning is an error
	$(BIN)/sphinx-build -b html -W --keep-going --jobs auto --quiet docs docs/_build/html $(ARGS)

demo: venv image  ## publish and consume orders while the broker is killed
	@$(BIN)/python -m integration.demo $(ARGS)

demo-cluster: venv image  ## handle orders on three nodes through a killed leader, a partition and a rolling restart
	@$(BIN)/python -m integration.demo_cluster $(ARGS)

dashboards: venv image prometheus  ## draw the dashboard pictures of the manual from real data
	@$(BIN)/python -m integration.draw_dashboards

pictures: venv image prometheus chromium  ## draw the other pictures of the manual: a trace, probes, tokens, failing fast, alerts, dead letters
	@$(BIN)/python -m integration.draw_pictures

java:
	@$(SETUP) java

demo-spark: venv image java  ## aggregate orders into alerts on a Spark cluster while parts of it are killed
	@$(BIN)/python -m integration.demo_spark $(ARGS)

bench: venv image databases  ## measure throughput and CPU time per message, and compare with other clients
	$(BIN)/python -m integration.bench $(ARGS)
	$(BIN)/python -m integration.bench.stores
	$(BIN)/python -m integration.bench.outboxes
	$(BIN)/python -m integration.bench.poison
	$(BIN)/python -m integration.bench.tracing
	$(BIN)/python -m integration.bench.tracing_alone

bench-recovery: venv image  ## measure recovery after cluster faults, and compare with other clients (ten minutes)
	$(BIN)/python -m integration.bench.recovery $(ARGS)

# Both broker lines and many seeds (RELIABLE_MQ_SOAK_SEEDS, 20 if not set), drawn from a seed that is printed;
# RELIABLE_MQ_SEED repeats a run. The number of seeds also multiplies the examples of property tests. To run a part:
# make soak TESTS=integration/spark/test_queue_kills.py JOBS=2 DIST=load
TESTS ?=
DIST ?= loadfile
SOAK = RELIABLE_MQ_SOAK_SEEDS=$${RELIABLE_MQ_SOAK_SEEDS:-20} $(PYTEST) -n $(JOBS) --dist $(DIST)
soak:  ## run the fault matrix on both broker lines with many seeds, many examples of each property, every Python
	@tests/parts.sh $(if $(TESTS),soak-tests,soak-integration soak-unit test-pythons)

soak-integration: venv images java databases prometheus chromium
	$(SOAK) integration $(ARGS)

soak-unit: venv
	$(SOAK) tests $(ARGS)

soak-tests: venv images java databases prometheus chromium
	$(SOAK) $(TESTS) $(ARGS)

fmt: venv  ## format the code, and apply the linter's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and all generated files (docker images stay)
	rm -rf .venv .pythons build dist docs/_build .bench htmlcov .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
