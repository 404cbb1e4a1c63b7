"""DistributedDataParallel: a process per GPU, gradients averaged while backward still runs.

    make run RECIPE=ddp NODES=2
    .venv/bin/torchrun --nproc-per-node=2 -m recipes.ddp.train

Success: the last line is `result recipe=ddp world_size=2 test_accuracy=0.98.. samples_per_s=...`.
Source: Li et al. 2020, PyTorch Distributed, https://arxiv.org/abs/2006.15704.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recipes.common.arguments import choice, is_user_code, option, positive_float, positive_int, switch
from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.loop import Technique, begin_run, load_data_and_model, train_epochs
from recipes.common.models.models import compile_forward
from recipes.common.optim import autocast, build_optimizer, build_scaler
from recipes.common.options import Options, parse
from recipes.common.parallel.buckets import build_final_buckets, check_complete, default_bucket_mb, wrap_in_ddp
from recipes.common.process.entry import run_main
from recipes.common.process.signals import Stop
from recipes.common.world.agreement import run_on_all_ranks
from recipes.common.world.world import World, train_as_rank


@dataclass(frozen=True)
class DDPOptions(Options):
    """DistributedDataParallel."""

    grad_compression: str = choice(
        "how gradients cross the wire; none: as fp32", "none", "fp16", "bf16", "powersgd"
    )
    powersgd_rank: int = option(4, positive_int, "rank of powersgd's two factors", "R")
    bucket_cap_mb: float | None = option(
        None,
        positive_float,
        "gradients that travel together (default: 4 on CPUs, 25 after a first 1 on GPUs)",
        "MB",
    )
    zero: bool = switch("shard the optimizer's state over the ranks (ZeRO stage 1)")

    def check(self) -> None:
        """Raise UserError if options do not combine."""
        super().check()
        if self.zero and is_user_code(self.optimizer):
            raise UserError(f"--zero is for sgd and adamw; drop it, or --optimizer {self.optimizer}")
        if self.compile and self.bucket_cap_mb and self.bucket_cap_mb < 1:
            why = "torch cuts a compiled model at buckets of at least 1 MB"
            raise UserError(f"--bucket-cap-mb {self.bucket_cap_mb:g}: {why}; use 1 or more, or drop --compile")
        if self.grad_compression == "powersgd":
            # Each step's error is added to the next gradient: once the error is not finite, it stays so.
            why = "--grad-compression powersgd carries a gradient that is not finite to all later steps"
            if self.amp == "fp16":
                raise UserError(f"--amp fp16: {why}; use --amp bf16")
            if self.on_nonfinite == "skip":
                raise UserError(f"--on-nonfinite skip: {why}; drop one of the two")

    @property
    def takes_sparse_gradients(self) -> bool:
        """Not with compression."""
        return super().takes_sparse_gradients and self.grad_compression == "none"


options = partial(parse, DDPOptions, "ddp", __doc__)


def wrap(model: nn.Module, args: DDPOptions, world: World, data: Data) -> DistributedDataParallel:
    """Wrap the model so that its gradients are averaged over all ranks; call it on all ranks."""
    # DDP: with --sync-batchnorm, a layer gathers 2C + 1 floats of each rank in forward, and sums 2C in backward.
    if args.sync_batchnorm:
        from recipes.common.models.batchnorm import sync_batch_norm

        model = sync_batch_norm(model, world)
    # DDP: construction broadcasts rank 0's parameters. Backward then averages a bucket of gradients (a
    # ring all-reduce: 2 (N-1)/N of its bytes per rank) while the layers before it are still computing.
    size_mb = args.bucket_cap_mb or default_bucket_mb(world.device)
    ddp = wrap_in_ddp(model, args, world.device, bucket_cap_mb=size_mb)
    if args.deterministic:
        build_final_buckets(ddp, data, world.device)
    if args.grad_compression != "none":
        from recipes.ddp.compression import compress_gradients

        run_on_all_ranks(lambda: compress_gradients(ddp, args.grad_compression, args.powersgd_rank), world)
    # DDP: not the wrapper: torch would compile nothing of an nn.Sequential in it. When DDP calls the model, torch
    # cuts the graph at the buckets, so that their exchange still overlaps with backward.
    compile_forward(model, args)
    return ddp


def prepare(args: DDPOptions, recipe: str, world: World, stop: Stop) -> tuple[Job, Technique]:
    """Return the job and the technique that trains it; call it on all ranks."""
    data, model = load_data_and_model(args, recipe, world, stop)
    with world.watch("model", computes=True):
        ddp = wrap(model, args, world, data)
    gather = None
    if args.zero:
        from recipes.ddp.zero import consolidate, shard_optimizer  # the import takes 0.7 s: only with --zero

        optimizer = shard_optimizer(args, model)
        gather = partial(consolidate, optimizer, world)
    else:
        optimizer = build_optimizer(args, model, world)
    job = Job(args, recipe, data, world, model, optimizer, build_scaler(args, world.device), stop)

    def forward_backward(inputs: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        """Accumulate the gradients of one pass; return this rank's part of the loss."""
        # DDP: gradients are exchanged only in the last of the accumulated passes, while backward runs.
        with world.watch("gradients", computes=True) if is_last else ddp.no_sync():
            with autocast(args, world.device):
                loss = job.loss(ddp(inputs), targets)
            # DDP: gradients are averaged over the ranks; this factor makes the result the global batch's mean.
            job.scaler.scale(loss * world.world_size).backward()
        if is_last:
            check_complete(ddp)
        return loss.detach()

    # DDP: evaluation calls ddp(), too, which exchanges nothing without gradients.
    return job, Technique(forward_backward, ddp, gather_state=gather)


def train(args: DDPOptions, recipe: str, world: World, stop: Stop) -> None:
    """Train with the given options; call it on all ranks."""
    job, technique = prepare(args, recipe, world, stop)
    # DDP: rank 0 reads the checkpoint and broadcasts it. All ranks hold the same weights: rank 0 writes them.
    begin_run(job)
    train_epochs(job, technique)
    job.finish()


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the options in argv; call it on every rank."""
    # DDP: a launcher (torchrun, srun, mpirun) gives each process its rank.
    train_as_rank("ddp", options(argv), lambda args, world, stop: train(args, "ddp", world, stop))


if __name__ == "__main__":
    raise SystemExit(run_main(main))
