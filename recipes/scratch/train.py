"""Data parallelism from sends and receives alone: parameters are copied, batches split, gradients summed.

    make run RECIPE=scratch NODES=2
    .venv/bin/torchrun --nproc-per-node=2 -m recipes.scratch.train --allreduce ring --log-bytes

Success: the last line is `result recipe=scratch world_size=2 test_accuracy=0.98.. samples_per_s=...`.
Source: the ring is that of Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002; get_params,
split_batch and train_batch are named as in https://d2l.ai/chapter_computational-performance/multiple-gpus.html.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.common.job import Job
from recipes.common.loop import Technique, begin_run, load_data_and_model, train_epochs
from recipes.common.models.batchnorm import sync_batch_norm
from recipes.common.optim import autocast, build_optimizer, build_scaler
from recipes.common.options import Options, one_of, option, parse, positive_int, switch
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
    piece_kib: int = option(
        1024, positive_int, "size of one message: while it travels, the one before it is added", "KIB"
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


@dataclass(frozen=True)
class CountedWorld(World):
    """This process among the others, and the bytes that it exchanges with them."""

    traffic: Traffic = field(default_factory=Traffic)


def exchange(sends: list[Message], receives: list[Message], traffic: Traffic) -> list[dist.Work]:
    """Begin to send some tensors and to receive others, each with its peer; count their bytes.

    All of it is under way at once, in whatever order the peers get to it, so that no rank waits for a rank that
    waits for it.
    """
    # Scratch: exactly these bytes cross the wire, here and nowhere else.
    traffic.sent_bytes += sum(tensor.nbytes for tensor, _ in sends)
    traffic.received_bytes += sum(tensor.nbytes for tensor, _ in receives)
    operations = [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends if tensor.numel()]
    operations += [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in receives if tensor.numel()]
    return dist.batch_isend_irecv(operations) if operations else []


def finish(works: list[dist.Work]) -> None:
    """Wait until an exchange is done."""
    for work in works:
        work.wait()


def get_params(tensors: Iterable[Tensor], world: CountedWorld) -> None:
    """Overwrite these tensors (parameters, or batch norm's buffers) with those of rank 0; call it on all ranks."""
    uncounted = Traffic()
    for tensor in tensors:
        # Scratch: rank 0 sends the tensor to each of the others: (N-1) times its bytes.
        values = tensor.detach().contiguous()
        if world.rank == 0:
            finish(exchange([(values, peer) for peer in range(1, world.world_size)], [], uncounted))
        else:
            finish(exchange([], [(values, 0)], uncounted))
            tensor.detach().copy_(values)


def all_reduce(buffer: Tensor, args: ScratchOptions, world: CountedWorld) -> None:
    """Replace a flat buffer by its sum over the ranks, to the last bit the same on all; call it on all ranks."""
    world.traffic.sent_bytes = world.traffic.received_bytes = 0
    if world.world_size == 1:
        return
    reduce = {"naive": naive_all_reduce, "ring": ring_all_reduce}[args.allreduce]
    reduce(buffer, args.piece_kib * 1024 // buffer.element_size(), world)


def naive_all_reduce(buffer: Tensor, piece_numel: int, world: CountedWorld) -> None:
    """Add everything up on rank 0, one rank after another, and send the sum back."""
    pieces = buffer.split(piece_numel)
    peers = range(1, world.world_size)
    if world.rank > 0:
        for piece in pieces:
            # Scratch: the buffer's B bytes go to rank 0, piece by piece, and B bytes come back.
            finish(exchange([(piece, 0)], [], world.traffic))
        for piece in pieces:
            finish(exchange([], [(piece, 0)], world.traffic))
        return
    # Scratch: rank 0 receives (N-1) B bytes and sends (N-1) B: its link is what everybody waits for. Memory for
    # two pieces, whatever the size of the buffer: one arrives while the other is added.
    spares = itertools.cycle(buffer.new_empty(2, min(piece_numel, len(buffer))))
    arrived: tuple[Tensor, Tensor] | None = None
    for peer, piece in itertools.product(peers, pieces):
        arriving = next(spares)[: len(piece)]
        works = exchange([], [(arriving, peer)], world.traffic)
        add(arrived)
        finish(works)
        arrived = piece, arriving
    add(arrived)
    for piece in pieces:
        finish(exchange([(piece, peer) for peer in peers], [], world.traffic))


def ring_all_reduce(buffer: Tensor, piece_numel: int, world: CountedWorld) -> None:
    """Let chunks of the buffer travel around the ring of ranks: once to be added up, once to be handed out.

    The buffer is cut into N chunks. In step s, rank r sends chunk r - s to rank r + 1, and chunk r - s - 1 arrives
    from rank r - 1. During the first N - 1 steps (reduce-scatter) it is added to the chunk here, and travels on as
    that sum in the next step: then rank r holds the whole sum of chunk r + 1. During the other N - 1 (all-gather)
    it replaces the chunk here.
    """
    rank, size = world.rank, world.world_size
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = buffer.tensor_split(size)
    # Each chunk travels as at least two pieces: one is added while the next one is on its way.
    num_pieces = max(2, -(-len(chunks[0]) // piece_numel))
    pieces = [chunk.tensor_split(num_pieces) for chunk in chunks]
    spares = itertools.cycle(buffer.new_empty(2, len(pieces[0][0])))
    arrived: tuple[Tensor, Tensor] | None = None
    for step in range(2 * (size - 1)):
        outgoing, incoming = pieces[(rank - step) % size], pieces[(rank - step - 1) % size]
        for i in range(num_pieces):
            is_sum = step >= size - 1
            arriving = incoming[i] if is_sum else next(spares)[: len(incoming[i])]
            # Scratch: a piece goes right, a piece comes from the left. Each rank sends 2 (N-1) chunks of B/N
            # bytes: B for two ranks and not quite 2 B for a thousand, and all links are busy all the time.
            works = exchange([(outgoing[i], right)], [(arriving, left)], world.traffic)
            add(arrived)
            finish(works)
            arrived = None if is_sum else (incoming[i], arriving)


def add(arrived: tuple[Tensor, Tensor] | None) -> None:
    """Add what has arrived to what is here; a sum of the same two numbers, whoever forms it."""
    if arrived:
        arrived[0].add_(arrived[1])


def wrap(model: nn.Module, args: ScratchOptions, world: CountedWorld) -> nn.Module:
    """Return the model with the parameters of rank 0."""
    # Scratch: left to torch: with --sync-batchnorm, layers exchange 2C + 1 floats per layer and pass.
    model = sync_batch_norm(model, args, world)
    # Scratch: the model's size to each rank, once; all have drawn the same from --seed, so this only makes sure.
    get_params(model.parameters(), world)
    if args.compile:
        model.compile(mode=args.compile_mode)
    return model


def split_batch(indices: Tensor, world: CountedWorld) -> Tensor:
    """Return this rank's share of the indices: contiguous, and as even as it goes."""
    # Scratch: the ranks' shares are disjoint and make up the whole, without padding or repetition.
    return shard(indices, world.rank, world.world_size)


def train_batch(
    job: Job, args: ScratchOptions, world: CountedWorld, inputs: Tensor, targets: Tensor, is_last: bool
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
            all_reduce(buffer, args, world)
        for gradient, part in zip(gradients, buffer.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
    return loss.detach()


def sync_buffers(job: Job, world: CountedWorld) -> None:
    """Give all ranks rank 0's batch-norm statistics: without --sync-batchnorm each has its own batches'."""
    with world.watch("evaluation"):
        get_params(job.model.buffers(), world)


def log_bytes(job: Job, args: ScratchOptions, world: CountedWorld) -> None:
    """Let rank 0 print what each rank has sent and received in the last step; call it on all ranks."""
    # Scratch: gathers two numbers per rank.
    with world.watch("traffic"):
        traffic = [Traffic(**row) for row in world.gather_objects(vars(world.traffic))]
    size = sum(parameter.nbytes for parameter in job.model.parameters())
    job.say(f"{args.allreduce} all-reduce of {size} bytes of gradients")
    for rank, seen in enumerate(traffic):
        job.say(f"  rank {rank}  sent {seen.sent_bytes}  received {seen.received_bytes}")


def train(args: ScratchOptions, world: CountedWorld, stop: Stop) -> None:
    """Train as the options say; call it on all ranks."""
    data, model = load_data_and_model(args, "scratch", world, stop)
    with world.watch("model", computes=True):
        model = wrap(model, args, world)
    optimizer = build_optimizer(args, model.parameters())
    job = Job(args, "scratch", data, world, model, optimizer, build_scaler(args, world.device), stop)
    technique = Technique(
        forward_backward=partial(train_batch, job, args, world),
        module=model,
        shard=partial(split_batch, world=world),
        sync_buffers=partial(sync_buffers, job, world),
    )
    # Scratch: rank 0 reads the checkpoint and broadcasts it. All ranks hold the same weights: rank 0 writes them.
    begin_run(job)
    train_epochs(job, technique)
    if args.log_bytes and job.is_complete:
        log_bytes(job, args, world)
    job.finish()


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the options say; call it on every rank."""
    args = options(argv)
    stop = Stop()
    # Scratch: a launcher (torchrun, srun, mpirun) tells each process who it is. Gloo (CPUs) and NCCL (GPUs) can
    # both send and receive, and that is all that is asked of them here.
    with connected_world(args, read_ranks("scratch")) as world:
        train(args, CountedWorld(**vars(world)), stop)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
