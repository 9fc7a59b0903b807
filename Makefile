# make demo and make test set everything up themselves. RLFLOW_DATA_DIR moves the data folder (./data).
# EXTRA=gpu installs for CUDA. EXTRA=gpu-flash adds flash-attn, compiled against the torch of EXTRA=gpu (docs/performance.md).
# JOBS: tests at a time; each file starts servers or Ray and wants about a core and 3 GiB.
# LONG_JOBS: the same for tests/long, which waits for servers for much of its time.
# An environment keeps what it was installed for, unless EXTRA says otherwise.
INSTALLED := $(patsubst .venv/.installed-%,%,$(firstword $(wildcard .venv/.installed-*)))
EXTRA ?= $(or $(INSTALLED),$(if $(filter demo-gpu,$(MAKECMDGOALS)),gpu,cpu))
JOBS ?= 2
LONG_JOBS ?= $(shell expr $(JOBS) + 1)
PINS := $(EXTRA:gpu-flash=gpu)
STAMP := .venv/.installed-$(EXTRA)
RUN := .venv/bin/python
FIND_PYTHON := for p in python3.11 python3.12 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
  && $$p -c 'import sys; print(sys.executable)' && break; done
PYTHON := $(shell $(FIND_PYTHON))
UV := $(or $(shell command -v uv),.uv/bin/uv)
LOCK := $(UV) pip compile pyproject.toml --python-version 3.11 --no-emit-index-url --no-header --extra dev --extra oracle --extra tensorboard --extra wandb --extra swanlab
export UV_PYTHON_DOWNLOADS := never
# Compiled at install, or every start of a worker imports for 15 s instead of 6.
export UV_COMPILE_BYTECODE := 1

.PHONY: help install up down status tour demo demo-gsm8k demo-countdown demo-geo3k demo-gpu demo-algorithms bench check-models chaos ui docs test test-all test-in-time test-stacks test-clusters mutants check lock clean
help:
	@echo 'make demo                      from raw data to a registered model, on the CPU'
	@echo 'make demo-gsm8k, -countdown    the same with a tiny text policy: sums, the countdown game'
	@echo 'make demo-geo3k DATA=FOLDER    the same on real Geometry3K files, two steps'
	@echo 'make demo-gpu                  on one GPU: the whole flow for a random Qwen2.5-VL-3B, killed once; seconds and memory'
	@echo '                               by stage. DATA=FOLDER: Geometry3K files; SHAPE=text-1.5b or vl-7b; OUT=FILE'
	@echo 'make demo-algorithms           does every algorithm learn? A table of three seeds each, under 40 minutes'
	@echo 'make bench                     on a GPU: do the main figures of docs/performance.md still hold?'
	@echo 'make check-models              trainer, transformers and vLLM on tiny models of every family: docs/models.md, 3 minutes'
	@echo 'make chaos                     kill everything, at random; is anything lost? A table, 25 minutes; SEED=7 repeats one'
	@echo 'make up, down, status          Prefect, MLflow and workers in the background; then .venv/bin/prefect deployment run NAME'
	@echo 'make tour                      all of it once, from nothing, with pictures of the pages; under 30 minutes'
	@echo 'make ui                        the Prefect and MLflow pages over the data folder'
	@echo 'make test, make check          the tests of every promise, 15 minutes; lint, format and types'
	@echo 'make test-all                  the long tests as well: many engines, servers, browsers; 65 minutes'
	@echo 'make test-in-time MINUTES=40   those of the long tests that this machine can run in this time, after make test'
	@echo 'make test-stacks               the flow-level tests on PostgreSQL and S3'
	@echo 'make test-clusters             the stack of compose.yaml, the Dockerfile, several machines on one folder; as root, 30 min'
	@echo 'make mutants                   do the tests see small faults? SIZE=600 of them, SEED=0; MINUTES=60'
	@echo 'make docs                      write docs/reference.md, and the tables of measured figures in docs/'
	@echo 'make install, lock, clean      environment; pinned requirements; remove what make made'

install: $(STAMP)

$(STAMP): pyproject.toml infra/requirements/$(EXTRA).txt infra/requirements/$(PINS).txt | $(UV)
	@test -n '$(PYTHON)' || { echo 'make: found no Python 3.11 or 3.12 on the PATH; install one of them.'; exit 1; }
	test -x .venv/bin/python || $(UV) venv --quiet --python '$(PYTHON)' .venv
	$(UV) pip sync --quiet --no-build --python .venv/bin/python infra/requirements/$(PINS).txt
	$(UV) pip install --quiet --python .venv/bin/python --no-deps --editable .
	$(if $(filter gpu-flash,$(EXTRA)),$(UV) pip install --quiet --python .venv/bin/python --no-build-isolation --no-deps --requirement infra/requirements/gpu-flash.txt)
	@rm -f .venv/.installed-* && touch $@

.uv/bin/uv:
	@test -n '$(PYTHON)' || { echo 'make: found no Python 3.11 or 3.12 on the PATH; install one of them.'; exit 1; }
	'$(PYTHON)' -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check uv

demo: $(STAMP)
	@.venv/bin/rlflow train grpo-geo3k-tiny

demo-gsm8k: $(STAMP)
	@.venv/bin/rlflow train grpo-gsm8k-tiny

demo-countdown: $(STAMP)
	@.venv/bin/rlflow train grpo-countdown-tiny

demo-geo3k: $(STAMP)
	@test -n '$(DATA)' || { echo 'make: name the folder with the train and validation files, or its URI: make demo-geo3k DATA=FOLDER'; exit 1; }
	@.venv/bin/rlflow train grpo-geo3k-demo-real --data '$(DATA)'

demo-gpu: $(STAMP)
	@$(RUN) -m tests.whole_flow $(if $(SHAPE),--shape '$(SHAPE)') $(if $(DATA),--data '$(DATA)') $(if $(OUT),--out '$(OUT)')

demo-algorithms: $(STAMP)
	@OMP_NUM_THREADS=1 $(RUN) -W ignore -m tests.bench.algorithms

bench: $(STAMP)
	@$(RUN) -m tests.bench.guard $(if $(PEER),--peer '$(PEER)')

check-models: $(STAMP)
	@OMP_NUM_THREADS=1 $(RUN) -W ignore -m tests.bench.models

chaos: $(STAMP)
	@OMP_NUM_THREADS=1 $(RUN) -m tests.chaos $(if $(SEED),--seed $(SEED))

up down status: $(STAMP)
	@.venv/bin/rlflow $@

tour: $(STAMP)
	@OMP_NUM_THREADS=1 $(RUN) -W ignore -m tests.tour

ui: $(STAMP)
	@.venv/bin/rlflow ui

docs: $(STAMP)
	@.venv/bin/rlflow docs
	@$(RUN) -m tests.bench.tables
	@$(RUN) -m tests.docs.ran

# A file's tests share their servers, so they stay together; files come in the order of tests/durations.json.
# ORDER=random: files, and the tests of each, come in a random order. The seed is printed, and SEED=7 sets it.
# Each test's seconds and outcome are kept in build/.
PYTEST = $(RUN) -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --junitxml=build/$@.xml \
  $(if $(filter random,$(ORDER)),--random-order) $(if $(SEED),--random-order-seed=$(SEED))

# tests/long is left out; tests/gpu needs a GPU.
test: $(STAMP)
	$(PYTEST) $(filter-out tests/long/ tests/gpu/,$(sort $(dir $(wildcard tests/*/test_*.py))))

test-all: test
	$(PYTEST) --numprocesses $(LONG_JOBS) -m 'not clusters' tests/long tests/gpu

# The commit decides which file comes first. What is left out is named.
test-in-time: $(STAMP)
	@test -n '$(MINUTES)' || { echo 'make: say how long the tests may take: make test-in-time MINUTES=40'; exit 1; }
	files=$$($(RUN) -m tests.in_time --minutes '$(MINUTES)' --jobs $(LONG_JOBS)) \
	  && $(PYTEST) --numprocesses $(LONG_JOBS) -m 'not clusters' $$files tests/gpu

# Ten minutes for each file; .ci/run leaves them out.
test-clusters: $(STAMP)
	$(PYTEST) -m clusters tests/long

test-stacks: $(STAMP)
	$(PYTEST) -m stacks --stack=postgres-s3 tests/long

# One process; every test runs without and with faults in it, so the share is told and nothing fails.
mutants: $(STAMP)
	@OMP_NUM_THREADS=1 nice -n 15 $(RUN) -W ignore -m tests.mutants --seed $(or $(SEED),0) --size $(or $(SIZE),600) --minutes $(or $(MINUTES),60)

check: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# No index addresses in these files: whoever installs uses the registry that is set up for them.
lock: | $(UV)
	$(LOCK) --extra cpu --output-file infra/requirements/cpu.txt
	$(LOCK) --extra gpu --output-file infra/requirements/gpu.txt

clean:
	rm -rf .venv .uv .mypy_cache .ruff_cache .pytest_cache rlflow.egg-info build
