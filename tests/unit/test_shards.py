"""Shards: the very images of the folder that was packed, and one line for whatever is wrong with them."""

import errno
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.common.data import load_data
from recipes.common.data import shards as shards_module
from recipes.common.data.shards import FIELDS, INDEX, pack, write_index
from recipes.common.errors import UserError
from recipes.common.job import draw_order
from recipes.common.seeding import permutation
from recipes.common.task import SKIPPED
from recipes.single.train import options
from scripts.bench.range_server import serve
from scripts.dev import shards
from tests.images import make_images
from tests.support import ROOT

CPU = torch.device("cpu")


def load(data, folder, on_bad_image=print, *flags):
    argv = ["--data", data, "--data-dir", str(folder), "--workers", "0", "--image-size", "16", *flags]
    return load_data(options(argv), CPU, on_bad_image)


def packed(source, folder):
    assert sum(number for _, number in pack(source, folder, 4000)) > 0
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, images):
    return packed(images, tmp_path_factory.mktemp("shards") / "whole")


@pytest.fixture
def copy(images, tmp_path):
    """A copy of the shards that a test may damage."""
    return packed(images, tmp_path / "copy")


def test_a_run_sees_the_images_of_the_folder(images, whole):
    ours, theirs = load("shards", whole), load("imagefolder", images)
    assert (ours.num_classes, ours.input) == (theirs.num_classes, theirs.input)
    for split in ("train", "test"):
        one, other = getattr(ours, split), getattr(theirs, split)
        assert len(one) == len(other)
        order = torch.randperm(len(one), generator=torch.Generator().manual_seed(0)).split(5)
        for epoch in range(2):
            for (a, b), (c, d) in zip(one.batches(order, epoch), other.batches(order, epoch), strict=True):
                assert torch.equal(a, c)
                assert torch.equal(b, d)


def test_no_more_shards_are_open_than_a_process_may_have(images, whole):
    """A few terabytes have thousands of shards, and a process often may open only 1,024 files."""
    dataset = load("shards", whole).train.dataset
    assert len(dataset.shards) > 3
    dataset.files.most = 2
    before = len(os.listdir("/proc/self/fd"))
    folder = load("imagefolder", images).train.dataset
    assert [dataset.read(i) for i in range(len(dataset))] == [folder.read(i) for i in range(len(folder))]
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_process_may_open_as_many_shards_as_its_hard_limit_allows(tmp_path):
    """Also in a worker, which gets the pool as a pickle; its limit may be another one."""
    code = f"""
import os, pickle, resource
from recipes.common.data.file_pool import FilePool

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 2000))
pool = FilePool(300)
assert (pool.most, resource.getrlimit(resource.RLIMIT_NOFILE)) == ((1200 + 128) // 4, (1328, 2000))
for i in range(300):
    open(f"{tmp_path}/{{i}}", "wb").write(b"%d" % i)
read = [pool.read(f"{tmp_path}/{{i}}", 0, 9) for i in range(300)]
assert read == [b"%d" % i for i in range(300)]
assert len(pool.descriptors) == 300
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 2000))
sent = pickle.loads(pickle.dumps(pool))
assert (sent.most, len(sent.descriptors)) == (332, 0)
assert FilePool(10**6).most == 500, "the hard limit"
assert FilePool(1).most == 500, "never lower"
assert sent.read(f"{tmp_path}/7", 0, 9) == b"7"
kept = len(os.listdir("/proc/self/fd"))
sent.close()
assert len(os.listdir("/proc/self/fd")) == kept - 1 > 300
del pool
assert len(os.listdir("/proc/self/fd")) < 30
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_without_a_limit_on_open_files_all_shards_stay_open(whole, monkeypatch):
    no_limit = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (no_limit, no_limit))
    dataset = load("shards", whole).train.dataset
    assert dataset.files.most > len(dataset.shards) > 3


def test_the_index_of_a_hundred_million_images_is_not_too_large(images, whole, monkeypatch):
    """One of more bytes than allowed is refused, and packing takes days."""
    assert sum(np.dtype(kind).itemsize for kind in FIELDS.values()) * 10**8 < shards_module.MAX_INDEX_BYTES
    monkeypatch.setattr(shards_module, "MAX_INDEX_BYTES", 100)
    with pytest.raises(UserError, match="it unpacks to more than an index"):
        load("shards", whole)


def test_the_layout_is_webdatasets(images, whole):
    """An image and its class have the same name, side by side, in random order; a shard ends at its size."""
    names = sorted(path.name for path in whole.glob("*.tar"))
    trained = [name for name in names if name.startswith("train-")]
    assert trained == [f"train-{i:06d}.tar" for i in range(len(trained))]
    assert len(trained) > 2
    found = {}
    for name in trained:
        with tarfile.open(whole / name) as tar:
            members = tar.getmembers()
            for image, label in zip(members[::2], members[1::2], strict=True):
                number, kind = label.name.split(".")
                assert (image.name.split(".")[0], kind, len(number)) == (number, "cls", 8)
                assert image.name == image.name.lower()
                found[int(number)] = tar.extractfile(image).read(), int(tar.extractfile(label).read())
    classes = sorted(os.listdir(images / "train"))
    paths = [path for name in classes for path in sorted((images / "train" / name).glob("*.*[gG]"))]
    packed_here = [(path.read_bytes(), classes.index(path.parent.name)) for path in paths]
    assert [found[i] for i in range(len(found))] == packed_here
    order = load("shards", whole).train.storage_order().tolist()
    assert list(found) == order != sorted(order)
    changes = sum(found[a][1] != found[b][1] for a, b in itertools.pairwise(order))
    assert changes > len(order) / 2, "neighbours are of many classes"


def test_other_images_have_another_fingerprint(images, whole, tmp_path):
    ours = load("shards", whole).train
    (tmp_path / "other").symlink_to(images)
    same = load("shards", packed(tmp_path / "other", tmp_path / "same")).train
    assert same.fingerprint() == ours.fingerprint()
    less = make_images(tmp_path / "less")
    next((less / "train").rglob("*.jpg")).write_bytes(next((less / "val").rglob("*.jpg")).read_bytes())
    other = load("shards", packed(less, tmp_path / "others")).train
    assert len(other) == len(ours)
    assert other.fingerprint() != ours.fingerprint()


def test_the_places_of_images_take_little_memory(whole):
    fields = load("shards", whole).train.dataset.fields
    assert sum(field.element_size() for field in fields.values()) == 32


@pytest.mark.parametrize("flags", [(), ("--skip-bad-images",)])
def test_a_damaged_image_is_one_line_and_is_not_skipped(copy, flags):
    """The image was whole when it was packed: the storage is damaged."""
    path = copy / "train-000000.tar"
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)
    told = []
    data = load("shards", copy, told.append, *flags)
    split = data.train
    ((_, labels),) = split.batches([split.storage_order()[:2]], 0)
    assert [label == SKIPPED for label in labels.tolist()] == [True, False]
    said = "its checksum is not that of the image that was packed: copy the shard again; fix this, then add --res"
    [error] = told
    assert str(error).startswith(f"cannot read {path} at byte 512: {said}")
    assert error.status == 2, "the next launch reads the same"
    ((_, labels),) = split.unreported().batches([split.storage_order()[:1]], 0)
    assert (labels.tolist(), split.skipped, len(told)) == ([SKIPPED], 0, 1)
    assert data.may_skip == bool(flags)


def test_an_empty_image_is_one_that_does_not_decode(tmp_path, monkeypatch):
    """As in the folder. Downloads that failed leave such files."""
    folder = make_images(tmp_path / "images")
    (folder / "train" / "class0" / "0.jpg").write_bytes(b"")
    packed(folder, tmp_path / "shards")
    reasons = []
    with serve(tmp_path / "shards") as (url, _):
        cached = ("--cache-dir", str(tmp_path / "cache"))
        for data, place, *flags in (
            ("imagefolder", folder),
            ("shards", tmp_path / "shards"),
            *(("shards", url, *extra) for extra in ((), cached, cached)),
        ):
            told = []
            split = load(data, place, told.append, *flags).train
            ((_, labels),) = split.batches([torch.tensor([0, 1])], 0)
            assert labels.tolist() == [SKIPPED, 0]
            reasons += [str(error).partition(" does not ")[2] for error in told]
    said = "decode (not an image of a supported format); fix or remove it, or add --skip-bad-images"
    assert reasons == [said] * 5
    monkeypatch.setattr("recipes.common.data.shards.MAX_IMAGE_BYTES", 300)
    with pytest.raises(UserError, match=r"/class\d/\S+ has \d+ bytes, more than 300; scale or remove it, then"):
        packed(folder, tmp_path / "more")


def test_a_block_is_side_by_side_in_the_shards(whole):
    split = load("shards", whole).train
    args = options(["--data", "shards", "--shuffle-block", "4"])
    places = {index: place for place, index in enumerate(split.storage_order().tolist())}
    order = [places[index] for index in draw_order(split, args, 0).tolist()]
    assert sorted(order) == list(range(28))
    assert order == permutation(28, 0, 0, 4).tolist()
    single_images = draw_order(split, options(["--data", "shards"]), 0)
    assert torch.equal(single_images, permutation(28, 0, 0)), "as in the folder"
    in_storage = split.storage_order().tolist()
    pairs = set(itertools.pairwise(in_storage)) & set(itertools.pairwise(single_images.tolist()))
    assert len(pairs) < 5, "an epoch's order is another one than that of the shards"


def test_blocks_in_other_places_are_other_data(images, whole, tmp_path, monkeypatch):
    """Ranks with shards of another order would train on samples of other ranks."""
    monkeypatch.setattr("recipes.common.data.shards.STORAGE_SEED", 5)
    other = packed(images, tmp_path / "other")
    for flags, is_same in (((), True), (("--shuffle-block", "4"), False)):
        ours, theirs = (load("shards", folder, print, *flags) for folder in (whole, other))
        assert (ours.train.fingerprint() == theirs.train.fingerprint()) is is_same
        assert ours.test.fingerprint() == theirs.test.fingerprint()


def test_blocks_of_shards_in_the_folders_order_are_refused(copy):
    """Shards packed before 0.2.0 are in this order, in which a block holds one class."""
    with np.load(copy / INDEX) as index:
        arrays = dict(index)
    about = json.loads(str(arrays.pop("about")))
    del about["is_shuffled"]
    write_index(copy, about, arrays)
    assert len(load("shards", copy).train) == 28
    with pytest.raises(UserError, match=r"^--shuffle-block 4: the shards of \S+ hold class after class"):
        load("shards", copy, print, "--shuffle-block", "4")


def test_shards_have_the_names_of_the_classes(copy):
    """Those that were packed before have none."""
    assert load("shards", copy).classes == ["class0", "class1", "class2"]
    with np.load(copy / INDEX) as index:
        arrays = dict(index)
    about = json.loads(str(arrays.pop("about")))
    for names in (["a", "b"], ["a", "b", 3], 3):
        write_index(copy, {**about, "classes": names}, arrays)
        with pytest.raises(UserError, match=r"index.npz is damaged"):
            load("shards", copy)
    del about["classes"]
    write_index(copy, about, arrays)
    assert load("shards", copy).classes == ()


def test_a_folder_that_is_not_whole_is_refused(copy):
    for size in (512, 2**20):
        os.truncate(copy / "train-000001.tar", size)
        with pytest.raises(UserError, match=rf"train-000001\.tar has {size} bytes instead of "):
            load("shards", copy)
    (copy / INDEX).unlink()
    with pytest.raises(UserError, match=r"cannot read .*index\.npz \(No such file.*make shards DATA_DIR="):
        load("shards", copy)


def test_an_index_that_cannot_be_written_is_none(images, tmp_path, monkeypatch):
    def fill_disk(file, **arrays):
        file.write(b"begun")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", fill_disk)
    with pytest.raises(OSError, match="No space"):
        packed(images, tmp_path / "out")
    assert not (tmp_path / "out" / INDEX).exists()


def test_all_shards_are_on_the_disk_before_the_index_names_them(images, tmp_path, monkeypatch):
    """After a power cut, the index counts as a sign that they are whole."""
    seen, fsync = [], os.fsync

    def watch(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        seen.append((path.name, path.stat().st_size))
        return fsync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    packed(images, tmp_path / "out")
    tars = sorted((path.name, path.stat().st_size) for path in (tmp_path / "out").glob("*.tar"))
    assert len(tars) > 2
    assert sorted(seen[:-2]) == tars, "whole, with their ends"
    assert [name for name, _ in seen[-2:]] == [f".{INDEX}", "out"]


def test_the_command_packs_and_refuses(images, tmp_path, capsys, monkeypatch):
    assert shards.main([str(images), str(tmp_path / "out"), "--shard-mb", "5000"]) == 0
    assert f"; train with --data shards --data-dir {tmp_path / 'out'}\n" in capsys.readouterr().out
    assert len(load("shards", tmp_path / "out").train) == len(load("imagefolder", images).train)
    assert shards.main([str(images), str(tmp_path / "out")]) == 2
    said = f"error: OUT {tmp_path / 'out'} is not empty; remove what it holds, or choose another folder\n"
    assert capsys.readouterr().err == said
    assert shards.main([str(tmp_path / "none"), str(tmp_path / "new")]) == 2
    said = f"error: DATA_DIR: cannot read {tmp_path / 'none' / 'train'} (No such file or directory); imagefolder"
    assert capsys.readouterr().err.startswith(said)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("of the user")
    assert shards.main([str(images), str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"error: cannot create {tmp_path / 'file'}: File exists\n"
    monkeypatch.chdir(tmp_path)
    assert shards.main([str(images), "s3://bucket/images"]) == 2
    assert capsys.readouterr().err.startswith("error: OUT s3://bucket/images is a URL; give a folder, and copy it")
    assert not (tmp_path / "s3:").exists()
    for out in (images / "train" / "shards", images / "val"):
        assert shards.main([str(images), str(out)]) == 2
        said = f"error: OUT {out} is among the images of DATA_DIR; choose a folder outside of its train and val\n"
        assert capsys.readouterr().err == said
    assert not (images / "train" / "shards").exists()


@pytest.mark.parametrize("is_full", [True, False])
def test_without_a_reader_the_packing_goes_on(images, tmp_path, capsys, monkeypatch, is_full):
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full if is_full else pipe)
        status = shards.main([str(images), str(tmp_path / "out")])
    said = "error: cannot write: No space left on device; free some space\n"
    expected = (1, said) if is_full else (128 + signal.SIGPIPE, "")
    assert (status, capsys.readouterr().err) == expected
    assert len(load("shards", tmp_path / "out").train) == len(load("imagefolder", images).train)


def test_two_commands_do_not_write_the_same_shards(images, tmp_path, capsys, monkeypatch):
    """The second finds the folder empty, and then the first one's shard."""
    first = tmp_path / "out" / "train-000000.tar"
    first.parent.mkdir()
    first.write_text("of the first")
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda folder: iter(()))
    assert shards.main([str(images), str(first.parent)]) == 2
    said = f"error: {first} exists: another make shards writes there; let it end, or choose another OUT\n"
    assert (capsys.readouterr().err, first.read_text()) == (said, "of the first")
