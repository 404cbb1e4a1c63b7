# shellcheck shell=bash
# Set the network and thread environment of a node's processes by FABRIC; source it on each node of a job.
#
#   FABRIC=auto MASTER_ADDR=node-a PYTHON=.venv/bin/python source scripts/launch/fabric.sh
#
#   ib     InfiniBand: NCCL finds it; Ethernet ports of the same cards are kept out of it
#   roce   RDMA over Ethernet: NCCL (2.21 and later) finds the GID index; a traffic class is the network owner's matter;
#          InfiniBand ports are kept out of it
#   efa    AWS: FI_EFA_USE_HUGE_PAGE=0, or processes that fork (data loaders) break
#   tcp    plain Ethernet: NCCL uses no RDMA, no plugin but one that NCCL_NET names, and the interface that reaches
#          MASTER_ADDR
#   auto   the fastest of these that this process can use, else tcp
#
# A pod's /sys shows the machine's devices although it may not open them. A fabric can be used where a port is active,
# its uverbs device opens, and NCCL finds its library: libibverbs.so.1 (rdma-core), for EFA the plugin aws-ofi-nccl
# (libnccl-net*.so). Without them, NCCL would silently use TCP; FABRIC=ib, roce or efa is then an error: of status 1 if
# no port is active, as another node may have one, else of status 2.
#
# site.env in this folder (SITE_ENV names another file) holds what a site needs beyond that, NAME=value a line:
# docs/site.md has examples. Its FABRIC takes the place of auto.
#
# RDZV_TIMEOUT_S (or the shell's name_timeout_s) limits the wait for MASTER_ADDR to become a known name. On every fabric,
# gloo and NCCL's sockets use the interface that reaches MASTER_ADDR, and OMP_NUM_THREADS is a process's share of the cores
# that the node may use (scripts/launch/cores.py). A variable that is already set is kept. A line says what was chosen, and so
# does FABRIC_USED, which ranks on GPUs compare before they use NCCL (recipes/common/world/devices.py).

fabric_devices() {
    local device
    for device in "${SYSFS:-/sys}"/class/infiniband/*; do
        if [[ -e $device ]]; then echo "$device"; fi
    done
}

# efa, ib, roce or iwarp, which NCCL cannot use, for one device of /sys/class/infiniband.
fabric_of() {
    if [[ $(readlink "$1/device/driver") == */efa ]]; then
        echo efa
    elif grep -qs RNIC "$1/node_type"; then
        echo iwarp
    elif grep -qs InfiniBand "$1"/ports/*/link_layer; then
        echo ib
    else
        echo roce
    fi
}

# Whether the dynamic linker finds a library, by the beginning of its name.
has_library() {
    local folder paths=${LD_LIBRARY_PATH:-}
    for folder in ${paths//:/ }; do
        if compgen -G "$folder/$1*" >/dev/null; then return; fi
    done
    PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null | grep -F "$(printf '\t')$1" >/dev/null
}

# Why a device cannot be used; nothing for one that can.
fabric_fault() {
    local device=$1 name verbs node
    name=$(basename "$device")
    if grep -qs . "$device"/ports/*/state && ! grep -qs ACTIVE "$device"/ports/*/state; then
        echo "no port of $name is active"
        return
    fi
    verbs=$(basename "$device"/device/infiniband_verbs/uverbs*)
    node=${DEVFS:-/dev}/infiniband/$verbs
    if [[ ! -e $node ]] || ! : 2>/dev/null <>"$node"; then # to open what is not there would make it
        echo "/dev/infiniband/$verbs of $name does not open"
    elif [[ $(fabric_of "$device") == efa ]]; then
        if [[ -z ${NCCL_NET_PLUGIN:-} ]] && ! has_library libnccl-net; then
            echo "$name needs the plugin aws-ofi-nccl, and there is no libnccl-net*.so"
        fi
    elif ! has_library libibverbs.so.1; then
        echo "$name needs libibverbs1 and ibverbs-providers, and there is no libibverbs.so.1"
    fi
}

# The fastest fabric that this node can use, and its device; else tcp, and why.
find_fabric() {
    local device kind fault reason="no ${1:-RDMA} device"
    for kind in ${1:-efa ib roce}; do
        for device in $(fabric_devices); do
            if [[ $(fabric_of "$device") != "$kind" ]]; then continue; fi
            fault=$(fabric_fault "$device")
            if [[ -z $fault ]]; then
                echo "$kind $(basename "$device")"
                return
            fi
            reason=$fault
        done
    done
    echo "tcp $reason"
}

# Take what the site's file sets, unless it is set already.
read_site() {
    local file=${SITE_ENV:-site.env} line name number=0
    if [[ ! -e $file && -z ${SITE_ENV:-} ]]; then return; fi
    if [[ ! -r $file ]]; then
        echo "error: cannot read $file; SITE_ENV names the file of this site" >&2
        return 2
    fi
    while read -r line || [[ -n $line ]]; do
        number=$((number + 1)) line=${line%$'\r'}
        if [[ -z $line || $line == \#* ]]; then continue; fi
        if ! is_assignment "$line"; then
            echo "error: $file: line $number is not NAME=value; correct it, or begin it with #" >&2 # it may hold a password
            return 2
        fi
        name=${line%%=*}
        if [[ $name == FABRIC ]]; then
            if [[ ${FABRIC:-auto} == auto ]]; then
                export FABRIC=${line#*=}
                remedy="change it in $file, or $remedy"
            fi
        else
            fabric_set "$name" "${line#*=}"
        fi
    done <"$file"
}

# Whether a line is NAME=value. In the C locale: in others, classes of characters have more or fewer letters.
is_assignment() {
    local LC_ALL=C pattern='^[A-Z_][A-Z0-9_]*='
    [[ $1 =~ $pattern ]]
}

# Set a variable, unless the user has, and keep what to say about it. A site's other variables may hold a password.
fabric_set() {
    local name=$1 value=$2 note=""
    if [[ -n ${!name:-} ]]; then
        note=" (as set)"
    else
        export "$name=$value"
    fi
    if [[ $name =~ ^(NCCL|GLOO|FI|OMP)_ ]]; then
        fabric_said+=" $name=${!name}$note"
    else
        fabric_said+=" $name$note"
    fi
}

set_fabric() {
    local fabric reason="FABRIC" interface cores device others="" fabric_said="" found
    local remedy="set FABRIC=tcp on all nodes" # with auto, other nodes would still use the fabric
    read_site || return 2
    fabric=${FABRIC:-auto}
    case $fabric in
    auto)
        read -r fabric reason <<<"$(find_fabric)"
        ;;
    ib | roce | efa)
        found=$(find_fabric "$fabric")
        if [[ $found == tcp* ]]; then
            echo "error: $(uname -n): FABRIC=$fabric cannot be used: ${found#tcp }; $remedy" >&2
            if [[ $found == *"is active" ]]; then return 1; fi # the next start may be on another node
            return 2
        fi
        ;;
    tcp) ;;
    *)
        echo "error: FABRIC expects auto, ib, roce, efa or tcp, got '$fabric'" >&2
        return 2
        ;;
    esac
    interface=$(RDZV_TIMEOUT_S=${RDZV_TIMEOUT_S:-${name_timeout_s:-0}} \
        "${PYTHON:-scripts/dev/python.sh}" -m scripts.launch.interface "${MASTER_ADDR:-127.0.0.1}") || return
    # Never kept: an outer shell's may be another job's. Empty, and not compared, if the user names NCCL's network.
    export FABRIC_USED="$fabric ($reason)"
    if [[ -n ${NCCL_NET:-} ]]; then
        FABRIC_USED=""
    elif [[ $fabric =~ ^(ib|roce)$ && ${NCCL_IB_DISABLE:-0} != 0 ]]; then
        FABRIC_USED="tcp (NCCL_IB_DISABLE)"
    fi
    case $fabric in
    ib | roce) # NCCL would take all devices
        for device in $(fabric_devices); do
            if [[ $(fabric_of "$device") != "$fabric" ]]; then others+=${others:+,}$(basename "$device"); fi
        done
        # ^ leaves out, = compares whole names: ^mlx5_1 alone would also drop mlx5_10 and mlx5_11.
        if [[ -n $others ]]; then fabric_set NCCL_IB_HCA "^=$others"; fi
        ;;
    efa)
        fabric_set FI_EFA_USE_HUGE_PAGE 0
        ;;
    tcp)
        if [[ $reason == FABRIC && ${NCCL_IB_DISABLE:-1} != 0 ]]; then fabric_set NCCL_NET Socket; fi # plugins ignore the next one
        fabric_set NCCL_IB_DISABLE 1
        ;;
    esac
    # On every fabric, NCCL's processes find each other by sockets. = is the exact name, else any with this beginning.
    fabric_set NCCL_SOCKET_IFNAME "=$interface"
    fabric_set GLOO_SOCKET_IFNAME "$interface"
    cores=$("${PYTHON:-scripts/dev/python.sh}" -m scripts.launch.cores) || return 2
    cores=$((cores / ${TASK_PROCESSES:-${NPROC_PER_NODE:-1}}))
    fabric_set OMP_NUM_THREADS $((cores > 0 ? cores : 1))
    if ((${OMPI_COMM_WORLD_LOCAL_RANK:-${SLURM_LOCALID:-0}} > 0)); then return; fi # one line a node
    echo "$(uname -n): fabric $fabric ($reason), ${MASTER_ADDR:-127.0.0.1} by $interface:$fabric_said"
}

set_fabric || exit # 2 is a refusal; 1 a node 0 that did not come, or a fault that another node may not have
