#!/usr/bin/env bash
# Start this node's processes of a recipe: the one entry for the Makefile, containers, Slurm and Kubernetes.
#
#   NNODES=2 NODE_RANK=0 NPROC_PER_NODE=1 MASTER_ADDR=node-a MASTER_PORT=29500 scripts/launch.sh ddp --epochs 3
#
# It reads the five variables above (unset: one node, one process, this machine, port 29500), sets the network's
# environment by FABRIC (auto on several machines) and site.env (scripts/launch/fabric.sh), and becomes the launcher that the
# recipe needs. USR1 and TERM mean: write a checkpoint, then leave with status 0, or STOPPED_STATUS where that is set
# (scripts/launch/stopped_status.py).
# Also optional: RDZV_TIMEOUT_S bounds the wait for other nodes (300 s), RDZV_ID distinguishes this job from another at
# the same address; MIN_NODES makes the job elastic (scripts/launch/rejoin.py); LAUNCHER_PID is the process with which this
# node's processes end (recipes/common/process/parent.py).
#
# SCRIPT=train.py runs that file in the recipe's place, started as the recipe is (docs/your-own.md):
#
#   SCRIPT=train.py scripts/launch.sh ddp --lr 0.1
set -euo pipefail
# The kernel drops signals without a handler for the first process of a container; in others, they end bash at once.
if (($$ == 1)); then
    trap 'exit "${STOPPED_STATUS:-138}"' USR1
    trap 'exit "${STOPPED_STATUS:-143}"' TERM
fi

if [[ -n ${SCRIPT:-} ]]; then # paths begin at the caller's folder
    for variable in SCRIPT WORKDIR RUN_DIR; do # macOS' realpath knows no -ms
        if [[ -n ${!variable:-} && ${!variable} != /* ]]; then export "$variable=$PWD/${!variable}"; fi
    done
    export WORKDIR=${WORKDIR:-$PWD} RUN_DIR=${RUN_DIR:-}
fi
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONHOME PYTHONSAFEPATH # they are for another Python, and hide the modules of this folder
# Open the standard streams that the caller has closed, as daemons do: else the next file would get what is printed.
for fd in 0 1 2; do [[ ! -d /dev/fd || -e /dev/fd/$fd ]] || eval "exec $fd<>/dev/null"; done
if (($# == 0)); then
    echo "usage: scripts/launch.sh RECIPE [OPTIONS]" >&2
    exit 2
fi
recipe=$1
shift
if [[ ${MASTER_ADDR:-} == \[*\] ]]; then MASTER_ADDR=${MASTER_ADDR//[][]/}; fi # [fd00::1], as URLs have it

refuse() {
    echo "error: $1" >&2
    exit 2
}

if [[ ! $recipe =~ ^[[:lower:][:digit:]_]+$ || ! -f recipes/$recipe/train.py ]]; then
    refuse "there is no recipe '$recipe'; make list shows all"
fi
if [[ ! ${NPROC_PER_NODE:-1} =~ ^[1-9][0-9]*$ ]]; then # scripts/launch/fabric.sh divides by it
    refuse "NPROC_PER_NODE expects a whole number of at least 1, got '$NPROC_PER_NODE'"
fi
if [[ $recipe =~ ^(single|dataparallel)$ && (${NNODES:-1} != 1 || ${NPROC_PER_NODE:-1} != 1) ]]; then
    refuse "$recipe is one process; NODES=1 NPROC_PER_NODE=1, or RECIPE=ddp"
fi
export PYTHON=${PYTHON:-.venv/bin/python} # scripts/launch/fabric.sh uses it, too
python=$PYTHON
if ! command -v "$python" >/dev/null; then
    refuse "there is no $python; run make setup, or set PYTHON to an interpreter that has torch"
fi
if [[ ! ${python%/*} -ef .venv/bin ]]; then # an environment of the user's own
    packages=(torch psutil)
    if [[ -z ${SCRIPT:-} ]]; then packages+=(isal numpy tqdm); fi
    "$python" scripts/launch/environment.py "${packages[@]}"
fi

address_space_kb=$(ulimit -v)
if [[ $address_space_kb != unlimited ]] && ((address_space_kb < 16 * 2 ** 20)); then
    echo "warning: ulimit -v is $address_space_kb kB, and torch needs some 4 GB of it, with GPUs more: if its import fails, ulimit -v unlimited" >&2
fi

# A stop signal waits until Python handles it, by an option of GNU's env. Env takes a name with = for a variable.
start=(exec)
if [[ $python != *=* ]] && env --block-signal=TERM true 2>/dev/null; then start+=(env '--block-signal=USR1,TERM'); fi
if [[ -n ${STOPPED_STATUS:-} ]]; then # set by the Kubernetes manifests; it calls this script again without it
    "${start[@]}" "$python" -m scripts.launch.stopped_status "$recipe" "$@"
fi

# On several machines, NCCL needs its fabric's settings, and gloo alone would use the address of the host's own name: on
# Debian 127.0.1.1, which no other reaches.
if [[ -z ${FABRIC:-} && ${NNODES:-1} != 1 && ! ${MASTER_ADDR:-localhost} =~ ^(127\.|::1$|localhost$) ]]; then
    export FABRIC=auto
    name_timeout_s=300 # as long as the agent would wait for MASTER_ADDR to become a known name
fi
if [[ -n ${FABRIC:-} || -n ${SITE_ENV:-} || -e site.env ]]; then # FABRIC is set by a cluster's launch files
    source scripts/launch/fabric.sh
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [[ $recipe == spawn ]]; then
    # It starts the node's ranks by itself; what a launcher further out says of ranks is not meant for it.
    unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE
fi
case ${MIN_NODES:+elastic-}${SCRIPT:+script-}$recipe in
elastic-*)
    # Its agent is started again if it is killed and the job continues.
    "${start[@]}" "$python" -m scripts.launch.rejoin "$recipe" "$@"
    ;;
single | dataparallel)
    "${start[@]}" "$python" -m scripts.launch.hold_signals "recipes.$recipe.train" "$@"
    ;;
spawn)
    "${start[@]}" "$python" -m scripts.launch.hold_signals recipes.spawn.train --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
        --nproc-per-node "${NPROC_PER_NODE:-1}" --rdzv-timeout-s "${RDZV_TIMEOUT_S:-300}" "$@"
    ;;
horovod | script-horovod)
    "${start[@]}" "$python" -m scripts.launch.horovod "$recipe" "$@"
    ;;
*)
    "${start[@]}" "$python" -m scripts.launch.agent "$recipe" "$@"
    ;;
esac
