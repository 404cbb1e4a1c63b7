"""Keep a stop signal or an error of this rank until all ranks agree on the step after which they act."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from recipes.common.errors import UserError

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

MAX_VOTE_INTERVAL_S = 5.0
"""Longest time between two votes, unless a step is longer: schedulers give a job a minute or two to stop."""

GO, STOP, FAIL = 0, 1, 2
"""A rank's vote. All ranks do what the largest vote says."""


def handle_stop_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    """Call handler() at a stop signal from now on, also at one that came while a launcher has blocked them."""
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextlib.contextmanager
def block_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals here and in processes started here, then restore the mask (the tracker unblocks TERM)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Stop:
    """This rank's reason to stop: a signal it received, or an error that only it has.

    USR1 and TERM mean "write a checkpoint, then exit with status 0". The handler only sets a flag, so that the
    current step ends normally. A launcher may start its ranks with these signals blocked, so that none is lost
    while Python imports; signals that came before the handlers were installed are delivered here.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.error: UserError | None = None
        self.listen()

    def listen(self) -> None:
        """Take stop signals from now on, also if the user's code has set handlers of its own meanwhile."""
        handle_stop_signals(self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)

    def fail(self, error: UserError) -> None:
        """Keep the first error of this rank until all ranks know of it."""
        self.error = self.error or error

    @property
    def vote(self) -> int:
        """This rank's current vote: GO, STOP or FAIL."""
        if self.error:
            return FAIL
        return STOP if self.signal else GO


def vote_interval(world_size: int, step_s: float) -> int:
    """Return the number of steps from one vote to the next.

    Gloo sends a vote around a ring of all ranks: with thousands, that takes longer than a short step. Up to 64
    ranks vote in each step, so that a signal takes effect at once; beyond that, the cost of votes per step is
    constant, but if steps are long, a signal waits for at most about MAX_VOTE_INTERVAL_S.
    """
    return max(1, min(-(-world_size // 64), int(MAX_VOTE_INTERVAL_S / max(step_s, 1e-3))))
