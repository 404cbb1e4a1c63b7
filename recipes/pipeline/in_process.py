"""--split in-process: a model whose parts lie on several devices of one process."""

from __future__ import annotations

import contextlib
from typing import cast

import torch
from torch import Tensor, nn

from recipes.common.data import Data
from recipes.pipeline.grid import Grid, wrap
from recipes.pipeline.options import PipelineOptions
from recipes.pipeline.partition import Loss, Part, PartModule, Share


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
