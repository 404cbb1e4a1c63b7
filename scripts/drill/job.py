"""A job under a fault: all its processes, wherever they end up, and the steps that it logs."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from scripts.launch.processes import start_process
from scripts.launch.runs import last_step

JOB_VARIABLE = "DRILL_JOB"
"""A variable that each process of a job inherits, which also identifies orphans."""


def find_processes(text: str = "", **variables: str) -> list[psutil.Process]:
    """Return the running processes with this text in their command line and these variables."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_wanted = variables.items() <= process.environ().items() and text in " ".join(process.cmdline())
            if is_wanted and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Steps:
    """The steps that a run logs, and when each one was first seen."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.seen: list[tuple[float, int]] = []
        self.is_ended = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self.is_ended:
            step = self.last()
            if not self.seen or step != self.seen[-1][1]:
                self.seen.append((time.monotonic(), step))
            time.sleep(0.01)

    def last(self) -> int:
        """Return the newest step that is logged, or 0 if there is none."""
        return last_step(self.run)

    def end(self) -> None:
        """Stop watching."""
        self.is_ended = True
        self._thread.join()

    def first_after(self, moment: float, above: int = -1) -> float | None:
        """Return when a step larger than `above` was first seen after a moment, or None."""
        return next((seen for seen, step in self.seen if seen > moment and step > above), None)

    def longest_pause(self, since: float) -> float:
        """Return the seconds of the longest pause between two steps since a moment."""
        times = [seen for seen, _ in self.seen]
        return max((b - max(a, since) for a, b in itertools.pairwise(times) if b > since), default=0.0)


class Job:
    """A job as `make run` starts it, in its own session and with its output in a file."""

    def __init__(self, recipe: str, words: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.recipe, self.mark, self.log = recipe, uuid.uuid4().hex, log
        inherited = {k: v for k, v in os.environ.items() if k not in ("MAKELEVEL", "MAKEFLAGS", "MIN_NODES")}
        command = [sys.executable, "-m", "scripts.launch.local", recipe, *words]
        with open(log, "ab") as output:
            env = {**inherited, JOB_VARIABLE: self.mark, **env}
            self.process = start_process(command, env, stdout=output, stderr=output)

    @property
    def text(self) -> str:
        """The output of this job and of earlier ones with the same log file."""
        return self.log.read_text(errors="replace")

    def processes(self, text: str = "", **variables: str) -> list[psutil.Process]:
        """Return the job's running processes with this text in their command line and these variables."""
        return find_processes(text, **{JOB_VARIABLE: self.mark, **variables})

    def of_node(self, node: int, text: str = "") -> list[psutil.Process]:
        """Return a node's processes with this text in their command line."""
        return self.processes(text, NODE_RANK=str(node))

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of the running ranks, by rank."""
        found = {}
        for process in self.processes(f"-m recipes.{self.recipe}.train"):
            with contextlib.suppress(psutil.Error):
                found[int(process.environ().get("RANK", "0"))] = process
        return found

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition while the job runs; return whether it holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                return condition()
            time.sleep(0.002)
        return True

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the job's end; return its exit status, or None after timeout_s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return self.process.returncode

    def left_over(self) -> list[str]:
        """Kill the processes that still run 3 s after the job's end, and return their command lines."""
        deadline = time.monotonic() + 3
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        names = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                names.append(" ".join(process.cmdline())[:80])
                process.kill()
        return names

    def kill(self) -> None:
        """Kill all processes at once, as a power cut does."""
        self.process.kill()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
