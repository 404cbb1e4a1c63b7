"""Data parallelism from only sends and receives: parameters are copied, batches split, gradients summed.

    make run RECIPE=scratch NODES=2
    .venv/bin/torchrun --nproc-per-node=2 -m recipes.scratch.train --allreduce ring --log-bytes

Success: the last line is `result recipe=scratch world_size=2 test_accuracy=0.98.. samples_per_s=...`.
Source: the ring is from Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002; get_params,
split_batch and train_batch are named as in https://d2l.ai/chapter_computational-performance/multiple-gpus.html.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.common.arguments import one_of, option, switch
from recipes.common.job import Job
from recipes.common.loop import Technique, begin_run, load_data_and_model, train_epochs
from recipes.common.models.models import compile_forward
from recipes.common.optim import autocast, build_optimizer, build_scaler
from recipes.common.options import Options, parse
from recipes.common.parallel.buckets import find_unused
from recipes.common.process.entry import run_main
from recipes.common.process.signals import Stop
from recipes.common.world.agreement import shard
from recipes.common.world.world import World, train_as_rank

Message = tuple[Tensor, int]
"""A tensor and the rank that it goes to or comes from."""


@dataclass(frozen=True)
class ScratchOptions(Options):
    """Data parallelism from sends and receives."""

    allreduce: str = option(
        "ring", one_of("naive", "ring"), "how gradients are added up: naive (all to rank 0 and back) or ring"
    )
    log_bytes: bool = switch("print at the end what each rank has sent in a step")

    @property
    def takes_sparse_gradients(self) -> bool:
        """No: they travel as one flat buffer."""
        return False


options = partial(parse, ScratchOptions, "scratch", __doc__)


@dataclass
class Traffic:
    """Bytes that this rank sent and received in the last all_reduce()."""

    sent_bytes: int = 0
    received_bytes: int = 0


def exchange(sends: list[Message], receives: list[Message], traffic: Traffic) -> None:
    """Send tensors to their peers and receive others; count the bytes.

    All transfers are in flight at once, so that no two ranks wait for each other.
    """
    # Scratch: exactly these bytes of parameters and gradients cross the wire, here and nowhere else.
    traffic.sent_bytes += sum(tensor.nbytes for tensor, _ in sends)
    traffic.received_bytes += sum(tensor.nbytes for tensor, _ in receives)
    # Receives first: with Gloo, a peer sends only after a message about our receive, which would otherwise wait
    # behind our own bytes. On two nodes at 1 Gbit/s, a step takes 556 ms this way, and 930 ms the other way round.
    operations = [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in receives if tensor.numel()]
    operations += [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends if tensor.numel()]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def get_params(parameters: Iterable[Tensor], world: World) -> None:
    """Overwrite the parameters with rank 0's; call it on all ranks."""
    for parameter in parameters:
        # Scratch: rank 0 sends the parameter to each other rank: (N-1) times its bytes.
        values = parameter.detach().contiguous()
        if world.rank == 0:
            exchange([(values, peer) for peer in range(1, world.world_size)], [], Traffic())
        else:
            exchange([], [(values, 0)], Traffic())
            parameter.detach().copy_(values)


def all_reduce(buffer: Tensor, args: ScratchOptions, world: World, traffic: Traffic) -> None:
    """Overwrite a flat buffer with its sum over the ranks, bitwise the same on all; call it on all ranks."""
    traffic.sent_bytes = traffic.received_bytes = 0
    reduce = {"naive": naive_all_reduce, "ring": ring_all_reduce}[args.allreduce]
    reduce(buffer, world.rank, world.world_size, traffic)


def naive_all_reduce(buffer: Tensor, rank: int, size: int, traffic: Traffic) -> None:
    """Sum the buffers on rank 0, one rank after another, and send the sum back."""
    peers = range(1, size)
    if rank > 0:
        # Scratch: the buffer's B bytes go to rank 0, and B bytes come back.
        exchange([(buffer, 0)], [], traffic)
        exchange([], [(buffer, 0)], traffic)
        return
    for peer in peers:
        # Scratch: rank 0 receives (N-1) B bytes and sends (N-1) B bytes: all other ranks wait for its link.
        arrived = torch.empty_like(buffer)
        exchange([], [(arrived, peer)], traffic)
        buffer += arrived
    exchange([(buffer, peer) for peer in peers], [], traffic)


def ring_all_reduce(buffer: Tensor, rank: int, size: int, traffic: Traffic) -> None:
    """Pass chunks of the buffer around the ring of ranks: once to sum them, once to distribute the sums.

    The buffer is cut into N chunks. In step s, rank r sends chunk r - s to rank r + 1 and receives chunk r - s - 1
    from rank r - 1. In the first N - 1 steps (reduce-scatter) it adds the received chunk to its own and sends that
    sum in the next step; then rank r holds the whole sum of chunk r + 1. In the other N - 1 steps (all-gather) the
    received chunk replaces its own.
    """
    chunks = buffer.tensor_split(size)
    for step in range(2 * (size - 1)):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        is_sum = step < size - 1
        arrived = torch.empty_like(incoming) if is_sum else incoming
        # Scratch: sends a chunk to the right, receives one from the left. Each rank sends 2 (N-1) chunks of B/N
        # bytes: B for two ranks and almost 2 B for a thousand. All links are busy all the time.
        exchange([(outgoing, (rank + 1) % size)], [(arrived, (rank - 1) % size)], traffic)
        if is_sum:
            incoming += arrived


def wrap(model: nn.Module, args: ScratchOptions, world: World) -> nn.Module:
    """Return the model with rank 0's parameters; call it on all ranks."""
    # Scratch: torch does this: with --sync-batchnorm, a layer gathers 2C + 1 floats of each rank in forward, and
    # sums 2C in backward.
    if args.sync_batchnorm:
        from recipes.common.models.batchnorm import sync_batch_norm

        model = sync_batch_norm(model, world)
    # Scratch: sends the model's bytes to each rank, once. All have drawn the same weights from --seed; this only
    # makes sure.
    get_params(model.parameters(), world)
    compile_forward(model, args)
    return model


def split_batch(indices: Tensor, world: World) -> Tensor:
    """Return this rank's share of the indices: contiguous, and as even as possible."""
    # Scratch: the ranks' shares are disjoint and make up the whole, without padding or repetition.
    return shard(indices, world.rank, world.world_size)


def train_batch(
    job: Job, args: ScratchOptions, world: World, traffic: Traffic, inputs: Tensor, targets: Tensor, is_last: bool
) -> Tensor:
    """Accumulate the gradients of one pass, and in the last sum them over ranks; return this rank's loss part."""
    with autocast(args, world.device):
        # Scratch: gradients are summed, not averaged, so the global batch's mean needs no factor.
        loss = job.loss(job.model(inputs), targets)
    job.scaler.scale(loss).backward()
    if is_last:
        # Scratch: once backward is done, all gradients travel as one flat buffer, a second copy of the model's
        # size. DDP sends buckets of them while backward still runs, and its gradients are views of the buckets.
        # A parameter that this rank did not use may have a gradient on another one: it adds zeros.
        unused = set(find_unused(job.model, args, world))
        for parameter in job.model.parameters():
            if parameter.requires_grad and parameter.grad is None and parameter not in unused:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in job.model.parameters() if p.grad is not None]
        buffer = torch.cat([gradient.flatten() for gradient in gradients])
        with world.watch("gradients"):
            all_reduce(buffer, args, world, traffic)
        for gradient, part in zip(gradients, buffer.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
    return loss.detach()


def log_bytes(job: Job, args: ScratchOptions, world: World, traffic: Traffic) -> None:
    """Print on rank 0 the bytes that each rank sent and received in the last step; call it on all ranks."""
    # Scratch: gathers two numbers per rank.
    with world.watch("traffic"):
        rows = world.gather_objects((traffic.sent_bytes, traffic.received_bytes))
    size = sum(parameter.nbytes for parameter in job.model.parameters())
    job.say(f"{args.allreduce} all-reduce of {size} bytes of gradients")
    for rank, (sent, received) in enumerate(rows):
        job.say(f"  rank {rank}  sent {sent}  received {received}")


def train(args: ScratchOptions, world: World, stop: Stop) -> None:
    """Train with the given options; call it on all ranks."""
    data, model = load_data_and_model(args, "scratch", world, stop)
    with world.watch("model", computes=True):
        model = wrap(model, args, world)
    optimizer, traffic = build_optimizer(args, model, world), Traffic()
    job = Job(args, "scratch", data, world, model, optimizer, build_scaler(args, world.device), stop)
    step = partial(train_batch, job, args, world, traffic)
    # Scratch: rank 0 reads the checkpoint and broadcasts it. All ranks hold the same weights: rank 0 writes them.
    begin_run(job)
    train_epochs(job, Technique(step, model, shard=partial(split_batch, world=world)))
    if args.log_bytes and job.is_complete:
        log_bytes(job, args, world, traffic)
    job.finish()


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the options in argv; call it on every rank."""
    # Scratch: a launcher (torchrun, srun, mpirun) gives each process its rank. Gloo (CPUs) and NCCL (GPUs) can
    # both send and receive, which is all that this recipe needs.
    train_as_rank("scratch", options(argv), train)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
