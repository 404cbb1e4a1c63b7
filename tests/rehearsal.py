"""The ddp recipe's own code as rank 0 of a thousand and more, in one process, and what of it grows.

torch's fake process group replaces the network: collectives return at once, with this rank's data in place of
other ranks'. Everything else is recipes/ddp/train.py, unchanged. A rank's batch has the same size at each world
size, so a step's collectives have to be the same too. Each world size gets its own process.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.common import loop
from recipes.common.job import Job
from recipes.common.metrics import averages, peak_memory_bytes
from recipes.common.watch.watch import Watch
from recipes.common.world import world
from recipes.common.world.places import Place
from recipes.ddp import train
from scripts.launch.processes import rank_environment

LOCAL_BATCH = 2
STEPS = 8

VOTE = ("allreduce", 4)
"""The vote on stopping, which is less frequent with more ranks."""

GPUS = 8
"""Ranks per node."""


class Trace(TorchDispatchMode):
    """Counts all collectives, whatever code starts them, and the bytes of their tensors, step by step.

    For an all-gather these are the bytes that arrive, for all others those that are passed in. torch's fake group
    returns no result for an all-reduce, but DDP expects one: it gets the tensors unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()
        self.steps: list[Counter[tuple[str, int]]] = []  # copies of `seen` at the end of each step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            name = func._schema.name.removeprefix("c10d::").rstrip("_")
            self.seen[name, sum(tensor.nbytes for tensor in tensors)] += 1
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.allreduce_.default:
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            future.set_result(list(result[0]))
            return result[0], _create_work_from_future(future).boxed()
        return result

    def a_step(self) -> Counter[tuple[str, int]]:
        """Return the collectives of one step, without votes; the first and last steps do not count."""
        steps = [after - before for before, after in itertools.pairwise(self.steps[1:-1])]
        for one in steps:
            one.pop(VOTE, None)
        assert all(one == steps[0] for one in steps), f"steps differ: {steps}"
        return steps[0]


@contextlib.contextmanager
def stand_ins(world_size: int, trace: Trace) -> Iterator[None]:
    """Make this process rank 0 of a world that does not exist; the recipe itself is unchanged."""
    own = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment = rank_environment(0, 1, min(GPUS, world_size)) | own
    gather, count_step, new_group = world.World.gather_objects, Job.count_step, dist.new_group
    init = functools.partial(dist.init_process_group, "fake", rank=0, world_size=world_size, store=FakeStore())

    def fake_gather(self: world.World, own: Any) -> list[Any]:
        values = gather(self, own)
        if isinstance(own, Place):  # in a real job, each node gives its own name
            return [replace(place, host=f"node-{i // GPUS:04d}") for i, place in enumerate(values)]
        return values

    def note_step(job: Job) -> None:
        count_step(job)
        trace.steps.append(trace.seen.copy())

    with (
        patch.dict(os.environ, environment),
        patch.object(dist, "rendezvous", lambda *_, **__: iter([(None, 0, world_size)])),
        patch.object(world, "_exchange_kinds", lambda store, ranks, kind, text: {kind: text}),
        patch.object(dist, "init_process_group", lambda *_, **__: init()),
        patch.object(dist, "new_group", lambda *_, **__: new_group(backend="fake")),
        patch.object(world.World, "gather_objects", fake_gather),
        patch.object(dist, "TCPStore", lambda *_, **__: None),
        patch.object(dist, "PrefixStore", lambda *_: dist.HashStore()),
        patch.object(Job, "count_step", note_step),
        patch.object(Watch, "leave", Watch.close),  # no other rank ever leaves
        # Nobody evaluates the samples of the other ranks.
        patch.object(loop, "averages", lambda totals, task, _: averages(totals, task, int(totals[0] + totals[1]))),
    ):
        yield


def rehearse(world_size: int, extra: Sequence[str]) -> dict[str, Any]:
    """Run the recipe at a world size and return the figures observed; a process can do this only once."""
    torch.set_num_threads(1)  # a LeNet's step on two images is too short for more
    trace, said = Trace(), io.StringIO()
    # Enough samples that no epoch ends within the steps; the same number at 1 and 1,024 ranks.
    samples = (STEPS + 1) * LOCAL_BATCH * max(world_size, 1024)
    words = ["--data", "synthetic", "--image-size", "12", "--num-samples", str(samples)]
    words += ["--global-batch-size", str(LOCAL_BATCH * world_size), "--max-steps", str(STEPS), "--epochs", "100"]
    words += ["--device", "cpu", "--no-tensorboard", "--log-every", "1000", "--name", "run"]
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        with stand_ins(world_size, trace), contextlib.redirect_stdout(said), trace:
            train.main([*words, "--runs-dir", folder, *extra])
        config_bytes = (Path(folder) / "run" / "config.json").stat().st_size
    step = trace.a_step()
    others = trace.seen - Counter({key: STEPS * number for key, number in step.items()})
    figures: dict[str, Any] = {"world_size": world_size, "votes": others.pop(VOTE)}
    for name, kinds in (("step", step), ("other", others)):
        figures[f"{name}_collectives"] = kinds.total()
        figures[f"{name}_bytes"] = sum(nbytes * number for (_, nbytes), number in kinds.items())
    return figures | {
        "step_kinds": sorted([name, nbytes, number] for (name, nbytes), number in step.items()),
        "peak_memory_bytes": peak_memory_bytes(torch.device("cpu")),
        "config_bytes": config_bytes,
        "printed_lines": len(said.getvalue().splitlines()),
    }


def rehearse_all(world_sizes: Sequence[int], extra: Sequence[str]) -> list[dict[str, Any]]:
    """Return rehearse() of each world size, run in its own process."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return list(pool.map(functools.partial(rehearse, extra=extra), world_sizes, timeout=120))
