# shellcheck shell=bash
# Shared by the sbatch files: paths, the head node, and how a job ends, is requeued and resumes. slurm/README.md lists the
# variables that users set. An sbatch file sources it and calls begin_job with the recipe and its options, run_step with the
# command that starts the ranks, and end_job. begin_job sets the arrays that this command uses: srun (srun and its common
# options), container (Apptainer's prefix, or empty), rank (the module of a rank) and options.

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then set +u; fi # there, "${empty[@]}" is an error
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ! -e $root/scripts/launch.sh ]]; then # the folder slurm is a link
    root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
fi
if [[ -n ${SCRIPT:-} ]]; then
    SCRIPT=$(realpath -ms "$SCRIPT") WORKDIR=$(realpath -ms "${WORKDIR:-.}")
    RUNS_DIR=$(realpath -ms "${RUNS_DIR:-$root/runs}")
    export SCRIPT WORKDIR RUNS_DIR
fi
cd "$root" || exit 1
host=$(uname -n) host=${host%%.*} # a minimal node lacks the program hostname
unset PYTHONHOME PYTHONSAFEPATH # as in scripts/launch.sh
# Else srun exports only the variables named by sbatch --export, and uses the CPU binding of an enclosing srun, ...
unset SLURM_EXPORT_ENV SLURM_CPU_BIND SLURM_CPU_BIND_{LIST,TYPE,VERBOSE}
# ... and how that distributes its tasks. Without one, SLURM_DISTRIBUTION is what the user gave to sbatch.
if [[ -n ${SLURM_SRUN_COMM_PORT:-} ]]; then unset SLURM_DISTRIBUTION; fi
# A step on one node cannot have the GPUs of all nodes (sbatch --gpus), and a task is to see all GPUs of its node, not only its
# share (--gpus-per-task, in Slurm 24.11 as SLURM_TRES_PER_TASK). The job's own request applies to a step that makes none: of the
# file's --gpus-per-node and a user's --gres=gpu:4 (refused since Slurm 26.05), the job has got the latter. A whole node (--exclusive)
# comes with its GPUs without a request: its steps would get none.
asked=${SLURM_GPUS_PER_NODE:-}
if [[ -n ${SLURM_GPUS:-}${SLURM_GPUS_PER_SOCKET:-} ]]; then asked=${asked:-${SLURM_GPUS_ON_NODE:-}}; fi
if [[ ${SLURM_GPUS_ON_NODE:-0} != 0 && (-n ${SLURM_GPUS_PER_TASK:-} || ${SLURM_TRES_PER_TASK:-} == *gres/gpu* ||
    ${asked##*:} != "$SLURM_GPUS_ON_NODE" ||
    ${SLURM_GPUS:+${SLURM_GPUS##*:}} == "$((SLURM_GPUS_ON_NODE * SLURM_NNODES))") ]]; then
    export SLURM_GPUS_PER_NODE=$SLURM_GPUS_ON_NODE
    unset SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_TRES_BIND
fi

refuse() {
    echo "error: $1" >&2
    exit 2
}

# fail REASON: end the job with status 1.
fail() {
    echo "error: job $job: $1" >&2
    exit 1
}

# option NAME DEFAULT ARGUMENTS...: print the last value of an option among arguments: --name x or --name=x.
option() {
    local name=$1 value=$2 home=~
    shift 2
    while (($#)); do
        case $1 in
        "$name") value=${2:-} ;;
        "$name="*) value=${1#*=} ;;
        esac
        shift
    done
    if [[ $value == \~ || $value == \~/* ]]; then value=$home${value:1}; fi # of --runs-dir=~/runs, which no shell expands
    echo "$value"
}

# Set the job's id, its number of restarts, its nodes, and the cores that it has on each node.
identify_job() {
    job=$SLURM_JOB_ID restarts=${SLURM_RESTART_COUNT:-0} NNODES=$SLURM_NNODES
    # The last task of an array has the array's own id: a command for that id would reach all tasks.
    if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    # srun asks for the same number of cores on each node: the smallest, of "96(x2),64".
    cores=$(tr , '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-$SLURM_CPUS_ON_NODE}" | sort -n | head -n 1)
    cores=${cores%(*}
}

# Set rank_cores, the cores of a rank that is a task of its own; srun refuses 0 with an error of its own.
share_cores() {
    local tasks=${SLURM_NTASKS_PER_NODE:-1} needed
    rank_cores=$((cores / NPROC_PER_NODE))
    if ((rank_cores == 0)); then
        needed=$(((NPROC_PER_NODE + tasks - 1) / tasks))
        refuse "a node gives this job $cores cores for $NPROC_PER_NODE ranks; sbatch --cpus-per-task=$needed, or NPROC_PER_NODE=$cores"
    fi
    fill_sockets
}

# Let ranks that are tasks fill one socket after another, as GPUs do on most nodes: by default, Slurm binds task 1 to the second
# socket, and task 2 to the first again.
fill_sockets() { export SLURM_DISTRIBUTION=${SLURM_DISTRIBUTION:-block:block}; }

# Refuse wrong variables before the first step: if all nodes refused them, srun would kill some before they print the reason.
check_variables() {
    local name
    if ((${SLURM_HET_SIZE:-1} > 1)); then
        refuse "a heterogeneous job (sbatch ... : ...) would use only its first component; ask for nodes of one kind"
    fi
    if [[ ! ${NPROC_PER_NODE:-1} =~ ^[1-9][0-9]*$ ]]; then
        refuse "NPROC_PER_NODE expects a whole number of at least 1, got '$NPROC_PER_NODE'"
    fi
    for name in MAX_REQUEUES MAX_EXCLUDED; do
        if [[ ! ${!name:-1} =~ ^[0-9]+$ ]]; then refuse "$name expects a whole number, got '${!name}'"; fi
    done
    if ! is_plain_name "${NAME:-x}"; then # it becomes a folder of runs
        refuse "NAME expects at most 100 letters, digits, '.', '_' and '-', the first a letter or digit, got '$NAME'"
    fi
    if [[ ! ${FABRIC:-auto} =~ ^(auto|ib|roce|efa|tcp)$ ]]; then
        refuse "FABRIC expects auto, ib, roce, efa or tcp, got '$FABRIC'"
    fi
}

# begin_job RECIPE OPTIONS...: set the environment of ranks, the folder for logs, and the arrays.
begin_job() {
    recipe=$1
    shift
    local default name host_log variable point size log
    signal="" signals=0 step="" step_pid="" stopper=() unanswered=RUNNING
    trap 'signals=$((signals + 1)); stop_step USR1' USR1
    trap 'signals=$((signals + 1)); stop_step TERM' TERM
    signal=${signal:-${early:+USR1}}
    check_variables
    identify_job
    name=${NAME:+$NAME${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}
    name=${name:-$(basename "${SCRIPT:-$recipe}" .py)-job$job}
    set_python "$@"
    if [[ -n ${SWEEP:-} ]]; then
        read_point "$@"
        set -- "${point[@]}" "$@"
    fi
    default=$((gpus > 0 ? gpus : ${SLURM_NTASKS_PER_NODE:-1}))
    if [[ $recipe =~ ^(single|dataparallel)$ ]]; then default=1; fi # one process, whatever the number of GPUs
    export NNODES NPROC_PER_NODE=${NPROC_PER_NODE:-$default}
    # This script runs on the head node, the first. No fallback to localhost: each node would wait for itself.
    export MASTER_ADDR=${MASTER_ADDR:-$(address_of "${nodes%%$'\n'*}")} MASTER_PORT
    MASTER_PORT=$(free_port)
    export PORT_IS_CHOSEN=1 # if it is taken, rank 0 ends with status 75, and the job is requeued
    export FABRIC=${FABRIC:-auto}
    for variable in ${container_prefix:+"${container_env[@]}"}; do export "$container_prefix$variable=${!variable}"; done
    if [[ -n ${SCRIPT:-} ]]; then
        begin_script "$name"
        go_on="NAME=$name RESUME=auto SCRIPT=$(printf %q "$SCRIPT") sbatch ...${SWEEP:+ ${point[*]}}"
    else
        refuse_in_config "$(option --config "" "$@")"
        run_dir=$(option --runs-dir runs "$@")/$(option --name "$name" "$@")
        go_on="sbatch ...${SWEEP:+ ${point[*]}} --name $(basename "$run_dir") --resume auto"
    fi
    go_on="to resume${SWEEP:+, without SWEEP and --array}: $go_on"
    logs=$run_dir/slurm
    mkdir -p "$logs" || refuse "cannot make $logs; choose another folder of runs"
    # One log per node: a node that is cut off can still write its own.
    srun+=(--output="$logs/%N.txt" --open-mode=append)
    # Before Slurm 25.11, srun's %N is the host name, which may differ from NodeName: one file with both names.
    host_log=$logs/$host.txt head_log=$logs/${SLURMD_NODENAME:-$host}.txt started=$logs/.started-$job
    touch "$host_log" "$started" || refuse "cannot write $logs; choose another folder of runs"
    leave_if_complete
    if [[ ! -e $head_log ]]; then ln -s "$(basename "$host_log")" "$head_log"; fi
    declare -gA earlier_bytes=() # of each log: what earlier starts have written
    while read -r size log; do earlier_bytes[$log]=$size; done < <(stat -Lc "%s %n" "$logs"/*.txt)
    # shellcheck disable=SC2034 # sbatch files use rank
    if [[ -n ${SCRIPT:-} ]]; then
        rank=(scripts.launch.script --task "$SCRIPT") options=("$@")
    else
        rank=(scripts.launch.hold_signals "recipes.$recipe.train")
        set_options "$@"
    fi
    if [[ -n ${STAGE:-} ]]; then stage; fi
    echo "job $job, start $((restarts + 1)): ${SCRIPT:-$recipe} on $NNODES nodes x $NPROC_PER_NODE, head" \
        "$MASTER_ADDR:$MASTER_PORT, record and logs in $run_dir"
    show_share
}

# read_point OPTIONS...: set `point` to the options of this task of a job array, a point of the grid SWEEP (slurm/sweep.py).
read_point() {
    local words last
    if [[ -z ${SLURM_ARRAY_TASK_ID:-} ]]; then refuse "SWEEP needs a task for each point of its grid; sbatch --array=0-3 ..."; fi
    if [[ -z ${SCRIPT:-} && -n $(option --name "" "$@") ]]; then
        refuse "--name is one run for all tasks; NAME=mine sbatch ... makes runs mine-0, mine-1, ..."
    fi
    words=$(exec_python -m slurm.sweep "$SWEEP" "$SLURM_ARRAY_TASK_ID") || exit 2
    mapfile -t point <<<"$words"
    # shellcheck disable=SC2153 # Slurm sets it
    if ((SLURM_ARRAY_TASK_ID == SLURM_ARRAY_TASK_MIN)); then
        last=$(($(exec_python -m slurm.sweep "$SWEEP") - 1))
        if ((SLURM_ARRAY_TASK_MAX < last)); then
            echo "warning: SWEEP has $((last + 1)) points, and the array ends with task $SLURM_ARRAY_TASK_MAX;" \
                "for the others: sbatch --array=$((SLURM_ARRAY_TASK_MAX + 1))-$last ..."
        fi
    fi
}

# refuse_in_config FILE: refuse options in a --config file that this script reads from the command line only.
refuse_in_config() {
    local found
    if [[ -e $1 && ! -f $1 && ! -d $1 ]]; then refuse "--config $1: it is a pipe, a device or a socket, not a file"; fi # grep would wait
    found=$(grep -sm 1 -oE '^[{ ]*"?(runs[-_]dir|name)"? *:' "$1" | tr -d '{": ' | tr _ -)
    if [[ -n $found ]]; then refuse "$1 has $found; give it on the command line: sbatch ... --$found VALUE"; fi
}

# begin_script NAME: set the variables of a script (scripts/launch/script.py), and check it.
begin_script() {
    export RUN_DIR=$RUNS_DIR/$1 RESUME=${RESUME:-none}
    run_dir=$RUN_DIR
    if ((restarts > 0)) && [[ -e $run_dir/slurm/.first-start-$job ]]; then RESUME=auto; fi
    mkdir -p "$RUNS_DIR" || refuse "cannot make $RUNS_DIR; choose another RUNS_DIR" # a container mounts it
    (exec_python -m scripts.launch.script --check "$SCRIPT") || exit 2
    if [[ $RESUME == none && -n $(ls -A "$run_dir" 2>/dev/null) ]]; then
        refuse "$run_dir is not empty; set RESUME=auto to resume this run, or choose another NAME"
    fi
}

# Set the recipe's options: the user's, the name, the device, and --resume auto after a requeue.
set_options() {
    options=("$@")
    # A job with GPUs never trains on CPUs, unless the user's own --device, which comes later, says so.
    if ((gpus > 0)) && ! grep -qsE '^[{ ]*"?device"? *: *"?(cpu|cuda)' "$(option --config "" "$@")"; then options=(--device cuda "$@"); fi
    if [[ $recipe == probe ]]; then return; fi # it keeps no record
    options=(--name "$name" "${options[@]}")
    # The ranks' HOME may be that of a container.
    if [[ " $*" == *" --runs-dir"[=\ ]"~"* ]]; then options+=(--runs-dir "$(option --runs-dir "" "$@")"); fi
    if resumes; then options+=(--resume auto); fi
}

# Whether a later start resumes the run: it does unless the record is the one that the first start found. That is another job's,
# which --overwrite replaces. Times do not show that: a node's clock and a file server's may differ.
resumes() { ((restarts > 0)) && [[ ! -e $run_dir/config.json || $(<"$run_dir/config.json") != "$(<"$first_start")" ]]; }

# Print a free port, derived from the job id and the restart, so that jobs on the same nodes differ. Ports from 20000 to
# 31999 are below Linux's range for outgoing connections. /proc/net lists the sockets of all addresses.
free_port() {
    local port=$((20000 + (SLURM_JOB_ID * 16 + restarts) % 12000))
    while grep -qs "$(printf '^ *[0-9]*: [0-9A-F]*:%04X ' $port)" /proc/net/tcp /proc/net/tcp6; do port=$((port + 1)); done
    echo "$port"
}

# address_of NODE: print the node's name if it resolves (a NodeName need not), else its NodeAddr.
address_of() {
    local address
    if ! getent ahosts "$1" >/dev/null; then
        address=$(scontrol show node "$1" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    fi
    echo "${address:-$1}"
}

# Unpack STAGE on each node, once for all jobs, and use its Python: thousands of small files on a shared folder are slow.
stage() {
    local from to
    from=$(realpath -ms "$STAGE") to=${STAGE_DIR:-/tmp}/cluster-recipes-$UID
    if [[ -n ${CONTAINER_IMAGE:-} ]]; then refuse "STAGE is for a venv, and CONTAINER_IMAGE is one file already; unset one of them"; fi
    if [[ ! -r $from ]]; then refuse "STAGE: there is no $from; on the login node: tar -C $root/.venv -cf $from ."; fi
    to+=/$(stat -Lc %s-%Y "$from") # a changed file gets another folder
    local begin=$SECONDS
    # shellcheck disable=SC2016 # expanded on each node
    "${srun[@]}" --output=all --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 bash -c '
        own=${1%/*}
        umask 077; mkdir -p "$own" || exit 1
        # Its path can be guessed: another user of the node may have made it, with a Python of their own.
        if [[ -L $own || ! -d $own || ! -O $own || $(stat -c %a "$own") != *700 ]]; then
            echo "error: STAGE: $(uname -n): $own is not your own folder of mode 700; remove it, or choose another STAGE_DIR" >&2
            exit 2
        fi
        if [[ -x $1/bin/python ]]; then exit; fi
        new=$(mktemp -d "$1.XXXXXX") || exit
        if tar -xf "$0" -C "$new" && mv -T "$new" "$1" 2>/dev/null; then exit; fi
        rm -rf "$new"; [[ -x $1/bin/python ]]' "$from" "$to" || # another job unpacked it first
        { (($? == 2)) && exit 2; } || # a node has said why
        refuse "STAGE: cannot unpack $from to $to on each node; see above, choose another STAGE_DIR, or unset STAGE"
    export PYTHON=$to/bin/python
    echo "staged $from on $NNODES nodes in $((SECONDS - begin)) s: $to"
}

# show_share [submit]: print the job's share of the head node; warn if it is less than half of the GPUs or cores.
show_share() {
    local command=sbatch gpus_flag=--gpus-per-node cores_flag=--cpus-per-task tasks=${SLURM_NTASKS_PER_NODE:-1}
    if [[ ${1:-} == submit ]]; then command="make submit" gpus_flag=GPUS cores_flag=CPUS; fi
    local node=${SLURMD_NODENAME:-$host} cores=${SLURM_CPUS_ON_NODE:-1} memory unused="" flags=""
    local node_cores node_memory node_gpus gres
    read -r node_cores node_memory gres \
        <<<"$(sinfo --noheader --Node --nodes="$node" --format="%c %m %G" 2>/dev/null | head -n 1)"
    if [[ -z $gres ]]; then return; fi
    # gpu:2, or gpu:h100:8(S:0-1), or gpu:a100:4(S:0),gpu:l4:2(S:1), or (null)
    node_gpus=$(grep -oE 'gpu(:[^:,()]+)?:[0-9]+' <<<"$gres" | awk -F: '{ sum += $NF } END { print sum + 0 }')
    memory=$((${SLURM_MEM_PER_NODE:-0} + ${SLURM_MEM_PER_CPU:-0} * cores + ${SLURM_MEM_PER_GPU:-0} * gpus))
    if ((memory == 0)); then memory=$node_memory; fi # no limit
    echo "$node gives this job $gpus of $node_gpus GPUs, $cores of $node_cores cores," \
        "$((memory / 1024)) of $((node_memory / 1024)) GB of memory"
    if ((2 * gpus < node_gpus)); then
        unused="$((node_gpus - gpus)) of $node_gpus GPUs" flags=" $gpus_flag=$node_gpus"
        if [[ ${1:-} == submit ]]; then tasks=$node_gpus; fi # a process for each GPU
    fi
    if ((2 * cores < node_cores)); then
        unused+="${unused:+ and }$((node_cores - cores)) of $node_cores cores"
        flags+=" $cores_flag=$((node_cores / tasks))"
    fi
    if [[ -n $unused ]]; then
        echo "warning: this job does not use $unused of a node; to use them: $command$flags"
    fi
}

# set_python OPTIONS...: set the interpreter, in this repository's venv or in a container of pyxis or Apptainer, and the
# arrays srun and container.
set_python() {
    # --wait=0: a site's WaitTime would kill ranks that still work when the first has ended.
    srun=(srun --wait=0 --kill-on-bad-exit=1) container=() container_prefix="" gpus=${SLURM_GPUS_ON_NODE:-0}
    if [[ -z ${CONTAINER_IMAGE:-} ]]; then
        export PYTHON=${PYTHON:-$root/.venv/bin/python}
        if ! command -v "$PYTHON" >/dev/null; then
            refuse "there is no $PYTHON; run make setup in $root, on a file system that all nodes share, or set PYTHON or CONTAINER_IMAGE"
        fi
        return
    fi
    # Else the image's variables replace the job's. The code is that of this checkout, not the image's.
    container_env=(NNODES NPROC_PER_NODE MASTER_ADDR MASTER_PORT FABRIC PYTHON SOURCE_REVISION)
    export PYTHON=${PYTHON:-python3} SOURCE_REVISION
    SOURCE_REVISION=$(git ls-files --error-unmatch slurm/job.sh &>/dev/null &&
        git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown) # as in docker/image.sh
    if [[ $CONTAINER_IMAGE == /* && ! -e $CONTAINER_IMAGE ]]; then
        refuse "there is no CONTAINER_IMAGE $CONTAINER_IMAGE; make it on the login node: enroot import -o FILE.sqsh docker://..., or apptainer build FILE.sif docker://..."
    fi
    local mounts="$root:$root${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}" tool folder folders runs=${SCRIPT:+$RUNS_DIR}
    IFS=, read -ra folders <<<"${CONTAINER_MOUNTS:-}"
    for folder in "${folders[@]}"; do # else each node prints the container tool's own errors
        folder=${folder%%:*}
        if [[ $folder == /* && ! -e $folder ]]; then refuse "CONTAINER_MOUNTS: there is no $folder on $host; correct it"; fi
    done
    # A record that is written only to a folder of the container is lost with it.
    runs=${runs:-$(realpath -ms "$(option --runs-dir runs "$@")")}
    for folder in ${SCRIPT:+"$(dirname "$SCRIPT")" "$WORKDIR"} "$runs"; do
        if [[ $folder/ != "$root"/* && ,$mounts != *",$folder:"* ]]; then mounts+=",$folder:$folder"; fi
    done
    if [[ $(srun --help) == *--container-image* ]]; then
        srun+=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts" --container-workdir="$root"
            --container-env="$(IFS=, && echo "${container_env[*]}")")
        return
    fi
    tool=$(command -v apptainer || command -v singularity) ||
        refuse "CONTAINER_IMAGE is set, but srun has no --container-image (pyxis) and there is no apptainer; unset it to use a venv"
    container_prefix=$(basename "${tool^^}")ENV_
    container=("$tool" exec --bind "$mounts" --pwd "$root")
    if ((gpus > 0)); then container+=(--nv); fi
    container+=("$CONTAINER_IMAGE")
}

# exec_python ARGUMENTS...: replace this (sub)shell by that interpreter, on this node; call set_python first.
exec_python() {
    if [[ -n ${CONTAINER_IMAGE:-} && -z ${container[*]} ]]; then # pyxis works in srun only
        # --overlap: beside the other steps
        exec "${srun[@]}" --overlap --nodes=1 --ntasks=1 --nodelist="${SLURMD_NODENAME:-$host}" "$PYTHON" "$@"
    else
        exec "${container[@]}" "$PYTHON" "$@"
    fi
}

# run_step COMMAND...: start the ranks and show the head node's log. Set `greatest` to srun's status, the greatest of all
# tasks, and `status` to that of the first task that failed, if it exited by itself: srun kills the others.
run_step() {
    local tails=() before first errors=$logs/.srun-$job
    # Slurm may signal only the steps, as at a preemption without send_user_signal: a script's launchers leave this file.
    export STOPPED_FILE=$logs/.stopped-$job
    rm -f "$STOPPED_FILE"
    : >"$errors"
    tail -c "+$(($(stat -Lc %s "$head_log") + 1))" -f -s 0.2 "$head_log" &
    tails+=("$!")
    tail -c +1 -f -s 0.2 "$errors" >&2 &
    tails+=("$!")
    status=0 step=$1
    if [[ -z $signal ]]; then
        "$@" 2>"$errors" &
        step_pid=$!
        if [[ $signal == USR1 ]]; then stop_step USR1; fi # it came after the test above
        while :; do # a trap interrupts wait
            before=$signals status=0
            wait "$step_pid" || status=$?
            if ((before == signals)); then break; fi
        done
    fi
    sleep 0.5
    kill "${tails[@]}" "${stopper[@]}" 2>/dev/null
    wait "${tails[@]}" 2>/dev/null || true
    greatest=$status
    first=$(grep --max-count=1 '^srun: error: .*: tasks\? [0-9,-]*: ' "$errors")
    if [[ $step == srun && $first =~ ": Exited with exit code "([0-9]+)$ ]]; then status=${BASH_REMATCH[1]}; fi
}

# Make the job elastic: serve its store here, so that it survives the loss of other nodes, and let srun continue after a loss.
make_elastic() {
    export MIN_NODES=${MIN_NODES:-1} MAX_RESTARTS=${MAX_RESTARTS:-10} RDZV_ENDPOINT
    export RDZV_ID=$job.$restarts ENDED_FILE=$logs/.ended-$job
    local store is_ready=$logs/.store-$job bound=$((SECONDS + ${RDZV_TIMEOUT_S:-300}))
    RDZV_ENDPOINT=$MASTER_ADDR:$MASTER_PORT
    rm -f "$is_ready" "$ENDED_FILE"
    exec_python -m scripts.launch.elastic "$MASTER_PORT" "" "$is_ready" &
    store=$!
    # shellcheck disable=SC2064 # expand the process id now
    trap "kill -KILL $store 2>/dev/null" EXIT # KILL: at TERM, srun (pyxis) prints a message
    while [[ ! -e $is_ready ]] && kill -0 "$store" 2>/dev/null && ((SECONDS < bound)); do sleep 0.2; done
    if [[ ! -e $is_ready ]]; then
        kill -KILL "$store" 2>/dev/null
        status=0
        wait "$store" || status=$?
        if ((status == 75)); then requeue "another process took port $MASTER_PORT"; fi
        fail "its store did not start on $RDZV_ENDPOINT (status $status); its error is above, fix it and submit again"
    fi
    disown "$store"
    srun+=(--no-kill --kill-on-bad-exit=0)
}

# stop_step SIGNAL: Slurm sends its signal before the time limit or a preemption to this script only (B:). Pass it on to
# the ranks until they have ended, or a script's launcher has noted it: a step that is about to begin would miss it.
# TERM, too, may be a user's own (--signal=B:TERM@120); if it is scancel's, the job's state says so at the end.
stop_step() {
    if ((${#stopper[@]})); then return; fi # a repeated signal
    signal=USR1
    if [[ $1 == TERM ]]; then unanswered="perhaps CANCELLED"; fi
    echo "job $job got $1: ranks write a checkpoint"
    if [[ -z $step_pid ]]; then return; fi # run_step starts no step, or calls this again
    if ! kill -0 "$step_pid" 2>/dev/null; then return; fi # the step has ended
    while :; do
        if [[ $step == srun ]]; then # the steps, not this script
            # If Slurm ends the job itself, its steps know; scancel would wait, and signal those of the job's next start.
            if [[ $(job_field JobState) =~ ^(RUNNING)?$ ]]; then timeout 8 scancel --signal="$1" "$job" 2>/dev/null; fi
        else
            kill -s USR1 "$step_pid" 2>/dev/null # mpirun passes it to its ranks; at TERM it would end them
        fi
        read -rt 10 <> <(:) # nothing comes: a wait of 10 s that ends with this process, as a sleep would not
        if [[ -n ${SCRIPT:-} && -e $STOPPED_FILE ]]; then break; fi
    done &
    stopper=("$!")
}

# Whether a text can be a run's name. In the C locale: in others, classes of characters have more or fewer letters.
is_plain_name() {
    local LC_ALL=C pattern='^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$'
    [[ $1 =~ $pattern ]]
}

# Exit if an earlier start of this job has completed: since 24.05, Slurm requeues a job at its end if an earlier start was
# preempted and did not end within the grace time. The first start removes what another job of this number has left.
leave_if_complete() {
    complete=$logs/.complete-$job first_start=$logs/.first-start-$job
    if ((restarts == 0)); then rm -f "$complete"; fi
    # Slurm also counts a start that never ran this script, as its node was lost before.
    if ((restarts > 0)) && [[ ! -e $first_start && ! -e $run_dir/config.json ]]; then
        echo "warning: job $job, start $((restarts + 1)): no earlier start has written to $logs; is this the same disk?" >&2
    fi
    if ((restarts == 0)) || [[ ! -e $first_start ]]; then cat "$run_dir/config.json" >"$first_start" 2>/dev/null; fi
    if [[ -e $complete ]]; then
        echo "job $job, start $((restarts + 1)): an earlier start has completed; to run it again, submit another job"
        exit 0
    fi
}

# Exit with the job's status, or requeue an incomplete job.
end_job() {
    if is_complete; then
        touch "$complete"
        exit 0
    fi
    start_again
    local log refusal=""
    # All nodes refuse most jobs for the same reason: the head's line is in the job's output already.
    if ((status == 2)) && [[ -z ${SCRIPT:-} ]]; then refusal=$(errors_in "$head_log" | grep -v 'lost another rank'); fi
    for log in "$logs"/*.txt; do
        if [[ -z $refusal && ! $log -ef $head_log && $log -nt $started ]]; then
            errors_in "$log" | tail -n 1 | sed "s/^/[$(basename "$log" .txt)] /"
        fi
    done | shorten >&2
    echo "error: job $job ended with status $status; all nodes' logs are in $logs" >&2
    exit "$status"
}

# errors_in LOG: print the errors that a node has written to its log in this start.
errors_in() {
    tail -c "+$((${earlier_bytes[$1]:-0} + 1))" "$1" 2>/dev/null | grep '^error: '
}

# Print at most 20 of the lines on standard input; of more, those first that name a cause, not the loss of another rank.
shorten() {
    local lines count
    lines=$(cat)
    count=$(wc -l <<<"$lines")
    if ((count > 20)); then
        lines=$({ grep -v 'lost another rank' <<<"$lines"; grep 'lost another rank' <<<"$lines"; } | head -n 20)
        lines+=$'\n'"... and $((count - 20)) more nodes with errors"
    fi
    if [[ -n $lines ]]; then echo "$lines"; fi
}

# Requeue an incomplete job that was stopped, lost a node or the port, or has a broken GPU; else return.
start_again() {
    local state preempted lost broken
    state=$(job_field JobState)
    state=${state:-${unanswered:-RUNNING}} # empty: Slurm does not answer
    preempted=$(job_field PreemptTime | grep '[0-9]')
    if [[ $state != RUNNING ]]; then
        # scancel, or a manual requeue: Slurm ends this script, too.
        echo "job $job is $state and its ranks have left; $go_on"
        exit 1
    elif [[ ($signal == USR1 || $preempted) && $greatest != 2 ]]; then
        if [[ -z $preempted ]] && ! has_progress; then
            fail "its time is up, and it has written nothing to $run_dir since its start, so that it is not requeued; write checkpoints to RUN_DIR, or give it more --time"
        fi
        requeue "it was stopped before its end"
    elif ((status == 75 || greatest == 75)); then # other nodes may have reached the port's owner instead
        requeue "another process took port $MASTER_PORT"
    elif ((status == 0)); then
        fail "its ranks were asked to stop before their end; $go_on"
    elif ((greatest != 2)); then
        lost=$(lost_nodes)
        if [[ -n $lost ]]; then requeue "no answer from $lost"; fi
        broken=$(broken_nodes)
        if [[ -n $broken ]]; then leave_out "$broken"; fi
    fi
}

# begin_submitted PYTHON SCRIPT MAX_REQUEUES LOGS RUN_DIR...: begin_job for a job of make submit, whose ranks submitit
# starts (slurm/submit.py). Each task of an array has its own RUN_DIR. SCRIPT is "" for a recipe.
begin_submitted() {
    local run_dirs=("${@:5}")
    trap : TERM # the ranks get it, too, and write a checkpoint
    identify_job
    PYTHON=$1 SCRIPT=$2 MAX_REQUEUES=$3 logs=$4 run_dir=${run_dirs[${SLURM_ARRAY_TASK_ID:-0}]} recipe=""
    srun=(srun) container=() gpus=${SLURM_GPUS_ON_NODE:-0} started=$logs/$job.started
    # Rank 0 writes its exit status, and the signal that stopped it, to STATUS_FILE. Each start has another port.
    export STATUS_FILE=$logs/${job}_status RESUMES="" MASTER_ADDR MASTER_PORT PORT_IS_CHOSEN=1
    MASTER_ADDR=$(address_of "${nodes%%$'\n'*}") MASTER_PORT=$(free_port)
    rm -f "$STATUS_FILE"
    touch "$started"
    leave_if_complete
    if resumes; then RESUMES=1; fi
    fill_sockets
    show_share submit
}

# end_submitted STATUS: end_job for a job of make submit, whose srun ended with this status. slurm/submit.py prints errors.
end_submitted() {
    status=$1 greatest=$1 signal=""
    if [[ -e $STATUS_FILE ]]; then read -r status signal <"$STATUS_FILE"; fi
    if ((status == 2)); then greatest=2; fi
    if ((status == 0)); then status=$greatest; fi
    if is_complete; then
        touch "$complete"
        exit 0
    fi
    echo "$((status == 0 ? 1 : status))" >"$STATUS_FILE.tmp" && mv "$STATUS_FILE.tmp" "$STATUS_FILE" # for slurm/submit.py
    go_on="to resume: make submit ... NAME=$(basename "$run_dir") ARGS=\"... --resume auto\""
    if [[ -n $SCRIPT ]]; then go_on="to resume: RESUME=auto make submit ... NAME=$(basename "$run_dir")"; fi
    start_again
    exit "$status"
}

# Whether the run is complete. A recipe's record shows it. A script is complete if it was not stopped. In an elastic job,
# lost nodes do not count, and a script is complete if one node ended well and none failed.
is_complete() {
    if [[ -z ${SCRIPT:-} ]]; then
        if [[ $run_dir/result.json -nt $started ]]; then
            [[ $status == 0 || -n ${RDZV_ENDPOINT:-} ]]
        else
            [[ $status == 0 ]] && keeps_no_record && [[ -z $signal ]]
        fi
    elif [[ -n ${RDZV_ENDPOINT:-} && -z $signal && -e ${ENDED_FILE:-} ]]; then
        # 137: killed in a container; 69: the node lost the store.
        ! grep 'Exited with exit code' "$logs/.srun-$job" | grep -qvE 'code (69|137)$'
    else
        [[ $status == 0 && -z $signal && ! -e ${STOPPED_FILE:-} ]]
    fi
}

# Whether status 0 without a record is the end: of the probe, and of --help. Ranks that got a signal which this script did
# not see, such as scancel --signal=TERM, end with it as well. In make submit (no $recipe), rank 0 hands on its signal.
keeps_no_record() {
    if [[ -z $recipe ]]; then
        [[ ! -e $run_dir/config.json ]]
    else
        [[ $recipe == probe || " ${options[*]} " =~ " "(--help|-h)" " ]]
    fi
}

# Whether a script wrote to its folder in this start; if not, every restart would begin from step 0.
has_progress() {
    [[ -z ${SCRIPT:-} || -n $(find "$run_dir" -path "$logs" -prune -o -type f -newer "$started" -print -quit) ]]
}

# persist COMMAND...: run a command of Slurm, up to three times if its controller is busy or restarts.
persist() { "$@" || { sleep 5 && "$@"; } || { sleep 5 && "$@"; }; }

job_field() {
    persist scontrol show job "$job" --oneliner | sed -n "s/.* $1=\([^ ]*\).*/\1/p"
}

# Print the nodes that do not start a command within 20 s. If no node does, the fault is srun's: print none. At most 100 are
# asked at once: of a thousand steps, Slurm's controller would begin many too late, and their nodes would seem lost.
lost_nodes() {
    local lost
    # shellcheck disable=SC2016 # expanded for each node
    lost=$(xargs --max-procs=100 --max-args=1 bash -c '
        timeout 20 srun --overlap --immediate=10 --nodes=1 --ntasks=1 --nodelist="$0" true </dev/null &>/dev/null ||
            echo "$0"' <<<"$nodes")
    if (($(wc -w <<<"$lost") < $(wc -w <<<"$nodes"))); then grep -Fxf - <(echo "$nodes") <<<"${lost:-/}" | paste -sd " "; fi
}

# Print a line for each fault of a GPU or memory, with its node; 100 nodes are asked at once, for 30 s, under pyxis for 300 s,
# since it unpacks the image first.
broken_nodes() {
    local node asked=0 limit_s=30
    if [[ "${srun[*]}" == *--container-image* ]]; then limit_s=300; fi
    while read -r node; do
        if ((asked++ % 100 == 0)); then wait; fi
        timeout "$limit_s" "${srun[@]}" --overlap --immediate=10 --output=all --nodes=1 --ntasks=1 --nodelist="$node" \
            "${container[@]}" "$PYTHON" -m scripts.doctor.gpus --since-s "$((SECONDS + limit_s + 30))" </dev/null 2>/dev/null |
            sed -n "s/^error: /$node: /p" &
    done <<<"$nodes"
    wait
}

# leave_out LINES: requeue the job without these nodes, unless it has excluded too many or too few others remain.
leave_out() {
    local limit=${MAX_EXCLUDED:-3} list=$logs/excluded.txt new all others old usable why
    echo "job $job: ${1//$'\n'/$'\n'job $job: }" | tee -a "$list" # for later starts, and for administrators
    new=$(cut -d: -f1 <<<"$1" | sort -u | paste -sd,)
    all=$(sed -n "s/^job $job: \([^:]*\): .*/\1/p" "$list" | sort -u)
    old=$(job_field ExcNodeList | grep -v '^(null)$')
    usable=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format="%N %t" |
        awk '$2 !~ /^(down|drain|drng|fail|failg|maint|unk|inval)/ { print $1 }' | sort -u)
    others=$({
        echo "$all"
        if [[ -n $old ]]; then scontrol show hostnames "$old"; fi
    } | sort -u | comm -13 - <(echo "$usable") | wc -l)
    if (($(wc -l <<<"$all") > limit)); then
        why="a job may exclude at most $limit nodes (MAX_EXCLUDED); have those in $list repaired"
    elif ((others < NNODES)); then
        why="partition $SLURM_JOB_PARTITION has $others other working nodes for $NNODES; have it repaired"
    else
        requeue "fault on $new, excluded from now on" "${old:+$old,}$new"
    fi
    echo "error: job $job: fault on $new, and $why; $go_on" >&2
}

# Whether Slurm requeues this preempted job at the end of its script, as it does since 24.05, up to MaxBatchRequeue times. If the
# script asked for it as well, Slurm would requeue the next start, too, at its end.
slurm_requeues() {
    local config shown version='SLURM_VERSION = ([0-9]+)\.([0-9]+)' limit='MaxBatchRequeue = ([0-9]+)'
    config=$(scontrol show config | tr -s ' ') shown=$(scontrol show job "$job" --oneliner)
    [[ $shown == *' Requeue=1 '* && $config == *'PreemptType = preempt/partition_prio'* &&
        $(scontrol show partition "$SLURM_JOB_PARTITION") =~ ' PreemptMode='(GANG,)?REQUEUE ]] &&
        [[ $config =~ $version ]] && ((BASH_REMATCH[1] * 100 + 10#${BASH_REMATCH[2]} >= 2405)) &&
        [[ $config =~ $limit ]] && (($(job_field BatchFlag) < BASH_REMATCH[1]))
}

# requeue REASON [NODES]: requeue the job, without these nodes, and exit.
requeue() {
    local limit=${MAX_REQUEUES:-10} excluded=${2:-}
    if ((restarts >= limit)); then
        if [[ -n ${preempted:-} ]]; then scontrol update "JobId=$job" Requeue=0; fi # else Slurm requeues it
        fail "$1, and it has started $((restarts + 1)) times (MAX_REQUEUES=$limit); $go_on"
    fi
    echo "job $job: $1; it is requeued and resumes from its last checkpoint"
    if [[ -n ${preempted:-} && -z $excluded ]] && slurm_requeues; then exit 1; fi
    if [[ -n $excluded ]]; then trap '' TERM; else trap - TERM; fi
    persist scontrol requeue "$job" || fail "it could not be requeued; $go_on"
    if [[ -z $excluded ]]; then exec sleep 60; fi # Slurm ends this script
    # Slurm does not change a running job. The job cannot start again before this script has ended.
    scontrol update "JobId=$job" "ExcNodeList=$excluded" ||
        fail "Slurm did not take ExcNodeList=$excluded; it may get these nodes again"
    exit 1
}
