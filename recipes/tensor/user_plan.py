"""A plan that comes with your own model, and the check that its parts compute what the whole model does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.models.user_model import run_seeded
from recipes.common.optim import autocast
from recipes.common.options import Options
from recipes.common.parallel.sharding import gather_whole
from recipes.common.task import in_float
from recipes.common.user_code import name_of, refusal

BETWEEN = "replicated_with_grad_allreduce"
STYLES = ("colwise", "rowwise", BETWEEN)
"""Hugging Face's names; BETWEEN is for modules between a colwise layer and a rowwise one."""


def read_plan(model: nn.Module, name: str) -> dict[str, str]:
    """Return the model's tensor_plan: the style of each split layer, by a pattern of paths such as layers.*.up.

    Raises UserError if there is none, or it names anything but nn.Linear layers that can be split.
    """
    what, plan = f"--model {name}", getattr(model, "tensor_plan", None)
    if plan is None:
        fix = "give it a tensor_plan (docs/your-model.md), or use --tensor-parallel 1"
        raise UserError(f"{what}: it has no plan of what to split; {fix}")
    if not isinstance(plan, dict) or not plan:
        example = '{"layers.*.up": "colwise"}'
        raise UserError(f"{what}: tensor_plan is {name_of(plan)}; give a dict such as {example}")
    users = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    named = set[str]()
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UserError(f"{what}: tensor_plan has {style!r} for {pattern}; use {', '.join(STYLES)}")
        found = dict(matches(model, pattern))
        if not found:
            raise UserError(f"{what}: tensor_plan names {pattern}, which is no module of it; correct the name")
        if twice := named & found.keys():
            raise UserError(f"{what}: tensor_plan names {min(twice)} by two patterns; remove one of them")
        named.update(found)
        for path, module in found.items():
            is_packed = isinstance(model.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention)
            if (type(module) is not nn.Linear or is_packed) and style != BETWEEN:
                kind = "nn.MultiheadAttention" if is_packed else f"a {type(module).__name__}"
                fix = "name layers of nn.Linear, such as those of queries, keys, values and output"
                raise UserError(f"{what}: tensor_plan names {path} of {kind}; {fix}")
            if any(users[parameter] > 1 for parameter in module.parameters()):
                fix = "leave it out, and it stays whole"
                raise UserError(f"{what}: tensor_plan names {path}, which shares its weight; {fix}")
    return plan


def matches(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose path a pattern names; a * stands for a part between dots, as in torch's plans."""
    wanted = pattern.split(".")
    for path, module in model.named_modules():
        parts = path.split(".")
        if len(parts) == len(wanted) and all(map(fnmatch, parts, wanted)):
            yield path, module


def one_pass(model: nn.Module, data: Data, args: Options, device: torch.device) -> dict[str, Tensor]:
    """Return the model's output for two samples, as "", and each parameter's whole gradient, on the CPU.

    The model is in eval() meanwhile. Once it is split, call this on all ranks of a replica.
    """
    inputs, targets = (tensor.to(device) for tensor in data.examples(2))
    model.eval()
    with autocast(args, device):
        output = run_seeded(model, inputs)
    data.task.loss_sum(in_float(output), targets).backward()
    found = {"": output.detach().cpu()}
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[path] = gather_whole(parameter.grad).cpu()
    model.zero_grad()
    model.train()
    return found


def check_split(
    whole: dict[str, Tensor], model: nn.Module, data: Data, args: Options, device: torch.device
) -> None:
    """Raise UserError if the split model's output or gradients are not those of `whole`, one_pass() before."""
    what = f"--model {args.model}: split by its tensor_plan, it"
    try:
        parts = one_pass(model, data, args, device)
    except RuntimeError as error:
        fix = "let forward() take the number of a rank's heads or units from the shape (-1 in view())"
        raise refusal(f"{what} fails", error, fix) from error
    allowed = 0.01 if args.amp == "none" else 0.1
    least = 0.001 * max(float(torch.linalg.vector_norm(x)) for path, x in whole.items() if path)
    for path, expected in whole.items():
        found = parts.get(path, torch.zeros_like(expected))
        size = float(torch.linalg.vector_norm(expected))
        if found.shape == expected.shape:
            difference = float(torch.linalg.vector_norm(found - expected))
            if difference <= allowed * (max(size, least) if path else size):
                continue
        if not path:
            fix = "let a rowwise layer take what colwise layers return"
            raise UserError(f"{what} returns other values than whole; {fix}")
        fix = f"give its module the style {BETWEEN}, or leave the layers around it whole"
        raise UserError(f"{what} has another gradient of {path} than whole; {fix}")
