"""The one file for inference: a model's weights, exported from a checkpoint or from a run's newest."""

from __future__ import annotations

import os
import resource
import signal
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from recipes.common.checkpoint.checkpoint import CheckpointFolder
from recipes.common.errors import UserError
from recipes.common.record.resume import read_path
from scripts.dev import export
from tests.support import ROOT, is_equal, newest_checkpoint, run_command
from tests.unit.test_checkpoint import content


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run with two checkpoints, the first of which is the best."""
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints")
    checkpoints.write(content(10), is_best=True)
    checkpoints.write(content(20))
    return tmp_path / "run"


@pytest.mark.parametrize(("place", "step"), [("", 20), ("checkpoints/best.pt", 10)])
def test_one_command_exports_a_run_or_a_checkpoint(run, tmp_path, capsys, place, step):
    out = tmp_path / "model.pt"
    assert export.main([str(run / place), str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {out}: 2 tensors of step {step}, from {run / 'checkpoints'}")
    written = torch.load(run / "checkpoints" / f"step-{step:09d}.pt", weights_only=True)
    assert is_equal(torch.load(out, weights_only=True), written["model"])
    torch.nn.Linear(3, 2).load_state_dict(torch.load(out, weights_only=True))


def test_safetensors(run, tmp_path, capsys):
    """Tied tensors, which share memory, are written under both of their names."""
    out = tmp_path / "model.SAFETENSORS"
    tied = content(30)
    tied["model"]["again"], tied["model"]["turned"] = tied["model"]["weight"], tied["model"]["weight"].T
    CheckpointFolder(run / "checkpoints").write(tied)
    assert export.main([str(run), str(out)]) == 0
    assert is_equal(load_file(out), {**tied["model"]})
    with safe_open(out, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses other files
    capsys.readouterr()
    others = {"w": torch.zeros(2, dtype=torch.complex128), "_extra_state": {"count": 1}}
    reasons = ("safetensors have no torch.complex128", "safetensors hold only tensors, and _extra_state is none")
    for step, item, reason in zip((40, 50), others.items(), reasons, strict=True):
        model = dict([*tied["model"].items(), item])
        CheckpointFolder(run / "checkpoints").write({**content(step), "model": model})
        assert export.main([str(run), str(tmp_path / "other.safetensors")]) == 2
        what = f"cannot write {tmp_path / 'other.safetensors'}: {reason}"
        assert capsys.readouterr().err == f"error: {what}; fix this and export again\n"
    assert not list(tmp_path.glob(".*"))
    assert export.main([str(run), str(tmp_path / "none" / "model.safetensors")]) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot write {tmp_path / 'none' / 'model.safetensors'}: ")


@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="make would install .venv first; run make setup")
def test_make_export(run, tmp_path):
    out = tmp_path / "a model.pt"
    result = run_command("make", "export", f"RUN={run}", f"OUT={out}")
    assert (result.status, result.stderr) == (0, "")
    assert is_equal(torch.load(out, weights_only=True), newest_checkpoint(run)["model"])


def test_what_cannot_be_exported_is_refused_in_one_line(run, tmp_path, capsys):
    def refusal(source, out=tmp_path / "out.pt"):
        assert export.main([str(source), str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    (run / "checkpoints" / "cut.pt").write_bytes((run / "checkpoints" / "best.pt").read_bytes()[:-1])
    (tmp_path / "empty").mkdir()
    there = tmp_path / "there.pt"
    there.write_text("mine")
    assert refusal(run, there) == f"error: OUT {there} exists; remove it, or choose another name"
    assert there.read_text() == "mine"
    none = tmp_path / "none"
    assert refusal(none) == f"error: RUN {none}: no such file; give a checkpoint, or a run's folder"
    assert refusal(tmp_path / "empty").startswith(f"error: RUN {tmp_path / 'empty'}: no checkpoints in ")
    assert refusal(run / "checkpoints" / "cut.pt").startswith("error: RUN ")
    assert "No such file or directory" in refusal(run, tmp_path / "no" / "out.pt")
    what = "the file has torch's format, or safetensors; let its name end with .pt or .safetensors"
    assert refusal(run, tmp_path / "out.onnx") == f"error: OUT {tmp_path / 'out.onnx'}: {what}"
    assert refusal(run, there / "out.pt").startswith(f"error: cannot write {there / 'out.pt'}: Not a directory; ")
    assert refusal(none, tmp_path / "no" / "out.pt").startswith("error: cannot write ")  # before it is read
    assert "File name too long" in refusal(run, tmp_path / f"{'a' * 256}.pt")
    for path in (run / "checkpoints").glob("step-*"):
        path.unlink()
    assert refusal(run).endswith(f", only best.pt, cut.pt; give {run / 'checkpoints' / 'best.pt'}")
    (tmp_path / "empty" / "c.pt").write_text("of a script")
    assert refusal(tmp_path / "empty").endswith(", only c.pt; give another run or checkpoint")


def test_an_exported_model_is_named_where_a_checkpoint_is_meant(run, tmp_path):
    """Its checksum is wrong, too, but it is not damaged."""
    out = tmp_path / "model.pt"
    assert export.main([str(run), str(out)]) == 0
    with pytest.raises(UserError) as caught:
        read_path(out)
    what = "it holds only weights, as make export writes them, and no step"
    assert str(caught.value) == f"--start-from {out}: {what}; give another checkpoint or the run's folder"


def test_ctrl_c_leaves_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
    assert export.main([str(run), str(tmp_path / "out.pt")]) == 128 + signal.SIGINT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_leaves_nothing(run, tmp_path, monkeypatch, number):
    signal.signal(number, signal.SIG_DFL)
    monkeypatch.setattr(os, "fsync", lambda file: signal.raise_signal(number))
    with pytest.raises(SystemExit) as ended:
        export.main([str(run), str(tmp_path / "out.pt")])
    assert ended.value.code == 128 + number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_a_full_disk_leaves_nothing(run, tmp_path, capfd, name):
    """A limit on the file size stands in for the full disk; the error itself goes to a file, too."""
    CheckpointFolder(run / "checkpoints").write({**content(30), "model": {"weight": torch.zeros(1000)}})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        assert export.main([str(run), str(tmp_path / name)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capfd.readouterr().err.startswith(f"error: cannot write {tmp_path / name}: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
