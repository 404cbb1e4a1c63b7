"""Every minimal.py on one, two and four GPUs has the curve of single's on a CPU, also after a resume on more GPUs.

test_context_gpu.py has the page of context.
"""

from __future__ import annotations

import pytest

from tests.conftest import need_gpus
from tests.gpu.test_every_recipe_gpu import FP32, first_gpus, need_own_library
from tests.parallel.test_minimal import ON_DIGITS, PAGES, options_of, run

CASES = [(page, gpus) for page in ON_DIGITS for gpus in (1, 2, 4) if gpus == 1 or page != "single"]


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    """Return the run of single's page on a CPU."""
    need_gpus()
    return run("single", tmp_path_factory.mktemp("cpu"), 1, ["--epochs", "2"], CUDA_VISIBLE_DEVICES="")


def run_on_gpus(page, gpus, folder, *argv):
    """Run a page with a process for each GPU, or one for all of them; return what it printed."""
    need_gpus(gpus)
    need_own_library(page)
    own, started = options_of(page, gpus, min(gpus, 2)) if page in PAGES[2:] else ([], 1)
    env = {"CUDA_VISIBLE_DEVICES": first_gpus(gpus), "NVIDIA_TF32_OVERRIDE": "0"}
    found = run(page, folder, started, [*argv, *own], **env)
    assert found.result[:2] == (page, gpus if page in PAGES[2:] else 1)
    return found


def assert_same_evaluations(found, cpu):
    for epoch, (loss, accuracy) in found.evaluations.items():
        expected_loss, expected_accuracy = cpu.evaluations[epoch]
        assert loss == pytest.approx(expected_loss, rel=FP32)
        assert accuracy == pytest.approx(expected_accuracy, abs=0.003)  # one of 360 images


@pytest.mark.parametrize(("page", "gpus"), CASES)
def test_it_has_the_cpus_curve(tmp_path, cpu, page, gpus):
    found = run_on_gpus(page, gpus, tmp_path, "--epochs", "2")
    assert len(found.losses) == 44
    assert found.losses == pytest.approx(cpu.losses, rel=FP32)
    assert list(found.evaluations) == [1, 2]
    assert_same_evaluations(found, cpu)


@pytest.mark.parametrize("page", ["fsdp", "tensor", "pipeline"])
def test_it_goes_on_on_more_gpus(tmp_path, cpu, page):
    """Rank 0 reads weights and momentum into main memory; NCCL takes what is on a GPU alone."""
    path = ("--checkpoint", str(tmp_path / "checkpoint.pt"))
    first = run_on_gpus(page, 2, tmp_path, "--epochs", "1", *path)
    later = run_on_gpus(page, 4, tmp_path, "--epochs", "2", *path)
    assert (list(first.evaluations), list(later.evaluations)) == ([1], [2])
    assert not first.losses.keys() & later.losses.keys()
    assert first.losses | later.losses == pytest.approx(cpu.losses, rel=FP32)
    assert_same_evaluations(later, cpu)
