# Every target does its own set-up: on a fresh machine `make test` is enough. See integration/setup.sh for what is
# installed, when, and for its settings (PYTHON, RELIABLE_MQ_BROKER_IMAGE, ...). ARGS is passed on to what is run.
SHELL := /bin/bash
SETUP := integration/setup.sh
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
ARGS ?=
# Tests mostly wait, for a broker or a time to pass, so some run side by side: each process with brokers of its own.
JOBS ?= 6
# Each of some hundred processes uses what an earlier one has compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup venv compiled image images databases prometheus chromium check test test-unit test-core test-rest test-fast t \
	test-integration test-brokers test-spark test-pythons docs demo demo-cluster dashboards pictures demo-spark java bench bench-recovery soak soak-integration soak-unit soak-tests fmt clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: venv images databases prometheus chromium  ## everything the other targets need: .venv, docker, the images

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

check: venv  ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Every part runs, also when one before it failed; the end tells what became of each.
test:  ## all tests: without a broker, then against real ones
	@tests/parts.sh test-core test-rest test-integration

test-unit:  ## the tests that need no broker, and the coverage of the core
	@tests/parts.sh test-core test-rest

# The core and the codec are covered by their own tests, every branch; what else runs their lines does not count.
test-core: venv
	$(PYTEST) tests/core tests/codec -m traced -n auto --cov=reliable_mq.core --cov=reliable_mq.codec --cov-report=term-missing --cov-fail-under=100 $(ARGS)

# Ten at a time, since most of these wait for a time to pass, and need little of a processor.
test-rest: compiled
	$(PYTEST) tests -m "not traced" -n 10 --dist worksteal $(ARGS)

# Each process collects all tests, so that more of them take longer.
test-fast: compiled  ## most tests that need no broker (under a minute)
	$(PYTEST) tests -q -m "not slow" -n 3 $(ARGS)

T ?= tests/core
t: venv  ## some tests, in this process: make t T=tests/core/test_confirms.py
	$(PYTEST) -q -n 0 $(T) $(ARGS)

# Not beside each other: Spark gives a Python process 10 s to start, which it needs more than once beside the other tests.
test-integration: venv images java databases prometheus chromium  ## the tests against real brokers, databases and Spark
	@tests/parts.sh test-brokers test-spark

test-brokers: compiled images databases prometheus chromium
	$(PYTEST) integration --ignore=integration/spark -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-spark: compiled images java
	$(PYTEST) integration/spark -n 3 --dist worksteal $(ARGS)

test-pythons:  ## the tests that need no broker on every Python found, and on those of Debian sid
	@tests/pythons.sh

docs: venv  ## the manual, into docs/_build/html; every warning is an error
	$(BIN)/sphinx-build -b html -W --keep-going --jobs auto --quiet docs docs/_build/html $(ARGS)

demo: venv image  ## publish and consume orders while the broker is killed under them
	@$(BIN)/python -m integration.demo $(ARGS)

demo-cluster: venv image  ## orders on three nodes: the leader killed, a partition, a rolling restart, and the account
	@$(BIN)/python -m integration.demo_cluster $(ARGS)

dashboards: venv image prometheus  ## the pictures of the dashboards in the manual, drawn from real data
	@$(BIN)/python -m integration.draw_dashboards

pictures: venv image prometheus chromium  ## the other pictures in the manual: a trace, probes, tokens, failing fast, alerts, dead letters
	@$(BIN)/python -m integration.draw_pictures

java:
	@$(SETUP) java

demo-spark: venv image java  ## orders in, aggregated by a Spark cluster, alerts out, while parts of it are killed
	@$(BIN)/python -m integration.demo_spark $(ARGS)

bench: venv image databases  ## throughput and CPU per message, ours beside others
	$(BIN)/python -m integration.bench $(ARGS)
	$(BIN)/python -m integration.bench.stores
	$(BIN)/python -m integration.bench.outboxes
	$(BIN)/python -m integration.bench.poison
	$(BIN)/python -m integration.bench.tracing
	$(BIN)/python -m integration.bench.tracing_alone

bench-recovery: venv image  ## seconds until messages flow again after faults of a cluster, ours beside others (ten minutes)
	$(BIN)/python -m integration.bench.recovery $(ARGS)

# Both broker lines and many seeds (RELIABLE_MQ_SOAK_SEEDS, 20 if not set), drawn from one that is printed; RELIABLE_MQ_SEED
# repeats a run. Property tests take so many times the examples. A part of it:
# make soak TESTS=integration/spark/test_queue_kills.py JOBS=2 DIST=load
TESTS ?=
DIST ?= loadfile
SOAK = RELIABLE_MQ_SOAK_SEEDS=$${RELIABLE_MQ_SOAK_SEEDS:-20} $(PYTEST) -n $(JOBS) --dist $(DIST)
soak:  ## the fault matrix on both broker lines with many seeds, many examples of each property, every Python
	@tests/parts.sh $(if $(TESTS),soak-tests,soak-integration soak-unit test-pythons)

soak-integration: venv images java databases prometheus chromium
	$(SOAK) integration $(ARGS)

soak-unit: venv
	$(SOAK) tests $(ARGS)

soak-tests: venv images java databases prometheus chromium
	$(SOAK) $(TESTS) $(ARGS)

fmt: venv  ## format, and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and everything that was generated here (docker images stay)
	rm -rf .venv .pythons build dist docs/_build .bench htmlcov .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
