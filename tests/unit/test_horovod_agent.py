"""How Horovod's processes meet without MPI: the rendezvous of node 0, with a stand-in for Horovod's."""

import socket
import sys
import types
import urllib.request
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipes.common.errors import UserError
from recipes.common.process.node import Node
from recipes.common.process.rendezvous_errors import PortTakenError
from scripts.launch import horovod as horovod_agent
from scripts.launch.local import free_port


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


def test_the_rendezvous_answers_at_every_address_of_node_0(node):
    with horovod_agent.rendezvous(node):
        for address in ("127.0.1.1", "127.0.0.1", "127.0.0.2"):
            with urllib.request.urlopen(f"http://{address}:{node.master_port}/global/0", timeout=10) as answer:
                assert answer.read() == b"ok"


def test_thousands_of_ranks_may_connect_at_once(node, monkeypatch):
    """Python's servers let five wait, and the others try again after a second and more."""
    listen, waiting = socket.socket.listen, []
    monkeypatch.setattr(socket.socket, "listen", lambda self, most: waiting.append(most) or listen(self, most))
    with horovod_agent.rendezvous(node):
        assert waiting[-1] == 4096


def test_the_rendezvous_of_nodes_on_this_machine_is_out_of_others_reach(node):
    here = replace(node, master_addr="127.0.0.1")
    with horovod_agent.rendezvous(here):
        socket.create_connection(("127.0.0.1", here.master_port), timeout=10).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", here.master_port), timeout=10)


def test_a_lost_race_for_its_port_is_no_traceback(node, monkeypatch):
    with horovod_agent.rendezvous(node):
        for chosen, kind in (("", UserError), ("1", PortTakenError)):
            monkeypatch.setenv("PORT_IS_CHOSEN", chosen)
            with pytest.raises(UserError, match=f"MASTER_PORT {node.master_port} ") as caught:
                horovod_agent.rendezvous(node).__enter__()
            assert type(caught.value) is kind


def test_ipv6_is_refused_in_one_line():
    assert horovod_agent.resolve_ipv4("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match="MASTER_ADDR ::1 has no IPv4 address, and Horovod meets by IPv4 only"):
        horovod_agent.resolve_ipv4("::1")
