# The front door: `make help` lists every target. Variables: RECIPE, NODES, NPROC_PER_NODE, NAME, ARGS; what a job
# asks for: GPUS, and of Slurm also PARTITION, TIME, MEM, CPUS, CONSTRAINT, ACCOUNT, QOS, SWEEP, LOCAL; of
# Kubernetes KIND, IMAGE, FABRIC, NAMESPACE, RENDER. MIN_NODES, MAX_RESTARTS make a local job elastic. FAULTS,
# ROUNDS, SEED are the drill's, BACKENDS commbench's; MODEL, CHECK, REHEARSE the plan's. WITH=docker runs in
# containers; images take BASE_IMAGE, BUILD_IMAGE, REGISTRY, TAG. PYTHON is what .venv is created with.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# Variables reach programs as typed: by the environment, never expanded by make or by a shell. scripts/make.py reads them.
$(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),\
	$(eval override $(name) := $$(value $(name)))$(eval export $(name))))

.PHONY: help list setup run bench commbench plan report doctor image push submit horovod compare drill slurm-up slurm-down slurm-status k8s k8s-delete test test-all lint audit format lock clean

help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' Makefile | expand -t 14

list: ## List the recipes, a line each

setup: ## Create .venv with the exact packages that recipes need
	@scripts/setup.sh run

run: ## Run a recipe on this machine: RECIPE=ddp NODES=2 NPROC_PER_NODE=1 NAME=mine ARGS="--epochs 3" WITH=docker

doctor: ## Check nodes before training, and name what is wrong with its remedy: NODES=2 NPROC_PER_NODE=1 ARGS="--json FILE"

image: ## Build the image of a recipe: RECIPE=ddp BASE_IMAGE=... BUILD_IMAGE=... REGISTRY=... TAG=...

push: ## Push it: RECIPE=ddp REGISTRY=registry.example.com/team TAG=1

submit: ## Submit a recipe to Slurm by submitit: RECIPE=ddp NODES=2 GPUS=8 TIME=2:00:00; LOCAL=1 without Slurm

horovod: ## Build Horovod for the torch of .venv, from a cache where it can

compare: ## Run recipes side by side: RECIPES="single ddp" NODES=2 ARGS="--epochs 10"

drill: ## Plant faults in real jobs and measure recovery: FAULTS="kill-rank truncate" ROUNDS=50 SEED=3 NODES=2

bench: ## Measure speed against the limit and the peers: PARTS="small-data wire" ROUNDS=5

commbench: ## Measure all-reduce, broadcast, all-gather over sizes: NODES=2 BACKENDS="gloo mpi" ARGS="--link-gbit 10"

plan: ## Rehearse a job of any size: RECIPE=ddp MODEL=resnet50 NODES=512 GPUS=8 FABRIC=ib-400; CHECK=1; REHEARSE=1024

report: ## Render what bench has measured: docs/benchmarks/README.md with pictures, and the table in README.md

slurm-up: ## Start a real Slurm cluster on this machine, as root: NODES=3

slurm-down: ## End it, with all its jobs
	@scripts/slurm_cluster.sh down

slurm-status: ## Show its nodes and jobs
	@scripts/slurm_cluster.sh status

k8s: ## Run a recipe on a Kubernetes cluster: RECIPE=ddp NODES=4 KIND=pytorchjob GPUS=8 IMAGE=... NAME=mine ARGS="--epochs 3"

k8s-delete: ## Delete a job from the cluster, NAME=mine; its record stays on the volume

test: ## Run the tests that take minutes, as an ordinary user or as root: ARGS="-k resume -x"

test-all: ## Run all tests; REQUIRE=slurm,docker,... turns a skip into a failure; COVERAGE=1 measures coverage

lint: ## Check formatting, names, types, shell scripts and YAML
	@scripts/setup.sh dev
	@scripts/lint.sh

audit: ## Ask PyPI for known vulnerabilities of the locked packages
	@scripts/setup.sh dev
	@scripts/audit.sh

format: ## Let ruff format the code
	@scripts/setup.sh dev
	@.venv/bin/python -m ruff format . && .venv/bin/python -m ruff check --fix .

lock: ## Resolve requirements/*.in anew into requirements/*.txt, with hashes
	@scripts/setup.sh dev
	@PATH="$$PWD/.venv/bin:$$PATH" scripts/lock.sh

clean: ## Remove .venv and caches; runs/ and data/ stay
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The targets above that have no commands of their own.
list run doctor image push submit horovod compare drill bench commbench plan report slurm-up k8s k8s-delete test test-all:
	@exec scripts/python.sh -m scripts.make $@
