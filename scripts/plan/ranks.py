"""A rank of the plan's check: what a prediction may know, measured without a step; then the recipe itself.

    RANK=0 WORLD_SIZE=2 ... python -m scripts.plan.ranks '{"options": [...], "local_batch_size": 4, ...}'

scripts/plan/check.py starts it in each node's network.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from recipes.common.process.entry import exit_status
from recipes.ddp import train
from scripts.plan.workload import TimedStep, kind_of

COMPUTE_S = 2.0
"""How long ranks compute side by side, without any exchange."""

RUN_S, FEWEST, MOST = 4.0, 6, 40
"""About how long the steps of a run take, and how many there are at least and at most."""


def probe(options: list[str], local_batch_size: int, bucket_bytes: int) -> dict[str, float]:
    """Return the mean times of computing beside other ranks and of exchanges; call it on all ranks."""
    args = train.options(options)
    compute = TimedStep(args, kind_of(args, None, None), local_batch_size, torch.device("cpu"))
    compute()
    dist.barrier()
    times: list[tuple[float, float, float]] = []
    end = time.perf_counter() + COMPUTE_S
    while time.perf_counter() < end or len(times) < 3:
        times.append(compute())
    forward_s, backward_s, optimizer_s = mean_over_ranks([fmean(values) for values in zip(*times, strict=True)])
    figures = {"forward_s": forward_s, "backward_s": backward_s, "optimizer_s": optimizer_s}
    if dist.get_world_size() > 1:
        bucket = torch.zeros(bucket_bytes // 4)
        figures["small_s"] = small_s()
        figures["bucket_s"], _ = buckets_s(bucket, 6, lambda: None)
        number = min(60, max(4, round(COMPUTE_S / figures["bucket_s"])))
        figures["busy_bucket_s"], figures["busy_step_s"] = buckets_s(bucket, number, compute)
    return figures


def mean_over_ranks(values: list[float]) -> list[float]:
    """Return the means of the ranks' numbers; call it on all ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found)
    return (found / dist.get_world_size()).tolist()


def small_s(times: int = 20) -> float:
    """Return the mean time of an all-reduce of one number; call it on all ranks."""
    tensor = torch.zeros(1)
    for _ in range(2):
        dist.all_reduce(tensor)
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(tensor)
    return (time.perf_counter() - begin) / times


def buckets_s(bucket: torch.Tensor, number: int, compute: Callable[[], object]) -> list[float]:
    """Return the mean times of an all-reduce and of computing beside it; call it on all ranks.

    All of them are under way at once, as DDP has its buckets; the backend takes them one or two at a time.
    """
    dist.barrier()
    begin, steps = time.perf_counter(), 0
    works = [dist.all_reduce(bucket, async_op=True) for _ in range(number)]
    while not works[-1].is_completed():
        step_begin = time.perf_counter()
        compute()
        steps += 1
        if time.perf_counter() - step_begin < 1e-4:
            time.sleep(1e-4)  # nothing to compute
    end = time.perf_counter()
    for work in works:
        work.wait()
    return mean_over_ranks([(end - begin) / number, (end - begin) / steps])


def run(request: dict[str, Any]) -> None:
    """Measure, then train under each compression; rank 0 writes what was measured."""
    options, bucket_bytes = request["options"], request["bucket_bytes"]
    dist.init_process_group("gloo")
    figures = probe(options, request["local_batch_size"], bucket_bytes)
    if dist.get_rank() == 0:
        Path(request["result"]).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    step_s = max(figures.get("busy_step_s", 0.0), figures["forward_s"] + figures["backward_s"])
    step_s = max(step_s, request["gradient_bytes"] / bucket_bytes * figures.get("bucket_s", 0.0))
    steps = request["steps"] or min(MOST, max(FEWEST, round(RUN_S / step_s)))
    for compression in request["compression"]:
        # A port of its own for each: the other ranks may come before rank 0 has closed the last store.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        run_options = ["--name", compression, "--grad-compression", compression, "--max-steps", str(steps)]
        train.main([*options, *run_options])


if __name__ == "__main__":
    sys.exit(exit_status(lambda: run(json.loads(sys.argv[1]))))
