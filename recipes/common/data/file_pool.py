"""Files that are read part by part, and stay open between reads."""

from __future__ import annotations

import math
import os
import resource
import weakref
from typing import Any

from recipes.common.process.open_files import allow_open_files


class FilePool:
    """Read `count` files by path; each process that gets a copy opens them again.

    At most `most` are open, a quarter of those that a process may open, since workers' batches are files, too. For
    thousands of files, its limit is raised as far as it may be. A pool that is no longer in use closes its files.
    """

    def __init__(self, count: int) -> None:
        allow_open_files(4 * count)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = max(1, limit // 4) if limit != resource.RLIM_INFINITY else math.inf
        self.count = count
        self.descriptors: dict[str, int] = {}
        weakref.finalize(self, close_all, self.descriptors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make this pool in another process, which raises its own limit."""
        return FilePool, (self.count,)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return the bytes of a file from `offset` on: `size`, or fewer at its end; raises OSError."""
        return os.pread(self.descriptor(path), size, offset)

    def descriptor(self, path: str) -> int:
        """Return the descriptor of a file, which stays open until others need its place; raises OSError."""
        if path not in self.descriptors:
            if len(self.descriptors) >= self.most:
                os.close(self.descriptors.pop(next(iter(self.descriptors))))
            self.descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self.descriptors[path]

    def close(self) -> None:
        """Close all files."""
        close_all(self.descriptors)


def close_all(descriptors: dict[str, int]) -> None:
    """Close the files of these descriptors, and forget them."""
    while descriptors:
        os.close(descriptors.popitem()[1])
