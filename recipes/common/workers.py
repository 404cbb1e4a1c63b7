"""Worker processes that decode for a rank: they come from a fork server, and stop signals are not meant for them.

A rank is not forked: in that moment one of its threads (checkpoints, pinned memory, network) may hold a lock of
the C library, which stays locked in the worker for ever (https://github.com/pytorch/pytorch/issues/130610).

Slurm sends USR1 and TERM, "write a checkpoint, then leave", to every process of a job. A worker that died of them
would take its rank along before there is a checkpoint.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext

from recipes.common.signals import STOP_SIGNALS

CHECK_S = 1.0
"""Time between two looks of a worker whether its rank is there."""


def start_server() -> BaseContext:
    """Let the fork server start, which takes as long as to import torch; return the context to make workers by."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recipes.common.imagefolder"])
    # What a rank that was killed leaves behind, the tracker removes. It need not warn of that.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        for helper in (resource_tracker, forkserver):
            # What is blocked here is so in the helper, and in workers that it starts. The tracker unblocks TERM.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            helper.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Let processes that are started here not import the main module: the recipe, and all that it imports."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def begin(worker_id: int) -> None:
    """Prepare a worker process: a DataLoader's worker_init_fn."""
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    """End this worker when its rank says so, by a TERM, or has gone.

    The loader looks for the latter only while a worker waits for work, and takes the fork server for the rank.
    """
    rank = multiprocessing.parent_process()
    assert rank
    while rank.is_alive():
        received = signal.sigtimedwait([signal.SIGTERM], CHECK_S)
        if received and received.si_pid == rank.pid:
            break
    os._exit(0)
