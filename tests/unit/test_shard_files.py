"""Sharded checkpoints: any slice is read from any pieces, and what is cut, lost or left over does no harm."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from recipes.common.checkpoint import reading, shard_files
from recipes.common.checkpoint.checkpoint import CheckpointFolder, Position, pack
from recipes.common.checkpoint.reading import BadCheckpointError, check_shards, read_checkpoint, read_newest
from recipes.common.checkpoint.shard_files import ShardedFolder, read_box, read_whole, share_checks
from recipes.common.data.file_pool import FilePool
from recipes.common.errors import UserError
from recipes.common.folders import names_in
from recipes.common.models.gpt import GPT
from recipes.common.parallel.sharding import map_states
from recipes.common.watch.watch import NoWatch
from scripts.dev import export
from tests.support import is_equal
from tests.unit.test_checkpoint import ARGS, files

RANKS = 3


class Together:
    """Ranks that are threads of this process, with the methods that ShardedFolder calls."""

    def __init__(self, rank, barrier, values):
        self.rank, self.world_size, self.barrier, self.values = rank, len(values), barrier, values
        self.watch = NoWatch()

    def broadcast_object(self, value):
        return self.gather_objects(value)[0]

    def gather_objects(self, value):
        self.values[self.rank] = value
        self.barrier.wait(10)
        values = list(self.values)
        self.barrier.wait(10)
        return values


def tensors(step):
    """Return a model with several kinds of tensors, the same for the same step."""
    draw = torch.Generator().manual_seed(step)
    return {
        "matrix": torch.randn(7, 5, generator=draw),
        "cube": torch.randn(4, 3, 2, generator=draw).to(torch.bfloat16),
        "count": torch.tensor(step),
    }


def cut(tensor, rank):
    """Return a rank's boxes: rows of a matrix, columns of a cube, and a number on rank 0 alone."""
    if not tensor.ndim:
        return [()] if rank == 0 else []
    dimension = {2: 0, 3: 1}[tensor.ndim]
    size, box = tensor.shape[dimension], [(0, n) for n in tensor.shape]
    box[dimension] = (size * rank // RANKS, size * (rank + 1) // RANKS)
    return [tuple(box)]


def part_of(step, rank):
    """Return what a rank passes to ShardedFolder.write()."""
    parts, model, place = [], {}, 0
    for name, tensor in tensors(step).items():
        pieces = []
        for box in cut(tensor, rank):
            parts.append(tensor[tuple(slice(*ends) for ends in box)])
            pieces.append([place, box])
            place += parts[-1].nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        model[name] = {"shape": list(tensor.shape), "dtype": dtype, "pieces": pieces}
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    content = pack(ARGS, Position(step=step), model, optimizer, {})
    return {**content, "parts": parts}


def write(folder, step, is_best=False, spoil=None):
    """Let all ranks write the checkpoint of a step; return each rank's result, a path or a UserError."""
    barrier, values = threading.Barrier(RANKS), [None] * RANKS

    def work(rank):
        sharded = ShardedFolder(folder, Together(rank, barrier, values))
        content = part_of(step, rank)
        if spoil and rank == 1:
            spoil(sharded, content)
        try:
            return sharded.write(content, is_best)
        except UserError as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(work, range(RANKS)))


@pytest.fixture
def folder(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    for step in (10, 20):
        assert write(checkpoints, step) == [tmp_path / f"step-{step:09d}.pt"] * RANKS
    return checkpoints


def test_all_shard_files_are_on_the_disk_before_a_checkpoint_names_them(folder, monkeypatch):
    seen, fsync = [], os.fsync

    def watch(handle):
        seen.append(Path(f"/proc/self/fd/{handle}").readlink().suffix)
        return fsync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    write(folder, 30)
    assert sorted(seen[:-2]) == [""] * RANKS + [".shard"] * RANKS, "the files, and the folder for each"
    assert seen[-2:] == [".tmp", ""]


def shards(folder, step=None):
    pattern = "*.shard" if step is None else f"step-{step:09d}-*.shard"
    return sorted(folder.folder.glob(pattern))


def test_what_is_written_is_read(folder):
    content = read_newest(folder, set_aside=True)[1]
    content["model"]["tied"] = {**content["model"]["matrix"]}
    whole = read_whole(content)
    assert whole["model"].pop("tied") is whole["model"]["matrix"]
    assert is_equal(whole["model"], tensors(20))
    assert whole["optimizer"] == {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    assert whole["position"]["step"] == 20
    assert whole.keys() == pack(ARGS, Position(), {}, {}, {}).keys()
    sizes = [path.stat().st_size for path in shards(folder, 20)]
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors(20).values())
    assert max(sizes) < sum(sizes) / 2


def test_a_rank_without_tensors_writes_no_file(folder):
    path = folder.folder / "step-000000030-00000-01234567.shard"
    assert ShardedFolder(folder, Together(0, None, [None]))._write_part(path, []) is None
    assert not path.exists()


def test_empty_tensors_have_no_pieces_and_keep_their_shapes():
    shapes = {"a": [0], "b": [0, 3], "c": [2, 0]}
    model = {name: {"shape": shape, "dtype": "float32", "pieces": []} for name, shape in shapes.items()}
    whole = read_whole({"model": model, "shards": {"folder": "", "files": []}})
    assert {name: list(tensor.shape) for name, tensor in whole["model"].items()} == shapes


@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_any_box_is_read_from_the_pieces_that_overlap_it(folder, monkeypatch, block_bytes):
    monkeypatch.setattr(shard_files, "BLOCK_BYTES", block_bytes)
    content, chance = read_newest(folder, set_aside=True)[1], random.Random(0)
    for name, tensor in tensors(20).items():
        for _ in range(50):
            box = tuple(tuple(sorted(chance.randint(0, size) for _ in "ab")) for size in tensor.shape)
            found = read_box(content["model"][name], box, content["shards"], FilePool(RANKS))
            assert is_equal(found, tensor[tuple(slice(*ends) for ends in box)]), (name, box)


def test_each_file_is_opened_once(folder, monkeypatch):
    """A rank reads some 3,000 tensors of a large model, most of them from one file."""
    content, opened = read_newest(folder, set_aside=True)[1], []
    real, before = os.open, os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "open", lambda path, *how: opened.append(Path(path).name) or real(path, *how))
    read_whole(content)
    assert sorted(opened) == [path.name for path in shards(folder, 20)]
    assert os.listdir("/proc/self/fd") == before, "all are closed"


def test_what_version_0_2_wrote_is_read(folder):
    content = read_newest(folder, set_aside=True)[1]
    for reference in content["model"].values():
        rows = [(piece[:2], piece[2::2], piece[3::2]) for piece in reference["pieces"].tolist()]
        reference["pieces"] = [[*place, [*zip(starts, ends, strict=True)]] for place, starts, ends in rows]
    assert content["model"]["matrix"]["pieces"][1] == [1, 0, [(2, 4), (0, 5)]]
    assert content["model"]["count"]["pieces"] == [[0, 56, []]]
    assert is_equal(read_whole(content)["model"], tensors(20))


def test_of_thousands_of_ranks_a_checkpoint_has_one_tensor_of_pieces_for_each_of_its_own(tmp_path):
    """Lists of 70 billion parameters' pieces on 8,192 ranks would be 17 GB, and take minutes to read."""
    ranks, names = 4096, [f"weight{i}" for i in range(3)]
    content = pack(ARGS, Position(step=1), {}, {"state": {}, "param_groups": []}, {})
    content["model"] = {name: {"shape": [ranks, 7], "dtype": "float32", "pieces": []} for name in names}
    gathered = []
    for rank in range(ranks):
        name = f"step-000000001-{rank:05d}-00000000.shard"
        (tmp_path / name).touch()
        own = shard_files.pack_pieces([[[28 * i, ((rank, rank + 1), (0, 7))]] for i in range(len(names))])
        assert len(own) < 100
        gathered.append(({"name": name, "size": 0, "crc32": 0}, own, None))
    sharded = ShardedFolder(CheckpointFolder(tmp_path), Together(0, None, [None]))
    assert sharded._commit(content, gathered, is_best=False) is None
    path = tmp_path / "step-000000001.pt"
    found = torch.load(path, weights_only=True)["model"]["weight1"]["pieces"]
    assert (found.shape, found.dtype) == ((ranks, 6), torch.int64)
    assert found[4000].tolist() == [4000, 28, 4000, 4001, 0, 7]
    box = ((10, 12), (3, 5))
    pieces = shard_files.find_pieces({"pieces": found, "shape": [ranks, 7]}, box)
    found = [(file, common) for file, _, _, common in pieces]
    assert found == [(10, ((10, 11), (3, 5))), (11, ((11, 12), (3, 5)))]


def test_pieces_are_merged_tensor_by_tensor_in_the_order_of_the_ranks(tmp_path):
    """Of any number for each tensor and rank, some ranks without a file."""
    chance, own = random.Random(0), []
    shapes = [[8, 8], [8], [], [4, 4, 4], [3], [0]]
    for rank in range(9):
        counts = [chance.randint(0, 3) * (rank not in (0, 4)) for _ in shapes[:-1]] + [0]
        box = [
            [(chance.randint(0, 9), tuple((i, i + rank) for i in shape)) for _ in range(n)]
            for shape, n in zip(shapes, counts, strict=True)
        ]
        own.append(box)
    gathered = []
    for rank, pieces in enumerate(own):
        name = f"step-000000001-{rank:05d}-00000000.shard"
        (tmp_path / name).touch()
        entry = {"name": name, "size": 0, "crc32": 0} if any(pieces) else None
        gathered.append((entry, shard_files.pack_pieces(pieces), None))
    content = pack(ARGS, Position(step=1), {}, {"state": {}, "param_groups": []}, {})
    content["model"] = {
        str(i): {"shape": shape, "dtype": "float32", "pieces": []} for i, shape in enumerate(shapes)
    }
    sharded = ShardedFolder(CheckpointFolder(tmp_path), Together(0, None, [None]))
    assert sharded._commit(content, gathered, is_best=False) is None
    read = torch.load(tmp_path / "step-000000001.pt", weights_only=True)
    files = [int(entry["name"].split("-")[2]) for entry in read["shards"]["files"]]
    assert files == [1, 2, 3, 5, 6, 7, 8]
    for number, shape in enumerate(shapes):
        rows = [
            [files.index(rank), place, *(end for ends in box for end in ends)]
            for rank in files
            for place, box in own[rank][number]
        ]
        found = read["model"][str(number)]["pieces"]
        assert (found.dtype, found.shape) == (torch.int64, (len(rows), 2 + 2 * len(shape)))
        assert found.tolist() == rows


def test_cut_or_changed_at_any_byte_it_is_passed_over(folder, capsys):
    for path in [*shards(folder, 20), folder.paths()[0]]:
        whole = path.read_bytes()
        step = max(1, len(whole) // 12)
        for place in range(0, len(whole), step):
            changed = bytearray(whole)
            changed[place] ^= 1 << place % 8
            for damaged in (whole[:place], bytes(changed)):
                path.write_bytes(damaged)
                found, content = read_newest(folder, set_aside=False)
                assert is_equal(read_whole(content)["model"], tensors(10))
                assert found.name == "step-000000010.pt"
                assert capsys.readouterr().err.count("warning: skipped ") == 1
        path.write_bytes(whole)
    assert read_newest(folder, set_aside=False)[0].name == "step-000000020.pt"


def test_a_tied_weight_is_gathered_or_written_once():
    model, changed = GPT(7, width=4, depth=1, heads=2), []

    def change(name, value):
        changed.append(name)
        return value.clone()

    state = map_states({"model": model.state_dict(), "optimizer": {"state": {}}}, model, change)["model"]
    assert is_equal(dict(state), dict(model.state_dict()))
    assert state._metadata == model.state_dict()._metadata
    assert state["head.weight"] is state["embedding.weight"]
    assert changed == [name for name, _ in model.named_parameters()]


def test_a_checkpoint_is_read_once_for_the_names_of_its_files(folder, monkeypatch):
    """Of thousands of ranks, step-N.pt has millions of pieces, and to read four of them takes minutes."""
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda path, **how: read.append(path.name) or load(path, **how))
    write(folder, 30, is_best=True)
    write(folder, 40)
    write(folder, 50)
    assert read == []
    names = {path.name for path in folder.folder.glob("*.pt")}
    assert names == {"step-000000040.pt", "step-000000050.pt", "best.pt"}
    assert len(shards(folder)) == 3 * RANKS
    again = CheckpointFolder(folder.folder, keep=2)  # as after a resume
    write(again, 60)
    assert sorted(read) == ["best.pt", "step-000000040.pt", "step-000000050.pt"]
    write(again, 70)
    assert len(read) == 3
    assert len(shards(folder)) == 3 * RANKS


def test_without_a_shard_file_it_is_passed_over(folder, capsys):
    lost = shards(folder, 20)[1]
    lost.unlink()
    assert read_newest(folder, set_aside=False)[0].name == "step-000000010.pt"
    assert f": its shard file {lost.name} is missing\n" in capsys.readouterr().err


def resume(folder, monkeypatch, lacking=None):
    """Let rank 0 look for the newest checkpoint; return each rank's result, and the files that each checked.

    Only rank 0 lists the folder: of thousands of ranks, it has as many files.
    """
    here, checked, listed = threading.local(), [], []
    barrier, values = threading.Barrier(RANKS), [None] * RANKS

    def note(path, entries):
        checked.append((here.rank, path.name, [entry["name"] for entry in entries]))
        check_shards(path, entries)

    def look_on_rank_0(check):
        here.rank = 0  # in a thread of its own
        return read_newest(folder, True, check)

    def work(rank):
        here.rank = rank
        look = look_on_rank_0 if rank == 0 else (lambda check: None)
        try:
            return share_checks(look, Together(rank, barrier, values), 60.0, 0.0)
        except UserError as error:
            return error

    with monkeypatch.context() as patch, ThreadPoolExecutor(RANKS) as pool:
        patch.setattr(shard_files, "check_shards", note)
        patch.setattr(shard_files, "names_in", lambda place: listed.append(here.rank) or names_in(place))
        patch.setattr(Path, "exists", lambda path: here.rank != lacking and os.path.lexists(path))
        results = list(pool.map(work, range(RANKS)))
    assert set(listed) == {0}
    return results, sorted(checked)


def test_ranks_share_the_check_and_pass_over_what_one_of_them_finds_damaged(folder, monkeypatch, capsys):
    names = {step: [path.name for path in shards(folder, step)] for step in (10, 20)}
    damaged = shards(folder, 20)[1]
    damaged.write_bytes(bytes(damaged.stat().st_size))
    (found, *others), checked = resume(folder, monkeypatch)
    assert (found[0].name, others) == ("step-000000010.pt", [None] * (RANKS - 1))
    said = f"step-000000020.pt: its shard file {damaged.name} is truncated or damaged (wrong checksum)"
    assert f"warning: skipped {folder.folder}/{said}" in capsys.readouterr().err
    assert (folder.folder / "step-000000020.pt.bad").exists()
    pairs = [(rank, step) for rank in range(RANKS) for step in (10, 20)]
    assert checked == [(rank, f"step-{step:09d}.pt", [names[step][rank]]) for rank, step in pairs]


def test_a_rank_that_does_not_see_the_files_condemns_nothing(folder, monkeypatch):
    shards(folder, 20)[0].write_bytes(b"")  # which rank 0 finds
    before = files(folder.folder)
    (error, *others), _ = resume(folder, monkeypatch, lacking=2)
    assert str(error).startswith(f"no {shards(folder, 20)[2].name} in {folder.folder} on ")
    assert str(error).endswith("; let all ranks share it")
    assert error.status == 2
    assert others == [None] * (RANKS - 1)
    assert files(folder.folder) == before


def test_what_one_rank_cannot_read_now_another_launch_may_read(folder, monkeypatch):
    before, checksum_of = files(folder.folder), reading.checksum_of

    def fail(file, size):
        if "-00001-" in file.name:
            raise OSError(errno.ESTALE, "Stale file handle", "a.shard")
        return checksum_of(file, size)

    monkeypatch.setattr(reading, "checksum_of", fail)
    (error, *others), _ = resume(folder, monkeypatch)
    assert str(error).startswith("cannot read a.shard: Stale file handle; nothing was changed")
    assert (error.status, others) == (1, [None] * (RANKS - 1))
    assert files(folder.folder) == before


def test_a_rank_that_remembers_older_names_looks_again(folder, monkeypatch):
    path = folder.paths()[0]
    entries = torch.load(path, weights_only=True)["shards"]["files"]
    is_old, exists = [True], Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: not is_old and exists(path))
    peers = SimpleNamespace(rank=1, world_size=RANKS)
    text, status = shard_files._check_share(peers, path, entries)
    assert (text.split(" in ")[0], status) == (f"no {entries[1]['name']}", 2)
    without_a_share = SimpleNamespace(rank=RANKS, world_size=RANKS + 1)
    assert shard_files._check_share(without_a_share, path, entries)[0].startswith(f"no {entries[0]['name']} in ")
    monkeypatch.setattr(shard_files, "refresh_names", lambda folder: is_old.clear())
    assert shard_files._check_share(peers, path, entries) == ("", 0)


def test_rank_0_looks_again_where_it_remembers_older_names(folder, monkeypatch):
    is_old = [True]
    monkeypatch.setattr(shard_files, "names_in", lambda place: set() if is_old else names_in(place))
    monkeypatch.setattr(shard_files, "refresh_names", lambda place: is_old.clear())
    alone = Together(0, threading.Barrier(1), [None])
    path, _ = share_checks(lambda check: read_newest(folder, False, check), alone, 60.0, 0.0)
    assert path.name == "step-000000020.pt"


def test_files_without_a_size_make_a_bad_checkpoint_on_any_number_of_ranks(folder):
    path = folder.paths()[0]
    entries = [{"name": entry["name"]} for entry in torch.load(path, weights_only=True)["shards"]["files"]]
    found = shard_files._check_share(SimpleNamespace(rank=1, world_size=RANKS), path, entries)
    assert found == ("it does not say which shard files it has", False)


def test_the_search_ends_with_the_connections(folder):
    """Its thread would keep the interpreter alive."""
    has_ended, lost = threading.Event(), RuntimeError("Connection closed by peer")
    alone = Together(0, None, [None])
    alone.broadcast_object = Mock(side_effect=lost)

    def look(check):
        try:
            return read_newest(folder, False, check)
        finally:
            has_ended.set()

    with pytest.raises(RuntimeError, match="Connection closed"):
        share_checks(look, alone, 60.0, 60.0)
    assert has_ended.wait(20)


def test_a_passing_fault_condemns_nothing(folder, monkeypatch):
    before, fault = files(folder.folder), OSError(errno.EIO, "Input/output error", str(shards(folder, 20)[0]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", Mock(side_effect=fault))
        with pytest.raises(UserError, match=r"cannot read .*Input/output error; nothing was changed") as caught:
            read_newest(folder, set_aside=True)
    assert caught.value.status == 1
    assert files(folder.folder) == before


def test_a_kill_before_step_n_pt_leaves_the_one_before_and_the_next_write_clears_it(folder):
    """A kill leaves shard files of a step, of any length, and perhaps step-N.tmp."""
    left = folder.folder / "step-000000030-00001-0123abcd.shard"
    left.write_bytes(b"cut")
    (folder.folder / "step-000000030.tmp").write_bytes(b"cut")
    assert read_whole(read_newest(folder, set_aside=True)[1])["position"]["step"] == 20
    write(folder, 25)
    assert not left.exists()
    assert sorted(path.name for path in folder.folder.glob("*.tmp")) == []
    assert len(shards(folder)) == 2 * RANKS


def test_what_a_kill_has_left_makes_room_before_the_first_write(folder):
    """With a quota, it may be the reason why there is no next checkpoint that could remove it."""
    found, used = [], shards(folder)
    left = folder.folder / "step-000000030-00001-0123abcd.shard"
    left.write_bytes(b"cut")

    def look(sharded, content):
        write_part = sharded._write_part
        sharded._write_part = lambda *args: found.append(left.exists()) or write_part(*args)

    write(folder, 30, spoil=look)
    assert found == [False]
    assert set(used) - set(shards(folder)) == set(used[:RANKS]), "those of step 10, after step 30 was written"


def test_an_older_job_removes_nothing(folder, monkeypatch):
    left = folder.folder / "step-000000030-00001-0123abcd.shard"
    left.write_bytes(b"a newer job writes it")
    before = files(folder.folder)
    monkeypatch.setattr(folder, "check_owner", Mock(side_effect=UserError("another job has taken over")))
    assert [str(error) for error in write(folder, 30)] == ["another job has taken over"] * RANKS
    assert files(folder.folder) == before


def test_what_a_rank_writes_first_is_not_taken_for_a_leftover(folder, monkeypatch):
    """Rank 0 may be late: the others wait for it before their first file."""
    remove = folder.remove_old
    monkeypatch.setattr(folder, "remove_old", lambda: time.sleep(0.5) or remove())
    assert write(folder, 30) == [folder.folder / "step-000000030.pt"] * RANKS


def test_the_oldest_go_with_their_files_and_the_best_keeps_its_own(folder):
    write(folder, 30, is_best=True)
    for step in (40, 50, 60):
        write(folder, step)
    assert [path.name for path in folder.paths()] == ["step-000000060.pt", "step-000000050.pt"]
    assert [len(shards(folder, step)) for step in (10, 20, 30, 40, 50, 60)] == [0, 0, 3, 0, 3, 3]
    assert is_equal(read_whole(read_checkpoint(folder.folder / "best.pt"))["model"], tensors(30))
    write(folder, 70, is_best=True)
    assert len(shards(folder, 30)) == 0
    folder.write(pack(ARGS, Position(step=80), {}, {"state": {}}, {}))  # the run continues with plain checkpoints
    folder.write(pack(ARGS, Position(step=90), {}, {"state": {}}, {}), is_best=True)
    assert shards(folder) == []


def test_a_damaged_checkpoint_keeps_all_shard_files(folder, capsys):
    (folder.folder / "best.pt").write_bytes(b"damaged")
    write(folder, 30)
    assert len(shards(folder)) == 3 * RANKS
    said = "warning: cannot remove old checkpoints: best.pt does not say which shard files it has"
    assert said in capsys.readouterr().err


def test_a_bad_checkpoint_that_was_the_best_keeps_no_shard_file_for_ever(folder):
    write(folder, 30, is_best=True)
    newest = folder.paths()[0]
    newest.write_bytes(newest.read_bytes()[:-10])
    assert read_newest(folder, set_aside=True)[0].name == "step-000000020.pt"
    write(folder, 40)
    assert [len(shards(folder, step)) for step in (10, 20, 30, 40)] == [0, 3, 0, 3]


def full_disk(sharded, content):
    def fail(path, parts):
        path.write_bytes(b"begun")
        raise OSError(errno.ENOSPC, "No space left on device")

    sharded._write_part = fail


def full_memory(sharded, content):
    sharded._write_part = Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory"))


def own_disk(sharded, content):
    sharded.folder = CheckpointFolder(sharded.folder.folder / "elsewhere" / "checkpoints")


def bad_weights(sharded, content):
    content["parts"] = UserError("the weights are not finite")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (full_disk, "rank 1: cannot write .*00001-.*: No space left on device.*step-000000020.pt is intact"),
        (full_memory, "rank 1: cannot write .*: DefaultCPUAllocator.*step-000000020.pt is intact"),
        (own_disk, "rank 1: cannot write .*/elsewhere/.*: No such file or directory; there is no earlier one"),
        (bad_weights, "rank 1: the weights are not finite"),
    ],
)
def test_what_one_rank_meets_all_raise_and_nothing_is_left(folder, spoil, message):
    before = files(folder.folder)
    errors = write(folder, 30, spoil=spoil)
    assert {type(error) for error in errors} == {UserError}
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(UserError, match=message):
        raise errors[0]
    assert files(folder.folder) == before


def test_a_newer_job_that_clears_the_shard_files_is_named(folder, monkeypatch):
    def clear(place):
        for path in place.glob("step-000000030-*.shard"):
            path.unlink(missing_ok=True)

    monkeypatch.setattr(shard_files, "sync_folder", clear)
    takes_over = Mock(side_effect=[None, UserError("another job has taken over")])  # while the files are written
    monkeypatch.setattr(folder, "check_owner", takes_over)
    assert [str(error) for error in write(folder, 30)] == ["another job has taken over"] * RANKS
    assert [path.name for path in folder.paths()] == ["step-000000020.pt", "step-000000010.pt"]


def test_what_rank_0_cannot_add_all_raise_and_the_next_write_clears_it(folder, monkeypatch):
    """best.pt may be there by then, and still needs its shard files."""
    replace = type(folder.folder).replace

    def fail(path, target):
        if target.name != "best.pt":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(folder.folder), "replace", fail)
        errors = write(folder, 30, is_best=True)
    assert all("cannot write" in str(error) for error in errors)
    assert read_newest(folder, set_aside=True)[0].name == "step-000000020.pt"
    assert is_equal(read_whole(read_checkpoint(folder.folder / "best.pt"))["model"], tensors(30))
    write(folder, 40, is_best=True)
    assert len(shards(folder)) == 2 * RANKS


@pytest.mark.parametrize("spoil", [os.unlink, lambda path: path.write_bytes(b"stale")], ids=["missing", "other"])
def test_a_rank_that_writes_elsewhere_is_noticed(folder, spoil):
    def elsewhere(sharded, content):
        write_part = sharded._write_part

        def lose(path, parts):
            entry = write_part(path, parts)
            spoil(path)
            return entry

        sharded._write_part = lose

    (error, *_) = write(folder, 30, spoil=elsewhere)
    assert "cannot write" in str(error)
    assert "is missing or of another size on rank 0; let all ranks share --runs-dir" in str(error)
    assert folder.paths()[0].name == "step-000000020.pt"
    write(folder, 40)
    assert shards(folder, 30) == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "step-000000020.pt", 3])
def test_no_other_file_is_read_as_a_shard(folder, name):
    content = torch.load(folder.paths()[0], weights_only=True)
    content["shards"]["files"][0]["name"] = name
    folder.write({**content, "position": {"step": 40}})
    with pytest.raises(BadCheckpointError, match=r"is not a shard file|does not say which shard files"):
        read_checkpoint(folder.folder / "step-000000040.pt")


def test_a_checkpoint_that_lacks_a_part_is_refused(folder):
    content = read_newest(folder, set_aside=True)[1]
    pieces = content["model"]["matrix"]["pieces"]
    content["model"]["matrix"]["pieces"] = pieces[[0, 2]]
    with pytest.raises(UserError, match="lack parts of a tensor"):
        read_whole(content)
    content, cut = read_newest(folder, set_aside=True)[1], shards(folder, 20)[0]
    os.truncate(cut, cut.stat().st_size - 1)  # since it was checked
    with pytest.raises(UserError, match=rf"cannot read {cut}: it ends before byte \d+; fix this"):
        read_whole(content)


def test_the_export_of_a_sharded_checkpoint_is_that_of_a_plain_one(folder, tmp_path, capsys):
    assert export.main([str(folder.folder), str(tmp_path / "model.pt")]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / 'model.pt'}: 3 tensors of step 20, from ")
    assert is_equal(torch.load(tmp_path / "model.pt", weights_only=True), tensors(20))
