"""Files of tokens: their formats, the windows that they are cut into, and what is wrong with bad ones."""

import errno
import os
import re
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from recipes.common.data import find_for_all_ranks, load_data, tokens
from recipes.common.data.tokens import FINGERPRINT_WINDOWS, HEADER_BYTES, PROBE_BYTES, inspect_file
from recipes.common.errors import UserError
from recipes.single.train import options
from tests.conftest import refused

LENGTH = 4
LARGEST = 2**16 + 1


def write(path, tokens, kind=np.uint16, magic=0):
    """Write a file of tokens, with llm.c's header if there is a magic number."""
    header = np.zeros(HEADER_BYTES // 4, np.int32)
    header[:3] = magic, 1, len(tokens)
    path.write_bytes((header.tobytes() if magic else b"") + np.array(tokens, kind).tobytes())


def words_of(folder, *argv):
    return ["--data", "tokens", "--data-dir", str(folder), "--seq-len", str(LENGTH), "--workers", "0", *argv]


def load(folder, *argv, on_fault=print, found=b""):
    return load_data(options(words_of(folder, *argv)), torch.device("cpu"), on_fault, found)


def windows(split):
    """Return the inputs and targets of all windows of a split, as lists."""
    ((inputs, targets),) = split.batches([torch.arange(len(split))], 0)
    assert inputs.dtype == targets.dtype == torch.int64
    return list(zip(inputs.tolist(), targets.tolist(), strict=True))


@pytest.fixture
def folder(tmp_path):
    """Write one file for training and one for the test, each longer than its windows by some tokens."""
    write(tmp_path / "train.bin", range(15))
    write(tmp_path / "val.bin", range(5))
    return tmp_path


def test_a_window_ends_where_the_next_begins_and_a_rest_is_left_out(folder):
    data = load(folder)
    assert windows(data.train) == [([i, i + 1, i + 2, i + 3], [i + 1, i + 2, i + 3, i + 4]) for i in (0, 4, 8)]
    assert windows(data.test) == [([0, 1, 2, 3], [1, 2, 3, 4])]
    assert (data.kind, data.num_classes, data.input.shape) == ("tokens", 50_304, (LENGTH,))


def test_windows_do_not_cross_files(folder):
    """A file of 4 tokens has no window of 4 and the token after it; hidden files are not read."""
    write(folder / "more_train_000002.bin", range(100, 109))
    write(folder / "a_train_000001.bin", range(4))
    write(folder / "._train.bin", range(200, 300))
    (folder / "README.md").write_text("train")
    firsts = [inputs[0] for inputs, _ in windows(load(folder).train)]
    assert firsts == [100, 104, 0, 4, 8]


@pytest.mark.parametrize(
    ("kind", "magic", "argv"),
    [
        (np.uint16, 0, ()),
        (np.uint32, 0, ("--vocab-size", "128256")),
        (np.uint16, 20240520, ()),
        (np.uint16, 20240520, ("--vocab-size", "128256")),
        (np.uint32, 20240801, ("--vocab-size", "128256")),
    ],
)
def test_formats(tmp_path, kind, magic, argv):
    """A header says how many bytes a token has, else the size of the vocabulary does."""
    tokens = [50_000, 1, LARGEST if kind is np.uint32 else 7, 3, 4]
    for name in ("train.bin", "val.bin"):
        write(tmp_path / name, tokens, kind, magic)
    assert windows(load(tmp_path, *argv).train) == [(tokens[:-1], tokens[1:])]


@pytest.mark.parametrize(
    ("change", "argv", "said"),
    [
        (lambda folder: (folder / "val.bin").unlink(), (), "has no file of tokens with 'val' in its name"),
        (lambda folder: write(folder / "val.bin", range(4)), (), "at most 4 tokens, too few for a window of"),
        (lambda folder: write(folder / "val.bin", []), (), "at most 0 tokens, too few for a window of"),
        (lambda folder: (folder / "val.bin").write_bytes(b"odd"), (), "val.bin has 3 bytes, which are not 1 "),
        (lambda folder: None, ("--vocab-size", "70000"), "has 30 bytes, which are not 7 tokens of 4 bytes"),
        (lambda folder: None, ("--vocab-size", "12"), "token 8: token 12 is not below --vocab-size 12"),
        (lambda folder: (folder / "x_val.bin").mkdir(), (), "cannot read .*x_val.bin: Is a directory"),
        (lambda folder: None, ("--data-dir", "no-such-folder"), r"cannot read no-such-folder \(No .*--data-dir"),
    ],
)
def test_bad_files_are_one_line(folder, change, argv, said):
    change(folder)
    with pytest.raises(UserError, match=said):
        load(folder, *argv).train.fingerprint()


@pytest.mark.parametrize(
    ("kind", "argv", "said"),
    [
        (np.int64, (), "val.bin has 8 bytes for each token, and 2 are read; write numpy.uint16, as docs/data.md"),
        (np.int32, (), "val.bin has 4 bytes for each token, and 2 are read; write numpy.uint16, as docs/data.md"),
        (np.int64, ("--vocab-size", "70000"), "val.bin has 8 bytes for each token, and 4 are read; write .*32"),
    ],
)
def test_wider_tokens_are_refused(folder, kind, argv, said):
    """numpy.array(ids).tofile() writes 8 bytes; the upper ones would be valid tokens, 0."""
    right = np.uint32 if argv else np.uint16
    tokens = [0, 0, 7, *range(60)]
    write(folder / "train.bin", tokens, right)
    write(folder / "val.bin", tokens, right)
    load(folder, *argv)
    write(folder / "val.bin", tokens, kind)
    with pytest.raises(UserError, match=said):
        load(folder, *argv)


@pytest.mark.parametrize("tokens", [[50256] + 200 * [0], 50 * [50256, 0]], ids=["padding", "separators"])
def test_a_token_among_zeros_is_no_wider_one(folder, tokens):
    write(folder / "val.bin", tokens, np.uint16)
    assert load(folder).test.dataset.files[0].num_tokens == len(tokens)


def test_the_half_of_a_file_is_no_part_of_another_word(folder):
    for name in ("retrieval_train.bin", "pretrain_val.bin", "interval.bin", "webtext.train.000.bin"):
        write(folder / name, range(100, 105))
    data = load(folder)
    files = [[path.path.rpartition("/")[2] for path in split.dataset.files] for split in (data.train, data.test)]
    assert files[0] == ["retrieval_train.bin", "train.bin", "webtext.train.000.bin"]
    assert files[1] == ["pretrain_val.bin", "val.bin"]
    write(folder / "train_val.bin", range(9))
    with pytest.raises(UserError, match=r"train_val.bin has both 'train' and 'val' in its name; rename it$"):
        load(folder)


def test_files_without_a_window_are_counted(folder, capsys, monkeypatch):
    for count in (0, 3, 4):
        write(folder / f"train_{count}.bin", range(count))
    load(folder)
    said = "note: 3 of 4 train files have at most --seq-len 4 tokens, and are left out\n"
    assert capsys.readouterr().err == said
    monkeypatch.setenv("RANK", "1")
    load(folder)
    assert not capsys.readouterr().err


def test_a_header_that_counts_other_tokens_than_there_are_is_refused(folder):
    """As after a copy that broke off."""
    write(folder / "train.bin", range(9), magic=20240520)
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match="has 1040 bytes, which are not 9 tokens of 2 bytes each; copy it again"):
        load(folder)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_file_that_fails_later_ends_the_run(folder, workers):
    """The fingerprint has read it in this process; workers open it themselves."""
    faults = []
    data = load(folder, "--workers", workers, on_fault=faults.append)
    assert data.train.fingerprint().startswith("3 windows with digest ")
    write(folder / "train.bin", [*range(5), 60_000, *range(6)])
    ((inputs, _),) = data.train.batches([torch.tensor([0, 1, 2])], 0)
    assert inputs.tolist() == [[0, 1, 2, 3], [0] * 4, [0] * 4]
    assert {error.status for error in faults} == {2}
    wrong, short = map(str, faults)
    assert "train.bin at token 4: token 60000 is not below --vocab-size 50304; " in wrong
    assert "train.bin at token 8: it has become shorter; fix this, then add --resume auto" in short


@pytest.mark.parametrize(("number", "status"), [(errno.EIO, 1), (errno.ENOENT, 2)])
def test_what_another_launch_may_read_ends_the_run_with_status_1(folder, monkeypatch, number, status):
    faults = []
    data = load(folder, on_fault=faults.append)
    monkeypatch.setattr(os, "pread", Mock(side_effect=OSError(number, os.strerror(number))))
    list(data.train.batches([torch.tensor([0])], 0))
    with pytest.raises(UserError) as caught:
        data.train.fingerprint()
    assert [error.status for error in (*faults, caught.value)] == [status, status]


def test_the_fingerprint_tells_files_apart(folder):
    tokens = list(range(PROBE_BYTES // 2 + 7))
    write(folder / "train.bin", tokens)
    before = load(folder).train.fingerprint()
    assert load(folder).train.fingerprint() == before
    write(folder / "train.bin", [*tokens[:-1], 99])  # of the rest, which no window has
    assert load(folder).train.fingerprint() == before
    write(folder / "train.bin", [1, *tokens[1:]])
    assert load(folder).train.fingerprint() != before


def test_the_fingerprint_notices_each_replaced_file(folder):
    """Files of llm.c all have one size, and there are more of them than windows in the digest."""
    paths = [folder / f"train_{number:03d}.bin" for number in range(3 * FINGERPRINT_WINDOWS)]
    for number, path in enumerate(paths):
        write(path, range(number, number + 15), magic=20240520)
    before = load(folder).train.fingerprint()
    for path in paths[1::17]:
        kept = path.read_bytes()
        write(path, range(10_000, 10_015), magic=20240520)
        assert load(folder).train.fingerprint() != before, path.name
        path.write_bytes(kept)
    assert load(folder).train.fingerprint() == before


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A folder of tokens as rank 0 has it, at first, and a function that loads it on the four ranks of a node.

    It returns the fingerprint of the training set on each rank, or its error, and the files that each inspects.
    """
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(6):
        write(folder / f"train_{number}.bin", range(number, number + 10))  # the last one is in no window
    write(folder / "val.bin", range(9))
    found = find_for_all_ranks(options(words_of(folder)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")

    def load_on_each_rank(folder):
        ends, inspected = [], []
        for local_rank in range(4):
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
            inspect = Mock(wraps=inspect_file)
            monkeypatch.setattr(tokens, "inspect_file", inspect)
            try:
                ends.append(load(folder, found=found).train.fingerprint())
            except UserError as error:
                ends.append(str(error))
            inspected.append([call.args[0].stem for call in inspect.mock_calls])
        return ends, inspected

    return folder, load_on_each_rank


def test_the_ranks_of_a_node_inspect_each_file_once(copy):
    """Thousands of ranks would open thousands of files each, on one file system."""
    folder, load_on_each_rank = copy
    ends, inspected = load_on_each_rank(folder)
    assert ends == [load(folder).train.fingerprint()] * 4
    assert inspected == [["train_0", "train_4", "val"], ["train_1", "train_5"], ["train_2"], ["train_3"]]
    other = folder.rename(folder.parent / "own")
    again, inspected = load_on_each_rank(other)
    assert again == ends
    assert list(map(len, inspected)) == [7] * 4, "each rank may have a folder of its own"


def test_a_copy_that_differs_is_noticed_by_one_of_its_ranks(copy):
    folder, load_on_each_rank = copy
    expected = load(folder).train.fingerprint()
    write(folder / "train_2.bin", [*range(2, 11), 99])
    ends, _ = load_on_each_rank(folder)
    assert [end == expected for end in ends] == [True, True, False, True]
    (folder / "train_2.bin").write_bytes(b"odd")
    ends, _ = load_on_each_rank(folder)
    assert "train_2.bin has 3 bytes, which are not 1 tokens of 2 bytes each; copy it again" in ends[2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: write(folder / "train_9.bin", range(9)), "14 windows with digest "),
        (lambda folder: (folder / "train_3.bin").unlink(), "10 windows with digest "),
        (
            lambda folder: (folder / "val.bin").rename(folder / "v.bin"),
            "--data tokens: .* has no file of tokens with 'val'",
        ),
    ],
    ids=["one more", "one less", "none"],
)
def test_a_copy_of_other_files_is_noticed_by_all_of_its_ranks(copy, change, said):
    folder, load_on_each_rank = copy
    change(folder)
    ends, _ = load_on_each_rank(folder)
    assert [bool(re.match(said, end)) for end in ends] == [True] * 4


def test_the_vocabulary_of_other_data_is_their_own():
    with refused("--vocab-size 100 is for --data tokens; drop it"):
        options(["--data", "text", "--vocab-size", "100"])
