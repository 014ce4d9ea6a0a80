# `make serve` runs Foredraft, `make test` tests it, `make check` is what CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROTOS := $(shell find protos -name '*.proto')

.PHONY: serve test check protos docs clean

$(BIN)/.ready: pyproject.toml foredraft/speculation/_ngram.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

serve: $(BIN)/.ready
	$(BIN)/foredraft serve

test: $(BIN)/.ready
	$(BIN)/python -m pytest

protos: $(BIN)/.ready
	rm -rf foredraft/api
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)
	find foredraft/api -type d -exec sh -c 'touch "$$1/__init__.py"' _ {} \;

clean:
	rm -rf $(VENV) build *.egg-info
