"""--sharded-checkpoints with real ranks: what each reads, and what happens when one of them fails or is killed."""

from __future__ import annotations

import functools
import json
import math
import os
import resource
import signal

import pytest

from recipes.common.checkpoint import shard_files
from recipes.common.checkpoint.checkpoint import CheckpointFolder
from recipes.common.checkpoint.reading import read_checkpoint
from recipes.common.checkpoint.shard_files import read_whole
from recipes.common.nonfinite import Guard
from tests.parallel.test_fsdp import note_restored_bytes
from tests.support import TEXT_DIR, Interrupt, largest_difference, launches, losses, metrics, start_run, train

SHARDED = ("--sharded-checkpoints", "--device", "cpu")
STEPS = (*SHARDED, "--max-steps", "12", "--checkpoint-every", "3")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a run of fsdp with sharded checkpoints."""
    return train("fsdp", tmp_path_factory.mktemp("undisturbed"), 2, *STEPS)


def end_of(run):
    """Return the content of a run's newest checkpoint, with whole tensors."""
    return read_whole(read_checkpoint(max((run / "checkpoints").glob("step-*.pt"))))


def shard_names(run):
    return sorted(path.name for path in (run / "checkpoints").glob("*.shard"))


def assert_same_end(run, other):
    assert losses(run) == pytest.approx(losses(other), rel=1e-5)
    assert largest_difference(end_of(run)["model"], end_of(other)["model"]) < 1e-5


def assert_no_file_is_left_over(run):
    """Assert that every shard file belongs to a checkpoint, and that none is missing."""
    paths = [*CheckpointFolder(run / "checkpoints").paths(), run / "checkpoints" / "best.pt"]
    named = {entry["name"] for path in paths for entry in read_checkpoint(path)["shards"]["files"]}
    assert shard_names(run) == sorted(named)


def test_every_rank_writes_its_share_and_the_curve_is_that_of_plain_checkpoints(undisturbed, tmp_path):
    plain = train("fsdp", tmp_path, 2, *STEPS, "--no-sharded-checkpoints")
    assert losses(undisturbed) == losses(plain)
    newest = max((undisturbed / "checkpoints").glob("step-*.pt"))
    sizes = [entry["size"] for entry in read_checkpoint(newest)["shards"]["files"]]
    whole = max((plain / "checkpoints").glob("step-*.pt")).stat().st_size
    assert len(sizes) == 2
    assert max(sizes) < 0.55 * whole
    assert newest.stat().st_size < 0.2 * whole
    assert largest_difference(end_of(undisturbed)["model"], end_of(plain)["model"]) == 0
    assert_no_file_is_left_over(undisturbed)


def test_a_complete_run_that_is_resumed_ends_as_it_was(tmp_path):
    argv = (*SHARDED, "--epochs", "1")
    run = train("fsdp", tmp_path, 2, *argv)
    before = json.loads((run / "result.json").read_text())
    again = train("fsdp", tmp_path, 2, *argv, "--resume", "auto")
    assert json.loads((again / "result.json").read_text()) == before
    (run / "result.json").unlink()  # as of a run that was killed before it could write it
    result = json.loads((train("fsdp", tmp_path, 2, *argv, "--resume", "auto") / "result.json").read_text())
    assert (result["step"], result["test_accuracy"]) == (before["step"], before["test_accuracy"])
    assert (before["checkpoints"], result["checkpoints"], result["checkpoint_stall_s"]) == (1, 0, 0)


@pytest.mark.parametrize(("recipe", "world_size", "options"), [("fsdp", 3, SHARDED), ("ddp", 2, ())])
def test_its_weights_are_those_of_another_run(undisturbed, tmp_path, recipe, world_size, options):
    run = train(recipe, tmp_path, world_size, *options, "--weights", str(undisturbed), "--evaluate")
    (ours,), theirs = metrics(run), metrics(undisturbed)[-1]
    assert (ours["epoch"], ours["test_accuracy"]) == (0, theirs["test_accuracy"])
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-6)
    assert not (run / "checkpoints").exists()


# ---- what a rank reads


def note_read_bytes(folder):
    """Make each rank write the bytes that it reads from shard files, and those that it keeps."""
    note_restored_bytes(folder)
    read_piece, total = shard_files._read_piece, 0

    def noting_read(path, place, piece, common, target):
        nonlocal total
        row_bytes = target.itemsize
        for first, end in piece[1:]:
            row_bytes *= end - first
        total += row_bytes * (common[0][1] - common[0][0] if common else 1)
        (folder / f"read{os.environ['RANK']}").write_text(str(total))
        return read_piece(path, place, piece, common, target)

    shard_files._read_piece = noting_read


GPT = ("--data", "text", "--model", "gpt-tiny", "--seq-len", "16", "--max-steps", "2")
LITTLE = ("--data-dir", str(TEXT_DIR))


@pytest.mark.slow
@pytest.mark.parametrize("writer", [("fsdp", 4, "--replicas", "2"), ("tensor", 4)], ids=["fsdp", "tensor"])
def test_a_rank_reads_and_keeps_little_more_than_its_share(tmp_path, writer):
    """Ranks read whole rows of a shard: a matrix that tensor parallelism cut by columns is read once in total."""
    recipe, world_size, *layout = writer
    first = train(recipe, tmp_path, world_size, *GPT, *LITTLE, *layout, *SHARDED)
    content = read_checkpoint(max((first / "checkpoints").glob("step-*.pt")))
    files = content["shards"]["files"]
    assert len(files) == 2, "of two replicas, one writes"
    numbers = sum(math.prod(ref["shape"]) for name, ref in content["model"].items() if name != "head.weight")
    counts = sum(entry["size"] for entry in files) - 12 * numbers  # AdamW: two numbers beside each weight
    assert 0 < counts < 1000, "the tied matrix once"
    argv = (*GPT, *LITTLE, *SHARDED, "--start-from", str(first), "--max-steps", "3")
    train("fsdp", tmp_path, 3, *argv, setup=functools.partial(note_read_bytes, tmp_path))
    total = sum(entry["size"] for entry in files)
    for kind in ("bytes", "read"):
        found = [int((tmp_path / f"{kind}{rank}").read_text()) for rank in range(3)]
        assert max(found) <= 1.2 * total / 3, kind
        assert sum(found) >= 0.9 * total, kind


# ---- faults


def limit_files(rank, size):
    if os.environ["RANK"] == str(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def spoil_weights(rank):
    """Make the check of a rank's weights fail at the second checkpoint."""

    def is_sound(self, step, weights, lost_buffers):
        if step == 6:
            self.fail(step, False, "it has corrupted the weights, which are not saved")
        return step < 6

    if os.environ["RANK"] == str(rank):
        Guard.is_sound = is_sound


WAITS = ("--async-checkpoints", "--no-async-checkpoints")


@pytest.mark.parametrize("wait", [WAITS[0], pytest.param(WAITS[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("setup", "statuses", "error", "steps"),
    [
        (functools.partial(limit_files, 1, 2000), [2, 2], "error: rank 1: cannot write ", []),
        (functools.partial(spoil_weights, 1), [1, 1], "error: a gradient of step 6 is not finite", [3]),
    ],
    ids=["disk", "weights"],
)
def test_what_one_rank_meets_ends_the_job_in_one_line(tmp_path, setup, statuses, error, steps, wait):
    outcome = start_run("fsdp", tmp_path, 2, *STEPS, wait, setup=setup).wait()
    assert outcome.statuses == statuses, outcome.text
    assert outcome.text.count("error: ") == 1
    assert error in outcome.outputs[0]
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    assert [read_checkpoint(path)["position"]["step"] for path in folder.paths()] == steps
    assert len(shard_names(tmp_path / "run")) == 2 * len(steps)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "count"), [(1, 3), (1, 4), (0, 5), (0, 6), (0, 7), (0, 8)])
def test_a_rank_killed_in_a_save_costs_no_checkpoint(undisturbed, tmp_path, rank, count):
    """Each save flushes a shard file and the folder; rank 0 also flushes step-N.pt, and config.json before."""
    interrupt, wait = Interrupt(signal.SIGKILL, count, [rank], "fsync"), WAITS[count % 2]
    outcome = start_run("fsdp", tmp_path, 2, *STEPS, wait, name="fsdp-3", interrupt=interrupt).wait()
    assert outcome.statuses[rank] == -signal.SIGKILL
    assert outcome.statuses[1 - rank] == 1, outcome.text
    run = tmp_path / "fsdp-3"
    steps = [read_checkpoint(path)["position"]["step"] for path in CheckpointFolder(run / "checkpoints").paths()]
    assert steps in ([], [3], [6, 3])
    train("fsdp", tmp_path, 3, *STEPS, wait, "--resume", "auto")
    assert launches(run, "step")[-1] == max(steps, default=0)
    assert_same_end(run, undisturbed)
    assert_no_file_is_left_over(run)


@pytest.mark.slow
def test_a_stop_signal_leaves_a_sharded_checkpoint(undisturbed, tmp_path):
    interrupt = Interrupt(signal.SIGUSR1, 5, [1])
    start_run("fsdp", tmp_path, 2, *STEPS, name="fsdp-1", interrupt=interrupt).wait(check=True)
    assert end_of(tmp_path / "fsdp-1")["position"]["step"] == 6
    run = train("fsdp", tmp_path, 1, *STEPS, "--resume", "auto")
    assert len([line for line in metrics(run) if "loss" in line]) == 12
    assert_same_end(run, undisturbed)
