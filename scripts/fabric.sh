# shellcheck shell=bash
# Set the network and thread environment of a node's processes by FABRIC; source it on each node of a job.
#
#   FABRIC=auto MASTER_ADDR=node-a PYTHON=.venv/bin/python source scripts/fabric.sh
#
#   ib     InfiniBand: NCCL finds it; Ethernet ports of the same cards are kept out of it
#   roce   RDMA over Ethernet: NCCL (2.21 and later) finds the GID index; a traffic class is the network owner's matter
#   efa    AWS: FI_EFA_USE_HUGE_PAGE=0, or processes that fork (data loaders) break
#   tcp    plain Ethernet: NCCL shall not look for RDMA, and takes the interface that reaches MASTER_ADDR
#   auto   what /sys/class/infiniband shows; tcp where there is nothing
#
# With RDZV_TIMEOUT_S set, MASTER_ADDR may take so long to become a known name.
# In all of them gloo takes the interface that reaches MASTER_ADDR, and OMP_NUM_THREADS is this node's share of cores.
# A variable that is set already stays as it is. One line on standard output says what was chosen, and why.

fabric_devices() {
    local device
    for device in "${SYSFS:-/sys}"/class/infiniband/*; do
        if [[ -e $device ]]; then echo "$device"; fi
    done
}

# efa, ib or roce for one device of /sys/class/infiniband.
fabric_of() {
    if [[ $(readlink "$1/device/driver") == */efa ]]; then
        echo efa
    elif grep -qs InfiniBand "$1"/ports/*/link_layer; then
        echo ib
    else
        echo roce
    fi
}

# The fabric of this node, the fastest where there are several, and what shows it.
find_fabric() {
    local device kind
    for kind in efa ib roce; do
        for device in $(fabric_devices); do
            if [[ $(fabric_of "$device") == "$kind" ]]; then
                echo "$kind $(basename "$device")"
                return
            fi
        done
    done
    echo "tcp no RDMA device"
}

# Set a variable, unless the user has, and keep what to say about it.
fabric_set() {
    local name=$1 value=$2
    if [[ -n ${!name:-} ]]; then
        fabric_said+=" $name=${!name} (as set)"
    else
        export "$name=$value"
        fabric_said+=" $name=$value"
    fi
}

set_fabric() {
    local fabric=${FABRIC:-auto} reason="FABRIC" interface cores device ethernet="" fabric_said=""
    case $fabric in
    auto)
        read -r fabric reason <<<"$(find_fabric)"
        ;;
    ib | roce | efa | tcp) ;;
    *)
        echo "error: FABRIC wants auto, ib, roce, efa or tcp, got '$fabric'" >&2
        return 2
        ;;
    esac
    interface=$("${PYTHON:-scripts/python.sh}" -m scripts.interface "${MASTER_ADDR:-127.0.0.1}") || return 2
    case $fabric in
    ib)
        for device in $(fabric_devices); do
            if [[ $(fabric_of "$device") == roce ]]; then ethernet+=${ethernet:+,}$(basename "$device"); fi
        done
        if [[ -n $ethernet ]]; then fabric_set NCCL_IB_HCA "^$ethernet"; fi
        ;;
    efa)
        fabric_set FI_EFA_USE_HUGE_PAGE 0
        ;;
    tcp)
        fabric_set NCCL_IB_DISABLE 1
        fabric_set NCCL_SOCKET_IFNAME "=$interface" # with = the exact name, without it any that begins so
        ;;
    esac
    fabric_set GLOO_SOCKET_IFNAME "$interface"
    cores=$(env -u OMP_NUM_THREADS nproc)
    if ((${SLURM_CPUS_PER_TASK:-cores} < cores)); then cores=$SLURM_CPUS_PER_TASK; fi
    cores=$((cores / ${TASK_PROCESSES:-${NPROC_PER_NODE:-1}}))
    fabric_set OMP_NUM_THREADS $((cores > 0 ? cores : 1))
    if ((${OMPI_COMM_WORLD_LOCAL_RANK:-${SLURM_LOCALID:-0}} > 0)); then return; fi # one line a node
    echo "$(hostname): fabric $fabric ($reason), ${MASTER_ADDR:-127.0.0.1} by $interface:$fabric_said"
}

set_fabric || exit 2
