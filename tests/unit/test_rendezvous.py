"""The rendezvous of an elastic job: who is noticed to be lost, who joins, and what a node does then."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from torch.distributed import DistError, HashStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    api,
    dynamic_rendezvous,
)

from recipes.common.errors import UserError
from recipes.common.process import stuck
from recipes.common.process.node import OOM_KILLS_BEFORE, Failure, Node
from recipes.common.process.rendezvous_errors import (
    MissingNodeError,
    MissingStoreError,
    PortTakenError,
    port_taken_error,
)
from recipes.common.watch.timeouts import HANG_STATUS
from scripts.launch import elastic, local, rank_processes, rejoin, torch_agent
from scripts.launch.command import NOT_ELASTIC
from scripts.launch.echo import listen
from scripts.launch.local import free_port
from scripts.launch.rejoin import LOST_STATUS
from tests.support import ROOT, run_command, wait_until

BEAT_S = 0.1


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_store_on_all_addresses_answers_by_ipv4_and_ipv6(address):
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6; boot it without ipv6.disable=1")
    with listen("", 0) as listener:
        socket.create_connection((address, listener.getsockname()[1]), timeout=10).close()


def test_the_store_of_nodes_on_this_machine_is_out_of_others_reach():
    place = Node(1, 0, 1, "127.0.0.1", free_port(), 10)
    served = torch_agent.meet_nodes(place, "job")
    socket.create_connection(("127.0.0.1", place.master_port), timeout=10).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", place.master_port), timeout=10)
    with pytest.raises(UserError, match=f"^MASTER_PORT {place.master_port} "):
        torch_agent.meet_nodes(place, "job")
    del served
    with pytest.raises(UserError, match=r"^cannot listen at 192\.0\.2\.1:29500: Cannot assign requested address$"):
        torch_agent.listening_fd("192.0.2.1", 29500)  # of no machine


@pytest.mark.parametrize(("address", "place"), [("127.0.0.1", "127.0.0.1"), ("node-a", "")])
def test_so_is_that_of_an_elastic_job_on_this_machine(monkeypatch, address, place):
    for name in ("RDZV_ENDPOINT", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    port = str(free_port())
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setattr(rejoin, "start_process", lambda command, environment: command)
    assert rejoin.start_store(None)[1:] == ["-m", "scripts.launch.elastic", port, place]


def test_the_store_refuses_a_port_that_is_none(capsys):
    assert elastic.main(["node-a:29500"]) == 2
    assert capsys.readouterr().err == "error: PORT: expects a whole number from 1 to 65535, got 'node-a:29500'\n"
    assert elastic.main([]) == 2
    assert capsys.readouterr().err == "error: the following arguments are required: PORT\n"


@pytest.fixture
def store(monkeypatch):
    """A job's store, with short timeouts."""
    monkeypatch.setattr(elastic, "BEAT_S", BEAT_S)
    monkeypatch.setattr(elastic, "SILENT_BEATS", 15)
    monkeypatch.setattr(elastic, "LAST_CALL_S", 0.3)
    for name in ("NEWCOMER_WAIT_S", "MIN_ROUND_S"):
        monkeypatch.setattr(elastic, name, 0.2)
    delay = dynamic_rendezvous._delay
    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda seconds: delay(0.02))
    replaced = [(dynamic_rendezvous, "datetime"), (dynamic_rendezvous, "get_method_name"), (api, "get_free_port")]
    for module, name in replaced:  # install() changes them, so undo that after the test
        monkeypatch.setattr(module, name, getattr(module, name))
    for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_WORKER_IDENTICAL", "PORT_IS_CHOSEN"):
        monkeypatch.setenv(name, "")
    elastic.install()
    port = free_port()
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    server.set("clock", repr(time.monotonic()))
    yield f"127.0.0.1:{port}"
    del server


@pytest.fixture
def nodes(store):
    """Make handlers of nodes, whose heartbeats end with the test."""
    made = []

    def make(count, min_nodes=2, max_nodes=3, timeout_s=20, addresses=("127.0.0.1",)):
        for number, address in zip(range(count), itertools.cycle(addresses), strict=False):
            place = Node(max_nodes, number, 1, "", 0, timeout_s)
            handler = elastic.create_handler(store, "job", min_nodes, place, address)
            handler._state_holder._cache_duration = 0
            made.append(handler)
        return made[-count:]

    yield make
    for handler in made:
        handler._stop_heartbeats()


def join(*handlers):
    """Let nodes join a round together; return their ranks and the world size."""
    with ThreadPoolExecutor(len(handlers)) as pool:
        infos = list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
    [size] = {info.world_size for info in infos}
    [port] = {info.bootstrap_store_info.master_port for info in infos}
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))  # it is held until rank 0 listens there
    socket.create_server(("", port)).close()
    return sorted(info.rank for info in infos), size


def wait_for_change(*handlers):
    """Wait until all nodes must restart their ranks; return how many seconds that took."""
    begun = time.monotonic()
    for handler in handlers:
        wait_until(lambda handler=handler: handler.num_nodes_waiting() == 1, 10, "a change")
    return time.monotonic() - begun


@pytest.mark.parametrize(("nnodes", "beat_s", "silence_s"), [(2, 1, 7), (256, 1, 7), (384, 2, 14), (512, 4, 28)])
def test_many_nodes_beat_less_often(nnodes, beat_s, silence_s):
    """All write to one key, whose size grows as well: in a simulation, 512 beats each second nearly all fail."""
    assert elastic.beat_interval_s(nnodes) == beat_s
    handler = SimpleNamespace(settings=SimpleNamespace(max_nodes=nnodes))
    assert elastic.Handler.silence_s(handler) == silence_s
    assert silence_s > elastic.STORE_SILENCE_S * elastic.BEAT_S, "a lost node has ended its ranks by then"


def test_a_node_whose_writes_come_too_late_waits_before_the_next(monkeypatch):
    """Of hundreds that join at once, nearly all writes would fail, again and again."""
    shared, longest = HashStore(), []
    ours, theirs = (elastic.Backend(shared, "job") for _ in range(2))

    def wait(_, most_s):
        longest.append(most_s)
        assert theirs.set_state(b"they write while we wait", theirs.get_state()[1])[2]
        return 0.0

    monkeypatch.setattr(elastic.random, "uniform", wait)
    _, token, _ = ours.set_state(b"first")
    for number in range(4):
        assert theirs.set_state(b"%d" % number, theirs.get_state()[1])[2]
        state, token, is_set = ours.set_state(b"ours", token)
        assert not is_set
        assert state == (b"they write while we wait" if number else b"0")
    assert longest == [0.04, 0.08, 0.16]
    assert ours.set_state(b"ours", token)[2], "it has the newest state"
    assert ours.failures == 0


def test_a_silent_node_is_noticed_and_the_others_go_on(nodes, capsys):
    a, b, c = nodes(3)
    assert join(a, b, c) == ([0, 1, 2], 3)
    assert [handler.num_nodes_waiting() for handler in (a, b, c)] == [0, 0, 0]
    b._stop_heartbeats()
    assert 15 * BEAT_S - 1 < wait_for_change(a, c) < 15 * BEAT_S + 3
    assert {node.local_id for node in a.lost} == {b._this_node.local_id}
    assert a.has_lost()
    assert join(a, c) == ([0, 1], 2)
    assert (a.num_nodes_waiting(), c.num_nodes_waiting(), a.round) == (0, 0, 1)
    name = f"127.0.0.1 (pid {os.getpid()})"
    assert capsys.readouterr().err == f"elastic: round 2: 2 of 3 nodes, without {name}\n"
    assert b.num_nodes_waiting() == 1, "once it is back it joins again"


def test_ranks_follow_the_nodes_numbers_and_not_their_addresses(nodes):
    """Rank 0 prints what the job does: a pod's address says nothing of which pod a user watches."""
    a, b, c = nodes(3, addresses=["127.0.0.3", "127.0.0.2", "127.0.0.1"])
    with ThreadPoolExecutor(3) as pool:
        infos = list(pool.map(lambda handler: handler.next_rendezvous(), (a, b, c)))
    assert [info.rank for info in infos] == [0, 1, 2]
    assert {info.bootstrap_store_info.master_addr for info in infos} == {"127.0.0.3"}


def test_a_node_joins_the_next_round(nodes):
    a, b = nodes(2, max_nodes=3)
    a._settings.timeout.is_first = b._settings.timeout.is_first = lambda: False  # no wait for a third
    assert join(a, b) == ([0, 1], 2)
    begun_s = a._begun_s
    [c] = nodes(1)
    with ThreadPoolExecutor(1) as pool:
        newcomer = pool.submit(c.next_rendezvous)
        wait_for_change(a, b)
        assert not a.left
        assert not b.left
        assert not a.is_stopping()
        a.announce_stop()
        assert b.is_stopping(), "so that ranks of b which end well have not finished"
        join(a, b)
        assert newcomer.result().world_size == 3
    assert not b.is_stopping(), "in the next round"
    assert not a._newcomers_since_s, "the next newcomer waits for others, too"
    assert begun_s < a._begun_s > time.monotonic() - 5, "and until this round has run a while"


def test_a_surplus_node_says_that_it_waits_and_takes_the_place_of_one_that_leaves(nodes, capsys):
    a, b = nodes(2, min_nodes=1, max_nodes=2)
    assert join(a, b) == ([0, 1], 2)
    [c] = nodes(1, min_nodes=1, max_nodes=2)
    infos, said = [], []
    line = "elastic: the job has all of its 2 nodes (NNODES): this one waits until one of them leaves or is lost\n"
    threading.Thread(
        target=lambda: infos.append(c.next_rendezvous()), daemon=True
    ).start()  # its wait has no limit
    wait_until(lambda: said.append(capsys.readouterr().err) or line in "".join(said), 10, "the line")
    c._op_executor._add_to_redundancy_list()  # as if another node's write had come first
    assert a.num_nodes_waiting() == 0, "no round begins for it"
    b.leave()
    wait_for_change(a)
    join(a)
    wait_until(lambda: infos, 10, "its turn")
    assert (infos[0].world_size, "".join([*said, capsys.readouterr().err]).count(line)) == (2, 1)


def test_a_node_that_restarts_its_ranks_is_not_lost(nodes):
    a, b = nodes(2, max_nodes=2)
    join(a, b)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(b.next_rendezvous)
        wait_for_change(a)
        wait_until(lambda: a.num_nodes_waiting() and not a.lost, 10, "b, which waits for the next round")
        assert (a.left, a.has_lost()) == ({b._this_node}, False)
        a.next_rendezvous()
        assert again.result().world_size == 2


def test_newcomers_share_a_restart_and_each_round_runs_a_while(monkeypatch):
    one, now = elastic.Handler.__new__(elastic.Handler), [100.0]
    monkeypatch.setattr(elastic, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one._begun_s, joined_at_s = 100.0, []
    for _ in range(2):
        one._newcomers_since_s = 0.0
        while not one._is_time_to_join():
            now[0] += 0.5
        joined_at_s.append(now[0])
    assert joined_at_s == [110.5, 113.0]


def test_a_node_that_is_stopped_before_it_joins_stops_no_ranks(nodes):
    a, b, c = nodes(3)
    c.announce_stop()
    join(a, b, c)
    assert not a.is_stopping()
    c.announce_stop()
    assert a.is_stopping()


def test_a_stop_reaches_the_ranks_without_the_store(nodes, monkeypatch):
    """Otherwise the thread that passes the signal on would end before it has done so."""
    [a] = nodes(1, min_nodes=1, max_nodes=1)
    join(a)
    add = Mock(side_effect=RuntimeError("Connection was likely closed"))
    monkeypatch.setattr(elastic.Handler, "notes", SimpleNamespace(add=add))
    assert not a.announce_stop()


def test_the_first_round_waits_for_missing_nodes(nodes, monkeypatch):
    a, b, c = nodes(3)
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(handler.next_rendezvous) for handler in (a, b)]
        time.sleep(0.5)  # more than LAST_CALL_S, less than FIRST_CALL_S
        assert not any(future.done() for future in first)
        assert c.next_rendezvous().world_size == 3
        assert {future.result().world_size for future in first} == {3}


def test_too_few_nodes_are_waited_for_no_longer_than_the_bound(nodes):
    [a] = nodes(1, min_nodes=2, timeout_s=1)
    begun = time.monotonic()
    with pytest.raises(RendezvousTimeoutError):
        a.next_rendezvous()
    assert 1 <= time.monotonic() - begun < 8


def test_a_beat_touches_no_disk(nodes, monkeypatch):
    """A shared file system may stall, and reading a source file to name the caller would wait for it."""
    touched, real = [], os.stat

    def stat(*args, **kwargs):
        if threading.current_thread().name.startswith("RendezvousKeepAlive"):
            touched.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    [a] = nodes(1, min_nodes=1, max_nodes=1)
    join(a)
    beats = set()
    wait_until(lambda: beats.add(a._state_holder._last_sync_time) or len(beats) > 6, 10, "some beats")
    assert touched == []


def test_the_jobs_clock_is_the_stores(nodes, store, monkeypatch):
    monkeypatch.setattr(elastic.JobClock, "offset_s", 0.0)
    elastic.connect(store).set("clock", repr(time.monotonic() + 1000))
    nodes(1)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # this node's clock has jumped
    assert dynamic_rendezvous.datetime.now().timestamp() == pytest.approx(time.monotonic() + 1000, abs=1)


def test_a_node_that_has_lost_the_store_gives_up(nodes, monkeypatch):
    monkeypatch.setattr(elastic, "STORE_SILENCE_S", 3)
    [a] = nodes(1, min_nodes=1, max_nodes=1)
    given_up = threading.Event()
    watch = threading.Thread(target=a.watch_store, args=(given_up.set,))
    join(a)
    watch.start()
    time.sleep(10 * BEAT_S)
    assert not given_up.is_set()
    a._stop_heartbeats()
    assert given_up.wait(10)
    watch.join()


@pytest.mark.parametrize(
    ("answers", "stopped_by"), [([1.0, 1.0, 2.0, 2.0, 3.0, 3.0], set()), ([1.0] * 9, {signal.SIGTERM})]
)
def test_answers_that_come_late_are_no_silence(monkeypatch, answers, stopped_by):
    """And ranks that stop need no answers to write their checkpoint."""
    monkeypatch.setattr(elastic, "STOPPED_BY", stopped_by)
    monkeypatch.setattr(elastic, "BEAT_S", 0)
    monkeypatch.setattr(elastic, "STORE_SILENCE_S", 3)
    one, times = elastic.Handler.__new__(elastic.Handler), iter(answers)

    class Answers:
        @property
        def _last_sync_time(self):
            time_s = next(times, 0.0)
            one.is_over = not time_s
            return time_s

    one._state_holder = Answers()
    one.watch_store(lambda: pytest.fail("it gives up"))


def test_a_refusal_is_that_of_all_nodes(nodes, monkeypatch):
    """If a node is lost while ranks meet, the ranks of other nodes also end with status 2."""
    a, b = nodes(2, max_nodes=2)
    join(a, b)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda handler: handler.is_refusal(), (a, b))) == [True, True]
    join(a, b)
    b._stop_heartbeats()
    assert not a.is_refusal()


def test_a_refusal_of_one_node_is_one_after_a_while(nodes, monkeypatch):
    monkeypatch.setattr(elastic, "REFUSAL_WAIT_S", 0.5)
    a, b = nodes(2, max_nodes=2)
    join(a, b)
    assert a.is_refusal()


def test_a_job_that_has_ended_says_how(nodes, store):
    a, b = nodes(2, max_nodes=2)
    join(a, b)
    a.notes.set("status", "2")
    assert b.shutdown(), "a node leaves"
    assert not a.is_closed()
    a.has_result = True
    assert a.shutdown()
    b._stop_heartbeats()
    with pytest.raises(RendezvousClosedError):
        b.next_rendezvous()
    assert a.job_status() == 2


class FakeHandler:
    """A handler of a round without any faults."""

    def __init__(self, stopping=False, refusal=True):
        self.stopping, self.refusal, self.noted = stopping, refusal, {}
        self.left = self.lost = frozenset()
        self.has_stopped = self.has_saved = False
        self.round = 0
        self.notes = SimpleNamespace(set=self.noted.__setitem__)

    def is_stopping(self):
        return self.stopping

    def is_refusal(self):
        return self.refusal

    def announce_stop(self):
        self.stopping = True
        return self.has_saved

    def announce_finish(self):
        self.noted["finished"] = "1"

    def leave(self):
        self.has_left = True

    def is_ending(self):
        return "finished" in self.noted

    def has_lost(self):
        return False

    def silence_s(self):
        return 7

    def num_nodes_waiting(self):
        return 0


def monitored(monkeypatch, result, handler, restarts=2, stopped_by=()):
    """Return an agent whose ranks have come to a result, and a function that monitors them."""
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: result)
    monkeypatch.setattr(elastic.psutil.Process, "children", lambda self: [])  # pytest's children are no ranks
    one = elastic.Agent.__new__(elastic.Agent)
    one._worker_group = SimpleNamespace(workers=[])
    one.handler, one._remaining_restarts = handler, restarts
    stopped = set(stopped_by)
    for owner in (elastic, rank_processes):
        monkeypatch.setattr(owner, "STOPPED_BY", stopped)
    return one, lambda: one._monitor_workers(SimpleNamespace(spec=SimpleNamespace(max_restarts=3)))


def failed(**statuses):
    failures = {int(rank[1:]): SimpleNamespace(exitcode=status, pid=7) for rank, status in statuses.items()}
    return RunResult(state=WorkerState.FAILED, failures=failures)


def test_a_failure_is_told_and_leaves_a_restart(monkeypatch, capsys):
    one, monitor = monitored(monkeypatch, failed(r0=1, r1=-9), FakeHandler())
    assert monitor().state == WorkerState.FAILED
    assert one._remaining_restarts == 2
    assert one.handler.noted == {}
    line = capsys.readouterr().err
    assert line.startswith("elastic: rank 1 (pid 7 on ")
    assert line.endswith(") was killed by SIGKILL; restart 2 of at most 3\n")
    one.handler.announce_finish()
    monitor()
    assert capsys.readouterr().err.endswith("; no restart, since ranks of another node have finished\n")


@pytest.mark.parametrize(("is_refusal", "restarts", "noted"), [(True, 0, "2"), (False, 2, None)])
def test_a_refusal_is_not_tried_again(monkeypatch, is_refusal, restarts, noted):
    one, monitor = monitored(monkeypatch, failed(r0=2, r1=-signal.SIGUSR2), FakeHandler(refusal=is_refusal))
    monitor()
    assert one._remaining_restarts == restarts
    assert one.handler.noted.get("status") == noted


def test_the_last_failure_is_noted_for_the_others(monkeypatch):
    one, monitor = monitored(monkeypatch, failed(r0=1), FakeHandler(), restarts=0)
    monitor()
    assert one.handler.noted == {"status": "1"}


def test_ranks_that_end_well(monkeypatch):
    """They have finished, or stopped because a node joins or leaves, or with this node."""
    done = RunResult(state=WorkerState.SUCCEEDED)
    _, monitor = monitored(monkeypatch, done, FakeHandler())
    assert monitor().state == WorkerState.SUCCEEDED
    one, monitor = monitored(monkeypatch, done, FakeHandler(stopping=True))
    assert monitor().state == WorkerState.HEALTHY
    assert one.handler.has_stopped
    one, monitor = monitored(monkeypatch, done, FakeHandler(), stopped_by=[signal.SIGTERM])
    with pytest.raises(SignalException):
        monitor()
    assert one.handler.has_left
    with pytest.raises(SignalException):
        one._stop_workers(SimpleNamespace(state=WorkerState.HEALTHY))  # its ranks ended just before
    one, monitor = monitored(monkeypatch, failed(r0=1), FakeHandler(), stopped_by=[signal.SIGTERM])
    with pytest.raises(UserError, match="without a checkpoint"):
        monitor()
    assert one.handler.has_left


def test_ranks_of_a_script_that_a_stop_ends_have_not_failed(monkeypatch, capsys):
    """A node joins or all must stop: ranks without a handler are killed by the signal, and their peers fail."""
    monkeypatch.setenv("SCRIPT", "train.py")
    one, monitor = monitored(monkeypatch, failed(r0=1, r1=-10), FakeHandler(stopping=True))
    assert monitor().state == WorkerState.HEALTHY
    assert one.handler.has_stopped
    assert not one.handler.has_saved, "so that a stop signal before the next round does not end with status 0"
    assert one.failures is None
    line, said = capsys.readouterr().err, "its own error is above; it was stopping, so no restart is counted\n"
    assert line.startswith("elastic: rank 0 (pid 7 on "), "it may be a checkpoint that could not be written"
    assert line.endswith(f"ended with status 1; {said}")
    assert monitored(monkeypatch, failed(r0=1), FakeHandler())[1]().state == WorkerState.FAILED
    _, monitor = monitored(monkeypatch, failed(r0=1, r1=-15), FakeHandler(), stopped_by=[signal.SIGTERM])
    with pytest.raises(SignalException):
        monitor()
    assert "stopped by SIGTERM, for which a rank had no handler\n" in capsys.readouterr().out


def test_a_script_may_end_on_one_node_before_the_others(nodes, monkeypatch):
    monkeypatch.setenv("SCRIPT", "train.py")
    a, b = nodes(2, min_nodes=1, max_nodes=3)
    a._settings.timeout.is_first = b._settings.timeout.is_first = lambda: False
    for _ in range(2):
        join(a, b)
    b.announce_finish()
    b._stop_heartbeats()
    wait_until(lambda: b._this_node not in a._state_holder.state.participants or a.num_nodes_waiting(), 10, "b")
    assert a.num_nodes_waiting() == 0
    assert not a.has_lost()
    [c] = nodes(1, min_nodes=1, timeout_s=1)
    with ThreadPoolExecutor(1) as pool:
        newcomer = pool.submit(c.next_rendezvous)
        wait_until(lambda: a._state_holder.sync() or a._state_holder.state.wait_list, 10, "c")
        time.sleep(1.3)  # more than NEWCOMER_WAIT_S, and than c's bound for a round
        assert a.num_nodes_waiting() == 0, "no node joins what is about to end"
        assert not newcomer.done(), "which is no lack of nodes"
        a.has_result = True
        a.shutdown()
        with pytest.raises(RendezvousClosedError):
            newcomer.result()


def test_a_node_that_is_lost_after_another_has_finished_fails_the_job(nodes, store, monkeypatch):
    """The remaining ranks run to their end: no further round begins."""
    monkeypatch.setenv("SCRIPT", "train.py")
    a, b, c = nodes(3)
    join(a, b, c)
    a.announce_finish()
    assert not a.has_finished()
    c._stop_heartbeats()
    wait_until(lambda: b.num_nodes_waiting() or b.lost, 10, "c")
    assert b.num_nodes_waiting() == 0, "its ranks may be writing the model"
    assert not a.has_finished(), "b may"
    b.announce_finish()
    for handler in (a, b):
        with pytest.raises(UserError, match=r"but not those of 127.0.0.1 \(pid \d+\); .* RESUME=auto") as caught:
            wait_until(handler.has_finished, 10, "the end")
        assert caught.value.status == 1
    assert a.job_status() == 1


def test_a_node_whose_ranks_fail_or_stop_after_another_has_finished_fails_the_job(nodes, store, monkeypatch):
    monkeypatch.setenv("SCRIPT", "train.py")
    a, b, c = nodes(3)
    join(a, b, c)
    a.announce_finish()
    with ThreadPoolExecutor(1) as pool:
        next_round = pool.submit(b.next_rendezvous)
        wait_until(lambda: a.num_nodes_waiting() or a.left, 10, "b")
        assert not a.has_finished(), "c may be writing the model"
        c.announce_finish()
        with pytest.raises(UserError, match="RESUME=auto"):
            wait_until(a.has_finished, 10, "the end")
        a.has_result = True
        a.shutdown()
        with pytest.raises(RendezvousClosedError):
            next_round.result()
    assert a.job_status() == 1


def test_no_round_begins_once_a_node_has_finished_and_gone(nodes, store, monkeypatch):
    """A node whose ranks have finished is stopped or lost: those of the other node can no longer finish."""
    monkeypatch.setenv("SCRIPT", "train.py")
    monkeypatch.setattr(elastic, "FIRST_CALL_S", 0.3)
    a, b = nodes(2, min_nodes=1)
    join(a, b)
    b.announce_finish()
    b._stop_heartbeats()
    wait_until(lambda: a.num_nodes_waiting() or b._this_node not in a._state_holder.state.participants, 10, "b")
    with pytest.raises(RendezvousClosedError):
        a.next_rendezvous()
    a.shutdown()
    [c] = nodes(1, min_nodes=1)
    with pytest.raises(RendezvousClosedError):
        c.next_rendezvous()
    assert a.job_status() == 1


def test_nodes_wait_for_each_other_to_finish(nodes, monkeypatch):
    monkeypatch.setenv("SCRIPT", "train.py")
    a, b = nodes(2, max_nodes=2)
    join(a, b)
    one, _ = monitored(monkeypatch, None, a)
    a.announce_finish()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(one._exit_barrier)
        time.sleep(5 * BEAT_S)
        assert not end.done()
        b.announce_finish()
        assert b.has_finished()
        b.has_result = True
        b.shutdown()
        end.result(10)
    a.has_result = True
    a.announce_stop()
    assert not b.is_stopping(), "a stop signal that comes after the end is none of the others"


@pytest.mark.parametrize(
    ("has_run", "has_saved", "status"), [(False, False, 0), (True, True, 0), (True, False, 1)]
)
def test_a_stop_signal_while_the_nodes_meet(monkeypatch, has_run, has_saved, status):
    """The main thread says the same as the thread that takes the signals, whichever ends this process."""
    one, _ = monitored(monkeypatch, None, FakeHandler(), stopped_by=[signal.SIGTERM])
    monkeypatch.setattr(torch_agent.Agent, "_start_workers", lambda self, group: {})
    group = SimpleNamespace(spec=SimpleNamespace(args=()))
    one.has_run, one.handler.has_saved = has_run, has_saved
    one.failures, one.later_args = {0: Failure(1, 7)}, lambda: ["--resume", "auto"]
    with pytest.raises(UserError if status else SignalException):
        one._start_workers(group)
    elastic.STOPPED_BY.clear()
    one._start_workers(group)
    assert (one.has_run, one.handler.has_saved) == (True, False), "from now on there is something to lose"
    assert (one.failures, group.spec.args) == (None, ())
    one.handler.round = 1
    one._start_workers(group)
    assert group.spec.args == ("--resume", "auto")


UNSAVED = (
    "error: stopped by SIGUSR1 while no ranks ran: this node's ranks had ended without a checkpoint; "
    "to resume: the same command with --resume auto\n"
)


@pytest.mark.parametrize(
    ("has_run", "has_returned", "announce_stop", "status", "said"),
    [
        (True, "", lambda: True, 0, ""),
        (False, "", lambda: False, 0, "stopped by SIGUSR1 before any process had started\n"),
        (True, "", lambda: False, 1, UNSAVED),
        # The ranks were killed with an earlier agent. This one has not met the others yet, or is meeting them.
        (False, "1", None, 1, UNSAVED),
        (False, "1", lambda: False, 1, UNSAVED),
    ],
)
def test_a_stop_signal_ends_a_node_whose_ranks_have_ended(
    monkeypatch, tmp_path, capfd, has_run, has_returned, announce_stop, status, said
):
    """The status is 0 only if they have finished, or have written a checkpoint for a node that joins."""
    logs = tmp_path / "logs"
    (logs / "attempt_0" if has_run else logs).mkdir(parents=True)
    monkeypatch.setattr(elastic.psutil.Process, "children", lambda self: [])
    monkeypatch.setattr(signal, "sigwait", lambda signals: signal.SIGUSR1)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(rank_processes, "STATUS_WAIT_S", 0)
    monkeypatch.setattr(rank_processes, "STOPPED_BY", set())
    monkeypatch.setattr(rank_processes, "announce_stop", announce_stop)
    monkeypatch.setenv(rank_processes.HAS_RETURNED, has_returned)
    monkeypatch.setenv("STOPPED_FILE", str(tmp_path / "stopped"))
    with pytest.raises(SystemExit) as caught:
        rank_processes.pass_signals_on(str(logs))
    assert caught.value.code == status
    assert (tmp_path / "stopped").exists(), "a batch script may have got no signal itself"
    assert not logs.exists()
    assert "".join(capfd.readouterr()) == said


def test_a_stop_is_announced_once_and_before_ranks_get_it(monkeypatch, tmp_path):
    """Launchers repeat the signal; and the agent may not have noticed yet how its ranks have ended."""
    (tmp_path / "attempt_0").mkdir()
    signals, answers, seen = iter([signal.SIGTERM] * 2), iter([False, True]), []
    rank = Mock(send_signal=seen.append)
    monkeypatch.setattr(signal, "sigwait", lambda _: next(signals))
    monkeypatch.setattr(psutil.Process, "children", lambda self: [rank])
    monkeypatch.setattr(rank_processes, "STOPPED_BY", set())
    monkeypatch.setattr(rank_processes, "announce_stop", lambda: seen.append("announced"))
    with pytest.raises(StopIteration):
        rank_processes.pass_signals_on(str(tmp_path))
    assert seen == ["announced", signal.SIGTERM]
    monkeypatch.setattr(rank_processes, "STATUS_WAIT_S", 0)
    monkeypatch.setattr(rank_processes, "announce_stop", lambda: next(answers))
    assert rank_processes.have_ended_well()


@pytest.mark.parametrize("start", ["torchrun", "processes"])
def test_a_stop_signal_that_comes_while_ranks_are_started_reaches_all(monkeypatch, tmp_path, start):
    """Kubernetes does not repeat it: a script's other ranks would run until they are killed."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(20); raise SystemExit(7)"]
    monkeypatch.setattr(torch_agent, "rank_command", lambda recipe, options: sleeper)
    ranks, start_process = [], subprocess.Popen.__init__

    def start_rank(self, *words, **how):
        start_process(self, *words, **how)
        rank_processes.STOPPED_BY.add(signal.SIGTERM)
        ranks.append(psutil.Process(self.pid))

    monkeypatch.setattr(subprocess.Popen, "__init__", start_rank)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive=False: ranks)
    run = partial(torch_agent.run, Node(1, 0, 2, "127.0.0.1", local.free_port(), 5), "ddp", [])
    if start == "processes":  # Horovod's
        run = partial(rank_processes.run_processes, sleeper, {0: dict(os.environ), 1: dict(os.environ)})
    try:
        assert run(str(tmp_path)) == 0, "not 7, as a sleeper's that no signal has reached"
    finally:
        rank_processes.STOPPED_BY.clear()
    assert len(ranks) == 2


def test_a_stop_signal_between_rounds_learns_how_the_ranks_have_ended(nodes, monkeypatch):
    """Ranks are killed because a node is lost, have finished, or have stopped for a node that joins."""
    a, b = nodes(2)
    a._settings.timeout.is_first = b._settings.timeout.is_first = lambda: False
    join(a, b)
    assert not a.announce_stop()
    a.announce_finish()
    assert a.announce_stop()
    assert not b.announce_stop()
    done = RunResult(state=WorkerState.SUCCEEDED)
    one, _ = monitored(monkeypatch, done, b)
    monkeypatch.setattr(LocalElasticAgent, "_stop_workers", lambda self, group: None)
    one._stop_workers(SimpleNamespace(state=WorkerState.HEALTHY))
    assert b.announce_stop()
    join(a, b)
    assert b.announce_stop(), "until its ranks run again"


def test_a_stop_needs_no_store(store, monkeypatch):
    """The store may end first: the launcher of `make run` ends it once its own nodes have ended."""
    port = free_port()
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    server.set("clock", "0")
    one = elastic.create_handler(f"127.0.0.1:{port}", "job", 1, Node(1, 0, 1, "", 0, 20), "127.0.0.1")
    one._state_holder._cache_duration = 0
    join(one)
    del server
    _, monitor = monitored(monkeypatch, failed(r0=-signal.SIGTERM), one)
    with pytest.raises((RendezvousConnectionError, DistError)):
        one.num_nodes_waiting()
    elastic.STOPPED_BY.add(signal.SIGTERM)
    assert one.num_nodes_waiting() == 0
    with pytest.raises(SignalException):
        monitor()
    one._stop_heartbeats()


@pytest.mark.parametrize(("state", "status"), [(WorkerState.SUCCEEDED, 0), (WorkerState.HEALTHY, LOST_STATUS)])
def test_a_stop_that_comes_as_the_store_ends_has_a_checkpoint_if_the_ranks_ended_well(monkeypatch, state, status):
    """A signal to all nodes may end the ranks of this one before it gets the signal itself."""
    handler = FakeHandler()

    def lose_store(*_):
        elastic.STOPPED_BY.add(signal.SIGTERM)
        raise DistError("Connection reset by peer")

    handler.is_stopping = handler.num_nodes_waiting = lose_store
    one, monitor = monitored(monkeypatch, RunResult(state=state), handler)
    one.run = lambda: monitor() and handler.num_nodes_waiting()
    assert run_agent(monkeypatch, one) == status


@pytest.mark.parametrize(("left", "lost", "bound_s"), [(False, False, 0.5), (True, True, 60), (True, False, 60)])
def test_ranks_have_a_bound_for_the_checkpoint_and_none_without_a_peer(monkeypatch, capsys, left, lost, bound_s):
    monkeypatch.setattr(elastic, "CHECKPOINT_TIMEOUT_S", bound_s)
    healthy = RunResult(state=WorkerState.HEALTHY)
    one, _ = monitored(monkeypatch, healthy, FakeHandler())
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(elastic.psutil.Process, "children", lambda self: [rank])
    stopped = []
    monkeypatch.setattr(LocalElasticAgent, "_stop_workers", lambda self, group: stopped.append(group))
    begun = time.monotonic()
    if left:
        one.handler.lost = one.handler.left = frozenset(["b"])
        one.handler.has_lost = lambda: lost
        monkeypatch.setattr(elastic, "names_of", lambda nodes: "b")
    one._stop_workers(SimpleNamespace(state=WorkerState.HEALTHY))
    assert (0 if left else 0.5) <= time.monotonic() - begun < 5
    assert len(stopped) == 1
    assert (one.handler.stopping, one.handler.has_saved) == (not left, False)
    assert ("elastic: lost b: silent for 7 s\n" in capsys.readouterr().err) is lost
    assert not rank_processes.SAVING.is_set(), "ranks of a later round that fail are not waited for"
    if not left:
        assert rank.wait(10) == -signal.SIGUSR1
    rank.kill()
    rank.wait()


@pytest.mark.parametrize(
    ("result", "is_file"),
    [(None, True), (RunResult(state=WorkerState.SUCCEEDED), True), (failed(r0=1), False)],
)
def test_a_script_that_has_finished_leaves_a_file(monkeypatch, tmp_path, result, is_file):
    """It has no record that shows job.sh, after the loss of an agent, that the job need not start again."""
    monkeypatch.setenv("ENDED_FILE", str(tmp_path / "ended"))
    monkeypatch.setattr(LocalElasticAgent, "run", lambda self, role: result)
    one, _ = monitored(monkeypatch, None, FakeHandler())
    assert one.run().is_failed() is not is_file
    assert (tmp_path / "ended").exists() is is_file


def test_a_port_that_another_program_takes_before_a_round_is_no_refusal(store):
    assert port_taken_error(29500).status == PortTakenError.status


def test_ranks_that_were_asked_to_stop_are_not_asked_again(monkeypatch):
    """USR1 would kill ranks of a script that have written their checkpoint, and are about to end."""
    done = RunResult(state=WorkerState.SUCCEEDED)
    one, _ = monitored(monkeypatch, done, FakeHandler(), stopped_by=[signal.SIGTERM])
    rank = Mock()
    monkeypatch.setattr(elastic.psutil.Process, "children", lambda self: [rank])
    with pytest.raises(SignalException):
        one._stop_workers(SimpleNamespace(state=WorkerState.HEALTHY))  # the other node has left
    rank.send_signal.assert_not_called()
    elastic.STOPPED_BY.clear()
    one._ask_for_checkpoint(SimpleNamespace())
    rank.send_signal.assert_called_once_with(signal.SIGUSR1)


def test_another_torch_is_refused(store, monkeypatch):
    monkeypatch.delitem(dynamic_rendezvous.DynamicRendezvousHandler.__annotations__, "_op_executor")
    with pytest.raises(UserError, match="has no _op_executor, which elastic jobs need; unset MIN_NODES"):
        elastic.install()
    monkeypatch.delattr(dynamic_rendezvous, "get_method_name")
    with pytest.raises(UserError, match="has no get_method_name, "):
        elastic.install()


@pytest.mark.parametrize(("ended", "status"), [(-9, 1), (69, 1), (68, 1), (2, 2)])
@pytest.mark.parametrize("is_closed", [True, False])
def test_no_end_of_a_rank_is_taken_for_that_of_its_agent(monkeypatch, capsys, ended, status, is_closed):
    """Statuses above 128, and 69, mean that the agent was killed or lost the store, and let the node return."""
    monkeypatch.setenv("SCRIPT", "train.py")

    def run():
        if is_closed:
            raise RendezvousClosedError  # the ranks of another node have finished
        return failed(r0=ended)

    agent = SimpleNamespace(failures={0: Failure(ended, 7)}, run=run, handler=FakeHandler())
    agent.handler.job_status = lambda: int(ended == 2)
    assert run_agent(monkeypatch, agent) == status
    assert agent.handler.shutdown.called
    was_restarted = "elastic: that was restart 3 of at most 3 (MAX_RESTARTS)\n" in capsys.readouterr().err
    assert was_restarted is (not is_closed and ended != 2)


def test_too_few_nodes_are_one_line(monkeypatch):
    handler = FakeHandler()
    agent = SimpleNamespace(failures=None, run=Mock(side_effect=RendezvousTimeoutError), handler=handler)
    with pytest.raises(MissingNodeError, match=r"^fewer than 1 nodes \(MIN_NODES\) within 3 s; .*--resume auto"):
        run_agent(monkeypatch, agent)
    assert handler.shutdown.called


def run_agent(monkeypatch, agent):
    """Run an agent as a node does; return its status. Another thread watches the store meanwhile."""
    handler, is_watched = agent.handler, threading.Event()
    handler.shutdown = Mock()
    handler.watch_store = lambda give_up: is_watched.set()
    handler.notes.compare_set = lambda key, expected, wanted: wanted.encode()
    monkeypatch.setattr(elastic, "install", lambda: None)
    monkeypatch.setattr(rank_processes, "announce_stop", None)
    monkeypatch.setattr(elastic, "wait_for_head", lambda node, endpoint: "127.0.0.1")
    monkeypatch.setattr(elastic, "create_handler", lambda *_: handler)
    monkeypatch.setattr(elastic, "worker_spec", lambda *_, **__: None)
    monkeypatch.setattr(elastic, "Agent", lambda *_: agent)
    try:
        return elastic.run(Node(2, 0, 1, "n1", 7, rdzv_timeout_s=3), "ddp", [], "logs")
    finally:
        assert is_watched.wait(20)


AGENT = """
import os, sys
log = sys.argv[1]
with open(log, "a") as file:
    print(*sys.argv[2:], file=file)
line = sum(1 for _ in open(log))
status = int(os.environ["STATUSES"].split()[line - 1])
os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
"""


def kept(monkeypatch, tmp_path, statuses, max_restarts=3, options=("--name=x",)):
    """Keep a node whose agents end with these statuses; return the node's status and the agents' options."""
    monkeypatch.setattr(rejoin, "RETURN_AFTER_S", 0.05)
    monkeypatch.setenv("STATUSES", statuses)
    monkeypatch.setenv("RDZV_ENDPOINT", "127.0.0.1:1")
    log = tmp_path / "log"
    status = rejoin.run_with_restarts([*options], max_restarts, [sys.executable, "-c", AGENT, str(log)])
    return status, log.read_text().splitlines()


@pytest.mark.parametrize(
    ("statuses", "status", "starts"),
    [
        *(("0", 0, 1), ("2", 2, 1), ("68", 1, 1), ("1", 1, 1), ("-9 0", 0, 2), ("69 -9 1", 1, 3)),
        *(("-9 69 -9 -9 0", 69, 4), ("-9 2", 69, 2), ("-9 68", 69, 2)),
    ],
)
def test_an_agent_that_is_lost_runs_again(monkeypatch, tmp_path, statuses, status, starts):
    first, later = "--name=x", "--name=x --resume auto"
    expected = [first, later, f"{later} --resume auto", f"{later} --resume auto --resume auto"][:starts]
    assert kept(monkeypatch, tmp_path, statuses) == (status, expected)


def test_an_agent_that_returns_before_its_run_has_begun_resumes_no_earlier_run(monkeypatch, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/config.json").write_text('{"launches": [{"id": "old"}]}')
    options = ("--runs-dir", str(tmp_path), "--name", "x", "--overwrite")
    assert kept(monkeypatch, tmp_path, "-9 0", options=options) == (0, [" ".join(options)] * 2)


def test_the_last_loss_of_a_node_is_told_as_such(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr("recipes.common.process.node.count_oom_kills", lambda: OOM_KILLS_BEFORE)
    assert kept(monkeypatch, tmp_path, "-9 69", max_restarts=1)[0] == 69
    returns = "elastic: this node's agent was killed by SIGKILL; return 1 of at most 1\n"
    last = "elastic: this node's agent lost the store; no more returns (MAX_RESTARTS 1)\n"
    assert capfd.readouterr().err == returns + last


def test_a_stop_before_the_agent_returns_has_no_checkpoint(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(signal, "sigtimedwait", lambda signals, seconds: SimpleNamespace(si_signo=signal.SIGTERM))
    status, starts = kept(monkeypatch, tmp_path, "-9 0")
    assert (status, len(starts)) == (1, 1)
    assert capfd.readouterr().err.splitlines()[-1] == (
        "error: stopped by SIGTERM while no ranks ran: this node's ranks had ended without a checkpoint; "
        "to resume: the same command with --resume auto"
    )


def test_a_program_that_is_no_store_has_not_answered_as_a_store(monkeypatch, silent_port):
    """A node that had returned then counts as lost, and the others continue."""
    monkeypatch.setattr(elastic, "STORE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(torch_agent, "ANSWER_S", 0.0)
    with pytest.raises(MissingStoreError, match="has not answered"):
        elastic.connect(f"127.0.0.1:{silent_port}")


def test_later_rounds_go_on_with_the_run(tmp_path):
    words = ["--runs-dir", str(tmp_path), "--name", "x"]
    assert rejoin.options_of_later_rounds(words, "none") == [*words, "--resume", "auto"]
    other = [*words, "--start-from", "other.pt"]
    assert rejoin.options_of_later_rounds(other, "none") == [*other, "--resume", "auto"]


def test_later_rounds_do_not_resume_a_run_that_the_job_replaces(tmp_path):
    words = ["--runs-dir", str(tmp_path), "--name", "x", "--overwrite"]
    config = tmp_path / "x/config.json"
    config.parent.mkdir()
    for launch in ({"id": "abc"}, {}):  # the latter: of an old version
        config.write_text(json.dumps({"launches": [launch]}))
        replaced = rejoin.last_launch(words)
        assert rejoin.options_of_later_rounds(words, replaced) == words, "no round has begun"
        other = [*words, "--start-from", "other.pt"]
        assert rejoin.options_of_later_rounds(other, replaced) == other
        assert rejoin.options_of_later_rounds([*words, "--resume", "auto"], replaced)[-2:] == ["--resume", "auto"]
        config.write_text(json.dumps({"launches": [{"id": "new"}]}))
        for begun in (words, other):
            assert rejoin.options_of_later_rounds(begun, replaced) == [*begun, "--resume", "auto"]


def test_later_rounds_tell_a_script_to_resume(monkeypatch):
    monkeypatch.setenv("SCRIPT", "train.py")
    monkeypatch.setenv("RESUME", "none")
    assert rejoin.options_of_later_rounds(["--name", "x"], "none") == ["--name", "x"]
    assert os.environ["RESUME"] == "auto"
    assert rejoin.check_variables([]) == 3, "it needs no option of ours"


def test_a_node_that_leaves_is_not_waited_for(nodes, monkeypatch):
    monkeypatch.setattr(elastic, "SILENT_BEATS", 600)
    a, b, c = nodes(3)
    join(a, b, c)
    b.leave()
    assert wait_for_change(a, c) < 5
    assert not a.has_lost()
    assert join(a, c) == ([0, 1], 2)


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        ({"NNODES": "2", "MIN_NODES": "3"}, ["--name=x"], "MIN_NODES 3 is more than NNODES 2; lower it"),
        ({"MIN_NODES": "0"}, ["--name=x"], "MIN_NODES expects a whole number of at least 1"),
        ({"RDZV_ENDPOINT": "here"}, ["--name=x"], "RDZV_ENDPOINT expects host:port, got 'here'"),
        ({"RDZV_ENDPOINT": "here:65536"}, ["--name=x"], "RDZV_ENDPOINT expects host:port, got 'here:65536'"),
        ({"RDZV_ENDPOINT": "..:1"}, ["--name=x"], r"'\.\.' is not a host name"),
        ({}, [], "an elastic job needs a name"),
    ],
)
def test_settings_that_make_no_sense(monkeypatch, variables, options, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        rejoin.check_variables(options)


@pytest.mark.parametrize(
    ("nnodes", "node_rank", "words"), [("512", "0", ""), ("513", "1", ""), ("513", "0", "and of 513 healthy ones")]
)
def test_more_nodes_than_elastic_jobs_are_for(monkeypatch, capsys, nnodes, node_rank, words):
    for name, value in {"NNODES": nnodes, "NODE_RANK": node_rank}.items():
        monkeypatch.setenv(name, value)
    rejoin.check_variables(["--name=x"])
    error = capsys.readouterr().err
    assert (words in error, error.count("\n")) == (True, bool(words))


def test_an_endpoint_may_have_an_ipv6_address(monkeypatch):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6; boot it without ipv6.disable=1")
    port = free_port()
    server = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("RDZV_ENDPOINT", f"[::1]:{port}")
    rejoin.check_variables(["--name=x"])
    assert os.environ["RDZV_ENDPOINT"] == f"::1:{port}"
    elastic.connect(os.environ["RDZV_ENDPOINT"]).set("key", "value")
    assert server.get("key") == b"value"


def test_a_store_whose_port_is_taken(monkeypatch):
    port = free_port()
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(UserError, match=f"MASTER_PORT {port} is taken"):
        elastic.serve(port, "127.0.0.1")
    monkeypatch.setenv("PORT_IS_CHOSEN", "1")
    with pytest.raises(PortTakenError):
        elastic.serve(port, "127.0.0.1")
    del server


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("ddp --min-nodes=3", "MIN_NODES 3 is more than NODES 2; lower it"),
        ("ddp --min-nodes=x", "MIN_NODES expects a whole number from 1 to 1024, got 'x'"),
        ("ddp --min-nodes=1 --max-restarts=1001", "MAX_RESTARTS expects a whole number from 0 to 1000"),
        ("ddp --max-restarts=1", "MAX_RESTARTS belongs to an elastic job"),
        ("single --min-nodes=1", "single cannot be elastic; unset MIN_NODES"),
        ("horovod --min-nodes=1", "horovod cannot be elastic; unset MIN_NODES"),
    ],
)
def test_the_launcher_refuses(capsys, words, refusal):
    assert local.main([*words.split(), "--nodes=2"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {refusal}")


@pytest.mark.parametrize("recipe", NOT_ELASTIC)
def test_a_node_refuses_what_cannot_be_elastic(recipe):
    done = run_command(str(ROOT / "scripts/launch.sh"), recipe, MIN_NODES="1", PYTHON=sys.executable)
    assert done.refusal == f"error: {recipe} cannot be elastic; unset MIN_NODES, or use RECIPE=ddp"


def test_a_stop_between_two_agents_is_not_lost(monkeypatch, tmp_path):
    """Kubernetes sends TERM once. The handler here is still that of the agent that has ended."""
    monkeypatch.setattr(rejoin, "say", lambda text: signal.raise_signal(signal.SIGTERM))  # sent to this thread
    status, starts = kept(monkeypatch, tmp_path, "-9 0")
    assert (status, len(starts)) == (1, 1)


def test_a_stop_while_the_first_agent_imports_waits_for_it(monkeypatch):
    """It ends with status 0 then; by default, TERM ends a process with 143."""
    monkeypatch.setenv("RDZV_ENDPOINT", "127.0.0.1:1")
    words = "import signal, sys; blocked = signal.pthread_sigmask(signal.SIG_BLOCK, []); print(sorted(blocked)); "
    words += "sys.exit(len(blocked))"
    assert rejoin.run_with_restarts([], 0, [sys.executable, "-c", words]) == len(rejoin.STOP_SIGNALS)


def test_a_stop_while_the_next_agent_is_prepared_reaches_it(monkeypatch, tmp_path):
    """Kubernetes sends TERM once: here while the store is looked after, before the next agent is started."""
    received, run = [], rejoin.run

    def note(command, env):
        status, signals = run(command, env)
        received.append(signals)
        return status, signals

    monkeypatch.setattr(rejoin, "run", note)
    prepared = iter([lambda: None, lambda: signal.raise_signal(signal.SIGTERM)])
    monkeypatch.setattr(rejoin, "start_store", lambda store: next(prepared)())
    assert kept(monkeypatch, tmp_path, "-9 0")[0] == 0
    assert received == [[], [signal.SIGTERM]]


# ---- a rank that the kernel does not let go


def test_a_process_with_kill_pending_is_stuck(tmp_path):
    """Its main thread has ended, and another one waits for a file server."""
    for thread, pending in ((7, 0), (8, 0)):
        (tmp_path / f"7/task/{thread}").mkdir(parents=True)
        (tmp_path / f"7/task/{thread}/status").write_text(f"Name:\tpython\nSigPnd:\t{pending:016x}\nShdPnd:\t0\n")
    assert not stuck.is_stuck(7, tmp_path)
    (tmp_path / "7/task/8/status").write_text("Name:\tpython\nState:\tD (disk sleep)\nSigPnd:\t0000000000000100\n")
    assert stuck.is_stuck(7, tmp_path)
    assert not stuck.is_stuck(9, tmp_path), "it has ended"
    assert not stuck.is_stuck(os.getpid())


def test_a_rank_whose_name_is_cut_within_a_letter_is_not_stuck(tmp_path):
    """Linux keeps 15 bytes of a thread's name, which setproctitle or a script has set."""
    (tmp_path / "7/task/7").mkdir(parents=True)
    (tmp_path / "7/task/7/status").write_bytes(b"Name:\tentra\xc3\xaenements\xc3\nSigPnd:\t0000000000000000\n")
    assert not stuck.is_stuck(7, tmp_path)


@pytest.mark.parametrize("start", ["torchrun", "processes"])
def test_a_rank_that_cannot_end_ends_its_launcher(monkeypatch, tmp_path, start):
    """A FUSE mount whose server is stopped keeps a killed rank; the launcher would wait for it for ever."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(100)"]
    monkeypatch.setattr(torch_agent, "rank_command", lambda recipe, options: sleeper)
    monkeypatch.setattr(stuck, "is_stuck", lambda pid: True)
    monkeypatch.setattr(stuck, "STUCK_S", 0.5)
    for module in (torch_agent, rank_processes):
        monkeypatch.setattr(module, "LOOK_EVERY_S", 0.1)
    node = Node(1, 0, 1, "127.0.0.1", local.free_port(), 5)
    run = partial(torch_agent.run, node, "ddp", [])
    if start == "processes":  # Horovod's
        run = partial(rank_processes.run_processes, sleeper, {0: dict(os.environ)})
    with pytest.raises(UserError, match=r"^rank 0 \(pid \d+ on .*\) was killed, and cannot end: a file") as caught:
        run(str(tmp_path))
    assert caught.value.status == HANG_STATUS
