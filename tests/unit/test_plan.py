"""The plan's arithmetic against formulas worked out by hand, simulations with a fixed seed, and real state."""

import itertools
import json
import math
import random
import re
from dataclasses import replace

import pytest
import torch

from recipes.common.errors import UserError
from recipes.common.models.models import build_model
from recipes.common.optim import build_optimizer
from recipes.common.world.peers import Peers
from recipes.ddp import train
from recipes.tensor.train import options as tensor_options
from scripts.launch.command import ROOT
from scripts.launch.tables import table
from scripts.plan import __main__ as command
from scripts.plan import published
from scripts.plan import workload as workload_module
from scripts.plan.cost_model import (
    Cluster,
    Compute,
    Gradient,
    Link,
    Method,
    all_reduce,
    daly_interval_s,
    ddp_messages,
    exchanges_end_s,
    ring_bytes,
    split_compute,
    step,
    useful_share,
)
from scripts.plan.fabrics import INTRA, node_link
from scripts.plan.workload import count_pass, count_workload, kind_of, timed_step
from tests.conftest import slow

LINK, LOADED = Link(1e-3, 1e6), Link(1e-3, 1e5)
GRADIENTS = [Gradient((250, 1000), (i + 1) / 4) for i in range(4)]
"""Four gradients of 1 MB each, a quarter of backward apart."""


def test_the_ring_is_the_formula():
    """Four ranks, 8 MB at 1 MB/s: six hops of 1 ms, and 2 x 3/4 of the bytes over each link."""
    assert all_reduce(8e6, Cluster(4, 1, LINK), "ring") == (pytest.approx(6 * 1e-3 + 12), 12e6)
    assert all_reduce(8e6, Cluster(1, 4, LINK), "ring").seconds == pytest.approx(6 * 1e-3 + 4 * 12)
    assert all_reduce(8e6, Cluster(1, 1, LINK), "ring") == (0, 0)
    assert ring_bytes(8e6, 4) == 12e6


def test_within_and_between_nodes():
    """Two nodes of four GPUs: 2 of the ring's 14 hops leave the node, and 2 of the tree's 8.

    The ring leaves a node once: the node sends 2 x 7/8 of the bytes.
    """
    fast = Link(1e-5, 1e7)
    cluster = Cluster(2, 4, LINK, fast)
    assert all_reduce(8e6, cluster, "ring") == pytest.approx((2e-3 + 12e-5 + 14, 14e6))
    assert all_reduce(8e6, cluster, "tree").seconds == pytest.approx(2e-3 + 6e-5 + 16)
    assert all_reduce(8e6, cluster) == all_reduce(8e6, cluster, "ring")
    many = Cluster(256, 4, LINK, fast)
    assert all_reduce(8, many) == all_reduce(8, many, "tree")
    assert all_reduce(8e6, Cluster(1, 4, LINK, fast), "ring").sent_bytes == 0


@pytest.mark.parametrize("algorithm", ["ring", "tree", "auto"])
@pytest.mark.parametrize("intra", ["nvlink", "none"])
def test_more_nodes_more_bytes_and_slower_links_take_no_less_time(algorithm, intra):
    slow, fast = (node_link(name, 8) for name in ("tcp-10", "ib-400"))
    last = 0.0
    for nodes in (1, 2, 4, 16, 64, 512):
        seconds, _ = all_reduce(1e8, Cluster(nodes, 8, slow, INTRA[intra]), algorithm)
        assert seconds >= last
        assert seconds >= all_reduce(1e8, Cluster(nodes, 8, fast, INTRA[intra]), algorithm).seconds
        assert seconds >= all_reduce(1e7, Cluster(nodes, 8, slow, INTRA[intra]), algorithm).seconds
        last = seconds


def test_buckets_close_once_they_are_full():
    assert [m.nbytes for m in ddp_messages(GRADIENTS, 1.5e6)] == [2e6, 2e6]
    assert [m.ready for m in ddp_messages(GRADIENTS, 1.5e6)] == [0.5, 1.0]
    assert [m.nbytes for m in ddp_messages(GRADIENTS, 2.5e6, factor=0.5)] == [1.5e6, 0.5e6]
    assert [m.nbytes for m in ddp_messages(GRADIENTS, 1e9)] == [4e6]
    assert [m.nbytes for m in ddp_messages(GRADIENTS, 1e9, first_bytes=1e6)] == [1e6, 3e6]


def test_exchanges_overlap_with_backward():
    """Forward takes 1 s, backward 4 s; an exchange of 1 MB takes 0.5 s, then 2 s."""
    compute, buckets = Compute(1.0, 4.0), ddp_messages(GRADIENTS, 1e6)
    assert exchanges_end_s(buckets, lambda nbytes: nbytes * 0.5e-6, compute) == pytest.approx(5.5)
    # The first exchange can begin after 2 s; then the link is always busy.
    assert exchanges_end_s(buckets, lambda nbytes: nbytes * 2e-6, compute) == pytest.approx(10)
    at_once = ddp_messages(GRADIENTS, 1e9)
    assert exchanges_end_s(at_once, lambda nbytes: nbytes * 2e-6, compute) == pytest.approx(13)


def test_an_exchange_that_needs_the_same_cores_slows_backward_down():
    """The exchange takes half of the cores from 2 s on: the remaining 3 s of backward take 6 s."""
    compute, buckets = Compute(1.0, 4.0, load=0.5), ddp_messages(GRADIENTS, 1e6)
    assert exchanges_end_s(buckets, lambda nbytes: nbytes * 10e-6, compute) == pytest.approx(42)
    assert exchanges_end_s(buckets[:1], lambda nbytes: 100.0, compute) == pytest.approx(102)
    # An exchange of 2 s costs 1 s of computing.
    assert exchanges_end_s(buckets[:1], lambda nbytes: 2.0, compute) == pytest.approx(6)


def test_backward_slows_an_exchange_down_that_needs_the_same_cores():
    """A 2 s exchange begins at 2 s; until backward ends at 5 s it only does 0.6 s of its work, so 1.4 s remain."""
    compute, [first, *_] = Compute(1.0, 4.0), ddp_messages(GRADIENTS, 1e6)
    end_s = exchanges_end_s([first], lambda nbytes: 2.0, compute, loaded_cost=lambda nbytes: 10.0)
    assert end_s == pytest.approx(5 + 1.4)


def test_horovod_sends_together_what_has_come_up_meanwhile():
    """The first megabyte goes alone, from 2 s to 4 s; the two that are ready by then go together."""
    messages = ddp_messages(GRADIENTS, 1e6)

    def cost(nbytes):
        return 0.5 + nbytes * 1.5e-6

    assert exchanges_end_s(messages, cost, Compute(1.0, 4.0), fuse_bytes=1e9) == pytest.approx(2 + 2 + 3.5 + 2)
    assert exchanges_end_s(messages, cost, Compute(1.0, 4.0), fuse_bytes=1.5e6) == pytest.approx(2 + 4 * 2)


def test_the_backend_and_the_load_of_its_cores_decide():
    """Gloo has a ring alone and takes longer beside computing; Horovod looks for gradients once in 1 ms."""
    compute, cluster = Compute(1.0, 2.0), Cluster(256, 1, Link(1.0, 1e9))
    nccl, gloo = (step(GRADIENTS, compute, cluster, Method("ddp", device=device)) for device in ("cuda", "cpu"))
    assert gloo.exchange_s > 10 * nccl.exchange_s
    found = (step(GRADIENTS, compute, Cluster(2, 1, LINK, loaded=link), Method("ddp")) for link in (None, LOADED))
    assert [one.step_s for one in found] == [pytest.approx(6.004), pytest.approx(6.904, abs=1e-3)]
    quick = Cluster(2, 1, Link(0.0, 1e12))
    assert step(GRADIENTS, compute, quick, Method("horovod")).step_s == pytest.approx(3.001, abs=1e-4)


@pytest.mark.parametrize(
    ("compression", "exchange_s"), [("none", 4.0 + 2e-3), ("fp16", 2.0 + 2e-3), ("bf16", 2.0 + 2e-3)]
)
def test_recipes_exchange_as_they_do(compression, exchange_s):
    """Two nodes exchange 4 MB of gradients at 1 MB/s, in hops of 1 ms."""
    method = Method("ddp", grad_compression=compression, bucket_cap_mb=1e3)
    found = step(GRADIENTS, Compute(1.0, 2.0, 0.1), Cluster(2, 1, LINK), method)
    assert found.exchange_s == pytest.approx(exchange_s, rel=1e-3)
    assert found.step_s == pytest.approx(3.1 + exchange_s, rel=1e-3)


def test_of_accumulated_passes_the_last_one_hides_exchanges():
    """Two passes of 1 s forward and 2 s backward equal one with 4 s before its 2 s of backward."""
    cluster, method = Cluster(2, 1, LINK), Method("ddp", bucket_cap_mb=0.9)
    once = step(GRADIENTS, Compute(4.0, 2.0), cluster, method)
    assert step(GRADIENTS, Compute(2.0, 4.0), cluster, replace(method, accumulate_steps=2)) == once
    assert step(GRADIENTS, Compute(2.0, 4.0), cluster, method).step_s < once.step_s
    # A gather and a scatter of 4 MB take 3.003 s each: two gathers beside forward, the scatter beside 2 s.
    method = Method("fsdp", accumulate_steps=2, reshard_after_forward=False)
    found = step(GRADIENTS, Compute(2.0, 4.0), Cluster(4, 1, LINK), method)
    assert found.step_s == pytest.approx(2 * 3.003 + 2 + 3.003 + 2 * 3.003)


def test_a_sharded_optimizer_hands_the_weights_out():
    methods = Method("ddp"), Method("ddp", zero=True)
    plain, sharded = (step(GRADIENTS, Compute(1.0, 2.0), Cluster(4, 1, LINK), method) for method in methods)
    assert sharded.sent_bytes_per_node == pytest.approx(1.5 * plain.sent_bytes_per_node)
    assert sharded.step_s > plain.step_s


@pytest.mark.parametrize(
    ("method", "sent"),
    [
        (Method("fsdp"), 3 * 3 / 4),
        (Method("fsdp", reshard_after_forward=False), 2 * 3 / 4),
        (Method("fsdp", amp="bf16"), 2 * 3 / 4),
        (Method("fsdp", device="cpu"), 4 * 3 / 4),
        (Method("fsdp", replicas=2), 3 * 1 / 2 + 2 * 1 / 2 / 2),
        (Method("fsdp", accumulate_steps=4), (4 * 2 + 1) * 3 / 4),
    ],
    ids=["default", "no reshard", "bf16", "gloo", "replicas", "accumulation"],
)
def test_shards_are_gathered_and_gradients_scattered(method, sent):
    """Four nodes of one rank: the bytes are those of the table in recipes/fsdp/README.md."""
    found = step(GRADIENTS, Compute(1.0, 2.0), Cluster(4, 1, LINK), method)
    assert found.sent_bytes_per_node == pytest.approx(sent * 4e6, rel=1e-3)
    assert found.exchange_s == pytest.approx(sent * 4, rel=1e-2)
    assert found.step_s > 3.0


@pytest.mark.parametrize(
    ("recipe", "mib", "count", "messages"),
    [("fsdp", 12.5, 6, 3 * 3), ("horovod", 64, 3, 2)],  # blocks of 25 MiB, three times; up to 128 MiB together
)
def test_how_many_bytes_fsdp_and_horovod_send_together(recipe, mib, count, messages):
    """Between two nodes, a message takes two hops of a second; a gather or a scatter takes one."""
    gradients = [Gradient((int(mib * 1024), 256), (i + 1) / count) for i in range(count)]
    found = step(gradients, Compute(1.0, 2.0), Cluster(2, 1, Link(1.0, 1e15)), Method(recipe))
    assert found.exchange_s == pytest.approx(messages * (1 if recipe == "fsdp" else 2))


def test_layers_wait_for_sums_and_replicas_sum_gradients():
    """Four ranks, replicas of two, sums of 1 MB forward and backward: each takes a second and two hops."""
    method = Method("tensor", bucket_cap_mb=1e3, tensor_parallel=2, sums=(1e6, 1e6))
    apart = step(GRADIENTS, Compute(1.0, 2.0), Cluster(4, 1, LINK), method)
    assert apart.exchange_s == pytest.approx(2 * 1.002 + 4.002)
    assert apart.step_s == pytest.approx(3 + 2 * 1.002 + 4.002)
    assert apart.sent_bytes_per_node == pytest.approx(2e6 + 4e6)
    # With one replica per node, sums stay in the node, and its two ranks share the link out of it.
    near = step(GRADIENTS, Compute(1.0, 2.0), Cluster(2, 2, LINK, Link(0.0, 1e9)), method)
    assert near.exchange_s == pytest.approx(2 * 1e-3 + 8.002)
    assert near.sent_bytes_per_node == pytest.approx(2 * 4e6)
    # With one replica on both nodes, there is no other replica to sum gradients with.
    wide = step(GRADIENTS, Compute(1.0, 2.0), Cluster(2, 1, LINK), method)
    assert (wide.sent_bytes_per_node, wide.exchange_s) == (pytest.approx(2e6), pytest.approx(2 * 1.002))


@pytest.mark.parametrize("ranks", [2, *slow(4)])
def test_a_rank_of_tensor_computes_its_part(ranks):
    """12 W^2 numbers in each of gpt-tiny's 4 blocks are split, and attention by heads; a block has 4 sums."""
    words = f"--data text --data-dir {ROOT}/docs --seq-len 16 --tensor-parallel {ranks}".split()
    args = tensor_options(words)
    workload = count_workload(args, kind_of(args))
    split, whole = 4 * 12 * 64**2, 4 * 4 * 64 + 2 * 64 + 256 * 64
    assert workload.parameters == split // ranks + whole
    attention = 4 * 2 * 2 * 16 * 64
    assert workload.flops_per_sample == 3 * 16 * (2 * (split // ranks + 256 * 64) + attention // ranks)
    assert workload.sums_bytes_per_sample == (4 * 16 * 64,) * 16
    assert workload.whole.parameters == split + whole
    assert workload.activation_bytes_per_sample < workload.whole.activation_bytes_per_sample
    assert not torch.distributed.is_initialized()
    half = tensor_options([*words, "--amp", "bf16", "--accumulate-steps", "2"])
    assert workload.sums_bytes(half, 8) == (4 * 2 * 16 * 64,) * 16 + (4 * 4 * 16 * 64,) * 16


OWN = """
import torch


def net(data):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def narrow(data):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(7, 10))
"""


def test_an_own_model_is_counted_without_data(tmp_path, monkeypatch):
    """A data set of images is known by its numbers alone: there is no sample to try the model on."""
    (tmp_path / "planned.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["ddp", "--data", "digits", "--compute-ms", "1", "--local-batch-size", "8", "--model"]
    row = command.make_plan([*words, "planned:net"])[0]["rows"][-1]
    assert row["checkpoint_bytes"] == 4 * (64 * 10 + 10) * 2, "weights, and SGD's momentum"
    said = r"--model planned:narrow, on tensors without data, failed: RuntimeError: .*64"
    with pytest.raises(UserError, match=said):
        command.make_plan([*words, "planned:narrow"])


@pytest.mark.parametrize(
    ("recipe", "option", "nodes", "rows", "left_out"),
    [
        ("tensor", "--tensor-parallel 4", 3, (2, 8), ("[1, 3] nodes, 3", 6)),
        ("fsdp", "--replicas 3", 6, (6, 96), ("[1, 2, 4] nodes, 4", 8)),
    ],
)
def test_nodes_that_make_up_no_whole_replicas_are_left_out(recipe, option, nodes, rows, left_out):
    words = f"{recipe} {option} --nodes {nodes} --data digits --gpus 2 --compute-ms 1 --local-batch-size 8"
    made, lines, _ = command.make_plan(words.split())
    assert [(row["nodes"], row["global_batch_size"]) for row in made["rows"]] == [rows]
    where, ranks = left_out
    note = f"note: left out {where} because {option} does not divide {ranks} ranks; change it, NODES or GPUS"
    assert lines[-1] == note


def test_a_checkpoint_in_shards_is_not_gathered():
    """Four nodes of one GPU at 1 GB/s without latency; files at 1 GB/s, copies at 5 GB/s."""
    words = ("fsdp", "--data", "digits", "--gpus", "1", "--nodes", "4", "--compute-ms", "1", "--gbit", "8")
    words += ("--alpha-us", "0", "--local-batch-size", "8")
    whole, own = (command.make_plan([*words, *more])[0]["rows"][-1] for more in ((), ("--sharded-checkpoints",)))
    size = 8 * 21_386
    assert whole["checkpoint_bytes"] == own["checkpoint_bytes"] == size
    assert whole["checkpoint_host_bytes"] == 2 * size, "rank 0 gathers all, and copies it to write the copy"
    assert whole["checkpoint_cost_s"] == pytest.approx((3 / 4 + 1 / 5) * size / 1e9)
    assert whole["checkpoint_restore_s"] == pytest.approx((1 + 3 / 4) * size / 1e9)
    part = own["checkpoint_file_bytes"]
    # Rows of rank 0: 2 of 6 and 4 of 16 channels, 30 of 120, 21 of 84 and 3 of 10 units, each with its bias.
    numbers = 2 * 26 + 4 * 151 + 30 * 65 + 21 * 121 + 3 * 85
    assert part == own["checkpoint_host_bytes"] == 8 * numbers
    assert own["checkpoint_cost_s"] == pytest.approx(part / 5e9)
    assert own["checkpoint_write_s"] == pytest.approx(part / 1e9)
    assert own["checkpoint_restore_s"] == pytest.approx(2 * part / 1e9), "a share to check, and its own part"


def test_each_tensor_of_a_checkpoint_is_gathered_by_itself():
    """LeNet's 10 weights and momenta each take 3 hops of 1 ms on 4 ranks; --zero exchanges sizes and 4 votes."""
    words = "--data digits --gpus 1 --nodes 4 --compute-ms 1 --gbit 8 --alpha-us 1000 --local-batch-size 8"
    size = 8 * 21_386
    row = command.make_plan(["fsdp", *words.split()])[0]["rows"][-1]
    assert row["checkpoint_cost_s"] == pytest.approx(20 * 3e-3 + (3 / 4 + 1 / 5) * size / 1e9)
    row = command.make_plan(["ddp", "--zero", *words.split()])[0]["rows"][-1]
    assert row["checkpoint_cost_s"] == pytest.approx((3 + 2 * 4) * 3e-3 + (3 / 8 + 1 / 5) * size / 1e9)
    assert row["checkpoint_host_bytes"] == 1.5 * size, "the optimizer is collected, and all copied"


def test_checkpoints_come_when_they_are_asked_for_and_after_each_epoch():
    """1,437 digits in batches of 8 are 179 steps an epoch; Daly's interval would be many epochs."""
    words = "ddp --data digits --gpus 1 --nodes 1 --compute-ms 1000 --local-batch-size 8 --copy-gb-s 0.001"
    epoch, asked = (rows_of(*words.split(), *more)[0] for more in ((), ("--checkpoint-every", "5")))
    assert (epoch["interval_s"], epoch["checkpoint_every_steps"]) == (pytest.approx(179), 179)
    assert (asked["interval_s"], asked["checkpoint_every_steps"]) == (pytest.approx(5), 5)
    assert asked["useful_share"] < epoch["useful_share"]
    # Written at 10 kB/s, a checkpoint takes longer than the interval, so the next one waits for it.
    words += " --checkpoint-every 5 --checkpoint-gb-s 1e-5"
    slow = rows_of(*words.split())[0]
    size = 8 * 21_386
    assert slow["checkpoint_cost_s"] == pytest.approx(size / 1e6 + size / 1e4 - 5)


def test_ranks_step_their_shards_of_the_optimizer():
    for words, ranks in ((("fsdp",), 2), (("ddp", "--zero"), 2), (("ddp",), 1)):
        args, options = command.parse_args([*words, "--data", "digits", "--gpus", "2", "--local-batch-size", "8"])
        kind = kind_of(options)
        row = command.plan_row(1, args, options, kind, count_workload(options, kind), Compute(1.0, 2.0, 0.5))
        assert row["compute_s"] == pytest.approx(3.0 + 0.5 / ranks)


def test_a_shard_of_the_memory():
    args, _, workload = looked_at("--optimizer", "adamw")
    methods = Method("ddp"), Method("fsdp", replicas=2)
    whole, shard = (workload.memory_bytes(args, method, 1, 16) for method in methods)
    for name in ("gradients", "optimizer"):
        assert shard[name] == whole[name] / 8
    assert shard["gathered_weights"] == workload.parameter_bytes  # less than two blocks
    assert whole["gathered_weights"] == 0
    method = Method("tensor", tensor_parallel=2)
    assert workload.memory_bytes(args, method, 1, 4)["gradient_sums"] == workload.parameter_bytes
    assert workload.memory_bytes(args, method, 1, method.tensor_parallel)["gradient_sums"] == 0
    passes = Method("fsdp", accumulate_steps=2)
    assert workload.memory_bytes(args, passes, 2, 16)["gradients"] == workload.parameter_bytes
    zero = workload.memory_bytes(args, Method("ddp", zero=True, amp="bf16", accumulate_steps=2), 2, 16)
    assert zero["optimizer"] == whole["optimizer"] / 16
    assert zero["activations"] == whole["activations"] / 2, "a sample a pass, in half of the bytes"
    assert zero["half_weights"] == workload.parameter_bytes / 2
    assert workload.memory_bytes(args, Method("fsdp", amp="bf16"), 1, 16)["half_weights"] == 0
    plain, *others = (looked_at(*words)[0] for words in (("--momentum", "0"), (), ("--optimizer", "adamw")))
    assert [workload.tensors(options) for options in (plain, *others)] == [10, 20, 30]


def test_what_limits_a_step_is_named():
    quick, cluster, ddp = Link(1e-6, 1e12), Cluster(64, 1, LINK), Method("ddp")
    compute = Compute(1.0, 2.0)
    assert step(GRADIENTS, compute, Cluster(64, 1, quick), ddp).limit == "compute"
    assert step(GRADIENTS, compute, cluster, ddp).limit == "exchange"
    assert step(GRADIENTS, compute, Cluster(2, 1, Link(0.0, 1e7)), ddp).limit == "exchange", "6%"
    assert step(GRADIENTS, compute, Cluster(64, 1, quick), ddp, control_alpha_s=0.1).limit == "vote"
    assert step(GRADIENTS, compute, Cluster(64, 1, quick), ddp, control_alpha_s=0.0243).limit == "compute", "2%"
    many = step(GRADIENTS, compute, Cluster(4096, 1, quick), ddp, control_alpha_s=0.1)
    assert (many.limit, many.step_s) == ("vote", pytest.approx(2 * 4095 * 0.1))
    short = step(GRADIENTS, Compute(0.01, 0.02), Cluster(4096, 1, quick), ddp, control_alpha_s=1e-4)
    assert short.step_s == pytest.approx(0.03 + (2 * 4095 * 1e-4 - 0.03) / 64, rel=0.05), "a vote in 64 steps"
    assert step(GRADIENTS, compute, cluster, ddp, input_s=100.0).limit == "input"
    assert step(GRADIENTS, compute, cluster, ddp, input_s=100.0).step_s == 100.0


def test_fewer_samples_do_not_shorten_the_fixed_part():
    compute = split_compute(10.0, 4.0)
    half = compute.scaled(0.5)
    assert compute.scaled(0.5, passes=3).total_s == pytest.approx(3 * 4 + 3)
    assert (half.total_s, half.scaled(2).total_s) == (pytest.approx(4 + 3), pytest.approx(10))
    assert half.scaled(0.5).total_s == compute.scaled(0.25).total_s == pytest.approx(4 + 1.5)
    assert half.backward_s == pytest.approx(2 * half.forward_s)
    assert split_compute(10.0).scaled(0.5).total_s == pytest.approx(5)


def test_published_runs():
    first, second, third = published.rows()
    assert first["from_one"] is first["from_two"] is second["from_two"] is None
    assert abs(third["from_two_error"]) < 0.15
    text = (ROOT / "docs" / "plan.md").read_text()
    assert table(published.COLUMNS, [first, second, third]) in text
    assert f"{1e3 * published.fixed_s():.1f} ms" in text


# ---- failures


def simulate(interval_s, cost_s, mtbf_s, restart_s, work_s):
    """Return the useful share of a job that fails at random: work, checkpoint, fail, go back, restart."""
    chance = random.Random(1)
    now = done = 0.0
    fails_at = chance.expovariate(1 / mtbf_s)

    def survives(seconds):
        nonlocal now, fails_at
        if now + seconds <= fails_at:
            now += seconds
            return True
        now, fails_at = fails_at, fails_at + chance.expovariate(1 / mtbf_s)
        return False

    while done < work_s:
        if survives(interval_s + cost_s):
            done += interval_s
        else:
            while not survives(restart_s):
                pass
    return done / now


@pytest.mark.parametrize("interval_s", [200, 1060, 5000])
def test_the_useful_share_is_what_a_simulation_gives(interval_s):
    share = useful_share(interval_s, 60, 10_000, 300)
    assert share == pytest.approx(simulate(interval_s, 60, 10_000, 300, 2e7), rel=0.01)


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(60, 10_000), (5, 100_000), (300, 3_000)])
def test_dalys_interval_is_the_best_one(cost_s, mtbf_s):
    daly = daly_interval_s(cost_s, mtbf_s)
    best = max(range(1, 20_000, 1), key=lambda seconds: useful_share(seconds, cost_s, mtbf_s, 300))
    assert daly == pytest.approx(best, rel=0.01)
    assert math.sqrt(2 * cost_s * mtbf_s) == pytest.approx(daly + cost_s, rel=0.15)
    assert daly_interval_s(2 * mtbf_s, mtbf_s) == daly_interval_s(3 * mtbf_s, mtbf_s) == mtbf_s
    assert useful_share(1000, 10, 1, 300) == 0, "a hopeless job gets nowhere"


def test_dalys_interval_has_his_three_terms():
    """Of equal cost and MTBF: sqrt(2) (1 + sqrt(1/2) / 3 + 1/2 / 9) - 1."""
    assert daly_interval_s(1.0, 1.0) == pytest.approx(0.826114)


# ---- the model, without memory or time


def looked_at(*words):
    args = train.options(list(words))
    kind = kind_of(args)
    return args, kind, count_workload(args, kind)


@pytest.mark.parametrize(
    "words",
    [(), ("--momentum", "0"), ("--optimizer", "adamw"), ("--model", "vit-tiny", "--optimizer", "adamw")],
    ids=["sgd", "plain", "adamw", "vit"],
)
def test_memory_of_weights_and_optimizer_is_that_of_real_state(words):
    args, kind, workload = looked_at(*words)
    model = build_model(args, kind.data)
    optimizer = build_optimizer(args, model, Peers(torch.device("cpu")))
    model(kind.data.input.zeros(2)).sum().backward()
    optimizer.step()
    weights = sum(value.nbytes for value in model.state_dict().values())
    state = optimizer.state_dict()["state"].values()
    held = sum(v.nbytes for values in state for v in values.values() if isinstance(v, torch.Tensor))
    assert workload.parameter_bytes + workload.buffer_bytes == weights
    assert workload.state_bytes(args) == held
    assert workload.checkpoint_bytes(args) == weights + held


def test_lenets_arithmetic_is_the_one_by_hand():
    """8x8 digits: two convolutions of 5x5 and three matrices; each weight is used once per place and sample.

    A multiply-add counts as two; backward takes the same for weights, and for inputs but the first layer's.
    """
    _, _, workload = looked_at()
    first = 2 * 25 * 6 * 64
    others = 2 * (25 * 6 * 16 * 16 + 64 * 120 + 120 * 84 + 84 * 10)
    assert workload.flops_per_sample == 2 * first + 3 * others
    assert workload.parameters == 21_386
    assert workload.activation_bytes_per_sample < 4 * 21_386 / 2, "weights are no activations"


def test_text_is_looked_at_too():
    """gpt-tiny: 4 blocks of 12 W^2 numbers and two norms of 2 W, a last norm, and 256 x W to embed and to predict.

    That matrix is shared: its gradient is ready when the first layer's is.
    """
    _, kind, workload = looked_at("--data", "text", "--data-dir", str(ROOT / "docs"), "--seq-len", "16")
    assert workload.parameters == 4 * (12 * 64**2 + 4 * 64) + 2 * 64 + 256 * 64
    # A multiply-add counts as two, forward and twice backward: a weight per place, and attention's two products.
    assert workload.flops_per_sample == 3 * 16 * (2 * (4 * 12 * 64**2 + 256 * 64) + 4 * 2 * 2 * 16 * 64)
    assert (workload.gradients[-1].shape, workload.gradients[-1].ready) == ((256, 64), 1.0)
    assert (kind.sample_bytes, kind.num_samples) == (0, len(kind.data.train)), "text lies on the device"


def test_gradients_come_from_the_last_layer_to_the_first():
    """The order is that of a real pass on the CPU; a layer's bias comes with its weight, before or after it."""
    args, kind, workload = looked_at()
    model, real = build_model(args, kind.data), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: real.append(parameter.shape))
    model(kind.data.input.zeros(2)).sum().backward()
    found = [gradient.shape for gradient in workload.gradients]
    assert found == real
    shapes = [parameter.shape for parameter in model.parameters()]
    assert [{*found[i : i + 2]} for i in range(0, 10, 2)] == [{*shapes[i : i + 2]} for i in range(8, -1, -2)]
    ready = [gradient.ready for gradient in workload.gradients]
    assert ready == sorted(ready)
    assert 0 < ready[0] < ready[-1] == 1.0


def test_backward_yields_gradients_as_its_arithmetic_goes_on():
    """The last layer's weights take 2 x 84 x 10 operations, after the same number for its inputs."""
    _, _, workload = looked_at()
    first = 2 * 25 * 6 * 64  # no gradient for the images
    backward = first + 2 * 2 * (25 * 6 * 16 * 16 + 64 * 120 + 120 * 84 + 84 * 10)
    ready = {gradient.shape: gradient.ready for gradient in workload.gradients}
    assert ready[10, 84] == pytest.approx(2 * 2 * 84 * 10 / backward)
    assert ready[84, 120] == pytest.approx(2 * 2 * (84 * 10 + 120 * 84) / backward)


def test_weights_that_are_not_trained_take_memory_alone():
    args, kind, whole = looked_at()
    with torch.device("meta"):
        model = build_model(args, kind.data)
    frozen = next(iter(model.parameters())).requires_grad_(False)
    part = count_pass(model, kind.data)
    assert part.parameter_bytes == whole.parameter_bytes - frozen.nbytes
    assert part.buffer_bytes == whole.buffer_bytes + frozen.nbytes
    assert part.checkpoint_bytes(args) == whole.checkpoint_bytes(args) - frozen.nbytes, "its momentum"


# ---- the command


def rows_of(*words):
    return command.make_plan(words)[0]["rows"]


def test_a_plan_is_written_whole(tmp_path, capsys):
    words = "ddp --model lenet --data digits --nodes 12 --gpus 2 --local-batch-size 8 --compute-ms 5"
    words += " --fabric tcp-10"
    assert command.main([*words.split(), "--output", str(tmp_path / "plan")]) == 0
    rows = json.loads((tmp_path / "plan/plan.json").read_text())["rows"]
    assert [row["nodes"] for row in rows] == [1, 2, 4, 8, 12]
    assert [row["global_batch_size"] for row in rows] == [16, 32, 64, 128, 192]
    assert rows[0]["sent_bytes_per_node"] == 0
    assert rows[1]["sent_bytes_per_node"] == pytest.approx(2 * 3 / 4 * 4 * 21_386)
    assert all(a["step_s"] <= b["step_s"] for a, b in itertools.pairwise(rows))
    assert all(a["useful_share"] >= b["useful_share"] for a, b in itertools.pairwise(rows))
    assert all(row["cost"] == pytest.approx(row["hours"] * row["ranks"] * 2.5) for row in rows)
    assert {path.name for path in (tmp_path / "plan").iterdir()} == {"plan.json", "table.md", "plan.png"}
    shown = capsys.readouterr().out
    assert "compute 5.0 ms a step of 8 samples, given by --compute-ms" in shown
    assert table(command.COLUMNS, rows) in shown
    assert table(command.COLUMNS, rows) in (tmp_path / "plan/table.md").read_text()


def test_buckets_and_compression_are_the_recipes():
    """GPUs use torch's buckets, 1 MiB and then 25 MiB, ddp on CPUs 4 MiB; --bucket-cap-mb replaces them."""
    sizes = []
    for words in ((), ("--device", "cpu"), ("--bucket-cap-mb", "7")):
        args, options = command.parse_args(["ddp", "--grad-compression", "bf16", *words])
        method = command.method_of(args, options)
        assert (method.grad_compression, method.device) == ("bf16", options.device)
        sizes.append(method.bucket_bytes)
    assert sizes == [(25 * 2**20, 2**20), (4 * 2**20, None), (7 * 2**20, None)]
    for words, compression in (("horovod", "fp16"), ("horovod --compression none", "none")):
        assert command.method_of(*command.parse_args(words.split())).grad_compression == compression
    for words, first in (("tensor", None), ("tensor --device cpu", None), ("apex --device cpu", 2**20)):
        assert command.method_of(*command.parse_args(words.split())).bucket_bytes == (25 * 2**20, first)
    assert command.method_of(*command.parse_args(["spawn", "--device", "cpu"])).bucket_bytes == (4 * 2**20, None)


def test_a_configuration_says_the_data_and_the_batch(tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text("data: digits\nglobal-batch-size: 64\n")
    words = ("ddp", "--nodes", "1", "--gpus", "2", "--compute-ms", "8")
    rows = rows_of(*words, "--config", str(config))
    assert rows == rows_of(*words, "--data", "digits", "--global-batch-size", "64")
    assert rows[0]["global_batch_size"] == 64


def test_apex_computes_and_sends_by_its_level():
    words = "apex --data digits --nodes 2 --gpus 1 --opt-level"
    full, mixed, half = (command.make_plan([*words.split(), level])[0] for level in ("O0", "O1", "O2"))
    assert mixed["compute"]["forward_s"] == half["compute"]["forward_s"] < full["compute"]["forward_s"]
    sent = [made["rows"][-1]["sent_bytes_per_node"] for made in (full, mixed, half)]
    assert sent[0] == sent[1] == pytest.approx(2 * sent[2])


def test_a_fixed_global_batch_is_shared_out():
    """64 samples are 64, 32 and 16 each on 1, 2 and 4 ranks; --compute-ms is the time for 64 of them."""
    words = ("ddp", "--data", "digits", "--nodes", "4", "--gpus", "1", "--global-batch-size", "64")
    words += ("--local-batch-size", "64", "--compute-ms", "8", "--fabric", "ib-400")
    for more, compute_ms in (
        ("", [8, 4, 2]),
        ("--fixed-ms 2", [8, 5, 3.5]),
        ("--fixed-ms 2 --accumulate-steps 2", [10, 7, 5.5]),  # each pass takes the fixed part
    ):
        rows = rows_of(*words, *more.split())
        assert [row["global_batch_size"] for row in rows] == [64, 64, 64]
        assert [1e3 * row["compute_s"] for row in rows] == pytest.approx(compute_ms)


def test_memory_that_does_not_fit_is_named_at_each_number_of_nodes():
    """A fixed batch needs more memory on fewer nodes, so not only the largest number of nodes is checked."""
    words = "ddp --model resnet50 --nodes 4 --gpus 1 --global-batch-size 1024 --gpu-type a100"
    made, lines, _ = command.make_plan(words.split())
    rows = made["rows"]
    assert [row["memory_sum_bytes"] == sum(row["memory_bytes"].values()) for row in rows] == [True] * 3
    assert [row["memory_sum_bytes"] > 76e9 for row in rows] == [True, False, False]
    [line] = [line for line in lines if line.startswith("memory of a GPU on 4 nodes, estimated: ")]
    assert "of 80 on one A100; DOES NOT FIT on 1 node: lower --global-batch-size, or raise --acc" in line


def test_synthetic_data_have_the_recipes_size():
    words = "ddp --data synthetic --image-size 12 --num-samples 1000 --nodes 1 --gpus 2 --local-batch-size 8"
    [row] = rows_of(*words.split(), "--epochs", "3", "--compute-ms", "10")
    assert row["steps"] == 3 * (1000 // 16)
    assert row["hours"] == pytest.approx(row["steps"] * row["step_s"] / 3600 / row["useful_share"])
    for count in (10, 5000):
        kind = kind_of(train.options(["--data", "synthetic", "--num-samples", str(count)]))
        assert (kind.num_samples, kind.data.num_classes) == (count, min(count, 1000))


def test_groups_of_batch_norm_go_round_as_in_the_recipe():
    """96 samples in groups of 32: three on one rank, two and one on two ranks, none for a fourth rank."""
    words = "ddp --data digits --nodes 4 --gpus 1 --batchnorm-group 32 --global-batch-size 96"
    rows = rows_of(*words.split(), "--local-batch-size", "96", "--compute-ms", "9")
    assert [row["nodes"] for row in rows] == [1, 2]
    assert [row["compute_s"] for row in rows] == pytest.approx([9e-3, 6e-3])


def test_input_is_of_a_node_or_of_all():
    """Two nodes of eight ranks read 128 pictures of 110 kB each."""
    words = ("ddp", "--nodes", "2", "--compute-ms", "1")
    decoded = rows_of(*words, "--images-per-s", "1000")
    assert [row["step_s"] for row in decoded] == pytest.approx([1.024, 1.024])
    read = rows_of(*words, "--storage-gb-s", "1")
    assert [row["step_s"] for row in read] == pytest.approx([0.11264, 0.22528])
    assert {row["limit"] for row in (*decoded, *read)} == {"input"}


def test_an_estimate_says_that_it_is_one():
    words = ("ddp", "--data", "digits", "--nodes", "1", "--gpu-type", "a100", "--utilisation", "0.5")
    made = command.make_plan([*words, "--tf32"])[0]
    assert made["compute"]["source"].startswith("ESTIMATED: 50% of the 156 TFLOP/s of one A100")
    seconds = made["compute"]["forward_s"] + made["compute"]["backward_s"]
    assert seconds == pytest.approx(128 * made["flops_per_sample"] / (0.5 * 156e12))
    assert math.isclose(made["compute"]["backward_s"], 2 * made["compute"]["forward_s"])
    # With neither --tf32 nor --no-tf32, only LeNet's convolutions use TF32.
    convolutions = 2 * (2 * 25 * 6 * 64) + 3 * (2 * 25 * 6 * 16 * 16)
    matrices = made["flops_per_sample"] - convolutions
    for more, flops_s in (
        ((), convolutions / 156e12 + matrices / 19.5e12),
        (("--no-tf32",), made["flops_per_sample"] / 19.5e12),
    ):
        compute = command.make_plan([*words, *more])[0]["compute"]
        assert compute["forward_s"] + compute["backward_s"] == pytest.approx(128 * flops_s / 0.5)


def test_compute_is_measured_on_request():
    words = ("single", "--data", "digits", "--nodes", "1", "--gpus", "1", "--measure", "--device", "cpu")
    made = command.make_plan(words)[0]
    assert made["compute"]["source"].startswith("measured here: CPU")
    assert made["rows"][0]["step_s"] > 0


@pytest.mark.parametrize(
    ("step_s", "fixed_share"),
    [(lambda samples: 4 + samples, 1 / 3), (lambda samples: samples**2, 0), (lambda samples: 3 / samples, 1)],
)
def test_half_of_the_samples_show_the_fixed_part(monkeypatch, step_s, fixed_share):
    """The first two steps are slower, and none of those that count."""

    def timed(args, kind, samples, device):
        slow_s = iter([1.0, 1.0])
        return lambda: [step_s(samples) / 2 + next(slow_s, 0.0)] * 2 + [0.5]

    monkeypatch.setattr(workload_module, "timed_step", timed)
    args, kind, _ = looked_at("--data", "digits")
    found = workload_module.measure_compute(args, kind, 8, torch.device("cpu"))
    assert found.total_s == pytest.approx(step_s(8) + 0.5)
    assert found.fixed_share == pytest.approx(fixed_share)


def test_a_measurement_that_takes_minutes_says_so(monkeypatch, capsys):
    args, kind, _ = looked_at("--data", "digits")
    for seconds, said in ((0.5, ""), (2.0, "measuring: a step of 2 samples takes 6.0 s; four more follow\n")):
        monkeypatch.setattr(workload_module, "timed_step", lambda *_, seconds=seconds: lambda: [seconds] * 3)
        assert workload_module.measure_compute(args, kind, 2, torch.device("cpu")).total_s == 3 * seconds
        assert capsys.readouterr().err == said


def test_what_is_measured_is_what_the_recipe_runs(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, mode: compiled.append(mode) or function)
    words = ["--data", "text", "--data-dir", str(ROOT / "docs"), "--seq-len", "16", "--compile"]
    args, kind, _ = looked_at(*words)
    assert all(seconds > 0 for seconds in timed_step(args, kind, 2, torch.device("cpu"))())
    assert compiled == ["default"]


def test_batches_beyond_what_is_known_are_warned_of():
    words = "ddp --model lenet --nodes 64 --gpus 8 --compute-ms 100"
    shown = "\n".join(command.make_plan(words.split())[1])
    assert "gives R x 256; warm up over 5 epochs: --warmup-epochs 5" in shown
    assert "up to about 8,192" in shown
    assert "that is 8 nodes" in shown
    words = ("--data", "imagefolder", "--nodes", "4", "--compute-ms", "100", "--global-batch-size", "16384")
    lines = command.make_plan(["ddp", *words])[1]
    assert any("up to about 8,192. Other data" in line for line in lines), "the batch is the same on fewer nodes"


REFUSALS = {
    "ddq": "did you mean 'ddp'?",
    "pipeline": "RECIPE pipeline cannot be planned; one of single, ",
    "ddp --fabric ib-40": "FABRIC: invalid choice 'ib-40'; did you mean 'ib-400'?",
    "ddp --model resnet5": "did you mean 'resnet50'?",
    "ddp --gbits 3": "unknown option --gbits; did you mean '--gbit'?",
    "ddp --grad-compresion fp16": "did you mean '--grad-compression'?",
    "ddp --gbit 3": "--gbit and --alpha-us belong together",
    "ddp --nodes 0": "NODES expects a whole number from 1 to 100000, got '0'",
    "ddp --nodes 1000000": "NODES expects a whole number from 1 to 100000",
    "single --nodes 2": "RECIPE single has one process; use NODES=1 GPUS=1, or RECIPE=ddp",
    "ddp --grad-compression powersgd": "--grad-compression powersgd: the plan does not know what it",
    "ddp --compute-ms 3 --measure": "give one",
    "ddp --compute-ms 3 --fixed-ms 4": "--fixed-ms is a part of --compute-ms",
    "ddp --fixed-ms 4": "--fixed-ms is a part of --compute-ms",
    "ddp --utilisation 15": "--utilisation is a share, at most 1",
    "ddp --sync-batchnorm": "--sync-batchnorm: the plan does not know what it saves and costs; drop it",
    "ddp --data digits --images-per-s 9": "--data digits lies on the device; drop them",
    "ddp --evaluate-every 100": "--evaluate-every: the plan does not know what it saves and costs; drop it",
    "fsdp --cpu-offload": "--cpu-offload: the plan does not know what it saves and costs; drop it",
    "tensor --fully-shard": "--fully-shard: the plan does not know what it saves and costs; drop it",
    "tensor --sequence-parallel": "--sequence-parallel: the plan does not know what it saves and costs; drop it",
    "tensor --measure --data digits": "--measure computes a whole model; give the --compute-ms of",
    "tensor --gpus 3 --data digits": "--tensor-parallel 2 and GPUS=3: neither divides the other",
    "tensor --tensor-parallel 16 --nodes 1": "--tensor-parallel 16 does not divide",
    "tensor --model resnet18": "--model resnet18: it has no plan of what to split; use lenet,",
    "fsdp --replicas 16 --nodes 1": "--replicas 16 does not divide 8 ranks; change it, NODES or GPUS",
    "ddp --data digits --local-batch-size 2 --accumulate-steps 8": "--local-batch-size 2 on 8 ranks: --global-"
    "batch-size 16 is too small for 8 processes x 8 accumulation steps; use at least 64",
    "ddp --data digits --global-batch-size 7": "error: --global-batch-size 7 is too small for 8 processes x 1 ",
    "ddp --sharded-checkpoints": "--sharded-checkpoints: the ranks of this recipe hold no shards",
    "ddp --data digits --local-batch-size 5000": "--local-batch-size 5000 on 8 ranks: --global-batch-size 40000 "
    "is larger than the training set; use at most 1437",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_bad_input_is_refused_in_a_line(words, capsys, tmp_path):
    assert command.main([*words.split(), "--output", str(tmp_path / "plan")]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert REFUSALS[words] in text
    assert not (tmp_path / "plan").exists()


def test_the_documented_defaults_are_those_of_the_options():
    args, _ = command.parse_args(["ddp"])
    documented = re.findall(r"`--([a-z-]+)` \(([\w.]+)\)", (ROOT / "docs" / "plan.md").read_text())
    assert {name: str(getattr(args, name.replace("-", "_"))) for name, _ in documented} == dict(documented)
    assert {"local-batch-size", "utilisation", "gpu-type", "price"} == set(dict(documented))
    assert f"`--mtbf-gpu-hours` is {args.mtbf_gpu_hours:,.0f} by default" in (ROOT / "docs/plan.md").read_text()


def test_a_plan_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "count_workload", pytest.fail)
    (tmp_path / "file").touch()
    for folder in ("file", "file/plan"):
        assert command.main(["ddp", "--data", "digits", "--nodes", "1", "--output", str(tmp_path / folder)]) == 2
        assert capsys.readouterr().err == f"error: cannot write {tmp_path / 'file'}: Not a directory\n"


def test_the_page_shows_what_the_plan_prints():
    rows = rows_of("ddp", "--model", "resnet50", "--nodes", "4", "--fabric", "tcp-100", "--compute-ms", "120")
    assert len(rows) == 3
    assert table(command.COLUMNS, rows) in (ROOT / "docs/plan.md").read_text(encoding="utf-8")


def test_the_length_of_the_job_is_shown():
    words = ("--data", "digits", "--nodes", "2", "--gpus", "1", "--compute-ms", "5")
    for more, steps in (
        ([], "200 in the job's 40.0 epochs."),
        (["--max-steps", "12"], "12 in the job's 2.4 epochs."),
    ):
        [line] = [line for line in command.make_plan(["ddp", *words, *more])[1] if " steps an epoch, " in line]
        assert steps in line
