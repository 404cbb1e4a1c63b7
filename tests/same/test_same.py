"""make same on real runs: every planted bug is found and named, and scripts without one pass."""

import importlib.util
import os
import re
import sys

import pytest

from scripts.same import script_job
from scripts.same.__main__ import main
from scripts.same.causes import NOTES
from scripts.same.recorded_run import load
from tests.conftest import require
from tests.same.bugs import BUGS, RESUME, RIGHT, UNWRAPPED, plant
from tests.support import ROOT

pytestmark = pytest.mark.slow
GLOBAL_BATCH = ("--global-batch", "12")
LOCAL_BATCH = ("--", "--batch-size", "{local_batch}")
CHECKPOINT = ("--checkpoint", "{run_dir}/c.pt")
PAGES = {
    "single": (),
    "ddp": (),
    "scratch": (),
    "apex": ("--opt-level", "O0"),
    "pipeline": ("--stages", "{world_size}"),
}


def named(output):
    """Return the causes in a verdict, without notes."""
    return {cause for cause in re.findall(r"\[([a-z-]+)\]$", output, re.MULTILINE) if cause not in NOTES}


def shown(command):
    """Return the output that docs/same.md shows for a command, without measured differences."""
    page = (ROOT / "docs" / "same.md").read_text(encoding="utf-8")
    block = re.search(rf"^\$ make same {re.escape(command)}.*\n((?:.*\n)*?)```", page, re.MULTILINE)
    return without_measurements(block[1])


def without_measurements(text):
    text = re.sub(r"\d+\.\d+", lambda match: f"{float(match[0]):.3f}", text)  # last digits depend on the machine
    return re.sub(r"\de-\d+", "#e-#", text).strip().splitlines()


def test_the_right_script_gives_what_the_page_shows(capsys):
    status = main([str(RIGHT), *GLOBAL_BATCH, *RESUME, *LOCAL_BATCH, *CHECKPOINT])
    assert without_measurements(capsys.readouterr().out) == shown("SCRIPT=tests/same/right.py")
    assert status == 0


def test_a_batch_that_grows_with_the_processes_is_said(capsys):
    assert main([str(RIGHT), "--world-sizes", "1 2", "--", "--batch-size", "6"]) == 0
    output = capsys.readouterr().out
    assert "step 1, samples: 12, and 6 at 1 process" in output
    assert "[other-batch]" in output
    assert "[other-order]" not in output


def test_a_wrong_script_gives_what_the_page_shows(capsys, tmp_path):
    script = plant(BUGS["padded evaluation"].edits, tmp_path)
    assert main([str(script), *GLOBAL_BATCH, *LOCAL_BATCH]) == 1
    assert without_measurements(capsys.readouterr().out) == shown("SCRIPT=wrong.py")


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_named(capsys, tmp_path, name):
    bug = BUGS[name]
    script = str(plant(bug.edits, tmp_path))
    status = main(
        [script, *GLOBAL_BATCH, "--world-sizes", "1 2", *bug.options, *LOCAL_BATCH, *CHECKPOINT, *bug.argv]
    )
    output = capsys.readouterr()
    assert named(output.out) == {bug.cause}, output
    assert status == 1


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
def test_other_libraries_raise_no_alarm(capsys, library):
    require("bench", importlib.util.find_spec(library), f"{library} is not installed", "run `make bench` once")
    status = main([f"tests/same/with_{library}.py", *GLOBAL_BATCH, *LOCAL_BATCH])
    output = capsys.readouterr().out
    assert "gradients differ by up to" in output
    assert status == 0, output


def test_a_metric_that_is_not_named_as_one_of_an_evaluation_is_known_by_their_number(capsys, tmp_path):
    edits = {'print(f"test_loss {total[0]': """print(f"accuracy {total[0]"""}
    script = str(plant(edits | BUGS["padded evaluation"].edits, tmp_path))
    assert main([script, *GLOBAL_BATCH, "--world-sizes", "1 2", *LOCAL_BATCH]) == 1
    assert named(capsys.readouterr().out) == {"padded-evaluation"}


EXCHANGING = """class Exchanging(torch.optim.SGD):
    def step(self):
        for weight in model.parameters():
            weight.grad = weight.grad / world_size
            dist.all_reduce(weight.grad)
        super().step()


"""


@pytest.mark.parametrize("divisor", [" / world_size", ""])
def test_an_optimizer_that_exchanges_in_its_step_is_compared_by_its_updates(capsys, tmp_path, divisor):
    own = EXCHANGING.replace(" / world_size", divisor) + "optimizer = Exchanging("
    script = str(plant(UNWRAPPED | {"optimizer = torch.optim.SGD(": own}, tmp_path))
    status = main([script, *GLOBAL_BATCH, "--world-sizes", "1 2", *LOCAL_BATCH])
    output = capsys.readouterr().out
    assert named(output) == (set() if divisor else {"loss-scaled"}), output
    assert status == (not divisor)


def test_the_empty_step_by_which_torch_makes_an_optimizers_state_is_no_step(capsys, tmp_path):
    """torch.distributed.checkpoint.state_dict makes one before it loads a checkpoint."""
    load = '    optimizer.load_state_dict(state["optimizer"])\n'
    init = "    torch.distributed.checkpoint.state_dict._init_optim_state(optimizer)\n"
    module = "import torch.distributed as dist\n"
    edits = {load: init + load, module: module + "import torch.distributed.checkpoint.state_dict\n"}
    script = str(plant(edits, tmp_path))
    status = main([script, *GLOBAL_BATCH, "--world-sizes", "1 2", *RESUME, *LOCAL_BATCH, *CHECKPOINT])
    assert named(capsys.readouterr().out) == set()
    assert status == 0


def test_accumulation_raises_no_alarm(capsys):
    argv = [str(RIGHT), *GLOBAL_BATCH, "--world-sizes", "1 2", *LOCAL_BATCH, "--accumulate", "2"]
    assert main(argv) == 0
    assert named(capsys.readouterr().out) == set()


@pytest.mark.parametrize(
    "launcher", [(), ("--launch", f"{sys.executable} -m torch.distributed.run --nproc-per-node {{world_size}}")]
)
def test_a_script_without_a_seed_raises_no_alarm(capsys, tmp_path, launcher):
    script = str(plant({"torch.manual_seed(0)\n": "", "torch.manual_seed(100 + rank)\n": ""}, tmp_path))
    status = main([script, *GLOBAL_BATCH, "--world-sizes", "1 2", *launcher, *LOCAL_BATCH])
    output = capsys.readouterr().out
    assert "same to rounding at 1 and 2 processes\n  gradients differ by up to" in output
    assert "[" not in output, output
    assert status == 0


@pytest.mark.parametrize("method", ["", "forkserver"])
def test_an_evaluation_between_batches_that_workers_have_drawn_raises_no_alarm(capsys, tmp_path, method):
    """All ranks evaluate the same samples, which are no training samples; those are padded to 50."""
    evaluate = """            mean = torch.zeros(())
            with torch.no_grad():
                for points, labels in DataLoader(test, 5) if i == 2 else ():
                    print(f"test_loss {cross_entropy(model(points), labels).item():.6f}")
    model.eval()"""
    edits = {"Points(48,": "Points(49,", "sampler=sampler)": "sampler=sampler, num_workers=2)"}
    edits |= {"            mean = torch.zeros(())\n    model.eval()": evaluate}
    if method:  # the default from Python 3.14 on
        context = (
            f"multiprocessing.context._default_context._default_context = multiprocessing.get_context('{method}')"
        )
        edits |= {"import torch\n": f"import multiprocessing\n{context}\nimport torch\n"}
    script = str(plant(edits, tmp_path))
    assert main([script, *GLOBAL_BATCH, "--world-sizes", "1 2", *LOCAL_BATCH]) == 0
    assert named(capsys.readouterr().out) == set()


def test_a_script_that_prints_no_loss_or_fails_is_refused(capsys, tmp_path):
    path = tmp_path / "script.py"
    for text, error in (
        ("print('epoch 1 done')", f"SCRIPT {path} prints no loss that can be read; print `loss 2.3` in a line"),
        (
            "raise OSError('no data')",
            f"SCRIPT {path} fails at 1 process, after step 0: OSError: no data (script.py:1); fix it",
        ),
    ):
        path.write_text(text)
        assert main([str(path)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith(f"error: {error}")


SILENT = {'print(f"loss {mean': 'print(f"value {mean', 'print(f"test_loss': 'print(f"result'}


def test_the_steps_of_a_script_that_prints_no_loss_are_compared(capsys, tmp_path):
    script = str(plant(SILENT, tmp_path))
    assert main([script, *GLOBAL_BATCH, "--world-sizes", "1 2", *LOCAL_BATCH]) == 0
    output = capsys.readouterr().out
    assert "no difference found, but not all was compared, at 1 and 2 processes\n  gradients differ by" in output
    assert re.findall(r"\[([a-z-]+)\]$", output, re.MULTILINE) == ["not-printed"]
    script = str(plant(SILENT | BUGS["no exchange"].edits, tmp_path))
    assert main([script, *GLOBAL_BATCH, "--world-sizes", "1 2", *LOCAL_BATCH]) == 1
    assert named(capsys.readouterr().out) == {"not-synchronised"}


def test_a_script_that_goes_on_from_the_run_before_is_refused(capsys, tmp_path):
    argv = [
        str(RIGHT),
        *GLOBAL_BATCH,
        "--world-sizes",
        "1 2",
        *LOCAL_BATCH,
        "--checkpoint",
        str(tmp_path / "c.pt"),
    ]
    fix = "if it goes on from a file of an earlier run, let it keep its files in {run_dir}"
    for what in (
        "does 12 steps, and none when it is started again",
        "prints no loss that can be read; print `loss 2.3` in a line, or give LOSS='(regular expression)'",
    ):
        assert main(argv) == 2
        assert capsys.readouterr().err == f"error: SCRIPT {RIGHT} {what}; {fix}\n"


@pytest.mark.parametrize(
    ("first_epoch", "what"),
    [
        ('state["epoch"] - 1', "does 12 steps, and 4 when it is started again"),
        ("0", "begins with other weights when it is started again"),
    ],
)
def test_a_script_that_repeats_epochs_of_the_run_before_is_refused(capsys, tmp_path, first_epoch, what):
    script = plant({'first_epoch = state["epoch"]': f"first_epoch = {first_epoch}"}, tmp_path)
    checkpoint = ("--checkpoint", str(tmp_path / "c.pt"))
    assert main([str(script), *GLOBAL_BATCH, "--world-sizes", "1 2", *LOCAL_BATCH, *checkpoint]) == 2
    assert capsys.readouterr().err.startswith(f"error: SCRIPT {script} {what}; if it goes on from a file")


@pytest.mark.parametrize("launcher", ["", sys.executable])
def test_a_loss_is_read_from_the_report(tmp_path, launcher):
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text("import os\nprint('loss 2.5', file=open(os.environ['SAME_REPORT'], 'a'))\n")
    assert script_job.run([str(script)], launcher, 1, folder, 60) == [0]
    assert load(folder, 1, [0]).series["loss"].values == [2.5]


@pytest.mark.parametrize("launcher", ["", sys.executable])
def test_a_loss_is_read_from_a_script_that_ends_without_a_flush(tmp_path, launcher):
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text("import os\nprint('loss 2.5')\nos._exit(0)\n")
    assert script_job.run([str(script)], launcher, 1, folder, 60) == [0]
    assert load(folder, 1, [0]).series["loss"].values == [2.5]


def test_of_ranks_that_all_print_one_is_read_under_a_launcher(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text("print('loss 2.5')\n")
    launcher = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2"
    assert script_job.run([str(script)], launcher, 2, folder, 60) == [0]
    assert load(folder, 2, [0]).series["loss"].values == [2.5]


def test_what_a_launcher_says_is_its_error(tmp_path):
    launcher = f"{sys.executable} -c 'raise SystemExit(\"no such host\")'"
    assert script_job.run(["script.py"], launcher, 2, tmp_path / "run", 60) == [1]
    assert load(tmp_path / "run", 2, [1]).error == "no such host"


@pytest.mark.parametrize("launcher", ["", os.path.relpath(sys.executable)])
def test_the_script_runs_in_workdir(tmp_path, launcher):
    script, folder = tmp_path / "script", tmp_path / "run"
    script.write_text("print('loss', open('value').read())\n")
    (tmp_path / "value").write_text("2.5")
    assert script_job.run([str(script)], launcher, 1, folder, 60, WORKDIR=str(tmp_path)) == [0]
    assert load(folder, 1, [0]).series["loss"].values == [2.5]


def test_a_script_may_import_a_package_named_like_one_of_this_repository(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/__init__.py").touch()
    (tmp_path / "scripts/settings.py").write_text("LOSS = 2.5\n")
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text("from scripts.settings import LOSS\nprint('loss', LOSS)\n")
    assert script_job.run([str(script)], "", 1, folder, 60) == [0]
    assert load(folder, 1, [0]).series["loss"].values == [2.5]


def test_ranks_that_wait_for_each_other_are_ended(capsys, tmp_path):
    script = str(plant({"    dist.all_reduce(total)\n": "    rank and dist.all_reduce(total)\n"}, tmp_path))
    argv = [script, *GLOBAL_BATCH, "--world-sizes", "1 2", "--timeout-s", "15", *LOCAL_BATCH]
    assert main(argv) == 1
    assert named(capsys.readouterr().out) & {"hung", "failed"}
