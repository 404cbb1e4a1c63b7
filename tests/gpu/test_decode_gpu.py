"""--decode gpu on a GPU: its pixels beside those of the workers, and a run with each."""

import pytest
import torch

from recipes.common.data import gpu_decode, load_data
from recipes.common.data.images import import_nvimgcodec
from recipes.single.train import options
from tests.conftest import need_gpus, require
from tests.images import make_images
from tests.support import losses, train

LEVELS = 2 / 58
"""Two levels of 256, in the units of normalised pixels: decoders and scaling round differently."""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    need_gpus(real=True)
    remedy = "pip install 'nvidia-nvimgcodec-cu13[nvjpeg]'"
    require("nvimgcodec", import_nvimgcodec(), "nvImageCodec is not installed", remedy)
    folder = make_images(tmp_path_factory.mktemp("images"))
    return "--data", "imagefolder", "--data-dir", str(folder), "--image-size", "32", "--workers", "1"


@pytest.mark.parametrize("half", ["train", "test"])
def test_pixels_are_nearly_those_of_the_workers(words, monkeypatch, half):
    monkeypatch.setattr(gpu_decode, "decode", None)  # no JPEG may fall back to a CPU
    device = torch.device("cuda", 0)
    both = [options([*words, *more]) for more in ((), ("--decode", "gpu"))]
    splits = [getattr(load_data(args, device, print), half) for args in both]
    order = torch.arange(len(splits[0])).split(8)
    for ours, theirs in zip(splits[1].batches(order, 2), splits[0].batches(order, 2), strict=True):
        assert torch.equal(ours[1], theirs[1])
        assert ours[0].device == device
        assert (ours[0] - theirs[0]).abs().mean() < LEVELS


def test_a_run_has_nearly_the_same_losses(words, tmp_path):
    words = (*words, "--device", "cuda", "--max-steps", "12", "--global-batch-size", "9", "--deterministic")
    ours = train("single", tmp_path / "gpu", 1, *words, "--decode", "gpu")
    theirs = train("single", tmp_path / "workers", 1, *words)
    assert losses(ours) == pytest.approx(losses(theirs), rel=0.02)
    assert len(losses(ours)) == 12
