"""Where the ranks of a run are: the host and device of each, as the run's first lines and its record show them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

MOST_LINES = 8
"""Most lines of a description that the terminal shows."""


@dataclass(frozen=True)
class Place:
    """The host of a rank, its device's name and number there (None for a CPU), and the network that NCCL uses."""

    host: str
    device: str
    index: int | None = None
    network: str | None = None


def place_of(device: torch.device) -> Place:
    """Return the place of this process, which works on the device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return Place(socket.gethostname(), torch.cuda.get_device_name(index), number_on_host(index))
    threads = torch.get_num_threads()
    return Place(socket.gethostname(), f"CPU, {threads} thread{'s' if threads > 1 else ''} a process")


def number_on_host(index: int) -> int:
    """Return a GPU's number on its host: CUDA counts the GPUs that CUDA_VISIBLE_DEVICES lists from 0.

    Several nodes on one machine see different GPUs, each counted from cuda:0. A list of names is not translated.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return int(listed[index]) if index < len(listed) and listed[index].strip().isdecimal() else index


def describe(places: Sequence[Place]) -> list[str]:
    """Return a line for each group of consecutive ranks on a host; `places` holds the place of every rank.

    If all ranks are on one host, NCCL's network is not used, and not shown.
    """
    lines = []
    has_network = len({place.host for place in places}) > 1
    ranked = groupby(enumerate(places), key=lambda item: (item[1].host, item[1].device, item[1].network))
    for (host, device, network), group in ranked:
        ranks, indices = zip(*((rank, place.index) for rank, place in group), strict=True)
        over = f", NCCL over {network}" if network and has_network else ""
        numbers = "" if indices[0] is None else f"cuda:{_span(indices)} "
        lines.append(f"{'ranks' if len(ranks) > 1 else 'rank'} {_span(ranks)} on {host}: {numbers}{device}{over}")
    return lines


def shorten(lines: Sequence[str]) -> list[str]:
    """Return the first lines of a description, and how many more there are, if it has more than MOST_LINES."""
    if len(lines) <= MOST_LINES:
        return list(lines)
    return [*lines[: MOST_LINES - 1], f"... and {len(lines) - MOST_LINES + 1} more such lines in config.json"]


def _span(numbers: Sequence[int]) -> str:
    """Return "0-3" for 0, 1, 2, 3, and a list such as "0,2" for numbers that are not consecutive."""
    first, last = numbers[0], numbers[-1]
    if list(numbers) == list(range(first, last + 1)):
        return str(first) if first == last else f"{first}-{last}"
    return ",".join(map(str, numbers))
