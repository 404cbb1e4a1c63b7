"""Run one node's processes of a recipe: torchrun, with its handling of signals, exit codes and orphans mended.

    NNODES=2 NODE_RANK=0 NPROC_PER_NODE=1 MASTER_ADDR=node-a MASTER_PORT=29500 python -m scripts.agent ddp

scripts/launch.sh calls it in place of `torchrun -m recipes.ddp.train`. What differs:
- USR1 and TERM reach the recipe, which writes a checkpoint and ends with status 0. torchrun dies of USR1, leaves
  its processes behind, and counts a TERM that was obeyed as a failure.
- The exit status is that of the process that failed first (2 for a refusal), with one line that names it.
- If this agent is killed, its processes end too (recipes/common/parent.py).
- The wait for the other nodes has a bound (RDZV_TIMEOUT_S, 300 s), and what it waited for is named.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from recipes.common.errors import UserError
from recipes.common.node import Node, check_head, port_taken, read_master, read_number, status_of
from recipes.common.parent import LAUNCHER_PID, end_with_launcher
from recipes.common.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from torch.distributed import Store

END_SIGNAL = signal.SIGUSR2
"""Ends the other processes of a node once one has failed: it kills at once, and shows who sent it."""

REFUSAL_GRACE_S = 2.0
"""How long node 0 leaves the others to read why all of them end."""

END_GRACE_S = 2
"""How long they may take to end by it, before KILL."""


def read_node() -> Node:
    """Return what the node-level variables say; raises UserError for what makes no sense."""
    nnodes = read_number("NNODES", 1, at_least=1)
    node_rank = read_number("NODE_RANK", 0, at_least=0)
    if node_rank >= nnodes:
        raise UserError(f"NODE_RANK {node_rank} of NNODES {nnodes}: node ranks count from 0")
    master_addr, master_port = read_master(nnodes)
    return Node(
        nnodes,
        node_rank,
        nproc_per_node=read_number("NPROC_PER_NODE", 1, at_least=1),
        master_addr=master_addr,
        master_port=master_port,
        rdzv_timeout_s=read_number("RDZV_TIMEOUT_S", 300, at_least=1),
    )


def pass_signals_on(logs: str) -> None:
    """Send each stop signal to the processes that this agent has started.

    It runs in a thread that takes the signals which the main thread keeps blocked. Blocked signals wait, and
    a new process inherits the mask: a recipe that is still importing gets the signal once it has its handlers.
    """
    import psutil

    while True:
        received = signal.sigwait(STOP_SIGNALS)
        workers = psutil.Process().children()
        try:
            has_begun = bool(workers or os.listdir(logs))  # something lies there once processes have started
        except FileNotFoundError:  # all is over
            return
        if not has_begun:
            print(f"stopped by {signal.Signals(received).name} before any process had started", flush=True)
            shutil.rmtree(logs)
            os._exit(0)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(received)


def rank_command(recipe: str, options: list[str]) -> list[str]:
    """Return the command of a rank that ends with this agent."""
    os.environ[LAUNCHER_PID] = str(os.getpid())
    return [sys.executable, "-m", "recipes.common.parent", "-m", f"recipes.{recipe}.train", *options]


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Import torch without its C++ warnings, in this process alone: the recipe's own processes keep them.

    Where node 0, which keeps the store, has left the last barrier first, the other agents would print twenty
    lines about a connection that is gone, at the end of a job in which all went well.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "ERROR")
    yield
    if not is_set:
        del os.environ[name]


def meet_nodes(node: Node, job: str) -> Store:
    """Meet the other nodes in the store that node 0 keeps; return it.

    Each node puts its name under its node rank. torchrun, which then uses the same store, would not notice that
    two nodes have the same rank, and would wait for the missing one until its bound.

    Raises:
        UserError: the port is taken, two nodes have the same rank or differ in NNODES, or a node does not come
            within the bound.
    """
    from torch.distributed import DistNetworkError, PrefixStore, TCPStore

    is_head = node.node_rank == 0
    bound = timedelta(seconds=node.rdzv_timeout_s)
    connect = partial(TCPStore, node.master_addr, node.master_port, wait_for_workers=False, multi_tenant=True)
    try:
        store = connect(is_master=is_head, timeout=bound)
    except DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise port_taken(node.master_port) from None
        raise
    names, own = PrefixStore(f"{job}/nodes", store), f"{socket.gethostname()} (pid {os.getpid()})"
    rank, ranks = str(node.node_rank), [str(rank) for rank in range(node.nnodes)]
    size = names.compare_set("nnodes", "", str(node.nnodes)).decode()
    if size != str(node.nnodes):
        names.set("refusal", f"NNODES is {size} on one node and {node.nnodes} on node {rank}; give all the same")
    names.set(rank, own)
    deadline = time.monotonic() + node.rdzv_timeout_s
    while True:
        are_all_there = names.check(ranks)
        # A node that was started again may find its old name there; the other way round, two nodes live.
        if (other := names.get(rank).decode()) != own and not names.check(["refusal"]):
            names.set("refusal", f"NODE_RANK {rank} is that of two nodes, {own} and {other}; number them from 0")
        if names.check(["refusal"]):
            time.sleep(REFUSAL_GRACE_S if is_head else 0)  # the store goes with node 0
            raise UserError(names.get("refusal").decode())
        if are_all_there:
            return store
        if time.monotonic() > deadline:
            missing = ", ".join(rank for rank in ranks if not names.check([rank]))
            raise UserError(
                f"node {rank} waited {node.rdzv_timeout_s} s for node {missing} of {node.nnodes} at "
                f"{node.master_addr}:{node.master_port}; is it up, and is its NODE_RANK right?"
            )
        time.sleep(0.1)


def run_torchrun(node: Node, recipe: str, options: list[str], logs: str) -> int:
    """Let torchrun start the node's processes; return the job's exit status on this node."""
    with quiet_import():
        from torch.distributed import DistError
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing import api as processes
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    check_head(node)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun's own variables, an operator's: it would mix them with what is said below
    logging.disable(logging.ERROR)  # status_of() says in one line what torchrun logs in thirty
    # torchrun would ask the other processes to end by TERM, which recipes take for "write a checkpoint" and a
    # process that waits in a collective does not heed at all, and would kill them 30 s later.
    processes._get_default_signal = lambda: END_SIGNAL
    # A process that is stopped, or stuck in a driver, takes no signal but KILL: torchrun would wait 30 s for it.
    close = processes.PContext.close

    def close_soon(context: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        close(context, death_sig, END_GRACE_S)

    processes.PContext.close = close_soon  # type: ignore[method-assign, assignment]
    job = os.environ.get("RDZV_ID") or "none"  # apart from what another job of the same name left
    arguments = [
        f"--nnodes={node.nnodes}",
        f"--node-rank={node.node_rank}",
        f"--nproc-per-node={node.nproc_per_node}",
        f"--master-addr={node.master_addr}",
        f"--master-port={node.master_port}",
        f"--rdzv-conf=timeout={node.rdzv_timeout_s}",
        f"--rdzv-id={job}",
        f"--log-dir={logs}",
        "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT",
        "--no-python",
        *rank_command(recipe, options),
    ]
    try:
        store = meet_nodes(node, job)
        torchrun.run(torchrun.parse_args(arguments))
        del store  # on node 0 it is the server of all
    except ChildFailedError as error:
        failures = error.failures.items()
        return blame({rank: f.exitcode for rank, f in failures}, {rank: f.pid for rank, f in failures})
    except DistError as error:
        raise UserError(
            f"node {node.node_rank} waited for {node.nnodes} nodes at {node.master_addr}:{node.master_port}, "
            f"at most {node.rdzv_timeout_s} s for each: {str(error).strip().splitlines()[0]}"
        ) from None
    return 0


def blame(statuses: dict[int, int], pids: dict[int, int]) -> int:
    """Return the exit status of a node from its failed ranks, without those that the agent has ended."""
    own = {rank: status for rank, status in statuses.items() if status != -END_SIGNAL}
    return status_of(own or statuses, pids)


def main(run: Callable[[Node, str, list[str], str], int]) -> None:
    """Run a node by run(node, recipe, options, folder for logs) and exit with its status."""
    # The stop signals stay blocked in this thread from the first moment on: pass_signals_on() takes them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    end_with_launcher()
    with tempfile.TemporaryDirectory(prefix="cluster-recipes-") as logs:
        threading.Thread(target=pass_signals_on, args=(logs,), daemon=True).start()
        try:
            status = run(read_node(), sys.argv[1], sys.argv[2:], logs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            status = error.status
    sys.exit(status)


if __name__ == "__main__":
    main(run_torchrun)
