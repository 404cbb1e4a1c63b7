"""make same on real runs: every planted bug is found and named, and scripts without one pass."""

import importlib.util
import os
import re
import signal
import sys

import pytest

from scripts.same import script_job
from scripts.same.__main__ import main
from scripts.same.causes import NOTES
from scripts.same.recorded_run import load
from tests.conftest import require
from tests.same.bugs import BUGS, NO_BUGS, PADDED, RESUME, RESUME_BUGS, RIGHT, SHARE, UNWRAPPED, plant
from tests.support import ROOT, Command, Result, has_ended, start_and_signal, wait_until, write_program

pytestmark = pytest.mark.slow
CHECKPOINT = ("--checkpoint", "{run_dir}/c.pt")
PAGES = dict.fromkeys(("single", "ddp", "scratch"), ())
PAGES |= {"apex": ("--opt-level", "O0"), "pipeline": ("--stages", "{world_size}")}


@pytest.fixture
def same(capsys):
    """Return a function that runs `make same`, by default at 1 and 2 processes; it returns status and output."""

    def run(script, *options, argv=()):
        batch, sizes = ("--global-batch", "12"), ("--world-sizes", "1 2")
        status = main([str(script), *batch, *sizes, *options, "--", "--batch-size", "{local_batch}", *argv])
        output = capsys.readouterr()
        return status, output.out + output.err

    return run


def causes(output):
    """Return the causes in a verdict, with notes."""
    return set(re.findall(r"\[([a-z-]+)\]$", output, re.MULTILINE))


def named(output):
    """Return the causes in a verdict, without notes."""
    return causes(output) - set(NOTES)


def shown(command):
    """Return the output that docs/same.md shows for a command, without measured differences."""
    page = (ROOT / "docs" / "same.md").read_text(encoding="utf-8")
    block = re.search(rf"^\$ make same {re.escape(command)}.*\n((?:.*\n)*?)```", page, re.MULTILINE)
    return without_measurements(block[1])


def without_measurements(text):
    text = re.sub(r"\d+\.\d+", lambda match: f"{float(match[0]):.3f}", text)  # last digits depend on the machine
    return re.sub(r"\de-\d+", "#e-#", text).strip().splitlines()


def test_the_right_script_gives_what_the_page_shows(same):
    status, output = same(RIGHT, "--world-sizes", "1 2 3", *RESUME, argv=CHECKPOINT)
    assert without_measurements(output) == shown("SCRIPT=tests/same/right.py")
    assert status == 0


def test_a_batch_that_grows_with_the_processes_is_said(capsys):
    assert main([str(RIGHT), "--world-sizes", "1 2", "--", "--batch-size", "6"]) == 0
    output = capsys.readouterr().out
    assert "step 1, samples: 12, and 6 at 1 process" in output
    assert "[other-batch]" in output
    assert "[other-order]" not in output


def test_a_wrong_script_gives_what_the_page_shows(same, tmp_path):
    script = plant({SHARE: PADDED}, tmp_path)
    status, output = same(script, "--world-sizes", "1 2 3")
    assert without_measurements(output) == shown("SCRIPT=wrong.py")
    assert status == 1


PLANTED = [
    pytest.param(cause, edits, options, id=name)
    for options, group in (((), BUGS), (RESUME, RESUME_BUGS))
    for cause, bugs in group.items()
    for name, edits in bugs.items()
]


@pytest.mark.parametrize(("cause", "edits", "options"), PLANTED)
def test_a_planted_bug_is_named(same, tmp_path, cause, edits, options):
    status, output = same(plant(edits, tmp_path), *options, argv=CHECKPOINT)
    assert named(output) == {cause}, output
    assert status == 1


@pytest.mark.parametrize("edits", NO_BUGS.values(), ids=NO_BUGS)
def test_what_is_no_bug_raises_no_alarm(same, tmp_path, edits):
    status, output = same(plant(edits, tmp_path), *RESUME, argv=CHECKPOINT)
    assert named(output) == set(), output
    assert status == 0


@pytest.mark.parametrize("page", PAGES)
def test_the_one_page_recipes_raise_no_alarm(capsys, monkeypatch, page):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "stand_in"))  # apex.amp itself needs a GPU
    sizes = ("--world-sizes", "1 2 3" if page == "ddp" else "1 3")
    status = main([f"recipes/{page}/minimal.py", *sizes, "--", "--epochs", "1", "--log-every", "1", *PAGES[page]])
    output = capsys.readouterr().out
    assert output.count("     22  ") == len(sizes[1].split())
    assert "same to rounding at 1" in output
    assert status == 0


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_other_libraries_raise_no_alarm(same, library):
    require("bench", importlib.util.find_spec(library), f"{library} is not installed", "run `make bench` once")
    status, output = same(f"tests/same/with_{library}.py", "--world-sizes", "1 2 3")
    assert "gradients differ by up to" in output
    assert status == 0, output


def test_a_metric_that_is_not_named_as_one_of_an_evaluation_is_known_by_their_number(same, tmp_path):
    edits = {'print(f"test_loss {total[0]': """print(f"accuracy {total[0]"""}
    status, output = same(plant(edits | {SHARE: PADDED}, tmp_path))
    assert named(output) == {"padded-evaluation"}
    assert status == 1


@pytest.mark.parametrize(
    "launcher", [(), ("--launch", f"{sys.executable} -m torch.distributed.run --nproc-per-node {{world_size}}")]
)
def test_a_script_without_a_seed_raises_no_alarm(same, tmp_path, launcher):
    script = plant({"torch.manual_seed(0)\n": "", "torch.manual_seed(100 + rank)\n": ""}, tmp_path)
    status, output = same(script, *launcher)
    assert "same to rounding at 1 and 2 processes\n  gradients differ by up to" in output
    assert "[" not in output, output
    assert status == 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("print('epoch 1 done')", "prints no loss that can be read; print `loss 2.3` in a line"),
        ("raise OSError('no data')", "fails at 1 process, after step 0: OSError: no data (script.py:1); fix it"),
    ],
)
def test_a_script_that_prints_no_loss_or_fails_is_refused(capsys, tmp_path, text, error):
    path = tmp_path / "script.py"
    path.write_text(text)
    assert main([str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: SCRIPT {path} {error}")


def test_the_steps_of_a_script_that_prints_no_loss_are_compared(same, tmp_path):
    silent = {'print(f"loss {mean': 'print(f"value {mean', 'print(f"test_loss': 'print(f"result'}
    status, output = same(plant(silent, tmp_path))
    assert "no difference found, but not all was compared, at 1 and 2 processes\n  gradients differ by" in output
    assert causes(output) == {"not-printed"}
    assert status == 0
    status, output = same(plant(silent | UNWRAPPED, tmp_path))
    assert named(output) == {"not-synchronised"}
    assert status == 1


def test_a_script_that_goes_on_from_the_run_before_is_refused(same, tmp_path):
    fix = "if it goes on from a file of an earlier run, let it keep its files in {run_dir}"
    for what in (
        "does 12 steps, and none when it is started again",
        "prints no loss that can be read; print `loss 2.3` in a line, or give LOSS='(regular expression)'",
    ):
        refusal = same(RIGHT, argv=("--checkpoint", str(tmp_path / "c.pt")))
        assert refusal == (2, f"error: SCRIPT {RIGHT} {what}; {fix}\n")


@pytest.mark.parametrize(
    ("first_epoch", "what"),
    [
        ('state["epoch"] - 1', "does 12 steps, and 4 when it is started again"),
        ("0", "begins with other weights when it is started again"),
    ],
)
def test_a_script_that_repeats_epochs_of_the_run_before_is_refused(same, tmp_path, first_epoch, what):
    script = plant({'first_epoch = state["epoch"]': f"first_epoch = {first_epoch}"}, tmp_path)
    status, output = same(script, argv=("--checkpoint", str(tmp_path / "c.pt")))
    assert status == 2
    assert output.startswith(f"error: SCRIPT {script} {what}; if it goes on from a file")


@pytest.fixture
def losses_of(tmp_path):
    """Return a function that runs a script and returns the losses that are read from what its ranks print."""

    def run(text, launcher="", world_size=1, **variables):
        script, folder = tmp_path / "script", tmp_path / "run"
        script.write_text(text)
        assert script_job.run([str(script)], launcher, world_size, folder, 60, **variables) == [0]
        return load(folder, world_size, [0]).series["loss"].values

    return run


@pytest.mark.parametrize("launcher", ["", sys.executable])
@pytest.mark.parametrize(
    "line", ["print('loss 2.5', file=open(os.environ['SAME_REPORT'], 'a'))", "print('loss 2.5')"]
)
def test_a_loss_is_read_from_the_report_and_from_a_script_that_ends_without_a_flush(losses_of, launcher, line):
    assert losses_of(f"import os\n{line}\nos._exit(0)\n", launcher) == [2.5]


def test_of_ranks_that_all_print_one_is_read_under_a_launcher(losses_of):
    launcher = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2"
    assert losses_of("print('loss 2.5')\n", launcher, 2) == [2.5]


def test_what_a_launcher_says_is_its_error(tmp_path):
    launcher = f"{sys.executable} -c 'raise SystemExit(\"no such host\")'"
    assert script_job.run(["script.py"], launcher, 2, tmp_path / "run", 60) == [1]
    assert load(tmp_path / "run", 2, [1]).error == "no such host"


@pytest.mark.parametrize("launcher", ["", os.path.relpath(sys.executable)])
def test_the_script_runs_in_workdir(losses_of, tmp_path, launcher):
    (tmp_path / "value").write_text("2.5")
    assert losses_of("print('loss', open('value').read())\n", launcher, WORKDIR=str(tmp_path)) == [2.5]


def test_a_script_may_import_a_package_named_like_one_of_this_repository(losses_of, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/__init__.py").touch()
    (tmp_path / "scripts/settings.py").write_text("LOSS = 2.5\n")
    assert losses_of("from scripts.settings import LOSS\nprint('loss', LOSS)\n") == [2.5]


def test_ranks_that_wait_for_each_other_are_ended(same, tmp_path):
    script = plant({"    dist.all_reduce(total)\n": "    rank and dist.all_reduce(total)\n"}, tmp_path)
    status, output = same(script, "--timeout-s", "15")
    assert named(output) & {"hung", "failed"}
    assert status == 1


def test_a_launcher_that_hangs_leaves_no_rank_behind(tmp_path):
    """A rank of horovodrun has a session of its own."""
    lines = f"#!/bin/sh\nsetsid sleep 60 &\necho $! >{tmp_path}/rank\nwait\n"
    launcher = write_program(tmp_path / "launcher", lines)
    (tmp_path / "run").mkdir()
    assert script_job.run_launcher([launcher], os.environ, tmp_path / "run", 2) is None
    rank = int((tmp_path / "rank").read_text())
    wait_until(lambda: has_ended(rank), 10, "no rank")


def test_ctrl_c_leaves_no_rank_and_no_file_behind(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "tmp"
    folder.mkdir()
    script.write_text(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"open({str(tmp_path / 'started')!r}, 'w')\ntime.sleep(600)\n"
    )
    command = Command(sys.executable, "-m", "scripts.same", str(script), TMPDIR=str(folder))
    wait_until((tmp_path / "started").exists, 60, lambda: command.text)
    os.killpg(command.process.pid, signal.SIGINT)
    result = command.wait()
    assert (result.status, result.stdout + result.stderr) == (130, "")
    assert list(folder.glob("cluster-recipes-*")) == []


def test_ctrl_c_while_the_fork_server_starts_leaves_no_traceback(tmp_path):
    (tmp_path / "script.py").touch()
    words = (str(tmp_path / "script.py"), "--global-batch", "48", "--", "--batch-size", "{local_batch}")
    result = start_and_signal("forkserver", "os.killpg(0, 2)", "scripts.same", *words).wait()
    assert result == Result(130, "", "")
