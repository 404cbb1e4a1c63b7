"""--zero: the optimizer's state in shards over the ranks (ZeRO stage 1).

Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from recipes.common.errors import UserError
from recipes.common.models.user_model import check_shared_memory
from recipes.common.optim import optimizer_class, optimizer_state, parameter_groups
from recipes.common.options import Options
from recipes.common.parallel.groups import gather_values
from recipes.common.world.world import World


def shard_optimizer(args: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with sharded state; raises UserError for several dtypes, or as check_shared_memory()."""
    check_shared_memory(model, args)
    # DDP: each rank updates its share of the weights, then broadcasts it: the model's bytes cross the wire again.
    (make, settings), groups = optimizer_class(args), parameter_groups(args, model.parameters())
    try:
        return ZeroRedundancyOptimizer(groups, optimizer_class=make, **settings)
    except ValueError as error:  # parameters of several dtypes
        raise UserError(f"--model {args.model}: --zero: {error}; use one dtype, or drop --zero") from None


def consolidate(optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any] | None:
    """Return the whole optimizer state on rank 0 and None on the others; call it on all ranks."""
    local = cast(ZeroRedundancyOptimizer, optimizer).optim.state
    numbered = enumerate(p for group in optimizer.param_groups for p in group["params"])
    # DDP: rank 0 gathers the optimizer's shards, with AdamW twice the model's bytes; torch's own
    # consolidate_state_dict() would send them to all ranks.
    own = {number: local[p] for number, p in numbered if p in local}
    shards = gather_values(own, world, world.control, world.watch.args.timeout_s)
    if shards is None:
        return None
    state = {number: values for shard in shards for number, values in shard.items()}
    content = torch.optim.Optimizer.state_dict(optimizer)  # ZeroRedundancyOptimizer's would need the sending
    return {"optimizer": optimizer_state(optimizer, {**content, "state": state})}
