# Everything a fresh machine with Python and make needs: `make demo` trains, `make test` tests; both set up by themselves.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# The version of torch in a new environment, and how many tests run at once.
TESTED   := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH    ?= $(TESTED)
PARALLEL ?= 3
INSTALL  := $(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt
# A programme for a GPU, and a Python like that of its machine.
PROGRAMME  ?= A
GPU_PYTHON ?= python3.12
# A thread for each process: several tests run at once, and threads of one that wait for each other take the cores of the next.
# Bytecode is written, whatever the environment says: hundreds of processes load the same modules.
SETTINGS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1
PYTEST   := -m pytest --numprocesses $(PARALLEL) --dist loadfile --no-loadscope-reorder --durations 20
QUICK    := not slow and not soak and not tools and not clusters and not engines

.PHONY: help setup demo test test-slow test-tools test-full coverage test-torch test-decode test-engines test-clusters soak fuzz mutations lint docs bench bench-data bench-checkpoint bench-planner bench-peers bench-gpu gpu-bundle dry-bench clean
.DEFAULT_GOAL := help

help:            ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(READY)  ## Make a virtual environment with vitpar in it, at the tested versions

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
# Another version of torch may require another one of triton.
	sed -e 's/^torch==.*/torch==$(TORCH)/'$(if $(filter $(TESTED),$(TORCH)),, -e '/^triton==/d') constraints.txt > $(VENV)/constraints.txt
	$(INSTALL) torch
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps timm torchvision peft accelerate
	@$(BIN)/python -c 'import torchvision' 2> /dev/null || \
		echo "note: torchvision does not fit this build of torch, so \`import timm\` fails here (tests do without): install both from one index"
# Tests start hundreds of processes at once, which would compile the same files.
	@$(BIN)/python -m compileall -q src cli
	@touch $(READY)

data_shards/digits/dataset.json: | $(READY)
	$(BIN)/vitpar data pack digits data_shards/digits

demo: $(READY) data_shards/digits/dataset.json  ## Train a ViT on real digits: 8 processes, pipeline x tensor x data parallel
	$(BIN)/vitpar train --mesh pp2xtp2xdp2 --microbatches 2 --recipe experiments/digits.toml --device cpu

test: $(READY)   ## Test every feature once, PARALLEL=3 at a time
	$(SETTINGS) $(BIN)/python $(PYTEST) -m '$(QUICK)'

test-slow: $(READY)  ## The slow tests: more plans, kills and hangs, compiled blocks
	$(SETTINGS) $(BIN)/python $(PYTEST) --hypothesis-profile many -m 'slow and not soak'

test-tools: $(READY)  ## Tests of the benchmarks, the fuzzing and mutation harness, and the documentation site
	$(SETTINGS) $(BIN)/python $(PYTEST) -m tools tests/experiments

coverage: $(READY)  ## Lines of the source that `make test` runs, in all of its processes
	$(BIN)/coverage erase
# A test of signals in forks ends pytest itself under coverage's handler of SIGTERM.
	$(SETTINGS) $(BIN)/coverage run $(PYTEST) -m '$(QUICK)' --deselect tests/launch/test_stop_request.py::test_children_and_the_training_loop_have_the_default_actions
	$(BIN)/coverage combine --quiet && $(BIN)/coverage report

# In an environment of its own, which uses the packages of the other: Ray and SkyPilot ask for many.
ENGINES := $(VENV)-engines
test-engines: $(READY)  ## Run the examples for Ray, Lightning, Accelerate, Kubeflow and SkyPilot, and object storage (about 1 GB)
	$(PYTHON) -m venv $(ENGINES)
	$(BIN)/python -c 'import site; print(*site.getsitepackages())' > $(ENGINES)/vitpar.pth
	mv $(ENGINES)/vitpar.pth $(ENGINES)/lib/python*/site-packages/
# botocore, which moto uses, needs an older python-dateutil than the tested one.
	sed '/^python-dateutil==/d' $(VENV)/constraints.txt > $(ENGINES)/constraints.txt
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check -c $(ENGINES)/constraints.txt -e '.[engines]' psutil
	$(ENGINES)/bin/python -m pytest -m engines tests/engines

test-full: $(READY)  ## What test, test-slow and test-tools run, at once, the longest tests first
	$(SETTINGS) $(BIN)/python $(PYTEST) --hypothesis-profile many -m 'not soak and not clusters and not engines'

test-torch:      ## All tests on another version of torch: make test-torch VERSION=2.15.0 (about 6 GB)
	@test -n "$(VERSION)" || { echo "VERSION is missing: make test-torch VERSION=2.15.0"; exit 2; }
	$(MAKE) test-full VENV=.venv-torch-$(VERSION) TORCH=$(VERSION)

test-decode:     ## Decoding by torchcodec, on the CPU, with a CUDA build of torch: make test-decode VERSION=2.14.1 (about 6 GB)
	@test -n "$(VERSION)" || { echo "VERSION is missing: make test-decode VERSION=2.14.1"; exit 2; }
	$(MAKE) setup VENV=.venv-torch-$(VERSION) TORCH=$(VERSION)
	.venv-torch-$(VERSION)/bin/pip install --quiet --disable-pip-version-check 'torchcodec>=0.16'
	.venv-torch-$(VERSION)/bin/python -m pytest tests/data/test_device_decoding.py

test-clusters: $(READY)  ## Real launchers on two hosts in this machine: OpenMPI, SLURM, torchrun; needs root and Debian
	tests/clusters/install.sh
	$(BIN)/python -m pytest -m clusters -rpsfE --no-fold-skipped tests/clusters

soak: $(READY)   ## Hours of tests: 200 faults, searches on 200 clusters, all plans, the complete support matrix, random layerwise plans
	$(BIN)/python -m pytest --hypothesis-profile many -m soak tests
	VITPAR_RANDOM_PLANS=300 $(BIN)/python -m pytest tests/parallel/test_parity.py -k random

fuzz: $(READY)   ## Hostile input for every reader of files, URLs and ports, ten minutes
	$(BIN)/python experiments/fuzz.py $(FUZZ)

mutations: $(READY)  ## Known faults in copies of the source: the check or a test must notice each
	$(BIN)/python experiments/mutations.py $(MUTATIONS)

lint: $(READY)   ## Style, spelling, language and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell && $(BIN)/python experiments/lint_language.py && $(BIN)/mypy

docs: $(READY)   ## Generate pages of docs/ from the source, and build the documentation site into site/
	$(BIN)/python experiments/write_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(READY)  ## Compare speed and memory with hand-written PyTorch
	$(BIN)/python experiments/bench_cpu.py

bench-data: $(READY)  ## Images that a core reads, and the cores that a GPU needs; webdataset with Pillow
	$(BIN)/python experiments/bench_data.py

bench-checkpoint: $(READY)  ## Compare the cost of saving with torch.distributed.checkpoint
	$(BIN)/python experiments/bench_checkpoint.py

bench-planner: $(READY)  ## Duration of plan searches
	$(BIN)/python experiments/bench_planner.py

bench-peers: $(READY)  ## Compare with timm, if it is installed, and plain PyTorch
	$(BIN)/python experiments/bench_peers.py

gpu-bundle: $(READY)     ## Prepare a programme for a GPU: PROGRAMME=A, CIFAR=folder, REHEARSE=1 runs it on the CPU
	$(BIN)/python experiments/gpu_programme.py bundle $(PROGRAMME) $(if $(CIFAR),--cifar $(CIFAR))
	$(if $(REHEARSE),$(BIN)/python experiments/gpu_programme.py rehearse $(PROGRAMME) --python $(GPU_PYTHON))

bench-gpu: $(READY)  ## One CUDA GPU: rates against the chip's limits, JPEG input, fp8
	$(BIN)/python experiments/bench_gpu.py

dry-bench: $(READY)  ## Kernels, bytes and estimated steps of compiled blocks on a GPU, without one: DRY="--gpu A100"; needs triton
	$(BIN)/python experiments/dry_bench.py $(DRY)

clean:           ## Remove the virtual environment, caches and the built site, no data and no runs
	rm -rf $(VENV) $(ENGINES) .venv-torch-* .venv-gpu gpu-bundle site .pytest_cache .mypy_cache .ruff_cache .hypothesis
