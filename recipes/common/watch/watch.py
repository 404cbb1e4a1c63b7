"""No hang without a name: what every rank is waiting for, and a report when one does not come.

A rank says which collective it enters (`with world.watch("gradients"): ...`; a microsecond, no system call). A
thread of its own puts that down five times a second where all ranks can read it: the store at MASTER_ADDR. When
a wait is longer than --timeout-s, whoever notices first calls the others. Each rank that still answers then writes
where it stands, with the stacks of its threads, to runs/NAME/hang/rank-N.txt; one of them puts these together into
runs/NAME/hang-report.txt, names in one line on standard error who is missing, and all of them end (report.py).

The notes also tell how long a rank has worked by itself, outside of collectives. From them rank 0 names, during
training, ranks that the others keep waiting for.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, NoReturn

from recipes.common.options import Options
from recipes.common.watch.bounds import HANG_STATUS, TIME_OUTS
from recipes.common.watch.notes import ANSWER_S, Notes, Store, read
from recipes.common.watch.report import Report, describe_rank
from recipes.common.watch.stragglers import Work, stragglers

NOTE_S = 0.2
"""Time between two notes of a rank; longer for more than a thousand ranks, whose store takes 10,000 a second."""

LEAVE_S = 5.0
"""How long rank 0, with which the store may go, waits at the end for the others to stop using it."""


class At(NamedTuple):
    """Where a rank's main thread stands among the collectives."""

    entered: int = 0
    """How many it has entered; those of one name in a row are one: a pipeline's stages have several or none."""
    name: str = "start"
    """The last one that it has entered."""
    is_inside: bool = False
    since: float = 0.0
    """When it has entered or left it, by time.monotonic()."""
    limit_s: float = 0.0


class Watch:
    """This rank's part in noticing, naming and ending a hang.

    Args:
        rank: of this process.
        world_size: the number of processes.
        args: for --timeout-s and --runs-dir.
        store: what all ranks share; without one, each rank speaks for itself.
    """

    active: ClassVar[Watch | None] = None
    """The one of this process, for exit_status(), which sees what a collective has raised."""

    def __init__(self, rank: int, world_size: int, args: Options, store: Store | None) -> None:
        self.rank, self.world_size, self.args = rank, world_size, args
        self.notes = Notes(store, world_size)
        self.folder: Path | None = None
        self._step: Callable[[], int] | None = None
        self._last_notes: dict[int, str] = {}
        self._at = At(since=time.monotonic())
        self._busy_s = 0.0
        self._stragglers: list[str] = []
        self._note_s = max(NOTE_S, world_size / 5000)
        self._closed = threading.Event()
        self._ending = threading.Lock()
        time_s = self._note_s if store else 1.0
        self._threads = [threading.Thread(target=self._keep_time, args=(time_s,), name="watch: time", daemon=True)]
        if store:
            self._threads.append(
                threading.Thread(target=self._keep_notes, args=(store,), name="watch: notes", daemon=True)
            )
        for thread in self._threads:
            thread.start()
        Watch.active = self

    def __call__(self, name: str, computes: bool = False) -> Watch:
        """Enter a collective that all ranks enter: `with watch(name):`.

        With computes, what is done in it besides waiting may itself take long: the bound is that of the backend,
        and this one, at twice the time, is for a backend that has none.
        """
        limit_s = self.args.timeout_s * (2 if computes else 1) + 1
        entered, now = self._at.entered + (name != self._at.name), time.monotonic()
        if not self._at.is_inside:
            self._busy_s += now - self._at.since
        self._at = At(entered, name, True, now, limit_s)
        return self

    def __enter__(self) -> None:
        """Nothing: calling it has noted the place."""

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Note that the collective is done; one that has failed is where this rank stands."""
        if kind is None:
            self._at = self._at._replace(is_inside=False, since=time.monotonic())

    def follow(self, step: Callable[[], int], folder: Path | None) -> None:
        """Take the step from step(), and keep reports in the run's folder."""
        self._step, self.folder = step, folder

    def take_stragglers(self) -> list[str]:
        """Return the warnings about slow ranks since the last call."""
        taken, self._stragglers = self._stragglers, []
        return taken

    def close(self) -> None:
        """Stop watching; the store may go after this."""
        self._closed.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * ANSWER_S)
        Watch.active = None

    def leave(self) -> None:
        """Stop watching at the end of the job; on rank 0, return once the other ranks have, within LEAVE_S.

        The store may go with rank 0, and a rank that still used it would print twenty lines of C++.
        """
        self.close()
        if self.notes.count("left", otherwise=0) == self.world_size:
            self.notes.put("all left", "")
        if self.rank == 0:
            self.notes.ask(lambda store: store.get("all left"), b"", LEAVE_S)

    def is_hang(self, message: str) -> bool:
        """Whether a collective that has failed with this message has waited for somebody in vain.

        The first rank whose time is up breaks its connections, and the others see that before their own is.
        """
        waited_s = time.monotonic() - self._at.since
        if any(phrase in message for phrase in TIME_OUTS) or waited_s > 0.8 * self.args.timeout_s:
            return True
        return self.notes.has("hung")

    def end(self, error: BaseException | None = None) -> NoReturn:
        """Report where this rank stands, see to it that all that is known gets into one file, and end."""
        self._ending.acquire()  # a second thread waits here until the process ends
        try:
            text = describe_rank(self._note(), error, self._threads)
            place = self.folder or self.args.runs_dir / f"hang-{socket.gethostname()}-{os.getpid()}"
            known, recent_s = self._last_notes, self.args.timeout_s
            report = Report(self.rank, self.world_size, place, self.notes, known, recent_s)
            report.make(text, linger_s=2 * self._note_s)
        except Exception:  # whatever becomes of the report, the rank ends
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(HANG_STATUS)

    def _keep_time(self, every_s: float) -> None:
        """End this rank when a wait is too long; without a store, also when another rank has put a report down."""
        has_store = self.notes.store is not None
        while not self._closed.wait(every_s):
            at = self._at
            if at.is_inside and time.monotonic() - at.since > at.limit_s:
                self.end()
            if not has_store and self.folder and (self.folder / "hang").exists():
                self.end()

    def _keep_notes(self, store: Store) -> None:
        """Put down where this rank stands, and see whether another one calls."""
        window_s, before, since = self.args.straggler_window_s, Work(), time.monotonic()
        with contextlib.suppress(RuntimeError):  # the store has gone with its rank
            while not self._closed.wait(self._note_s):
                store.set(f"note/{self.rank}", json.dumps(self._note()))
                if self.rank == 1:  # rank 0 may keep the store, and take its own note with it
                    self._last_notes.update(read(store, "note", [0]))
                if store.check(["hung"]):
                    self.end()
                now = time.monotonic()
                if self.rank == 0 and self.args.straggler_share and now > since + window_s:
                    texts = read(store, "note", range(self.world_size))
                    after = {rank: json.loads(text) for rank, text in texts.items()}
                    self._stragglers += stragglers(before, after, now - since, self.args.straggler_share)
                    before, since = after, now

    def _note(self) -> dict[str, Any]:
        """Return where this rank stands, in plain values."""
        at = self._at
        return {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self._step() if self._step else None,
            "time": time.time(),
            "busy_s": round(self._busy_s, 4),
            "entered": at.entered,
            "name": at.name,
            "is_inside": at.is_inside,
            "since_s": round(time.monotonic() - at.since, 1),
        }
