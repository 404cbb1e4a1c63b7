"""What tensors on two devices cannot do: on a GPU, and so on its stand-in (tests/light/stand_in_gpus.py)."""

from __future__ import annotations

import copy
import io
import operator

import pytest
import torch

from tests.conftest import need_gpus

CASES = {
    "sum": operator.add,
    "product of matrices": lambda gpu, cpu: gpu @ cpu.view(2, 1),
    "sum on the CPU": lambda gpu, cpu: cpu[0].add_(gpu[0]),
    "stack of numbers": lambda gpu, cpu: torch.stack((gpu[0], cpu[0])),
    "gradient": lambda gpu, cpu: setattr(gpu, "grad", cpu),
    "NumPy": lambda gpu, cpu: gpu.numpy(),
}


@pytest.fixture
def gpu():
    need_gpus()
    return torch.ones(2, device="cuda")


@pytest.mark.parametrize("case", CASES)
def test_is_refused(gpu, case):
    with pytest.raises((RuntimeError, TypeError)):
        CASES[case](gpu, torch.ones(2))


def test_tensors_stay_where_they_are(gpu):
    module = torch.nn.Linear(2, 2).cuda()
    loss = module(gpu).sum()
    loss.backward()
    numbers = [gpu, loss, gpu[:1], gpu.clone(), copy.deepcopy(gpu), torch.zeros_like(gpu), module.weight.grad]
    assert {tensor.device for tensor in numbers} == {torch.device("cuda", 0)}
    file = io.BytesIO()
    torch.save(gpu.cpu(), file)
    file.seek(0)
    assert torch.load(file, map_location="cpu").device == gpu.to("cpu").device == torch.device("cpu")
    assert (gpu * 2 + torch.tensor(1.0)).tolist() == [3, 3]


def test_a_copy_is_no_alias(gpu):
    for copied in (gpu.to("cuda", copy=True), gpu.cpu(), gpu.cpu().to("cpu", copy=True)):
        copied.zero_()
    assert gpu.tolist() == [1, 1]
