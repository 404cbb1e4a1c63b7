"""Run a script of the user's own in a recipe's place: what launchers agree on, and what each rank becomes.

    SCRIPT=train.py RECIPE=ddp NODES=2 ARGS="--lr 0.1 --out {run_dir}" make run
    RUN_DIR=runs/mine python -m scripts.launch.script train.py --lr 0.1      # one rank: what a launcher starts

docs/your-own.md is the contract. These variables name the script and its run; every launcher sets all of them:
SCRIPT   the file
WORKDIR  the folder in which it runs (default: the one in which the launcher was called)
RUN_DIR  the folder in which it writes: NAME in RUNS_DIR (default: `runs` in this repository)
RESUME   auto: resume from what RUN_DIR holds, if it holds anything; none: start from the beginning
In the script's options, {run_dir} and {resume} are replaced by the last two. The script gets no other options.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import re
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

from recipes.common.arguments import read_number
from recipes.common.errors import UserError, as_user_error, nearest
from recipes.common.folders import check_file
from recipes.common.process.open_files import STORE_CONNECTIONS, allow_open_files
from recipes.common.process.parent import end_with_launcher, exec_python
from recipes.common.process.signals import STOP_SIGNALS
from recipes.common.world import transport
from scripts.launch.command import ROOT, absolute, command, make_folder, next_folder, warn
from scripts.launch.processes import run_with_signals


def is_set() -> bool:
    """Whether the job runs the user's own script."""
    return bool(os.environ.get("SCRIPT"))


def read_script() -> Path:
    """Return the absolute path of SCRIPT; raises UserError if no launcher can run it or WORKDIR is wrong."""
    path = absolute(os.environ["SCRIPT"])
    if path.parent.parent == ROOT / "recipes" and path.name == "train.py":
        recipe = path.parent.name
        raise UserError(f"SCRIPT {path} is a recipe, not a script; set RECIPE={recipe} and no SCRIPT")
    check_python(path)
    read_workdir()
    return path


def check_python(path: Path) -> None:
    """Raise UserError if a file cannot be read, or is no Python program."""
    try:
        check_file(path)
        source = path.read_bytes()
    except FileNotFoundError:
        hint = nearest(path.name, [other.name for other in path.parent.glob("*.py")], cutoff=0.7)
        parts = path.name.split(".")
        if not hint and len(parts) > 1 and parts[-1] != "py" and all(map(str.isidentifier, parts)):
            code = f"import runpy; runpy.run_module('{path.name}', None, '__main__', True)"
            hint = f"; for a module, name a file with the line: {code}"
        raise UserError(f"SCRIPT {path} does not exist{hint}") from None
    except OSError as error:
        raise UserError(f"SCRIPT {path} cannot be read: {error.strerror}; name a Python file") from None
    try:
        body = parse_python(source).body
    except (SyntaxError, ValueError) as error:  # ValueError: a zero byte
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else error
        raise UserError(f"SCRIPT {path} is not Python: {what}{line}; fix it, or name a Python file") from None
    # A notebook and a list of options mostly are valid Python, which does nothing.
    if len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Dict):
        raise UserError(f"SCRIPT {path} is JSON; convert a notebook by jupyter nbconvert --to script")
    if body and all(isinstance(node, ast.AnnAssign) and node.value is None for node in body):
        raise UserError(f"SCRIPT {path} is YAML; name a Python file")


def read_workdir() -> Path:
    """Return the absolute path of WORKDIR, by default the current folder; raises UserError if there is none."""
    workdir = absolute(os.environ.get("WORKDIR") or ".")
    if not workdir.is_dir():
        raise UserError(f"WORKDIR {workdir} is not a folder; name the folder in which the script is to run")
    return workdir


def parse_python(source: bytes) -> ast.Module:
    """Return a script's syntax tree, without Python's warnings of its code: they come when it runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def line_of_own_port(node: ast.AST) -> int:
    """Return the line in which a script sets MASTER_PORT to a constant, not within some `if`; else 0."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assign):
            is_port = any(ast.unparse(target).endswith("environ['MASTER_PORT']") for target in child.targets)
            if is_port and re.fullmatch(r"'\d+'|str\(\d+\)", ast.unparse(child.value)):
                return child.lineno
        elif isinstance(child, ast.If) and "__name__" not in ast.unparse(child.test):
            continue
        elif isinstance(child, ast.stmt) and (line := line_of_own_port(child)):
            return line
    return 0


def warn_of_own_port() -> None:
    """Print a warning if the script sets MASTER_PORT: the ranks of torchrun then wait where nobody listens."""
    path = Path(os.environ["SCRIPT"])
    if line := line_of_own_port(parse_python(path.read_bytes())):
        warn(
            f"{path.name} sets MASTER_PORT in line {line}: ranks that torchrun starts may wait there, where none "
            "of them listens; use os.environ.setdefault(), or RECIPE=spawn if it starts ranks itself"
        )


def check_job() -> None:
    """Make RUN_DIR if it is set, and raise UserError if this node cannot run the script."""
    if run_dir := os.environ.get("RUN_DIR"):
        make_folder(Path(run_dir))  # before the checks, since it may also be WORKDIR
    read_script()
    read_resume()


def read_resume() -> str:
    """Return RESUME, by default none; raises UserError for anything but auto or none."""
    resume = os.environ.get("RESUME") or "none"
    if resume not in ("auto", "none"):
        raise UserError(f"RESUME expects auto or none, got {resume!r}")
    return resume


def runs_dir() -> Path:
    """Return the absolute path of RUNS_DIR, which holds one folder per run."""
    return absolute(os.environ.get("RUNS_DIR") or ROOT / "runs")


def make_run_dir(script: Path, name: str) -> Path:
    """Make the folder of a run and return it: NAME, or the script's name with the next free number.

    Raises UserError for a name that contains folders, or a folder with files unless RESUME=auto.
    """
    if name and (Path(name).name != name or name in (".", "..")):
        raise UserError(f"NAME expects a name without folders, got {name!r}")
    if not name:
        return next_folder(script.stem, runs_dir())
    run_dir = runs_dir() / name
    make_folder(run_dir)
    with as_user_error("use", run_dir):
        is_empty = not any(run_dir.iterdir())
    if read_resume() == "none" and not is_empty:
        raise UserError(f"{run_dir} is not empty; set RESUME=auto to resume this run, or choose another NAME")
    return run_dir


def lock_run_dir(run_dir: Path) -> None:
    """Lock a run's folder until this process ends; raises UserError if another job of this machine has it."""
    with as_user_error("use", run_dir):
        handle = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another job runs in {run_dir}; wait for its end, or choose another NAME") from None
    except OSError:  # a file system without locks
        os.close(handle)


def job_environment(name: str) -> dict[str, str]:
    """Return the four variables of a job on this machine, and make its run folder; raises UserError."""
    script = read_script()
    return {
        "SCRIPT": str(script),
        "WORKDIR": str(read_workdir()),
        "RUN_DIR": str(make_run_dir(script, name)),
        "RESUME": read_resume(),
    }


def note_stop() -> None:
    """Leave STOPPED_FILE, if it is set: a batch script that got no signal itself then knows of this one."""
    if stopped_file := os.environ.get("STOPPED_FILE"):
        with contextlib.suppress(OSError):  # on a full disk, ranks are to get the signal all the same
            Path(stopped_file).touch()


def is_first_of_several_nodes() -> bool:
    """Whether this is a node's first rank in a job on several nodes of a cluster; FABRIC is set only there."""
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    local_rank = next((os.environ[name] for name in names if os.environ.get(name)), "0")
    nodes = read_number("WORLD_SIZE", read_number("NNODES", 1, 1), 1)
    return local_rank == "0" and nodes > read_number("LOCAL_WORLD_SIZE", 1, 1) and bool(os.environ.get("FABRIC"))


def say_network(log: int) -> None:
    """Print which network NCCL uses in the script; end this process, and the script, if FABRIC forbids TCP."""
    host, network = socket.gethostname(), None
    for line in open(log, errors="replace"):  # noqa: SIM115 (open until this process ends)
        if network or not (network := transport.find_network(line)):
            continue
        print(f"{host}: NCCL over {network}", flush=True)
        try:
            transport.check_hosts([host] if network == transport.TCP else [])
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(error.status)


def run_watched(argv: Sequence[str], pipe: tuple[int, int] | None, is_task: bool) -> int:
    """Run the script in a child process, and print which network NCCL uses there; return the script's status.

    This process passes signals on to the script, and ends by the signal that ended the script. As a task, it
    returns 0 once it got a stop signal: srun and mpirun end all ranks, also one that is saving, when one fails.
    """
    reader = threading.Thread(target=say_network, args=pipe[:1], daemon=True) if pipe else None
    if reader:
        reader.start()
    command = [sys.executable, "-m", "scripts.launch.script", *argv]  # the child finds NCCL's log set
    # Use a separate group: mpirun and some Slurm versions signal this whole group, and each signal is passed on.
    returned, received = run_with_signals(command, os.environ, process_group=0, on_stop=note_stop)
    if pipe and reader:
        os.close(pipe[1])
        reader.join(1.0)  # processes that the script left behind may keep it open
    if received and is_task:
        return 0
    if returned < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script's own core is enough
        with contextlib.suppress(OSError):  # KILL has no handler
            signal.signal(-returned, signal.SIG_DFL)
        os.kill(os.getpid(), -returned)
    return returned


@command
def main(argv: Sequence[str]) -> None:
    """Become the script, in its folder; it ends with its launcher, and stop signals reach it at once.

    --check only checks the variables; --task says that srun or mpirun has started this rank (see run_watched()).
    """
    is_check, is_task = ([flag] == argv[:1] for flag in ("--check", "--task"))
    argv = argv[is_check or is_task :]
    if not argv:
        raise UserError("no script; usage: python -m scripts.launch.script [--check | --task] SCRIPT [OPTION ...]")
    os.environ["SCRIPT"], *options = argv
    script, resume = read_script(), read_resume()
    if is_check:
        return
    end_with_launcher()
    # Under srun and mpirun, its rank 0 has the store.
    allow_open_files(STORE_CONNECTIONS * read_number("WORLD_SIZE", 1, 1))
    pipe = transport.log_processes() if is_first_of_several_nodes() else None
    if pipe or is_task:
        sys.exit(run_watched(argv, pipe, is_task))
    run_dir = Path(os.environ.get("RUN_DIR") or runs_dir() / script.stem).absolute()
    os.environ |= {"RUN_DIR": str(run_dir), "RESUME": resume}
    make_folder(run_dir)
    os.chdir(os.environ.pop("WORKDIR", "") or ".")
    del os.environ["SCRIPT"]  # a launcher that the script calls must not start it again
    # Otherwise what the script printed before a signal ended it would be lost.
    os.environ["PYTHONUNBUFFERED"] = os.environ.get("PYTHONUNBUFFERED") or "1"
    # The launcher blocked them. A pending one ends this process now, before the script has done anything.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    words = [word.replace("{run_dir}", str(run_dir)).replace("{resume}", resume) for word in options]
    exec_python([str(script), *words])


if __name__ == "__main__":
    sys.exit(main())
