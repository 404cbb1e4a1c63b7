"""How many files and connections this process may open.

A shell, and so a Slurm job, often starts processes with a soft limit of 1,024, which the process may raise.
"""

from __future__ import annotations

import resource

from recipes.common.errors import UserError

STORE_CONNECTIONS = 2
"""Connections to the store at MASTER_ADDR of each rank, and of each node's agent."""

WORKER_FILES = 12
"""What a rank opens for each of its --workers, which both sets have: pipes, and the memory of batches."""

OTHER_FILES = 128
"""What a process opens besides: libraries, logs, data."""


def allow_open_files(count: int, what: str = "") -> None:
    """Let this process open so many files, such as connections: raise its soft limit up to the hard one.

    If they are for `what`, raises UserError if that is not enough: clients of a store without a connection would
    wait until their time-out, and blame the network, and so would a rank for a worker process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if what and allowed < needed:
        fix = f"raise its hard limit to {needed} or more (ulimit -Hn), as docs/site.md says"
        raise UserError(f"{what} needs {needed} open files, and this process may open {hard}; {fix}")
