"""FSDP2: a process per GPU, each holding a shard of the weights, gradients and optimizer state.

    make run RECIPE=fsdp NODES=2 NPROC_PER_NODE=2
    .venv/bin/torchrun --nproc-per-node=4 -m recipes.fsdp.train --replicas 2 --data text --model gpt-tiny

Success: the first command ends with `result recipe=fsdp world_size=4 test_accuracy=0.98.. samples_per_s=...`.
Source: Zhao et al. 2023, PyTorch FSDP, https://arxiv.org/abs/2304.11277; Rajbhandari et al. 2020, ZeRO stage 3,
https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from recipes.common.arguments import is_user_code, option, positive_int, switch
from recipes.common.data import Data
from recipes.common.data.splits import digest
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.loop import Technique, begin_run, load_checked_data, train_epochs
from recipes.common.models.batchnorm import check_parts, set_groups
from recipes.common.models.blocks import checkpoint_blocks
from recipes.common.models.models import build_model, make_model
from recipes.common.models.user_model import check_fit
from recipes.common.optim import build_optimizer, build_scaler
from recipes.common.options import Options, check_processes, parse
from recipes.common.parallel.block_shards import finish_gathers, kept_attributes, shard_blocks
from recipes.common.parallel.groups import flat_mesh, grid_mesh
from recipes.common.parallel.same_use import SameUse
from recipes.common.parallel.sharding import (
    check_sharded_state,
    gather_state,
    own_shards,
    own_state,
    read_shards,
    update,
    write_shards,
)
from recipes.common.process.entry import run_main
from recipes.common.process.signals import Stop
from recipes.common.world.agreement import check_same_weights, run_on_all_ranks
from recipes.common.world.world import World, train_as_rank
from recipes.fsdp.initialise import Shards, build_shards, materialise


@dataclass(frozen=True)
class FSDPOptions(Options):
    """Fully sharded data parallelism."""

    has_shards = True
    exchanges_in_forward = True
    replicas: int = option(1, positive_int, "copies of the model, each sharded over world size / R ranks", "R")
    reshard_after_forward: bool = switch(
        "free a block's gathered weights after forward, and gather them again for backward", default=True
    )
    cpu_offload: bool = switch("keep shards and optimizer in main memory, and step there (GPUs)")

    def check(self) -> None:
        """Raise UserError if options do not combine."""
        super().check()
        if self.sync_batchnorm:
            raise UserError("--sync-batchnorm: fsdp normalises each rank's share by itself; use --batchnorm-group")

    def check_world_size(self, world_size: int) -> None:
        """Raise UserError if the number of replicas does not divide the world size."""
        check_processes("--replicas", self.replicas, world_size, 1)


options = partial(parse, FSDPOptions, "fsdp", __doc__)


def build_mesh(args: FSDPOptions, world: World) -> DeviceMesh:
    """Return the mesh of replicas x shards; call it on all ranks."""
    if args.replicas == 1:
        return flat_mesh(world)
    # HSDP: a group for each row (a replica's shards: best within a node) and each column (a shard's copies).
    return grid_mesh(args, world, world.world_size // args.replicas, ("replicate", "shard"))


def build(args: FSDPOptions, data: Data, world: World) -> tuple[nn.Module, Shards, list[Tensor], str]:
    """Return the model on the meta device, and this rank's rows of the weights that --seed gives the whole model.

    Then digests of the whole weights, if the model is the user's, and "". If the rows cannot be computed alone,
    return the whole model on the CPU, no rows, the weights, and the reason.
    """
    contiguous = replace(args, channels_last=False)  # a shard is rows of contiguous parameters
    count = world.world_size // args.replicas
    digests: list[Tensor] = []

    def add_digest(tensor: Tensor) -> None:
        if is_user_code(args.model):
            digests.append(torch.tensor(digest(tensor)))

    try:
        model, shards = build_shards(lambda: make_model(contiguous, data), world.rank % count, count, add_digest)
        if args.has_user_code:
            try:
                check_fit(copy.deepcopy(model).to("meta"), args, data, world.device)
            except UserError as error:
                # Code that reads a number, by item(), fails only on the meta device: train() checks the shards.
                if args.compile or "meta" not in str(error.__cause__):
                    raise
        return model, shards, digests, ""
    except Exception as error:  # missing values cause any; build_model() raises the model's own errors again
        cause = error.__cause__ or error  # of an error in the user's code
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
        model = build_model(contiguous, data, world.device)
        return model, {}, list(model.parameters()), reason


def wrap(model: nn.Module, args: FSDPOptions, world: World) -> FSDPModule:
    """Shard the model in place, block by block; return it."""
    if args.cpu_offload and world.device.type == "cpu":
        raise UserError("--cpu-offload: shards are in main memory already on a CPU; drop it")
    checkpoint_blocks(model, args)
    # True would hold for the root, too: torch's default frees the blocks after their forward, and keeps the root.
    settings: dict[str, Any] = {} if args.reshard_after_forward else {"reshard_after_forward": False}
    if args.cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy()
    # FSDP: a rank keeps 1/N of the rows of each parameter. An all-gather before a block's forward, and another
    # before its backward, each take (N-1)/N of the block's bytes per rank; a reduce-scatter after its backward
    # takes (N-1)/N of its gradients' bytes. The next block's weights arrive while this block computes.
    # FSDP: parameters in no block are gathered at the beginning of forward and kept until the end of backward.
    # HSDP: replicas average each shard's gradients: 2 (R-1)/R of 1/N of the model's bytes per rank.
    return shard_blocks(model, args, mesh=build_mesh(args, world), **settings)


def train(args: FSDPOptions, world: World, stop: Stop) -> None:
    """Train with the given options; call it on all ranks."""
    data = load_checked_data(args, "fsdp", world, stop)
    with world.watch("model", computes=True):
        model, shards, weights, why_whole = run_on_all_ranks(lambda: build(args, data, world), world)
        check_same_weights(args, weights, model.buffers(), world)
        del weights
        set_groups(model, args, world, world.world_size)
        parts = world.world_size * args.accumulate_steps
        run_on_all_ranks(lambda: check_parts(model, args, parts, data), world)
        with kept_attributes(model):
            module = wrap(model, args, world)
            if not why_whole:
                materialise(model, shards, torch.device("cpu") if args.cpu_offload else world.device)
            del shards  # the model has copies
        # FSDP: each rank sends whether its check_fit() saw the model without weights.
        needs_check = is_user_code(args.model) and not args.compile
        needs_check = needs_check and any(world.gather_objects(not why_whole))
    # FSDP: the optimizer sees shards only, so its state is sharded too.
    optimizer = build_optimizer(args, model, world)
    job = Job(args, "fsdp", data, world, model, optimizer, build_scaler(args, world.device), stop)
    same_use = SameUse(model, args, world, stop)

    def forward_backward(inputs: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        """Accumulate the gradients of one pass; return this rank's part of the loss."""
        # FSDP: gradients are exchanged only in the last of the accumulated passes; until then each rank keeps
        # whole gradients.
        module.set_requires_gradient_sync(is_last)
        with world.watch("gradients", computes=True):
            loss = job.loss(same_use.forward(inputs), targets)
            same_use.check_loss(loss)
            # FSDP: gradients are averaged over the ranks; this factor makes the result the global batch's mean.
            job.scaler.scale(loss * world.world_size).backward()
            finish_gathers(model, world.device, has_exchanged=is_last)
        if is_last:
            same_use.check_gradients()
        return loss.detach()

    def predict(inputs: Tensor) -> Tensor:
        # FSDP: evaluation gathers weights too, so all ranks run the same number of passes.
        with world.watch("evaluation", computes=True):
            return same_use.forward(inputs)

    if needs_check:
        # Passes gather the weights: all ranks run them.
        run_on_all_ranks(lambda: check_fit(model, args, data, world.device, predict), world)
        same_use.first.clear()
    state = own_state if args.sharded_checkpoints else gather_state
    technique = Technique(
        forward_backward,
        model,
        predict,
        update,
        gather_state=partial(state, job),
        check_optimizer=check_sharded_state,
    )
    # FSDP: rank 0 reads the checkpoint and broadcasts it, a tensor at a time; each rank keeps its shard of each
    # tensor. With a sharded checkpoint, each rank reads its own shards.
    begin_run(job, partial(read_shards, model), partial(own_shards, model))
    write_shards(job, world.with_own_group)
    if why_whole:
        what = "note: the model was built whole on each rank before it was sharded"
        job.say(f"{what} ({why_whole}); see recipes/fsdp/README.md")
    train_epochs(job, technique)
    job.finish(sample_on_all_ranks=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the options in argv; call it on every rank."""
    # FSDP: a launcher (torchrun, srun, mpirun) gives each process its rank.
    train_as_rank("fsdp", options(argv), train)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
