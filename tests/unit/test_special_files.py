"""A pipe or a device in the place of a file is refused at once: to read it would take for ever."""

import os

import pytest

from recipes.common.checkpoint.checkpoint import CheckpointFolder
from recipes.common.checkpoint.reading import BadCheckpointError, check_shards, read_newest
from recipes.common.data.tokens import inspect_file
from recipes.common.errors import UserError
from recipes.common.record.earlier_launches import read_config
from recipes.common.record.resume import read_path, read_weights
from recipes.single.train import options
from scripts.dev import export
from scripts.launch.script import check_python
from tests.unit.test_checkpoint import content

SAID = "it is a pipe, a device or a socket, not a file"

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["pipe", "device"])
def special(request, tmp_path):
    """A path of either kind, below a folder that holds nothing else."""
    path = tmp_path / "special" / "step-000000009.pt"
    path.parent.mkdir()
    if request.param == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize(
    ("read_it", "words"),
    [
        (lambda path: read_path(path), "--start-from {}: "),
        (lambda path: options(["--config", str(path)]), "--config {}: "),
        (lambda path: inspect_file(path, 2), "cannot read {}: "),
        (lambda path: read_config(path), "{}"),
        (check_python, "SCRIPT {} cannot be read: "),
    ],
    ids=["start-from", "config", "tokens", "record", "script"],
)
def test_what_the_user_names(special, read_it, words):
    with pytest.raises(UserError) as caught:
        read_it(special)
    said = " is damaged" if words == "{}" else SAID
    assert str(caught.value).startswith(words.format(special) + said)


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_weights(special, name):
    with pytest.raises(OSError, match=SAID):
        read_weights(special.rename(special.with_name(name)), None)


def test_a_shard_file_makes_its_checkpoint_bad(special):
    shard = special.rename(special.with_name("step-000000009-00000-0123abcd.shard"))
    with pytest.raises(BadCheckpointError, match=f"its shard file {shard.name} is none: {SAID}"):
        check_shards(special, [{"name": shard.name, "size": 8, "crc32": 0}])


def test_an_export(special, tmp_path, capsys):
    assert export.main([str(special), str(tmp_path / "m.pt")]) == 2
    assert f"error: RUN {special}: {SAID}; give another checkpoint" in capsys.readouterr().err


def test_a_run_resumes_from_the_checkpoint_before(special, capsys):
    folder = CheckpointFolder(special.parent)
    path = folder.write(content(8))
    found, _ = read_newest(folder, set_aside=True)
    assert found == path
    assert f"warning: skipped {special}: {SAID}" in capsys.readouterr().err
    assert special.with_name(f"{special.name}.bad").exists()
