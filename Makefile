# Everstep's commands. `make` alone lists them. Two need nothing else on a fresh machine: `make demo` and `make test`.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
VENV := .venv/.stamp
PAGES := dashboard/static/vendor/.stamp
SEED ?= 1
SCHEDULES ?= 500
CASES ?= 200
# Management commands that need no state of their own keep the little that they write out of the demo's folder.
SCRATCH := EVERSTEP_HOME=$(CURDIR)/.venv/scratch

.PHONY: help install demo demo-check drills single-node shrink check check-format check-lint check-types check-imports \
	check-unit test test-training test-systems test-rows test-agents test-pages test-production proof planted-bugs \
	corruptions exactness axe chaos simulate silence openapi lock clean
.DEFAULT_GOAL := help

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

$(VENV): requirements/dev.lock pyproject.toml
	@PYTHON=$(PYTHON) .ci/venv
	@touch $@

$(PAGES): $(VENV) package-lock.json dashboard/management/commands/vendor_static.py
	@$(SCRATCH) $(BIN)/python manage.py vendor_static
	@touch $@

install: $(VENV) $(PAGES) ## install everything into .venv; the other commands do so by themselves

demo: install ## server, agents and a real training job on this machine; Ctrl-C stops all. ARGS="--port 9000"
	@$(BIN)/everstep demo $(ARGS)

demo-check: install ## the demo without a person: one drill, its proof recomputed. DRILL=freeze-node, BUG=optimizer
	@PYTHONPATH=tests/acceptance DRILL=$(DRILL) BUG=$(BUG) KEEP=$(KEEP) $(BIN)/python -m demo_check

drills: install ## every kind of drill, one after the other on one running system, each recomputed. SEED=1
	@PYTHONPATH=tests/acceptance SEED=$(SEED) KEEP=$(KEEP) $(BIN)/python -m demo_check.all_kinds

single-node: install ## a job on one node: cut off while it trains on, then gone for good until an operator attests it
	@PYTHONPATH=tests/acceptance KEEP=$(KEEP) $(BIN)/python -m single_node

shrink: install ## a job that may run on one or two nodes loses one, and there is no spare: it goes on without it
	@PYTHONPATH=tests/acceptance KEEP=$(KEEP) $(BIN)/python -m shrink

chaos: install ## drills while web, worker, beat, Redis, PostgreSQL die, alone and together. SEED=1
	@.ci/apt
	@PYTHONPATH=tests/acceptance SEED=$(SEED) $(BIN)/python -m chaos

check: $(VENV) ## format, lint, types, imports, unit tests
	@$(MAKE) --no-print-directory -j2 check-unit check-format check-lint check-types check-imports

check-format: $(VENV)
	@$(BIN)/ruff format --check --quiet . || { echo 'Run: .venv/bin/ruff format .' >&2; exit 1; }

check-lint: $(VENV)
	@$(BIN)/ruff check --quiet .

check-types: $(VENV)
	@$(SCRATCH) $(BIN)/mypy --no-error-summary

check-imports: $(VENV)
	@$(BIN)/lint-imports >.venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }

check-unit: $(VENV)
	@$(BIN)/pytest -q --timeout 60 tests/unit

# `make check test` runs the unit tests once, within check.
test: install $(if $(ARGS)$(filter check,$(MAKECMDGOALS)),,check-unit) ## all tests; those of rows and broker also on PostgreSQL and Redis. Installs from apt what is missing
	@.ci/apt
ifdef ARGS
	@$(BIN)/pytest $(ARGS)
	@EVERSTEP_TEST_SERVERS=production $(BIN)/pytest $(ARGS) || [ $$? = 5 ] # 5: ARGS chose none of those
else
	@$(MAKE) --no-print-directory -k -j4 test-training test-systems test-rows test-agents test-pages test-production
endif

named = $(wildcard $(addprefix tests/integration/test_,$(1)))
AGENTS_TESTS := $(call named,agent_*.py node_drills.py server_life.py supervise*.py)
TRAINING_TESTS := $(call named,replayable_*.py resume_*.py run_*.py runner_*.py samples_*.py save_*.py)
EXACTNESS_TESTS := tests/acceptance/test_exactness.py
# Lanes, four at a time: many of these tests wait for leases to run out, for processes to start and to die.
test-training: install
	@$(BIN)/pytest -q $(EXACTNESS_TESTS) $(TRAINING_TESTS)

test-systems: install
	@$(BIN)/pytest -q tests/acceptance --ignore=$(EXACTNESS_TESTS)

test-rows: install
	@$(BIN)/pytest -q tests/integration $(addprefix --ignore=,$(AGENTS_TESTS) $(TRAINING_TESTS))

test-agents: install
	@$(BIN)/pytest -q $(AGENTS_TESTS)

test-pages: install
	@$(BIN)/pytest -q tests/browser tests/simulation

test-production: install
	@EVERSTEP_TEST_SERVERS=production $(BIN)/pytest -q tests/integration

planted-bugs: $(VENV) ## resumes with a bug in them are found and named, clean ones raise no alarm; real training. SEED=1
	@OMP_NUM_THREADS=1 PYTHONPATH=.:tests/acceptance $(BIN)/python -m planted_bugs --seed $(SEED)

corruptions: $(VENV) ## real checkpoints damaged in every way, and saves to failing storage: none is taken wrongly. CASES=200 SEED=1
	@OMP_NUM_THREADS=1 PYTHONPATH=.:tests/acceptance $(BIN)/python -m corruptions --seed $(SEED) --cases $(CASES)

exactness: $(VENV) ## 300 steps with 5 faults end bit for bit where an uninterrupted run ends. SEED=1, BUG=optimizer
	@OMP_NUM_THREADS=1 PYTHONPATH=.:tests/acceptance $(BIN)/python -m exactness --seed $(SEED) \
		$(if $(BUG),--bug $(BUG)) $(if $(ONLY),--only "$(ONLY)")

axe: install ## every page in both colours and widths: nothing serious of axe's, no complaint of the browser. SEED=1
	@.ci/apt
	@SEED=$(SEED) PYTHONPATH=tests/browser $(BIN)/python -m axe

proof: install ## every long proof in full, one table at the end (an hour and more). SEED=1
	@.ci/apt
	@$(BIN)/python tests/proof.py --seed $(SEED)

simulate: $(VENV) ## the decisions against a simulated fleet under random faults. SCHEDULES=500 SEED=1 BUG=no-fence
	@$(BIN)/python tests/simulation/simulate.py --schedules $(SCHEDULES) --seed $(SEED) $(if $(BUG),--plant $(BUG))

silence: $(VENV) ## 24 node-days of heartbeats with losses and pauses: none falsely lost, real silences found. SEED=1
	@$(BIN)/python tests/simulation/silence.py --seed $(SEED)

openapi: $(VENV) ## write docs/openapi.json
	@$(SCRATCH) $(BIN)/python manage.py export_openapi

lock: $(VENV) ## renew requirements/dev.lock from pyproject.toml
	@.ci/lock

clean: ## remove everything that these commands made, the demo's data in .everstep included
	rm -rf .venv .everstep node_modules dashboard/static/vendor staticfiles build dist *.egg-info htmlcov .coverage
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
