"""--profile-steps: where the time of a step goes on rank 0, as a trace and in one line.

torch.profiler records operators, kernels, collectives and the phases of the loop. The trace,
runs/NAME/trace.json.gz, opens in https://ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function

from recipes.common.data import Batch
from recipes.common.options import Options
from recipes.common.world.peers import Peers

WARM_UP_STEPS = 10
"""Steps before the recorded ones: compilation, DDP's first buckets, caches. Fewer in a short run, but not none."""


class Profile:
    """Record --profile-steps steps of this launch after its warm-up, or as many as there are. Only for rank 0.

    Args:
        args: for --profile-steps.
        done: the steps of the run so far.
        total: the steps of the whole run, more than `done`.
        peers: for the device, and for the watch, whose waits the trace names.
        folder: the run's folder.
        say: prints a line.
    """

    def __init__(
        self, args: Options, done: int, total: int, peers: Peers, folder: Path, say: Callable[[str], None]
    ) -> None:
        left = total - done
        self._warm_up = max(min(WARM_UP_STEPS, left - args.profile_steps), min(1, left - 1))
        self._last = min(self._warm_up + args.profile_steps, left) - 1
        self._first_step = done + self._warm_up + 1
        self._watch, self._path, self._say = peers.watch, folder / "trace.json.gz", say
        self._is_gpu = peers.device.type == "cuda"
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it logs, and calls the lack of a GPU an error
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_gpu else [])]
        profiler = torch.profiler.profile(activities=kinds, schedule=self._plan, on_trace_ready=self._write)
        profiler.start()
        self._profiler: torch.profiler.profile | None = profiler
        self._watch.mark = record_function

    def _plan(self, number: int) -> ProfilerAction:
        """Return what to do in a step of this launch, counted from 0."""
        if number < self._warm_up:
            return ProfilerAction.WARMUP if number == self._warm_up - 1 else ProfilerAction.NONE
        if number < self._last:
            return ProfilerAction.RECORD
        return ProfilerAction.RECORD_AND_SAVE if number == self._last else ProfilerAction.NONE

    def mark_data(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and mark the wait for each of them."""
        iterator = iter(batches)
        while True:
            with self._watch.mark("data"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def end_step(self) -> None:
        """Mark the end of a step; after the last one to record, write the trace."""
        if self._profiler:
            self._profiler.step()

    def close(self) -> None:
        """Write what has been recorded, if a signal ends the run before the last step to record."""
        if self._profiler:
            self._profiler.stop()
        if self._profiler:
            self._say(f"no profile: the job ends before step {self._first_step}, the first to record")

    def _write(self, profiler: torch.profiler.profile) -> None:
        """Write the trace, print how its time divides, and free the profiler."""
        self._profiler, self._watch.mark = None, contextlib.nullcontext
        temporary = self._path.with_name(".trace.tmp.json.gz")
        try:
            profiler.export_chrome_trace(str(temporary))
            with gzip.open(temporary) as file:
                events = json.load(file)["traceEvents"]
            temporary.replace(self._path)
        except (OSError, ValueError) as error:  # not JSON: the disk of torch's own temporary file is full
            self._say(f"warning: cannot write {self._path}: {error}")
        else:
            what = f"from step {self._first_step}{divide_time(events, self._is_gpu)}"
            self._say(f"profile {what}; {self._path} opens in https://ui.perfetto.dev")
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._watch.restart_clock()


# The kind and the name of an event, for each label. An operator is one of torch, torchvision and the like, or a
# compiled one; the engine of autograd also runs hooks, which may wait.
ON_CPU = re.compile(
    r"(?P<step>user_annotation/ProfilerStep#)|(?P<pause>user_annotation/(?:evaluation|checkpoint)$)"
    r"|(?P<data>user_annotation/data$)|(?P<optimizer>user_annotation/optimizer$)"
    r"|(?P<in_flight>(?:user_annotation|cpu_op)/(?:gloo|mpi|ucc):)"
    r"|(?P<call>cpu_op/_?c10d(?:_functional)?::)|(?P<wait>user_annotation/gradients$)"
    r"|(?P<passes>user_annotation/forward and backward$)"
    r"|(?P<operator>cpu_op/(?!autograd::)(?:\w+::|Torch-Compiled Region|## Call CompiledFxGraph))"
)
ON_GPU = re.compile(
    r"(?P<step>gpu_user_annotation/ProfilerStep#)|(?P<pause>user_annotation/(?:evaluation|checkpoint)$)"
    r"|(?P<data>user_annotation/data$)|(?P<optimizer>gpu_user_annotation/optimizer$)"
    r"|(?P<in_flight>kernel/(?i:.*nccl))|(?P<operator>kernel/)|(?P<copy>gpu_mem(?:cpy|set)/)"
)

# A moment with several labels belongs to the first of these. In a pass, "wait" is how long Horovod's rank waits:
# the thread that exchanges is not in the trace. After it, "wait" is mostly the check of the gradients.
WAITING = "waiting for the exchange"
ON_CPU_PARTS = {"data": "data", "call": WAITING, "operator": "computing", "in_flight": WAITING, "wait": WAITING}
ON_GPU_PARTS = {"operator": "computing", "in_flight": WAITING, "copy": "copies", "data": "data"}


def divide_time(events: Iterable[dict[str, Any]], is_gpu: bool) -> str:
    """Return how the time of the recorded steps divides, as a text to append; "" if the events do not show it.

    On a GPU, its kernels count; with several GPUs in one process, nothing is said. The time is from the end of the
    first step to the end of the last one, which is whole steps of a GPU, too, without evaluations and checkpoints.
    """
    kinds, parts, rest = (ON_GPU, ON_GPU_PARTS, "idle") if is_gpu else (ON_CPU, ON_CPU_PARTS, "other")
    edges: list[tuple[float, int, str]] = []
    ends: dict[str, float] = defaultdict(float)
    places = set()
    for event in events:
        found = kinds.match(f"{event.get('cat')}/{event['name']}") if event.get("ph") == "X" else None
        label, start = found and found.lastgroup, event.get("ts", 0.0)
        if label == "step":
            ends[event["name"]] = max(ends[event["name"]], start + event["dur"])
        elif label:
            edges += [(start, 1, label), (start + event["dur"], -1, label)]
            places |= {event["pid"]} if label == "operator" else set()
    if is_gpu and not places:
        return ": no kernel of a GPU was seen (KINETO_LOG_LEVEL=4 shows why)"
    if len(ends) < 2 or len(places) != 1:
        return ""
    edges += [(min(ends.values()), 1, "step"), (max(ends.values()), -1, "step")]
    found_times = overlaps(edges).items()
    times = {labels: time for labels, time in found_times if "step" in labels and "pause" not in labels}

    def share(name: str, label: str = "step", of: str = "step") -> float:
        """Return the share of a part's time under one label in all time under another."""
        part = sum(time for labels, time in times.items() if label in labels and part_of(labels) == name)
        return part / sum(time for labels, time in times.items() if of in labels)

    def part_of(labels: frozenset[str]) -> str:
        known = labels if "passes" in labels else labels - {"wait"}
        return next((parts[label] for label in parts if label in known), rest)

    order = ("computing", WAITING, "copies", "data", rest)
    shown = [f"{name} {share(name):.0%}" for name in order if share(name)]
    if optimizer := share("computing", "optimizer"):
        shown[0] += f" (optimizer {optimizer:.0%})"
    text = f": {sum(times.values()) / (len(ends) - 1) / 1000:.4g} ms a step, {', '.join(shown)}"
    if any("in_flight" in labels for labels in times):
        text += f"; {share('computing', 'in_flight', 'in_flight'):.0%} of the exchange is hidden behind computing"
    return text


def overlaps(edges: Iterable[tuple[float, int, str]]) -> dict[frozenset[str], float]:
    """Return the time for which exactly these labels apply, from when each begins (1) and ends (-1) to apply."""
    times: dict[frozenset[str], float] = defaultdict(float)
    active: Counter[str] = Counter()
    before = 0.0
    for at, change, label in sorted(edges):
        if at > before:
            times[frozenset(+active)] += at - before
        active[label] += change
        before = at
    return times
