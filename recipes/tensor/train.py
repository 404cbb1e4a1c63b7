"""Tensor parallelism x data parallelism: the ranks of a replica split each layer, the replicas divide the batch.

    make run RECIPE=tensor NODES=2 NPROC_PER_NODE=2
    .venv/bin/torchrun --nproc-per-node=4 -m recipes.tensor.train --tensor-parallel 4 --data text --model gpt-tiny

Success: the first command ends with `result recipe=tensor world_size=4 test_accuracy=0.98.. samples_per_s=...`.
Source: Shoeybi et al. 2019, Megatron-LM, https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from recipes.common.arguments import is_user_code, option, positive_int, switch
from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.loop import Check, Content, Technique, begin_run, load_data_and_model, train_epochs
from recipes.common.models.models import compile_forward
from recipes.common.optim import autocast, build_optimizer, build_scaler
from recipes.common.options import Options, check_processes, parse
from recipes.common.parallel import sharding
from recipes.common.parallel.block_shards import finish_gathers, kept_attributes, shard_blocks
from recipes.common.parallel.groups import grid_mesh
from recipes.common.parallel.same_use import SameUse
from recipes.common.process.entry import run_main
from recipes.common.process.signals import Stop
from recipes.common.world.agreement import run_on_all_ranks, shard
from recipes.common.world.world import World, train_as_rank
from recipes.tensor.plans import Packed, check_tokens, packed_boxes, parallelize, reorder_packed

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that travel together, as in DistributedDataParallel."""


@dataclass(frozen=True)
class TensorOptions(Options):
    """Tensor parallelism."""

    has_shards = True
    tensor_parallel: int = option(2, positive_int, "ranks that split each layer", "N")
    sequence_parallel: bool = switch("vit-tiny and GPT: between split layers, a rank has 1/N of a sample's tokens")
    loss_parallel: bool = switch("GPT: split the vocabulary; a rank computes the loss from 1/N of the logits")
    fully_shard: bool = switch("shard weights, gradients and optimizer over the replicas, too (FSDP2)")

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether the ranks of a replica sum activations."""
        return self.tensor_parallel > 1

    def check(self) -> None:
        """Raise UserError if options do not combine."""
        super().check()
        if self.amp == "fp16":
            # Tensor: torch sums up whether gradients overflow as the first of them is placed.
            what = "a gradient scaler does not take split and whole gradients together"
            raise UserError(f"--amp fp16: {what}; use --amp bf16")
        if self.sync_batchnorm:
            raise UserError("--sync-batchnorm: each replica normalises its own share; use --batchnorm-group")
        if self.tensor_parallel == 1 and (self.sequence_parallel or self.loss_parallel):
            flag = "--sequence-parallel" if self.sequence_parallel else "--loss-parallel"
            raise UserError(f"{flag}: --tensor-parallel 1 splits nothing; drop one of the two")
        if self.tensor_parallel == 1 and self.fully_shard:
            raise UserError("--fully-shard: --tensor-parallel 1 splits nothing; drop it, or use RECIPE=fsdp")
        if self.loss_parallel and self.task not in ("auto", "language-model"):
            raise UserError(f"--loss-parallel: --task {self.task} may read all logits; drop it")

    def check_world_size(self, world_size: int) -> None:
        """Raise UserError if the world size is not a multiple of the ranks per replica."""
        check_processes("--tensor-parallel", self.tensor_parallel, world_size, world_size)


options = partial(parse, TensorOptions, "tensor", __doc__)


def wrap(model: nn.Module, data: Data, args: TensorOptions, world: World, mesh: DeviceMesh) -> Packed:
    """Split the model over the ranks of a replica; return its packed parameters, as parallelize() does."""
    tp = mesh["tp"]
    split = partial(parallelize, model, args.model, tp, args.sequence_parallel, args.loss_parallel)
    if is_user_code(args.model) and tp.size() > 1:
        from recipes.common.models.user_model import check_shared_memory
        from recipes.tensor.user_plan import split_user_model

        run_on_all_ranks(lambda: check_shared_memory(model, args), world)  # the split copies what it splits
        split = partial(split_user_model, model, data, args, world.device, tp.size(), split)
    packed = run_on_all_ranks(split, world)
    if args.fully_shard:
        # Tensor: with --fully-shard, each of D replicas keeps 1/D of the rows of a rank's shard. An all-gather
        # before a block's forward, and another before its backward, each take (D-1)/D of the bytes of a rank's
        # part of the block; a reduce-scatter after its backward takes (D-1)/D of its gradients' bytes.
        # Tensor: parameters in no block are gathered before forward, and kept until backward has ended.
        shard_blocks(model, args, mesh=mesh["dp"])
    else:
        compile_forward(model, args)
    return packed


class GradientSum:
    """Sums the gradients of a rank's shards over the replicas while backward runs."""

    def __init__(self, model: nn.Module, replicas: dist.ProcessGroup, everyone: dist.ProcessGroup) -> None:
        self.replicas, self.everyone, self.is_last = replicas, everyone, True
        self.buckets: dict[dist.ProcessGroup, list[Tensor]] = {replicas: [], everyone: []}
        self.sums: list[tuple[list[Tensor], Tensor, dist.Work]] = []
        self.names: dict[Tensor, str] = {x: name for name, x in model.named_parameters() if x.requires_grad}
        self.taken: set[Tensor] = set()
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(self.add)

    def add(self, parameter: Tensor) -> None:
        """In the last pass of a step, add a complete gradient to its bucket, and send the bucket if it is full."""
        if not self.is_last:
            return
        self.taken.add(parameter)
        gradient, group = cast(Tensor, parameter.grad), self.replicas
        if isinstance(gradient, DTensor):
            own = gradient.to_local()
            if gradient.placements == (Partial(),):  # of this rank's tokens or heads only: sum over all ranks
                group = self.everyone
                parameter.grad = DTensor.from_local(own, gradient.device_mesh, [Replicate()], run_check=False)
            gradient = own
        if group.size() > 1:
            self.buckets[group].append(gradient)
            if sum(gradient.nbytes for gradient in self.buckets[group]) >= BUCKET_BYTES:
                self.send(group)

    def send(self, group: dist.ProcessGroup) -> None:
        """Start to sum the gradients in a group's bucket."""
        flat = torch.cat([gradient.flatten() for gradient in self.buckets[group]])
        # Tensor: replicas have different samples, so the ranks that hold the same shards all-reduce their
        # gradients. With D replicas, each rank sends 2 (D-1)/D of a bucket's bytes while backward runs. With a
        # sequence, the norms' gradients are summed over all ranks: 2 (DN-1)/DN of their bytes.
        work = dist.all_reduce(flat, group=group, async_op=True)
        self.sums.append((self.buckets[group], flat, work))
        self.buckets[group] = []

    def finish(self) -> None:
        """Replace all gradients with their sums after the last pass of a step.

        Raises UserError if a parameter got no gradient in the last pass, perhaps on this rank only: replicas that
        miss different gradients would sum buckets that do not match.
        """
        missing = [parameter for parameter in self.names if parameter not in self.taken]
        if missing and self.is_last and self.replicas.size() > 1:
            what = f"{self.names[missing[0]]} got no gradient, so that replicas cannot sum it"
            fix = "use it in every forward pass, or set its requires_grad to False"
            raise UserError(f"{what}; {fix}", on_one_rank=True)
        for parameter in missing:
            if parameter.grad is not None:  # of an earlier pass
                self.add(parameter)
        self.taken.clear()
        for group in [group for group, bucket in self.buckets.items() if bucket]:
            self.send(group)
        for gradients, flat, work in self.sums:
            work.wait()
            for gradient, total in zip(gradients, flat.split([part.numel() for part in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))
        self.sums.clear()


def update(job: Job, check: Check) -> None:
    """Step the optimizer on this rank's shards and on the replicated parameters; call it on all ranks."""
    with implicit_replication():  # a parameter that is not split is the same on all ranks
        sharding.update(job, check)


def train(args: TensorOptions, world: World, stop: Stop) -> None:
    """Train with the given options; call it on all ranks."""
    replicas = world.world_size // args.tensor_parallel
    # FSDP shards the rows of contiguous parameters.
    layout = replace(args, channels_last=False) if args.fully_shard else args
    data, model = load_data_and_model(layout, "tensor", world, stop, replicas)
    if args.sequence_parallel:
        run_on_all_ranks(lambda: check_tokens(model, data.input.shape[0], args.tensor_parallel), world)
    # Tensor: a group for each row (the ranks of a replica: neighbours, best within a node) and each column (the
    # ranks with the same shards).
    mesh = grid_mesh(args, world, args.tensor_parallel, ("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    with world.watch("model", computes=True), kept_attributes(model):
        packed = wrap(model, data, args, world, mesh)
    # Tensor: with --fully-shard, FSDP sums the gradients.
    everyone = cast(dist.ProcessGroup, dist.group.WORLD)
    gradients = None if args.fully_shard else GradientSum(model, dp.get_group(), everyone)
    same_use = SameUse(model, args, world, stop)
    optimizer = build_optimizer(args, model, world)
    scaler = build_scaler(args, world.device)
    job = Job(args, "tensor", data, world, model, optimizer, scaler, stop, replicas=replicas)
    # Tensor: ranks of a replica draw the same numbers, as dropout does, for what each of them computes whole.
    job.draws_as = dp.get_local_rank()

    def forward_backward(inputs: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        """Accumulate the gradients of one pass; return this rank's part of the loss."""
        if gradients:
            gradients.is_last = is_last
        else:
            cast(FSDPModule, model).set_requires_gradient_sync(is_last)
        # Tensor: from sharded logits, ranks all-reduce each position's maximum, sum of exponentials and target
        # logit: 3 x 2 (N-1)/N x 4 bytes per position.
        shards = loss_parallel() if args.loss_parallel else nullcontext()
        with world.watch("gradients", computes=True), shards:
            with autocast(args, world.device):
                loss = job.loss(same_use.forward(inputs), targets)
            same_use.check_loss(loss)
            if gradients:
                loss.backward()
                gradients.finish()
            else:
                # Tensor: FSDP averages the replicas' gradients; this factor makes the result their sum.
                (loss * dp.size()).backward()
                finish_gathers(model, world.device, has_exchanged=is_last)
        if is_last:
            same_use.check_gradients()
        # Tensor: all ranks of a replica have its whole loss; each gives 1/N of it to the sum that is logged.
        return sharding.gather_whole(loss.detach()) / tp.size()

    def predict(inputs: Tensor) -> Tensor | None:
        # Tensor: evaluation sums activations too; only the first rank of a replica counts its samples.
        with world.watch("evaluation", computes=True), autocast(args, world.device):
            output = same_use.forward(inputs)
        return output if tp.get_local_rank() == 0 else None

    def gather_state() -> Content | None:
        if args.sharded_checkpoints:
            return sharding.own_state(job, mesh, boxes)
        # Tensor: rank 0 gathers the shards of its replica; the file is the same as for a model that is not split.
        state = sharding.gather_state(job)
        return state and reorder_packed(state, model, packed, tp.size(), 3)

    boxes = partial(packed_boxes, packed, tp.size())

    def own_shards(outline: Content) -> Content:
        return reorder_packed(sharding.own_shards(model, outline), model, packed, 3, tp.size())

    technique = Technique(
        forward_backward,
        model,
        predict=predict,
        update=update,
        # Tensor: all ranks of a replica take the same samples.
        shard=lambda indices: shard(indices, dp.get_local_rank(), dp.size()),
        counts_skipped=tp.get_local_rank() == 0,
        gather_state=gather_state,
        check_optimizer=sharding.check_sharded_state,
    )
    # Tensor: rank 0 reads the checkpoint and broadcasts it; each rank keeps its shards. With a sharded checkpoint,
    # each rank reads its own shards.
    begin_run(job, lambda content: sharding.read_shards(model, content, boxes), own_shards)
    sharding.write_shards(job, world.with_own_group)
    train_epochs(job, technique)
    job.finish(sample_on_all_ranks=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the options in argv; call it on every rank."""
    # Tensor: a launcher (torchrun, srun, mpirun) gives each process its rank.
    train_as_rank("tensor", options(argv), train)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
