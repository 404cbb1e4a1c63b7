"""How a recipe's process ends, and with which status."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from recipes.common.errors import UserError
from recipes.common.process.failure import explain  # now: later, a failing disk may prevent it
from recipes.common.process.signals import STOP_SIGNALS
from recipes.common.watch.watch import Watch

USAGE_STATUS = 2
"""Exit status of a UserError by default, the one that argparse and most Unix tools use."""

CHECKPOINT_THREAD = "checkpoint"
"""The name of the thread that writes a checkpoint."""

CHECKPOINT_GRACE_S = 2.0
"""How long a rank that has lost another one may still write a checkpoint, before launchers end it."""


def exit_status(main: Callable[[], object]) -> int:
    """Run main() and return the exit status; turn a UserError into one line on standard error and its status.

    All ranks end with the same status, but only rank 0 prints: a recipe shares an error of one rank with all ranks
    before it raises it. Before the ranks have met, rank 0 may not have the error: the first rank of each other
    node then prints it, too, unless its launcher ends it first because rank 0 has ended.

    A lost connection to another rank is reported in one line, too, with status 1. That rank reports its own error,
    and a traceback through the collective that noticed it would add nothing. If a rank does not answer within
    --timeout-s, the report names it and where all others wait for it: see watch.py.

    Torch's 300,000 objects never become garbage. Freezing them saves 0.1 s in each garbage collection: a rank
    needs 1 s less CPU time to start and to end.
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
        # The job is over for this process: a stop signal must not kill it while the interpreter shuts down.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if Watch.active:
            Watch.active.close()
        gc.freeze()  # later imports, too: the interpreter collects garbage once more at exit
    return 0


def _end_now(status: int) -> NoReturn:
    """End this process at once: threads that wait for another rank would keep the interpreter alive."""
    for thread in threading.enumerate():
        if thread.name == CHECKPOINT_THREAD:
            thread.join(CHECKPOINT_GRACE_S)
    os._exit(status)
