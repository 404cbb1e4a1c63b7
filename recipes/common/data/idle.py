"""How long a device has nothing to do because its process waits, for data above all."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch


class IdleClock:
    """Add up the time for which a device stands idle while this process waits.

    A CPU is idle for as long as its process waits. A GPU first works off what it was given before: it is idle
    between two events, recorded in its queue before and after the wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=10_000)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a wait."""
        if self.device.type != "cuda":
            since = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - since
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def seconds(self) -> float:
        """Return the idle seconds of all waits so far; of a GPU, those that it has come to."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            self._seconds += begin.elapsed_time(end) / 1000
        return self._seconds
