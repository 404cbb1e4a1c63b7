"""How Horovod's processes meet without MPI: the rendezvous of node 0, with a stand-in for Horovod's."""

import importlib.util
import re
import socket
import sys
import threading
import time
import types
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipes.common.errors import UserError
from recipes.common.process.node import Node
from recipes.common.process.rendezvous_errors import MissingNodeError, PortTakenError
from scripts.launch import horovod as horovod_agent
from scripts.launch.local import free_port


class Server(ThreadingHTTPServer):
    """A stand-in with the interface of Horovod's RendezvousHTTPServer."""

    def __init__(self, address, handler, verbose):
        super().__init__(address, handler)
        self.keys = {}

    def init(self, plan):
        self.plan = plan


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        value = self.server.keys.get(self.path)
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(value or b"")))
        self.end_headers()
        self.wfile.write(value or b"")

    def do_PUT(self):
        self.server.keys[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

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
        assert horovod_agent.ask(node, "PUT", "0", "ok") == ""
        for address in ("127.0.1.1", "127.0.0.1", "127.0.0.2"):
            with urllib.request.urlopen(f"http://{address}:{node.master_port}/nodes/0", timeout=10) as answer:
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


def meet(*nodes):
    """Let some nodes meet at once; return what each raises."""
    raised = [None] * len(nodes)

    def run(i):
        try:
            horovod_agent.meet_nodes(nodes[i], f"node-{i}")
        except UserError as error:
            raised[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def places(node, *ranks):
    return [replace(node, node_rank=rank) for rank in ranks]


def test_all_nodes_meet_before_their_processes_start(node):
    three = replace(node, nnodes=3)
    with horovod_agent.rendezvous(three):
        assert meet(*places(three, 2, 0, 1)) == [None, None, None]
    with horovod_agent.rendezvous(replace(node, nnodes=1)):
        assert meet(replace(node, nnodes=1)) == [None]


def test_two_nodes_of_a_rank_end_all_at_once(node, monkeypatch):
    monkeypatch.setattr(horovod_agent, "SERVER_LINGER_S", 0.5)
    four = replace(node, nnodes=4)
    with horovod_agent.rendezvous(four):
        raised = meet(*places(four, 0, 1, 1, 2))
    assert len(set(map(str, raised))) == 1
    said = r"NODE_RANK 1 is that of two nodes, node-[12] and node-[12]; number them from 0"
    assert re.fullmatch(said, str(raised[0]))
    assert {(type(error), error.status) for error in raised} == {(UserError, 2)}


@pytest.mark.parametrize("rank", [1, 3])
def test_two_sizes_of_a_job_end_the_nodes_that_wait(node, monkeypatch, rank):
    monkeypatch.setattr(horovod_agent, "SERVER_LINGER_S", 0.5)
    three, other = replace(node, nnodes=3), replace(node, nnodes=4, node_rank=rank)
    with horovod_agent.rendezvous(three):
        raised = meet(*places(three, 0, 2), other)
    said = f"NNODES is 3 on node 0 and 4 on node {rank}; give all the same"
    assert [str(error) for error in raised] == [said] * 3


def test_a_node_that_is_no_part_of_a_job_that_runs_is_refused(node):
    with horovod_agent.rendezvous(node):
        assert meet(*places(node, 0, 1)) == [None, None]
        [error] = meet(replace(node, nnodes=3, node_rank=2))
    assert str(error) == "NNODES is 2 on node 0 and 3 on node 2; give all the same"


def test_a_node_of_a_rank_that_is_taken_does_not_start_its_processes(node):
    with horovod_agent.rendezvous(node):
        assert meet(*places(node, 0, 1)) == [None, None]
        [error] = meet(*places(node, 1))
    assert re.search(r"^node 1 has come to 127\.0\.1\.1:\d+ after all 2 nodes; is its NODE_RANK ", str(error))
    assert error.status == 1, "it may be node 1 itself that starts again, and so it may later"


def test_a_node_that_starts_again_is_no_second_one(node):
    """It comes before node 0, to which its old name would do."""
    with horovod_agent.rendezvous(node), ThreadPoolExecutor(1) as pool:
        horovod_agent.ask(node, "PUT", "1", "node-1 before it was killed")
        again = pool.submit(horovod_agent.meet_nodes, *places(node, 1), "node-1")
        while horovod_agent.ask(node, "GET", "1") != "node-1" and not again.done():
            time.sleep(0.01)
        horovod_agent.meet_nodes(node, "node-0")
        again.result()


def test_a_node_that_does_not_come_is_named(node, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nodes reach each other without one
    four = replace(node, nnodes=4, rdzv_timeout_s=1)
    with horovod_agent.rendezvous(four):
        raised = meet(*places(four, 0, 2))
    assert {type(error) for error in raised} == {MissingNodeError}
    at = f"at 127.0.1.1:{node.master_port}; is it up, and is its NODE_RANK right?"
    assert str(raised[0]) == f"node 0 waited 1 s for node 1, 3 of 4 {at}"
    assert str(raised[1]) == f"node 2 waited 1 s for node 0 of 4 {at}"


def test_no_process_starts_before_all_nodes_have_come(node, monkeypatch):
    monkeypatch.setattr(horovod_agent, "rank_command", lambda *_: [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(horovod_agent, "run_processes", lambda *_: pytest.fail("a process has started"))
    with pytest.raises(MissingNodeError):
        horovod_agent.run(replace(node, rdzv_timeout_s=1), "horovod", [], "logs")


def test_ipv6_is_refused_in_one_line():
    assert horovod_agent.resolve_ipv4("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match="MASTER_ADDR ::1 has no IPv4 address, and Horovod meets by IPv4 only"):
        horovod_agent.resolve_ipv4("::1")
