"""Loaders: real digits, random images, and small files in the formats of Fashion-MNIST and CIFAR-10."""

import errno
import gzip
import hashlib
import os
import pickle
import socket
import struct
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torchvision import datasets
from torchvision.transforms.v2 import functional

from recipes.common.data import Data, Spec, imagefolder, load_data, unread_folder, workers
from recipes.common.data.splits import MemorySplit
from recipes.common.errors import UserError
from recipes.common.task import SKIPPED
from recipes.single.train import options
from tests.conftest import refused

CPU = torch.device("cpu")


def load(*argv):
    return load_data(options([*argv]), CPU, print)


def test_digits_are_the_real_ones():
    from sklearn.datasets import load_digits

    data = load()
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert (data.channels, data.image_size, data.num_classes) == (1, 8, 10)
    images = torch.cat([data.train.inputs, data.test.inputs]).flatten(1)
    labels = torch.cat([data.train.targets, data.test.targets])
    ours = sorted(zip(images.tolist(), labels.tolist(), strict=True))
    theirs = load_digits()
    assert ours == sorted(zip(theirs.data.astype(int).tolist(), theirs.target.tolist(), strict=True))


def test_digits_without_scikit_learn_or_its_file_are_one_line(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    path = tmp_path / "datasets/data/digits.csv.gz"
    for found, said in (
        (None, "--data digits needs scikit-learn; install it with `pip install scikit-learn`"),
        (spec, f"--data digits: cannot read {path}: .*; reinstall scikit-learn"),
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        with pytest.raises(UserError, match=f"^{said}$"):
            load()


def test_a_folder_that_the_data_do_not_read_is_no_silent_option(tmp_path):
    folder, said = tmp_path / "images", "warning: --data digits does not read --data-dir "
    assert unread_folder(options(["--data-dir", str(folder)])).startswith(f"{said}{folder}; give --data image")
    folder.mkdir()
    assert unread_folder(options(["--data-dir", str(folder)])) == "", "the manifests name an empty folder"
    (folder / "train").mkdir()
    assert unread_folder(options(["--data-dir", str(folder)])).startswith(said)
    assert unread_folder(options(["--data", "imagefolder", "--data-dir", str(folder)])) == ""
    assert unread_folder(options([])) == ""


def test_the_split_does_not_depend_on_the_seed():
    assert torch.equal(load("--seed", "1").test.inputs, load("--seed", "2").test.inputs)


def test_training_pixels_are_normalised():
    ((images, labels),) = load().train.batches([torch.arange(1437)], 0)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert float(images.mean()) == pytest.approx(0, abs=1e-5)
    assert float(images.std()) == pytest.approx(1, abs=1e-5)


def test_batches_are_those_of_the_indices():
    split = load().train
    batches = list(split.batches([torch.tensor([5, 3]), torch.tensor([], dtype=torch.int64)], 0))
    assert [len(labels) for _, labels in batches] == [2, 0]
    assert batches[0][1].tolist() == split.targets[[5, 3]].tolist()


def test_synthetic():
    data = load("--data", "synthetic", "--num-samples", "100", "--image-size", "12")
    assert (len(data.train), len(data.test), data.channels, data.image_size) == (100, 12, 3, 12)
    assert data.num_classes == 100
    assert load("--data", "synthetic", "--num-samples", "1500", "--image-size", "4").num_classes == 1000
    again = load("--data", "synthetic", "--num-samples", "100", "--image-size", "12", "--seed", "9")
    assert torch.equal(data.train.inputs, again.train.inputs)


def idx(array):
    """Return an array of bytes in the compressed IDX format of MNIST's files."""
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.tobytes())


@pytest.fixture
def fashion(tmp_path, monkeypatch):
    """Write Fashion-MNIST's four compressed files, with few images, as a download leaves them."""
    chance = np.random.default_rng(0)
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    resources, content = [], {}
    for split, count in (("train", 50), ("t10k", 20)):
        content[split] = chance.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 10
        for kind, array in zip(("images-idx3", "labels-idx1"), content[split], strict=True):
            path = raw / f"{split}-{kind}-ubyte.gz"
            path.write_bytes(idx(array))
            resources.append((path.name, hashlib.md5(path.read_bytes()).hexdigest()))
    monkeypatch.setattr(datasets.FashionMNIST, "resources", resources)
    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])  # nothing is fetched
    return tmp_path, content


def test_fashion_mnist(fashion):
    folder, content = fashion
    data = load("--data", "fashion-mnist", "--data-dir", str(folder), "--download")
    assert (len(data.train), len(data.test)) == (50, 20)
    assert (data.channels, data.image_size, data.num_classes) == (1, 28, 10)
    assert np.array_equal(data.train.inputs[..., 0].numpy(), content["train"][0])
    assert np.array_equal(data.test.targets.numpy(), content["t10k"][1])
    again = load("--data", "fashion-mnist", "--data-dir", str(folder))  # unpacked by now
    assert torch.equal(again.test.inputs, data.test.inputs)


def test_a_failed_download_is_refused_in_one_line(fashion):
    folder, _ = fashion
    next(folder.glob("FashionMNIST/raw/t10k-images*")).unlink()
    with refused("fashion-mnist"):
        load("--data", "fashion-mnist", "--data-dir", str(folder), "--download")


def test_a_folder_that_cannot_be_locked_is_refused_with_the_remedy(fashion, monkeypatch):
    """Lustre refuses locks without the mount option flock."""

    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    with pytest.raises(UserError, match=r"^--download: cannot lock .*: Function not .*; download once"):
        load("--data", "fashion-mnist", "--data-dir", str(fashion[0]), "--download")


def test_a_lock_that_leads_elsewhere_empties_nothing(fashion, tmp_path):
    """Others may be able to write to a folder of data."""
    folder, _ = fashion
    (tmp_path / "mine").write_text("mine")
    (folder / ".download.lock").symlink_to(tmp_path / "mine")
    load("--data", "fashion-mnist", "--data-dir", str(folder), "--download")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_download_into_a_folder_that_cannot_be_written(fashion, monkeypatch, number):
    """As on a read-only volume: it is no fault if all files are there."""
    argv = ("--data", "fashion-mnist", "--data-dir", str(fashion[0]), "--download")
    load(*argv)

    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    assert len(load(*argv).train) == 50
    next(fashion[0].glob("FashionMNIST/raw/t10k-images*-ubyte")).unlink()
    monkeypatch.setattr(os, "makedirs", refuse)
    with pytest.raises(UserError, match=rf"^--data fashion-mnist from --data-dir .*{os.strerror(number)}"):
        load(*argv)


@pytest.mark.parametrize("size", [0, 3, 1000])
def test_an_unpacked_file_that_was_cut_is_refused_with_the_fix(fashion, size):
    """A kill while the file was unpacked leaves it so, and torchvision takes it for whole."""
    argv = ("--data", "fashion-mnist", "--data-dir", str(fashion[0]))
    load(*argv, "--download")
    path = fashion[0] / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"fashion-mnist is missing or damaged in .*; add --download to fetch it"):
        load(*argv)
    with pytest.raises(UserError, match=r"--download does not replace it \(.+\); remove what is there") as caught:
        load(*argv, "--download")
    assert "\n" not in str(caught.value)


def test_a_server_that_falls_silent_ends_the_download(fashion, monkeypatch):
    next(fashion[0].glob("FashionMNIST/raw/t10k-images*")).unlink()
    with socket.create_server(("127.0.0.1", 0)) as server:  # connections wait in its queue forever
        monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [f"http://127.0.0.1:{server.getsockname()[1]}/"])
        argv = ("--data", "fashion-mnist", "--data-dir", str(fashion[0]), "--download", "--timeout-s", "1")
        with pytest.raises(UserError, match=r"--data fashion-mnist .*timed out"):
            load(*argv)
    assert socket.getdefaulttimeout() is None


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Write CIFAR-10's pickled batches with few images."""
    chance = np.random.default_rng(0)
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    content = {}

    def write(name, value):
        (base / name).write_bytes(pickle.dumps(value))
        return [name, hashlib.md5((base / name).read_bytes()).hexdigest()]

    lists = {"train_list": [f"data_batch_{i}" for i in range(1, 6)], "test_list": ["test_batch"]}
    for kind, names in lists.items():
        for name in names:
            pixels = chance.integers(0, 256, (12, 3072), np.uint8)
            content[name] = pixels, [int(i) for i in chance.integers(0, 10, 12)]
        entries = [write(name, {"data": content[name][0], "labels": content[name][1]}) for name in names]
        monkeypatch.setattr(datasets.CIFAR10, kind, entries)
    names = {"label_names": [f"class{i}" for i in range(10)]}
    _, checksum = write("batches.meta", names)
    meta = {"filename": "batches.meta", "key": "label_names", "md5": checksum}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    return tmp_path, content


def test_cifar10(cifar):
    folder, content = cifar
    data = load("--data", "cifar10", "--data-dir", str(folder))
    assert (len(data.train), len(data.test)) == (60, 12)
    assert (data.channels, data.image_size) == (3, 32)
    expected = np.concatenate([content[f"data_batch_{i}"][0] for i in range(1, 6)]).reshape(-1, 3, 32, 32)
    assert np.array_equal(data.train.inputs.permute(0, 3, 1, 2).numpy(), expected)
    assert data.test.targets.tolist() == content["test_batch"][1]
    ((images, _),) = data.train.batches([torch.arange(60)], 0)
    assert images.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-5)


def test_cifar10_is_cropped_and_flipped_by_seed_epoch_and_index(cifar):
    """Each image is one of torchvision's RandomCrop(32, padding=4) and RandomHorizontalFlip."""
    folder, _ = cifar
    plain, data, other = (
        load("--data", "cifar10", "--data-dir", str(folder), *more).train
        for more in ((), ("--augment", "crop-flip"), ("--augment", "crop-flip", "--seed", "1"))
    )
    order = torch.arange(60)
    ((images, labels),) = data.batches([order], 3)
    assert labels.equal(plain.targets)
    places = []
    for image, pixels in zip(images, plain.inputs, strict=True):
        padded = functional.pad(pixels.permute(2, 0, 1), [4])
        crops = {(i, j): functional.crop(padded, i, j, 32, 32) for i in range(9) for j in range(9)}
        views = {(*key, flips): crop.flip(2) if flips else crop for key, crop in crops.items() for flips in (0, 1)}
        [place] = [
            key for key, view in views.items() if plain.prepare(view.permute(1, 2, 0)[None])[0].equal(image)
        ]
        places.append(place)
    for values, count in zip(zip(*places, strict=True), (9, 9, 2), strict=True):
        assert set(values) == set(range(count))
    parts = [image for batch, _ in data.batches(order.flip(0).split(7), 3) for image in batch]
    assert torch.stack(parts).flip(0).equal(images), "whatever the batch"
    for split, epoch in ((data, 4), (other, 3)):
        ((changed, _),) = split.batches([order], epoch)
        assert (changed != images).flatten(1).any(1).sum() > 50
    assert data.fingerprint() == plain.fingerprint()


def test_a_damaged_file_is_refused(cifar):
    folder, _ = cifar
    (folder / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"x")
    with pytest.raises(UserError, match=r"cifar10 is missing or damaged .*add --download"):
        load("--data", "cifar10", "--data-dir", str(folder))


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
def test_missing_data_are_refused(tmp_path, name):
    with pytest.raises(UserError, match=f"{name} is missing or damaged in --data-dir .*; add --download to fetch"):
        load("--data", name, "--data-dir", str(tmp_path / "none"))


def write_files(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


class TestImageFolder:
    def load(self, folder):
        return load("--data", "imagefolder", "--data-dir", str(folder), "--workers", "0", "--image-size", "8")

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            ([], "cannot read .*train .*No such file.*imagefolder expects DIR/train/CLASS"),
            (["train/"], "train has no class folders"),
            (["train/a/"], "a has no images"),
            (["train/a/x.txt"], "a has no images"),
            (["train/a/x.jpg"], "cannot read .*val"),
            (["train/a/x.jpg", "val/b/x.jpg"], "val has the class 'b', which train does not have"),
            (["train/all/a/x.jpg", "train/all/b/x.jpg", "val/all/a/x.jpg"], "/train has the one class 'all'; are"),
        ],
    )
    def test_what_is_missing_is_named(self, tmp_path, files, words):
        for name in files:
            if name.endswith("/"):
                (tmp_path / name).mkdir(parents=True)
            else:
                write_files(tmp_path, name)
        with pytest.raises(UserError, match=words) as caught:
            self.load(tmp_path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("folder", ["train/a", "train/a/deep"])
    def test_a_folder_that_cannot_be_read_is_not_an_empty_one(self, tmp_path, monkeypatch, folder):
        write_files(tmp_path, "train/a/0.jpg", "train/a/deep/1.jpg", "val/a/0.jpg")
        scandir = os.scandir

        def fail(path):
            if Path(path) == tmp_path / folder:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", fail)
        with pytest.raises(UserError, match=rf"--data-dir: cannot read .*/{folder} \(Permission denied\); "):
            self.load(tmp_path)

    def test_classes_are_numbered_by_name(self, tmp_path):
        from PIL import Image

        for name in ("train/b/deep/1.png", "train/a/2.PNG", "train/b/0.png", "val/b/0.png"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 9), (255, 0, 0)).save(tmp_path / name)
        data = self.load(tmp_path)
        assert data.num_classes == 2
        dataset = data.train.dataset
        names = [(Path(dataset.path(i)).name, int(dataset.labels[i])) for i in range(len(data.train))]
        assert names == [("2.PNG", 0), ("0.png", 1), ("1.png", 1)]
        ((images, labels),) = data.test.batches([torch.tensor([0])], 0)
        assert labels.tolist() == [1]
        expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]
        assert images.mean(dim=(0, 2, 3)).tolist() == pytest.approx(expected, rel=1e-5)

    def test_classes_have_their_names(self, tmp_path):
        """Another rank gets the list from rank 0."""
        odd = os.fsdecode(b"caf\xe9")
        write_files(tmp_path, *(f"train/{name}/x.jpg" for name in ("2", "10", "1", odd)), "val/2/x.jpg")
        assert self.load(tmp_path).classes == ["1", "10", "2", odd]
        found = imagefolder.find_images(tmp_path).to_bytes()
        words = ["--data", "imagefolder", "--data-dir", str(tmp_path), "--workers", "0"]
        assert load_data(options(words), CPU, print, found).classes == ["1", "10", "2", odd]

    @pytest.mark.parametrize("name", ["train/b", "train/a/deep", "train/a/v1.0", "val/b"])
    def test_a_link_to_nothing_is_no_class_left_out(self, tmp_path, name):
        """The labels of all classes after it would be others."""
        write_files(tmp_path, "train/a/0.jpg", "train/a/note.txt", "train/c/0.jpg", "val/a/0.jpg")
        (tmp_path / name).symlink_to("/mnt/away")
        said = rf"cannot read {tmp_path / name} \(No such file .*\); it is a link to /mnt/away: restore that, or"
        with pytest.raises(UserError, match=said):
            self.load(tmp_path)
        (tmp_path / name).rename(tmp_path / "train" / ".hidden")
        (tmp_path / "train/a/link.txt").symlink_to("note.txt")
        (tmp_path / "train/a/1.jpg").symlink_to("/mnt/away/1.jpg")  # it is named when it is read
        assert len(self.load(tmp_path).train) == 3

    def test_images_are_those_of_torchvision(self):
        assert sorted(imagefolder.EXTENSIONS) == sorted(datasets.folder.IMG_EXTENSIONS)

    def test_hidden_files_are_left_out_links_followed_and_any_name_taken(self, tmp_path):
        """Tools leave copies of images: Jupyter in .ipynb_checkpoints, macOS as ._photo.jpg."""
        odd = os.fsdecode(b"caf\xe9 au lait")  # Latin-1, as from an old archive
        hidden = ["train/.cache/x.jpg", "train/a/.ipynb_checkpoints/x.jpg", "train/a/._0.jpg"]
        hidden += ["train/@eaDir/x.jpg", "train/a/@eaDir/x.jpg"]
        write_files(tmp_path, "train/a/0.jpg", f"train/{odd}/0.jpg", "val/a/0.jpg", "more/9.jpg", *hidden)
        (tmp_path / "train/a/more").symlink_to(tmp_path / "more")
        data = self.load(tmp_path)
        paths = [os.path.relpath(data.train.dataset.path(i), tmp_path) for i in range(len(data.train))]
        assert paths == ["train/a/0.jpg", "train/a/more/9.jpg", f"train/{odd}/0.jpg"]

    def test_links_that_lead_back_are_left_out(self, tmp_path):
        """A walk through two of them would visit each folder 2^40 times, until the system refuses the path."""
        write_files(tmp_path, "train/a/0.jpg", "train/b/0.jpg", "val/a/0.jpg")
        for name, target in (("a/here", "."), ("a/up", ".."), ("a/b", "../b"), ("b/a", "../a"), ("all", ".")):
            (tmp_path / "train" / name).symlink_to(target)
        data = self.load(tmp_path)
        paths = [os.path.relpath(data.train.dataset.path(i), tmp_path) for i in range(len(data.train))]
        assert paths == ["train/a/0.jpg", "train/a/b/0.jpg", "train/b/0.jpg", "train/b/a/0.jpg"]

    def test_the_fingerprint_is_that_of_the_names_wherever_they_are(self, tmp_path):
        for root, file in (("one", "0.jpg"), ("two", "0.jpg"), ("three", "1.jpg")):
            write_files(tmp_path / root, f"train/a/{file}", f"val/a/{file}")
        one, two, three = (self.load(tmp_path / name).train.fingerprint() for name in ("one", "two", "three"))
        assert one == two != three

    def test_checks_before_the_training_get_no_image_that_does_not_decode(self, tmp_path):
        """In its place, a batch has zeros, and a label that does not count."""
        from PIL import Image

        for name in ("train/a/0.png", "train/b/0.png", "train/c/0.png", "val/a/0.png"):
            (tmp_path / name).parent.mkdir(parents=True)
            Image.new("RGB", (9, 9), (255, 0, 0)).save(tmp_path / name)
        assert self.load(tmp_path).examples(2)[1].tolist() == [0, 1]
        (tmp_path / "train/a/0.png").write_bytes(b"no image")
        images, labels = self.load(tmp_path).examples(2)
        assert labels.tolist() == [1, 2]
        assert images.ne(0).all()
        for name in ("b", "c"):
            (tmp_path / "train" / name / "0.png").write_bytes(b"no image")
        assert self.load(tmp_path).examples(2)[1].tolist() == [SKIPPED, SKIPPED]

    def test_there_are_as_many_workers_as_asked_for(self, tmp_path, monkeypatch):
        write_files(tmp_path, "train/a/0.jpg", "val/a/0.jpg")
        monkeypatch.setattr(workers, "start_server", lambda: None)
        words = ("--data", "imagefolder", "--data-dir", str(tmp_path), "--workers", "2")
        assert load(*words).train.loader.num_workers == 2

    def test_ten_skipped_images_are_named_and_all_are_counted(self, tmp_path, capsys):
        write_files(tmp_path, *(f"train/a/{number}.jpg" for number in range(12)), "val/a/0.jpg")
        words = ("--data", "imagefolder", "--data-dir", str(tmp_path), "--workers", "0", "--image-size", "8")
        split = load(*words, "--skip-bad-images").train
        list(split.batches([torch.arange(12)], 0))
        list(split.unreported().batches([torch.arange(12)], 0))
        assert (split.skipped, capsys.readouterr().err.count("warning: skipped ")) == (12, 10)

    @pytest.mark.parametrize("data", ["synthetic", "imagefolder"])
    def test_a_batch_has_the_layout_of_the_models_weights(self, tmp_path, data):
        from PIL import Image

        for name in ("train/a/0.png", "train/a/1.png", "val/a/0.png"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 9)).save(tmp_path / name)
        words = ("--data", data, "--image-size", "8", "--workers", "0", "--data-dir", str(tmp_path))
        for layout in (torch.channels_last, torch.contiguous_format):
            switch = f"--{'no-' * (layout is torch.contiguous_format)}channels-last"
            ((images, _),) = load(*words, switch).train.batches([torch.arange(2)], 0)
            assert images.is_contiguous(memory_format=layout)

    def test_a_value_that_is_no_class_counts_whatever_it_is(self):
        split = MemorySplit(torch.zeros(4, 1), torch.tensor([SKIPPED, 1.0, 2.0, 3.0]))
        data = Data(split, split, Spec((1,), torch.float32), Spec((), torch.float32), None, "values")
        assert data.examples(2)[1].tolist() == [SKIPPED, 1.0]

    @pytest.mark.parametrize("flags", [[], ["--skip-bad-images"]])
    @pytest.mark.parametrize(
        ("number", "status"), [(errno.ESTALE, 1), (errno.EIO, 1), (errno.ENOENT, 2), (errno.EACCES, 2)]
    )
    def test_an_image_that_cannot_be_read_is_not_a_bad_one(self, tmp_path, monkeypatch, flags, number, status):
        """It ends the run even with --skip-bad-images, since the next launch may be able to read it.

        Engines start that launch after status 1.
        """
        write_files(tmp_path, "train/a/0.jpg", "val/a/0.jpg")

        def fail(path):
            raise OSError(number, os.strerror(number), path)

        monkeypatch.setattr(imagefolder, "read", fail)
        told = []
        argv = ["--data", "imagefolder", "--data-dir", str(tmp_path), "--workers", "0", "--image-size", "8"]
        data = load_data(options([*argv, *flags]), CPU, told.append)
        ((_, labels),) = data.train.batches([torch.tensor([0])], 0)
        assert labels.tolist() == [SKIPPED]
        path = tmp_path / "train" / "a" / "0.jpg"
        [error] = told
        assert str(error) == f"cannot read {path}: {os.strerror(number)}; fix this, then add --resume auto"
        assert error.status == status
        assert data.train.skipped == 0
        assert data.may_skip == bool(flags)
