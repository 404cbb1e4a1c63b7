#!/usr/bin/env bash
# Stand in for ssh between the networks of scripts/lab/network.py: mpirun starts its daemon on "host" n1 by
#
#   scripts/bench/commbench/on_node.sh n1 COMMAND...
#
# The daemon gets a host name of its own, too: MPI would take nodes of one name for one, and use shared memory.
set -euo pipefail

node=${1:?usage: on_node.sh NODE COMMAND...}
shift
exec nsenter --net="/run/netns/$node" -- unshare --uts bash -c 'hostname "$0" && exec bash -c "$*"' "$node" "$@"
