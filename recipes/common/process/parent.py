"""End this process when its parent ends, so that no rank outlives the launcher that started it.

A launcher sets LAUNCHER_PID to its own process id and starts a program that calls `end_with_launcher()` first
(scripts/launch/hold_signals.py). Linux then kills the process when its parent ends (prctl(2), PR_SET_PDEATHSIG),
also after exec. Where there is no prctl (macOS), or it is refused, a thread polls the parent's process id.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

with contextlib.suppress(ImportError):  # here, because end_with_parent() also runs between fork and exec
    import ctypes

LAUNCHER_PID = "LAUNCHER_PID"
"""The variable with the process id of the launcher that a process is to end with."""

POLL_S = 0.5
"""How often a process looks for its parent where the kernel does not."""

_is_polling = False


def end_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Send this process a signal when its parent ends, by default one that nothing can block.

    Args:
        parent: the process id of the parent, where it is known; another one now means that it has ended already.
        number: the signal.
    """
    global _is_polling
    parent = os.getppid() if parent is None else parent
    if not _ask_kernel(number):
        _is_polling = True
        threading.Thread(target=_poll, args=(parent, number), name="parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), number)


def _ask_kernel(number: int) -> bool:
    """Let Linux send the signal; return False where it cannot."""
    pr_set_pdeathsig = 1
    try:
        return bool(ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(number)) == 0)
    except (NameError, OSError, AttributeError):  # no ctypes, or a C library without prctl
        return False


def _poll(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), number)


def end_with_launcher() -> None:
    """End with the launcher that LAUNCHER_PID names, if it is set; take the variable out of the environment."""
    launcher = os.environ.pop(LAUNCHER_PID, "")
    if launcher:
        end_with_parent(int(launcher))


def become(words: Sequence[str]) -> NoReturn:
    """Become another Python program: `-m MODULE ARGUMENTS` after Python's own options, or `FILE ARGUMENTS`."""
    if not _is_polling:
        os.execv(sys.executable, [sys.executable, *words])
    # The thread would not survive exec: the program runs in this process, without Python's own options.
    if words[0].startswith("-"):
        sys.argv = list(words[words.index("-m") + 1 :])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
    sys.exit()
