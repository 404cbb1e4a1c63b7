"""Pipeline parallelism x DDP: the processes of a replica divide its layers, the replicas the batch.

    make run RECIPE=pipeline NODES=2 NPROC_PER_NODE=2
    .venv/bin/torchrun --nproc-per-node=2 -m recipes.pipeline.train --model resnet18 --data cifar10 --balance cost

Success: the first command ends with `result recipe=pipeline world_size=4 test_accuracy=0.98.. samples_per_s=...`.
Source: Huang et al. 2019, GPipe, https://arxiv.org/abs/1811.06965; Narayanan et al. 2021 (1F1B and the interleaved
schedule), https://arxiv.org/abs/2104.04473.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.common.arguments import is_user_code
from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.loop import Check, Content, Technique, begin_run, train_epochs
from recipes.common.models.batchnorm import check_groups, check_parts, group_batch_norm
from recipes.common.models.blocks import checkpoint_blocks
from recipes.common.models.models import build_model
from recipes.common.nonfinite import NonFiniteError
from recipes.common.optim import autocast, build_optimizer, build_scaler, densify_gradients, fill_momentum
from recipes.common.options import parse
from recipes.common.parallel.groups import gather_values
from recipes.common.process.entry import run_main
from recipes.common.process.signals import Stop
from recipes.common.seeding import choose_kernels
from recipes.common.world.agreement import (
    check_same_weights,
    load_same_data,
    raise_on_all_ranks,
    run_on_all_ranks,
    shard,
)
from recipes.common.world.world import World, train_as_rank
from recipes.pipeline import partition
from recipes.pipeline.grid import PARTS_PER_STAGE, Grid, PipelineOptions, build_grid
from recipes.pipeline.partition import Part
from recipes.pipeline.stages import InProcessPipeline, RankPipeline, batch_sizes

Pipeline = RankPipeline | InProcessPipeline

options = partial(parse, PipelineOptions, "pipeline", __doc__)


def build_sequence(args: PipelineOptions, data: Data, device: torch.device) -> nn.Module:
    """Return --model on the CPU; raises UserError as build_model(), or if it is more than a sequence of layers."""
    model = build_model(args, data, device)
    if is_user_code(args.model):
        from recipes.common.models.user_model import check_input, check_on, check_sequence, check_shared_memory

        check_shared_memory(model, args)
        check_on(device, check_sequence, model, args, data)
        check_on(device, check_input, model, args, data)
    checkpoint_blocks(model, args)
    return model


def agree_on_parts(model: nn.Module, args: PipelineOptions, data: Data, world: Grid) -> list[Part]:
    """Cut the model into parts, the same on every rank; call it on all ranks."""
    count = args.stages * (PARTS_PER_STAGE[args.schedule] if args.split == "ranks" else 1)
    size = args.global_batch_size // (world.replicas * args.passes)

    def cut() -> list[Part]:
        if world.rank:
            return []
        inputs, _ = data.examples(size if args.balance == "cost" else 1)
        parts = partition.plan_parts(model, count, args.balance, args, inputs.to(world.device))
        has_devices = args.split == "in-process" and world.device.type == "cuda"
        partition.check_repeated(model, parts, args, has_devices)
        return parts

    # Pipeline: two ranks never measure the same times, so rank 0 plans the parts for all and broadcasts their
    # names and output shapes, some hundred bytes.
    parts = run_on_all_ranks(cut, world)
    with world.watch("model"):
        fields = world.broadcast_object([vars(part) for part in parts])
    return [Part(**own) for own in fields]


def build_stage_buckets(
    pipeline: Pipeline, model: nn.Module, args: PipelineOptions, data: Data, world: Grid
) -> None:
    """Make DDP build its final buckets before the first step, as buckets.py explains; call it on all ranks."""
    size, _ = batch_sizes(args, data, world)
    model.eval()  # the pass changes no statistics
    ((inputs, targets),) = world.read_batches(data.target, data.train.unreported(), [torch.arange(size)], 0)
    # Pipeline: runs a step's last pass on samples: activations and gradients cross as in training.
    with world.watch("gradients", computes=True):
        pipeline.forward_backward(inputs, targets, exchange=True)
    model.zero_grad()


def sum_shared_gradients(owners: dict[nn.Parameter, set[int]], world: Grid) -> None:
    """Sum the gradients of parameters that stages share, such as GPT's tied matrix; call it on all ranks."""
    shared, row = [p for p, stages in owners.items() if len(stages) > 1], world.mesh.get_group("pp")
    if not shared:
        return
    counts = torch.tensor([float(p.grad is not None) for p in shared], device=world.device)
    # Pipeline: how many stages have a gradient of each: an all-reduce of 4 bytes a parameter, once a step.
    with world.watch("gradients"):
        dist.all_reduce(counts, group=row)
    for parameter, count in zip(shared, counts, strict=True):
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter, device=world.device)
        # Pipeline: each stage has its own layers' contribution to the gradient, or zeros: an all-reduce of the
        # matrix's bytes, once a step. All owners then take the same step, or none if no stage has a gradient.
        with world.watch("gradients"):
            dist.all_reduce(gradient, group=row)
        if parameter.grad is None and world.stage in owners[parameter] and count:
            parameter.grad = gradient


def update(owners: dict[nn.Parameter, set[int]], world: Grid, job: Job, check: Check) -> None:
    """Step the optimizer of this stage's parameters if their gradients pass the check; call it on all ranks."""
    densify_gradients(job.args, owners)
    sum_shared_gradients(owners, world)
    own = [parameter for parameter in owners if parameter.grad is not None]
    if job.args.clip_grad_norm:
        # If stages share a parameter, only the first of them counts its gradient.
        counted = [p.grad for p in own if p.grad is not None and min(owners[p]) == world.stage]
        squares = nn.utils.get_total_norm(counted).to(world.device).square()
        # Pipeline: each stage knows only its own gradients' norm: an all-reduce of the squares, 4 bytes a rank.
        with world.watch("gradients"):
            dist.all_reduce(squares, group=world.mesh.get_group("pp"))
        job.grad_norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(own, job.args.clip_grad_norm, job.grad_norm)
    if check([p.grad for p in own if p.grad is not None]):
        fill_momentum(job.optimizer, may_skip=False)
        job.optimizer.step()
    if job.is_unseen_optimizer:
        partition.check_groups_agree(job.args, job.optimizer, world)
    job.optimizer.zero_grad()


def predict(pipeline: Pipeline, batch_size: int, world: Grid, inputs: Tensor) -> Tensor | None:
    """Return the model's output on a replica's last stage, and None on the other stages."""
    missing = batch_size - len(inputs)
    if missing and world.stage == 0:
        # Microbatches must have equal sizes: fill the last batch up with copies of its last sample.
        inputs = torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])])
    # Pipeline: the forward pass runs through all stages, so that no device has to hold the whole model.
    with world.watch("evaluation", computes=True):
        output = pipeline.output(inputs)
    return None if output is None else output[: batch_size - missing]


def gather_state(pipeline: Pipeline, world: Grid, job: Job) -> Content | None:
    """Gather all weights into rank 0's model; return the whole optimizer state there. Call it on all ranks."""
    # Each stage checks only its own gradients, so rank 0 may not know of the error. Other errors spoil no weights.
    error = job.stop.error
    raise_on_all_ranks(error if isinstance(error, NonFiniteError) else None, world)
    if is_user_code(job.args.optimizer):
        partition.check_groups_agree(job.args, job.optimizer, world)
    # Pipeline: rank 0 gathers weights and optimizer state from the stages of replica 0, with momentum twice the
    # model's bytes. DDP: the other replicas hold the same, and send nothing.
    own = None if world.replica else partition.state_of(pipeline.modules, job.model, job.optimizer)
    states = gather_values(own, world, world.first_replica, job.args.timeout_s)
    # Pipeline: the file equals a one-process run's: every recipe can resume from it, with any number of stages.
    return {"optimizer": partition.merge_states(states, job.model, job.optimizer)} if states else None


def train(args: PipelineOptions, world: World, stop: Stop) -> None:
    """Train with the given options; call it on all ranks."""
    choose_kernels(args)
    data = load_same_data(args, "pipeline", world, on_bad_image=stop.fail)
    grid = build_grid(args, world)
    run_on_all_ranks(lambda: args.check_microbatches(grid.replicas, len(data.train)), world)
    # DDP: every rank draws the same weights from --seed; a stage then moves its own layers to its device.
    model = run_on_all_ranks(lambda: build_sequence(args, data, world.device), world)
    check_same_weights(args, model.parameters(), model.buffers(), world)
    run_on_all_ranks(lambda: check_groups(model, args), world)
    pieces = grid.replicas * args.passes
    run_on_all_ranks(lambda: check_parts(model, args, pieces, data), world)
    parts = agree_on_parts(model, args, data, grid)

    def scaled_loss(output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss whose gradients, summed over microbatches and averaged by DDP, are the global mean's."""
        with autocast(args, output.device):
            return job.loss(output, targets.to(output.device)) * grid.replicas

    def forward_backward(inputs: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        """Accumulate the gradients of one pass; return this rank's part of the loss."""
        try:
            with world.watch("gradients", computes=True):
                return pipeline.forward_backward(inputs, targets, exchange=is_last) / grid.replicas
        except RuntimeError as error:
            if "modified by an inplace operation" not in f"{error} {error.__cause__}":
                raise
            what = "a layer changes in place, perhaps a buffer, what the backward of an earlier microbatch needs"
            fix = "let it make a new tensor, or use RECIPE=ddp"
            raise UserError(f"--model {args.model}: {what}; {fix}", on_one_rank=True) from error

    build = RankPipeline if args.split == "ranks" else InProcessPipeline
    with world.watch("model", computes=True):
        # Perhaps only one stage's ranks refuse; rank 0 prints why.
        pipeline: Pipeline = run_on_all_ranks(lambda: build(model, parts, args, data, grid, scaled_loss), world)
    # Pipeline: a replica's share of the batch reaches a stage in microbatches; a step's groups are in all of them.
    for module in pipeline.modules:
        group_batch_norm(module, args, args.global_batch_size // grid.replicas)
    # Pipeline: the optimizer holds all parameters, but steps only those with a gradient here: the stage's own.
    optimizer = build_optimizer(args, model, world)
    scaler = build_scaler(args, world.device)
    _, eval_batch_size = batch_sizes(args, data, grid)
    settings = args, "pipeline", data, world, model, optimizer, scaler, stop
    job = Job(*settings, pipeline.devices, grid.replicas, batch_parts=pieces, eval_batch_size=eval_batch_size)
    if args.deterministic and grid.replicas > 1:
        build_stage_buckets(pipeline, model, args, data, grid)
    technique = Technique(
        forward_backward,
        model,
        predict=partial(predict, pipeline, eval_batch_size, grid),
        update=partial(update, partition.stages_of(model, parts, grid.stages), grid),
        shard=lambda indices: shard(indices, grid.replica, grid.replicas),
        read_batches=partial(grid.read_batches, data.target),
        sync_buffers=partial(grid.sync_buffers, pipeline.modules),
        sum_statistics=grid.sum_over_replicas,
        gather_state=partial(gather_state, pipeline, grid, job),
    )
    # DDP: rank 0 reads the checkpoint and broadcasts it.
    # Pipeline: each stage takes the optimizer state of its own parameters, whichever recipe wrote it.
    begin_run(job, lambda content: partition.own_state(content, model, pipeline.modules))
    job.say("\n".join(f"{place}: {part}" for place, part in zip(pipeline.places, parts, strict=True)))
    train_epochs(job, technique)
    job.finish()


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the options in argv; call it on every rank."""
    args = options(argv)
    # DDP: a launcher (torchrun, srun, mpirun) gives each process its rank.
    train_as_rank("pipeline", args, train, devices_per_rank=args.stages // args.stages_in_ranks)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
