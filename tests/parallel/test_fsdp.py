"""FSDP: hybrid sharding, its options, what each rank holds, and one curve in double precision."""

from __future__ import annotations

import functools
import os
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from recipes.common import loop
from recipes.common import restore as restoring
from recipes.common.data import load_data
from recipes.common.errors import UserError
from recipes.common.language import LanguageModel
from recipes.common.models.models import build_model
from recipes.common.optim import optimizer_state
from recipes.common.parallel.sharding import own_shards
from recipes.common.watch.watch import Watch
from recipes.common.world.peers import Peers
from recipes.common.world.tree import broadcast_tree
from recipes.fsdp import train as fsdp
from recipes.fsdp.initialise import UnknownInitError, build_shards, rows
from recipes.fsdp.train import build, build_mesh, options, wrap
from tests import observe
from tests.conftest import slow
from tests.support import (
    TEXT_DIR,
    assert_same_curve,
    largest_difference,
    losses,
    metrics,
    newest_checkpoint,
    start_run,
    train,
    weights,
)

HERE = "tests.parallel.test_fsdp"
TEXT = ("--data", "text", "--data-dir", str(TEXT_DIR))
DIGITS = ("--max-steps", "20", "--checkpoint-every", "10")
STEPS = (*TEXT, "--model", "gpt-tiny", "--seq-len", "16", "--max-steps", "4", "--clip-grad-norm", "1")


@pytest.mark.parametrize(
    ("world_size", "argv"),
    [
        (2, ("--replicas", "2")),
        (2, ("--no-reshard-after-forward", "--accumulate-steps", "2")),
        *slow((4, ("--replicas", "2", "--activation-checkpointing"))),
    ],
)
def test_every_layout_has_the_losses_of_single(single, tmp_path, world_size, argv):
    run = train("fsdp", tmp_path, world_size, *STEPS, *argv)
    assert losses(run) == pytest.approx(losses(single), rel=1e-5)
    assert largest_difference(weights(run), weights(single)) < 1e-5


def test_cpus_beside_gpus_wait_in_the_group_that_has_the_time_out(monkeypatch):
    """Where CUDA is available, DeviceMesh() replaces a group of gloo by one that waits for half an hour."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        mesh = build_mesh(options([]), Peers(torch.device("cpu")))
        assert mesh.get_group() is dist.group.WORLD
        assert (mesh.mesh_dim_names, mesh.mesh.tolist()) == (("shard",), [0])
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone():
    """A job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Peers(torch.device("cpu"))
    dist.destroy_process_group()


class Headed(nn.Module):
    """Two blocks, and a head that belongs to the root."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)

    def forward(self, inputs):
        return self.head(self.blocks(inputs))


@pytest.mark.parametrize(
    ("argv", "expected"), [((), {"head"}), (("--no-reshard-after-forward",), {"head", "blocks"})]
)
def test_what_is_in_no_block_is_gathered_once_in_a_pass(alone, argv, expected):
    """Backward begins with it, so that nothing would hide a second gather."""
    model = wrap(Headed(), options(list(argv)), alone)

    def gathered():
        return {name.split(".")[0] for name, value in model.named_parameters() if not isinstance(value, DTensor)}

    for _ in range(2):
        assert gathered() == set()
        loss = model(torch.ones(1, 2)).sum()
        assert gathered() == expected
        loss.backward()


def test_state_that_a_whole_model_wrote_gets_the_memory_format_of_shards(alone):
    """A fused kernel would pair the numbers of one with others of the other, without an error."""
    whole = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    written = torch.optim.AdamW(whole.parameters())
    whole(torch.randn(1, 3, 5, 5)).sum().backward()
    written.step()
    content = {"model": whole.state_dict(), "optimizer": optimizer_state(written)}
    model = fully_shard(nn.Conv2d(3, 8, 3), mesh=build_mesh(options([]), alone))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    restoring.load_optimizer_state(
        optimizer, broadcast_tree(content, alone, functools.partial(own_shards, model))["optimizer"]
    )
    for parameter, state, expected in zip(
        model.parameters(), optimizer.state.values(), written.state.values(), strict=True
    ):
        assert torch.equal(state["exp_avg"].full_tensor(), expected["exp_avg"])
        assert state["exp_avg"].to_local().stride() == parameter.to_local().stride()


def test_bf16_gathers_half_and_stays_close(single, tmp_path):
    """2^-8 is bfloat16's rounding error; norms and the loss average it out over a block's sums."""
    run = train("fsdp", tmp_path, 2, *STEPS, "--amp", "bf16")
    assert losses(run) == pytest.approx(losses(single), rel=2.0**-8)
    assert losses(run) != pytest.approx(losses(single), rel=1e-6)
    assert {tensor.dtype for tensor in weights(run).values()} == {torch.float32}


@pytest.mark.slow
def test_fp16_stays_close_to_that_of_single_and_resumes_exactly(tmp_path):
    """The tolerance is that of test_ddp.py: 10 roundings in a pass, of which two are compared."""
    argv = (*DIGITS, "--amp", "fp16", "--clip-grad-norm", "1")
    single, run = train("single", tmp_path, 1, *argv), train("fsdp", tmp_path, 2, *argv)
    for step, (ours, theirs) in enumerate(zip(losses(run), losses(single), strict=True)):
        assert ours == pytest.approx(theirs, rel=3 * (10 * (step + 1) * 2) ** 0.5 * 2.0**-11), step
    assert newest_checkpoint(run)["scaler"] == newest_checkpoint(single)["scaler"]
    assert newest_checkpoint(run)["scaler"]["scale"] > 1
    start = run / "checkpoints/step-000000010.pt"
    again = train("fsdp", tmp_path / "again", 2, *argv, "--start-from", str(start))
    assert losses(again, after=10) == losses(run)[10:]


@pytest.mark.slow
def test_bf16_weights_are_half_the_bytes_and_gradients_all_of_them(tmp_path):
    """Two gathers and a sum of gradients, which gloo sends twice: fp32 sends 2 + 2, bf16 1 + 2 (NCCL: 3 and 2).

    Blocks that are kept after forward are gathered once: 1 + 2.
    """
    sent = {}
    for option in ("--amp=none", "--amp=bf16", "--no-reshard-after-forward"):
        (tmp_path / f"of{option}").mkdir()
        setup = functools.partial(observe.observe_steps, tmp_path / f"of{option}")
        train("fsdp", tmp_path / option, 2, *STEPS, option, "--device", "cpu", setup=setup)
        sent[option] = sum(observe.sent_per_step(tmp_path / f"of{option}", 2))
    plain, *others = sent.values()
    assert all(0.64 < other / plain < 0.78 for other in others), sent


def spoil_own_shards(step, ranks="1"):
    """Make these ranks' gradient shards infinite in a step; those of other ranks stay finite."""
    update = fsdp.update

    def spoilt(job, check):
        if os.environ["RANK"] in ranks and job.position.step + 1 == step:
            for parameter in job.model.parameters():
                parameter.grad.to_local().fill_(float("inf"))
        update(job, check)

    fsdp.update = spoilt


def leave_out(step):
    """Make a step change nothing."""
    update = fsdp.update

    def leaving_out(job, check):
        update(job, check) if job.position.step + 1 != step else job.optimizer.zero_grad()

    fsdp.update = leaving_out


def test_all_ranks_leave_out_a_step_of_which_one_has_a_bad_gradient(tmp_path):
    """A rank that checked only its own shards would step while the others skip."""
    runs = []
    for fault in (spoil_own_shards, leave_out):
        argv = ("--max-steps", "4", "--device", "cpu", "--on-nonfinite", "skip", "--optimizer", "adamw")
        how = {"name": fault.__name__, "setup": functools.partial(fault, 3)}
        outcome = start_run("fsdp", tmp_path, 2, *argv, **how).wait(check=True)
        assert ("warning: skipped step 3: " in outcome.outputs[0]) == (fault is spoil_own_shards)
        runs.append(tmp_path / fault.__name__)
    assert losses(runs[0]) == losses(runs[1])
    assert largest_difference(*map(weights, runs)) == 0


@pytest.mark.parametrize("optimizer", ["sgd", *slow("adamw")])
def test_all_ranks_leave_out_a_step_of_fp16_if_one_overflows(tmp_path, optimizer):
    """Rank 3 has no row of the first layer."""
    runs = []
    for ranks in ("none", "1", "0123"):
        argv = ("--max-steps", "4", "--device", "cpu", "--amp", "fp16", "--optimizer", optimizer)
        setup = functools.partial(spoil_own_shards, 3, ranks)
        runs.append(train("fsdp", tmp_path / ranks, 4, *argv, setup=setup))
    usual, *scales = (newest_checkpoint(run)["scaler"]["scale"] for run in runs)
    assert scales == [usual / 2] * 2
    assert losses(runs[1]) == losses(runs[2])
    assert largest_difference(*map(weights, runs[1:])) == 0


def show_sampling(run):
    """Make this rank print, instead of a sample, whether it is watched and whether result.json exists."""

    def sample(task, model, device):
        at = Watch.active._at
        print(f"in {at.name!r}, inside: {at.is_inside}, result: {(run / 'result.json').exists()}")
        return "a sample"

    LanguageModel.sample = sample


def test_the_result_is_there_before_ranks_sample_under_watch(tmp_path):
    setup = functools.partial(show_sampling, tmp_path / "run")
    outcome = start_run("fsdp", tmp_path, 2, *STEPS, "--max-steps", "1", setup=setup).wait(check=True)
    for text in outcome.outputs:
        assert "in 'sample', inside: True, result: True\n" in text
    assert re.search(r"a sample\nresult recipe=fsdp world_size=2 .*\n$", outcome.outputs[0])


class Numbers(torch.utils.data.Dataset):
    """A map-style dataset: samples are read one by one."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((64,), index / self.count), index % 10


def numbers():
    """Return data whose test set has 513 samples."""
    return {"train": Numbers(64), "test": Numbers(513), "target": "class", "num_classes": 10}


@pytest.mark.parametrize(
    "argv",
    [
        ("--data", "synthetic", "--num-samples", "4104", "--image-size", "8"),
        ("--data", f"{HERE}:numbers", "--model", f"{HERE}:viewing_model"),
    ],
    ids=["in memory", "loaded"],
)
def test_ranks_evaluate_equally_often(tmp_path, argv):
    """Of 513 samples, rank 0 has one batch of 256; rank 1 has a second batch, of one sample."""
    argv = (*argv, "--max-steps", "1", "--workers", "0", "--timeout-s", "20")
    runs = [train(recipe, tmp_path, n, *argv) for recipe, n in (("fsdp", 2), ("single", 1))]
    ours, theirs = (metrics(run)[-1] for run in runs)
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-6)
    assert ours["test_accuracy"] == theirs["test_accuracy"]


def viewing_model(spec):
    """Return a model that fails on an empty batch, because view() cannot infer -1 there."""
    return nn.Sequential(View(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


class View(nn.Module):
    """Flatten with view(), as much code does."""

    def forward(self, inputs):
        return inputs.view(len(inputs), -1)


def windows():
    """Return data with 3 rows a sample, of which a linear layer returns a view."""
    inputs = torch.randn(40, 3, 8, generator=torch.Generator().manual_seed(0))
    split = inputs, torch.arange(40) % 10
    return {"train": split, "test": split, "target": "class", "num_classes": 10}


class InPlace(nn.Module):
    """A model that changes a block's output in place, within its sequence and after it."""

    def __init__(self, spec):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.second = nn.Sequential(nn.Linear(8, 10))

    def forward(self, rows):
        rows = self.first(rows)
        rows += 1
        return self.second(rows).transpose(1, 2).mean(2)


@pytest.mark.parametrize("argv", ["", *slow("--accumulate-steps 2", "--activation-checkpointing")])
def test_a_blocks_output_may_be_changed_in_place(tmp_path, argv):
    """FSDP gathers a block for backward when the gradient of its output arrives, which a view would not see."""
    own = [f"{HERE}:{name}" for name in ("windows", "InPlace")]
    words = ("--data", own[0], "--model", own[1], "--max-steps", "4", "--global-batch-size", "8")
    whole = train("single", tmp_path, 1, *words)
    run = train("fsdp", tmp_path, 2, *words, *argv.split())
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    assert largest_difference(weights(run), weights(whole)) < 1e-5
    assert "Warning" not in (tmp_path / "output-fsdp-2" / "rank0.txt").read_text()


def normed_model(spec):
    """Return a model with batch norm among its blocks."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


class Scaled(nn.Module):
    """A model with a parameter without rows, like CLIP's logit scale."""

    def __init__(self, spec):
        super().__init__()
        self.blocks = nn.ModuleDict({"first": nn.Flatten(), "second": nn.Linear(64, 10)})
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images):
        return self.scale * self.blocks["second"](self.blocks["first"](images))


class Empty(Scaled):
    """A model with a parameter without values, such as a prompt of no tokens."""

    def __init__(self, spec):
        super().__init__(spec)
        self.scale = nn.Parameter(torch.zeros(0, 10))

    def forward(self, images):
        return self.blocks["second"](self.blocks["first"](images)) + self.scale.sum(0)


def scripted(spec):
    """Return a model that TorchScript has compiled."""
    return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


@pytest.mark.parametrize("model", ["normed_model", "Named"], ids=["block", "root"])
def test_batch_norm_keeps_fp32_beside_bf16(tmp_path, model):
    argv = ("--model", f"{HERE}:{model}", "--max-steps", "1", "--amp", "bf16")
    run = train("fsdp", tmp_path, 2, *argv)
    assert metrics(run)[-1]["step"] == 1


@pytest.mark.parametrize(
    ("model", "argv", "message"),
    [
        ("", "--replicas 2", "--replicas 2 does not divide 3 processes; start 2 or 4, or give --replicas 1"),
        ("", "--cpu-offload", "--cpu-offload: shards are in main memory already on a CPU; drop it"),
        ("normed_model", "--activation-checkpointing", "--activation-checkpointing: {} has batch norm, and "),
        ("Scaled", "", "{}: the parameter scale is a single number, without rows to shard; give it the shape"),
        ("Empty", "", "{}: the parameter scale is empty, without rows to shard; "),
        ("scripted", "", "{}: TorchScript has no hooks, in which FSDP gathers weights; "),
    ],
)
def test_refusals(tmp_path, model, argv, message):
    own = f"--model {HERE}:{model}" if model else ""
    outcome = start_run("fsdp", tmp_path, 3, "--device", "cpu", *f"{own} {argv}".split()).wait()
    assert outcome.refusal.startswith(f"error: {message.format(own)}")


# ---- in double precision: only the order of sums still makes a difference


def compute_in_double():
    observe.compute_in_double()
    make_model, build_model = fsdp.make_model, fsdp.build_model
    fsdp.make_model = lambda *args: make_model(*args).double()
    fsdp.build_model = lambda *args: build_model(*args).double()


@pytest.mark.slow
@pytest.mark.parametrize("argv", [(), ("--replicas", "2")])
def test_100_steps_in_double_precision(tmp_path, argv):
    words = ("--device", "cpu", "--max-steps", "100", "--global-batch-size", "11", "--optimizer", "adamw")
    words += ("--lr-schedule", "constant", "--warmup-steps", "0")
    single = train("single", tmp_path, 1, *words, setup=observe.compute_in_double)
    run = train("fsdp", tmp_path, 4, *words, *argv, setup=compute_in_double)
    assert {tensor.dtype for tensor in weights(run).values()} == {torch.float64}
    assert losses(run) == pytest.approx(losses(single), rel=1e-6)  # logged in float32
    assert largest_difference(weights(run), weights(single)) < 1e-9


# ---- memory


def note_bytes(folder):
    """Make each rank write the bytes allocated for its weights, gradients and optimizer state in a step."""
    update = loop.update

    def noting_update(job, *how):
        parameters = list(job.model.parameters())
        held = allocated(parameters) + allocated([parameter.grad for parameter in parameters])
        update(job, *how)
        state = [value for values in job.optimizer.state.values() for value in values.values()]
        held += allocated([tensor for tensor in state if tensor.ndim])
        (folder / f"bytes{job.peers.rank}").write_text(str(held))

    loop.update = noting_update


def allocated(tensors):
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]  # the gradients of a block share a storage
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(("world_size", "argv"), [(3, ()), *slow((4, ("--replicas", "2")))])
def test_each_rank_holds_its_share(tmp_path, world_size, argv):
    argv = (*STEPS, "--max-steps", "1", *argv)
    train("fsdp", tmp_path, world_size, "--device", "cpu", *argv, setup=functools.partial(note_bytes, tmp_path))
    args = options([*argv])
    model = build_model(args, load_data(args, torch.device("cpu"), print))
    total = 4 * 4 * sum(parameter.numel() for parameter in model.parameters())  # AdamW keeps two numbers a weight
    held = [int((tmp_path / f"bytes{rank}").read_text()) for rank in range(world_size)]
    shards = world_size // args.replicas
    assert sum(held) >= total * args.replicas
    assert max(held) <= 1.1 * total / shards


def note_kept_rows(folder):
    """Make each rank write, in a step, how many of the tensors that it was built from are still in memory."""
    materialise, update = fsdp.materialise, loop.update
    rows = []

    def noting_materialise(model, shards, device):
        rows.extend(map(weakref.ref, shards.values()))
        materialise(model, shards, device)

    def noting_update(job, *how):
        (folder / f"kept{job.peers.rank}").write_text(f"{sum(row() is not None for row in rows)} of {len(rows)}")
        update(job, *how)

    fsdp.materialise, loop.update = noting_materialise, noting_update


def test_a_rank_keeps_no_second_copy_of_its_rows(tmp_path):
    argv = (*STEPS, "--max-steps", "1", "--device", "cpu")
    train("fsdp", tmp_path, 2, *argv, setup=functools.partial(note_kept_rows, tmp_path))
    for rank in range(2):
        assert re.fullmatch(r"0 of [1-9]\d*", (tmp_path / f"kept{rank}").read_text())


def note_restored_bytes(folder):
    """Make each rank write the bytes that it keeps of a checkpoint."""
    restore = restoring.restore

    def noting_restore(job, content):
        optimizer = [value for values in content["optimizer"]["state"].values() for value in values.values()]
        tensors = [*content["model"].values(), *(tensor for tensor in optimizer if tensor.ndim)]
        (folder / f"bytes{job.peers.rank}").write_text(str(allocated(tensors)))
        restore(job, content)

    restoring.restore = noting_restore


def test_a_rank_keeps_its_share_of_a_checkpoint(single, tmp_path):
    argv = ("--device", "cpu", *STEPS, "--start-from", str(single), "--max-steps", "5", "--epochs", "2")
    train("fsdp", tmp_path, 3, *argv, setup=functools.partial(note_restored_bytes, tmp_path))
    held = [int((tmp_path / f"bytes{rank}").read_text()) for rank in range(3)]
    total = 3 * sum(tensor.nbytes for name, tensor in weights(single).items() if name != "head.weight")
    assert total <= sum(held) <= 1.2 * total
    assert max(held) <= 1.2 * total / 3


# ---- initialisation


def own_model(spec):
    """Return a model whose initialisation reads its own weights."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10))
    with torch.no_grad():
        model[1].weight /= model[1].weight.norm()
    return model


SYNTHETIC = ("--data", "synthetic", "--image-size", "32", "--num-samples", "4")


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--model", "vit-tiny"),
        (*TEXT, "--model", "gpt-tiny"),
        *slow(
            ["--model", "resnet18", *SYNTHETIC],
            ["--model", "vit_b_16", *SYNTHETIC],  # its truncated normal reads the numbers that it draws
        ),
    ],
)
def test_a_rank_draws_its_rows_of_what_one_process_draws(argv):
    args = options([*argv, "--no-channels-last"])
    data = load_data(args, torch.device("cpu"), print)
    whole = dict(build_model(args, data).named_parameters())
    model, shards = build_shards(lambda: build_model(args, data), 1, 3)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert shards.keys() == whole.keys()
    for name, own in shards.items():
        assert torch.equal(own, rows(whole[name].detach(), 1, 3)), name
    total = sum(parameter.nbytes for parameter in whole.values())
    assert sum(own.untyped_storage().nbytes() for own in shards.values()) <= 1.1 / 3 * total
    assert nn.init.normal_.__module__ == "torch.nn.init"


def asks(tensor):
    if not tensor.is_meta:
        nn.init.ones_(tensor)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weight: weight.div_(weight.norm()),
        lambda weight: weight[0].mul_(2),
        lambda weight: weight.copy_(torch.rand_like(weight)),
        asks,
    ],
)
def test_what_cannot_be_drawn_in_part_is_refused(spoil):
    def build():
        linear = nn.Linear(4, 4)
        with torch.no_grad():
            spoil(linear.weight)
        return linear

    with pytest.raises(UnknownInitError):
        build_shards(build, 0, 2)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight[1].fill_(1),
        lambda weight: weight[1:].normal_(),
        lambda weight: weight[:, ::2].zero_(),
        lambda weight: weight[3:].copy_(torch.eye(2, 4)),
        lambda weight: nn.init.normal_(weight.data[2]),
    ],
)
def test_a_part_may_be_written_anew(write):
    """As an embedding does with the row of its padding_idx."""

    def build():
        torch.manual_seed(0)
        embedding = nn.Embedding(5, 4, padding_idx=4)
        with torch.no_grad():
            write(embedding.weight)
        return embedding

    whole = build().weight.detach()
    for rank in range(2):
        _, shards = build_shards(build, rank, 2)
        assert torch.equal(shards["weight"], rows(whole, rank, 2))


class Sequence(nn.Sequential):
    """A model that consists of its children, one after another."""

    is_sequence = True

    def __init__(self, spec):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


class Decides(Sequence):
    """A model that returns no logits in evaluation, whose output has no gradient then."""

    def forward(self, images):
        logits = super().forward(images)
        return logits if self.training else logits > 0


class Reads(nn.Module):
    """A model whose code reads a number of its input, which no tensor without memory has."""

    def __init__(self, spec):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 16), nn.Linear(16, 10)])

    def forward(self, images):
        if images.mean().item() > 1e6:
            raise ValueError("too bright")
        hidden = images.flatten(1)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class ReadsAndMixes(Reads):
    """One whose output depends on the other samples of the batch."""

    def forward(self, images):
        logits = super().forward(images)
        return logits - logits.mean(0)


class ReadsAndDoesNotFit(Reads):
    """One that returns a row for both samples."""

    def forward(self, images):
        return super().forward(images).mean(0, keepdim=True)


class Named(nn.Module):
    """A model with blocks in a ModuleDict, which has no forward()."""

    def __init__(self, spec):
        super().__init__()
        self.blocks = nn.ModuleDict({"first": nn.Flatten(), "second": nn.Linear(64, 10)})
        self.norm = nn.BatchNorm1d(10)

    def forward(self, images):
        return self.norm(self.blocks["second"](self.blocks["first"](images)))


def own_data():
    """Return random images of the digits' size."""
    images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    pair = images, torch.arange(32) % 10
    return {"train": pair, "test": pair, "target": "class", "num_classes": 10}


@pytest.mark.parametrize(
    "argv",
    [*(("--model", f"{HERE}:{name}") for name in ("Sequence", "Named", "Reads")), ("--data", f"{HERE}:own_data")],
)
def test_what_a_user_brings_is_built_in_shards_too(argv):
    args = options(argv)
    data = load_data(args, torch.device("cpu"), print)
    model, shards, _, _ = build(args, data, SimpleNamespace(rank=1, world_size=2, device=torch.device("cpu")))
    assert all(parameter.is_meta for parameter in model.parameters())
    whole = dict(build_model(args, data).named_parameters())
    assert shards.keys() == whole.keys()
    assert all(torch.equal(own, rows(whole[name].detach(), 1, 2)) for name, own in shards.items())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", f"{HERE}:Scaled", *TEXT], f"--model {HERE}:Scaled on 2 samples, .* failed"),
        (["--model", f"{HERE}:Decides"], "has to return a scalar tensor that gradients come from"),
    ],
)
def test_a_model_of_a_user_that_does_not_fit_is_refused_as_ever(argv, message):
    args = options(argv)
    data = load_data(args, torch.device("cpu"), print)
    with pytest.raises(UserError, match=message):
        build(args, data, SimpleNamespace(rank=1, world_size=2, device=torch.device("cpu")))


def test_blocks_by_name_are_sharded(tmp_path):
    argv = ("--model", f"{HERE}:Named", "--max-steps", "3", "--global-batch-size", "16")
    run = train("fsdp", tmp_path, 1, *argv)
    assert losses(run) == pytest.approx(losses(train("single", tmp_path, 1, *argv)), rel=1e-5)


@pytest.mark.parametrize(("model", "warnings"), [("Reads", 0), ("ReadsAndMixes", 1)])
def test_a_model_that_needs_its_weights_is_checked_in_shards(tmp_path, model, warnings):
    argv = ("--model", f"{HERE}:{model}", "--max-steps", "3", "--global-batch-size", "16")
    run = train("fsdp", tmp_path, 2, *argv)
    output = (tmp_path / "output-fsdp-2" / "rank0.txt").read_text()
    assert ("built whole" in output, output.count("depends on the other samples")) == (False, warnings)
    if not warnings:
        assert_same_curve(run, train("single", tmp_path, 1, *argv))
        more = (*argv, "--max-steps", "6")
        resumed = train("fsdp", tmp_path, 3, *more, "--start-from", str(run))
        whole = {line["step"]: line["loss"] for line in metrics(train("single", tmp_path / "more", 1, *more))[:6]}
        for line in metrics(resumed)[:3]:
            assert line["loss"] == pytest.approx(whole[line["step"]], rel=1e-5)


def test_a_model_that_needs_its_weights_and_does_not_fit_is_refused(tmp_path):
    refusal = start_run("fsdp", tmp_path, 2, "--model", f"{HERE}:ReadsAndDoesNotFit").wait().refusal
    assert "returned a tensor of shape (1, 10) for 2 samples; return a tensor with a row for each" in refusal


def test_a_model_that_has_to_be_built_whole_says_so_and_trains_the_same(tmp_path):
    argv = ("--model", f"{HERE}:own_model", "--max-steps", "3")
    run = train("fsdp", tmp_path, 2, *argv)
    assert losses(run) == pytest.approx(losses(train("single", tmp_path, 1, *argv)), rel=1e-5)
    output = (tmp_path / "output-fsdp-2" / "rank0.txt").read_text()
    assert "note: the model was built whole on each rank before it was sharded (UnknownInitError: aten." in output
