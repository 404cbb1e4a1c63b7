"""How a recipe's process ends, and with which status."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from recipes.common.errors import UserError
from recipes.common.process.failure import explain  # not later: a disk that fails may be the reason
from recipes.common.process.signals import STOP_SIGNALS
from recipes.common.watch.watch import Watch

USAGE_STATUS = 2
"""Exit status of a refusal, the one that argparse and most Unix tools use."""

CHECKPOINT_THREAD = "checkpoint"
"""The name of the thread that writes a checkpoint."""

CHECKPOINT_GRACE_S = 2.0
"""How long a rank that has lost another still writes at a checkpoint: launchers leave it 3 s."""


def exit_status(main: Callable[[], object]) -> int:
    """Run main() and turn a UserError into one line on standard error and status 2.

    Every rank ends with the same status, but only rank 0 prints: a recipe shares an error that one rank alone
    has met with all ranks before it raises it. Before the ranks have met, rank 0 may have no such error: the first
    rank of each other node prints it too, unless a launcher has ended it because rank 0 has.

    A lost connection to another rank is one line too, with status 1. That rank reports its own error,
    and a traceback through the collective that noticed it would add nothing. A rank that does not answer
    within --timeout-s is named, and where all others wait for it: see watch.py.

    Torch's 300,000 objects never become garbage. Frozen, they no longer add 0.1 s to each garbage collection: a
    rank takes 1 s less of CPU time to start and to end.
    """
    gc.freeze()
    try:
        main()
    except (UserError, RuntimeError) as error:
        if not explain(error):
            raise
        status = error.status if isinstance(error, UserError) else 1
        if not isinstance(error, UserError) or error.on_one_rank:
            _end_now(status)
        return status
    finally:
        # The job is over for this process: a stop signal must not kill it while the interpreter winds down.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if Watch.active:
            Watch.active.close()
        gc.freeze()  # also what was imported later: the interpreter collects again as it ends
    return 0


def _end_now(status: int) -> NoReturn:
    """End this process; threads that wait for another rank would keep the interpreter from ending."""
    for thread in threading.enumerate():
        if thread.name == CHECKPOINT_THREAD:
            thread.join(CHECKPOINT_GRACE_S)
    os._exit(status)
