"""Cut a model that is a sequence of layers into parts of about equal cost, and a checkpoint along with it."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recipes.common.errors import UserError
from recipes.common.models.layers import layers
from recipes.common.optim import autocast, optimizer_state
from recipes.common.options import Options
from recipes.common.world.peers import Peers
from recipes.common.world.tree import map_tree

REPEATS = 3
"""Runs of each layer when its cost is measured; the fastest counts."""

State = tuple[dict[str, Any], dict[int, Any]]
"""Weights by name, and optimizer state by the parameter's index in model.parameters()."""


@dataclass(frozen=True)
class Part:
    """A run of consecutive layers, and the shape and dtype of its output."""

    names: list[str]
    """Names of the layers, as layers() gives them."""
    num_parameters: int
    cost_share: float
    """Share of the whole model's cost; 1 / parts would be a perfect balance."""
    output_shape: tuple[int, ...]
    """Shape of one sample's output, without the batch dimension."""
    output_dtype: torch.dtype

    def __str__(self) -> str:
        span = self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]}"
        return f"{span}  ({self.num_parameters:,} parameters, {self.cost_share:.0%} of the cost)"


def balanced_cuts(costs: Sequence[float], parts: int) -> list[int]:
    """Cut a sequence into contiguous parts so that the largest part's cost is as small as possible.

    Returns:
        parts + 1 bounds: part k is costs[bounds[k]:bounds[k + 1]], and none is empty.
    """
    assert 1 <= parts <= len(costs)
    upto = list(itertools.accumulate(costs, initial=0.0))
    # best[end]: the smallest possible cost of the largest of k parts of the first `end` costs, and their bounds.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for k in range(1, parts + 1):
        best = {
            end: min(
                (max(largest, upto[end] - upto[cut]), [*bounds, end])
                for cut, (largest, bounds) in best.items()
                if cut < end
            )
            for end in range(k, len(costs) + 1)
        }
    return best[len(costs)][1]


def plan_parts(model: nn.Module, parts: int, balance: str, args: Options, sample: Tensor) -> list[Part]:
    """Cut a model into parts that balance the number of parameters or the time measured on the sample's device.

    Each part begins with a layer that gets a row for each sample and that trains, so that the part has a gradient
    to compute and to send back; frozen layers stay with the layers before them. Measured times vary, so one
    process plans the parts and broadcasts them.

    Raises UserError if the model is not a sequence of layers, or has too few of them.
    """
    sequence = layers(model)
    sizes = [sum(p.numel() for p in module.parameters()) for _, module in sequence]
    trains = [any(p.requires_grad for p in module.parameters()) for _, module in sequence]
    seconds, outputs = measure([module for _, module in sequence], args, sample, timed=balance == "cost")
    # A stage expects a row for each sample: no cut where layers work on (B * T, C).
    has_rows = [True, *(output.ndim > 0 and len(output) == len(sample) for output in outputs)]
    starts = [0, *[i for i, has_any in enumerate(trains) if has_any and any(trains[:i]) and has_rows[i]]]
    if len(starts) < parts:
        what = f"--model {args.model} cannot be cut into {parts} parts"
        why = "each from a layer that trains and gets a row for each sample"
        raise UserError(f"{what}, {why}; use at most {len(starts)}")
    costs = seconds if balance == "cost" else [float(size) for size in sizes]
    ends = [*starts[1:], len(sequence)]
    cuts = balanced_cuts([sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)], parts)
    bounds = [*(starts[cut] for cut in cuts[:-1]), len(sequence)]
    return [
        Part(
            names=[name for name, _ in sequence[a:b]],
            num_parameters=sum(sizes[a:b]),
            cost_share=sum(costs[a:b]) / sum(costs),
            output_shape=tuple(outputs[b - 1].shape[1:]),
            output_dtype=outputs[b - 1].dtype,
        )
        for a, b in itertools.pairwise(bounds)
    ]


def check_repeated(model: nn.Module, parts: Sequence[Part], args: Options, has_devices: bool) -> None:
    """Raise UserError if a layer occurs in several parts, and that does not work.

    The gradients of its parameters are summed, but each part would have its own buffers. `has_devices`: whether
    one process has the parts on several devices; a layer can be on only one of them.
    """
    named = dict(layers(model))
    places: dict[nn.Module, tuple[int, str]] = {}
    for number, name in ((number, name) for number, part in enumerate(parts) for name in part.names):
        for module in named[name].modules():
            place = places.setdefault(module, (number, name))
            if place[0] == number:
                continue
            what = f"--model {args.model}: {place[1]} and {name} are one layer in two parts"
            if any(True for _ in module.buffers()):
                fix = "make two layers, or use another recipe"
                raise UserError(f"{what}, whose buffers, such as running statistics, would differ; {fix}")
            if has_devices and any(True for _ in module.parameters()):
                raise UserError(f"{what}, on two devices; make two layers, or drop --split in-process")


def measure(
    sequence: Sequence[nn.Module], args: Options, sample: Tensor, timed: bool
) -> tuple[list[float], list[Tensor]]:
    """Run the layers one after another; return the seconds that each took, with backward if timed, and its output.

    A copy of one layer at a time runs on the device, so the model does not change and need not fit there as a
    whole. The outputs are on the meta device: they have only a shape and a dtype.

    Raises UserError if a layer does not return a tensor.
    """
    fastest, outputs = [], []
    for module in sequence:
        layer = copy.deepcopy(module).to(sample.device).eval()  # eval: no dropout, and one sample is enough
        seconds = []
        for _ in range(REPEATS if timed else 1):
            # Tokens have no gradient. The second clone() is no leaf, so a layer may change it in place.
            given = sample.clone().requires_grad_(timed and sample.is_floating_point()).clone()
            _synchronize(sample.device)
            begin = time.perf_counter()
            with torch.set_grad_enabled(timed), autocast(args, sample.device):
                output = layer(given)
            if not isinstance(output, Tensor):
                what = f"--model {args.model}: its layer {type(module).__name__} returns a {type(output).__name__}"
                fix = "make one module of it and of the layer that follows it"
                raise UserError(f"{what}, and a pipeline sends one tensor from a layer to the next; {fix}")
            if timed and output.requires_grad:  # false for a frozen layer on tokens
                output.float().sum().backward()
            _synchronize(sample.device)
            seconds.append(time.perf_counter() - begin)
        sample = output.detach()
        fastest.append(min(seconds))
        outputs.append(sample.to("meta"))
    return fastest, outputs


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
    """Return a tensor in row-major order; torch 2.11 compares strides, even those of dimensions of size 1."""
    return tensor.reshape(-1).view(tensor.shape)


def stages_of(model: nn.Module, parts: Sequence[Part], stages: int) -> dict[nn.Parameter, set[int]]:
    """Return, for each parameter, the stages whose layers have it: several if layers share a matrix."""
    named, owners = dict(layers(model)), {parameter: set[int]() for parameter in model.parameters()}
    for number, part in enumerate(parts):
        for parameter in (p for name in part.names for p in named[name].parameters()):
            owners[parameter].add(number % stages)
    return owners


def check_groups_agree(args: Options, optimizer: torch.optim.Optimizer, peers: Peers) -> None:
    """Raise UserError if a step has left stages other values in the optimizer's groups; call it on all ranks.

    Each stage has only its own gradients. An optimizer that computes one value from all would need the others'.
    """
    own = [
        {name: str(tree_map_only(Tensor, Tensor.tolist, x)) for name, x in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    # Pipeline: each rank sends its groups' values, some hundred bytes, once.
    with peers.watch("agreement"):
        first, *others = peers.gather_objects(own)
    for group, there in itertools.chain.from_iterable(zip(first, each, strict=True) for each in others):
        if name := next((name for name in {**group, **there} if group.get(name) != there.get(name)), None):
            what = f"--optimizer {args.optimizer}: a step leaves another {name} of a group on each stage"
            raise UserError(f"{what}, which has only its own gradients; use another recipe, such as ddp or fsdp")


def state_of(modules: Sequence[PartModule], model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return these parts' weights, and their state of an optimizer that steps only them, on the CPU."""
    named = [pair for module in modules for pair in module.named]
    weights = {f"{name}.{key}": value for name, layer in named for key, value in layer.state_dict().items()}
    # The user's own optimizer may keep something for parameters without a gradient, which other stages step.
    content = own_state({"optimizer": optimizer_state(optimizer)}, model, modules)
    own = weights, content["optimizer"]["state"]
    return map_tree(own, torch.is_tensor, lambda tensor: tensor.detach().cpu())


def merge_states(states: Iterable[State], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load all stages' weights into the whole model; return the whole optimizer's state dict."""
    merged: dict[int, Any] = {}
    for weights, state in states:
        model.load_state_dict(weights, strict=False)
        merged |= state
    return {**optimizer_state(optimizer), "state": dict(sorted(merged.items()))}


def own_state(content: dict[str, Any], model: nn.Module, modules: Iterable[nn.Module]) -> dict[str, Any]:
    """Return a checkpoint's content with only the optimizer state of these modules' parameters."""
    own = {parameter for module in modules for parameter in module.parameters()}
    places = {place for place, parameter in enumerate(model.parameters()) if parameter in own}
    state = {place: values for place, values in content["optimizer"]["state"].items() if place in places}
    return {**content, "optimizer": {**content["optimizer"], "state": state}}
