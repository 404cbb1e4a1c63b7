"""Your own model: its plan, and the check that it computes the same once it is split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.models.split_check import Pass, call_own, check_same_pass, one_pass, without_zeros
from recipes.common.options import HOOKED, Options
from recipes.common.parallel.sharding import gather_whole
from recipes.common.user_code import name_of
from recipes.tensor.plans import PLANS, Packed, matches, swap

BETWEEN = "replicated_with_grad_allreduce"
FIXES = (
    "let forward() take the number of a rank's heads or units from the shape (-1 in view())",
    "let a rowwise layer take what colwise layers return",
    f"give its module the style {BETWEEN}, or leave the layers around it whole",
)
"""What to do with a plan if a pass fails, or gives another output, or another gradient."""
FIX = "leave the layers as their class has made them, or use --tensor-parallel 1"
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


def split_user_model(
    model: nn.Module, data: Data, args: Options, device: torch.device, ranks: int, split: Callable[..., Packed]
) -> Packed:
    """Split the model by split(own_plan=...), which is parallelize(); call it on all ranks of a replica.

    Raises UserError as read_plan(), if split() fails, or if two samples then have another output or gradient: a
    plan may name the wrong layers, and a model of a class with a plan may have other layers, hooks or ties.
    """
    own_plan = None if type(model) in PLANS else read_plan(model, args.model)
    inputs, targets = data.examples(2)
    samples = inputs.to(device), targets.to(device)
    what = f"--model {args.model}: split by its plan, it"
    fix_failure, fix_output, fix_gradient = FIXES if own_plan else (FIX, FIX, FIX)

    def split_pass() -> Pass:
        packed.update(split(own_plan=own_plan))
        return one_pass(model, samples, data.task, args, gather_whole)

    packed: Packed = {}
    with without_zeros(model):
        expected = one_pass(model, samples, data.task, args)
        found = call_own(f"{what} fails", fix_failure, split_pass)
    for path in packed.keys() & expected.keys():
        expected[path] = swap(expected[path], 3, ranks)
    check_same_pass(what, expected, found, args.amp, fix_output, fix_gradient)
    for path in getattr(model, HOOKED, []):
        if isinstance(model.get_parameter(path), DTensor):
            raise UserError(f"{what} drops the gradient hook of {path}; leave that layer whole")
    return packed
