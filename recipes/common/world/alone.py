"""The devices of a job of one process, as single and dataparallel are."""

from __future__ import annotations

import torch

from recipes.common.errors import UserError
from recipes.common.options import read_number


def choose_devices(wanted: str) -> list[torch.device]:
    """Return the devices of a job of one process: all visible GPUs, or the CPU if there are none.

    Raises UserError if --device is cuda, and no GPU is visible; or if a launcher has started several processes,
    each of which would train by itself.
    """
    if (count := read_number("WORLD_SIZE", 1)) > 1:
        fix = "start one, without torchrun, or use RECIPE=ddp"
        raise UserError(f"{count} processes were started, and this recipe is one; {fix}")
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and not count:
        raise UserError("--device cuda: no GPU is visible; use --device cpu")
    return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
