"""One node's part in a job: its place, the connection to node 0, and which failed rank to blame at the end.

scripts/launch/agent.py and recipes/spawn use it. It imports nothing heavy, so that a launcher handles signals at
once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recipes.common.arguments import read_number
from recipes.common.errors import UserError
from recipes.common.process.entry import LOST_RANK_STATUS, USAGE_STATUS
from recipes.common.process.ranks import bind_address, connect_within, is_loopback
from recipes.common.process.rendezvous_errors import (
    MissingNodeError,
    MissingStoreError,
    PortTakenError,
    port_taken_error,
)
from recipes.common.watch.report import list_numbers, name_ranks
from recipes.common.watch.timeouts import HANG_STATUS


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
    """Return MASTER_ADDR and MASTER_PORT; the defaults are this machine (for one node only) and 29500.

    Raises UserError if a job of several nodes has no MASTER_ADDR, it cannot be a host's name, or MASTER_PORT is no
    port.
    """
    address = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    if nnodes > 1 and not os.environ.get("MASTER_ADDR"):
        raise UserError(f"NNODES is {nnodes} and MASTER_ADDR is not set; set it to the address of node 0")
    check_host(address)
    return address, read_number("MASTER_PORT", 29500, 1, 65535)


def check_host(name: str) -> None:
    """Raise UserError if a text cannot be a host's name: the functions of `socket` raise UnicodeError for it.

    Two addresses, as of hostname -I, or an address with its port would only fail to resolve, after minutes.
    """
    if re.search(r"[\s,/]|^[^:]*:[^:]*$", name):
        raise UserError(f"{name!r} is not a host name or address; give one, without a port")
    try:
        name.encode("idna")
    except UnicodeError:
        raise UserError(f"{name!r} is not a host name: parts between dots have 1 to 63 characters") from None


def check_head(node: Node) -> None:
    """Check on node 0 that the port is free; on the other nodes, wait until node 0 answers.

    Raises:
        UserError: the port is taken.
        MissingNodeError: the name of node 0 does not resolve, or it does not answer, in time.
    """
    if node.node_rank == 0:
        check_port(node.master_port)
    else:
        wait_for_head(node)


def check_port(port: int) -> None:
    """Bind a port on all addresses for a moment; raises UserError if that is not possible."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_taken_error(port) from None
            raise UserError(f"cannot listen at MASTER_PORT {port}: {error.strerror}; choose another one") from None


def wait_for_head(node: Node, store: str = "") -> str:
    """Wait until node 0, or an elastic job's store (host:port), answers; return this node's address for others.

    This node connects from that address; if it is the loopback, on node 0's own machine, MASTER_ADDR is returned.

    Raises:
        MissingNodeError: node 0 does not answer in time.
        MissingStoreError: the store does not answer in time.
    """
    place = store or f"{node.master_addr}:{node.master_port}"
    host, _, port = place.rpartition(":")
    try:
        address = connect_within(host, int(port), node.rdzv_timeout_s)
    except OSError as error:
        what = "the job's store" if store else "node 0"
        raise (MissingStoreError if store else MissingNodeError)(
            f"node {node.node_rank} waited {node.rdzv_timeout_s} s for {what} at {place} "
            f"({error.strerror or error}); is it up, and is MASTER_ADDR right?"
        ) from None
    return node.master_addr if is_loopback(address) else address


def missing_nodes_error(node: Node, missing: Sequence[int]) -> MissingNodeError:
    """Return the error for nodes that have not come in time."""
    hint = " (no other machine reaches 127.0.0.1)" if bind_address(node.master_addr) else ""
    nodes, place = f"node {list_numbers(missing)} of {node.nnodes}", f"{node.master_addr}:{node.master_port}"
    return MissingNodeError(
        f"node {node.node_rank} waited {node.rdzv_timeout_s} s for {nodes} at {place}; is it up, and is its "
        f"NODE_RANK right?{hint}"
    )


OWN_ERROR = "; its own error is above"
"""End of cause_of() where a rank has printed why it ended."""


class Failure(NamedTuple):
    """How a process has ended: its exit status, or -n for signal n."""

    status: int
    pid: int


def with_own_error(failures: dict[int, Failure], is_script: bool) -> dict[int, Failure]:
    """Return the failed ranks without those that have only lost another one, unless there are no others."""
    own = {rank: failure for rank, failure in failures.items() if is_script or failure.status != LOST_RANK_STATUS}
    return own or {rank: failure._replace(status=1) for rank, failure in failures.items()}


def status_of(failures: dict[int, Failure], is_script: bool = False, left: Sequence[int] = ()) -> int:
    """Return a node's exit status; print which of its failed ranks is to blame, unless the ranks have done so.

    A UserError takes precedence, then a port that was taken, then a hang: each of them has printed its own line,
    unless the ranks are a user's script. A rank killed by a signal comes before ranks that ended with an error,
    which may have lost the killed rank. They may also have lost one of `left`, which ended with status 0.
    """
    if not (is_script or left) and {failure.status for failure in failures.values()} == {LOST_RANK_STATUS}:
        return 1  # the error is on another node, and these ranks have said so
    failures = with_own_error(failures, is_script)
    for spoken in (USAGE_STATUS, PortTakenError.status, HANG_STATUS):
        if speakers := {rank: failure for rank, failure in failures.items() if failure.status == spoken}:
            if not is_script:
                return spoken
            failures = speakers
    early = f"; {name_ranks(left)} ended with status 0, perhaps too early" if left else ""
    print(f"error: {cause_of(failures)}{early}", file=sys.stderr, flush=True)
    return shell_status(failures[culprit_of(failures)].status)


def culprit_of(failures: dict[int, Failure]) -> int:
    """Return the failed rank to blame: the lowest one killed by a signal, or else the lowest one."""
    return min(failures, key=lambda rank: (failures[rank].status > 0, rank))


def shell_status(status: int) -> int:
    """Return an exit status as a shell has it: 128 + n where signal n ended the process, not -n."""
    return status if status >= 0 else 128 - status


def how_ended(status: int) -> str:
    """Return how a process with this exit status ended; a negative status means a signal."""
    if status >= 0:
        return f"ended with status {status}"
    is_named = -status in set(signal.Signals)
    hint = ""
    if status == -signal.SIGKILL and (kills := count_oom_kills() - OOM_KILLS_BEFORE) > 0:
        hint = f"; meanwhile memory ran out in its cgroup (oom_kill {kills})"
    return f"was killed by {signal.Signals(-status).name if is_named else f'signal {-status}'}{hint}"


def count_oom_kills(cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes of this cgroup the kernel has killed for lack of memory; 0 if it does not say."""
    kills = 0
    with contextlib.suppress(OSError):
        for line in cgroup.read_text().splitlines():
            _, controllers, path = line.split(":", 2)  # version 2 names no controllers
            if not (file := {"": "memory.events", "memory": "memory.oom_control"}.get(controllers)):
                continue
            # In a container, its own cgroup may be the root, whatever the path says.
            for folder in (root / controllers / path.lstrip("/"), root / controllers):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    events = dict(event.split() for event in (folder / file).read_text().splitlines())
                    kills += int(events["oom_kill"])
                    break
    return kills


OOM_KILLS_BEFORE = count_oom_kills()
"""Those before this launcher started its ranks."""


def cause_of(failures: dict[int, Failure]) -> str:
    """Return which of a node's failed ranks is to blame, and how it ended."""
    rank = culprit_of(failures)
    status, pid = failures[rank]
    hint = "" if status < 0 else OWN_ERROR
    return f"rank {rank} (pid {pid} on {socket.gethostname()}) {how_ended(status)}{hint}"
