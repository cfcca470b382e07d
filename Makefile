# Two commands: `make demo` and `make test`. Everything goes into .venv; nothing else on the machine is touched,
# except that `make test` installs the Debian packages its tests need where they are missing and it may.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEBIAN := strace gnugo redis-server

.PHONY: demo test quick full torch check lint types layers golden bench clean constraints debian

demo: $(VENV)/core
	$(BIN)/shoal train trpo CartPole-v1

# The inner loop: no test that starts a process or trains for long.
quick: $(VENV)/dev
	$(BIN)/python -m pytest -q -m 'not (processes or mpi or ray or redis or trains or slow)'

test: $(VENV)/dev debian
	$(BIN)/python -m pytest --durations 25

# Everything, also what is too long for CI.
full: $(VENV)/dev debian
	$(BIN)/python -m pytest --durations 25 -m 'slow or not slow'
	$(MAKE) torch

# What needs PyTorch, in a virtualenv that has it.
torch: $(VENV)-torch/ready
	$(VENV)-torch/bin/python -m pytest -q -m 'slow or not slow' tests/policies/test_export_torch.py tests/spmd

check: lint types layers test

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

layers: $(VENV)/dev
	$(BIN)/lint-imports

golden: $(VENV)/dev
	$(BIN)/python -m tests.golden $(BASE)

bench: $(VENV)/dev
	$(BIN)/shoal bench

debian:
	@for tool in $(DEBIAN); do \
	  PATH=$$PATH:/usr/games command -v $$tool >/dev/null || { \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	      apt-get update -qq && apt-get install -y -qq $$tool; \
	    else echo "$$tool is missing: the tests that need it are skipped (apt-get install $$tool)"; fi; }; \
	done

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/core: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/core

# PyTorch comes first and by itself, so that nothing else chooses another build of it.
$(VENV)-torch/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)-torch
	$(VENV)-torch/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)-torch/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[mpi]' \
	  psutil pytest pytest-timeout
	@touch $@

# The newest versions of everything. Golden digests have to be written again with them: make golden
constraints:
	rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet --editable '.[dev]'
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) $(VENV)-torch runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
