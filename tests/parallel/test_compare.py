"""Recipes side by side: the figures of real runs, and the table and picture that are made of them."""

import json
import math

import pytest

from scripts.bench import compare
from tests.support import losses, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    argv = ("--epochs", "2", "--seed", "1")
    folders = [train("single", folder, 1, *argv), train("ddp", folder, 2, *argv)]
    found = [compare.read_run(path) for path in folders]
    for run in found:
        run["difference"] = compare.difference(run["losses"], found[0]["losses"], steps=44)
    return folders, found


def test_figures_are_those_of_the_runs(runs):
    folders, (single, ddp) = runs
    assert list(single["losses"].values()) == losses(folders[0])
    assert (single["world_size"], ddp["world_size"]) == (1, 2)
    assert single["difference"] == 0
    assert single["epoch_s"] == pytest.approx(22 * 64 / single["samples_per_s"])
    assert 0 < ddp["difference"] < 1e-5
    assert single["target_s"] is None  # two epochs do not reach 97%
    assert ddp["sent_kb"] > 85.5  # the gradients' 85,544 bytes, at two ranks once from each


def test_evaluations_within_an_epoch_are_no_epochs_and_null_is_no_figure(tmp_path):
    """The record has null for the loss of a step that --on-nonfinite skip left out, and for the bytes on GPUs."""
    losses = [{"kind": "step", "step": step, "loss": loss} for step, loss in ((1, 2.0), (2, None))]
    evaluations = [
        {"kind": kind, "step": 2, "test_loss": None, "test_accuracy": None, "train_s": 6.0}
        for kind in ("evaluation", "evaluation", "epoch")
    ]
    result = {
        **{"recipe": "single", "world_size": 1, "samples_per_s": 1.0, "train_s": 6.0, "peak_memory_bytes": 1},
        **{"sent_bytes_per_step": None, "headline": "test_accuracy", "test_accuracy": None},
        **{"samples": 6, "epochs": 1.0},
    }
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, losses + evaluations)))
    (tmp_path / "result.json").write_text(json.dumps(result))
    found = compare.read_run(tmp_path)
    assert (found["epoch_s"], found["target_s"], found["test_result"], found["sent_kb"]) == (6.0, None, None, None)
    assert compare.difference(found["losses"], found["losses"], steps=2) == 0
    (tmp_path / "result.json").write_text(json.dumps({**result, "test_accuracy": math.inf}))
    assert " inf " in compare.table(compare.COLUMNS, [{**compare.read_run(tmp_path), "difference": 0.0}])


def test_a_run_that_ends_within_an_epoch_says_how_long_a_whole_one_takes(tmp_path):
    run = compare.read_run(train("single", tmp_path, 1, "--max-steps", "33", "--global-batch-size", "64"))
    assert run["epoch_s"] == pytest.approx(22 * 64 / run["samples_per_s"])


def test_difference_looks_at_common_steps_up_to_the_bound():
    assert compare.difference({1: 1.0, 2: 3.0, 3: 9.0}, {1: 1.0, 2: 2.0, 3: 3.0}, steps=2) == 0.5
    assert compare.difference({5: 1.0}, {1: 1.0}, steps=9) is None


def test_table_and_picture_hold_every_run(runs, tmp_path):
    columns = compare.columns_for(runs[1])
    lines = compare.table(columns, runs[1], left=1).splitlines()
    assert [line.split()[1] for line in lines[:1] + lines[2:]] == ["recipe", "single", "ddp"]
    assert "test accuracy" in lines[0]
    assert " - |" in lines[2]  # single has not reached the target accuracy
    compare.plot(runs[1], tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "RECIPES is empty; "),
        (["singel"], "RECIPE: invalid choice 'singel'; did you mean 'single'?"),
        (["single", "--nodes", "0"], "NODES expects a whole number "),
        (["single", "--", "--name", "x"], "--name is set by compare itself; leave it out of ARGS"),
        (["ddp", "single", "--", "--zero"], "single: unknown option --zero"),
        (["single", "--", "--weights", "w.pt", "--evaluate"], "--evaluate trains nothing to compare"),
        (["single", "probe"], "probe trains nothing; leave it out of RECIPES"),
        (
            ["single", "pipeline", "--nodes", "3"],
            "pipeline: --stages 2 does not divide 3 processes; start 2 or 4",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_runs(words, error, monkeypatch, capsys):
    for name in ("next_folder", "run_in_foreground"):
        monkeypatch.setattr(compare, name, pytest.fail)
    assert compare.main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {error}")


@pytest.mark.parametrize(
    ("words", "processes", "gpus"),
    [
        ([], 4, "0,1,2,3"),
        (["--nodes", "2"], 2, "0,1,2,3"),
        (["--nproc-per-node", "3"], 3, "0,1,2,3"),
        (["--nodes", "5"], 1, ""),
    ],
)
def test_a_recipe_gets_a_process_for_each_gpu_as_in_make_run(words, processes, gpus, tmp_path, monkeypatch):
    commands = []

    def run(command, env, **_):
        commands.append(command)
        assert env["CUDA_VISIBLE_DEVICES"] == gpus
        return 1

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(compare, "run_in_foreground", run)
    monkeypatch.setattr(compare, "next_folder", lambda kind: tmp_path)
    assert compare.main(["ddp", *words]) == 1
    assert f"--nproc-per-node={processes}" in commands[0]
    assert "--how-to-resume=" in commands[0]  # after Ctrl-C, there is nothing to resume


def test_dataparallel_gets_as_many_gpus_as_the_others_together(tmp_path, monkeypatch):
    seen = []

    def run(command, env, **_):
        seen.append(env["CUDA_VISIBLE_DEVICES"])
        (tmp_path / "ddp").mkdir(exist_ok=True)
        (tmp_path / "ddp" / "result.json").touch()
        return len(seen) - 1

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(compare, "run_in_foreground", run)
    monkeypatch.setattr(compare, "next_folder", lambda kind: tmp_path)
    assert compare.main(["ddp", "dataparallel", "--nodes", "2", "--nproc-per-node", "1"]) == 1
    assert seen == ["4,5,6,7", "4,5"]


def test_a_run_that_a_signal_has_stopped_ends_the_comparison(tmp_path, monkeypatch, capsys):
    """Its launcher ends with status 0, and there is no result."""
    monkeypatch.setattr(compare, "run_in_foreground", lambda *_, **__: 0)
    monkeypatch.setattr(compare, "next_folder", lambda kind: tmp_path)
    assert compare.main(["single", "ddp"]) == 1
    what = f"error: single was stopped before its end; its record is in {tmp_path}, compare again\n"
    assert capsys.readouterr().err == what
