"""The doctor as a user types it: nodes on this machine, refusals, and nothing that hangs or is left behind."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time

import pytest

from recipes.common.errors import UserError
from recipes.common.process.node import Node
from recipes.common.process.rendezvous_errors import MissingNodeError
from scripts.doctor import folder, rendezvous
from scripts.doctor.case import Case
from scripts.launch import echo
from scripts.launch.local import free_port
from tests.support import Command, wait_until, write_program

pytestmark = pytest.mark.slow

DOCTOR = (sys.executable, "-m", "scripts.doctor")


def test_two_nodes_of_this_machine(tmp_path):
    words = ("--nodes", "2", "--nproc-per-node", "2", "--json", str(tmp_path / "report.json"), "--device", "cpu")
    result = Command(*DOCTOR, *words, "--runs-dir", str(tmp_path / "runs"), FABRIC="tcp").wait(100, check=True)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("doctor: 2 nodes at 127.0.0.1:")
    assert re.match(r"doctor: all is well on 2 nodes, \d+ s$", lines[-1])
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["ok"]
    assert content["findings"] == []
    assert list(content["links_gbit_s"]) == ["0-1"]
    assert content["nodes"]["1"]["torch"]["devices"][0]["is_right"]
    seen = [(row["rank"], row["node_rank"], row["local_rank"]) for row in content["probe"]["ranks"]]
    assert seen == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (("--nodes", "0"), {}, "NODES expects a whole number of at least 1, got '0'"),
        (("--node", "1"), {}, "unknown option --node; did you mean '--nodes'?"),
        (("--nproc-per-node", "2"), {}, "--nproc-per-node needs --nodes; without it, set NPROC_PER_NODE"),
        (("--json", "."), {}, "--json . is a folder; name a file in it"),
        (("--json", "none/a"), {}, "cannot write none/a: No such file or directory; choose another --json"),
        (("--json", "a" * 256), {}, "File name too long"),
        ((), {"NNODES": "2"}, "NNODES is 2 and MASTER_ADDR is not set"),
        ((), {"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK 2 of NNODES 2: node ranks count from 0"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(words, env, said):
    clean = dict.fromkeys(("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"), "")
    assert said in Command(*DOCTOR, *words, **{**clean, **env}).wait(30).refusal


def test_a_health_check_ends_within_its_bound_where_the_driver_hangs(tmp_path):
    write_program(tmp_path / "nvidia-smi", "exec sleep 60")
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = Command(*DOCTOR, "--quick", "--runs-dir", str(tmp_path / "runs"), PATH=path).wait(30)
    assert result.status == 1
    [line] = [line for line in result.stdout.splitlines() if line.startswith("error: ")]
    assert "gpus: nvidia-smi did not end within 3 s; see nvidia-smi and dmesg there" in line


def test_a_health_check_does_not_try_a_runs_folder_that_hangs_again(tmp_path):
    """Removing the probe's files there would take 5 s more than the health check has."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "def hang(event, args):\n"
        "    if event in ('os.mkdir', 'os.scandir') and '/frozen' in str(args[0]):\n"
        "        print('hangs', event, flush=True)\n"
        "        time.sleep(60)\n"
        "sys.addaudithook(hang)\n"
    )
    (tmp_path / "frozen").mkdir()
    result = Command(*DOCTOR, "--quick", "--runs-dir", str(tmp_path / "frozen"), PYTHONPATH=str(tmp_path)).wait(30)
    assert result.status == 1
    assert "failed at the request for write: no answer within " in result.stdout
    assert re.findall("hangs .*", result.stdout) == ["hangs os.mkdir"]


def test_no_link_of_another_user_is_followed(tmp_path):
    """A health check runs as root, and its folder may be /tmp: it uses no folder whose name can be guessed."""
    probe = folder.RunsFolder(tmp_path, "none", 0)
    probe.folder.mkdir()
    (tmp_path / "mine").write_text("mine")
    for name in (".node-0.tmp", "message-0"):
        (probe.folder / name).symlink_to(tmp_path / "mine")
    Command(*DOCTOR, "--quick", "--runs-dir", str(tmp_path)).wait(30)
    assert (probe.folder / ".node-0.tmp").is_symlink()
    assert probe.write() is None
    probe.leave_message("a line")
    assert probe.read_messages() == {0: "a line"}
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        result = Command(*DOCTOR, "--quick", "--runs-dir", str(tmp_path), **env).wait(30)
    assert result.status == 1
    said = f"cannot listen at 127.0.0.1:{port}: Address already in use; choose another MASTER_PORT"
    assert said in result.stdout


STALL = """
import sys, time
def stall(event, args):
    if event == "{event}" and "/.doctor-" in str(args[0]):
        open("{reached}", "w").close()
        time.sleep({seconds})
sys.addaudithook(stall)
"""


@pytest.mark.parametrize(("words", "said"), [((), ""), (("--nodes", "1"), "interrupted\n")])
@pytest.mark.parametrize(("event", "seconds"), [("os.rename", 1), ("os.listdir", 60)], ids=["write", "see"])
def test_ctrl_c_takes_effect_at_once_and_leaves_nothing_in_the_runs_folder(tmp_path, words, said, event, seconds):
    reached, runs = tmp_path / "reached", tmp_path / "runs"
    (tmp_path / "sitecustomize.py").write_text(STALL.format(event=event, reached=reached, seconds=seconds))
    words = (*words, "--quick", "--runs-dir", str(runs))
    command = Command(*DOCTOR, *words, PYTHONPATH=str(tmp_path))
    wait_until(reached.exists, 60, f"{event} in the probe's folder")
    os.killpg(command.process.pid, signal.SIGINT)
    result = command.wait(10)
    assert (result.status, result.stderr) == (130, said)
    assert list(runs.iterdir()) == []


def test_ctrl_c_takes_effect_while_another_node_does_not_answer(tmp_path):
    port = free_port()
    env = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = Command(*DOCTOR, "--quick", "--runs-dir", str(tmp_path), **env, RDZV_ID="word")
    channel = rendezvous.join(place(port), "word", 60)
    assert channel.receive(60) == {"do": "facts"}
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait(10).status == 130


def test_ctrl_c_while_ranks_run_leaves_no_temporary_folder(tmp_path):
    (tmp_path / "tmp").mkdir()
    words = ("--device", "cpu", "--runs-dir", str(tmp_path / "runs"))
    command = Command(*DOCTOR, *words, TMPDIR=str(tmp_path / "tmp"))
    wait_until(lambda: command.processes("scripts.doctor.collectives"), 100, "a rank")
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait(10).status == 130
    assert [list(path.iterdir()) for path in tmp_path.iterdir()] == [[], []]


def test_a_reader_that_leaves_costs_no_report_and_leaves_nothing_in_the_runs_folder(tmp_path):
    report = tmp_path / "report.json"
    words = ("--quick", "--nodes", "2", "--json", str(report), "--runs-dir", str(tmp_path / "runs"))
    result = Command("bash", "-c", f"{shlex.join([*DOCTOR, *words])} | head -1; exit $PIPESTATUS").wait(30)
    assert (result.status, result.stdout.count("\n")) == (128 + signal.SIGPIPE, 1)
    assert list(json.loads(report.read_text())["nodes"]) == ["0", "1"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_ctrl_c_leaves_no_process(tmp_path):
    command = Command(*DOCTOR, "--nodes", "2", "--runs-dir", str(tmp_path))
    wait_until(lambda: len(command.processes("scripts.doctor")) >= 3, 60, "two nodes")
    command.process.send_signal(signal.SIGINT)
    assert command.wait(20).status == 130


# ---- strangers


@pytest.fixture
def stranger():
    """Return the place of node 1 in a job where another program acts as node 0, and what that has received."""
    received = []

    def pretend():
        with contextlib.suppress(OSError), server:
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b'{"nonce": "00"}\n')
                    received.append(connection.recv(65536))
                    connection.sendall(b'{"mac": "00"}\n{"do": "ranks"}\n')

    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=pretend, daemon=True).start()
    return place(server.getsockname()[1]), received


def place(port, rdzv_timeout_s=60):
    return Node(2, 1, 1, "127.0.0.1", port, rdzv_timeout_s)


def test_who_does_not_know_the_word_gets_no_echo():
    answering = echo.Echo("127.0.0.1", "the word")
    assert answering.listener.getsockname()[0] == "127.0.0.1", "on one address only"
    assert echo.try_port("127.0.0.1", answering.port, "the word")["stage"] == "done"
    assert echo.try_port("127.0.0.1", answering.port, "another")["stage"] == "greet"
    answering.close()


def test_a_stranger_cannot_be_node_0_and_does_not_get_the_word(stranger):
    at, received = stranger
    with pytest.raises(MissingNodeError, match="another program answers there"):
        rendezvous.join(at, "the-secret-word", 0.1)
    assert received
    assert not any(b"the-secret-word" in text for text in received)


def test_strangers_do_not_hold_up_the_meeting():
    met = rendezvous.Coordinator(Case(2), "word", lambda order: order)
    listener = echo.listen("127.0.0.1", port := free_port())
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        met.gather(listener, 0.5, lambda _: None)
    assert (met.channels, met.case.refused) == ({}, [])


def test_strangers_do_not_take_the_place_of_a_node(monkeypatch):
    monkeypatch.setattr(rendezvous, "MAX_REFUSED", 2)
    monkeypatch.setattr(rendezvous, "SILENCE_S", 0.1)
    met = rendezvous.Coordinator(Case(2), "word", lambda order: order)
    listener = echo.listen("127.0.0.1", port := free_port())
    gathering = threading.Thread(target=met.gather, args=(listener, 20, lambda _: None))
    gathering.start()
    for refusal in ("rejected this node: it has another RDZV_ID", "rejected this node: it has", "another program"):
        begin = time.monotonic()
        with pytest.raises(UserError, match=refusal):
            rendezvous.join(place(port, 1), "another word", 0.1)
        assert "rejected" not in refusal or time.monotonic() > begin + 1, "node 0 may wait for others as long"
    rendezvous.join(place(port), "word", 5)
    gathering.join(20)
    assert list(met.channels) == [1]
    assert len(met.case.refused) == 2


def test_a_second_node_of_a_rank_and_one_of_another_job_size_are_rejected(monkeypatch):
    monkeypatch.setattr(rendezvous, "SILENCE_S", 0.1)
    met = rendezvous.Coordinator(Case(3), "word", lambda order: order)
    listener = echo.listen("127.0.0.1", port := free_port())
    gathering = threading.Thread(target=met.gather, args=(listener, 20, lambda _: None))
    gathering.start()
    rendezvous.join(Node(3, 1, 1, "127.0.0.1", port, 0), "word", 5)
    for rank, nnodes, why in ((1, 3, "NODE_RANK 1 is taken by another node"), (2, 2, "it has NNODES 2, node 0")):
        with pytest.raises(UserError, match=f"rejected this node: {why}.*; see the RDZV_ID, NNODES"):
            rendezvous.join(Node(nnodes, rank, 1, "127.0.0.1", port, 0), "word", 5)
    rendezvous.join(Node(3, 2, 1, "127.0.0.1", port, 0), "word", 5)
    gathering.join(20)
    assert sorted(met.channels) == [1, 2]


def test_a_node_0_whose_name_gets_another_address_is_found(monkeypatch):
    """A name server may give the address of a pod's predecessor for half a minute."""
    addresses, getaddrinfo = ["127.0.0.3", "127.0.0.3"], socket.getaddrinfo

    def look_up(host, *words, **options):
        if host == "node-0":
            host = addresses.pop() if addresses else "127.0.0.1"
        return getaddrinfo(host, *words, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    met = rendezvous.Coordinator(Case(2), "word", lambda order: order)
    listener = echo.listen("127.0.0.1", port := free_port())
    gathering = threading.Thread(target=met.gather, args=(listener, 20, lambda _: None))
    gathering.start()
    rendezvous.join(Node(2, 1, 1, "node-0", port, 60), "word", 5)
    gathering.join(20)
    assert list(met.channels) == [1]


@pytest.mark.parametrize("hello", [b'{"rank": Infinity, "nnodes": 2, "nonce": ""}\n', b"[" * 100_000 + b"\n"])
def test_what_a_stranger_sends_is_no_error_of_node_0(hello):
    own, theirs = socket.socketpair()
    theirs.sendall(hello)
    met = rendezvous.Coordinator(Case(2), "word", lambda order: order)
    met.welcome(rendezvous.Channel(own), "10.0.0.9")
    assert (met.channels, met.case.refused) == ({}, [])


def test_a_node_that_falls_silent_is_lost_within_the_bound():
    one, other = socket.socketpair()
    met = rendezvous.Coordinator(Case(2), "word", lambda order: {"time": 0.0}, {1: rendezvous.Channel(one)})
    other.sendall(b'{"time"')  # a partial answer does not count
    assert met.ask_all({"do": "facts"}, 0.5) == {0: {"time": 0.0}}
    assert met.case.lost == {1: ("facts", "no answer within 0 s")}
    assert met.channels == {}
    other.close()


def test_an_own_part_that_hangs_is_lost_within_the_bound():
    met = rendezvous.Coordinator(Case(1), "word", lambda order: time.sleep(1) or {})
    assert met.ask_all({"do": "write"}, 0.2) == {}
    assert met.case.lost[0][0] == "write"
