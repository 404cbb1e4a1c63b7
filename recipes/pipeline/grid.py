"""The ranks as a grid: DDP over the columns, a pipeline with one reader of data in each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from recipes.common.data import Batch, Spec, Split
from recipes.common.parallel.buckets import NO_BUFFER_SYNC
from recipes.common.watch.bounds import bound_of_group, bound_of_waits
from recipes.common.world.world import World, grid_mesh
from recipes.pipeline.options import PipelineOptions, count_stages


@dataclass(frozen=True)
class Grid(World):
    """This process among the others, at its place in the (dp, pp) mesh: rank = replica * stages + stage."""

    devices: list[torch.device]
    """This process's own: one, or with --split in-process one for each part of the model."""
    mesh: DeviceMesh
    first_replica: dist.ProcessGroup
    """A gloo group of replica 0, whose state a checkpoint holds."""
    replica: int
    replicas: int
    """Copies of the model, among which DDP shares out the batch."""
    stage: int
    stages: int
    """Processes that a replica spans: 1 with --split in-process."""


def build_grid(args: PipelineOptions, world: World) -> Grid:
    """Find this process's place among the others; call it on all ranks, with the same options."""
    stages = count_stages(args)
    first, count = world.device.index, args.stages // stages  # no index for the CPU
    devices = [world.device if first is None else torch.device("cuda", first + i) for i in range(count)]
    # Pipeline: the world is a grid of replicas x stages, with a group for each column (one stage's gradients)
    # and each row (a replica's activations).
    grid = torch.arange(world.world_size).view(-1, stages)
    timeout = bound_of_group(bound_of_waits(args), world.device.type)
    mesh = grid_mesh(args, world, stages, ("dp", "pp"))
    first_replica = dist.new_group(grid[0].tolist(), timeout=timeout, backend="gloo")
    replica, stage = divmod(world.rank, stages)
    own: dict[str, Any] = {"devices": devices, "mesh": mesh, "first_replica": first_replica}
    place: dict[str, Any] = {"replica": replica, "replicas": len(grid), "stage": stage, "stages": stages}
    return Grid(**vars(world), **own, **place)


def wrap(module: nn.Module, world: Grid) -> DistributedDataParallel:
    """Return a part of the model with gradients that are averaged over the replicas."""
    # DDP: construction broadcasts replica 0's parameters within this stage's column of the mesh. The last backward
    # pass of a step then averages the gradients there (a ring all-reduce: 2 (N-1)/N of their bytes per rank).
    return DistributedDataParallel(
        module,  # no device_ids: a part lies where it lies, in-process even on several devices
        process_group=world.mesh.get_group("dp"),
        **NO_BUFFER_SYNC,  # evaluate() does it, once an epoch instead of once a step
        gradient_as_bucket_view=True,  # the gradients are the buckets: no second copy of the model's size
    )


def sync_buffers(modules: Iterable[nn.Module], world: Grid) -> None:
    """Give all replicas the batch-norm statistics of replica 0: each has those of its own microbatches."""
    for module in modules:
        for buffer in module.buffers():
            # DDP: within a stage's column of the mesh, replica 0 sends its buffers to the others.
            with world.watch("evaluation"):
                dist.broadcast(buffer, group=world.mesh.get_group("dp"), group_src=0)


def sum_over_replicas(world: Grid, tensor: Tensor) -> None:
    """Overwrite a tensor of this stage by its sum over the replicas."""
    # DDP: an all-reduce within this stage's column of the mesh.
    with world.watch("statistics"):
        dist.all_reduce(tensor, group=world.mesh.get_group("dp"))


def read_batches(world: Grid, target: Spec, split: Split, shares: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
    """Yield the batches of a replica's shares, of which only its first stage has the inputs.

    Call it on all ranks of a replica.
    """
    filled = (share for share in shares if len(share))
    nothing = ((torch.empty(len(i), 0), target.zeros(len(i))) for i in filled)
    for inputs, targets in split.batches(filled, epoch) if world.stage == 0 else nothing:
        targets = targets.to(world.device).contiguous()
        # Pipeline: only a replica's first stage reads data; targets go to the others, of a label 8 bytes a sample.
        with world.watch("labels"):
            dist.broadcast(targets, group=world.mesh.get_group("pp"), group_src=0)
        yield inputs, targets
