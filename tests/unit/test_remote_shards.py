"""Shards on a server: the images of the local ones, and one line for whatever the server does, within a bound."""

import errno
import functools
import itertools
import json
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import time
import zipfile
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from recipes.common.data import load_data, stores
from recipes.common.data.cache import Cache, is_hole
from recipes.common.data.shards import INDEX, RemoteImages, pack
from recipes.common.data.stores import FsspecStore, open_store
from recipes.common.data.workers import BatchKeys
from recipes.common.errors import UserError, may_pass
from recipes.common.seeding import permutation
from recipes.common.task import SKIPPED
from recipes.single.train import options
from scripts.bench.range_server import serve

CPU = torch.device("cpu")


def load(place, *flags, told=None):
    argv = ["--data", "shards", "--data-dir", str(place), "--workers", "0", "--image-size", "16", *flags]
    return load_data(options(argv), CPU, print if told is None else told.append)


@pytest.fixture(scope="module")
def shards(tmp_path_factory, images):
    folder = tmp_path_factory.mktemp("shards") / "packed"
    list(pack(images, folder, 30_000))
    return folder


@pytest.fixture
def copy(shards, tmp_path):
    """Shards that a test may damage."""
    return shutil.copytree(shards, tmp_path / "copy")


def order_of(split, seed=0):
    return torch.randperm(len(split), generator=torch.Generator().manual_seed(seed)).split(5)


def assert_equal(split, other):
    for epoch in range(2):
        order = order_of(split, epoch)
        for (a, b), (c, d) in zip(split.batches(order, epoch), other.batches(order, epoch), strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)


def requests_for(split, epochs):
    """Return the requests that assert_equal() takes: neighbours drawn one after another come in one request."""
    order, shards = split.storage_order().tolist(), split.dataset.fields["shard"]
    neighbours = {pair for pair in itertools.pairwise(order) if shards[pair[0]] == shards[pair[1]]}
    drawn = [torch.cat(order_of(split, epoch)).tolist() for epoch in range(epochs)]
    return sum(len(split) - sum(pair in neighbours for pair in itertools.pairwise(one)) for one in drawn)


def one_error(data, number=None, status=None):
    """Return the error of one image, by default the first of the first shard; it may have to have a status."""
    told = []
    data.train.on_fault = told.append
    index = data.train.storage_order()[:1] if number is None else torch.tensor([number])
    ((_, labels),) = data.train.batches([index], 0)
    assert labels.tolist() == [SKIPPED]
    [error] = told
    assert status in (None, error.status)
    return str(error)


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_run_sees_the_images_of_the_disk(shards, tmp_path, has_cache):
    flags = ["--cache-dir", str(tmp_path / "cache")] * has_cache
    local = load(shards)
    with serve(shards) as (url, counts):
        data = load(f"{url}/", *flags)
        assert data.train.fingerprint() == local.train.fingerprint()
        opened = counts.requests
        assert_equal(data.train, local.train)
        assert_equal(data.test, local.test)
        # Without a cache, each of 2 epochs reads each image; with one, only the first does.
        expected = sum(requests_for(split, 2 - has_cache) for split in (data.train, data.test))
        assert counts.requests - opened == expected > (2 - has_cache) * (28 + 12 - 10)
        if has_cache:
            before = counts.requests
            assert_equal(load(url, *flags).train, local.train)
            assert counts.requests - before == opened, "all images are in the cache"


def test_the_cache_heals(shards, tmp_path):
    """A damaged cached image is read again, and so are the images of a run that was killed while writing them."""
    with serve(shards) as (url, counts):
        flags = ("--cache-dir", str(tmp_path))
        data = load(url, *flags)
        assert_equal(data.train, load(shards).train)
        [path] = tmp_path.glob("*/train-000000.tar")
        os.truncate(path, 1024)
        before = counts.requests
        assert_equal(data.train, load(shards).train)
        assert counts.requests > before
        after = counts.requests
        assert_equal(data.train, load(shards).train)
        assert counts.requests == after, "what was read again is in the cache again"


def test_what_was_not_written_to_a_cache_is_a_hole(tmp_path):
    page = 1 << 16  # at least a block of any usual file system
    with open(tmp_path / "a.tar", "w+b") as file:
        os.pwrite(file.fileno(), b"x" * page, 2 * page)
        found = [is_hole(file.fileno(), start) for start in (0, page, 2 * page, 3 * page - 1, 3 * page, 9 * page)]
    assert found == [True, True, False, False, True, True]
    cache = Cache(SimpleNamespace(), tmp_path)
    assert cache.look("a.tar", 0, page) == b"", "zeros need neither be read nor checked"
    assert cache.look("a.tar", 2 * page, 3 * page) == b"x" * page


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_block_is_one_read(shards, tmp_path, has_cache):
    """One read brings all images that lie side by side in a shard and in the block, in whichever batches."""
    flags = ["--cache-dir", str(tmp_path)] * has_cache
    with serve(shards) as (url, counts):
        split = load(url, "--shuffle-block", "4", *flags).train
        shard_of = split.dataset.fields["shard"]
        order = split.storage_order()[permutation(len(split), 0, 0, 4)]
        spans = {(place // 4, int(shard_of[index])) for place, index in enumerate(split.storage_order())}
        before = counts.requests
        ours = list(split.batches(order.split(6), 0))
        assert counts.requests - before == len(spans) < 28 / 2
        theirs = load(shards).train.batches(order.split(6), 0)
        for (a, b), (c, d) in zip(ours, theirs, strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)
        list(split.batches(order.split(6), 0))
        assert counts.requests - before == len(spans) * (2 - has_cache)


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_damaged_image_of_a_block_costs_no_other(copy, tmp_path, has_cache):
    """It is named, and its neighbours are trained on; so are all where nobody gets to it."""
    data = load(copy)
    order, fields = data.train.storage_order(), data.train.dataset.fields
    third = int(order[2])
    path = copy / data.train.dataset._shard(third)
    with path.open("r+b") as file:
        file.seek(int(fields["offset"][third]) + 200)
        file.write(b"damage")
    told = []
    with serve(copy) as (url, _):
        flags = ["--cache-dir", str(tmp_path / "cache")] * has_cache
        data = load(url, "--shuffle-block", "4", "--timeout-s", "8", *flags, told=told)
        first, second = data.train.batches(order[:4].split(2), 0)
    assert SKIPPED not in first[1].tolist()
    assert second[1].tolist() == [SKIPPED, SKIPPED], "a batch ends there"
    place = f"{url}/{path.name} at byte {int(fields['offset'][third])}"
    [error] = map(str, told)
    assert error.startswith(f"cannot read {place}: the server sent other bytes than were packed, 4 times;")


def test_an_evaluation_reads_a_shard_in_one_piece(shards):
    with serve(shards) as (url, counts):
        split = load(url).test
        before = counts.requests
        list(split.batches(torch.arange(len(split)).split(5), 0))
        assert counts.requests - before == len(set(split.dataset.fields["shard"].tolist())) < len(split) / 2


def test_reads_together_are_bounded(shards, monkeypatch):
    with serve(shards) as (url, _):
        dataset = load(url).train.dataset
        order = dataset.storage_order().tolist()
        most = 8 * max(dataset.fields["size"]).item()
        monkeypatch.setattr("recipes.common.data.shards.PART_BYTES", most)
        groups = list(dataset._groups(order))
        assert [index for group in groups for index in group] == order
        assert max(map(len, groups)) >= 3
        assert all(dataset._end(g[-1]) - dataset._value("offset", g[0]) <= most for g in groups)


@pytest.mark.parametrize("limit", [32, 8])
def test_reads_are_in_flight_together(shards, monkeypatch, limit):
    assert stores.READS_IN_FLIGHT == 32
    monkeypatch.setattr(stores, "READS_IN_FLIGHT", limit)
    monkeypatch.setattr(stores, "start_readers", functools.cache(stores.start_readers.__wrapped__))
    with serve(shards, delay_s=0.05) as (url, counts):
        data = load(url)
        counts.most = 0
        list(data.train.batches(order_of(data.train), 0))
        assert 5 < counts.most <= limit, "more than a batch"


def test_each_batch_knows_the_next_ones_of_its_worker():
    keys = BatchKeys(workers=3, samples=3)
    keys.batches = list(torch.arange(18).split(2))
    batches = list(keys)
    assert batches[8] == [(0, 16), (0, 17)]
    ahead = [[i for _, i in batch.ahead] for batch in batches[:4]]
    assert ahead == [[6, 7, 12, 13], [8, 9, 14, 15], [10, 11, 16, 17], [12, 13]]
    assert [batch.ahead for batch in batches[6:]] == [[], [], []]


def test_batches_are_drawn_as_far_as_workers_read_ahead():
    """An epoch may have a million of them."""
    drawn = []
    keys = BatchKeys(workers=2, samples=5)
    keys.batches = (drawn.append(i) or torch.arange(2) for i in itertools.count())
    batches = iter(keys)
    for number in range(3):
        assert len(next(batches).ahead) == 3 * 2
        assert len(drawn) == number + 1 + 2 * 3


def drop(handler, number):
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True
    return True


def answer(status, content=b"", **headers):
    """Return a fault: every request gets this answer."""
    return lambda handler, _: handler.answer(status, content, **headers) is None


def send(handler, content=None, shift=0, length=0, **headers):
    """Send bytes as if they were the requested part, or a part that begins `shift` bytes later."""
    start, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
    length = length or end + 1 - start
    headers = {"Content-Range": f"bytes {start + shift}-{end + shift}/1000000", **headers}
    handler.send_response(206)
    for name, value in {**headers, "Content-Length": str(length)}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(b"x" * length if content is None else content)
    handler.wfile.flush()
    return True


def drip(handler, number):
    """Send a byte now and then: each one is in time, but the last one never comes."""
    send(handler, b"x")
    while True:
        time.sleep(0.02)
        handler.wfile.write(b"x")
        handler.wfile.flush()


PLACE = r"in place of bytes \d+-\d+, 4 times"
FAULTS = {
    "drop": (drop, r"(Remote end closed connection without response|Connection reset by peer), 4 times", 4),
    "half": (lambda handler, _: send(handler, b"x") and drop(handler, _),
        r"(the server sent 1 bytes of \d+|Connection reset by peer), 4 times", 4),
    "404": (answer(404), "the server answered 404 Not Found", 1),
    "503": (answer(503), "the server answered 503 Service Unavailable, 4 times", 4),
    "moved": (answer(307, Location="https://me:pw@other/x?Signature=secret#y"),
        "the server answered 307 Temporary Redirect: it leads to https://other/x; "
        "give an address that serves the files themselves", 1),
    "gzip": (  # a part compressed, or a part of the compressed file: neither is a part of the file
        lambda handler, _: send(handler, **{"Content-Encoding": "gzip"}),
        r"the server compresses what it sends \(gzip\), although asked not to; turn that off for the shards",
        1,
    ),
    "escape": (
        lambda handler, _: handler.send_response(418, "\x1b[2Jtea") or handler.end_headers() or drop(handler, _),
        r"the server answered 418 \?\[2Jtea", 1),
    "no HTTP": (lambda handler, _: handler.wfile.write(b"\x1b[2J\r\n") and drop(handler, _),
        r"\?\[2J, 4 times|Connection reset by peer, 4 times", 4),
    "digits": (answer(206, b"x", Content_Range=f"bytes {'1' * 5000}-2/3"),
        rf"the server sent bytes 1+ in 1 bytes, {PLACE}", 4),
    "whole": (answer(200, b"x" * 5000), "the server answered 200 OK: it does not support range requests", 1),
    "longer": (lambda handler, _: send(handler, length=10**5),
        rf"the server sent bytes \d+-\d+/1000000 in 100000 bytes, {PLACE}", 4),
    "next": (lambda handler, _: send(handler, shift=1),
        rf"the server sent bytes \d+-\d+/1000000 in \d+ bytes, {PLACE}", 4),
    "drip": (drip, r"the server took longer than 0.1 s, 4 times|not there after 0.6 s", 4),
    "silent": (lambda *_: time.sleep(5), r"timed out, 4 times|not there after 0.6 s", 4),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_server_does_is_one_line(shards, name, monkeypatch):
    fault, reason, attempts = FAULTS[name]
    faulty, is_slow = [], name in ("drip", "silent")
    if not is_slow:
        monkeypatch.setattr(time, "sleep", lambda _: None)  # between attempts
    with serve(shards, fault=lambda *request: bool(faulty) and fault(*request)) as (url, counts):
        data = load(url)
        store = data.train.dataset.store
        store.attempt_s, store.longest_s = (0.1, 0.6) if is_slow else (1, 60)
        faulty.append(True)
        before = counts.requests
        error = one_error(data, 20, status=1 if attempts > 1 else 2)
        offset = int(data.train.dataset.fields["offset"][20])
        shard = data.train.dataset._shard(20)
        start = f"cannot read {url}/{shard} at byte {offset}: "
        assert error.startswith(start)
        assert error.endswith("; fix this, then add --resume auto")
        assert re.fullmatch(reason, error.removeprefix(start).removesuffix("; fix this, then add --resume auto"))
        assert 1 <= counts.requests - before <= attempts


def in_chunks(handler, number):
    """Send the right part in chunks of 500 bytes, and then the head of another answer, which nobody asked for."""
    start, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
    content = (handler.server.folder / handler.path.lstrip("/")).read_bytes()
    part = content[start : end + 1]
    handler.send_response(206)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
    handler.end_headers()
    chunks = [part[at : at + 500] for at in range(0, len(part), 500)]
    for chunk in [*chunks, b""]:
        handler.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
    handler.wfile.write(b"HTTP/1.1 503 Late\r\n\r\n")
    handler.wfile.flush()
    return True


def test_a_part_may_come_in_chunks(shards):
    with serve(shards, fault=in_chunks) as (url, counts):
        store, name = open_store(url, 60), "train-000000.tar"
        content = (shards / name).read_bytes()
        for start, end in ((0, 1300), (500, 501), (512, 2512)):
            assert store.read(name, start, end) == content[start:end]
        assert counts.requests == 3


def test_an_attempt_ends_in_time_although_bytes_keep_coming(shards):
    with serve(shards, fault=drip) as (url, _):
        store = open_store(url, 60)
        store.attempt_s = 0.1
        with pytest.raises(OSError, match=r"the server took longer than 0\.1 s, 4 times"):
            store.read("train-000000.tar", 0, 1000)


def test_a_server_has_time_to_restart_while_other_ranks_wait(shards, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with serve(shards) as (url, _):
        store = open_store(url, 300)
    with pytest.raises(OSError, match="Connection refused, 4 times"):
        store.read("train-000000.tar", 0, 1000)
    assert 45 < sum(pauses) < store.longest_s - 4 * store.attempt_s


def test_a_server_that_recovers_costs_nothing(shards, monkeypatch):
    """The server answers 503 and drops connections in the middle of an epoch."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    seen = Counter()

    def fault(handler, number):
        request = handler.path, handler.headers["Range"]
        seen[request] += 1
        if seen[request] == 1:
            return answer(503)(handler, number)
        return seen[request] == 2 and drop(handler, number)

    with serve(shards, fault=fault) as (url, counts):
        data = load(url, "--timeout-s", "8")
        assert_equal(data.train, load(shards).train)
        assert set(seen.values()) >= {3}
        assert counts.requests > 2 * 28 + requests_for(data.train, 1)


@pytest.mark.parametrize("has_cache", [False, True])
def test_other_bytes_than_were_packed_are_asked_for_again(shards, tmp_path, monkeypatch, has_cache):
    """No image is left out for them, even with --skip-bad-images: it was whole when it was packed."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    seen = Counter()

    def fault(handler, number):
        request = handler.path, handler.headers["Range"]
        seen[request] += 1
        return seen[request] < spoilt and send(handler)

    spoilt = 0
    with serve(shards, fault=fault) as (url, _):
        data = load(url, "--skip-bad-images", "--timeout-s", "8", *["--cache-dir", str(tmp_path)] * has_cache)
        seen.clear()
        spoilt = 3
        assert_equal(data.train, load(shards).train)
        assert max(seen.values()) >= 3
        seen.clear()
        spoilt = 1000
        for path in tmp_path.rglob("*.tar"):
            os.truncate(path, 0)
        error = one_error(data, status=2)
        start = f"cannot read {url}/train-000000.tar at byte 512: "
        assert error.startswith(f"{start}the server sent other bytes than were packed, 4 times; fix this")
        assert set(seen.values()) == {4}
        assert not any(path.stat().st_size for path in tmp_path.rglob("*.tar"))


def test_a_batch_ends_at_the_first_image_that_cannot_be_read(shards):
    """Trying all its images would take the limit many times over, which other ranks would take for a hang."""
    gone = []
    with serve(shards, fault=lambda handler, _: bool(gone) and answer(404)(handler, 0)) as (url, _):
        data = load(url)
        gone.append(True)
        told = []
        data.train.on_fault = told.append
        ((images, labels),) = data.train.batches([torch.arange(20)], 0)
        assert (len(images), set(labels.tolist())) == (20, {SKIPPED})
        assert len(told) == 1


def rewrite(folder, change):
    with np.load(folder / INDEX) as index:
        arrays = dict(index)
    about = json.loads(str(arrays.pop("about")))
    change(about, arrays)
    with open(folder / INDEX, "wb") as file:
        np.savez(file, about=np.array(json.dumps(about)), **arrays)


def cut_header(folder):
    """Make an array whose header has an open bracket."""
    with zipfile.ZipFile(folder / INDEX, "w") as archive:
        header = b"{'descr': [(\n"
        archive.writestr("about.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)


NOT_WHOLE = {
    r"cannot read http://\S+/index\.npz \(the server answered 404 Not Found\); see that the server is up": (
        lambda folder: (folder / INDEX).unlink()
    ),
    r"index\.npz is damaged \(File is not a zip file\)": lambda folder: (folder / INDEX).write_bytes(b"x" * 400),
    r"cannot read \S+/val-000000\.tar \(the server answered 404 Not Found\); copy it again, or see": (
        lambda folder: (folder / "val-000000.tar").unlink()
    ),
    r"train-000001\.tar has 512 bytes instead of ": lambda folder: os.truncate(folder / "train-000001.tar", 512),
    r"index\.npz is damaged \(": cut_header,
}
DAMAGED = {
    r"'\.\./train-000000\.tar' is not a shard's name": (
        lambda about, _: about.update(shards={f"../{name}": size for name, size in about["shards"].items()})
    ),
    r"'a/\.\./train-000000\.tar' is not a shard's name": (
        lambda about, _: about.update(shards={f"a/../{name}": size for name, size in about["shards"].items()})
    ),
    r"an image of train is where there can be none\)": lambda _, arrays: np.put(arrays["train_size"], 3, 2**30),
    r"train has other fields than images have\)": (
        lambda _, arrays: arrays.update(train_label=arrays["train_label"].astype(np.int8))
    ),
    "a size or num_classes is not a whole number": lambda about, _: about.update(num_classes=2.5),
    r"there are more classes than images\)": (
        lambda about, arrays: about.update(num_classes=len(arrays["train_label"]) + 1)
    ),
    "val has no images, or not all of them have all fields": (
        lambda _, arrays: arrays.update({name: arrays[name][:0] for name in arrays if name.startswith("val_")})
    ),
    "train has no images, or not all of them have": (
        lambda _, arrays: arrays.update(train_label=arrays["train_label"][:-1])
    ),
    "Object arrays cannot be loaded": lambda _, arrays: arrays.update(val_label=np.array([{}], dtype=object)),
}
NOT_WHOLE |= {rf"is damaged \({why}": partial(rewrite, change=change) for why, change in DAMAGED.items()}


@pytest.mark.parametrize("error", NOT_WHOLE)
def test_a_folder_that_is_not_whole_is_refused(copy, error):
    NOT_WHOLE[error](copy)
    with serve(copy) as (url, _), pytest.raises(UserError, match=error):
        load(url)


@pytest.mark.parametrize(
    ("name", "value"),
    [("val_shard", -1), ("val_shard", 99), ("val_offset", -1), ("val_size", 2**20), ("val_label", 3)],
)
def test_an_image_outside_of_its_shard_or_of_all_classes_is_refused(copy, name, value):
    rewrite(copy, lambda _, arrays: np.put(arrays[name], 3, value))
    with pytest.raises(UserError, match=r"an image of val is where there can be none\)"):
        load(copy)


def test_an_image_that_is_too_large_for_memory_is_refused(copy):
    def enlarge(about, arrays):
        about["shards"] = dict.fromkeys(about["shards"], 2**40)
        np.put(arrays["val_size"], 3, 2**29)

    rewrite(copy, enlarge)
    with pytest.raises(UserError, match=r"an image of val is where there can be none\)"):
        load(copy)


def test_a_cache_that_cannot_be_kept_is_refused(shards, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with serve(shards) as (url, _):
        with pytest.raises(UserError, match=r"--cache-dir: cannot use \S+ \(Not a directory\); give a folder"):
            load(url, "--cache-dir", str(tmp_path / "file"))
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=512))
            with pytest.raises(UserError, match=r"GB more, and its disk has 0\.0 GB free; make room"):
                load(url, "--cache-dir", str(tmp_path / "cache"))
        data = load(url, "--cache-dir", str(tmp_path / "cache"))

        monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        assert "--cache-dir cannot use " in one_error(data, status=1)


def test_what_the_cache_has_of_other_shards_needs_room_again(shards, tmp_path, monkeypatch):
    """As after the images were packed again, into larger shards; a file of the same name is overwritten."""
    flags = ("--cache-dir", str(tmp_path))
    with serve(shards) as (url, _):
        load(url, *flags)
        [folder] = tmp_path.iterdir()
        large, other = bytes(10**6), folder / "train-000099.tar"
        sizes = [path.stat().st_size for path in shards.glob("*.tar")]
        (folder / "train-000000.tar").write_bytes(large)
        other.write_bytes(large)
        needed = sum(sizes) - (shards / "train-000000.tar").stat().st_size
        for free, fits in ((needed, True), (needed - 1, False)):
            monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=SimpleNamespace(free=free)))
            with nullcontext() if fits else pytest.raises(UserError, match="GB more, and its disk has"):
                load(url, *flags)


@pytest.mark.parametrize("call", ["pwrite", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_cache_whose_disk_fills_up_costs_time_and_no_run(shards, tmp_path, monkeypatch, capfd, call, number):
    """Other jobs may fill it. What was read is in memory anyway, and one line a node says what it costs."""
    call_system = getattr(os, call)

    def fail(*values, dir_fd=None, **more):
        if call == "open" and dir_fd is None:
            return call_system(*values, **more)
        raise OSError(number, os.strerror(number))

    with serve(shards) as (url, counts):
        data, local = load(url, "--cache-dir", str(tmp_path)), load(shards)
        [folder] = tmp_path.iterdir()
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            assert_equal(data.train, local.train)
            before = counts.requests
            assert_equal(data.train, local.train)
        assert counts.requests - before == requests_for(data.train, 2), "each epoch reads all again"
        [warning] = re.findall("warning: .*\n", capfd.readouterr().err)
        what = (
            rf"warning: --cache-dir cannot use {re.escape(str(folder))}/train-00000\d\.tar: {os.strerror(number)}"
        )
        assert re.fullmatch(f"{what}; each epoch reads what the cache lacks from the server\n", warning)
        assert_equal(data.train, local.train)
        before = counts.requests
        assert_equal(data.train, local.train)
        assert counts.requests == before, "with room again, the cache keeps them"


def test_a_cache_that_others_can_write_is_refused(shards, tmp_path, monkeypatch):
    """Others could put links there, and let this run write to any file of its user."""
    flags = ("--cache-dir", str(tmp_path / "cache"))
    mask = os.umask(0o002)
    try:
        with serve(shards) as (url, _):
            data = load(url, *flags)
            [folder] = (tmp_path / "cache").iterdir()
            assert not folder.stat().st_mode & 0o022
            victim = tmp_path / "victim"
            victim.write_bytes(b"")
            for name in ("train-000000.tar", "val-000000.tar"):
                (folder / name).symlink_to(victim)
            assert f"--cache-dir cannot use {folder}/train-000000.tar: Too many" in one_error(data, status=2)
            assert victim.read_bytes() == b""
            (folder / "train-000000.tar").unlink()
            fix = re.escape(f"others can write to it: make it yours, and chmod go-w {folder}")
            folder.chmod(0o775)
            assert re.search(fix, one_error(data)), "also after it was found to be the user's"
            with pytest.raises(UserError, match=rf"--cache-dir: cannot use \S+ \({fix}\); give a folder"):
                load(url, *flags)
            folder.chmod(0o755)
            with monkeypatch.context() as patch:
                patch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
                with pytest.raises(UserError, match=fix):
                    load(url, *flags)
            folder.rename(tmp_path / "elsewhere")
            folder.symlink_to(tmp_path / "elsewhere")
            assert "Not a directory" in one_error(data)
            with pytest.raises(UserError, match=r"--cache-dir: cannot use \S+ \(Not a directory\); give a folder"):
                load(url, *flags)
    finally:
        os.umask(mask)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("shards --data-dir https://me:secret@host/x", "a URL with a password, a query or a fragment"),
        ("shards --data-dir https://host/x?token=secret", "would be recorded; give the bare address"),
        ("shards --data-dir https://me@host/x", "address; web servers are read without a login, s3:// and"),
        ("shards --data-dir s3://me@bucket/x", "bare address; fsspec's packages find credentials by themselves"),
        ("shards --data-dir http://host:port/x", "Port could not be cast"),
        ("shards --data-dir http://[x/y", "--data-dir: Invalid IPv6 URL; give http"),
        ("shards --data-dir https://a..b/x", ": label empty"),
        ("shards --data-dir http://:80/x", "it names no host"),
        ("shards --data-dir s3://bucket/x", r"--data-dir s3://: Install s3fs .*`pip install s3fs`"),
        ("shards --data-dir nope://bucket/x", "--data-dir nope://: Protocol not known: nope"),
        ("shards --data-dir ftp://host/x", "missing a required argument: 'host'; serve the folder by http://"),
        ("shards --data-dir zip://x/y", "--data-dir zip://: .*; serve the folder by http:// or https://"),
        ("imagefolder --data-dir https://host/x", "only shards can be read from a server; pack images by"),
        ("shards --cache-dir x", "--cache-dir x is for --data shards on a server; drop it"),
    ],
)
def test_refusals(flags, error, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    with pytest.raises(UserError, match=error):
        load_data(options(["--data", *flags.split()]), CPU, print)


def test_variables_of_fsspec_set_what_a_url_does_not(tmp_path):
    """As for buckets without a login; docs/data.md names those of s3fs."""
    script = "from recipes.common.data.stores import file_system; print(file_system('file').auto_mkdir)"
    env = {**os.environ, "FSSPEC_FILE_AUTO_MKDIR": "true", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout == "True\n"
    (tmp_path / ".config" / "fsspec").mkdir(parents=True)
    (tmp_path / ".config" / "fsspec" / "conf.json").write_text('{"file": {"auto_mkdir": true}}')
    del env["FSSPEC_FILE_AUTO_MKDIR"]
    assert subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout == "True\n"


def test_a_folder_of_any_name_is_asked_for(shards, tmp_path):
    folder = "größe a+b=c%25d"
    shutil.copytree(shards, tmp_path / "gr%C3%B6%C3%9Fe%20a+b=c%25d")  # the server does not decode names
    with serve(tmp_path) as (url, _):
        assert_equal(load(f"{url}/{folder}").train, load(shards).train)


def test_a_store_that_gives_no_size_is_one_line(shards, monkeypatch):
    no_size = SimpleNamespace(size=lambda *_: None)
    monkeypatch.setattr("recipes.common.data.stores.file_system", lambda _: no_size)
    with pytest.raises(UserError, match=r"cannot read memory://x/index\.npz \(it does not report a size"):
        load("memory://x")


def test_a_store_that_sends_a_part_of_what_was_asked_for_is_one_line(monkeypatch):
    half = SimpleNamespace(cat_file=lambda *_, start, end: bytes((end - start) // 2))
    monkeypatch.setattr("recipes.common.data.stores.file_system", lambda _: half)
    store = FsspecStore("memory://x", 0.1)
    with pytest.raises(OSError, match="5 bytes came of 10"):
        store.read("index.npz", 0, 10)


class NoCredentialsError(Exception):
    """As botocore's."""


@pytest.mark.parametrize(
    ("kind", "attempts", "status"),
    [(NoCredentialsError, 1, 2), (ConnectionError, 4, 1), (RuntimeError, 4, 1)],
)
def test_what_a_package_of_fsspec_raises_is_judged_by_its_name(monkeypatch, kind, attempts, status):
    call = Mock(side_effect=kind("of the package"))
    monkeypatch.setattr(stores, "file_system", lambda scheme: SimpleNamespace(size=call))
    with pytest.raises(OSError, match=f"{kind.__name__}: of the package") as caught:
        FsspecStore("s3://x", 0.01).size("y")
    assert (call.call_count, may_pass(caught.value)) == (attempts, status == 1)


def test_a_certificate_that_is_not_valid_stays_so(monkeypatch):
    store = open_store("https://127.0.0.1", 0.01)
    monkeypatch.setattr(store, "_size", Mock(side_effect=ssl.SSLCertVerificationError(1, "unknown authority")))
    with pytest.raises(OSError, match="unknown authority, 4 times") as caught:
        store.size("y")
    assert not may_pass(caught.value)


def test_fsspec_reads_the_same_images(shards, tmp_path):
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec: pip install fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(shards), "/packed", recursive=True)
    data = load("memory://packed", "--cache-dir", str(tmp_path))
    assert isinstance(data.train.dataset, RemoteImages)
    assert_equal(data.train, load(shards).train)
    memory.rm("/packed/val-000000.tar")
    missing = r"cannot read memory://packed/val-000000\.tar \(No such file or directory\)"
    with pytest.raises(UserError, match=missing):
        load("memory://packed")
