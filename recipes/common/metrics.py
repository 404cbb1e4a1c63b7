"""Sums and counts, which may be added over ranks; never averages, which may not."""

from __future__ import annotations

import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.common.errors import UserError
from recipes.common.task import Task, has_own, in_float


def new_totals(task: Task, device: torch.device) -> Tensor:
    """Return zero totals for an evaluation: float64 [evaluated, left out, skipped in the run, loss, *metrics]."""
    return torch.zeros(4 + len(task.metrics), dtype=torch.float64, device=device)


def add_batch(totals: Tensor, task: Task, output: Tensor, target: Tensor) -> None:
    """Add a batch to the totals: its output and its target, whose first dimension counts samples."""
    output = in_float(output)
    # A task's one value may have a shape such as (1, 1).
    evaluated = torch.as_tensor(task.count(target), dtype=totals.dtype).sum()
    # averages() refuses NaN: to raise here would wait for a GPU in each batch.
    totals[0] += torch.where(evaluated >= 0, evaluated, math.nan)
    totals[1] += len(target) - evaluated
    for place, value in enumerate((task.loss_sum(output, target), *task.metric_sums(output, target)), 3):
        # Apex's O1 cannot add float32 to float64.
        totals[place] += torch.as_tensor(value, dtype=totals.dtype).sum()


def averages(totals: Tensor, task: Task, num_samples: int) -> dict[str, float]:
    """Return test_loss and the task's metrics from totals that have to cover each of num_samples once.

    They are NaN if no sample counts. If images were skipped, skipped_images is how often this launch has skipped
    one so far. Raises UserError if a batch's count was negative or not finite.
    """
    count, left_out, skipped, *sums = totals.tolist()
    if not math.isfinite(count):
        what = f"--task {type(task).__name__}: count() of a batch is negative or not finite"
        raise UserError(f"{what}; return how many of its samples count")
    seen = f"evaluated {count:.0f} samples and skipped {left_out:.0f} of {num_samples}"
    # A count may be a sum of weights, which is not exact; a missing sample is a whole one.
    assert abs(count + left_out - num_samples) < 0.5, f"{seen}: the ranks' shares are not the whole"
    names = ("loss", *task.metrics)
    means = {name: value / count if count else math.nan for name, value in zip(names, sums, strict=True)}
    if has_own(task, "derive"):
        from recipes.common.user_code import add_derived

        means = add_derived(means, task)
    result = {f"test_{name}": value for name, value in means.items()}
    return {**result, "skipped_images": int(skipped)} if skipped else result


class Throughput:
    """Training samples per second over all ranks, without evaluation and without the first step.

    The first step warms caches up and compiles: its time is not typical of the others.
    """

    def __init__(self, global_batch_size: int, device: torch.device) -> None:
        self.global_batch_size, self.device = global_batch_size, device
        self._warm = False
        self._steps, self._seconds = 0, 0.0
        self._since: float | None = None
        self._earlier = (0, 0.0)
        self._mark = (0, 0.0)
        self._sent = 0
        self._sent_since: dict[str, int] = {}

    def start(self) -> None:
        """Start the clock when training begins or continues."""
        self._since, self._sent_since = time.perf_counter(), sent_bytes()

    def count_step(self) -> None:
        """Count one optimizer step."""
        if self._warm:
            self._steps += 1
        else:
            self._warm = True
            self._synchronize()
            self.start()

    def pause(self) -> None:
        """Stop the clock before work that is not training."""
        self._synchronize()
        self._seconds, self._since = self.seconds(), None
        # An interface that is gone, such as an ended container's, has no count any more.
        self._sent += sum(max(0, sent - self._sent_since.get(name, 0)) for name, sent in sent_bytes().items())

    def recent(self) -> float:
        """Return the samples per second since the last call."""
        steps, seconds = self._mark
        self._mark = (self._steps, self.seconds())
        return self._rate(self._mark[0] - steps, self._mark[1] - seconds)

    def overall(self) -> float:
        """Return the samples per second over all launches."""
        return self._rate(**self.timed())

    def seconds(self) -> float:
        """Return how long this launch has trained, in seconds."""
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def timed(self) -> dict[str, Any]:
        """Return the timed steps and their seconds, of this launch and those before it."""
        steps, seconds = self._earlier
        return {"steps": steps + self._steps, "seconds": seconds + self.seconds()}

    def add_earlier(self, steps: int = 0, seconds: float = 0.0) -> None:
        """Set the steps and seconds that earlier launches have timed."""
        self._earlier = (steps, seconds)

    def sent_per_step(self) -> float:
        """Return the bytes that this machine has sent per step, by any process.

        NaN on GPUs, whose traffic over NVLink and RDMA passes no interface.
        """
        if self.device.type == "cuda":
            return math.nan
        return self._sent / self._steps if self._steps else 0.0

    def _rate(self, steps: int, seconds: float) -> float:
        return steps * self.global_batch_size / seconds if seconds else 0.0

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def sent_bytes() -> dict[str, int]:
    """Return the bytes that each network interface of this machine has sent, loopback included ({} if unknown).

    Exchanges through shared memory, NVLink or RDMA do not pass an interface and are not counted.
    """
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    except OSError:
        return {}
    fields = (line.split(":") for line in lines)
    return {name.strip(): int(counts.split()[8]) for name, counts in fields}


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory: what torch has allocated on the GPU, if it has one, else main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes
