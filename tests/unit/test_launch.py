"""The launcher of local nodes and the agent of a node: what they decide before anything starts."""

import contextlib
import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch

from recipes.common.errors import UserError, as_user_error
from recipes.common.process import node
from recipes.common.process.node import Failure, Node, check_head, how_ended, wait_for_head
from recipes.common.process.rendezvous_errors import MissingNodeError, PortTakenError
from scripts.launch import agent, echo, local, processes, rank_processes, script
from scripts.launch.command import command
from tests import support
from tests.conftest import need_horovod, refused
from tests.support import ROOT, Command, has_ended, run_command, wait_until, write_program


@pytest.mark.parametrize(
    ("gpus", "nodes", "shares"),
    [
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (8, 3, [[0, 1], [2, 3], [4, 5]]),
        (1, 2, [[], []]),
        (0, 2, [[], []]),
    ],
)
def test_gpus_are_shared_out_evenly(gpus, nodes, shares):
    assert local.share_out([str(i) for i in range(gpus)], nodes) == [[str(i) for i in share] for share in shares]


@pytest.mark.parametrize(
    ("argv", "gpus", "warning"),
    [
        (["--nodes", "2"], "0", "2 nodes share 1 GPU, so none of them gets any; NODES=1 uses them"),
        (["--nodes", "3"], "0,1", "3 nodes share 2 GPUs, so none of them gets any; NODES=2 uses them"),
        (["--nodes", "2", "--", "--device", "cpu"], "0", ""),
        (["--nodes", "2"], "", ""),
        (["--nodes", "2"], "0,1", ""),
    ],
)
def test_gpus_that_are_too_few_to_be_used_are_a_warning(monkeypatch, capsys, argv, gpus, warning):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    args = local.parse_args(["ddp", *argv])
    local.assign_gpus(args.nodes, args.options)
    assert capsys.readouterr().err == (f"warning: {warning}\n" if warning else "")


@pytest.mark.parametrize(
    ("nodes", "words"), [(16, ""), (17, "warning: 17 processes share 2 cores, and may take minutes to start; ")]
)
def test_more_processes_than_a_machine_can_start_soon_are_a_warning(monkeypatch, capsys, nodes, words):
    monkeypatch.setattr(local, "count_cores", lambda: 2)
    assert local.processes_per_node(local.parse_args(["ddp", "--nodes", str(nodes)]), [[]] * nodes) == 1
    error = capsys.readouterr().err
    assert (error.startswith(words), error.count("\n")) == (True, bool(words))


@pytest.mark.parametrize(
    ("value", "gpus"),
    [("0,1", ["0", "1"]), ("", []), ("GPU-3a,MIG-b", ["GPU-3a", "MIG-b"]), ("-1", []), ("NoDevFiles", [])],
)
def test_visible_gpus_of_the_environment(monkeypatch, value, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert local.visible_gpus() == gpus


def test_visible_gpus_of_the_machine(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local, "DEVICES", tmp_path)
    assert local.visible_gpus() == []
    assert capsys.readouterr().err == ""
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia3").touch()
    assert local.visible_gpus() == []
    assert "nvidia3 is there and nvidia-smi is not in PATH: no GPU is used; set " in capsys.readouterr().err
    script = '[ "$1" = -L ] && printf "GPU 0: H100 (UUID: a)\\nGPU 1: H100 (UUID: b)\\n"'
    write_program(tmp_path / "nvidia-smi", script)
    assert local.visible_gpus() == ["0", "1"]
    assert capsys.readouterr().err == ""
    hangs = Mock(side_effect=subprocess.TimeoutExpired("nvidia-smi", 30))
    monkeypatch.setattr(local.subprocess, "run", hangs)
    with pytest.raises(UserError, match="nvidia-smi -L does not answer; fix the driver"):
        local.visible_gpus()


@pytest.mark.parametrize(
    ("second", "gpus"),
    [("", "MIG-1"), ("GPU 1: H100 (UUID: b)", "1"), ("GPU 1: H100\n  MIG 7g: (UUID: MIG-3)", "MIG-1")],
)
def test_of_mig_instances_a_job_uses_one_unless_told_otherwise(monkeypatch, tmp_path, capsys, second, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first = "GPU 0: H100 (UUID: a)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\n  MIG 1g.10gb Device 1: (UUID: MIG-2)"
    write_program(tmp_path / "nvidia-smi", f"cat <<'END'\n{first}\n{second}\nEND")
    assert local.visible_gpus() == [gpus]
    error = capsys.readouterr().err
    assert f"MIG instances, each process can use one: this job uses {gpus}; set CUDA_VISIBLE_DEVICES" in error


def test_an_nvidia_smi_that_fails_is_warned_of(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    write_program(tmp_path / "nvidia-smi", "echo 'a first line'\necho 'Driver/library version mismatch'\nexit 18")
    assert local.visible_gpus() == []
    expected = "warning: nvidia-smi -L failed (status 18): Driver/library version mismatch\n"
    assert capsys.readouterr() == ("", expected)


def test_the_environment_of_a_node(monkeypatch):
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: set(range(16)))
    for name in ("RANK", "WORLD_SIZE"):  # with RANK=1, single would leave what it says to rank 0
        monkeypatch.setenv(name, "1")
    environment = local.node_environment(1, 2, 4, ["4", "5"], 1234)
    assert not {"RANK", "WORLD_SIZE"} & set(environment)
    expected = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "NPROC_PER_NODE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "OMP_NUM_THREADS": "2",  # 16 cores for 2 x 4 processes
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert {name: environment[name] for name in expected} == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert local.node_environment(0, 1, 1, [], 1)["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert local.node_environment(0, 10, 10, [], 1)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("text", ["0", "-1", "abc", "", "1.5", "2000", "²", " 1"])
@pytest.mark.parametrize("name", ["NODES", "NPROC_PER_NODE"])
def test_bad_counts(capsys, name, text):
    assert local.main(["ddp", f"--{name.lower().replace('_', '-')}={text}"]) == 2
    assert capsys.readouterr().err == f"error: {name} expects a whole number from 1 to 1024, got {text!r}\n"


def test_bad_recipes(capsys):
    for name, words in (
        ("dpp", ": invalid choice 'dpp'; did you mean 'ddp'?"),
        ("", " is missing"),
        ("DDP", ": invalid choice 'DDP'; did you mean 'ddp'?"),
        ("../ddp", ": invalid choice '../ddp'; did you mean 'ddp'?"),
    ):
        assert local.main([name]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: RECIPE{words} (choose from apex, ")
        assert error.count("\n") == 1


def test_free_ports_are_free_and_differ():
    """They are none of the ports that Linux gives to callers that ask for any."""
    ports = [local.free_port() for _ in range(100)]
    assert len(set(ports)) == 100
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()
    assert max(ports) < 32768


@pytest.mark.skipif(sys.platform != "linux", reason="a port is held on Linux alone")
@pytest.mark.parametrize(("address", "place"), [("", "0.0.0.0"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_a_free_port_is_one_of_the_address(address, place):
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6; boot it without ipv6.disable=1")
    port = local.free_port(address)
    assert local._held[-1].getsockname()[:2] == (place, port)


@pytest.mark.skipif(sys.platform != "linux", reason="a port is held on Linux alone")
def test_a_free_port_is_given_to_no_other_launcher_until_rank_0_listens():
    port = local.free_port()
    other = "import sys; from scripts.launch import local; port = int(sys.argv[1])"
    other += "; local._PORTS = range(port, port + 1); local.free_port()"
    assert f"no port is free from {port} to {port}; " in run_command(sys.executable, "-c", other, str(port)).stderr
    socket.create_server(("", port)).close()  # as rank 0 does, in any process


def test_a_port_in_use_is_passed_over(monkeypatch):
    port = local.free_port()
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(local, "_PORTS", range(port, port + 1))
        with pytest.raises(UserError, match=f"^no port is free from {port} to {port}; "):
            local.free_port()
        local._held.clear()
    assert local.free_port() == port


class TestNode:
    NAMES = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "RDZV_TIMEOUT_S")

    @pytest.fixture(autouse=True)
    def _bare(self, monkeypatch):
        for name in self.NAMES:
            monkeypatch.delenv(name, raising=False)

    def test_nothing_set_is_one_process(self):
        assert agent.read_node() == Node(1, 0, 1, "127.0.0.1", 29500, 300)

    def test_all_set(self, monkeypatch):
        for name, value in zip(self.NAMES, ("3", "2", "8", "node-a", "1234", "9"), strict=True):
            monkeypatch.setenv(name, value)
        assert agent.read_node() == Node(3, 2, 8, "node-a", 1234, 9)

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("NNODES", "0", "NNODES expects a whole number of at least 1, got '0'"),
            ("NNODES", "two", "NNODES expects"),
            ("NPROC_PER_NODE", "-1", "NPROC_PER_NODE expects"),
            ("NPROC_PER_NODE", "auto", "NPROC_PER_NODE expects"),
            ("NODE_RANK", "-1", "NODE_RANK expects a whole number of at least 0"),
            ("NODE_RANK", "1", "NODE_RANK 1 of NNODES 1: node ranks count from 0"),
            ("NNODES", "2", "NNODES is 2 and MASTER_ADDR is not set"),
            ("MASTER_ADDR", "10.0.0.1 172.17.0.1", "'10.0.0.1 172.17.0.1' is not a host name or address; "),
            ("MASTER_ADDR", "node-a,node-b", "'node-a,node-b' is not a host name or address; give one, "),
            ("MASTER_ADDR", "tcp://node-a", "'tcp://node-a' is not a host name or address; give one, "),
            ("MASTER_ADDR", "node-a:29500", "'node-a:29500' is not a host name or address; give one, "),
            ("MASTER_ADDR", "node..a", r"'node\.\.a' is not a host name: parts between dots have 1 to 63"),
            ("MASTER_PORT", "70000", "MASTER_PORT expects a whole number from 1 to 65535, got '70000'"),
            ("MASTER_PORT", "http", "MASTER_PORT expects"),
            ("RDZV_TIMEOUT_S", "0", "RDZV_TIMEOUT_S expects"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, monkeypatch, name, value, words):
        monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=words):
            agent.read_node()


EARLY = "ranks 0, 2 ended with status 0, perhaps too early\n"


@pytest.mark.parametrize(
    ("statuses", "expected", "words"),
    [
        ({"r0": 2, "r1": 2}, 2, None),  # both have refused, and rank 0 has printed why
        ({"r0": 1, "r1": 2}, 2, None),
        ({"r0": 1, "r3": -9, "r1": 1}, 137, "3{at} was killed by SIGKILL"),
        ({"r0": -signal.SIGUSR2, "r1": 1}, 1, "1{at} ended with status 1; its own error is above"),
        ({"r0": -signal.SIGUSR2, "r1": -11}, 139, "1{at} was killed by SIGSEGV"),
        ({"r2": 4}, 4, "2{at} ended with status 4"),
        ({"r0": 0, "r1": 1, "r2": 0}, 1, f"1{{at}} ended with status 1; its own error is above; {EARLY}"),
        ({"r0": 0, "r1": -signal.SIGUSR2}, 140, "1{at} was killed by SIGUSR2; rank 0 ended"),
        ({"r0": 3, "r1": -9}, 3, None),  # each has reported where it hung
        ({"r0": 75, "r1": -9}, 75, None),  # rank 0 has reported that its port was taken
        ({"r0": 69, "r1": 1}, 1, "1{at} ended with status 1; its own error is above"),  # rank 0 lost rank 1
        ({"r0": 69, "r1": -9}, 137, "1{at} was killed by SIGKILL"),
        ({"r0": 69, "r1": 69, "r2": -signal.SIGUSR2}, 1, None),  # they have lost a rank of another node
        ({"r0": 0, "r1": 69}, 1, "1{at} ended with status 1; its own error is above; rank 0 ended"),
    ],
)
def test_the_status_that_tells_most(capsys, statuses, expected, words):
    ended = {int(rank[1:]): Failure(status, 77) for rank, status in statuses.items()}
    assert rank_processes.node_status(ended) == expected
    error = capsys.readouterr().err
    if words is None:
        assert error == ""
    else:
        assert error.startswith(f"error: rank {words.format(at=f' (pid 77 on {socket.gethostname()})')}")
        assert error.count("\n") == 1


def test_a_script_may_end_with_any_status(capsys, monkeypatch):
    monkeypatch.setenv("SCRIPT", "train.py")
    assert rank_processes.node_status({0: Failure(69, 77), 1: Failure(1, 78)}) == 69
    assert "rank 0 (pid 77 on " in capsys.readouterr().err


STORE_GONE = """
import os
from scripts.launch.agent import quiet_import

with quiet_import():
    from torch.distributed import TCPStore

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
del server
try:
    client.wait(["word"])
except RuntimeError:
    print("gone", os.environ.get("TORCH_CPP_LOG_LEVEL"))
"""


def test_how_a_process_ended(monkeypatch):
    monkeypatch.setattr(node, "count_oom_kills", lambda: node.OOM_KILLS_BEFORE)
    ways = ["was killed by SIGKILL", "was killed by signal 127", "ended with status 3"]
    assert [how_ended(status) for status in (-9, -127, 3)] == ways


def test_a_lack_of_memory_is_named_where_the_cgroup_has_counted_it(monkeypatch):
    assert node.count_oom_kills() >= 0
    monkeypatch.setattr(node, "count_oom_kills", lambda: node.OOM_KILLS_BEFORE + 2)
    ended = {0: Failure(1, 5), 1: Failure(-signal.SIGKILL, 6)}
    hint = "meanwhile memory ran out in its cgroup (oom_kill 2)"
    assert node.cause_of(ended).endswith(f" was killed by SIGKILL; {hint}")
    assert node.how_ended(-signal.SIGKILL) == f"was killed by SIGKILL; {hint}"  # also of a node, for local.py
    assert node.cause_of({0: Failure(-signal.SIGABRT, 5)}).endswith(" was killed by SIGABRT")


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/job/step\n", "job/step/memory.events"),
        ("0::/of/the/host\n", "memory.events"),  # in a container that sees its own cgroup alone
        ("9:name=systemd:/\n4:memory:/slurm/job\n0::/\n", "memory/slurm/job/memory.oom_control"),  # version 1
        ("4:memory:/docker/1\n", "memory/memory.oom_control"),
        ("4:cpu:/\n", "memory.events"),
    ],
)
def test_both_versions_of_cgroups_count_the_kills(tmp_path, cgroup, file):
    (tmp_path / "cgroup").write_text(cgroup)
    path = tmp_path / "root" / file
    path.parent.mkdir(parents=True)
    path.write_text("low 0\noom_kill 3\n")
    assert node.count_oom_kills(tmp_path / "cgroup", tmp_path / "root") == (0 if "cpu" in cgroup else 3)
    assert node.count_oom_kills(tmp_path / "none") == 0


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        RuntimeError("Resource temporarily unavailable"),
    ],
)
def test_a_limit_on_processes_is_one_line(capsys, error):
    what = "cannot start another thread or process; raise their limit (ulimit -u, or pids.max of the cgroup), or "
    assert command(Mock(side_effect=error))([]) == 1
    assert capsys.readouterr().err == f"error: {what}use fewer processes and --workers\n"
    with pytest.raises(RuntimeError, match=r"^another$"):
        command(Mock(side_effect=RuntimeError("another")))([])
    code = "from recipes.common.process.entry import run_main; from unittest.mock import Mock; "
    result = run_command(sys.executable, "-c", code + f"run_main(Mock(side_effect={error!r}))", RANK="3")
    line = f"error: rank 3 on {socket.gethostname()} {what}use fewer processes and --workers\n"
    assert (result.status, result.stderr) == (1, line)


def refuse():
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_a_process_that_the_system_does_not_start_is_one_line(monkeypatch, capsys):
    """A lock, a pipe or a socket raises the same error."""
    with pytest.raises(BlockingIOError):
        command(lambda argv: refuse())([])
    for call in (lambda: subprocess.run(["true"]), lambda: subprocess.run(["true"], close_fds=False)):
        monkeypatch.setattr(subprocess, "_fork_exec", lambda *words: refuse())
        monkeypatch.setattr(os, "posix_spawn", lambda *words, **options: refuse())
        monkeypatch.setattr(os, "fork", refuse)
        assert command(lambda argv, call=call: call())([]) == 1
        assert "cannot start another thread or process; " in capsys.readouterr().err


def test_an_agent_whose_store_has_gone_says_nothing_of_it():
    """What it starts has the level of warnings that the user has chosen, or torch's own."""
    result = run_command(sys.executable, "-c", STORE_GONE)
    assert (result.stdout, result.stderr) == ("gone None\n", "")
    result = run_command(sys.executable, "-c", STORE_GONE, TORCH_CPP_LOG_LEVEL="WARNING")
    assert result.stdout == "gone WARNING\n"
    assert "recvValueWithTimeout failed" in result.stderr


@pytest.mark.parametrize("main", ["agent.run_torchrun", "horovod.run"])
def test_a_host_name_of_64_characters(tmp_path, main):
    """Linux takes such a name, and Python's look-up of names fails for it."""
    if main == "horovod.run":
        need_horovod()
    code = "import socket; socket.gethostname = lambda: 'n' * 64; from scripts.launch import agent, horovod; "
    code += f"horovod.bind_address = lambda _: ''; agent.main({main})"
    script = tmp_path / "mine.py"
    script.write_text("print('trains')")
    result = run_command(sys.executable, "-c", code, "ddp", SCRIPT=str(script), MASTER_PORT=str(local.free_port()))
    assert (result.status, result.stdout, result.stderr) == (0, "trains\n", "")


@pytest.mark.parametrize(("limit", "words"), [(2**21, "warning: ulimit -v is 2097152 kB, "), ("unlimited", "")])
def test_a_small_address_space_is_a_warning(limit, words):
    """The import of torch then fails with a traceback that says nothing of a limit."""
    done = run_command("bash", "-c", f"ulimit -v {limit}; exec scripts/launch.sh single", PYTHON="true")
    assert (done.status, done.stderr.startswith(words), done.stderr.count("\n")) == (0, True, bool(words))


def test_a_signal_to_an_agent_that_is_about_to_end_is_no_error(monkeypatch, tmp_path):
    """An elastic node repeats a signal every second until its agent has ended."""
    monkeypatch.setattr(signal, "sigwait", lambda _: signal.SIGUSR1)
    monkeypatch.setattr(psutil.Process, "children", lambda _: [])
    monkeypatch.setattr(rank_processes, "STOPPED_BY", set())
    rank_processes.pass_signals_on(str(tmp_path / "removed"))


def test_a_rank_that_saves_is_left_to_finish_by_horovods_agent_too(monkeypatch, tmp_path, capsys):
    """test_your_own.py has the same for torchrun's."""
    code = "import os, signal, time\n"
    code += "os.kill(os.getpid(), signal.SIGTERM) if os.environ['RANK'] == '1' else time.sleep(1)\n"
    code += "open(os.environ['SAVED'], 'w').close()"
    monkeypatch.setenv("SCRIPT", "train.py")
    monkeypatch.setattr(rank_processes, "STOPPED_BY", {signal.SIGTERM})
    monkeypatch.setattr(rank_processes, "send_stop_signals", lambda: None)  # rank 0 has a handler
    monkeypatch.setattr(rank_processes, "FAILURE_GRACE_S", 0.1)
    environments = {rank: {**os.environ, "RANK": str(rank), "SAVED": str(tmp_path / "saved")} for rank in (0, 1)}
    assert rank_processes.run_processes([sys.executable, "-c", code], environments, str(tmp_path)) == 0
    assert capsys.readouterr().out == "stopped by SIGTERM, for which a rank had no handler\n"
    assert (tmp_path / "saved").exists()


def test_of_horovods_ranks_the_one_that_failed_is_to_blame_and_all_end(monkeypatch, tmp_path, capsys):
    """Rank 0 reacts to KILL alone, as when it is stopped (SIGSTOP), and has started a process of its own."""
    code = """if True:
        import os, signal, subprocess, sys, time
        seen = os.environ["SEEN"]
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            sleep = subprocess.Popen(["sleep", "600"], process_group=0)
            with open(seen + ".new", "w") as file:
                print(os.getpid(), sleep.pid, file=file)
            os.rename(seen + ".new", seen)
            time.sleep(600)
        while not os.path.exists(seen):
            time.sleep(0.05)
        sys.exit(5)
    """
    monkeypatch.delenv("SCRIPT", raising=False)
    for name in ("FAILURE_GRACE_S", "END_SIGNAL_GRACE_S"):
        monkeypatch.setattr(rank_processes, name, 0.1)
    environments = {rank: {**os.environ, "RANK": str(rank), "SEEN": str(tmp_path / "seen")} for rank in (0, 1)}
    assert rank_processes.run_processes([sys.executable, "-c", code], environments, str(tmp_path)) == 5
    assert capsys.readouterr().err.startswith("error: rank 1 (pid ")
    for pid in map(int, (tmp_path / "seen").read_text().split()):
        wait_until(lambda pid=pid: has_ended(pid), 10, "the end")


def test_the_port_of_node_0_is_tried_and_found_taken(monkeypatch):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UserError, match=f"MASTER_PORT {port} is taken; choose another one"):
            check_head(Node(1, 0, 1, "127.0.0.1", port, 1))
        check_head(Node(2, 1, 1, "127.0.0.1", port, 1))  # another node finds somebody listening
        monkeypatch.setenv("PORT_IS_CHOSEN", "1")  # which makes it nobody's mistake
        with pytest.raises(PortTakenError, match=f"MASTER_PORT {port} has been taken since") as caught:
            check_head(Node(1, 0, 1, "127.0.0.1", port, 1))
        assert caught.value.status == 75
    check_head(Node(1, 0, 1, "127.0.0.1", port, 1))


SIGNALLED = """
import os, signal, sys
from scripts.launch import processes

def trace(frame, event, argument):
    if frame.f_code.co_name == "run_with_signals" and frame.f_locals.get("process"):
        sys.settrace(None)
        frame.f_trace = None
        signal.raise_signal(signal.SIGUSR1)
    return trace

sent = []
processes.os.kill = lambda pid, number: sent.append(number)
sys.settrace(trace)
assert processes.run_with_signals(["true"], os.environ) == (0, [signal.SIGUSR1])
assert sent == [signal.SIGUSR1], sent
"""


def test_a_signal_that_comes_as_the_process_has_just_started_is_sent_once():
    """A second one would interrupt a script that is saving in its handler."""
    run_command(sys.executable, "-c", SIGNALLED, check=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid"])
def test_another_node_waits_no_longer_than_the_bound(address):
    node = Node(2, 1, 1, address, local.free_port(), 1)
    said = r"node 1 waited 1 s for node 0 at .*is it up, and is MASTER_ADDR right"
    with pytest.raises(MissingNodeError, match=said):
        check_head(node)
    with pytest.raises(UserError, match=r"node 1 waited 1 s for the job's store at .*") as caught:
        wait_for_head(node, f"{address}:9")
    assert caught.value.status == 68, "rejoin.py makes 1 of it, or lost where a node comes back"


def test_a_node_on_node_0s_machine_gives_others_an_address_that_they_reach():
    with socket.create_server(("127.0.0.1", 0)) as store:
        place = f"127.0.0.1:{store.getsockname()[1]}"
        assert wait_for_head(Node(2, 0, 1, "node-a", 29500, 5), place) == "node-a"


@pytest.mark.parametrize("address", ["[fd00::1]", "fd00::1"])
def test_a_node_gets_whole_paths_and_a_bare_address(tmp_path, address):
    """Paths of a script begin at the caller's folder, without GNU's realpath; URLs have addresses in brackets."""
    shown = '"$SCRIPT" "$WORKDIR" "$RUN_DIR" "$MASTER_ADDR"'
    write_program(tmp_path / "python", rf"[ $1 != -m ] || printf '%s\n' {shown}")
    write_program(tmp_path / "realpath", "exit 1")
    own = {"SCRIPT": "a b/train.py", "RUN_DIR": "/runs/mine", "PYTHON": str(tmp_path / "python")}
    own |= {"MASTER_ADDR": address, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [ROOT / "scripts/launch.sh", "ddp"]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=20)
    assert done.stdout.splitlines() == [f"{tmp_path}/a b/train.py", str(tmp_path), "/runs/mine", "fd00::1"]


@pytest.mark.parametrize(
    ("recipe", "stopped_status"), [("ddp", ""), ("ddp", "143"), ("horovod", ""), ("single", ""), ("spawn", "")]
)
@pytest.mark.parametrize("has_option", [True, False])
def test_a_stop_signal_waits_until_python_handles_it(tmp_path, recipe, stopped_status, has_option):
    """Its start may take seconds; env of macOS cannot block signals."""
    source = "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    write_program(tmp_path / "my=python", f"#!{sys.executable} -SE\n{source}\n")
    (tmp_path / "python").symlink_to(tmp_path / "my=python")
    if not has_option:
        write_program(tmp_path / "env", 'case $1 in -*) echo "illegal option" >&2; exit 1; esac')
    masks = {}
    for name in ("python", "my=python"):
        own = {"PYTHON": str(tmp_path / name), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        own["STOPPED_STATUS"] = stopped_status
        done = subprocess.run(["scripts/launch.sh", recipe], cwd=ROOT, env=own, capture_output=True, timeout=20)
        assert (done.returncode, done.stderr) == (0, b"")
        masks[name] = {*map(int, done.stdout.split())}
    assert masks == {"python": {signal.SIGUSR1, signal.SIGTERM} if has_option else set(), "my=python": set()}


@pytest.mark.parametrize("script", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("s*/*.s*h*")))
def test_shell_scripts_are_strict_and_parse(script):
    text = (ROOT / script).read_text()
    if text.startswith("# shellcheck shell=bash\n"):  # sourced into a shell that sets its own options
        assert not os.access(ROOT / script, os.X_OK)
    else:
        assert text.startswith("#!/usr/bin/env bash\n")
        assert "\nset -euo pipefail\n" in text or (script.endswith(".sbatch") and "\nset -u\n" in text)
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True, timeout=10)


@pytest.mark.parametrize("script", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[ds]*/**/*.s*h*")))
def test_shell_scripts_work_in_every_locale_and_in_old_shells(script):
    text = (ROOT / script).read_text()
    fix = "in Turkish, [a-z] has no i: compare in LC_ALL=C, or write [[:lower:]]"
    assert not re.findall(r"=~ .*[aA]-[zZ]", text), fix
    assert not re.findall("&>>", text), "a syntax error in bash 3.2, that of macOS"


class TestALostRaceForThePort:
    """Another process takes MASTER_PORT after the launcher has chosen it."""

    TAKE = """
import itertools, socket, sys
from scripts.launch import local

holder = socket.create_server(("", 0))
ports = itertools.chain([holder.getsockname()[1]], iter(local.free_port, None))
local.free_port = lambda: next(ports)
sys.exit(local.main(["probe", "--nodes", "1", "--nproc-per-node", "1"]))
"""

    @pytest.mark.slow
    def test_the_local_launcher_takes_another_port(self):
        result = run_command(sys.executable, "-c", self.TAKE, check=True)
        assert result.stdout.splitlines()[-1].startswith("probe {")
        assert len(result.errors) == 1
        assert "has been taken since the launcher chose it" in result.errors[0]

    @pytest.mark.parametrize(
        ("statuses", "expected", "jobs"), [((75, 0), 0, 2), ((75, 2), 2, 2), ((1,), 1, 1), ((75,) * 9, 75, 3)]
    )
    def test_which_is_tried_three_times_at_most(self, monkeypatch, statuses, expected, jobs):
        left = list(statuses)
        monkeypatch.setattr(local, "run_job", lambda *_: left.pop(0))
        assert local.main(["ddp", "--nodes", "1", "--nproc-per-node", "1"]) == expected
        assert len(statuses) - len(left) == jobs

    def test_which_is_not_tried_after_a_stop_signal(self, monkeypatch):
        """A script that has written its checkpoint may ask for another start: not of a user who stopped it."""
        jobs = []
        monkeypatch.setattr(local, "run_job", lambda job, *_: jobs.append(job) or job.stop_signals.add(15) or 75)
        assert local.main(["ddp", "--nodes", "1", "--nproc-per-node", "1"]) == 75
        assert len(jobs) == 1

    @pytest.mark.parametrize("statuses", [(75, -9), (75, 2), (2, 75)])
    def test_a_node_that_tells_of_it_counts_before_all_others(self, capsys, statuses):
        job = local.LocalJob()
        job.nodes = [types.SimpleNamespace(returncode=status) for status in statuses]
        assert job.report([0, 1]) == 75
        assert capsys.readouterr().err == ""


def test_a_stop_signal_ends_launch_sh_also_as_the_first_process_of_a_container(tmp_path):
    """The kernel would drop a signal for which it has no handler, and the job would begin all the same."""
    isolate = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if run_command(*isolate, "true", check=False).status:
        pytest.skip("unshare cannot make namespaces here; run this test as root, or allow user namespaces")
    env = write_program(tmp_path / "env", 'kill -TERM 1; exec /usr/bin/env "$@"')  # the first that launch.sh calls
    done = run_command(
        *isolate, "scripts/launch.sh", "single", "--help", check=False, PATH=f"{env.parent}:{os.environ['PATH']}"
    )
    assert (done.status, done.stdout) == (143, "")


def meet(node, output, is_over):
    """Meet the others as a node's agent; write the outcome to a file, and stay, since node 0 serves the store."""
    try:
        with agent.quiet_import():
            from scripts.launch import torch_agent

            store = torch_agent.meet_nodes(node, "job")
        said = f"met by {store}"
    except UserError as error:
        said = str(error)
    except torch.distributed.DistError:
        said = "node 0 has gone"
    output.write_text(said)
    is_over.wait(60)


class TestMeetNodes:
    def meet(self, folder, *places, bound_s=600, at_once=9):
        """Return what the node of each (NNODES, NODE_RANK) says, and their processes.

        The first start at once, and each later one when those have answered; it waits for 2 s.
        """
        port, is_over, started = local.free_port(), support._context.Event(), []
        files = [folder / str(i) for i in range(len(places))]
        have_answered = lambda: all(file.exists() and file.read_text() for file in files[: len(started)])  # noqa: E731
        try:
            for file, (nnodes, rank) in zip(files, places, strict=True):
                if len(started) >= at_once:
                    wait_until(have_answered, 50, "an answer of each node")
                    bound_s = 2
                node = Node(nnodes, rank, 1, "127.0.0.1", port, bound_s)
                started.append(support._context.Process(target=meet, args=(node, file, is_over)))
                started[-1].start()
            wait_until(have_answered, 50, "an answer of each node")
            is_over.set()
            for process in started:
                process.join(30)
        finally:
            for process in started:
                process.kill()
        return [file.read_text() for file in files], started

    def test_all_come(self, tmp_path):
        said, _ = self.meet(tmp_path, (3, 0), (3, 2), (3, 1))
        assert all(text.startswith("met by ") for text in said), said

    def test_two_nodes_of_a_rank_end_all_at_once(self, tmp_path):
        said, started = self.meet(tmp_path, (3, 0), (3, 1), (3, 1))
        assert len(set(said)) == 1
        assert said[0].startswith("NODE_RANK 1 is that of two nodes, ")
        assert all(f"{socket.gethostname()} (pid {process.pid})" in said[0] for process in started[1:])

    def test_a_node_that_comes_after_all_others_is_told_that_its_rank_is_taken(self, tmp_path):
        """Its ranks would wait for --timeout-s, and then blame the network."""
        said, started = self.meet(tmp_path, (2, 0), (2, 1), (2, 1), at_once=2)
        assert all(text.startswith("met by ") for text in said[:2]), said
        assert re.fullmatch(
            r"NODE_RANK 1 of the job at 127\.0\.0\.1:\d+ is taken: "
            rf"{re.escape(socket.gethostname())} \(pid {started[1].pid}\) has started it; end one of the two, .*",
            said[2],
        )

    def test_a_node_whose_rank_is_taken_waits_for_the_end_of_that_job(self, monkeypatch, capsys):
        """A lost node may start again before node 0 notices: to fail at once would use up its restarts."""
        from scripts.launch import torch_agent

        store = torch.distributed.HashStore()

        class Ending(torch.distributed.PrefixStore):
            def check(self, keys):
                if keys == ["1"]:
                    raise torch.distributed.DistError("the connection is closed")
                return super().check(keys)

        monkeypatch.setattr(torch_agent, "TCPStore", lambda *_, **__: store)
        monkeypatch.setattr(torch_agent, "PrefixStore", Ending)
        for key in ("1", "met/1"):
            store.set(f"job/nodes/{key}", "node-b (pid 7)")
        with pytest.raises(
            MissingNodeError, match=r"^the job at 10\.0\.0\.1:29500 has ended, whose NODE_RANK 1 was "
        ):
            torch_agent.meet_nodes(Node(2, 1, 1, "10.0.0.1", 29500, 60), "job")
        assert "is taken: node-b (pid 7) has started it, and this node waits " in capsys.readouterr().err

    def test_two_sizes_of_a_job_end_the_node_that_waits(self, tmp_path):
        said, _ = self.meet(tmp_path, (3, 0), (2, 1))
        assert re.fullmatch(r"NNODES is [23] on one node and [23] on node [01]; give all the same", said[0])
        assert said[1] == said[0]

    def test_a_node_that_does_not_come_is_named(self, tmp_path):
        said, _ = self.meet(tmp_path, (4, 0), (4, 2), bound_s=5)
        assert said[0].startswith("node 0 waited 5 s for node 1, 3 of 4 at 127.0.0.1:")
        assert said[1] == "node 0 has gone" or said[1].startswith("node 2 waited 5 s for node 1, 3 of 4 ")

    def test_another_program_at_the_port_is_no_store(self, monkeypatch, silent_port):
        """Torch sets no limit to the wait for its answer."""
        from scripts.launch import torch_agent

        monkeypatch.setattr(torch_agent, "ANSWER_S", 0.5)
        said = rf"^127\.0\.0\.1:{silent_port} has not answered as a node's store does within 1\.5 s; does "
        with pytest.raises(MissingNodeError, match=said):
            torch_agent.meet_nodes(Node(2, 1, 1, "127.0.0.1", silent_port, 1), "job")

    def test_a_node_that_waits_asks_for_a_few_keys(self, monkeypatch):
        """If each node looked for all others again and again, 1,000 nodes would overload the store of node 0."""
        from scripts.launch import torch_agent

        store, asked = torch.distributed.HashStore(), []

        class Counted(torch.distributed.PrefixStore):
            def check(self, keys):
                asked.append(len(keys))
                return super().check(keys)

        monkeypatch.setattr(torch_agent, "TCPStore", lambda *_, **__: store)
        monkeypatch.setattr(torch_agent, "PrefixStore", Counted)
        for rank in set(range(1000)) - {7, 900}:
            store.set(f"job/nodes/{rank}", "there")
        for address, hint in (("10.0.0.1", ""), ("127.0.0.1", r" \(no other machine reaches 127\.0\.0\.1\)")):
            asked.clear()
            said = rf"^node 5 waited 1 s for node 7, 900 of 1000 at {address}:29500; .* is its NODE_RANK right\?"
            with pytest.raises(MissingNodeError, match=f"{said}{hint}$"):
                torch_agent.meet_nodes(Node(1000, 5, 1, address, 29500, 1), "job")
        assert max(asked[:8]) == 1
        assert sum(asked) < 5 * 1000
        for rank in (7, 900):
            store.set(f"job/nodes/{rank}", "there")
        with pytest.raises(MissingNodeError, match=r"^node 5 waited 1 s for node 0 of 1000 at "):
            torch_agent.meet_nodes(Node(1000, 5, 1, "10.0.0.1", 29500, 1), "job")
        torch_agent.meet_nodes(Node(1000, 0, 1, "127.0.0.1", local.free_port(), 1), "job")
        asked.clear()
        torch_agent.meet_nodes(Node(1000, 5, 1, "127.0.0.1", local.free_port(), 1), "job")
        assert sum(asked) <= 3

    def test_many_nodes_that_do_not_come_are_a_short_line(self, monkeypatch):
        from scripts.launch import torch_agent

        store = torch.distributed.HashStore()
        monkeypatch.setattr(torch_agent, "TCPStore", lambda *_, **__: store)
        with pytest.raises(MissingNodeError, match=r"^node 0 waited 1 s for node 1-511 of 512 at "):
            torch_agent.meet_nodes(Node(512, 0, 1, "127.0.0.1", local.free_port(), 1), "job")


def test_an_echo_outlives_a_lack_of_files():
    """511 nodes may connect at once; those of them that no file is left for are answered later."""
    here, there = socket.socketpair()
    answers = [OSError(errno.EMFILE, "Too many open files"), (there, ""), OSError(errno.EBADF, "it is closed")]
    server = types.SimpleNamespace(listener=types.SimpleNamespace(accept=Mock(side_effect=answers)), answer=Mock())
    echo.Echo.serve(server)
    wait_until(lambda: server.answer.mock_calls, 10, "an answer")
    server.answer.assert_called_once_with(there)
    for end in (here, there):
        end.close()


def test_an_echo_answers_only_who_knows_the_word():
    answering = echo.Echo("127.0.0.1", "the word")
    greeting = bytes(echo.GREETING_BYTES)
    for word, answer in (("the word", echo.MAC_BYTES), ("another", 0)):
        with socket.create_connection(("127.0.0.1", answering.port), timeout=20) as client:
            client.sendall(greeting + echo.mac(word, greeting))
            assert len(client.recv(echo.MAC_BYTES)) == answer
    answering.close()


def test_an_echo_that_does_not_know_the_word_is_another_program():
    """It greets with a proof of another word."""
    server = socket.create_server(("127.0.0.1", 0))

    def pretend():
        connection, _ = server.accept()
        with connection:
            greeting = echo.read_exactly(connection, echo.GREETING_BYTES + echo.MAC_BYTES)
            connection.sendall(echo.mac("another", greeting))
            connection.recv(1)  # until the other side has closed

    threading.Thread(target=pretend, daemon=True).start()
    found = echo.try_port("127.0.0.1", server.getsockname()[1], "the word", size=0)
    assert found == {"stage": "greet", "why": "another program answers"}
    server.close()


def test_nodes_that_are_killed_at_the_bound_are_not_called_failed(monkeypatch, capfd):
    """This holds even if they are dead before the launcher looks at them again."""
    monkeypatch.setattr(local, "STOP_GRACE_S", 0.0)
    job = local.LocalJob()
    kill = local.end_sessions
    monkeypatch.setattr(local, "end_sessions", lambda pids: [kill(pids), *(node.wait(30) for node in job.nodes)])
    job.start(["bash", "-c", "trap '' TERM; echo up; sleep 60 & wait; wait"], {**os.environ})
    wait_until(lambda: "up" in capfd.readouterr().out, 30, lambda: "bash has not begun")
    job.record_stop(signal.SIGTERM, None)
    assert job.wait() == 1
    assert capfd.readouterr().err == "error: still running 0 s after the signal; killed\n"


def sleep_in(mark, shell):
    """Start a shell that starts a sleep, which leaves its process id in a file; return both."""
    own = {"stdin": subprocess.DEVNULL, "start_new_session": True, "env": {**os.environ, "FILE": str(mark)}}
    process = subprocess.Popen(["bash", "-c", shell], **own)
    wait_until(lambda: mark.exists() and mark.read_text(), 20, "the sleep")
    return process, psutil.Process(int(mark.read_text()))


SLEEP = "sh -c 'echo $$ >$FILE; exec sleep 60'"


@pytest.mark.parametrize("shell", [f"set -m; {SLEEP} &", f"setsid {SLEEP} & wait"], ids=["group", "session"])
def test_what_a_rank_has_started_ends_with_it(tmp_path, shell):
    """As a compiler in a process group of its own, and the ranks of a torchrun that a script calls."""
    process, sleep = sleep_in(tmp_path / "pid", shell)
    try:
        if "setsid" not in shell:
            assert process.wait(20) == 0
        processes.end_sessions([process.pid])
        wait_until(lambda: has_ended(sleep), 10, "the end of the sleep")
    finally:
        process.wait(20)
        with contextlib.suppress(psutil.NoSuchProcess):
            sleep.kill()


def test_a_volume_that_is_not_this_users_is_one_line(monkeypatch, tmp_path):
    """A driver that ignores fsGroup mounts such a volume, for a recipe's record or a script's folder."""
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("SCRIPT", str(tmp_path / "train.py"))
    monkeypatch.setenv("RUN_DIR", "/runs/mine")
    refusal = PermissionError(errno.EACCES, "Permission denied", "/runs/mine")
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=refusal))
    words = f"cannot make /runs/mine: Permission denied; give it to user {os.getuid()} (Kubernetes: by an access"
    with refused(words):
        script.check_job()
    with refused(words), as_user_error("make", tmp_path):
        raise refusal


def test_where_a_script_runs_and_writes_by_default(monkeypatch, tmp_path):
    """`make` calls its launcher in this repository."""
    for name in ("WORKDIR", "RUNS_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    assert (script.read_workdir(), script.runs_dir()) == (tmp_path, ROOT / "runs")
    for name in ("WORKDIR", "RUNS_DIR"):
        monkeypatch.delenv(name)
    assert (script.read_workdir(), script.runs_dir()) == (tmp_path, ROOT / "runs")
    shown = "import os, sys; print(os.getcwd())"
    start = Command(str(ROOT / "scripts/dev/python.sh"), "-c", shown, cwd=tmp_path, PYTHON=sys.executable)
    assert start.wait(check=True).stdout == f"{ROOT}\n"


@pytest.mark.parametrize("name", ["", "mine"])
def test_a_file_in_place_of_the_runs_folder_is_one_line(monkeypatch, tmp_path, name):
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match=rf"^cannot make {tmp_path}/runs.*: (File exists|Not a directory)$"):
        script.make_run_dir(tmp_path / "train.py", name)


def test_a_run_folder_that_another_user_keeps_private_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    for owner, name, call in (
        (Path, "iterdir", lambda: script.make_run_dir(tmp_path / "train.py", "mine")),
        (os, "open", lambda: script.lock_run_dir(tmp_path / "mine")),
    ):
        with monkeypatch.context() as patch:  # root may read everything
            patch.setattr(owner, name, Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
            with pytest.raises(UserError, match=rf"^cannot use {tmp_path}/mine: Permission denied; give it to "):
                call()


def test_a_file_system_without_locks_is_no_obstacle(monkeypatch, tmp_path):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    script.lock_run_dir(tmp_path)


def test_a_stop_that_comes_before_the_command_is_started_reaches_it(monkeypatch):
    start = subprocess.Popen

    def start_late(*words, **how):
        signal.raise_signal(signal.SIGTERM)
        return start(*words, **how)

    monkeypatch.setattr(subprocess, "Popen", start_late)
    status, received = processes.run(["sleep", "60"], dict(os.environ))
    assert (status, received) == (128 + signal.SIGTERM, [signal.SIGTERM])


def test_a_command_that_ends_while_its_stop_is_noted_keeps_its_status():
    """The note may go to a slow file server."""
    own = os.getpid()
    code = f"import os, sys, time; os.kill({own}, {signal.SIGTERM:d}); time.sleep(0.2); sys.exit(3)"
    ended = processes.run([sys.executable, "-c", code], dict(os.environ), on_stop=lambda: time.sleep(1))
    assert ended == (3, [signal.SIGTERM])


def test_a_command_learns_which_process_it_ends_with():
    assert processes.run(["sh", "-c", 'test "$LAUNCHER_PID" = "$PPID"'], os.environ) == (0, [])


def test_two_scripts_at_once_in_one_folder_are_refused(tmp_path):
    """A lock belongs to who has opened the folder, and ends with that process."""
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    words = f"^another job runs in {tmp_path}; wait for its end, or choose another NAME$"
    with pytest.raises(UserError, match=words):
        script.lock_run_dir(tmp_path)
    os.close(other)
    script.lock_run_dir(tmp_path)
    with pytest.raises(UserError, match=words):
        script.lock_run_dir(tmp_path)


@pytest.mark.slow
def test_what_has_passed_with_the_same_file_is_left_out(tmp_path):
    """The file is outside of the checkout, and no argument names the tests' folder, as with `make test`."""
    env = {"ONCE": str(tmp_path / "passed"), "PYTHON": sys.executable}
    # To collect all tests takes half a minute.
    others = ("--ignore-glob=tests/[!u]*", "--ignore-glob=tests/unit/test_[!w]*")
    words = ("scripts/dev/test.sh", "quick", "--numprocesses", "0", *others, "-k", "test_wire_sums")
    passed = []
    for more in ("and by_hand", ""):
        done = run_command(*words[:-1], f"{words[-1]} {more}", "-v", check=True, **env)
        passed.append(set(re.findall(r"::(\w+)\S* PASSED", done.stdout)))
    assert passed[0] == {"test_figures_by_hand"}
    assert passed[1]
    assert not passed[0] & passed[1]


IN_FOREGROUND = """
import signal, subprocess, sys, time
from scripts.launch.processes import run_in_foreground
child = '''
import os, signal, sys, time
def end(number, frame):
    time.sleep(1)  # subprocess.run() waits for 0.25 s
    os.write(1, b"ended")
    sys.exit()
signal.signal(signal.SIGINT, end)
os.write(1, b"started, ")
time.sleep(60)
'''
try:
    run_in_foreground([sys.executable, "-c", child])
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_command_has_time_to_end_after_ctrl_c_or_its_parents_end(number, status):
    job = Command(sys.executable, "-c", IN_FOREGROUND)
    wait_until(lambda: job.text == "started, ", 20, lambda: job.text)
    if number == signal.SIGINT:
        os.killpg(job.process.pid, number)
    else:
        job.process.send_signal(number)
    assert job.wait().status == status
    assert job.text == "started, ended"
