"""Pipeline times DDP: the layers of a model spread over the processes of a replica, and replicas side by side.

    make run RECIPE=pipeline NODES=2 NPROC_PER_NODE=2
    .venv/bin/torchrun --nproc-per-node=2 -m recipes.pipeline.train --model resnet18 --data cifar10 --balance cost

Success: the last line is `result recipe=pipeline world_size=4 test_accuracy=0.98.. samples_per_s=...`.
Source: Huang et al. 2019, GPipe, https://arxiv.org/abs/1811.06965; Narayanan et al. 2021 (1F1B and the interleaved
schedule), https://arxiv.org/abs/2104.04473.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

from recipes.common.agreement import begin_run, load_same_data, raise_on_all_ranks, run_on_all_ranks, shard
from recipes.common.buckets import NO_BUFFER_SYNC
from recipes.common.data import EVAL_BATCH_SIZE, SKIPPED, Batch, Data, Split
from recipes.common.entry import exit_status
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.metrics import add_batch, averages, new_totals
from recipes.common.models import build_model
from recipes.common.optim import autocast, build_optimizer, build_scaler, learning_rate, set_learning_rate
from recipes.common.options import Options, build_parser, one_of, parse, positive_int
from recipes.common.partition import (
    Part,
    PartModule,
    Share,
    check_microbatches,
    merge_shares,
    plan_parts,
)
from recipes.common.ranks import read_ranks
from recipes.common.seeding import choose_kernels, seed_step
from recipes.common.signals import FAIL, GO, STOP, Stop
from recipes.common.watch import bound_of_group, bound_of_waits
from recipes.common.world import NO_PICKLE, World, join_world, leave_world

# One line tells that a neighbour is lost (entry.py); torch would log the whole interleaved schedule besides.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
PARTS_PER_STAGE = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Interleaved, stage r of p holds parts r and p + r: half the bubble for twice the messages."""


def options(argv: Sequence[str] | None = None) -> Options:
    """Return the options of this recipe; raises UserError for what cannot work."""
    parser = build_parser("pipeline", __doc__)
    group = parser.add_argument_group("pipeline")
    group.add_argument("--stages", type=positive_int, default=2, metavar="P", help="devices that a replica spans")
    group.add_argument(
        "--num-microbatches", type=positive_int, default=4, metavar="M", help="equal pieces of a replica's batch"
    )
    words = (
        "gpipe: all forward passes first; 1f1b: alternating, at most P microbatches in memory; interleaved: 1f1b"
    )
    group.add_argument(
        "--schedule", type=one_of(*SCHEDULES), default="1f1b", help=f"{words} with two parts a stage"
    )
    words = "ranks: a process for each stage; in-process: the whole model in each process, on P devices"
    group.add_argument("--split", type=one_of("ranks", "in-process"), default="ranks", help=words)
    words = "what the parts have in equal amounts: parameters, or cost (time measured on a microbatch)"
    group.add_argument("--balance", type=one_of("parameters", "cost"), default="parameters", help=words)
    args = parse(parser, argv)
    check_options(args)
    return args


def check_options(args: Options) -> None:
    """Refuse options that do not combine."""
    microbatches, stages = args.num_microbatches, args.stages
    rounds = max(1, microbatches // stages)
    if args.on_nonfinite != "stop":
        raise UserError(f"--on-nonfinite {args.on_nonfinite}: a stage sees its own gradients only; use stop")
    if args.amp == "fp16":
        raise UserError("--amp fp16: the stages would scale their losses apart; use --amp bf16")
    if args.sync_batchnorm:
        raise UserError("--sync-batchnorm: a pipeline normalises each microbatch by itself; drop it")
    if args.split == "ranks" and args.schedule == "1f1b" and microbatches < stages:
        mend = f"use at least {stages}, or --schedule gpipe"
        raise UserError(f"--num-microbatches {microbatches} are too few for 1f1b with {stages} stages; {mend}")
    if args.split == "ranks" and args.schedule == "interleaved" and (stages < 2 or microbatches % rounds):
        mend = f"use 2 stages or more and --num-microbatches {max(2, stages) * rounds}"
        raise UserError(f"--schedule interleaved: {microbatches} microbatches for {stages} stages; {mend}")


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


def count_stages(args: Options) -> int:
    """Return how many processes a replica spans; one that is split within its process takes one."""
    return 1 if args.split == "in-process" else args.stages


def join_replicas(args: Options) -> World:
    """Connect this process with the others, which have to make up whole replicas."""
    # DDP: a launcher (torchrun, srun, mpirun) tells each process who it is.
    ranks, stages = read_ranks("pipeline"), count_stages(args)
    if ranks.world_size % stages:
        below = ranks.world_size // stages * stages
        either = f"{below} or {below + stages}" if below else f"{stages}"
        raise UserError(
            f"--stages {stages} wants a multiple of {stages} processes, got {ranks.world_size}; "
            f"start {either}, or give --stages {ranks.world_size}"
        )
    return join_world(args, ranks, devices_per_rank=args.stages // stages)


def build_grid(args: Options, world: World) -> Grid:
    """Find this process's place among the others; call it on all ranks, with the same options."""
    stages = count_stages(args)
    first, count = world.device.index, args.stages // stages  # no index for the CPU
    devices = [world.device if first is None else torch.device("cuda", first + i) for i in range(count)]
    # Pipeline: the world is a grid of replicas x stages, with a group for each column (one stage's gradients)
    # and each row (a replica's activations).
    grid = torch.arange(world.world_size).view(-1, stages)
    timeout = bound_of_group(bound_of_waits(args), world.device.type)
    groups = [dist.new_subgroups_by_enumeration(lines.tolist(), timeout=timeout)[0] for lines in (grid.T, grid)]
    mesh = DeviceMesh.from_group(cast(Any, groups), world.device.type, grid, mesh_dim_names=("dp", "pp"))
    first_replica = dist.new_group(grid[0].tolist(), timeout=timeout, backend="gloo")
    replica, stage = divmod(world.rank, stages)
    own: dict[str, Any] = {"devices": devices, "mesh": mesh, "first_replica": first_replica}
    place: dict[str, Any] = {"replica": replica, "replicas": len(grid), "stage": stage, "stages": stages}
    return Grid(**vars(world), **own, **place)


def plan(model: nn.Module, args: Options, data: Data, world: Grid) -> list[Part]:
    """Return the parts that the model is cut into, the same on every rank; call it on all ranks."""
    count = world.stages * PARTS_PER_STAGE[args.schedule] if args.split == "ranks" else args.stages
    size = args.global_batch_size // (world.replicas * args.accumulate_steps * args.num_microbatches)
    sample = torch.zeros(size if args.balance == "cost" else 1, data.channels, data.image_size, data.image_size)

    def cut() -> list[Part] | None:
        return plan_parts(model, count, args.balance, args, sample.to(world.device)) if world.rank == 0 else None

    # Pipeline: two ranks never measure the same times, so rank 0 cuts for all and broadcasts the names and output
    # shapes of the parts, some hundred bytes.
    parts = run_on_all_ranks(cut, world)
    with world.watch("model"):
        fields = world.broadcast_object([vars(part) for part in parts or []])
    return [Part(**own) for own in fields]


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


class RankPipeline:
    """--split ranks: this process's stage of a pipeline, driven by one of torch's schedules.

    Each stage sends a microbatch's activations to the next one and its gradient to the one before. Of
    m + p - 1 time slots a stage of p works in m: the bubble is (p - 1) / (m + p - 1) of its time.
    """

    def __init__(self, model: nn.Module, parts: list[Part], args: Options, data: Data, world: Grid) -> None:
        self.args, self.world = args, world
        self.numbers = range(world.stage, len(parts), world.stages)
        modules = [PartModule(model, parts[i], args, world.device) for i in self.numbers]
        self.share = Share(model, modules)
        self.ddp = [wrap(module, world) if world.replicas > 1 else module for module in modules]
        image = ((data.channels, data.image_size, data.image_size), torch.float32)
        self.shapes = [image, *((part.output_shape, part.output_dtype) for part in parts)]
        per_pass = args.global_batch_size // world.replicas // args.accumulate_steps
        self.stages, self.schedule = self.connect(per_pass, partial(scaled_loss, args, world))
        # Pipeline: evaluation has its own buffers, and no loss: the schedule then only runs forward.
        _, self.forward_schedule = self.connect(eval_batch_size(args, data, world), None)

    def connect(self, batch_size: int, loss: Callable[..., Tensor] | None) -> tuple[list[PipelineStage], Any]:
        """Return this process's stages for batches of a size, and the schedule that drives them."""
        size = batch_size // self.args.num_microbatches

        def like(number: int) -> Tensor:
            """Return a tensor of the shape that crosses in front of part `number`, without memory."""
            shape, dtype = self.shapes[number]
            needs_grad = loss is not None and number > 0
            return torch.empty(size, *shape, dtype=dtype, device="meta", requires_grad=needs_grad)

        # Pipeline: shapes known beforehand spare the stages a first exchange of them, and a pass to find them out.
        stages = [
            PipelineStage(
                module,
                number,
                num_stages=len(self.shapes) - 1,
                device=self.world.device,
                input_args=like(number),
                output_args=like(number + 1),
                group=self.world.mesh.get_group("pp"),
            )
            for number, module in zip(self.numbers, self.share.modules, strict=True)
        ]
        # Pipeline: the loss is divided by the global batch already; the schedule must not divide it again.
        held = stages if self.args.schedule == "interleaved" else stages[0]
        make = SCHEDULES[self.args.schedule]
        return stages, make(held, self.args.num_microbatches, loss_fn=loss, scale_grads=False)

    def forward_backward(self, images: Tensor, labels: Tensor, exchange: bool) -> Tensor:
        """Run one pass of all stages; return the loss, which is 0 on all but the last stage."""
        for stage, module, ddp in zip(self.stages, self.share.modules, self.ddp, strict=True):
            # DDP: gradients are exchanged only in the last of the accumulated passes; the others go past DDP.
            stage.submod = ddp if exchange else module
        losses: list[Tensor] = []
        # Pipeline: images go in at the first stage, activations and their gradients cross between neighbours
        # (a microbatch's output_shape each way), and labels meet the logits at the last stage.
        inputs = (images,) if self.world.stage == 0 else ()
        self.schedule.step(*inputs, target=labels, losses=losses)
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.world.device))

    def logits(self, images: Tensor) -> Tensor | None:
        """Run one forward pass of all stages; return the logits (B, classes) on the last one."""
        inputs = (images,) if self.world.stage == 0 else ()
        return cast("Tensor | None", self.forward_schedule.step(*inputs))


class SplitModel(nn.Module):
    """The parts of a model on devices of one process."""

    def __init__(self, parts: list[PartModule], num_microbatches: int) -> None:
        super().__init__()
        self.parts, self.num_microbatches = nn.ModuleList(parts), num_microbatches

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) on the first device to logits (B, classes) on the last."""
        outputs = []
        # Pipeline: kernels are queued, not waited for: while one device works on a microbatch, the device before
        # it has begun the next one.
        for data in images.tensor_split(self.num_microbatches):
            for part in self.parts:
                data = part(data.to(cast(PartModule, part).device, non_blocking=True))
            outputs.append(data)
        return torch.cat(outputs)


class InProcessPipeline:
    """--split in-process: each process has the whole model, its parts on devices of their own."""

    def __init__(self, model: nn.Module, parts: list[Part], args: Options, data: Data, world: Grid) -> None:
        self.args, self.world = args, world
        # Pipeline: part i lies on this process's i-th device; on a CPU all of them are the same one.
        placed = zip(parts, world.devices, strict=True)
        self.share = Share(model, [PartModule(model, part, args, device) for part, device in placed])
        self.split = SplitModel(self.share.modules, args.num_microbatches)
        self.ddp = wrap(self.split, world)

    def forward_backward(self, images: Tensor, labels: Tensor, exchange: bool) -> Tensor:
        """Run one pass; return the loss."""
        # DDP: gradients are exchanged only in the last of the accumulated passes.
        with contextlib.nullcontext() if exchange else self.ddp.no_sync():
            loss = scaled_loss(self.args, self.world, self.ddp(images), labels)
            loss.backward()
        return loss.detach().to(self.world.device)

    def logits(self, images: Tensor) -> Tensor | None:
        """Run one forward pass; return the logits (B, classes)."""
        return cast(Tensor, self.split(images)).to(self.world.device)


Pipeline = RankPipeline | InProcessPipeline


def scaled_loss(args: Options, world: Grid, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss whose gradient, summed over microbatches and averaged by DDP, is that of the global mean."""
    with autocast(args, logits.device):
        loss = cross_entropy(logits, labels.to(logits.device), reduction="sum")
    return loss * world.replicas / args.global_batch_size


def settle_buckets(pipeline: Pipeline, model: nn.Module, args: Options, data: Data, world: Grid) -> None:
    """Let DDP put its buckets together as they will stay, for the reason in buckets.py; call it on all ranks."""
    size = args.global_batch_size // world.replicas // args.accumulate_steps
    images = torch.zeros(size, data.channels, data.image_size, data.image_size, device=world.device)
    labels = torch.zeros(size, dtype=torch.int64, device=world.device)
    model.eval()  # the pass changes no statistics
    # Pipeline: a step's last pass on blank images: activations and gradients cross as they will in training.
    with world.watch("gradients", computes=True):
        pipeline.forward_backward(images, labels, exchange=True)
    for parameter in pipeline.share.parameters:
        parameter.grad = None


def read_batches(
    split: Split, shares: Iterable[Tensor], epoch: int, batch_size: int, world: Grid, purpose: str
) -> Iterator[Batch]:
    """Yield batches of exactly batch_size samples on every stage; call it on all ranks of a replica.

    What is missing in a short one is blank and does not count. Only the first stage has the images.
    """
    nothing = (torch.empty(batch_size, 0), torch.empty(batch_size, dtype=torch.int64, device=world.device))
    batches = split.batches(shares, epoch) if world.stage == 0 else (nothing for _ in shares)
    for images, labels in batches:
        missing = batch_size - len(labels)
        if missing:
            images = pad(images, (0, 0, 0, 0, 0, 0, 0, missing))
            labels = pad(labels, (0, missing), value=SKIPPED)
        # Pipeline: only a replica's first stage reads data; the labels go to the other stages, 8 bytes a sample.
        with world.watch(purpose):
            dist.broadcast(labels, group=world.mesh.get_group("pp"), group_src=0)
        yield images, labels


def train_one_epoch(job: Job, pipeline: Pipeline, world: Grid) -> int:
    """Train to the epoch's end, or until a vote ends it; return that vote: GO, STOP or FAIL."""
    args, position, accumulate = job.args, job.position, job.args.accumulate_steps
    decision = GO
    job.model.train()
    job.begin_epoch()
    shares = (shard(batch, world.replica, world.replicas) for batch in job.global_batches())
    batch_size = args.global_batch_size // world.replicas
    for images, labels in read_batches(job.data.train, shares, position.epoch, batch_size, world, "labels"):
        # DDP: each rank sends its vote, 4 bytes; it is read after backward, so nobody waits for it.
        if is_vote_due := job.is_vote_due(world.world_size):
            vote = torch.tensor(job.stop.vote, dtype=torch.int32)
            voting = dist.all_reduce(vote, dist.ReduceOp.MAX, group=world.control, async_op=True)

        seed_step(args.seed, position.step, world.rank, world.device)
        loss_sum = torch.zeros((), device=world.device)
        parts = zip(images.tensor_split(accumulate), labels.tensor_split(accumulate), strict=True)
        for i, (some_images, some_labels) in enumerate(parts):
            with world.watch("gradients", computes=True):
                loss_sum += pipeline.forward_backward(some_images, some_labels, exchange=i == accumulate - 1)

        if is_vote_due:
            with world.watch("stop vote"):
                voting.wait()
            decision = int(vote)
        if decision == FAIL:
            break
        rate = learning_rate(args, position.step, job.total_steps)
        set_learning_rate(job.optimizer, rate)
        if args.clip_grad_norm:
            clip_gradients(job, world)
        if job.allows(loss_sum)([parameter.grad for parameter in job.optimizer.param_groups[0]["params"]]):
            job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=True)
        job.count_step()
        if job.is_log_due():
            # Pipeline: adds up the last stages' losses and the others' zeros, 4 bytes a rank, once in --log-every
            # steps; the mean over the replicas is the global batch's loss.
            with world.watch("metrics"):
                dist.all_reduce(loss_sum)
                loss_mean = loss_sum.item() / world.replicas
            job.log_step(loss_mean, rate)
        if decision == STOP:
            break
        if job.is_checkpoint_due():
            save_checkpoint(job, pipeline, world)
    job.pause()
    return decision


def clip_gradients(job: Job, world: Grid) -> None:
    """Scale the gradients down to --clip-grad-norm, the norm of the whole model's; call it on all ranks."""
    parameters = job.optimizer.param_groups[0]["params"]
    norm = nn.utils.get_total_norm([p.grad for p in parameters]).to(world.device)
    # Pipeline: each stage knows its own gradients' norm; adds up the squares, 4 bytes a rank.
    squares = norm.square()
    with world.watch("gradients"):
        dist.all_reduce(squares, group=world.mesh.get_group("pp"))
    nn.utils.clip_grads_with_norm_(parameters, job.args.clip_grad_norm, squares.sqrt())


def eval_batch_size(args: Options, data: Data, world: Grid) -> int:
    """Return the size of evaluation batches: a replica's share, in equal microbatches, up to a bound."""
    share = math.ceil(len(data.test) / world.replicas)
    return args.num_microbatches * math.ceil(min(EVAL_BATCH_SIZE, share) / args.num_microbatches)


@torch.no_grad()
def evaluate(job: Job, pipeline: Pipeline, world: Grid) -> dict[str, float]:
    """Return test_loss and test_accuracy over the whole test set, each sample counted once."""
    # DDP: each replica has batch-norm statistics of its own microbatches; all evaluate with replica 0's.
    for module in pipeline.share.modules:
        for buffer in module.buffers():
            with world.watch("evaluation"):
                dist.broadcast(buffer, group=world.mesh.get_group("dp"), group_src=0)
    job.model.eval()
    totals = new_totals(world.device)
    batch_size = eval_batch_size(job.args, job.data, world)
    share = shard(torch.arange(len(job.data.test)), world.replica, world.replicas)
    shares = share.split(batch_size)
    # Pipeline: forward passes through all stages, so that no device ever has to hold the whole model.
    for images, labels in read_batches(job.data.test, shares, job.position.epoch, batch_size, world, "evaluation"):
        with world.watch("evaluation", computes=True):
            logits = pipeline.logits(images)
        if logits is not None:
            add_batch(totals, logits, labels)
    if world.stage == world.stages - 1:
        totals[4] += len(share) - batch_size * len(shares)  # what read_batches() has added counts for nothing
    totals[3] += job.data.train.skipped + job.data.test.skipped
    # DDP: adds up sums and counts, 40 bytes a rank; the averages are taken after it.
    with world.watch("evaluation"):
        dist.all_reduce(totals)
        return averages(totals, len(job.data.test))


def save_checkpoint(job: Job, pipeline: Pipeline, world: Grid, is_best: bool = False) -> None:
    """Write a checkpoint on rank 0; a failure is voted on in a later step. Call it on all ranks."""
    # A stage sees its own gradients alone, and rank 0 not those of others.
    raise_on_all_ranks(job.stop.error, world)
    # Pipeline: rank 0 gathers weights and optimizer state from the stages of replica 0, with momentum twice the
    # model's bytes. DDP: the other replicas hold the same, and send nothing.
    gathered: list[Any] | None = [None] * world.stages if world.rank == 0 else None
    with world.watch("checkpoint"):
        if world.replica == 0:
            share = pipeline.share.state(job.optimizer)
            dist.gather_object(share, gathered, dst=0, group=world.first_replica, **NO_PICKLE)
    if job.record and gathered:
        # Pipeline: the file is the one-process run's: every recipe goes on from it, with any number of stages.
        job.save(is_best, merge_shares(job.model, gathered))


def describe(parts: list[Part], args: Options, world: Grid) -> str:
    """Return which layers lie where, a line each."""
    stages = [f"stage {number % world.stages}" for number in range(len(parts))]
    owners = stages if args.split == "ranks" else [str(device) for device in world.devices]
    return "\n".join(f"{owner}: {part}" for owner, part in zip(owners, parts, strict=True))


def train(args: Options, stop: Stop, world: World) -> None:
    """Set everything up, train epoch by epoch, and leave a checkpoint behind."""
    data = load_same_data(args, "pipeline", world, on_bad_image=stop.fail)
    grid = build_grid(args, world)
    run_on_all_ranks(lambda: check_microbatches(args, grid.replicas, len(data.train)), world)
    # DDP: every rank draws the same weights from --seed; a stage then moves its own layers to its device.
    model = run_on_all_ranks(lambda: build_model(args, data), world)
    parts = plan(model, args, data, grid)
    build = RankPipeline if args.split == "ranks" else InProcessPipeline
    with world.watch("model", computes=True):
        pipeline: Pipeline = build(model, parts, args, data, grid)
    if args.deterministic and grid.replicas > 1:
        settle_buckets(pipeline, model, args, data, grid)
    optimizer = build_optimizer(args, pipeline.share.parameters)
    job = Job(args, data, world.device, model, optimizer, build_scaler(args, world.device), stop)

    # DDP: rank 0 opens the record and reads the checkpoint; its content, the whole state, goes to all ranks.
    # Pipeline: each stage takes the optimizer state of its own parameters, whatever recipe wrote it.
    begin_run(job, "pipeline", world, pipeline.share.of_checkpoint)
    if job.record:
        job.record.progress.say(describe(parts, args, grid))

    while not job.is_complete:
        decision = train_one_epoch(job, pipeline, grid)
        if decision == STOP:
            save_checkpoint(job, pipeline, grid)
        raise_on_all_ranks(stop.error, world)
        if decision == STOP:
            job.leave()
            return
        averages = evaluate(job, pipeline, grid)
        is_best = job.end_epoch(averages)
        save_checkpoint(job, pipeline, grid, is_best)
        raise_on_all_ranks(stop.error, world)
    job.finish(world.world_size)


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the options say; call it on every rank."""
    args = options(argv)
    stop = Stop()
    choose_kernels(args)
    world = join_replicas(args)
    try:
        train(args, stop, world)
    except UserError:
        leave_world(world)
        raise
    leave_world(world)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
