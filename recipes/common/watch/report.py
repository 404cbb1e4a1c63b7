"""The report of a hang: what each rank that answers says, put together by one of them."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from recipes.common.folders import replace_text
from recipes.common.watch.notes import Notes, run_bounded

T = TypeVar("T")

GATHER_S = 2.0
"""How long ranks may take to report their positions once one notices a hang; a second more per 1,000 ranks."""

COLLECT_S = 2.0
"""How long one of them may take to combine the reports; a second more per 1,000 ranks."""

DISK_S = 5.0
"""Longest wait for the disk; then the report does without it, since a dead file server may be what hangs."""

MANY = 64
"""In jobs of up to this many ranks, all ranks collect the others' reports."""

COLLECTORS = 3
"""In larger jobs, only this many do, the first to report: 1,000 ranks reading 1,000 reports overload the store."""

MOST_NAMED = 8
"""Up to this many ranks, ranges of ranks, or hosts are named one by one."""


def describe_rank(note: dict[str, Any], error: BaseException | None, watchers: Iterable[threading.Thread]) -> str:
    """Return this rank's report: its note as a line of JSON, a sentence, and the stacks of its threads.

    If the main thread has caught an `error`, its traceback replaces that thread's stack. The stacks of the
    `watchers` and of the calling thread (unless it is the main one) are left out: they explain nothing.
    """
    lines = [json.dumps(note), where_it_stands(note), ""]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    left_out = {threading.get_ident(), *(thread.ident for thread in watchers)} - {main}
    for ident, frame in sys._current_frames().items():
        if ident not in left_out:
            has_error = ident == main and error is not None
            stack = traceback.format_exception(error) if has_error else traceback.format_stack(frame)
            lines.append(f"thread {names.get(ident, ident)}:\n{''.join(stack)}")
    return "\n".join(lines)


class Report:
    """One rank's part in the report, which is written to the folder `place`.

    Ranks exchange their reports through `notes`; without a store, through the folder. Reports there that are older
    than `recent_s` are from an earlier launch and are ignored. `last_notes` are other ranks' last known notes.
    """

    def __init__(
        self, rank: int, world_size: int, place: Path, notes: Notes, last_notes: dict[int, str], recent_s: float
    ) -> None:
        self.rank, self.world_size, self.place = rank, world_size, place
        self.notes, self.last_notes, self.recent_s = notes, last_notes, recent_s
        self.path = place / "hang-report.txt"
        self._lacks_disk = False
        # Of thousands of ranks, three read all reports, as the store and the disk answer the others' questions.
        self.gather_s, self.collect_s = GATHER_S + world_size / 1000, COLLECT_S + world_size / 1000
        self.poll_s = max(0.1, world_size / 5000)

    def make(self, text: str, linger_s: float) -> None:
        """Publish this rank's report, and return once the combined report is written or the time is up.

        The rank that writes the combined report stays for another `linger_s`, because the store may end with it.
        """
        self.notes.put(f"report/{self.rank}", text)
        self.notes.put("hung", str(self.rank))  # makes the other ranks report and end, too
        self._on_disk(lambda: self._write_part(text), None)
        if not self.is_collector():
            self._wait(self.gather_s + self.collect_s, self._is_done)
            return
        reports = self.gather() or {self.rank: text}  # neither the store nor the disk works
        # The lowest rank writes; in a large job, where it rarely collects, the first collector (by the store).
        if self.rank != min(reports) and not (self.world_size > MANY and self.notes.store):
            self._wait(self.collect_s, self._is_done)
        if self._is_done():
            return
        if self.notes.count("collectors", otherwise=1) > 1:
            self._wait(self.collect_s, self._is_done)  # the end of this rank may end the one that writes
            return
        self._collect(reports)
        if self.notes.store:
            self.notes.put("done", str(self.rank))
            time.sleep(linger_s)

    def is_collector(self) -> bool:
        """Return whether this rank collects the others' reports; in large jobs, the first COLLECTORS ranks do."""
        if self.world_size <= MANY:
            return True
        if number := self.notes.count("callers", otherwise=0):
            return number <= COLLECTORS
        return self._on_disk(self._claim_collector, True)

    def _claim_collector(self) -> bool:
        """Return whether this rank is among the first COLLECTORS on this disk."""
        for i in range(COLLECTORS):
            with contextlib.suppress(FileExistsError):
                (self.place / "hang" / f"collector-{i}").touch(exist_ok=False)
                return True
        return False

    def _write_part(self, text: str) -> None:
        """Write this rank's report to the folder."""
        (self.place / "hang").mkdir(parents=True, exist_ok=True)
        replace_text(self.place / "hang" / f"rank-{self.rank}.txt", text)

    def _read_parts(self, ranks: Iterable[int], began_at: float) -> dict[int, str]:
        """Return the recent reports of these ranks in the folder, by rank."""
        parts = {}
        for rank in ranks:
            path = self.place / "hang" / f"rank-{rank}.txt"
            with contextlib.suppress(OSError):
                if path.stat().st_mtime > began_at - self.recent_s:
                    parts[rank] = path.read_text()
        return parts

    def _on_disk(self, action: Callable[[], T], otherwise: T) -> T:
        """Return action(), or `otherwise` if it raises OSError, or the disk does not answer, now or before."""
        if self._lacks_disk:
            return otherwise
        result, self._lacks_disk = run_bounded(action, otherwise, OSError, DISK_S)
        return result

    def gather(self) -> dict[int, str]:
        """Wait up to gather_s for the reports of all ranks; return those that arrived, by rank."""
        reports: dict[int, str] = {}
        # By the clock that dates the others' reports, which may be a server's.
        own = self.place / "hang" / f"rank-{self.rank}.txt"
        began_at = self._on_disk(lambda: own.stat().st_mtime, time.time())

        def have_all() -> bool:
            unread = set(range(self.world_size)) - set(reports)
            reports.update(self._on_disk(lambda: self._read_parts(unread, began_at), dict[int, str]()))
            if missing := sorted(set(range(self.world_size)) - set(reports)):
                reports.update(self.notes.read("report", missing))
            return len(reports) == self.world_size

        self._wait(self.gather_s, have_all)
        return reports

    def _wait(self, seconds: float, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(self.poll_s)

    def _is_done(self) -> bool:
        return self._on_disk(self.path.exists, False) or self.notes.has("done")

    def _collect(self, reports: dict[int, str]) -> None:
        """Write hang-report.txt and print one line that names the missing ranks."""
        silent = sorted(set(range(self.world_size)) - set(reports))
        texts = {**self.last_notes, **self.notes.read("note", silent)}
        last = {rank: json.loads(text) for rank, text in texts.items()}
        found = {rank: json.loads(text.split("\n")[0]) for rank, text in reports.items()}
        summary = summarize(found, last, self.world_size)
        table = [where_it_stands(found[rank]) for rank in sorted(found)]
        table += [f"rank {rank} did not answer; {last_place(last.get(rank), found)}" for rank in silent]
        stacks = [f"==== rank {rank}\n{text}" for rank, text in sorted(reports.items())]
        text = "\n".join([summary, "", *table, "", *stacks])
        failure = self._on_disk(lambda: _try_to_write(self.path, text), "the disk does not answer")
        where = f"cannot write {self.path}: {failure}" if failure else f"stacks of the others: {self.path}"
        print(f"error: {summary}; {where}", file=sys.stderr, flush=True)


def _try_to_write(path: Path, text: str) -> str:
    """Write a file atomically; return the reason if that fails, or ""."""
    try:
        replace_text(path, text)
    except OSError as error:
        return error.strerror or str(error)
    return ""


# ---- sentences, made from the notes of the ranks: see Watch._note()


def summarize(found: dict[int, dict[str, Any]], last: dict[int, dict[str, Any]], world_size: int) -> str:
    """Return one sentence that says which ranks wait, and for which ranks.

    `found` has the notes of the ranks that answered, by rank; `last` the last known notes of some of the others.
    """
    silent = sorted(set(range(world_size)) - set(found))
    outside = sorted(rank for rank, note in found.items() if not note["is_inside"])
    waits = _waits([note for note in found.values() if note["is_inside"]])
    if silent:
        known = sorted({str(last[rank]["host"]) for rank in silent if rank in last})
        more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
        hosts = ", ".join(known[:MOST_NAMED]) + more
        verb = "does" if len(silent) == 1 else "do"
        place = last_place(last.get(silent[0]), found)
        return f"{name_ranks(silent)}{hosts and ' on '}{hosts} {verb} not answer, {place}; {waits}"
    if outside:
        verb = "does" if len(outside) == 1 else "do"
        return f"{name_ranks(outside)} {verb} not come, {where_it_stands(found[outside[0]])}; {waits}"
    return f"all ranks answer, and all wait: {waits}; is a link between them down?"


def _waits(notes: Sequence[dict[str, Any]]) -> str:
    """Return which ranks wait in which collective; the collective that some ranks have not joined comes first."""
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for note in notes:
        groups.setdefault((note["entered"], note["name"], _after(note)), []).append(note)
    texts = []
    for (_, name, after), members in sorted(groups.items()):
        ranks = name_ranks(sorted(note["rank"] for note in members))
        texts.append(f'{ranks} waited {max(note["since_s"] for note in members):.0f} s in "{name}"{after}')
    return ", ".join(texts) or "nobody waits"


def where_it_stands(note: dict[str, Any]) -> str:
    """Return a rank's position according to its note."""
    where = "waits in" if note["is_inside"] else "is past"
    on = f"rank {note['rank']} (pid {note['pid']} on {note['host']})"
    return f'{on} {where} "{note["name"]}"{_after(note)} for {note["since_s"]:.1f} s'


def last_place(note: dict[str, Any] | None, found: dict[int, dict[str, Any]]) -> str:
    """Return the position of a rank that does not answer, by its last note, and how much older than `found` it is.

    Notes have the time since the ranks met, as the clocks of their hosts may differ.
    """
    if not note:
        return "nobody knows where it was"
    ago_s = max(0.0, max(other["time_s"] for other in found.values()) - note["time_s"])
    where = "in" if note["is_inside"] else "past"
    return f'last seen {ago_s:.1f} s ago {where} "{note["name"]}"{_after(note)}'


def _after(note: dict[str, Any]) -> str:
    return "" if note["step"] is None else f" after step {note['step']}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2"; of more than MOST_NAMED ranks, as list_numbers() does."""
    return f"rank{'s' if len(ranks) != 1 else ''} {list_numbers(ranks)}"


def list_numbers(numbers: Sequence[int]) -> str:
    """Return "0, 1, 2", or, for more than MOST_NAMED ascending numbers, ranges: "0-16, 18-1023".

    Of more than MOST_NAMED ranges, the first ones, and how many numbers the others have.
    """
    if len(numbers) <= MOST_NAMED:
        return ", ".join(map(str, numbers))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:MOST_NAMED]]
    left = sum(last - first + 1 for first, last in runs[MOST_NAMED:])
    return ", ".join(texts) + (f" and {left} more" if left else "")
