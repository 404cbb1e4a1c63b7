"""Context parallelism: each layout of ranks, its checkpoints, its sample, its refusals, what crosses the wire."""

from __future__ import annotations

import functools
import os
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from recipes.common.checkpoint.reading import read_checkpoint
from recipes.common.errors import UserError
from recipes.common.models.attention import causal_attention, positions, use_sequence_sharding
from recipes.common.models.gpt import GPT, Attention, rotate
from recipes.context import attention
from recipes.context.attention import make_sequence_sharding, shard_sequence
from recipes.context.train import options
from tests import observe
from tests.conftest import refused, slow
from tests.page import run_page, shuffle_as_the_pages
from tests.parallel.test_fsdp import note_bytes
from tests.parallel.test_your_model import DIVIDED
from tests.support import (
    ROOT,
    TEXT_DIR,
    assert_same_training,
    losses,
    metrics,
    run_ranks,
    start_run,
    train,
    weights,
)

TEXT = ("--data", "text", "--data-dir", str(TEXT_DIR), "--device", "cpu")
STEPS = (*TEXT, "--seq-len", "16", "--global-batch-size", "6", "--max-steps", "4", "--checkpoint-every", "2")
STEPS += ("--clip-grad-norm", "1")
FULL = "--fully-shard"


@pytest.mark.parametrize(
    ("replicas", "ranks", "more"),
    [
        (1, 2, ()),
        (2, 2, ("--accumulate-steps", "3", "--deterministic")),
        (2, 2, (FULL,)),
        *slow((1, 4, ()), (1, 3, ("--seq-len", "18")), (4, 1, ()), (1, 8, ())),
        *slow((1, 3, ("--seq-len", "18", FULL)), (1, 4, (FULL,)), (1, 2, (FULL, "--activation-checkpointing"))),
        *slow((2, 2, (FULL, "--accumulate-steps", "3"))),
    ],
)
def test_every_layout_has_the_losses_of_single(single, tmp_path, replicas, ranks, more):
    """Of 16 positions, each of 8 ranks has two, and each chunk is one."""
    run = train("context", tmp_path, replicas * ranks, *STEPS, "--context-parallel", str(ranks), *more)
    whole = train("single", tmp_path, 1, *STEPS, *more[:2]) if "--seq-len" in more else single
    assert_same_training(run, whole)


SGD = ("--optimizer", "sgd", "--lr", "0.1", "--warmup-steps", "1", "--clip-grad-norm", "1000")
"""Updates that are wrong by a factor if gradients are: AdamW and clipping would hide it."""


@pytest.mark.parametrize("switches", [(), *slow(((FULL,),))])
def test_gradients_have_the_size_of_those_of_single(tmp_path, switches):
    argv = (*STEPS, *SGD)
    run = train("context", tmp_path, 4, *argv, "--context-parallel", "2", *switches)
    assert_same_training(run, train("single", tmp_path, 1, *argv))


MIDDLE = "checkpoints/step-000000002.pt"


def test_a_checkpoint_passes_to_single_and_back(single, tmp_path):
    run = train("context", tmp_path, 2, *STEPS, "--start-from", str(single / MIDDLE))
    later = train(
        "single", tmp_path, 1, *STEPS, "--start-from", str(train("context", tmp_path, 4, *STEPS) / MIDDLE)
    )
    for path in (run, later):
        assert_same_training(path, single, after=2)


@pytest.mark.slow
def test_shards_pass_between_recipes_and_numbers_of_ranks(single, tmp_path):
    """Rows do not divide evenly by 3 ranks of fsdp."""
    shards = (*STEPS, "--sharded-checkpoints")
    run = train("context", tmp_path / "run", 4, *shards, FULL)
    assert len(read_checkpoint(run / MIDDLE)["shards"]["files"]) == 4
    later = [train("single", tmp_path / "single", 1, *STEPS, "--start-from", str(run / MIDDLE))]
    other = train("fsdp", tmp_path / "fsdp", 3, *shards, "--start-from", str(run / MIDDLE))
    for number, earlier in enumerate((run, single)):
        argv = (*STEPS, FULL, "--start-from", str(earlier / MIDDLE))
        later.append(train("context", tmp_path / f"later{number}", 2, *argv))
    for path in later:
        assert_same_training(path, single, after=2)
    assert losses(other, after=2) == pytest.approx(losses(single)[2:], rel=1e-5)


def test_given_weights_are_evaluated_as_by_single(single, tmp_path):
    argv = (*STEPS, "--weights", str(single / "checkpoints/step-000000004.pt"), "--evaluate")
    ours, theirs = (metrics(path) for path in (train("context", tmp_path, 2, *argv), single))
    assert [line["test_loss"] for line in ours] == pytest.approx([theirs[-1]["test_loss"]], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["bf16", "fp16", f"bf16 {FULL}", f"fp16 {FULL}"])
def test_half_precision_stays_close(tmp_path, words):
    """2^-8 is bfloat16's rounding error. The steps change the loss by a fifth."""
    amp, *switches = words.split()
    argv = (*STEPS, *SGD, "--lr", "0.3", "--amp", amp)
    run, whole = train("context", tmp_path, 2, *argv, *switches), train("single", tmp_path, 1, *argv)
    assert losses(whole)[-1] < 0.9 * losses(whole)[0]
    assert losses(run) == pytest.approx(losses(whole), rel=2.0**-8)


@pytest.mark.slow
@pytest.mark.parametrize("switches", [(), (FULL,)])
def test_a_compiled_model_has_the_losses_of_single(single, tmp_path, switches):
    run = train("context", tmp_path, 2, *STEPS, "--compile", *switches)
    assert_same_training(run, single)


@pytest.mark.parametrize("switches", [(), *slow(((FULL,),))])
def test_all_ranks_write_the_sample_of_single(tmp_path, switches):
    """Rank 0 alone could not: each rank computes its own part of each forward pass."""
    argv = (*STEPS, "--lr", "0.01", "--warmup-steps", "1")
    texts = []
    for recipe, world_size, more in (("single", 1, ()), ("context", 4, switches)):
        outcome = start_run(recipe, tmp_path, world_size, *argv, *more, name=recipe).wait(check=True)
        texts.append(outcome.outputs[0].split("a sample of what the model writes:\n")[1].split("\nresult ")[0])
    assert texts[0] == texts[1]
    assert len(texts[0]) > 10


class Grouped(nn.Module):
    """A user's own model: learned positions, and two query heads for each head of keys and values."""

    def __init__(self, data):
        super().__init__()
        self.tokens, self.places = nn.Embedding(data.num_classes, 32), nn.Embedding(64, 32)
        self.norm, self.layers = nn.LayerNorm(32), nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.head = nn.Linear(32, data.num_classes)

    def place(self, ids):
        return positions(ids.shape[1], ids.device)

    def project(self, x):
        return [layer(x) for layer in self.layers]

    def attend(self, q, k, v):
        return causal_attention(q, k, v, 0.5)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(self.place(ids))
        q, kv = self.project(self.norm(x))
        q = q.unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = kv.unflatten(-1, (4, 8)).transpose(1, 2).chunk(2, 1)
        return self.head(x + self.attend(q, k, v).transpose(1, 2).flatten(2))


class OwnPlaces(Grouped):
    def place(self, ids):
        return torch.arange(ids.shape[1])


class OwnKeys(Grouped):
    def attend(self, q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.5)


class SumsAcross(Grouped):
    def forward(self, ids):
        return super().forward(ids) + super().forward(ids.flip(1)).cumsum(1)


class BatchNormed(Grouped):
    """In eval(), which the check uses, batch norm treats each position by itself."""

    def __init__(self, data):
        super().__init__(data)
        self.norm = OfPositions(32)


class OfPositions(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Limited(Grouped):
    def __init__(self, data):
        super().__init__(data)
        self.tokens = nn.Embedding(data.num_classes, 32, max_norm=1.0)
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-1e6, 1e6))


class Thaws(Grouped):
    def __init__(self, data):
        super().__init__(data)
        self.places.requires_grad_(False)
        self.step = 0

    def forward(self, ids):
        self.step += self.training
        if self.step == 2:
            self.places.requires_grad_()
        return super().forward(ids)


class Shares(Grouped):
    def __init__(self, data):
        super().__init__(data)
        self.layers[1].weight = nn.Parameter(self.layers[0].weight.data.t())


class OtherOrder(Grouped):
    def project(self, x):
        is_other = self.training and os.environ["RANK"] == "1"
        return [layer(x) for layer in (self.layers[::-1] if is_other else self.layers)]


class OtherGradients(Grouped):
    def project(self, x):
        q, kv = super().project(x)
        return q.detach() if self.training and os.environ["RANK"] == "1" else q, kv


def drawn_by_rank(data):
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    return Grouped(data)


OWN = "tests.parallel.test_context:"


@pytest.mark.parametrize(
    ("ranks", "more"), [(2, ()), (2, (FULL,)), *slow((4, ("--accumulate-steps", "3")), (2, ("--compile",)))]
)
def test_a_users_model_has_the_losses_of_single(tmp_path, ranks, more):
    argv = (*STEPS, "--model", f"{OWN}Grouped", "--optimizer", "adamw", "--lr", "0.001")
    run, whole = train("context", tmp_path, ranks, *argv, *more), train("single", tmp_path, 1, *argv)
    assert_same_training(run, whole)
    if not more:  # rank 0 alone builds a model to fit the weights to
        argv = (*argv, "--weights", str(whole), "--evaluate")
        (ours,), (*_, theirs) = metrics(train("context", tmp_path / "later", 2, *argv)), metrics(whole)
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-6)


@pytest.mark.parametrize("model", ["OwnPlaces", "OwnKeys", "SumsAcross"])
def test_a_users_model_that_needs_whole_sequences_is_refused(tmp_path, model):
    outcome = start_run("context", tmp_path, 2, *STEPS, "--model", OWN + model).wait(60)
    assert outcome.refusal.startswith(
        f"error: --model {OWN}{model}: with its sequences divided, it returns other values than whole; let each"
    )


def test_a_users_model_with_batch_norm_over_positions_is_refused(tmp_path):
    outcome = start_run("context", tmp_path, 2, *STEPS, "--model", f"{OWN}BatchNormed").wait(60)
    what = "with its sequences divided, norm (OfPositions) normalises each rank's positions by themselves"
    fix = "use a norm of each position, such as nn.LayerNorm, or --context-parallel 1"
    assert outcome.refusal == f"error: --model {OWN}BatchNormed: {what}; {fix}"


@pytest.mark.parametrize("ranks", [2, *slow(1)])
def test_a_rank_that_has_a_part_of_each_sequence_is_warned_of_what_it_does_with_it(tmp_path, ranks):
    """In ddp, an embedding with max_norm and a gradient hook are warned of with two replicas."""
    argv = (*STEPS, "--model", f"{OWN}Limited", "--context-parallel", str(ranks), "--warmup-steps", "1")
    outcome = start_run("context", tmp_path, ranks, *argv).wait(check=True)
    expected = [
        "the gradient hook of head.weight gets the gradient of each of 2 parts of the batch",
        "tokens has max_norm, by which each rank scales the rows of its own part of the batch",
    ]
    found = re.findall("^warning: (.*), so losses depend on the number", outcome.outputs[0], re.MULTILINE)
    assert found == (expected if ranks > 1 else [])


@pytest.mark.parametrize("more", [(), *slow(((FULL,),))])
def test_a_users_model_that_differs_between_ranks_is_rank_0s(tmp_path, more):
    argv = (*STEPS, "--model", f"{OWN}drawn_by_rank")
    assert_same_training(train("context", tmp_path, 2, *argv, *more), train("single", tmp_path, 1, *argv))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Shares", f"--model {OWN}Shares: layers.0.weight and layers.1.weight are two parameters in the same mem"),
        ("OtherOrder", "rank 1 runs layers.1 where rank 0 runs layers.0, and FSDP gathers in order; run the same"),
        ("OtherGradients", "the block layers.0 got gradients on some ranks or in some steps only, and FSDP sums"),
        ("Thaws", "training has set requires_grad of places.weight, whose gradient the ranks do not exchange"),
    ],
)
def test_a_users_model_that_shards_would_train_otherwise_is_refused(tmp_path, model, message):
    outcome = start_run("context", tmp_path, 2, *STEPS, FULL, "--model", OWN + model).wait(60)
    assert set(outcome.statuses) == {2}, outcome.text
    assert {line.startswith(f"error: {message}") for line in outcome.errors} == {True}, outcome.text


def test_samples_without_a_sequence_are_refused(tmp_path):
    argv = ("--device", "cpu", "--model", f"{OWN}of_images")
    outcome = start_run("context", tmp_path, 2, *argv).wait(60)
    assert outcome.refusal.startswith("error: --data digits has")
    assert (
        "which ranks cannot divide; give sequences of ids, shape (T,), with a target for each" in outcome.refusal
    )


def test_the_page_shows_functions_that_do_the_usual_elsewhere():
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    exec(DIVIDED, shown := {"ids": torch.zeros(1, 8), "q": q, "k": k, "v": v})
    assert torch.equal(shown["place"], torch.arange(8))
    assert torch.equal(shown["mixed"], scaled_dot_product_attention(q, k, v, is_causal=True))


def of_images(data):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, data.num_classes))


# ---- who does what


class Mesh:
    """A rank's place among those of its replica."""

    def __init__(self, rank, ranks):
        self.get_local_rank, self.size = lambda: rank, lambda: ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_attend_to_equally_many_keys(monkeypatch, ranks):
    """Their results, put together, are those of attention over the whole sequence."""
    heads = (1, 2, 24, 8)
    q, k, v = torch.randn(3, *heads).double()
    whole = torch.stack((rotate(k, torch.arange(24)), v))
    expected = Attention.attend(None, q, k, v)
    monkeypatch.setattr(attention, "gather_sequence", lambda part, mesh, dim: whole)
    products = []

    def count(queries, keys, values, bias, **more):
        products[-1] += queries.shape[2] * keys.shape[2]
        return scaled_dot_product_attention(queries, keys, values, bias, **more)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", count)
    for rank in range(ranks):
        products.append(0)
        mesh = Mesh(rank, ranks)
        with use_sequence_sharding(make_sequence_sharding(mesh)):
            mixed = Attention.attend(None, *(shard_sequence(x, mesh, 2) for x in (q, k, v)))
        assert torch.allclose(mixed, shard_sequence(expected, mesh, 2), atol=1e-6)
    assert set(products) == {(24 // (2 * ranks)) ** 2 * (2 * ranks + 1)}


def kept_bytes(model, tokens):
    """Return the bytes of activations that a forward pass keeps for backward."""
    given = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        # Wider tensors than an MLP's are masks, which only CPUs have, and what has a number for each position.
        if storage.data_ptr() not in given and tensor.shape[-1] <= 4 * WIDTH:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(tokens)
    assert output.grad_fn
    return sum(kept.values())


WIDTH, LENGTH, DEPTH = 64, 4096, 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_its_part_of_the_activations_and_all_keys_and_values(monkeypatch, ranks):
    monkeypatch.setattr(attention, "gather_sequence", lambda part, mesh, dim: torch.cat([part] * ranks, dim))
    model = GPT(256, WIDTH, DEPTH, 4)
    tokens = torch.randint(256, (1, LENGTH))
    whole = kept_bytes(model, tokens)
    mesh = Mesh(0, ranks)
    with use_sequence_sharding(make_sequence_sharding(mesh)):
        part = kept_bytes(model, shard_sequence(tokens, mesh, 1))
    gathered = DEPTH * 2 * 4 * LENGTH * WIDTH
    # Undivided, a block keeps its keys and, since values are a view of it, the product of all three: 4 per number.
    assert part == pytest.approx((whole - 2 * gathered) / ranks + gathered, rel=1e-3)


def test_a_rank_has_the_positions_of_an_early_and_a_late_chunk():
    parts = [shard_sequence(torch.arange(12)[None], Mesh(rank, 3), 1)[0].tolist() for rank in range(3)]
    assert parts == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


# ---- what is refused


PARTS = "does not divide into 2 chunks for each rank"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            (),
            "--model lenet has no sequence that ranks can divide; use gpt-tiny, gpt-small, gpt-medium or gpt-xl ",
        ),
        ((*TEXT, "--task", "my:Task"), "--task my:Task may read whole sequences; drop it"),
        (("--seq-len", "30", *TEXT), f"a sequence of 30 {PARTS}; use a length of 28 or 32 (--seq-len)"),
        (("--seq-len", "3", *TEXT), f"a sequence of 3 {PARTS}; use a length of 4 (--seq-len)"),
    ],
)
def test_what_does_not_divide_is_refused(argv, message):
    with pytest.raises(UserError, match=f"^--context-parallel 2: {re.escape(message)}"):
        options([*argv])
    assert options([*argv, "--context-parallel", "1"]).context_parallel == 1


def tokens():
    """Return a data set of sequences of 10 tokens."""
    rows = torch.arange(1100).view(100, 11) % 7
    train, test = ((part[:, :-1], part[:, 1:]) for part in (rows[:80], rows[80:]))
    return {"train": train, "test": test, "target": "tokens", "num_classes": 7}


def test_a_length_that_only_the_data_know_is_refused_once_they_are_loaded(tmp_path):
    words = ("--data", "tests.parallel.test_context:tokens", "--model", "gpt-tiny", "--workers", "0")
    outcome = start_run("context", tmp_path, 2, *words, "--device", "cpu").wait(60)
    message = f"error: --context-parallel 2: a sequence of 10 {PARTS}; use a length of 8 or 12"
    assert outcome.refusal == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--context-parallel 1",
            "--fully-shard: --context-parallel 1 divides nothing; drop it, or use RECIPE=fsdp",
        ),
    ],
)
def test_what_shards_cannot_do_is_refused(words, message):
    argv = ["--data", "text", *words.split()]
    options(argv)
    with refused(message):
        options([*argv, FULL])


def test_processes_that_are_no_multiple_are_refused(tmp_path):
    message = "--context-parallel 2 does not divide 3 processes; start 2 or 4, or give"
    assert start_run("context", tmp_path, 3, *STEPS).wait(60).refusal.startswith(f"error: {message}")


# ---- what a rank holds, and bytes on the wire


@pytest.mark.parametrize("ranks", [2, *slow(4)])
def test_a_rank_holds_its_share_of_the_weights(single, tmp_path, ranks):
    """AdamW keeps two numbers a weight, beside the weight and its gradient; 4 ranks are in two replicas."""
    argv = (*STEPS, FULL, "--max-steps", "1", "--optimizer", "adamw")
    train("context", tmp_path, ranks, *argv, setup=functools.partial(note_bytes, tmp_path))
    total = 4 * sum(4 * weight.numel() for name, weight in weights(single).items() if name != "head.weight")
    held = [int((tmp_path / f"bytes{rank}").read_text()) for rank in range(ranks)]
    assert held == [total / ranks] * ranks


@pytest.mark.parametrize(
    ("replicas", "ranks", "switches"),
    [(1, 2, ()), *slow((2, 2, ()), (1, 4, ()), (2, 2, (FULL, "--accumulate-steps", "2")))],
)
def test_keys_values_and_gradients_cross_the_wire(single, tmp_path, replicas, ranks, switches):
    """Each of 4 blocks gathers keys and values of b sequences of 16 x 64 numbers, and scatters their gradients.

    A reduce-scatter should send as much as an all-gather; gloo's is an all-reduce, which sends twice as much.
    """
    own = (*STEPS, "--global-batch-size", "8", "--max-steps", "6", "--context-parallel", str(ranks), *switches)
    setup = functools.partial(observe.observe_steps, tmp_path)
    train("context", tmp_path, replicas * ranks, *own, setup=setup)
    gathered = 2 * 4 * (8 // replicas) * 16 * 64
    gradients = sum(4 * weight.numel() for name, weight in weights(single).items() if name != "head.weight")
    everyone = replicas * ranks
    if switches:  # each of two passes gathers all but the embedding and the last norm twice
        gradients = (2 * (2 * gradients - 4 * 64 * (256 + 2)) + 2 * gradients) / 2
    expected = 4 * 3 * (ranks - 1) / ranks * gathered + 2 * (everyone - 1) / everyone * gradients
    for sent in observe.sent_per_step(tmp_path, everyone):
        assert expected <= sent <= 1.05 * expected


# ---- the page, which is not LeNet on digits as the others are


PAGE_STEPS = 3


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a file for the page, and a folder with the same text for --data text."""
    folder = tmp_path_factory.mktemp("texts")
    words = (ROOT / "LICENSE").read_bytes() + (ROOT / "CONTRIBUTING.md").read_bytes() * 2
    count = PAGE_STEPS * 16 * 256 + 200  # bytes for training; whole windows of 256, and some that are left over
    assert len(words) > count * 10 // 9
    text = bytearray(words[: count // 9 * 10])
    cut = len(text) * 9 // 10
    text[cut - 1] = text[-1] = 0  # --data text ends each file with a zero
    (folder / "page").write_bytes(text)
    (folder / "split").mkdir()
    for name, part in (("most", text[:cut]), ("rest", text[cut:])):
        (folder / "split" / name).write_bytes(part[:-1])
    return folder / "page", folder / "split"


def run_the_page_in_bf16(argv):
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_cache_enabled(False)  # only the end of an autocast block would clear it
    run_page("context", argv)


def test_the_page_trains_under_autocast(texts, tmp_path):
    """The tolerance is that of the recipe's bf16."""
    argv = ["--epochs", "1", "--log-every", "1", "--text", str(texts[0])]
    curves = []
    for setup in (functools.partial(run_page, "context"), run_the_page_in_bf16):
        outcome = run_ranks("context", [], 2, tmp_path, setup=functools.partial(setup, argv), OMP_NUM_THREADS="1")
        curves.append(read_page(outcome.outputs[0])[0])
    assert curves[1] == pytest.approx(curves[0], rel=2.0**-8)
    assert curves[1] != pytest.approx(curves[0], rel=1e-6)


def read_page(text):
    """Return the losses of the page's steps, the test losses of its epochs, and its last line."""
    steps, epochs = (re.findall(rf"^{kind} (\S+)$", text, re.MULTILINE) for kind in KINDS)
    return [*map(float, steps)], [*map(float, epochs)], text.splitlines()[-1]


KINDS = (r"step \d+ loss", r"epoch \d+ test_loss")


def run_the_page(path, folder, world_size, ranks, **env):
    """Run the page for two epochs; return read_page() of rank 0's output. The other ranks print nothing."""
    argv = ["--epochs", "2", "--log-every", "1", "--text", str(path), "--context-parallel", str(ranks)]
    setup = functools.partial(run_page, "context", argv)
    outcome = run_ranks("context", [], world_size, folder, setup=setup, OMP_NUM_THREADS="1", **env)
    assert not any("loss" in output for output in outcome.outputs[1:])
    return read_page(outcome.outputs[0])


@pytest.fixture(scope="module")
def recipe_on_texts(texts, tmp_path_factory):
    """Return the run of single that the page repeats: its text, batches and learning rate."""
    argv = ("--data", "text", "--data-dir", str(texts[1]), "--seq-len", "256", "--global-batch-size", "16")
    argv += ("--lr", "0.001", "--lr-schedule", "constant", "--warmup-steps", "0", "--epochs", "2")
    folder = tmp_path_factory.mktemp("page")
    return train("single", folder, 1, *argv, "--device", "cpu", setup=shuffle_as_the_pages)


@pytest.mark.parametrize(("world_size", "ranks"), [(1, 1), (2, 2), *slow((4, 2), (4, 4), (2, 1))])
def test_the_page_has_the_losses_of_single(texts, recipe_on_texts, tmp_path, world_size, ranks):
    steps, epochs, result = run_the_page(texts[0], tmp_path, world_size, ranks)
    assert len(steps) == 2 * PAGE_STEPS
    assert steps == pytest.approx(losses(recipe_on_texts), rel=1e-5)
    expected = [line["test_loss"] for line in metrics(recipe_on_texts) if "test_loss" in line]
    assert epochs == pytest.approx(expected, rel=1e-5)
    start = f"result recipe=context world_size={world_size} test_loss={expected[-1]:.4f} samples_per_s="
    assert re.fullmatch(rf"{re.escape(start)}\d+", result)
