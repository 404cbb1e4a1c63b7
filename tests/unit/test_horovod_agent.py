"""How Horovod's processes meet without MPI: the rendezvous that node 0 serves, with a stand-in for Horovod's."""

import contextlib
import importlib.util
import re
import socket
import sys
import threading
import types
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest
from torch.distributed import DistNetworkError, HashStore

from recipes.common.errors import UserError
from recipes.common.process.node import Node
from recipes.common.process.rendezvous_errors import MissingNodeError
from scripts.launch import horovod as horovod_agent
from scripts.launch import torch_agent
from scripts.launch.local import free_port
from tests.support import Command


class Server(ThreadingHTTPServer):
    """A stand-in with the interface of Horovod's RendezvousHTTPServer."""

    def __init__(self, address, handler, verbose):
        super().__init__(address, handler)

    def init(self, plan):
        self.plan = plan


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_):
        pass


@pytest.fixture
def node(monkeypatch):
    """Node 0 of two, whose own name resolves to a loopback address, as with Debian's /etc/hosts."""
    hosts = types.SimpleNamespace(parse_hosts=str, get_host_assignments=lambda hosts, size: (hosts, size))
    server = types.SimpleNamespace(RendezvousHandler=Handler, RendezvousHTTPServer=Server)
    for name in ("horovod", "horovod.runner", "horovod.runner.common", "horovod.runner.common.util"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "horovod.runner.common.util.hosts", hosts)
    monkeypatch.setitem(sys.modules, "horovod.runner.http", types.ModuleType("http"))
    monkeypatch.setitem(sys.modules, "horovod.runner.http.http_server", server)
    return Node(2, 0, 1, "127.0.1.1", free_port(), 10)


def places(node, *ranks):
    return [replace(node, node_rank=rank) for rank in ranks]


def answer(address, port):
    with urllib.request.urlopen(f"http://{address}:{port}/", timeout=10) as response:
        return response.read()


def test_the_rendezvous_answers_at_every_address_of_node_0(node):
    with horovod_agent.rendezvous(node) as port:
        assert [answer(address, port) for address in ("127.0.1.1", "127.0.0.1", "127.0.0.2")] == [b"ok"] * 3


def test_thousands_of_ranks_may_connect_at_once(node, monkeypatch):
    """Python's servers let five wait, and the others try again after a second and more."""
    listen, waiting = socket.socket.listen, []
    monkeypatch.setattr(socket.socket, "listen", lambda self, most: waiting.append(most) or listen(self, most))
    with horovod_agent.rendezvous(node):
        assert waiting[-1] == 4096


def test_the_rendezvous_of_nodes_on_this_machine_is_out_of_others_reach(node):
    with horovod_agent.rendezvous(replace(node, master_addr="127.0.0.1")) as port:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=10)


@pytest.fixture
def started(monkeypatch):
    """The environments of the ranks that agents start, in place of the ranks."""
    environments = {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(horovod_agent, "quiet_import", contextlib.nullcontext)
    monkeypatch.setattr(horovod_agent, "rank_command", lambda *_: [])
    monkeypatch.setattr(torch_agent, "STORE_LINGER_S", 0.5)
    return environments


def start(monkeypatch, started, *nodes):
    """Run the agents of some nodes at once; return how each has ended: its status, or the error that it raises."""
    all_run = threading.Barrier(len(nodes))

    def run_ranks(command, environments, logs):
        started.update(environments)
        all_run.wait(30)  # node 0 serves what the others read
        [port] = {own["HOROVOD_GLOO_RENDEZVOUS_PORT"] for own in environments.values()}
        assert answer("127.0.0.1", port) == b"ok"
        all_run.wait(30)
        return 0

    def run(node):
        try:
            return horovod_agent.run(node, "horovod", [], "logs")
        except UserError as error:
            return error

    monkeypatch.setattr(horovod_agent, "run_processes", run_ranks)
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(run, nodes))


def test_all_ranks_know_the_port_of_node_0(node, monkeypatch, started):
    three = replace(node, nnodes=3, nproc_per_node=2)
    assert start(monkeypatch, started, *places(three, 2, 0, 1)) == [0, 0, 0]
    assert sorted(started) == [0, 1, 2, 3, 4, 5]
    [port] = {own["HOROVOD_GLOO_RENDEZVOUS_PORT"] for own in started.values()}
    assert port != str(node.master_port)


@pytest.mark.parametrize(("nproc_per_node", "warnings"), [(128, 0), (129, 1)])
def test_hundreds_of_ranks_are_told_to_meet_by_mpi(node, monkeypatch, started, capsys, nproc_per_node, warnings):
    many = replace(node, nproc_per_node=nproc_per_node)
    assert start(monkeypatch, started, *places(many, 0, 1)) == [0, 0]
    assert len(started) == 2 * nproc_per_node
    assert capsys.readouterr().err.count("warning: 258 ranks of Horovod ask node 0 for one another's ") == warnings


def test_no_rank_starts_if_nodes_differ_in_their_number(node, monkeypatch, started):
    ended = start(monkeypatch, started, node, replace(node, nnodes=3, node_rank=2))
    assert re.fullmatch(r"NNODES is [23] on one node and [23] on node [02]; give all the same", str(ended[0]))
    assert [(type(error), str(error)) for error in ended] == [(UserError, str(ended[0]))] * 2
    assert not started


def test_no_rank_starts_if_two_nodes_have_a_rank(node, tmp_path, monkeypatch, started):
    """One of them is another process, as nodes are named by process."""
    (tmp_path / "horovod.py").touch()
    own = {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": node.master_addr, "MASTER_PORT": str(node.master_port)}
    other = Command(sys.executable, "-m", "scripts.launch.horovod", "horovod", PYTHONPATH=str(tmp_path), **own)
    three = replace(node, nnodes=3, rdzv_timeout_s=60)
    [head, second] = start(monkeypatch, started, *places(three, 0, 1))
    assert re.fullmatch(r"NODE_RANK 1 is that of two nodes, .* and .*; number them from 0", str(head))
    assert str(second) == str(head)
    assert other.wait().refusal == f"error: {head}"
    assert not started


def test_no_rank_starts_before_all_nodes_have_come(node, monkeypatch, started):
    [error] = start(monkeypatch, started, replace(node, rdzv_timeout_s=1))
    assert type(error) is MissingNodeError
    assert str(error).startswith(f"node 0 waited 1 s for node 1 of 2 at 127.0.1.1:{node.master_port}; ")
    assert not started


def test_a_node_0_that_ends_while_nodes_meet_is_one_line(node, monkeypatch, started):
    """Torch raises an error of its own where the store has gone."""
    monkeypatch.setattr(horovod_agent, "check_head", lambda _: None)
    monkeypatch.setattr(torch_agent, "meet_nodes", lambda *_: HashStore())  # all came, and no port is set
    monkeypatch.setattr(HashStore, "get", Mock(side_effect=DistNetworkError("Connection was closed")))
    [error] = start(monkeypatch, started, *places(node, 1))
    assert type(error) is MissingNodeError
    said = (
        f"node 1 waited for 2 nodes at 127.0.1.1:{node.master_port}, at most 10 s for each: Connection was closed"
    )
    assert str(error) == said
    assert not started


def test_ipv6_is_refused_in_one_line():
    assert horovod_agent.resolve_ipv4("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match="MASTER_ADDR ::1 has no IPv4 address, and Horovod meets by IPv4 only"):
        horovod_agent.resolve_ipv4("::1")
