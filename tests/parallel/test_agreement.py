"""What ranks have to agree on before they train: the device, options, data, code; each refusal is one line."""

import os

import pytest
import torch

from recipes.common import entry
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


def see_gpus(count):
    torch.cuda.device_count = lambda: count
    torch.cuda.get_device_name = lambda device=None: "a stand-in"
    entry.REFUSAL_GRACE_S = 0.1  # no launcher ends these ranks


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
