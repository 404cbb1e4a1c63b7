"""Folders of images: the same samples and crops at any world size and with any number of workers."""

import functools
import shutil
import signal
import sys
import time

import psutil
import pytest

from recipes.common.data.shards import pack
from scripts.bench.range_server import serve
from tests.conftest import slow
from tests.images import CLASSES, VAL
from tests.support import (
    TIMEOUT_S,
    Interrupt,
    accuracies,
    has_ended,
    is_equal,
    losses,
    metrics,
    newest_checkpoint,
    run_command,
    start_run,
    train,
    wait_until,
)

WORDS = ("--image-size", "32", "--global-batch-size", "8", "--lr", "0.01", "--seed", "1", "--epochs", "3")
WORDS = ("--data", "imagefolder", *WORDS, "--deterministic")


@pytest.fixture(scope="session")
def single(tmp_path_factory, images):
    """Return a function that returns the one-process run without workers; each set of options is trained once."""
    argv = (*WORDS, "--data-dir", str(images), "--workers", "0")
    return functools.cache(lambda *more: train("single", tmp_path_factory.mktemp("single"), 1, *argv, *more))


def test_the_run_is_what_it_should_be(single):
    assert len(losses(single())) == 3 * (28 // 8)
    assert losses(single()) != losses(single("--seed", "2"))
    assert accuracies(single())[-1] * 12 == pytest.approx(round(accuracies(single())[-1] * 12), abs=1e-9)


@pytest.mark.parametrize(
    ("recipe", "world_size", "workers"), [("ddp", 3, 2), *slow(("single", 1, 2), ("ddp", 3, 0))]
)
def test_the_curve_is_the_same(images, single, tmp_path, recipe, world_size, workers):
    argv = (*WORDS, "--data-dir", str(images), "--workers", str(workers))
    run = train(recipe, tmp_path, world_size, *argv)
    assert losses(run) == pytest.approx(losses(single()), rel=1e-5 if world_size > 1 else 0)
    assert accuracies(run) == accuracies(single())


def test_shards_give_the_curve_of_their_folder(images, single, tmp_path):
    assert sum(number for _, number in pack(images, tmp_path / "shards", 9000)) == 28 + 12
    argv = (*WORDS, "--data", "shards", "--data-dir", str(tmp_path / "shards"), "--workers", "1")
    run = train("ddp", tmp_path, 2, *argv)
    assert losses(run) == pytest.approx(losses(single()), rel=1e-5)
    assert accuracies(run) == accuracies(single())


@pytest.mark.slow
def test_shards_on_a_server_give_the_curve_of_their_folder(images, single, tmp_path):
    assert sum(number for _, number in pack(images, tmp_path / "shards", 9000)) == 28 + 12
    argv = (*WORDS, "--data", "shards", "--workers", "1", "--cache-dir", str(tmp_path / "cache"))
    with serve(tmp_path / "shards") as (url, counts):
        run = train("ddp", tmp_path, 2, *argv, "--data-dir", url)
        index = counts.paths["/index.npz"]
    assert losses(run) == pytest.approx(losses(single()), rel=1e-5)
    assert accuracies(run) == accuracies(single())
    assert index == 2, "rank 0 alone asks for its size, and reads it"


@pytest.mark.slow
def test_blocks_of_shards_give_one_curve(images, single, tmp_path):
    """The curve differs from that of single images, but is the same on 1, 2 and 3 ranks and after a resume."""
    assert sum(number for _, number in pack(images, tmp_path / "shards", 9000)) == 28 + 12
    argv = (*WORDS, "--data", "shards", "--data-dir", str(tmp_path / "shards"), "--workers", "0")
    argv = (*argv, "--shuffle-block", "4")
    whole = train("single", tmp_path / "single", 1, *argv)
    when = Interrupt(signal.SIGTERM, 4)  # in the second epoch
    start_run("ddp", tmp_path, 2, *argv, name="ddp-3", interrupt=when).wait(check=True)
    run = train("ddp", tmp_path, 3, *argv, "--resume", "auto")
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    assert losses(run) != pytest.approx(losses(single()), rel=1e-3)


@pytest.mark.slow
def test_the_same_goes_on_after_an_interruption(images, single, tmp_path):
    argv = (*WORDS, "--data-dir", str(images), "--workers", "1")
    when = Interrupt(signal.SIGTERM, 4)  # in the second epoch
    train("ddp", tmp_path, 2, *argv, interrupt=when)
    run = train("ddp", tmp_path, 2, *argv, "--resume", "auto")
    assert losses(run) == pytest.approx(losses(single()), rel=1e-5)
    whole = train("ddp", tmp_path / "whole", 2, *argv, "--workers", "0")
    assert is_equal(newest_checkpoint(run)["model"], newest_checkpoint(whole)["model"])
    assert losses(run) == losses(whole)


def test_crops_differ_between_epochs_and_not_between_runs(images):
    import torch

    from recipes.common.data import load_data
    from recipes.single.train import options

    args = options([*WORDS, "--data-dir", str(images), "--workers", "0"])
    data = load_data(args, torch.device("cpu"), print)
    batches = [next(data.train.batches([torch.arange(6)], epoch))[0] for epoch in (0, 0, 1)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    alone = next(data.train.batches([torch.tensor([4])], 0))[0]
    assert torch.equal(alone[0], batches[0][4]), "a sample's crop does not depend on its batch"
    tests = [next(data.test.batches([torch.arange(6)], epoch))[0] for epoch in (0, 1)]
    assert torch.equal(*tests), "the test set is not augmented"


@pytest.fixture
def spoilt(images, tmp_path):
    """Return a copy of the images in which one training and one test image do not decode."""
    folder = shutil.copytree(images, tmp_path / "spoilt")
    (folder / "train" / "class1" / "3.JPEG").write_bytes(b"no image")
    cut = folder / "val" / "class2" / "1.JPEG"
    cut.write_bytes(cut.read_bytes()[:200])
    return folder


@pytest.mark.parametrize(("recipe", "world_size", "workers"), [("single", 1, 0), ("ddp", 2, 1)])
def test_a_bad_image_is_named(spoilt, tmp_path, recipe, world_size, workers):
    argv = (*WORDS, "--data-dir", str(spoilt), "--workers", str(workers))
    outcome = start_run(recipe, tmp_path, world_size, *argv).wait()
    assert str(spoilt / "train" / "class1" / "3.JPEG") in outcome.refusal
    assert "--skip-bad-images" in outcome.refusal


@pytest.mark.parametrize("recipe", ["ddp", *slow("pipeline")])
def test_a_bad_test_image_is_named_too(spoilt, images, single, tmp_path, recipe):
    shutil.copy(images / "train" / "class1" / "3.JPEG", spoilt / "train" / "class1" / "3.JPEG")
    bad = spoilt / "val" / "class2" / "1.JPEG"
    argv = (*WORDS, "--data-dir", str(spoilt), "--workers", "0", "--max-steps", "3")
    run = tmp_path / f"{recipe}-2"
    outcome = start_run(recipe, tmp_path, 2, *argv, name=run.name).wait()
    alone = "rank 1: " if recipe == "ddp" else ""  # whose share it is in; rank 0 prints the line
    assert outcome.refusal.startswith(f"error: {alone}{bad} does not decode")
    assert outcome.refusal in outcome.outputs[0]
    kept = {"step": 3, "epoch": 0, "averages": {}, "best_score": 0.0, "evaluated_step": 0}
    assert newest_checkpoint(run)["position"] | {"best_score": 0.0} == kept, "the evaluation is not"
    assert not accuracies(run)
    shutil.copy(images / "val" / "class2" / "1.JPEG", bad)
    train(recipe, tmp_path, 2, *argv, "--resume", "auto")
    ours, theirs = (metrics(folder)[-1] for folder in (run, single("--max-steps", "3")))
    assert (ours["test_accuracy"], ours["epoch"]) == (theirs["test_accuracy"], 1)
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-5)


@pytest.mark.slow
def test_bad_images_are_counted_and_skipped(spoilt, tmp_path):
    argv = (*WORDS, "--data-dir", str(spoilt), "--skip-bad-images")
    runs = [
        train("single", tmp_path, 1, *argv, "--workers", "0"),
        train("ddp", tmp_path, 3, *argv, "--workers", "1"),
        train("tensor", tmp_path, 2, *argv, "--workers", "0"),  # both ranks read all images
    ]
    for run in runs[1:]:
        assert losses(run) == pytest.approx(losses(runs[0]), rel=1e-5)
        assert accuracies(run) == accuracies(runs[0])
    counts = [[line["skipped_images"] for line in metrics(run) if "test_accuracy" in line] for run in runs]
    assert counts[0] == counts[1] == counts[2]
    assert counts[0][0] in (1, 2)  # the test image, and the training image if the epoch used it
    whole = [accuracy * 11 for accuracy in accuracies(runs[0])]  # 12 test images, one of which does not count
    assert whole == pytest.approx([round(value) for value in whole], abs=1e-9)
    assert (tmp_path / "output-single-1" / "rank0.txt").read_text().count("warning: skipped ") == counts[0][-1]


@pytest.mark.slow
def test_a_bad_image_that_a_rank_repeats_counts_once(images, tmp_path):
    """Rank 2 has none of two test images and repeats the first; --deterministic runs the first training image."""
    folder = shutil.copytree(images, tmp_path / "first")
    for path in sorted((folder / "val" / "class0").iterdir())[2:]:
        path.unlink()
    for number in range(1, CLASSES):
        shutil.rmtree(folder / "val" / f"class{number}")
    for split in ("train", "val"):
        (folder / split / "class0" / "0.jpg").write_bytes(b"no image")
    argv = (*WORDS, "--data-dir", str(folder), "--skip-bad-images", "--workers", "0")
    runs = [train("single", tmp_path, 1, *argv), train("ddp", tmp_path, 3, *argv)]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-5)
    counts = [[line["skipped_images"] for line in metrics(run) if "test_accuracy" in line] for run in runs]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_fewer_test_images_than_ranks(images, tmp_path):
    folder = shutil.copytree(images, tmp_path / "few")
    for number in range(1, CLASSES):
        shutil.rmtree(folder / "val" / f"class{number}")
    for i in range(1, VAL):
        next((folder / "val" / "class0").glob(f"{i}.*")).unlink()
    argv = (*WORDS, "--data-dir", str(folder), "--max-steps", "2")
    runs = [train(recipe, tmp_path, n, *argv, "--workers", "0") for recipe, n in (("single", 1), ("ddp", 3))]
    assert accuracies(runs[0]) == accuracies(runs[1])
    loss = [[line["test_loss"] for line in metrics(run) if "test_loss" in line] for run in runs]
    assert loss[0] == pytest.approx(loss[1], rel=1e-6)


def run_lines(*lines):
    """Run lines of Python in a process that can load data with workers; return its output."""
    imports = (
        f"import faulthandler; faulthandler.dump_traceback_later({TIMEOUT_S / 2})  # says where it hangs",
        "import os, torch",
        "from recipes.common.data import load_data",
        "from recipes.single.train import options",
        f"load = lambda *argv: load_data(options([*{WORDS}, *argv]), torch.device('cpu'), print)",
    )
    result = run_command(sys.executable, "-c", "\n".join((*imports, *lines)), check=True)
    return result.stdout


@pytest.mark.slow
def test_a_lock_that_a_thread_of_the_rank_holds_does_not_stop_a_worker(images):
    """A worker forked while the lock is held would wait for it for ever."""
    printed = run_lines(
        "lock = torch.storage._share_memory_lock  # a worker needs it, to hand over its first batch",
        "os.register_at_fork(before=lock.acquire, after_in_parent=lock.release)",
        f"data = load('--data-dir', {str(images)!r}, '--workers', '1')",
        "print([len(labels) for _, labels in data.train.batches([torch.arange(4)], 0)])",
    )
    assert printed == "[4]\n"


@pytest.mark.slow
def test_an_epoch_that_is_left_leaves_nothing_for_the_next(images):
    """Workers live on between epochs, and may have decoded ahead."""
    printed = run_lines(
        "found = []",
        "for workers in '02':",
        f"    data = load('--data-dir', {str(images)!r}, '--workers', workers)",
        "    next(data.train.batches(torch.arange(16).split(2), 0))",
        "    batches = data.train.batches(torch.arange(16).split(3), 1)",
        "    found.append(torch.cat([images for images, _ in batches]))",
        "print(found[0].shape[0], torch.equal(*found))",
    )
    assert printed == "16 True\n"


def wait_for_workers(rank):
    """Return all descendants of a rank once at least two of them are workers."""
    processes = []

    def is_complete():
        processes[:] = psutil.Process(rank.pid).children(recursive=True)
        return len([process for process in processes if process.ppid() != rank.pid]) >= 2

    wait_until(is_complete, TIMEOUT_S, "two workers")
    return processes


@pytest.mark.slow
def test_workers_outlive_a_signal_to_all_processes(images, tmp_path):
    """Slurm may send a signal to each process of a job."""
    argv = (*WORDS, "--data-dir", str(images), "--workers", "2", "--epochs", "500")
    job = start_run("ddp", tmp_path, 2, *argv)
    job.wait_for_step(tmp_path / "run", 2)
    workers = [process for rank in job.processes for process in wait_for_workers(rank)]
    for process in workers:
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in workers)
    job.send(signal.SIGTERM)
    outcome = job.wait(check=True)
    assert "stopped by SIGTERM: wrote " in outcome.outputs[0]
    assert "Traceback" not in outcome.text
    wait_until(lambda: all(map(has_ended, workers)), 10, lambda: f"no worker left: {workers}")


@pytest.mark.slow
def test_workers_end_when_their_rank_is_killed(images, tmp_path):
    argv = (*WORDS, "--data-dir", str(images), "--workers", "2", "--epochs", "500")
    job = start_run("ddp", tmp_path, 2, *argv)
    job.wait_for_step(tmp_path / "run", 2)
    workers = wait_for_workers(job.processes[0])
    job.send(signal.SIGKILL, [0])
    outcome = job.wait()
    assert outcome.statuses == [-signal.SIGKILL, 1], outcome.text
    wait_until(lambda: all(map(has_ended, workers)), 10, lambda: f"no worker left: {workers}")
