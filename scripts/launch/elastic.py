"""Elastic jobs: torchrun's c10d rendezvous and agent, extended so that a lost node is noticed within 8 s.

    python -m scripts.launch.elastic 29500              # the job's store, in a process that outlives the nodes
    python -m scripts.launch.elastic 29500 127.0.0.1    # at one address instead of all

torchrun restarts the ranks of all nodes when a rank fails or a node joins. Handler and Agent add what it lacks:
- A node that is silent, or was cut off, restarts the others (pytorch#111646: torchrun waits for a rank to fail),
  and ends its own ranks.
- Before a node joins, ranks write a checkpoint, for up to CHECKPOINT_S; ranks that lost a peer end at once.
- Where ranks of a script have ended on some nodes, the others run to their end, and no node joins. A node that is
  lost, fails or stops before its own have ended fails the job.
- A refusal (status 2) ends the job, since a restart would meet it again.
- Heartbeats carry the store's time and touch no disk: neither a clock nor a file system costs a restart.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, tzinfo
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
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from recipes.common.errors import UserError
from recipes.common.options import read_number
from recipes.common.process.entry import USAGE_STATUS
from recipes.common.process.meeting import MissingNodeError, MissingStoreError, port_taken
from recipes.common.process.node import Node, wait_for_head
from recipes.common.process.parent import end_with_launcher
from scripts.launch import script, torch_agent
from scripts.launch.command import command
from scripts.launch.echo import listen
from scripts.launch.ranks import SAVING, STOPPED_BY, announce, blame, cause_of_failure, is_stopped, rank_command
from scripts.launch.rejoin import (
    HAS_RETURNED,
    LOST_STATUS,
    UnsavedStopError,
    how_to_go_on,
    options_of_later_rounds,
    say,
)
from scripts.launch.torch_agent import failures_of, worker_spec

BEAT_S = 1
"""How often a node shows that it is alive."""

SILENT_BEATS = 7
"""A node is lost after so many beats without one of its own ..."""

STORE_SILENCE_S = 5
"""... and ends its ranks earlier than that, when it has had no answer from the store for so long."""

STORE_TIMEOUT_S = 15
"""Longest wait for a key that another node is about to set."""

FIRST_CALL_S, LAST_CALL_S = 30, 2
"""How long the first round, and a later one, waits for missing nodes once MIN_NODES have joined."""

NEWCOMER_WAIT_S, ROUND_S = 2.0, 10.0
"""Nodes that arrive within the first share one restart; a round runs for the second before it ends for them."""

CHECKPOINT_S = 60.0
"""How long ranks may take to write a checkpoint before a node joins."""

REFUSAL_S = 10.0
"""How long a refusal waits for the other nodes' refusals: a lost node, which can cause one, is noticed before."""

EXIT_BARRIER_S = 60.0
"""How long a node whose ranks have finished waits for the others; for those of a script, while they run."""


def names_of(nodes: Iterable[Any]) -> str:
    """Return the names of nodes."""
    return ", ".join(f"{node.addr} (pid {node.pid})" for node in sorted(nodes))


# ---- the store


def serve(port: int, address: str = "", ready_file: str = "") -> None:
    """Be the job's store, which tells the time too, until this process is killed.

    It makes ready_file once it serves.

    Raises:
        UserError: the port is taken, or the address is not this machine's.
    """
    try:
        listener = listen(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise port_taken(port) from None
        raise UserError(f"cannot listen at {address}:{port}: {error.strerror}") from None
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to all steps, this one included
    store = TCPStore(
        address or "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    if ready_file:
        Path(ready_file).touch()
    while True:
        store.set("clock", repr(time.monotonic()))
        time.sleep(0.2)


class JobClock(datetime):
    """The store's time: it stays comparable between nodes whose own clocks differ or jump."""

    offset_s = 0.0

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        """Return the job's time."""
        return datetime.fromtimestamp(time.monotonic() + cls.offset_s, tz)


# ---- the rendezvous


class Timeouts(RendezvousTimeout):
    """torchrun's bounds, with a longer last call in the first round, to which nodes start at different times."""

    is_first: Callable[[], bool] = staticmethod(lambda: True)

    @property
    def last_call(self) -> timedelta:
        """How long a round waits for more nodes once there are enough."""
        return timedelta(seconds=FIRST_CALL_S if self.is_first() else LAST_CALL_S)


class UnfinishedError(UserError):
    """Ranks of some nodes have finished, and those of others cannot any more."""

    status = 1


class Handler(DynamicRendezvousHandler):
    """torchrun's rendezvous, which also reports lost nodes as a reason to restart."""

    members: frozenset[Any] = frozenset()
    """The nodes of the round."""
    left: frozenset[Any] = frozenset()
    """Those that have left it since, lost or to restart their ranks."""
    lost: frozenset[Any] = frozenset()
    """Those of them that do not wait to join again."""
    round = 0
    has_stopped = False
    """Whether this node's ranks have stopped for a node that joins or leaves."""
    has_saved = False
    """Whether they have ended with status 0 then, after a checkpoint."""
    has_announced_finish = False
    has_result = False
    """Whether this node's ranks have finished, or failed for the last time."""
    is_over = False
    _begun_s = 0.0
    _newcomers_since_s = 0.0

    @property
    def notes(self) -> Store:
        """What nodes note for each other, apart from torchrun's keys."""
        return PrefixStore(f"{self.get_run_id()}/notes", self._store)

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, or wait for the end of one in which ranks of a script have finished."""
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
        self.left = self.lost = frozenset()
        self.has_stopped, self._begun_s, self._newcomers_since_s = False, time.monotonic(), 0.0
        if info.rank == 0 and (self.round or info.world_size < self.settings.max_nodes):
            without = f", without {names_of(before - self.members)}" if before - self.members else ""
            say(f"round {self.round + 1}: {info.world_size} of {self.settings.max_nodes} nodes{without}")
        return info

    def _wait_for_end(self) -> NoReturn:
        """Leave the job once no ranks run: some have finished, so that those of this node cannot start again."""
        self.leave()
        with contextlib.suppress(UnfinishedError):
            while not self.has_finished():
                time.sleep(BEAT_S / 4)
        self.has_result = True  # shutdown() then closes the rendezvous, so that no other node begins a round
        raise RendezvousClosedError

    def num_nodes_waiting(self) -> int:
        """Return 1 where the ranks are to restart: a node was lost, restarts its own, leaves or joins; else 0."""
        has_waiting = super().num_nodes_waiting() > 0
        state = self._state_holder.state
        gone = self.members - state.participants.keys()
        self.left = frozenset(node for node in gone if not self.notes.check([self._finished(node)]))
        self.lost = self.left - state.wait_list
        if not self.has_stopped and self.is_ending():
            return 0  # there is no further round
        return int(bool(self.left) or self.has_stopped or (has_waiting and self._is_time_to_join()))

    def _is_time_to_join(self) -> bool:
        now = time.monotonic()
        self._newcomers_since_s = self._newcomers_since_s or now
        return now > max(self._newcomers_since_s + NEWCOMER_WAIT_S, self._begun_s + ROUND_S)

    def is_ending(self) -> bool:
        """Whether ranks of a script have finished on some node, so that no further round begins."""
        return script.is_set() and self.notes.check([self._finished()])

    def _finished(self, node: object = "") -> str:
        return f"finished/{self.round}/{node}"

    def announce_finish(self) -> None:
        """Note that this node's ranks have finished, so that its end is no loss."""
        self.notes.set(self._finished(self._this_node), "1")
        self.notes.set(self._finished(), "1")
        self.has_announced_finish = True

    def has_finished(self) -> bool:
        """Whether the ranks of all nodes of the round have finished, once those of this one have.

        Raises:
            UnfinishedError: those of another node cannot any more, and none that can is at work.
        """
        self.num_nodes_waiting()
        is_closed = self._state_holder.state.closed  # read before the keys: the first who sees all of them closes
        unfinished = [node for node in self.members if not self.notes.check([self._finished(node)])]
        if not unfinished:
            return True
        if not is_closed and not self.left.issuperset(unfinished):
            return False
        self.notes.compare_set("status", "", "1")
        raise UnfinishedError(
            f"ranks of this node have finished, but not those of {names_of(unfinished)}; {how_to_go_on()}"
        )

    def announce_stop(self) -> bool:
        """Note that ranks of this round are asked to stop: that they end with status 0 does not end the job.

        Return whether those of this node have finished, or written a checkpoint for another one.
        """
        if self.members and not self.has_result:
            with contextlib.suppress(RuntimeError):  # the store is gone: the ranks are to stop all the same
                self.notes.add(f"stopping/{self.round}", 1)
        return self.has_announced_finish or self.has_saved

    def is_stopping(self) -> bool:
        """Whether any node has noted that."""
        return self.notes.add(f"stopping/{self.round}", 0) > 0

    def has_lost(self) -> bool:
        """Whether a node is not there any more that has not left by itself."""
        return bool(self.lost) and len(self.lost) > self.notes.add(f"left/{self.round}", 0)

    def is_refusal(self) -> bool:
        """Whether ranks that ended with status 2 refuse the job, and have not just lost others as they met.

        Ranks share a refusal: it is one where the ranks of all nodes end so, or where no node is lost.
        """
        key, deadline = f"refused/{self.round}", time.monotonic() + REFUSAL_S
        self.notes.add(key, 1)
        while time.monotonic() < deadline:
            if self.notes.add(key, 0) >= len(self.members):
                return True
            self.num_nodes_waiting()
            if self.has_lost():
                return False
            time.sleep(0.1)
        return True

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
        """Call give_up() once the store has not answered for STORE_SILENCE_S; count beats, which a pause stops."""
        seen, misses = 0.0, 0
        while not self.is_over:
            time.sleep(BEAT_S)
            answered = self._state_holder._last_sync_time  # type: ignore[attr-defined]
            misses = misses + 1 if seen == answered else 0
            seen = answered
            if misses >= STORE_SILENCE_S and not self.is_over:
                give_up()
                return


def connect(endpoint: str) -> TCPStore:
    """Return a connection of its own to the store: a wait for a key blocks the connection."""
    host, _, port = endpoint.rpartition(":")
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def create_handler(
    endpoint: str, job: str, min_nodes: int, max_nodes: int, address: str, timeout_s: int
) -> Handler:
    """Return a node's rendezvous with the others of the job, at most timeout_s long; address is this node's."""
    store = connect(endpoint)
    JobClock.offset_s = float(store.get("clock")) - time.monotonic()
    timeouts = Timeouts(join=timedelta(seconds=timeout_s))
    handler = Handler.from_backend(
        job,
        store,
        C10dRendezvousBackend(connect(endpoint), job),
        min_nodes,
        max_nodes,
        address,
        timeouts,
        keep_alive_interval=BEAT_S,
        keep_alive_max_attempt=SILENT_BEATS,
    )
    assert isinstance(handler, Handler)
    timeouts.is_first = lambda: handler._state_holder.state.round == 0
    return handler


# ---- the agent


class Agent(torch_agent.Agent):
    """torchrun's agent of a node, which tells reasons to restart from reasons to end."""

    has_run = False
    """Whether ranks of this node have run, so that a stop between two rounds may lose what they had done."""
    failures: tuple[dict[int, int], dict[int, int]] | None = None
    """Statuses and process ids of the ranks of this node that have failed in the newest round."""

    def __init__(
        self, spec: WorkerSpec, logs: str, handler: Handler, later_arguments: Callable[[], list[str]]
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs(logs), exit_barrier_timeout=EXIT_BARRIER_S)
        self.handler, self.later_arguments = handler, later_arguments
        self.has_run = bool(os.environ.get(HAS_RETURNED))

    def run(self, role: str = "default") -> RunResult:
        """Run the node's ranks to the end of the job."""
        # None: the job ended while this node was one too many.
        result = super().run(role) or RunResult(state=WorkerState.SUCCEEDED)
        if not result.is_failed() and (ended_file := os.environ.get("ENDED_FILE")):
            Path(ended_file).touch()  # a script leaves no record that says so
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if STOPPED_BY:  # while the nodes met
            self._leave(has_checkpoint=self.handler.has_saved or not self.has_run)
        self.handler.has_saved, self.has_run = False, True
        self.failures = None
        if self.handler.round > 0:
            worker_group.spec.args = tuple(self.later_arguments())
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED:
            if STOPPED_BY:
                self._leave(has_checkpoint=True)
            self.handler.has_stopped = self.handler.has_saved = self.handler.is_stopping()
            if self.handler.has_stopped:
                return RunResult(state=WorkerState.HEALTHY)  # num_nodes_waiting() then restarts them
            self.handler.has_result = True
            self.handler.announce_finish()
        elif result.state == WorkerState.FAILED:
            statuses, pids = failures_of(result)
            if STOPPED_BY:
                self._leave(has_checkpoint=is_stopped(statuses))
            if script.is_set() and self.handler.is_stopping():
                # Ranks that do not handle the signal end by it, and the others for want of them: no failure. One
                # that could not write its checkpoint looks the same, so its end is told.
                if ended := {rank: status for rank, status in statuses.items() if status > 0}:
                    say(f"{cause_of_failure(ended, pids)}; it was stopping, so no restart is counted")
                self.handler.has_stopped = True
                return RunResult(state=WorkerState.HEALTHY)
            self.failures = statuses, pids
            is_refusal = USAGE_STATUS in statuses.values() and self.handler.is_refusal()
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
                say(f"{cause_of_failure(statuses, pids)}; {restart}")
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY and not self.handler.has_stopped:
            if self.handler.has_lost():
                say(f"lost {names_of(self.handler.lost)}: silent for {BEAT_S * SILENT_BEATS} s")
            elif not self.handler.left or self.handler.is_stopping():
                result = self._ask_for_checkpoint(worker_group)
                statuses, _ = failures_of(result)
                has_ended = result.state == WorkerState.SUCCEEDED
                if STOPPED_BY and (has_ended or is_stopped(statuses)):
                    self._leave(has_checkpoint=True)
                self.handler.has_saved = has_ended
            if STOPPED_BY:
                self._leave(has_checkpoint=False)
        super()._stop_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Wait for the other nodes to finish. A stop signal ends this process meanwhile."""
        if not script.is_set():
            super()._exit_barrier()
            return
        while not self.handler.has_finished():
            time.sleep(BEAT_S / 4)

    def _leave(self, has_checkpoint: bool) -> NoReturn:
        """Leave the job, as a stop signal asks this node to."""
        self.handler.leave()
        if not has_checkpoint:
            raise UnsavedStopError(
                f"stopped after this node's ranks had ended without a checkpoint, as said above; {how_to_go_on()}"
            )
        raise SignalException("this node leaves the job", signal.Signals(min(STOPPED_BY)))

    def _ask_for_checkpoint(self, worker_group: WorkerGroup) -> RunResult:
        """Let the ranks write a checkpoint and end, unless they lose a peer meanwhile; return how they are."""
        say("a node joins or leaves: ranks write a checkpoint first")
        self.handler.announce_stop()
        SAVING.set()
        for worker in psutil.Process().children():
            worker.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + CHECKPOINT_S
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
    (DynamicRendezvousHandler, ("from_backend", "next_rendezvous", "num_nodes_waiting", "_stop_heartbeats")),
    (dynamic_rendezvous, ("datetime", "get_method_name", "_RendezvousExitOp")),
)
"""What of torch the classes above extend and use, and what install() replaces."""

NEEDED_FIELDS = (
    (DynamicRendezvousHandler, ("_this_node", "_store", "_state_holder", "_op_executor")),
    (dynamic_rendezvous._BackendRendezvousStateHolder, ("_last_sync_time",)),
)


def install() -> None:
    """Let torch's rendezvous, in this process, use the job's clock; raise UserError where torch is another one."""
    missing = [name for owner, names in NEEDED for name in names if not hasattr(owner, name)]
    missing += [name for owner, names in NEEDED_FIELDS for name in names if name not in owner.__annotations__]
    if missing:
        raise UserError(
            f"torch {torch.__version__} has no {missing[0]}, which elastic jobs need; "
            "unset MIN_NODES, or use the torch of requirements/"
        )
    dynamic_rendezvous.datetime = JobClock  # type: ignore[misc]
    # It names the caller in each note of a heartbeat, and for that looks at source files: a disk may stall.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    # Else survivors that lose rank 0's node keep the address of its store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["PORT_IS_CHOSEN"] = "1"  # torch chooses a port for each round
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks follow from node ranks, without a further exchange


def run(node: Node, recipe: str, options: list[str], logs: str) -> int:
    """Let torchrun's agent start the node's ranks again as nodes come and go; return this node's exit status."""
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
        handler = create_handler(endpoint, job, min_nodes, node.nnodes, address, node.rdzv_timeout_s)
        spec = worker_spec(node, recipe, options, handler, max_restarts, local_addr=address)
        agent = Agent(spec, logs, handler, lambda: rank_command(recipe, options_of_later_rounds(options))[1:])
        announce.append(handler.announce_stop)
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
            # On other nodes they had ended by then: there is no further round.
            status = own_status(blame(*agent.failures)) or status
        say(f"the job has ended without this node, with status {status}")
        return status
    except RendezvousTimeoutError:
        raise MissingNodeError(
            f"fewer than {min_nodes} nodes (MIN_NODES) within {node.rdzv_timeout_s} s; {how_to_go_on()}"
        ) from None
    except (RendezvousError, DistError, OSError) as error:
        say(f"lost the store at {endpoint}: {(str(error).strip() or repr(error)).splitlines()[0]}")
        return LOST_STATUS
    if not result.is_failed():
        return 0
    status = blame(*failures_of(result))
    if status != USAGE_STATUS and max_restarts:
        say(f"that was restart {max_restarts} of at most {max_restarts} (MAX_RESTARTS)")
    return own_status(status)


def own_status(status: int) -> int:
    """Return an elastic node's status from that of its ranks.

    Above 128, and LOST_STATUS, mean that the agent itself was killed or has lost the store, and runs again; the
    status of MissingStoreError means that it has not found it.
    """
    return 1 if status > 128 or status in (LOST_STATUS, MissingStoreError.status) else status


@command
def main(argv: list[str]) -> None:
    """Serve the store."""
    end_with_launcher()
    serve(int(argv[0]), *argv[1:])


if __name__ == "__main__":
    sys.exit(main())
