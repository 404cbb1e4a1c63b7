#!/usr/bin/env bash
# Start this node's processes of a recipe: the one entry for the Makefile, containers, Slurm and Kubernetes.
#
#   NNODES=2 NODE_RANK=0 NPROC_PER_NODE=1 MASTER_ADDR=node-a MASTER_PORT=29500 scripts/launch.sh ddp --epochs 3
#
# It reads the five variables above (unset: one node, one process, this machine, port 29500), sets the network's
# environment if FABRIC says which (scripts/fabric.sh), and becomes the launcher that the recipe wants. USR1 and TERM
# mean: write a checkpoint, then leave with status 0, or STOPPED_STATUS where that is set (scripts/finished.py).
# Also optional: RDZV_TIMEOUT_S bounds the wait for other nodes (300 s), RDZV_ID tells this job from another at the
# same address; MIN_NODES makes the job elastic (scripts/elastic/node.py); LAUNCHER_PID is the process with which this
# node's processes end (recipes/common/parent.py).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if (($# == 0)); then
    echo "usage: scripts/launch.sh RECIPE [OPTIONS]" >&2
    exit 2
fi
recipe=$1
shift

refuse() {
    echo "error: $1" >&2
    exit 2
}

if [[ ! $recipe =~ ^[a-z0-9_]+$ || ! -f recipes/$recipe/train.py ]]; then
    refuse "there is no recipe '$recipe'; make list shows all"
fi
if [[ $recipe =~ ^(single|dataparallel)$ && (${NNODES:-1} != 1 || ${NPROC_PER_NODE:-1} != 1) ]]; then
    refuse "$recipe is one process; NODES=1 NPROC_PER_NODE=1, or RECIPE=ddp"
fi
export PYTHON=${PYTHON:-.venv/bin/python} # scripts/fabric.sh uses it, too
python=$PYTHON
if ! command -v "$python" >/dev/null; then
    refuse "there is no $python; run make setup, or set PYTHON to an interpreter that has torch"
fi

if [[ -n ${STOPPED_STATUS:-} ]]; then # set by the Kubernetes manifests; it calls this script again without it
    exec "$python" -m scripts.finished "$recipe" "$@"
fi

if [[ -n ${MIN_NODES:-} ]]; then # an elastic job; it calls this script again without it, for each round
    exec "$python" -m scripts.elastic.node "$recipe" "$@"
fi

if [[ -n ${FABRIC:-} ]]; then # set by a cluster's launch files
    source scripts/fabric.sh
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

case $recipe in
single | dataparallel)
    exec "$python" -m scripts.hold "recipes.$recipe.train" "$@"
    ;;
spawn)
    # It starts the node's ranks by itself; what a launcher further out says of ranks is not meant for it.
    unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE
    exec "$python" -m scripts.hold recipes.spawn.train --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
        --nproc-per-node "${NPROC_PER_NODE:-1}" --rdzv-timeout-s "${RDZV_TIMEOUT_S:-300}" "$@"
    ;;
horovod)
    exec "$python" -m scripts.horovod_agent "$recipe" "$@"
    ;;
*)
    exec "$python" -m scripts.agent "$recipe" "$@"
    ;;
esac
