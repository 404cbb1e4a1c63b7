"""Every recipe on GPUs has the curve of single on a CPU: on one GPU, in two ranks that share it, and over NCCL.

NCCL refuses two ranks on one GPU, so they exchange over gloo. Everything but NCCL is as on two GPUs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recipes.common.data.shards import pack
from tests.conftest import need_gpus, need_horovod, require
from tests.images import make_images
from tests.support import (
    ROOT,
    Ranks,
    accuracies,
    largest_difference,
    losses,
    newest_checkpoint,
    run_ranks,
    train,
    weights,
    words_for,
)

STEPS = ("--max-steps", "60", "--seed", "1", "--deterministic", "--no-tf32")
FP32 = 1000 * 2**-24
"""24 bits, and sums in another order on a GPU: 60 steps amplify the error by less than a thousand."""
ALONE = {
    **dict.fromkeys(("single", "dataparallel", "ddp", "spawn", "fsdp", "scratch"), ()),
    "apex": ("--opt-level", "O0"),
    "horovod": ("--compression", "none"),
    "pipeline": ("--stages", "1"),
    "tensor": ("--tensor-parallel", "1"),
    "context": ("--context-parallel", "1"),
}
"""The options of each recipe on one GPU, in full precision."""

SHARED = {
    **{name: ALONE[name] for name in ("ddp", "spawn", "apex", "fsdp", "scratch")},
    "pipeline": ("--stages", "2", "--num-microbatches", "2"),
    "tensor": ("--tensor-parallel", "2"),
}
"""The same with two ranks. Horovod is missing: between GPUs it exchanges only over NCCL."""

OVER_NCCL = [
    *((2, recipe, own) for recipe, own in SHARED.items()),
    (2, "horovod", ALONE["horovod"]),
    (2, "ddp", ("--zero",)),
    (2, "scratch", ("--allreduce", "naive")),
    (2, "pipeline", ("--stages", "2", "--schedule", "gpipe")),
    (2, "pipeline", ("--stages", "2", "--schedule", "interleaved")),
    (4, "pipeline", ("--stages", "2")),
    (4, "pipeline", ("--stages", "4")),
    (4, "fsdp", ("--replicas", "2")),
]
"""Numbers of GPUs, recipes and options; test_context_gpu.py has context."""


def first_gpus(count: int) -> str:
    """Return the first GPUs, as CUDA_VISIBLE_DEVICES names them."""
    return ",".join(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")[:count])


@dataclass
class ThroughHost:
    """A message to or from a GPU that gloo is transferring through the host's memory, the only one it can use."""

    work: dist.Work
    host: torch.Tensor
    received: torch.Tensor | None

    def wait(self) -> None:
        """Wait for the message; if it is a received one, copy it to the GPU."""
        self.work.wait()
        if self.received is not None:
            self.received.detach().copy_(self.host)


def exchange(operations: list[dist.P2POp]) -> list[ThroughHost]:
    """Start the same operations as dist.batch_isend_irecv(), through copies on the host."""
    works = []
    for each in operations:
        host = each.tensor.detach().to("cpu", copy=True)
        received = each.tensor if each.op is dist.irecv else None
        works.append(ThroughHost(each.op(host, each.peer, each.group, each.tag), host, received))
    return works


def share_a_gpu(device: str = "cuda:0") -> None:
    """Make this rank use the first GPU, whatever its local_rank, and exchange over gloo."""
    from recipes.common.world import world

    connect = dist.init_process_group
    world.choose_device = lambda *args: torch.device(device)
    dist.init_process_group = lambda backend, **more: connect("gloo", **more)
    dist.batch_isend_irecv = exchange


@pytest.fixture(autouse=True)
def gpu():
    need_gpus()


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    """Return the run of single on a CPU."""
    need_gpus()
    return train("single", tmp_path_factory.mktemp("cpu"), 1, *STEPS, "--device", "cpu")


def assert_same_run(run, cpu):
    assert len(losses(run)) == 60
    assert losses(run) == pytest.approx(losses(cpu), rel=FP32)
    assert accuracies(run) == pytest.approx(accuracies(cpu), abs=0.003)  # one of 360 images


def need_own_library(recipe):
    """Skip Horovod where it cannot exchange between GPUs."""
    if recipe == "horovod":
        need_horovod()
        import horovod.torch as hvd

        require("nccl", hvd.nccl_built(), "Horovod was built without NCCL", "run `make horovod` where CUDA is")


@pytest.mark.parametrize("recipe", ALONE)
def test_one_gpu_equals_the_cpu(tmp_path, cpu, recipe):
    need_own_library(recipe)
    words = (*STEPS, "--device", "cuda", *ALONE[recipe])
    assert_same_run(train(recipe, tmp_path, 1, *words, CUDA_VISIBLE_DEVICES=first_gpus(1)), cpu)


@pytest.mark.parametrize("recipe", SHARED)
def test_two_ranks_on_one_gpu_equal_the_cpu(tmp_path, cpu, recipe):
    words = words_for(tmp_path, "run", *STEPS, "--device", "cuda", *SHARED[recipe])
    run_ranks(recipe, words, 2, tmp_path, setup=share_a_gpu)
    assert_same_run(tmp_path / "run", cpu)


@pytest.mark.parametrize(("gpus", "recipe", "own"), OVER_NCCL, ids=str)
def test_ranks_over_nccl_equal_the_cpu(tmp_path, cpu, gpus, recipe, own):
    need_gpus(gpus)
    need_own_library(recipe)
    assert_same_run(train(recipe, tmp_path, gpus, *STEPS, "--device", "cuda", *own), cpu)


def test_gradients_in_fp16_over_nccl_stay_close(tmp_path, cpu):
    """As in test_contract.py: two ranks round a gradient three times in each step."""
    need_gpus(2)
    run = train("ddp", tmp_path, 2, *STEPS, "--device", "cuda", "--grad-compression", "fp16")
    for step, (ours, theirs) in enumerate(zip(losses(run), losses(cpu), strict=True)):
        assert ours == pytest.approx(theirs, rel=FP32 + step * 3 * 2**-11), step
    assert losses(run) != pytest.approx(losses(cpu), rel=1e-6)


def test_powersgd_over_nccl_equals_the_cpus(tmp_path, cpu):
    """It compresses from step 12 on, and draws factors on the CPU first. After step 40, rounding errors grow."""
    need_gpus(2, real=True)
    words = (*STEPS, "--grad-compression", "powersgd")
    run = train("ddp", tmp_path, 2, *words, "--device", "cuda")
    on_cpus = train("ddp", tmp_path / "cpus", 2, *words, CUDA_VISIBLE_DEVICES="")
    assert losses(run)[:40] == pytest.approx(losses(on_cpus)[:40], rel=FP32)
    assert losses(run)[:40] != pytest.approx(losses(cpu)[:40], rel=0.01)


@pytest.mark.parametrize("more", [(), ("--async-checkpoints", "--sharded-checkpoints")], ids=str)
def test_shards_pass_from_two_gpus_to_one(tmp_path, cpu, more):
    need_gpus(2)
    words = (*STEPS, "--device", "cuda", *more)
    train("fsdp", tmp_path, 2, *words, "--max-steps", "30")
    resume = words_for(tmp_path, "fsdp-2", *words, "--resume", "auto")
    run_ranks("fsdp", resume, 1, tmp_path / "later")
    assert losses(tmp_path / "fsdp-2") == pytest.approx(losses(cpu), rel=FP32)


@pytest.mark.parametrize("more", [(), ("--async-checkpoints", "--sharded-checkpoints")], ids=str)
def test_shards_under_adamw_pass_from_two_gpus_to_one(tmp_path, more):
    """A fused kernel updates them; its counts of steps are on the GPU."""
    need_gpus(2)
    words = (*STEPS, "--optimizer", "adamw", "--lr", "0.001")
    expected = train("single", tmp_path / "cpu", 1, *words, "--device", "cpu")
    words += ("--device", "cuda", *more)
    train("fsdp", tmp_path, 2, *words, "--max-steps", "30")
    run_ranks("fsdp", words_for(tmp_path, "fsdp-2", *words, "--resume", "auto"), 1, tmp_path / "later")
    assert losses(tmp_path / "fsdp-2") == pytest.approx(losses(expected), rel=FP32)


@pytest.mark.parametrize("data", ["imagefolder", "shards"])
def test_photos_give_the_losses_of_the_cpu(tmp_path, data):
    folder = make_images(tmp_path / "photos")
    if data == "shards":
        list(pack(folder, folder := tmp_path / "shards", 9000))
    words = ("--data", data, "--data-dir", str(folder), "--image-size", "16", "--workers", "2")
    words = (*STEPS, "--max-steps", "8", "--global-batch-size", "9", *words)
    on_gpu, on_cpu = (train("ddp", tmp_path / device, 1, *words, "--device", device) for device in ("cuda", "cpu"))
    assert len(losses(on_gpu)) == 8
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=FP32)


def test_shards_of_shards_in_four_ranks_on_one_gpu_equal_the_cpu(tmp_path, cpu):
    words = words_for(tmp_path, "run", *STEPS, "--device", "cuda", "--fully-shard", "--clip-grad-norm", "1000000")
    run_ranks("tensor", words, 4, tmp_path, setup=share_a_gpu)
    assert_same_run(tmp_path / "run", cpu)


def test_dataparallel_on_every_gpu_equals_the_cpu(tmp_path, cpu):
    need_gpus(2)
    assert_same_run(train("dataparallel", tmp_path, 1, *STEPS, "--device", "cuda"), cpu)


def require_bf16():
    """Make this rank fail if a linear layer computes in another precision."""
    forward = nn.Linear.forward

    def checked(layer, inputs):
        output = forward(layer, inputs)
        assert output.dtype == torch.bfloat16
        return output

    nn.Linear.forward = checked


def test_replicas_compute_in_the_precision_asked_for(tmp_path):
    need_gpus(2)
    words = ("--max-steps", "2", "--device", "cuda", "--amp", "bf16")
    run_ranks("dataparallel", words_for(tmp_path, "run", *words), 1, tmp_path, setup=require_bf16)


@pytest.mark.parametrize("flag", ["--sync-batchnorm", "--compile"])
def test_what_replicas_cannot_do_is_refused(tmp_path, flag):
    need_gpus(2)
    outcome = Ranks("dataparallel", ["--runs-dir", str(tmp_path), flag], 1, tmp_path / "out").wait()
    assert "RECIPE=ddp" in outcome.refusal


def test_shards_in_main_memory_equal_the_cpu_and_resume(tmp_path, cpu):
    words = (*STEPS, "--device", "cuda", "--cpu-offload", "--checkpoint-every", "30")
    run = train("fsdp", tmp_path, 1, *words)
    assert_same_run(run, cpu)
    middle = run / "checkpoints" / "step-000000030.pt"
    later = train("fsdp", tmp_path / "later", 1, *words, "--start-from", str(middle))
    assert largest_difference(weights(later), weights(run)) < 1e-5


@pytest.mark.parametrize("own", [(), ("--cpu-offload",), ("--replicas", "2"), ("--optimizer", "adamw")], ids=str)
def test_shards_under_a_loss_scale_stay_close_and_resume_exactly(tmp_path, own):
    """All ranks skip a step if a shard overflows. The tolerance is that of test_ddp_gpu.py."""
    need_gpus(2)
    words = (*STEPS, "--max-steps", "20", "--checkpoint-every", "10", "--amp", "fp16", *own)
    run = train("fsdp", tmp_path, 2, *words, "--device", "cuda")
    alone = [word for word in words if word not in ("--cpu-offload", "--replicas", "2")]
    single = train("single", tmp_path, 1, *alone, "--device", "cuda")
    assert losses(run) == pytest.approx(losses(single), rel=(10 * 20) ** 0.5 * 3 * 2**-11)
    assert newest_checkpoint(run)["scaler"] == newest_checkpoint(single)["scaler"]
    middle = str(run / "checkpoints" / "step-000000010.pt")
    later = train("fsdp", tmp_path / "later", 2, *words, "--device", "cuda", "--start-from", middle)
    assert losses(later, after=10) == losses(run)[10:]


@pytest.mark.parametrize(("gpus", "recipe", "own"), [(2, "fsdp", ()), (4, "tensor", ("--fully-shard",))])
def test_what_an_evaluation_gathers_last_does_not_overwrite_weights(tmp_path, cpu, gpus, recipe, own):
    """The first backward after an evaluation gathers a block too many, in memory that the next pass gets."""
    need_gpus(gpus)
    words = ("--device", "cuda", "--accumulate-steps", "2", "--evaluate-every", "5", *own)
    run = train(recipe, tmp_path, gpus, *STEPS, *words)
    assert losses(run) == pytest.approx(losses(cpu), rel=FP32)


def test_a_pipeline_on_two_gpus_of_a_process_equals_the_cpu(tmp_path):
    """GPT's first parameter is on the last GPU, whose stage needs it too.

    30 steps: from step 40 to 55, rounding differences of this run grow a thousandfold.
    """
    need_gpus(2)
    text = ("--data", "text", "--data-dir", str(ROOT / "docs"), "--model", "gpt-tiny", "--seq-len", "16")
    words = (*text, *STEPS, "--max-steps", "30", "--clip-grad-norm", "1")
    split = ("--split", "in-process", "--stages", "2", "--num-microbatches", "2")
    run = train("pipeline", tmp_path, 1, *words, "--device", "cuda", *split)
    assert losses(run) == pytest.approx(losses(train("single", tmp_path, 1, *words, "--device", "cpu")), rel=FP32)
