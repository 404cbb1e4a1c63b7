"""What make bench measures the recipes against does the same work."""

import argparse

import psutil
import pytest
import torch
from torch.nn.functional import cross_entropy

from recipes.common.models.models import LeNet
from scripts.bench import jpeg, programs
from scripts.bench.contenders import lenet
from tests.support import has_ended, wait_until


def test_the_lenet_of_the_tutorials_is_that_of_the_recipes(tmp_path):
    """The recipes pool before ReLU; the loss and the gradients differ by rounding only."""
    torch.manual_seed(0)
    ours = LeNet(1, 28, 10)
    torch.save({"weights": [parameter.detach() for parameter in ours.parameters()]}, tmp_path / "start.pt")
    theirs = lenet.model_of(argparse.Namespace(begin_with=tmp_path / "start.pt"))
    images, labels = torch.randn(32, 1, 28, 28), torch.arange(32) % 10
    losses = [cross_entropy(model(images), labels) for model in (ours, theirs)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_the_photographs_are_like_those_of_imagenet(tmp_path):
    assert 100 < jpeg.write_photos(tmp_path, 6) < 120
    assert len(list(tmp_path.rglob("*.jpg"))) == 8


def test_nothing_of_a_contender_outlives_its_time_limit(monkeypatch, tmp_path):
    """Torchrun's workers do not end with it."""
    pid = tmp_path / "pid"
    monkeypatch.setattr(programs, "TIMEOUT_S", 1)
    with pytest.raises(RuntimeError, match="took longer than 1 s"):
        programs.run(["bash", "-c", f"sleep 60 & echo $! > {pid}; wait"])
    sleeping = int(pid.read_text())
    wait_until(
        lambda: not psutil.pid_exists(sleeping) or has_ended(psutil.Process(sleeping)), 5, "the sleep has ended"
    )


@pytest.mark.parametrize("after", ["", "\n", "[Gloo] Rank 0 is connected to 1 peer ranks\n", "12\n"])
def test_a_contender_s_result_is_found_between_the_lines_of_libraries(monkeypatch, after):
    monkeypatch.setattr(programs, "run", lambda *_: 'warmed up\n{"step_ms": 1.5}\n' + after)
    assert programs.contender("bare_step", []) == {"step_ms": 1.5}


def test_a_contender_without_a_result_is_an_error_that_shows_what_it_printed(monkeypatch):
    monkeypatch.setattr(programs, "run", lambda *_: "no server\n")
    with pytest.raises(RuntimeError, match=r"contenders.bare_step.* printed no result, but: 'no server\\n'"):
        programs.contender("bare_step", [])
