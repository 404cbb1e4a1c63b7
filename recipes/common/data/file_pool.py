"""Files that are read part by part, and stay open between reads."""

from __future__ import annotations

import math
import os
import resource
from typing import Any


class FilePool:
    """Read files by path; each process that gets a copy opens them anew.

    At most `most` are open, a quarter of those that a process may open: a few terabytes have more files than that,
    and workers' batches are files, too.
    """

    def __init__(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = max(1, limit // 4) if limit != resource.RLIM_INFINITY else math.inf
        self.descriptors: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "descriptors": {}}

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return the bytes of a file from `offset` on: `size`, or fewer at its end; raises OSError."""
        if path not in self.descriptors:
            if len(self.descriptors) >= self.most:
                os.close(self.descriptors.pop(next(iter(self.descriptors))))
            self.descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self.descriptors[path], size, offset)
