"""--weights and --evaluate: what is read, what fits, and what a restart takes, in the one-process recipe."""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import shutil
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.models import resnet18
from torchvision.models.vision_transformer import MLPBlock

from recipes.common.data.shards import pack
from recipes.common.errors import UserError
from scripts.dev import export
from tests.support import contents, is_equal, metrics, newest_checkpoint, train, weights
from tests.unit import test_resume

HERE = "tests.unit.test_weights"
STILL = ("--lr", "1e-12", "--weight-decay", "0", "--max-steps", "1")
"""A step that changes no weight by more than rounding."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run of two epochs."""
    return train("single", tmp_path_factory.mktemp("trained"), 1, "--epochs", "2", "--max-steps", "24")


@pytest.fixture
def given(trained, tmp_path):
    """Return a copy of that run, of which another checkpoint than the newest is the best."""
    run = shutil.copytree(trained, tmp_path / "given")
    first = min((run / "checkpoints").glob("step-*.pt"))
    (run / "checkpoints" / "best.pt").unlink()
    shutil.copy(first, run / "checkpoints" / "best.pt")
    return run


def epochs(run):
    return [line for line in metrics(run) if line["kind"] == "epoch"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def saved(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    return str(tmp_path / "w.pt")


def prefixed(state, prefix):
    return {f"{prefix}{name}": value for name, value in state.items()}


# ---- what is read


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/best.pt", "checkpoints/step-000000024.pt"])
def test_a_run_is_evaluated_by_its_best_checkpoint(given, single, tmp_path, place):
    expected = epochs(given)[-1 if "step" in place else 0]
    lines = single("a", "--weights", str(given / place), "--evaluate")
    name = "step-000000024.pt" if "step" in place else "best.pt"
    assert f"took 10 of 10 tensors from {given}/checkpoints/{name}" in lines
    (line,) = metrics(tmp_path / "a")
    assert (line["kind"], line["epoch"], line["step"]) == ("epoch", 0, 0)
    assert line["test_accuracy"] == expected["test_accuracy"]
    assert line["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-6)
    assert lines[-2].startswith("epoch 0  step 0  test_loss ")
    accuracy = f"test_accuracy={line['test_accuracy']:.4f}"
    assert lines[-1] == f"result recipe=single world_size=1 {accuracy} record={tmp_path}/a"
    assert names(tmp_path / "a") == ["config.json", "metrics.jsonl", "result.json"]


def test_without_a_best_checkpoint_the_newest_is_read(given, single):
    (given / "checkpoints" / "best.pt").unlink()
    lines = single("a", "--weights", str(given), "--evaluate")
    assert f"took 10 of 10 tensors from {given}/checkpoints/step-000000024.pt" in lines


FORMS = {
    "plain": lambda state: state,
    "model": lambda state: {"model": state, "epoch": 3},
    "state_dict": lambda state: {"state_dict": prefixed(state, "module."), "best": 0.5},
    "DDP": lambda state: prefixed(state, "module."),
    "compiled": lambda state: prefixed(state, "_orig_mod."),
    "DDP, compiled": lambda state: prefixed(state, "_orig_mod.module."),
    "half": lambda state: {name: value.half() for name, value in state.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_another_program(given, single, tmp_path, form):
    state = weights(given)
    single("a", "--weights", saved(tmp_path, FORMS[form](state)), *STILL)
    found = weights(tmp_path / "a")
    assert list(found) == list(state)
    for name, value in found.items():
        torch.testing.assert_close(value, state[name], rtol=1e-3 if form == "half" else 0, atol=1e-6)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_an_exported_model(given, single, tmp_path, name):
    assert export.main([str(given), str(tmp_path / name)]) == 0
    single("a", "--weights", str(tmp_path / name), "--evaluate")
    assert epochs(tmp_path / "a")[0]["test_accuracy"] == epochs(given)[-1]["test_accuracy"]


def test_a_run_with_an_exported_model_is_a_run(given, single):
    assert export.main([str(given), str(given / "model.safetensors")]) == 0
    lines = single("a", "--weights", str(given), *STILL)
    assert f"took 10 of 10 tensors from {given}/checkpoints/best.pt" in lines


@pytest.mark.parametrize("named", ["model.safetensors.index.json", ""], ids=["index", "folder"])
def test_safetensors_in_several_files(given, single, tmp_path, named):
    state = {name: value.contiguous() for name, value in weights(given).items()}
    first = dict(itertools.islice(state.items(), 4))
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: value for name, value in state.items() if name not in first}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    files = {name: "model-00001-of-00002.safetensors" if name in first else "b.safetensors" for name in state}
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert f"took 10 of 10 tensors from {index}" in single("a", "--weights", str(tmp_path / named), *STILL)
    for name, value in weights(tmp_path / "a").items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=1e-6)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"--weights .*index\.json: .*[Nn]o such file.*; give a file that exists"):
        single("b", "--weights", str(index))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("w.safetensors", b"", "w.safetensors: .*; it is damaged: copy it again"),
        ("w.safetensors", b"\xff" * 40, "w.safetensors: .*; it is damaged"),
        ("w.safetensors.index.json", b"{", "index.json: .*; it is damaged"),
        ("w.safetensors.index.json", b"[]", "index.json: .*; it is damaged"),
        ("w.safetensors.index.json", b"{}", "index.json: .*; it is damaged"),
        ("none.safetensors", None, "none.safetensors: .*; give a file that exists"),
    ],
)
def test_bad_safetensors_are_refused_in_one_line(single, tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(UserError, match=f"^--weights .*{words}") as caught:
        single("a", "--weights", str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_safetensors_that_cannot_be_read_say_why(single, tmp_path):
    """The package says of every error, also of a lack of permission, that there is no such file."""
    (tmp_path / "b.safetensors").symlink_to(tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "b.safetensors"}}))
    with pytest.raises(UserError, match=r"cannot read .*b\.safetensors: Too many levels of symbolic links"):
        single("a", "--weights", str(index))


# ---- what fits


def four_classes():
    images = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(16) % 4
    return {"train": (images, labels), "test": (images, labels), "target": "class", "num_classes": 4}


FEW = ("--data", f"{HERE}:four_classes", "--global-batch-size", "8")


def test_another_head_keeps_its_initial_values(given, single, tmp_path):
    lines = single("a", *FEW, "--weights", str(given / "checkpoints" / "step-000000024.pt"), *STILL)
    text = f"took 8 of 10 tensors from {given}/checkpoints/step-000000024.pt; of another shape: "
    assert f"{text}classifier.4.weight, classifier.4.bias" in lines
    single("fresh", *FEW, *STILL)
    ours, taken, fresh = weights(tmp_path / "a"), weights(given), weights(tmp_path / "fresh")
    for name, value in ours.items():
        expected = fresh if name.startswith("classifier.4.") else taken
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_the_state_dict_of_a_torchvision_model(single, tmp_path):
    torch.manual_seed(7)
    state = resnet18(num_classes=12).state_dict()
    path = saved(tmp_path, state)
    data = ("--data", "synthetic", "--image-size", "65", "--num-samples", "8", "--global-batch-size", "4")
    lines = single("a", *data, "--model", "resnet18", "--weights", path, *STILL)
    assert f"took 120 of 122 tensors from {path}; of another shape: fc.weight, fc.bias" in lines
    found = weights(tmp_path / "a")
    for name in ("conv1.weight", "bn1.weight", "layer4.1.conv2.weight"):
        torch.testing.assert_close(found[name], state[name], rtol=0, atol=1e-6)


def block(data):
    return nn.Sequential(nn.Flatten(), MLPBlock(64, 16, 0.0), nn.Linear(64, data.num_classes))


def test_a_model_translates_the_names_of_its_older_versions(single, tmp_path):
    """As torchvision's vision transformers do with the weights that it publishes."""
    state = nn.Sequential(nn.Flatten(), MLPBlock(64, 16, 0.0)).state_dict()
    older = {"1.0.": "1.linear_1.", "1.3.": "1.linear_2."}
    path = saved(tmp_path, {older[name[:4]] + name[4:]: value for name, value in state.items()})
    lines = single("a", *FEW, "--model", f"{HERE}:block", "--weights", path, *STILL)
    assert f"took 4 of 6 tensors from {path}; missing there: 2.weight, 2.bias" in lines
    torch.testing.assert_close(weights(tmp_path / "a")["1.3.weight"], state["1.3.weight"], rtol=0, atol=1e-6)


def tied(data):
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, second, nn.Linear(64, data.num_classes))


def test_names_that_are_missing_or_unknown(single, tmp_path):
    """One name of a tied parameter is enough."""
    whole = tied(argparse.Namespace(num_classes=4)).state_dict()
    state = {name: value for name, value in whole.items() if name not in ("1.weight", "3.bias")}
    path = saved(tmp_path, {**state, **{f"ema.{i}": torch.zeros(1) for i in range(6)}})
    lines = single("a", *FEW, "--model", f"{HERE}:tied", "--weights", path, *STILL)
    unknown = "unknown here: ema.0, ema.1, ema.2, ema.3 and 2 more"
    assert f"took 5 of 6 tensors from {path}; missing there: 3.bias; {unknown}" in lines
    found = weights(tmp_path / "a")
    for name in ("1.weight", "2.weight"):
        torch.testing.assert_close(found[name], whole["2.weight"], rtol=0, atol=1e-6)


# ---- what is refused


REFUSED = {
    "text": (
        b"weights",
        "w.pt: it is not a file of torch.save(), or holds more than tensors and plain values; give a",
    ),
    "empty": (b"", "w.pt: it is not a file of torch.save(), or"),
    "tensor": (torch.zeros(2), "w.pt: it holds no state dict; give a file"),
    "no tensor": ({"epoch": 3}, "it holds no state dict"),
    "numbers": ({0: torch.zeros(2)}, "it holds no state dict"),
    "object": ({"model": {"a": torch.zeros(2)}, "args": argparse.Namespace(lr=1)}, "or holds more than tensors"),
    "other model": (
        {"a": torch.zeros(2, 3)},
        "w.pt: no parameter has the name and shape of one there: it begins with a (2, 3), --model lenet with",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_holds_no_weights_of_the_model_is_refused_in_one_line(single, tmp_path, case):
    content, words = REFUSED[case]
    path = saved(tmp_path, content)
    if isinstance(content, bytes):
        (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(UserError) as caught:
        single("a", "--weights", path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a").exists()


QUANTIZED = {
    "fp8": lambda weight: (weight.to(torch.float8_e4m3fn), "weight_scale_inv"),
    "int8": lambda weight: ((weight * 127).to(torch.int8), "SCB"),
    "nf4": lambda weight: (torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8), "absmax"),
}


@pytest.mark.parametrize("form", QUANTIZED)
def test_quantized_weights_are_refused(given, single, tmp_path, form):
    """Their scales are tensors of other names; without these, the values are a thousand times too large."""
    state = {name: value.contiguous() for name, value in weights(given).items()}
    state["classifier.4.weight"], scale = QUANTIZED[form](state["classifier.4.weight"])
    state[f"classifier.4.{scale}"] = torch.ones(1)
    save_file(state, tmp_path / "model.safetensors")
    what = rf"classifier\.4\.weight is quantized \({state['classifier.4.weight'].dtype}\); dequantize the weights"
    for path in (saved(tmp_path, {"model": state}), str(tmp_path)):
        with pytest.raises(UserError, match=rf"^--weights {path}.*: {what}"):
            single("a", "--weights", path, "--evaluate")
    assert not (tmp_path / "a").exists()


def test_a_missing_file_is_named_with_what_to_give(single, tmp_path):
    with pytest.raises(UserError, match=r"--weights .*none\.pt: no such file; give a file of torch\.save"):
        single("a", "--weights", str(tmp_path / "none.pt"))
    assert not (tmp_path / "a").exists()


def test_a_damaged_or_cut_file_is_refused(given, single, tmp_path):
    path = given / "checkpoints" / "best.pt"
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(UserError, match=r"--weights .*best.pt: truncated, damaged"):
        single("a", "--weights", str(given))
    path.write_bytes(whole[:1000])
    with pytest.raises(UserError, match=r"cannot read --weights .*best.pt: "):
        single("a", "--weights", str(path))
    assert not (tmp_path / "a").exists()


def test_a_passing_fault_says_nothing_of_the_file(single, tmp_path, monkeypatch):
    path = tmp_path / "w.pt"
    fault = OSError(errno.ESTALE, "Stale file handle", str(path))
    monkeypatch.setattr(torch, "load", Mock(side_effect=fault))
    with pytest.raises(UserError, match=rf"^cannot read {path}: Stale file handle$"):
        single("a", "--weights", str(path))


@pytest.fixture
def folders(tmp_path):
    """Return folders of images, by their classes."""

    def write(*names):
        folder = tmp_path / "-".join(names)
        for number, name in enumerate(names):
            for split, count in (("train", 4), ("val", 1)):
                (folder / split / name).mkdir(parents=True)
                for i in range(count):
                    Image.new("RGB", (40, 40), (99 * number, 9 * i, 0)).save(folder / split / name / f"{i}.png")
        return folder

    return write


def test_other_classes_than_those_of_the_weights_are_warned_of(folders, single, tmp_path):
    """They have the same numbers, so that an evaluation compares roses with tulips."""
    argv = ("--data", "imagefolder", "--image-size", "32", "--workers", "0", "--global-batch-size", "4")
    single("a", *argv, "--data-dir", str(folders("daisy", "rose")), "--max-steps", "2")
    assert newest_checkpoint(tmp_path / "a")["data"]["classes"] == ["daisy", "rose"]
    packed = tmp_path / "shards"
    list(pack(folders("daisy", "tulip"), packed, 10_000))
    shards = ("--data", "shards", *argv[2:])
    said = {}
    for name, words in {
        "same": (*argv, "--data-dir", str(tmp_path / "daisy-rose")),
        "other": (*argv, "--data-dir", str(tmp_path / "daisy-tulip")),
        "packed": (*shards, "--data-dir", str(packed)),
        "more": (*argv, "--data-dir", str(folders("aster", "daisy", "rose"))),  # its head is another one
    }.items():
        lines = single(name, *words, "--weights", str(tmp_path / "a"), "--evaluate")
        said[name] = [line.partition("checkpoints/")[2] for line in lines if line.startswith("warning")]
    other = ["best.pt was trained on other classes: class 1 is 'tulip' (was 'rose')"]
    assert said == {"same": [], "other": other, "packed": other, "more": []}
    lines = single("a", *argv, "--data-dir", str(tmp_path / "daisy-tulip"), "--max-steps", "4", "--resume", "auto")
    (warning,) = (line for line in lines if line.startswith("warning: the data have changed"))
    assert ", class 1 is 'tulip' (was 'rose'); samples have another order now" in warning


def test_a_run_is_not_overwritten_from_its_own_weights(given, single):
    before = contents(given)
    with pytest.raises(UserError, match=r"--weights: .*best\.pt is in .*given, which --overwrite deletes; choose"):
        single("given", "--overwrite", "--weights", str(given))
    assert contents(given) == before


# ---- restarts


def test_a_restarted_run_takes_its_own_checkpoint(given, single, tmp_path):
    begin = ("--weights", str(given), "--epochs", "1", "--lr-schedule", "constant")
    argv = (*begin, "--resume", "auto")
    lines = single("a", *argv, "--max-steps", "5")
    assert any(line.startswith("nothing to resume") for line in lines)
    lines = single("a", *argv)
    assert f"resumed from {tmp_path}/a/checkpoints/step-000000005.pt at step 5" in lines
    assert not any("tensors from" in line for line in lines)
    single("whole", *begin)
    assert is_equal(weights(tmp_path / "a"), weights(tmp_path / "whole"))


def test_without_a_checkpoint_of_its_own_it_takes_the_weights_again(given, single, tmp_path):
    """Given again or not: the run's record has them."""
    argv = ("--epochs", "1", "--resume", "auto")
    single("a", "--weights", str(given), *argv)
    run, whole = tmp_path / "a", newest_checkpoint(tmp_path / "a")
    for more in (("--weights", str(given)), (), ()):
        test_resume.lose_checkpoints(run)
        lines = single("a", *argv, *more)
        assert f"took 10 of 10 tensors from {given}/checkpoints/best.pt" in lines
        assert is_equal(newest_checkpoint(run)["model"], whole["model"])
    launches = json.loads((run / "config.json").read_text())["launches"]
    assert [launch["weights"] for launch in launches] == [f"{given}/checkpoints/best.pt"] * 4
    test_resume.lose_checkpoints(run)
    shutil.rmtree(given)
    with pytest.raises(UserError, match=r"a has no checkpoint, and .*best\.pt, where it began, is gone; "):
        single("a", *argv)


def test_an_evaluation_that_starts_again(given, single, tmp_path):
    argv = ("--weights", str(given), "--evaluate", "--resume", "auto")
    for _ in range(2):
        lines = single("a", *argv)
        assert lines[-1].startswith("result recipe=single world_size=1 test_accuracy=")
        assert [line["epoch"] for line in metrics(tmp_path / "a")] == [0]
    before = contents(given)
    with pytest.raises(UserError, match=r"--evaluate: .*given is a run that trains; choose another --name"):
        single("given", *argv)
    assert contents(given) == before


def test_a_signal_ends_an_evaluation_without_a_result(given, single, tmp_path, monkeypatch):
    argv = ("a", "--weights", str(given), "--evaluate", "--resume", "auto")
    monkeypatch.setattr(test_resume.StopsInEvaluation, "batches", 0)
    own = ("--task", "tests.unit.test_resume:StopsInEvaluation")
    lines = single(*argv, *own)
    assert lines[-2] == "stopped by SIGUSR1: wrote no checkpoint"
    assert names(tmp_path / "a") == ["config.json", "metrics.jsonl"]
    assert single(*argv, *own)[-1].startswith("result ")
