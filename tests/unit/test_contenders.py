"""What make bench measures the recipes against does the same work."""

import argparse

import torch
from torch.nn.functional import cross_entropy

from recipes.common.models.models import LeNet
from scripts.bench import jpeg
from scripts.bench.contenders import lenet


def test_the_lenet_of_the_tutorials_is_that_of_the_recipes(tmp_path):
    """The recipes pool before ReLU; neither the loss nor a gradient differs by more than rounding."""
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
    assert max(jpeg.differences(tmp_path)) < 0.5
