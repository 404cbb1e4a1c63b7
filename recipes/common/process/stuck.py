"""Find ranks that were killed, or have ended, and that the kernel does not let go."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from recipes.common.errors import UserError
from recipes.common.watch.timeouts import HANG_STATUS

STUCK_S = 60.0
"""How long a rank that was killed, or has ended, may take until all of its threads have ended."""

LOOK_EVERY_S = 6.0
"""How often to look for such ranks."""


class StuckRankError(UserError):
    """A rank that was killed, or has ended, and that the kernel does not let go."""

    status = HANG_STATUS

    def __init__(self, rank: int, pid: int) -> None:
        what = f"rank {rank} (pid {pid} on {socket.gethostname()}) was killed, and cannot end"
        fix = "a file system does not answer (see dmesg, df); repair it, then add --resume auto"
        super().__init__(f"{what}: {fix}")


def is_stuck(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether a thread of a process has KILL pending: it waits in the kernel, as for a dead file server."""
    for path in (proc / str(pid) / "task").glob("*/status"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = dict(line.split(":", 1) for line in path.read_text(errors="replace").splitlines())
            if int(fields["SigPnd"], 16) & 1 << (signal.SIGKILL - 1):
                return True
    return False


class StuckRanks:
    """Since when ranks of this node have been stuck."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def look(self, ranks: Mapping[int, int]) -> None:
        """Raise StuckRankError if one of these ranks, given by process id, has been stuck for STUCK_S."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in ranks if is_stuck(pid)}
        for pid, since in self._since.items():
            if now - since > STUCK_S:
                raise StuckRankError(ranks[pid], pid)
