"""The rules of the house that a reader relies on: who imports whom, and what each recipe looks like."""

import ast
import difflib
import subprocess
import sys

import pytest

from tests.support import ROOT

RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/train.py"))
TRAINING = [name for name in RECIPES if name != "probe"]
"""The probe reports which process is which, and trains nothing."""
WORLD = ROOT / "recipes" / "common" / "world.py"
FILES = sorted(ROOT.glob("recipes/**/*.py"))
PARALLEL = ("torch.distributed", "horovod", "apex", "mpi4py")
SCHEDULERS = ("SLURM_", "OMPI_", "PET_", "JOB_", "PMI_", "PMIX_")


def imports(path):
    """Yield every module that a file imports, anywhere in it, with the names taken from it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_below(module, parents):
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def identify(path):
    return str(path.relative_to(ROOT))


def test_there_are_recipes():
    assert {"single", "ddp"} <= set(RECIPES)


@pytest.mark.parametrize("path", FILES, ids=identify)
def test_no_recipe_imports_another(path):
    home = path.relative_to(ROOT / "recipes").parts[0]
    others = [f"recipes.{name}" for name in RECIPES if name != home]
    assert [module for module in imports(path) if is_below(module, others)] == []
    assert [module for module in imports(path) if is_below(module, ["scripts", "tests"])] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/common/*.py")), ids=identify)
def test_of_common_only_the_world_uses_torch_distributed(path):
    banned = [name for name in PARALLEL if (path.name, name) != ("world.py", "torch.distributed")]
    assert [module for module in imports(path) if is_below(module, banned)] == []
    uses = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    assert [use for use in uses if is_below(use, PARALLEL)] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/common/*.py")), ids=identify)
def test_the_world_is_for_recipes_alone(path):
    """Single and dataparallel have no ranks: nothing that they import may import the world."""
    assert [module for module in imports(path) if is_below(module, ["recipes.common.world"])] == []


@pytest.mark.parametrize("path", FILES, ids=identify)
def test_no_variable_of_a_scheduler_is_read(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    words = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [word for word in words if word.startswith(SCHEDULERS)] == []


def positions(names, wanted):
    return [names.index(name) for name in wanted]


@pytest.mark.parametrize("recipe", TRAINING)
def test_every_recipe_has_the_same_shape(recipe):
    path = ROOT / "recipes" / recipe / "train.py"
    tree = ast.parse(path.read_text())
    docstring = ast.get_docstring(tree)
    assert f"make run RECIPE={recipe}" in docstring
    assert f"result recipe={recipe} " in docstring
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    order = positions(list(functions), ["options", "train_one_epoch", "evaluate", "main"])
    assert order == sorted(order)
    for name in ("options", "main"):
        arguments = functions[name].args
        assert [argument.arg for argument in arguments.args] == ["argv"]
        assert [ast.unparse(default) for default in arguments.defaults] == ["None"]
    assert (ROOT / "recipes" / recipe / "__init__.py").exists()


COLLECTIVES = (
    *(
        "dist.all_reduce(",
        "dist.broadcast(",
        "dist.all_gather",
        "dist.broadcast_object_list(",
        "dist.gather_object(",
    ),
    *("hvd.allreduce", "hvd.broadcast", "hvd.allgather", "world.gather_objects(", "world.broadcast_object("),
)


@pytest.mark.parametrize("path", [*sorted(ROOT.glob("recipes/*/train.py")), WORLD], ids=identify)
def test_every_collective_says_what_crosses_the_wire(path):
    """Each use of a collective stands below a comment that begins with the technique, in the same function."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if any(word in line for word in COLLECTIVES):
            above = lines[max(0, number - 6) : number]
            assert any(text.strip().startswith("# ") and ": " in text for text in above), f"{path}:{number + 1}"


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("recipes.single.train", ("torchvision", "sklearn", "tensorboard", "yaml", "PIL", "pandas")),
        ("recipes.ddp.train", ("torchvision", "sklearn", "tensorboard", "yaml", "PIL", "torch._dynamo")),
        ("scripts.local", ("torch", "numpy", "yaml", "psutil")),
        ("scripts.doctor.__main__", ("torch", "numpy", "yaml", "psutil")),
        ("scripts.agent", ("torch", "numpy", "yaml", "psutil")),
        ("scripts.sweep", ("torch", "numpy", "yaml", "psutil")),
        ("slurm.submit", ("torch", "numpy", "yaml", "psutil", "submitit")),
    ],
)
def test_importing_costs_no_more_than_it_must(module, unwanted):
    code = f"import sys, {module}; print([name for name in {unwanted!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("recipe", "limit"),
    [("spawn", 180), ("horovod", 310), ("apex", 450), ("scratch", 360), ("pipeline", 560), ("dataparallel", 300)],
)
def test_a_diff_with_ddp_reads_like_a_lesson(recipe, limit):
    """The lines that a reader has to read; what differs beyond the technique is a fault of one of the two."""
    texts = [(ROOT / "recipes" / name / "train.py").read_text().splitlines() for name in ("ddp", recipe)]
    changed = [line for line in difflib.unified_diff(*texts, n=0) if line[0] in "+-"]
    assert len(changed) <= limit


WAITS = ("all_reduce", "broadcast", "gather_object", "gather_objects", "broadcast_object", "barrier", "item")
WAITS += ("averages", "wrap", "build", "broadcast_parameters", "allreduce", "synchronize", "get_params")
"""Calls that wait for other ranks, or that read from a GPU what NCCL has yet to deliver."""
WATCHED_BY_CALLERS = ("wrap", "__init__", "get_params", "all_reduce")
WATCHED_BY_CALLERS += ("gather_objects", "broadcast_object", "barrier")


def unwatched_waits(node, function="", is_watched=False):
    """Yield the calls below a node that may wait for other ranks outside of `with world.watch(...)`."""
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.With):
        is_watched = is_watched or any(".watch(" in ast.unparse(item.context_expr) for item in node.items)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).split(".")[-1]
        is_async = any(keyword.arg == "async_op" for keyword in node.keywords)
        if name in WAITS and not (is_watched or is_async or function in WATCHED_BY_CALLERS):
            yield f"{function}, line {node.lineno}: {ast.unparse(node)}"
    for child in ast.iter_child_nodes(node):
        yield from unwatched_waits(child, function, is_watched)


@pytest.mark.parametrize("recipe", sorted({*TRAINING} - {"single", "dataparallel"}))
def test_every_wait_for_other_ranks_is_watched(recipe):
    """Where a rank is missing, the others are to say in which wait: on GPUs only reading the result blocks."""
    tree = ast.parse((ROOT / "recipes" / recipe / "train.py").read_text())
    assert list(unwatched_waits(tree)) == []
