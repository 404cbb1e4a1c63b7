"""The check that all ranks use the same blocks of a model of your own in backward.

FSDP reduces the gradients of a block only if the block has some. If another rank has none, its next exchange is
another one: both would wait until --timeout-s ends the job.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.parallel.buckets import FIX_MISSING
from recipes.common.world.agreement import raise_on_all_ranks
from recipes.common.world.peers import Peers


class UsedBlocks:
    """Compares, before backward, which blocks have a parameter that the loss comes from."""

    def __init__(self, model: nn.Module, args: Options, peers: Peers) -> None:
        self.peers = peers
        self.blocks: dict[Tensor, str] = {}
        """The block of each gathered parameter of the current pass."""
        self.first: set[str] | None = None
        """The blocks that the first loss came from."""
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                self.watch(name, module, args)

    def watch(self, name: str, block: FSDPModule, args: Options) -> None:
        """Note the parameters that a block has while it is gathered."""

        def note(module: nn.Module, *_: Any) -> None:
            for parameter in module.parameters():
                self.blocks.setdefault(parameter, name)

        cast(nn.Module, block).register_forward_pre_hook(torch.compiler.disable(note) if args.compile else note)

    def check(self, loss: Tensor) -> None:
        """Compare the blocks with the other ranks' in the first step, later with the first step's.

        Call it on all ranks. Raises UserError on all ranks in the first step, later on this one.
        """
        used = {self.blocks[leaf] for leaf in leaves(loss) if leaf in self.blocks}
        self.blocks.clear()
        if self.first is None:
            self.first = used
            # FSDP: each rank sends the names of its blocks, once.
            with self.peers.watch("gradients"):
                gathered = self.peers.gather_objects(used)
            different = min((name for each in gathered for name in each ^ used), default=None)
            raise_on_all_ranks(None if different is None else self.error(different), self.peers)
        elif used != self.first:
            error = self.error(min(used ^ self.first))
            error.on_one_rank = True
            raise error

    def error(self, block: str) -> UserError:
        """Return the error about a block that has gradients on some ranks only."""
        what = f"the block {block or 'model'} got gradients on some ranks or in some steps only"
        return UserError(f"{what}, and FSDP sums them block by block; {FIX_MISSING}")


def leaves(loss: Tensor) -> set[Tensor]:
    """Return the tensors that get a gradient of the loss."""
    nodes, seen, found = [loss.grad_fn], set[Any](), set[Tensor]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            if (variable := getattr(node, "variable", None)) is not None:
                found.add(variable)
    return found
