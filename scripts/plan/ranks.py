"""What a rank does in its process, in its node's network: the recipe, or a measurement without it."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.common.entry import exit_status

COMPUTE_S = 2.0
"""How long ranks compute side by side, without any exchange."""


def join(place: str, environment: dict[str, str], output: Path, threads: int) -> None:
    """Put this process into a node's network, and its words into a file."""
    import torch

    with open(f"/run/netns/{place}", "rb") as file:
        clone_newnet = 0x40000000
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), clone_newnet):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of {place}")
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(threads)


def run_recipe(argv: list[str]) -> None:
    """Be a rank of the recipe."""
    from recipes.ddp import train

    status = exit_status(lambda: train.main(argv))
    sys.stdout.flush()
    sys.exit(status)


def run_probe(argv: list[str], local_batch_size: int, bucket_bytes: int, result: str) -> None:
    """Measure a rank's computing beside that of the others, then exchanges without computing; rank 0 writes it."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    from recipes.common.data import load_data
    from recipes.common.models import build_model
    from recipes.common.optim import build_optimizer, build_scaler, optimizer_step
    from recipes.ddp import train

    args = train.options(argv)
    data = load_data(args, torch.device("cpu"), print)
    model = build_model(args, data).train()
    optimizer, scaler = build_optimizer(args, model.parameters()), build_scaler(args, torch.device("cpu"))
    dist.init_process_group("gloo")
    batches = iter(data.train.batches((torch.arange(local_batch_size) for _ in range(10**6)), 0))
    sums = [0.0, 0.0, 0.0]

    def compute() -> None:
        times = [time.perf_counter()]
        images, labels = next(batches)
        loss = cross_entropy(model(images), labels)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer_step(args, model.parameters(), optimizer, scaler)
        times.append(time.perf_counter())
        for i in range(3):
            sums[i] += times[i + 1] - times[i]

    compute()
    dist.barrier()
    sums, steps, end = [0.0, 0.0, 0.0], 0, time.perf_counter() + COMPUTE_S
    while time.perf_counter() < end or steps < 3:
        compute()
        steps += 1
    found = torch.tensor([value / steps for value in sums])
    dist.all_reduce(found)
    forward_s, backward_s, optimizer_s = (found / dist.get_world_size()).tolist()
    numel = sum(parameter.numel() for parameter in model.parameters())
    numel = sum(parameter.numel() for parameter in model.parameters())
    figures = {"forward_s": forward_s, "backward_s": backward_s, "optimizer_s": optimizer_s, "numel": numel}
    if dist.get_world_size() > 1:
        bucket = torch.zeros(bucket_bytes // 4)
        figures["small_s"] = small_s()
        figures["bucket_s"], _ = buckets_s(bucket, 6, lambda: None)
        number = max(4, round(COMPUTE_S / figures["bucket_s"]))
        agreed = torch.tensor(number)
        dist.broadcast(agreed, 0)
        figures["busy_bucket_s"], figures["busy_step_s"] = buckets_s(bucket, min(int(agreed), 60), compute)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def small_s(times: int = 20) -> float:
    """Return the mean time of an all-reduce of one number; call it on all ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(1)
    for _ in range(2):
        dist.all_reduce(tensor)
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(tensor)
    return (time.perf_counter() - begin) / times


def buckets_s(bucket: Any, number: int, compute: Callable[[], None]) -> tuple[float, float]:
    """Return the mean times of an all-reduce and of computing beside it; call it on all ranks.

    All of them are under way at once, as DDP has its buckets; the backend takes them one or two at a time.
    """
    import torch
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    works = [dist.all_reduce(bucket, async_op=True) for _ in range(number)]
    assert works[-1]
    steps = 0
    while not works[-1].is_completed():
        step_begin = time.perf_counter()
        compute()
        steps += 1
        if time.perf_counter() - step_begin < 1e-4:
            time.sleep(1e-4)  # nothing to compute
    end = time.perf_counter()
    for work in works:
        assert work
        work.wait()
    found = torch.tensor([(end - begin) / number, (end - begin) / steps])
    dist.all_reduce(found)
    bucket_s, step_s = (found / dist.get_world_size()).tolist()
    return bucket_s, step_s


def rank_main(
    action: Callable[..., None],
    words: list[Any],
    place: str,
    environment: dict[str, str],
    output: Path,
    threads: int,
) -> None:
    """Be one rank, from its process's start to its end."""
    join(place, environment, output, threads)
    action(*words)
