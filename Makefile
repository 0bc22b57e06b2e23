# make install · make install-gpu · make demo · make test · make test-all · make quick · make simulate · make fuzz · make chaos · make chaos-network · make parity · make results · make reference · make screenshots · make docs · make lint · make format · make lock · make clean
#
# Each target first creates the environment .venv if it is missing or outdated, which takes minutes once.

PYTHON ?= python3
UV_VERSION := 0.13.8
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export UV_HTTP_TIMEOUT ?= 300
# Without bytecode each worker recompiles its imports when it starts, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE
# Do not install into another environment that happens to be active.
unexport VIRTUAL_ENV PYTHONHOME

.PHONY: help install install-gpu demo test test-all quick simulate fuzz chaos chaos-network parity results reference screenshots docs lint format lock upgrade clean
.DELETE_ON_ERROR:

help:
	@echo "make demo     train on the testbed and write a report (minutes on two CPU cores)"
	@echo "make test     unit tests, simulated runs, and runs with kills on a real Ray: about a quarter of an hour on two cores"
	@echo "make test-all all tests, including the slow ones"
	@echo "make quick    unit tests of five packages, under a minute: for use while editing"
	@echo "make simulate run the real controller in virtual time with injected faults; SEEDS=a..b (docs/reference/failures.md)"
	@echo "make fuzz     read files of every format with altered bytes, a million times; MUTATIONS, FUZZ_SEED"
	@echo "make chaos    kill random processes and nodes of a run for a quarter of an hour (docs/reference/failures.md)"
	@echo "make chaos-network  run on three nodes with a slow, narrow or cut network; CASES (Linux, no root needed)"
	@echo "make parity   compare our rewards with the original packages, installed in a separate environment"
	@echo "make results  regenerate the tables and figures of docs/results from benchmarks/results, without a GPU"
	@echo "make reference  regenerate docs/reference and the drawings of docs/images from the code"
	@echo "make screenshots  run the demo and take images of its report, live view and dashboard (needs a browser)"
	@echo "make docs     build the documentation site in build/site"
	@echo "make lint     check format, lint, types and layers, without changing anything"
	@echo "make format   format the code and apply the linter's safe fixes"
	@echo "make install-gpu  add Transformer Engine to the environment, for NVFP4 on Blackwell GPUs; Linux with CUDA"
	@echo "make lock     update requirements.lock after a change of pyproject.toml; make upgrade takes the newest versions"
	@echo "make clean    remove the environment and caches, never runs/"

install: $(READY)

$(BIN)/uv:
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "error: $(PYTHON) was not found; install Python 3.11, 3.12 or 3.13 and choose it: make PYTHON=python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "error: $(PYTHON) is $$("$(PYTHON)" -V), but Python 3.11, 3.12 or 3.13 is needed; choose one: make PYTHON=python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot create virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	"$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)

# The lock also pins the build requirements of source distributions. A file with another hash is refused.
$(READY): $(BIN)/uv requirements.lock pyproject.toml
	$(BIN)/uv pip sync --python $(BIN)/python --compile-bytecode --build-constraints requirements.lock requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --build-constraints requirements.lock --editable .
	@touch $@

# Packages for NVFP4, on Linux with CUDA. The PyTorch package of Transformer Engine is downloaded for the torch of the lock
# or compiled in minutes. Compiling needs torch and the headers of NVIDIA's packages: so it is installed last and without
# build isolation.
GPU_LOCK := requirements-gpu.lock
GPU_READY := $(VENV)/.ready-gpu
SITE = $(abspath $(VENV))/lib/$$($(BIN)/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')/site-packages
install-gpu: $(GPU_READY)
$(GPU_READY): $(READY) $(GPU_LOCK)
	sed '/^transformer-engine-torch/,/[^\\]$$/d' $(GPU_LOCK) | $(BIN)/uv pip install --python $(BIN)/python --no-deps --requirements -
	CPATH="$(SITE)/nvidia/cu13/include/cccl:$(SITE)/include" NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 \
	  $(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --requirements $(GPU_LOCK)
	@touch $@

# Resumes an interrupted demo. A finished one is kept, and the next one gets a number.
demo: $(READY)
	@set -e; name=demo; number=1; \
	while [ -e runs/$$name/summary.json ]; do number=$$((number + 1)); name=demo-$$number; done; \
	if [ -e runs/$$name/config.yaml ]; then \
	  echo "runs/$$name was interrupted: continuing it"; $(BIN)/solrl train --resume runs/$$name; \
	else \
	  $(BIN)/solrl train configs/demo.yaml --set run.name=$$name; \
	fi

# Each line of PARTS runs in two processes, GPU tests in one. Each process with system and chaos tests starts its own local
# Ray, but they share one undisturbed run, to which the others must be equal, and one process of which workers are forks.
# tests/gpu is left out on machines without a GPU's device file.
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

# Tests of the packages that most changes touch; they need neither Ray nor a model.
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

# The requirements of hpsv2 and image-reward clash with current versions: install both without, and add the imports they use.
PARITY := .parity
$(PARITY)/.ready: $(BIN)/uv requirements.lock
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(PARITY)
	$(BIN)/uv pip install --python $(PARITY)/bin/python $$(sed -nE 's/^((torch|torchvision|pillow)==[^ ]+).*/\1/p' requirements.lock) \
	  transformers==4.40.2 timm==0.6.13 ftfy regex clint requests 'huggingface-hub<1' setuptools
	$(BIN)/uv pip install --python $(PARITY)/bin/python --no-deps hpsv2==1.2.0 image-reward==1.5
	@touch $@

# The hpsv2 wheel lacks its vocabulary; open_clip has the same file.
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

# Silences the theme's notice about MkDocs 2, which it prints on each build.
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

# The GPU lock has the versions of requirements.lock, plus the packages for NVFP4.
lock upgrade: $(BIN)/uv
	$(BIN)/uv $(COMPILE) --extra dev --output-file requirements.lock $(if $(filter upgrade,$@),--upgrade)
	$(BIN)/uv $(COMPILE) --extra nvfp4 --extra rewards --constraints requirements.lock --output-file $(GPU_LOCK) \
	  $(if $(filter upgrade,$@),--upgrade)

clean:
	rm -rf $(VENV) $(PARITY) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis build dist *.egg-info
	find solrl_ray actors tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
