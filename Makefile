# `make serve` runs Foredraft, `make test` tests it, `make check` is what CI runs, `make lint` what the pre-commit hook runs.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
WORKERS ?= 3
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
PROTOS := $(shell find protos -name '*.proto')
PROTOC := $(BIN)/python -m grpc_tools.protoc -I protos

# The many processes of the tests import what one of them has compiled, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test test-fast test-thorough test-gpu test-kernels test-failed check collected lint style types arrows fresh format protos docs site dist clean

$(BIN)/.ready: pyproject.toml $(wildcard draft_service/ngram/_ngram*.[ch] foredraft/cpu/_*.[ch])
	$(PYTHON) -m venv $(VENV)
	-$(PIP) --upgrade pip # that of Python 3.11 takes 20 s longer
	# C sources are compiled while what Foredraft depends on is installed; a pip that cannot do so does it all at once.
	$(PIP) --only-deps '.[$(EXTRAS)]' & $(PIP) --no-deps --editable . && wait $$! || $(PIP) --editable '.[$(EXTRAS)]'
	touch $@

serve: $(BIN)/.ready
	$(BIN)/foredraft serve

test: $(BIN)/.ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Unit tests of what needs no running services: under two minutes on two cores.
FAST := config docs parallel protos rpc sampling telemetry text trees verify_service/scheduler test_structure.py test_kernel_loops.py test_kernel_calls.py
test-fast: $(BIN)/.ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu" $(addprefix tests/,$(FAST))

# As `test`, with more repetitions (`testing/rounds.py`). A workflow runs it every night.
test-thorough: $(BIN)/.ready
	FOREDRAFT_TEST_THOROUGH=1 $(MAKE) test

# What needs an NVIDIA GPU, one after the other.
test-gpu: $(BIN)/.ready
	$(BIN)/python -m pytest -m gpu

# The kernels for GPUs in Triton's interpreter, without a GPU: ten minutes. Triton stays out of the environment, where torch would use it.
INTERPRETER := build/interpreter
$(INTERPRETER)/.ready: $(BIN)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target $(INTERPRETER) triton==3.6.0 numpy==2.2.6
	touch $@

test-kernels: $(INTERPRETER)/.ready
	PYTHONPATH=$(INTERPRETER) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m gpu --ignore=tests/e2e

# The tests that failed in the last run, one after the other: a failure that ends by itself here is one of timing, to be mended.
test-failed: $(BIN)/.ready
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

LINT := types style arrows fresh site

# Real processes on a busy machine can be slow once; a defect fails twice.
check: $(BIN)/.ready
	$(MAKE) --jobs=2 --output-sync=target $(LINT) collected
	$(MAKE) test || $(MAKE) test-failed

# Compiles what tests import while mypy leaves a core idle; else each worker of the tests would. A failure is told by `test`.
collected: $(BIN)/.ready
	-@$(BIN)/python -m pytest --collect-only -qq >/dev/null

lint: $(BIN)/.ready
	$(MAKE) --jobs=2 --output-sync=target $(LINT)

style: $(BIN)/.ready
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: $(BIN)/.ready
	$(BIN)/mypy

arrows: $(BIN)/.ready
	$(BIN)/lint-imports

fresh: $(BIN)/.ready
	$(BIN)/python docs/generate.py --check

format: $(BIN)/.ready
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

protos: $(BIN)/.ready
	rm -rf foredraft/api
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)
	find foredraft/api -type d -exec sh -c 'touch "$$1/__init__.py"' _ {} \;

docs: $(BIN)/.ready
	$(BIN)/python docs/generate.py

# The manual and the lab book as a site in build/site; a link that leads nowhere fails. (--quiet would hide it from --strict.)
site: $(BIN)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# An sdist, and a wheel built from it.
dist: $(BIN)/.ready
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist *.egg-info
