"""No hang without a name: what every rank is waiting for, and a report when one does not come.

A rank says which collective it enters (`with world.watch("gradients"): ...`; a microsecond, no system call). A
thread of its own puts that down five times a second where all ranks can read it: the store at MASTER_ADDR. When
a wait is longer than --timeout-s, whoever notices first calls the others. Each rank that still answers then writes
where it stands, with the stacks of its threads, to runs/NAME/hang/rank-N.txt; one of them puts these together into
runs/NAME/hang-report.txt, names in one line on standard error who is missing, and all of them end.

The notes also tell how long a rank has worked by itself, outside of collectives. From them rank 0 names, during
training, ranks that the others keep waiting for.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeVar

from recipes.common.options import Options
from recipes.common.watch import sentences
from recipes.common.watch.bounds import HANG_STATUS, TIME_OUTS
from recipes.common.watch.stragglers import Work, stragglers

T = TypeVar("T")
NOTE_S = 0.2
"""Time between two notes of a rank; longer for more than a thousand ranks, whose store takes 10,000 a second."""

ANSWER_S = 1.0
"""How long the store may take to answer: the rank that keeps it may be the one that hangs."""

LEAVE_S = 5.0
"""How long rank 0, with which the store may go, waits at the end for the others to stop using it."""

GATHER_S = 2.0
"""How long ranks may take to say where they stand, once one has called."""

COLLECT_S = 2.0
"""How long one of them may take to put that together."""

MANY = 64
"""Up to so many ranks, all of them look for the others' reports."""

COLLECTORS = 3
"""Of more ranks, so many do, those that call first: a thousand asking for a thousand would choke the store."""


class Notes(Protocol):
    """A store that all ranks share, such as torch's TCPStore; the recipe hands it in."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def add(self, key: str, amount: int, /) -> int: ...  # noqa: D102


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
        notes: the store that all ranks share; without one, each rank speaks for itself.
    """

    active: ClassVar[Watch | None] = None
    """The one of this process, for exit_status(), which sees what a collective has raised."""

    def __init__(self, rank: int, world_size: int, args: Options, notes: Notes | None) -> None:
        self.rank, self.world_size, self.args, self.notes = rank, world_size, args, notes
        self.folder: Path | None = None
        self._step: Callable[[], int] | None = None
        self._last_notes: dict[int, str] = {}
        self._at = At(since=time.monotonic())
        self._busy_s = 0.0
        self._stragglers: list[str] = []
        self._shares_notes = notes is not None
        self._note_s = max(NOTE_S, world_size / 5000)
        self._closed = threading.Event()
        self._ending = threading.Lock()
        self._threads = [threading.Thread(target=self._keep_time, name="watch: time", daemon=True)]
        if notes:
            self._threads.append(threading.Thread(target=self._keep_notes, name="watch: notes", daemon=True))
        for thread in self._threads:
            thread.start()
        Watch.active = self

    # ---- what a recipe calls

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
        if self._ask(lambda notes: notes.add("left", 1), 0) == self.world_size:
            self._ask(lambda notes: notes.set("all left", ""), None)
        if self.rank == 0:
            self._ask(lambda notes: notes.get("all left"), b"", LEAVE_S)

    def is_hang(self, message: str) -> bool:
        """Whether a collective that has failed with this message has waited for somebody in vain.

        The first rank whose time is up breaks its connections, and the others see that before their own is.
        """
        waited_s = time.monotonic() - self._at.since
        if any(phrase in message for phrase in TIME_OUTS) or waited_s > 0.8 * self.args.timeout_s:
            return True
        return self._ask(lambda notes: notes.check(["hung"]), False)

    def end(self, error: BaseException | None = None) -> NoReturn:
        """Report where this rank stands, see to it that all that is known gets into one file, and end."""
        self._ending.acquire()  # a second thread waits here until the process ends
        text = self._report(error)
        self._ask(lambda notes: self._call(notes, text), None)
        place = self.folder or self.args.runs_dir / f"hang-{socket.gethostname()}-{os.getpid()}"
        with contextlib.suppress(OSError):
            (place / "hang").mkdir(parents=True, exist_ok=True)
            _write(place / "hang" / f"rank-{self.rank}.txt", text)
        path = place / "hang-report.txt"
        if self._is_collector(place):
            reports = self._gather(place)
            if self.rank != min(reports):
                self._wait(COLLECT_S, lambda: self._is_done(path))
            is_first = not self._is_done(path) and self._ask(lambda notes: notes.add("collectors", 1), 1) == 1
            if is_first:
                self._collect(reports, path)
        else:
            self._wait(GATHER_S + COLLECT_S, lambda: self._is_done(path))
        sys.stdout.flush()
        os._exit(HANG_STATUS)

    # ---- threads

    def _keep_time(self) -> None:
        """End this rank when a wait is too long; without a store, also when another rank has put a report down."""
        while not self._closed.wait(self._note_s if self._shares_notes else 1.0):
            at = self._at
            if at.is_inside and time.monotonic() - at.since > at.limit_s:
                self.end()
            if not self._shares_notes and self.folder and (self.folder / "hang").exists():
                self.end()

    def _keep_notes(self) -> None:
        """Put down where this rank stands, and see whether another one calls."""
        notes = self.notes
        assert notes
        window_s, before, since = self.args.straggler_window_s, Work(), time.monotonic()
        with contextlib.suppress(RuntimeError):  # the store has gone with its rank
            while not self._closed.wait(self._note_s):
                notes.set(f"note/{self.rank}", json.dumps(self._note()))
                if self.rank == 1:  # rank 0 may keep the store, and take its own note with it
                    self._last_notes.update(_read(notes, "note", [0]))
                if notes.check(["hung"]):
                    self.end()
                now = time.monotonic()
                if self.rank == 0 and self.args.straggler_share and now > since + window_s:
                    texts = _read(notes, "note", range(self.world_size))
                    after = {rank: json.loads(text) for rank, text in texts.items()}
                    self._stragglers += stragglers(before, after, now - since, self.args.straggler_share)
                    before, since = after, now

    # ---- the report

    def _note(self) -> dict[str, Any]:
        """Return where this rank stands, in plain values."""
        at = self._at
        step = self._step() if self._step else None
        since_s = round(time.monotonic() - at.since, 1)
        host, now = socket.gethostname(), time.time()
        own = {"rank": self.rank, "host": host, "pid": os.getpid(), "step": step, "time": now}
        own["busy_s"] = round(self._busy_s, 4)
        return {**own, "entered": at.entered, "name": at.name, "is_inside": at.is_inside, "since_s": since_s}

    def _report(self, error: BaseException | None) -> str:
        """Return this rank's report: its note as a line of JSON, a sentence, and the stacks of its threads."""
        note = self._note()
        lines = [json.dumps(note), sentences.where_it_stands(note), ""]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().ident
        own = [threading.get_ident(), *(thread.ident for thread in self._threads)]
        for ident, frame in sys._current_frames().items():
            if ident == main and error is not None:
                text = "".join(traceback.format_exception(error))
            elif ident in own and ident != main:
                continue
            else:
                text = "".join(traceback.format_stack(frame))
            lines.append(f"thread {names.get(ident, ident)}:\n{text}")
        return "\n".join(lines)

    def _ask(self, action: Callable[[Notes], T], otherwise: T, bound_s: float = ANSWER_S) -> T:
        """Return what an action on the store gives; otherwise, if there is none, or it does not answer in time."""
        notes = self.notes
        if notes is None:
            return otherwise
        result = [otherwise]

        def act() -> None:
            with contextlib.suppress(RuntimeError):
                result[0] = action(notes)

        thread = threading.Thread(target=act, name="watch: store", daemon=True)
        thread.start()
        thread.join(bound_s + self.world_size / 2000)  # some questions are about all ranks
        if thread.is_alive():
            self.notes = None  # no use to ask again
        return result[0]

    def _call(self, notes: Notes, text: str) -> None:
        """Call the other ranks, and show them this one's report."""
        notes.set(f"report/{self.rank}", text)
        notes.set("hung", str(self.rank))

    def _gather(self, place: Path) -> dict[int, str]:
        """Wait for the reports of all ranks, for a while; return those that came."""
        reports: dict[int, str] = {}
        began_at = time.time()

        def have_all() -> bool:
            for rank in set(range(self.world_size)) - set(reports):
                path = place / "hang" / f"rank-{rank}.txt"
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime > began_at - self.args.timeout_s:
                        reports[rank] = path.read_text()
            missing = sorted(set(range(self.world_size)) - set(reports))
            if missing:
                nothing: dict[int, str] = {}
                reports.update(self._ask(lambda notes: _read(notes, "report", missing), nothing))
            return len(reports) == self.world_size

        self._wait(GATHER_S, have_all)
        if not reports:  # neither a store nor a disk
            reports[self.rank] = self._report(None)
        return reports

    def _is_collector(self, place: Path) -> bool:
        """Whether this rank looks for the reports of the others; of many, those that come first."""
        if self.world_size <= MANY:
            return True
        if number := self._ask(lambda notes: notes.add("callers", 1), 0):
            return number <= COLLECTORS
        for i in range(COLLECTORS):  # without a store, of those that share a disk
            try:
                (place / "hang" / f"collector-{i}").touch(exist_ok=False)
            except FileExistsError:
                continue
            except OSError:
                return True
            return True
        return False

    def _is_done(self, path: Path) -> bool:
        return path.exists() or self._ask(lambda notes: notes.check(["done"]), False)

    def _collect(self, reports: dict[int, str], path: Path) -> None:
        """Write hang-report.txt and say in one line who is missing."""
        silent = sorted(set(range(self.world_size)) - set(reports))
        texts = {**self._last_notes, **self._ask(lambda notes: _read(notes, "note", silent), self._last_notes)}
        last = {rank: json.loads(text) for rank, text in texts.items()}
        found = {rank: json.loads(text.split("\n")[0]) for rank, text in reports.items()}
        summary = sentences.summarize(found, last, self.world_size)
        table = [sentences.where_it_stands(found[rank]) for rank in sorted(found)]
        table += [f"rank {rank} did not answer; {sentences.last_place(last.get(rank))}" for rank in silent]
        stacks = [f"==== rank {rank}\n{text}" for rank, text in sorted(reports.items())]
        where = f"stacks of the others: {path}"
        try:
            _write(path, "\n".join([summary, "", *table, "", *stacks]))
        except OSError as error:
            where = f"cannot write {path}: {error.strerror}"
        print(f"error: {summary}; {where}", file=sys.stderr, flush=True)
        if self.notes:
            self._ask(lambda notes: notes.set("done", str(self.rank)), None)
            time.sleep(2 * self._note_s)  # the others see it before the store goes with this rank

    def _wait(self, seconds: float, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.1)


def _read(notes: Notes, kind: str, ranks: Sequence[int]) -> dict[int, str]:
    """Return what the store has of a kind from these ranks."""
    keys = {rank: f"{kind}/{rank}" for rank in ranks}
    return {rank: notes.get(key).decode() for rank, key in keys.items() if notes.check([key])}


def rename_old_report(folder: Path) -> None:
    """Keep the report of an earlier launch of the run under another name."""
    shutil.rmtree(folder / "hang", ignore_errors=True)
    path = folder / "hang-report.txt"
    if path.exists():
        number = len(list(folder.glob("hang-report-*.txt"))) + 1
        path.rename(folder / f"hang-report-{number}.txt")


def _write(path: Path, text: str) -> None:
    """Write a file that is whole or absent for whoever waits for it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)
