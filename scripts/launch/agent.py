"""Run one node's processes of a recipe or of SCRIPT: torchrun with other handling of signals, errors and orphans.

    NNODES=2 NODE_RANK=0 NPROC_PER_NODE=1 MASTER_ADDR=node-a MASTER_PORT=29500 python -m scripts.launch.agent ddp

scripts/launch.sh calls it in place of `torchrun -m recipes.ddp.train`. What differs:
- USR1 and TERM reach the recipe, which writes a checkpoint and ends with status 0. torchrun dies of USR1, leaves
  its processes behind, and counts a TERM that was obeyed as a failure.
- The exit status is that of the process that failed first (2 for a refusal), with one line that names it.
- If this agent is killed, its processes end too (recipes/common/process/parent.py).
- The wait for the other nodes has a bound (RDZV_TIMEOUT_S, 300 s), and what it waited for is named.
- With MIN_NODES the job is elastic: it goes on with the nodes that are there (scripts/launch/elastic.py).
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from recipes.common.errors import MissingNodeError, MissingStoreError, UserError, port_taken
from recipes.common.options import read_number
from recipes.common.process.entry import USAGE_STATUS
from recipes.common.process.node import (
    Node,
    cause_of,
    check_head,
    read_master,
    status_of,
    wait_for_head,
)
from recipes.common.process.parent import LAUNCHER_PID, end_with_launcher
from recipes.common.process.signals import STOP_SIGNALS
from scripts.launch import script
from scripts.launch.processes import end_groups, wait_for
from scripts.launch.rejoin import (
    HAS_RETURNED,
    LOST_STATUS,
    how_to_go_on,
    options_of_later_rounds,
    say,
    unsaved_stop,
)
from scripts.launch.stopped_status import option

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

END_SIGNAL = signal.SIGUSR2
"""Ends the other processes of a node once one has failed: it kills at once, and shows who sent it."""

REFUSAL_GRACE_S = 2.0
"""How long node 0 leaves the others to read why all of them end."""

END_GRACE_S = 2
"""How long they may take to end by it, before KILL."""

ERROR_GRACE_S = 2.0
"""How long the other processes may take to print what they met, once one has failed."""

STOP_GRACE_S = 30.0
"""How long they may still write a checkpoint, once a stop signal has ended one that does not handle it."""

NOTICE_S = 1.0
"""How long a stop signal waits, where no ranks run, for the agent to have noticed how they have ended."""

STOPPED_BY: set[int] = set()
"""The stop signals that this agent has passed on."""

SAVING = threading.Event()
"""Set while ranks of an elastic job may write a checkpoint before a node joins."""

PLAIN_CONF = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=7,last_call_timeout=5"
"""torchrun's own rendezvous, set as scripts/launch/elastic.py sets it, where that cannot be used."""

announce: list[Callable[[], bool]] = []
"""What an elastic job calls before a stop signal is passed on; it returns whether ranks have ended well."""


def read_node(rdzv_timeout_s: int = 300) -> Node:
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
        rdzv_timeout_s=read_number("RDZV_TIMEOUT_S", rdzv_timeout_s, at_least=1),
    )


def pass_signals_on(logs: str) -> None:
    """Send each stop signal to the processes that this agent has started.

    It runs in a thread that takes the signals which the main thread keeps blocked. Blocked signals wait, and
    a new process inherits the mask: a recipe that is still importing gets the signal once it has its handlers.
    """
    import psutil

    sent = set()
    while True:
        received = signal.Signals(signal.sigwait(STOP_SIGNALS))
        if announce and STOPPED_BY:
            continue  # launchers repeat it, and an elastic job's node is on its way out
        STOPPED_BY.add(received)
        for tell in announce:
            tell()
        workers = psutil.Process().children()
        try:
            # Something lies there once processes have started; those of an elastic job may have ended.
            have_run = bool(os.listdir(logs))
            has_begun = bool(workers or (have_run and not announce))
        except FileNotFoundError:  # all is over
            return
        if not has_begun:
            status = 0
            if not (have_run or os.environ.get(HAS_RETURNED)):
                print(f"stopped by {received.name} before any process had started", flush=True)
            elif not have_ended_well():
                error = unsaved_stop(received)
                print(f"error: {error}", file=sys.stderr, flush=True)
                status = error.status
            shutil.rmtree(logs, ignore_errors=True)
            os._exit(status)
        # Launchers repeat a signal; a script may save in its handler, which a second one would interrupt.
        for worker in workers:
            if (worker, received) not in sent:
                sent.add((worker, received))
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(received)


def have_ended_well() -> bool:
    """Whether ranks of an elastic job's node, of which none runs, have finished or written a checkpoint."""
    if not announce:
        return False  # no rendezvous yet: those of an earlier agent were lost with it
    if all(tell() for tell in announce):
        return True
    time.sleep(NOTICE_S)
    return all(tell() for tell in announce)


def rank_command(recipe: str, options: list[str]) -> list[str]:
    """Return the command of a rank that ends with this agent."""
    os.environ[LAUNCHER_PID] = str(os.getpid())
    if script.is_set():
        return [sys.executable, "-m", "scripts.launch.script", os.environ["SCRIPT"], *options]
    return [sys.executable, "-m", "scripts.launch.hold_signals", f"recipes.{recipe}.train", *options]


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Import torch without its C++ warnings, in this process alone: the recipe's own processes keep them.

    Where node 0, which keeps the store, has left the last barrier first, the other agents would print twenty
    lines about a connection that is gone, at the end of a job in which all went well.

    Torch's 200,000 objects never become garbage: without garbage collections the import takes 0.2 s less, and so
    does the end of this process.
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


def meet_nodes(node: Node, job: str) -> Store:
    """Meet the other nodes in the store that node 0 keeps; return it.

    Each node puts its name under its node rank. torchrun, which then uses the same store, would not notice that
    two nodes have the same rank, and would wait for the missing one until its bound.

    Raises:
        UserError: the port is taken, or two nodes have the same rank or differ in NNODES.
        MissingNodeError: a node does not come within the bound.
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
            raise MissingNodeError(
                f"node {rank} waited {node.rdzv_timeout_s} s for node {missing} of {node.nnodes} at "
                f"{node.master_addr}:{node.master_port}; is it up, and is its NODE_RANK right?"
            )
        time.sleep(0.1)


def run_torchrun(node: Node, recipe: str, options: list[str], logs: str) -> int:
    """Let torchrun start the node's processes; return the job's exit status on this node."""
    with quiet_import():
        from torch.distributed import DistError
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun's own variables, an operator's: it would mix them with what is said below
    logging.disable(logging.ERROR)  # status_of() says in one line what torchrun logs in thirty
    end_ranks_at_once()
    bind_to_numa_nodes(node, options)
    arguments = [
        f"--nproc-per-node={node.nproc_per_node}",
        f"--log-dir={logs}",
        "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT",
    ]
    if os.environ.get("MIN_NODES"):
        return run_elastic(node, recipe, options, logs, arguments)
    check_head(node)
    job = os.environ.get("RDZV_ID") or "none"  # apart from what another job of the same name left
    arguments += [
        f"--nnodes={node.nnodes}",
        f"--node-rank={node.node_rank}",
        f"--master-addr={node.master_addr}",
        f"--master-port={node.master_port}",
        f"--rdzv-conf=timeout={node.rdzv_timeout_s}",
        f"--rdzv-id={job}",
        "--no-python",
        *rank_command(recipe, options),
    ]
    try:
        store = meet_nodes(node, job)
        torchrun.run(torchrun.parse_args(arguments))
        del store  # on node 0 it is the server of all
    except ChildFailedError as error:
        return blame(*failures_of(error))
    except DistError as error:
        raise MissingNodeError(
            f"node {node.node_rank} waited for {node.nnodes} nodes at {node.master_addr}:{node.master_port}, "
            f"at most {node.rdzv_timeout_s} s for each: {str(error).strip().splitlines()[0]}"
        ) from None
    return 0


def run_processes(command: list[str], environments: dict[int, dict[str, str]], logs: str) -> int:
    """Start a process for each rank with its environment, wait for all; return the node's exit status.

    Once one has failed, the others are ended after a moment.
    """
    open(os.path.join(logs, "started"), "w").close()
    processes = {
        rank: subprocess.Popen(command, env=environment, start_new_session=True)
        for rank, environment in environments.items()
    }
    running = list(processes.values())
    wait_for(running, math.inf, until_failure=True)
    grace_s = STOP_GRACE_S if script.is_set() and STOPPED_BY else ERROR_GRACE_S
    for number, wait_s in ((END_SIGNAL, grace_s), (signal.SIGKILL, END_GRACE_S)):
        if not wait_for(running, wait_s):
            for process in running:
                if process.poll() is None:  # one that is stopped takes no signal but KILL
                    os.killpg(process.pid, number)
    wait_for(running, END_GRACE_S)
    end_groups([process.pid for process in running])
    failed = {rank: process for rank, process in processes.items() if process.returncode}
    if not failed:
        return 0
    return blame({rank: p.returncode for rank, p in failed.items()}, {rank: p.pid for rank, p in failed.items()})


def run_one(node: Node, recipe: str, options: list[str], logs: str) -> int:
    """Run SCRIPT as the node's only process, which starts its ranks by itself if it has several."""
    return run_processes(rank_command(recipe, options), {node.node_rank: dict(os.environ)}, logs)


def end_ranks_at_once() -> None:
    """Let torchrun end ranks by END_SIGNAL, and after END_GRACE_S by KILL.

    It would ask them by TERM, which recipes take for "write a checkpoint" and which a process that waits in a
    collective does not obey at all, and would wait 30 s. A process that is stopped takes no signal but KILL.
    """
    from torch.distributed.elastic.multiprocessing import api as processes

    close = getattr(getattr(processes, "PContext", None), "close", None)
    if not close or list(inspect.signature(close).parameters) != ["self", "death_sig", "timeout"]:
        warn_of_torch("a failed rank's peers may take 30 s to end")
        return

    def close_soon(context: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        ranks = [handler.proc for handler in getattr(context, "subprocess_handlers", {}).values()]
        if script.is_set() and (STOPPED_BY or SAVING.is_set()):
            wait_for(ranks, STOP_GRACE_S)
        close(context, END_SIGNAL, END_GRACE_S)
        end_groups([rank.pid for rank in ranks])

    processes.PContext.close = close_soon  # type: ignore[method-assign, assignment]


def bind_to_numa_nodes(node: Node, options: list[str]) -> None:
    """Let torchrun bind each rank to the cores near its GPU (--numa-binding node), where that can be done.

    It needs numactl, as many GPUs as ranks, and a torch that has it. Where Slurm or a container gives a job cores
    of another NUMA node than its GPU's, the rank runs unbound: --numa-binding itself would end the job.
    """
    import torch
    from torch.distributed import run as torchrun

    is_for_gpus = option("--device", "auto", options) != "cpu" and torch.cuda.device_count() >= node.nproc_per_node
    if not is_for_gpus or not shutil.which("numactl"):
        return
    try:
        from torch.numa.binding import AffinityMode, NumaOptions

        chosen = NumaOptions(affinity_mode=AffinityMode.NODE, should_fall_back_if_binding_fails=True)
        configure = torchrun.config_from_args
    except (ImportError, AttributeError, TypeError):
        warn_of_torch("ranks are not bound to the cores near their GPUs")
        return

    def configure_with_numa(args: Any) -> Any:
        config, command, arguments = configure(args)
        config.numa_options = chosen
        return config, command, arguments

    torchrun.config_from_args = configure_with_numa


def warn_of_torch(consequence: str) -> None:
    """Say once what is worse with this version of torch, whose inside is not as expected."""
    import torch

    print(f"warning: torch {torch.__version__} is not as this launcher expects: {consequence}", file=sys.stderr)


def run_elastic(node: Node, recipe: str, options: list[str], logs: str, arguments: list[str]) -> int:
    """Let torchrun start the node's processes again as nodes come and go; return this node's exit status."""
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousError,
        RendezvousTimeoutError,
    )

    endpoint = os.environ.get("RDZV_ENDPOINT") or f"{node.master_addr}:{node.master_port}"
    min_nodes, max_restarts = read_number("MIN_NODES", 1, 1), read_number("MAX_RESTARTS", 3, 0)
    job_id = os.environ.get("RDZV_ID") or "none"
    address = wait_for_head(node, endpoint)

    def give_up() -> None:
        say(f"no answer from the store at {endpoint}")
        shutil.rmtree(logs, ignore_errors=True)
        os._exit(LOST_STATUS)

    def later_arguments() -> tuple[str, ...]:
        return tuple(rank_command(recipe, options_of_later_rounds(options))[1:])

    try:
        from scripts.launch import elastic

        missing = elastic.missing_parts()
    except ImportError as error:
        missing = [str(error)]
    if missing:
        warn_of_torch(f"a silent node is noticed after --timeout-s, not 8 s ({missing[0]})")
        arguments += [f"--rdzv-conf=timeout={node.rdzv_timeout_s},{PLAIN_CONF}", "--rdzv-backend=c10d"]
        options = options_of_later_rounds(options)
    else:
        job = elastic.Job(later_arguments, cause_of_failure, is_stopped, STOPPED_BY, announce, give_up, SAVING)
        elastic.install(job)
        arguments += [f"--rdzv-conf=timeout={node.rdzv_timeout_s}", f"--rdzv-backend={elastic.BACKEND}"]
    arguments += [
        f"--nnodes={min_nodes}:{node.nnodes}",
        f"--max-restarts={max_restarts}",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={job_id}",
    ]
    command = ["--no-python", *rank_command(recipe, options)]
    try:
        torchrun.run(torchrun.parse_args([*arguments, f"--local-addr={address}", *command]))
    except ChildFailedError as error:
        status = blame(*failures_of(error))
        if status != USAGE_STATUS and max_restarts:
            say(f"that was restart {max_restarts} of at most {max_restarts} (MAX_RESTARTS)")
        return own_status(status)
    except SignalException:
        return 0  # a checkpoint is written
    except RendezvousClosedError:
        status = 0 if missing else elastic.status_of_job(endpoint, job_id)
        if not missing and script.is_set() and job.failures:
            # On other nodes they had ended by then: there is no further round.
            status = own_status(blame(*job.failures)) or status
        say(f"the job has ended without this node, with status {status}")
        return status
    except RendezvousTimeoutError:
        raise MissingNodeError(
            f"fewer than {min_nodes} nodes (MIN_NODES) within {node.rdzv_timeout_s} s; {how_to_go_on()}"
        ) from None
    except (RendezvousError, DistError, OSError) as error:
        say(f"lost the store at {endpoint}: {(str(error).strip() or repr(error)).splitlines()[0]}")
        return LOST_STATUS
    return 0


def own_status(status: int) -> int:
    """Return an elastic node's status from that of its ranks.

    Above 128, and LOST_STATUS, mean that the agent itself was killed or has lost the store, and runs again; the
    status of MissingStoreError means that it has not found it.
    """
    return 1 if status > 128 or status in (LOST_STATUS, MissingStoreError.status) else status


def failures_of(error: ChildFailedError) -> tuple[dict[int, int], dict[int, int]]:
    """Return the exit statuses and process ids of a node's failed ranks."""
    failures = error.failures.items()
    return {rank: f.exitcode for rank, f in failures}, {rank: f.pid for rank, f in failures}


def own_failures(statuses: dict[int, int]) -> dict[int, int]:
    """Return the statuses of ranks without those that the agent has ended, unless there are no others."""
    return {rank: status for rank, status in statuses.items() if status != -END_SIGNAL} or statuses


def cause_of_failure(statuses: dict[int, int], pids: dict[int, int]) -> str:
    """Return which of a node's ranks failed first, and how."""
    return cause_of(own_failures(statuses), pids)


def is_stopped(statuses: dict[int, int]) -> bool:
    """Whether ranks have ended by the stop signal itself; say so."""
    for number in STOP_SIGNALS if STOPPED_BY else ():
        if -number in statuses.values():
            print(f"stopped by {signal.Signals(number).name}, which the script does not handle", flush=True)
            return True
    return False


def blame(statuses: dict[int, int], pids: dict[int, int]) -> int:
    """Return the exit status of a node from its failed ranks, without those that the agent has ended."""
    if is_stopped(statuses):
        return 0
    return status_of(own_failures(statuses), pids)


def main(run: Callable[[Node, str, list[str], str], int]) -> None:
    """Run a node by run(node, recipe, options, folder for logs) and exit with its status."""
    # The stop signals stay blocked in this thread from the first moment on: pass_signals_on() takes them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    end_with_launcher()
    with tempfile.TemporaryDirectory(prefix="cluster-recipes-") as logs:
        threading.Thread(target=pass_signals_on, args=(logs,), daemon=True).start()
        try:
            node = read_node()
            if script.is_set():
                script.check_job()
            status = run(node, sys.argv[1], sys.argv[2:], logs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            status = error.status
    sys.exit(status)


if __name__ == "__main__":
    main(run_one if sys.argv[1] in ("single", "dataparallel", "spawn") else run_torchrun)
