# `make help` lists every target with its variables. SCRIPT, WORKDIR, RUNS_DIR and RESUME run your own script in place of
# RECIPE (docs/your-own.md). PYTHON is the Python that .venv is created with.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# Variables reach programs as typed: by the environment, never expanded by make or by a shell. scripts/make.py reads them.
$(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),\
	$(eval override $(name) := $$(value $(name)))$(eval export $(name))))

.PHONY: help list setup run new shards export bench commbench plan report evidence doctor image image-lock push submit horovod compare same drill slurm-up slurm-down slurm-status k8s k8s-delete test test-all lint audit format lock clean

help: ## List the targets
	@awk '/^##@ / { print "\n" substr($$0, 5) } /^#: / { printf "%18s%s\n", "", substr($$0, 4) } \
		/^[a-z0-9-]+: ## / { printf "  %-13s %s\n", substr($$1, 1, length($$1) - 1), substr($$0, index($$0, "##") + 3) }' Makefile

##@ Start

list: ## List the recipes, a line each

setup: ## Create .venv with the exact packages that recipes need
	@scripts/dev/setup.sh run

horovod: ## Build Horovod for the torch of .venv, or take it from a cache

new: ## Copy a recipe under a new name, with a test
#: NAME=mine FROM=ddp

shards: ## Pack an image folder into a few large files
#: DATA_DIR=/data/imagenet OUT=/data/imagenet-shards

##@ Train

run: ## Run a recipe on this machine, in containers (WITH=docker), or your own script
#: RECIPE=ddp NODES=2 NPROC_PER_NODE=1 NAME=mine ARGS="--epochs 3"
#: default: 1 node, 1 process per GPU, else 1; ARGS=--help lists a recipe's options
#: MIN_NODES=1 MAX_RESTARTS=3 elastic; SCRIPT=train.py RUNS_DIR=runs RESUME=auto

submit: ## Submit a recipe to Slurm by submitit, or train here with LOCAL=1
#: RECIPE=ddp NODES=2 GPUS=8 TIME=2:00:00 PARTITION=gpu SWEEP="lr=0.1,0.2"
#: CPUS=12 MEM=64GB CONSTRAINT=... ACCOUNT=... QOS=... as in docs/submitit.md

k8s: ## Run a recipe on a Kubernetes cluster, or print its manifest with RENDER=1
#: RECIPE=ddp NODES=4 GPUS=8 KIND=pytorchjob IMAGE=... NAME=mine ARGS="--epochs 3"
#: COMPONENTS="kueue rdma" FABRIC=ib NAMESPACE=... as in k8s/README.md

k8s-delete: ## Delete a job from the cluster; its record stays on the volume
#: NAME=mine

export: ## Write the weights of a checkpoint to one file, for inference
#: RUN=runs/ddp-001 OUT=model.pt

##@ Check a cluster

doctor: ## Check nodes before training: what is wrong, and how to fix it
#: NODES=2 NPROC_PER_NODE=1 ARGS="--json FILE"

commbench: ## Measure all-reduce, broadcast and all-gather over sizes
#: NODES=2 BACKENDS="gloo mpi" ARGS="--link-gbit 10"

drill: ## Plant faults in real jobs and measure the recovery
#: FAULTS="kill-rank truncate" NODES=2 ROUNDS=50 SEED=3

slurm-up: ## Start a real Slurm cluster on this machine, as root
#: NODES=3

slurm-status: ## Show the nodes and jobs of that cluster
	@scripts/lab/slurm_cluster.sh status

slurm-down: ## Stop that cluster and its jobs
	@scripts/lab/slurm_cluster.sh down

##@ Compare and plan

compare: ## Run recipes side by side
#: RECIPES="single ddp" NODES=2 ARGS="--epochs 10"

same: ## Check that your own script trains the same at 1, 2 and 3 processes
#: SCRIPT=train.py ARGS="--batch-size {local_batch}" GLOBAL_BATCH=48 RESUME=auto
#: WORLD_SIZES="1 2 3" STOP_AFTER=20 LOSS=... LAUNCH=... as in docs/same.md

plan: ## Predict step time, memory, hours and cost of a job of any size
#: RECIPE=ddp MODEL=resnet50 NODES=512 GPUS=8 FABRIC=ib-400
#: CHECK=1 compares with real runs here, CHECK=mlperf with published runs

bench: ## Measure speed against the machine's limits and other tools
#: PARTS="small-data wire" ROUNDS=5

report: ## Render the figures of bench: docs/benchmarks/README.md and the table in README.md

evidence: ## Check the claims of the documents, and write docs/evidence.md
#: CLAIMS="one-curve exact-evaluation" runs some; ARGS go to pytest
#: REPORT=report.xml: results of make test-all ARGS=--junit-xml=report.xml

##@ Images

image: ## Build the image of a recipe
#: RECIPE=ddp BASE_IMAGE=... BUILD_IMAGE=... APT_SNAPSHOT=... REGISTRY=... TAG=...
#: ATTEST=1 REGISTRY=... builds and pushes, with SBOM and provenance

image-lock: ## Resolve the base images to digests, in docker/images.lock
	@docker/image.sh lock

push: ## Push the image of a recipe
#: RECIPE=ddp REGISTRY=registry.example.com/team TAG=1

##@ Develop

test: ## Run the quick tests (minutes), which need neither root nor a cluster
#: ARGS="-k resume -x"

test-all: ## Run all tests
#: REQUIRE=slurm,docker turns a skip into a failure; COVERAGE=1 measures coverage

lint: ## Check formatting, names, types, shell scripts and YAML
	@scripts/dev/setup.sh dev
	@scripts/dev/lint.sh

format: ## Let ruff format the code
	@scripts/dev/setup.sh dev
	@.venv/bin/python -m ruff format . && .venv/bin/python -m ruff check --fix .

audit: ## Ask PyPI for known vulnerabilities of the locked packages
	@scripts/dev/setup.sh dev
	@scripts/dev/audit.sh

lock: ## Resolve requirements/*.in into requirements/*.txt, with hashes
#: TORCH_INDEX=... TORCH="torch==2.11.0 torchvision==0.26.0" for an older CUDA
	@scripts/dev/setup.sh dev
	@PATH="$$PWD/.venv/bin:$$PATH" scripts/dev/lock.sh

clean: ## Remove .venv and caches; runs/ and data/ stay
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The targets above that have no commands of their own.
list run new shards export doctor image push submit horovod compare same drill bench commbench plan report evidence slurm-up k8s k8s-delete test test-all:
	@exec scripts/dev/python.sh -m scripts.make $@
