"""What FSDP gathers and frees together: the blocks of a model, and the precision that they have meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from recipes.common.optim import AMP_DTYPES
from recipes.common.options import Options


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a model's outermost sequences: the units that are gathered and freed together."""
    sequences = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    for child in module.children():
        if isinstance(module, sequences) and not isinstance(child, sequences):
            yield child
        else:
            yield from blocks(child)


def precision(args: Options) -> MixedPrecisionPolicy:
    """Return FSDP's form of --amp: bf16 weights cross the wire as half the bytes; gradients are summed in fp32."""
    if args.amp == "none":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=AMP_DTYPES[args.amp], reduce_dtype=torch.float32)
