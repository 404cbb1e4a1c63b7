"""Be a container's first process, and distinguish a run that was stopped before its end from a complete one.

    STOPPED_STATUS=143 python -m scripts.launch.stopped_status ddp --name mine --runs-dir /runs --resume auto

scripts/launch.sh calls it if STOPPED_STATUS is set. A recipe that receives a stop signal writes a checkpoint and
ends with status 0 on all nodes, which a Kubernetes Job takes as "done": it would never restart the pod of a
drained node. This process therefore ends with STOPPED_STATUS, a failure, and the restart resumes from the
checkpoint. If this node fails after the end of the run, as when NCCL hangs while ranks disconnect, it ends with 0:
a restart would wait for nodes that have ended well and do not come back. As process 1, it also passes signals on
and reaps orphans.

A script has no record. The stopped node therefore writes a file beside the run's folder before it passes the
signal on; nodes whose ranks then also end know by that file that the script was not complete. (In an elastic job,
the other nodes continue.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from recipes.common.arguments import read_number
from recipes.common.folders import refresh_names
from recipes.common.process.signals import STOP_SIGNALS
from scripts.launch import script
from scripts.launch.command import command
from scripts.launch.processes import run
from scripts.launch.recipe_options import read_option

CLOCKS_S = 2.0
"""How far the clock of a file server may differ from that of the node that sets a file's time."""


def has_finished(options: Sequence[str], begin: float) -> bool | None:
    """Whether the run of these options has finished since begin, a time_on_disk(); None if there is no record."""
    name = read_option("--name", "", options)
    folder = Path(read_option("--runs-dir", "runs", options)) / name
    refresh_names(folder)  # this node may remember that there was no such file
    if not name or not (folder / "config.json").exists():
        return None  # there is no run, or its record is not on this node
    try:
        with open(folder / "result.json") as file:  # NFS asks the server for the time of a file that is opened
            return os.fstat(file.fileno()).st_mtime >= begin - CLOCKS_S
    except FileNotFoundError:
        return False


def time_on_disk(options: Sequence[str]) -> float:
    """Return the time by which the runs folder dates its files: that of a file server may differ by an hour."""
    folder = read_option("--runs-dir", "runs", options)
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime
    return time.time()  # there is no folder yet, or this node does not write to it


def stop_file() -> Path | None:
    """Return the file beside a script's RUN_DIR that says which node was stopped last; None if none is needed."""
    run_dir = os.environ.get("RUN_DIR")
    if not run_dir or not script.is_set() or os.environ.get("MIN_NODES"):
        return None
    return Path(run_dir).with_name(f".{Path(run_dir).name}.stopped")


def read_stop_file() -> str:
    """Return the content of stop_file(), "" if it is new or cannot be opened."""
    path = stop_file()
    if not path:
        return ""
    try:
        with open(path, "a+") as file:  # it makes the file: NFS may remember for a minute that there was none
            file.seek(0)
            return file.read()
    except OSError:
        return ""


def write_stop_file() -> None:
    """Write to stop_file() that this node was stopped."""
    if path := stop_file():
        with contextlib.suppress(OSError):  # its disk is full, or lost: then only this node knows
            path.write_text(f"{socket.gethostname()} {time.time_ns()}\n")


@command
def main(argv: list[str]) -> int:
    """Run scripts/launch.sh with these arguments; return the status with which the container must end."""
    stopped_status = read_number("STOPPED_STATUS", 0, at_least=1)
    begin = time_on_disk(argv)
    env = {name: value for name, value in os.environ.items() if name != "STOPPED_STATUS"}
    earlier = read_stop_file()
    # scripts/launch.sh has blocked the stop signals. Called again, it is to end by them while it waits for a name.
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOP_SIGNALS)
    status, received = run(["scripts/launch.sh", *argv], env, on_stop=write_stop_file, preexec_fn=unblock)
    finished = None if script.is_set() else has_finished(argv, begin)
    was_stopped = received or read_stop_file() != earlier
    if status == 0 and (finished is False or (finished is None and was_stopped)):
        print(f"stopped before its end: status {stopped_status}, so that a restart continues", flush=True)
        return stopped_status
    if status not in (0, 2) and finished:  # 2 refuses, also a second job while the first one finishes the run
        print(f"warning: status {status} after the run was complete; this pod ends with 0", flush=True)
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
