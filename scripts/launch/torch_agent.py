"""torchrun's agent of a node: it starts ranks as torchrun does, and ends them at once when one has failed.

scripts/launch/agent.py calls it, and scripts/launch/elastic.py extends it. Source: torch.distributed.launcher.api.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.numa.binding import AffinityMode, NumaOptions

from recipes.common.errors import UserError
from recipes.common.process.node import Failure, Node, check_head, missing_nodes_error
from recipes.common.process.open_files import STORE_CONNECTIONS, allow_open_files
from recipes.common.process.ranks import bind_address
from recipes.common.process.rendezvous_errors import MissingNodeError, port_taken_error
from recipes.common.process.stuck import LOOK_EVERY_S, StuckRanks
from recipes.common.process.threads import call_within
from recipes.common.watch.notes import Notes, find_missing, run_bounded
from scripts.launch import script
from scripts.launch.command import warn
from scripts.launch.echo import listen
from scripts.launch.other_nodes import FailedNodeError, OtherNodes
from scripts.launch.processes import end_sessions, wait_for
from scripts.launch.rank_processes import (
    END_SIGNAL,
    END_SIGNAL_GRACE_S,
    SAVING,
    STOP_GRACE_S,
    STOPPED_BY,
    node_status,
    rank_command,
    send_stop_signals,
)
from scripts.launch.recipe_options import read_option

STORE_LINGER_S = 2.0
"""How long node 0 keeps the store after a refusal, so that the other nodes can read it."""

ANSWER_S = 5.0
"""How long a store may take to answer, once it is connected."""

ARRIVAL_S = 0.01
"""How long a node whose ranks have failed stays at the exit barrier (0 would be without a limit)."""

MEET_WITHIN_S = 600.0
"""How long a script's ranks may take to meet in a process group before a warning says that they have not."""

NOTICE_S = 0.5
"""How long a node whose ranks have failed waits for others to say that theirs have left: they look every 0.1 s."""


class Agent(LocalElasticAgent):
    """torchrun's agent of a node, which ends ranks with END_SIGNAL, and after END_SIGNAL_GRACE_S with KILL.

    torchrun would send TERM and wait 30 s. Recipes take TERM for "write a checkpoint", and a process that waits in
    a collective does not react to it. A process that was stopped (SIGSTOP) reacts only to KILL.
    """

    notes = Notes(None, 1)  # of all nodes: which ranks have left
    store: TCPStore | None = None  # on node 0: the one in which ranks meet
    own_keys = ""  # how the agents' keys in it begin
    others: OtherNodes | None = None  # those of an elastic job find out otherwise
    _stuck = StuckRanks()
    _looks_at = _warns_at = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        send_stop_signals()
        context = self._pcontext
        assert context is not None
        context.close = partial(end_ranks, context, context.close)  # type: ignore[method-assign]
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY and time.monotonic() > self._looks_at:
            self._looks_at = time.monotonic() + LOOK_EVERY_S
            self._stuck.look({worker.id: worker.global_rank for worker in self._worker_group.workers})
            self._warns_at = self._warns_at or time.monotonic() + MEET_WITHIN_S
            if time.monotonic() > self._warns_at:
                self._warn_if_alone()
        if self.others and not STOPPED_BY:  # ranks that a signal stops may end one after another
            if result.state == WorkerState.HEALTHY:
                self.others.check()
            elif result.is_failed():
                self.others.tell_failures(failures_of(result))
        return result

    def _warn_if_alone(self) -> None:
        """Print a warning, once, if no ranks of a script have met: they may all train the same."""
        store, self.store = self.store, None
        ranks = self._worker_group.workers[0].world_size
        if not store or ranks == 1 or not script.is_set() or STOPPED_BY:
            return
        if all(key.startswith(self.own_keys) for key in store.list_keys()):
            what = f"the {ranks} ranks have not met in a process group"
            warn(f"{what}: each may train alone, on all data; docs/your-own.md")

    def ranks_that_left(self) -> dict[int, Failure]:
        """Return the ranks that have ended with status 0."""
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        processes = processes_of(self._pcontext)
        return {ranks[i]: Failure(0, process.pid) for i, process in processes.items() if process.returncode == 0}

    def _exit_barrier(self) -> None:
        """Tell the other nodes that all ranks of this one have left, as theirs may fail because of it."""
        ranks = " ".join(map(str, self.ranks_that_left()))
        self.notes.put("left/any", "")  # first: without it, nobody asks for the others
        self.notes.put(f"left/{self._worker_group.group_rank}", ranks)
        self._warn_if_alone()
        super()._exit_barrier()

    def release_others(self) -> None:
        """Arrive at the exit barrier, where nodes whose ranks have finished wait for this one; do not wait."""
        self._exit_barrier_timeout = ARRIVAL_S
        run_bounded(super()._exit_barrier, None, Exception, ANSWER_S)

    def ranks_that_left_elsewhere(self) -> dict[int, Failure]:
        """Return the ranks of other nodes all of whose ranks have ended with status 0."""
        nodes = self._worker_group.group_world_size or 1
        time.sleep(NOTICE_S if nodes > 1 else 0)
        # In most failures none has left, and a store is asked twice for each key that it lacks.
        texts = self.notes.read("left", range(nodes)) if self.notes.has("left/any") else {}
        return {int(rank): Failure(0, 0) for text in texts.values() for rank in text.split()}


def processes_of(context: PContext | None) -> dict[int, subprocess.Popen[bytes]]:
    """Return a node's processes by local rank."""
    return {i: handler.proc for i, handler in getattr(context, "subprocess_handlers", {}).items()}


def end_ranks(
    context: PContext, close: Callable[[signal.Signals, int], None], death_sig: object = None, timeout: int = 30
) -> None:
    """End a node's ranks; it replaces torch's close(death_sig, timeout)."""
    ranks = list(processes_of(context).values())
    if script.is_set() and (STOPPED_BY or SAVING.is_set()):
        wait_for(ranks, STOP_GRACE_S)
    close(END_SIGNAL, END_SIGNAL_GRACE_S)
    end_sessions([rank.pid for rank in ranks])


def failures_of(result: RunResult) -> dict[int, Failure]:
    """Return how a node's failed ranks have ended."""
    return {rank: Failure(failure.exitcode, failure.pid) for rank, failure in result.failures.items()}


def choose_numa_options(node: Node, options: list[str]) -> NumaOptions | None:
    """Return options that bind each rank to the cores near its GPU (torchrun --numa-binding node), or None.

    Binding needs numactl and one GPU for each rank. If Slurm or a container
    gives a job cores of another NUMA node than its GPU's, its rank runs unbound: --numa-binding itself would fail.
    """
    if read_option("--device", "auto", options) == "cpu" or torch.cuda.device_count() < node.nproc_per_node:
        return None
    has_several = read_option("--split", "ranks", options) == "in-process"  # GPUs of one rank, in pipeline
    if has_several or not shutil.which("numactl"):
        return None
    return NumaOptions(affinity_mode=AffinityMode.NODE, should_fall_back_if_binding_fails=True)


def worker_spec(
    node: Node, recipe: str, options: list[str], handler: RendezvousHandler, max_restarts: int, **place: Any
) -> WorkerSpec:
    """Return the specification of the ranks that torchrun's agent starts on a node."""
    command = rank_command(recipe, options)
    return WorkerSpec(
        "default",
        node.nproc_per_node,
        handler,
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=max_restarts,
        numa_options=choose_numa_options(node, options),
        **place,
    )


def listening_fd(address: str, port: int) -> int:
    """Return the descriptor of a socket that listens at an address ("": all, as torch's do); raises UserError."""
    try:
        return listen(address, port).detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise port_taken_error(port) from None
        raise UserError(f"cannot listen at {address}:{port}: {error.strerror}") from None


def open_store(host: str, port: int, timeout_s: float, **options: Any) -> TCPStore:
    """Return a connection to a store, or the store itself with is_master.

    Raises MissingNodeError if another program listens there: torch would wait for its answer without a limit.
    """
    limit_s = timeout_s + ANSWER_S
    connect = partial(TCPStore, host, port, timeout=timedelta(seconds=timeout_s), **options)
    try:
        return call_within(connect, limit_s)
    except TimeoutError:
        what = f"{host}:{port} has not answered as a node's store does within {limit_s:g} s"
        fix = "does another program listen there, and is MASTER_PORT node 0's?"
        raise MissingNodeError(f"{what}; {fix}") from None


def meet_nodes(node: Node, job: str) -> TCPStore:
    """Meet the other nodes in the store that node 0 serves; return the store.

    Each node stores its name under its node rank. torchrun, which uses the same store afterwards, would not notice
    that two nodes have the same rank: it would wait for the missing one until its timeout. Raises MissingNodeError
    for a late node, also one whose rank has been taken, and UserError if nodes share a rank, differ in NNODES, or
    cannot be served at this port.
    """
    is_head = node.node_rank == 0
    options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
    if is_head:
        users = node.nnodes * (1 + node.nproc_per_node)
        allow_open_files(STORE_CONNECTIONS * users, f"the store for {node.nnodes * node.nproc_per_node} ranks")
        options["master_listen_fd"] = listening_fd(bind_address(node.master_addr), node.master_port)
    store = open_store(node.master_addr, node.master_port, node.rdzv_timeout_s, is_master=is_head, **options)
    names, own = PrefixStore(f"{job}/nodes", store), f"{socket.gethostname()} (pid {os.getpid()})"
    rank, ranks = str(node.node_rank), [str(rank) for rank in range(node.nnodes)]
    size = names.compare_set("nnodes", "", str(node.nnodes)).decode()
    if size != str(node.nnodes):
        names.set("refusal", f"NNODES is {size} on one node and {node.nnodes} on node {rank}; give all the same")
    deadline = time.monotonic() + node.rdzv_timeout_s
    if names.check([f"met/{rank}"]):
        wait_for_end(node, names, deadline)
    names.set(rank, own)
    while True:
        # Node 0 looks for all, and the others for its word: 1,000 nodes that look for 1,000 overload the store.
        if is_head and names.check(ranks):
            names.set("all", "")
        are_all_there = names.check(["all"])
        # A restarted node overwrites its old name; if its new one is overwritten, two live nodes have this rank.
        if (other := names.get(rank).decode()) != own and not names.check(["refusal"]):
            names.set("refusal", f"NODE_RANK {rank} is that of two nodes, {own} and {other}; number them from 0")
        if names.check(["refusal"]):
            time.sleep(STORE_LINGER_S if is_head else 0)  # the store ends with node 0
            raise UserError(names.get("refusal").decode())
        if are_all_there:
            names.set(f"met/{rank}", "")
            return store
        if time.monotonic() > deadline:
            missing = [*map(int, find_missing(names, ranks))] or [0]  # all are there, and node 0 has not said so
            raise missing_nodes_error(node, missing)
        time.sleep(0.1)


@contextlib.contextmanager
def explain_lost_store(node: Node) -> Iterator[None]:
    """Raise MissingNodeError where torch says that node 0's store has ended or does not answer in time."""
    try:
        yield
    except DistError as error:
        raise MissingNodeError(
            f"node {node.node_rank} waited for {node.nnodes} nodes at {node.master_addr}:{node.master_port}, "
            f"at most {node.rdzv_timeout_s} s for each: {str(error).strip().splitlines()[0]}"
        ) from None


def wait_for_end(node: Node, names: PrefixStore, deadline: float) -> None:
    """Say that another node has this rank, wait until the store ends with its job, and raise MissingNodeError.

    A scheduler may start a lost node again before the others have noticed: each failure is one of its restarts.
    """
    rank, fix = str(node.node_rank), "end one of the two, or choose another MASTER_PORT"
    place = f"the job at {node.master_addr}:{node.master_port}"
    what = f"NODE_RANK {rank} of {place} is taken: {names.get(rank).decode()} has started it"
    print(f"warning: {what}, and this node waits until it ends; {fix}", file=sys.stderr, flush=True)
    while time.monotonic() < deadline:
        time.sleep(1.0)
        try:
            names.check([rank])
        except DistError:
            raise MissingNodeError(f"{place} has ended, whose NODE_RANK {rank} was taken; start again") from None
    raise MissingNodeError(f"{what}; {fix}")


def run(node: Node, recipe: str, options: list[str], logs: str) -> int:
    """Let torchrun's agent start the node's ranks; return the job's exit status on this node."""
    check_head(node)
    job = os.environ.get("RDZV_ID") or "none"  # keeps keys apart from those that an earlier job left
    place: dict[str, Any] = {"master_addr": node.master_addr, "master_port": node.master_port}
    with explain_lost_store(node):
        store = meet_nodes(node, job)
        handler = StaticTCPRendezvous(
            **place, rank=node.node_rank, world_size=node.nnodes, run_id=job, timeout=node.rdzv_timeout_s
        )
        spec = worker_spec(node, recipe, options, handler, max_restarts=0, **place)
        agent = Agent(spec, DefaultLogsSpecs(logs))
        agent.notes = Notes(PrefixStore(f"{job}/agents", store), node.nnodes)
        agent.store, agent.own_keys = (store if node.node_rank == 0 else None), f"{job}/"
        agent.others = OtherNodes(node, PrefixStore(f"{job}/agents", store)) if node.nnodes > 1 else None
        try:
            result = agent.run()
        except UserError as error:
            if agent.others and not isinstance(error, FailedNodeError):  # but a StuckRankError
                agent.others.tell(error.status, str(error))
            agent.release_others()
            raise
        finally:
            if agent.others:
                agent.others.close()
        left = agent.ranks_that_left() | agent.ranks_that_left_elsewhere() if result.is_failed() else {}
        failures = failures_of(result)
        if agent.others and not script.is_set():
            failures = agent.others.excuse(failures)
        status = node_status(failures | left)
        if result.is_failed():
            agent.release_others()
        del store  # on node 0 it is the server for all nodes
        return status
