"""What a rank does in its process, in its node's network: the recipe, or a measurement without it."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
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
    figures["small_s"] = timed_all_reduce(torch.zeros(1), 40)
    figures["whole_s"] = timed_all_reduce(torch.zeros(numel), 8)
    if dist.get_world_size() > 1:
        figures["busy_small_s"], _ = beside(compute, torch.zeros(1), COMPUTE_S / 4)
        figures["busy_bucket_s"], step_s = beside(compute, torch.zeros(bucket_bytes // 4), COMPUTE_S)
        figures["busy_step_s"] = step_s
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def beside(compute: Callable[[], None], tensor: Any, seconds: float) -> tuple[float, float]:
    """Return the mean times of an all-reduce and of a step while both go on; call it on all ranks."""
    import torch
    import torch.distributed as dist

    # As many on each rank as take about so long, without a limit on the links.
    number = torch.tensor(max(4.0, seconds / timed_all_reduce(tensor, 4) / 3))
    dist.all_reduce(number, dist.ReduceOp.MIN)
    took = []

    def exchange() -> None:
        took.append(timed_all_reduce(tensor, int(number)))

    thread, steps = threading.Thread(target=exchange), 0
    begin = time.perf_counter()
    thread.start()
    while thread.is_alive():
        compute()
        steps += 1
    found = torch.tensor([took[0], (time.perf_counter() - begin) / steps])
    dist.all_reduce(found)
    return found[0].item() / dist.get_world_size(), found[1].item() / dist.get_world_size()


def timed_all_reduce(tensor: Any, times: int) -> float:
    """Return the mean time of an all-reduce; call it on all ranks."""
    import torch.distributed as dist

    for _ in range(2):
        dist.all_reduce(tensor)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(tensor)
    return (time.perf_counter() - begin) / times


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
