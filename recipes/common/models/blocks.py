"""The blocks of a model: what FSDP gathers together, and what runs again with --activation-checkpointing."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from recipes.common.errors import UserError
from recipes.common.models.batchnorm import plain_layers
from recipes.common.options import Options


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the children of a model's outermost sequences, such as the layers of a transformer, each once."""
    sequences = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if isinstance(module, sequences) and not isinstance(child, sequences) else blocks(child)
    return list(dict.fromkeys(found))


def checkpoint_blocks(model: nn.Module, args: Options) -> None:
    """With --activation-checkpointing, make each block keep only its inputs, and run again in backward.

    Raises UserError if the model has no blocks with parameters, or has batch norm.
    """
    if not args.activation_checkpointing:
        return
    what = f"--activation-checkpointing: --model {args.model}"
    if any(plain_layers(model)):
        why = "blocks that run again would count their statistics twice"
        raise UserError(f"{what} has batch norm, and {why}; drop it")
    found = [block for block in blocks(model) if any(True for _ in block.parameters())]
    if not found:
        why = "which are what an nn.Sequential or nn.ModuleList holds"
        raise UserError(f"{what} has no blocks with parameters, {why}; drop it")
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
