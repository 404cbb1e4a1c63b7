"""Errors of ranks or nodes that do not find each other at MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from recipes.common.errors import UserError
from recipes.common.process.ranks import Ranks
from recipes.common.watch.report import name_ranks


class PortTakenError(UserError):
    """Another process took MASTER_PORT after a launcher had chosen it, which is nobody's mistake: retry."""

    status = 75
    """EX_TEMPFAIL of sysexits.h: a Slurm job with this status is requeued; other launchers choose another port."""


def is_port_chosen() -> bool:
    """Return whether a launcher, not the user, chose MASTER_PORT."""
    return bool(os.environ.get("PORT_IS_CHOSEN"))


def port_taken_error(port: int) -> UserError:
    """Return the error for a port that is taken: the user's mistake, unless a launcher chose the port."""
    if is_port_chosen():
        return PortTakenError(f"MASTER_PORT {port} has been taken since the launcher chose it; try again")
    return UserError(f"MASTER_PORT {port} is taken; choose another one")


class MissingNodeError(UserError):
    """A node did not join in time; another start may find it."""

    status = 1


class MissingStoreError(MissingNodeError):
    """The store of an elastic job did not answer in time."""

    status = 68
    """EX_NOHOST of sysexits.h, for an agent. Its node ends with status 1, or counts as lost if it had returned."""


def rendezvous_error(rank: int, message: str) -> UserError:
    """Return the error for torch's message: the port is taken, or the ranks did not find each other in time."""
    is_taken = "EADDRINUSE" in message
    if is_taken and is_port_chosen():
        return port_taken_error(int(os.environ["MASTER_PORT"]))
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    reason = message.strip().split("\n")[0].strip()
    what = f"rank {rank} cannot meet the others at {place} ({reason})"
    kind = UserError if is_taken else MissingNodeError
    return kind(f"{what}; is rank 0 up, is MASTER_ADDR right, is MASTER_PORT free?", on_every_node=True)


def missing_ranks_error(ranks: Ranks, missing: Sequence[int], waited_s: float) -> UserError:
    """Return the error for ranks that have not come in time."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    what = f"rank {ranks.rank} waited {waited_s:g} s for {name_ranks(missing)} of {ranks.world_size} at {place}"
    return MissingNodeError(f"{what}; are they up, and are their ranks right?", on_every_node=True)


def taken_rank_error(rank: int) -> UserError:
    """Return the error for a rank that another process already is, in a job whose ranks have met."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    what = f"the job at {place} already has a rank {rank}"
    return MissingNodeError(
        f"{what}; end that job first, choose another MASTER_PORT, or number ranks from 0", on_every_node=True
    )


def connection_error(rank: int, message: str) -> UserError:
    """Return the error for gloo's message that a rank cannot connect to another one, which the store knows."""
    reason = message.partition("] ")[2].strip().split("\n")[0] or message  # after the place in gloo's sources
    return MissingNodeError(
        f"rank {rank} on {socket.gethostname()} cannot connect to the others ({reason}); set GLOO_SOCKET_IFNAME "
        "to the interface that leads to them (ip -brief address lists all), or open the ports between nodes",
        on_every_node=True,
    )
