# make install · make install-gpu · make demo · make test · make test-all · make quick · make simulate · make fuzz · make chaos · make chaos-network · make parity · make results · make reference · make screenshots · make docs · make lint · make format · make lock · make clean
#
# Each of them makes its own environment .venv first; that takes minutes once and nothing afterwards.

PYTHON ?= python3
UV_VERSION := 0.13.8
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export UV_HTTP_TIMEOUT ?= 300
# Without bytecode every start of a worker compiles its imports again, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE
# An active environment must not be mistaken for ours.
unexport VIRTUAL_ENV PYTHONHOME

.PHONY: help install install-gpu demo test test-all quick simulate fuzz chaos chaos-network parity results reference screenshots docs lint format lock upgrade clean
.DELETE_ON_ERROR:

help:
	@echo "make demo     train the small world and write its report (minutes, two CPU cores)"
	@echo "make test     unit tests, simulated runs, runs and kills on a real Ray: about a quarter of an hour on two cores"
	@echo "make test-all everything, with the slow ones"
	@echo "make quick    tests of configuration and decisions, under a minute; while working"
	@echo "make simulate runs of the real controller in virtual time with faults; SEEDS=a..b (docs/reference/failures.md)"
	@echo "make fuzz     alter the bytes of every format that is read, a million times; MUTATIONS, FUZZ_SEED"
	@echo "make chaos    kill processes and nodes of a run at random for a quarter of an hour (docs/reference/failures.md)"
	@echo "make chaos-network  a run on three nodes whose network is slow, narrow or cut; CASES (Linux, no root needed)"
	@echo "make parity   rewards beside the packages that they replace, in an environment of their own"
	@echo "make results  tables and figures of docs/results again from benchmarks/results, without a GPU"
	@echo "make reference  generated pages of docs/reference and drawings of docs/images, from the code"
	@echo "make screenshots  the demo's report, live view and dashboard for the documents; a whole demo and a browser"
	@echo "make docs     the documentation as a site, in build/site"
	@echo "make lint     formatter, linter, types and layers, without changing anything"
	@echo "make format   format and apply the linter's safe fixes"
	@echo "make install-gpu  the environment with Transformer Engine, for NVFP4 on Blackwell cards; Linux with CUDA"
	@echo "make lock     pin the versions of pyproject.toml again; make upgrade takes the newest"
	@echo "make clean    remove the environment and caches, never runs/"

install: $(READY)

$(BIN)/uv:
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "error: $(PYTHON) was not found; install Python 3.11, 3.12 or 3.13 and name it: make PYTHON=python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "error: $(PYTHON) is $$("$(PYTHON)" -V), but Python 3.11, 3.12 or 3.13 is needed; name one: make PYTHON=python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	"$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)

# The lock also pins what source distributions are built with. A file that has none of its hashes is refused.
$(READY): $(BIN)/uv requirements.lock pyproject.toml
	$(BIN)/uv pip sync --python $(BIN)/python --compile-bytecode --build-constraints requirements.lock requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --build-constraints requirements.lock --editable .
	@touch $@

# What NVFP4 needs on a Linux machine with CUDA. The PyTorch part of Transformer Engine is fetched for the torch of the lock,
# or compiled (minutes) with the headers of NVIDIA's packages; hence after all others, and not isolated from them.
GPU_LOCK := requirements-gpu.lock
GPU_READY := $(VENV)/.ready-gpu
SITE = $(abspath $(VENV))/lib/$$($(BIN)/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')/site-packages
install-gpu: $(GPU_READY)
$(GPU_READY): $(READY) $(GPU_LOCK)
	sed '/^transformer-engine-torch/,/[^\\]$$/d' $(GPU_LOCK) | $(BIN)/uv pip install --python $(BIN)/python --no-deps --requirements -
	CPATH="$(SITE)/nvidia/cu13/include/cccl:$(SITE)/include" NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 \
	  $(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --requirements $(GPU_LOCK)
	@touch $@

# An interrupted demo is continued; a finished one stays, and the next gets a number.
demo: $(READY)
	@set -e; name=demo; number=1; \
	while [ -e runs/$$name/summary.json ]; do number=$$((number + 1)); name=demo-$$number; done; \
	if [ -e runs/$$name/config.yaml ]; then \
	  echo "runs/$$name was interrupted: continuing it"; $(BIN)/solrl train --resume runs/$$name; \
	else \
	  $(BIN)/solrl train configs/demo.yaml --set run.name=$$name; \
	fi

# Two processes each. Each of those with system and chaos tests has a local Ray of its own; the undisturbed run that the
# others must equal, and the process of which workers are forks, are there once. Whoever has a GPU wants it alone; where
# there is no device file of one, tests/gpu would only be skipped.
test: CHOSEN := not slow
test-all: CHOSEN := slow or not slow
GPU := $(if $(wildcard /dev/nvidia[0-9]* /dev/dxg),"tests/gpu")
PARTS := "-n 2 --dist worksteal tests/unit tests/simulated" "-n 2 --dist loadfile tests/system tests/chaos" $(GPU)
test test-all: $(READY)
	@set -e; \
	for part in $(PARTS); do \
	  echo "== $$part"; began=$$(date +%s); \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=15 -m "$(CHOSEN)" $$part; \
	  echo "== $$part took $$(($$(date +%s) - began)) s"; \
	done

# What most changes touch, of the tests that need neither Ray nor a model.
QUICK := $(addprefix tests/unit/,config scheduling rollout sampling prompts)
quick: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 $(QUICK)

SEEDS ?= 0..10000
MUTATIONS ?= 1000000
FUZZ_SEED ?= 1
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --mutations $(MUTATIONS) --seed $(FUZZ_SEED)

simulate: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulated.campaign $(SEEDS)

CHAOS_SECONDS ?= 900
CHAOS_SEED ?= 1
chaos: $(READY)
	$(BIN)/python -m tests.chaos.soak --seconds $(CHAOS_SECONDS) --seed $(CHAOS_SEED)

CASES ?=
chaos-network: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.network $(CASES)

# Packages whose own requirements clash with current tools: without them, and with what their code needs.
PARITY := .parity
$(PARITY)/.ready: $(BIN)/uv requirements.lock
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(PARITY)
	$(BIN)/uv pip install --python $(PARITY)/bin/python $$(sed -nE 's/^((torch|torchvision|pillow)==[^ ]+).*/\1/p' requirements.lock) \
	  transformers==4.40.2 timm==0.6.13 ftfy regex clint requests 'huggingface-hub<1' setuptools
	$(BIN)/uv pip install --python $(PARITY)/bin/python --no-deps hpsv2==1.2.0 image-reward==1.5
	@touch $@

# The hpsv2 wheel lacks its vocabulary; open_clip's is the same file.
parity: $(READY) $(PARITY)/.ready
	@to=$$($(PARITY)/bin/python -c 'import importlib.util as i; print(i.find_spec("hpsv2").submodule_search_locations[0])'); \
	from=$$($(BIN)/python -c 'import importlib.util as i; print(i.find_spec("open_clip").submodule_search_locations[0])'); \
	cp "$$from/bpe_simple_vocab_16e6.txt.gz" "$$to/src/open_clip/"
	$(BIN)/python benchmarks/parity/compare.py $(PARITY)/bin/python

results: $(READY)
	$(BIN)/python benchmarks/results_page.py
	$(BIN)/python benchmarks/plots.py

reference: $(READY)
	$(BIN)/python docs/reference_pages.py
	$(BIN)/python docs/drawings.py

screenshots: $(READY)
	$(BIN)/python docs/screenshots.py

# Its theme announces on each build that it has a successor.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY)
	$(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

COMPILE := pip compile pyproject.toml --universal --python-version 3.11 --no-annotate --no-emit-index-url \
	--no-emit-find-links --generate-hashes --custom-compile-command "make lock" --quiet

# The GPU lock has the versions of the other one, and what NVFP4 needs beside them.
lock upgrade: $(BIN)/uv
	$(BIN)/uv $(COMPILE) --extra dev --output-file requirements.lock $(if $(filter upgrade,$@),--upgrade)
	$(BIN)/uv $(COMPILE) --extra nvfp4 --extra rewards --constraints requirements.lock --output-file $(GPU_LOCK) \
	  $(if $(filter upgrade,$@),--upgrade)

clean:
	rm -rf $(VENV) $(PARITY) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis build dist *.egg-info
	find solrl_ray actors tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
