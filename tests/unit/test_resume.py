"""What `--resume` finds, takes over from a checkpoint, and leaves as it is: the one-process recipe, in process."""

import contextlib
import copy
import errno
import importlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from recipes.common import loop
from recipes.common.errors import UserError
from recipes.common.optim import build_optimizer
from recipes.common.record import record
from recipes.common.record.record import open_run
from recipes.common.restore import load_optimizer_state
from recipes.common.task import Classification
from recipes.single.train import options
from tests.support import ROOT, contents, is_equal, losses, metrics, newest_checkpoint, run_command, train, weights
from tests.tiny import ALONE

EPOCH = 22
"""Steps of an epoch: 1,437 digits in batches of 64."""


def config_with(**launch):
    """Return the text of a config.json with this launch alone."""
    return json.dumps({"recipe": "single", "options": {}, "launches": [launch]})


LAUNCHED = "2026-01-09T09:00:00+0000"

DAMAGED_CONFIGS = [
    "",
    '{"recipe": "single", "laun',
    "[]",
    '{"model_type": "bert"}',
    '{"recipe": "single", "launches": [1]}',
    '{"recipe": "single", "launches": {"a": {}}}',
    config_with(time=LAUNCHED),
    config_with(time=LAUNCHED, checkpoint=[1]),
    config_with(checkpoint=None),
    config_with(checkpoint=None, time="yesterday"),
    config_with(checkpoint=None, time="2026-01-09T09:00:00"),  # cannot be compared with a time that has a zone
    config_with(checkpoint=None, time=LAUNCHED, options=[]),
    json.dumps({"recipe": "single", "launches": [{"checkpoint": None, "time": LAUNCHED}]}),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a complete run of one epoch."""
    return train("single", tmp_path_factory.mktemp("trained"), 1, "--epochs", "1")


@pytest.fixture
def run(trained, tmp_path):
    """Return a copy of that run, tmp_path / "a"."""
    return shutil.copytree(trained, tmp_path / "a")


def read(run, name="config.json"):
    return json.loads((run / name).read_text())


def lose_checkpoints(run):
    """Leave of a run what a launch leaves that was killed before its first checkpoint."""
    shutil.rmtree(run / "checkpoints")
    for name in ("result.json", "has-checkpoints"):
        (run / name).unlink()


@contextlib.contextmanager
def refused_and_left(run, words):
    """Assert that the block raises a UserError with these words (a pattern), and leaves the run as it is."""
    before = contents(run)
    with pytest.raises(UserError, match=words):
        yield
    assert contents(run) == before


# ---- a passing fault


@pytest.mark.parametrize("call", ["load", "listdir", "read_text"])
def test_after_a_passing_fault_the_run_goes_on_where_it_was(run, single, monkeypatch, call):
    def fail(path, **options):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with refused_and_left(run, r"cannot read .*Stale file handle"), monkeypatch.context() as patch:
        owner = {"load": torch, "listdir": os, "read_text": record.Path}[call]
        patch.setattr(owner, call, fail)
        single("a", "--epochs", "2", "--resume", "auto")
    lines = single("a", "--epochs", "2", "--resume", "auto")
    assert f"resumed from {run}/checkpoints/step-{EPOCH:09d}.pt at step {EPOCH}" in lines
    assert len(losses(run)) == 2 * EPOCH


def test_what_another_node_wrote_is_found_although_this_node_remembers_older_names(run, single, monkeypatch):
    """NFS and sshfs remember a folder's names for up to a minute, until the node itself changes the folder."""
    names, listdir, mkdir = {}, os.listdir, os.mkdir

    def mkdir_and_forget(path, mode=0o777):
        mkdir(path, mode)
        names.pop(str(Path(path).parent), None)

    for folder in (run.parent, run, run / "checkpoints"):
        names[str(folder)] = listdir(folder)  # on this node
    single("a", "--epochs", "2", "--resume", "auto", "--keep-checkpoints", "1")  # on another node
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda path: names.get(str(path)) or listdir(path))
        patch.setattr(os, "mkdir", mkdir_and_forget)
        lines = single("a", "--epochs", "3", "--resume", "auto")
    assert f"resumed from {run}/checkpoints/step-{2 * EPOCH:09d}.pt at step {2 * EPOCH}" in lines
    assert len(losses(run)) == 3 * EPOCH
    assert not list(run.rglob(".refresh-*"))


class NumpyTask(Classification):
    """A task whose headline is a numpy number, which torch does not load with weights_only=True."""

    headline = "error"
    higher_is_better = False

    def derive(self, averages):
        return {"error": np.sqrt(1 - averages["accuracy"]), "half": torch.tensor(0.5)}


def test_what_a_task_derives_is_saved_as_plain_numbers(run, single):
    argv = ("b", "--epochs", "1", "--task", "tests.unit.test_resume:NumpyTask")
    single(*argv, "--max-steps", "2")
    folder = run.parent / "b"
    for path in folder.glob("checkpoints/*.pt"):
        kept = torch.load(path, weights_only=True)["position"]
        assert [type(value) for value in [*kept["averages"].values(), kept["best_score"]]] == [float] * 5
        assert kept["best_score"] == -kept["averages"]["test_error"]
    lines = single(*argv, "--max-steps", "3", "--resume", "auto")
    assert f"resumed from {folder}/checkpoints/step-000000002.pt at step 2" in lines


def test_where_no_checkpoint_is_good_nothing_begins(run, single):
    for path in run.glob("checkpoints/*.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        with refused_and_left(run, r"none of the 1 checkpoints .*; try .*--overwrite and --resume none"):
            single("a", "--epochs", "2", "--resume", "auto")
    single("a", "--max-steps", "1", "--overwrite", "--resume", "none")
    assert newest_checkpoint(run)["position"]["step"] == 1


def test_a_run_killed_before_its_first_checkpoint_has_its_name_resumes(tmp_path, single, monkeypatch):
    """That checkpoint is the best one so far, and is linked as such first."""
    replace = Path.replace
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda path, to: 1 / 0 if to.name[:5] == "step-" else replace(path, to))
        with pytest.raises(UserError, match="division by zero"):
            single("a", "--max-steps", "8", "--evaluate-every", "8")
    names = {path.name for path in (tmp_path / "a/checkpoints").iterdir()}
    assert names == {"best.pt", "step-000000008.tmp"}
    lines = single("a", "--max-steps", "12", "--evaluate-every", "8", "--resume", "auto")
    assert f"resumed from {tmp_path}/a/checkpoints/best.pt at step 8" in lines
    assert len(losses(tmp_path / "a")) == 12


def test_a_run_killed_within_its_first_checkpoint_begins_again(tmp_path, single, monkeypatch):
    """That checkpoint follows no evaluation, so it has no other name."""
    argv, replace = ("a", "--max-steps", "12", "--checkpoint-every", "8"), Path.replace
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda path, to: 1 / 0 if to.name[:5] == "step-" else replace(path, to))
        with pytest.raises(UserError, match="division by zero"):
            single(*argv)
    assert [path.name for path in (tmp_path / "a/checkpoints").iterdir()] == ["step-000000008.tmp"]
    assert "no checkpoint yet: starting from step 0" in single(*argv, "--resume", "auto")
    assert len(losses(tmp_path / "a")) == 12


@pytest.mark.parametrize("flag", ["", "--start-from", "--weights"])
def test_a_run_whose_checkpoints_are_gone_is_refused(run, single, tmp_path, flag):
    """Its volume is not mounted, or old files were purged; what its first launch began from is there."""
    argv = ("b", "--epochs", "2", *filter(None, (flag, flag and str(run))))
    single(*argv)
    other, resumed = tmp_path / "b", (*argv, "--resume", "auto")
    (other / "result.json").unlink()
    shutil.move(other / "checkpoints", tmp_path / "moved")
    with refused_and_left(other, r"b has written checkpoints, and they are gone; put back .*--overwrite"):
        single(*resumed)
    (other / "checkpoints").mkdir()  # as of a mount
    with refused_and_left(other, r"b has written checkpoints, and they are gone; "):
        single(*resumed)
    (other / "checkpoints").rmdir()
    (other / "checkpoints").symlink_to(tmp_path / "moved")
    assert f"resumed from {other}/checkpoints/step-{2 * EPOCH:09d}.pt at step {2 * EPOCH}" in single(*resumed)


def test_a_link_to_checkpoints_that_leads_nowhere_is_named(run, single, tmp_path):
    """Older versions have left no sign that the run has checkpoints; and nothing could be written there."""
    lose_checkpoints(run)
    (run / "checkpoints").symlink_to(tmp_path / "volume")
    with refused_and_left(run, rf"a/checkpoints is a link to {tmp_path}/volume, which does not exist; put back "):
        single("a", "--epochs", "2", "--resume", "auto")


def test_a_complete_run_without_checkpoints_is_refused(run, single):
    shutil.rmtree(run / "checkpoints")
    with refused_and_left(run, r"a is complete, and its checkpoints are gone; .*--overwrite"):
        single("a", "--epochs", "2", "--resume", "auto")


@pytest.mark.parametrize("text", DAMAGED_CONFIGS)
def test_a_damaged_config_is_named_and_left(run, single, text):
    (run / "config.json").write_text(text)
    with refused_and_left(run, r"config.json is damaged or not of this project; restore or remove it"):
        single("a", "--epochs", "2", "--resume", "auto")


def test_a_damaged_line_costs_no_other(run, single):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[3], lines[4] = "\0" * len(lines[3]), '{"kind": "step"}'
    path.write_text("\n".join(lines) + '\n{"step": 22, "lo')
    single("a", "--epochs", "2", "--resume", "auto")
    steps = [line["step"] for line in metrics(run) if "loss" in line]
    assert steps == [step for step in range(1, 2 * EPOCH + 1) if step not in (4, 5)]


def test_a_run_begun_from_another_is_never_begun_from_step_0(run, single, tmp_path):
    """Stopped before its own first checkpoint, it begins again from that of the other run."""
    single("b", "--epochs", "2", "--start-from", str(run))
    other = tmp_path / "b"
    whole = newest_checkpoint(other)
    for _ in range(2):
        lose_checkpoints(other)
        lines = single("b", "--epochs", "2", "--resume", "auto")
        assert f"resumed from {run}/checkpoints/step-{EPOCH:09d}.pt at step {EPOCH}" in lines
        assert is_equal(newest_checkpoint(other)["model"], whole["model"])
        assert len(losses(other, after=EPOCH)) == EPOCH
    lose_checkpoints(other)
    shutil.rmtree(run)
    with refused_and_left(other, r"b has no checkpoint, and .*a/checkpoints/step-.*, where it began, is gone; "):
        single("b", "--epochs", "2", "--resume", "auto")


def test_the_run_that_another_begins_from_stays_as_it_is(run, single):
    good = newest_checkpoint(run)
    damaged = run / "checkpoints" / f"step-{EPOCH + 1:09d}.pt"
    damaged.write_bytes(b"cut")
    before = contents(run)
    lines = single("b", "--max-steps", "24", "--start-from", str(run))
    assert f"resumed from {run}/checkpoints/step-{good['position']['step']:09d}.pt at step {EPOCH}" in lines
    assert contents(run) == before


def test_a_run_begun_from_another_has_a_best_checkpoint_of_its_own(run, single, tmp_path):
    content = newest_checkpoint(run)
    content["position"]["best_score"] = 1.0
    record.CheckpointFolder(run / "checkpoints").write(content)
    single("b", "--epochs", "2", "--start-from", str(run))
    result = read(tmp_path / "b", "result.json")
    assert result["best_test_accuracy"] == result["test_accuracy"] < 1
    best = torch.load(tmp_path / "b/checkpoints/best.pt", weights_only=True)["position"]
    assert (best["step"], best["best_score"]) == (2 * EPOCH, result["test_accuracy"])
    single("a", "--epochs", "2", "--resume", "auto")
    assert read(run, "result.json")["best_test_accuracy"] == 1.0, "a run that continues keeps its own"


def test_a_run_begun_from_another_has_steps_to_train(run, single, tmp_path):
    """It would be complete without a checkpoint, and `--resume auto` would refuse it."""
    with pytest.raises(UserError, match=rf"is at step {EPOCH}, the last of --epochs and --max-steps; raise them"):
        single("b", "--epochs", "1", "--start-from", str(run))
    assert not (tmp_path / "b").exists()


def test_a_job_that_starts_again_resumes_its_own_run_or_begins_from_another_again(run, single, tmp_path):
    """Launch files add --resume auto, whether or not the first start had begun the record."""
    argv = ("--start-from", str(run), "--epochs", "2")
    open_run(options(["--runs-dir", str(tmp_path), "--name", "b", *argv]), "single", [])
    assert os.listdir(tmp_path / "b") == ["metrics.jsonl"]
    lines = single("b", *argv, "--max-steps", "25", "--resume", "auto")
    assert f"resumed from {run}/checkpoints/step-{EPOCH:09d}.pt at step {EPOCH}" in lines
    with pytest.raises(UserError, match="b exists; add --resume auto"):
        single("b", *argv)
    shutil.rmtree(run)  # it is needed no more
    lines = single("b", "--epochs", "2", "--resume", "auto")
    assert not any("--start-from" in line for line in lines), "it has no effect on a run that has a checkpoint"
    assert f"resumed from {tmp_path}/b/checkpoints/step-000000025.pt at step 25" in lines


def test_a_run_that_had_begun_from_another_does_not_begin_from_a_third(run, single, tmp_path):
    """A run without a checkpoint of its own begins again where it began, whatever is given now."""
    other = shutil.copytree(run, tmp_path / "other")
    single("b", "--start-from", str(run), "--epochs", "2")
    lose_checkpoints(tmp_path / "b")
    lines = single("b", "--start-from", str(other), "--epochs", "2", "--resume", "auto")
    assert f"resumed from {run}/checkpoints/step-{EPOCH:09d}.pt at step {EPOCH}" in lines


def test_a_resume_deletes_nothing_although_overwrite_is_given(run, single):
    """A requeued job has both options: --overwrite was for its first start."""
    lines = single("a", "--epochs", "2", "--overwrite", "--resume", "auto")
    assert f"resumed from {run}/checkpoints/step-{EPOCH:09d}.pt at step {EPOCH}" in lines
    assert len(losses(run)) == 2 * EPOCH


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/best.pt"])
def test_a_run_is_not_overwritten_from_its_own_checkpoint(run, single, tmp_path, place):
    """Its own checkpoint would be lost before the new run has written one."""
    (tmp_path / "link").symlink_to(run)
    for path in (run / place, tmp_path / "link" / place):
        with refused_and_left(run, r"--start-from: .*\.pt is in .*a, which --overwrite deletes; "):
            single("a", "--epochs", "2", "--overwrite", "--start-from", str(path))


def test_a_refused_overwrite_leaves_the_run_as_it_is(run, single, tmp_path):
    """The old record is removed once the checkpoint has been restored and the steps are known to suffice."""
    other = shutil.copytree(run, tmp_path / "b")
    with refused_and_left(run, rf"is at step {EPOCH}, beyond the 5 steps"):
        single("a", "--max-steps", "5", "--overwrite", "--start-from", str(other))
    content = newest_checkpoint(other)
    content["model"].popitem()
    record.CheckpointFolder(other / "checkpoints").write(content)
    with refused_and_left(run, "the checkpoint does not fit this run"):
        single("a", "--overwrite", "--start-from", str(other))
    with pytest.raises(UserError, match="the checkpoint does not fit this run"):
        single("c", "--start-from", str(other))
    assert not (tmp_path / "c").exists(), "a refusal leaves no run behind"


def test_an_accepted_overwrite_leaves_nothing_of_the_old_run(run, single, tmp_path):
    other = shutil.copytree(run, tmp_path / "b")
    (run / "note.txt").write_text("of the old run")
    single("a", "--max-steps", "24", "--overwrite", "--start-from", str(other))
    assert len(losses(run, after=EPOCH)) == 2
    assert [launch["step"] for launch in read(run)["launches"]] == [EPOCH]
    files = ["config.json", "has-checkpoints", "metrics.jsonl", "result.json"]
    assert sorted(os.listdir(run)) == ["checkpoints", *files]
    assert sorted(os.listdir(run / "checkpoints")) == ["best.pt", "step-000000024.pt"]


# ---- a complete run


def test_a_complete_run_stays_as_it_is(run, single):
    before, last = contents(run), read(run, "result.json")
    asked_at = (run / "result.json").stat().st_mtime_ns
    for argv in (["--epochs", "1"], ["--max-steps", "5"], ["--epochs", "1", "--lr", "0.5"]):
        lines = single("a", *argv, "--resume", "auto")
        assert lines == [
            f"run {run} is complete: nothing to train",
            f"result recipe=single world_size=1 test_accuracy={last['test_accuracy']:.4f} "
            f"samples_per_s={last['samples_per_s']:.0f} record={run}",
        ]
        assert contents(run) == before
    assert last["samples_per_s"] > 0
    assert (run / "result.json").stat().st_mtime_ns > asked_at, "launch files go by it"


def test_ranks_of_a_complete_run_find_no_hang_of_an_earlier_end(run, single):
    """Horovod's ranks, which have no store, take hang/ for the report of another rank, and end with status 3."""
    (run / "hang").mkdir()
    (run / "hang-report.txt").write_text("rank 1 does not come")
    single("a", "--epochs", "1", "--resume", "auto")
    assert [path.name for path in run.glob("hang*")] == ["hang-report-1.txt"]


def test_with_more_epochs_it_goes_on_and_totals_add_up(run, single):
    first = read(run, "result.json")
    assert (first["step"], first["samples"]) == (EPOCH, EPOCH * 64)
    first_s = {line["epoch"]: line["train_s"] for line in metrics(run) if "train_s" in line}
    single("a", "--epochs", "3", "--resume", "auto")
    result = read(run, "result.json")
    assert (result["step"], result["samples"]) == (3 * EPOCH, 3 * EPOCH * 64)
    times = {line["epoch"]: line["train_s"] for line in metrics(run) if "train_s" in line}
    assert times[1] == first_s[1] < times[2] < times[3]
    assert times[3] == pytest.approx(result["train_s"], abs=0.001)
    assert first["train_s"] < result["train_s"]
    # The first step of a launch is not timed.
    timed = newest_checkpoint(run)["timed"]
    assert timed["steps"] == (EPOCH - 1) + (2 * EPOCH - 1)
    assert result["samples_per_s"] == pytest.approx(timed["steps"] * 64 / result["train_s"])


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_result_that_was_not_written_is_written_from_the_checkpoint(run, single, is_cut):
    """A longer run that was killed between its last checkpoint and its result still has the shorter run's."""
    left = '{"recipe": "si' if is_cut else (run / "result.json").read_text()
    single("a", "--epochs", "3", "--resume", "auto")
    whole = read(run, "result.json")
    (run / "result.json").write_text(left)
    lines = single("a", "--epochs", "3", "--resume", "auto")
    again = read(run, "result.json")
    for name in ("test_accuracy", "samples", "step"):
        assert again[name] == whole[name]
    for name in ("train_s", "samples_per_s"):
        assert again[name] == pytest.approx(whole[name])
    assert again["step"] == 3 * EPOCH
    assert f"result recipe=single world_size=1 test_accuracy={whole['test_accuracy']:.4f} " in lines[-1]


def test_fewer_steps_than_a_run_has_done_are_refused(run, single, tmp_path):
    (run / "result.json").unlink()  # as if it had been stopped there
    words = rf"step-{EPOCH:09d}.pt is at step {EPOCH}, beyond the 5 steps of .*; raise them"
    with refused_and_left(run, words):
        single("a", "--max-steps", "5", "--resume", "auto")
    with refused_and_left(run, words):
        single("b", "--max-steps", "5", "--start-from", str(run))
    assert not (tmp_path / "b").exists(), "a refusal leaves no run behind"


# ---- options


def test_settings_are_the_options_and_state_is_the_checkpoints():
    """The arithmetic of SGD is v = momentum * v + (g + decay * w), w -= lr * v."""
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    args = options(["--momentum", "0.9", "--weight-decay", "0"])
    optimizer = build_optimizer(args, torch.nn.ParameterList([weight]), ALONE)
    weight.grad = torch.tensor([3.0])
    optimizer.step()  # leaves a momentum of 3
    saved = copy.deepcopy(optimizer.state_dict())
    again = torch.nn.Parameter(torch.tensor([2.0]))
    args = options(["--momentum", "0.5", "--weight-decay", "0.25", "--lr", "0.1"])
    optimizer = build_optimizer(args, torch.nn.ParameterList([again]), ALONE)
    load_optimizer_state(optimizer, saved)
    again.grad = torch.tensor([1.0])
    optimizer.step()
    assert again.item() == pytest.approx(2 - 0.1 * (0.5 * 3 + (1 + 0.25 * 2)))
    assert saved["param_groups"][0]["momentum"] == 0.9, "the checkpoint's content stays as it is"


def test_a_fused_optimizer_takes_over_the_state_of_a_plain_one():
    weight = torch.nn.Parameter(torch.ones(3))
    plain = torch.optim.AdamW([weight], foreach=True)
    weight.grad = torch.ones(3)
    plain.step()
    fused = torch.optim.AdamW([weight], fused=True)
    load_optimizer_state(fused, plain.state_dict())
    assert (fused.param_groups[0]["fused"], fused.param_groups[0]["foreach"]) == (True, None)
    fused.step()
    assert fused.state[weight]["step"].item() == 2
    with pytest.raises(ValueError, match="its optimizer has 0 parameters, the model 1"):
        load_optimizer_state(fused, {"state": {}, "param_groups": []})


def test_a_resume_applies_the_optimizers_options(run, single):
    lines = single("a", "--epochs", "2", "--momentum", "0.5", "--weight-decay", "0.25", "--resume", "auto")
    (group,) = newest_checkpoint(run)["optimizer"]["param_groups"]
    assert (group["momentum"], group["weight_decay"]) == (0.5, 0.25)
    says = "options that differ from the last launch (defaults if not given): "
    changed = "--epochs 2 (was 1), --momentum 0.5 (was 0.9), --weight-decay 0.25 (was 0.01)"
    assert lines[:4][-1] == says + changed


def test_config_has_each_launchs_own_options(run, single):
    first = read(run)
    single("a", "--epochs", "2", "--lr", "0.5", "--resume", "auto")
    single("a", "--epochs", "3", "--clip-grad-norm", "2", "--resume", "auto")
    config = read(run)
    for name in ("recipe", "options", "versions", "hardware", "revision"):
        assert config[name] == first[name]
        assert all(name in launch for launch in config["launches"])
    assert config["launches"][0] == first["launches"][0]
    names = ("epochs", "lr", "clip_grad_norm", "resume")
    assert [[launch["options"][name] for name in names] for launch in config["launches"]] == [
        [1, 0.02, None, "none"],
        [2, 0.5, None, "auto"],
        [3, 0.02, 2.0, "auto"],
    ]
    assert [launch["step"] for launch in config["launches"]] == [0, EPOCH, 2 * EPOCH]


def test_a_record_of_an_earlier_version_goes_on(run, single):
    """Its launches have no options of their own, and its checkpoints no times."""
    path = run / "config.json"
    config = read(run)
    for name in ("recipe", "options", "versions", "hardware", "revision"):
        del config["launches"][0][name]
    path.write_text(json.dumps(config))
    content = newest_checkpoint(run)
    del content["timed"]
    record.CheckpointFolder(run / "checkpoints").write(content)
    lines = single("a", "--epochs", "2", "--resume", "auto")
    assert lines[3] == "options that differ from the last launch (defaults if not given): --epochs 2 (was 1)"
    assert read(run)["launches"][1]["options"]["epochs"] == 2
    assert newest_checkpoint(run)["timed"]["steps"] == EPOCH - 1


# ---- which run


def test_a_name_that_does_not_exist_is_said_first(single, tmp_path):
    (tmp_path / "logs" / "slurm").mkdir(parents=True)
    for name in ("new", "logs"):
        lines = single(name, "--max-steps", "1", "--resume", "auto")
        assert lines[0] == f"nothing to resume (no run {tmp_path / name} yet): starting a new run"
    lines = single(None, "--max-steps", "1", "--resume", "auto", runs_dir=tmp_path / "none")
    assert lines[0] == f"nothing to resume (no run of single in {tmp_path / 'none'} yet): starting a new run"
    assert lines[1].startswith(f"run {tmp_path / 'none' / 'single-001'}  ")


def test_a_run_without_a_checkpoint_says_that_it_begins_again(run, single):
    lose_checkpoints(run)
    lines = single("a", "--max-steps", "1", "--resume", "auto")
    assert "no checkpoint yet: starting from step 0" in lines[:3]


def test_a_folder_that_is_no_run_is_left_alone(single, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"precious exists and is not a run; choose another --name"):
        single("precious", "--resume", "auto")
    assert os.listdir(tmp_path / "precious") == ["thesis.txt"]


def test_without_a_name_the_newest_run_of_the_recipe_goes_on(run, single, tmp_path, capsys):
    """The newest is the one launched last, whatever its name and the times of copied files."""
    for name, launched, recipe in (
        ("zoe", "2026-01-01T09:00:00+0000", "single"),
        ("single-007", "2026-01-03T09:00:00+0000", "single"),
        ("mine", "2026-01-03T09:30:00-0100", "single"),
        ("twin", "2026-01-03T10:30:00+0000", "single"),
        ("theirs", "2026-01-09T09:00:00+0000", "ddp"),
    ):
        other = shutil.copytree(run, tmp_path / "runs" / name)
        config = read(other)
        config["launches"][-1].update(time=launched, recipe=recipe)
        (other / "config.json").write_text(json.dumps(config))
    for name, written_s in (("mine", 2), ("twin", 1)):
        os.utime(tmp_path / "runs" / name / "config.json", (written_s, written_s))
    (tmp_path / "runs" / "notes.txt").write_text("")
    (tmp_path / "runs" / "compare-001").mkdir()
    (tmp_path / "runs" / "bert").mkdir()
    (tmp_path / "runs" / "bert" / "config.json").write_text('{"model_type": "bert"}')
    lines = single(None, "--max-steps", "23", "--resume", "auto", runs_dir=tmp_path / "runs")
    mine = tmp_path / "runs" / "mine"
    assert f"resumed from {mine}/checkpoints/step-{EPOCH:09d}.pt at step {EPOCH}" in lines
    assert losses(mine)[:EPOCH] == losses(run)
    for name in ("zoe", "single-007", "theirs", "twin"):
        assert is_equal(weights(tmp_path / "runs" / name), weights(run))


def test_without_a_name_a_training_and_an_evaluation_pass_each_other_over(run, single, tmp_path):
    """README's own flow is to train, stop, evaluate, and train on."""
    evaluation = ("--weights", str(run), "--evaluate")
    single("z", *evaluation)
    lines = single(None, "--max-steps", "23", "--resume", "auto")
    assert f"resumed from {run}/checkpoints/step-{EPOCH:09d}.pt at step {EPOCH}" in lines
    lines = single(None, *evaluation, "--resume", "auto")
    assert lines[0].startswith(f"run {tmp_path}/z ")
    with refused_and_left(tmp_path / "z", r"z is a run that only evaluates; choose another --name"):
        single("z", "--resume", "auto")
    (tmp_path / "b").mkdir()
    shutil.copy(run / "config.json", tmp_path / "b")  # as before its first checkpoint
    with refused_and_left(tmp_path / "b", r"b is a run that trains; choose another --name"):
        single("b", *evaluation, "--resume", "auto")


@pytest.mark.parametrize("text", DAMAGED_CONFIGS)
def test_a_config_that_cannot_be_judged_is_not_passed_over_silently(run, single, capsys, tmp_path, text):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text(text)
    args = options(["--runs-dir", str(tmp_path), "--resume", "auto"])
    capsys.readouterr()
    opened, _ = open_run(args, "single", [])
    assert opened.folder == run
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: skipped a run in the search for the newest one: {tmp_path}/b/config.json")


def test_a_run_of_another_user_is_passed_over(run, monkeypatch, capsys):
    shutil.copytree(run, run.with_name("theirs"))
    read_text = record.Path.read_text

    def read_own(path, *args, **options):
        if path.parent.name == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_text(path, *args, **options)

    monkeypatch.setattr(record.Path, "read_text", read_own)
    opened, _ = open_run(options(["--runs-dir", str(run.parent), "--resume", "auto"]), "single", [])
    assert opened.folder == run
    assert "warning: skipped a run in the search for the newest one: " in capsys.readouterr().err


class StopsInEvaluation(Classification):
    """A task that raises a stop signal once, in the first batch of an evaluation."""

    batches = 0

    def metric_sums(self, output, target):
        type(self).batches += len(target) > 2  # the check before the training has two samples
        if self.batches == 1 and len(target) > 2:
            signal.raise_signal(signal.SIGUSR1)
        return super().metric_sums(output, target)


def test_a_signal_in_an_evaluation_ends_it_and_loses_no_step(tmp_path, single):
    """The 360 test images are two batches."""
    argv = ("a", "--epochs", "1", "--task", "tests.unit.test_resume:StopsInEvaluation")
    lines = single(*argv)
    path = tmp_path / "a" / "checkpoints" / f"step-{EPOCH:09d}.pt"
    assert f"stopped by SIGUSR1: wrote {path}" in lines
    assert torch.load(path, weights_only=True)["position"]["epoch"] == 0
    assert [line["kind"] for line in metrics(tmp_path / "a")] == ["step"] * EPOCH
    lines = single(*argv, "--resume", "auto")
    assert lines[-1].startswith("result recipe=single world_size=1 test_accuracy=")
    assert [line["kind"] for line in metrics(tmp_path / "a")] == [*["step"] * EPOCH, "epoch"]


HANDLES_SIGNALS = """
import signal
from recipes.common.task import Classification

signal.signal(signal.SIGTERM, signal.SIG_DFL)

class Own(Classification):
    def loss_sum(self, output, target):
        if len(target) > 2:
            signal.raise_signal(signal.SIGTERM)
        return super().loss_sum(output, target)
"""


def test_a_signal_handler_of_the_users_code_loses_no_step(tmp_path):
    (tmp_path / "own.py").write_text(HANDLES_SIGNALS)
    words = ("--task", "own:Own", "--no-tensorboard", "--runs-dir", str(tmp_path), "--name", "a")
    result = run_command(
        sys.executable, "-m", "recipes.single.train", *words, check=True, PYTHONPATH=f"{ROOT}:{tmp_path}"
    )
    assert f"stopped by SIGTERM: wrote {tmp_path / 'a/checkpoints/step-000000002.pt'}\n" in result.stdout


NAN_AT = 40


def spoilt_digits():
    """Return 64 training samples, one of which has a pixel that is no number."""
    images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    spoilt = images.index_fill(0, torch.tensor([NAN_AT]), float("nan"))
    labels = torch.arange(64) % 4
    return {"train": (spoilt, labels), "test": (images, labels), "target": "class", "num_classes": 4}


def normalised(data):
    """Return a model with batch norm."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4))


@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_a_skipped_step_leaves_the_statistics_of_batch_norm_as_they_were(tmp_path, single, amp):
    """The batch with the bad sample has passed through the model before its gradients are checked."""
    here = "tests.unit.test_resume"
    argv = ("--data", f"{here}:spoilt_digits", "--model", f"{here}:normalised", "--on-nonfinite", "skip")
    lines = single("a", *argv, "--amp", amp, "--global-batch-size", "8", "--epochs", "3", "--device", "cpu")
    model = weights(tmp_path / "a")
    assert all(tensor.isfinite().all() for tensor in model.values())
    skipped = 3 * 8 - int(model["1.num_batches_tracked"])
    assert skipped == 3 or (amp == "fp16" and skipped > 3), lines  # a loss scale may overflow at first
    assert all(np.isfinite(line["test_loss"]) for line in metrics(tmp_path / "a") if "test_loss" in line)


def overflowing_digits():
    """Return 64 training samples, one of which overflows in fp16 behind a layer."""
    data = spoilt_digits()
    images = data["train"][0]
    return {**data, "train": (images.nan_to_num(1.0).index_fill(0, torch.tensor([NAN_AT]), 1e6), data["train"][1])}


def masked(data):
    """Return a model with batch norm behind a layer, and a mask whose infinities are on purpose."""
    layers = (torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model = torch.nn.Sequential(torch.nn.Flatten(), *layers)
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    return model


def test_buffers_that_overflow_are_not_saved(tmp_path, single):
    """The scaler skips the step, so that weights stay finite; batch norm's running statistics do not."""
    here = "tests.unit.test_resume"
    argv = ("--data", f"{here}:overflowing_digits", "--model", f"{here}:masked", "--amp", "fp16")
    argv = (*argv, "--global-batch-size", "8", "--log-every", "9", "--epochs", "1", "--device", "cpu")
    said = (
        r"^the buffer 2\.running_mean is not finite after step 8, and is not saved: .*lower --lr, .*--resume auto"
    )
    with pytest.raises(UserError, match=said) as caught:
        single("a", *argv)
    assert caught.value.status == 1
    assert not (tmp_path / "a/checkpoints").exists()
    single("a", *argv, "--resume", "auto", "--on-nonfinite", "skip")
    model = weights(tmp_path / "a")
    assert [name for name, tensor in model.items() if not tensor.isfinite().all()] == ["mask"]


def growing():
    """Return SAMPLES samples."""
    images = torch.rand(int(os.environ["SAMPLES"]), 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(len(images)) % 4
    return {"train": (images, labels), "test": (images[:8], labels[:8]), "target": "class", "num_classes": 4}


class StopsWithinEpoch(StopsInEvaluation):
    batches = 0


def test_a_signal_in_an_evaluation_within_an_epoch_ends_it_and_loses_no_step(tmp_path, single):
    argv = ("a", "--epochs", "1", "--evaluate-every", "8", "--task", "tests.unit.test_resume:StopsWithinEpoch")
    single(*argv)
    assert sorted(path.name for path in (tmp_path / "a/checkpoints").iterdir()) == ["step-000000008.pt"]
    assert [line["kind"] for line in metrics(tmp_path / "a")] == ["step"] * 8
    single(*argv, "--resume", "auto")
    lines = [(line["kind"], line["step"]) for line in metrics(tmp_path / "a") if line["kind"] != "step"]
    assert lines == [("evaluation", 8), ("evaluation", 16), ("epoch", EPOCH)]
    assert len(losses(tmp_path / "a")) == EPOCH


class StopsFirstEvaluation(StopsInEvaluation):
    batches = 0


def test_an_evaluation_that_is_repeated_has_one_line(tmp_path, single, monkeypatch):
    """A job is killed between an evaluation of the checkpoint's step and the next checkpoint."""
    argv = ("a", "--epochs", "1", "--evaluate-every", "8", "--task", "tests.unit.test_resume:StopsFirstEvaluation")
    single(*argv)  # its checkpoint of step 8 is not evaluated
    with monkeypatch.context() as patch:
        patch.setattr(record.CheckpointFolder, "write", Mock(side_effect=UserError("killed")))
        with pytest.raises(UserError, match="killed"):
            single(*argv, "--resume", "auto")
    assert metrics(tmp_path / "a")[-1]["kind"] == "evaluation"
    single(*argv, "--resume", "auto")
    lines = [(line["kind"], line["step"]) for line in metrics(tmp_path / "a") if line["kind"] != "step"]
    assert lines == [("evaluation", 8), ("evaluation", 16), ("epoch", EPOCH)]
    assert len(losses(tmp_path / "a")) == EPOCH


def test_a_resumed_run_may_be_evaluated_more_often(tmp_path, single):
    """A run's end is an evaluation, too; the next ones are multiples of the new number."""
    single("a", "--max-steps", "12")
    single("a", "--epochs", "1", "--evaluate-every", "6", "--resume", "auto")
    lines = [(line["kind"], line["step"]) for line in metrics(tmp_path / "a") if line["kind"] != "step"]
    assert lines == [("epoch", 12), ("evaluation", 18), ("epoch", EPOCH)]


def test_the_best_evaluation_may_be_within_an_epoch(tmp_path, single, monkeypatch):
    scores = iter((0.2, 0.9, 0.5))
    monkeypatch.setattr(loop, "evaluate", lambda *given: {"test_loss": 1.0, "test_accuracy": next(scores)})
    (*_, result) = single("a", "--epochs", "1", "--evaluate-every", "8")
    assert "test_accuracy=0.5000" in result
    assert torch.load(tmp_path / "a/checkpoints/best.pt", weights_only=True)["position"]["step"] == 16
    assert json.loads((tmp_path / "a/result.json").read_text())["best_test_accuracy"] == 0.9


def test_a_resume_says_that_the_data_have_changed(tmp_path, single, monkeypatch):
    """The order of samples changes, and so does the number of steps of an epoch."""
    argv = ("--data", "tests.unit.test_resume:growing", "--global-batch-size", "8", "--device", "cpu")
    monkeypatch.setenv("SAMPLES", "64")
    single("a", *argv, "--epochs", "2")
    same = single("a", *argv, "--epochs", "3", "--resume", "auto")
    assert not any("warning" in line for line in same)
    monkeypatch.setenv("SAMPLES", "32")
    lines = single("a", *argv, "--epochs", "8", "--resume", "auto")
    (warning,) = (line for line in lines if line.startswith("warning: the data have changed"))
    assert "the training set is 32 samples with digest " in warning
    assert "(was 64 samples with digest " in warning
    assert "the test set" not in warning
    assert "; samples have another order now, labels may stand for other classes, and earlier" in warning
    epochs = [line["step"] for line in metrics(tmp_path / "a") if line["kind"] == "epoch"]
    assert epochs == [8, 16, 24, 24, 28, 32]


CODE = """
from recipes.common.world.peers import Peers
from recipes.common.task import Classification
import {helper}

class Own(Classification):
    {settings}
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """Return a function that writes the modules own_task and own_helper, as they are imported next."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def write(settings="pass", helper=""):
        (tmp_path / "own_task.py").write_text(CODE.format(helper="own_helper", settings=settings))
        (tmp_path / "own_helper.py").write_text(helper)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # it knows a file by its size and second
        for name in ("own_task", "own_helper"):
            sys.modules.pop(name, None)

    yield write
    write()


OWN = ("--task", "own_task:Own", "--max-steps")


def test_a_resume_says_that_the_users_code_has_changed(own_code, single):
    own_code()
    single("a", *OWN, "2")
    own_code()
    assert not any("warning" in line for line in single("a", *OWN, "4", "--resume", "auto"))
    for settings, helper, what in (("x = 1", "", "own_task"), ("x = 2", "y = 3", "own_helper, own_task")):
        own_code(settings, helper)
        lines = single("a", *OWN, "6" if helper else "5", "--resume", "auto")
        (warning,) = (line for line in lines if "warning" in line)
        assert warning == f"warning: code has changed since the checkpoint was written: {what}"


def test_a_resume_begins_anew_to_choose_the_best_if_the_task_measures_it_otherwise(own_code, single, tmp_path):
    """Scores of two scales do not compare: best.pt might never change again, or be a bad one."""
    own_code()
    single("a", *OWN, "2")
    own_code("headline, higher_is_better = 'loss', False")
    lines = single("a", *OWN, "4", "--resume", "auto")
    before, now = "the highest test_accuracy", "the lowest test_loss"
    text = f"warning: best.pt was the checkpoint of {before}; from here on, it is that of {now}"
    assert text in lines
    assert torch.load(tmp_path / "a/checkpoints/best.pt", weights_only=True)["position"]["step"] == 4
    result = read(tmp_path / "a", "result.json")
    assert result["best_test_loss"] == result["test_loss"]
    own_code("headline, higher_is_better = 'loss', False")
    assert text not in single("a", *OWN, "6", "--resume", "auto")


def some_tests():
    """Return TESTS test samples."""
    images, labels = torch.zeros(64, 1, 8, 8), torch.arange(64) % 4
    count = int(os.environ["TESTS"])
    test = images[:count], labels[:count]
    return {"train": (images, labels), "test": test, "target": "class", "num_classes": 4}


@pytest.mark.parametrize(("tests", "best_step"), [("8", 2), ("9", 4)])
def test_a_resume_begins_anew_to_choose_the_best_if_the_test_set_has_changed(
    tmp_path, single, monkeypatch, tests, best_step
):
    scores = {2: 0.9, 4: 0.5, 6: 0.4}
    monkeypatch.setattr(loop, "evaluate", lambda job, _: {"test_accuracy": scores[job.position.step]})
    argv = ("a", "--data", "tests.unit.test_resume:some_tests", "--global-batch-size", "8", "--max-steps")
    monkeypatch.setenv("TESTS", "8")
    single(*argv, "2")
    monkeypatch.setenv("TESTS", tests)
    text = "warning: best.pt was chosen on another test set; from here on, it is chosen on this one"
    assert (text in single(*argv, "4", "--resume", "auto")) == (best_step == 4)
    assert text not in single(*argv, "6", "--resume", "auto")
    assert torch.load(tmp_path / "a/checkpoints/best.pt", weights_only=True)["position"]["step"] == best_step
    assert read(tmp_path / "a", "result.json")["best_test_accuracy"] == scores[best_step]


def test_a_complete_run_stays_as_it_is_although_its_data_have_shrunk(tmp_path, single, monkeypatch):
    """Its steps are now more epochs than it has counted, and it must not go on to count them."""
    argv = ("a", "--data", "tests.unit.test_resume:growing", "--global-batch-size", "8", "--max-steps", "20")
    monkeypatch.setenv("SAMPLES", "64")
    single(*argv)
    before = contents(tmp_path / "a")
    monkeypatch.setenv("SAMPLES", "32")
    monkeypatch.setattr(loop, "evaluate", None)
    assert "is complete: nothing to train" in "".join(single(*argv, "--resume", "auto"))
    assert contents(tmp_path / "a") == before
