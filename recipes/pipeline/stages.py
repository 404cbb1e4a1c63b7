"""The two ways to run a model in parts: a stage in each rank, or all parts in one process."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from recipes.common.data import EVAL_BATCH_SIZE, Data
from recipes.common.parallel.buckets import check_complete, wrap_in_ddp
from recipes.pipeline.grid import Grid, PipelineOptions
from recipes.pipeline.partition import Part, PartModule, row_major

# entry.py reports a lost neighbour in one line; torch would also log the whole interleaved schedule.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps (outputs, targets) to the loss, scaled as scaled_loss() in train.py does."""


def wrap(module: nn.Module, args: PipelineOptions, world: Grid) -> DistributedDataParallel:
    """Wrap a part of the model so that its gradients are averaged over the replicas; call it on all replicas."""
    # DDP: construction broadcasts replica 0's parameters within this stage's column of the mesh. The last backward
    # pass of a step then averages the gradients there (a ring all-reduce: 2 (N-1)/N of their bytes per rank).
    # No device_ids: the part is on its device already, in-process even on several.
    return wrap_in_ddp(module, args, process_group=world.mesh.get_group("dp"))


def batch_sizes(args: PipelineOptions, data: Data, world: Grid) -> tuple[int, int]:
    """Return a replica's samples per pass in training and in evaluation, both multiples of the microbatches."""
    count, share = args.num_microbatches, math.ceil(len(data.test) / world.replicas)
    per_pass = args.global_batch_size // world.replicas // args.accumulate_steps
    return per_pass, count * math.ceil(min(EVAL_BATCH_SIZE, share, per_pass) / count)


class RankPipeline:
    """--split ranks: this process's stage of a pipeline, driven by one of torch's schedules.

    Each stage sends a microbatch's activations to the next stage and their gradient to the previous one. With m
    microbatches, each of p stages works in m of m + p - 1 time slots: the bubble is (p - 1) / (m + p - 1).
    """

    def __init__(
        self, model: nn.Module, parts: list[Part], args: PipelineOptions, data: Data, world: Grid, loss: Loss
    ) -> None:
        self.args, self.world = args, world
        self.places = [f"stage {number % world.stages}" for number in range(len(parts))]
        self.numbers, self.devices = range(world.stage, len(parts), world.stages), [world.device]
        self.modules = [PartModule(model, parts[i], args, world.device) for i in self.numbers]
        for module in self.modules[world.stage == 0 :]:  # not the first part
            # The tensor received is a leaf, which autograd forbids a layer to change in place: pass on a copy.
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
        self.ddp = [wrap(module, args, world) if world.replicas > 1 else module for module in self.modules]
        self.shapes = [data.input, *((part.output_shape, part.output_dtype) for part in parts)]
        batch_size, eval_batch_size = batch_sizes(args, data, world)
        self.stages, self.schedule = self.connect(batch_size, loss)
        # Pipeline: evaluation has its own buffers and no loss, so its schedule only runs forward.
        _, self.forward_schedule = self.connect(eval_batch_size, None)

    def connect(self, batch_size: int, loss: Loss | None) -> tuple[list[PipelineStage], Any]:
        """Return this process's stages for batches of this size, and the schedule that drives them."""
        size = batch_size // self.args.num_microbatches

        def like(number: int) -> Tensor:
            """Return a tensor without memory that has the shape and dtype of part `number`'s input."""
            shape, dtype = self.shapes[number]
            needs_grad = loss is not None and number > 0
            return torch.empty(size, *shape, dtype=dtype, device="meta", requires_grad=needs_grad)

        # Pipeline: stages that know the shapes need no extra pass to find them, and no exchange of them.
        stages = [
            PipelineStage(
                module,
                number,
                num_stages=len(self.places),
                device=self.world.device,
                input_args=like(number),
                output_args=like(number + 1),
                group=self.world.mesh.get_group("pp"),
            )
            for number, module in zip(self.numbers, self.modules, strict=True)
        ]
        # Pipeline: the loss is already divided by the global batch size; the schedule must not divide it again.
        held = stages if self.args.schedule == "interleaved" else stages[0]
        make = SCHEDULES[self.args.schedule]
        return stages, make(held, self.args.num_microbatches, loss_fn=loss, scale_grads=False)

    def forward_backward(self, inputs: Tensor, targets: Tensor, exchange: bool) -> Tensor:
        """Run one pass of all stages; return the loss, which is 0 on all but the last stage."""
        for stage, module, ddp in zip(self.stages, self.modules, self.ddp, strict=True):
            # DDP: gradients are exchanged only in the last of the accumulated passes; the others bypass DDP.
            stage.submod = ddp if exchange else module
        losses: list[Tensor] = []
        # Pipeline: the first stage takes the inputs, activations and their gradients cross between neighbours (a
        # microbatch's output_shape each way), and the last stage takes the targets.
        # return_outputs: the last stage would keep the outputs of all microbatches, and then copy them.
        self.schedule.step(*self.given(inputs), target=targets, losses=losses, return_outputs=False)
        for ddp in self.ddp if exchange else ():
            if isinstance(ddp, DistributedDataParallel):  # else there is one replica
                check_complete(ddp)
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.world.device))

    def output(self, inputs: Tensor) -> Tensor | None:
        """Run one forward pass of all stages; return the model's output on the last one."""
        return self.forward_schedule.step(*self.given(inputs))

    def given(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs for a schedule on the first stage, and nothing on the others."""
        return (row_major(inputs),) if self.world.stage == 0 else ()


class SplitModel(nn.Module):
    """The parts of a model, on the devices of one process."""

    def __init__(self, parts: list[PartModule], num_microbatches: int) -> None:
        super().__init__()
        self.parts, self.num_microbatches = nn.ModuleList(parts), num_microbatches

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs on the first device to the model's output on the last."""
        outputs = []
        # Pipeline: kernels are queued, not waited for: while one device works on a microbatch, the previous device
        # already works on the next one.
        for data in inputs.tensor_split(self.num_microbatches):
            for part in self.parts:
                data = part(data.to(cast(PartModule, part).device, non_blocking=True))
            outputs.append(data)
        return torch.cat(outputs)


class InProcessPipeline:
    """--split in-process: each process has the whole model, with each part on its own device."""

    def __init__(
        self, model: nn.Module, parts: list[Part], args: PipelineOptions, data: Data, world: Grid, loss: Loss
    ) -> None:
        self.world, self.loss, first = world, loss, world.device.index
        # Pipeline: part i is on this process's i-th device; on a CPU, which has no index, all are on the same one.
        devices = [world.device if first is None else torch.device("cuda", first + i) for i in range(len(parts))]
        self.places, self.devices = [str(device) for device in devices], devices
        self.modules = [PartModule(model, part, args, device) for part, device in zip(parts, devices, strict=True)]
        self.split = SplitModel(self.modules, args.num_microbatches)
        self.ddp = wrap(self.split, args, world)

    def forward_backward(self, inputs: Tensor, targets: Tensor, exchange: bool) -> Tensor:
        """Run one pass; return the loss."""
        # DDP: gradients are exchanged only in the last of the accumulated passes.
        with contextlib.nullcontext() if exchange else self.ddp.no_sync():
            loss = self.loss(self.ddp(inputs), targets)
            loss.backward()
        if exchange:
            check_complete(self.ddp)
        return loss.detach().to(self.world.device)

    def output(self, inputs: Tensor) -> Tensor | None:
        """Run one forward pass; return the model's output."""
        return self.split(inputs).to(self.world.device)
