# Works on a fresh machine: every target but `clean` begins with `make setup`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GPU_DRIVER := $(or $(wildcard /proc/driver/nvidia),$(wildcard /dev/kfd))
# A machine without an NVIDIA or AMD driver gets the release of torch that the tests run on.
CONSTRAINTS := $(if $(GPU_DRIVER),/dev/null,constraints-cpu.txt)
COMMA := ,
# pip's own torch is CUDA's: on a machine with AMD GPUs alone it would find none of them.
ROCM_ALONE := $(if $(wildcard /proc/driver/nvidia),,$(wildcard /dev/kfd))
NEEDS_ROCM := { echo "error: install PyTorch 2.11 to 2.13 for ROCm into $(VENV) (see pytorch.org), then run make again" >&2; exit 2; }
# pip would download gigabytes before it says so.
NEW_ENOUGH := import sys; sys.version_info >= (3, 11) or sys.exit("error: " + sys.executable + " is Python %d.%d, and 3.11 or \
	later is needed; name one with PYTHON=, and remove $(VENV) if it is there" % sys.version_info[:2])
# An image's Python brings its vendor's PyTorch, which a virtual environment sees where it is not in one itself.
FROM_IMAGE := $(shell $(PYTHON) -c "import sys; from importlib.metadata import version; \
	version('torch'); print('--system-site-packages' * (sys.prefix == sys.base_prefix))" 2>/dev/null)
# What is there before the first setup stays there, also while pip resolves the rest.
KEPT := $(VENV)/.kept
KEEP_TORCH := $(BIN)/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" \
	>$(KEPT) 2>/dev/null || true
# A line for each package: minutes without one look like a hang. What is there already, and pip's warnings of other folders, are no news.
NO_NEWS := ^(WARNING: |Requirement already satisfied|Looking in |Obtaining |  Using cached |  Preparing metadata|  Checking if )
PIP_INSTALL = pip_install() { { $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	-c $$(test -s $(KEPT) && echo $(KEPT) || echo $(CONSTRAINTS)) "$$@" 2>&1; echo $$? >$(VENV)/.status; } \
	| grep --line-buffered -vE '$(NO_NEWS)'; return $$(cat $(VENV)/.status); }; pip_install
EXTRAS := dev,hf$(if $(GPU_DRIVER),$(COMMA)gpu)
TEXT ?=
RDMA_MINUTES ?= 10
VERSIONS ?=
# How many processes run test files side by side: two a core, because most tests wait for other processes. 0: none do.
# Tests on GPUs have them to themselves.
TEST_WORKERS ?= $(if $(GPU_DRIVER),0,$(shell echo $$(( 2 * $$(nproc) ))))
# A file's tests stay together, because they share runs. The longest come first in the order of their names.
SIDE_BY_SIDE = -n $(TEST_WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Images that set it would have every process that a test starts compile this checkout anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all test-gpu test-rdma test-versions lint docs wheel clean

setup: $(STAMP)

CC_FOUND := $(shell command -v $(firstword $(CC)) || command -v gcc || command -v clang)
IN_C := $(wildcard hetero/native/*.c hetero/native/*.h)
# The links' library is in C. Where there is no compiler, one from PyPI builds it.
ZIGLANG := $(if $(CC_FOUND),,ziglang)

$(STAMP): requirements.txt constraints-cpu.txt pyproject.toml setup.py $(IN_C)
	@$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -c '$(NEW_ENOUGH)'
	@echo "setup, 1 of 3: the virtual environment $(VENV), with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(FROM_IMAGE) $(VENV)
	@$(if $(wildcard $(STAMP)),,$(KEEP_TORCH))
	@$(if $(ROCM_ALONE),$(BIN)/python -c "import torch; assert torch.version.hip" 2>/dev/null || $(NEEDS_ROCM))
	@echo "setup, 2 of 3: what builds the library of links"
	@$(PIP_INSTALL) "setuptools>=77.0.3" $(ZIGLANG)
	@echo "setup, 3 of 3: PyTorch and the rest, of 1.5 to 5 GB; two to five minutes"
	@$(PIP_INSTALL) --no-build-isolation -e ".[$(EXTRAS)]"
	@touch $(STAMP)
	@echo "setup: done; source $(BIN)/activate"

demo: setup
	$(BIN)/python examples/quickstart/demo.py $(if $(TEXT),--text "$(TEXT)")

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hetero megatron/hetero bench examples pretrain_gpt.py

test: lint
	$(BIN)/python -m pytest -m "not slow" $(SIDE_BY_SIDE)

test-all: lint
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# On a machine with GPUs: the first thing to run on an AMD one. With one GPU both ends of a link share it, and what needs
# two is skipped with a line.
test-gpu: setup
	$(BIN)/python -m pytest -m "gpu and not slow"

# RDMA between emulated NICs, in an emulated machine that is booted for it and ended after RDMA_MINUTES. It
# needs root on Debian; anywhere else it says that it was skipped.
test-rdma: setup
	$(BIN)/python -m tests.rdma.machine.boot --minutes $(RDMA_MINUTES) $(RDMA_FLAGS)

# The fast tests on every release of megatron-core and every Python that is found, in environments below .cache/versions
# (5 GB for each Python). VERSIONS chooses: VERSIONS="--releases 0.19.0 --pythons python3.12 -- tests/megatron".
test-versions: setup
	$(BIN)/python bench/run_versions.py $(VERSIONS)

# The variable silences an advertisement that the theme prints at every build.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "built; to read it with its search: $(BIN)/python -m http.server -d .cache/site"

# The sdist and a wheel for each machine, in dist/. The library is compiled for an old glibc, whatever this machine has,
# and auditwheel sees that the tag is true.
MACHINES ?= x86_64 aarch64
GLIBC := 2.17
TAG := manylinux_$(subst .,_,$(GLIBC))

wheel: setup
	$(PIP_INSTALL) --no-build-isolation -e ".[wheel]"
	set -e; for machine in $(MACHINES); do \
		CC="$(abspath $(BIN))/python -m ziglang cc -target $$machine-linux-gnu.$(GLIBC)" \
			$(BIN)/python -m build --no-isolation -C--build-option=--plat-name=$(TAG)_$$machine; \
		$(BIN)/python -m auditwheel show dist/*-py3-none-$(TAG)_$$machine.whl | grep "$(TAG)_$$machine"; \
	done

clean:
	rm -rf $(VENV) runs .cache build dist
