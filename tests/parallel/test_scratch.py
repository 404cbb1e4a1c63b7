"""Data parallelism by hand: the same numbers as single, equal bits on all ranks, and exact bytes on the wire."""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shlex
import signal
import sys

import pytest
import torch

from recipes.common import loop
from recipes.common.process.ranks import read_ranks
from recipes.common.world.world import join_world, leave_world
from recipes.scratch import train as scratch
from tests.support import Ranks, assert_same_run, run_ranks, train

STEPS = shlex.split(
    "--max-steps 24 --checkpoint-every 12 --global-batch-size 96 --seed 2 --lr 0.01 --warmup-steps 5 "
    "--lr-schedule constant"
)
SIZES = (1, 2, 7, 1000, 100_003)
"""Numbers of floats in a buffer: fewer than ranks, even, and uneven."""


def draw_other_weights():
    """Make rank 1 draw the weights of another seed, as a model of the user's that draws them by itself may."""
    build = loop.build_model
    if os.environ["RANK"] == "1":
        loop.build_model = lambda args, *others: build(dataclasses.replace(args, seed=9), *others)


def test_every_step_of_naive_equals_single(single, tmp_path):
    """test_contract.py tests the ring. All ranks begin with rank 0's weights."""
    run = train("scratch", tmp_path, 2, *STEPS, "--allreduce", "naive", setup=draw_other_weights)
    assert_same_run(run, single)


def in_ranks(function, world_size, folder):
    """Call function(folder) as each rank of a world; return what it returned."""
    run_ranks("scratch", [], world_size, folder / "out", setup=functools.partial(write_result, function, folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def write_result(function, folder):
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(function(folder)))
    sys.exit()


def reduce_buffers(folder):
    """All-reduce buffers of all sizes both ways; return for each whether the sum is right, its bits and bytes."""
    results = []
    world, traffic = join_world(scratch.options([]), read_ranks("scratch")), scratch.Traffic()
    for allreduce in ("naive", "ring"):
        for size in SIZES:
            args = scratch.options(["--allreduce", allreduce])
            contributions = torch.randn(world.world_size, size, generator=torch.Generator().manual_seed(size))
            buffer = contributions[world.rank].clone()
            scratch.all_reduce(buffer, args, world, traffic)
            error = (buffer.double() - contributions.double().sum(dim=0)).abs().max().item()
            digest = hashlib.sha256(buffer.numpy().tobytes()).hexdigest()
            results.append([allreduce, size, error < 1e-5, digest, traffic.sent_bytes, traffic.received_bytes])
    leave_world(world)
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_reduce_adds_up_and_sends_what_the_readme_says(tmp_path, world_size):
    by_rank = in_ranks(reduce_buffers, world_size, tmp_path)
    for rank, results in enumerate(by_rank):
        assert [row[3] for row in results] == [row[3] for row in by_rank[0]], "ranks hold different bits"
        for allreduce, size, is_right, _, sent, received in results:
            assert is_right, (rank, allreduce, size)
            buffer_bytes = 4 * size
            if allreduce == "naive":
                share = buffer_bytes * (world_size - 1 if rank == 0 else 1)
                assert (sent, received) == (share, share)
            else:
                # Chunk c has one more float if c is below the remainder. A rank sends all chunks twice, except
                # chunk rank + 1 in the first half and rank + 2 in the second; its left neighbour does likewise.
                chunks = [4 * (size // world_size + (c < size % world_size)) for c in range(world_size)]
                kept = [(rank + 1) % world_size, (rank + 2) % world_size]
                assert sent == 2 * buffer_bytes - sum(chunks[c] for c in kept)
                assert received == 2 * buffer_bytes - sum(chunks[(c - 1) % world_size] for c in kept)
                if size % world_size == 0:
                    assert sent == received == 2 * (world_size - 1) * buffer_bytes // world_size


def digests_of_training(folder):
    """Train a few steps; return the digest of all parameters after each step."""
    digests = []
    step = loop.optimizer_step

    def step_and_digest(args, parameters, *rest):
        parameters = list(parameters)
        step(args, parameters, *rest)
        values = torch.cat([parameter.detach().flatten() for parameter in parameters])
        digests.append(hashlib.sha256(values.numpy().tobytes()).hexdigest())

    loop.optimizer_step = step_and_digest
    name = ["--runs-dir", str(folder), "--no-tensorboard", "--overwrite", "--name", "bits"]
    scratch.main([*name, "--max-steps", "12", "--global-batch-size", "50"])
    return digests


@pytest.mark.slow
def test_parameters_are_the_same_bits_on_all_ranks_and_in_each_run(tmp_path):
    first, again = (in_ranks(digests_of_training, 3, tmp_path) for _ in range(2))
    assert len(first[0]) == len(set(first[0])) == 12
    assert first[0] == first[1] == first[2]
    assert first == again


def test_log_bytes_prints_what_each_rank_has_sent(tmp_path):
    argv = ["--runs-dir", str(tmp_path), "--no-tensorboard", "--max-steps", "2", "--log-bytes"]
    text = run_ranks("scratch", argv, 3, tmp_path / "out").outputs[0]
    size = int(re.search(r"ring all-reduce of (\d+) bytes", text)[1])
    sent = [int(n) for n in re.findall(r"rank \d  sent (\d+) ", text)]
    assert len(sent) == 3
    assert sum(sent) == 4 * size
    assert text.splitlines()[-1].startswith("result recipe=scratch world_size=3")


def test_a_lost_rank_ends_the_others(tmp_path):
    argv = ["--runs-dir", str(tmp_path), "--no-tensorboard", "--epochs", "10000", "--timeout-s", "20"]
    ranks = Ranks("scratch", argv, 3, tmp_path / "out")
    ranks.wait_for_text("epoch 1")
    ranks.send(signal.SIGKILL, [1])
    # Usually within a second. Once in many hundred times, gloo does not notify a rank that its peer has gone; then
    # the timeout ends it, or the launcher if there is one.
    outcome = ranks.wait(30)
    assert outcome.statuses == [1, -signal.SIGKILL, 1]
    assert "lost another rank" in outcome.outputs[0]
    assert "Traceback" not in outcome.text


def test_sync_batchnorm_is_refused_on_cpus_in_one_line(tmp_path):
    argv = ["--runs-dir", str(tmp_path), "--sync-batchnorm"]
    outcome = Ranks("scratch", argv, 2, tmp_path / "out").wait()
    assert "--sync-batchnorm: torch has it for GPUs only" in outcome.refusal
    assert "".join(outcome.outputs) == f"{outcome.refusal}\n"
