"""Which network NCCL uses between hosts, by its own log: it falls back to TCP without an error.

NCCL prints `NCCL INFO Using network IB` (`Socket`: TCP; `AWS Libfabric` or another plugin's name) for each
communicator, only with NCCL_DEBUG=INFO (src/init.cc). Its log goes to a file of this process (for a user's script,
to a pipe), and only that line is read. If the user has set NCCL_DEBUG, the log is the user's, and the network is
unknown here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.common.errors import UserError

if TYPE_CHECKING:  # the doctor reads logs without torch, which all of these import
    import torch

    from recipes.common.world.peers import Peers
    from recipes.common.world.places import Place

NETWORK = re.compile(r"NCCL INFO Using network (.*\S)")
TCP = "Socket"
FABRICS = ("ib", "roce", "efa")
VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")

_log: Path | None = None


def log_nccl() -> None:
    """Make NCCL log its start to a file; call it before this process's first communicator is created."""
    global _log
    if _is_users_log():
        return
    try:
        descriptor, path = tempfile.mkstemp(prefix="nccl-", suffix=".log")
    except OSError:  # the temporary folder is full, or read-only
        return
    os.close(descriptor)
    _log = Path(path)
    _log_to(path.replace("%", "%%"))
    atexit.register(end_log)


def _is_users_log() -> bool:
    """Return whether the user has set what NCCL logs, or where."""
    return any(os.environ.get(name) for name in VARIABLES)


def _log_to(pattern: str) -> None:
    """Make NCCL log its start to a file; in its name, %% stands for a percent sign."""
    os.environ.update(zip(VARIABLES, ("INFO", "INIT", pattern), strict=True))


def read_network() -> str | None:
    """Return the network that NCCL uses, and end its log; None before its first communicator, or on CPUs.

    A process has one network for all communicators.
    """
    if _log is None:
        return None
    with contextlib.suppress(OSError):
        if found := find_network(_log.read_text(errors="replace")):
            end_log()
            return found
    return None


def end_log() -> None:
    """Remove the log and its variables: it is read no more, and programs started from here must not log to it."""
    global _log
    if _log:
        with contextlib.suppress(OSError):
            _log.unlink()
        _log = None
        for name in VARIABLES:
            os.environ.pop(name, None)


def log_processes() -> tuple[int, int] | None:
    """Make NCCL in processes that this one starts log to a pipe, which they open as a file; return its two ends.

    Read the pipe as long as they run, or they block. Return None if the user has set what NCCL logs.
    """
    if _is_users_log():
        return None
    reading, writing = os.pipe()
    _log_to(f"/proc/{os.getpid()}/fd/{writing}")
    return reading, writing


def find_network(text: str) -> str | None:
    """Return the network that NCCL's log names; None if it names none."""
    found = NETWORK.findall(text)
    return str(found[-1]) if found else None


def gather_networks(places: Sequence[Place], device: torch.device, peers: Peers) -> list[Place]:
    """Return the places of GPUs with the network that NCCL uses between hosts; call it on all ranks.

    Raises UserError on all ranks if FABRIC asks for a fabric and NCCL uses TCP.
    """
    import torch

    from recipes.common.world.agreement import run_on_all_ranks

    networks: list[str | None] = [None] * len(places)
    if len({place.host for place in places}) > 1:
        own = read_network()
        networks = peers.gather_objects(own)
        if None in networks:
            # All-reduce: 4 bytes, which make NCCL connect the ranks and log the network.
            peers.sum_tensor(torch.zeros(1, device=device))
            networks = peers.gather_objects(own or read_network())
    end_log()  # also if all ranks are on one host, where no network is used
    places = [replace(place, network=network) for place, network in zip(places, networks, strict=True)]
    tcp = sorted({place.host for place in places if place.network == TCP})
    run_on_all_ranks(lambda: None if peers.rank else check_hosts(tcp), peers)
    return places


def check_hosts(hosts: Sequence[str]) -> None:
    """Raise UserError if FABRIC asks for a fabric and `hosts`, on which NCCL uses TCP, is not empty."""
    fabric = os.environ.get("FABRIC")
    if fabric in FABRICS and hosts:
        names = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
        what = f"FABRIC={fabric}, and NCCL uses {TCP}, which is TCP, on {names}"
        fix = "see docs/site.md (devices, libraries, locked memory), or set FABRIC=auto to use TCP"
        raise UserError(f"{what}; {fix}")
