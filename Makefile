# Quire: `make serve` and `make test` do everything, the set-up included. `make help` lists the rest.

# What may be passed, as in  make serve PORT=9000 MODEL=/models/qwen3  or in the environment.
HOST ?= 127.0.0.1##      serve: the address to listen on
PORT ?= 8000##           serve: the port
MODEL ?=##                serve: a folder or a name on the hub; empty: the model that ships with Quire
ARGS ?=##                 serve, test: further options, passed on as they are
WORKERS ?= 2##          test: processes that share the tests, a file at a time
WHY ?=##                  bench-ledger: what it buys that something costs more
STEPS ?= 20000000##       nightly: random steps in all
CASES ?= 300##            fuzz-api: cases an operation
PYTHON ?=##               setup: the Python to use (3.11 to 3.13); empty: the first that fits
TORCH_INDEX ?=##          setup: an index of CPU wheels of torch; empty: pip's own choice

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

venv := .venv
ready := $(venv)/.quire-ready
kernels := $(venv)/.quire-kernels
export PYTHON TORCH_INDEX

# The stamp holds the folder it was made in. A tree that was moved or copied must be set up anew: a venv cannot move.
ifneq ($(file <$(ready)),$(CURDIR))
.PHONY: $(ready)
endif

$(ready): pyproject.toml tools/setup.sh
	@tools/setup.sh

# Compiled ahead so that the first start is quick. Without a compiler, or if it fails, Quire runs its PyTorch kernels.
$(kernels): $(ready) $(shell find src/quire/csrc -type f 2>/dev/null)
	@if command -v "$${CXX:-g++}" >/dev/null; then \
	    $(venv)/bin/python -m quire.worker.kernels.cpu.build || echo "setup: the C++ kernels were not built (reason above); the PyTorch kernels are used, which are slower"; \
	else \
	    echo "setup: no C++ compiler found; the PyTorch kernels are used, which are slower (sudo apt install g++)"; \
	fi
	@touch $@

.PHONY: setup serve test nightly faults gpu-check conformance fuzz-api wheel bench-ledger lint format clean help

setup: $(ready) $(kernels) ## create .venv and install everything; does nothing the second time

serve: setup ## run the server in the foreground (HOST, PORT, MODEL, ARGS); Ctrl-C ends it
	@exec $(venv)/bin/quire serve $(if $(MODEL),"$(MODEL)") --host "$(HOST)" --port "$(PORT)" $(ARGS)

# Files in their order: the other one, most tests first, ends with the files of one long test each.
# One thread a process: on busy cores two threads that wait for each other are many times slower than one.
test: export OMP_NUM_THREADS = 1
test: export OMP_WAIT_POLICY = passive
test: lint ## lint, then the default tests (ARGS="-k scheduler", ARGS="-m nightly")
	@$(venv)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# In pieces: a run that was stopped goes on where it was, and build/soak.json sums them up.
nightly: export OMP_NUM_THREADS = 1
nightly: export OMP_WAIT_POLICY = passive
nightly: setup ## 20 million random steps on the simulator, then the nightly tests (STEPS; ARGS="-k metamorphic")
	@$(venv)/bin/python -m quire.testing.soak --steps $(STEPS) --state build/soak.json
	@$(venv)/bin/python -m pytest -m nightly $(ARGS)

# The clients are installed into build/clients at first use.
conformance: setup ## every check of OpenAI's API, then the clients that people use (ARGS="--url http://host:8000 --api-key K")
	@$(venv)/bin/python -m conformance --clients $(ARGS)

fuzz-api: setup ## Schemathesis against the real server, CASES an operation; goes on where it was (ARGS="--operation 'GET /health'")
	@$(venv)/bin/python -m conformance.fuzz --cases $(CASES) $(ARGS)

# In pieces as well: build/faults.json sums them up.
faults: export OMP_NUM_THREADS = 1
faults: export OMP_WAIT_POLICY = passive
faults: setup ## break a real server in every known way, as often as each case says (ARGS="--only F1,F3 --times 1"; takes some 40 minutes)
	@$(venv)/bin/python -m tests.support.faults --out build/faults.json $(ARGS)

# No setup: on a machine with a GPU Quire stands beside the torch and Triton that are there (PYTHON).
gpu-check: ## what a GPU must show: kernels are verified and timed, W1 to W5 of an 8B shape; goes on where it was (ARGS="--again")
	@$(if $(PYTHON),$(PYTHON),$(if $(wildcard $(venv)/bin/python),$(venv)/bin/python,python3)) benchmarks/gpu_check.py $(ARGS)

# The kernels lie among the sources only while the wheel is made: there they would be taken before newer ones.
wheel: setup ## dist/quire-*.whl with compiled kernels, which installs and serves without a compiler (ARGS="--check" tries it)
	@tools/wheel.sh $(ARGS)

bench-ledger: setup ## count what things cost (no time) and put a line into benchmarks/ledger.jsonl (WHY="what a rise buys")
	@$(venv)/bin/python benchmarks/ledger.py --extend --why "$(WHY)"

lint: setup ## ruff and mypy
	@$(venv)/bin/ruff check .
	@$(venv)/bin/ruff format --check .
	@$(venv)/bin/mypy

format: setup ## format the code, and repair what ruff can repair
	@$(venv)/bin/ruff check --fix-only --quiet .
	@$(venv)/bin/ruff format .

clean: ## remove .venv, caches and build results
	@rm -rf $(venv) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

help: ## this list
	@echo "make <target> [VARIABLE=value]"; echo
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1|\2/p' Makefile | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'
	@echo
	@sed -nE 's/^([A-Z_]+) \?= ?([^#]*)## *(.*)/  \1|\3|\2/p' Makefile | awk -F'|' '{printf "%-14s %s%s\n", $$1, $$2, ($$3 == "" ? "" : " [" $$3 "]")}'
