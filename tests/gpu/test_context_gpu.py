"""Context parallelism on GPUs: their attention kernels, two ranks that share one, more over NCCL, and the page."""

from __future__ import annotations

import pytest
import torch

from recipes.common.models.attention import use_sequence_sharding
from recipes.common.models.gpt import Attention, rotate
from recipes.context import attention
from recipes.context.attention import make_sequence_sharding, shard_sequence
from tests.conftest import need_gpus
from tests.gpu.test_every_recipe_gpu import FP32, STEPS, first_gpus, share_a_gpu
from tests.parallel.test_context import FULL, TEXT, Mesh, run_the_page, texts  # noqa: F401 (a fixture)
from tests.support import losses, run_ranks, train, words_for

WORDS = (*TEXT[:-2], *STEPS, "--seq-len", "64")


@pytest.fixture(autouse=True)
def gpu():
    need_gpus()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_each_ranks_attention_and_gradients_are_those_of_whole_sequences(monkeypatch, dtype, error):
    """bfloat16 takes flash attention; its rounding error is 2^-8."""
    q, k, v = torch.randn(3, 2, 4, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
    expected = Attention.attend(None, q, k, v)
    wanted = torch.autograd.grad(expected.float().square().sum(), (q, k, v))
    places = torch.arange(256, device="cuda")
    monkeypatch.setattr(attention, "gather_sequence", lambda part, mesh, dim: torch.stack((rotate(k, places), v)))
    found = []
    for rank in range(2):
        mesh = Mesh(rank, 2)
        with use_sequence_sharding(make_sequence_sharding(mesh)):
            mixed = Attention.attend(None, *(shard_sequence(x, mesh, 2) for x in (q, k, v)))
        assert torch.allclose(mixed, shard_sequence(expected, mesh, 2), atol=error)
        found.append(torch.autograd.grad(mixed.float().square().sum(), (q, k, v)))
    for one, other, whole in zip(*found, wanted, strict=True):
        assert torch.allclose(one + other, whole, atol=error * whole.abs().max().item())


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    """Return the losses of single on a CPU."""
    need_gpus()
    return losses(train("single", tmp_path_factory.mktemp("cpu"), 1, *WORDS, "--device", "cpu"))


@pytest.mark.parametrize("more", [(), (FULL,)])
def test_two_ranks_on_one_gpu_equal_the_cpu(tmp_path, cpu, more):
    run_ranks(
        "context", words_for(tmp_path, "run", *WORDS, "--device", "cuda", *more), 2, tmp_path, setup=share_a_gpu
    )
    assert losses(tmp_path / "run") == pytest.approx(cpu, rel=FP32)


@pytest.mark.parametrize("more", [(), (FULL,), ("--compile",)])
def test_two_gpus_equal_the_cpu(tmp_path, cpu, more):
    need_gpus(2, real="--compile" in more)
    run = train("context", tmp_path, 2, *WORDS, "--device", "cuda", *more)
    assert losses(run) == pytest.approx(cpu, rel=FP32)


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (2, 2), (4, 2)])
def test_the_page_has_the_cpus_curve(tmp_path, texts, gpus, ranks):  # noqa: F811
    need_gpus(gpus)
    env = {"CUDA_VISIBLE_DEVICES": first_gpus(gpus), "NVIDIA_TF32_OVERRIDE": "0"}
    steps, epochs, _ = run_the_page(texts[0], tmp_path, gpus, ranks, **env)
    on_cpu = run_the_page(texts[0], tmp_path, 1, 1, CUDA_VISIBLE_DEVICES="")
    assert steps == pytest.approx(on_cpu[0], rel=FP32)
    assert epochs == pytest.approx(on_cpu[1], rel=FP32)
