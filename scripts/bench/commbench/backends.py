"""The libraries that move tensors between ranks, each behind the same calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.common.process.ranks import read_ranks
from recipes.probe.train import HorovodWorld, TorchWorld


@dataclass(frozen=True)
class Backend:
    """Ranks connected by one library. Every rank must make the same calls in the same order."""

    rank: int
    size: int
    device: torch.device
    all_reduce: Callable[[Tensor], object]  # In place: the sum of the ranks' tensors
    broadcast: Callable[[Tensor], object]  # In place: rank 0's tensor
    all_gather: Callable[[Tensor], Tensor]
    """Returns the ranks' tensors of shape (n,), concatenated in rank order to (size * n,)."""
    largest: Callable[[float], float]  # Returns the largest of the ranks' numbers
    leave: Callable[[], None]


@functools.lru_cache(maxsize=1)
def memory_for(numel: int, device: torch.device) -> Tensor:
    """Return a buffer for a result; consecutive calls with the same size and device return the same one."""
    return torch.empty(numel, device=device)


def connect_by_torch(name: str, timeout_s: float) -> Backend:
    """Connect by torch.distributed over gloo or NCCL; a launcher must have set RANK and the other variables."""
    world = TorchWorld(read_ranks("probe"), "cuda" if name == "nccl" else "cpu", timeout_s)
    size, device = world.ranks.world_size, world.device

    def all_gather(tensor: Tensor) -> Tensor:
        gathered = memory_for(size * len(tensor), device)
        dist.all_gather_into_tensor(gathered, tensor)
        return gathered

    def largest(value: float) -> float:
        number = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return float(number)

    broadcast = functools.partial(dist.broadcast, src=0)
    return Backend(world.ranks.rank, size, device, dist.all_reduce, broadcast, all_gather, largest, world.leave)


def connect_by_mpi() -> Backend:
    """Connect by mpi4py, on the CPU. Leaving is a barrier: mpi4py finalises MPI at exit."""
    from mpi4py import MPI

    world, device = MPI.COMM_WORLD, torch.device("cpu")

    def all_gather(tensor: Tensor) -> Tensor:
        gathered = memory_for(world.size * len(tensor), device)
        world.Allgather(tensor.numpy(), gathered.numpy())
        return gathered

    return Backend(
        world.rank,
        world.size,
        device,
        lambda tensor: world.Allreduce(MPI.IN_PLACE, tensor.numpy(), op=MPI.SUM),
        lambda tensor: world.Bcast(tensor.numpy(), root=0),
        all_gather,
        lambda value: float(world.allreduce(value, op=MPI.MAX)),
        world.Barrier,
    )


def connect_by_horovod(timeout_s: float) -> Backend:
    """Connect by Horovod, over Gloo or MPI as it was started, and over NCCL if it was built with NCCL."""
    import horovod.torch as hvd

    world = HorovodWorld("auto" if hvd.nccl_built() else "cpu", timeout_s)
    return Backend(
        world.ranks.rank,
        world.ranks.world_size,
        world.device,
        lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum, name="all-reduce"),
        lambda tensor: hvd.broadcast_(tensor, 0, name="broadcast"),
        lambda tensor: hvd.allgather(tensor, name="all-gather"),  # allocates its result in each call
        lambda value: float(hvd.allreduce(torch.tensor([value], dtype=torch.float64), op=hvd.Max, name="largest")),
        world.leave,
    )


def connect(name: str, timeout_s: float) -> Backend:
    """Connect by the named backend and return it; call it on all ranks."""
    if name == "mpi":
        return connect_by_mpi()
    return connect_by_horovod(timeout_s) if name == "horovod" else connect_by_torch(name, timeout_s)
