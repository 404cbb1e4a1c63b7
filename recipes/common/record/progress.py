"""What rank 0 shows without a terminal: plain lines (progress_bar.py: with one)."""

from __future__ import annotations

import os
import sys
import time

from recipes.common.errors import UserError

QUIET_S = 10.0
"""Step lines appear at most this often; epoch lines always do."""


def say(text: str, fix: str) -> None:
    """Print and flush in one write; raise UserError, with the fix, if standard output is closed or full."""
    try:
        print(f"{text}\n", end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or it is raised again at exit
        what = "is closed" if isinstance(error, BrokenPipeError) else f"failed: {error.strerror}"
        raise UserError(f"standard output {what}; {fix}") from None


class Progress:
    """Lines on standard output."""

    def __init__(self) -> None:
        self._spoke_at = time.monotonic()

    def begin_epoch(self, epoch: int, steps: int, done: int, run_steps: int, run_done: int) -> None:
        """Start an epoch of `steps`; `done` of them, and `run_done` of the run's `run_steps`, are done already."""
        self._title, self._steps, self._done = f"epoch {epoch}", steps, done

    def begin_evaluation(self) -> None:
        """Note that an evaluation is running; plain lines do not show it."""

    def advance(self) -> None:
        """Count a step."""
        self._done += 1

    def show(self, text: str) -> None:
        """Show the newest figures."""
        if time.monotonic() - self._spoke_at > QUIET_S:
            self.say(f"{self._title}  step {self._done}/{self._steps}  {text}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._spoke_at = time.monotonic()
        say(text, "to resume: --resume auto, with the output in a file")

    def close(self) -> None:
        """Leave the terminal as it was; plain lines need nothing for that."""
