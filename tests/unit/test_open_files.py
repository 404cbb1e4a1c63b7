"""Large jobs' connections: how many a process may open, and who hosts them."""

import os
import resource
import socket
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import TCPStore

from recipes.common.data.workers import LoadedSplit
from recipes.common.errors import UserError
from recipes.common.process.node import Node
from recipes.common.process.open_files import OTHER_FILES, allow_open_files
from recipes.common.process.ranks import Ranks
from recipes.common.world import world
from recipes.single import train as single
from scripts.launch import local, torch_agent
from tests import support
from tests.conftest import refused
from tests.support import wait_until

UNLIMITED = resource.RLIM_INFINITY


def limit(monkeypatch, soft, hard):
    """Give this process limits of its own; return what sets them."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", raised := Mock())
    return raised


def test_a_limit_is_raised_as_far_as_it_may_be(monkeypatch):
    enough = 8192 + OTHER_FILES
    for hard, soft_then in ((524288, enough), (UNLIMITED, enough), (4096, 4096)):
        raised = limit(monkeypatch, 1024, hard)
        allow_open_files(8192)
        assert [call.args[1] for call in raised.mock_calls] == [(soft_then, hard)]
    for soft in (65536, UNLIMITED):
        raised = limit(monkeypatch, soft, soft)
        allow_open_files(8192)
        assert raised.mock_calls == []


def test_a_store_with_too_few_places_is_refused(monkeypatch):
    """Ranks that find no place would wait until their time-out, and blame MASTER_ADDR and the network."""
    limit(monkeypatch, 1024, 4096)
    words = "the store for 4096 ranks needs 9344 open files, and this process may open 4096; raise its hard limit "
    with refused(words):
        torch_agent.meet_nodes(Node(512, 0, 8, "127.0.0.1", local.free_port(), 1), "job")


def test_workers_without_enough_files_are_refused(monkeypatch):
    """Otherwise they die with a traceback, or a rank waits for them for twice --timeout-s."""
    limit(monkeypatch, 64, 150)
    args = single.options(["--workers", "2"])
    with refused("--workers 2 needs 152 open files, and this process may open 150; raise its hard limit to 152 "):
        LoadedSplit([], args, torch.device("cpu"), on_fault=Mock())


@pytest.mark.parametrize(
    ("rank", "agents_store", "files"), [(0, "", 1024 + 8192), (0, "True", 1024), (4095, "", 1024)]
)
def test_rank_0_of_a_job_without_agents_hosts_the_store(monkeypatch, rank, agents_store, files):
    raised = limit(monkeypatch, 256, UNLIMITED)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agents_store)
    world.allow_sockets(Ranks(rank, rank % 8, 4096, 8))
    assert raised.mock_calls[0].args[1] == (files + OTHER_FILES, UNLIMITED)


def serve(port, is_over):
    """Serve the store of a node with 100 ranks as its agent, which begins with a limit of 200 files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    store = torch_agent.meet_nodes(Node(1, 0, 100, "127.0.0.1", port, 60), "job")
    is_over.wait(60)
    del store


def test_a_store_answers_more_ranks_than_its_limit_had_places():
    port, is_over = local.free_port(), support._context.Event()
    process = support._context.Process(target=serve, args=(port, is_over))
    process.start()
    connections = []

    def connect():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(connect, 50, "the store")
        connections += [socket.create_connection(("127.0.0.1", port)) for _ in range(250)]
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
        store.set("key", "value")
        assert store.get("key") == b"value"
    finally:
        is_over.set()
        for connection in connections:
            connection.close()
        process.join(30)
        process.kill()
    assert not os.path.exists(f"/proc/{process.pid}/fd")


def test_a_rank_that_hosts_nothing_goes_on(monkeypatch):
    limit(monkeypatch, 64, 64)
    world.allow_sockets(Ranks(1, 1, 4096, 8))
    with pytest.raises(UserError, match="the store for 2 ranks needs 140 open files"):
        world.allow_sockets(Ranks(0, 0, 2, 2))
