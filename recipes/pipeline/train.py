"""Pipeline times DDP: the layers of a model spread over the processes of a replica, and replicas side by side.

    make run RECIPE=pipeline NODES=2 NPROC_PER_NODE=2
    .venv/bin/torchrun --nproc-per-node=2 -m recipes.pipeline.train --model resnet18 --data cifar10 --balance cost

Success: the last line is `result recipe=pipeline world_size=4 test_accuracy=0.98.. samples_per_s=...`.
Source: Huang et al. 2019, GPipe, https://arxiv.org/abs/1811.06965; Narayanan et al. 2021 (1F1B and the interleaved
schedule), https://arxiv.org/abs/2104.04473.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from recipes.common.data import EVAL_BATCH_SIZE, Data
from recipes.common.job import Job
from recipes.common.loop import Check, Technique, begin_run, train_epochs
from recipes.common.models.batchnorm import check_groups, group_batch_norm
from recipes.common.models.models import build_model
from recipes.common.nonfinite import NonFiniteError
from recipes.common.optim import autocast, build_optimizer, build_scaler
from recipes.common.options import parse
from recipes.common.process.entry import exit_status
from recipes.common.process.ranks import read_ranks
from recipes.common.process.signals import Stop
from recipes.common.seeding import choose_kernels
from recipes.common.world.agreement import load_same_data, raise_on_all_ranks, run_on_all_ranks, shard
from recipes.common.world.world import NO_PICKLE, World, connected_world
from recipes.pipeline import partition
from recipes.pipeline.grid import Grid, build_grid, read_batches, sum_over_replicas, sync_buffers, wrap
from recipes.pipeline.in_process import InProcessPipeline
from recipes.pipeline.options import PipelineOptions, check_replicas, count_stages
from recipes.pipeline.partition import Loss, Part, PartModule, Share, merge_shares, row_major, tied_parameters

# One line reports a lost neighbour (entry.py); torch would log the whole interleaved schedule besides.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


def options(argv: Sequence[str] | None = None) -> PipelineOptions:
    """Return the options of this recipe; raises UserError for what cannot work."""
    return parse(PipelineOptions, "pipeline", __doc__, argv)


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
        self.schedule.step(*self.given(inputs), target=targets, losses=losses)
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.world.device))

    def output(self, inputs: Tensor) -> Tensor | None:
        """Run one forward pass of all stages; return the model's output on the last one."""
        return cast("Tensor | None", self.forward_schedule.step(*self.given(inputs)))

    def given(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what this process hands to a schedule: the inputs on the first stage."""
        return (row_major(inputs),) if self.world.stage == 0 else ()


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


def train(args: PipelineOptions, world: World, stop: Stop) -> None:
    """Train as the options say; call it on all ranks."""
    choose_kernels(args)
    data = load_same_data(args, "pipeline", world, on_bad_image=stop.fail)
    grid = build_grid(args, world)
    run_on_all_ranks(
        lambda: partition.check_microbatches(args, args.num_microbatches, grid.replicas, len(data.train)), world
    )
    # DDP: every rank draws the same weights from --seed; a stage then moves its own layers to its device.
    model = run_on_all_ranks(lambda: build_model(args, data), world)
    run_on_all_ranks(lambda: check_groups(model, args), world)
    parts = partition.agree_on_parts(model, args, data, grid)

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
        sync_buffers=partial(sync_buffers, pipeline.share.modules, grid),
        sum_statistics=partial(sum_over_replicas, grid),
        gather_state=partial(gather_state, pipeline, grid, job),
    )
    # DDP: rank 0 reads the checkpoint and broadcasts it.
    # Pipeline: each stage takes the optimizer state of its own parameters, whatever recipe wrote it.
    begin_run(job, pipeline.share.of_checkpoint)
    job.say(partition.describe(parts, args, grid))
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
