"""What ranks have to agree on before they train: the device, options, data, code; each refusal is one line."""

import functools
import importlib
import importlib.util
import os
import shutil

import pytest
import torch

from recipes.common import agreement, entry, imagefolder
from tests.conftest import require
from tests.images import make_images
from tests.support import Ranks, words_for


def refusal(outcome):
    """Return the one line by which all ranks end with status 2."""
    assert set(outcome.statuses) == {2}, outcome.text
    lines = [line for text in outcome.outputs for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, outcome.text
    assert "Traceback" not in outcome.text
    return lines[0]


def my_rank():
    return int(os.environ["RANK"])


# ---- the device


def leave_at_once():
    entry.REFUSAL_GRACE_S = 0.0  # no launcher ends these ranks


def see_gpus(count):
    leave_at_once()
    torch.cuda.device_count = lambda: count
    torch.cuda.get_device_name = lambda device=None: "a stand-in"


def see_a_gpu_on_rank_0():
    see_gpus(1 if my_rank() == 0 else 0)


def see_one_gpu():
    see_gpus(1)


@pytest.mark.parametrize("recipe", ["ddp", "pipeline", "probe"])
def test_a_node_without_a_gpu_among_others_that_have_one(tmp_path, recipe):
    """The one would exchange gradients through gloo, the others through NCCL, and all would wait for ever."""
    argv = ["--timeout-s", "20"]
    line = refusal(Ranks(recipe, argv, 2, tmp_path, nodes=2, setup=see_a_gpu_on_rank_0).wait(60))
    assert line.startswith("error: rank 0 on ")
    assert " has a GPU, rank 1 on " in line
    assert line.endswith("make GPUs visible on every node, or use --device cpu on all")


@pytest.mark.parametrize("recipe", ["ddp", "pipeline", "probe"])
def test_fewer_gpus_than_processes(tmp_path, recipe):
    """A job that could use GPUs does not train on CPUs unasked."""
    line = refusal(Ranks(recipe, ["--timeout-s", "20"], 2, tmp_path, setup=see_one_gpu).wait(60))
    assert line.startswith("error: --device auto: 2 processes on ")
    assert line.endswith(
        " need a GPU each, 1 visible; start at most 1 on each node (NPROC_PER_NODE) or use --device cpu"
    )


def test_cpus_can_be_asked_for_where_there_are_gpus(tmp_path):
    argv = words_for(tmp_path, "cpu", "--max-steps", "1", "--device", "cpu")
    outcome = Ranks("ddp", argv, 2, tmp_path / "out", setup=see_one_gpu).wait()
    assert outcome.statuses == [0, 0], outcome.text


# ---- options, data, code and libraries


def change(name, value):
    """Let rank 1 alone see another fact."""
    leave_at_once()
    facts = agreement.training_facts
    agreement.training_facts = lambda *args: {**facts(*args), name: value} if my_rank() == 1 else facts(*args)


def refused(recipe, folder, **how):
    argv = words_for(folder, recipe, "--max-steps", "1")
    return refusal(Ranks(recipe, argv, 2, folder / "out", **how).wait())


@pytest.mark.parametrize("recipe", ["ddp", "spawn", "apex", "pipeline", "scratch", "horovod"])
def test_other_options_on_a_rank(tmp_path, recipe):
    if recipe == "horovod":
        require("horovod", importlib.util.find_spec("horovod"), "Horovod is not built", "run `make horovod`")
    line = refused(recipe, tmp_path, own_argv={1: ["--lr", "0.5", "--seed", "7"]}, setup=leave_at_once)
    assert line.startswith("error: rank 1: --lr is 0.5 on ")
    assert line.endswith(", and 0.02 on rank 0; start all ranks with the same options, data, code and libraries")
    assert not (tmp_path / recipe).exists(), "nothing was recorded"


@pytest.mark.parametrize("name", ["recipes/common/optim.py", "recipes/ddp/train.py", "torch", "the test set"])
def test_other_code_libraries_or_data_on_a_rank(tmp_path, name):
    line = refused("ddp", tmp_path, setup=functools.partial(change, name, "another"))
    assert line.startswith(f"error: rank 1: {name} is another on ")


def test_what_decides_a_run_is_compared():
    args = importlib.import_module("recipes.ddp.train").options([])
    data = agreement.load_data(args, torch.device("cpu"), print)
    facts = agreement.training_facts(args, "ddp", data)
    flags = {f"--{name.replace('_', '-')}" for name in args.as_dict()}
    local = {"--config", "--data-dir", "--runs-dir", "--workers"}
    assert {name for name in facts if name.startswith("--")} == flags - local
    assert {"recipes/ddp/train.py", "recipes/common/job.py", "python", "torch", "the training set"} <= set(facts)
    assert facts["torch"] == torch.__version__.split("+")[0] or facts["torch"] == torch.__version__
    first, second = data.train.fingerprint(), data.test.fingerprint()
    assert first.startswith("1437 samples with digest ")
    assert second.startswith("360 samples with digest ")
    data.test.labels[7] += 1
    assert data.test.fingerprint() != second


# ---- folders of images


def count_walks():
    walk = imagefolder.walk

    def counted(folder):
        print(f"walked {folder}", flush=True)
        return walk(folder)

    imagefolder.walk = counted


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    make_images(folder)
    return folder


IMAGES = ("--data", "imagefolder", "--image-size", "16", "--global-batch-size", "8", "--workers", "0")


def test_one_rank_walks_a_folder_that_all_ranks_see(images, tmp_path):
    argv = words_for(tmp_path, "walk", *IMAGES, "--data-dir", str(images), "--max-steps", "1")
    outcome = Ranks("ddp", argv, 2, tmp_path / "out", setup=count_walks).wait()
    assert outcome.statuses == [0, 0], outcome.text
    assert [text.count("walked ") for text in outcome.outputs] == [1, 0]


def test_an_image_that_a_rank_lacks(images, tmp_path):
    """It would have another permutation of the samples, and train on others than the curve says."""
    copy = tmp_path / "copy"
    shutil.copytree(images, copy)
    own = {0: ["--data-dir", str(images)], 1: ["--data-dir", str(copy)]}
    argv = words_for(tmp_path, "same", *IMAGES, "--max-steps", "1")
    outcome = Ranks("ddp", argv, 2, tmp_path / "a", own_argv=own).wait()
    assert outcome.statuses == [0, 0], outcome.text
    missing = sorted((copy / "train").rglob("*.*"))[3]
    missing.unlink()
    argv = words_for(tmp_path, "less", *IMAGES)
    line = refusal(Ranks("ddp", argv, 2, tmp_path / "b", own_argv=own, setup=leave_at_once).wait())
    assert line.startswith(f"error: rank 1: --data-dir {copy} on ")
    assert f" lacks {missing.relative_to(copy)}, which rank 0 has; " in line


# ---- the evaluation


def lose_a_sample():
    recipe = importlib.import_module("recipes.ddp.train")
    shard = recipe.shard
    recipe.shard = lambda *args: shard(*args)[1:] if my_rank() == 1 else shard(*args)


def test_an_evaluation_that_leaves_a_sample_out_fails(tmp_path):
    argv = words_for(tmp_path, "lossy", "--max-steps", "1")
    outcome = Ranks("ddp", argv, 2, tmp_path / "out", setup=lose_a_sample).wait()
    assert set(outcome.statuses) == {1}, outcome.text
    assert "evaluated 359 samples and skipped 0 of 360" in outcome.outputs[0]
