"""FSDP2, block by block: each rank keeps a shard of each parameter's rows, and gathers a block to run it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from recipes.common.arguments import is_user_code
from recipes.common.errors import UserError
from recipes.common.models.blocks import blocks
from recipes.common.models.models import compile_forward
from recipes.common.optim import AMP_DTYPES
from recipes.common.options import HOOKED, MOST_GRAPHS, Options
from recipes.common.parallel.buckets import check_frozen, frozen


def shard_blocks(model: nn.Module, args: Options, **settings: Any) -> FSDPModule:
    """Shard the model in place, block by block; return it. `settings` are those of fully_shard(), such as mesh.

    Raises UserError if a parameter or module cannot be sharded.
    """
    if is_user_code(args.model):
        from recipes.common.models.user_model import check_shared_memory

        check_shared_memory(model, args)
    check_shardable(model, args)
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    names = {p: name for name, p in model.named_parameters()}
    owners = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    own_norms = norms if args.amp != "none" else []
    chosen = []
    for block in blocks(model):
        parameters = list(block.parameters())
        # Tied matrices stay in the root module, where both users see them.
        if block not in own_norms and parameters and max(owners[p] for p in parameters) == 1:
            chosen.append(block)
    taken = {p for norm in own_norms for p in norm.parameters()}
    for module in (*chosen, model):
        check_dtypes([p for p in module.parameters() if p.requires_grad and p not in taken], args, names)
        taken.update(module.parameters())
    for norm in own_norms:
        fully_shard(norm, mp_policy=precision(replace(args, amp="none")), **settings)  # fp32 statistics need that
    if args.compile:
        # Torch counts the graphs of all blocks of a class together.
        torch.compiler.config.recompile_limit = MOST_GRAPHS * max(1, len(chosen))
    for block in chosen:
        compile_forward(block, args)
        block.register_forward_hook(copy_views)
        watch_frozen(block, names)
        fully_shard(block, mp_policy=precision(args), **settings)
    model.register_forward_hook(copy_views)
    return fully_shard(model, mp_policy=precision(args), **settings)


def precision(args: Options) -> MixedPrecisionPolicy:
    """Return FSDP's form of --amp: 16-bit weights cross the wire as half the bytes; gradients are summed in 32."""
    if args.amp == "none":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=AMP_DTYPES[args.amp], reduce_dtype=torch.float32)


def check_shardable(model: nn.Module, args: Options) -> None:
    """Raise UserError if a parameter has no rows, or if it or a module would lose what FSDP replaces."""
    what = f"--model {args.model}:"
    for name, parameter in model.named_parameters():
        if not parameter.ndim or not parameter.numel():
            kind, fix = "empty", "leave it out"
            if not parameter.ndim:
                kind, fix = "a single number", "give it the shape (1,)"
            why = f"the parameter {name} is {kind}, without rows to shard"
            raise UserError(f"{what} {why}; {fix}, or use RECIPE=ddp")
    if hooked := getattr(model, HOOKED, None):
        why = f"{hooked[0]} has a gradient hook, and FSDP replaces parameters by shards"
        raise UserError(f"{what} {why}; let a hook of the module do its work, or use RECIPE=ddp")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        why = "TorchScript has no hooks, in which FSDP gathers weights"
        raise UserError(f"{what} {why}; return the module itself, or use RECIPE=ddp")


def check_dtypes(own: Sequence[nn.Parameter], args: Options, names: Mapping[nn.Parameter, str]) -> None:
    """Raise UserError if the parameters that are sent as one have several dtypes."""
    for p in own:
        if p.dtype != own[0].dtype:
            what = f"{names[own[0]]} is {own[0].dtype}, {names[p]} of the same block {p.dtype}"
            why = "FSDP sends a block's parameters as one"
            raise UserError(f"--model {args.model}: {what}, and {why}; use one dtype, or RECIPE=ddp")


def copy_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return a block's output with copies of tensors that are views, such as a linear layer's of 3-D inputs.

    FSDP gathers the block for backward when the output's gradient arrives. If a view is changed in place, it would
    not notice that.
    """
    return tree_map_only(Tensor, lambda x: x.clone() if x.requires_grad and x._base is not None else x, output)


def finish_gathers(model: nn.Module, device: torch.device, has_exchanged: bool) -> None:
    """On a GPU, wait for FSDP's all-gathers at the end of a pass that has exchanged no gradients.

    Backward may gather a block too many, such as one of an evaluation before the pass. Torch 2.14 frees its memory
    while it is being written: torch.Stream.wait_event() ignores a torch.cuda.Event. The next pass would gather its
    own weights there. In a pass that exchanges gradients, FSDP waits for these, which come after the gathers.
    """
    if device.type == "cuda" and not has_exchanged and isinstance(model, FSDPModule):
        torch.cuda.synchronize(device)


def watch_frozen(module: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
    """Make a block raise as check_frozen() if it thaws its gathered weights, whose gradients FSDP would drop."""
    if found := [(name, names[parameter]) for name, parameter in frozen(module)]:

        def check(module: nn.Module, *_: Any) -> None:
            check_frozen([(path, module.get_parameter(name)) for name, path in found])

        module.register_forward_hook(check)


@contextlib.contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Give the parameters that replace the model's in this block their attributes: an optimizer may read them."""
    own = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    yield
    for name, parameter in model.named_parameters():
        vars(parameter).update(own.get(name, {}))
