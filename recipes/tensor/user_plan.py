"""Your own model: its plan, and the check that it computes the same once it is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.models.split_check import Pass, call_own, check_same_pass, one_pass, without_zeros
from recipes.common.options import HOOKED, Options
from recipes.common.parallel.sharding import gather_whole, names_of_parameters
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
STYLES: dict[str, type[nn.Module] | None] = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"), nn.Linear),
    "embedding_rowwise": nn.Embedding,
    BETWEEN: None,
}
"""Hugging Face's names, and the class that each splits; BETWEEN is for any module between two split layers."""
SPLIT_ROWS = {"colwise", "colwise_gather_output", "embedding_rowwise"}
"""The styles in which layers can share their weight: each splits its rows."""


def read_plan(model: nn.Module, name: str) -> dict[str, str]:
    """Return the model's tensor_plan: the style of each split layer, by a pattern of paths such as layers.*.up.

    Raises UserError if there is none, or a style does not fit what it names.
    """
    what, plan = f"--model {name}", getattr(model, "tensor_plan", None)
    if plan is None or plan == {}:
        fix = "give it a tensor_plan (docs/your-model.md), or use --tensor-parallel 1"
        raise UserError(f"{what}: it has no plan of what to split; {fix}")
    if not isinstance(plan, dict):
        example = '{"layers.*.up": "colwise"}'
        raise UserError(f"{what}: tensor_plan is {name_of(plan)}; give a dict such as {example}")
    named: dict[str, Any] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UserError(f"{what}: tensor_plan has {style!r} for {pattern}; use {', '.join(STYLES)}")
        found = dict(matches(model, pattern))
        if not found:
            raise UserError(f"{what}: tensor_plan names {pattern}, which is not a module of it; correct the name")
        if twice := named & found.keys():
            raise UserError(f"{what}: tensor_plan names {min(twice)} by two patterns; remove one of them")
        named |= dict.fromkeys(found, style)
        for path, module in found.items():
            is_packed = isinstance(model.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention)
            kind = STYLES[style]
            if kind and (is_packed or not isinstance(module, kind)):
                other = "nn.MultiheadAttention" if is_packed else f"a {type(module).__name__}"
                fix = f"{style} splits only nn.{kind.__name__}: leave it out, and it stays whole"
                raise UserError(f"{what}: tensor_plan names {path} of {other}; {fix}")
    for names in names_of_parameters(model):
        owners = [name.rpartition(".")[0] for name in names]
        split = [path for path in owners if path in named]
        if len(owners) > 1 and split and not SPLIT_ROWS.issuperset(map(named.get, owners)):
            fix = "leave it out, and it stays whole"
            raise UserError(f"{what}: tensor_plan names {split[0]}, which shares its weight; {fix}")
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
