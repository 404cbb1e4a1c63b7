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
from torch.nn.parallel import DistributedDataParallel

from recipes.common.data import EVAL_BATCH_SIZE, Batch, Data, Spec, Split
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.loop import Check, Technique, begin_run, train_epochs
from recipes.common.models.batchnorm import check_groups, group_batch_norm
from recipes.common.models.models import build_model
from recipes.common.nonfinite import NonFiniteError
from recipes.common.optim import autocast, build_optimizer, build_scaler
from recipes.common.options import Options, one_of, option, parse, positive_int
from recipes.common.parallel.buckets import NO_BUFFER_SYNC
from recipes.common.process.entry import exit_status
from recipes.common.process.ranks import read_ranks
from recipes.common.process.signals import Stop
from recipes.common.seeding import choose_kernels
from recipes.common.watch.watch import bound_of_group, bound_of_waits
from recipes.common.world.agreement import load_same_data, raise_on_all_ranks, run_on_all_ranks, shard
from recipes.common.world.world import NO_PICKLE, World, connected_world, grid_mesh
from recipes.pipeline.partition import (
    Part,
    PartModule,
    Share,
    check_microbatches,
    merge_shares,
    plan_parts,
    tied_parameters,
)

# One line reports a lost neighbour (entry.py); torch would log the whole interleaved schedule besides.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

Loss = Callable[[Tensor, Tensor], Tensor]
"""The loss of outputs and targets, scaled as its gradients need it."""

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
PARTS_PER_STAGE = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Interleaved, stage r of p holds parts r and p + r: half the bubble for twice the messages."""


@dataclass(frozen=True)
class PipelineOptions(Options):
    """Pipeline."""

    stages: int = option(2, positive_int, "devices that a replica spans", "P")
    num_microbatches: int = option(4, positive_int, "equal pieces of a replica's batch", "M")
    schedule: str = option(
        "1f1b",
        one_of(*SCHEDULES),
        "gpipe: all forward passes first; 1f1b: alternating, at most P microbatches in memory; interleaved: 1f1b "
        "with two parts a stage",
    )
    split: str = option(
        "ranks",
        one_of("ranks", "in-process"),
        "ranks: a process for each stage; in-process: the whole model in each process, on P devices",
    )
    balance: str = option(
        "parameters",
        one_of("parameters", "cost"),
        "what the parts have in equal amounts: parameters, or cost (time measured on a microbatch)",
    )

    def check(self) -> None:
        """Raise UserError where options do not combine."""
        super().check()
        microbatches, stages = self.num_microbatches, self.stages
        rounds = max(1, microbatches // stages)
        if self.on_nonfinite != "stop":
            raise UserError(f"--on-nonfinite {self.on_nonfinite}: a stage sees its own gradients only; use stop")
        if self.amp == "fp16":
            raise UserError("--amp fp16: the stages would scale their losses apart; use --amp bf16")
        if self.sync_batchnorm:
            raise UserError(
                "--sync-batchnorm: a pipeline normalises each microbatch by itself; use --batchnorm-group"
            )
        if self.split == "ranks" and self.schedule == "1f1b" and microbatches < stages:
            fix = f"use at least {stages}, or --schedule gpipe"
            raise UserError(f"--num-microbatches {microbatches} are too few for 1f1b with {stages} stages; {fix}")
        if self.split == "ranks" and self.schedule == "interleaved" and (stages < 2 or microbatches % rounds):
            fix = f"use 2 stages or more and --num-microbatches {max(2, stages) * rounds}"
            raise UserError(f"--schedule interleaved: {microbatches} microbatches for {stages} stages; {fix}")


def options(argv: Sequence[str] | None = None) -> PipelineOptions:
    """Return the options of this recipe; raises UserError for what cannot work."""
    return parse(PipelineOptions, "pipeline", __doc__, argv)


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


def count_stages(args: PipelineOptions) -> int:
    """Return how many processes a replica spans; one that is split within its process takes one."""
    return 1 if args.split == "in-process" else args.stages


def check_replicas(world_size: int, stages: int) -> None:
    """Raise UserError where the processes do not make up whole replicas."""
    if world_size % stages:
        below = world_size // stages * stages
        either = f"{below} or {below + stages}" if below else f"{stages}"
        raise UserError(
            f"--stages {stages} needs a multiple of {stages} processes, got {world_size}; "
            f"start {either}, or give --stages {world_size}"
        )


def build_grid(args: PipelineOptions, world: World) -> Grid:
    """Find this process's place among the others; call it on all ranks, with the same options."""
    stages = count_stages(args)
    first, count = world.device.index, args.stages // stages  # no index for the CPU
    devices = [world.device if first is None else torch.device("cuda", first + i) for i in range(count)]
    # Pipeline: the world is a grid of replicas x stages, with a group for each column (one stage's gradients)
    # and each row (a replica's activations).
    grid = torch.arange(world.world_size).view(-1, stages)
    timeout = bound_of_group(bound_of_waits(args), world.device.type)
    mesh = grid_mesh(args, world, stages, ("dp", "pp"))
    first_replica = dist.new_group(grid[0].tolist(), timeout=timeout, backend="gloo")
    replica, stage = divmod(world.rank, stages)
    own: dict[str, Any] = {"devices": devices, "mesh": mesh, "first_replica": first_replica}
    place: dict[str, Any] = {"replica": replica, "replicas": len(grid), "stage": stage, "stages": stages}
    return Grid(**vars(world), **own, **place)


def plan(model: nn.Module, args: PipelineOptions, data: Data, world: Grid) -> list[Part]:
    """Return the parts that the model is cut into, the same on every rank; call it on all ranks."""
    count = world.stages * PARTS_PER_STAGE[args.schedule] if args.split == "ranks" else args.stages
    size = args.global_batch_size // (world.replicas * args.accumulate_steps * args.num_microbatches)
    sample = data.input.zeros(size if args.balance == "cost" else 1)

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

    def __init__(
        self, model: nn.Module, parts: list[Part], args: PipelineOptions, data: Data, world: Grid, loss: Loss
    ) -> None:
        self.args, self.world = args, world
        self.numbers = range(world.stage, len(parts), world.stages)
        modules = [PartModule(model, parts[i], args, world.device) for i in self.numbers]
        self.share = Share(model, modules)
        self.ddp = [wrap(module, world) if world.replicas > 1 else module for module in modules]
        # Pipeline: a matrix that layers of several stages have in common, as GPT's first and last.
        owners = [
            (p, {number % world.stages for number in numbers}) for p, numbers in tied_parameters(model, parts)
        ]
        self.tied = [parameter for parameter, stages in owners if len(stages) > 1]
        counted_elsewhere = {parameter for parameter, stages in owners if world.stage != min(stages)}
        self.counted = [parameter for parameter in self.share.parameters if parameter not in counted_elsewhere]
        self.shapes = [data.input, *((part.output_shape, part.output_dtype) for part in parts)]
        per_pass = args.global_batch_size // world.replicas // args.accumulate_steps
        self.stages, self.schedule = self.connect(per_pass, loss)
        # Pipeline: evaluation has its own buffers, and no loss: the schedule then only runs forward.
        _, self.forward_schedule = self.connect(eval_batch_size(args, data, world), None)

    def connect(self, batch_size: int, loss: Loss | None) -> tuple[list[PipelineStage], Any]:
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

    def forward_backward(self, inputs: Tensor, targets: Tensor, exchange: bool) -> Tensor:
        """Run one pass of all stages; return the loss, which is 0 on all but the last stage."""
        for stage, module, ddp in zip(self.stages, self.share.modules, self.ddp, strict=True):
            # DDP: gradients are exchanged only in the last of the accumulated passes; the others go past DDP.
            stage.submod = ddp if exchange else module
        losses: list[Tensor] = []
        # Pipeline: inputs go in at the first stage, activations and their gradients cross between neighbours
        # (a microbatch's output_shape each way), and targets meet the output at the last stage.
        given = (inputs,) if self.world.stage == 0 else ()
        self.schedule.step(*given, target=targets, losses=losses)
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.world.device))

    def output(self, inputs: Tensor) -> Tensor | None:
        """Run one forward pass of all stages; return the model's output on the last one."""
        given = (inputs,) if self.world.stage == 0 else ()
        return cast("Tensor | None", self.forward_schedule.step(*given))


class SplitModel(nn.Module):
    """The parts of a model on devices of one process."""

    def __init__(self, parts: list[PartModule], num_microbatches: int) -> None:
        super().__init__()
        self.parts, self.num_microbatches = nn.ModuleList(parts), num_microbatches

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs on the first device to the model's output on the last."""
        outputs = []
        # Pipeline: kernels are queued, not waited for: while one device works on a microbatch, the device before
        # it has begun the next one.
        for data in inputs.tensor_split(self.num_microbatches):
            for part in self.parts:
                data = part(data.to(cast(PartModule, part).device, non_blocking=True))
            outputs.append(data)
        return torch.cat(outputs)


class InProcessPipeline:
    """--split in-process: each process has the whole model, its parts on devices of their own."""

    def __init__(
        self, model: nn.Module, parts: list[Part], args: PipelineOptions, data: Data, world: Grid, loss: Loss
    ) -> None:
        self.world, self.loss = world, loss
        # Pipeline: part i lies on this process's i-th device; on a CPU all of them are the same one.
        placed = zip(parts, world.devices, strict=True)
        self.share = Share(model, [PartModule(model, part, args, device) for part, device in placed])
        self.tied, self.counted = list[nn.Parameter](), self.share.parameters
        self.split = SplitModel(self.share.modules, args.num_microbatches)
        self.ddp = wrap(self.split, world)

    def forward_backward(self, inputs: Tensor, targets: Tensor, exchange: bool) -> Tensor:
        """Run one pass; return the loss."""
        # DDP: gradients are exchanged only in the last of the accumulated passes.
        with contextlib.nullcontext() if exchange else self.ddp.no_sync():
            loss = self.loss(self.ddp(inputs), targets)
            loss.backward()
        return loss.detach().to(self.world.device)

    def output(self, inputs: Tensor) -> Tensor | None:
        """Run one forward pass; return the model's output."""
        return cast(Tensor, self.split(inputs)).to(self.world.device)


Pipeline = RankPipeline | InProcessPipeline


def settle_buckets(pipeline: Pipeline, model: nn.Module, args: PipelineOptions, data: Data, world: Grid) -> None:
    """Let DDP put its buckets together as they will stay, for the reason in buckets.py; call it on all ranks."""
    size = args.global_batch_size // world.replicas // args.accumulate_steps
    model.eval()  # the pass changes no statistics
    # Pipeline: a step's last pass on blank inputs: activations and gradients cross as they will in training.
    with world.watch("gradients", computes=True):
        blank = data.input.zeros(size, world.device), data.target.zeros(size, world.device)
        pipeline.forward_backward(*blank, exchange=True)
    for parameter in pipeline.share.parameters:
        parameter.grad = None


def read_batches(world: Grid, target: Spec, split: Split, shares: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
    """Yield the batches of a replica's shares, of which only its first stage has the inputs.

    Call it on all ranks of a replica.
    """
    filled = (share for share in shares if len(share))
    nothing = ((torch.empty(len(i), 0), target.zeros(len(i))) for i in filled)
    for inputs, targets in split.batches(filled, epoch) if world.stage == 0 else nothing:
        targets = targets.to(world.device).contiguous()
        # Pipeline: only a replica's first stage reads data; targets go to the others, of a label 8 bytes a sample.
        with world.watch("labels"):
            dist.broadcast(targets, group=world.mesh.get_group("pp"), group_src=0)
        yield inputs, targets


def update(pipeline: Pipeline, world: Grid, job: Job, check: Check) -> None:
    """Step the optimizer of this stage's parameters if their gradients pass the check."""
    sum_tied_gradients(pipeline, world)
    if job.args.clip_grad_norm:
        clip_gradients(pipeline, job.args.clip_grad_norm, world)
    if check([p.grad for p in pipeline.share.parameters if p.grad is not None]):
        job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)


def sum_tied_gradients(pipeline: Pipeline, world: Grid) -> None:
    """Add up the gradients of what stages have in common; call it on all ranks of a replica."""
    for parameter in pipeline.tied:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter, device=world.device)
        # Pipeline: each stage has the part that its own layers contribute, or zeros: an all-reduce of the matrix's
        # bytes, once a step. All owners then take the same step.
        with world.watch("gradients"):
            dist.all_reduce(gradient, group=world.mesh.get_group("pp"))


def clip_gradients(pipeline: Pipeline, max_norm: float, world: Grid) -> None:
    """Scale the gradients down to --clip-grad-norm, the norm of the whole model's; call it on all ranks."""
    norm = nn.utils.get_total_norm([p.grad for p in pipeline.counted if p.grad is not None]).to(world.device)
    # Pipeline: each stage knows its own gradients' norm; adds up the squares, 4 bytes a rank.
    squares = norm.square()
    with world.watch("gradients"):
        dist.all_reduce(squares, group=world.mesh.get_group("pp"))
    nn.utils.clip_grads_with_norm_(pipeline.share.parameters, max_norm, squares.sqrt())


def eval_batch_size(args: PipelineOptions, data: Data, world: Grid) -> int:
    """Return the size of evaluation batches: a replica's share, in equal microbatches, up to a bound."""
    share = math.ceil(len(data.test) / world.replicas)
    return args.num_microbatches * math.ceil(min(EVAL_BATCH_SIZE, share) / args.num_microbatches)


def predict(pipeline: Pipeline, batch_size: int, world: Grid, inputs: Tensor) -> Tensor | None:
    """Return the model's output for some inputs on a replica's last stage, None on the others."""
    missing = batch_size - len(inputs)
    if missing and world.stage == 0:
        # Microbatches are equal: what is missing is blank.
        inputs = torch.cat([inputs, inputs.new_zeros(missing, *inputs.shape[1:])])
    # Pipeline: forward passes through all stages, so that no device ever has to hold the whole model.
    with world.watch("evaluation", computes=True):
        output = pipeline.output(inputs)
    return None if output is None else output[: batch_size - missing]


def sync_buffers(pipeline: Pipeline, world: Grid) -> None:
    """Give all replicas the batch-norm statistics of replica 0: each has those of its own microbatches."""
    for module in pipeline.share.modules:
        for buffer in module.buffers():
            # DDP: within a stage's column of the mesh, replica 0 sends its buffers to the others.
            with world.watch("evaluation"):
                dist.broadcast(buffer, group=world.mesh.get_group("dp"), group_src=0)


def sum_over_replicas(world: Grid, tensor: Tensor) -> None:
    """Overwrite a tensor of this stage by its sum over the replicas."""
    # DDP: an all-reduce within this stage's column of the mesh.
    with world.watch("statistics"):
        dist.all_reduce(tensor, group=world.mesh.get_group("dp"))


def gather_state(pipeline: Pipeline, world: Grid, job: Job) -> dict[str, Any] | None:
    """Put all weights into rank 0's model and return the whole optimizer's state there; call it on all ranks."""
    # A stage sees its own gradients alone, and rank 0 not those of others. Other errors spoil no weights.
    error = job.stop.error
    raise_on_all_ranks(error if isinstance(error, NonFiniteError) else None, world)
    # Pipeline: rank 0 gathers weights and optimizer state from the stages of replica 0, with momentum twice the
    # model's bytes. DDP: the other replicas hold the same, and send nothing.
    gathered: list[Any] | None = [None] * world.stages if world.rank == 0 else None
    with world.watch("checkpoint"):
        if world.replica == 0:
            share = pipeline.share.state(job.optimizer)
            dist.gather_object(share, gathered, dst=0, group=world.first_replica, **NO_PICKLE)
    # Pipeline: the file is the one-process run's: every recipe resumes from it, with any number of stages.
    return {"optimizer": merge_shares(job.model, gathered)} if gathered else None


def describe(parts: list[Part], args: PipelineOptions, world: Grid) -> str:
    """Return which layers lie where, a line each."""
    stages = [f"stage {number % world.stages}" for number in range(len(parts))]
    owners = stages if args.split == "ranks" else [str(device) for device in world.devices]
    return "\n".join(f"{owner}: {part}" for owner, part in zip(owners, parts, strict=True))


def train(args: PipelineOptions, world: World, stop: Stop) -> None:
    """Train as the options say; call it on all ranks."""
    choose_kernels(args)
    data = load_same_data(args, "pipeline", world, on_bad_image=stop.fail)
    grid = build_grid(args, world)
    run_on_all_ranks(
        lambda: check_microbatches(args, args.num_microbatches, grid.replicas, len(data.train)), world
    )
    # DDP: every rank draws the same weights from --seed; a stage then moves its own layers to its device.
    model = run_on_all_ranks(lambda: build_model(args, data), world)
    run_on_all_ranks(lambda: check_groups(model, args), world)
    parts = plan(model, args, data, grid)

    def scaled_loss(output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss whose gradient, summed over microbatches and averaged by DDP, is the global mean's."""
        with autocast(args, output.device):
            return job.loss(output, targets.to(output.device)) * grid.replicas

    def forward_backward(inputs: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        """Add the gradients of a pass to those of earlier passes; return this rank's part of the loss."""
        with world.watch("gradients", computes=True):
            return pipeline.forward_backward(inputs, targets, exchange=is_last) / grid.replicas

    build = RankPipeline if args.split == "ranks" else InProcessPipeline
    with world.watch("model", computes=True):
        pipeline: Pipeline = build(model, parts, args, data, grid, scaled_loss)
    # Pipeline: a stage's layers have their groups of a replica's share in one microbatch after another.
    for module in pipeline.share.modules:
        group_batch_norm(module, args, args.global_batch_size // grid.replicas)
    optimizer = build_optimizer(args, pipeline.share.parameters)
    pieces = grid.replicas * args.accumulate_steps * args.num_microbatches
    scaler = build_scaler(args, world.device)
    job = Job(args, "pipeline", data, world, model, optimizer, scaler, stop, batch_parts=pieces)
    if args.deterministic and grid.replicas > 1:
        settle_buckets(pipeline, model, args, data, grid)
    technique = Technique(
        forward_backward,
        model,
        predict=partial(predict, pipeline, eval_batch_size(args, data, grid), grid),
        update=partial(update, pipeline, grid),
        shard=lambda indices: shard(indices, grid.replica, grid.replicas),
        read_batches=partial(read_batches, grid, data.target),
        sync_buffers=partial(sync_buffers, pipeline, grid),
        sum_statistics=partial(sum_over_replicas, grid),
        gather_state=partial(gather_state, pipeline, grid, job),
    )
    # DDP: rank 0 reads the checkpoint and broadcasts it.
    # Pipeline: each stage takes the optimizer state of its own parameters, whatever recipe wrote it.
    begin_run(job, pipeline.share.of_checkpoint)
    job.say(describe(parts, args, grid))
    train_epochs(job, technique)
    job.finish()


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the options say; call it on every rank."""
    args = options(argv)
    stop = Stop()
    # DDP: a launcher (torchrun, srun, mpirun) tells each process who it is.
    ranks, stages = read_ranks("pipeline"), count_stages(args)
    check_replicas(ranks.world_size, stages)
    with connected_world(args, ranks, devices_per_rank=args.stages // stages) as world:
        train(args, world, stop)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
