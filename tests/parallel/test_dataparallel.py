"""nn.DataParallel on one device: it is single, and says so. tests/gpu has it on several."""

import functools
import re
import sys

import pytest
import torch

from recipes.dataparallel import train as recipe
from tests.support import Ranks, run_command, start_run


def test_one_device_is_said_to_be_single(tmp_path):
    text = start_run("dataparallel", tmp_path, 1, "--max-steps", "1").wait(check=True).outputs[0]
    assert len(re.findall(r"^DataParallel has one device here .* RECIPE=single$", text, re.MULTILINE)) == 1
    assert text.splitlines()[-1].startswith("result recipe=dataparallel world_size=1 ")


@pytest.mark.slow
def test_make_run_starts_one_process_where_there_are_several_gpus(tmp_path):
    """Several GPUs still get one process; these two do not exist, so the run uses the CPU."""
    options = ["--max-steps", "1", "--device", "cpu", "--runs-dir", str(tmp_path), "--no-tensorboard"]
    command = [sys.executable, "-m", "scripts.launch.local", "dataparallel", "--", *options]
    done = run_command(*command, CUDA_VISIBLE_DEVICES="0,1", check=True)
    assert "result recipe=dataparallel world_size=1 " in done.stdout


def use_devices(number):
    recipe.choose_devices = lambda wanted: [torch.device("cpu")] * number


@pytest.mark.parametrize(
    ("size", "devices", "end"),
    [(5, 4, "give at least 8"), (10, 4, "give a multiple of 4"), (3, 2, "give at least 4")],
)
def test_a_batch_of_which_a_device_would_get_one_sample_is_refused(tmp_path, size, devices, end):
    """DataParallel gives each device the same number, rounded up, and the last one the rest: 3, 3, 3, 1."""
    words = ["--runs-dir", str(tmp_path), "--model", "resnet18", "--global-batch-size", str(size)]
    setup = functools.partial(use_devices, devices)
    outcome = Ranks("dataparallel", words, 1, tmp_path / "out", setup=setup).wait()
    parts = f"--global-batch-size {size} is {devices} parts, some of one sample, and batch norm of"
    assert parts in outcome.refusal
    assert outcome.refusal.endswith(f"needs two; {end}")
