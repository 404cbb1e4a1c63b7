"""How long a device waits for samples that worker processes read."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

IDLE_WINDOW_S = 10.0
"""Seconds of training over which the idle share is measured; a share above MAX_IDLE_SHARE is worth a warning."""
MAX_IDLE_SHARE = 0.2


class IdleClock:
    """Add up how long a device is idle while this process waits, and its share of the training in each window.

    A CPU is idle as long as its process waits. A GPU first completes the work in its queue: it is idle between two
    events that are recorded in the queue before and after the wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = 0.0
        self._window_begin: tuple[float, float] | None = None
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
        """Return the idle seconds of all waits so far; for a GPU, of the waits that its queue has passed."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            self._seconds += begin.elapsed_time(end) / 1000
        return self._seconds

    def end_window(self, train_s: float) -> float:
        """Return the idle share since the last window; 0 if less than IDLE_WINDOW_S of training have passed.

        `train_s` are the seconds of training so far. The first call begins the first window, so that start-up does
        not count.
        """
        now = self.seconds(), train_s
        begin = self._window_begin = self._window_begin or now
        window_s = train_s - begin[1]
        if window_s < IDLE_WINDOW_S:
            return 0.0
        self._window_begin = now
        return (now[0] - begin[0]) / window_s
