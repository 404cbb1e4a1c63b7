"""Become a recipe, with USR1 and TERM blocked until it handles them.

    python -m scripts.launch.hold_signals recipes.single.train --epochs 3
    python -m scripts.launch.hold_signals -u -m recipes.single.train --epochs 3    # Python's own options first

A recipe imports torch for a second or two before it can handle a signal; one that arrived in that time would kill
it. Blocked signals stay pending instead, also across exec, until the recipe unblocks them. The recipe ends with
the launcher that LAUNCHER_PID names (recipes/common/process/parent.py).
"""

from __future__ import annotations

import signal
import sys

from recipes.common.process.parent import end_with_launcher, exec_python
from recipes.common.process.signals import STOP_SIGNALS

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    end_with_launcher()
    exec_python(sys.argv[1:] if sys.argv[1].startswith("-") else ["-m", *sys.argv[1:]])
