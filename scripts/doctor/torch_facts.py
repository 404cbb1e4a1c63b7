"""Print what torch knows of this node as one line of JSON: versions, GPUs, a product of matrices on each device.

    python -m scripts.doctor.torch_facts

The factors are small whole numbers, so that every product is exact in any precision: a different result comes from
a broken device, not from rounding.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import torch
import torch.distributed as dist

SIZE = 256
"""Of the matrices whose product is checked."""

TIMED_SIZE, TIMED_REPEATS, TIMED_S = 4096, 10, 0.3
"""Of the products that are timed on a GPU: 10 x 2 x 4096^3 = 1.4 Tflop take 2 ms on an H100. An idle GPU's clock
is a fraction of the usual one, and rises only under load: the best time of TIMED_S counts."""

COPY_BYTES = 256 * 2**20
"""Of one copy: 5 ms over PCIe 5, much longer than the call itself."""


def main() -> None:
    """Print the facts."""
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "gloo": dist.is_gloo_available(),
        "devices": [],
    }
    count = torch.cuda.device_count()
    if count:
        try:
            torch.cuda.init()
            count = torch.cuda.device_count()  # with MIG fewer than before: CUDA shows a process one instance
        except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
            count, facts["cuda_error"] = 0, str(error).strip().split("\n")[0][:300]
    for device in [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]:
        facts["devices"].append(check_device(device))
    if count > 1:
        for index, found in enumerate(facts["devices"]):
            following = torch.device("cuda", (index + 1) % count)
            if "error" not in found:
                try:
                    found["peer_gb_s"] = round(copy_speed(torch.device("cuda", index), following), 1)
                except RuntimeError as error:
                    found["error"] = f"a copy to {following}: {' '.join(str(error).split())[:300]}"
    print(json.dumps(facts))


def check_device(device: torch.device) -> dict[str, Any]:
    """Return a device's name, whether its product is correct, and its speeds (GPUs only)."""
    found: dict[str, Any] = {"device": str(device), "name": "cpu", "is_right": False, "tflops": None}
    try:
        if device.type == "cuda":
            found["name"] = torch.cuda.get_device_name(device)
        i, j = torch.arange(SIZE).unsqueeze(1), torch.arange(SIZE).unsqueeze(0)
        a, b = ((i + 2 * j) % 3 - 1), ((2 * i + j) % 3 - 1)
        # The row sums of a @ b are a @ (b @ 1): two products of a matrix and a vector, in whole numbers.
        expected = a @ (b @ torch.ones(SIZE, 1, dtype=torch.int64))
        product = (a.to(device, torch.float32) @ b.to(device, torch.float32)).sum(1, keepdim=True)
        found["is_right"] = bool((product.cpu().to(torch.int64) == expected).all())
        if device.type == "cuda":
            found["tflops"] = round(speed(device), 1)
            found["to_device_gb_s"] = round(copy_speed(torch.device("cpu"), device), 1)
            found["from_device_gb_s"] = round(copy_speed(device, torch.device("cpu")), 1)
    except RuntimeError as error:
        found["error"] = " ".join(str(error).split())[:300]
    return found


def speed(device: torch.device) -> float:
    """Return a GPU's speed in bfloat16, in 10^12 operations per second."""
    a = torch.ones(TIMED_SIZE, TIMED_SIZE, device=device, dtype=torch.bfloat16)
    a @ a
    torch.cuda.synchronize(device)
    begin = first = time.perf_counter()
    fastest = math.inf
    while begin - first < TIMED_S:
        for _ in range(TIMED_REPEATS):
            a @ a
        torch.cuda.synchronize(device)
        fastest, begin = min(fastest, time.perf_counter() - begin), time.perf_counter()
    return TIMED_REPEATS * 2 * TIMED_SIZE**3 / fastest / 1e12


def copy_speed(source: torch.device, target: torch.device) -> float:
    """Return the GB/s of copies between a GPU and pinned memory, or between two GPUs; the best of four."""
    pair = (source, target)
    data, into = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=d, pin_memory=d.type == "cpu") for d in pair)
    gpus = [device for device in pair if device.type == "cuda"]
    best = 0.0
    for _ in range(4):  # the first one sets up the path
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        begin = time.perf_counter()
        into.copy_(data, non_blocking=True)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        best = max(best, COPY_BYTES / (time.perf_counter() - begin) / 1e9)
    return best


if __name__ == "__main__":
    main()
