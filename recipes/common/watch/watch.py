"""No hang without a name: what every rank is waiting for, and a report when one does not come.

Each rank records which collective it enters (`with world.watch("gradients"): ...`; a microsecond, no system call).
A background thread publishes this five times a second where all ranks can read it: in the store at MASTER_ADDR.
When a wait is longer than --timeout-s, the first rank to notice alerts the others. Each rank that still answers
writes its position and the stacks of its threads to runs/NAME/hang/rank-N.txt. One of them combines these files
into runs/NAME/hang-report.txt and names the missing ranks in one line on standard error; then all end (report.py).

The notes also record how long a rank has worked by itself, outside of collectives. During training, rank 0 uses
them to name ranks that the others keep waiting for.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

from recipes.common.folders import identity_of_open
from recipes.common.options import Options
from recipes.common.watch.notes import ANSWER_TIMEOUT_S, Notes, Store, read_notes, run_bounded
from recipes.common.watch.report import DISK_S, MOST_NAMED, Report, describe_rank
from recipes.common.watch.timeouts import HANG_STATUS, TIMEOUT_PHRASES

NOTE_INTERVAL_S = 0.2
"""Time between two notes of a rank; longer beyond 1,000 ranks, as their store takes 10,000 requests a second."""

LEAVE_TIMEOUT_S = 5.0
"""How long rank 0, which may host the store, waits at the end for the others to stop using it."""

LEAST_EXCESS_S = 0.005
"""A straggler's work takes at least this much longer per step: less is not worth a warning."""

Work = dict[int, dict[str, Any]]
"""The notes of ranks, by rank."""


class CollectivePosition(NamedTuple):
    """The position of a rank's main thread among the collectives."""

    entered: int = 0
    """Collectives entered; consecutive ones of one name count once: a pipeline's stages have several or none."""
    name: str = "start"
    """The last collective that it entered."""
    is_inside: bool = False
    since: float = 0.0
    """When it entered or left that collective, by time.monotonic()."""
    limit_s: float = 0.0


class NoWatch:
    """The object that is notified of each wait for other ranks; this one watches nothing."""

    mark: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Names what is done inside it in the trace of --profile-steps; without that option, does nothing."""

    def __call__(
        self, name: str, computes: bool = False, timeouts: int = 1
    ) -> contextlib.AbstractContextManager[None]:
        """Enter a collective that all ranks enter; with `computes`, this rank also does work of its own in it."""
        return contextlib.nullcontext()

    def follow(self, step: Callable[[], int], folder: Path) -> None:
        """Get the current step from step(), and write reports to the run's folder."""

    def restart_clock(self) -> None:
        """Count what this rank has done since its last collective as no work of a step: it makes no straggler."""

    def take_stragglers(self) -> list[str]:
        """Return the warnings about slow ranks since the last call."""
        return []


class Watch(NoWatch):
    """This rank's part in detecting, reporting and ending a hang.

    All ranks share the `store`; without one, each rank reports by itself.
    """

    active: ClassVar[Watch | None] = None
    """This process's Watch, for run_main(), which catches the errors of collectives."""

    def __init__(self, rank: int, world_size: int, args: Options, store: Store | None) -> None:
        self.rank, self.world_size, self.args = rank, world_size, args
        self.notes = Notes(store, world_size)
        self.folder: Path | None = None
        self._step: Callable[[], int] | None = None
        self._launch: tuple[int, ...] = ()
        self._last_notes: dict[int, str] = {}
        self._begun = time.monotonic()  # all ranks have just met: this time is nearly the same for all
        self._at = CollectivePosition(since=self._begun)
        self._busy_s = 0.0
        self._stragglers: list[str] = []
        self._note_s = max(NOTE_INTERVAL_S, world_size / 5000)
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

    @contextlib.contextmanager
    def __call__(self, name: str, computes: bool = False, timeouts: int = 1) -> Iterator[None]:
        """Record that this rank is in a collective that all ranks enter; after an error, it stays inside.

        With `computes`, this rank does work of its own inside, which may take `timeouts` times --timeout-s. The
        backend's time-out then limits the wait; the limit here is for backends without one.
        """
        limit_s = self.args.timeout_s * (1 + timeouts * computes) + 1
        entered, now = self._at.entered + (name != self._at.name), time.monotonic()
        outer = self._at
        if not outer.is_inside:
            self._busy_s += now - outer.since
        self._at = CollectivePosition(entered, name, True, now, limit_s)
        with contextlib.nullcontext() if computes else self.mark(name):
            yield
        now = time.monotonic()
        if outer.is_inside:  # back in the collective around this one
            self._at = CollectivePosition(self._at.entered, outer.name, True, now, outer.limit_s)
        else:
            self._at = self._at._replace(is_inside=False, since=now)

    def follow(self, step: Callable[[], int], folder: Path) -> None:
        """Get the current step from step(), and write reports to the run's folder."""
        self._step, self.folder = step, folder
        if not self.notes.store:  # with one, another job's hang ends no rank of this one
            self._launch = self._read_launch()

    def restart_clock(self) -> None:
        """Count what this rank has done since its last collective as no work of a step: it makes no straggler."""
        self._at = self._at._replace(since=time.monotonic())

    def take_stragglers(self) -> list[str]:
        """Return the warnings about slow ranks since the last call."""
        taken, self._stragglers = self._stragglers, []
        return taken

    def close(self) -> None:
        """Stop watching; after this, the store may end."""
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * ANSWER_TIMEOUT_S)
        Watch.active = None

    def leave(self) -> None:
        """Stop watching at the end of the job; on rank 0, wait up to LEAVE_TIMEOUT_S for the other ranks to do so.

        The store may end with rank 0, and a rank that still used it would print twenty lines of C++ errors.
        """
        self.close()
        if self.notes.count("left", otherwise=0) == self.world_size:
            self.notes.put("all left", "")
        if self.rank == 0:
            self.notes.ask(lambda store: store.get("all left"), b"", LEAVE_TIMEOUT_S)

    def is_hang(self, message: str) -> bool:
        """Return whether a collective that failed with this message did so because of a hang.

        The first rank to time out breaks its connections, and the others see that before they time out themselves.
        """
        waited_s = time.monotonic() - self._at.since
        if any(phrase in message for phrase in TIMEOUT_PHRASES) or waited_s > 0.8 * self.args.timeout_s:
            return True
        return self.notes.has("hung")

    def end(self, error: BaseException | None = None) -> NoReturn:
        """Report this rank's position, take part in combining all ranks' reports, and end this process."""
        self._ending.acquire()  # a second thread waits here until the process ends
        try:
            text = describe_rank(self._note(), error, self._threads)
            place = self.args.runs_dir / f"hang-{socket.gethostname()}-{os.getpid()}"
            if self.folder and not self._is_taken_over():
                place = self.folder
            known, recent_s = self._last_notes, self.args.timeout_s
            report = Report(self.rank, self.world_size, place, self.notes, known, recent_s)
            report.make(text, linger_s=2 * self._note_s)
        except Exception:  # the rank ends even if its report fails
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(HANG_STATUS)

    def _is_taken_over(self) -> bool:
        """Return whether another job has taken over the run: its ranks would end if they found hang/."""
        return bool(self._launch) and self._read_launch() not in ((), self._launch)

    def _read_launch(self) -> tuple[int, ...]:
        """Return the identity of the run's config.json, which each launch replaces; () if it cannot be read."""
        path = (self.folder or self.args.runs_dir) / "config.json"
        unread: tuple[int, ...] = ()
        return run_bounded(lambda: identity_of_open(path), unread, OSError, DISK_S)[0]

    def _keep_time(self, every_s: float) -> None:
        """End this rank when a wait is too long; without a store, also when another rank has written a report."""
        has_store = self.notes.store is not None
        while not self._closed.wait(every_s):
            at = self._at
            if at.is_inside and time.monotonic() - at.since > at.limit_s:
                self.end()
            if not has_store and self.folder and (self.folder / "hang").exists():
                self.end()

    def _keep_notes(self, store: Store) -> None:
        """Publish this rank's notes, end it if another rank has noticed a hang, and find stragglers on rank 0."""
        window_s, before, since = self.args.straggler_window_s, Work(), time.monotonic()
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank
            while not self._closed.wait(self._note_s):
                store.set(f"note/{self.rank}", json.dumps(self._note()))
                if self.rank == 1:  # rank 0 may host the store: its note would be lost with it
                    self._last_notes.update(read_notes(store, "note", [0]))
                if store.check(["hung"]):
                    self.end()
                now = time.monotonic()
                if self.rank == 0 and self.args.straggler_share and now > since + window_s:
                    texts = read_notes(store, "note", range(self.world_size))
                    after = {rank: json.loads(text) for rank, text in texts.items()}
                    found = stragglers(before, after, now - since, self.args.straggler_share)
                    self._stragglers += found
                    before, since = after, now
                    # While ranks stay slow, each window is twice as long, by default up to an hour.
                    least_s = self.args.straggler_window_s
                    window_s = min(2 * window_s, 360 * least_s) if found else least_s

    def _note(self) -> dict[str, Any]:
        """Return this rank's note: its position, in values that JSON has."""
        at = self._at
        return {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self._step() if self._step else None,
            "time_s": round(time.monotonic() - self._begun, 1),
            "busy_s": round(self._busy_s, 4),
            "entered": at.entered,
            "name": at.name,
            "is_inside": at.is_inside,
            "since_s": round(time.monotonic() - at.since, 1),
        }


def stragglers(before: Work, after: Work, seconds: float, share: float) -> list[str]:
    """Return a sentence for each rank that all others wait for: at most MOST_NAMED, and one about the rest.

    A rank is slow if its own work exceeds the median of the others' by this share of a step's time. `before` and
    `after` are the ranks' notes at both ends of a window of `seconds`; ranks with fewer than 5 steps are ignored.
    """
    work_s = {}
    for rank in before.keys() & after.keys():
        steps = (after[rank]["step"] or 0) - (before[rank]["step"] or 0)
        if steps >= 5:
            step_s = seconds / steps  # the same for all ranks: they step together
            # Notes are up to NOTE_INTERVAL_S old, and so may cover more time than the window.
            work_s[rank] = min((after[rank]["busy_s"] - before[rank]["busy_s"]) / steps, step_s)
    if len(work_s) < 2:
        return []
    ordered = sorted(work_s.values())
    places = {rank: bisect.bisect_left(ordered, own_s) for rank, own_s in work_s.items()}
    others_s = {rank: median_without(ordered, place) for rank, place in places.items()}
    least_s = max(share * step_s, LEAST_EXCESS_S)
    slow = [rank for rank in sorted(work_s) if work_s[rank] - others_s[rank] > least_s]
    found = [
        f"rank {rank} on {after[rank]['host']} is slow: of a step of {1000 * step_s:.0f} ms, "
        f"its own work takes {1000 * work_s[rank]:.0f} ms, the work of the others {1000 * others_s[rank]:.0f} ms"
        for rank in slow[:MOST_NAMED]
    ]
    if len(slow) > MOST_NAMED:
        last = f"rank {slow[-1]} on {after[slow[-1]]['host']}"
        found.append(f"{len(slow) - MOST_NAMED} more ranks are that slow, the last one {last}")
    return found


def median_without(ordered: Sequence[float], place: int) -> float:
    """Return the median of sorted numbers without the one at a place."""
    low, high = ((len(ordered) - 2) // 2, (len(ordered) - 1) // 2)
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
