"""Start processes: several side by side, within a bound, or one that gets the stop signals of this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from recipes.common.process.node import shell_status
from recipes.common.process.parent import LAUNCHER_PID, end_with_parent
from recipes.common.process.signals import STOP_SIGNALS
from scripts.launch.command import ROOT

INTERRUPT_GRACE_S = 30.0
"""How long a command may take to end after Ctrl-C."""

FAILURE_GRACE_S = 5.0
"""How long the other processes may run after one has failed: they notice the failure by themselves."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    status: int  # -n if signal n ended the process
    is_late: bool  # whether it was killed at the time limit
    output: str

    @property
    def last_line(self) -> str:
        """The last line that it printed, or its status if it printed none."""
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else f"status {self.status}"


def start_process(command: Sequence[str], environment: Mapping[str, str], **streams: Any) -> subprocess.Popen[Any]:
    """Start a process that ends with this one, in its own session, so that Ctrl-C reaches only this process."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, LAUNCHER_PID: str(os.getpid())},
        start_new_session=True,
        preexec_fn=end_with_parent,
        stdin=subprocess.DEVNULL,
        **streams,
    )


def run_in_foreground(command: Sequence[str], at_end: int = signal.SIGINT, **how: Any) -> int:
    """Run a command that gets Ctrl-C as this process does, and `at_end` when this one ends; return its status.

    At Ctrl-C, subprocess.run() would kill a launcher after 0.25 s, before it has ended its ranks and said so.
    """
    process = subprocess.Popen(command, preexec_fn=partial(end_with_parent, number=at_end), **how)
    try:
        return process.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPT_GRACE_S)
        raise
    finally:
        process.kill()


def rank_environment(node_rank: int, nnodes: int, nproc_per_node: int, local_rank: int = 0) -> dict[str, str]:
    """Return the variables that say which rank a process is, as torchrun sets them."""
    return {
        "RANK": str(node_rank * nproc_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nnodes * nproc_per_node),
        "LOCAL_WORLD_SIZE": str(nproc_per_node),
    }


def run_side_by_side(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], folder: Path, timeout_s: float
) -> list[Ended]:
    """Run commands side by side until all have ended; return how each ended. They also end with this process.

    Processes that still run are killed at the time limit, or FAILURE_GRACE_S after a failure.
    """
    processes = []
    for i, (command, environment) in enumerate(commands):
        with open(folder / f"{i}.txt", "wb") as output:
            processes.append(start_process(command, environment, stdout=output, stderr=subprocess.STDOUT))
    is_late = not wait_for(processes, timeout_s, until_failure=True)
    if not is_late:
        wait_for(processes, FAILURE_GRACE_S)
    ended = []
    for i, process in enumerate(processes):
        is_killed = process.poll() is None
        process.kill()
        text = (folder / f"{i}.txt").read_text(errors="replace")
        ended.append(Ended(process.wait(), is_killed and is_late, text))
    return ended


def wait_for(processes: Sequence[subprocess.Popen[Any]], timeout_s: float, until_failure: bool = False) -> bool:
    """Wait until all processes have ended, or one has failed (until_failure); return False after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        if until_failure and any(process.poll() for process in processes):
            break
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def run(command: Sequence[str], env: Mapping[str, str], **how: Any) -> tuple[int, list[int]]:
    """Run a command as run_with_signals() does, but return the status 128 + n for signal n, as a shell does."""
    returned, received = run_with_signals(command, env, **how)
    return shell_status(returned), received


def run_with_signals(
    command: Sequence[str], env: Mapping[str, str], on_stop: Callable[[], None] = lambda: None, **how: Any
) -> tuple[int, list[int]]:
    """Run a command; return its status (-n for signal n) and the stop signals that this process received.

    The command gets each stop signal once, after on_stop(): with process_group=0, even if all of this process's
    group get it. LAUNCHER_PID lets it end with this process. `how` is Popen's.
    """
    received: list[int] = []
    unsent: list[int] = []  # received before the process existed
    process: subprocess.Popen[bytes] | None = None

    def send(number: int) -> None:
        if process is None:
            unsent.append(number)
        # Not send_signal(): it would reap a process that has ended, for which the loop below waits.
        elif process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number not in received:
            received.append(number)
            on_stop()
            send(number)

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    process = subprocess.Popen(command, env={**env, LAUNCHER_PID: str(os.getpid())}, **how)
    for early in unsent:
        send(early)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a launcher may have blocked them
    while True:
        pid, wait_status = os.wait()
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(wait_status)
            return process.returncode, received


def end_sessions(leaders: Sequence[int]) -> None:
    """Kill these leaders of sessions, their descendants, and what ended leaders left behind in their sessions.

    Otherwise data loaders and compilers would outlive a rank that was killed.
    """
    import psutil

    descendants = set()
    for pid in leaders:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants |= {process.pid for process in psutil.Process(pid).children(recursive=True)}
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid in descendants or os.getsid(pid) in leaders:
                os.kill(pid, signal.SIGKILL)
