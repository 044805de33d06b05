# `make train` and `make test` set up everything by themselves in .venv; with PYTHON=python3 they use that environment as
# it is, and need no network.
SHELL := /bin/bash
PYTHON ?=
ARGS ?=
# Threads that spin while they wait make each other slow on a shared machine: on two cores with six other processes, training
# ran at 610 tokens/s with the default and at 2,260 with this.
export OMP_WAIT_POLICY ?= PASSIVE
SOURCES := pyproject.toml $(wildcard setup.py) $(shell find csrc -type f \( -name '*.cpp' -o -name '*.h' \) 2>/dev/null)

ifeq ($(PYTHON),)
  PY := $(CURDIR)/.venv/bin/python
  READY := .venv/ready
  TEST_READY := .venv/test
  FRAMEWORKS_READY := .venv/frameworks
  DOCS_READY := .venv/docs
else
  ifeq ($(shell command -v '$(PYTHON)'),)
    $(error PYTHON=$(PYTHON) is no program: name a Python that has torch, or leave PYTHON out and make will build .venv)
  endif
  PY := $(PYTHON)
  READY := build/ready$(subst /,-,$(shell $(PYTHON) -c 'import sys; print(sys.prefix)'))
  TEST_READY := $(READY)
  FRAMEWORKS_READY := $(READY)
  DOCS_READY := $(READY)
endif

# An environment is ready for one torch: the stamp is a copy of torch's version file, and goes where torch changed since.
TORCH_VERSION = $(shell $(PY) -c 'from importlib.util import find_spec as find; \
  print(find("torch").origin.replace("__init__", "version"))' 2>/dev/null)
ifneq ($(wildcard $(READY)),)
  $(shell cmp -s '$(TORCH_VERSION)' '$(READY)' || rm -f '$(READY)')
endif

.PHONY: help setup train test test-cpu test-interpreter test-gpu test-ranks lint docs sweep sanitize sanitize-address sanitize-thread memory-check soak bench clean

help: ## list the targets (times are those of two cores)
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(TEST_READY) ## make the environment that all targets but docs need (some minutes, most of them downloads)

train: $(READY) ## train a small language model with dynamic masks (about 5 minutes; ARGS="--steps 100 ...")
	@$(PY) examples/train.py $(ARGS)

test: test-cpu test-interpreter ## run all tests that need no GPU (10 to 20 minutes)

# One worker for each core where pytest-xdist is installed, whole files to each: tests of a file share what is costly to make.
# Two threads in each worker: some tests compare numbers of threads.
WORKERS = $$($(PY) -c 'import xdist' 2>/dev/null && echo --numprocesses=auto --dist=loadfile)
CPU_TESTS = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(PY) -m pytest -m "not gpu and not slow" $(WORKERS)

test-cpu: $(TEST_READY)
	$(CPU_TESTS) tests --ignore=tests/interpreter --ignore=tests/gpu $(ARGS)

# A process of its own: Triton decides at import whether it interprets.
test-interpreter: $(TEST_READY)
	TRITON_INTERPRET=1 $(CPU_TESTS) tests/interpreter $(ARGS)

test-gpu: $(TEST_READY) ## run the tests that need a GPU
	$(PY) -m pytest tests --ignore=tests/interpreter -m gpu $(ARGS)

OF_RANKS = ranks context_parallel context_dynamic context_models context_faults context_agreement document_runs sharding parallelize

# Every worker sees all GPUs: with a share of them, ranks that do not have a GPU each would run on the CPU, by gloo.
test-ranks: $(TEST_READY) ## run the tests of several ranks, by NCCL where there is a GPU for each; ARGS="-n 8" for 8 workers
	DMATTN_TEST_ALL_GPUS=1 $(PY) -m pytest $(OF_RANKS:%=tests/distributed/test_%.py) $(ARGS)

lint: $(TEST_READY) ## check style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(DOCS_READY) ## build the documentation into build/docs; a broken link or a page without a place is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

sweep: $(FRAMEWORKS_READY) ## compile every configuration and compare with the frozen tables, run the slow tests and random problems
	$(PY) -m tests.tools.sweep
	$(PY) -m pytest $(WORKERS) tests --ignore=tests/interpreter -m "slow and not gpu"
	DMATTN_COMPILE_ALL=1 $(PY) -m pytest $(WORKERS) tests/kernels/test_hopper_compile.py tests/kernels/test_hopper_forward_compile.py
	$(PY) -m pytest tests/integrations -m "not slow and not gpu" -k torchao
	TRITON_INTERPRET=1 $(PY) -m pytest $(WORKERS) tests/interpreter -m slow
	$(PY) -m dmattn_ops.testing --cases 2000 $(ARGS)

sanitize: export DMATTN_SANITIZE_CASES ?= 2000
sanitize: sanitize-address sanitize-thread ## run the tests of the C++ kernels and random problems under sanitizers (20 minutes)

sanitize-address: $(TEST_READY) ## the same with AddressSanitizer and UndefinedBehaviorSanitizer alone, and fewer problems (4 minutes)
	csrc/sanitize.sh address $(PY) $(WORKERS) $(ARGS)

sanitize-thread: $(TEST_READY)
	csrc/sanitize.sh thread $(PY) $(WORKERS) $(ARGS)

memory-check: $(TEST_READY) ## run every kernel under compute-sanitizer on a GPU; results go to memory_check.json (20 minutes)
	$(PY) -m tests.tools.memory_check $(ARGS)

soak: $(TEST_READY) ## make calls of all kinds for 8 minutes, each checked; results go to soak.json
	$(PY) -m tests.tools.soak $(ARGS)

bench: $(READY) ## measure against the peers; results go to benchmarks/results
	@$(PY) -c 'import pynvml' 2>/dev/null || echo "without nvidia-ml-py, clock and power are left out"
	$(PY) benchmarks/bench_dense.py
	$(PY) benchmarks/bench_masks.py
	$(PY) benchmarks/bench_masks.py --table proportional
	$(PY) benchmarks/bench_masks.py --table elements
	$(PY) benchmarks/bench_architectures.py
	$(PY) benchmarks/bench_features.py
	$(PY) benchmarks/bench_overhead.py
	$(PY) benchmarks/bench_dynamic.py --minutes 30
	$(PY) benchmarks/bench_intervals.py --minutes 30
	$(PY) benchmarks/bench_trees.py
	$(PY) benchmarks/bench_selection.py
	$(PY) benchmarks/bench_generation.py
	$(PY) benchmarks/bench_training.py
	$(PY) benchmarks/bench_transformers.py
	$(PY) benchmarks/benchmark_bubble_reduction.py

clean: ## remove what was built, the environment included
	rm -rf .venv build dist ./*.egg-info dmattn_ops/*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. Where there is no NVIDIA GPU, the newest CPU build of torch that pip can see is enough: it is a tenth of
# the size. It brings no Triton; the tests compile the CUDA kernels with the version whose registers and spills they freeze.
# Training needs neither Triton nor what else the tests need, which is larger than the CPU build of torch.
TRITON := triton==3.6.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := .venv/bin/python -m pip --disable-pip-version-check

.venv/torch:
	@echo "making the environment .venv"
	@python3 -m venv .venv
	@torch='torch>=2.11'; \
	if ! command -v nvidia-smi >/dev/null; then \
	  reach='import urllib.request; urllib.request.urlopen("$(CPU_INDEX)/", timeout=10)'; \
	  if .venv/bin/python -c "$$reach" 2>/dev/null; then more="--extra-index-url $(CPU_INDEX)"; fi; \
	  cpu=$$($(PIP) index versions torch $$more 2>/dev/null | grep -oE '[0-9.]+\+cpu' | head -n 1 || true); \
	  torch=$${cpu:+torch==$$cpu}; torch=$${torch:-torch>=2.11}; \
	fi; \
	echo "installing $$torch (a minute or more)"; \
	$(PIP) install --quiet "$$torch" 'setuptools>=77' $$more
	@touch $@

# What is built serves every torch and every Python (setup.py). Where the library could not be built, the package works
# without it, slowly on the CPU: then it says why.
define MARK_READY
@$(PY) -c 'from dmattn_ops.kernels import native; print("ready" if native.available() else f"SLOW ON THE CPU: {native.reason()}")'
@mkdir -p $(@D) && cp '$(TORCH_VERSION)' $@
endef

.venv/ready: .venv/torch $(SOURCES)
	@echo "installing what training needs, and building the C++ kernels (some minutes on two cores)"
	@$(PIP) install --quiet -e '.[train]' --no-build-isolation
	$(MARK_READY)

.venv/test: .venv/ready
	@echo "installing what the tests need, 1 GB with Triton and transformers (a minute or more)"
	@case $$($(PY) -c 'import torch; print(torch.__version__)')-$$(uname) in *+cpu-Linux) more='$(TRITON)';; esac; \
	$(PIP) install --quiet -e '.[test,train]' --no-build-isolation $$more
	@touch $@

.venv/frameworks: .venv/test
	@echo "installing torchao, whose tests are a part of the sweep"
	@$(PIP) install --quiet -e '.[frameworks]' --no-build-isolation
	@touch $@

.venv/docs: .venv/ready
	@echo "installing what builds the documentation"
	@$(PIP) install --quiet -e '.[docs]' --no-build-isolation
	@touch $@

build/ready%: $(SOURCES)
	@$(PY) -c 'import torch' || { echo "$(PY) has no torch: leave PYTHON out, and make will build .venv"; exit 1; }
	@echo "installing into the environment of $(PY), and building the C++ kernels for its torch (some minutes on two cores)"
	@$(PY) -m pip install --quiet -e . --no-build-isolation --no-deps || { \
	  echo "Could not install into the environment of $(PY) (is it writable, with setuptools >= 77?)."; \
	  echo "Use one of your own, which sees what is installed there:"; \
	  echo "    $(PY) -m venv --system-site-packages DIR"; \
	  echo "    DIR/bin/python -m pip install --upgrade 'setuptools>=77'"; \
	  echo "    make $(MAKECMDGOALS) PYTHON=DIR/bin/python"; \
	  exit 1; }
	$(MARK_READY)
