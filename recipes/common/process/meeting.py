"""Errors of ranks or nodes that do not meet at MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

import os

from recipes.common.errors import UserError


class PortTakenError(UserError):
    """Another process took MASTER_PORT after a launcher had chosen it, which is nobody's mistake: try again."""

    status = 75
    """EX_TEMPFAIL of sysexits.h: a Slurm job with it is requeued, and other launchers take another port."""


def is_port_chosen() -> bool:
    """Whether a launcher chose MASTER_PORT, and not the user."""
    return bool(os.environ.get("PORT_IS_CHOSEN"))


def port_taken(port: int) -> UserError:
    """Return the error of a port that is taken: the user's mistake, unless a launcher chose it."""
    if is_port_chosen():
        return PortTakenError(f"MASTER_PORT {port} has been taken since the launcher chose it; try again")
    return UserError(f"MASTER_PORT {port} is taken; choose another one")


class MissingNodeError(UserError):
    """A node did not come within the bound; another start may find it."""

    status = 1


class MissingStoreError(MissingNodeError):
    """The store of an elastic job did not answer within the bound."""

    status = 68
    """EX_NOHOST of sysexits.h, of an agent; its node ends with 1, or counts as lost where it was to come back."""


def cannot_meet(rank: int, message: str) -> UserError:
    """Return what torch's message means: the port is taken, or the ranks do not find each other in time."""
    is_taken = "EADDRINUSE" in message
    if is_taken and is_port_chosen():
        return port_taken(int(os.environ["MASTER_PORT"]))
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    reason = message.strip().split("\n")[0].strip()
    return (UserError if is_taken else MissingNodeError)(
        f"rank {rank} cannot meet the others at {place} ({reason}); "
        "is rank 0 up, is MASTER_ADDR right, is MASTER_PORT free?",
        on_every_node=True,
    )
