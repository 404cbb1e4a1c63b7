#!/usr/bin/env bash
# A real Slurm cluster on this machine: munge, slurmctld, and a slurmd for each node, up in seconds and gone in one.
#
#   scripts/lab/slurm_cluster.sh up [NODES]     start it (2 nodes) and print how to use it
#   scripts/lab/slurm_cluster.sh status         its nodes and jobs
#   scripts/lab/slurm_cluster.sh down           end it, its jobs included
#   scripts/lab/slurm_cluster.sh run CMD...     run a command inside; `on NODE CMD...` runs it on a node
#   scripts/lab/slurm_cluster.sh restart NODE   start the slurmd of a node that has lost it
#
# It needs root and Debian's packages slurm-wlm, munge and iproute2. Each node is a network namespace with an address
# and a host name of its own (n1 at 10.77.0.1, ...), on a bridge behind the controller's. All of it lives in one PID
# namespace: when that namespace's first process is killed, the kernel kills every other one.
#
# Variables: SLURM_CLUSTER_DIR (state, /run/cluster-recipes-slurm), GPUS (per node: 2; only names, unless the machine has
# them), CPUS (cores per node: 8; threads if THREADS_PER_CORE is 2), HOST_PREFIX (of the nodes' host names: none).
set -euo pipefail

state=${SLURM_CLUSTER_DIR:-/run/cluster-recipes-slurm}
here=$(readlink -f "${BASH_SOURCE[0]}")
subnet=10.77.0

refuse() {
    echo "error: $1" >&2
    exit 2
}

# Another process may have the number of one that was killed: only our own first process counts.
is_up() { [[ -s $state/pid ]] && tr '\0' ' ' 2>/dev/null <"/proc/$(<"$state/pid")/cmdline" | grep -q 'slurm_cluster.sh init '; }

# Delete the state of a cluster, and no folder that holds anything else.
remove_state() {
    if [[ -n $(ls -A "$state" 2>/dev/null) ]] && ! grep -qs '^ClusterName=recipes$' "$state/slurm.conf"; then
        refuse "SLURM_CLUSTER_DIR $state has files that are not a test cluster's; name a new folder, or empty this one"
    fi
    rm -rf "$state"
}

# The first process of the new namespaces: it makes the network, starts the daemons and reaps orphans.
init() {
    local nodes=$1 i
    hostname ctl
    mkdir -p /run/netns
    mount -t tmpfs -o mode=755 netns /run/netns
    mount --bind "$state/hosts" /etc/hosts
    mount --bind "$state/resolv.conf" /etc/resolv.conf
    ip link set lo up
    ip link add br0 type bridge
    ip addr add "$subnet.254/24" dev br0
    ip link set br0 up
    for ((i = 1; i <= nodes; i++)); do
        ip netns add "n$i"
        ip link add "v$i" type veth peer name eth0 netns "n$i"
        ip link set "v$i" master br0 up
        ip -n "n$i" addr add "$subnet.$i/24" dev eth0
        ip -n "n$i" link set lo up
        ip -n "n$i" link set eth0 up
        ip -n "n$i" route add default via "$subnet.254"
    done
    munged --foreground --force --key-file="$state/munge.key" --socket="$state/munge.sock" --num-threads=4 \
        --pid-file="$state/munge.pid" --log-file="$state/munge.log" --seed-file="$state/munge.seed" &>/dev/null &
    slurmctld -D -i &>"$state/slurmctld.out" &
    for ((i = 1; i <= nodes; i++)); do start_node "n$i"; done
    touch "$state/started"
    while :; do wait -n 2>/dev/null || sleep 1; done
}

# slurmd in the node's network, under its host name, with a /dev/shm of its own.
start_node() {
    ip netns exec "$1" unshare --uts sh -c '
        hostname "${HOST_PREFIX:-}$1"
        mount -t tmpfs shm /dev/shm
        exec slurmd -D -N "$1"' sh "$1" &>"$state/$1.out" &
}

write_configuration() {
    local nodes=$1 i cgroup=disabled cores=$((${CPUS:-8} / ${THREADS_PER_CORE:-1}))
    (umask 077 && head -c 128 /dev/urandom >"$state/munge.key")
    {
        printf '127.0.0.1 localhost\n%s.254 ctl\n' "$subnet"
        # The second line of each is for programs that look up an IPv4 address on an IPv6 socket, as torch's store does.
        for ((i = 1; i <= nodes; i++)); do printf '%s n%d\n::ffff:%s n%d\n' "$subnet.$i" "$i" "$subnet.$i" "$i"; done
    } >"$state/hosts"
    echo "options timeout:1 attempts:1" >"$state/resolv.conf" # nobody to ask: a look-up fails at once
    cat >>"$state/slurm.conf" <<CONF
SlurmctldHost=ctl($subnet.254)
SlurmUser=root
SlurmdUser=root
# A requeued job waits until its credential has expired.
AuthInfo=socket=$state/munge.sock,cred_expire=5
StateSaveLocation=$state/save
SlurmdSpoolDir=$state/spool.%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/%n.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
# PMIx's sockets: two nodes on one host need a folder each.
TmpFS=$state/tmp.%n
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
MpiDefault=none
SrunPortRange=60001-61000
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=${SLURMD_TIMEOUT_S:-15}
TCPTimeout=2
MessageTimeout=10
KillWait=${KILL_WAIT_S:-10}
JobRequeue=1
# A job that no nodes of a partition can ever run is refused at once.
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Without it a job that is preempted gets no USR1, only the TERM of a cancelled one.
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1,sched_interval=1
NodeName=n[1-$nodes] NodeAddr=$subnet.[1-$nodes] CPUs=${CPUS:-8} RealMemory=16000 Gres=gpu:${GPUS:-2} State=UNKNOWN \
    ${THREADS_PER_CORE:+Sockets=1 CoresPerSocket=$cores ThreadsPerCore=$THREADS_PER_CORE}
PartitionName=main Nodes=ALL Default=YES MaxTime=24:00:00 PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=24:00:00 PriorityTier=10 PreemptMode=OFF
CONF
    for ((i = 0; i < ${GPUS:-2}; i++)); do
        # Slurm expects a device for each GPU, and hands out their numbers; slurmd 24.11 calls a plain file an error.
        mknod "$state/gpu$i" c 195 "$i" 2>/dev/null || touch "$state/gpu$i" # NVIDIA's; not every container may make one
        echo "Name=gpu File=$state/gpu$i" >>"$state/gres.conf"
    done
    # slurmd up to 23.02 requires a cgroup plugin; only v1 works where there are no cgroups.
    if [[ $(slurmd -V) =~ ^slurm(-wlm)?\ (1|2[012]|23\.02) ]]; then cgroup=cgroup/v1; fi
    echo "CgroupPlugin=$cgroup" >"$state/cgroup.conf"
    for ((i = 1; i <= nodes; i++)); do mkdir "$state/spool.n$i" "$state/tmp.n$i"; done
    mkdir "$state/save"
}

# Slurm's commands by their plain names: each runs inside the cluster, from the same folder.
write_activate() {
    local name
    mkdir "$state/bin"
    for name in sbatch srun salloc scontrol squeue scancel sinfo sacct; do
        printf '#!/bin/sh\nexec %q run %s "$@"\n' "$here" "$name" >"$state/bin/$name"
    done
    chmod 755 "$state/bin/"*
    cat >"$state/activate" <<ACTIVATE
export SLURM_CLUSTER_DIR=$(printf %q "$state")
case ":\$PATH:" in *:"\$SLURM_CLUSTER_DIR/bin":*) ;; *) PATH="\$SLURM_CLUSTER_DIR/bin:\$PATH" ;; esac
# All nodes share this machine's cores.
export OMP_NUM_THREADS=\${OMP_NUM_THREADS:-1} GOMP_SPINCOUNT=\${GOMP_SPINCOUNT:-1000}
# MPI's mpirun refuses root without both of these.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ACTIVATE
}

up() {
    local nodes=${1-2} command
    if ! [[ $nodes =~ ^[1-9][0-9]?$ ]]; then refuse "NODES expects a whole number from 1 to 99, got '$nodes'"; fi
    if [[ $(id -u) != 0 ]]; then refuse "a test cluster needs root, for namespaces and slurmd; start it with sudo"; fi
    for command in munged slurmctld slurmd sbatch ip unshare nsenter; do
        if ! command -v "$command" >/dev/null; then
            refuse "there is no $command; apt-get install --no-install-recommends slurm-wlm munge iproute2"
        fi
    done
    if is_up; then refuse "a test cluster runs already (process $(<"$state/pid")); make slurm-down ends it"; fi
    remove_state
    mkdir -p "$state"
    chmod 755 "$state"
    trap 'exit 130' INT
    trap abandon EXIT # TERM and HUP, too
    echo ClusterName=recipes >"$state/slurm.conf" # first: by this line, remove_state knows the folder
    write_configuration "$nodes"
    write_activate
    SLURM_CONF=$state/slurm.conf setsid unshare --pid --fork --kill-child=KILL --mount-proc --mount --net --uts --ipc \
        --propagation private "$here" init "$nodes" &>"$state/init.out" </dev/null &
    local parent=$! i first
    for ((i = 0; i < 300; i++)); do
        # The child of unshare: the namespaces' first process.
        first=$(cat "/proc/$parent/task/$parent/children" 2>/dev/null) || true
        if [[ $first && ! -e $state/pid ]]; then
            echo "${first%% *}" >"$state/pid.new"
            mv "$state/pid.new" "$state/pid"
        fi
        if [[ -e $state/started && $(run sinfo -h -N -p main -o %T 2>/dev/null | grep -c '^idle$') == "$nodes" ]]; then
            trap - INT EXIT
            print_use
            return
        fi
        if ! kill -0 "$parent" 2>/dev/null; then break; fi
        sleep 0.1
    done
    tail -n 3 "$state"/*.out "$state"/*.log >&2 || true # there may be no log
    echo "error: the cluster was not ready within 30 s; see $state/*.log and $state/*.out" >&2
    exit 1
}

# Kill a cluster that is not ready: unshare and its child, which setsid has made a group, or setsid before it has.
abandon() {
    if [[ ${!-} ]]; then kill -KILL -- "-$!" "$!" 2>/dev/null || true; fi
    rm -f "$state/pid"
}

print_use() {
    local root
    root=$(cd "$(dirname "$here")/../.." && pwd)
    cat <<USE
A Slurm cluster of $(find "$state" -name 'spool.n*' | wc -l) nodes is up. To use Slurm's commands in a shell:

    source $state/activate
    sbatch --wait $root/slurm/ddp.sbatch --device cpu

make slurm-down ends it.
USE
}

# Become the command: it keeps process id, folder and terminal, and sees the controller's network and host name.
run() {
    export SLURM_CONF=$state/slurm.conf PATH=${PATH//"$state/bin:"/}
    exec nsenter --target "$(<"$state/pid")" --mount --net --uts --ipc --wd="$PWD" -- "$@"
}

on() {
    local node=$1
    shift
    if [[ ! -s $state/$node.pid ]]; then refuse "no slurmd runs on a node '$node'; $here restart NODE starts it, $here status lists the nodes"; fi
    run nsenter --target "$(<"$state/$node.pid")" --mount --net --uts --wd="$PWD" -- "$@"
}

restart() {
    local node=$1
    if [[ ! -e $state/$node.out ]]; then refuse "there is no node '$node'; $here status lists the nodes"; fi
    if ! is_up; then refuse "no test cluster is up; make slurm-up starts one"; fi
    SLURM_CONF=$state/slurm.conf setsid nsenter --target "$(<"$state/pid")" --all "$here" start_node "$node" </dev/null
}

status() {
    (run sinfo -N -p main -o '%10N %10T %15C %10G %E')
    (run squeue -o '%10i %20j %10P %10T %10M %6D %R')
}

down() {
    local pid parent net process i
    pid=$(<"$state/pid")
    parent=$(awk '/^PPid/ { print $2 }' "/proc/$pid/status")
    net=$(readlink "/proc/$pid/ns/net")
    # Commands that were run inside from outside, an srun say, are not of the PID namespace.
    for process in /proc/[0-9]*; do
        if [[ $(readlink "$process/ns/net" 2>/dev/null) == "$net" ]]; then kill -KILL "${process#/proc/}" 2>/dev/null || true; fi
    done
    kill -KILL "$pid" 2>/dev/null || true
    for ((i = 0; i < 200; i++)); do
        # A zombie has ended, too: in a container there may be no init that reaps it.
        if ! kill -0 "$parent" 2>/dev/null || grep -q '^State:.Z' "/proc/$parent/status" 2>/dev/null; then
            remove_state
            return
        fi
        sleep 0.05
    done
    echo "error: process $pid did not end within 10 s; see why in ps -o stat,wchan $pid, then run this again" >&2
    exit 1
}

command=${1:-}
shift || true
case $command in
up | init | start_node) ;;
run | on | restart) is_up || refuse "no test cluster is up; make slurm-up starts one" ;;
status | down)
    if ! is_up; then
        echo "no test cluster is up"
        if [[ $command == down ]]; then remove_state; fi
        exit
    fi
    ;;
*) refuse "usage: $here up [NODES] | down | status | run CMD... | on NODE CMD... | restart NODE" ;;
esac
"$command" "$@"
