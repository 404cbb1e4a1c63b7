"""DistributedDataParallel's buckets: the gradients that travel together."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recipes.common.arguments import is_user_code
from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.world.peers import Peers

KEYWORDS = inspect.signature(DistributedDataParallel).parameters
NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in KEYWORDS else "broadcast_buffers": False
}
"""The argument that stops DistributedDataParallel from broadcasting buffers; newer torch has renamed it."""

FIX_MISSING = "set requires_grad to False if it is never used, or use RECIPE=horovod if ranks use different ones"
"""What to do about a parameter without a gradient."""

Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters with their names."""

REFUSED_TYPES = {"Invalid scalar type": "gloo", "data type is not supported for NCCL": "NCCL"}
"""Phrases in errors about a type that a backend cannot send: gloo's RuntimeError, NCCL's TypeError."""


def default_bucket_mb(device: torch.device) -> float | None:
    """Return the size of buckets; None: torch's default, which is for NCCL.

    Ranks wait for the last bucket: 4 MB take 33 ms at 1 Gbit/s.
    """
    return 4 if device.type == "cpu" else None


def wrap_in_ddp(
    module: nn.Module, args: Options, device: torch.device | None = None, **settings: Any
) -> DistributedDataParallel:
    """Wrap a module in DDP, which then exchanges no buffers; call it on all ranks.

    `device` is the one of the module's inputs, which DDP moves to a GPU (default: it leaves them where they are).

    Raises UserError if the backend cannot send a parameter, a buffer or a gradient.
    """
    if any(parameter.is_cuda for parameter in module.parameters()):
        from recipes.common.models.layers import sparse_embedding

        if name := sparse_embedding(module):
            fix = "make it without sparse=True, or use RECIPE=single or horovod"
            raise UserError(f"--model {args.model}: {name} has sparse gradients, which NCCL cannot sum; {fix}")
    try:
        ddp = DistributedDataParallel(
            module,
            device_ids=[device.index] if device and device.type == "cuda" else None,
            **NO_BUFFER_SYNC,  # evaluate() in loop.py syncs buffers, once an epoch instead of once a step
            gradient_as_bucket_view=True,  # the gradients are the buckets: no second copy of the model's size
            **settings,
        )
    except (RuntimeError, TypeError) as error:
        backend = next((name for text, name in REFUSED_TYPES.items() if text in str(error)), None)
        if not backend:
            raise
        what = f"--model {args.model}: DDP cannot send its int16 or float8 tensors over {backend}"
        raise UserError(f"{what}; use another dtype, or RECIPE=fsdp") from None
    vars(ddp)["trained"], vars(ddp)["frozen"] = trained(module), frozen(module)  # as DDP itself takes them
    return ddp


def build_final_buckets(
    ddp: nn.Module, data: Data, device: torch.device, select: Callable[[Tensor], Tensor] = lambda inputs: inputs
) -> None:
    """Make DDP build its final buckets; call it on all ranks, before the model is compiled.

    `select` returns what this rank trains on of samples' inputs (default: all).

    DDP rebuilds its buckets in the order in which the first backward computes gradients. A gradient's place in a
    bucket decides how a sum over three or more ranks is rounded. A pass over a sample, before training, makes the
    first step after a resume round like any other. It runs in eval(), so that it changes no statistics.
    """
    ddp.eval()
    ddp(select(data.examples(1)[0]).to(device)).abs().sum().backward()  # abs: complex numbers have no gradients
    if missing := missing_gradients(trained(ddp)):
        what = f"--deterministic: the parameter {missing[0]} got no gradient in eval(), and DDP needs all"
        raise UserError(f"{what}; {FIX_MISSING}", on_one_rank=True)
    ddp.zero_grad()


def trained(module: nn.Module) -> Named:
    """Return the parameters that training changes."""
    named = ((name.removeprefix("module."), parameter) for name, parameter in module.named_parameters())
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def frozen(module: nn.Module) -> Named:
    """Return the parameters that training does not change; check_frozen() takes them after each step."""
    return [(name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad]


def check_frozen(parameters: Named) -> None:
    """Raise UserError if training has made a frozen parameter train, whose gradients ranks do not exchange."""
    for name, parameter in parameters:
        if parameter.requires_grad or parameter.grad is not None:
            what = f"training has set requires_grad of {name}, whose gradient the ranks do not exchange"
            raise UserError(f"{what}; set it in --model, or use RECIPE=scratch", on_one_rank=True)


def missing_gradients(parameters: Named) -> list[str]:
    """Return the names of the parameters without a gradient."""
    return [name for name, parameter in parameters if parameter.grad is None]


def find_unused(model: nn.Module, args: Options, peers: Peers) -> list[nn.Parameter]:
    """Return the parameters of a user's model that a step used on no rank; call it on all ranks after backward.

    One process leaves them as they are. A gradient of zeros would move them, by momentum and weight decay.
    """
    if not is_user_code(args.model):
        return []
    parameters = [parameter for _, parameter in trained(model)]
    used = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    if peers.world_size > 1:
        # Unused parameters: each rank sends a number for each parameter, once a step; on the CPU, since to read it
        # from a GPU would wait for backward.
        with peers.watch("gradients"):
            peers.sum_tensor(used)
    return [parameter for parameter, count in zip(parameters, used.tolist(), strict=True) if not count]


def check_complete(ddp: DistributedDataParallel) -> None:
    """Raise UserError if one of DDP's parameters got no gradient in a step's last pass, perhaps on this rank only.

    DDP then exchanges only a part of the gradients, and the next forward pass fails; other ranks may wait already.
    Raises UserError as check_frozen(), too.
    """
    names = [name for name, _ in vars(ddp)["trained"]]
    try:
        ddp._check_reducer_finalized()
    except RuntimeError as error:
        found = re.search(r"did not receive grad for rank \d+: ([^\s,]+)", str(error))
        name = found[1] if found else "unknown"  # a name or, unless TORCH_DISTRIBUTED_DEBUG is set, a number
        raise missing_gradient_error(names[int(name)] if name.isdigit() else name) from None
    # DDP notices nothing if no parameter at all got a gradient; otherwise, all have one here.
    if all(parameter.grad is None for parameter in ddp.parameters()):
        raise missing_gradient_error(names[0])
    check_frozen(vars(ddp)["frozen"])


def missing_gradient_error(name: str) -> UserError:
    """Return the error about a parameter without a gradient."""
    return UserError(f"the parameter {name} got no gradient, and DDP needs all; {FIX_MISSING}", on_one_rank=True)
