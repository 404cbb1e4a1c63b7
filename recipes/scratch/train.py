"""Data parallelism by hand: parameters copied, batches split and gradients added up by sends and receives alone.

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

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recipes.common.agreement import begin_run, load_same_data, raise_on_all_ranks, run_on_all_ranks, shard
from recipes.common.data import EVAL_BATCH_SIZE
from recipes.common.entry import exit_status
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.metrics import add_batch, averages, new_totals
from recipes.common.models import build_model
from recipes.common.optim import (
    autocast,
    build_optimizer,
    build_scaler,
    learning_rate,
    optimizer_step,
    set_learning_rate,
)
from recipes.common.options import (
    Options,
    add_switch,
    build_parser,
    check_batch,
    one_of,
    parse,
    positive_int,
)
from recipes.common.ranks import read_ranks
from recipes.common.seeding import choose_kernels, seed_step
from recipes.common.signals import FAIL, GO, STOP, Stop
from recipes.common.world import World, join_world, leave_world

Message = tuple[Tensor, int]
"""A tensor and the rank that it goes to or comes from."""


def options(argv: Sequence[str] | None = None) -> Options:
    """Return the options of this recipe; raises UserError for what cannot work."""
    parser = build_parser("scratch", __doc__)
    group = parser.add_argument_group("data parallelism by hand")
    group.add_argument(
        "--allreduce",
        type=one_of("naive", "ring"),
        default="ring",
        help="how gradients are added up: naive (all to rank 0 and back) or ring",
    )
    group.add_argument(
        "--piece-kib",
        type=positive_int,
        default=1024,
        metavar="KIB",
        help="size of one message: while it travels, the one before it is added",
    )
    add_switch(group, "--log-bytes", "print at the end what each rank has sent in a step")
    return parse(parser, argv)


@dataclass
class Traffic:
    """What this rank has sent and received in the last all_reduce."""

    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class CountedWorld(World):
    """This process among the others, and the bytes that it exchanges with them."""

    traffic: Traffic = field(default_factory=Traffic)


def join_counted_world(args: Options) -> CountedWorld:
    """Connect this process with the other processes."""
    # Scratch: a launcher (torchrun, srun, mpirun) tells each process who it is. Gloo (CPUs) and NCCL (GPUs) can
    # both send and receive, and that is all that is asked of them here.
    return CountedWorld(**vars(join_world(args, read_ranks("scratch"))))


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


def all_reduce(buffer: Tensor, args: Options, world: CountedWorld) -> None:
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
    from rank r - 1. During the first N - 1 steps (reduce-scatter) it is added to the chunk here, and goes on as
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


def wrap(model: nn.Module, args: Options, world: CountedWorld) -> nn.Module:
    """Return the model with the parameters of rank 0."""
    if args.sync_batchnorm:
        if world.device.type == "cpu" and world.world_size > 1:
            raise UserError("--sync-batchnorm: torch has it for GPUs only; drop it on the CPU")
        # Scratch: the one thing left to torch: batch-norm layers exchange 2C + 1 floats per layer and pass.
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # Scratch: the model's size to each rank, once; all have drawn the same from --seed, so this only makes sure.
    get_params(model.parameters(), world)
    if args.compile:
        model.compile(mode=args.compile_mode)
    return model


def split_batch(indices: Tensor, world: CountedWorld) -> Tensor:
    """Return this rank's share of the indices: contiguous, and as even as it goes."""
    # Scratch: the ranks' shares are disjoint and make up the whole, without padding or repetition.
    return shard(indices, world.rank, world.world_size)


def train_batch(job: Job, images: Tensor, labels: Tensor, world: CountedWorld) -> Tensor:
    """Leave the gradient of the global batch's loss in the parameters; return this rank's part of that loss."""
    args, accumulate = job.args, job.args.accumulate_steps
    loss_sum = torch.zeros((), device=world.device)
    parts = zip(images.tensor_split(accumulate), labels.tensor_split(accumulate), strict=True)
    for some_images, some_labels in parts:
        with autocast(args, world.device):
            loss = cross_entropy(job.model(some_images), some_labels, reduction="sum")
        # Scratch: gradients are added up, not averaged, so that this makes it the global batch's mean.
        loss = loss / args.global_batch_size
        job.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    # Scratch: all gradients travel as one flat buffer, a second copy of the model's size, once backward is done.
    # DDP sends buckets of them while backward still runs, and lets the gradients be the buckets.
    gradients = [p.grad for p in job.model.parameters() if p.grad is not None]
    buffer = torch.cat([gradient.flatten() for gradient in gradients])
    with world.watch("gradients"):
        all_reduce(buffer, args, world)
    for gradient, part in zip(gradients, buffer.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
    return loss_sum


def train_one_epoch(job: Job, world: CountedWorld) -> int:
    """Train to the epoch's end, or until a vote ends it; return that vote: GO, STOP or FAIL."""
    args, position = job.args, job.position
    decision = GO
    job.model.train()
    job.begin_epoch()
    shares = (split_batch(batch, world) for batch in job.global_batches())
    for images, labels in job.data.train.batches(shares, position.epoch):
        # Scratch: each rank sends its vote, 4 bytes; it is read after backward, so nobody waits for it.
        if is_vote_due := job.is_vote_due(world.world_size):
            vote = torch.tensor(job.stop.vote, dtype=torch.int32)
            voting = dist.all_reduce(vote, dist.ReduceOp.MAX, group=world.control, async_op=True)

        seed_step(args.seed, position.step, world.rank, world.device)
        loss_sum = train_batch(job, images, labels, world)

        if is_vote_due:
            with world.watch("stop vote"):
                voting.wait()
            decision = int(vote)
        if decision == FAIL:
            break
        rate = learning_rate(args, position.step, job.total_steps)
        set_learning_rate(job.optimizer, rate)
        optimizer_step(args, job.model.parameters(), job.optimizer, job.scaler, job.allows(loss_sum))
        job.count_step()
        if job.is_log_due():
            # Scratch: the ranks' parts add up to the global batch's loss: 4 bytes, once in --log-every steps.
            with world.watch("metrics"):
                dist.all_reduce(loss_sum)
                loss_mean = loss_sum.item()
            job.log_step(loss_mean, rate)
        if decision == STOP:
            break
        if job.is_checkpoint_due():
            save_checkpoint(job, world)
    job.pause()
    return decision


@torch.no_grad()
def evaluate(job: Job, world: CountedWorld) -> dict[str, float]:
    """Return test_loss and test_accuracy over the whole test set, each sample counted once."""
    # Scratch: without --sync-batchnorm each rank has statistics of its own batches; all evaluate with rank 0's.
    with world.watch("evaluation"):
        get_params(job.model.buffers(), world)
    job.model.eval()
    totals = new_totals(world.device)
    share = split_batch(torch.arange(len(job.data.test)), world)
    for images, labels in job.data.test.batches(share.split(EVAL_BATCH_SIZE), job.position.epoch):
        with autocast(job.args, world.device):
            logits = job.model(images)
        add_batch(totals, logits, labels)
    totals[3] += job.data.train.skipped + job.data.test.skipped
    # Scratch: adds up sums and counts, 40 bytes a rank; the averages are taken after it.
    with world.watch("evaluation"):
        dist.all_reduce(totals)
        return averages(totals, len(job.data.test))


def save_checkpoint(job: Job, world: CountedWorld, is_best: bool = False) -> None:
    """Write a checkpoint on rank 0; a failure is voted on in a later step. Call it on all ranks."""
    # Scratch: all ranks hold the same weights; rank 0 (of the world, not of each node) writes them.
    if job.record:
        job.save(is_best)


def log_bytes(job: Job, world: CountedWorld) -> None:
    """Let rank 0 print what each rank has sent and received in the last step; call it on all ranks."""
    # Scratch: gathers two numbers per rank.
    with world.watch("traffic"):
        traffic = [Traffic(**row) for row in world.gather_objects(vars(world.traffic))]
    if not job.record:
        return
    size = sum(parameter.nbytes for parameter in job.model.parameters())
    job.record.progress.say(f"{job.args.allreduce} all-reduce of {size} bytes of gradients")
    for rank, seen in enumerate(traffic):
        job.record.progress.say(f"  rank {rank}  sent {seen.sent_bytes}  received {seen.received_bytes}")


def train(args: Options, stop: Stop, world: CountedWorld) -> None:
    """Set everything up, train epoch by epoch, and leave a checkpoint behind."""
    data = load_same_data(args, "scratch", world, on_bad_image=stop.fail)
    run_on_all_ranks(lambda: check_batch(args, world.world_size, len(data.train)), world)
    # Scratch: every rank draws the same weights from --seed.
    model = run_on_all_ranks(lambda: build_model(args, data), world).to(world.device)
    with world.watch("model", computes=True):
        model = wrap(model, args, world)
    optimizer = build_optimizer(args, model.parameters())
    job = Job(args, data, world.device, model, optimizer, build_scaler(args, world.device), stop)

    # Scratch: rank 0 opens the record and reads the checkpoint; its content, the whole state, goes to all ranks.
    begin_run(job, "scratch", world)

    while not job.is_complete:
        decision = train_one_epoch(job, world)
        if decision == STOP:
            save_checkpoint(job, world)
        raise_on_all_ranks(stop.error, world)
        if decision == STOP:
            job.leave()
            return
        averages = evaluate(job, world)
        is_best = job.end_epoch(averages)
        save_checkpoint(job, world, is_best)
        raise_on_all_ranks(stop.error, world)
    if args.log_bytes:
        log_bytes(job, world)
    job.finish(world.world_size)


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the options say; call it on every rank."""
    args = options(argv)
    stop = Stop()
    choose_kernels(args)
    world = join_counted_world(args)
    try:
        train(args, stop, world)
    except UserError:
        leave_world(world)
        raise
    leave_world(world)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
