"""The fire drill's own sums: what it draws, what it compares, and when it is red."""

import json
import os
import subprocess
import tempfile
import types
from unittest.mock import Mock

import psutil
import pytest

from recipes.common.errors import UserError
from scripts.drill import __main__ as drill
from scripts.drill import faults as plants
from scripts.drill import trial
from scripts.drill.faults import FAULTS, NotSurvivedError
from scripts.drill.job import Steps
from scripts.drill.trial import Figures
from scripts.launch.runs import measured_on
from tests.support import run_command


def names(*words, has_network=False):
    return drill.choose(drill.parse_args(words), has_network)[0]


def test_what_an_interrupted_pip_has_left_hides_no_versions(tmp_path, monkeypatch):
    (tmp_path / "left-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert list(measured_on("pytest", "no-such-package")["versions"]) == ["python", "pytest"]


@pytest.mark.parametrize("words", [(), ("--rounds", "100")])
def test_without_networks_the_faults_of_links_are_left_out_with_the_reason(words):
    faults, reasons = drill.choose(drill.parse_args(words), False)
    assert set(reasons) >= {"cut-10s", "cut", "loss", "narrow", "cut-node"}
    assert not set(faults) & set(reasons)
    assert words or faults == [name for name in FAULTS if name not in reasons]


def test_a_soak_is_drawn_from_the_seed():
    soak = names("--rounds", "50", "--seed", "3")
    assert len(soak) == 50
    assert len(set(soak)) > 5
    assert soak == names("--rounds", "50", "--seed", "3") != names("--rounds", "50", "--seed", "4")
    assert set(names("truncate", "two", "--rounds", "20")) == {"truncate", "two"}


def test_a_trial_draws_the_same_again(tmp_path):
    def draw(seed, folder):
        folder.mkdir()
        setting = trial.Setting(3, seed, 400, folder, None)
        chance = trial.Trial(setting, "kill-rank", 1, tmp_path).chance
        return [chance.random() for _ in range(3)]

    assert draw(1, tmp_path / "a") == draw(1, tmp_path / "b") != draw(2, tmp_path / "c")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("kil-rank",), "did you mean 'kill-rank'?"),
        (("--plain", "cut"), "cut cannot be planted here: "),
        (("--steps", "83"), "--steps: a fault needs four checkpoints, 84 steps, got 83"),
        (("--nodes", "1"), "NODES: a drill needs at least 2 nodes, got 1"),
        (("--seed", "x"), "SEED expects a whole number of at least 0, got 'x'"),
        (("--rounds", "many"), "ROUNDS expects a whole number"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(words, refusal, capsys):
    assert drill.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert refusal in error


def test_make_drill_passes_its_variables_on():
    result = run_command("make", "drill", "FAULTS=kill-rank nonsense", "SEED=1", "ROUNDS=2")
    assert result.status == 2
    assert "error: FAULTS: invalid choice 'nonsense'" in result.stderr


@pytest.mark.parametrize(("failure", "status"), [("", 0), ("weights differ", 1)])
def test_it_is_red_when_a_fault_was_not_survived(tmp_path, monkeypatch, capsys, failure, status):
    done = [Figures("kill-rank", noticed_s=1.0), Figures("stop-rank", failure=failure)]
    monkeypatch.setattr(drill, "run_all", lambda *_: done)
    assert drill.main(["--plain", "kill-rank", "stop-rank", "--seed", "5", "--runs-dir", str(tmp_path)]) == status
    report = json.loads((tmp_path / "drill-001/drill.json").read_text())
    assert [fault["survived"] for fault in report["faults"]] == [True, not failure]
    assert report["seed"] == 5
    assert ("error: not survived: 002-stop-rank; again: SEED=5" in capsys.readouterr().err) == bool(failure)


def test_ctrl_c_leaves_no_files_of_killed_jobs(tmp_path, monkeypatch):
    def run_all(*_):
        tempfile.mkdtemp(prefix="cluster-recipes-", dir=os.environ["TMPDIR"])
        raise KeyboardInterrupt

    monkeypatch.setattr(drill, "run_all", run_all)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert drill.main(["--plain", "--runs-dir", str(tmp_path / "runs")]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    job = Mock(wait=Mock(side_effect=KeyboardInterrupt))
    setting = types.SimpleNamespace(folder=tmp_path, launch=lambda *_: job)
    with pytest.raises(KeyboardInterrupt):
        drill.undisturbed(setting, "kill-rank")
    job.kill.assert_called_once_with()


def test_an_interrupt_leaves_a_whole_report(tmp_path, monkeypatch):
    """A link keeps the earlier report only if the next one is another file, written before it takes the name."""

    def run_all(setting, names):
        yield Figures("kill-rank")
        (tmp_path / "earlier").hardlink_to(setting.folder / "drill.json")
        yield Figures("stop-rank")

    monkeypatch.setattr(drill, "run_all", run_all)
    assert drill.main(["--plain", "--runs-dir", str(tmp_path)]) == 0
    reports = [json.loads(path.read_text()) for path in (tmp_path / "earlier", tmp_path / "drill-001/drill.json")]
    assert [len(report["faults"]) for report in reports] == [1, 2]


def record(folder, losses):
    folder.mkdir()
    lines = [{"step": step, "loss": loss} for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_missing_step_is_no_equal_curve(tmp_path):
    whole = trial.read_losses(record(tmp_path / "a", {1: 2.0, 2: 1.0}))
    assert trial.largest_difference(whole, whole) == 0
    assert trial.largest_difference({1: 2.0, 2: 1.001}, whole) == pytest.approx(1e-3)
    assert trial.largest_difference({1: 2.0}, whole) == float("inf")
    assert trial.largest_difference({1: 0.0}, {1: 0.0}) == 0
    assert trial.largest_difference({1: 0.5}, {1: 0.0}) == float("inf")


def test_an_undisturbed_job_that_takes_too_long_is_told_apart_from_one_that_failed(tmp_path, monkeypatch):
    job = types.SimpleNamespace(wait=lambda timeout_s: None, kill=lambda: None, text="")
    setting = trial.Setting(2, 0, 400, tmp_path, None)
    monkeypatch.setattr(trial.Setting, "launch", lambda self, *args: job)
    with pytest.raises(UserError, match="did not end within 300 s; lower --steps"):
        drill.undisturbed(setting, "kill-rank")


def test_pauses_and_first_steps(tmp_path):
    steps = Steps(tmp_path)
    steps.end()
    steps.seen = [(0.0, 1), (1.0, 2), (5.0, 3), (5.5, 1), (6.0, 4)]
    assert steps.longest_pause(since=0.5) == 4.0
    assert steps.longest_pause(since=4.5) == 0.5
    assert steps.first_after(5.0, above=1) == 6.0
    assert steps.first_after(6.0) is None


def test_more_lost_steps_than_an_interval_are_a_failure(tmp_path):
    one = trial.Trial(trial.Setting(2, 0, 400, tmp_path, None), "kill-rank", 1, tmp_path)
    one.run_dir.mkdir()
    (one.run_dir / "config.json").write_text(json.dumps({"launches": [{"step": 0}, {"step": 40}]}))
    one._count_lost(60, -1)
    assert one.figures.steps_lost == 20
    with pytest.raises(NotSurvivedError, match="21 steps lost, more than 20"):
        one._count_lost(61, -1)


def test_an_elastic_job_without_a_second_round_has_not_survived(tmp_path):
    one = trial.Trial(trial.Setting(2, 0, 400, tmp_path, None), "lose-rank", 1, tmp_path)
    answers = [True, False]  # the loss is noticed, but the job ends before a second round
    one.job = types.SimpleNamespace(text="", wait_for=lambda condition, timeout_s: answers.pop(0))
    one.steps = types.SimpleNamespace(seen=[(0.0, 30)])
    one.lines_before = 0
    with pytest.raises(NotSurvivedError, match="no second round began"):
        one._wait_for_round()


def test_a_rank_is_killed_in_a_save_before_its_checkpoint_is_whole(tmp_path, monkeypatch):
    folder, calls = tmp_path / "checkpoints", []
    folder.mkdir()

    def write(step, ending):
        (folder / f"step-{step:09d}{ending}").touch()

    def wait_for(condition, timeout_s):
        step = 20 * len(calls) or 20
        write(step, "-00000-0123abcd.shard")
        assert not condition(), "the file is another rank's, or of a checkpoint that is whole"
        write(step, "-00001-0123abcd.shard")
        return condition()

    def sleep(seconds):
        if calls == ["SIGSTOP"]:  # the rank had written its part, and rank 0 completes the checkpoint
            write(20, ".pt")

    monkeypatch.setattr(plants.time, "sleep", sleep)
    process = types.SimpleNamespace(send_signal=lambda number: calls.append(number.name))
    job = types.SimpleNamespace(wait_for=wait_for)
    one = types.SimpleNamespace(run_dir=tmp_path, pick_rank=lambda: (1, process), job=job)
    assert plants.kill_in_save(one) == "rank 1, before step-000000040.pt"
    assert calls == ["SIGSTOP", "SIGCONT", "SIGSTOP", "SIGKILL"]


def test_a_storm_lasts_a_second_from_its_first_signal(monkeypatch):
    """On a busy machine, finding the job's processes takes longer than that."""
    now, sent = [0.0], []

    def pass_time(seconds):
        now[0] += seconds

    def processes(text):
        pass_time(2.0)
        return [types.SimpleNamespace(send_signal=sent.append)]

    monkeypatch.setattr(plants.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(plants.time, "sleep", pass_time)
    job = types.SimpleNamespace(processes=processes, ranks=dict)
    assert plants.storm(types.SimpleNamespace(job=job)) == f"{len(sent)} signals"
    assert 49 <= len(sent) <= 51


def gone(number):
    raise psutil.NoSuchProcess(7)


GONE = types.SimpleNamespace(send_signal=gone, pid=7)


class Network:
    """Links over which a job sends nothing, or which it can do without."""

    def __init__(self, *sent):
        self.sent, self.calls = [*sent, 0, 0], []

    def sent_bytes(self, node):
        return self.sent.pop(0)

    def cut(self, node):
        self.calls.append("cut")

    def restore(self, node):
        self.calls.append("restore")


@pytest.mark.parametrize(
    ("name", "network", "reason"),
    [
        ("kill-rank", None, "rank 1 had ended"),
        ("stop-rank", None, "rank 1 had ended"),
        ("kill-agent", None, "scripts.launch.agent of node 1 had ended"),
        ("lose-node", None, "scripts.launch.rejoin of node 1 had ended"),
        ("stop-node", None, "node 1 had ended"),
        ("two", None, "had ended"),
        ("usr1-storm", None, "the job had ended"),
        ("preempt", None, "no checkpoint was caught while it was written"),
        ("kill-shard", None, "no checkpoint was caught while it was written"),
        ("clock", None, "no agent of node 1 has loaded drill-clock.so"),
        ("narrow", Network(0), "the job does not use the link of node 1"),
        ("cut-10s", Network(0, 50_000), "the job continued without the link"),
    ],
)
def test_a_job_that_was_not_hit_has_survived_nothing(tmp_path, monkeypatch, name, network, reason):
    """It does not end the drill either: later faults are still planted."""
    monkeypatch.setattr(plants.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(plants.time, "monotonic", iter(range(10**6)).__next__)
    one = trial.Trial(trial.Setting(2, 0, 400, tmp_path, network), name, 1, tmp_path)
    steps = iter(range(100, 200))
    one.steps = types.SimpleNamespace(last=lambda: next(steps), end=lambda: None)
    one.pick_node = lambda: 1
    if name != "usr1-storm":
        one.pick_rank = lambda: (1, GONE)
    one.job = types.SimpleNamespace(
        processes=lambda text: [GONE],
        ranks=lambda: {1: GONE},
        of_node=lambda node, text="": [] if name == "clock" else [GONE],
        wait_for=lambda condition, timeout_s: condition(),
        kill=lambda: None,
    )
    with pytest.raises(NotSurvivedError, match=f"not planted: .*{reason}"):
        one.fault.plant(one)
    assert "restore" not in (network.calls if network else [])
    one.repair()
    assert (network.calls if network else []) == (["cut", "restore"] if name == "cut-10s" else [])


def test_a_rank_is_drawn_of_those_that_run(tmp_path):
    one = trial.Trial(trial.Setting(4, 0, 400, tmp_path, None), "kill-rank", 1, tmp_path)
    one.chance = types.SimpleNamespace(randrange=lambda nodes: 3)
    ranks = {0: "process 0", 2: "process 2"}
    one.job = types.SimpleNamespace(ranks=lambda: ranks)
    assert one.pick_rank() == (2, "process 2")
    ranks.clear()
    with pytest.raises(NotSurvivedError, match="not planted: all ranks had ended"):
        one.pick_rank()


def test_a_trial_that_breaks_is_a_failure_and_no_end_of_the_drill(tmp_path, monkeypatch):
    one = trial.Trial(trial.Setting(2, 0, 400, tmp_path, None), "kill-rank", 1, tmp_path)
    one.launch = lambda: setattr(one, "job", types.SimpleNamespace(kill=lambda: None))
    for error, words in (
        (NotSurvivedError("not planted: rank 1 had ended"), "not planted: rank 1 had ended"),
        (IndexError("list index out of range"), "IndexError: list index out of range"),
        (psutil.NoSuchProcess(7), "NoSuchProcess: process no longer exists (pid=7)"),
    ):
        monkeypatch.setattr(one, "_plant", Mock(side_effect=error))
        assert one.run().failure == words


def test_ranks_that_start_again_have_not_gone_on(monkeypatch, tmp_path):
    """A job that takes a node for lost ends well, too, in a second round."""
    one = trial.Trial(trial.Setting(2, 0, 400, tmp_path, None), "clock", 1, tmp_path)
    one.job = types.SimpleNamespace(wait=lambda bound_s: 0, left_over=list)
    one.steps = types.SimpleNamespace(longest_pause=lambda planted: 0.5)
    monkeypatch.setattr(trial.Trial, "launches", [{"step": 0}])
    assert one._wait_undisturbed() == 0
    monkeypatch.setattr(trial.Trial, "launches", [{"step": 0}, {"step": 60}])
    with pytest.raises(NotSurvivedError, match="its ranks were started again"):
        one._wait_undisturbed()


def test_a_fault_that_cannot_be_prepared_is_not_survived(monkeypatch, tmp_path):
    """The others are still planted, and nothing that was not done is undone."""
    monkeypatch.setattr(plants, "prepare_clock", Mock(side_effect=subprocess.CalledProcessError(1, ["cc"])))
    one = trial.Trial(trial.Setting(2, 0, 400, tmp_path, None), "clock", 1, tmp_path)
    assert one.run().failure.startswith("CalledProcessError: Command '['cc']' returned")
