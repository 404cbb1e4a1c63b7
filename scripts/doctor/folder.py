"""Whether a node can write to the runs folder, and whether all nodes see the same one.

Each node writes a file the way checkpoints are written (temporary name, flush, rename over an older file), and
appends to one, as to a record. Once all have written, each node looks for the files of the others. The folder
below runs/ is removed at the end. Each call has a time limit, because the disk may hang.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from recipes.common.process.threads import call_within

PROBE_BYTES = 4 * 1024 * 1024
"""More than a full disk or an exhausted quota still accepts in the first write."""

WRITE_S = 15.0
SEEN_TIMEOUT_S = 10.0
"""NFS caches the content of a folder for seconds."""

SMALL_S = 5.0
"""Time limit for leaving or reading lines, and for removing the folder."""

STALE_S = 3600.0


def create(path: Path) -> BinaryIO:
    """Open a new file, in place of an old one; a link that another user may have put there is not followed."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


class RunsFolder:
    """One node's view of the job's probe folder, whose name is the same on all nodes and differs between jobs."""

    def __init__(self, runs_dir: Path, secret: str, rank: int) -> None:
        self.runs_dir, self.secret, self.rank = runs_dir, secret, rank
        self.folder = runs_dir / f".doctor-{hashlib.sha256(secret.encode()).hexdigest()[:16]}"
        self.written, self.hangs = threading.Event(), False
        self.written.set()

    def content(self, rank: int) -> bytes:
        """Return the content of a node's file."""
        line = self.line(rank)
        return line * (PROBE_BYTES // len(line))

    def line(self, rank: int) -> bytes:
        """Return what the content of a node's file repeats."""
        return hashlib.sha256(f"{self.secret} {rank}".encode()).digest()

    def write(self) -> str | None:
        """Write this node's file; return the reason if it could not be written, else None."""
        self.written.clear()
        try:
            return call_within(self._write, WRITE_S)
        except TimeoutError as error:
            self.hangs = True
            return f"it hangs ({error})"
        except OSError as error:
            return error.strerror or str(error)

    def _write(self) -> str | None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary, path = self.folder / f".node-{self.rank}.tmp", self.folder / f"node-{self.rank}"
            with create(temporary) as file:
                file.write(self.content(self.rank))
                file.flush()
                os.fsync(file.fileno())
            create(path).close()
            temporary.replace(path)
            if reason := self._append():
                return reason
            is_whole = path.read_bytes() == self.content(self.rank)
            return None if is_whole else "it reads other bytes than were written"
        finally:
            self.written.set()

    def _append(self) -> str | None:
        """Append to a file, as records do; return the reason if the mount cannot (object stores')."""
        path = self.folder / f".lines-{self.rank}"
        create(path).close()
        try:
            with open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
                file.write(b"line\n")
        except OSError as error:
            return f"nothing can be appended to a file ({error.strerror})"
        return None

    def see(self, writers: Sequence[int]) -> list[int]:
        """Return the writers whose files are visible and complete; wait as long as a cache may hide them."""
        seen: set[int] = set()
        deadline = time.monotonic() + SEEN_TIMEOUT_S

        def look() -> None:
            while True:
                with contextlib.suppress(OSError):
                    os.listdir(self.folder)  # makes NFS refresh its cache
                for rank in set(writers) - seen:
                    with contextlib.suppress(OSError), open(self.folder / f"node-{rank}", "rb") as file:
                        line = self.line(rank)  # the last one: whole files would take many nodes too long
                        is_whole = file.seek(-len(line), os.SEEK_END) == PROBE_BYTES - len(line)
                        if is_whole and file.read() == line:
                            seen.add(rank)
                if len(seen) == len(writers) or time.monotonic() > deadline:
                    return
                time.sleep(0.2)

        with contextlib.suppress(TimeoutError):
            call_within(look, SEEN_TIMEOUT_S + 5)
        return sorted(seen)

    def leave_message(self, text: str) -> None:
        """Leave a line for node 0 that this node cannot send over the network."""

        def leave() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with create(self.folder / f"message-{self.rank}") as file:
                file.write(text.encode())

        with contextlib.suppress(OSError):
            call_within(leave, SMALL_S)

    def read_messages(self) -> dict[int, str]:
        """Return the lines that nodes have left, by rank."""

        def read() -> dict[int, str]:
            named = [(path, path.name.removeprefix("message-")) for path in self.folder.glob("message-*")]
            return {int(rank): path.read_text(errors="replace")[:500] for path, rank in named}

        with contextlib.suppress(OSError):
            return call_within(read, SMALL_S)
        return {}

    def remove(self) -> None:
        """Remove the probe's folder, and folders older than STALE_S that earlier doctors could not remove."""

        def remove() -> None:
            self.written.wait()  # at Ctrl-C, write() may still be at work in its thread
            now = time.time()
            with contextlib.suppress(OSError):  # by the clock that dates the others, which may be a server's
                now = self.folder.stat().st_mtime
            for folder in self.runs_dir.glob(".doctor-*"):
                with contextlib.suppress(OSError):
                    if folder == self.folder or now - folder.stat().st_mtime > STALE_S:
                        shutil.rmtree(folder, ignore_errors=True)

        if self.hangs and not self.written.is_set():
            return  # this would take the whole time limit again
        with contextlib.suppress(TimeoutError):
            call_within(remove, SMALL_S)
