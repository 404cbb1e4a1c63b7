"""Who this process is: the variables that every launcher sets, the only ones that a recipe reads.

And how it reaches rank 0.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass

from recipes.common.arguments import read_number
from recipes.common.errors import UserError

HAVE_MET = threading.Event()
"""Set once all ranks have met: from then on all ranks share an error, and rank 0 prints it."""


@dataclass(frozen=True)
class Ranks:
    """This process's ranks and the numbers of processes; `rank` is the global rank."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def read_ranks(recipe: str) -> Ranks:
    """Return the values of RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE.

    Raises UserError if one of them (or MASTER_ADDR, MASTER_PORT) is missing or invalid.
    """
    start = f"start it with `make run RECIPE={recipe}` or `torchrun --nproc-per-node=2 -m recipes.{recipe}.train`"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        if not os.environ.get(name):
            raise UserError(f"{name} is not set: a launcher sets it; {start}")
    try:
        ranks = Ranks(*(read_number(name, 0) for name in names[:4]))
        read_number("MASTER_PORT", 0, 1, 65535)
    except UserError as error:
        raise UserError(f"{error}; {start}") from None
    if ranks.rank >= ranks.world_size or ranks.local_rank >= ranks.local_world_size:
        own = f"RANK {ranks.rank} of WORLD_SIZE {ranks.world_size}"
        local = f"LOCAL_RANK {ranks.local_rank} of LOCAL_WORLD_SIZE {ranks.local_world_size}"
        raise UserError(f"{own}, {local}: ranks count from 0 and stay below the size; {start}")
    return ranks


def bind_address(master_addr: str) -> str:
    """Return where to listen for ranks of this job: on all addresses (""), or on the loopback if they meet there.

    Those that meet at 127.0.0.1 are all on this machine: nothing listens for others.
    """
    return master_addr if master_addr == "127.0.0.1" else ""


def is_loopback(address: str) -> bool:
    """Whether an address is one that only this machine reaches."""
    return address.startswith("127.") or address == "::1"


def connect_within(host: str, port: int, timeout_s: float) -> str:
    """Wait until someone answers there; return this end's address. Raises the last OSError after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                return str(connection.getsockname()[0]).removeprefix("::ffff:")
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)
