"""`make new`: a copy of a recipe stands under its own name, in the shape that the house asks for."""

import errno
import functools
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

import recipes
from scripts.dev import new
from tests.support import ROOT, run_ranks


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A repository to copy into."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "tests" / "parallel").mkdir(parents=True)
    (tmp_path / "tests" / "unit").symlink_to(ROOT / "tests" / "unit")
    for source in new.SOURCES:
        (tmp_path / "recipes" / source).symlink_to(ROOT / "recipes" / source)
    monkeypatch.setattr(new, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("source", new.SOURCES)
def test_every_name_is_changed_and_nothing_else(house, source):
    assert new.main(["--name", "mine", "--from", source]) == 0
    for path in (ROOT / "recipes" / source).glob("*.*"):
        before, after = path.read_text(), (house / "recipes/mine" / path.name).read_text()
        assert before.count("\n") == after.count("\n")
        for pair in zip(before.splitlines(), after.splitlines(), strict=True):
            assert pair[0] == pair[1] or re.sub(r"\bmine\b", source, pair[1]) == pair[0]
        compile(after, path.name, "exec") if path.suffix == ".py" else None
        assert not re.search(rf"(RECIPE=|recipe=|recipes[./]|--checkpoint ){source}\b", after)
    train = (house / "recipes/mine/train.py").read_text()
    assert re.search(r'options = partial\(parse, \w+Options, "mine", __doc__\)', train)
    assert 'train_as_rank("mine", ' in train
    assert train.count('"mine"') >= 3
    assert re.match(r"# mine\b", (house / "recipes/mine/README.md").read_text())
    compile((house / "tests/parallel/test_mine.py").read_text(), "test_mine.py", "exec")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--name", "mine", "--from", "horovod"], "FROM=horovod: launch files start this recipe in its own way"),
        (["--name", "ddp"], "NAME=ddp: recipes/ddp exists; choose another name, or remove it"),
        (["--name", "record"], "NAME=record: tests/unit/test_record.py exists; choose another name, or remove it"),
        (["--name", "my-recipe"], "NAME=my-recipe: give up to 40 lower-case letters"),
        (["--name", "class"], "NAME=class: give up to 40 lower-case letters"),
        (["--name", "a" * 41], f"NAME={'a' * 41}: give up to 40 lower-case letters"),
        ([], "NAME=: give up to 40 lower-case letters"),
        (["--name", "mine", "--from", "dpp"], "FROM: invalid choice 'dpp'; did you mean 'ddp'?"),
    ],
)
def test_what_cannot_be_is_one_line(house, capsys, argv, message):
    assert new.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_checkout_that_cannot_be_written_is_one_line(house, monkeypatch, capsys):
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS), "recipes/mine")
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=read_only))
    assert new.main(["--name", "mine"]) == 2
    what = "cannot write recipes/mine: Read-only file system; make it writable, or name another one"
    assert capsys.readouterr().err == f"error: {what}\n"


def import_copy(folder):
    """Make the copied recipe importable for a rank."""
    recipes.__path__.insert(0, str(folder / "recipes"))


def test_a_copy_trains(house, tmp_path):
    new.main(["--name", "mine", "--from", "ddp"])
    words = ["--runs-dir", str(tmp_path / "runs"), "--name", "run", "--max-steps", "2", "--no-tensorboard"]
    setup = functools.partial(import_copy, house)
    outcome = run_ranks("mine", words, 1, tmp_path / "output", setup=setup)
    assert "result recipe=mine world_size=1 test_accuracy=" in outcome.outputs[0]
