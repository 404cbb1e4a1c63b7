"""What ranks have to agree on before they train: the device, options, data, code; each refusal is one line."""

import contextlib
import functools
import importlib
import os
import pickle
import re
import shutil
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from recipes.common import loop
from recipes.common import restore as restoring
from recipes.common.data import imagefolder
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.parallel import groups
from recipes.common.parallel.groups import gather_values
from recipes.common.process import entry
from recipes.common.world import agreement, devices
from recipes.common.world.devices import start_gpu
from recipes.common.world.tree import broadcast_tree
from tests.support import Ranks, is_equal, start_run


def my_rank():
    return int(os.environ["RANK"])


# ---- the device


def see_gpus(count):
    entry.REFUSAL_GRACE_S = 0.0  # no launcher ends the ranks of these nodes
    torch.cuda.device_count = lambda: count
    devices.start_gpu = lambda device: None
    torch.cuda.get_device_name = lambda device=None: "a stand-in"


def see_a_gpu_on_rank_0():
    see_gpus(1 if my_rank() == 0 else 0)


see_one_gpu = functools.partial(see_gpus, 1)


def see_gpus_but_rank_1_has_an_old_driver():
    see_gpus(2)
    devices.start_gpu = start_gpu if my_rank() == 1 else devices.start_gpu
    torch.cuda.set_device = fail_as_with_an_old_driver


def fail_as_with_an_old_driver(device):
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12080).")


@pytest.mark.parametrize("recipe", ["ddp", "pipeline", "probe"])
def test_a_node_without_a_gpu_among_others_that_have_one(tmp_path, recipe):
    """That node would exchange gradients with gloo, the others with NCCL, and all would wait for ever."""
    argv = ["--timeout-s", "20"]
    line = Ranks(recipe, argv, 2, tmp_path, nodes=2, setup=see_a_gpu_on_rank_0).wait().refusal
    assert line.startswith("error: rank 0 on ")
    assert " has a GPU, rank 1 on " in line
    assert line.endswith("make GPUs visible on every node, or use --device cpu on all")


def choose_networks(*networks):
    """Let ranks have a GPU each, and nodes of these networks, as fabric.sh has found them."""
    see_gpus(1)
    os.environ["FABRIC_USED"] = networks[my_rank()]


MIXED = ("ib (mlx5_0)", "tcp (no port of mlx5_0 is active)")


@pytest.mark.parametrize("recipe", ["ddp", "pipeline", "probe"])
def test_a_node_whose_network_is_another_one(tmp_path, recipe):
    """NCCL would wait in its first call, and would say why only in a log that it does not write."""
    setup = functools.partial(choose_networks, *MIXED)
    ended = Ranks(recipe, ["--timeout-s", "20"], 2, tmp_path, nodes=2, setup=setup).wait()
    assert ended.statuses == [1, 1], "on other nodes, the next start may succeed"
    (line,) = ended.errors
    what = r"rank 0 on \S+ over ib \(mlx5_0\), rank 1 on \S+ over tcp \(no port of mlx5_0 is active\); fix "
    assert re.match(f"error: nodes use different networks, which NCCL cannot connect: {what}", line)


@pytest.mark.parametrize(
    ("network", "others"),
    [
        ("ib (mlx5_0)", {"cuda over ib": "rank 1 on n2 over ib (mlx5_3)"}),
        ("tcp (FABRIC)", {"cuda": "rank 1 on n2"}),
        ("", {"cuda over ib": "rank 1 on n2 over ib (mlx5_0)", "cuda over tcp": "rank 2 on n3 over tcp (FABRIC)"}),
        ("gIB", {"cuda over roce": "rank 1 on n2 over roce (mlx5_0)"}),
    ],
)
def test_networks_are_compared_only_if_all_are_known(monkeypatch, network, others):
    """Ranks that torchrun has started by itself do not know theirs."""
    monkeypatch.setattr(devices, "start_gpu", lambda device: None)
    monkeypatch.setenv("FABRIC_USED", network)
    gpu = torch.device("cuda", 0)
    assert devices.agree_on_device(lambda: gpu, 0, lambda kind, text: {**others, kind: text}) == gpu


def test_cpus_use_no_fabric(monkeypatch):
    """Gloo uses the interface that reaches MASTER_ADDR."""
    monkeypatch.setenv("FABRIC_USED", "ib (mlx5_0)")
    sent = []
    devices.agree_on_device(lambda: torch.device("cpu"), 0, lambda *own: sent.append(own) or dict([own]))
    assert [kind for kind, _ in sent] == ["cpu"]


@pytest.mark.parametrize("recipe", ["ddp", "pipeline", "probe"])
def test_fewer_gpus_than_processes(tmp_path, recipe):
    """A job that could use GPUs does not train on CPUs unless asked to."""
    line = Ranks(recipe, ["--timeout-s", "20"], 2, tmp_path, setup=see_one_gpu).wait().refusal
    assert line.startswith("error: --device auto: 2 processes on ")
    fix = "start at most 1 on each node (NPROC_PER_NODE), or let each process see all GPUs of its node"
    assert line.endswith(f" need a GPU each, 1 visible; {fix}, or use --device cpu")


def test_a_gpu_that_torch_counts_and_cannot_use(tmp_path):
    argv = ["--timeout-s", "20"]
    line = Ranks("ddp", argv, 2, tmp_path, setup=see_gpus_but_rank_1_has_an_old_driver).wait().refusal
    assert re.match(r"error: cuda:1 on \S+ does not work: The NVIDIA driver on your system is too old", line)
    assert line.endswith(" (found version 12080).; see `make doctor` for the cause, or use --device cpu")


def test_cpus_can_be_asked_for_where_there_are_gpus(tmp_path):
    start_run("ddp", tmp_path, 2, "--max-steps", "1", "--device", "cpu", setup=see_one_gpu).wait(check=True)


# ---- options, data, code and libraries


def change(name, value):
    """Make rank 1 alone see another value of a fact."""
    check = agreement.check_facts
    if my_rank() == 1:
        agreement.check_facts = lambda own, *others: check({**own, name: value} if name in own else own, *others)


def refusal_of(recipe, folder, **how):
    return start_run(recipe, folder, 2, "--max-steps", "1", **how).wait().refusal


@pytest.mark.parametrize("recipe", ["ddp", "spawn", "apex", "pipeline", "scratch", "horovod"])
def test_other_options_on_a_rank(tmp_path, recipe):
    line = refusal_of(recipe, tmp_path, own_argv={1: ["--lr", "0.5", "--seed", "7"]})
    assert line.startswith("error: rank 1: --lr is 0.5 on ")
    assert line.endswith(", and 0.02 on rank 0; start all ranks with the same options, data, code and libraries")
    assert not (tmp_path / "run").exists(), "nothing was recorded"


@pytest.mark.parametrize("recipe", ["ddp", "pipeline"])
def test_compile_on_one_rank(tmp_path, recipe):
    """Only ranks that compile check the folder of compiled code, together."""
    line = refusal_of(recipe, tmp_path, own_argv={0: ["--timeout-s", "30"], 1: ["--timeout-s", "30", "--compile"]})
    assert line.startswith("error: rank 1: --compile is True on ")


@pytest.mark.parametrize("own", [{0: "imagefolder", 1: "digits"}, {0: "digits", 1: "imagefolder"}])
def test_another_data_set_on_a_rank(images, tmp_path, own):
    """The two kinds of data are loaded with different collectives, so the options are compared first."""
    words = {
        rank: [*IMAGES[4:], *IMAGES[2:4] * (data == "imagefolder"), "--data", data, "--data-dir", str(images)]
        for rank, data in own.items()
    }
    line = refusal_of("ddp", tmp_path, own_argv=words)
    assert line.startswith(f"error: rank 1: --data is {own[1]} on ")
    assert f", and {own[0]} on rank 0; " in line


@pytest.mark.parametrize(("option", "here", "there"), [("--stages", "1", "2"), ("--split", "in-process", "ranks")])
def test_another_grid_on_a_rank(tmp_path, option, here, there):
    """Ranks with different grids would create different groups, and wait for each other until --timeout-s."""
    bound = ["--timeout-s", "30"]
    line = refusal_of("pipeline", tmp_path, own_argv={0: bound, 1: [*bound, option, here]})
    assert line.startswith(f"error: rank 1: {option} is {here} on ")
    assert f", and {there} on rank 0; " in line


@pytest.mark.parametrize("name", ["recipes/common/optim.py", "recipes/ddp/train.py", "torch", "the test set"])
def test_other_code_libraries_or_data_on_a_rank(tmp_path, name):
    line = refusal_of("ddp", tmp_path, setup=functools.partial(change, name, "another"))
    assert line.startswith(f"error: rank 1: {name} is another on ")


def test_what_decides_a_run_is_compared():
    args = importlib.import_module("recipes.ddp.train").options([])
    facts = agreement.training_facts(args, "ddp")
    flags = {f"--{name.replace('_', '-')}" for name in vars(args)}
    local = {"--config", "--data-dir", "--cache-dir", "--runs-dir", "--workers"}
    assert {name for name in facts if name.startswith("--")} == flags - local
    assert {"recipes/ddp/train.py", "recipes/common/job.py", "python", "torch"} <= set(facts)
    assert "recipes/ddp/train.py" in agreement.training_facts(args, "spawn"), "its ranks run ddp's code"
    less = {name: value for name, value in facts.items() if name != "recipes/ddp/train.py"}
    code = "code with digest [0-9a-f]{8}"
    for own, expected, here, there in ((less, facts, "missing", code), (facts, less, code, "missing")):
        with pytest.raises(UserError, match=rf"^recipes/ddp/train\.py is {here} on .*, and {there} on rank 0; "):
            agreement.check_facts(own, expected)
    assert facts["torch"] == torch.__version__.split("+")[0] or facts["torch"] == torch.__version__
    data = agreement.load_data(args, torch.device("cpu"), print)
    first, second = data.train.fingerprint(), data.test.fingerprint()
    assert first.startswith("1437 samples with digest ")
    assert second.startswith("360 samples with digest ")
    data.test.targets[7] += 1
    assert data.test.fingerprint() != second


# ---- folders of images


def count_walks():
    find_images = imagefolder.find_images

    def counted(folder):
        print(f"walked {folder}", flush=True)
        return find_images(folder)

    imagefolder.find_images = counted


IMAGES = ("--data", "imagefolder", "--image-size", "16", "--global-batch-size", "8", "--workers", "0")


def test_one_rank_walks_a_folder_that_all_ranks_see(images, tmp_path):
    argv = (*IMAGES, "--data-dir", str(images), "--max-steps", "1")
    outcome = start_run("ddp", tmp_path, 2, *argv, setup=count_walks).wait(check=True)
    assert [text.count("walked ") for text in outcome.outputs] == [1, 0]


def test_an_image_that_a_rank_lacks(images, tmp_path):
    """That rank would permute the samples differently, and train on others than the loss curve claims."""
    copy = tmp_path / "copy"
    shutil.copytree(images, copy)
    own = {0: ["--data-dir", str(images)], 1: ["--data-dir", str(copy)]}
    start_run("ddp", tmp_path, 2, *IMAGES, "--max-steps", "1", own_argv=own).wait(check=True)
    missing = sorted((copy / "train").rglob("*.*"))[3]
    missing.unlink()
    line = start_run("ddp", tmp_path, 2, *IMAGES, name="less", own_argv=own).wait().refusal
    assert line.startswith(f"error: rank 1: --data-dir {copy} on ")
    assert f" lacks {missing.relative_to(copy)}, which rank 0 has; " in line


# ---- the evaluation


def lose_a_sample():
    shard = loop.shard
    loop.shard = lambda *args: shard(*args)[1:] if my_rank() == 1 else shard(*args)


def test_an_evaluation_that_leaves_a_sample_out_fails(tmp_path):
    outcome = start_run("ddp", tmp_path, 2, "--max-steps", "1", setup=lose_a_sample).wait()
    assert set(outcome.statuses) == {1}, outcome.text
    assert "evaluated 359 samples and skipped 0 of 360" in outcome.outputs[0]


# ---- the restored state


class Replay:
    """Peers of two ranks that run one after the other: rank 1 receives what rank 0 has sent."""

    def __init__(self, rank, messages):
        self.rank, self.world_size, self.messages = rank, 2, messages

    def watch(self, name):
        return contextlib.nullcontext()

    def broadcast_object(self, value):
        if self.rank == 0:
            self.messages.append(pickle.dumps(value))
        return pickle.loads(self.messages.pop(0) if self.rank else self.messages[-1])

    def broadcast_tensor(self, tensor):
        assert tensor.is_contiguous()
        if self.rank == 0:
            self.messages.append(tensor.clone())
        else:
            tensor.copy_(self.messages.pop(0))


def test_a_state_arrives_bit_for_bit_one_tensor_at_a_time():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    model.to(memory_format=torch.channels_last)
    tensors = [torch.randn(5, 7).T, torch.tensor(3.0, dtype=torch.float64), torch.zeros(0, 4), torch.tensor(True)]
    tree = {"model": model.state_dict(), "odd": {0: tensors, 1: (0.9, 0.999)}, "bf16": torch.randn(9).bfloat16()}
    messages = []
    broadcast_tree(tree, Replay(0, messages))
    sizes = [message.nbytes for message in messages[1:]]
    assert len(messages[0]) < 4000, "the outline holds no tensor"
    assert max(sizes) == model[0].weight.nbytes
    received = broadcast_tree(None, Replay(1, messages))
    assert messages == []
    assert is_equal(received, tree)
    assert received["model"]._metadata == tree["model"]._metadata
    assert received["model"]["0.weight"].stride() == model[0].weight.stride()
    assert received["odd"][0][0].stride() == tensors[0].stride()


class Meeting:
    """Ranks that are threads: each of them gets what all have given."""

    def __init__(self, world_size):
        self.given, self.meetings = [None] * world_size, 0
        self.barrier = threading.Barrier(world_size, timeout=30)

    def meet(self, rank, value):
        self.given[rank] = value
        self.barrier.wait()
        given = list(self.given)
        self.meetings += rank == 0
        self.barrier.wait()
        return given

    def peers(self, rank):
        meet = functools.partial(self.meet, rank)
        return SimpleNamespace(
            rank=rank,
            watch=lambda name: contextlib.nullcontext(),
            gather_objects=meet,
            begin_vote=lambda vote: lambda: max(meet(vote)),
        )


def gather_from(values, monkeypatch, piece_bytes):
    """Return what gather_values() returns to each of some ranks, and the sender and size of each piece."""
    everyone, sent = Meeting(len(values)), []
    mailboxes = [SimpleQueue() for _ in values]

    def send(piece, group_dst, group):
        assert group_dst == 0
        sent.append((group, len(piece)))
        mailboxes[group].put(piece)

    def recv(piece, group_src, group):
        piece.copy_(mailboxes[group_src].get(timeout=30))

    monkeypatch.setattr(groups, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(torch.distributed, "send", send)
    monkeypatch.setattr(torch.distributed, "recv", recv)
    with ThreadPoolExecutor(len(values)) as pool:
        ranks = range(len(values))
        found = list(pool.map(lambda r: gather_values(values[r], everyone.peers(r), r, 300.0), ranks))
    return found, sent, everyone.meetings


def test_parts_of_a_state_arrive_bit_for_bit_in_pieces(monkeypatch):
    """The parts differ in size; the last rank is none of the group."""
    weight = torch.randn(8, 3, 3, 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    odd = [torch.randn(5, 7).T, torch.tensor(3.0, dtype=torch.float64), torch.zeros(0, 4), torch.tensor(True)]
    others = [torch.arange(3, dtype=torch.int16), torch.randn(4).bfloat16(), torch.ones(2, 3)[:, 1]]
    values = [{"weight": weight}, {0: {"step": 1, "odd": odd}, 1: (0.9, weight.detach())}, others, None]
    found, sent, _ = gather_from(values, monkeypatch, 300)
    assert is_equal(found, [values[:3], None, None, None])
    assert found[0][1][1][1].stride() == weight.stride()
    assert sorted(sent) == [(1, 113), (1, 300), (1, 300), (1, 300), (2, 22)], "each byte once, and no others"


def test_many_ranks_of_which_few_have_bytes_vote_seldom(monkeypatch):
    """ZeRO gives whole parameters to ranks: most of thousands of ranks have none, and one has the largest."""
    few = {1: 250_000, 5: 7, 13: 40_000}
    values = [{"own": torch.zeros(few.get(rank, 0), dtype=torch.uint8)} for rank in range(16)]
    monkeypatch.setattr(groups, "allow_open_files", allow := Mock())
    found, sent, meetings = gather_from(values, monkeypatch, 1000)
    allow.assert_called_once()
    assert allow.call_args.args[0] >= len(os.listdir("/dev/fd")) - 1 + len(values), "a connection with each rank"
    assert is_equal(found[0], values)
    assert len(sent) == 250 + 1 + 40
    assert {rank: sum(size for sender, size in sent if sender == rank) for rank in few} == few
    assert meetings == 1 + 9, "rounds of 1, 2, 4, ... 128 and 36 pieces"


def watch_the_content():
    """Print how many of the checkpoint's weights are still in memory when training begins."""
    restore, begin_steps = restoring.restore, Job.begin_steps
    kept = []

    def noting(job, content):
        kept.extend(weakref.ref(tensor) for tensor in content["model"].values())
        restore(job, content)

    def checking(job):
        print(f"{sum(tensor() is not None for tensor in kept)} of {len(kept)} alive", flush=True)
        begin_steps(job)

    restoring.restore, Job.begin_steps = noting, checking


@pytest.mark.parametrize(("recipe", "world_size"), [("single", 1), ("dataparallel", 1), ("ddp", 2)])
def test_no_copy_of_the_checkpoint_is_kept(tmp_path, recipe, world_size):
    argv = ("--resume", "auto", "--lr-schedule", "constant", "--epochs", "1", "--max-steps")
    start_run(recipe, tmp_path, world_size, *argv, "1").wait(check=True)
    outcome = start_run(recipe, tmp_path, world_size, *argv, "2", setup=watch_the_content).wait(check=True)
    assert [text.splitlines().count("0 of 10 alive") for text in outcome.outputs] == [1] * world_size, outcome.text


def slow_gathers():
    """Send and receive small pieces that take half a second each, and print of how many ranks the group is."""

    def slow(exchange):
        def sleeping(size, contents, group, *sender):
            print(f"gathers from {torch.distributed.get_world_size(group)}", flush=True)
            time.sleep(0.5)
            exchange(size, contents, group, *sender)

        return sleeping

    groups.send_piece, groups.receive_piece = map(slow, (groups.send_piece, groups.receive_piece))
    groups.PIECE_BYTES = 10_000


@pytest.mark.parametrize(
    ("recipe", "world_size", "option"), [("pipeline", 4, "--num-microbatches=2"), ("ddp", 2, "--zero")]
)
def test_a_large_state_may_take_longer_to_gather_than_the_limit_of_a_wait(tmp_path, recipe, world_size, option):
    """A piece has the whole limit: a slow network is no hang. A pipeline gathers within one replica."""
    argv = ("--max-steps", "1", option, "--timeout-s", "2", "--optimizer", "adamw")
    outcome = start_run(recipe, tmp_path, world_size, *argv, setup=slow_gathers).wait(check=True)
    counts = [text.count("gathers from 2") for text in outcome.outputs]
    assert min(counts[:2]) * 0.5 > 3
    assert counts[2:] == [0, 0][: world_size - 2]
