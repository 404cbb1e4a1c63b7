"""Which network NCCL says it uses: recorded logs, for no GPU is here to write one, and what becomes of FABRIC."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.common import loop
from recipes.common.errors import UserError
from recipes.common.world import transport
from recipes.common.world.peers import Peers
from recipes.common.world.places import Place
from scripts.launch import script
from scripts.launch.local import free_port
from tests.support import Command

HEAD = "n1:4242:4242 [0] NCCL INFO "
LOGS = {
    "IB": """cudaDriverVersion 13000
NCCL version 2.30.7+cuda13.0
NCCL_SOCKET_IFNAME set by environment to =eth0
Bootstrap : Using eth0:10.0.0.1<0>
NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB eth0:10.0.0.1<0>
Initialized NET plugin IB
Assigned NET plugin IB to comm
Using network IB
ncclCommInitRankConfig comm 0x55d rank 0 nranks 16 cudaDev 0 busId 1b000 commId 0x9 - Init COMPLETE""",
    "Socket": """NCCL version 2.30.7+cuda13.0
Failed to open libibverbs.so[.1]
NET/IB : No device found.
NET/Socket : Using [0]eth0:10.0.0.1<0>
Using network Socket""",
    "AWS Libfabric": """NCCL version 2.26.5+cuda12.9
NET/OFI Initializing aws-ofi-nccl 1.14.0
Using network AWS Libfabric""",
    None: "NCCL version 2.30.7+cuda13.0\nBootstrap : Using eth0:10.0.0.1<0>",
}
"""Logs by the network that they name, after the sources of NCCL and aws-ofi-nccl."""


def log_of(network):
    return "".join(f"{HEAD}{line}\n" for line in LOGS[network].splitlines())


@pytest.fixture(autouse=True)
def log(tmp_path, monkeypatch):
    """Keep the log in this test's folder, and restore NCCL's variables."""
    monkeypatch.setattr(transport, "_log", None)
    monkeypatch.setattr(transport.tempfile, "tempdir", str(tmp_path))
    for name in (*transport.VARIABLES, "FABRIC"):
        monkeypatch.setenv(name, "")  # so that changes by a test are undone
        monkeypatch.delenv(name)


@pytest.mark.parametrize("network", LOGS)
def test_the_log_names_the_network(network):
    assert transport.find_network(log_of(network)) == network


def test_the_log_is_of_this_process_and_goes_once_it_has_been_read(tmp_path):
    transport.log_nccl()
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT")
    path = Path(os.environ["NCCL_DEBUG_FILE"])
    assert path.stat().st_mode & 0o77 == 0
    assert transport.read_network() is None, "no communicator yet"
    path.write_text(log_of("IB"))
    assert transport.read_network() == "IB"
    assert list(tmp_path.iterdir()) == []
    assert not os.environ.keys() & set(transport.VARIABLES)
    assert transport.read_network() is None


def test_the_log_goes_where_all_ranks_are_on_one_host(job, tmp_path, monkeypatch):
    monkeypatch.setattr(TwoHosts, "gather_objects", lambda self, value: [value, value])
    assert [place.host for place in loop.gather_places(job)] == ["n1", "n1"]
    assert job.peers.sums == 0
    assert list(tmp_path.iterdir()) == []
    assert not os.environ.keys() & set(transport.VARIABLES)


@pytest.mark.parametrize("name", transport.VARIABLES)
def test_a_log_that_the_user_asks_for_stays_the_users(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "mine")
    transport.log_nccl()
    assert {key: os.environ.get(key) for key in transport.VARIABLES if os.environ.get(key)} == {name: "mine"}
    assert list(tmp_path.iterdir()) == []


class TwoHosts(Peers):
    """Rank 0 on n1 and rank 1 on n2; an all-reduce makes NCCL write its log."""

    network, sums = "IB", 0

    def gather_objects(self, value):
        return [value, replace(value, host="n2") if isinstance(value, Place) else value]

    def sum_tensor(self, tensor):
        self.sums += 1
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(log_of(self.network))


@pytest.fixture
def job(monkeypatch):
    """Return a job of two ranks with one GPU each, whose record cannot be opened."""
    monkeypatch.setattr(loop, "place_of", lambda _: Place("n1", "H100", 0))

    def open_run(args, recipe, places, check):
        raise UserError(f"open_run {[place.network for place in places]}")

    monkeypatch.setattr(loop, "open_run", open_run)
    transport.log_nccl()
    args = SimpleNamespace(may_start_from_file=False)
    return SimpleNamespace(args=args, recipe="ddp", device=torch.device("cpu"), peers=TwoHosts("cpu"))


@pytest.mark.parametrize("is_known", [False, True])
def test_ranks_learn_it_before_they_train(job, is_known):
    """DDP has used NCCL by then; if nothing has, an all-reduce does."""
    if is_known:
        job.peers.sum_tensor(None)
    with pytest.raises(UserError, match=r"open_run \['IB', 'IB'\]"):
        loop.begin_run(job)
    assert job.peers.sums == 1


@pytest.mark.parametrize(
    ("fabric", "network", "said"),
    [
        ("ib", "Socket", "FABRIC=ib, and NCCL uses Socket, which is TCP, on n1, n2; see docs/site.md"),
        ("roce", "Socket", "FABRIC=roce, and NCCL uses Socket"),
        ("efa", "Socket", "FABRIC=efa, and NCCL uses Socket"),
        ("ib", "IB", "open_run"),
        ("roce", "IB", "open_run"),
        ("efa", "AWS Libfabric", "open_run"),
        ("auto", "Socket", "open_run"),
        ("tcp", "Socket", "open_run"),
        ("", "Socket", "open_run"),
    ],
)
def test_a_fabric_that_was_asked_for_is_not_tcp(job, monkeypatch, fabric, network, said):
    monkeypatch.setenv("FABRIC", fabric)
    job.peers.network = network
    with pytest.raises(UserError) as error:
        loop.begin_run(job)
    assert str(error.value).startswith(said)


def test_within_a_host_no_network_is_used(job, monkeypatch):
    monkeypatch.setenv("FABRIC", "ib")
    places = [Place("n1", "H100", i, "Socket") for i in range(8)]
    found = transport.gather_networks(places, job.device, job.peers)
    assert [place.network for place in found] == [None] * 8


SCRIPT = """
import contextlib, os, time
with contextlib.suppress(BrokenPipeError), open(os.environ["NCCL_DEBUG_FILE"], "w") as log:
    log.write("n1:7:7 [0] NCCL INFO Using network Sock")
    log.flush()
    time.sleep(0.3)
    log.write("et\\n" + 4096 * "n1:7:7 [0] NCCL INFO Channel 00/02 : 0 1\\n")
time.sleep(0.3 if os.environ["FABRIC"] == "auto" else 60)
print("trained")
"""
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}


def start_script(folder, launcher, source, **env):
    """Start a script as the first rank of two nodes: by an agent, or as srun, submitit and mpirun start ranks."""
    if not (folder / "train.py").exists():  # otherwise another start may be reading it
        (folder / "train.py").write_text(source)
    own = {"SCRIPT": str(folder / "train.py"), "WORKDIR": str(folder), "RUN_DIR": str(folder / "run")}
    if launcher == "agent":
        own |= {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return Command(sys.executable, "-m", "scripts.launch.agent", "spawn", **own, **env)
    return Command(sys.executable, "-m", "scripts.launch.script", own["SCRIPT"], **{**own, **RANK, **env})


@pytest.mark.parametrize("launcher", ["agent", "rank"])
def test_a_scripts_network_is_said_by_its_launcher_and_tcp_is_no_fabric(tmp_path, launcher):
    """The script plays NCCL; an unfinished line is not read, and NCCL's later lines do not stop the script."""
    jobs = [start_script(tmp_path, launcher, SCRIPT, FABRIC=fabric) for fabric in ("auto", "ib")]
    goes_on, refused = (job.wait(timeout_s=60) for job in jobs)
    said = f"{os.uname().nodename}: NCCL over Socket\n"
    assert (goes_on.status, goes_on.stdout) == (0, f"{said}trained\n"), goes_on.stderr
    assert (refused.status, refused.stdout) == (2, said)
    error, *others = refused.errors
    assert error.startswith("error: FABRIC=ib, and NCCL uses Socket, which is TCP, on ")
    assert [line.startswith("error: rank 0 (pid ") for line in others] == [True] * (launcher == "agent")
    assert refused.stderr.count("\n") == 1 + len(others)
    jobs[1].wait_for_gone(10)  # the script has ended with it


def test_only_the_first_rank_of_a_node_is_asked_and_only_between_nodes(tmp_path):
    source = "import os; print(os.environ.get('NCCL_DEBUG_FILE', 'as it is'))"
    rows = (
        {"LOCAL_RANK": "1", "FABRIC": "ib"},
        {"LOCAL_WORLD_SIZE": "2", "FABRIC": "ib"},
        {"FABRIC": ""},
        {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "mine", "FABRIC": "ib"},
    )
    jobs = [start_script(tmp_path, "rank", source, **env) for env in rows]
    assert [job.wait(timeout_s=60).stdout for job in jobs] == [*["as it is\n"] * 3, "mine\n"]


ENDS = {"os.kill(os.getpid(), 10)": -10, "os.abort()": -6, "exit(137)": 137}


@pytest.mark.parametrize(("end", "status"), ENDS.items())
def test_the_process_around_a_script_ends_as_the_script_does(tmp_path, end, status):
    job = start_script(tmp_path, "rank", f"import os; os.environ['NCCL_DEBUG_FILE']; {end}", FABRIC="auto")
    assert job.wait(timeout_s=60).status == status


def test_a_script_with_a_process_around_it_has_a_group_of_its_own(tmp_path):
    """mpirun signals a rank's whole group, and the process around the script passes each signal on once."""
    source = "import os; print(os.getpgid(0) == os.getpid() != os.getpgid(os.getppid()))"
    job = start_script(tmp_path, "rank", source, FABRIC="auto")
    assert job.wait(timeout_s=60).stdout == "True\n"


def test_without_a_script_its_launcher_says_how_to_call_it(capsys):
    assert script.main([]) == 2
    assert capsys.readouterr().err.startswith("error: no script; usage: python -m scripts.launch.script ")
