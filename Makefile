# Everything happens in a virtual environment inside the checkout; nothing outside it is touched.
#
#   make quickstart   set up, train the starter model with reinforcement learning in INT8, show the result
#   make test         set up, run the quick tests: all parts, and a run of each kind
#   make test-all     all tests: whole grids, kills and soaks too, and test-triton
#   make test-rest    what the quick tests leave out; with MOST_SECONDS=N none begins after so many
#   make test-triton  compile the kernels with the Triton that torch brings on a GPU, which is older than the one for tests
#   make lint         ruff, pyright, the import rules and the limits of the structure
#   make docs         write the figures and pictures of the documentation, and build it as a site, in site/
#   make figures      write the figures and pictures alone, and tighten tools/structure/gates.toml to them
#   make schema       write docs/*.schema.json and the tables of docs/metrics.md
#   make lock         write requirements.lock, constraints.txt with hashes, and constraints-hopper.txt
#   make clean        remove the environment and the caches (never runs/)
#
# PYTHON        the interpreter to use, 3.11 to 3.13
# TORCH_INDEX   an index of CPU builds of torch, for example https://download.pytorch.org/whl/cpu; empty is pip's own index
# GPU           GPU=1 installs the pair of torch and DeepGEMM for Hopper GPUs (docs/install.md)
# TEST_WORKERS  processes of the test suite, of a thread each: one more than cores, since some tests wait

PYTHON ?= python3
TORCH_INDEX ?=
GPU ?=
TEST_WORKERS ?= 3

VENV := .venv
comma := ,
PIP := $(VENV)/bin/python -m pip
READY := $(VENV)/.ready$(if $(GPU),-hopper)
CONSTRAINTS := constraints$(if $(GPU),-hopper).txt
RUN := runs/quickstart
PIP_INSTALL := $(PIP) install --disable-pip-version-check --constraint $(CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help setup quickstart test test-all test-rest test-triton lint figures docs schema lock clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 13) else f"$(PYTHON) is Python {sys.version.split()[0]}; Isobit needs 3.11 to 3.13: make PYTHON=python3.12 ...")'
	@echo "== setting up $(VENV) with $$($(PYTHON) --version); the first time takes some minutes and about 1.5 GB of disk"
	$(PYTHON) -m venv $(VENV)
	@# pycosat, which reasoning-gym needs for one task, comes as C source only.
	$(PIP_INSTALL) --quiet pycosat 2>/dev/null || { echo "== pycosat cannot be compiled here; reasoning-gym's zebra_puzzles will be missing"; $(PIP_INSTALL) --quiet ./packaging/pycosat; }
	$(PIP_INSTALL) --progress-bar off --editable '.[dev$(if $(GPU),$(comma)hopper)]'
	@rm -f $(VENV)/.ready*; touch $@

quickstart: $(READY)
	@if [ -e $(RUN) ]; then moved=$(RUN)-$$(date +%Y%m%d-%H%M%S); mv $(RUN) $$moved; echo "== the previous run is now in $$moved"; fi
	$(VENV)/bin/isobit train recipes/quickstart.toml --output $(RUN)

# Dozens of their processes would compile the same modules, each for itself; where CI is set, pytest
# shows the whole difference of two values, which takes difflib hours for what runs leave.
PYTEST := PYTHONDONTWRITEBYTECODE= CI= BUILD_NUMBER= $(VENV)/bin/pytest --numprocesses $(TEST_WORKERS) --dist worksteal --quiet

test: $(READY)
	$(PYTEST)

test-all: test test-rest
	$(MAKE) test-triton

test-rest: $(READY)
	$(PYTEST) --rest $(if $(MOST_SECONDS),--seconds $(MOST_SECONDS))

# Its compiler, with the assemblers of the newer one, by which registers and spills are counted.
USERS_TRITON := $(VENV)/triton-$(shell sed -n 's/^triton==\([0-9.]*\).*/\1/p' constraints-hopper.txt)
tools_of = $(wildcard $(VENV)/lib/python3*/site-packages/triton/backends/nvidia/bin)
$(USERS_TRITON): $(READY)
	$(PIP) install --disable-pip-version-check --quiet --no-deps --target $@ triton==$(patsubst $(VENV)/triton-%,%,$@)

test-triton: $(USERS_TRITON)
	PYTHONPATH=$(USERS_TRITON) TRITON_PTXAS_PATH=$(tools_of)/ptxas TRITON_PTXAS_BLACKWELL_PATH=$(tools_of)/ptxas-blackwell \
		TRITON_CUOBJDUMP_PATH=$(tools_of)/cuobjdump TRITON_NVDISASM_PATH=$(tools_of)/nvdisasm $(PYTEST) tests/kernels -k 'compile or lowering'

lint: $(READY)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tools.structure --check

schema: $(READY)
	$(VENV)/bin/isobit schema train > docs/run.schema.json
	$(VENV)/bin/isobit schema sft > docs/sft.schema.json
	$(VENV)/bin/python -m tools.metrics_page

figures: $(READY)
	$(VENV)/bin/python -m tools.structure --write
	$(VENV)/bin/python -m tools.pictures
	$(VENV)/bin/python -m tools.quickstart_figures

docs: figures
	$(PIP_INSTALL) --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "== the site is in site/index.html"

lock: $(READY)
	$(PIP_INSTALL) --quiet uv
	$(VENV)/bin/uv pip compile pyproject.toml --extra dev --extra docs --constraint constraints.txt --universal --python-version 3.11 \
		--generate-hashes --no-annotate --quiet --custom-compile-command "make lock" --output-file requirements.lock
	@# torch 2.11, which the extra pins, brings its own Triton and older setuptools.
	grep -vE '^(torch|triton|setuptools)==' constraints.txt | $(VENV)/bin/uv pip compile pyproject.toml --extra dev --extra docs --extra hopper --constraint - \
		--universal --python-version 3.11 --strip-extras --no-annotate --quiet --custom-compile-command "make lock" --output-file constraints-hopper.txt

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks experiments tools -name __pycache__ -type d -prune -exec rm -rf {} +
