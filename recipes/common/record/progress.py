"""What rank 0 shows: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from recipes.common.errors import UserError

QUIET_S = 10.0
"""Without a terminal, step lines appear at most this often; epoch lines always do."""


class Progress:
    """One bar for the whole run on a terminal, with the time left; lines otherwise."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty() and sys.stdout.isatty()
        self._bar: Any = None
        self._spoke_at = time.monotonic()

    def begin_epoch(self, epoch: int, steps: int, done: int, run_steps: int, run_done: int) -> None:
        """Start an epoch of `steps`; `done` of them, and `run_done` of the run's `run_steps`, are done already."""
        self._title, self._steps, self._done = f"epoch {epoch}", steps, done
        if self._on_terminal:
            if self._bar is None:
                from tqdm import tqdm

                # The speed is in the figures at the end, in samples or tokens.
                form = "{desc} {percentage:3.0f}%|{bar}| step {n}/{total} {elapsed}, {remaining} left{postfix}"
                self._bar = tqdm(total=run_steps, initial=run_done, leave=False, bar_format=form)
            self._bar.set_description_str(self._title)

    def begin_evaluation(self) -> None:
        """Say on the bar that an evaluation is under way."""
        if self._bar is not None:
            self._bar.set_description_str(f"{self._title}: evaluating")

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
            try:
                print(text, flush=True)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else raised again at the end
                raise UserError(
                    "nobody reads standard output any more; to resume: --resume auto, and the output to a file"
                ) from None

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
