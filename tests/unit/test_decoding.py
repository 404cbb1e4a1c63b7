"""Decoding a part of an image gives the pixels of the whole; crops are distributed as torchvision's."""

import copy
import io
import os
import random
import struct
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from scipy.stats import ks_2samp
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from recipes.common.data import gpu_decode, imagefolder, images, load_data
from recipes.common.data.gpu_decode import BatchDecoder, PartDecoder, collate
from recipes.common.data.imagefolder import ImageFolder, centre_crop, random_box, resize, whole_box
from recipes.common.data.images import BAD_IMAGE, CropBox, decode, find_part, read
from recipes.common.data.workers import LoadedSplit, start_server
from recipes.common.errors import UserError
from recipes.common.seeding import hash_seed
from recipes.common.task import SKIPPED
from recipes.single.train import options
from tests.support import write_program

CPU = torch.device("cpu")
WIDTH, HEIGHT = 83, 61


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def picture():
    """Return an image with smooth parts, edges and noise, like a photograph."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    noise = np.random.default_rng(0).normal(0, 12, (HEIGHT, WIDTH, 3))
    waves = np.stack([128 + 100 * np.sin(x / 9 + y / 17), 2 * x + y, 255 * (x * y % 37 > 20)], axis=2)
    return Image.fromarray((waves + noise).clip(0, 255).astype(np.uint8))


def encoded(image, **settings):
    memory = io.BytesIO()
    image.save(memory, **{"format": "JPEG", "quality": 90, **settings})
    return memory.getvalue()


def patched(content, old, new):
    assert content.count(old) == 1
    return content.replace(old, new)


def rotated_exif():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


KINDS = {
    "4:2:0": lambda: encoded(picture(), subsampling=2),
    "4:2:2": lambda: encoded(picture(), subsampling=1),
    "4:4:4": lambda: encoded(picture(), subsampling=0),
    "progressive": lambda: encoded(picture(), progressive=True),
    "restart markers": lambda: encoded(picture(), restart_marker_blocks=3),
    "RGB within": lambda: encoded(picture(), keep_rgb=True),
    "grey": lambda: encoded(picture().convert("L")),
    "CMYK": lambda: encoded(picture().convert("CMYK")),
    "turned by EXIF": lambda: encoded(picture(), exif=rotated_exif()),
    "something behind its end": lambda: encoded(picture()) + b"\0\0more",
    "PNG": lambda: encoded(picture(), format="PNG"),
    "PNG with a palette and transparency": lambda: encoded(picture().convert("P"), format="PNG", transparency=3),
    "BMP": lambda: encoded(picture(), format="BMP"),
    "GIF": lambda: encoded(picture().convert("P"), format="GIF"),
}


@pytest.fixture(params=["nvImageCodec", "Pillow"])
def decoder(request, monkeypatch):
    """Decode with nvImageCodec if it is available, or with Pillow alone."""
    if request.param == "Pillow":
        monkeypatch.setattr(images, "import_nvimgcodec", lambda: None)
    elif not images.import_nvimgcodec():
        pytest.skip("nvidia-nvimgcodec-cu13 is not made for this system")
    return request.param


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_the_pixels_of_the_whole(kind):
    content = KINDS[kind]()
    with Image.open(io.BytesIO(content)) as image:
        expected = np.array(image.convert("RGB"))
    chance = random.Random(0)
    boxes = [CropBox(0, 0, WIDTH, HEIGHT), CropBox(WIDTH - 1, HEIGHT - 1, 1, 1), CropBox(0, HEIGHT - 1, WIDTH, 1)]
    for _ in range(20):
        left, top = chance.randrange(WIDTH), chance.randrange(HEIGHT)
        boxes.append(CropBox(left, top, chance.randint(1, WIDTH - left), chance.randint(1, HEIGHT - top)))
    for box in boxes:
        asked = []
        part = decode(content, lambda *size, box=box, asked=asked: (asked.append(size), box)[1])
        assert set(asked) == {(WIDTH, HEIGHT)}
        assert part.dtype == torch.uint8
        inside = expected[box.top : box.top + box.height, box.left : box.left + box.width]
        assert np.array_equal(part.numpy(), inside), box


@pytest.mark.parametrize("kind", ["4:2:0", "progressive"])
def test_plain_jpegs_are_decoded_in_part(monkeypatch, kind):
    """Otherwise the tests above would pass without partial decoding."""
    if not images.import_nvimgcodec():
        pytest.skip("nvidia-nvimgcodec-cu13 is not made for this system")
    content = KINDS[kind]()
    monkeypatch.setattr(Image, "open", None)
    assert decode(content, lambda *_: CropBox(3, 5, 7, 9)).shape == (9, 7, 3)


class VisibleGPUs:
    """A data set of one sample: which of two GPUs a process sees once it has decoded an image."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
        decode(KINDS["4:2:0"](), whole_box)
        return os.environ["CUDA_VISIBLE_DEVICES"]


def test_workers_that_decode_see_no_gpu(monkeypatch):
    """When it is imported, nvImageCodec calls nvjpegCreateEx(), which makes a CUDA context on the first GPU."""
    if not images.import_nvimgcodec():
        pytest.skip("nvidia-nvimgcodec-cu13 is not made for this system")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # to be restored
    assert VisibleGPUs()[0] == "0,1"  # a rank trains on its own
    loader = DataLoader(VisibleGPUs(), batch_size=None, num_workers=1, multiprocessing_context=start_server())
    assert [*loader] == [""]


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("share", [0, 0.01, 0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "grey", "PNG"])
def test_a_cut_file_is_a_fault_wherever_the_crop_is(kind, share):
    content = KINDS[kind]()
    with pytest.raises(BAD_IMAGE):
        decode(content[: int(len(content) * share)], lambda *_: CropBox(0, 0, 4, 4))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "grey", "with a thumbnail"])
def test_a_jpeg_whose_end_is_zeros_is_a_fault(kind, share):
    """Its size is right, as after an interrupted copy. To decoders, zeros are pixels."""
    exif = Image.Exif()
    exif[0x927C] = KINDS["4:2:0"]()  # has an end marker
    content = encoded(picture(), exif=exif) if kind.startswith("with") else KINDS[kind]()
    end = max(16, int(len(content) * (1 - share)))
    with pytest.raises(BAD_IMAGE):
        decode(content[:-end] + bytes(end), lambda *_: CropBox(0, 0, 4, 4))
    assert decode(content + bytes(end), whole_box).shape == (HEIGHT, WIDTH, 3)
    assert decode(content + b"more" + bytes(end), whole_box).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_keeps_its_upper_8(kind):
    """Pillow's own conversion turns all values above 255, and so nearly every 16-bit image, white."""
    values = np.linspace(0, 65535, 20, dtype=np.uint16).reshape(4, 5)
    pixels = decode(encoded(Image.fromarray(values), format=kind), whole_box)
    assert np.array_equal(pixels.numpy(), np.repeat((values >> 8)[..., None], 3, axis=2))
    assert int(pixels.max()) == 255


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_values_of_32_bits_are_those_of_8_or_a_fault(kind):
    values = np.linspace(0, 255, 20).astype(kind).reshape(4, 5)
    pixels = decode(encoded(Image.fromarray(values), format="TIFF"), whole_box)
    assert np.array_equal(pixels[..., 0].numpy(), values.astype(np.uint8))
    with pytest.raises(ValueError, match=r"its values of 32 bits are 0.* to 510.*, not 0 to 255"):
        decode(encoded(Image.fromarray(values * 2), format="TIFF"), whole_box)


@pytest.mark.parametrize("kind", ["TIFF", "PPM"])
def test_fractions_are_a_fault_and_no_black_image(kind):
    values = np.linspace(0, 1, 20, dtype=np.float32).reshape(4, 5)
    with pytest.raises(ValueError, match=r"its values of 32 bits are 0.0 to 1.0, not 0 to 255"):
        decode(encoded(Image.fromarray(values), format=kind), whole_box)
    assert not decode(encoded(Image.fromarray(0 * values), format=kind), whole_box).any()


def test_grey_of_other_than_8_bits_in_pgm_keeps_its_share_of_white():
    pixels = decode(b"P5 3 1 1023\n" + struct.pack(">3H", 0, 512, 1023), whole_box)
    assert pixels[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.usefixtures("decoder")
def test_what_is_no_image_is_a_fault(tmp_path):
    for content in (
        b"",
        b"x",
        b"no image",
        b"\xff\xd8\xff\xe0\xff\xd9",
        b"\xff\xd8\xff" + bytes(1000) + b"\xff\xd9",
        patched(encoded(picture()), struct.pack(">HH", HEIGHT, WIDTH), struct.pack(">HH", 0, WIDTH)),
        # The place of the pixels as a quotient, for which Pillow raises a TypeError.
        patched(encoded(picture(), format="TIFF"), struct.pack("<HH", 273, 4), struct.pack("<HH", 273, 5)),
    ):
        with pytest.raises(BAD_IMAGE):
            decode(content, whole_box)
    with pytest.raises(BAD_IMAGE):
        decode(read(str(tmp_path / "none.jpg")), whole_box)


def test_no_image_is_run_as_a_program(tmp_path, monkeypatch):
    """Pillow lets Ghostscript run EPS files, whatever their names; those of a server may be anybody's."""
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # as in a new process
    write_program(tmp_path / "gs", f"#!/bin/sh\ntouch {tmp_path}/has-run")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(BAD_IMAGE):
        decode(encoded(picture(), format="EPS"), whole_box)
    assert not (tmp_path / "has-run").exists()


@pytest.mark.parametrize("kind", ["WEBP", "JPEG2000", "AVIF"])
def test_other_formats_are_read_whatever_the_name_of_a_file(kind):
    assert decode(encoded(picture(), format=kind), whole_box).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.usefixtures("decoder")
def test_an_image_of_too_many_pixels_is_a_fault(monkeypatch):
    content = KINDS["4:2:0"]()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", WIDTH * HEIGHT // 3)
    with pytest.raises(Image.DecompressionBombError):
        decode(content, whole_box)


class TestCrops:
    @pytest.mark.parametrize(("width", "height"), [(500, 375), (60, 64), (300, 40), (5, 400)])
    def test_boxes_are_distributed_as_those_of_torchvision(self, width, height):
        count = 1500
        ours = np.array([random_box(width, height, random.Random(hash_seed(1, i))) for i in range(count)])
        torch.manual_seed(0)
        transform, image = v2.RandomResizedCrop(224), torch.empty(3, height, width)
        drawn = [transform.make_params([image]) for _ in range(count)]
        theirs = np.array([[box[name] for name in ("left", "top", "width", "height")] for box in drawn])
        assert (ours[:, :2] >= 0).all()
        assert (ours[:, :2] + ours[:, 2:] <= (width, height)).all()
        area = [boxes[:, 2] * boxes[:, 3] for boxes in (ours, theirs)]
        ratio = [boxes[:, 2] / boxes[:, 3] for boxes in (ours, theirs)]
        pairs = [area, ratio, *zip(ours.T, theirs.T, strict=True)]
        # With fair draws, the least of six is below this once in 300 times; the draws here are always the same.
        assert min(ks_2samp(*pair).pvalue for pair in pairs) > 0.0005

    def test_long_and_narrow_images_give_their_centre(self):
        assert random_box(1000, 10, random.Random(0)) == CropBox(493, 0, 13, 10)
        assert random_box(10, 1000, random.Random(0)) == CropBox(0, 493, 10, 13)

    def test_boxes_stay_what_they_were(self):
        """A run that resumes with a newer version must see the same crops."""
        boxes = [random_box(500, 375, random.Random(hash_seed(0, epoch, 7))) for epoch in range(3)]
        assert boxes == BOXES

    def test_half_of_the_samples_are_flipped(self, tmp_path):
        image = Image.new("RGB", (64, 64), (255, 255, 255))
        image.paste((0, 0, 0), (0, 0, 32, 64))
        image.save(tmp_path / "image.png")
        dataset = ImageFolder([(str(tmp_path / "image.png"), 0)] * 400, 8, 0, train=True)
        sides = Counter()
        for i in range(400):
            pixels = dataset[0, i].input.float()
            left, right = float(pixels[:, :4].mean()), float(pixels[:, 4:].mean())
            sides[(left > right) - (left < right)] += 1
        assert abs(sides[1] - sides[-1]) < 4 * 20  # 20: the standard deviation of 400 fair coins' difference

    def test_pixels_are_those_of_torchvision(self):
        content = KINDS["4:2:0"]()
        rgb = Image.open(io.BytesIO(content)).convert("RGB")
        for i in range(20):
            box = random_box(WIDTH, HEIGHT, random.Random(i))
            ours = resize(decode(content, lambda *_, box=box: box), 32, 32)
            left, top, width, height = box
            theirs = v2.functional.resized_crop(rgb, top, left, height, width, [32, 32], antialias=True)
            assert np.abs(ours.numpy().astype(int) - np.array(theirs)).max() <= 1

    @pytest.mark.parametrize(("size", "place"), [(20, "GPU"), (7, "CPU")])
    def test_a_gpu_leaves_a_large_reduction_to_the_cpu(self, size, place):
        """Its kernel fails: too much shared memory required."""
        image = torch.from_numpy(np.array(picture().resize((700, 500))))
        ours = resize(image.as_subclass(OnGPU), size, size)
        assert isinstance(ours, OnGPU) == (place == "GPU")
        assert (ours.as_subclass(torch.Tensor).int() - resize(image, size, size).int()).abs().max() <= 1

    @pytest.mark.parametrize("size", [(83, 61), (61, 83), (50, 50), (300, 31), (400, 10), (7, 400), (1, 900)])
    def test_the_view_for_evaluation_is_that_of_torchvision(self, size):
        image = picture().resize(size)
        theirs = v2.Compose([v2.Resize(round(32 * 256 / 224)), v2.CenterCrop(32)])(image)
        ours = centre_crop(torch.from_numpy(np.array(image)), 32)
        assert np.abs(ours.numpy().astype(int) - np.array(theirs)).max() <= 1

    def test_the_shorter_side_for_evaluation_is_an_option(self):
        image = picture()
        theirs = v2.Compose([v2.Resize(33), v2.CenterCrop(32)])(image)
        ours = centre_crop(torch.from_numpy(np.array(image)), 32, 33)
        assert np.abs(ours.numpy().astype(int) - np.array(theirs)).max() <= 1

    def test_a_thin_image_takes_little_memory(self, monkeypatch):
        """Scaled as a whole, this one would take 12 GB."""
        noted = Mock(side_effect=resize)
        monkeypatch.setattr(imagefolder, "resize", noted)
        assert centre_crop(torch.full((65_000, 1, 3), 7, dtype=torch.uint8), 224).eq(7).all()
        [(_, height, width)] = [call.args for call in noted.call_args_list]
        assert height * width == 32 * 256 * 256


BOXES = [CropBox(116, 21, 351, 328), CropBox(200, 100, 237, 186), CropBox(211, 132, 213, 226)]


@pytest.mark.usefixtures("decoder")
def test_a_sample_is_the_same_whoever_decodes_it(tmp_path, monkeypatch):
    (tmp_path / "bad.jpg").write_bytes(KINDS["4:2:0"]()[:500])
    paths = [tmp_path / "bad.jpg"]
    for i, kind in enumerate(KINDS):
        paths.append(tmp_path / f"{i}.jpg")
        paths[-1].write_bytes(KINDS[kind]())
    dataset = ImageFolder([(str(path), 1) for path in paths], 16, 3, train=True)
    samples = [dataset[5, i] for i in range(len(paths))]
    monkeypatch.setattr(images, "import_nvimgcodec", lambda: None)
    again = [dataset[5, i] for i in reversed(range(len(paths)))][::-1]
    assert all(torch.equal(one.input, other.input) for one, other in zip(samples, again, strict=True))
    assert [int(sample.target) for sample in samples] == [SKIPPED] + [1] * len(KINDS)
    assert samples[0].fault == again[0].fault
    assert samples[0].fault.startswith(f"{paths[0]} does not decode")


def test_what_decodes_whole_images_only_says_so_once(tmp_path, monkeypatch, capfd):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        picture().save(tmp_path / split / "a" / "0.jpg")
    args = options(["--data", "imagefolder", "--data-dir", str(tmp_path), "--workers", "0"])
    monkeypatch.setattr(imagefolder, "import_nvimgcodec", lambda: None)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        load_data(args, CPU, print)
    assert capfd.readouterr().err.count("Pillow decodes whole images") == 1


def warnings(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]


def decoder_of(dataset):
    dataset.encodes_later = True
    return BatchDecoder(dataset.image_size, dataset.fit, dataset.path, PartDecoder(CPU, 1))


class TestDecodeGpu:
    """--decode gpu, with nvImageCodec's CPU decoder in place of the GPU's: tests/gpu has the GPU's."""

    @pytest.fixture
    def folder(self, tmp_path):
        if not images.import_nvimgcodec():
            pytest.skip("nvidia-nvimgcodec-cu13 is not made for this system")
        for split in ("train", "val"):
            (tmp_path / split / "a").mkdir(parents=True)
            for i, kind in enumerate(KINDS):
                (tmp_path / split / "a" / f"{i:02d}.jpg").write_bytes(KINDS[kind]())
            # Its size can be read, so that a worker sends it; its Huffman table is damaged.
            start, table = KINDS["4:2:0"]().split(b"\xff\xc4", 1)
            damaged = start + b"\xff\xc4" + table[:3] + b"\xff" * 16 + table[19:]
            assert find_part(damaged, whole_box)
            (tmp_path / split / "a" / "90.jpg").write_bytes(damaged)
            (tmp_path / split / "a" / "91.jpg").write_bytes(b"no image")
        return tmp_path

    @pytest.mark.parametrize("workers", ["0", "2"])
    @pytest.mark.parametrize("name", ["train", "test"])
    def test_batches_are_those_of_the_workers(self, folder, capfd, workers, name):
        words = ("--data", "imagefolder", "--data-dir", str(folder), "--image-size", "16", "--workers", workers)
        args = options([*words, "--skip-bad-images"])
        split = getattr(load_data(args, CPU, print), name)
        order = torch.arange(len(KINDS) + 2).split(5)
        expected = [tuple(each.clone() for each in batch) for batch in split.batches(order, 3)]
        said = warnings(capfd)
        dataset = copy.copy(split.dataset)
        own = LoadedSplit(dataset, args, CPU, print, split.prepare, collate, decoder_of(dataset))
        found = list(own.batches(order, 3))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
        assert [int(label) for _, labels in found for label in labels][-2:] == [SKIPPED, SKIPPED]
        assert warnings(capfd) == said
        assert (own.skipped, split.skipped) == (2, 2)
        assert len(said) == 2
        assert said[1].endswith("91.jpg does not decode (not an image of a supported format)")

    def test_jpegs_are_decoded_by_the_rank(self, folder, monkeypatch):
        """Otherwise the test above would compare workers with workers."""
        paths = [str(folder / "train" / "a" / f"{i:02d}.jpg") for i in (0, 10)]
        dataset = ImageFolder([(path, 0) for path in paths], 16, 0, train=True)
        decode = decoder_of(dataset)
        samples = [dataset[0, i] for i in range(2)]
        assert [int(sample.input.plan[5]) > 0 for sample in samples] == [True, False]
        assert samples[0].input.content.numpy().tobytes() == KINDS["4:2:0"]()
        monkeypatch.setattr(gpu_decode, "decode", None)
        pixels, *_ = decode(collate(samples))
        assert pixels.shape == (2, 16, 16, 3)

    def test_what_cannot_decode_on_a_gpu_is_refused(self, folder, monkeypatch):
        words = ("--data", "imagefolder", "--data-dir", str(folder), "--decode", "gpu", "--workers", "0")
        with pytest.raises(UserError, match="--decode gpu: this run is on a CPU; drop it"):
            load_data(options(words), CPU, print)
        with pytest.raises(UserError, match="--decode gpu is for --data imagefolder and shards; drop it"):
            options(["--decode", "gpu"])
        dataset = ImageFolder([("0.jpg", 0)], 16, 0, train=True)
        fail = Mock(side_effect=RuntimeError("no driver\nat all"))
        monkeypatch.setattr(gpu_decode, "make_decoder", fail)
        with pytest.raises(UserError, match=r"nvImageCodec fails \(no driver\) on cpu; pip install"):
            decoder_of(dataset)
        fail.side_effect = images.make_decoder
        monkeypatch.setattr(PartDecoder, "__call__", lambda self, parts: [None])
        with pytest.raises(UserError, match="nvImageCodec cannot decode on cpu; pip install"):
            decoder_of(dataset)
        monkeypatch.setattr(gpu_decode, "import_nvimgcodec", lambda: None)
        with pytest.raises(UserError, match="--decode gpu needs nvImageCodec: pip install"):
            decoder_of(dataset)
