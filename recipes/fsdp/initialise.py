"""Initialise only this rank's rows of a model, with the numbers that one process draws for the whole.

Parameters are made without memory (on torch's meta device). What initialises one is done to a whole tensor of its
shape, which draws from the seed as ever; this rank's rows of it are kept and the rest is freed. Beside its shards,
a rank holds one tensor at a time. The idea is that of torchdistX's deferred initialisation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Shards = dict[str, Tensor]
"""This rank's rows of each parameter, by name."""


class UnknownInitError(Exception):
    """A parameter is initialised in a way of which this rank's rows alone cannot be computed."""


def rows(tensor: Tensor, index: int, count: int) -> Tensor:
    """Return a copy of the rows of shard `index` of `count`, as FSDP cuts: of n rows, ceil(n / count) each."""
    parts = tensor.chunk(count)
    return parts[index].clone() if index < len(parts) else tensor.new_empty(0, *tensor.shape[1:])


class ShardedInit(TorchDispatchMode):
    """While a model is built, keep only a part of what its parameters are initialised with.

    Args:
        keep: returns the part of a whole parameter that is kept, in memory of its own.
    """

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.keep = keep
        self.kept: dict[int, Tensor] = {}
        """By the storage of the parameter, which is what a Parameter shares with the tensor it is made of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation without memory, on a whole parameter, or on the rows that are kept."""
        kwargs = kwargs or {}
        # One of size 0 stays real: copy.deepcopy() gives it another storage.
        if func is torch.ops.aten.empty.memory_format and math.prod(args[0]):
            return func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        target, others = (args[0], [*args[1:], *kwargs.values()]) if args else (None, [])
        if not isinstance(target, Tensor) or not is_meta(target):
            return func(*args, **kwargs)
        is_random, key = torch.Tag.nondeterministic_seeded in func.tags, storage(target)
        is_known = not any(isinstance(other, Tensor) and is_meta(other) for other in others) and is_whole(target)
        if not func._schema.is_mutable:
            if is_random:
                raise UnknownInitError(func)
        elif is_known and (is_random or func._overloadpacket in OVERWRITING):
            return self.initialise(func, target, *args[1:], **kwargs)
        elif key in self.kept:
            if not is_known or torch.Tag.pointwise not in func.tags:
                raise UnknownInitError(func)
            func(self.kept[key], *args[1:], **kwargs)
            return target
        return func(*args, **kwargs)

    def initialise(self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Let a function overwrite a whole tensor of the tensor's shape; keep this rank's part of it."""
        if not is_meta(tensor):
            return function(tensor, *args, **kwargs)
        if not is_whole(tensor):
            raise UnknownInitError(function)
        value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        function(value, *args, **kwargs)
        self.kept[storage(tensor)] = self.keep(value)
        return tensor

    def __enter__(self) -> ShardedInit:
        """Start, and replace the functions of nn.init: some read the numbers that they draw."""
        names = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
        self.functions = {name: getattr(nn.init, name) for name in names}
        for name, function in self.functions.items():
            setattr(nn.init, name, functools.partial(self.initialise, function))
        self.no_checks = NoMetaChecks()
        self.no_checks.__enter__()
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        """Leave nn.init as it was."""
        super().__exit__(*reason)
        self.no_checks.__exit__(*reason)
        for name, function in self.functions.items():
            setattr(nn.init, name, function)


class NoMetaChecks(TorchFunctionMode):
    """Raises where code asks whether a tensor is on the meta device: it would then initialise it otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call func; raise for Tensor.is_meta of a tensor that is."""
        if func == IS_META and is_meta(args[0]):
            raise UnknownInitError("is_meta")
        return func(*args, **(kwargs or {}))


IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


OVERWRITING = (torch.ops.aten.fill_, torch.ops.aten.zero_, torch.ops.aten.copy_)


def storage(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor, also of one that has none."""
    return tensor.untyped_storage()._cdata


def is_meta(tensor: Tensor) -> bool:
    """Whether a tensor has no memory."""
    return tensor.device.type == "meta"


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, in order, and no view of a part."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def build_shards(build: Callable[[], nn.Module], index: int, count: int) -> tuple[nn.Module, Shards]:
    """Return the model on the meta device, with real buffers, and this rank's rows of its parameters.

    Raises:
        UnknownInitError: the model has to be built whole.
    """
    with ShardedInit(lambda tensor: rows(tensor, index, count)) as mode:
        model = build()
    shards: Shards = {}
    unknown = [name for name, buffer in model.named_buffers() if is_meta(buffer)]
    made_of_numbers: dict[Tensor, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if not is_meta(parameter):  # such as 0.02 * torch.randn(...)
            shards[name] = mode.keep(parameter.detach())
            made_of_numbers[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        elif storage(parameter) in mode.kept and is_whole(parameter):
            shards[name] = mode.kept[storage(parameter)]
        else:
            unknown.append(name)
    if unknown:
        raise UnknownInitError(unknown[0])
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None and own in made_of_numbers:
                module._parameters[name] = made_of_numbers[own]
    return model, shards


def materialise(model: nn.Module, shards: Shards, device: torch.device) -> None:
    """Give a model that was sharded on the meta device its shards, in memory of the device."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    model.to_empty(device=device)
    for module, own in buffers:
        module._buffers.update(own)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        parameter.to_local().detach().copy_(shards[name])
