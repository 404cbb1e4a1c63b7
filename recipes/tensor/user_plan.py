"""A plan that comes with your own model, and the check that its parts compute what the whole model does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch

import torch
from torch import nn

from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.models.split_check import Pass, check_same_pass, one_pass
from recipes.common.options import Options
from recipes.common.parallel.sharding import gather_whole
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


def whole_pass(model: nn.Module, data: Data, args: Options, device: torch.device) -> Pass:
    """Return one_pass() of two samples; once the model is split, call it on all ranks of a replica."""
    inputs, targets = data.examples(2)
    return one_pass(model, (inputs.to(device), targets.to(device)), data.task, args, gather_whole)


def check_split(whole: Pass, model: nn.Module, data: Data, args: Options, device: torch.device) -> None:
    """Raise UserError if the split model's output or gradients are not those of `whole`, whole_pass() before."""
    what = f"--model {args.model}: split by its tensor_plan, it"
    try:
        parts = whole_pass(model, data, args, device)
    except RuntimeError as error:
        fix = "let forward() take the number of a rank's heads or units from the shape (-1 in view())"
        raise refusal(f"{what} fails", error, fix) from error
    fixes = (
        "let a rowwise layer take what colwise layers return",
        f"give its module the style {BETWEEN}, or leave the layers around it whole",
    )
    check_same_pass(what, whole, parts, args.amp, *fixes)
