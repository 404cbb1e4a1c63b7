"""Whether a node can write to the runs folder, and whether all nodes see the same one.

Each node writes a file as checkpoints are written (temporary name, flush, rename); once all have, each looks for
the files of the others. The folder within runs/ is removed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROBE_BYTES = 4 * 1024 * 1024
"""More than the first write to a full disk or quota lets through."""

SEEN_TIMEOUT_S = 10.0
"""NFS keeps what it knows of a folder for seconds before it looks again."""


STALE_S = 3600.0


def probe_folder(runs_dir: Path, word: str) -> Path:
    """Return the folder of this job's probe: the same on all nodes, another for each job."""
    return runs_dir / f".doctor-{hashlib.sha256(word.encode()).hexdigest()[:16]}"


def write(runs_dir: Path, word: str, rank: int) -> dict[str, Any]:
    """Write this node's file; return {"error": None} or why it could not be written."""
    folder = probe_folder(runs_dir, word)
    begin = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".node-{rank}.tmp"
        with open(temporary, "wb") as file:
            file.write(content(word, rank))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / f"node-{rank}")
        if (folder / f"node-{rank}").read_bytes() != content(word, rank):
            return {"error": "it reads other bytes than were written"}
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"error": None, "write_s": round(time.monotonic() - begin, 3)}


def content(word: str, rank: int) -> bytes:
    """Return what a node writes."""
    line = hashlib.sha256(f"{word} {rank}".encode()).digest()
    return line * (PROBE_BYTES // len(line))


def see(runs_dir: Path, word: str, writers: Sequence[int]) -> list[int]:
    """Return the writers whose files are here and whole; wait for the others as long as a cache may hide them."""
    deadline = time.monotonic() + SEEN_TIMEOUT_S
    folder = probe_folder(runs_dir, word)
    seen: set[int] = set()
    while True:
        for rank in set(writers) - seen:
            with contextlib.suppress(OSError):
                os.listdir(folder)  # NFS looks anew
                if (folder / f"node-{rank}").read_bytes() == content(word, rank):
                    seen.add(rank)
        if len(seen) == len(writers) or time.monotonic() > deadline:
            return sorted(seen)
        time.sleep(0.2)


def leave_word(runs_dir: Path, word: str, rank: int, text: str) -> None:
    """Leave a line for node 0 where this node cannot tell it over the network."""
    with contextlib.suppress(OSError):
        folder = probe_folder(runs_dir, word)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"word-{rank}").write_text(text)


def words_left(runs_dir: Path, word: str) -> dict[int, str]:
    """Return the lines that nodes have left, by rank."""
    left = {}
    with contextlib.suppress(OSError):
        for path in probe_folder(runs_dir, word).iterdir():
            if match := re.fullmatch(r"word-(\d+)", path.name):
                left[int(match[1])] = path.read_text(errors="replace")[:500]
    return left


def remove(runs_dir: Path, word: str) -> None:
    """Remove the probe's folder, and those that earlier doctors were kept from removing."""
    for folder in runs_dir.glob(".doctor-*"):
        with contextlib.suppress(OSError):
            if folder == probe_folder(runs_dir, word) or time.time() - folder.stat().st_mtime > STALE_S:
                shutil.rmtree(folder, ignore_errors=True)
