"""What rank 0 shows on a terminal: one bar for the whole run, with the time left."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from recipes.common.record.progress import Progress


class ProgressBar(Progress):
    """A progress bar below the lines."""

    _bar: Any = None

    def begin_epoch(self, epoch: int, steps: int, done: int, run_steps: int, run_done: int) -> None:
        """Start an epoch; the first call creates the bar."""
        super().begin_epoch(epoch, steps, done, run_steps, run_done)
        if self._bar is None:
            # The postfix shows the speed, in samples or tokens.
            form = "{desc} {percentage:3.0f}%|{bar}| step {n}/{total} {elapsed}, {remaining} left{postfix}"
            self._bar = tqdm(total=run_steps, initial=run_done, leave=False, bar_format=form)
        self._bar.set_description_str(self._title)

    def begin_evaluation(self) -> None:
        """Show on the bar that an evaluation is running."""
        if self._bar is not None:
            self._bar.set_description_str(f"{self._title}: evaluating")

    def advance(self) -> None:
        """Count a step."""
        self._bar.update()

    def show(self, text: str) -> None:
        """Show the newest figures beside the bar."""
        self._bar.set_postfix_str(text, refresh=False)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
