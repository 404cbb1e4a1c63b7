"""The libraries that move tensors between ranks, each behind the same four calls.

All of them are collective: every rank calls the same ones in the same order.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.common.process.ranks import read_ranks
from recipes.probe.train import HorovodWorld, TorchWorld


class Backend(Protocol):
    """Ranks that one library connects."""

    rank: int
    size: int
    device: torch.device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, which may be the tensor itself."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, which may be the tensor itself."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors of shape (n,), one after another, as (size * n,)."""

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' numbers."""

    def leave(self) -> None:
        """Disconnect."""


class TorchBackend(TorchWorld):
    """torch.distributed over gloo or NCCL."""

    def __init__(self, name: str, timeout_s: float) -> None:
        # main() has seen to it that a launcher has set the ranks.
        super().__init__(read_ranks("probe"), "cuda" if name == "nccl" else "cpu", timeout_s)
        self.rank, self.size = self.ranks.rank, self.ranks.world_size
        self._gathered = torch.empty(0)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, in place."""
        dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, in place."""
        dist.broadcast(tensor, src=0)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors one after another, in a buffer that the next call of the same size reuses."""
        if len(self._gathered) != self.size * len(tensor):
            self._gathered = tensor.new_empty(self.size * len(tensor))
        dist.all_gather_into_tensor(self._gathered, tensor)
        return self._gathered

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' numbers."""
        number = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return float(number)


class MpiBackend:
    """MPI through mpi4py, on the CPU."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.size, self.device = self._world.rank, self._world.size, torch.device("cpu")
        self._gathered = torch.empty(0)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, in place."""
        self._world.Allreduce(self._mpi.IN_PLACE, tensor.numpy(), op=self._mpi.SUM)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, in place."""
        self._world.Bcast(tensor.numpy(), root=0)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors one after another, in a buffer that the next call of the same size reuses."""
        if len(self._gathered) != self.size * len(tensor):
            self._gathered = tensor.new_empty(self.size * len(tensor))
        self._world.Allgather(tensor.numpy(), self._gathered.numpy())
        return self._gathered

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' numbers."""
        return float(self._world.allreduce(value, op=self._mpi.MAX))

    def leave(self) -> None:
        """Wait for the others; MPI disconnects at exit."""
        self._world.Barrier()


class HorovodBackend(HorovodWorld):
    """Horovod over whatever it was started with: Gloo, MPI, and NCCL where it was built with it."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        super().__init__("auto" if hvd.nccl_built() else "cpu")
        self.rank, self.size = self.ranks.rank, self.ranks.world_size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, in place."""
        return self.hvd.allreduce_(tensor, op=self.hvd.Sum, name="all-reduce")

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, in place."""
        return self.hvd.broadcast_(tensor, 0, name="broadcast")

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors one after another, in memory that each call takes anew."""
        return self.hvd.allgather(tensor, name="all-gather")

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' numbers."""
        number = torch.tensor([value], dtype=torch.float64)
        return float(self.hvd.allreduce(number, op=self.hvd.Max, name="largest"))


def connect(name: str, timeout_s: float) -> Backend:
    """Return the backend of that name, connected; call it on all ranks."""
    if name == "mpi":
        return MpiBackend()
    return HorovodBackend() if name == "horovod" else TorchBackend(name, timeout_s)
