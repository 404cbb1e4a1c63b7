"""The options of the pipeline recipe, and the ranks as a grid: DDP over the columns, a pipeline in each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from recipes.common.arguments import choice, one_of, option, positive_int
from recipes.common.data import Batch, Spec, Split
from recipes.common.errors import UserError
from recipes.common.options import Options, check_divides, check_processes
from recipes.common.parallel.groups import grid_mesh
from recipes.common.watch.timeouts import wait_timeout
from recipes.common.world.peers import broadcast_bytes
from recipes.common.world.world import World

PARTS_PER_STAGE = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""With interleaved, stage r of p holds parts r and p + r: half the bubble for twice the messages."""


@dataclass(frozen=True)
class PipelineOptions(Options):
    """Pipeline."""

    stages: int = option(2, positive_int, "devices that a replica spans", "P")
    num_microbatches: int = option(4, positive_int, "equal pieces of a replica's batch", "M")
    schedule: str = option(
        "1f1b",
        one_of(*PARTS_PER_STAGE),
        "gpipe: all forward passes first; 1f1b: alternating, at most P microbatches in memory; interleaved: 1f1b "
        "with two parts a stage",
    )
    split: str = choice(
        "ranks: a process for each stage; in-process: the whole model in each process, on P devices",
        *("ranks", "in-process"),
    )
    balance: str = choice(
        "balance the parts by number of parameters, or by cost: the time measured on a microbatch",
        *("parameters", "cost"),
    )

    @property
    def passes(self) -> int:
        """Microbatches that go through a stage per step."""
        return self.accumulate_steps * self.num_microbatches

    @property
    def stages_in_ranks(self) -> int:
        """Processes that a replica spans: 1 with --split in-process."""
        return 1 if self.split == "in-process" else self.stages

    def check(self) -> None:
        """Raise UserError if options do not combine."""
        super().check()
        microbatches, stages = self.num_microbatches, self.stages_in_ranks
        if self.on_nonfinite != "stop":
            raise UserError(f"--on-nonfinite {self.on_nonfinite}: a stage sees its own gradients only; use stop")
        if self.records_graphs:
            # A microbatch's gradients and outputs lie in the graph's memory: see Options.check().
            what = "a CUDA graph overwrites the outputs and gradients of the microbatch before"
            raise UserError(f"--compile-mode {self.compile_mode}: {what}; use --compile-mode default")
        if self.amp == "fp16":
            raise UserError("--amp fp16: each stage would have its own loss scale; use --amp bf16")
        if self.sync_batchnorm:
            what = "a pipeline normalises each microbatch by itself"
            raise UserError(f"--sync-batchnorm: {what}; use --batchnorm-group")
        if self.schedule == "1f1b" and microbatches < stages:
            fix = f"use at least {stages}, or --schedule gpipe"
            raise UserError(f"--num-microbatches {microbatches} are too few for 1f1b with {stages} stages; {fix}")
        rounds = max(1, microbatches // stages)
        if self.split == "ranks" and self.schedule == "interleaved" and (stages < 2 or microbatches % rounds):
            fix = f"use 2 stages or more and --num-microbatches {max(2, stages) * rounds}"
            raise UserError(f"--schedule interleaved: {microbatches} microbatches for {stages} stages; {fix}")

    def check_world_size(self, world_size: int) -> None:
        """Raise UserError if the world size is not a multiple of the processes per replica."""
        check_processes("--stages", self.stages_in_ranks, world_size, world_size)

    def check_microbatches(self, replicas: int, num_train: int) -> None:
        """Raise UserError, with sizes that work, if the batch does not divide into equal microbatches."""
        shares = f"{replicas} replicas x {self.accumulate_steps} passes x {self.num_microbatches} microbatches"
        if self.batchnorm_group:
            shares += f" x groups of {self.batchnorm_group}"
        check_divides(self, replicas * self.passes * (self.batchnorm_group or 1), shares, num_train)


@dataclass(frozen=True)
class Grid(World):
    """The World with this process's place in the (dp, pp) mesh: rank = replica * stages + stage."""

    mesh: DeviceMesh
    first_replica: dist.ProcessGroup
    """Gloo group of replica 0's ranks, whose state a checkpoint holds."""
    replica: int
    replicas: int
    """Copies of the model; each trains on its share of the batch."""
    stage: int
    stages: int
    """Processes that a replica spans: 1 with --split in-process."""

    def sync_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Broadcast replica 0's batch-norm statistics to all replicas; each has only its own microbatches'."""
        column = self.mesh.get_group("dp")
        for buffer in (buffer for module in modules for buffer in module.buffers()):
            # DDP: within a stage's column of the mesh, replica 0 sends its buffers to the others.
            with self.watch("evaluation"):
                broadcast_bytes(buffer, lambda own: dist.broadcast(own, group=column, group_src=0))

    def sum_over_replicas(self, tensor: Tensor) -> None:
        """Overwrite a tensor of this stage with its sum over the replicas."""
        # DDP: an all-reduce within this stage's column of the mesh.
        with self.watch("statistics"):
            dist.all_reduce(tensor, group=self.mesh.get_group("dp"))

    def read_batches(self, target: Spec, split: Split, shares: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield the batches of a replica's shares; only its first stage gets the inputs.

        Call it on all ranks of a replica.
        """
        row = self.mesh.get_group("pp")
        filled = (share for share in shares if len(share))
        nothing = ((torch.empty(len(i), 0), target.zeros(len(i), self.device)) for i in filled)
        for inputs, targets in split.batches(filled, epoch) if self.stage == 0 else nothing:
            targets = targets.to(self.device)
            # Pipeline: only a replica's first stage reads data; it broadcasts the targets, 8 bytes per label. NCCL
            # needs a first operation of the whole group before stages send activations to one another.
            with self.watch("labels"):
                broadcast_bytes(targets, lambda own: dist.broadcast(own, group=row, group_src=0))
            yield inputs, targets


def build_grid(args: PipelineOptions, world: World) -> Grid:
    """Arrange the ranks in a grid and return this process's place; call it on all ranks with the same options."""
    stages = args.stages_in_ranks
    # Pipeline: the world is a grid of replicas x stages, with a group for each column (one stage's gradients)
    # and each row (a replica's activations).
    mesh = grid_mesh(args, world, stages, ("dp", "pp"))
    with world.watch("groups"):
        first_replica = cast(
            dist.ProcessGroup, dist.new_group(list(range(stages)), timeout=wait_timeout(args), backend="gloo")
        )
    replica, stage = divmod(world.rank, stages)
    replicas = world.world_size // stages
    return Grid(
        **vars(world),
        mesh=mesh,
        first_replica=first_replica,
        replica=replica,
        replicas=replicas,
        stage=stage,
        stages=stages,
    )
