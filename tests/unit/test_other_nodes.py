"""What a node learns of another one's failure, and from when on it ends ranks that still run."""

import re
import socket

import pytest
from torch.distributed import HashStore

from recipes.common.process.node import Failure, Node
from scripts.launch import other_nodes
from scripts.launch.local import free_port
from scripts.launch.other_nodes import FailedNodeError, OtherNodes
from tests.support import wait_until


@pytest.fixture
def job(monkeypatch):
    """Return a function that returns a node's view of the others, in one store."""
    for name in ("LOOK_EVERY_S", "LOST_GRACE_S"):
        monkeypatch.setattr(other_nodes, name, 0.01)
    monkeypatch.delenv("SCRIPT", raising=False)
    store, begun, port = HashStore(), [], free_port()

    def look(rank, store=store):
        begun.append(OtherNodes(Node(3, rank, 1, "127.0.0.1", port, 1), store))
        return begun[-1]

    look.store, look.port = store, port
    yield look
    for one in begun:
        one.close()


def failure_of(others):
    """Wait until a node's ranks are to be ended; return why."""
    failures = []

    def is_over():
        try:
            others.check()
        except FailedNodeError as error:
            failures.append((error.status, str(error)))
        return bool(failures)

    wait_until(is_over, 20, "a failure elsewhere")
    return failures[0]


@pytest.mark.parametrize(("status", "told"), [(5, 1), (-9, 1), (2, 2), (3, 3)])
def test_the_others_end_with_a_status_that_keeps_its_meaning(job, monkeypatch, status, told):
    monkeypatch.setattr(other_nodes, "REPORT_GRACE_S", 0.0)
    head, other = job(0), job(1)
    other.tell_failures({1: Failure(status, 7)})
    place = rf"rank 1 \(pid 7 on \S+\) (ended with status {status}|was killed by SIGKILL)"
    shown, said = failure_of(head)
    assert shown == told
    assert re.fullmatch(f"node 1 failed: {place}; ranks of this node still ran, and are ended", said)
    other.check()  # it knows of itself


def test_after_a_hang_ranks_have_time_for_their_reports(job):
    head = job(0)
    job(1).tell_failures({1: Failure(3, 7)})
    wait_until(lambda: head.cause, 20, "the cause")
    head.check()


@pytest.mark.parametrize("statuses", [[69], [-6], [69, -6, -12]])
def test_a_node_that_only_lost_others_is_no_cause(job, statuses):
    """Its ranks may end before the one that they lost, which closes its connections first; -12 is the agent's."""
    head, lost, first = job(0), job(2), job(1)
    lost.tell_failures({2 + i: Failure(status, 8) for i, status in enumerate(statuses)})
    wait_until(lambda: head._failure, 20, "the victim")
    assert not head.cause
    assert head.excuse({0: Failure(-6, 9)}) == {0: Failure(-6, 9)}
    first.tell_failures({1: Failure(5, 7)})
    wait_until(lambda: head.cause, 20, "the cause")
    assert failure_of(head)[1].startswith("node 1 failed: rank 1 (pid 7 on ")
    assert head.excuse({0: Failure(-6, 9)}) == {0: Failure(69, 9)}
    assert first.excuse({1: Failure(-6, 7)}) == {1: Failure(-6, 7)}


class EndedStore:
    """The store of a node 0 that has ended."""

    def __init__(self, left):
        self.left = left

    def check(self, keys):
        if keys == ["left/0"] and self.left:
            self.left = False
            return True
        if not self.left:
            raise RuntimeError("Connection was likely closed")
        return False


def test_the_end_of_node_0_is_a_failure(job):
    said = "node 0 ended, see its log; ranks of this node still ran, and are ended"
    assert failure_of(job(1, EndedStore(left=False))) == (1, said)


def test_it_is_none_after_its_ranks_have_finished(job):
    other = job(1, EndedStore(left=True))
    other._thread.join(20)
    other.check()


def test_a_lost_connection_to_a_node_0_that_still_answers_is_none(job):
    with socket.create_server(("127.0.0.1", job.port)):
        other = job(1, EndedStore(left=False))
        other._thread.join(20)
    other.check()
