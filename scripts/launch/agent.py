"""Run one node's processes of a recipe or of SCRIPT: torchrun with other handling of signals, errors and orphans.

    NNODES=2 NODE_RANK=0 NPROC_PER_NODE=1 MASTER_ADDR=node-a MASTER_PORT=29500 python -m scripts.launch.agent ddp

scripts/launch.sh calls it instead of `torchrun -m recipes.ddp.train`. What differs:
- USR1 and TERM reach the recipe, which writes a checkpoint and ends with status 0. torchrun is killed by USR1,
  which leaves its processes behind, and counts a TERM that the ranks obeyed as a failure.
- The exit status is that of the process that caused the failure (2 for a refusal), and one line names it.
- If this agent is killed, its processes end too (recipes/common/process/parent.py).
- The wait for the other nodes is limited (RDZV_TIMEOUT_S, 300 s), and the error says what it waited for.
- With MIN_NODES the job is elastic: it continues with the nodes that are there (scripts/launch/elastic.py).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from recipes.common.arguments import read_number
from recipes.common.errors import UserError
from recipes.common.process.node import Node, read_master
from recipes.common.process.parent import end_with_launcher
from recipes.common.process.signals import STOP_SIGNALS
from scripts.launch import script
from scripts.launch.command import ONE_PROCESS, command, temporary_folder
from scripts.launch.rank_processes import pass_signals_on, rank_command, run_processes


def read_node(rdzv_timeout_s: int = 300) -> Node:
    """Return this node's place in the job from the environment; raises UserError for an invalid variable."""
    nnodes = read_number("NNODES", 1, at_least=1)
    node_rank = read_number("NODE_RANK", 0, at_least=0)
    if node_rank >= nnodes:
        raise UserError(f"NODE_RANK {node_rank} of NNODES {nnodes}: node ranks count from 0")
    master_addr, master_port = read_master(nnodes)
    nproc_per_node = read_number("NPROC_PER_NODE", 1, at_least=1)
    timeout_s = read_number("RDZV_TIMEOUT_S", rdzv_timeout_s, at_least=1)
    return Node(nnodes, node_rank, nproc_per_node, master_addr, master_port, timeout_s)


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Silence torch's C++ warnings while this process imports it; those of a script are not this launcher's.

    If node 0, which serves the store, leaves the last barrier first, the other agents would print twenty lines
    about a lost connection. Torch's 200,000 objects never become garbage: without garbage collection, its import
    and the end of this process take 0.2 s less each.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "ERROR")
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    if not is_set:
        del os.environ[name]


def run_torchrun(node: Node, recipe: str, options: list[str], logs: str) -> int:
    """Let torchrun start the node's processes; return the job's exit status on this node."""
    if script.is_set() and node.node_rank == 0:
        script.warn_of_own_port()
    with quiet_import():
        if os.environ.get("MIN_NODES"):
            from scripts.launch.elastic import run
        else:
            from scripts.launch.torch_agent import run
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # set by an operator for torchrun, which this agent replaces, not for a script's own
    # Torch's handlers end a job under nohup, and print a traceback at Ctrl-C; pass_signals_on() replaces them.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    logging.disable(logging.ERROR)  # this launcher says in one line what torchrun logs in thirty
    return run(node, recipe, options, logs)


def run_one(node: Node, recipe: str, options: list[str], logs: str) -> int:
    """Run SCRIPT as the node's only process, which starts its ranks by itself if it has several."""
    return run_processes(rank_command(recipe, options), {node.node_rank: dict(os.environ)}, logs)


def main(run: Callable[[Node, str, list[str], str], int]) -> NoReturn:
    """Run a node with run(node, recipe, options, folder for logs), and exit with its status."""

    @command
    def run_node(argv: list[str]) -> int:
        # Block the stop signals in this thread from the start, so that pass_signals_on() takes them in its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        end_with_launcher()
        # Torch and Horovod's server only log it. A slow name server delays it, a name of 64 characters breaks it.
        socket.getfqdn = lambda name="": name or socket.gethostname()
        with temporary_folder() as logs:
            threading.Thread(target=pass_signals_on, args=(logs,), daemon=True).start()
            node = read_node()
            if script.is_set():
                script.check_job()
            return run(node, argv[0], argv[1:], logs)

    sys.exit(run_node())  # at Ctrl-C the ranks end with this process


if __name__ == "__main__":
    main(run_one if sys.argv[1] in (*ONE_PROCESS, "spawn") else run_torchrun)
