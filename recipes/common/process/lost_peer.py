"""What the message of a failed collective says: another rank has gone, or the network or a GPU is at fault."""

from __future__ import annotations

from recipes.common.watch.bounds import TIME_OUTS

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
"""Parts of the messages of a collective whose other ranks have gone or do not answer."""

NCCL_ERROR = "NCCL error"
"""How all messages of NCCL begin, those about a full disk or a broken GPU too; the last line is the reason."""


def find_reason(said: str) -> str | None:
    """Return one line on a collective that has failed with this message; None if it is about something else."""
    lost = next((phrase for phrase in LOST_PEER if phrase in said), None)
    if NCCL_ERROR in said:
        text = said[said.index(NCCL_ERROR) :].split("Exception raised from")[0]  # the C++ stack follows
        return f"{'lost another rank' if lost else 'cannot exchange data'}: {' '.join(text.split())[:500]}"
    if lost:
        return f"lost another rank: {' '.join(said[said.index(lost) :].split(chr(10))[0].split('. ')[0].split())}"
    return None


def messages_of(error: BaseException) -> str:
    """Return what an error says, and after it what those say that it was raised from."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 10:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    return "\n".join(texts)
