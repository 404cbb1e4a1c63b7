"""One node's part in a job, for whatever starts ranks: its place, the way to node 0, and whom to name at the end.

scripts/launch/agent.py and recipes/spawn use it. It imports nothing heavy, so that a starter listens to signals at
once.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass

from recipes.common.errors import UserError
from recipes.common.options import read_number
from recipes.common.process.entry import USAGE_STATUS
from recipes.common.process.meeting import MissingNodeError, MissingStoreError, PortTakenError, port_taken
from recipes.common.watch.bounds import HANG_STATUS


@dataclass(frozen=True)
class Node:
    """This node's place in the job."""

    nnodes: int
    node_rank: int
    nproc_per_node: int
    master_addr: str
    master_port: int
    rdzv_timeout_s: int


def read_master(nnodes: int) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT; unset, they are this machine (on one node only) and 29500.

    Raises:
        UserError: a job of several nodes without an address, or what is no port.
    """
    if nnodes > 1 and not os.environ.get("MASTER_ADDR"):
        raise UserError(f"NNODES is {nnodes} and MASTER_ADDR is not set; set it to the address of node 0")
    return os.environ.get("MASTER_ADDR") or "127.0.0.1", read_number("MASTER_PORT", 29500, 1, 65535)


def check_head(node: Node) -> None:
    """On node 0, take the port for a moment; on the others, wait until node 0 answers.

    Raises:
        UserError: the port is taken.
        MissingNodeError: the name does not resolve, or nobody answers, within the bound.
    """
    if node.node_rank == 0:
        check_port(node.master_port)
    else:
        wait_for_head(node)


def check_port(port: int) -> None:
    """Take a port on all addresses for a moment; raises UserError where that is not possible."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_taken(port) from None
            raise UserError(f"cannot listen at MASTER_PORT {port}: {error.strerror}; choose another one") from None


def wait_for_head(node: Node, store: str = "") -> str:
    """Wait until node 0 answers, or an elastic job's store (host:port); return this node's address for the others.

    It is the one that is seen there. On the same machine that may be the loopback, which means MASTER_ADDR.

    Raises:
        MissingNodeError: node 0 does not answer within the bound.
        MissingStoreError: the store does not.
    """
    place = store or f"{node.master_addr}:{node.master_port}"
    host, _, port = place.rpartition(":")
    deadline = time.monotonic() + node.rdzv_timeout_s
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                address = str(connection.getsockname()[0]).removeprefix("::ffff:")
            return node.master_addr if address.startswith("127.") or address == "::1" else address
        except OSError as error:
            if time.monotonic() > deadline:
                what = "the job's store" if store else "node 0"
                raise (MissingStoreError if store else MissingNodeError)(
                    f"node {node.node_rank} waited {node.rdzv_timeout_s} s for {what} at {place} "
                    f"({error.strerror or error}); is it up, and is MASTER_ADDR right?"
                ) from None
            time.sleep(0.2)


def status_of(statuses: dict[int, int], pids: dict[int, int]) -> int:
    """Return a node's exit status from those of its failed ranks; name the one to blame unless that is said.

    A refusal counts first, then a port that was taken, then a hang: each has printed its own line. A rank that a
    signal has killed counts before those that ended with an error, which is mostly that they have lost it.
    """
    for spoken in (USAGE_STATUS, PortTakenError.status, HANG_STATUS):
        if spoken in statuses.values():
            return spoken
    print(f"error: {cause_of(statuses, pids)}", file=sys.stderr, flush=True)
    status = statuses[culprit_of(statuses)]
    return status if status > 0 else 128 - status


def culprit_of(statuses: dict[int, int]) -> int:
    """Return the failed rank to blame: one that a signal has killed, else the lowest."""
    return min(statuses, key=lambda rank: (statuses[rank] > 0, rank))


def how_ended(status: int) -> str:
    """Return how a process with this exit status ended, below 0 by a signal."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def cause_of(statuses: dict[int, int], pids: dict[int, int]) -> str:
    """Return which of a node's failed ranks is to blame, and how it ended."""
    rank = culprit_of(statuses)
    status = statuses[rank]
    hint = "" if status < 0 else "; its own error is above"
    return f"rank {rank} (pid {pids[rank]} on {socket.gethostname()}) {how_ended(status)}{hint}"
