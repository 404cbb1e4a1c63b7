"""Groups of ranks within a job: a mesh of them, and what they gather on rank 0 for a checkpoint."""

from __future__ import annotations

import io
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from recipes.common.options import Options
from recipes.common.watch.timeouts import group_timeout, wait_timeout
from recipes.common.world.peers import Peers

T = TypeVar("T")

PIECE_BYTES = 64 * 2**20
"""Bytes that rank 0 receives in one wait: 64 s at 1 MB/s."""


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


def flat_mesh(world: Peers) -> DeviceMesh:
    """Return a mesh of all ranks in one dimension."""
    # Where GPUs are visible, DeviceMesh() would replace a group of CPUs by one that waits for 30 minutes.
    everyone = cast(dist.ProcessGroup, dist.group.WORLD)
    return DeviceMesh.from_group(everyone, world.device.type, mesh_dim_names=("shard",))


def gather_values(value: T | None, peers: Peers, group: dist.ProcessGroup) -> list[T] | None:
    """Return on rank 0 the values of a gloo group's ranks, which are the first ones; call it on all ranks.

    Ranks outside of the group give None. Values may hold what a checkpoint may; rank 0 gets tensors on the CPU.
    """
    own = torch.empty(0, dtype=torch.uint8)
    if value is not None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        own = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    with peers.watch("checkpoint"):
        sizes = [size for size in peers.gather_objects(len(own)) if size]
    is_first = peers.rank == 0
    rows = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if is_first else []
    step = max(1, PIECE_BYTES // len(sizes))
    for start in range(0, max(sizes), step):
        piece = slice(start, min(start + step, max(sizes)))
        with peers.watch("checkpoint"):  # of each: on a slow network, all of them take longer than a wait may
            if value is not None:
                part = nn.functional.pad(own[piece], (0, piece.stop - start - len(own[piece])))
                # Checkpoint: each rank of the group sends its bytes to rank 0, padded to the longest's.
                dist.gather(part, [row[piece] for row in rows] if is_first else None, group=group, group_dst=0)
            peers.begin_vote(0)()  # ranks that send nothing wait for this piece, too
    texts = (io.BytesIO(rows.pop(0)[:size].numpy().tobytes()) for size in sizes)
    return [torch.load(text, map_location="cpu", weights_only=True) for text in texts] if is_first else None
