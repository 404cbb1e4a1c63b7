"""--cache-dir: keep on a disk of the node what has been read from shards on a server.

Each shard has a file, with holes for what has not been read: an image is there if its checksum is right. So any
number of processes can write the file without a lock, and a crash loses only images that were being written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.utils.data import get_worker_info

from recipes.common.data.stores import Store
from recipes.common.errors import FULL, UserError, may_pass
from recipes.common.folders import open_own


class Cache:
    """Copies of a server's files in a folder; what is not there yet is read from the server."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder, self.has_warned = store, folder, False

    def look(self, name: str, start: int, end: int) -> bytes:
        """Return what a file's copy has from start to before end; raises OSError if the cache cannot be used."""
        with self._unless_full(), self._open(name) as file:
            return b"" if is_hole(file, start) else os.pread(file, end - start, start)
        return b""

    def read(
        self, name: str, start: int, end: int, is_packed: Callable[[memoryview], bool] = lambda content: True
    ) -> memoryview:
        """Return the bytes from Store.read(), and keep them if there is room; raises OSError if either fails."""
        content = self.store.read(name, start, end, is_packed)
        with self._unless_full(), self._open(name) as file:
            if os.pwrite(file, content, start) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return content

    @contextlib.contextmanager
    def _unless_full(self) -> Iterator[None]:
        """Go on without the cache if its disk is full, which other jobs may cause; one process a node says so."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            worker = get_worker_info()
            is_first = os.environ.get("LOCAL_RANK", "0") == "0" and not (worker and worker.id)
            if is_first and not self.has_warned:
                self.has_warned = True
                cost = "each epoch reads what the cache lacks from the server"
                print(f"warning: {error.strerror}; {cost}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """Open a file; no link is followed, even if others can rename the cache's folder."""
        try:
            folder = open_own(self.folder)
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                file = os.open(name, flags, 0o644, dir_fd=folder)
            finally:
                os.close(folder)
            try:
                yield file
            finally:
                os.close(file)
        except OSError as error:
            what = f"--cache-dir cannot use {self.folder / name}: {error.strerror}"
            raise OSError(error.errno, what) from None


def is_hole(file: int, start: int) -> bool:
    """Whether nothing was written at a place of an open file; False if its file system does not say."""
    try:
        return os.lseek(file, start, os.SEEK_DATA) > start
    except OSError as error:
        return error.errno == errno.ENXIO  # nothing from here to the end of the file


def open_cache(store: Store, cache_dir: Path, shards: dict[str, int]) -> Cache:
    """Return the cache for a server's shards (sizes by name), in a folder of its own below --cache-dir.

    Raises UserError if the folder cannot be made, others can write to it, or its disk is too full.
    """
    folder = cache_dir / f"{store.url.split('/')[-1]}-{zlib.crc32(store.url.encode()):08x}"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        os.close(open_own(folder))
        # Of a file of other shards, which were here before these were packed, what is overwritten needs no room.
        kept = sum(min(path.stat().st_blocks * 512, shards.get(path.name, 0)) for path in folder.iterdir())
        missing = sum(shards.values()) - kept
        free = shutil.disk_usage(folder).free
    except OSError as error:
        fix = "give a folder on a disk of the node that only this user can write to"
        what = f"--cache-dir: cannot use {folder} ({error.strerror}); {fix}"
        raise UserError(what, is_passing=may_pass(error)) from None
    if missing > free:
        what = f"needs {missing / 1e9:.1f} GB more, and its disk has {free / 1e9:.1f} GB free"
        fix = "make room, give another folder, or go without a cache"
        raise UserError(f"--cache-dir: {folder} {what}; {fix}")
    return Cache(store, folder)
