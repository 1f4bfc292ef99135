# `make` alone lists the targets. Everything runs in $(VENV), which is made on first use.

PYTHON ?= python3
VENV ?= .venv
# Options of the comparison, for example --quick.
BENCH ?=
# Processes that share the tests; each takes whole files.
WORKERS ?= 2
# Tests of `make coverage-lines`.
LINES ?= tests
# What `make fuzz` runs more of, and how many it tries of each kind; 1000 wrong arguments of each 1000 are all. Of random
# programs in parts it tries a thousand.
FUZZ := tests/graph/test_mutated_files.py tests/graph/test_costly_files.py tests/test_wrong_arguments.py \
  tests/test_escaping.py tests/cluster/alone/test_port_attacks.py tests/cluster/alone/test_model_of_faults.py \
  tests/execution/test_thousand_cuts.py
TRIES ?= 1000
# How long `make chaos` runs, and the seed of its faults.
SECONDS ?= 600
SEED ?= 1
# Address of one more wheel index, for example one with CPU-only builds of torch. Empty: pip's own configuration.
TORCH_INDEX ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NOTEBOOKS := $(wildcard notebooks/*.ipynb notebooks/evaluation/*.ipynb)
# Tests start hundreds of processes: where no bytecode is kept each of them compiles our modules anew.
export PYTHONDONTWRITEBYTECODE :=
# A worker that crashed is not replaced: pytest-xdist 3.8 can wait for ever for the new one.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --nbval --nbval-current-env --nbval-sanitize-with notebooks/sanitize.cfg --nbval-cell-timeout 240

.DEFAULT_GOAL := help
.PHONY: help chaos chaos-moments demo docs fuzz test test-slow test-all durations lint format type shape bench bench-cluster bench-cuda bench-peers bench-ray evaluate notebooks coverage coverage-lines page cuda wheel doctor lab clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV); the first time this downloads torch"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  -c constraints.txt -e '.[data,lab,dev]'
	@touch $@

demo: $(INSTALLED) ## install, then do the main job on real data, here and on a cluster in processes
	@$(BIN)/python -m tfnb demo

test: $(INSTALLED) ## all tests but the slow ones, with the quickstart notebook
	$(PYTEST) -m "not slow and not sweep" tests $(NOTEBOOKS)

test-slow: $(INSTALLED) ## only the slow tests, with the other notebooks and the pages in a browser
	$(PYTEST) -m slow tests $(NOTEBOOKS)

test-all: $(INSTALLED) ## both, without a choice or a limit of time
	$(PYTEST) -m "not sweep" tests $(NOTEBOOKS)

chaos: $(INSTALLED) ## trainings under faults of all kinds, each step counted once by a history; SECONDS=600 SEED=1
	$(BIN)/python -m tests.cluster.chaos $(SECONDS) $(SEED)

chaos-moments: $(INSTALLED) ## processes killed at moments of a recovery, values compared with a replay; SECONDS=600 SEED=1
	$(BIN)/python -m tests.cluster.chaos.moments $(SECONDS) $(SEED)

fuzz: $(INSTALLED) ## what strangers may do, many times: files, names, wrong arguments, attacks on a port; TRIES=100
	TFNB_FUZZ=$(TRIES) $(BIN)/python -m pytest -n $(WORKERS) --dist load $(FUZZ)

durations: $(INSTALLED) ## run all tests, and write what each takes to tests/durations.json
	mkdir -p build
	$(PYTEST) -m "not sweep" --junitxml build/all.xml tests $(NOTEBOOKS); $(BIN)/python -m tests.durations build/all.xml

lint: $(INSTALLED) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED) ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Type checkers do not follow an editable install: they read the unpacked wheel, from another folder.
type: wheel ## mypy on the wheel
	rm -rf build/types && mkdir -p build/types
	$(BIN)/python -m zipfile -e dist/tfnb-*.whl build/types
	cd build/types && ../../$(BIN)/python -m mypy --config-file ../../pyproject.toml -p tfnb

shape: $(INSTALLED) ## lines, functions and comments of each folder; names, prose and mechanisms of the house, counted
	@$(BIN)/python -m tests.benchmarks.shape

bench: $(INSTALLED) ## tfnb beside torch, TensorFlow and JAX; BENCH="--quick" or "--rows NAME ..."
	$(BIN)/python -m tests.benchmarks.compare $(BENCH)

evaluate: $(INSTALLED) ## the figures of the papers in full, beside what runs here: notebooks/evaluation/results.md
	for each in notebooks/evaluation/*.ipynb; do \
	  TFNB_EVALUATE=full $(BIN)/python -m jupyter nbconvert --to notebook --execute --inplace $$each || exit 1; done

bench-cluster: $(INSTALLED) ## a step on a cluster beside plain Dask actors doing the same; BENCH="ROUNDS STEPS"
	$(BIN)/python -m tests.benchmarks.cluster_steps $(BENCH)
	$(BIN)/python -m tests.benchmarks.cluster_bulk
	$(BIN)/python -m tests.benchmarks.cluster_copies
	$(BIN)/python -m tests.benchmarks.cluster_local
	$(BIN)/python -m tests.benchmarks.cluster_lossy
	$(BIN)/python -m tests.benchmarks.bench_sandblaster
	$(BIN)/python -m tests.benchmarks.cluster_faults
	$(BIN)/python -m tests.benchmarks.cluster_rows
	$(BIN)/python -m tests.benchmarks.bench_parts
	$(BIN)/python -m tests.benchmarks.cluster_pipeline
	$(BIN)/python -m tests.benchmarks.bench_messages

bench-peers: ## TensorFlow and JAX, in an environment of their own
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c tests/benchmarks/peers/constraints.txt tensorflow-cpu jax

bench-ray: ## Ray actors that take the step of bench-cluster, in an environment of their own; that runs them from then on
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ray torch numpy psutil
	.venv-ray/bin/python tests/benchmarks/peers/ray_actors.py $(BENCH)

notebooks: $(INSTALLED) ## execute the notebooks, keep their outputs, and draw the pictures of the pages
	$(BIN)/python -m jupyter nbconvert --to notebook --inplace --execute \
	  --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.store_widget_state=False $(wildcard notebooks/*.ipynb)
	@$(BIN)/python -m tests.pictures

docs: $(INSTALLED) ## the reference of all public names and magics, from the docstrings, into build/docs
	@$(BIN)/python -m tests.reference build/docs && echo build/docs/tfnb.html

coverage: $(INSTALLED) ## every sample of every torch operator, then tests/coverage/COVERAGE.md
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m sweep tests/coverage
	@$(BIN)/python -m tests.coverage.page

bench-cuda: $(INSTALLED) ## steps on a CUDA device beside eager, torch.compile and its CUDA graphs; BENCH="--nets NAME ..."
	$(BIN)/python -m tests.benchmarks.bench_cuda $(BENCH)
	$(BIN)/python -m tests.benchmarks.bench_swap --device cuda --lengths 1000 2500

cuda: $(INSTALLED) ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m cuda tests

coverage-lines: $(INSTALLED) ## the quick tests once more, slower, then which lines they reach: build/lines/index.html
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not sweep" $(LINES)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report --skip-covered --skip-empty

page: $(INSTALLED) ## write tests/coverage/COVERAGE.md from the table of what fails
	@$(BIN)/python -m tests.coverage.page

wheel: $(INSTALLED) ## build dist/tfnb-*.whl
	rm -rf build/lib build/bdist* dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

doctor: $(INSTALLED) ## say what works here
	@$(BIN)/python -m tfnb doctor

lab: $(INSTALLED) ## open JupyterLab on the notebooks
	@$(BIN)/python -m tfnb lab

clean: ## remove what was built, the environment included
	rm -rf $(VENV) .venv-peers build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache
