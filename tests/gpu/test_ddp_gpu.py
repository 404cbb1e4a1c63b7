"""What only GPUs show: NCCL, mixed precision in hardware, batch norm over all ranks, compiled models.

make test ARGS=tests/gpu            skips tests that the machine cannot run
REQUIRE=gpu make test ARGS=tests/gpu
"""

import os
import signal
import time

import pytest
import torch

from recipes.common.data.idle_clock import IdleClock
from tests.conftest import need_gpus
from tests.support import (
    FIRST_STEP_LEFT_OUT,
    Interrupt,
    Ranks,
    accuracies,
    is_equal,
    largest_difference,
    local,
    losses,
    newest_checkpoint,
    run_ranks,
    train,
    weights,
    words_for,
)

# TF32 would round otherwise where shares differ: emulated on a CPU, losses of 60 steps then differ by up to 1%.
STEPS = ("--device", "cuda", "--max-steps", "60", "--seed", "1", "--deterministic", "--no-tf32")
GPUS = torch.cuda.device_count()


@pytest.fixture(autouse=True)
def gpu():
    need_gpus()


@pytest.fixture
def two_gpus():
    need_gpus(2)


def assert_same_run(run, single, tolerance):
    assert len(losses(run)) == len(losses(single)) > 0
    assert losses(run) == pytest.approx(losses(single), rel=tolerance)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return the run of single on a GPU; test_every_recipe_gpu.py holds it against a CPU's."""
    need_gpus()
    return train("single", tmp_path_factory.mktemp("single"), 1, *STEPS)


@pytest.mark.parametrize("argv", [("--accumulate-steps", "3"), ("--no-channels-last",), ("--zero",)], ids=str)
def test_options_keep_the_curve(tmp_path, single, argv):
    run = train("ddp", tmp_path, 1, *STEPS, *argv)
    assert_same_run(run, single, 1e-4)
    assert abs(accuracies(run)[-1] - accuracies(single)[-1]) <= 3 * 0.011


def test_every_gpu_together_equals_one(tmp_path, two_gpus, single):
    run = train("ddp", tmp_path, min(GPUS, 8), *STEPS)
    assert_same_run(run, single, 1e-4)
    assert largest_difference(weights(run), weights(single)) < 1e-3


def test_two_nodes_share_the_gpus_out(tmp_path, two_gpus, single):
    every = ",".join(map(str, range(GPUS)))  # where there is no nvidia-smi to list them
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", every)}
    local("ddp", 2, GPUS // 2, *words_for(tmp_path, "a", *STEPS), **env).wait(check=True)
    assert_same_run(tmp_path / "a", single, 1e-4)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_mixed_precision_stays_close(tmp_path, kind):
    """A pass rounds about 10 times, independently in each step; fp16 gets a factor of 3 as in tests/parallel."""
    unit = {"fp16": 3 * 2**-11, "bf16": 2**-8}[kind]
    run = train("ddp", tmp_path, 1, *STEPS, "--amp", kind)
    single = train("single", tmp_path, 1, *STEPS, interrupt=FIRST_STEP_LEFT_OUT if kind == "fp16" else None)
    assert_same_run(run, single, (10 * 60) ** 0.5 * unit)
    assert losses(run) != losses(single)
    assert newest_checkpoint(run)["scaler"].get("scale") == (2**15 if kind == "fp16" else None)


def test_resume_is_exact(tmp_path):
    argv = (*STEPS, "--amp", "fp16", "--clip-grad-norm", "0.5")
    whole = train("ddp", tmp_path / "whole", 1, *argv)
    when = Interrupt(signal.SIGUSR1, 10)
    run_ranks("ddp", words_for(tmp_path, "ddp-1", *argv), 1, tmp_path / "out", interrupt=when)
    run = train("ddp", tmp_path, 1, *argv, "--resume", "auto")
    ours, theirs = ({**newest_checkpoint(each), "timed": None} for each in (run, whole))  # all but the clock
    assert is_equal(ours, theirs)
    assert losses(run) == losses(whole)


def test_a_gpu_run_goes_on_on_the_cpu(tmp_path):
    train("ddp", tmp_path, 1, *STEPS, "--max-steps", "20")
    run = train("ddp", tmp_path, 1, *STEPS, "--max-steps", "30", "--device", "cpu", "--resume", "auto")
    assert len(losses(run)) == 30


def test_batch_norm_over_all_ranks_equals_one_process(tmp_path, two_gpus):
    """On every rank, the statistics are those of the whole batch, as in the one-process run.

    Without ReLU, whose slope jumps at 0: one input that rounding puts on the other side of it changes the weights.
    """
    need_gpus(real=True)
    argv = (*STEPS, "--model", "tests.observe:smooth_resnet18", "--max-steps", "10", "--lr", "0.01")
    run = train("ddp", tmp_path, 2, *argv, "--sync-batchnorm")
    single = train("single", tmp_path, 1, *argv)
    assert_same_run(run, single, 1e-4)
    mean = "bn1.running_mean"
    torch.testing.assert_close(weights(run)[mean], weights(single)[mean], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_learns_the_same(mode, tmp_path):
    need_gpus(real=True)
    argv = ("--device", "cuda", "--max-steps", "20", "--seed", "1", "--no-tf32")
    compiled = train("ddp", tmp_path, 1, *argv, "--compile", "--compile-mode", mode)
    assert_same_run(compiled, train("single", tmp_path, 1, *argv), 1e-3)


def test_more_processes_than_gpus_is_refused(tmp_path):
    job = Ranks("ddp", words_for(tmp_path, "a", *STEPS), GPUS + 1, tmp_path / "out")
    outcome = job.wait()
    assert set(outcome.statuses) == {2}
    assert outcome.text.count("error: --device cuda: ") == 1


def test_tf32_rounds_otherwise(tmp_path, single):
    need_gpus(real=True)
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs TF32, which Turing has not; use a GPU from Ampere on")
    assert losses(train("single", tmp_path, 1, *STEPS, "--tf32")) != losses(single)


def test_a_gpu_gets_the_fused_optimizer(single):
    assert newest_checkpoint(single)["optimizer"]["param_groups"][0]["fused"] is True


def test_permanently_bad_gradients_end_an_fp16_run(tmp_path):
    """The loss scale is read when a loss is logged: it falls from 2^16 to below 1 in 17 steps."""
    words = words_for(tmp_path, "run", *STEPS, "--amp", "fp16")
    fault = Interrupt(signal.SIGCONT, 0, None, "gradient")
    outcome = Ranks("ddp", words, 1, tmp_path / "out", interrupt=fault).wait()
    assert outcome.statuses == [1], outcome.text
    assert "a gradient of step 17 is not finite; the loss scale has collapsed to 0.5" in outcome.text


def test_a_gpu_that_works_meanwhile_does_not_wait_for_data():
    need_gpus(real=True)
    device = torch.device("cuda", 0)
    clock = IdleClock(device)
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    with clock.waiting():
        time.sleep(0.2)
    torch.cuda.synchronize()
    assert clock.seconds() < 0.05
    with clock.waiting():
        time.sleep(0.2)
    torch.cuda.synchronize()
    assert 0.15 < clock.seconds() < 1
