"""Each minimal.py: it stands alone on one page, and trains, evaluates and resumes as the full recipes do.

Their losses are compared with those of recipes/single/train.py, with which other tests compare every train.py,
with the pages' seed and order of samples. The tolerance is 1e-5 relative, as in test_contract.py.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
import sys
import textwrap
from dataclasses import dataclass

import pytest
import torch

from tests.conftest import need_horovod
from tests.page import run_page, shuffle_as_the_pages
from tests.support import PROGRAMS, ROOT, Ranks, losses, metrics, run_command, run_ranks, train

ON_DIGITS = ["single", "dataparallel", "ddp", "spawn", "horovod", "apex", "fsdp", "tensor", "pipeline", "scratch"]
PAGES = [*ON_DIGITS, "context"]
"""The last one trains a GPT: test_context.py compares its losses."""
PARENTS = {"dataparallel": "single", "ddp": "single"} | dict.fromkeys(ON_DIGITS[3:], "ddp")
MOST_CHANGED = {"apex": 40, "fsdp": 46, "tensor": 60, "pipeline": 53, "scratch": 51}
"""Number of lines by which a page may differ from its parent; 40 by default."""

OWN_LIBRARIES = {"horovod": {"horovod"}, "apex": {"apex"}}
ALLOWED = {*sys.stdlib_module_names, "torch", "torchvision", "sklearn", "numpy"}

SEED = "1"
"""The pages'. With 0, a ReLU's input is so near 0 at step 64 that rounding differs: losses then differ by 3%."""
EPOCHS, STEPS_PER_EPOCH = 5, 1437 // 64
RUNS = [*((page, 1) for page in ON_DIGITS), ("tensor", 3), ("pipeline", 3)]
"""Pages and numbers of processes, which share a replica; the tests of resuming use 2 and 3 (or 4) processes."""

EVERY_STEP = ["--log-every", "1"]


@dataclass(frozen=True)
class Run:
    """The output of a page."""

    losses: dict[int, float]
    """Losses by step, counted from 1."""
    evaluations: dict[int, tuple[float, float]]
    """Loss and accuracy on the test set, by epoch."""
    result: tuple[str, int, float]
    """The recipe, the world size and the accuracy in the last line."""


def read(text):
    steps = re.findall(r"^step (\d+) loss (\S+)$", text, re.MULTILINE)
    epochs = re.findall(r"^epoch (\d+) test_loss (\S+) test_accuracy (\S+)$", text, re.MULTILINE)
    fields = r"recipe=(\w+) world_size=(\d+) test_accuracy=(0\.\d{4}) samples_per_s=\d+"
    result = re.fullmatch(f"result {fields}", text.splitlines()[-1])
    assert result, text
    return Run(
        {int(step): float(loss) for step, loss in steps},
        {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in epochs},
        (result[1], int(result[2]), float(result[3])),
    )


def options_of(page, world_size, stages):
    """Return a page's options for a number of processes, and the number that the launcher starts."""
    own = {
        "spawn": ["--nproc-per-node", str(world_size)],
        "apex": ["--opt-level", "O0"],
        "tensor": ["--tensor-parallel", str(stages)],
        "pipeline": ["--stages", str(stages)],
    }
    return own.get(page, []), 1 if page == "spawn" else world_size


def run(page, folder, world_size, argv, run_page=run_page, **env):
    """Run a page until it ends; return rank 0's output. The other ranks print no losses."""
    env = {"OMP_NUM_THREADS": "1", **env}
    setup = functools.partial(run_page, page, [*argv, *EVERY_STEP])
    outcome = run_ranks(page, [], world_size, folder, setup=setup, **env)
    assert not any("loss" in output for output in outcome.outputs[1:])
    return read(outcome.outputs[0])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return the run of recipes/single/train.py with the pages' seed and order of samples."""
    path, argv = tmp_path_factory.mktemp("reference"), ("--epochs", str(EPOCHS), "--seed", SEED)
    folder = train("single", path, 1, *argv, setup=shuffle_as_the_pages)
    epochs = [line for line in metrics(folder) if "test_loss" in line]
    return Run(
        dict(enumerate(losses(folder), 1)),
        {line["epoch"]: (line["test_loss"], round(line["test_accuracy"], 4)) for line in epochs},
        ("single", 1, round(epochs[-1]["test_accuracy"], 4)),
    )


def assert_same_run(found, reference):
    assert found.losses == pytest.approx(reference.losses, rel=1e-5)
    assert list(found.evaluations) == list(reference.evaluations) == [1, 2, 3, 4, 5]
    for epoch, (loss, accuracy) in reference.evaluations.items():
        assert found.evaluations[epoch] == (pytest.approx(loss, rel=1e-5), accuracy)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "world_size"), RUNS)
def test_every_step_and_evaluation_equals_single(reference, tmp_path, page, world_size):
    argv, started = options_of(page, world_size, stages=world_size)
    found = run(page, tmp_path, started, ["--epochs", str(EPOCHS), *argv])
    assert len(found.losses) == 110
    assert_same_run(found, reference)
    assert found.result == (page, world_size, reference.result[2])


@pytest.mark.parametrize("page", ON_DIGITS)
def test_it_goes_on_at_another_world_size_as_single_does(reference, tmp_path, page):
    path = tmp_path / "checkpoint.pt"
    found, evaluated = {}, {}
    for epochs, world_size in ((2, 2), (EPOCHS, 4 if page in ("tensor", "pipeline") else 3)):
        argv, started = options_of(page, world_size, 2) if page in PAGES[2:] else ([], 1)
        part = run(page, tmp_path, started, ["--epochs", str(epochs), "--checkpoint", str(path), *argv])
        assert part.result == (page, world_size if page in PAGES[2:] else 1, reference.evaluations[epochs][1])
        assert torch.load(path, weights_only=True)["epoch"] == epochs
        assert not (tmp_path / "checkpoint.pt.tmp").exists()
        assert not found.keys() & part.losses.keys()
        found, evaluated = found | part.losses, evaluated | part.evaluations
    assert len(found) == EPOCHS * STEPS_PER_EPOCH == 110
    assert_same_run(Run(found, evaluated, part.result), reference)


def run_with_steps_of_a_gpu(page, argv):
    sys.modules["torch.optim.optimizer"]._get_foreach_kernels_supported_devices = lambda: ["cpu"]
    run_page(page, argv)


@pytest.mark.parametrize("page", ["fsdp", "tensor"])
def test_shards_are_updated_as_on_a_gpu(reference, tmp_path, page):
    """On GPUs, torch's optimizers update all parameters in one call, which takes no DTensors beside tensors."""
    argv, started = options_of(page, 2, 2)
    found = run(page, tmp_path, started, ["--epochs", "1", *argv], run_page=run_with_steps_of_a_gpu)
    assert found.losses == pytest.approx({step: reference.losses[step] for step in range(1, 23)}, rel=1e-5)


def test_replicas_of_a_pipeline_that_do_not_divide_the_batch_are_refused(tmp_path):
    """Microbatches of unequal sizes would count as equal ones in the loss."""
    setup = functools.partial(run_page, "pipeline", ["--epochs", "1", "--stages", "1"])
    outcome = Ranks("pipeline", [], 3, tmp_path, setup=setup, OMP_NUM_THREADS="1").wait(60)
    assert outcome.statuses == [1, 1, 1], outcome.text
    assert "shape '[3, 4, -1]' is invalid for input of size 64" in outcome.text


def test_a_complete_run_only_repeats_its_result(tmp_path):
    argv = ["--epochs", "1", "--checkpoint", str(tmp_path / "checkpoint.pt")]
    first, second = (run("ddp", tmp_path, 2, argv) for _ in range(2))
    assert (second.losses, second.evaluations, second.result) == ({}, {}, first.result)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_precision_stays_close(reference, tmp_path, level):
    """The tolerance is that of test_apex.py: 15 roundings to bfloat16 between an image and its loss."""
    found = run("apex", tmp_path, 2, ["--epochs", "2", "--opt-level", level])
    expected = {step: reference.losses[step] for step in range(1, 2 * STEPS_PER_EPOCH + 1)}
    assert found.losses == pytest.approx(expected, rel=15 * 2.0**-8)
    assert found.losses != pytest.approx(expected, rel=1e-4)


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
HOROVODRUN = (str(PROGRAMS / "horovodrun"), "--gloo", "-np", "2", "--disable-cache", sys.executable)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "launcher"), [("ddp", TORCHRUN), ("horovod", HOROVODRUN)])
def test_its_own_launcher_starts_two_processes(reference, page, launcher):
    """spawn's launcher is a plain python, which starts it in test_your_own.py."""
    if page == "horovod":
        need_horovod()
    argv = (f"recipes/{page}/minimal.py", "--epochs", "1", *EVERY_STEP)
    result = run_command(*launcher, *argv, OMP_NUM_THREADS="1", check=True)
    found = read(re.sub(r"^\[\S+<stdout>:", "", result.stdout, flags=re.MULTILINE))  # what horovodrun prepends
    first = {step: reference.losses[step] for step in range(1, STEPS_PER_EPOCH + 1)}
    assert found.losses == pytest.approx(first, rel=1e-5)
    assert found.result == (page, 2, reference.evaluations[1][1])


def source(page):
    return (ROOT / "recipes" / page / "minimal.py").read_text(encoding="utf-8")


def num_changed(page):
    """Return the number of lines that were removed or added between a page's parent and the page."""
    texts = (source(name).splitlines() for name in (PARENTS[page], page))
    return sum(line[0] in "+-" for line in list(difflib.unified_diff(*texts, n=0))[2:])


def test_every_recipe_that_trains_has_a_page():
    tests = ROOT.glob("tests/parallel/test_*.py")
    copies = {path.stem.removeprefix("test_") for path in tests if "Made by `make new`" in path.read_text()[:300]}
    assert {path.parent.name for path in ROOT.glob("recipes/*/minimal.py")} - copies == set(PAGES)
    assert {path.parent.name for path in ROOT.glob("recipes/*/train.py")} - copies == {*PAGES, "probe"}


@pytest.mark.parametrize("page", PAGES)
def test_it_imports_nothing_of_this_repository(page):
    modules = set()
    for node in ast.walk(ast.parse(source(page))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module)
    assert {module.split(".")[0] for module in modules} <= ALLOWED | OWN_LIBRARIES.get(page, set())


@pytest.mark.parametrize("page", PAGES)
def test_it_is_a_page_that_says_how_to_run_it(page):
    assert len(source(page).splitlines()) <= 120
    docstring = ast.get_docstring(ast.parse(source(page)))
    assert re.search(rf"^Run `.*recipes/{page}/minimal\.py", docstring, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES[2:])
def test_every_exchange_says_what_crosses_the_wire(page):
    """Each use of a collective has a comment that begins with the technique, on its line or above it."""
    lines = source(page).splitlines()
    for number, line in enumerate(lines):
        if re.search(r"(dist|hvd)\.(all_reduce|allreduce|broadcast|all_gather|batch_isend)", line):
            near = lines[max(0, number - 4) : number + 1]
            assert any(re.search(r"# [A-Z]\w+: ", text) for text in near), f"{page}:{number + 1}"


@pytest.mark.parametrize("page", PARENTS)
def test_a_diff_with_its_parent_is_the_lesson(page):
    assert num_changed(page) <= MOST_CHANGED.get(page, 40)


def test_the_ladder_of_the_document_is_true():
    rows = [f"| [{page}]({page}/minimal.py) | {len(source(page).splitlines())} |" for page in PAGES]
    for i, page in enumerate(PAGES):
        rows[i] += f" {PARENTS[page]} | {num_changed(page)} |" if page in PARENTS else " | |"
    text = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in text, "\n".join(["recipes/README.md should have:", *rows])


@pytest.mark.parametrize("page", PAGES)
def test_its_document_quotes_it(page):
    """Each block of Python in a recipe's README.md is in its minimal.py, line by line, except for indentation."""
    text = (ROOT / "recipes" / page / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    lines = source(page).splitlines()
    for block in blocks:
        quoted = block.splitlines()
        excerpts = ("\n".join(lines[i : i + len(quoted)]) for i in range(len(lines)))
        assert textwrap.dedent(block).rstrip() in map(textwrap.dedent, excerpts), f"{page}: {block}"
