"""How long ranks may wait for each other, and what tells that they have waited too long."""

from __future__ import annotations

import os
from datetime import timedelta

from recipes.common.options import Options

HANG_STATUS = 3
"""Exit status of every rank of a job in which one did not answer; launchers then have nothing to add."""

TIME_OUTS = (
    "Timed out waiting",  # gloo
    "Watchdog caught collective operation timeout",  # NCCL
    "timed out in blocking wait",  # NCCL with TORCH_NCCL_BLOCKING_WAIT=1
)
"""Parts of the messages of a collective that has waited for longer than its bound."""


def bound_of_waits(args: Options) -> timedelta:
    """Return --timeout-s for process groups; call it before they are made."""
    # NCCL's flight recorder: the last collectives of each rank, dumped when one times out. The older name of the
    # first is TORCH_NCCL_TRACE_BUFFER_SIZE. (Not tried on several GPUs.)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    return timedelta(seconds=args.timeout_s)


def bound_of_group(timeout: timedelta, device_type: str) -> timedelta:
    """Return the bound of a process group whose ranks wait for at most this time-out.

    Gloo's waits fail, and are reported. NCCL's watchdog aborts the process instead: it has to come after Watch.
    """
    return 2 * timeout + timedelta(seconds=60) if device_type == "cuda" else timeout
