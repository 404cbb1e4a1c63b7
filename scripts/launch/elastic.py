"""Elastic jobs: torchrun's c10d rendezvous and agent, extended so that a lost node is noticed.

    python -m scripts.launch.elastic 29500              # the job's store, in a process that outlives the nodes
    python -m scripts.launch.elastic 29500 127.0.0.1    # at one address instead of all

torchrun restarts the ranks of all nodes when a rank fails or a node joins. Handler and Agent add what it lacks:
- If a node goes silent or is cut off, the other nodes restart within 8 s (above 256 nodes, later; pytorch#111646:
  torchrun waits for a rank to fail), and the node ends its own ranks.
- Before a node joins, the ranks write a checkpoint within CHECKPOINT_TIMEOUT_S; ranks that have lost a peer end at
  once.
- Once a script's ranks have finished on some nodes, the others run to their end, and no node joins. The job fails
  if a node is lost, fails or stops before its own ranks have finished.
- A refusal (status 2) ends the job, since a restart would be refused again.
- Heartbeats use the store's time and touch no disk, so neither clocks nor file systems cause a restart.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
    RendezvousTimeoutError,
    api,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from recipes.common.arguments import Parser, read_number, whole_number
from recipes.common.errors import UserError
from recipes.common.process.entry import USAGE_STATUS
from recipes.common.process.node import Failure, Node, wait_for_head
from recipes.common.process.open_files import allow_open_files
from recipes.common.process.parent import end_with_launcher
from recipes.common.process.rendezvous_errors import MissingNodeError, MissingStoreError
from scripts.launch import rank_processes, rejoin, script, torch_agent
from scripts.launch.command import command
from scripts.launch.local import free_port
from scripts.launch.rank_processes import (
    SAVING,
    STOPPED_BY,
    cause_of_failure,
    have_ended_well,
    node_status,
    rank_command,
    report_if_stopped,
)
from scripts.launch.rejoin import LOST_STATUS, UnsavedStopError, resume_hint, say
from scripts.launch.torch_agent import failures_of, listening_fd, worker_spec

BEAT_S = 1
"""Interval between two heartbeats of a node, and between two looks at the store."""

NODES_BEATING = 256
"""Above this many nodes, they beat less often: all write to one key, and each write has the beats of all."""

SILENT_BEATS = 7
"""A node counts as lost after this many intervals without a heartbeat ..."""

STORE_SILENCE_S = 5
"""... and ends its own ranks earlier: after this long without an answer from the store."""

STORE_TIMEOUT_S = 15
"""Longest wait for a key that another node is about to set."""

FIRST_CALL_S, LAST_CALL_S = 30, 2
"""How long the first round, and each later one, waits for more nodes once MIN_NODES have joined."""

NEWCOMER_WAIT_S, MIN_ROUND_S = 2.0, 10.0
"""Nodes that arrive within NEWCOMER_WAIT_S share a restart; a round runs MIN_ROUND_S before it ends for them."""

CHECKPOINT_TIMEOUT_S = 60.0
"""How long ranks may take to write a checkpoint before a node joins or leaves."""

REFUSAL_WAIT_S = 3.0
"""How long to wait for all nodes' refusals once a lost node, which also causes status 2, would be noticed."""

EXIT_BARRIER_S = 60.0
"""How long a node whose ranks have finished waits for the others; with a script, as long as their ranks run."""


def beat_interval_s(nnodes: int) -> int:
    """Return the interval between two heartbeats of a node: more nodes write more often, and more each time."""
    return max(BEAT_S, round(BEAT_S * (nnodes / NODES_BEATING) ** 2))


def names_of(nodes: Iterable[Any]) -> str:
    """Return the names of nodes, with their agents' process ids."""
    return ", ".join(f"{node.addr} (pid {node.pid})" for node in sorted(nodes))


# ---- the store


def serve(port: int, address: str = "", ready_file: str = "") -> None:
    """Serve the job's store, with the job's clock in it; create ready_file once it is up; raises UserError."""
    allow_open_files(10**6)  # as many as it may: it does not know the number of nodes
    listener = listening_fd(address, port)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to all steps, this one included
    place = address or "localhost", port
    store = TCPStore(*place, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    if ready_file:
        Path(ready_file).touch()
    while True:
        store.set("clock", repr(time.monotonic()))
        time.sleep(0.2)


class JobClock(datetime):
    """The store's time, which stays comparable between nodes whose own clocks differ or jump."""

    offset_s = 0.0

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        """Return the job's time."""
        return datetime.fromtimestamp(time.monotonic() + cls.offset_s, tz)


# ---- the rendezvous


@dataclass(frozen=True, repr=False)
class NodeDesc(dynamic_rendezvous._NodeDesc):
    """torchrun's description of a node, in the order of NODE_RANK and not of addresses: the order of the ranks.

    Rank 0 prints what the job does, and users watch node 0.
    """

    number: int = 0

    def __lt__(self, other: Any) -> bool:
        return (self.number, str(self)) < (other.number, str(other))


class NodeDescGenerator(dynamic_rendezvous._NodeDescGenerator):
    """Makes the descriptions of a node that has this number."""

    number = 0

    def generate(self, local_addr: str | None = None) -> NodeDesc:
        """Return a new description."""
        return NodeDesc(**vars(super().generate(local_addr)), number=self.number)


class Backend(C10dRendezvousBackend):
    """torchrun's key in the store; a node waits before it repeats a write that came after another node's.

    Hundreds of nodes that join at once would repeat their writes all the time, and nearly none would succeed.
    """

    failures = 0

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write the state unless another node has written since the token; return the newest state."""
        result = super().set_state(state, token)
        self.failures = self.failures + 1 if result and not result[2] else 0
        if self.failures < 2:  # the state of a first write is up to a second old, and often too old
            return result
        time.sleep(random.uniform(0, min(1.0, 0.01 * 2**self.failures)))
        newest = self.get_state()
        return (*newest, False) if newest else result


class Timeouts(RendezvousTimeout):
    """torchrun's timeouts, with a longer last call in the first round, since nodes start at different times."""

    is_first: Callable[[], bool] = staticmethod(lambda: True)

    @property
    def last_call(self) -> timedelta:
        """How long a round waits for more nodes once there are enough."""
        return timedelta(seconds=FIRST_CALL_S if self.is_first() else LAST_CALL_S)


class UnfinishedError(UserError):
    """Ranks of some nodes have finished, but those of others can no longer finish."""

    status = 1


class Handler(DynamicRendezvousHandler):
    """torchrun's rendezvous, which also reports lost nodes as a reason to restart."""

    _node_desc_generator = NodeDescGenerator()
    members: frozenset[Any] = frozenset()  # the nodes of the round
    left: frozenset[Any] = frozenset()  # members that have left the round since, lost or to restart their ranks
    lost: frozenset[Any] = frozenset()  # those of `left` that are not waiting to join again
    round = 0
    has_stopped = False  # whether this node's ranks have stopped because a node joins or leaves
    has_saved = False  # whether they have ended with status 0: finished, or stopped after a checkpoint
    has_result = False  # whether this node's ranks have finished, or failed for the last time
    is_over = False
    _begun_s = 0.0
    _newcomers_since_s = 0.0

    @property
    def notes(self) -> Store:
        """Keys that the nodes set for each other, apart from torchrun's."""
        return PrefixStore(f"{self.get_run_id()}/notes", self._store)

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round or, once ranks of a script have finished, wait for the job's end instead."""
        before = self.members
        if before and self.is_ending():
            self._wait_for_end()
        while True:
            try:
                info = super().next_rendezvous()
                break
            except RendezvousTimeoutError:
                self.round = self._state_holder.state.round
                if not self.is_ending():
                    raise
        state = self._state_holder.state
        self.members, self.round = frozenset(state.participants), state.round
        self.has_stopped, self._begun_s, self._newcomers_since_s = False, time.monotonic(), 0.0
        if info.rank == 0 and (self.round or info.world_size < self.settings.max_nodes):
            without = f", without {names_of(before - self.members)}" if before - self.members else ""
            say(f"round {self.round + 1}: {info.world_size} of {self.settings.max_nodes} nodes{without}")
        return info

    def _wait_for_end(self) -> NoReturn:
        """Leave the round, wait until no ranks run, and raise RendezvousClosedError: no further round begins."""
        self.leave()
        with contextlib.suppress(UnfinishedError):
            while not self.has_finished():
                time.sleep(BEAT_S / 4)
        self.has_result = True  # shutdown() then closes the rendezvous, so that no other node begins a round
        raise RendezvousClosedError

    def num_nodes_waiting(self) -> int:
        """Return 1 if ranks must restart because a node was lost, restarts its ranks, leaves or joins; else 0."""
        try:
            return int(self._must_restart())
        except (RendezvousError, DistError):
            if not STOPPED_BY:
                raise
            return 0  # this node's ranks are stopping, and do so without the store, too

    def _must_restart(self) -> bool:
        has_waiting = super().num_nodes_waiting() > 0
        state = self._state_holder.state
        gone = self.members - state.participants.keys()
        self.left = frozenset(node for node in gone if not self.notes.check([self._finished(node)]))
        self.lost = self.left - state.wait_list
        if not self.has_stopped and self.is_ending():
            return False  # no further round begins
        return bool(self.left) or self.has_stopped or (has_waiting and self._is_time_to_join())

    def _is_time_to_join(self) -> bool:
        now = time.monotonic()
        self._newcomers_since_s = self._newcomers_since_s or now
        return now > max(self._newcomers_since_s + NEWCOMER_WAIT_S, self._begun_s + MIN_ROUND_S)

    def is_ending(self) -> bool:
        """Whether ranks of a script have finished on some node, so that no further round begins."""
        return script.is_set() and self.notes.check([self._finished()])

    def _finished(self, node: object = "") -> str:
        return f"finished/{self.round}/{node}"

    def announce_finish(self) -> None:
        """Note that this node's ranks have finished, so that its departure does not count as a loss."""
        self.notes.set(self._finished(self._this_node), "1")
        self.notes.set(self._finished(), "1")
        self.has_saved = True

    def has_finished(self) -> bool:
        """Whether all ranks of the round have finished; raises UnfinishedError if some no longer can."""
        self.num_nodes_waiting()
        is_closed = self._state_holder.state.closed  # read before the keys: the first who sees them all closes
        unfinished = [node for node in self.members if not self.notes.check([self._finished(node)])]
        if not unfinished:
            return True
        if not is_closed and not self.left.issuperset(unfinished):
            return False
        self.notes.compare_set("status", "", "1")
        what = f"ranks of this node have finished, but not those of {names_of(unfinished)}"
        raise UnfinishedError(f"{what}; {resume_hint()}")

    def announce_stop(self) -> bool:
        """Note that ranks of this round are asked to stop, so that their status 0 does not end the job.

        Return whether this node's ranks have finished, or written a checkpoint for a node that joins or leaves.
        """
        if self.members and not self.has_result:
            with contextlib.suppress(RuntimeError):  # without the store the ranks must stop all the same
                self.notes.add(f"stopping/{self.round}", 1)
        return self.has_saved

    def is_stopping(self) -> bool:
        """Whether any node has announced a stop in this round."""
        return self.notes.add(f"stopping/{self.round}", 0) > 0

    def has_lost(self) -> bool:
        """Whether a node is gone that has not left by itself."""
        return bool(self.lost) and len(self.lost) > self.notes.add(f"left/{self.round}", 0)

    def is_refusal(self) -> bool:
        """Whether status 2 of this node's ranks is a refusal, and not the loss of others while the ranks met.

        All ranks share a refusal: it is one if those of all nodes end with status 2, or if no node is lost.
        """
        key, deadline = f"refused/{self.round}", time.monotonic() + self.silence_s() + REFUSAL_WAIT_S
        self.notes.add(key, 1)
        while time.monotonic() < deadline:
            if self.notes.add(key, 0) >= len(self.members):
                return True
            self.num_nodes_waiting()
            if self.has_lost():
                return False
            time.sleep(0.1)
        return True

    def silence_s(self) -> int:
        """Return after how long without a heartbeat a node counts as lost."""
        return beat_interval_s(self.settings.max_nodes) * SILENT_BEATS

    def leave(self) -> None:
        """Leave the round, so that the others need not wait until this node counts as lost."""
        self.notes.add(f"left/{self.round}", 1)
        self._stop_heartbeats()
        self._op_executor.run(dynamic_rendezvous._RendezvousExitOp(), time.monotonic() + STORE_SILENCE_S)

    def job_status(self) -> int:
        """Return the exit status of a job that has ended without this node."""
        return int(self.notes.get("status")) if self.notes.check(["status"]) else 0

    def shutdown(self) -> bool:
        """Close the rendezvous for all nodes if the job has ended; leave it if only this node has."""
        self.is_over = True
        if self.has_result:
            return super().shutdown()
        self._stop_heartbeats()
        return True

    def watch_store(self, give_up: Callable[[], object]) -> None:
        """Call give_up() after STORE_SILENCE_S beats without an answer from the store; pauses count no beats.

        Once a stop signal has come, ranks are left to write their checkpoint.
        """
        seen, misses = 0.0, 0
        while not self.is_over:
            time.sleep(BEAT_S)
            answered = self._state_holder._last_sync_time  # type: ignore[attr-defined]
            misses = misses + 1 if seen == answered else 0
            seen = answered
            if misses >= STORE_SILENCE_S and not self.is_over and not STOPPED_BY:
                give_up()
                return


def connect(endpoint: str) -> TCPStore:
    """Return a new connection to the store: waiting for a key blocks the connection that is used.

    Raises MissingStoreError if it does not answer.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        return torch_agent.open_store(host, int(port), STORE_TIMEOUT_S, is_master=False, wait_for_workers=False)
    except MissingNodeError as error:
        raise MissingStoreError(str(error)) from None


def create_handler(endpoint: str, job: str, min_nodes: int, node: Node, address: str) -> Handler:
    """Return this node's rendezvous with the others, which reach it at `address`."""
    store = connect(endpoint)
    JobClock.offset_s = float(store.get("clock")) - time.monotonic()
    timeouts = Timeouts(join=timedelta(seconds=node.rdzv_timeout_s))
    Handler._node_desc_generator.number = node.node_rank
    backend = Backend(connect(endpoint), job)
    beats = {"keep_alive_interval": beat_interval_s(node.nnodes), "keep_alive_max_attempt": SILENT_BEATS}
    handler = Handler.from_backend(job, store, backend, min_nodes, node.nnodes, address, timeouts, **beats)
    assert isinstance(handler, Handler)
    timeouts.is_first = lambda: handler._state_holder.state.round == 0
    executor = handler._op_executor
    add = executor._add_to_redundancy_list  # type: ignore[attr-defined]
    rounds: set[int] = set()

    def wait_as_surplus() -> None:
        number = handler._state_holder.state.round
        if number not in rounds:  # torch calls this again if another node's write came first
            rounds.add(number)
            wait = "this one waits until one of them leaves or is lost"
            say(f"the job has all of its {node.nnodes} nodes (NNODES): {wait}")
        add()

    executor._add_to_redundancy_list = wait_as_surplus  # type: ignore[attr-defined]
    return handler


# ---- the agent


class Agent(torch_agent.Agent):
    """torchrun's agent of a node, which decides whether a failure restarts the ranks or ends the job."""

    failures: dict[int, Failure] | None = None  # this node's failed ranks in the newest round

    def __init__(self, spec: WorkerSpec, logs: str, handler: Handler, later_args: Callable[[], list[str]]) -> None:
        super().__init__(spec, DefaultLogsSpecs(logs), exit_barrier_timeout=EXIT_BARRIER_S)
        self.handler, self.later_args = handler, later_args
        # Whether ranks of this node have run, so that a stop between two rounds may lose their work.
        self.has_run = bool(os.environ.get(rejoin.HAS_RETURNED))

    def run(self, role: str = "default") -> RunResult:
        """Run the node's ranks to the end of the job."""
        # None: the job ended while this node waited as a surplus one.
        result = super().run(role) or RunResult(state=WorkerState.SUCCEEDED)
        if not result.is_failed() and (ended_file := os.environ.get("ENDED_FILE")):
            Path(ended_file).touch()  # a script leaves no record of its end
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if STOPPED_BY:  # a stop signal came while the nodes met
            self._leave(has_checkpoint=self.handler.has_saved or not self.has_run)
        self.handler.has_saved, self.has_run = False, True
        self.failures = None
        if self.handler.round > 0:
            worker_group.spec.args = tuple(self.later_args())
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED:
            if STOPPED_BY:
                self._leave(has_checkpoint=True)
            self.handler.has_saved = True  # or finished: also if the store ends before it says which
            self.handler.has_stopped = self.handler.has_saved = self.handler.is_stopping()
            if self.handler.has_stopped:
                return RunResult(state=WorkerState.HEALTHY)  # num_nodes_waiting() then restarts them
            self.handler.has_result = True
            self.handler.announce_finish()
        elif result.state == WorkerState.FAILED:
            failures = failures_of(result)
            if STOPPED_BY:
                self._leave(has_checkpoint=report_if_stopped(failures))
            if script.is_set() and self.handler.is_stopping():
                # Ranks that do not handle the signal are killed by it, and the others fail without them: no
                # failure. A rank that could not write its checkpoint looks the same, so how it ended is printed.
                if ended := {rank: failure for rank, failure in failures.items() if failure.status > 0}:
                    say(f"{cause_of_failure(ended)}; it was stopping, so no restart is counted")
                self.handler.has_stopped = True
                return RunResult(state=WorkerState.HEALTHY)
            self.failures = failures
            has_refused = any(failure.status == USAGE_STATUS for failure in failures.values())
            is_refusal = has_refused and self.handler.is_refusal()
            if is_refusal:
                self._remaining_restarts = 0
            if self._remaining_restarts == 0:
                self.handler.has_result = True
                self.handler.notes.set("status", str(USAGE_STATUS if is_refusal else 1))
            else:
                count = worker_group.spec.max_restarts - self._remaining_restarts + 1
                restart = f"restart {count} of at most {worker_group.spec.max_restarts}"
                if self.handler.is_ending():
                    restart = "no restart, since ranks of another node have finished"
                say(f"{cause_of_failure(failures)}; {restart}")
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY and not self.handler.has_stopped:
            if self.handler.has_lost():
                say(f"lost {names_of(self.handler.lost)}: silent for {self.handler.silence_s()} s")
            elif not self.handler.left or self.handler.is_stopping():
                result = self._ask_for_checkpoint(worker_group)
                has_ended = result.state == WorkerState.SUCCEEDED
                if STOPPED_BY and (has_ended or report_if_stopped(failures_of(result))):
                    self._leave(has_checkpoint=True)
                self.handler.has_saved = has_ended
            if STOPPED_BY:
                self._leave(has_checkpoint=False)
        super()._stop_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Wait for the other nodes to finish; a stop signal ends this process meanwhile."""
        if not script.is_set():
            super()._exit_barrier()
            return
        while not self.handler.has_finished():
            time.sleep(BEAT_S / 4)

    def _leave(self, has_checkpoint: bool) -> NoReturn:
        """Leave the job after a stop signal; raises SignalException, or UnsavedStopError without a checkpoint."""
        with contextlib.suppress(RendezvousError, DistError):  # the store may have ended with the node that has it
            self.handler.leave()
        if not has_checkpoint:
            what = "stopped after this node's ranks had ended without a checkpoint, as said above"
            raise UnsavedStopError(f"{what}; {resume_hint()}")
        raise SignalException("this node leaves the job", signal.Signals(min(STOPPED_BY)))

    def _ask_for_checkpoint(self, worker_group: WorkerGroup) -> RunResult:
        """Ask the ranks to checkpoint and end; return their state at the end, the time limit or a loss."""
        say("a node joins or leaves: ranks write a checkpoint first")
        self.handler.announce_stop()
        SAVING.set()
        # Ranks that have got a stop signal may be about to end, when Python has restored the default actions.
        for worker in [] if STOPPED_BY else psutil.Process().children():
            worker.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + CHECKPOINT_TIMEOUT_S
        while True:
            result = super()._monitor_workers(worker_group)
            self.handler.num_nodes_waiting()
            is_running = result.state == WorkerState.HEALTHY
            if not is_running or self.handler.has_lost() or time.monotonic() > deadline:
                SAVING.clear()
                return result
            time.sleep(0.1)


NEEDED = (
    (LocalElasticAgent, ("_start_workers", "_monitor_workers", "_stop_workers", "_exit_barrier")),
    (api, ("get_free_port",)),
    (dynamic_rendezvous, ("datetime", "get_method_name", "_RendezvousExitOp")),
    (dynamic_rendezvous._BackendRendezvousStateHolder, ("_last_sync_time",)),
    (dynamic_rendezvous._DistributedRendezvousOpExecutor, ("_add_to_redundancy_list",)),
    (DynamicRendezvousHandler, ("from_backend", "next_rendezvous", "num_nodes_waiting", "_stop_heartbeats")),
    (DynamicRendezvousHandler, ("_node_desc_generator", "_this_node", "_store", "_state_holder", "_op_executor")),
)
"""What the classes above extend or use in torch, and what install() replaces."""


def install() -> None:
    """Make torch's rendezvous in this process use the job's clock; raises UserError if this torch lacks a name."""
    needed = [(owner, name) for owner, names in NEEDED for name in names]
    missing = [name for owner, name in needed if not hasattr(owner, name) and name not in owner.__annotations__]
    if missing:
        raise UserError(
            f"torch {torch.__version__} has no {missing[0]}, which elastic jobs need; "
            "unset MIN_NODES, or use the torch of requirements/"
        )
    dynamic_rendezvous.datetime = JobClock  # type: ignore[misc]
    # torch records each heartbeat with its caller's name, read from source files: a stalled disk would delay it.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    # For each round, the node of rank 0 chooses a port, and holds it: it could be taken before rank 0 listens.
    api.get_free_port = partial(free_port, ports=(0,))
    # Otherwise nodes that survive the loss of rank 0's node would keep the address of its store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["PORT_IS_CHOSEN"] = "1"
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks follow from node ranks, without an exchange


def run(node: Node, recipe: str, options: list[str], logs: str) -> int:
    """Run the node's ranks under torchrun's agent as nodes come and go; return this node's exit status."""
    install()
    endpoint = os.environ.get("RDZV_ENDPOINT") or f"{node.master_addr}:{node.master_port}"
    min_nodes, max_restarts = read_number("MIN_NODES", 1, 1), read_number("MAX_RESTARTS", 3, 0)
    job = os.environ.get("RDZV_ID") or "none"
    address = wait_for_head(node, endpoint)

    def give_up() -> None:
        say(f"no answer from the store at {endpoint}")
        shutil.rmtree(logs, ignore_errors=True)
        os._exit(LOST_STATUS)

    try:
        handler = create_handler(endpoint, job, min_nodes, node, address)
        spec = worker_spec(node, recipe, options, handler, max_restarts, local_addr=address)
        replaced = handler.notes.compare_set("replaced", "", rejoin.last_launch(options)).decode()
        later_options = partial(rejoin.options_of_later_rounds, options, replaced)
        agent = Agent(spec, logs, handler, lambda: rank_command(recipe, later_options())[1:])
        rank_processes.announce_stop = handler.announce_stop
        threading.Thread(target=handler.watch_store, args=(give_up,), daemon=True).start()
        try:
            result = agent.run()
        finally:
            handler.shutdown()
    except SignalException:
        return 0  # a checkpoint is written
    except RendezvousClosedError:
        status = handler.job_status()
        if script.is_set() and agent.failures:
            # Ranks of other nodes had finished by then, so no further round begins.
            status = own_status(node_status(agent.failures)) or status
        say(f"the job has ended without this node, with status {status}")
        return status
    except RendezvousTimeoutError:
        what = f"fewer than {min_nodes} nodes (MIN_NODES) within {node.rdzv_timeout_s} s"
        raise MissingNodeError(f"{what}; {resume_hint()}") from None
    except (RendezvousError, DistError, OSError) as error:
        if STOPPED_BY and have_ended_well():
            return 0  # the other nodes have stopped, too, and the store with them
        say(f"lost the store at {endpoint}: {(str(error).strip() or repr(error)).splitlines()[0]}")
        return LOST_STATUS
    if not result.is_failed():
        return 0
    status = node_status(failures_of(result))
    if status != USAGE_STATUS and max_restarts:
        say(f"that was restart {max_restarts} of at most {max_restarts} (MAX_RESTARTS)")
    return own_status(status)


def own_status(status: int) -> int:
    """Return an elastic node's status from its ranks' status.

    A status above 128 means that the agent itself was killed, LOST_STATUS that it has lost the store (both restart
    it), and MissingStoreError.status that it has not found the store. Ranks' statuses that equal these become 1.
    """
    return 1 if status > 128 or status in (LOST_STATUS, MissingStoreError.status) else status


@command
def main(argv: list[str]) -> None:
    """Serve the store."""
    parser = Parser("python -m scripts.launch.elastic", "Serve the store of an elastic job, until it is killed.")
    parser.add_argument("port", type=whole_number(1, 65535), metavar="PORT")
    parser.add_argument("address", nargs="?", default="", metavar="ADDRESS", help="listen here (all addresses)")
    parser.add_argument("ready_file", nargs="?", default="", metavar="READY_FILE", help="made once it serves")
    args = parser.parse_words(argv)
    end_with_launcher()
    serve(args.port, args.address, args.ready_file)


if __name__ == "__main__":
    sys.exit(main())
