"""Initialise only this rank's rows of a model, with the numbers that one process draws for the whole.

Parameters are created without memory, on torch's meta device. A parameter's initialiser runs on a temporary whole
tensor of its shape, so that it draws the usual numbers; this rank's rows are kept and the rest is freed. Besides
its shards, a rank holds one whole tensor at a time. The idea comes from torchdistX's deferred initialisation.
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
    """A parameter is initialised so that this rank's rows cannot be computed alone."""


def rows(tensor: Tensor, index: int, count: int) -> Tensor:
    """Return a copy of the rows of shard `index` of `count`, cut as FSDP does: ceil(n / count) of n rows each."""
    parts = tensor.chunk(count)
    return parts[index].clone() if index < len(parts) else tensor.new_empty(0, *tensor.shape[1:])


class ShardedInit(TorchDispatchMode):
    """While a model is built, keep of each parameter's initial values only keep(whole), in memory of its own."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.keep = keep
        self.kept: dict[int, tuple[Tensor, torch.Size]] = {}
        """A parameter's kept part and its shape, by its storage; the tensor that it is made from has the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the meta device, on a temporary whole parameter, or on the rows that are kept."""
        kwargs = kwargs or {}
        # A tensor of size 0 stays real: copy.deepcopy() gives it another storage.
        if func is torch.ops.aten.empty.memory_format and math.prod(args[0]):
            return func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        target, others = (args[0], [*args[1:], *kwargs.values()]) if args else (None, [])
        if not isinstance(target, Tensor) or not is_meta(target):
            return func(*args, **kwargs)
        is_random, key = torch.Tag.nondeterministic_seeded in func.tags, storage(target)
        is_known = not any(isinstance(other, Tensor) and is_meta(other) for other in others)
        if not func._schema.is_mutable:
            if is_random:
                raise UnknownInitError(func)
        elif is_known and (is_random or func._overloadpacket in OVERWRITING):
            return self.initialise(func, target, *args[1:], **kwargs)
        elif key in self.kept:
            if not (is_known and is_whole(target)) or torch.Tag.pointwise not in func.tags:
                raise UnknownInitError(func)
            func(self.kept[key][0], *args[1:], **kwargs)
            return target
        return func(*args, **kwargs)

    def initialise(self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run an initialiser on a temporary tensor like the whole parameter; keep this rank's part of it.

        `tensor` may be a view of a parameter that has values, such as the row of an embedding's padding_idx.
        """
        if not is_meta(tensor):
            return function(tensor, *args, **kwargs)
        key, place = storage(tensor), (tensor.size(), tensor.stride(), tensor.storage_offset())
        if not is_whole(tensor) and key not in self.kept:
            raise UnknownInitError(function)
        own, shape = (None, tensor.shape) if is_whole(tensor) else self.kept[key]
        value = torch.zeros(shape, dtype=tensor.dtype)
        function(value.as_strided(*place), *args, **kwargs)
        kept = self.keep(value)
        if own is not None:
            is_new = torch.zeros(shape, dtype=torch.bool)
            is_new.as_strided(*place).fill_(True)
            kept = torch.where(self.keep(is_new), kept, own)
        self.kept[key] = kept, shape
        return tensor

    def __enter__(self) -> ShardedInit:
        """Enter the mode, and replace the functions of nn.init: some of them read the numbers that they draw."""
        names = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
        self.functions = {name: getattr(nn.init, name) for name in names}
        for name, function in self.functions.items():
            setattr(nn.init, name, functools.partial(self.initialise, function))
        self.no_checks = NoMetaChecks()
        self.no_checks.__enter__()
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        """Leave the mode, and restore the functions of nn.init."""
        super().__exit__(*reason)
        self.no_checks.__exit__(*reason)
        for name, function in self.functions.items():
            setattr(nn.init, name, function)


class NoMetaChecks(TorchFunctionMode):
    """Raises if code asks whether a tensor is on the meta device: it might initialise such tensors differently."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call func; raise UnknownInitError if it reads the is_meta of a meta tensor."""
        if func == IS_META and is_meta(args[0]):
            raise UnknownInitError("is_meta")
        return func(*args, **(kwargs or {}))


IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
OVERWRITING = (torch.ops.aten.fill_, torch.ops.aten.zero_, torch.ops.aten.copy_)


def storage(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage; tensors on the meta device have one too."""
    return tensor.untyped_storage()._cdata


def is_meta(tensor: Tensor) -> bool:
    """Return whether a tensor is on the meta device, and so has no memory."""
    return tensor.device.type == "meta"


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor spans its whole storage in order, and is not a view of a part."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def build_shards(
    build: Callable[[], nn.Module],
    index: int,
    count: int,
    record: Callable[[Tensor], Any] = lambda tensor: None,
) -> tuple[nn.Module, Shards]:
    """Return the model on the meta device, with real buffers, and this rank's rows of its parameters.

    `record` gets each whole tensor whose rows are kept. Raises UnknownInitError if the rows cannot be computed
    alone; build the model whole.
    """

    def keep(tensor: Tensor) -> Tensor:
        record(tensor)
        return rows(tensor, index, count)

    with ShardedInit(keep) as mode:
        model = build()
    shards: Shards = {}
    unknown = [name for name, buffer in model.named_buffers() if is_meta(buffer)]
    made_of_numbers: dict[Tensor, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if not is_meta(parameter) and not is_whole(parameter):  # perhaps two in the same memory
            unknown.append(name)
        elif not is_meta(parameter):  # made from a real tensor, such as 0.02 * torch.randn(...)
            shards[name] = mode.keep(parameter.detach())
            made_of_numbers[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            vars(made_of_numbers[parameter]).update(vars(parameter))
        elif storage(parameter) in mode.kept and is_whole(parameter):
            shards[name], _ = mode.kept[storage(parameter)]
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
    """Allocate a model that was sharded on the meta device, and copy in its shards and its real buffers."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    model.to_empty(device=device)
    for module, own in buffers:
        module._buffers.update(own)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        parameter.to_local().detach().copy_(shards[name])
