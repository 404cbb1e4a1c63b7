"""Data parallelism from sends and receives alone: parameters are copied, batches split, gradients summed.

    make run RECIPE=scratch NODES=2
    .venv/bin/torchrun --nproc-per-node=2 -m recipes.scratch.train --allreduce ring --log-bytes

Success: the last line is `result recipe=scratch world_size=2 test_accuracy=0.98.. samples_per_s=...`.
Source: the ring is that of Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002; get_params,
split_batch and train_batch are named as in https://d2l.ai/chapter_computational-performance/multiple-gpus.html.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.common.job import Job
from recipes.common.loop import Technique, begin_run, load_data_and_model, train_epochs
from recipes.common.optim import autocast, build_optimizer, build_scaler
from recipes.common.options import Options, one_of, option, parse, switch
from recipes.common.process.entry import exit_status
from recipes.common.process.ranks import read_ranks
from recipes.common.process.signals import Stop
from recipes.common.world.agreement import shard
from recipes.common.world.world import World, connected_world

Message = tuple[Tensor, int]
"""A tensor and the rank that it goes to or comes from."""


@dataclass(frozen=True)
class ScratchOptions(Options):
    """Data parallelism from sends and receives."""

    allreduce: str = option(
        "ring", one_of("naive", "ring"), "how gradients are added up: naive (all to rank 0 and back) or ring"
    )
    log_bytes: bool = switch("print at the end what each rank has sent in a step")


def options(argv: Sequence[str] | None = None) -> ScratchOptions:
    """Return the options of this recipe; raises UserError for what cannot work."""
    return parse(ScratchOptions, "scratch", __doc__, argv)


@dataclass
class Traffic:
    """What this rank has sent and received in the last all_reduce."""

    sent_bytes: int = 0
    received_bytes: int = 0


def exchange(sends: list[Message], receives: list[Message], traffic: Traffic) -> None:
    """Send some tensors and receive others, each with its peer; count their bytes.

    All of it is under way at once, so that no rank waits for a rank that waits for it.
    """
    # Scratch: exactly these bytes cross the wire, here and nowhere else.
    traffic.sent_bytes += sum(tensor.nbytes for tensor, _ in sends)
    traffic.received_bytes += sum(tensor.nbytes for tensor, _ in receives)
    operations = [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends if tensor.numel()]
    operations += [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in receives if tensor.numel()]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def get_params(parameters: Iterable[Tensor], world: World) -> None:
    """Overwrite the parameters with those of rank 0; call it on all ranks."""
    for parameter in parameters:
        # Scratch: rank 0 sends the parameter to each of the others: (N-1) times its bytes.
        values = parameter.detach().contiguous()
        if world.rank == 0:
            exchange([(values, peer) for peer in range(1, world.world_size)], [], Traffic())
        else:
            exchange([], [(values, 0)], Traffic())
            parameter.detach().copy_(values)


def all_reduce(buffer: Tensor, args: ScratchOptions, world: World, traffic: Traffic) -> None:
    """Replace a flat buffer by its sum over the ranks, to the last bit the same on all; call it on all ranks."""
    traffic.sent_bytes = traffic.received_bytes = 0
    reduce = {"naive": naive_all_reduce, "ring": ring_all_reduce}[args.allreduce]
    reduce(buffer, world.rank, world.world_size, traffic)


def naive_all_reduce(buffer: Tensor, rank: int, size: int, traffic: Traffic) -> None:
    """Add everything up on rank 0, one rank after another, and send the sum back."""
    peers = range(1, size)
    if rank > 0:
        # Scratch: the buffer's B bytes go to rank 0, and B bytes come back.
        exchange([(buffer, 0)], [], traffic)
        exchange([], [(buffer, 0)], traffic)
        return
    for peer in peers:
        # Scratch: rank 0 receives (N-1) B bytes and sends (N-1) B: its link is what everybody waits for.
        arrived = torch.empty_like(buffer)
        exchange([], [(arrived, peer)], traffic)
        buffer += arrived
    exchange([(buffer, peer) for peer in peers], [], traffic)


def ring_all_reduce(buffer: Tensor, rank: int, size: int, traffic: Traffic) -> None:
    """Let chunks of the buffer travel around the ring of ranks: once to be added up, once to be handed out.

    The buffer is cut into N chunks. In step s, rank r sends chunk r - s to rank r + 1, and chunk r - s - 1 arrives
    from rank r - 1. During the first N - 1 steps (reduce-scatter) it is added to the chunk here, and travels on as
    that sum in the next step: then rank r holds the whole sum of chunk r + 1. During the other N - 1 (all-gather)
    it replaces the chunk here.
    """
    chunks = buffer.tensor_split(size)
    for step in range(2 * (size - 1)):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        is_sum = step < size - 1
        arrived = torch.empty_like(incoming) if is_sum else incoming
        # Scratch: a chunk goes right, a chunk comes from the left. Each rank sends 2 (N-1) chunks of B/N bytes:
        # B for two ranks and not quite 2 B for a thousand, and all links are busy all the time.
        exchange([(outgoing, (rank + 1) % size)], [(arrived, (rank - 1) % size)], traffic)
        if is_sum:
            incoming += arrived


def wrap(model: nn.Module, args: ScratchOptions, world: World) -> nn.Module:
    """Return the model with the parameters of rank 0."""
    # Scratch: left to torch: with --sync-batchnorm, layers exchange 2C + 1 floats per layer and pass.
    if args.sync_batchnorm:
        from recipes.common.models.batchnorm import sync_batch_norm

        model = sync_batch_norm(model, args, world)
    # Scratch: the model's size to each rank, once; all have drawn the same from --seed, so this only makes sure.
    get_params(model.parameters(), world)
    if args.compile:
        model.compile(mode=args.compile_mode)
    return model


def split_batch(indices: Tensor, world: World) -> Tensor:
    """Return this rank's share of the indices: contiguous, and as even as it goes."""
    # Scratch: the ranks' shares are disjoint and make up the whole, without padding or repetition.
    return shard(indices, world.rank, world.world_size)


def train_batch(
    job: Job,
    args: ScratchOptions,
    world: World,
    traffic: Traffic,
    inputs: Tensor,
    targets: Tensor,
    is_last: bool,
) -> Tensor:
    """Add the gradients of a pass, after the last those of all ranks; return this rank's part of the loss."""
    with autocast(args, world.device):
        # Scratch: gradients are added up, not averaged: no factor makes this the global batch's mean.
        loss = job.loss(job.model(inputs), targets)
    job.scaler.scale(loss).backward()
    if is_last:
        # Scratch: all gradients travel as one flat buffer, a second copy of the model's size, once backward is
        # done. DDP sends buckets of them while backward still runs, and lets the gradients be the buckets.
        gradients = [p.grad for p in job.model.parameters() if p.grad is not None]
        buffer = torch.cat([gradient.flatten() for gradient in gradients])
        with world.watch("gradients"):
            all_reduce(buffer, args, world, traffic)
        for gradient, part in zip(gradients, buffer.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
    return loss.detach()


def log_bytes(job: Job, args: ScratchOptions, world: World, traffic: Traffic) -> None:
    """Let rank 0 print what each rank has sent and received in the last step; call it on all ranks."""
    # Scratch: gathers two numbers per rank.
    with world.watch("traffic"):
        rows = world.gather_objects((traffic.sent_bytes, traffic.received_bytes))
    size = sum(parameter.nbytes for parameter in job.model.parameters())
    job.say(f"{args.allreduce} all-reduce of {size} bytes of gradients")
    for rank, (sent, received) in enumerate(rows):
        job.say(f"  rank {rank}  sent {sent}  received {received}")


def train(args: ScratchOptions, world: World, stop: Stop) -> None:
    """Train as the options say; call it on all ranks."""
    data, model = load_data_and_model(args, "scratch", world, stop)
    with world.watch("model", computes=True):
        model = wrap(model, args, world)
    optimizer, traffic = build_optimizer(args, model.parameters()), Traffic()
    job = Job(args, "scratch", data, world, model, optimizer, build_scaler(args, world.device), stop)
    step = partial(train_batch, job, args, world, traffic)
    # Scratch: rank 0 reads the checkpoint and broadcasts it. All ranks hold the same weights: rank 0 writes them.
    begin_run(job)
    train_epochs(job, Technique(step, model, shard=partial(split_batch, world=world)))
    if args.log_bytes and job.is_complete:
        log_bytes(job, args, world, traffic)
    job.finish()


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the options say; call it on every rank."""
    args = options(argv)
    stop = Stop()
    # Scratch: a launcher (torchrun, srun, mpirun) tells each process who it is. Gloo (CPUs) and NCCL (GPUs) can
    # both send and receive, and that is all that is asked of them here.
    with connected_world(args, read_ranks("scratch")) as world:
        train(args, world, stop)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
