"""nn.DataParallel: on one device it is single, and says so; on several GPUs it has the same numbers."""

import re
import shlex
import sys

import pytest
import torch

from tests.conftest import need_gpus
from tests.support import (
    Ranks,
    accuracies,
    largest_difference,
    losses,
    newest_checkpoint,
    run_command,
    run_ranks,
    train,
    weights,
)

STEPS = shlex.split(
    "--max-steps 24 --checkpoint-every 12 --global-batch-size 96 --seed 2 --lr 0.01 --warmup-steps 5 "
    "--lr-schedule constant"
)


def test_every_step_equals_single(single, tmp_path):
    run = train("dataparallel", tmp_path, 1, *STEPS)
    exact = torch.cuda.device_count() < 2
    assert losses(run) == pytest.approx(losses(single), rel=0 if exact else 1e-5)
    assert accuracies(run) == accuracies(single)
    assert largest_difference(weights(run), weights(single)) <= (0 if exact else 1e-5)
    assert newest_checkpoint(run).keys() == newest_checkpoint(single).keys()


def test_bf16_equals_single(tmp_path):
    argv = ("--max-steps", "5", "--amp", "bf16")
    runs = [train(recipe, tmp_path, 1, *argv) for recipe in ("single", "dataparallel")]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=0 if torch.cuda.device_count() < 2 else 1e-2)


@pytest.mark.skipif(
    torch.cuda.device_count() > 1, reason="several GPUs are visible; CUDA_VISIBLE_DEVICES=0 for it"
)
def test_one_device_is_said_to_be_single(tmp_path):
    argv = ["--runs-dir", str(tmp_path), "--no-tensorboard", "--max-steps", "1"]
    text = run_ranks("dataparallel", argv, 1, tmp_path / "out").outputs[0]
    assert len(re.findall(r"^DataParallel has one device here .* RECIPE=single$", text, re.MULTILINE)) == 1
    assert text.splitlines()[-1].startswith("result recipe=dataparallel world_size=1 ")


@pytest.mark.parametrize("flag", ["--sync-batchnorm", "--compile"])
def test_what_replicas_cannot_do_is_refused(tmp_path, flag):
    need_gpus(2)
    outcome = Ranks("dataparallel", ["--runs-dir", str(tmp_path), flag], 1, tmp_path / "out").wait()
    assert "RECIPE=ddp" in outcome.refusal


@pytest.mark.slow
def test_make_run_starts_one_process_where_there_are_several_gpus(tmp_path):
    """Several GPUs still get one process; these two do not exist, so the run uses the CPU."""
    options = ["--max-steps", "1", "--device", "cpu", "--runs-dir", str(tmp_path), "--no-tensorboard"]
    command = [sys.executable, "-m", "scripts.launch.local", "dataparallel", "--", *options]
    done = run_command(*command, CUDA_VISIBLE_DEVICES="0,1", check=True)
    assert "result recipe=dataparallel world_size=1 " in done.stdout


def test_bad_input_is_one_line(tmp_path):
    argv = ["--runs-dir", str(tmp_path), "--model", "lenett"]
    assert "did you mean 'lenet'" in Ranks("dataparallel", argv, 1, tmp_path / "out").wait().refusal
