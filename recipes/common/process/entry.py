"""How a recipe's process ends: its exit status, and one line in place of a traceback if the line says more."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from recipes.common.errors import UserError, adjust_output, explain_unrepeatable, lack_of_processes
from recipes.common.process.memory import keep_freed_memory
from recipes.common.process.ranks import HAVE_MET
from recipes.common.process.signals import STOP_SIGNALS, handle_stop_signals
from recipes.common.watch.timeouts import TIMEOUT_PHRASES
from recipes.common.watch.watch import Watch

USAGE_STATUS = 2
"""Exit status of a UserError by default, the one that argparse and most Unix tools use."""

LOST_RANK_STATUS = 69
"""Exit status of a rank that has only lost another one, if its launcher sets it; else 1, as for other errors."""

CHECKPOINT_THREAD = "checkpoint"
"""The name of the thread that writes a checkpoint."""

CHECKPOINT_GRACE_S = 2.0
"""How long a rank that has lost another one may still write a checkpoint, before launchers end it."""

MEMORY_GRACE_S = 60.0
"""How long a rank without GPU memory may still write a checkpoint, for which the others may wait."""

REFUSAL_GRACE_S = 3.0
"""How long the other ranks wait for rank 0 to print why all ranks end."""

LOST_PEER = (
    # gloo and the store
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Failed to recv, got 0 bytes",
    "timed out connecting",
    # NCCL
    "Connection closed by remote peer",
    "remote process exited",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Horovod has been shut down",
    *TIMEOUT_PHRASES,
)
"""Phrases in the error messages of collectives whose other ranks have gone or do not answer."""

LOST = "lost another rank"

SAME_ERROR_S = 1.0
"""How long a rank with an error of its own stays, as the others may have the same one in the same step."""

NCCL_ERROR = "NCCL error"
"""Start of all of NCCL's messages, also those about a full disk or a broken GPU; the last line is the reason."""

MAIN_MEMORY = "DefaultCPUAllocator: can't allocate memory: "
"""Start of what torch says if it gets no main memory."""


def run_main(main: Callable[[], object]) -> int:
    """Run main() and return the exit status; turn a UserError into one line on standard error and its status.

    All ranks end with the same status, but only rank 0 prints: a recipe shares an error of one rank with all ranks
    before it raises it. Before the ranks have met, rank 0 may not have the error: then the first rank of each
    other node prints it, too, unless its launcher ends it first. If ranks have the same error without sharing it,
    one rank of node 0 prints it, and one of all other nodes: launch.sh's nodes on one machine and slurm/ show the
    first alone.

    A lost connection to another rank and a lack of memory, threads or processes are also reported in one line,
    with status 1: the lost rank reports its own error, and all ranks mostly run out of memory in the same step. If
    a rank does not answer within --timeout-s, the report names it and where the others wait for it: see watch.py.
    """
    gc.freeze()  # torch's 300,000 objects, which are never garbage: saves a rank 1 s of CPU time
    adjust_output()
    keep_freed_memory()
    try:
        main()
    except UserError as error:
        return _refuse(error)
    except (RuntimeError, BlockingIOError) as error:
        if text := explain_unrepeatable(_said(error)):
            return _refuse(UserError(text, on_one_rank=True))
        # The first is torch's class for GPUs; this file does not import torch.
        is_full = type(error).__name__ == "OutOfMemoryError" or MAIN_MEMORY in str(error)
        if not (reason := _explain(error, is_full)):
            raise
        status = int(os.environ.get("LOST_RANK_STATUS", "1")) if reason.startswith(LOST) else 1
        _end_now(status, MEMORY_GRACE_S if is_full else CHECKPOINT_GRACE_S)
    finally:
        # The job is over for this process: a stop signal must not kill it while the interpreter shuts down.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if Watch.active:
            Watch.active.close()
        triton = getattr(sys.modules.get("triton"), "__version__", "0.")
        if re.match(r"[0-2]\.|3\.[0-8]\b", triton):  # later ones list what is not collected
            gc.freeze()  # later imports, too: the interpreter collects garbage once more at exit
    return 0


def _refuse(error: UserError) -> int:
    """Print the error unless another rank does, and return its status; end this process if the others continue."""
    active = Watch.active if error.on_one_rank else None  # with the ranks' store, unless Horovod connects them
    rank = os.environ.get("RANK", "0")
    place = "node 0" if os.environ.get("LOCAL_RANK", rank) == rank else "other nodes"
    if not active or active.notes.count(f"error on {place}/{error}", otherwise=1) == 1:
        _print_refusal(error)
    if active:
        time.sleep(SAME_ERROR_S)  # the store may end with this rank, and a launcher ends all once one exits
    if error.on_one_rank:
        _end_now(error.status, CHECKPOINT_GRACE_S)
    return error.status


def _end_now(status: int, grace_s: float) -> NoReturn:
    """End this process once its checkpoint is written, or after grace_s.

    Threads that wait for another rank would keep the interpreter alive.
    """
    for thread in threading.enumerate():
        if thread.name == CHECKPOINT_THREAD:
            thread.join(grace_s)
    os._exit(status)


def _explain(error: Exception, is_full: bool) -> str | None:
    """Print one line about a lack of memory or processes, or a failed collective, and return it; else None.

    If a rank does not answer, report the hang instead, and end this process.
    """
    said = _said(error)
    reason = _lack_of_memory(str(error)) if is_full else _reason(said)
    lack = lack_of_processes(error)
    reason = reason or lack
    if not reason:
        return None
    if Watch.active and not (is_full or lack) and Watch.active.is_hang(said):
        Watch.active.end(error)
    rank, host = os.environ.get("RANK", "0"), socket.gethostname()
    print(f"error: rank {rank} on {host} {reason}", file=sys.stderr, flush=True)
    return reason


def _print_refusal(error: UserError) -> None:
    """Print the error if this is the rank to print it; otherwise give that rank the time to do so."""
    rank = os.environ.get("RANK", "0")
    local_rank = os.environ.get("LOCAL_RANK", rank)
    if rank != "0" and not error.on_one_rank and not (error.on_every_node and local_rank == "0"):
        # After rank 0, the first rank of this node prints, too.
        wait_for_rank_0(error.status, 1 if local_rank in ("0", rank) else 2)
        if HAVE_MET.is_set() or local_rank != "0":
            return
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr, flush=True)


def wait_for_rank_0(status: int, shares: int = 1) -> None:
    """Give rank 0 the time to print why all ranks end, unless a signal comes: launchers end all once one exits."""
    handle_stop_signals(lambda number, frame: sys.exit(status))
    time.sleep(REFUSAL_GRACE_S * shares)


def _lack_of_memory(said: str) -> str:
    """Return torch's message about a lack of memory as one line: how much was asked for, and the fix."""
    if MAIN_MEMORY in said:
        fact = said.partition(MAIN_MEMORY)[2].split(". ")[0]
        return f"has no main memory left ({fact}); use smaller data, a smaller model or --global-batch-size"
    facts = said.split("\n")[0].removeprefix("CUDA out of memory. ").split(". ")
    fix = "use a smaller --global-batch-size, more --accumulate-steps or processes, or --amp bf16"
    return f"has no GPU memory left ({'. '.join(facts[:2])}); {fix}"


def _reason(said: str) -> str | None:
    """Return a one-line reason for a collective that failed; None for any other message."""
    lost = next((phrase for phrase in LOST_PEER if phrase in said), None)
    if NCCL_ERROR in said:
        text = said[said.index(NCCL_ERROR) :].split("Exception raised from")[0]  # the C++ stack follows
        return f"{LOST if lost else 'cannot exchange data'}: {' '.join(text.split())[:500]}"
    if lost:
        return f"{LOST}: {' '.join(said[said.index(lost) :].split(chr(10))[0].split('. ')[0].split())}"
    return None


def _said(error: BaseException) -> str:
    """Return the message of an error, followed by the messages of the errors that caused it."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 10:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    return "\n".join(texts)
