"""Run one node's processes of a recipe: torchrun, with its handling of signals, exit codes and orphans mended.

    NNODES=2 NODE_RANK=0 NPROC_PER_NODE=1 MASTER_ADDR=node-a MASTER_PORT=29500 python -m scripts.agent ddp

scripts/launch.sh calls it in place of `torchrun -m recipes.ddp.train`. What differs:
- USR1 and TERM reach the recipe, which writes a checkpoint and ends with status 0. torchrun dies of USR1, leaves
  its processes behind, and counts a TERM that was obeyed as a failure.
- The exit status is that of the process that failed first (2 for a refusal), with one line that names it.
- If this agent is killed, the kernel kills its processes too.
- The wait for the other nodes has a bound (RDZV_TIMEOUT_S, 300 s), and what it waited for is named.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

USAGE_STATUS = 2
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

END_SIGNAL = signal.SIGUSR2
"""Ends the other processes of a node once one has failed: it kills at once, and shows who sent it."""


class RefusalError(Exception):
    """What cannot work; the message says why and how to mend it."""


@dataclass(frozen=True)
class Failure:
    """A process that did not end with status 0."""

    pid: int
    status: int
    """Negative: the signal that killed it."""


@dataclass(frozen=True)
class Node:
    """This node's place in the job, from the variables that the launch files set."""

    nnodes: int
    node_rank: int
    nproc_per_node: int
    master_addr: str
    master_port: int
    rdzv_timeout_s: int


def read_node() -> Node:
    """Return what the node-level variables say; raises RefusalError for what makes no sense."""
    node = Node(
        nnodes=_number("NNODES", 1, at_least=1),
        node_rank=_number("NODE_RANK", 0, at_least=0),
        nproc_per_node=_number("NPROC_PER_NODE", 1, at_least=1),
        master_addr=os.environ.get("MASTER_ADDR") or "127.0.0.1",
        master_port=_number("MASTER_PORT", 29500, at_least=1),
        rdzv_timeout_s=_number("RDZV_TIMEOUT_S", 300, at_least=1),
    )
    if node.node_rank >= node.nnodes:
        raise RefusalError(f"NODE_RANK {node.node_rank} of NNODES {node.nnodes}: node ranks count from 0")
    if node.nnodes > 1 and not os.environ.get("MASTER_ADDR"):
        raise RefusalError(f"NNODES is {node.nnodes} and MASTER_ADDR is not set; set it to the address of node 0")
    if node.master_port > 65535:
        raise RefusalError(f"MASTER_PORT wants a port up to 65535, got {node.master_port}")
    return node


def _number(name: str, default: int, at_least: int) -> int:
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit()) or int(text) < at_least:
        raise RefusalError(f"{name} wants a whole number of at least {at_least}, got {text!r}")
    return int(text)


def check_head(node: Node) -> None:
    """On node 0, take the port for a moment; on the others, wait until node 0 answers.

    Raises:
        RefusalError: the port is taken, the name does not resolve, or nobody answers within the bound.
    """
    deadline = time.monotonic() + node.rdzv_timeout_s
    place = f"{node.master_addr}:{node.master_port}"
    if node.node_rank == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", node.master_port))
            except OSError as error:
                reason = "is taken" if error.errno == errno.EADDRINUSE else f"refuses: {error.strerror}"
                raise RefusalError(f"MASTER_PORT {node.master_port} {reason}; choose another one") from None
        return
    while True:
        try:
            socket.create_connection((node.master_addr, node.master_port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RefusalError(
                    f"node {node.node_rank} waited {node.rdzv_timeout_s} s for node 0 at {place} "
                    f"({error.strerror or error}); is it up, and is MASTER_ADDR right?"
                ) from None
            time.sleep(0.2)


def pass_signals_on(logs: str) -> None:
    """Send each stop signal to the processes that this agent has started.

    It runs in a thread that takes the signals which the main thread keeps blocked. Blocked signals wait, and
    a new process inherits the mask: a recipe that is still importing gets the signal once it has its handlers.
    """
    import psutil

    while True:
        received = signal.sigwait(STOP_SIGNALS)
        workers = psutil.Process().children()
        if not workers and not os.listdir(logs):  # something lies there once processes have started
            print(f"stopped by {signal.Signals(received).name} before any process had started", flush=True)
            shutil.rmtree(logs)
            os._exit(0)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(received)


def leashed(command: list[str]) -> list[str]:
    """Return a command that the kernel kills when the process that starts it dies (where setpriv is there)."""
    return ["setpriv", "--pdeathsig", "KILL", *command] if shutil.which("setpriv") else command


def run_torchrun(node: Node, recipe: str, options: list[str], logs: str) -> int:
    """Let torchrun start the node's processes; return the job's exit status on this node."""
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import api as processes
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    check_head(node)
    logging.disable(logging.ERROR)  # status_of() says in one line what torchrun logs in thirty
    # torchrun would ask the other processes to end by TERM, which recipes take for "write a checkpoint" and a
    # process that waits in a collective does not heed at all, and would kill them 30 s later.
    processes._get_default_signal = lambda: END_SIGNAL
    arguments = [
        f"--nnodes={node.nnodes}",
        f"--node-rank={node.node_rank}",
        f"--nproc-per-node={node.nproc_per_node}",
        f"--master-addr={node.master_addr}",
        f"--master-port={node.master_port}",
        f"--rdzv-conf=timeout={node.rdzv_timeout_s}",
        f"--log-dir={logs}",
        "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT",
        "--no-python",
        *leashed([sys.executable, "-m", f"recipes.{recipe}.train", *options]),
    ]
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        return status_of({rank: Failure(f.pid, f.exitcode) for rank, f in error.failures.items()})
    except DistError as error:
        raise RefusalError(
            f"node {node.node_rank} waited for {node.nnodes} nodes at {node.master_addr}:{node.master_port}, "
            f"at most {node.rdzv_timeout_s} s for each: {str(error).strip().splitlines()[0]}"
        ) from None
    return 0


def status_of(failures: dict[int, Failure]) -> int:
    """Return the exit status that tells most, and name the rank in one line unless it refused by itself.

    A refusal counts first. A process that a signal has killed counts before those that ended with an error,
    which is mostly that they have lost it; those that this agent has ended count last.
    """
    statuses = {rank: failure.status for rank, failure in failures.items()}
    if USAGE_STATUS in statuses.values():
        return USAGE_STATUS
    rank, status = min(statuses.items(), key=lambda item: (item[1] == -END_SIGNAL, item[1] > 0, item[0]))
    if status < 0:
        how, status = f"was killed by {signal.Signals(-status).name}", 128 - status
    else:
        how = f"ended with status {status}; its own words are above"
    host = socket.gethostname()
    print(f"error: rank {rank} (pid {failures[rank].pid} on {host}) {how}", file=sys.stderr, flush=True)
    return status


def main(run: Callable[[Node, str, list[str], str], int]) -> None:
    """Run a node by run(node, recipe, options, folder for logs) and exit with its status."""
    # The stop signals stay blocked in this thread from the first moment on: pass_signals_on() takes them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    with tempfile.TemporaryDirectory(prefix="cluster-recipes-") as logs:
        threading.Thread(target=pass_signals_on, args=(logs,), daemon=True).start()
        try:
            status = run(read_node(), sys.argv[1], sys.argv[2:], logs)
        except RefusalError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            status = USAGE_STATUS
    sys.exit(status)


if __name__ == "__main__":
    main(run_torchrun)
