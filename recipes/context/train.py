"""Context parallelism x data parallelism: the ranks of a replica divide each sequence, the replicas the batch.

    make run RECIPE=context NODES=2 NPROC_PER_NODE=2 ARGS="--data text"
    .venv/bin/torchrun --nproc-per-node=4 -m recipes.context.train --fully-shard --data text --seq-len 1024

Success: the first command ends with `result recipe=context world_size=4 test_bits_per_byte=2...`.
Source: Dubey et al. 2024, The Llama 3 Herd of Models, section 3.3.2, https://arxiv.org/abs/2407.21783.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from recipes.common.arguments import is_user_code, option, positive_int, switch
from recipes.common.data import Batch, Data, Split
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.loop import Technique, begin_run, load_data_and_model, train_epochs
from recipes.common.models.attention import use_sequence_sharding
from recipes.common.models.models import GPT_NAMES, GPTS, compile_forward
from recipes.common.optim import autocast, build_optimizer, build_scaler
from recipes.common.options import TEXTS, Options, check_processes, nearest_multiples, parse
from recipes.common.parallel import sharding
from recipes.common.parallel.block_shards import finish_gathers, kept_attributes, shard_blocks
from recipes.common.parallel.buckets import build_final_buckets, default_bucket_mb, wrap_in_ddp
from recipes.common.parallel.groups import flat_mesh, grid_mesh
from recipes.common.parallel.same_use import SameUse
from recipes.common.process.entry import run_main
from recipes.common.process.signals import Stop
from recipes.common.world.agreement import run_on_all_ranks, shard
from recipes.common.world.world import World, train_as_rank
from recipes.context.attention import make_sequence_sharding, shard_sequence, take_whole_sequences


@dataclass(frozen=True)
class ContextOptions(Options):
    """Context parallelism."""

    context_parallel: int = option(2, positive_int, "ranks that divide each sequence", "N")
    fully_shard: bool = switch("shard weights, gradients and optimizer over all ranks (FSDP2)")

    @property
    def has_shards(self) -> bool:
        """Whether ranks hold shards of the model."""
        return self.fully_shard

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether the ranks of a replica exchange keys and values."""
        return self.context_parallel > 1

    def check(self) -> None:
        """Raise UserError if options do not combine."""
        super().check()
        flag = f"--context-parallel {self.context_parallel}"
        if self.sync_batchnorm:
            raise UserError("--sync-batchnorm: this recipe has none; use RECIPE=ddp, or --batchnorm-group")
        if self.fully_shard and self.context_parallel == 1:
            raise UserError(f"--fully-shard: {flag} divides nothing; drop it, or use RECIPE=fsdp")
        if self.context_parallel == 1:
            return
        if self.model not in GPTS and not is_user_code(self.model):
            fix = f"use {GPT_NAMES} with --data text or tokens, or --context-parallel 1"
            raise UserError(f"{flag}: --model {self.model} has no sequence that ranks can divide; {fix}")
        if self.task not in ("auto", "language-model"):
            raise UserError(f"{flag}: --task {self.task} may read whole sequences; drop it")
        if self.data in TEXTS:
            self.check_length(self.seq_len)

    def check_length(self, length: int) -> None:
        """Raise UserError, with the nearest lengths that work, if sequences do not divide into 2N chunks."""
        chunks = 2 * self.context_parallel
        if length % chunks:
            what = f"a sequence of {length} does not divide into 2 chunks for each rank"
            flag = " (--seq-len)" if self.data in TEXTS else ""
            fix = f"use a length of {nearest_multiples(length, chunks)}{flag}"
            raise UserError(f"--context-parallel {self.context_parallel}: {what}; {fix}")

    def check_world_size(self, world_size: int) -> None:
        """Raise UserError if the world size is not a multiple of the ranks that divide a sequence."""
        check_processes("--context-parallel", self.context_parallel, world_size, world_size)


options = partial(parse, ContextOptions, "context", __doc__)


def wrap(
    model: nn.Module, args: ContextOptions, world: World, data: Data, cp: DeviceMesh
) -> DistributedDataParallel | None:
    """Let DDP average the gradients over all ranks; or with --fully-shard, shard the model in place.

    Call it on all ranks.
    """
    if args.fully_shard:
        # FSDP: each of M ranks keeps 1/M of the rows of each parameter. An all-gather before a block's forward,
        # and another before its backward, each take (M-1)/M of the block's bytes; a reduce-scatter after its
        # backward takes (M-1)/M of its gradients' bytes.
        mesh = flat_mesh(world)
        run_on_all_ranks(lambda: shard_blocks(model, args, mesh=mesh), world)
        return None
    # DDP: all ranks hold the whole model, and each has the gradient of its own positions of its own samples.
    # Backward averages a bucket of them over all ranks while the layers before it are still computing.
    ddp = wrap_in_ddp(model, args, world.device, bucket_cap_mb=default_bucket_mb(world.device))
    if args.deterministic:
        build_final_buckets(ddp, data, world.device, lambda inputs: own_sequence(inputs, cp))
    compile_forward(model, args)  # DDP: not the wrapper, as in recipes/ddp
    return ddp


def own_sequence(tensor: Tensor, cp: DeviceMesh) -> Tensor:
    """Return this rank's part of sequences (B, T), or all of any samples if there is nothing to divide."""
    return shard_sequence(tensor, cp, 1) if cp.size() > 1 else tensor


def read_batches(cp: DeviceMesh, split: Split, shares: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
    """Yield this rank's part of the sequences (B, T) and targets (B, T) of its replica: (B, T / N) each."""
    # Context: all ranks of a replica read the same samples; nothing crosses the wire.
    for inputs, targets in split.batches(shares, epoch):
        yield own_sequence(inputs, cp), own_sequence(targets, cp)


def train(args: ContextOptions, world: World, stop: Stop) -> None:
    """Train with the given options; call it on all ranks."""
    replicas = world.world_size // args.context_parallel
    data, model = load_data_and_model(args, "context", world, stop, replicas)
    if args.context_parallel > 1:
        if is_user_code(args.model):
            from recipes.context.user_model import check_data

            run_on_all_ranks(lambda: check_data(args, data), world)
        run_on_all_ranks(lambda: args.check_length(data.input.shape[0]), world)
    # Context: a group for each row (the ranks of a replica: neighbours, best within a node) and each column.
    mesh = grid_mesh(args, world, args.context_parallel, ("dp", "cp"))
    dp, cp = mesh["dp"], mesh["cp"]
    sequence_sharding = make_sequence_sharding(cp) if cp.size() > 1 else None
    if sequence_sharding and is_user_code(args.model):
        from recipes.context.user_model import check_model

        with world.watch("model", computes=True):
            check_model(model, data, args, cp, sequence_sharding, world)
    with use_sequence_sharding(sequence_sharding), world.watch("model", computes=True), kept_attributes(model):
        ddp = wrap(model, args, world, data, cp)
    module = ddp or model
    same_use = SameUse(module, args, world, stop)
    optimizer = build_optimizer(args, model, world)
    scaler = build_scaler(args, world.device)
    settings = args, "context", data, world, model, optimizer, scaler, stop
    job = Job(*settings, replicas=replicas, ranks_per_sample=cp.size())

    def forward_backward(inputs: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        """Accumulate the gradients of one pass; return this rank's part of the loss."""
        # DDP, FSDP: gradients are exchanged only in the last of the accumulated passes, while backward runs.
        if args.fully_shard:
            cast(FSDPModule, model).set_requires_gradient_sync(is_last)
        # Context: each pass exchanges keys, values and their gradients within the replica, in each block.
        with world.watch("gradients", computes=True), nullcontext() if is_last or not ddp else ddp.no_sync():
            with autocast(args, world.device):
                # Context: the mean over this rank's 1/N of the positions is 1/N of its samples' loss.
                loss = job.loss(same_use.forward(inputs), targets) / cp.size()
            same_use.check_loss(loss)
            # DDP, FSDP: gradients are averaged over ranks; this factor makes the result the global batch's mean.
            scaler.scale(loss * world.world_size).backward()
            finish_gathers(model, world.device, has_exchanged=is_last)
        if is_last:
            same_use.check_gradients()
        return loss.detach()

    def predict(inputs: Tensor) -> Tensor:
        # Context: evaluation gathers keys and values, too; each rank counts its own positions.
        with world.watch("evaluation", computes=True), autocast(args, world.device):
            return same_use.forward(inputs)

    technique = Technique(
        forward_backward,
        module,
        predict=predict,
        # Context: all ranks of a replica take the same samples.
        shard=lambda indices: shard(indices, dp.get_local_rank(), dp.size()),
        read_batches=partial(read_batches, cp),
    )
    if args.fully_shard:
        # FSDP: rank 0 gathers the tensors of a checkpoint; it broadcasts those that it reads, and each rank keeps
        # its shards. With a sharded checkpoint, each rank writes and reads its own shards.
        state = sharding.own_state if args.sharded_checkpoints else sharding.gather_state
        technique = replace(
            technique,
            update=sharding.update,
            gather_state=partial(state, job),
            check_optimizer=sharding.check_sharded_state,
        )
        begin_run(job, partial(sharding.read_shards, model), partial(sharding.own_shards, model))
    else:
        # DDP: rank 0 reads the checkpoint and broadcasts it. All ranks hold the same weights: rank 0 writes them.
        begin_run(job)
    sharding.write_shards(job, world.with_own_group)
    with use_sequence_sharding(sequence_sharding):
        train_epochs(job, technique)
        if cp.size() > 1:
            take_whole_sequences(model, cp)
        job.finish(sample_on_all_ranks=cp.size() > 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the options in argv; call it on every rank."""
    # Context: a launcher (torchrun, srun, mpirun) gives each process its rank.
    train_as_rank("context", options(argv), train)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
