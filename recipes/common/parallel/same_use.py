"""The check that all ranks use the same blocks and parameters of a user's model that shard_blocks() has sharded.

FSDP exchanges weights and gradients only by their order. If ranks use different ones, they mix them, gloo aborts,
or ranks wait in different exchanges until --timeout-s ends the job.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from recipes.common.arguments import is_user_code
from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.parallel.buckets import (
    FIX_MISSING,
    check_complete,
    check_frozen,
    frozen,
    missing_gradients,
    trained,
)
from recipes.common.process.signals import Stop
from recipes.common.world.peers import Peers

T = TypeVar("T")

MISUSES = {
    "mixed torch.Tensor and DTensor": (
        "forward() uses a parameter without calling its module, and FSDP gathers it when that is called; "
        "call the module"
    ),
    "RegisterPostBackwardFunction": (
        "a block changes its own input in place, and FSDP would not see when its backward ends; "
        "let the block make a new tensor (x = x + y)"
    ),
}
"""What torch says of models that FSDP cannot train, and what to say instead."""


class SameUse:
    """Compares what a rank is about to exchange: the first time with the other ranks', later with its own first.

    A built-in model with a built-in task uses the same on all ranks: it is not compared, and neither is a model
    without FSDP's shards. Call each method on all ranks.
    """

    def __init__(self, model: nn.Module, args: Options, peers: Peers, stop: Stop) -> None:
        self.model, self.peers, self.stop = model, peers, stop
        self.trained, self.frozen = trained(model), frozen(model)
        self.is_sharded = isinstance(model, FSDPModule)
        self.is_needed = self.is_sharded and (is_user_code(args.model) or is_user_code(args.task))
        self.first: dict[object, Any] = {}
        """What was compared first: a block by its place in a pass, the names of blocks, and of parameters."""
        self.place: int | None = None
        """The number of blocks of the current pass so far; None outside of a pass."""
        self.blocks: dict[Tensor, str] = {}
        """The block of each gathered parameter."""
        # A block is compiled with the hooks of the modules in it.
        compare, note = map(torch.compiler.disable if args.compile else lambda f: f, (self.compare, self.note))
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and self.is_needed:
                model.get_submodule(name).register_forward_pre_hook(partial(compare, name), prepend=True)
                model.get_submodule(name).register_forward_pre_hook(partial(note, name))

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's output.

        Raises UserError before the first gather that differs: in the first pass of training or of evaluation on
        all ranks, later on this one.
        """
        self.place = 0
        try:
            output = self.model(inputs)
        except RuntimeError as error:
            what = next((what for said, what in MISUSES.items() if said in str(error)), "")
            if not what or not self.is_sharded:
                raise
            raise UserError(f"{what}, or use RECIPE=ddp", on_one_rank=True) from None
        self.compare("nothing")
        self.place = None
        return output

    def compare(self, name: str, *_: Any) -> None:
        """Raise UserError if another block than this one is next."""
        if self.place is None or not self.is_needed:  # a sample may call some of the blocks
            return
        is_training = self.model.training
        key = is_training, self.place
        self.place += 1
        is_first, names = self.gather(key, name, "gradients" if is_training else "evaluation")
        for rank, other in enumerate(names):
            if other != names[0]:
                what = f"rank {rank} runs {other} where rank 0 runs {names[0]}"
                if not is_first:
                    what = f"rank {self.peers.rank} runs {name} where its first pass ran {names[0]}"
                fix = "run the same blocks on all ranks in every pass, or use RECIPE=horovod"
                raise UserError(f"{what}, and FSDP gathers in order; {fix}", on_one_rank=not is_first)

    def note(self, name: str, block: nn.Module, *_: Any) -> None:
        """Note the parameters that a block has while it is gathered."""
        for parameter in block.parameters():
            self.blocks.setdefault(parameter, name)

    def check_loss(self, loss: Tensor) -> None:
        """Raise UserError before backward if the loss comes from other blocks: FSDP reduces those with gradients.

        It is raised on all ranks in the first step, later on this one.
        """
        if self.is_needed:
            used = {self.blocks[leaf] for leaf in leaves(loss) if leaf in self.blocks}
            is_first, block = self.find_odd("blocks", used)
            if block is not None:
                what = f"the block {block or 'model'} got gradients on some ranks or in some steps only"
                why = "FSDP sums them block by block"
                raise UserError(f"{what}, and {why}; {FIX_MISSING}", on_one_rank=not is_first)

    def check_gradients(self) -> None:
        """Raise UserError on all ranks after the first step's last pass if different parameters got a gradient.

        After a later step, the error becomes this rank's vote. Raises UserError as check_frozen(), too, and for
        DDP as check_complete().
        """
        if isinstance(self.model, DistributedDataParallel):
            check_complete(self.model)  # it checks frozen parameters, too
            return
        check_frozen(self.frozen)
        if self.is_needed:
            is_first, name = self.find_odd("parameters", set(missing_gradients(self.trained)))
            if name is not None:
                what = f"the parameter {name} got a gradient on some ranks or in some steps only"
                error = UserError(f"{what}, and FSDP sums by position; {FIX_MISSING}")
                if is_first:
                    raise error
                self.stop.fail(error)

    def find_odd(self, key: object, names: set[str]) -> tuple[bool, str | None]:
        """Return whether the names were compared with other ranks', and one that not all have."""
        is_first, found = self.gather(key, names, "gradients")
        return is_first, min({name for each in found for name in each ^ names}, default=None)

    def gather(self, key: object, value: T, place: str) -> tuple[bool, list[T]]:
        """Return True and all ranks' values if this is the first one; else False, the first one and this one."""
        if key in self.first:
            return False, [self.first[key], value]
        self.first[key] = value
        # FSDP: each rank sends the name of a block, or the names of those that it has used, once.
        with self.peers.watch(place, computes=True):
            return True, self.peers.gather_objects(value)


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
