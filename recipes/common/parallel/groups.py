"""Groups of ranks within a job: a mesh of them, and what they gather on rank 0 for a checkpoint."""

from __future__ import annotations

import io
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from recipes.common.options import Options
from recipes.common.process.open_files import allow_open_files
from recipes.common.watch.timeouts import group_timeout, wait_timeout
from recipes.common.world.peers import Peers
from recipes.common.world.tree import Slot, bytes_of, fill_slots, map_tree, outline_of

T = TypeVar("T")

PIECE_BYTES = 64 * 2**20
"""Most bytes that a rank sends at once: 64 s at 1 MB/s."""

UNIT_BYTES = 10_000
"""A piece takes as long as so many bytes more: 1 ms at 10 MB/s."""


def grid_mesh(args: Options, world: Peers, row_size: int, names: tuple[str, str]) -> DeviceMesh:
    """Return a mesh of all ranks in rows of `row_size` neighbours; call it on all ranks.

    `names` are the names of its two dimensions: the groups along columns, then the groups along rows. Each group
    has a time-out.
    """
    grid = torch.arange(world.world_size).view(-1, row_size)
    timeout = group_timeout(wait_timeout(args), world.device.type)
    with world.watch("groups"):
        groups = [dist.new_subgroups_by_enumeration(some.tolist(), timeout=timeout)[0] for some in (grid.T, grid)]
    return DeviceMesh.from_group(cast(Any, groups), world.device.type, grid, mesh_dim_names=names)


def flat_mesh(world: Peers) -> DeviceMesh:
    """Return a mesh of all ranks in one dimension."""
    # Where GPUs are visible, DeviceMesh() would replace a group of CPUs by one that waits for 30 minutes.
    everyone = cast(dist.ProcessGroup, dist.group.WORLD)
    return DeviceMesh.from_group(everyone, world.device.type, mesh_dim_names=("shard",))


def gather_values(value: T | None, peers: Peers, group: dist.ProcessGroup, timeout_s: float) -> list[T] | None:
    """Return on rank 0 the values of a gloo group's ranks, which are the first ones; call it on all ranks.

    Ranks outside of the group give None. Values may hold what a checkpoint may; rank 0 gets tensors on the CPU.
    Rank 0 receives one piece after another. All ranks vote now and then, well within `timeout_s`.
    """
    is_first = peers.rank == 0
    outline, tensors = outline_of(None if is_first else value)
    text, own = io.BytesIO(), deque(bytes_of(tensor.detach()) for tensor in tensors)
    if value is not None:
        torch.save(outline, text)
    with peers.watch("checkpoint"):
        given = peers.gather_objects((text.getvalue(), sum(map(len, own))))
    texts, sizes = zip(*(pair for pair in given if pair[0]), strict=True)
    values: list[Any] = []
    places = [deque[Tensor]() for _ in sizes]
    if is_first:
        values = [map_tree(value, torch.is_tensor, lambda tensor: tensor.detach().cpu())]
        values += map(allocate_tensors, texts[1:], places[1:])
        allow_open_files(len(os.listdir("/dev/fd")) + len(sizes))  # in a large job, gloo connects only now
    starts = ((rank, size, start) for rank, size in enumerate(sizes) for start in range(0, size, PIECE_BYTES))
    pieces = deque((rank, min(PIECE_BYTES, size - start)) for rank, size, start in starts)
    units = 1
    while pieces:
        begun, left = time.monotonic(), units
        with peers.watch("checkpoint"):
            while pieces and left > 0:
                sender, size = pieces.popleft()
                left -= 1 + size // UNIT_BYTES
                if is_first:
                    receive_piece(size, places[sender], group, sender)
                elif sender == peers.rank:
                    send_piece(size, own, group)
            # Vote: 4 bytes a rank. Until the next one, rank 0 receives so many units, in an eighth of the limit.
            is_quick = time.monotonic() - begun < timeout_s / 8
            units = peers.begin_vote(is_first * max(1, 2 * units if is_quick else units // 2))()
    return values if is_first else None


def receive_piece(size: int, contents: deque[Tensor], group: dist.ProcessGroup, sender: int) -> None:
    """Receive bytes from a rank of the group, for the front of `contents`."""
    piece = torch.empty(size, dtype=torch.uint8)
    # Checkpoint: each rank of the group that has bytes sends them to rank 0, in its turn.
    dist.recv(piece, group=group, group_src=sender)
    for part, content in pair_bytes(piece, contents):
        content.copy_(part)


def send_piece(size: int, contents: deque[Tensor], group: dist.ProcessGroup) -> None:
    """Send bytes from the front of `contents` to rank 0."""
    piece = torch.empty(size, dtype=torch.uint8)
    for part, content in pair_bytes(piece, contents):
        part.copy_(content)
    dist.send(piece, group=group, group_dst=0)


def allocate_tensors(text: bytes, place: deque[Tensor]) -> Any:
    """Return the value of an outline that was saved as `text`; put the memory of its tensors into `place`."""

    def fill(slot: Slot) -> Tensor:
        place.append(slot.new_bytes())
        return slot.tensor_of(place[-1])

    with torch.serialization.safe_globals([Slot]):
        return fill_slots(torch.load(io.BytesIO(text), weights_only=True), fill)


def pair_bytes(piece: Tensor, contents: deque[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of a piece, each with as many bytes from the front of `contents`, which are removed there."""
    while len(piece) and contents:
        content = contents.popleft()
        count = min(len(piece), len(content))
        yield piece[:count], content[:count]
        piece = piece[count:]
        if count < len(content):
            contents.appendleft(content[count:])
