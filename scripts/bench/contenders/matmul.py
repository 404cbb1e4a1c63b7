"""The most that a GPU's tensor cores give: a large matrix product in bfloat16."""

from __future__ import annotations

import json
import time

import torch

SIDE = 8192


def main() -> None:
    """Print the TFLOP/s of products of 8192 x 8192 matrices."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 50
    for _ in range(count):
        a @ b
    torch.cuda.synchronize()
    print(json.dumps({"tflops": count * 2 * SIDE**3 / (time.perf_counter() - begin) / 1e12}), flush=True)


if __name__ == "__main__":
    main()
