"""Checkpoints are whole or absent: damage of any kind is seen, and never executed."""

import copy
import errno
import functools
import io
import json
import math
import os
import pickle
import random
import signal
import stat
import struct
import threading
import zlib
from collections import Counter
from unittest.mock import Mock

import pytest
import torch
from isal import isal_zlib
from torch import nn

from recipes.common.checkpoint import reading
from recipes.common.checkpoint.checkpoint import (
    FORMAT,
    CheckpointFolder,
    CheckpointWriter,
    Position,
    copy_tree,
    pack,
)
from recipes.common.checkpoint.reading import (
    BadCheckpointError,
    check_options,
    check_shards,
    checksum_of,
    read_checkpoint,
    read_newest,
)
from recipes.common.errors import UserError
from recipes.common.record.resume import read_path
from recipes.common.restore import position_of
from recipes.common.world.tree import map_tree
from recipes.single.train import options
from tests.conftest import refused
from tests.support import Ranks, is_equal, newest_checkpoint, train

ARGS = options([])
FIX = "fix this, then add --resume auto"


def content(step, accuracy=0.5):
    """Return a small checkpoint whose weights encode the step."""
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    position = Position(step=step, epoch=step // 10, averages={"test_accuracy": accuracy}, best_score=accuracy)
    return pack(ARGS, position, model.state_dict(), optimizer.state_dict(), {})


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path):
    checkpoints = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30):
        checkpoints.write(content(step))
    return checkpoints


def hang_in(read, *arguments):
    """Call a function that reads, as on a disk that does not answer."""

    def hang(*arguments, **options):
        print("reads", flush=True)
        threading.Event().wait()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    reading.checksum_of = torch.load = hang
    read(*arguments)


@pytest.mark.parametrize("kind", ["one file", "shards"])
def test_ctrl_c_does_not_wait_for_what_is_read(tmp_path, kind):
    path = tmp_path / "step-000000010-00000-00000000.shard"
    path.touch()
    entries = [{"name": path.name, "size": 0}] * 9
    read = (read_checkpoint, path) if kind == "one file" else (check_shards, path, entries)
    job = Ranks("single", [], 1, tmp_path / "out", setup=functools.partial(hang_in, *read))
    job.wait_for_text("reads")
    job.send(signal.SIGINT)
    outcome = job.wait(20)
    assert (outcome.statuses, "KeyboardInterrupt" in outcome.text) == ([1], True)


def test_what_is_written_is_read(folder):
    written = content(40)
    folder.write(written)
    path, read = read_newest(folder, set_aside=True)
    assert path.name == "step-000000040.pt"
    assert is_equal(read, written)
    averages = {"test_accuracy": 0.5}
    kept = {"step": 40, "epoch": 4, "averages": averages, "best_score": 0.5, "evaluated_step": 0}
    assert read["position"] == kept
    assert read["format"] == FORMAT
    data = {"data": "digits", "image_size": 224, "num_samples": 2048, "seq_len": 128, "shuffle_block": 1}
    model = {"model": "lenet", "task": "auto", "optimizer": "sgd", "global_batch_size": 64, "seed": 0}
    assert read["options"] == data | model


def test_cut_at_any_byte_it_never_loads(folder):
    path = folder.paths()[0]
    whole = path.read_bytes()
    assert len(whole) > 2000
    ends = 1000  # every length near the ends, where headers and the directory are, and every fifth between
    between = range(ends, len(whole) - ends, 5)
    for length in sorted({*range(ends), *between, *range(len(whole) - ends, len(whole))}, reverse=True):
        os.truncate(path, length)
        with pytest.raises(BadCheckpointError):
            read_checkpoint(path)
    path.write_bytes(whole)
    assert read_checkpoint(path)["position"]["step"] == 30


@pytest.mark.slow
def test_with_any_byte_flipped_it_does_not_load_or_is_the_same(folder):
    """Some bytes of a zip file mean nothing (padding, times): flipping them changes nothing that is read."""
    path = folder.paths()[0]
    whole, good = path.read_bytes(), read_checkpoint(path)
    chance, refused = random.Random(0), 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            assert is_equal(read_checkpoint(path), good)
        except BadCheckpointError:
            refused += 1
    tensors = sum(value.nbytes for value in good["model"].values())
    assert refused > 2 * tensors  # at least all weights and momenta are covered by a checksum


def test_a_file_full_of_zeros_past_some_byte_never_loads(folder):
    """A power cut leaves such a file if its length was recorded before its content."""
    path = folder.paths()[0]
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        damaged = whole[:length].ljust(len(whole), b"\0")
        if damaged == whole:
            continue  # the last bytes are zeros
        path.write_bytes(damaged)
        with pytest.raises(BadCheckpointError):
            read_checkpoint(path)


class Bomb:
    """A pickle that makes its reader run a command."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def with_checksum(data):
    """Return what somebody who knows the format could write."""
    return data + struct.pack("<8sI", b"crc32 =\0", zlib.crc32(data))


def test_the_checksum_of_these_tests_is_ours(folder):
    whole = folder.paths()[0].read_bytes()
    assert whole == with_checksum(whole[:-12])
    long = random.Random(2).randbytes(3_500_000)  # read in several parts
    assert checksum_of(io.BytesIO(long), len(long)) == (zlib.crc32(long), len(long))


def foreign_files(trace):
    plain, zipped, hidden = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"model": {}, "epoch": 3}, plain)
    torch.save([content(40)], listed := io.BytesIO())
    torch.save(Bomb(trace), zipped)
    torch.save({**content(40), "position": Bomb(trace)}, hidden)
    legacy = io.BytesIO()
    torch.save({**content(40), "scaler": Bomb(trace)}, legacy, _use_new_zipfile_serialization=False)
    return {
        "empty": b"",
        "random": random.Random(1).randbytes(5000),
        "text": b"not a checkpoint\n" * 100,
        "dict": plain.getvalue(),
        "pickle": pickle.dumps(Bomb(trace)),
        "pickle-in-zip": zipped.getvalue(),
        "ours-with-code": hidden.getvalue(),
        "ours-with-code-legacy": legacy.getvalue(),
        "ours-with-code-and-checksum": with_checksum(hidden.getvalue()),
        "dict-with-checksum": with_checksum(plain.getvalue()),
        "list-with-checksum": with_checksum(listed.getvalue()),
    }


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", list(foreign_files("unused")))
def test_a_foreign_file_is_passed_over_and_never_executed(folder, tmp_path, capsys, kind):
    trace = tmp_path / "executed"
    newest = folder.folder / "step-000000040.pt"
    newest.write_bytes(foreign_files(trace)[kind])
    path, read = read_newest(folder, set_aside=False)
    assert (path.name, read["position"]["step"]) == ("step-000000030.pt", 30)
    assert not trace.exists()
    assert newest.exists(), "it is set aside only in a run that goes on"
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"warning: skipped {newest}: ")


def test_the_bomb_of_these_tests_does_go_off(tmp_path):
    pickle.loads(foreign_files(tmp_path / "executed")["pickle"])
    assert (tmp_path / "executed").is_dir()


def test_a_bad_file_is_set_aside_once(folder, capsys):
    (folder.folder / "step-000000040.pt").write_bytes(b"x")
    read_newest(folder, set_aside=True)
    assert (folder.folder / "step-000000040.pt.bad").read_bytes() == b"x"
    capsys.readouterr()
    read_newest(folder, set_aside=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("has_links", [True, False])
def test_the_best_is_set_aside_with_a_bad_file_that_it_is(folder, monkeypatch, capsys, has_links):
    """Without hard links, it is a copy, which stays good."""
    if not has_links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    folder.write(content(40, 0.9), is_best=True)
    newest = folder.paths()[0]
    newest.write_bytes(newest.read_bytes()[:-10])
    path, found = read_newest(folder, set_aside=True)
    assert path.name == "step-000000030.pt"
    names = set(os.listdir(folder.folder))
    assert names >= {"step-000000040.pt.bad", "best.pt.bad" if has_links else "best.pt"}
    assert {"best.pt", "best.pt.bad"} - names
    assert found["position"]["best_score"] == (-math.inf if has_links else 0.5)
    said = f"warning: set aside {folder.folder}/best.pt, too; the next evaluation chooses it anew"
    assert (said in capsys.readouterr().err) == has_links


def test_none_good_is_an_error(folder, capsys):
    for path in folder.paths():
        path.write_bytes(path.read_bytes()[:-10])
    before = files(folder.folder)
    said = r"none of the 3 checkpoints in .* is good; .*--overwrite and --resume none"
    for _ in range(2):  # the second launch finds the same as the first
        with pytest.raises(UserError, match=said):
            read_newest(folder, set_aside=True)
        assert len(capsys.readouterr().err.splitlines()) == 3
    assert files(folder.folder) == before


@pytest.mark.parametrize("left", ["step-000000030.pt.bad", "best.pt"])
def test_a_run_that_has_lost_its_checkpoints_does_not_begin_from_step_0(folder, left):
    for path in folder.paths():
        path.unlink()
    (folder.folder / left).write_bytes(b"x")
    with pytest.raises(UserError, match=rf"no good checkpoint in .*, only {left};.*--overwrite") as caught:
        read_newest(folder, set_aside=True)
    assert ("best.pt under another --name" in str(caught.value)) == (left == "best.pt")


NO_MEMORY = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), "Stale file handle"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (MemoryError(), "out of memory"),
        (RuntimeError(NO_MEMORY), "can't allocate memory"),
    ],
    ids=["ESTALE", "EIO", "memory", "torch's memory"],
)
@pytest.mark.parametrize("call", ["load", "check", "fstat"])
def test_a_passing_fault_condemns_nothing(folder, monkeypatch, error, reason, call):
    """Neither the unreadable file nor those before it are set aside: the next launch resumes from the newest."""
    before = files(folder.folder)

    target = {"load": (torch, "load"), "check": (isal_zlib, "crc32"), "fstat": (os, "fstat")}
    with monkeypatch.context() as patch:
        patch.setattr(*target[call], Mock(side_effect=error))
        for set_aside in (True, False):
            with pytest.raises(UserError) as caught:
                read_newest(folder, set_aside)
            newest = folder.folder / "step-000000030.pt"
            assert str(caught.value).startswith(f"cannot read {newest}: ")
            assert reason in str(caught.value)
            assert str(caught.value).endswith("; nothing was changed: fix this, then resume again")
            assert caught.value.status == 1, "the engine may start it"
    assert files(folder.folder) == before
    assert read_newest(folder, set_aside=True)[1]["position"]["step"] == 30


def test_a_file_that_ends_while_it_is_read_condemns_nothing(folder, monkeypatch):
    before = files(folder.folder)
    monkeypatch.setattr(reading, "checksum_of", lambda file, size: (0, size - 1))
    with pytest.raises(UserError, match=r"it ended before its length while it was read; nothing was changed"):
        read_newest(folder, set_aside=True)
    assert files(folder.folder) == before


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.EINVAL, "Invalid argument"), RuntimeError("bad zip")]
)
def test_what_torch_says_of_a_damaged_file_is_no_fault_of_the_machine(folder, monkeypatch, error):
    newest = folder.paths()[0]
    newest.write_bytes(newest.read_bytes()[:-100])
    load = torch.load

    def fail(path, **options):
        if path == newest:
            raise error
        return load(path, **options)

    monkeypatch.setattr(torch, "load", fail)
    assert read_newest(folder, set_aside=True)[1]["position"]["step"] == 20
    assert newest.with_name("step-000000030.pt.bad").exists()


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(folder, monkeypatch):
    monkeypatch.setattr(os, "listdir", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(OSError, match="Stale file handle"):
        read_newest(folder, set_aside=True)


def test_an_old_checkpoint_that_cannot_be_removed_costs_no_new_one(folder, monkeypatch, capsys):
    def fail(path, missing_ok=False):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(type(folder.folder), "unlink", fail)
        assert folder.write(content(40)).exists()
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: cannot remove old checkpoints: ")
    assert "Device or resource busy" in warning
    folder.write(content(50))
    assert [path.name for path in folder.paths()] == [f"step-{step:09d}.pt" for step in (50, 40, 30)]


@pytest.mark.parametrize("has_links", [True, False])
def test_the_best_is_replaced_and_never_written_to(folder, monkeypatch, has_links):
    """The old best.pt stays whole until the new one, flushed to the disk, takes its name."""
    if not has_links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    best = folder.folder / "best.pt"
    folder.write(content(40, 0.6), is_best=True)
    before, newest = best.read_bytes(), folder.paths()[0].read_bytes()
    seen, replace, fsync = [], type(best).replace, os.fsync

    def watch_replace(path, target):
        whole = read_checkpoint(path)["position"]["step"]
        seen.append((target.name, whole, best.read_bytes() == before))
        return replace(path, target)

    def watch_fsync(handle):
        seen.append(("fsync", stat.S_ISREG(os.fstat(handle).st_mode)))
        return fsync(handle)

    with open(best, "rb") as old:
        monkeypatch.setattr(type(best), "replace", watch_replace)
        monkeypatch.setattr(os, "fsync", watch_fsync)
        folder.write(content(50, 0.7), is_best=True)
        assert old.read() == before
    assert folder.paths()[1].read_bytes() == newest
    flushes = [("fsync", True)] * (1 if has_links else 2)
    replacements = [("best.pt", 50, True), ("step-000000050.pt", 50, False)]
    assert seen == [*flushes, *replacements, ("fsync", False)]
    assert read_checkpoint(best)["position"]["step"] == 50
    assert best.samefile(folder.paths()[0]) == has_links


def test_no_folder_is_no_checkpoint(tmp_path):
    assert read_newest(CheckpointFolder(tmp_path / "none"), set_aside=True) is None


def test_the_newest_k_and_the_best_are_kept(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: pytest.fail("there are no shard files to look for"))
        for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.7), (40, 0.8), (50, 0.6)):
            folder.write(content(step, accuracy), is_best=accuracy in (0.5, 0.9))
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "step-000000040.pt", "step-000000050.pt"]
    assert read_checkpoint(tmp_path / "best.pt")["position"]["step"] == 20


def test_leftover_temporary_files_are_removed(folder):
    for name in ("step-000000005.tmp", "best.tmp"):
        (folder.folder / name).write_bytes(b"cut")
    assert read_newest(folder, set_aside=True)[1]["position"]["step"] == 30
    folder.write(content(40), is_best=True)
    assert sorted(os.listdir(folder.folder)) == ["best.pt", *(f"step-0000000{step}.pt" for step in (20, 30, 40))]


def test_a_failed_write_leaves_what_was_there(folder, monkeypatch):
    before = {path: path.read_bytes() for path in folder.paths()}
    full = OSError(28, "No space left on device"), "No space left on device (free some space)"
    stale = OSError(errno.ESTALE, "Stale file handle"), "Stale file handle"
    no_memory = (MemoryError(), "out of memory"), (RuntimeError(NO_MEMORY), NO_MEMORY), stale
    failures = [(name, *full) for name in ("save", "fsync", "replace")]
    for name, error, reason in [*failures, *(("save", *failure) for failure in no_memory)]:
        with monkeypatch.context() as patch:
            target = {"save": (torch, "save"), "fsync": (os, "fsync"), "replace": (type(folder.folder), "replace")}
            patch.setattr(*target[name], Mock(side_effect=error))
            with pytest.raises(UserError) as caught:
                folder.write(content(40))
        assert f"step-000000040.pt: {reason}; " in str(caught.value)
        assert caught.value.status == (2 if error.args[:1] == (errno.ENOSPC,) else 1)
        assert "step-000000030.pt is intact" in str(caught.value)
        assert {path: path.read_bytes() for path in folder.folder.iterdir()} == before


def refuse_folders(monkeypatch, number):
    """Let a flush of a folder fail with this error; files are flushed."""
    fsync = os.fsync

    def fsync_file(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fsync_file)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_flush_folders_takes_checkpoints(folder, monkeypatch, number):
    """AFS and VirtualBox's shared folders have no such call; the file itself is flushed."""
    refuse_folders(monkeypatch, number)
    assert read_checkpoint(folder.write(content(40)))["position"]["step"] == 40


def test_what_could_not_be_flushed_is_not_called_intact(folder, monkeypatch):
    refuse_folders(monkeypatch, errno.EIO)
    newest = folder.paths()[0]
    said = f"cannot write {folder.folder}/step-000000040.pt: Input/output error; {newest} is intact: fix this"
    with refused(said):
        folder.write(content(40))


def test_a_file_that_an_older_job_takes_away_costs_no_checkpoint(folder, monkeypatch):
    """The older job renames its checkpoint between the search for such files and their removal."""
    glob, leftover = type(folder.folder).glob, folder.folder / "step-000000035.tmp"
    monkeypatch.setattr(type(folder.folder), "glob", lambda path, pattern: [*glob(path, pattern), leftover])
    assert read_checkpoint(folder.write(content(40)))["position"]["step"] == 40


def test_a_checkpoint_is_whole_before_it_has_its_name(folder, monkeypatch):
    """A checkpoint is written, flushed and renamed, then its folder is flushed, in this order."""
    seen, sizes = [], []

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*args):
            seen.append((name, (folder.folder / "step-000000040.pt").exists()))
            if name == "fsync":
                sizes.append(os.fstat(args[0]).st_size)
            return original(*args)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in ((torch, "save"), (os, "fsync"), (type(folder.folder), "replace")):
        watch(owner, name)
    path = folder.write(content(40))
    assert sizes[0] == path.stat().st_size, "its last bytes do not wait in a buffer"
    assert seen == [("save", False), ("fsync", False), ("replace", False), ("fsync", True)]


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--seed", "1"], "--seed 0, this run has --seed 1"),
        (["--model", "resnet18"], "--model lenet, this run has --model resnet18"),
        (["--global-batch-size", "32"], "--global-batch-size 64, this run has --global-batch-size 32"),
        (["--data", "cifar10"], "--data digits, this run has --data cifar10"),
        (["--optimizer", "adamw"], "--optimizer sgd, this run has --optimizer adamw"),
    ],
)
def test_other_data_model_batch_or_seed_are_refused(folder, argv, flag):
    with refused(flag):
        check_options(options(argv), content(10), folder.paths()[0])


def test_a_checkpoint_from_before_an_option_had_its_default(folder):
    old = content(10)
    old["options"] = {name: value for name, value in old["options"].items() if name != "shuffle_block"}
    old["options"]["data"] = "shards"
    argv = ["--data", "shards", "--shuffle-block"]
    check_options(options([*argv, "1"]), old, folder.paths()[0])
    with pytest.raises(UserError, match="--shuffle-block 1, this run has --shuffle-block 8"):
        check_options(options([*argv, "8"]), old, folder.paths()[0])


def test_an_option_of_a_newer_version_is_one_line(folder):
    newer = content(10)
    newer["options"] = {**newer["options"], "rotary": "yes"}
    with refused(" was written with --rotary yes, which this version does not support; resume"):
        check_options(options([]), newer, folder.paths()[0])


def test_options_without_meaning_for_the_data_may_differ(folder):
    old = {**content(10), "options": {**content(10)["options"], "image_size": 32, "num_samples": 9}}
    check_options(options([]), old, folder.paths()[0])
    synthetic = {**content(10), "options": {**content(10)["options"], "data": "synthetic"}}
    for flag in ("--image-size", "--num-samples"):
        with pytest.raises(UserError, match=flag):
            check_options(options(["--data", "synthetic", flag, "9"]), synthetic, folder.paths()[0])


@pytest.mark.parametrize(
    ("step", "epoch", "total_steps", "expected"),
    [
        (30, 3, 100, 3),  # at the end of an epoch, to be continued
        (25, 3, 25, 3),  # ended by --max-steps within the third epoch, which counts as done
        (25, 3, 100, 2),  # the same with more steps: the third epoch is completed
        (25, 2, 100, 2),
        (55, 2, 100, 5),  # 20 steps an epoch, then 10: the sixth epoch is under way
        (50, 2, 100, 4),  # the fifth epoch is trained, and is evaluated before the sixth
        (50, 2, 50, 4),  # the same without a sixth
    ],
)
def test_position_of_a_longer_run(step, epoch, total_steps, expected):
    packed = pack(ARGS, Position(step=step, epoch=epoch), {}, {}, {})
    assert position_of(packed, steps_per_epoch=10, total_steps=total_steps).epoch == expected


@pytest.mark.parametrize(
    ("scores", "are_best", "best"),
    [
        ((-0.5, -0.6, -0.5, 0.6), [True, False, False, True], 0.6),  # a loss counts negatively
        # An evaluation that overflows gives no number; later scores are compared with those before it.
        ((math.nan, -0.5, math.nan, -0.4), [False, True, False, True], -0.4),
    ],
)
def test_the_best_score_is_remembered(scores, are_best, best):
    position = Position()
    assert [position.record_evaluation({"test_loss": -score}, score) for score in scores] == are_best
    assert (position.epoch, position.averages, position.best_score) == (4, {"test_loss": -best}, best)


@pytest.fixture
def late(folder, monkeypatch):
    """Return a writer that writes nothing before an event, the event, and what it was given so far."""
    begun, go, write = [], threading.Event(), folder.write

    def write_late(given, is_best):
        begun.append(given)
        assert go.wait(20)
        return write(given, is_best)

    monkeypatch.setattr(folder, "write", write_late)
    return CheckpointWriter(folder.write, on_error=pytest.fail), go, begun


def test_training_goes_on_from_the_moment_of_the_copy(folder, late):
    """Changes made while the file is written do not get into it."""
    writer, go, _ = late
    first = content(40)
    expected = copy.deepcopy(first)
    writer.begin(first)
    first["model"]["weight"].fill_(-1)
    first["optimizer"]["state"][0]["momentum_buffer"].fill_(-1)
    first["position"]["step"] = 41
    assert writer.newest is None
    go.set()
    writer.wait()
    assert writer.newest == folder.paths()[0]
    assert is_equal(read_newest(folder, set_aside=True)[1], expected)
    assert len(writer.stalls_s) == 1


def test_a_second_checkpoint_waits_for_the_first_and_takes_its_memory(folder, late):
    writer, go, begun = late
    second = content(50)
    wanted = copy.deepcopy(second)
    writer.begin(content(40))
    thread = threading.Thread(target=writer.begin, args=(second,))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert len(begun) == 1
    go.set()
    thread.join(20)
    assert writer.stalls_s[0] > 0.1, "the next one had to wait for it"
    writer.wait()
    assert is_equal(read_newest(folder, set_aside=True)[1], wanted)
    assert begun[0]["model"]["weight"].data_ptr() == begun[1]["model"]["weight"].data_ptr()
    assert [path.name for path in folder.paths()[:2]] == ["step-000000050.pt", "step-000000040.pt"]


def test_a_tied_weight_is_copied_and_written_once(folder):
    writer, matrix = CheckpointWriter(folder.write, on_error=pytest.fail), torch.randn(100, 100)
    names = {
        "tied": {"first": matrix, "second": matrix.detach()},
        "untied": {"first": matrix, "second": matrix + 1},
    }
    sizes = {}
    for step, kind in ((40, "tied"), (50, "untied"), (60, "tied")):
        writer.begin({**content(step), "model": names[kind]})
        writer.wait()
        assert is_equal(read_checkpoint(folder.paths()[0])["model"], names[kind])
        sizes[step] = folder.paths()[0].stat().st_size
    assert sizes[40] == sizes[60] < sizes[50] - 0.9 * matrix.nbytes


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("the disk is full"), "the disk is full"),
        (RuntimeError("Broken pipe\nat x"), "lost another rank while a checkpoint was written: Broken pipe"),
        (pickle.PicklingError("no"), f"cannot write a checkpoint: PicklingError: no; {FIX}"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_write_that_fails_behind_training_is_told(folder, monkeypatch, error, told):
    monkeypatch.setattr(folder, "write", Mock(side_effect=error))
    errors = []
    writer = CheckpointWriter(folder.write, errors.append)
    writer.begin(content(40))
    writer.wait()
    assert [str(error) for error in errors] == [told]
    assert writer.newest is None


@pytest.mark.parametrize("is_async", [True, False])
def test_the_stall_of_checkpoints_is_in_the_result(tmp_path, is_async):
    switch = "--async-checkpoints" if is_async else "--no-async-checkpoints"
    run = train("single", tmp_path, 1, "--epochs", "2", "--checkpoint-every", "10", switch)
    result = json.loads((run / "result.json").read_text())
    assert result["checkpoints"] == 6
    assert 0 < result["checkpoint_stall_s"] < 10
    assert newest_checkpoint(run)["position"]["step"] == 44


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_shares_memory_is_copied_once_and_nothing_else_is_taken_for_it():
    weight = torch.arange(6.0).view(2, 3)
    wave = torch.tensor([1 + 2j, 3 - 4j])
    sparse = torch.eye(3).to_sparse()
    tree = {"a": weight, "tied": weight.view(2, 3), "turned": weight.t(), "wave": wave, "conjugate": wave.conj()}
    tree |= {"negative": wave.conj().imag, "imaginary": wave.imag, "sparse": sparse, "csr": sparse.to_sparse_csr()}
    copied = copy_tree(tree)
    assert copied["a"] is copied["tied"] is not weight
    for name, value in tree.items():
        assert torch.equal(copied[name].to_dense(), value.to_dense()), name
    again = copy_tree(tree, copied)
    assert again["a"] is copied["a"]
    assert torch.equal(again["conjugate"], wave.conj())


def test_a_copy_takes_no_memory_of_another_kind_of_tensor():
    """Between two checkpoints, the tensors of a state may change: an optimizer's, or a model's extra state."""
    for old in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), nn.Parameter(torch.eye(3))):
        copied = copy_tree({"a": torch.ones(3, 3)}, {"a": old})["a"]
        assert (type(copied), copied.layout) == (torch.Tensor, torch.strided), old
        assert torch.equal(copied, torch.ones(3, 3))


def test_a_copy_keeps_the_versions_of_modules_and_the_class_of_an_extra_state():
    """Without its version, a module's state counts as one of an older torch, or of the user's older code."""
    state = nn.BatchNorm1d(3).state_dict()
    state["_extra_state"] = Counter(seen=3)
    for copied in (copy_tree(state), map_tree(state, torch.is_tensor, torch.clone)):
        assert copied._metadata == state._metadata
        assert copied["_extra_state"] == Counter(seen=3)
        assert type(copied["_extra_state"]) is Counter
        assert torch.equal(copied["running_var"], torch.ones(3))


def test_wrapped_tensors_without_an_address_are_two():
    """DTensors are such tensors."""

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            inner = [value.inner if isinstance(value, cls) else value for value in args]
            return cls(function(*inner, **(kwargs or {})))

    one, other = Wrapped(torch.zeros(2)), Wrapped(torch.ones(2))
    assert one.data_ptr() == other.data_ptr() == 0
    copied = copy_tree({"one": one, "other": other})
    assert copied["one"].inner.tolist() == [0, 0]
    assert copied["other"].inner.tolist() == [1, 1]


def test_a_checkpoint_that_was_written_on_gpus_is_read_without_one(tmp_path, monkeypatch):
    """By make export, and by the tests' own helper."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    CheckpointFolder(tmp_path / "checkpoints").write(content(10))
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"torch\.cuda\.is_available\(\) is False"):
            torch.load(tmp_path / "checkpoints/step-000000010.pt", weights_only=True)
    assert read_path(tmp_path)[1]["model"]["weight"].device.type == "cpu"
    assert newest_checkpoint(tmp_path)["model"]["weight"].device.type == "cpu"
