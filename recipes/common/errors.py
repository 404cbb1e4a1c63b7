"""The two ways in which a recipe refuses: a user's mistake (one line, status 2) and nothing else."""

from __future__ import annotations

import difflib
import os
import socket
import sys
from collections.abc import Callable, Iterable

USAGE_STATUS = 2
"""Exit status of a refusal, the one that argparse and most Unix tools use."""


LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
"""What gloo says when another rank has gone or does not answer."""


class UserError(ValueError):
    """Something that the user can mend; the message says in one line what is wrong and how.

    Args:
        on_every_node: rank 0 cannot know of it, so the first rank of each node that has met it prints it.
    """

    def __init__(self, message: str, on_every_node: bool = False) -> None:
        super().__init__(message)
        self.on_every_node = on_every_node


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'X'?" for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def exit_status(main: Callable[[], object]) -> int:
    """Run main() and turn a UserError into one line on standard error and status 2.

    Every rank ends with the same status, but only rank 0 prints: a recipe shares an error that one rank alone
    has met with all ranks before it raises it.

    A lost connection to another rank is one line too, with status 1. What that rank died of is its own story,
    and a traceback through the collective that noticed it would tell nothing more.
    """
    try:
        main()
    except UserError as error:
        is_first_on_node = os.environ.get("LOCAL_RANK", "0") == "0"
        if os.environ.get("RANK", "0") == "0" or (error.on_every_node and is_first_on_node):
            sys.stdout.flush()
            print(f"error: {error}", file=sys.stderr, flush=True)
        return USAGE_STATUS
    except RuntimeError as error:
        lost = next((words for words in LOST_PEER if words in str(error)), None)
        if lost is None:
            raise
        rank, host = os.environ.get("RANK", "0"), socket.gethostname()
        detail = " ".join(str(error)[str(error).index(lost) :].split(". ")[0].split())
        print(f"error: rank {rank} on {host} lost another rank: {detail}", file=sys.stderr, flush=True)
        # Threads that wait for the lost rank would keep the interpreter from ending.
        os._exit(1)
    return 0
