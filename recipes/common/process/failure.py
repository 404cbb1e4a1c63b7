"""What a rank prints of the error that ends it: one line in place of a traceback where that says more."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from recipes.common.errors import UserError
from recipes.common.process.ranks import HAVE_MET
from recipes.common.process.signals import STOP_SIGNALS
from recipes.common.watch.bounds import TIME_OUTS
from recipes.common.watch.watch import Watch

REFUSAL_GRACE_S = 3.0
"""How long the other ranks wait for rank 0 to print why all ranks end."""

LOST_PEER = (
    # gloo and the store
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    # NCCL
    "Connection closed by remote peer",
    "remote process exited",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    *TIME_OUTS,
)
"""Phrases in the error messages of collectives whose other ranks have gone or do not answer."""

NCCL_ERROR = "NCCL error"
"""Start of all of NCCL's messages, also those about a full disk or a broken GPU; the last line is the reason."""


def explain(error: UserError | RuntimeError) -> bool:
    """Print one line about a UserError or a failed collective; return False for an error of another kind.

    If a rank does not answer, report the hang instead, and end this process.
    """
    if isinstance(error, UserError):
        _print_refusal(error)
        return True
    said = _said(error)
    reason = _reason(said)
    if reason is None:
        return False
    if Watch.active and Watch.active.is_hang(said):
        Watch.active.end(error)
    rank, host = os.environ.get("RANK", "0"), socket.gethostname()
    print(f"error: rank {rank} on {host} {reason}", file=sys.stderr, flush=True)
    return True


def _print_refusal(error: UserError) -> None:
    """Print the error if this is the rank to print it; otherwise give that rank the time to do so."""
    rank = os.environ.get("RANK", "0")
    local_rank = os.environ.get("LOCAL_RANK", rank)
    if rank != "0" and not error.on_one_rank and not (error.on_every_node and local_rank == "0"):
        # A launcher ends all ranks as soon as one of them exits. Before that, rank 0 has to print the reason, and
        # after rank 0 the first rank of this node.
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: sys.exit(error.status))
        # A launcher may have started this process with these signals blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        time.sleep(REFUSAL_GRACE_S * (1 if local_rank in ("0", rank) else 2))
        if HAVE_MET.is_set() or local_rank != "0":
            return
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr, flush=True)


def _reason(said: str) -> str | None:
    """Return a one-line reason for a collective that failed with this message; None for any other message."""
    lost = next((phrase for phrase in LOST_PEER if phrase in said), None)
    if NCCL_ERROR in said:
        text = said[said.index(NCCL_ERROR) :].split("Exception raised from")[0]  # the C++ stack follows
        return f"{'lost another rank' if lost else 'cannot exchange data'}: {' '.join(text.split())[:500]}"
    if lost:
        return f"lost another rank: {' '.join(said[said.index(lost) :].split(chr(10))[0].split('. ')[0].split())}"
    return None


def _said(error: BaseException) -> str:
    """Return the message of an error, followed by the messages of the errors that caused it."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 10:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    return "\n".join(texts)
