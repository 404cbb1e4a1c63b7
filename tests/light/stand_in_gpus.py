"""GPUs made of main memory: with STAND_IN_GPUS=4, each process that has this folder in PYTHONPATH sees four.

A tensor on one of them is a CPU tensor whose storage is marked with the device. Python code sees that device;
torch's C++ code sees the CPU and computes there, except that operators refuse tensors on several devices, as they
do with GPUs. NCCL is Gloo here, and refuses CPU tensors. So this shows that Python code puts each tensor where it
is needed, and uses names of torch.cuda and torch.distributed that exist. It shows nothing of kernels, rounding,
random numbers, streams, graphs, memory or speed, and nothing else of NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import TensorBase
from torch.distributed import distributed_c10d
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
COPIES = ("copy_", "_to_copy", "_foreach_copy_", "set_")
"""Operators of aten whose tensors may be on two devices."""
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter_tensor"),
    *("irecv", "isend", "recv", "send"),
)
"""Functions of torch.distributed that NCCL offers for tensors on GPUs alone."""
INDEXING = ("index", "index_put_", "_index_put_impl_", "_unsafe_index")
"""Operators of aten whose indices may be on the CPU when their tensor is on a GPU."""


class Thread(threading.local):
    """What each thread has for itself."""

    current = 0
    """Its current device."""
    is_moving = False
    """Whether move() called the running _to_copy(). C++ code, which knows only the CPU, means no device."""


thread = Thread()
backends: dict[Any, str | None] = {}
"""The backend that each process group was asked for. None: the default group."""


def count() -> int:
    """Return how many stand-ins are visible."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return int(os.environ["STAND_IN_GPUS"]) if names is None else len(names.replace(",", " ").split())


def with_index(device: Any) -> torch.device:
    """Return a device; a GPU without a number is the current one."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        return found
    index = thread.current if found.index is None else found.index
    if index >= count():
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
    return torch.device("cuda", index)


def place(tensor: Tensor) -> torch.device:
    """Return the device that a tensor is on, as Python code sees it."""
    device = TensorBase.device.__get__(tensor)
    for part in ("_local_tensor", "elem"):  # of DTensor, AsyncCollectiveTensor
        if hasattr(tensor, part):
            return place(getattr(tensor, part))
    if device != CPU or tensor.layout != torch.strided:
        return device
    return getattr(TensorBase.untyped_storage(tensor), "stand_in", CPU)


def mark(tensor: Tensor, device: torch.device) -> Tensor:
    """Put a tensor on a device, with all that share its storage."""
    if TensorBase.device.__get__(tensor) == CPU:
        TensorBase.untyped_storage(tensor).stand_in = device
    return tensor


class Devices(TorchDispatchMode):
    """Gives each result its device, and refuses tensors on several."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented  # their own parts come here next
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_meta]
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        if name == "_to_copy" and not thread.is_moving:
            wanted = None
        if wanted is None and name in COPIES:
            wanted = place(args[0] if isinstance(args[0], Tensor) else args[0][0])
        elif wanted is None:
            wanted = one_device(name, args, given)
        result = func(*args, **kwargs)
        if (device := with_index(wanted)).type == "cuda":
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and not any(leaf is tensor for tensor in given):
                    mark(leaf, device)
        return result


def one_device(name: str, args: Sequence[Any], given: list[Tensor]) -> torch.device:
    """Return the device of an operator's tensors; raises RuntimeError if there are several, as torch does.

    A number on the CPU may come with tensors on a GPU, but not receive the result.
    """
    written = args[0] if name.endswith("_") else None
    if name in INDEXING and place(args[0]) != CPU:
        given = [
            tensor for tensor in given if place(tensor) != CPU or all(tensor is not index for index in args[1])
        ]
    needs_all = name in ("cat", "stack") or name.startswith("_fused_")
    found = {
        place(tensor) for tensor in given if tensor.dim() or needs_all or tensor is written or place(tensor) != CPU
    }
    on_gpus = found - {CPU}
    if len(found) == 2 and len(on_gpus) == 1 and is_called_by_cpp():
        for tensor in given:
            mark(tensor, *on_gpus)
    elif len(found) > 1:
        shapes = ", ".join(f"{tuple(tensor.shape)} on {place(tensor)}" for tensor in given)
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {shapes}")
    return next(iter(on_gpus or found), CPU)


def is_called_by_cpp() -> bool:
    """Tell whether C++ code of autograd or DDP called the operator: there, new tensors are on the CPU."""
    frame = sys._getframe(3)
    while frame and frame.f_code.co_filename.endswith(("_compile.py", "eval_frame.py", "stand_in_gpus.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith("autograd/graph.py")


class Move(torch.autograd.Function):
    """A copy to another device, whose gradient comes back to the first."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        ctx.back = place(tensor), tensor.dtype
        return move(tensor.detach(), device, dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return move(gradient, *ctx.back), None, None


def move(tensor: Tensor, device: Any, dtype: torch.dtype | None = None, copy: bool = False) -> Tensor:
    """Return a tensor on a device, and in a dtype; itself if it is so already, unless a copy is asked for."""
    device, dtype = with_index(device), dtype or tensor.dtype
    if place(tensor) == device:
        return TensorBase.to(tensor, dtype, copy=copy)
    if tensor.requires_grad and torch.is_grad_enabled():
        return Move.apply(tensor, device, dtype)
    thread.is_moving = True
    try:
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=device)
    finally:
        thread.is_moving = False


def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Be Tensor.to(), in all its forms."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    elif args and isinstance(args[0], torch.dtype):
        args = (None, *args)
    given = dict(zip(("device", "dtype", "non_blocking", "copy"), args, strict=False)) | kwargs
    if given.get("device") is not None:
        device = with_index(given["device"])
        if device.type == "meta" or tensor.is_meta:
            return mark(TensorBase.to(tensor, CPU if device.type == "cuda" else device), device)
        tensor = move(tensor, device, given.get("dtype"), given.get("copy", False))
        del given["device"]
        given.pop("copy", None)
    rest = {key: value for key, value in given.items() if value is not None}
    return TensorBase.to(tensor, **rest) if rest else tensor


def numpy(tensor: Tensor, **options: Any) -> Any:
    """Be Tensor.numpy(), which refuses a GPU's tensors."""
    if place(tensor) != CPU:
        raise TypeError(f"can't convert {place(tensor)} device type tensor to numpy. Use Tensor.cpu() first")
    return TensorBase.numpy(tensor, **options)


def gradient(tensor: Tensor) -> Tensor | None:
    """Be Tensor.grad; DDP's C++ code makes gradients views of its buckets."""
    grad = TensorBase.grad.__get__(tensor)
    return grad if grad is None or place(grad) == place(tensor) else mark(grad, place(tensor))


def set_gradient(tensor: Tensor, grad: Tensor | None) -> None:
    """Set Tensor.grad, which has to be on the same device."""
    if grad is not None and place(grad) != place(tensor):
        raise RuntimeError("assigned grad has data located on a different device")
    TensorBase.grad.__set__(tensor, grad)


def copy_storage(storage: torch.UntypedStorage, memo: dict[int, Any]) -> torch.UntypedStorage:
    """Be UntypedStorage.__deepcopy__(), with the mark."""
    if storage._cdata not in memo:
        memo[storage._cdata] = copied = storage.clone()
        vars(copied).update(vars(storage))
    return memo[storage._cdata]


def made_on(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch.tensor() or torch.as_tensor(), which C++ code fills before Devices sees it."""

    @functools.wraps(function)
    def make(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        device = data.device if device is None and isinstance(data, Tensor) else device
        return move(function(data, device=CPU, **options), CPU if device is None else device)

    return make


class Stream:
    """A stream on which each operation ends before the next is called."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.device = with_index("cuda" if device is None else device)
        self.stream_id, self.device_index, self.device_type = 0, self.device.index, 1

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """A moment on a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.is_timed, self.at = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> Event:
        self.at = time.perf_counter()
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        assert self.is_timed
        assert end.is_timed
        return 1000 * (end.at - self.at)


class Autocast(torch.autocast):
    """Autocasting of a GPU's operators, by the CPU's rules."""

    def __init__(self, device_type: str, dtype: torch.dtype | None = None, **options: Any) -> None:
        dtype = torch.float16 if (device_type, dtype) == ("cuda", None) else dtype
        super().__init__("cpu" if device_type == "cuda" else device_type, dtype=dtype, **options)


class Current:
    """torch.cuda.device(): makes a device the current one for a while."""

    def __init__(self, device: Any) -> None:
        self.before, self.index = thread.current, with_index(device).index

    def __enter__(self) -> None:
        self.before, thread.current = thread.current, self.index

    def __exit__(self, *_: object) -> None:
        thread.current = self.before


def set_current(device: Any) -> None:
    """Be torch.cuda.set_device(), which ignores negative numbers."""
    if not isinstance(device, int) or device >= 0:
        thread.current = with_index(device).index


def new_bias(kind: type[CausalBias], *_: object) -> CausalBias:
    """Be CausalBias.__new__(): C++ code cannot make a subclass of a tensor that Devices has seen."""
    with _disable_current_modes():
        return Tensor.__new__(kind)


def wrapped(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a tensor of tensors, such as a DTensor, be on the CPU for C++ code, as its parts are."""

    def call(*args: Any, device: Any = None, **options: Any) -> Tensor:
        is_gpu = device is not None and torch.device(device).type == "cuda"
        return make(*args, device=CPU if is_gpu else device, **options)

    return call


def as_nccl(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Let a collective of a group of NCCL refuse CPU tensors, and know ReduceOp.AVG, which Gloo lacks."""
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        tensors = [leaf for leaf in tree_leaves(list(given.values())) if isinstance(leaf, Tensor)]
        is_nccl = backends.get(given.get("group"), backends[None]) == "nccl"
        if is_nccl and any(place(tensor) == CPU for tensor in tensors):
            raise RuntimeError("No backend type associated with device type cpu")
        if given.get("op") != dist.ReduceOp.AVG:
            return collective(*args, **options)
        work = collective(**given | {"op": dist.ReduceOp.SUM, "async_op": True})
        work.wait()
        tensors[0].div_(dist.get_world_size(given.get("group")))
        return work if given.get("async_op") else None

    return call


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors on each device."""
    places = [place(tensor) for tensor in tensors]
    return [[i for i, one in enumerate(places) if one == each] for each in dict.fromkeys(places)]


def install() -> None:
    """Let this process see the stand-ins."""
    change_tensors()
    change_torch_cuda()
    change_replicas()
    change_torch_distributed()
    run = threading.Thread.run

    def run_with_devices(self: threading.Thread) -> None:
        with Devices():
            run(self)

    threading.Thread.run = run_with_devices
    Devices().__enter__()  # until the process ends
    # A forked process makes torch's threads anew at their first use: if autograd's threads of two devices came to
    # it at the same time, one of them would find none, and abort.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def change_tensors() -> None:
    """Let tensors tell their device, move between devices, and be made on one."""
    Tensor.device = property(place)
    Tensor.is_cuda = property(lambda tensor: place(tensor).type == "cuda")
    Tensor.get_device = lambda tensor: -1 if place(tensor) == CPU else place(tensor).index
    Tensor.is_cpu = property(lambda tensor: place(tensor).type == "cpu")
    Tensor.grad = property(gradient, set_gradient, lambda tensor: set_gradient(tensor, None))
    Tensor.to, Tensor.numpy = to, numpy
    Tensor.cpu = lambda tensor, **_: move(tensor, CPU)
    Tensor.cuda = lambda tensor, device=None, **_: move(tensor, "cuda" if device is None else device)
    Tensor.pin_memory = lambda tensor, *_: tensor
    Tensor.record_stream = lambda tensor, stream: None
    Tensor._make_wrapper_subclass = staticmethod(wrapped(Tensor._make_wrapper_subclass))
    CausalBias.__new__ = new_bias
    torch.UntypedStorage.__deepcopy__ = copy_storage
    torch.tensor, torch.as_tensor = made_on(torch.tensor), made_on(torch.as_tensor)
    torch._C._ensureCUDADeviceGuardSet()


def change_torch_cuda() -> None:
    """Let torch.cuda and torch.accelerator answer for the stand-ins."""
    generators = tuple(torch.Generator() for _ in range(count()))
    names: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: count() > 0,
        "device_count": count,
        "current_device": lambda: thread.current,
        "set_device": set_current,
        "device": Current,
        "synchronize": lambda device=None: None,
        "_sleep": lambda cycles: None,
        "get_device_name": lambda device=None: "Stand-in",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**30, multi_processor_count=1),
        "get_device_capability": lambda device=None: (9, 0),
        "max_memory_allocated": lambda device=None: 2**20,
        "reset_peak_memory_stats": lambda device=None: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "default_generators": generators,
        "manual_seed_all": lambda seed: [each.manual_seed(seed) for each in generators],
        "get_rng_state": lambda device="cuda": generators[with_index(device).index].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[with_index(device).index].set_state(state),
    }
    for name, value in names.items():
        setattr(torch.cuda, name, value)
    torch.cuda.nccl.version = lambda: (2, 0, 0)
    for name in ("is_available", "device_count", "current_stream"):
        setattr(torch.accelerator, name, names[name])
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda") if count() else None
    torch._C._get_accelerator = lambda *_: torch.device("cuda" if count() else "cpu")
    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = Autocast
    group = torch._C._group_tensors_by_device_and_dtype

    def group_tensors(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
        found = {}
        for some in by_device(lists[0]):
            parts = [[each[i] for i in some] if each else each for each in lists]
            for (_, dtype), (groups, places) in group(parts, True).items():
                found[place(lists[0][some[0]]), dtype] = groups, [some[i] for i in places]
        return found

    torch._C._group_tensors_by_device_and_dtype = group_tensors


def change_replicas() -> None:
    """Let nn.DataParallel copy between stand-ins."""
    torch._C._broadcast_coalesced = lambda tensors, devices, size: [
        [move(tensor, device) for tensor in tensors] for device in devices
    ]
    torch._C._scatter = lambda tensor, devices, sizes, dim, streams: tuple(
        move(part, device) for part, device in zip(tensor.chunk(len(devices), dim), devices, strict=False)
    )
    torch._C._gather = lambda tensors, dim, device: torch.cat([move(tensor, device) for tensor in tensors], dim)
    torch.nn.parallel._functions._get_stream = Stream
    torch.cuda.nccl.is_available = lambda tensors: False


def change_torch_distributed() -> None:
    """Let Gloo be NCCL, and DDP's C++ code group parameters by their device."""
    connect, connect_some = dist.init_process_group, dist.new_group

    def init_process_group(backend: str, device_id: Any = None, **options: Any) -> None:
        connect("gloo" if "nccl" in backend else backend, **options)
        backends[None] = backend
        if device_id is not None:
            dist.group.WORLD.bound_device_id = with_index(device_id)

    def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, **options: Any) -> Any:
        options.pop("device_id", None)
        group = connect_some(ranks, timeout, "gloo" if "nccl" in (backend or "") else backend, **options)
        backends[group] = backend or backends[None]
        return group

    def object_device(group: Any = None) -> torch.device:
        return torch.device("cuda", thread.current) if backends.get(group, backends[None]) == "nccl" else CPU

    names = {"init_process_group": init_process_group, "new_group": new_group}
    names |= {name: as_nccl(getattr(dist, name)) for name in COLLECTIVES}
    for name, function in names.items():
        setattr(dist, name, function)
        setattr(distributed_c10d, name, function)
    distributed_c10d._get_pg_default_device = object_device
    distributed_c10d._get_object_coll_device = lambda group=None: object_device(group).type
    broadcast, assign = dist._broadcast_coalesced, dist._compute_bucket_assignment_by_size

    def broadcast_coalesced(group: Any, tensors: Sequence[Tensor], *options: Any) -> None:
        for some in by_device(tensors):
            broadcast(group, [tensors[i] for i in some], *options)

    def assign_buckets(tensors: Sequence[Tensor], limits: Any, *options: Any) -> tuple[list[list[int]], list[int]]:
        buckets = []
        for some in by_device(tensors):
            found = zip(*assign([tensors[i] for i in some], limits), strict=True)
            buckets += [([some[i] for i in indices], size) for indices, size in found]
        indices, sizes = zip(*sorted(buckets), strict=True)
        return list(indices), list(sizes)

    dist._broadcast_coalesced, dist._compute_bucket_assignment_by_size = broadcast_coalesced, assign_buckets
    dist.Reducer._rebuild_buckets = lambda self: False  # it would group them by the device that C++ code knows


install()
