"""Cut a model that is a sequence of layers into parts of about equal cost, and a checkpoint along with it.

How the parts then work together (processes, devices, what crosses between them) is the recipe's matter.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.models.models import layers
from recipes.common.optim import autocast, optimizer_state
from recipes.common.options import Options, check_divides
from recipes.common.world.agreement import run_on_all_ranks
from recipes.pipeline.grid import Grid
from recipes.pipeline.options import PARTS_PER_STAGE, PipelineOptions

Loss = Callable[[Tensor, Tensor], Tensor]
"""The loss of outputs and targets, scaled as its gradients need it."""

REPEATS = 3
"""Runs of each layer when its cost is measured; the fastest counts."""


@dataclass(frozen=True)
class Part:
    """A run of consecutive layers, and what it hands to the next one."""

    names: list[str]
    """The layers, as layers() calls them."""
    num_parameters: int
    cost_share: float
    """Of the whole model's cost; 1 / parts would be a perfect balance."""
    output_shape: tuple[int, ...]
    """Of one sample, without the batch dimension."""
    output_dtype: torch.dtype

    def __str__(self) -> str:
        span = self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]}"
        return f"{span}  ({self.num_parameters:,} parameters, {self.cost_share:.0%} of the cost)"


@dataclass(frozen=True)
class _Measured:
    seconds: float
    output_shape: tuple[int, ...]
    output_dtype: torch.dtype


def check_microbatches(args: Options, num_microbatches: int, replicas: int, num_train: int) -> None:
    """Refuse a global batch that does not divide into equal microbatches.

    Raises:
        UserError: with the nearest sizes that do.
    """
    pieces = replicas * args.accumulate_steps * num_microbatches
    shares = f"{replicas} replicas x {args.accumulate_steps} passes x {num_microbatches} microbatches"
    if args.batchnorm_group:
        shares += f" x groups of {args.batchnorm_group}"
    check_divides(args, pieces * (args.batchnorm_group or 1), shares, num_train)


def balanced_cuts(costs: Sequence[float], parts: int) -> list[int]:
    """Return where to cut a sequence into contiguous parts so that the largest part's cost is as small as can be.

    Returns:
        parts + 1 bounds: part k is costs[bounds[k]:bounds[k + 1]], and none is empty.
    """
    assert 1 <= parts <= len(costs)
    upto = list(itertools.accumulate(costs, initial=0.0))
    # best[k][end]: the smallest possible largest part, and its last cut, of the first `end` costs in k parts.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for k in range(1, parts + 1):
        row = {}
        for end in range(k, len(costs) + 1):
            choices = (
                (max(best[k - 1][cut][0], upto[end] - upto[cut]), cut)
                for cut in range(k - 1, end)
                if cut in best[k - 1]
            )
            row[end] = min(choices)
        best.append(row)
    bounds = [len(costs)]
    for k in range(parts, 0, -1):
        bounds.insert(0, best[k][bounds[0]][1])
    return bounds


def plan_parts(model: nn.Module, parts: int, balance: str, args: Options, sample: Tensor) -> list[Part]:
    """Cut a model into parts: by `balance`, the number of parameters or the cost measured on the sample's device.

    A cut falls only before a layer that trains, so that every part has a gradient to compute and to send back;
    frozen layers (requires_grad is False) stay with those before them. The measured cost varies from call to
    call: one process plans, and broadcasts the parts.

    Raises:
        UserError: the model is no sequence of layers, or has too few of them.
    """
    sequence = layers(model)
    sizes = [sum(p.numel() for p in module.parameters()) for _, module in sequence]
    trains = [any(p.requires_grad for p in module.parameters()) for _, module in sequence]
    starts = [0, *[i for i, has_any in enumerate(trains) if has_any and any(trains[:i])]]
    if len(starts) < parts:
        raise UserError(
            f"--model {args.model} has {len(starts)} layers with parameters to train, too few for {parts} parts; "
            f"use at most {len(starts)}"
        )
    measured = measure([module for _, module in sequence], args, sample, timed=balance == "cost")
    costs = [m.seconds for m in measured] if balance == "cost" else [float(size) for size in sizes]
    ends = [*starts[1:], len(sequence)]
    cuts = balanced_cuts([sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)], parts)
    bounds = [*(starts[cut] for cut in cuts[:-1]), len(sequence)]
    return [
        Part(
            names=[name for name, _ in sequence[a:b]],
            num_parameters=sum(sizes[a:b]),
            cost_share=sum(costs[a:b]) / sum(costs),
            output_shape=measured[b - 1].output_shape,
            output_dtype=measured[b - 1].output_dtype,
        )
        for a, b in itertools.pairwise(bounds)
    ]


def agree_on_parts(model: nn.Module, args: PipelineOptions, data: Data, world: Grid) -> list[Part]:
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


def describe(parts: list[Part], args: PipelineOptions, world: Grid) -> str:
    """Return which layers lie where, a line each."""
    stages = [f"stage {number % world.stages}" for number in range(len(parts))]
    owners = stages if args.split == "ranks" else [str(device) for device in world.devices]
    return "\n".join(f"{owner}: {part}" for owner, part in zip(owners, parts, strict=True))


def measure(sequence: Sequence[nn.Module], args: Options, sample: Tensor, timed: bool) -> list[_Measured]:
    """Run the layers one after another: each one's time forward and backward (if timed), and its output.

    A copy of each layer runs, alone on the device: the model neither changes nor has to fit there as a whole.
    """
    results = []
    for module in sequence:
        layer = copy.deepcopy(module).to(sample.device).eval()  # eval: no dropout, and one sample is enough
        seconds = []
        for _ in range(REPEATS if timed else 1):
            # Tokens have no gradient. No leaf: a layer may work in place.
            given = sample.clone().requires_grad_(timed and sample.is_floating_point()).clone()
            _synchronize(sample.device)
            begin = time.perf_counter()
            with torch.set_grad_enabled(timed), autocast(args, sample.device):
                output = layer(given)
            if timed and output.requires_grad:  # not that of a frozen layer on tokens
                output.float().sum().backward()
            _synchronize(sample.device)
            seconds.append(time.perf_counter() - begin)
        sample = output.detach()
        results.append(_Measured(min(seconds), tuple(sample.shape[1:]), sample.dtype))
    return results


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PartModule(nn.Module):
    """The layers of a part on their device, in mixed precision; the layers stay shared with the whole model."""

    def __init__(self, model: nn.Module, part: Part, args: Options, device: torch.device) -> None:
        super().__init__()
        named = dict(layers(model))
        self.named = [(name, named[name].to(device)) for name in part.names]
        self.sequence = nn.Sequential(*(module for _, module in self.named))
        self.args, self.device = args, device
        self.memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
        if args.compile:
            self.compile(mode=args.compile_mode)

    def forward(self, data: Tensor) -> Tensor:
        """Apply the layers in order; the output is in row-major order, ready to be sent."""
        if data.ndim == 4:
            data = data.contiguous(memory_format=self.memory_format)
        with autocast(self.args, self.device):
            return row_major(self.sequence(data))


def row_major(tensor: Tensor) -> Tensor:
    """Return a tensor in row-major order; torch 2.11 compares strides, also those of dimensions of size 1."""
    return tensor.reshape(-1).view(tensor.shape)


def tied_parameters(model: nn.Module, parts: Sequence[Part]) -> list[tuple[nn.Parameter, list[int]]]:
    """Return the parameters that several parts have in common, each with the numbers of these parts."""
    named, owners = dict(layers(model)), {parameter: list[int]() for parameter in model.parameters()}
    for number, part in enumerate(parts):
        for parameter in {parameter for name in part.names for parameter in named[name].parameters()}:
            owners[parameter].append(number)
    return [(parameter, numbers) for parameter, numbers in owners.items() if len(numbers) > 1]


ShareState = tuple[dict[str, Tensor], list[int], dict[str, Any]]
"""Weights under the whole model's names, places of the parameters in model.parameters(), optimizer state dict."""


class Share:
    """What one process holds of a model: some parts, and the optimizer's state for their parameters.

    In a checkpoint, weights go by name and the optimizer's state by the parameter's place in model.parameters().
    """

    def __init__(self, model: nn.Module, modules: list[PartModule]) -> None:
        self.modules = modules
        self.named = [pair for module in modules for pair in module.named]
        everything = list(model.parameters())
        # By identity: a matrix that two layers have in common, as GPT's first and last, is one parameter.
        own = {parameter for _, module in self.named for parameter in module.parameters()}
        self.places = [place for place, parameter in enumerate(everything) if parameter in own]
        self.parameters = [everything[place] for place in self.places]
        self.num_all = len(everything)

    def state(self, optimizer: torch.optim.Optimizer) -> ShareState:
        """Return this share of a checkpoint, on the CPU; the optimizer is that of self.parameters."""
        weights = {
            f"{name}.{key}": _on_cpu(value)
            for name, module in self.named
            for key, value in module.state_dict().items()
        }
        content = optimizer_state(optimizer)
        for number, values in content["state"].items():
            content["state"][number] = {key: _on_cpu(value) for key, value in values.items()}
        return weights, self.places, content

    def of_checkpoint(self, content: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return a checkpoint's content with this share of the optimizer's state in place of the whole.

        Raises:
            UserError: it was written for another number of parameters.
        """
        if content is None:
            return None
        whole = content["optimizer"]
        group = whole["param_groups"][0]
        if len(group["params"]) != self.num_all:
            raise UserError(
                f"the checkpoint does not fit this run: its optimizer has {len(group['params'])} parameters, "
                f"the model {self.num_all}"
            )
        state = {i: whole["state"][place] for i, place in enumerate(self.places) if place in whole["state"]}
        group = {**group, "params": list(range(len(self.places)))}
        return {**content, "optimizer": {"state": state, "param_groups": [group]}}


def _on_cpu(value: Any) -> Any:
    """Return a tensor on the CPU, and what is none, as get_extra_state() may return it, as it is."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def merge_shares(model: nn.Module, shares: Sequence[ShareState]) -> dict[str, Any]:
    """Put the shares' weights into the whole model and return the whole optimizer's state dict."""
    state: dict[int, Any] = {}
    for weights, places, content in shares:
        model.load_state_dict(weights, strict=False)
        state.update({places[number]: values for number, values in content["state"].items()})
    group = shares[0][2]["param_groups"][0]
    count = len({place for _, places, _ in shares for place in places})  # two may hold the same one
    return {"state": dict(sorted(state.items())), "param_groups": [{**group, "params": list(range(count))}]}
