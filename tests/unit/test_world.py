"""What ranks send one another: values, and never code; their shares of samples, and where they are."""

import contextlib
import dataclasses
import os
import pickle
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from recipes.common.data.workers import WorkerError
from recipes.common.errors import UserError
from recipes.common.nonfinite import NonFiniteError
from recipes.common.process.ranks import Ranks
from recipes.common.process.rendezvous_errors import MissingNodeError
from recipes.common.world import devices
from recipes.common.world import world as world_module
from recipes.common.world.agreement import run_on_all_ranks, shard
from recipes.common.world.devices import choose_device, choose_devices
from recipes.common.world.peers import Peers
from recipes.common.world.places import Place, describe, place_of, shorten
from recipes.common.world.world import MANY, NO_PICKLE, World, connect, limit_connecting
from recipes.horovod import train as horovod
from scripts.launch.local import free_port


@pytest.fixture
def world():
    """A world of one rank, whose values are nevertheless converted to bytes and back."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), dist.group.WORLD, None)
    dist.destroy_process_group()


def test_values_arrive_as_they_were(world):
    values = [None, 3, "text", [("a/b.png", 1)], {"x": (1.5, True)}, Path("runs/a"), Place("n1", "H100", 3), 2.5]
    for value in values:
        assert world.gather_objects(value) == [value]
    content = {"model": {"weight": torch.arange(3.0)}, "step": 7}
    received = [None]
    dist.gather_object(content, received, dst=0, **NO_PICKLE)
    assert torch.equal(received[0]["model"]["weight"], content["model"]["weight"])
    [error] = world.gather_objects(UserError("wrong; fix it", on_every_node=True))
    assert (type(error), str(error), error.on_every_node) == (UserError, "wrong; fix it", True)
    [error] = world.gather_objects(NonFiniteError(3, True, "lower --lr", [1]))
    assert (type(error), error.step, error.hint, error.status) == (NonFiniteError, 3, "lower --lr", 1)


def test_an_error_of_another_class_arrives_with_its_status(world):
    """Such as a worker's, which the next launch may not have: status 1."""
    world = dataclasses.replace(world, watch=lambda name: contextlib.nullcontext())

    with pytest.raises(UserError, match=r"^a worker hangs$") as caught:
        run_on_all_ranks(Mock(side_effect=WorkerError("a worker hangs")), world)
    assert (caught.value.status, caught.value.on_one_rank) == (1, False)


class Order:
    """An object that runs a command in whoever unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_what_another_rank_sends_runs_no_code(world, tmp_path):
    with pytest.raises(pickle.UnpicklingError, match=r"another rank sent posix\.mkdir"):
        world.gather_objects(Order(str(tmp_path / "made")))
    assert not (tmp_path / "made").exists()


@pytest.mark.skipif(not NO_PICKLE, reason="this torch unpickles what it gathers; torch 2.14 does not")
def test_what_torch_gathers_runs_no_code(world, tmp_path):
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        dist.gather_object(Order(str(tmp_path / "made")), [None], dst=0, **NO_PICKLE)
    assert not (tmp_path / "made").exists()


@pytest.fixture
def port(monkeypatch):
    """Return the port at which this process, as rank 0, serves the store."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return port


@pytest.mark.usefixtures("port")
def test_a_rank_that_does_not_come_is_no_refusal():
    """The next start may find it, as when agents wait for each other."""
    said = r"^rank 0 waited 3 s for ranks 1, 3 of 4 at 127\.0\.0\.1:\d+; are they up, and are their ranks right\?$"

    def come():
        with contextlib.suppress(UserError):
            connect("cpu", Ranks(2, 0, 4, 1), timedelta(seconds=20))

    other = threading.Thread(target=come)
    other.start()
    with pytest.raises(MissingNodeError, match=said) as caught:
        connect("cpu", Ranks(0, 0, 4, 1), timedelta(seconds=3))
    assert caught.value.status == 1
    del caught  # and the store with it
    other.join()


@pytest.mark.usefixtures("port")
def test_ranks_that_come_as_the_time_runs_out_are_not_named_as_missing(monkeypatch):
    exchange = world_module._exchange_kinds

    def arrive_late(store, *others):
        store.add("rank/1", 1)  # and it has not been counted yet
        return exchange(store, *others)

    monkeypatch.setattr(world_module, "_exchange_kinds", arrive_late)
    with pytest.raises(MissingNodeError, match=r"^rank 0 cannot meet the others at .*\(wait timeout after "):
        connect("cpu", Ranks(0, 0, 2, 1), timedelta(seconds=1))


@pytest.mark.usefixtures("port")
def test_a_rank_that_two_processes_have_ends_all_of_them():
    """In spawn, two nodes may have one --node-rank. Gloo would wait for the rank that is missing."""

    def come(rank):
        with pytest.raises(UserError) as caught:
            connect("cpu", Ranks(rank, 0, 3, 1), timedelta(seconds=20))
        return str(caught.value), caught.value.status

    with ThreadPoolExecutor(3) as pool:
        said = f"two processes are rank 1, one of them on {socket.gethostname()}; number nodes and ranks from 0"
        assert set(pool.map(come, (0, 1, 1))) == {(said, 2)}


def test_a_second_process_of_a_rank_in_a_running_job_says_so_at_once(port, monkeypatch):
    """The others have met without it: none of them would print its error."""
    monkeypatch.setattr(world_module, "make_groups", lambda store, *_: store)
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(lambda rank: connect("cpu", Ranks(rank, 0, 2, 1), timedelta(seconds=20)), (0, 1)))
    with pytest.raises(MissingNodeError, match=rf"^the job at .*:{port} already has a rank 1; ") as caught:
        connect("cpu", Ranks(1, 0, 2, 1), timedelta(seconds=20))
    assert caught.value.on_every_node
    del met  # and the store with it


def test_ranks_that_an_agent_starts_again_are_no_second_ones(monkeypatch):
    """They may find what the earlier ones have left in its store."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.HashStore()
    for _ in range(2):
        found = world_module._exchange_kinds(store, Ranks(0, 0, 1, 1), "cpu", "rank 0")
        assert found == {"cpu": "rank 0"}


def test_ranks_that_torchrun_starts_again_find_nothing_of_earlier_ones(port, monkeypatch):
    """Such as the address of a rank that has ended: its agent keeps the store."""
    agents_store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(world_module, "make_groups", lambda store, *_: store)

    def come(rank):
        return connect("cpu", Ranks(rank, rank, 2, 2), timedelta(seconds=20))[1]

    for attempt in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with ThreadPoolExecutor(2) as pool:
            store, other = pool.map(come, range(2))
        assert not other.check(["address"])
        store.set("address", attempt)
        assert other.get("address") == attempt.encode()
    del agents_store


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Gloo connectFullMesh failed with [/gloo/tcp/pair.cc:152] timed out, remote=[127.0.1.1]:26", "timed out"),
        ("[/pair.cc:152] timed out connecting: SO_ERROR: Refused, remote=[127.0.1.1]:26", "timed out .*: Refused"),
        ("Gloo connectFullMesh failed with ... Connection closed by peer", None),
        ("another fault", None),
    ],
)
@pytest.mark.usefixtures("port")
def test_a_rank_that_cannot_connect_to_another_names_the_address(monkeypatch, said, reason):
    """Gloo uses the address of a host's own name, 127.0.1.1 on Debian, if nothing names an interface."""
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=RuntimeError(said)))
    words = rf"cannot connect to the others \({reason}, remote=\[127.0.1.1\]:26\); set GLOO_SOCKET_IFNAME to "
    error, words = (MissingNodeError, words) if reason else (RuntimeError, f"^{re.escape(said)}$")
    with pytest.raises(error, match=words):
        connect("cpu", Ranks(0, 0, 1, 1), timedelta(seconds=9))


class CountingStore(dist.Store):
    """A store of threads, which counts what each of them reads."""

    def __init__(self, values, has_new):
        super().__init__()
        self.values, self.has_new, self.reads, self.read_bytes = values, has_new, 0, 0

    def set(self, key, value):
        with self.has_new:
            self.values[key] = value
            self.has_new.notify_all()

    def wait(self, keys, timeout=None):
        with self.has_new:
            assert self.has_new.wait_for(lambda: self.values.keys() >= {*keys}, 30)

    def get(self, key):
        self.wait([key])
        self.reads, self.read_bytes = self.reads + 1, self.read_bytes + len(self.values[key])
        return self.values[key]


@pytest.mark.parametrize("size", [MANY, MANY + 1])
def test_ranks_of_large_jobs_connect_with_those_with_whom_they_exchange_data(monkeypatch, size):
    """Each of 8,192 ranks would read half a gigabyte of addresses from the store."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")  # and afterwards as before
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    for name in ("new_group", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, size)]))
    monkeypatch.setattr(world_module, "_exchange_kinds", lambda store, ranks, kind, text: {kind: text})
    connect("cpu", Ranks(0, 0, size, 1), timedelta(seconds=9))
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == ("1" if size > MANY else None)
    values, has_new, count = {}, threading.Condition(), 16
    stores = [CountingStore(values, has_new) for _ in range(count)]

    def exchange(rank):
        group = dist.ProcessGroupGloo(stores[rank], rank, count, timedelta(seconds=30))
        total = torch.ones(1)
        group.allreduce([total]).wait()
        group.broadcast([total]).wait()
        group.barrier().wait()
        return group, total.item()

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(exchange, range(count)))
    assert {total for _, total in found} == {count}
    if size > MANY:
        assert max(store.reads for store in stores) <= 2 + 2 * 4  # a ring, and trees of 2^4 ranks
        assert max(map(len, values.values())) < 200
    else:
        assert {store.reads for store in stores} == {count}
        assert min(map(len, values.values())) > 8 * count


def test_the_store_that_rank_0_serves_on_one_machine_is_out_of_others_reach(port):
    """In spawn, under mpirun, and in the rounds of an elastic job."""
    connect("cpu", Ranks(0, 0, 1, 1), timedelta(seconds=20))
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=10)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("local_rank", "says"), [("0", True), ("1", False)])
def test_gloo_may_not_connect_for_five_time_outs(monkeypatch, capfd, local_rank, says):
    """It does if another rank has ended after it stored its address."""
    ended = threading.Event()
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(os, "_exit", lambda status: ended.set() if status == 1 else None)
    monkeypatch.setattr(world_module, "SLACK_S", 0.0)
    with limit_connecting(3, timedelta(seconds=0.05), "connection_error"):
        assert ended.wait(20)
    reason = r"\(no answer within 0\.1 s; if another rank has ended, see its error\); set GLOO_"
    line = rf"error: rank 3 on .* cannot connect .* {reason}.*\n"
    assert re.fullmatch(line if says else "", capfd.readouterr().err)


def test_a_rank_does_not_wait_forever_for_a_program_that_is_no_store(monkeypatch, capfd):
    """Torch sets no limit to the wait for its answer."""
    monkeypatch.setattr(world_module, "SLACK_S", 0.0)
    listener = socket.create_server(("127.0.0.1", 0))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}.items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    ended = []

    def end(status):
        ended.append(status)
        for _ in range(2):  # after the one that only tried whether anyone listens
            listener.accept()[0].close()  # it frees the thread that would have ended with the process

    monkeypatch.setattr(os, "_exit", end)
    with listener, pytest.raises(MissingNodeError):
        connect("cpu", Ranks(1, 0, 2, 1), timedelta(seconds=0.5))
    assert ended == [1]
    assert capfd.readouterr().err.startswith("error: rank 1 cannot meet the others at 127.0.0.1:")


@pytest.mark.parametrize("address", ["127.0.0.1", "nowhere.invalid", 64 * "x"])
@pytest.mark.usefixtures("port")
def test_a_rank_that_does_not_reach_rank_0_prints_no_frames(monkeypatch, capfd, address):
    """Torch itself would print some 40 lines of its C++ stack."""
    monkeypatch.setenv("MASTER_ADDR", address)
    with pytest.raises(MissingNodeError, match=rf"^rank 1 cannot meet the others at {address}:\d+ \(.*\); is "):
        connect("cpu", Ranks(1, 0, 2, 1), timedelta(seconds=0.5))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("on_one_rank", "left"), [(False, ["world"]), (True, [])])
def test_a_rank_of_horovod_that_fails_alone_waits_for_no_other(monkeypatch, on_one_rank, left):
    bounds = ("HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *bounds):
        monkeypatch.setenv(name, "0")  # and afterwards as before
    for name in bounds:
        monkeypatch.delenv(name)
    found = []
    counts = {"size": lambda: 2, "rank": lambda: 0, "local_rank": lambda: 0, "local_size": lambda: 2}
    hvd = SimpleNamespace(init=bool, **counts)
    fail = Mock(side_effect=UserError("wrong", on_one_rank=on_one_rank))
    for name, value in {"hvd": hvd, "Stop": bool, "join_world": str, "train": fail}.items():
        monkeypatch.setattr(horovod, name, value)
    monkeypatch.setattr(horovod, "leave_world", lambda world: found.append("world"))
    with pytest.raises(UserError, match="wrong"):
        horovod.main(["--timeout-s", "90"])
    assert found == left
    assert [os.environ[name] for name in bounds] == ["30", "90"], "else its ranks wait for ever"


@pytest.mark.parametrize(("on_one_rank", "left"), [(False, ["world"]), (True, [])])
def test_a_rank_that_fails_alone_waits_for_no_other(monkeypatch, on_one_rank, left):
    found = []
    monkeypatch.setattr(world_module, "join_world", lambda *_: "world")
    monkeypatch.setattr(world_module, "leave_world", found.append)
    with pytest.raises(UserError, match="wrong"), world_module.connected_world(None, None):
        raise UserError("wrong", on_one_rank=on_one_rank)
    assert found == left


def test_every_world_of_several_ranks_exchanges_by_itself():
    """What it does not override would keep the value of its own rank, without an error."""
    for kind in (World, horovod.World):
        methods = {name for name in vars(Peers) if not name.startswith("_")}
        assert methods == {name for name in methods if name in vars(kind)}


def test_a_process_of_several_gpus_has_those_of_its_place(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = [choose_device("auto", Ranks(rank, rank, 2, 2), devices_per_rank=2) for rank in range(2)]
    assert found == [torch.device("cuda", 0), torch.device("cuda", 2)]
    with pytest.raises(UserError, match=r"3 processes on \S+ need 2 GPUs each, 4 visible; start at most 2 "):
        choose_device("auto", Ranks(0, 0, 3, 3), devices_per_rank=2)


def test_gpus_are_counted_when_one_is_in_use(monkeypatch):
    """Before, torch counts what the driver lists; of several parts of GPUs (MIG), a process can use one."""
    counts = [2, 1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counts[0])
    monkeypatch.setattr(devices, "start_gpu", lambda device: counts.pop(0))
    assert choose_devices("auto") == [torch.device("cuda", 0)]


def test_a_gpu_that_does_not_work_is_not_replaced_by_the_cpu_unasked(monkeypatch):
    said = "CUDA call failed lazily with error: invalid\n\nIt was called at:"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", Mock(side_effect=torch.cuda.DeferredCudaCallError(said)))
    with pytest.raises(UserError, match=r"^cuda:0 on \S+ does not work: CUDA call failed .*: invalid; see `make"):
        choose_devices("auto")
    assert choose_devices("cpu") == [torch.device("cpu")]


class TestShares:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
    @pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 360])
    def test_shares_are_disjoint_whole_and_even(self, world_size, count):
        indices = torch.arange(count) * 3
        shares = [shard(indices, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat(shares), indices)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("places", "lines"),
    [
        ([Place("a", "CPU")], ["rank 0 on a: CPU"]),
        ([Place("a", "CPU")] * 2 + [Place("b", "CPU")], ["ranks 0-1 on a: CPU", "rank 2 on b: CPU"]),
        ([Place("a", "H200", i) for i in range(4)], ["ranks 0-3 on a: cuda:0-3 H200"]),
        ([Place("a", "H200", 1), Place("a", "H200", 0)], ["ranks 0-1 on a: cuda:1,0 H200"]),
        (
            [Place("a", "H200", 0, "IB"), Place("b", "H200", 0, "IB")],
            [f"rank {i} on {h}: cuda:0 H200, NCCL over IB" for i, h in enumerate("ab")],
        ),
        ([Place("a", "H200", i, "Socket") for i in range(2)], ["ranks 0-1 on a: cuda:0-1 H200"]),
        ([Place("a", "A", 0), Place("a", "B", 1)], ["rank 0 on a: cuda:0 A", "rank 1 on a: cuda:1 B"]),
    ],
)
def test_a_line_tells_where_ranks_are(places, lines):
    assert describe(places) == lines


@pytest.mark.parametrize(
    ("visible", "line"),
    [
        (["", ""], "ranks 0-3 on {host}: cuda:0,1,0,1 H200"),
        (["0,1", "2, 3"], "ranks 0-3 on {host}: cuda:0-3 H200"),
        (["GPU-a,GPU-b", "MIG-c"], "ranks 0-3 on {host}: cuda:0,1,0,1 H200"),
    ],
)
def test_gpus_have_their_numbers_on_the_machine(monkeypatch, visible, line):
    """Each node of `make run NODES=2` sees only its own GPUs, and calls the first one cuda:0."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    places = []
    for listed in visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        places += [place_of(torch.device("cuda", index)) for index in range(2)]
    assert describe(places) == [line.format(host=socket.gethostname())]


def test_a_thousand_nodes_are_told_in_eight_lines():
    lines = describe([Place(f"node-{i // 8}", "H100", i % 8) for i in range(1024)])
    assert len(lines) == 128
    shown = shorten(lines)
    assert shown[:7] == lines[:7]
    assert shown[7:] == ["... and 121 more such lines in config.json"]
    assert shorten(lines[:8]) == lines[:8]
