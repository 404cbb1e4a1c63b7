"""How long ranks may wait for each other, and the error if they wait too long."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

from recipes.common.options import Options

HANG_STATUS = 3
"""Exit status of all ranks if one did not answer; launchers print nothing, since the ranks have reported it."""

TIMEOUT_PHRASES = (
    "Timed out waiting",  # gloo
    "Application timeout caused pair closure",  # gloo, of a collective under way when another one timed out
    "wait timeout after",  # the store, while gloo connects
    "Watchdog caught collective operation timeout",  # NCCL
    "timed out in blocking wait",  # NCCL with TORCH_NCCL_BLOCKING_WAIT=1
)
"""Phrases in the error messages of collectives that timed out."""


def wait_timeout(args: Options) -> timedelta:
    """Return --timeout-s for process groups, and set NCCL's variables; call it before creating the groups."""
    # NCCL's flight recorder keeps the last collectives of each rank and dumps them when one times out. (Not tested
    # on several GPUs.)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    return timedelta(seconds=args.timeout_s)


def group_timeout(timeout: timedelta, device_type: str) -> timedelta:
    """Return the time-out to give to a process group whose ranks should wait for at most `timeout`.

    A gloo time-out raises an error, which is reported. NCCL's watchdog aborts the process instead, so it has to
    act later than Watch.
    """
    return 2 * timeout + timedelta(seconds=60) if device_type == "cuda" else timeout


def set_horovod_timeout(timeout_s: float) -> None:
    """Set how long Horovod waits for a rank that is alive but does not join; call it before hvd.init()."""
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(round(timeout_s / 3) or 1))
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(round(timeout_s)))


@contextlib.contextmanager
def time_limit(seconds: float, give_up: Callable[[], object]) -> Iterator[None]:
    """Call give_up() in a thread if the block takes longer: the caller's thread may wait in a library forever."""
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may hold the last reference to a process group, which cannot be freed as Python ends
