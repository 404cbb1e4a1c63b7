"""The processes of a job, connected by torch.distributed: the only file of recipes/common that imports it."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.places import choose_device
from recipes.common.ranks import Ranks
from recipes.common.watch import Watch, bound_of_waits

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the others (the `Peers` of agreement.py)."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    """A gloo group beside that of the gradients, for the few bytes that ranks exchange on the CPU."""
    watch: Watch

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks; call it on all ranks."""
        values = cast(list[T], [None] * self.world_size)
        # World: gathers the pickled value of each rank, padded to the longest.
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value; call it on all ranks."""
        box = [value]
        # World: rank 0 sends its pickled value to all others.
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def barrier(self) -> None:
        """Return once every rank has called it."""
        dist.barrier(group=self.control)


def join_world(args: Options, ranks: Ranks, devices_per_rank: int = 1) -> World:
    """Choose this process's device, connect it with the other processes, and watch what it waits for.

    Raises:
        UserError: too few GPUs for --device cuda, or the processes do not find each other.
    """
    device = choose_device(args.device, ranks, devices_per_rank)
    timeout = bound_of_waits(args)
    control = connect(ranks, device, timeout)
    # What each rank waits for is noted in the store at MASTER_ADDR:MASTER_PORT, where the others can read it.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    watch = Watch(ranks.rank, ranks.world_size, args, dist.PrefixStore("watch", store))
    return World(ranks.rank, ranks.world_size, device, control, watch)


def connect(ranks: Ranks, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """Let all processes meet at MASTER_ADDR:MASTER_PORT; return a gloo group of all of them.

    In the default group, CPU tensors go through gloo and CUDA ones through NCCL.

    Raises:
        UserError: they do not find each other within the time-out.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timeout, rank=ranks.rank, world_size=ranks.world_size)
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
    except dist.DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).strip().split("\n")[0].strip()
        raise UserError(
            f"rank {ranks.rank} cannot meet the others at {place} ({reason}); "
            "is rank 0 up, is MASTER_ADDR right, is MASTER_PORT free?",
            on_every_node=True,
        ) from None


def leave_world(world: World) -> None:
    """Disconnect, once no rank waits for another any more."""
    gc.collect()  # models and optimizers go before the connections that they use
    with world.watch("teardown"):
        world.barrier()
    world.watch.close()
    dist.destroy_process_group()
