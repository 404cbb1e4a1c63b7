"""A check that a user's model computes the same when ranks split it, or what it gets, as when it is whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from recipes.common.data import Batch
from recipes.common.errors import UserError
from recipes.common.models.user_model import run_seeded
from recipes.common.optim import autocast
from recipes.common.options import Options
from recipes.common.task import Task, in_float
from recipes.common.user_code import refusal

Pass = dict[str, Tensor]
"""A model's output for two samples, as "", and each parameter's gradient, on the CPU."""


@contextlib.contextmanager
def without_zeros(model: nn.Module) -> Iterator[None]:
    """Give parameters that are all zero other values meanwhile, the same on all ranks.

    Behind a layer of zeros, every gradient would be zero, right or wrong.
    """
    found = {path: x for path, x in model.named_parameters() if x.requires_grad and not x.any()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in found.values():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    yield
    with torch.no_grad():
        for path in found:
            model.get_parameter(path).zero_()  # a split model has others in their place


def call_own(what: str, fix: str, action: Callable[[], Pass]) -> Pass:
    """Return what a pass through a user's model returns; raises UserError if it fails but for want of memory."""
    try:
        return action()
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise refusal(what, error, fix) from error


def one_pass(
    model: nn.Module, samples: Batch, task: Task, args: Options, whole: Callable[[Tensor], Tensor] = lambda x: x
) -> Pass:
    """Run samples, on the model's device, forward and backward through the model in eval().

    `whole` gathers a gradient if this rank holds only a part of it. Call it on all ranks that share one.
    """
    inputs, targets = samples
    model.eval()
    with autocast(args, inputs.device):
        output = run_seeded(model, inputs)
    scale = 1024 if args.amp == "fp16" else 1  # small gradients would be rounded to zero
    (scale * task.loss_sum(in_float(output), targets)).backward()
    found = {"": in_float(output.detach()).cpu()}
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[path] = in_float(whole(parameter.grad)).cpu()
    model.zero_grad()
    model.train()
    if inputs.is_cuda:  # the memory of this pass is not the training's
        torch.cuda.reset_peak_memory_stats(inputs.device)
    return found


def check_same_pass(what: str, expected: Pass, found: Pass, amp: str, fix_output: str, fix_gradient: str) -> None:
    """Raise UserError, with a fix, if a pass has another output or gradient than the whole model's."""
    allowed = 0.01 if amp == "none" else 0.1
    norm = torch.linalg.vector_norm
    size = {path: float(norm(tensor[tensor.isfinite()])) for path, tensor in expected.items()}
    rounding = 0.001 * max((size[path] for path in size if path), default=0.0)  # of a gradient that is zero
    for path, tensor in expected.items():
        own = found.get(path, torch.zeros_like(tensor))
        if own.shape == tensor.shape:
            same = (own == tensor) | (own.isnan() & tensor.isnan())  # a logit may be -inf
            difference = float(norm((own - tensor).masked_fill(same, 0)))
            if difference <= allowed * (max(size[path], rounding) if path else size[path]):
                continue
        if not path:
            raise UserError(f"{what} returns other values than whole; {fix_output}")
        raise UserError(f"{what} has another gradient of {path} than whole; {fix_gradient}")
