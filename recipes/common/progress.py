"""What rank 0 shows: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

QUIET_S = 10.0
"""Without a terminal, step lines appear at most this often; epoch lines always do."""


class Progress:
    """One bar an epoch on a terminal; lines otherwise."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty() and sys.stdout.isatty()
        self._bar: Any = None
        self._spoke_at = time.monotonic()

    def begin_epoch(self, epoch: int, steps: int, done: int) -> None:
        """Start an epoch's bar; `done` steps of it were done before a resume."""
        self._title, self._steps, self._done = f"epoch {epoch}", steps, done
        if self._on_terminal:
            from tqdm import tqdm

            self._bar = tqdm(desc=self._title, total=steps, initial=done, leave=False, unit="step")

    def advance(self) -> None:
        """Count a step."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()

    def show(self, text: str) -> None:
        """Show the newest figures."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
        elif time.monotonic() - self._spoke_at > QUIET_S:
            self.say(f"{self._title}  step {self._done}/{self._steps}  {text}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._spoke_at = time.monotonic()
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
