"""The devices of a job of one process, as single and dataparallel are."""

from __future__ import annotations

import torch

from recipes.common.errors import UserError
from recipes.common.options import read_number
from recipes.common.world.devices import start_gpu


def choose_devices(wanted: str) -> list[torch.device]:
    """Return the devices of a job of one process: all visible GPUs, or the CPU if there are none.

    Raises UserError if --device is cuda, and no GPU is visible; if the first GPU does not work; or if a launcher
    has started several processes, each of which would train by itself.
    """
    if (count := read_number("WORLD_SIZE", 1)) > 1:
        fix = "start one, without torchrun, or use RECIPE=ddp"
        raise UserError(f"{count} processes were started, and this recipe is one; {fix}")
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and not count:
        raise UserError("--device cuda: no GPU is visible; use --device cpu")
    if not count:
        return [torch.device("cpu")]
    devices = [torch.device("cuda", i) for i in range(count)]
    start_gpu(devices[0])
    return devices
