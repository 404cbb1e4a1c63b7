"""Tensor parallelism: each model in each layout, its checkpoints, its refusals, and what crosses the wire."""

from __future__ import annotations

import functools
import os
import sys
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from recipes.common.checkpoint.checkpoint import CheckpointWriter
from recipes.common.checkpoint.reading import read_checkpoint
from recipes.common.data import load_data
from recipes.common.errors import UserError
from recipes.common.models import gpt
from recipes.common.models.models import build_model
from recipes.common.models.vit import VisionTransformer
from recipes.tensor import plans
from recipes.tensor.plans import NEEDS_EVEN, check_tokens, packed_boxes, swap
from recipes.tensor.train import GradientSum, options
from recipes.tensor.user_plan import read_plan
from scripts.plan.__main__ import make_plan
from tests import observe
from tests.conftest import refused, slow
from tests.parallel.test_fsdp import allocated, note_bytes
from tests.parallel.test_your_model import SPLIT, import_from
from tests.support import TEXT_DIR, assert_same_training, losses, metrics, start_run, train

STEPS = ("--max-steps", "4", "--checkpoint-every", "2", "--clip-grad-norm", "1")
GPT = ("--data", "text", "--data-dir", str(TEXT_DIR), "--model", "gpt-tiny", "--seq-len", "16")
SEQUENCE, LOSS, FULL = "--sequence-parallel", "--loss-parallel", "--fully-shard"
MODELS = {
    "lenet": (),
    "vit-tiny": ("--model", "vit-tiny", "--optimizer", "adamw", "--lr", "0.001"),
    "gpt-tiny": (*GPT, "--optimizer", "adamw", "--global-batch-size", "8"),
}


@pytest.fixture(scope="module", params=MODELS)
def single(request, tmp_path_factory):
    """Return a model's options and the run of single with it."""
    argv = (*MODELS[request.param], *STEPS)
    return argv, train("single", tmp_path_factory.mktemp(request.param), 1, *argv)


@pytest.mark.parametrize(("replicas", "ranks"), [(2, 2), *slow((1, 4))])
def test_every_layout_has_the_losses_of_single(single, tmp_path, replicas, ranks):
    argv, whole = single
    run = train("tensor", tmp_path, replicas * ranks, *argv, "--tensor-parallel", str(ranks))
    assert_same_training(run, whole)


@pytest.mark.parametrize(
    ("single", "replicas", "ranks", "switches"),
    [
        ("gpt-tiny", 1, 2, (SEQUENCE, LOSS)),
        ("gpt-tiny", 2, 2, (FULL,)),
        *slow(
            ("gpt-tiny", 3, 2, (FULL, SEQUENCE, LOSS)),
            ("gpt-tiny", 2, 2, (FULL, LOSS, "--accumulate-steps", "2")),
            ("vit-tiny", 2, 2, (FULL, SEQUENCE, "--accumulate-steps", "2")),
            ("vit-tiny", 3, 2, (FULL, "--no-decay-norm-bias")),
            ("lenet", 3, 2, (FULL,)),
            ("lenet", 1, 2, (FULL,)),
            ("gpt-tiny", 2, 2, (SEQUENCE, "--accumulate-steps", "2")),
            ("gpt-tiny", 1, 4, (SEQUENCE, LOSS)),
            ("gpt-tiny", 2, 2, (LOSS,)),
            ("vit-tiny", 2, 2, (SEQUENCE, "--accumulate-steps", "2")),
            ("vit-tiny", 1, 4, (SEQUENCE,)),
        ),
    ],
    indirect=["single"],
)
def test_tokens_and_vocabulary_in_shards_have_the_losses_of_single(single, tmp_path, replicas, ranks, switches):
    argv, whole = single
    words = ("--tensor-parallel", str(ranks), *switches)
    run = train("tensor", tmp_path, replicas * ranks, *argv, *words)
    assert_same_training(run, whole)


def half_frozen(data):
    """Return a transformer of which only a part is trained."""
    model = VisionTransformer(1, 8, 10) if data.has_images else gpt.GPT(data.num_classes, 64, depth=2, heads=4)
    for frozen in (model.embedding, model.blocks[0], model.blocks[1].norm1):
        frozen.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("world_size", "switches"),
    [(2, (*GPT, SEQUENCE)), *slow((2, ()), (4, (*GPT, FULL)), (4, (*GPT, FULL, SEQUENCE, LOSS)))],
)
def test_frozen_parameters_stay_as_they_are(tmp_path, world_size, switches):
    argv = (*(word for word in switches if word not in (SEQUENCE, LOSS, FULL)), *STEPS, "--optimizer", "adamw")
    argv = (*argv, "--lr", "0.001", "--model", "tests.parallel.test_tensor:half_frozen")
    run, whole = train("tensor", tmp_path, world_size, *switches, *argv), train("single", tmp_path, 1, *argv)
    assert_same_training(run, whole)


class Grouped(nn.Module):
    """A layer as in Llama, and dropout: two query heads for each key and value head, and a gated MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(32), nn.LayerNorm(32), nn.Dropout(0.0)
        self.q, self.k, self.v, self.o = (nn.Linear(a, b, bias=False) for a, b in HEADS)
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        q, k, v = (f(self.norm1(x)).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.drop(self.o(mixed.transpose(1, 2).flatten(2)))
        y = self.norm2(x)
        return x + self.drop(self.down(nn.functional.silu(self.gate(y)) * self.up(y)))


HEADS = ((32, 32), (32, 16), (32, 16), (32, 32))
exec(SPLIT, shown := {"nn": nn})
PLAN = shown["Llama"].tensor_plan


class Llama(nn.Module):
    """A user's own model with a plan."""

    def __init__(self, data):
        super().__init__()
        self.tensor_plan = PLAN
        self.tokens, self.layers = nn.Embedding(data.num_classes, 32), nn.ModuleList([Grouped(), Grouped()])
        self.head = nn.Linear(32, data.num_classes, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Gathered(Llama):
    """As in Phi-3: what is split within a layer is gathered behind it. Also the vocabulary, as in Pythia."""

    def __init__(self, data):
        super().__init__(data)
        self.head = nn.Linear(32, data.num_classes, bias=False)
        inner = dict.fromkeys(("gate", "up", "q", "k", "v"), "colwise_gather_output")
        inner |= dict.fromkeys(("o", "down"), "rowwise_split_input")
        self.tensor_plan = {f"layers.*.{name}": style for name, style in inner.items()}
        self.tensor_plan |= {"tokens": "embedding_rowwise", "head": "colwise_gather_output"}


class GatheredTied(Gathered):
    """Embedding and head share their weight, and keep sharing it; the embedding has a buffer, as in Gemma."""

    def __init__(self, data):
        super().__init__(data)
        self.tokens = Scaled(data.num_classes, 32)
        self.tokens.weight = self.head.weight


class Scaled(nn.Embedding):
    def __init__(self, rows, columns):
        super().__init__(rows, columns)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids):
        return super().forward(ids) * self.scale


class TiedBlocks(Llama):
    """Two blocks share a weight that is whole: FSDP cannot shard it with each of them."""

    def __init__(self, data):
        super().__init__(data)
        self.layers[1].norm1.weight = self.layers[0].norm1.weight


class Normed(nn.Module):
    """Batch norm in a part that stays whole."""

    tensor_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self, data):
        super().__init__()
        self.first, self.norm = nn.Linear(64, 32), nn.BatchNorm1d(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, data.num_classes)

    def forward(self, images):
        return self.down(self.up(self.norm(self.first(images.flatten(1))).tanh()).tanh())


@pytest.mark.parametrize(("world_size", "group"), [(4, 8), *slow((2, 56))])
def test_groups_of_batch_norm_are_those_of_the_replicas(tmp_path, world_size, group):
    """Two replicas of two ranks share out seven groups; one replica has a single group."""
    argv = ("--model", f"{NAME}Normed", *STEPS, "--global-batch-size", "56", "--batchnorm-group", str(group))
    argv += ("--lr", "0.01", "--device", "cpu")
    assert_same_training(train("tensor", tmp_path, world_size, *argv), train("single", tmp_path, 1, *argv))


class OneReplicaStops(Llama):
    """The second replica's loss does not come from its layers."""

    def __init__(self, data):
        super().__init__(data)
        self.layers[1].register_forward_hook(
            lambda layer, inputs, x: x.detach() if layer.training and int(os.environ["RANK"]) > 1 else x
        )


OWN = (*GPT[:4], "--seq-len", "16", *STEPS, "--optimizer", "adamw", "--lr", "0.001", "--global-batch-size", "8")
NAME = "tests.parallel.test_tensor:"


@pytest.mark.parametrize(
    ("model", "world_size", "switches"),
    [
        ("Llama", 4, ()),
        ("SummedHeads", 2, ()),
        ("SummedZeros", 2, ()),
        ("GatheredTied", 4, ()),
        *slow(
            ("Gathered", 6, (FULL,)),
            ("GatheredTied", 3, ("--tensor-parallel", "3")),
            ("GatheredTied", 6, (FULL,)),
            ("Llama", 2, ("--amp", "bf16")),
            ("Llama", 6, (FULL,)),
            ("SummedHeads", 4, (FULL,)),
        ),
        ("TiedBlocks", 4, (FULL,)),
    ],
)
def test_a_users_model_is_split_by_its_plan(tmp_path, model, world_size, switches):
    """single resumes from its checkpoint."""
    argv = (*OWN, "--model", NAME + model)
    run, whole = train("tensor", tmp_path, world_size, *switches, *argv), train("single", tmp_path, 1, *argv)
    if "bf16" in switches:
        assert losses(run) == pytest.approx(losses(whole), rel=2.0**-8)
        return
    assert_same_training(run, whole)
    later = train("single", tmp_path / "later", 1, *argv, "--start-from", str(run / MIDDLE))
    assert_same_training(later, whole, after=2)


def dropping(data):
    model = Llama(data)
    for layer in model.layers:
        layer.drop.p = 0.5
    return model


def test_ranks_of_a_replica_drop_the_same_units(tmp_path):
    """Otherwise a rank would add its activations to those of others that have dropped other units."""
    argv = (*OWN, "--model", f"{NAME}dropping")
    run, whole = train("tensor", tmp_path, 2, *argv), train("single", tmp_path, 1, *argv)
    assert_same_training(run, whole)


class PackedHeads(nn.Module):
    """torch's attention, whose queries, keys and values are in one parameter."""

    def __init__(self):
        super().__init__()
        self.inner, self.tensor_plan = nn.MultiheadAttention(8, 2), {"inner.out_proj": "rowwise"}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (None, "it has no plan of what to split; give it a tensor_plan"),
        (list(PLAN), "tensor_plan is a list; give a dict such as"),
        (
            {"layers.*.q": "column"},
            "tensor_plan has 'column' for layers.*.q; use colwise, colwise_gather_output, rowwise, ",
        ),
        ({"layers.q": "colwise"}, "tensor_plan names layers.q, which is not a module of it; correct the name"),
        (
            {"layers.*.norm1": "colwise"},
            "tensor_plan names layers.0.norm1 of a LayerNorm; colwise splits only nn.Linear: leave it out",
        ),
        (
            {"head": "embedding_rowwise"},
            "tensor_plan names head of a Linear; embedding_rowwise splits only nn.Embedding: leave it out",
        ),
        ({"head": "colwise"}, "tensor_plan names head, which shares its weight; leave it out"),
        (
            {"tokens": "embedding_rowwise", "head": "rowwise_split_input"},
            "tensor_plan names tokens, which shares its weight; leave it out",
        ),
        ({}, "it has no plan of what to split; give it a tensor_plan"),
        (
            {"layers.*.q": "colwise", "layers.1.*": "rowwise"},
            "tensor_plan names layers.1.q by two patterns; remove",
        ),
    ],
)
def test_plans_that_name_what_cannot_be_split_are_refused(plan, message):
    model = Llama(Mock(num_classes=256))
    model.tensor_plan = plan
    with refused(f"--model mine:net: {message}"):
        read_plan(model, "mine:net")
    with refused("--model mine:net: tensor_plan names inner.out_proj of nn.MultiheadAttention; rowwise splits"):
        read_plan(PackedHeads(), "mine:net")


class NormedHeads(nn.Module):
    """A norm of each head: a rank sees the gradient from its own heads alone."""

    def __init__(self, data):
        super().__init__()
        self.tensor_plan = {"q": "colwise", "o": "rowwise"}
        self.tokens, self.head = nn.Embedding(data.num_classes, 32), nn.Linear(32, data.num_classes)
        self.q, self.norm, self.o = nn.Linear(32, 32), nn.LayerNorm(8), nn.Linear(32, 32)

    def forward(self, ids):
        return self.head(self.o(self.norm(self.q(self.tokens(ids)).unflatten(-1, (-1, 8))).flatten(2)))


class SummedHeads(NormedHeads):
    """Its gradient is summed over the ranks."""

    def __init__(self, data):
        super().__init__(data)
        self.tensor_plan["norm"] = "replicated_with_grad_allreduce"


class ZeroHeads(NormedHeads):
    """Behind a layer that begins with zeros, all gradients are zero."""

    def __init__(self, data):
        super().__init__(data)
        nn.init.zeros_(self.o.weight)


class SeldomNormed(SummedHeads):
    """In training, every other pass leaves out the norm."""

    passes = 0

    def forward(self, ids):
        q = self.q(self.tokens(ids)).unflatten(-1, (-1, 8))
        self.passes += self.training
        return self.head(self.o((q if self.training and self.passes % 2 == 0 else self.norm(q)).flatten(2)))


def test_a_gradient_of_an_earlier_pass_alone_is_summed_over_the_ranks(tmp_path):
    argv = (*OWN, "--model", f"{NAME}SeldomNormed", "--accumulate-steps", "2")
    run, whole = train("tensor", tmp_path, 2, *argv), train("single", tmp_path, 1, *argv)
    assert_same_training(run, whole)
    ours, theirs = ([m["grad_norm"] for m in metrics(path) if "grad_norm" in m] for path in (run, whole))
    assert ours == pytest.approx(theirs, rel=1e-5)


class SummedZeros(SummedHeads, ZeroHeads):
    """Its zeros are there again after the check."""


class HookedHeads(SummedHeads):
    """A hook on the gradient of a parameter that a shard replaces; it changes no gradient of the check."""

    def __init__(self, data):
        super().__init__(data)
        self.q.weight.register_hook(lambda gradient: gradient.clamp(-1e6, 1e6))


class CountedHeads(NormedHeads):
    """The number of heads is that of the whole model."""

    def forward(self, ids):
        return self.head(self.o(self.q(self.tokens(ids)).unflatten(-1, (4, 8)).flatten(2)))


class HalfSum(NormedHeads):
    """A mean over the units of a rank, without a layer that sums over the ranks."""

    def __init__(self, data):
        super().__init__(data)
        del self.tensor_plan["o"]

    def forward(self, ids):
        return self.head(self.o(self.tokens(ids) * self.q(self.tokens(ids)).mean(-1, keepdim=True)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("NormedHeads", "it has another gradient of norm.weight than whole; give its module the style repl"),
        ("ZeroHeads", "it has another gradient of norm.weight than whole; give its module the style repl"),
        ("HookedHeads", "it drops the gradient hook of q.weight; leave that layer whole"),
        ("CountedHeads", "it fails: RuntimeError: unflatten"),
        ("HalfSum", "it returns other values than whole; let a rowwise layer take what colwise layers return"),
    ],
)
def test_plans_that_compute_something_else_are_refused(tmp_path, model, message):
    argv = (*OWN, "--device", "cpu", "--model", NAME + model)
    outcome = start_run("tensor", tmp_path, 2, *argv).wait(60)
    assert outcome.refusal.startswith(f"error: --model {argv[-1]}: split by its plan, {message}")


@pytest.mark.slow
@pytest.mark.skipif(NEEDS_EVEN, reason="torch before 2.13 divides no such sequence; install a later one")
def test_sequences_that_do_not_divide_and_sharded_checkpoints(tmp_path):
    """The 4 ranks of a replica have 2, 2, 1 and 0 of 5 positions; single resumes from their shards."""
    argv = (*MODELS["gpt-tiny"], *STEPS, "--seq-len", "5", "--global-batch-size", "6")
    words = ("--tensor-parallel", "4", SEQUENCE, LOSS, "--sharded-checkpoints")
    whole, run = train("single", tmp_path, 1, *argv), train("tensor", tmp_path, 4, *argv, *words)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    checkpoint = str(run / "checkpoints" / "step-000000002.pt")
    later = train("single", tmp_path / "later", 1, *argv, "--start-from", checkpoint)
    assert_same_training(later, whole, after=2)


MIDDLE = "checkpoints/step-000000002.pt"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("single", "ranks", "switches"),
    [("gpt-tiny", 2, (LOSS,)), ("vit-tiny", 2, ()), ("gpt-tiny", 4, (SEQUENCE,)), ("lenet", 2, ())],
    indirect=["single"],
)
def test_shards_of_shards_pass_between_recipes_and_layouts(single, tmp_path, ranks, switches):
    """Rows do not divide evenly by 3 replicas, or ranks of fsdp."""
    argv, whole = single
    words, shards = (*argv, "--tensor-parallel", str(ranks), *switches, FULL), "--sharded-checkpoints"
    run = train("tensor", tmp_path / "run", 3 * ranks, *words, shards)
    later = train("single", tmp_path / "single", 1, *argv, "--start-from", str(run / MIDDLE))
    assert_same_training(later, whole, after=2)
    other = train("fsdp", tmp_path / "fsdp", 3, *argv, shards)
    ours, theirs = (read_checkpoint(folder / MIDDLE)["shards"]["files"] for folder in (run, other))
    assert sum(file["size"] for file in ours) == sum(file["size"] for file in theirs)  # nothing is written twice
    for number, earlier in enumerate((run, other, whole)):
        argv = (*words, "--start-from", str(earlier / MIDDLE))
        later = train("tensor", tmp_path / f"later{number}", 2 * ranks, *argv)
        assert_same_training(later, whole, after=2)


def step_as_on_a_gpu():
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        sys.modules[name]._get_foreach_kernels_supported_devices = lambda: ["cpu"]


@pytest.mark.parametrize("single", ["gpt-tiny", *slow("vit-tiny", "lenet")], indirect=True)
@pytest.mark.parametrize(("world_size", "switches"), [(2, ()), *slow((4, (FULL,)))])
def test_shards_are_updated_as_on_a_gpu(single, tmp_path, world_size, switches):
    """On GPUs, torch's optimizers update all parameters in one call, DTensors beside plain tensors.

    The second run goes on from a checkpoint of single.
    """
    argv, whole = single
    argv = (*argv, *switches)
    start_run("tensor", tmp_path, world_size, *argv, setup=step_as_on_a_gpu).wait(check=True)
    assert_same_training(tmp_path / "run", whole)
    how = {"name": "later", "setup": step_as_on_a_gpu}
    start_run("tensor", tmp_path, world_size, *argv, "--start-from", str(whole / MIDDLE), **how).wait(check=True)
    assert_same_training(tmp_path / "later", whole, after=2)


@pytest.mark.parametrize("switches", [(), (FULL,)])
def test_shares_may_be_uneven_and_a_replica_may_take_several_ranks_but_one_sample(tmp_path, switches):
    """4 ranks in two replicas train on batches of 3 samples: the replicas have 1 and 2.

    SGD without clipping sees a sum of gradients that is wrong by a factor.
    """
    argv = ("--max-steps", "3", "--global-batch-size", "3", "--data", "synthetic", "--num-samples", "20")
    argv += ("--image-size", "8", "--lr", "0.001")
    run, whole = train("tensor", tmp_path, 4, *argv, *switches), train("single", tmp_path, 1, *argv)
    assert_same_training(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "switches"), [(2, ()), (4, (FULL, SEQUENCE, "--accumulate-steps", "2"))])
def test_bf16_stays_close(tmp_path, world_size, switches):
    """2^-8 is bfloat16's rounding error. Four steps of SGD change the loss by a fifth.

    A gradient that is wrong by a factor changes them, too; AdamW would hide it.
    """
    sgd = ("--optimizer", "sgd", "--lr", "0.3", "--warmup-steps", "1")
    argv = (*GPT, *sgd, "--max-steps", "4", "--amp", "bf16")
    run, whole = train("tensor", tmp_path, world_size, *argv, *switches), train("single", tmp_path, 1, *argv)
    assert losses(whole)[-1] < 0.9 * losses(whole)[0]
    assert losses(run) == pytest.approx(losses(whole), rel=2.0**-8)


@pytest.mark.parametrize(
    ("world_size", "argv", "message"),
    [
        (3, (), "--tensor-parallel 2 does not divide 3 processes; start 2 or 4, or give"),
        (3, ("--tensor-parallel", "3", *GPT), "--tensor-parallel 3 does not divide the 4 attention heads of gpt-"),
        (2, ("--model", "resnet18"), "--model resnet18: it has no plan of what to split; use lenet, vit-tiny, "),
        (2, (SEQUENCE,), "--sequence-parallel: --model lenet has no plan for sequences; drop it, or use vit-tiny"),
        (
            2,
            (LOSS, "--model", "vit-tiny"),
            "--loss-parallel: --model vit-tiny has no plan for vocabularies; drop it, or use",
        ),
    ],
)
def test_refusals(tmp_path, world_size, argv, message):
    outcome = start_run("tensor", tmp_path, world_size, "--device", "cpu", *argv).wait(60)
    assert outcome.refusal.startswith(f"error: {message}")


CHANGED = """
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from recipes.common.models.gpt import GPT


def same(data, act=None):
    model = GPT(data.num_classes, 16, 2, 4)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].mlp[1] = act or model.blocks[1].mlp[1]
    return model


def masked(data):
    model = same(data)
    model.blocks[1].mlp[0].weight.register_hook(lambda gradient: gradient * 0.5)
    return model


def normalised(data):
    model = same(data)
    weight_norm(model.blocks[1].mlp[0])
    return model


class Thaws(nn.GELU):
    def forward(self, inputs):
        if self.training:
            self.block[0].norm1.weight.requires_grad_()
        return super().forward(inputs)


def thaws(data):
    model = same(data)
    model.blocks[0].mlp[1] = Thaws()
    model.blocks[0].mlp[1].block = [model.blocks[0]]
    return model


softmax = lambda data: same(data, nn.Softmax(-1))
slope = lambda data: same(data, nn.PReLU())
"""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("same", ""),
        ("softmax", ": split by its plan, it returns other values than whole"),
        ("slope", ": split by its plan, it has another gradient of blocks.1.mlp.1.weight than whole"),
        *slow(("masked", ": split by its plan, it has another gradient of blocks.1.mlp.0.weight than whole")),
        ("normalised", ": split by its plan, it fails: KeyError: "),
    ],
)
@pytest.mark.parametrize("switches", [(), *slow(((SEQUENCE, LOSS),))])
def test_a_model_that_its_plan_does_not_fit_is_refused(tmp_path, model, message, switches):
    """An own model of a class with a plan may have other layers: their sums would be of a rank's part."""
    (tmp_path / "changed.py").write_text(CHANGED)
    argv = ("--device", "cpu", *GPT, "--model", f"changed:{model}", "--max-steps", "1", *switches)
    setup = functools.partial(import_from, tmp_path)
    outcome = start_run("tensor", tmp_path, 2, *argv, setup=setup).wait(60, check=not message)
    if message:
        assert outcome.refusal.startswith(f"error: --model changed:{model}{message}")
        assert outcome.refusal.endswith(
            "; leave the layers as their class has made them, or use --tensor-parallel 1"
        )


def test_a_block_of_shards_that_thaws_its_gathered_weights_is_refused(tmp_path):
    """FSDP would drop their gradients."""
    (tmp_path / "changed.py").write_text(CHANGED)
    argv = ("--device", "cpu", *GPT, "--model", "changed:thaws", "--max-steps", "2", FULL)
    outcome = start_run("tensor", tmp_path, 2, *argv, setup=functools.partial(import_from, tmp_path)).wait(60)
    what = "training has set requires_grad of blocks.0.norm1.weight, whose gradient the ranks do not exchange"
    assert set(outcome.statuses) == {2}, outcome.text
    assert {line.startswith(f"error: {what}; ") for line in outcome.errors} == {True}, outcome.text


def test_a_block_of_shards_that_one_replica_does_not_use_is_named(tmp_path):
    """Ranks would wait in different exchanges."""
    argv = (*OWN, "--device", "cpu", "--model", f"{NAME}OneReplicaStops", FULL)
    refusal = start_run("tensor", tmp_path, 4, *argv).wait(60).refusal
    assert refusal.startswith("error: the block layers.0 got gradients on some ranks or in some steps only, and ")


@pytest.mark.parametrize("earlier", ["pass", "step", None])
def test_a_parameter_that_only_some_passes_steps_or_replicas_use_is_refused(monkeypatch, earlier):
    """Its gradient would not be summed, and the replicas would diverge."""
    layers = nn.ModuleDict({"used": nn.Linear(2, 2), "frozen": nn.Linear(2, 2), "seldom": nn.Linear(2, 2)})
    layers["frozen"].requires_grad_(False)
    replicas, everyone = Mock(), Mock()
    replicas.size.return_value = everyone.size.return_value = 2
    monkeypatch.setattr(torch.distributed, "all_reduce", Mock())
    gradients, inputs = GradientSum(layers, replicas, everyone), torch.ones(1, 2)
    if earlier:
        gradients.is_last = earlier == "step"
        layers["used"](layers["seldom"](inputs)).sum().backward()
        gradients.finish()
    gradients.is_last = True
    layers["used"](layers["frozen"](inputs)).sum().backward()
    with pytest.raises(UserError, match=r"^seldom.weight got no gradient"):
        gradients.finish()
    replicas.size.return_value = 1
    gradients.buckets[replicas].clear()
    gradients.finish()  # one replica sums nothing


class Forgetful(nn.Module):
    """A model in which the second rank skips a layer."""

    def __init__(self, data):
        super().__init__()
        self.seldom = nn.Linear(64, 64)
        self.head = nn.Linear(64, data.num_classes)

    def forward(self, images):
        hidden = images.flatten(1)
        return self.head(hidden if os.environ["RANK"] == "1" else self.seldom(hidden))


def test_a_parameter_that_one_replica_does_not_use_ends_the_job_with_its_name(tmp_path):
    """The other replica waits for the gradient, and ends as soon as that rank has gone."""
    argv = ("--device", "cpu", "--model", "tests.parallel.test_tensor:Forgetful", "--tensor-parallel", "1")
    outcome = start_run("tensor", tmp_path, 2, *argv).wait(60)
    assert outcome.statuses == [1, 2], outcome.text
    assert "error: seldom.weight got no gradient, so that replicas cannot sum it; use it in" in outcome.outputs[1]
    assert "error: rank 0" in outcome.outputs[0]
    assert "lost another rank" in outcome.outputs[0]


def test_switches_that_would_do_nothing_or_harm_are_refused():
    with pytest.raises(UserError, match="--sequence-parallel: --tensor-parallel 1 splits nothing; drop one"):
        options(["--tensor-parallel", "1", SEQUENCE])
    with pytest.raises(UserError, match="--loss-parallel: --task my:Task may read all logits; drop it"):
        options([*GPT, "--task", "my:Task", LOSS])
    with pytest.raises(UserError, match="--fully-shard: --tensor-parallel 1 splits nothing; drop it, or use"):
        options(["--tensor-parallel", "1", FULL])


def test_on_an_older_torch_ranks_need_equal_numbers_of_tokens(monkeypatch):
    vit, other = VisionTransformer(1, 10, 10), nn.Module()
    monkeypatch.setattr(plans, "NEEDS_EVEN", True)
    check_tokens(other, 1, 4)  # a model without a sequence has its own refusal
    other.blocks = ()
    for model, length, tokens in ((vit, 1, 25), (other, 5, 5)):
        check_tokens(model, length, tokens)
        with refused(f"cannot divide {tokens} tokens by 4; torch 2.13 can, or use a multiple of 4 tokens"):
            check_tokens(model, length, 4)
    monkeypatch.setattr(plans, "NEEDS_EVEN", False)
    for model, length in ((vit, 1), (other, 5)):
        check_tokens(model, length, 4)


# ---- bytes on the wire


def planned(recipe, world_size, *argv):
    """Return the plan's row for a job with one rank per node."""
    words = ["--nodes", str(world_size), "--gpus", "1", "--compute-ms", "1", "--samples", "1000000"]
    return make_plan([recipe, *words, *argv])[0]["rows"][-1]


def gradient_bytes(ranks, switches=()):
    """Return the bytes of gpt-tiny's gradients that a rank sums over the replicas and over all ranks."""
    args = options([*GPT, "--device", "cpu"])
    model = build_model(args, load_data(args, torch.device("cpu"), print))
    sizes = {name: 4 * parameter.numel() for name, parameter in model.named_parameters()}
    kinds = ("attention", "mlp", "embedding" if LOSS in switches else "attention")
    split = sum(size for name, size in sizes.items() if any(kind in name for kind in kinds))
    norms = sum(size for name, size in sizes.items() if ".norm" in name and "head" not in name)
    everywhere = norms if SEQUENCE in switches else 0
    return sum(sizes.values()) - split + split / ranks - everywhere, everywhere


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "ranks", "amp"), [(2, 2, "none"), (1, 4, "none"), (1, 2, "bf16")])
def test_activations_and_gradients_of_shards_cross_the_wire(tmp_path, replicas, ranks, amp):
    """Each of 4 blocks all-reduces b samples of 16 x 64 numbers 4 times; replicas sum the gradients of a rank.

    With bf16, the two all-reduces of the forward pass have two bytes per number.
    """
    own = (*GPT, "--global-batch-size", "8", "--device", "cpu", "--tensor-parallel", str(ranks), "--amp", amp)
    setup = functools.partial(observe.observe_steps, tmp_path)
    train("tensor", tmp_path, replicas * ranks, *own, "--max-steps", "5", setup=setup)
    activations = 4 * 4 * (8 // replicas * 16 * 64 * (4 if amp == "none" else 3))
    expected = 2 * (ranks - 1) / ranks * activations + 2 * (replicas - 1) / replicas * gradient_bytes(ranks)[0]
    row = planned("tensor", replicas * ranks, *own)
    assert row["sent_bytes_per_node"] == pytest.approx(expected)
    assert row["sent_in_replica_bytes"] + row["sent_to_replicas_bytes"] == pytest.approx(expected)
    for sent in observe.sent_per_step(tmp_path, replicas * ranks):
        assert expected <= sent <= 1.05 * expected


@pytest.mark.slow
def test_a_rank_holds_its_share_of_a_replicas_share(tmp_path):
    """AdamW keeps two numbers a weight, beside the weight and its gradient."""
    argv = (*MODELS["gpt-tiny"], "--device", "cpu", "--max-steps", "1", FULL)
    train("tensor", tmp_path, 4, *argv, setup=functools.partial(note_bytes, tmp_path))
    held = [int((tmp_path / f"bytes{rank}").read_text()) for rank in range(4)]
    assert held == [4 * gradient_bytes(2)[0] / 2] * 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ranks_packed_rows_lie_where_the_whole_model_has_them(ranks):
    whole = torch.arange(3 * 4 * 5)
    for rank, rows in enumerate(swap(whole, 3, ranks).chunk(ranks)):
        box = (len(rows) * rank, len(rows) * (rank + 1))
        packed = {"qkv": len(rows) // 3}
        boxes = packed_boxes(packed, ranks, "qkv", (box,))
        assert len(boxes) == 3
        assert torch.equal(torch.cat([whole[first:end] for ((first, end),) in boxes]), rows)
        for replica, part in enumerate(rows.chunk(4)):  # --fully-shard
            first = box[0] + replica * len(rows.chunk(4)[0])
            boxes = packed_boxes(packed, ranks, "qkv", ((first, first + len(part)),))
            assert torch.equal(torch.cat([whole[start:end] for ((start, end),) in boxes]), part)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "ranks", "switches"),
    [
        *((2, 2, (SEQUENCE,)), (1, 4, (SEQUENCE, LOSS)), (2, 2, (LOSS,))),
        *((2, 2, (FULL,)), (2, 2, (FULL, SEQUENCE, LOSS))),
    ],
)
def test_tokens_and_sums_of_the_vocabulary_cross_the_wire(tmp_path, replicas, ranks, switches):
    """An activation is b samples of 16 x 64 numbers; a unit is (N-1)/N of its bytes.

    A reduce-scatter should send one unit; gloo's sends two, because it is an all-reduce that keeps only a part.
    """
    own = (*GPT, "--global-batch-size", "8", "--device", "cpu", "--tensor-parallel", str(ranks), *switches)
    setup = functools.partial(observe.observe_steps, tmp_path)
    train("tensor", tmp_path, replicas * ranks, *own, "--max-steps", "5", setup=setup)
    places, n = 8 // replicas * 16, replicas * ranks
    units = 4 * 8  # each of 4 blocks: 4 all-reduces, or 4 all-gathers and 4 reduce-scatters
    units += 2 if SEQUENCE in switches else 0  # the tokens before the head, their gradient after the embedding
    units += (3 if SEQUENCE in switches else 4) if LOSS in switches else 0
    units += 4 * 4 + (LOSS in switches) if SEQUENCE in switches else 0  # second units of gloo's reduce-scatters
    activations = units * places * 64 * 4 + (6 * places * 4 if LOSS in switches else 0)
    own, norms = gradient_bytes(ranks, switches)
    if FULL in switches:
        # All but the embedding and the last norm is gathered twice; a reduce-scatter sends as much as two gathers.
        outer = 4 * 64 * (256 / (ranks if LOSS in switches else 1) + 2)
        own, n = (4 * (own + norms) - outer) / 2, ranks
    expected = (ranks - 1) / ranks * activations + 2 * (replicas - 1) / replicas * own + 2 * (n - 1) / n * norms
    for sent in observe.sent_per_step(tmp_path, replicas * ranks):
        assert expected <= sent <= 1.05 * expected


# ---- what the plan says of memory and of checkpoints


def note_held(folder):
    """Make each rank write the bytes that it holds in a step, in its gradients' sums and for a checkpoint."""
    note_bytes(folder)
    finish, begin = GradientSum.finish, CheckpointWriter.begin

    def noting_finish(self):
        pending = [flat for _, flat, _ in self.sums] + self.buckets[self.replicas]
        (folder / f"sums{os.environ['RANK']}").write_text(str(allocated(pending)))
        finish(self)

    def noting_begin(self, content, is_best=False, copies=True):
        begin(self, content, is_best, copies)
        gathered = {name: value for name, value in content.items() if name != "parts"}
        held = [x for x in tree_leaves([gathered, self._copy]) if isinstance(x, torch.Tensor)]
        (folder / f"host{os.environ['RANK']}").write_text(str(allocated(held)))

    GradientSum.finish, CheckpointWriter.begin = noting_finish, noting_begin


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "world_size", "argv"),
    [
        ("tensor", 2, ["--sharded-checkpoints"]),
        ("tensor", 4, []),
        ("fsdp", 3, ["--sharded-checkpoints"]),
        ("fsdp", 4, ["--replicas", "2"]),
    ],
)
def test_the_plan_knows_what_ranks_hold_and_write(tmp_path, recipe, world_size, argv):
    argv = ["--data", "digits", *MODELS["vit-tiny"], "--device", "cpu", *argv]
    setup = functools.partial(note_held, tmp_path)
    run = train(recipe, tmp_path, world_size, *argv, "--max-steps", "2", "--checkpoint-every", "1", setup=setup)
    row = planned(recipe, world_size, *argv)
    memory, counts = row["memory_bytes"], 4 * 79  # AdamW counts the steps of each of 79 parameters
    held = [int((tmp_path / f"bytes{rank}").read_text()) for rank in range(world_size)]
    expected = memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert expected - counts <= max(held) <= (1.0 if recipe == "tensor" else 1.1) * expected
    if recipe == "tensor":
        assert int((tmp_path / "sums0").read_text()) == memory["gradient_sums"]
    assert int((tmp_path / "host0").read_text()) == pytest.approx(row["checkpoint_host_bytes"], rel=0.01)
    newest = max((run / "checkpoints").glob("step-*.pt"))
    if "--sharded-checkpoints" in argv:
        files = read_checkpoint(newest)["shards"]["files"]
        assert files[0]["size"] == max(file["size"] for file in files) == row["checkpoint_file_bytes"]
        assert sum(file["size"] for file in files) == row["checkpoint_bytes"]
    else:
        assert row["checkpoint_bytes"] < newest.stat().st_size < 1.1 * row["checkpoint_bytes"]
