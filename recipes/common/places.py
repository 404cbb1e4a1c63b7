"""Where the ranks of a run are: how each chooses its device, and what the run's first lines and record show."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from recipes.common.errors import UserError
from recipes.common.ranks import Ranks

MOST_LINES = 8
"""Of a description, on the terminal."""


@dataclass(frozen=True)
class Place:
    """The host of a rank, its device's name, and the number of that device (None for a CPU)."""

    host: str
    device: str
    index: int | None = None


def choose_device(wanted: str, ranks: Ranks, devices_per_rank: int = 1) -> torch.device:
    """Return the first GPU of this process's own and make it the current one, or the CPU where there are too few.

    Args:
        wanted: --device, one of auto, cpu and cuda.
        ranks: this process's numbers.
        devices_per_rank: GPUs that each process takes.

    Raises:
        UserError: too few GPUs for --device cuda.
    """
    needed, visible = ranks.local_world_size * devices_per_rank, torch.cuda.device_count()
    use_cuda = wanted != "cpu" and visible >= needed
    if wanted == "cuda" and not use_cuda:
        each = f"{devices_per_rank} GPUs" if devices_per_rank > 1 else "a GPU"
        raise UserError(
            f"--device cuda: {ranks.local_world_size} processes on {socket.gethostname()} need {each} each, "
            f"{visible} visible; start fewer processes per node (NPROC_PER_NODE) or use --device cpu",
            on_every_node=True,
        )
    if not use_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", ranks.local_rank * devices_per_rank)
    torch.cuda.set_device(device)
    return device


def place_of(device: torch.device) -> Place:
    """Return where this process is that works on the device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return Place(socket.gethostname(), torch.cuda.get_device_name(index), index)
    threads = torch.get_num_threads()
    return Place(socket.gethostname(), f"CPU, {threads} thread{'s' if threads > 1 else ''} a process")


def describe(places: Sequence[Place]) -> list[str]:
    """Return a line for each group of ranks that follow one another on a host; places holds every rank's."""
    lines = []
    ranked = groupby(enumerate(places), key=lambda item: (item[1].host, item[1].device))
    for (host, device), group in ranked:
        ranks, indices = zip(*((rank, place.index) for rank, place in group), strict=True)
        numbers = "" if indices[0] is None else f"cuda:{_span(indices)} "
        lines.append(f"{'ranks' if len(ranks) > 1 else 'rank'} {_span(ranks)} on {host}: {numbers}{device}")
    return lines


def shorten(lines: Sequence[str]) -> list[str]:
    """Return the first lines of a description, and how many more there are: a thousand nodes fill no terminal."""
    if len(lines) <= MOST_LINES:
        return list(lines)
    return [*lines[: MOST_LINES - 1], f"... and {len(lines) - MOST_LINES + 1} more such lines in config.json"]


def _span(numbers: Sequence[int]) -> str:
    """Return 0-3 for 0, 1, 2, 3, and all of them where they do not count up by one."""
    first, last = numbers[0], numbers[-1]
    if list(numbers) == list(range(first, last + 1)):
        return str(first) if first == last else f"{first}-{last}"
    return ",".join(map(str, numbers))
