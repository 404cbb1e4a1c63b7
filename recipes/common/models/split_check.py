"""A check that a user's model computes the same when ranks split it, or what it gets, as when it is whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from recipes.common.data import Batch
from recipes.common.errors import UserError
from recipes.common.models.user_model import run_seeded
from recipes.common.optim import autocast
from recipes.common.options import Options
from recipes.common.task import Task, in_float

Pass = dict[str, Tensor]
"""A model's output for two samples, as "", and each parameter's gradient, on the CPU."""


def one_pass(
    model: nn.Module, samples: Batch, task: Task, args: Options, whole: Callable[[Tensor], Tensor] = lambda x: x
) -> Pass:
    """Run samples, on the model's device, forward and backward through the model in eval().

    `whole` returns the whole of a gradient of which this rank has a part. Call it on all ranks that share one.
    """
    inputs, targets = samples
    model.eval()
    with autocast(args, inputs.device):
        output = run_seeded(model, inputs)
    task.loss_sum(in_float(output), targets).backward()
    found = {"": output.detach().cpu()}
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[path] = whole(parameter.grad).cpu()
    model.zero_grad()
    model.train()
    return found


def check_same_pass(what: str, expected: Pass, found: Pass, amp: str, fix_output: str, fix_gradient: str) -> None:
    """Raise UserError, with a fix, if a pass has another output or gradient than the whole model's."""
    allowed = 0.01 if amp == "none" else 0.1
    size = {path: float(torch.linalg.vector_norm(tensor)) for path, tensor in expected.items()}
    rounding = 0.001 * max((size[path] for path in size if path), default=0.0)  # of a gradient that is zero
    for path, tensor in expected.items():
        own = found.get(path, torch.zeros_like(tensor))
        if own.shape == tensor.shape:
            difference = float(torch.linalg.vector_norm(own - tensor))
            if difference <= allowed * (max(size[path], rounding) if path else size[path]):
                continue
        if not path:
            raise UserError(f"{what} returns other values than whole; {fix_output}")
        raise UserError(f"{what} has another gradient of {path} than whole; {fix_gradient}")
