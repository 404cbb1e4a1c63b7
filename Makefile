# The front door: `make help` lists every target. Variables: RECIPE, NODES, NPROC_PER_NODE, NAME, ARGS; what a job
# asks for: GPUS, and of Slurm also PARTITION, TIME, MEM, CPUS, CONSTRAINT, ACCOUNT, QOS, SWEEP, LOCAL; of
# Kubernetes KIND, IMAGE, FABRIC, NAMESPACE, RENDER. MIN_NODES, MAX_RESTARTS make a local job elastic. FAULTS,
# ROUNDS, SEED are the drill's, BACKENDS commbench's; MODEL, CHECK, REHEARSE the plan's. WITH=docker runs in
# containers; images take BASE_IMAGE, BUILD_IMAGE, REGISTRY, TAG.
SHELL := /bin/bash
.DEFAULT_GOAL := help

RECIPE ?=
NODES ?= 1
NPROC_PER_NODE ?=
NAME ?=
ARGS ?=
RECIPES ?=
KIND ?=
GPUS ?=
IMAGE ?=
FABRIC ?=
NAMESPACE ?=
RENDER ?=
WITH ?=
MIN_NODES ?=
MAX_RESTARTS ?=
PARTS ?=
BACKENDS ?=
FAULTS ?=
ROUNDS ?=
SEED ?=
MODEL ?=
CHECK ?=
REHEARSE ?=

VENV := .venv
PYTHON := $(VENV)/bin/python

# Those of submit's options whose variable is set.
SUBMIT_OPTIONS = $(if $(GPUS),--gpus-per-node "$(GPUS)") $(if $(NPROC_PER_NODE),--nproc-per-node "$(NPROC_PER_NODE)") \
	$(if $(PARTITION),--partition "$(PARTITION)") $(if $(TIME),--time "$(TIME)") $(if $(MEM),--mem "$(MEM)") \
	$(if $(CPUS),--cpus-per-task "$(CPUS)") $(if $(CONSTRAINT),--constraint "$(CONSTRAINT)") \
	$(if $(ACCOUNT),--account "$(ACCOUNT)") $(if $(QOS),--qos "$(QOS)") $(if $(NAME),--name "$(NAME)") \
	$(if $(SWEEP),--sweep "$(SWEEP)") $(if $(filter-out 0,$(LOCAL)),--local)

# Those of scripts.local that make a job elastic.
ELASTIC_OPTIONS = $(if $(MIN_NODES),--min-nodes "$(MIN_NODES)") $(if $(MAX_RESTARTS),--max-restarts "$(MAX_RESTARTS)")

# What plan hands on of the variables that are set.
PLAN_OPTIONS = $(if $(filter file,$(origin NODES)),,--nodes "$(NODES)") $(if $(GPUS),--gpus "$(GPUS)") \
	$(if $(FABRIC),--fabric "$(FABRIC)") $(if $(MODEL),--model "$(MODEL)")

.PHONY: help list setup run bench commbench plan report doctor image push submit horovod compare drill slurm-up slurm-down slurm-status k8s k8s-delete test test-all lint audit format lock clean

help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

list: ## List the recipes, a line each
	@python3 -m scripts.local --list

setup: ## Create .venv with the exact packages that recipes need
	@scripts/setup.sh run

run: ## Run a recipe on this machine: RECIPE=ddp NODES=2 NPROC_PER_NODE=1 NAME=mine ARGS="--epochs 3" WITH=docker
	@[[ -z "$(filter-out docker,$(WITH))" ]] || { echo "error: WITH wants docker, got '$(WITH)'" >&2; exit 2; }
	@$(if $(WITH),,scripts/setup.sh run)
	@$(if $(WITH),,$(if $(filter horovod,$(RECIPE)),scripts/horovod/build.sh --if-missing))
	@exec $(if $(WITH),python3 -m scripts.compose,$(PYTHON) -m scripts.local) "$(RECIPE)" --nodes "$(NODES)" \
		--nproc-per-node "$(NPROC_PER_NODE)" $(ELASTIC_OPTIONS) -- $(if $(NAME),--name "$(NAME)") $(ARGS)

doctor: ## Check nodes before training, and name what is wrong with its remedy: NODES=2 NPROC_PER_NODE=1 ARGS="--json FILE"
	@scripts/setup.sh run
	@exec $(PYTHON) -m scripts.doctor --nodes "$(NODES)" $(if $(NPROC_PER_NODE),--nproc-per-node "$(NPROC_PER_NODE)") $(ARGS)

image: ## Build the image of a recipe: RECIPE=ddp BASE_IMAGE=... BUILD_IMAGE=... REGISTRY=... TAG=...
	@scripts/image.sh build "$(RECIPE)"

push: ## Push it: RECIPE=ddp REGISTRY=registry.example.com/team TAG=1
	@scripts/image.sh push "$(RECIPE)"

submit: ## Submit a recipe to Slurm by submitit: RECIPE=ddp NODES=2 GPUS=8 TIME=2:00:00; LOCAL=1 without Slurm
	@scripts/setup.sh run
	@exec $(PYTHON) -m slurm.submit "$(RECIPE)" --nodes "$(NODES)" $(SUBMIT_OPTIONS) -- $(ARGS)

horovod: ## Build Horovod for the torch of .venv, from a cache where it can
	@scripts/setup.sh run
	@scripts/horovod/build.sh

compare: ## Run recipes side by side: RECIPES="single ddp" NODES=2 ARGS="--epochs 10"
	@scripts/setup.sh run
	@$(if $(filter horovod,$(RECIPES)),scripts/horovod/build.sh --if-missing)
	@exec $(PYTHON) -m scripts.compare $(RECIPES) --nodes "$(NODES)" --nproc-per-node "$(NPROC_PER_NODE)" -- $(ARGS)

drill: ## Plant faults in real jobs and measure recovery: FAULTS="kill-rank truncate" ROUNDS=50 SEED=3 NODES=2
	@scripts/setup.sh run
	@exec $(PYTHON) -m scripts.drill $(FAULTS) --nodes "$(if $(filter file,$(origin NODES)),2,$(NODES))" \
		--rounds "$(ROUNDS)" --seed "$(or $(SEED),0)"

bench: ## Measure speed against the limit and the peers: PARTS="small-data wire" ROUNDS=5
	@scripts/setup.sh bench
	@scripts/horovod/build.sh --if-missing
	@exec $(PYTHON) -m scripts.bench $(PARTS) $(if $(ROUNDS),--rounds "$(ROUNDS)") $(ARGS)

commbench: ## Measure all-reduce, broadcast, all-gather over sizes: NODES=2 BACKENDS="gloo mpi" ARGS="--link-gbit 10"
	@scripts/setup.sh run
	@$(if $(filter horovod,$(BACKENDS)),scripts/horovod/build.sh --if-missing)
	@exec $(PYTHON) -m scripts.commbench $(BACKENDS) $(if $(filter file,$(origin NODES)),,--nodes "$(NODES)") \
		$(if $(NPROC_PER_NODE),--nproc-per-node "$(NPROC_PER_NODE)") $(ARGS)

plan: ## Rehearse a job of any size: RECIPE=ddp MODEL=resnet50 NODES=512 GPUS=8 FABRIC=ib-400; CHECK=1; REHEARSE=1024
	@scripts/setup.sh run
	@exec $(PYTHON) -m $(if $(filter-out 0,$(CHECK)),scripts.plan.check $(if $(ROUNDS),--rounds "$(ROUNDS)") $(ARGS),$(if \
		$(REHEARSE),scripts.plan.thousand --world-size "$(REHEARSE)" $(if $(RECIPE),--recipe "$(RECIPE)") -- $(ARGS),scripts.plan "$(RECIPE)" $(PLAN_OPTIONS) $(ARGS)))

report: ## Render what bench has measured: docs/benchmarks/README.md with pictures, and the table in README.md
	@scripts/setup.sh run
	@exec $(PYTHON) -m scripts.report

slurm-up: ## Start a real Slurm cluster on this machine, as root: NODES=3
	@scripts/slurm_cluster.sh up "$(if $(filter file,$(origin NODES)),2,$(NODES))"

slurm-down: ## End it, with all its jobs
	@scripts/slurm_cluster.sh down

slurm-status: ## Show its nodes and jobs
	@scripts/slurm_cluster.sh status

k8s: ## Run a recipe on a Kubernetes cluster: RECIPE=ddp NODES=4 KIND=pytorchjob GPUS=8 IMAGE=... NAME=mine ARGS="--epochs 3"
	@scripts/setup.sh run
	@exec $(PYTHON) -m scripts.k8s "$(RECIPE)" --nodes "$(NODES)" --kind "$(KIND)" --gpus "$(GPUS)" \
		--image "$(IMAGE)" --fabric "$(FABRIC)" --name "$(NAME)" --namespace "$(NAMESPACE)" $(if $(RENDER),--render) -- $(ARGS)

k8s-delete: ## Delete a job from the cluster, NAME=mine; its record stays on the volume
	@scripts/setup.sh run
	@exec $(PYTHON) -m scripts.k8s --namespace "$(NAMESPACE)" --delete "$(NAME)"

test: ## Run the tests that take minutes, as an ordinary user or as root: ARGS="-k resume -x"
	@scripts/setup.sh dev
	@scripts/test.sh quick $(ARGS)

test-all: ## Run all tests; REQUIRE=slurm,docker,... turns a skip into a failure; COVERAGE=1 measures coverage
	@scripts/setup.sh dev
	@scripts/test.sh all $(ARGS)

lint: ## Check formatting, names, types, shell scripts and YAML
	@scripts/setup.sh dev
	@scripts/lint.sh

audit: ## Ask PyPI for known vulnerabilities of the locked packages
	@scripts/setup.sh dev
	@scripts/audit.sh

format: ## Let ruff format the code
	@scripts/setup.sh dev
	@$(PYTHON) -m ruff format . && $(PYTHON) -m ruff check --fix .

lock: ## Resolve requirements/*.in anew into requirements/*.txt, with hashes
	@scripts/setup.sh dev
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/lock.sh

clean: ## Remove .venv and caches; runs/ and data/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
