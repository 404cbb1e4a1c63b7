"""Submit a recipe to Slurm from Python, by submitit, and follow it: one task for each rank, no sbatch file.

    python -m slurm.submit ddp --nodes 2 --gpus-per-node 8 --time 2:00:00 -- --epochs 90
    python -m slurm.submit ddp --gpus-per-node 1 --sweep "lr=0.01,0.02 seed=1,2" -- --epochs 3
    python -m slurm.submit ddp --nodes 2 --local

Success: the last line is the recipe's own, `result recipe=ddp world_size=16 ...` (of a sweep: a table), and the
status is 0; it is 2 for a refusal and 1 for a job that failed. The record is runs/NAME; submitit's files and the
log of each rank lie in runs/NAME/slurm. `make submit` calls it; docs/submitit.md has more.
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
from argparse import ArgumentTypeError, Namespace
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from recipes.common.entry import USAGE_STATUS
from recipes.common.errors import UserError, nearest
from recipes.common.options import Parser, add_switch, non_negative_int, plain_name, positive_int
from scripts.local import ONE_PROCESS, ROOT, check_recipe, free_port, visible_gpus
from scripts.sweep import grid_points, words
from slurm.training import SIGNAL, Training, status_path

SIGNAL_DELAY_S = 120
"""How long before the time limit ranks are told to write a checkpoint; of a short limit, its last quarter."""

POLL_S = 0.3
SILENCE_S = 300.0
"""After so long without a word the state of a job is printed again."""

STOP_GRACE_S = 60.0
"""How long ranks on this machine may take to write a checkpoint after Ctrl-C."""

PYTHON = f"{shlex.quote(sys.executable)} -m scripts.hold"
"""The interpreter of the ranks, with the stop signals held back until the recipe listens to them."""

JOB_SETUP = [
    # The batch script runs where rank 0 will. The port depends on the job and on its start, so that neither jobs
    # on the same nodes nor two starts of one job meet. It lies below those of outgoing connections.
    "port=$((20000 + (SLURM_JOB_ID * 16 + ${SLURM_RESTART_COUNT:-0}) % 12000))",
    # /proc/net has the sockets of all addresses.
    "while grep -qs \"$(printf '^ *[0-9]*: [0-9A-F]*:%04X ' $port)\" /proc/net/tcp /proc/net/tcp6; do "
    "port=$((port + 1)); done",
    f"export MASTER_PORT=$port PORT_IS_CHOSEN=1 SUBMITIT_PREEMPT_SIGNAL={SIGNAL.name.removeprefix('SIG')}",
]

REFUSED = {
    "horovod": "horovod has a launch file of its own: sbatch slurm/horovod.sbatch",
    "spawn": "spawn starts its ranks by itself, here Slurm does: RECIPE=ddp trains the same, "
    "or sbatch slurm/spawn.sbatch",
}


def parse_args(argv: list[str]) -> Namespace:
    """Return this command's own arguments; what follows -- is the recipe's, in `options`."""
    own, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = Parser("python -m slurm.submit", (__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", metavar="RECIPE", type=check_recipe)
    shape = parser.add_argument_group("shape (what is not given is the cluster's default)")
    shape.add_argument("--nodes", type=positive_int, default=1, metavar="N", help="number of nodes")
    shape.add_argument("--gpus-per-node", type=non_negative_int, metavar="G", help="GPUs to ask for on each node")
    shape.add_argument(
        "--nproc-per-node", type=positive_int, metavar="P", help="processes a node (default: its GPUs, else 1)"
    )
    shape.add_argument("--cpus-per-task", type=positive_int, metavar="C", help="cores for each process")
    shape.add_argument("--mem", help="memory of a node, such as 64GB")
    shape.add_argument("--time", type=minutes, metavar="TIME", help="limit: minutes, or 2:00:00, or 1-12:00:00")
    for name in ("partition", "constraint", "account", "qos"):
        shape.add_argument(f"--{name}", help=f"Slurm's --{name}")
    job = parser.add_argument_group("job")
    job.add_argument("--name", type=plain_name, help="the run's name (default: the recipe and the time)")
    job.add_argument("--sweep", metavar="GRID", help='a run for each point of a grid: "lr=0.1,0.2 seed=1,2"')
    job.add_argument(
        "--max-requeues", type=non_negative_int, default=10, metavar="N", help="times that a job may be requeued"
    )
    job.add_argument("--local", action="store_true", help="start all processes on this machine, without Slurm")
    add_switch(job, "--follow", "watch the job until its end", default=True)
    args, unknown = parser.parse_known_args(own, Namespace(options=options))
    if unknown:
        hint = nearest(unknown[0], parser.flags(), cutoff=0.8) or "; the recipe's own options come after --"
        raise UserError(f"unknown option {unknown[0]}{hint}")
    return args


def minutes(text: str) -> int:
    """Return whole minutes of a time as Slurm writes it: 90, 90:00, 1:30:00, 1-12, 1-12:30, 1-12:30:00."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if not match:
        raise ArgumentTypeError(f"wants minutes, 2:00:00 or 1-12:00:00 (a day and a half), got {text!r}")
    days, first, second, third = (int(group) if group else 0 for group in match.groups())
    if match[1]:
        total = days * 1440 + first * 60 + second + third / 60
    elif match[4]:
        total = first * 60 + second + third / 60
    else:
        total = first + second / 60
    if total <= 0:
        raise ArgumentTypeError(f"wants more than nothing, got {text!r}")
    return math.ceil(total)


def check(args: Namespace) -> None:
    """Set the number of processes a node; raise UserError for what this launcher cannot start."""
    if args.recipe in REFUSED:
        raise UserError(REFUSED[args.recipe])
    is_single = args.recipe in ONE_PROCESS
    if is_single and (args.nodes, args.nproc_per_node or 1) != (1, 1):
        raise UserError(f"{args.recipe} is one process; NODES=1 NPROC_PER_NODE=1, or RECIPE=ddp")
    args.nproc_per_node = args.nproc_per_node or (1 if is_single else args.gpus_per_node) or 1
    if args.local and args.sweep and not args.follow:
        raise UserError("--local trains the points of a sweep one after another; drop --no-follow")
    if not args.local:
        for command in ("sbatch", "srun", "squeue", "scontrol"):
            if not shutil.which(command):
                other = "use --local (make submit: LOCAL=1), or run this on the cluster's login node"
                raise UserError(f"there is no {command} in PATH; {remedy(other)}")


def remedy(other: str) -> str:
    """Return how to reach a cluster of make slurm-up that PATH does not have yet; where there is none, other."""
    state = os.environ.get("SLURM_CLUSTER_DIR", "/run/cluster-recipes-slurm")
    is_used = f"{state}/bin" in os.environ.get("PATH", "").split(os.pathsep)
    if is_used or not Path(state, "activate").exists():
        return other
    return f"for the cluster of make slurm-up: source {shlex.quote(state)}/activate"


@dataclass
class Run:
    """One run of the recipe, which becomes one job."""

    name: str
    folder: Path
    argv: list[str]
    point: dict[str, str]


def plan_runs(args: Namespace) -> tuple[Path, list[Run]]:
    """Return the folder of the job (or of the whole sweep) and its runs, all options checked by the recipe itself.

    Raises:
        UserError: an option that the recipe refuses, a name that is taken.
    """
    recipe_options = importlib.import_module(f"recipes.{args.recipe}.train").options
    parsed = recipe_options(args.options)
    runs_dir = getattr(parsed, "runs_dir", Path("runs"))
    name = args.name or getattr(parsed, "name", None)
    resume = getattr(parsed, "resume", "none")
    if resume == "auto" and not name:
        raise UserError("--resume auto wants to know which run: NAME=... (--name)")
    # A job that asked for GPUs never trains on CPUs, unless the user's own --device, which comes later, says so.
    device = ["--device", "cuda"] if args.gpus_per_node and parsed.device == "auto" else []
    points = grid_points(args.sweep) if args.sweep else [{}]
    plans = []
    for point in points:
        argv = [*device, *args.options, *words(point)]
        recipe_options(argv)
        plans.append((point, argv))
    folder = runs_dir / name if name else new_folder(runs_dir, args.recipe)
    names = run_names(folder.name, points)
    runs = []
    for run_name, (point, argv) in zip(names, plans, strict=True):
        run = Run(run_name, runs_dir / run_name, argv, point)
        if (run.folder / "metrics.jsonl").exists() and not parsed.overwrite and resume != "auto":
            mend = "add --resume auto to go on with it, --overwrite to replace it, or choose another NAME"
            raise UserError(f"the run {run.folder} exists; {mend}")
        if hasattr(parsed, "name"):  # the probe keeps no record
            run.argv += ["--name", run.name]
        runs.append(run)
    return folder, runs


def new_folder(runs_dir: Path, recipe: str) -> Path:
    """Make a folder that is named by the recipe and the time, and that no other job has."""
    stem = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    runs_dir.mkdir(parents=True, exist_ok=True)
    while True:
        folder = runs_dir / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def run_names(name: str, points: list[dict[str, str]]) -> list[str]:
    """Return a name for each point: NAME-lr0.1-seed1; by its number where that makes no name (NAME-0)."""
    if points == [{}]:
        return [name]
    texts = ["-".join([name, *(f"{key}{value}" for key, value in point.items())]) for point in points]
    if len(set(texts)) == len(texts) and all(re.fullmatch(r"[A-Za-z0-9._-]{1,100}", text) for text in texts):
        return texts
    return [f"{name}-{number}" for number in range(len(points))]


def default_minutes(partition: str | None) -> int:
    """Return the time limit that Slurm gives to a job without one; submitit would write its own, 5 minutes."""
    command = ["scontrol", "show", "partition", *([partition] if partition else []), "--oneliner"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if shown.returncode:
        reason = " ".join((shown.stderr + shown.stdout).split()).rstrip(".")
        raise UserError(f"Slurm shows no time limit: {reason}; {remedy('sinfo lists the partitions')}")
    lines = shown.stdout.splitlines()
    line = next((line for line in lines if " Default=YES " in line), lines[0] if lines else "")
    for name in ("DefaultTime", "MaxTime"):
        found = re.search(rf"\b{name}=(\d\S*)", line)
        if found:
            return minutes(found[1])
    return 365 * 1440  # there is no limit


def make_executor(args: Namespace, folder: Path) -> Any:
    """Return submitit's executor for jobs of this shape, its files in the folder."""
    import submitit

    # What submitit takes for the signal of a preemption, in the jobs and in the processes that it starts here.
    submitit.JobEnvironment.USR_SIG = SIGNAL.name.removeprefix("SIG")
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = submitit.JobEnvironment.USR_SIG
    cluster = "local" if args.local else "slurm"
    settings = {f"{cluster}_python": PYTHON, f"{cluster}_max_num_timeout": args.max_requeues}
    executor = submitit.AutoExecutor(folder / "slurm", cluster=cluster, **settings)
    common = {"name": folder.name, "stderr_to_stdout": True}
    if args.local:
        gpus = len(visible_gpus()) if args.gpus_per_node is None else args.gpus_per_node * args.nodes
        executor.update_parameters(
            **common,
            tasks_per_node=args.nodes * args.nproc_per_node,
            gpus_per_node=gpus,
            timeout_min=args.time or 7 * 1440,
        )
        return executor
    limit = args.time or default_minutes(args.partition)
    # Since Slurm 22.05 srun does not take --cpus-per-task over from the job.
    cores = [f"--cpus-per-task={args.cpus_per_task}"] if args.cpus_per_task else []
    executor.update_parameters(
        **common,
        nodes=args.nodes,
        tasks_per_node=args.nproc_per_node,
        gpus_per_node=args.gpus_per_node or None,
        cpus_per_task=args.cpus_per_task,
        timeout_min=limit,
        slurm_mem=args.mem,
        slurm_partition=args.partition,
        slurm_constraint=args.constraint,
        slurm_account=args.account,
        slurm_qos=args.qos,
        slurm_signal_delay_s=min(SIGNAL_DELAY_S, limit * 60 // 4),
        slurm_setup=JOB_SETUP,
        slurm_srun_args=["--kill-on-bad-exit=1", *cores],
        slurm_additional_parameters={"requeue": True},  # after the loss of a node, too
    )
    return executor


def sbatch_text(executor: Any) -> str:
    """Return the sbatch file that submitit writes for a job."""
    inner = executor._executor
    text: str = inner._make_submission_file_text(inner._submitit_command_str, "")
    return text


def check_by_slurm(executor: Any) -> None:
    """Let Slurm look at the job without queueing it: an impossible one would wait for ever."""
    command = ["sbatch", "--test-only"]
    shown = subprocess.run(command, input=sbatch_text(executor), capture_output=True, text=True, timeout=60)
    if shown.returncode:
        lines = [re.sub(r"^(sbatch: )?(error: )?", "", line) for line in shown.stderr.splitlines()]
        hint = remedy("sinfo shows what there is")
        raise UserError(f"Slurm refuses the job: {'; '.join(lines)}; {hint}")


@dataclass
class Watched:
    """A job that was submitted, and what has been seen of it."""

    run: Run
    job: Any
    shows_log: bool
    state: str = ""
    restarts: str = "0"
    result: str = ""
    """The recipe's last line, held back until the end."""
    _offset: int = 0
    _asked: float = 0.0
    _spoke: float = field(default_factory=time.monotonic)

    @property
    def log(self) -> Path:
        """What rank 0 prints."""
        path = Path(self.job.paths.stdout)
        return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path

    @property
    def logs(self) -> str:
        """What all ranks print, as a pattern."""
        return str(self.log).replace("_0_log", "_*_log")

    @property
    def title(self) -> str:
        """The job as lines name it."""
        point = ", ".join(f"{name} {value}" for name, value in self.run.point.items())
        return f"job {self.job.job_id}" + (f" ({point})" if point else "")

    def say(self, text: str) -> None:
        """Print a line about the job."""
        print(f"{self.title}: {text}", flush=True)
        self._spoke = time.monotonic()

    def look(self) -> bool:
        """Print what is new; return whether the job has ended."""
        is_over = bool(self.result) and time.monotonic() > self._asked + 1
        self._asked = time.monotonic() if is_over else self._asked
        info = self.job.get_info(mode="force" if is_over else "standard")
        if "jobState" in info:  # submitit's local executor
            state, is_done = info["jobState"], self.job.done()
        else:
            state, is_done = info.get("State", "UNKNOWN"), self.job.watcher.is_done(self.job.job_id, mode="cache")
        restarts, reason = info.get("Restarts", "0"), info.get("Reason", "None")
        if restarts != self.restarts:
            self.say(f"requeued, start {int(restarts) + 1}")
        shown = f"{state} ({reason})" if reason != "None" and state in ("PENDING", "UNKNOWN") else state
        is_silent = time.monotonic() > self._spoke + SILENCE_S
        if not is_done and (shown != self.state or is_silent):
            self.say(shown)
        self.state, self.restarts = shown, restarts
        self._read_log(is_done)
        return is_done

    def _read_log(self, is_done: bool) -> None:
        """Take in the lines that rank 0 has added; the last one may be under way until the job is done."""
        try:
            with open(self.log, "rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return
        whole = content if is_done else content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(("result ", "probe {")):
                self.result = line
            elif self.shows_log and not line.startswith("submitit "):
                print(line, flush=True)
                self._spoke = time.monotonic()

    def is_complete(self) -> bool:
        """Whether the job has done what it was to do."""
        if self.state != "COMPLETED" and self.state not in ("FINISHED", "GONE"):
            return False
        paths = self.job.task(0).paths
        return bool(paths.result_pickle.exists() and self.job.task(0).exception() is None)

    def blame(self) -> int:
        """Say in a few lines why the job has failed; return 2 for a refusal by the recipe, else 1."""
        for path in sorted(self.log.parent.glob(self.log.name.replace("_0_log", "_*_log"))):
            is_shown = self.shows_log and path.name == self.log.name
            cause = "" if is_shown else cause_in(path.read_text(errors="replace"))
            if cause:
                print(f"{path.name}: {cause}", file=sys.stderr)
        path = status_path(self.job.paths.submitted_pickle)
        status = int(path.read_text()) if path.exists() else 1
        how = (
            "was refused by the recipe"
            if status == USAGE_STATUS
            else f"ended before the run was complete ({self.state})"
        )
        print(f"error: {self.title} {how}; all ranks' logs: {self.logs}", file=sys.stderr)
        return status


def cause_in(log: str) -> str:
    """Return the line of a rank's log that tells most, of its last start: a refusal, or an exception."""
    newest = log.split(" - Starting with JobEnvironment")[-1]
    lines = re.findall(r"^(error: .*|[\w.]+(?:Error|Exception): .*)$", newest, re.MULTILINE)
    return lines[-1] if lines else ""


def follow(jobs: list[Watched]) -> int:
    """Show the jobs until all have ended; return the status of this command."""
    running = list(jobs)
    while running:
        running = [watched for watched in running if not watched.look()]
        time.sleep(POLL_S if running else 0)
    statuses = [0 if watched.is_complete() else watched.blame() for watched in jobs]
    return max(statuses)


def report(jobs: list[Watched]) -> None:
    """Print the result: of one job its own line, of a sweep a table."""
    if len(jobs) == 1 and not jobs[0].run.point:
        if jobs[0].result:
            print(jobs[0].result, flush=True)
        return
    rows = []
    for watched in jobs:
        result = dict(re.findall(r"(\w+)=(\S+)", watched.result)) if watched.is_complete() else {}
        figures = [result.get(name, "-") for name in ("world_size", "test_accuracy", "samples_per_s")]
        rows.append([watched.run.name, *watched.run.point.values(), *figures])
    table = [["run", *jobs[0].run.point, "world_size", "test_accuracy", "samples_per_s"], *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def submit_to_slurm(args: Namespace, folder: Path, runs: list[Run]) -> int:
    """Submit the runs as one job, or as one array, and follow them."""
    import submitit

    from slurm.watcher import SqueueWatcher

    submitit.SlurmJob.watcher = SqueueWatcher(delay_s=10)
    executor = make_executor(args, folder)
    check_by_slurm(executor)
    trainings = [Training(args.recipe, run.argv, run.folder, args.max_requeues) for run in runs]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it raises, too
            submitted = executor.submit_array(trainings)
    except submitit.core.utils.FailedJobError as error:
        raise UserError(f"Slurm refuses the job: {' '.join(str(error).split())}") from None
    jobs = [Watched(run, job, shows_log=not run.point) for run, job in zip(runs, submitted, strict=True)]
    number = submitted[0].job_id.split("_")[0]
    log = jobs[0].log if len(jobs) == 1 else jobs[0].log.with_name(f"{number}_*_0_log.out")
    print(f"job {number}: {describe(args, runs)}, record {folder}, log {log}", flush=True)
    again = f"tail -n +1 -F {log}"
    if not args.follow:
        print(f"to follow it: {again}; to cancel it: scancel {number}", flush=True)
        return 0
    try:
        status = follow(jobs)
    except KeyboardInterrupt:
        print(f"\njob {number} goes on; to follow it: {again}; to cancel it: scancel {number}", flush=True)
        return 128 + signal.SIGINT
    report(jobs)
    return status


def submit_here(args: Namespace, folder: Path, runs: list[Run]) -> int:
    """Start the runs on this machine, one after another, and follow them."""
    executor = make_executor(args, folder)
    print(f"{describe(args, runs)}, all on this machine as one node, record {folder}", flush=True)
    jobs = []
    status = 0
    for run in runs:
        os.environ["MASTER_PORT"] = str(free_port())
        # Ctrl-C reaches every process of the terminal: only this one shall heed it, and end the others in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        job = executor.submit(Training(args.recipe, run.argv, run.folder, args.max_requeues))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        jobs.append(Watched(run, job, shows_log=not run.point))
        if not args.follow:
            print(f"to follow it: tail -n +1 -F {jobs[0].log}; to end it: kill {job.job_id}", flush=True)
            return 0
        try:
            status = max(status, follow(jobs[-1:]))
        except KeyboardInterrupt:
            end_here(jobs[-1])
            return 128 + signal.SIGINT
    report(jobs)
    return status


def interrupt(number: int, frame: FrameType | None) -> None:
    """Treat a signal as Ctrl-C."""
    raise KeyboardInterrupt


def end_here(watched: Watched) -> None:
    """Let a local job write a checkpoint and leave; kill what does not."""
    import psutil

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print(f"\n{watched.title}: interrupted, ranks write a checkpoint", flush=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        controller = psutil.Process(int(watched.job.job_id))
        processes = [controller, *controller.children(recursive=True)]
        controller.terminate()  # it passes TERM on to the ranks
        deadline = time.monotonic() + STOP_GRACE_S
        while not watched.look() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def describe(args: Namespace, runs: list[Run]) -> str:
    """Return what is started, in words."""
    points = f"{len(runs)} points of {args.recipe}" if args.sweep else args.recipe
    gpus = f", {args.gpus_per_node} GPUs a node" if args.gpus_per_node else ""
    return f"{points} on {args.nodes} x {args.nproc_per_node} processes{gpus}"


def main(argv: list[str] | None = None) -> int:
    """Submit what the arguments say and follow it; return the exit status."""
    os.chdir(ROOT)  # where jobs will run: they import this package and read scripts/
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        check(args)
        folder, runs = plan_runs(args)
        try:
            return (submit_here if args.local else submit_to_slurm)(args, folder, runs)
        finally:
            with contextlib.suppress(OSError):  # nothing is in the folder of a job that was refused
                folder.rmdir()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_STATUS
    except subprocess.TimeoutExpired as error:
        print(
            f"error: Slurm did not answer {error.cmd[0]} within {error.timeout:.0f} s; sinfo tells more",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
