"""Groups of ranks beside the one of all ranks, for the recipes that split more than the batch."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from recipes.common.options import Options
from recipes.common.watch.timeouts import group_timeout, wait_timeout
from recipes.common.world.peers import Peers


def grid_mesh(args: Options, world: Peers, row_size: int, names: tuple[str, str]) -> DeviceMesh:
    """Return a mesh of all ranks in rows of `row_size` neighbours; call it on all ranks.

    `names` are the names of its two dimensions: the groups along columns, then the groups along rows. Each group
    has a time-out.
    """
    grid = torch.arange(world.world_size).view(-1, row_size)
    timeout = group_timeout(wait_timeout(args), world.device.type)
    with world.watch("groups"):
        groups = [dist.new_subgroups_by_enumeration(some.tolist(), timeout=timeout)[0] for some in (grid.T, grid)]
    return DeviceMesh.from_group(cast(Any, groups), world.device.type, grid, mesh_dim_names=names)
