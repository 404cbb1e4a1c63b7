"""End this process when its parent ends, so that no rank outlives the launcher that started it.

A launcher sets LAUNCHER_PID to its own process id and starts a program that calls `end_with_launcher()` first
(scripts/launch/hold_signals.py). Linux then kills the process when its parent ends (prctl(2), PR_SET_PDEATHSIG),
also after exec. If prctl is missing (macOS) or refused, a thread polls the parent's process id instead.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

LAUNCHER_PID = "LAUNCHER_PID"
"""Environment variable with the process id of the launcher: a process ends when its launcher ends."""

POLL_S = 0.5
"""Time between a process's checks of its parent if the kernel does not watch it."""

_is_polling = False


def end_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Send this process a signal when its parent ends, by default one that cannot be blocked.

    `parent` is the parent's process id, if known: if another process is the parent now, it has already ended.
    """
    global _is_polling
    parent = os.getppid() if parent is None else parent
    if not _ask_kernel(number):
        _is_polling = True
        threading.Thread(target=_poll, args=(parent, number), name="parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), number)


def _ask_kernel(number: int) -> bool:
    """Ask Linux to send the signal when the parent ends; return False if it cannot."""
    pr_set_pdeathsig = 1
    try:
        return bool(ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(number)) == 0)
    except (OSError, AttributeError):  # a C library without prctl
        return False


def _poll(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), number)


def end_with_launcher() -> None:
    """End this process when the launcher in LAUNCHER_PID ends, if that is set; remove the variable."""
    launcher = os.environ.pop(LAUNCHER_PID, "")
    if launcher:
        end_with_parent(int(launcher))


def exec_python(words: Sequence[str]) -> NoReturn:
    """Replace this program by another one: Python's own options and `-m MODULE ARGUMENTS`, or `FILE ARGUMENTS`.

    A recipe's torch prints only errors of its C++ code, unless TORCH_CPP_LOG_LEVEL is set.
    """
    if words[0] == "-m" and words[1].startswith("recipes."):
        # Otherwise each rank that loses the store of rank 0 prints 20 lines of frames around the one that counts.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not _is_polling:
        os.execv(sys.executable, [sys.executable, *words])
    # The polling thread would not survive exec: run the program in this process, without Python's own options.
    if words[0].startswith("-"):
        sys.argv = list(words[words.index("-m") + 1 :])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
    sys.exit()
