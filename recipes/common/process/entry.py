"""How a recipe's process ends: the exit status, and one line in place of a traceback where that says more."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from recipes.common.errors import UserError
from recipes.common.process.ranks import HAVE_MET
from recipes.common.process.signals import STOP_SIGNALS
from recipes.common.watch.watch import Watch

USAGE_STATUS = 2
"""Exit status of a refusal, the one that argparse and most Unix tools use."""

REFUSAL_GRACE_S = 3.0
"""How long the other ranks leave rank 0 to print why all of them end."""

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
    except UserError as error:
        _print_refusal(error)
        if error.on_one_rank:
            _end_now(error.status)
        return error.status
    except RuntimeError as error:
        from recipes.common.process.lost_peer import find_reason, messages_of

        said = messages_of(error)
        reason = find_reason(said)
        if reason is None:
            raise
        if Watch.active and Watch.active.is_hang(said):
            Watch.active.end(error)
        rank, host = os.environ.get("RANK", "0"), socket.gethostname()
        print(f"error: rank {rank} on {host} {reason}", file=sys.stderr, flush=True)
        _end_now(1)
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


def _print_refusal(error: UserError) -> None:
    """Print one line, if this is the rank to do so; where others are to, leave them the time for it."""
    rank = os.environ.get("RANK", "0")
    local_rank = os.environ.get("LOCAL_RANK", rank)
    if rank != "0" and not error.on_one_rank and not (error.on_every_node and local_rank == "0"):
        # A launcher ends all ranks as soon as one of them exits: rank 0 has to say why before that, and after it
        # the first rank of this node.
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: sys.exit(error.status))
        # A launcher may have started this process with them blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        time.sleep(REFUSAL_GRACE_S * (1 if local_rank in ("0", rank) else 2))
        if HAVE_MET.is_set() or local_rank != "0":
            return
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr, flush=True)
