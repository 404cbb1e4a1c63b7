"""Evaluation counts every sample exactly once, however many ranks share the test set."""

import functools

import pytest
import torch
from torch.nn.functional import cross_entropy

from recipes.common.checkpoint import CheckpointFolder
from recipes.common.data import load_data
from recipes.common.models import build_model
from recipes.single.train import options
from tests.support import metrics, newest_checkpoint, run_ranks, train, words_for

CPU = torch.device("cpu")

DATA = {
    "101 of 101": ("--data", "synthetic", "--num-samples", "808", "--image-size", "8"),
    "1 for 7 ranks": (
        "--data",
        "synthetic",
        "--num-samples",
        "15",
        "--image-size",
        "8",
        "--global-batch-size",
        "14",
    ),
    "digits": (),
}


@functools.cache
def trained(folder, *argv):
    """Return a checkpoint that lacks only the evaluation of its last epoch."""
    run = train("single", folder, 1, *argv, "--max-steps", "12", "--lr-schedule", "constant", "--lr", "0.01")
    content = newest_checkpoint(run)
    content["position"]["epoch"] -= 1
    content["position"]["best_accuracy"] = -1.0
    return CheckpointFolder(folder / "unevaluated").write(content)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("recipe", "world_size"), [("single", 1), ("ddp", 1), ("ddp", 2), ("ddp", 3), ("ddp", 7)])
def test_every_sample_counts_once(tmp_path_factory, tmp_path, data, recipe, world_size):
    argv = ("--seed", "1", *DATA[data])
    path = trained(tmp_path_factory.getbasetemp() / data.replace(" ", "-"), *argv)
    words = words_for(tmp_path, "eval", *argv, "--max-steps", "12", "--resume", str(path))
    run_ranks(recipe, words, world_size, tmp_path / "out")
    (line,) = metrics(tmp_path / "eval")

    # The same without batches, ranks or sums: one sample after the other.
    args = options([*argv])
    samples = load_data(args, CPU, print)
    model = build_model(args, samples)
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    model.eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for image, label in samples.test.batches(torch.arange(len(samples.test)).split(1), 0):
            logits = model(image)
            correct += int(logits.argmax(1) == label)
            loss += float(cross_entropy(logits, label).double())
    assert line["test_accuracy"] == correct / len(samples.test)
    assert line["test_loss"] == pytest.approx(loss / len(samples.test), rel=1e-6)


def test_the_sizes_do_not_divide():
    sizes = [len(load_data(options([*argv]), CPU, print).test) for argv in DATA.values()]
    assert sizes == [101, 1, 360]


def test_a_trained_network_is_evaluated_alike_with_batch_norm(tmp_path):
    """Ranks gather statistics of their own shares; all evaluate with rank 0's, so that the counts fit together."""
    argv = ("--model", "resnet18", "--max-steps", "2", "--global-batch-size", "16", "--seed", "1")
    run = train("ddp", tmp_path, 2, *argv)
    (line,) = [line for line in metrics(run) if "test_accuracy" in line]
    args = options([*argv])
    samples = load_data(args, CPU, print)
    model = build_model(args, samples)
    model.load_state_dict(newest_checkpoint(run)["model"])
    model.eval()
    with torch.no_grad():
        batches = list(samples.test.batches(torch.arange(360).split(120), 0))
        correct = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in batches)
    assert line["test_accuracy"] == correct / 360
