"""A node's ranks, whatever starts them: their command, the stop signals they get, how they end, whom to blame."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.common.process.entry import LOST_RANK_STATUS
from recipes.common.process.node import Failure, cause_of, status_of, with_own_error
from recipes.common.process.parent import LAUNCHER_PID
from recipes.common.process.signals import STOP_SIGNALS
from recipes.common.process.stuck import LOOK_EVERY_S, StuckRanks
from scripts.launch import script
from scripts.launch.processes import end_sessions, wait_for
from scripts.launch.rejoin import HAS_RETURNED, report_unsaved_stop

if TYPE_CHECKING:
    import psutil

END_SIGNAL = signal.SIGUSR2
"""Ends the other processes of a node once one has failed: it kills at once, and shows who sent it."""

END_SIGNAL_GRACE_S = 2
"""How long those processes may take to end after END_SIGNAL, before KILL."""

FAILURE_GRACE_S = 2.0
"""How long the other processes may take to print their own errors once one has failed."""

STOP_GRACE_S = 30.0
"""How long other processes may still write a checkpoint once a stop signal has killed one without a handler."""

STATUS_WAIT_S = 1.0
"""How long a stop signal waits, if no ranks run, for the agent to notice how they ended."""

STOPPED_BY: set[int] = set()
"""Stop signals that this agent has received."""

_sent: set[tuple[psutil.Process, int]] = set()
"""The processes that this agent has sent a stop signal, each with the signal."""
_sending = threading.Lock()
"""Held while signals are sent: ranks start in another thread than the one that takes signals."""

SAVING = threading.Event()
"""Set while ranks of an elastic job may write a checkpoint before a node joins or leaves."""

announce_stop: Callable[[], bool] | None = None
"""Announce a stop signal to an elastic job's nodes before ranks get it; return whether these ranks ended well."""


def rank_command(recipe: str, options: list[str]) -> list[str]:
    """Return the command of a rank; set LAUNCHER_PID, with which it ends, and its status if it loses another."""
    os.environ[LAUNCHER_PID] = str(os.getpid())
    if script.is_set():
        return [sys.executable, "-m", "scripts.launch.script", os.environ["SCRIPT"], *options]
    os.environ["LOST_RANK_STATUS"] = str(LOST_RANK_STATUS)
    return [sys.executable, "-m", "scripts.launch.hold_signals", f"recipes.{recipe}.train", *options]


def pass_signals_on(logs: str) -> None:
    """Send each stop signal to the processes that this agent has started; call it in a thread of its own.

    The main thread keeps these signals blocked, so that this thread takes them. Blocked signals stay pending, and
    a new process inherits the mask: a recipe that is still importing gets the signal once it has its handlers.
    """
    import psutil

    while True:
        received = signal.Signals(signal.sigwait(STOP_SIGNALS))
        if announce_stop and STOPPED_BY:
            continue  # launchers repeat it, and an elastic job's node is already leaving
        STOPPED_BY.add(received)
        script.note_stop()
        if announce_stop:
            announce_stop()
        workers = psutil.Process().children()
        try:
            # The folder has files once processes have started; those of an elastic job may have ended since.
            have_run = bool(os.listdir(logs))
        except FileNotFoundError:  # the job is over
            return
        if not workers and (announce_stop or not have_run):
            status = 0
            if not (have_run or os.environ.get(HAS_RETURNED)):
                print(f"stopped by {received.name} before any process had started", flush=True)
            elif not have_ended_well():
                status = report_unsaved_stop(received)
            shutil.rmtree(logs, ignore_errors=True)
            os._exit(status)
        send_stop_signals()


def send_stop_signals() -> None:
    """Send the stop signals that this agent has received to those of its processes that have not had them.

    Call it after ranks are started, too: a signal that came meanwhile has reached only some of them.
    """
    if not STOPPED_BY:
        return
    import psutil

    with _sending:
        for worker, received in itertools.product(psutil.Process().children(), tuple(STOPPED_BY)):
            # Launchers repeat a signal, and a second one would interrupt a script that saves in its handler.
            if (worker, received) not in _sent:
                _sent.add((worker, received))
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(received)


def have_ended_well() -> bool:
    """Whether this node's ranks of an elastic job, all ended, have finished or written a checkpoint."""
    if not announce_stop:
        return False  # no rendezvous yet: the ranks of an earlier agent were lost with it
    if announce_stop():
        return True
    time.sleep(STATUS_WAIT_S)
    return announce_stop()


def run_processes(command: list[str], environments: dict[int, dict[str, str]], logs: str) -> int:
    """Start one process per rank in its environment and wait for all; return the node's exit status.

    Once one has failed, the others are ended after a grace period. Raises StuckRankError as StuckRanks.look().
    """
    Path(logs, "started").touch()
    processes = {
        rank: subprocess.Popen(command, env=own, start_new_session=True) for rank, own in environments.items()
    }
    send_stop_signals()
    stuck, ranks = StuckRanks(), {process.pid: rank for rank, process in processes.items()}
    running = list(processes.values())
    try:
        while not wait_for(running, LOOK_EVERY_S, until_failure=True):
            stuck.look(ranks)
    finally:
        killed = end_processes(running)
    ended = {rank: Failure(p.returncode, p.pid) for rank, p in processes.items() if p.returncode is not None}
    return node_status({rank: how for rank, how in ended.items() if how.pid not in killed})


def end_processes(running: list[subprocess.Popen[bytes]]) -> set[int]:
    """End the node's processes that still run, and what all have left behind; return the ids of those killed."""
    killed: set[int] = set()
    grace_s = STOP_GRACE_S if script.is_set() and STOPPED_BY else FAILURE_GRACE_S
    if not wait_for(running, grace_s):
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, END_SIGNAL)
                killed.add(process.pid)
        wait_for(running, END_SIGNAL_GRACE_S)
    end_sessions([process.pid for process in running])  # a stopped process (SIGSTOP) reacts only to KILL
    wait_for(running, END_SIGNAL_GRACE_S)
    return killed


def own_failures(failures: dict[int, Failure]) -> dict[int, Failure]:
    """Return the failed ranks without those that the agent ended, unless there are no others."""
    return {rank: failure for rank, failure in failures.items() if failure.status != -END_SIGNAL} or failures


def cause_of_failure(failures: dict[int, Failure]) -> str:
    """Return which of a node's failed ranks is to blame, and how it ended."""
    return cause_of(with_own_error(own_failures(failures), script.is_set()))


def report_if_stopped(failures: dict[int, Failure]) -> bool:
    """Whether a stop signal itself has ended ranks; print a line if so."""
    for number in STOP_SIGNALS if STOPPED_BY else ():
        if any(failure.status == -number for failure in failures.values()):
            print(f"stopped by {signal.Signals(number).name}, for which a rank had no handler", flush=True)
            return True
    return False


def node_status(ended: dict[int, Failure]) -> int:
    """Return a node's status from how its ranks ended: 0 if none failed by itself, or a stop signal ended them."""
    failures = {rank: how for rank, how in ended.items() if how.status}
    if not failures or report_if_stopped(failures):
        return 0
    return status_of(own_failures(failures), script.is_set(), sorted(ended.keys() - failures.keys()))
