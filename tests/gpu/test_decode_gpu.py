"""--decode gpu on a GPU: its pixels beside those of the workers, and a run with each."""

import pytest
import torch

from recipes.common.data import gpu_decode, load_data
from recipes.common.data.images import CropBox, import_nvimgcodec
from recipes.common.data.workers import Sample
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


class Engine:
    """Writes each image to the same memory as soon as it is called, as a GPU's JPEG engine does."""

    def __init__(self):
        need_gpus()
        self.device, self.calls = torch.device("cuda", 0), 0
        self.memory = torch.zeros(4, 4, 3, dtype=torch.uint8, device=self.device)
        self.stream = torch.cuda.Stream(self.device)

    def __call__(self, parts):
        self.calls += 1
        with torch.cuda.stream(self.stream):
            self.memory.fill_(self.calls)
        self.stream.synchronize()
        return [self.memory for _ in parts]


def test_a_batch_keeps_its_pixels_while_the_next_one_is_decoded():
    """Training is behind: it reads a batch when the engine has written the images of the next one."""
    decode = gpu_decode.BatchDecoder(4, lambda pixels, is_flipped: pixels, str, Engine())
    sample = Sample(gpu_decode.encode(b"a JPEG", 0, False, CropBox(0, 0, 4, 4)), torch.tensor(1), "", False)
    batches = []
    for _ in range(3):
        torch.cuda._sleep(200_000_000)  # cycles: some 0.1 s of training that is queued
        batches.append(decode(gpu_decode.collate([sample] * 2))[0])
    assert [batch.unique().tolist() for batch in batches] == [[1], [2], [3]]


@pytest.mark.parametrize("name", ["train", "test"])
def test_pixels_are_nearly_those_of_the_workers(words, monkeypatch, name):
    monkeypatch.setattr(gpu_decode, "decode", None)  # no JPEG may fall back to a CPU
    device = torch.device("cuda", 0)
    both = [options([*words, *more]) for more in ((), ("--decode", "gpu"))]
    splits = [getattr(load_data(args, device, print), name) for args in both]
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
