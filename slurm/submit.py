"""Submit a recipe to Slurm from Python, by submitit, and follow it: one task for each rank, no sbatch file.

    python -m slurm.submit ddp --nodes 2 --gpus-per-node 8 --time 2:00:00 -- --epochs 90
    python -m slurm.submit ddp --gpus-per-node 1 --sweep "lr=0.01,0.02 seed=1,2" -- --epochs 3
    python -m slurm.submit ddp --nodes 2 --local

On success, the last line is the recipe's own, `result recipe=ddp world_size=16 ...` (a table for a sweep), and the
status is 0; it is 2 for a refusal and 1 for a failed job. The record is runs/NAME; submitit's files and the log of
each rank are in runs/NAME/slurm. `make submit` calls it; docs/submitit.md has more.
Source: https://github.com/facebookincubator/submitit.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.common.arguments import non_negative_int, plain_name, positive_int
from recipes.common.errors import UserError
from recipes.common.folders import refresh_names
from recipes.common.options import Options
from recipes.common.process.entry import USAGE_STATUS
from recipes.common.process.node import shell_status
from scripts.launch import script
from scripts.launch.command import (
    ONE_PROCESS,
    RECIPE_OPTIONS,
    ROOT,
    CommandParser,
    check_recipe,
    command,
    gpus,
    next_folder,
    parse,
)
from scripts.launch.local import visible_gpus
from scripts.launch.processes import run_in_foreground
from scripts.launch.recipe_options import read_option
from slurm.sweep import grid_points, point_argv, report
from slurm.training import SIGNAL, Run

SIGNAL_DELAY_S = 120
"""How long before the time limit ranks are signalled to write a checkpoint, at most a quarter of the limit."""

POLL_S = 0.3
ASK_S = (2.0, 10.0)
"""Seconds between two queries of a job's state: in the first minute, and later."""

SILENCE_S = 300.0
"""The state of a job is printed again after this long without output."""

MOST_CAUSES = 20
"""Of a failed job, the errors of at most this many ranks are printed."""

FINAL_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("TIMEOUT", "GONE"),
)

REFUSED = {
    "horovod": "horovod has a launch file of its own: sbatch slurm/horovod.sbatch",
    "spawn": "spawn starts its ranks by itself, here Slurm does: RECIPE=ddp trains the same, "
    "or sbatch slurm/spawn.sbatch",
}


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return this command's own arguments, with the recipe's (after --) in `options`; raises UserError."""
    parser = CommandParser("python -m slurm.submit", __doc__, RECIPE_OPTIONS)
    parser.add_argument("recipe", metavar="RECIPE")
    add = parser.add_argument_group("resources (default: the cluster's)").add_argument
    add("--nodes", type=positive_int, default=1, metavar="N", help="number of nodes")
    add("--gpus-per-node", type=gpus, metavar="G", help="GPUs to ask for on each node: 8, or h100:8")
    add("--nproc-per-node", type=positive_int, metavar="P", help="processes a node (default: its GPUs, else 1)")
    add("--cpus-per-task", type=positive_int, metavar="C", help="cores for each process")
    add("--mem", help="memory of a node, such as 64GB")
    add("--time", type=minutes, metavar="TIME", help="limit: minutes, or 2:00:00, or 1-12:00:00")
    for name in ("partition", "constraint", "account", "qos"):
        add(f"--{name}", help=f"Slurm's --{name}")
    add = parser.add_argument_group("job").add_argument
    add("--name", type=plain_name, help="the run's name (default: the recipe with the next number)")
    add("--sweep", metavar="GRID", help='a run for each point of a grid: "lr=0.1,0.2 seed=1,2"')
    add("--max-requeues", type=non_negative_int, default=10, metavar="N", help="times that a job may be requeued")
    add("--local", action="store_true", help="start all processes on this machine, without Slurm")
    add("--follow", action=BooleanOptionalAction, default=True, help="watch the job until its end")
    args = parse(parser, argv)
    check_recipe(args.recipe)
    args.gpus = None if args.gpus_per_node is None else int(args.gpus_per_node.rpartition(":")[2])
    return args


def minutes(text: str) -> int:
    """Return a time as Slurm writes it in minutes, rounded up: 90, 90:00, 1:30:00, 1-12, 1-12:30, 1-12:30:00."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if match:
        days, *clock = (int(group or 0) for group in match.groups())
        units_s = (3600, 60, 1) if match[1] or match[4] else (60, 1, 0)
        total_s = days * 86400 + sum(number * unit_s for number, unit_s in zip(clock, units_s, strict=True))
        if total_s > 0:
            return math.ceil(total_s / 60)
    raise ArgumentTypeError(f"expects minutes, 2:00:00 or 1-12:00:00 (a day and a half), got {text!r}")


def check_job(args: Namespace) -> None:
    """Set the number of processes per node; raises UserError for what this launcher cannot start."""
    if args.recipe in REFUSED:
        raise UserError(f"{REFUSED[args.recipe]}; on this machine: make run RECIPE={args.recipe}")
    is_single = args.recipe in ONE_PROCESS
    if is_single and (args.nodes, args.nproc_per_node or 1) != (1, 1):
        raise UserError(f"{args.recipe} is one process; NODES=1 NPROC_PER_NODE=1, or RECIPE=ddp")
    if not args.local or args.gpus is not None:  # else the local launcher decides
        args.nproc_per_node = args.nproc_per_node or (1 if is_single else args.gpus) or 1
    if args.local and not args.follow:
        raise UserError("--local is followed to its end; drop --no-follow")
    if args.local and args.gpus and read_option("--device", "auto", args.options) != "cpu":
        needed, there = args.nodes * args.gpus, len(visible_gpus())
        if there < needed:
            where = f"GPUS={args.gpus} on {args.nodes} node{'s' * (args.nodes > 1)} of this machine"
            raise UserError(f"{where}: {there} of {needed} GPUs are there; lower GPUS, or leave it out")
    for name in () if args.local else ("sbatch", "srun", "squeue", "scontrol", "sinfo"):
        if not shutil.which(name):
            other = "use --local (make submit: LOCAL=1), or run this on the cluster's login node"
            raise UserError(f"there is no {name} in PATH; {remedy(other)}")


def remedy(other: str) -> str:
    """Return how to reach a cluster of `make slurm-up` that is not in PATH yet; without one, return `other`."""
    state = os.environ.get("SLURM_CLUSTER_DIR", "/run/cluster-recipes-slurm")
    is_used = f"{state}/bin" in os.environ.get("PATH", "").split(os.pathsep)
    if is_used or not Path(state, "activate").exists():
        return other
    return f"for the cluster of make slurm-up: source {shlex.quote(state)}/activate"


def plan_runs(args: Namespace) -> tuple[Path, list[Run]]:
    """Return the folder of the job (or of the whole sweep) and its runs; the recipe itself checks all options.

    Raises:
        UserError: an option that the recipe refuses, a name that is taken, or a script that cannot run.
    """
    points = grid_points(args.sweep) if args.sweep else [{}]
    device = []
    if script.is_set():
        kind, runs_dir, name = script.read_script().stem, script.runs_dir(), args.name
    else:
        parse_options = importlib.import_module(f"recipes.{args.recipe}.train").options
        parsed = parse_options(args.options)
        kind, runs_dir = args.recipe, getattr(parsed, "runs_dir", Path("runs"))
        name, resume = args.name or getattr(parsed, "name", None), getattr(parsed, "resume", "none")
        if resume == "auto" and not name:
            raise UserError("--resume auto needs the run's name: NAME=... (--name)")
        # A job that asked for GPUs never trains on CPUs, unless the user's own --device, which comes later, asks.
        device = ["--device", "cuda"] if args.gpus and parsed.device == "auto" else []
    argvs = [[*device, *args.options, *point_argv(point)] for point in points]
    for argv in argvs if not script.is_set() else ():
        own = parse_options(argv)
        if args.nproc_per_node and isinstance(own, Options):
            own.check_world_size(args.nodes * args.nproc_per_node)
    folder = runs_dir / name if name else next_folder(kind, runs_dir)
    folders = [runs_dir / run_name for run_name in run_names(folder.name, points)]
    runs = [Run(args.recipe, *of_run) for of_run in zip(argvs, folders, points, strict=True)]
    for run in runs:
        if script.is_set():
            run.script = script.job_environment(run.folder.name)
        elif (run.folder / "metrics.jsonl").exists() and not parsed.overwrite and resume != "auto":
            fix = "add --resume auto to resume it, --overwrite to replace it, or choose another NAME"
            raise UserError(f"the run {run.folder} exists; {fix}")
        elif hasattr(parsed, "name"):  # the probe keeps no record
            run.argv += ["--name", run.folder.name]
    return folder, runs


def run_names(name: str, points: list[dict[str, str]]) -> list[str]:
    """Return a name for each point: NAME-lr0.1-seed1, or numbered (NAME-0) if those are invalid or not unique."""
    if points == [{}]:
        return [name]
    texts = ["-".join([name, *(f"{key}{value}" for key, value in point.items())]) for point in points]
    if len(set(texts)) == len(texts) and all(re.fullmatch(r"[A-Za-z0-9._-]{1,100}", text) for text in texts):
        return texts
    return [f"{name}-{number}" for number in range(len(points))]


# ---- by Slurm


def slurm_options(args: Namespace) -> dict[str, Any]:
    """Return the sbatch options that the arguments stand for; the cluster decides those that are not given."""
    limit_s = 60 * (args.time or 1440)
    given = {
        "nodes": args.nodes,
        "ntasks-per-node": args.nproc_per_node,
        "gpus-per-node": args.gpus_per_node if args.gpus else None,
        "signal": f"{SIGNAL.name.removeprefix('SIG')}@{min(SIGNAL_DELAY_S, limit_s // 4)}",
        **{name: getattr(args, name) for name in ("mem", "time", "partition", "constraint", "account", "qos")},
        "cpus-per-task": args.cpus_per_task,
    }
    return {name: value for name, value in given.items() if value is not None}


def check_by_slurm(options: dict[str, Any]) -> None:
    """Let Slurm check the job before it is queued: an impossible job might wait forever. Raises UserError."""
    test = ["sbatch", "--test-only", *(f"--{name}={value}" for name, value in options.items()), "--wrap=true"]
    shown = subprocess.run(test, capture_output=True, text=True, timeout=60)
    if shown.returncode:
        lines = [re.sub(r"^(sbatch: )?(error: )?", "", line) for line in shown.stderr.splitlines()]
        if any("configuration source" in line for line in lines):
            other = "submit from a login node, or use --local (make: LOCAL=1)"
            raise UserError(f"no Slurm is configured on this machine; {remedy(other)}")
        why = "; ".join(lines)
        # The test leaves out nodes that are down or drained, for which sbatch queues a job.
        nodes = unavailable_nodes(options) if "allocation failure" in why else set()
        if not nodes:
            raise UserError(f"Slurm refuses the job: {why}; {remedy('see sinfo')}")
        are = "nodes are" if len(nodes) > 1 else "node is"
        found = f"{len(nodes)} {are} down or drained, see sinfo --list-reasons"
        print(f"warning: the job may have to wait: {why}; {found}", file=sys.stderr)


def unavailable_nodes(options: dict[str, Any]) -> set[str]:
    """Return the nodes that are down or drained in the job's partition, if it takes jobs of as many nodes."""
    command = ["sinfo", "--noheader", "--Node", "--format=%N %P %s", "--states=down,drain,fail"]
    command += [f"--partition={options['partition']}"] if "partition" in options else []
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    rows = [line.split() for line in shown.splitlines()]  # ["n2", "gpu*", "1-infinite"]; *: the default partition

    def takes(partition: str, most: str) -> bool:
        is_chosen = "partition" in options or partition.endswith("*")
        return is_chosen and (most == "infinite" or int(most) >= options["nodes"])

    return {node for node, partition, sizes in rows if takes(partition, sizes.split("-")[-1])}


def submit_runs(args: Namespace, folder: Path, runs: list[Run]) -> list[Any]:
    """Submit the runs, as an array if there are several; return submitit's job of each. Raises UserError."""
    import submitit

    options = slurm_options(args)
    check_by_slurm(options)
    # The stop signals stay blocked until the recipe handles them.
    python = f"{shlex.quote(sys.executable)} -m scripts.launch.hold_signals"
    executor = submitit.SlurmExecutor(folder / "slurm", python=python)
    path = runs[0].program if runs[0].script else ""
    own = (sys.executable, path, args.max_requeues, ROOT / folder / "slurm", *(run.folder for run in runs))
    # In Slurm 22.05 and 23.02, srun does not inherit --cpus-per-task from the job.
    cores = [f"--cpus-per-task={args.cpus_per_task}"] if args.cpus_per_task else []
    executor.update_parameters(
        job_name=folder.name,
        stderr_to_stdout=True,
        time=None,  # submitit's default is 5 minutes
        setup=[f"source {shlex.quote(str(ROOT))}/slurm/job.sh", shlex.join(["begin_submitted", *map(str, own)])],
        teardown=["end_submitted $?"],
        srun_args=["--wait=0", "--kill-on-bad-exit=1", *cores],
        additional_parameters={**options, "requeue": True},  # also after the loss of a node
    )
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it raises as well
            return list(executor.submit_array(runs))
    except submitit.core.utils.FailedJobError as error:
        raise UserError(f"Slurm refuses the job: {' '.join(str(error).split())}") from None


States = dict[str, tuple[str, str, int]]
"""State, reason and number of restarts of a job, or of an array's tasks, by id."""


def ask_slurm(number: str, known: States) -> States:
    """Return the states of a job and of its array's tasks, as Slurm reports them.

    squeue lists every job until some minutes after its end (MinJobAge, 300 s) and needs no accounting database. A
    job that it no longer lists is GONE. If squeue does not answer, the last state stays, and the reason says why.
    """
    # Give the number twice: squeue reports an error for a single one that it does not know.
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={number},{number}"]
    command += ["--Format=JobArrayID:|,State:|,Reason:|,RestartCnt:|"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        why = str(getattr(error, "stderr", None) or error).strip().split("\n")[0]
        return {id_: (state, why, restarts) for id_, (state, _, restarts) in known.items()}
    rows = (line.split("|") for line in shown.splitlines())
    states = {id_: (state, reason, int(restarts)) for id_, state, reason, restarts, *_ in rows}
    return dict.fromkeys(known, ("GONE", "None", 0)) | states


class Watched:
    """A submitted job, and what has been seen of it so far."""

    def __init__(self, run: Run, job: Any) -> None:
        self.run, self.id = run, job.job_id
        point = ", ".join(f"{name} {value}" for name, value in run.point.items())
        self.title = f"job {self.id}" + (f" ({point})" if point else "")
        path = Path(job.paths.stdout)
        self.log = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path  # of rank 0
        # Rank 0 writes its exit status to this file, and then the batch script that of the job.
        self.status_file = self.log.with_name(f"{self.id}_status")
        self.state, self.restarts = "UNKNOWN", 0
        self.shown, self.log_offset, self.last_output = "", 0, time.monotonic()

    def say(self, text: str) -> None:
        """Print a line, and note the time."""
        print(text, flush=True)
        self.last_output = time.monotonic()

    def look(self, states: States) -> bool:
        """Print what is new in the job's state and log; return whether the job has ended."""
        self.state, reason, restarts = states.get(self.id, ("UNKNOWN", "None", 0))
        is_done = self.state in FINAL_STATES
        is_completing = self.state == "COMPLETING"
        if is_done:
            refresh_names(self.log.parent)
        if restarts > self.restarts and not is_completing:  # its ranks have written their last lines
            self._show_log(is_done)
            self.say(f"{self.title}: requeued, start {restarts + 1}")
            self.restarts = restarts
        has_reason = self.state == "PENDING" and reason != "None"
        shown = f"{self.state} ({reason})" if has_reason else self.state
        is_new = shown != self.shown and not is_completing  # the result must be the last line
        if not is_done and (is_new or time.monotonic() > self.last_output + SILENCE_S):
            self.say(f"{self.title}: {shown}")
        self.shown = shown
        self._show_log(is_done)
        return is_done

    def _show_log(self, is_done: bool) -> None:
        """Print the lines that rank 0 has added (none of a sweep), only complete ones until the job is done."""
        if self.run.point:
            return
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(self.log_offset)
            for line in file:
                if not (is_done or line.endswith(b"\n")):
                    break
                self.log_offset += len(line)
                if not line.startswith(b"submitit "):
                    self.say(line.decode(errors="replace").rstrip("\n"))

    def end(self) -> int:
        """Return 0, or 2 if the recipe refused the job, or else 1; print in a few lines why the job failed."""
        words = self.status_file.read_text().split() if self.status_file.exists() else []
        status = int(words[0]) if words else 1  # without words: the disk was full
        if self.state == "COMPLETED" or (self.state == "GONE" and status == 0):
            return 0
        pattern = self.log.name.replace("_0_log", "_*_log")
        causes, seen = [], {""}
        for log in sorted(self.log.parent.glob(pattern)):  # rank 0's first
            is_shown = log.name == self.log.name and not self.run.point
            cause = cause_in(log.read_text(errors="replace"))
            if not is_shown and cause not in seen:
                causes.append(f"{log.name}: {cause}")
            seen.add(cause)
        if len(causes) > MOST_CAUSES:  # the loss of another rank is no cause
            causes.sort(key=lambda line: "lost another rank" in line)
            causes[MOST_CAUSES:] = [f"... and {len(causes) - MOST_CAUSES} more ranks with errors"]
        for line in causes:
            print(line, file=sys.stderr)
        refused = status == USAGE_STATUS
        how = f"ended before the run was complete ({self.state})"
        if refused and not script.is_set():
            how = "was refused by the recipe"
        print(f"error: {self.title} {how}; all ranks' logs: {self.log.with_name(pattern)}", file=sys.stderr)
        return USAGE_STATUS if refused else 1


def cause_in(log: str) -> str:
    """Return the most telling line of a rank's last start, a refusal or an exception; "" if there is none."""
    newest = log.split(" - Starting with JobEnvironment")[-1]
    lines = re.findall(r"^(error: .*|[\w.]+(?:Error|Exception): .*)$", newest, re.MULTILINE)
    return lines[-1] if lines else ""


def watch(jobs: list[Watched], number: str) -> None:
    """Print the progress of the jobs, all of one array, until each has ended."""
    states: States = {}
    began, asked = time.monotonic(), -math.inf
    while jobs:
        now = time.monotonic()
        is_ending = any(job.state in ("RUNNING", "COMPLETING") and job.status_file.exists() for job in jobs)
        if now > asked + (1.0 if is_ending else ASK_S[now > began + 60]):
            states, asked = ask_slurm(number, states), now
        jobs = [job for job in jobs if not job.look(states)]
        time.sleep(POLL_S)


def submit_to_slurm(args: Namespace, folder: Path, runs: list[Run]) -> int:
    """Submit the runs as one job or one array, and follow them; return the exit status."""
    left = "\na job may have been queued: squeue --me lists yours"  # sbatch may not have said so yet
    try:
        submitted = submit_runs(args, folder, runs)
        number = submitted[0].job_id.split("_")[0]
        jobs = [Watched(run, job) for run, job in zip(runs, submitted, strict=True)]
        log = jobs[0].log if len(jobs) == 1 else jobs[0].log.with_name(f"{number}_*_0_log.out")
        again = f"to follow it: tail -n +1 -F {log}; to cancel it: scancel {number}"
        left = f"\njob {number} continues; {again}"
        print(f"job {number}: {describe(args, runs)}, record {folder}, log {log}", flush=True)
        if not args.follow:
            print(again, flush=True)
            return 0
        watch(jobs, number)
    except KeyboardInterrupt:
        print(left, flush=True)
        return 128 + signal.SIGINT
    statuses = [job.end() for job in jobs]
    if args.sweep:
        report(runs, statuses)
    return max(statuses)


# ---- on this machine


def train_here(args: Namespace, folder: Path, runs: list[Run]) -> int:
    """Train on this machine as `make run` does: become its launcher, or run a sweep's points one after another."""
    print(f"{describe(args, runs)}, all on this machine, record {folder}", flush=True)
    nodes = ["--nodes", str(args.nodes)]
    if args.nproc_per_node:
        nodes += ["--nproc-per-node", str(args.nproc_per_node)]
    nodes.append(f"--how-to-resume=to resume, the same command with NAME={folder.name} ARGS='... --resume auto'")
    launcher = [sys.executable, "-m", "scripts.launch.local", args.recipe, *nodes]
    names = [[f"--name={run.folder.name}"] if run.script else [] for run in runs]
    commands = [[*launcher, *name, "--", *run.argv] for name, run in zip(names, runs, strict=True)]
    if not args.sweep:
        os.execv(launcher[0], commands[0])
    statuses = [run_in_foreground(command) for command in commands]
    report(runs, statuses)
    return max(map(shell_status, statuses))


def describe(args: Namespace, runs: list[Run]) -> str:
    """Return a description of what is started."""
    points = f"{len(runs)} points of {runs[0].program}" if args.sweep else runs[0].program
    with_gpus = f", {args.gpus} GPUs a node" if args.gpus else ""
    processes = f" x {args.nproc_per_node} processes" if args.nproc_per_node else f" node{'s' * (args.nodes > 1)}"
    return f"{points} on {args.nodes}{processes}{with_gpus}"


@command
def main(argv: list[str]) -> int:
    """Submit a job as the arguments say, and follow it; return the exit status."""
    os.chdir(ROOT)  # jobs run here: they import this package and read scripts/
    args = parse_args(argv)
    check_job(args)
    folder, runs = plan_runs(args)
    try:
        return (train_here if args.local else submit_to_slurm)(args, folder, runs)
    except subprocess.TimeoutExpired as error:
        late = f"Slurm did not answer {error.cmd[0]} within {error.timeout:.0f} s; see sinfo"
        print(f"error: {late}", file=sys.stderr)
        return 1
    finally:
        with contextlib.suppress(OSError):  # the folder of a refused job is empty
            folder.rmdir()


if __name__ == "__main__":
    sys.exit(main())
