"""The rules of the house that a reader relies on: who imports whom, and what each recipe looks like."""

import ast
import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import typing
from types import SimpleNamespace

import pytest
from packaging.markers import Marker

from tests.conftest import pytest_configure
from tests.support import ROOT

RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/train.py"))
TRAINING = [name for name in RECIPES if name != "probe"]
"""The probe reports which process is which, and trains nothing."""
WORLD, LOOP = (ROOT / "recipes" / "common" / name for name in ("world/world.py", "loop.py"))
FILES = sorted(ROOT.glob("recipes/**/*.py"))
COMMON = sorted(ROOT.glob("recipes/common/**/*.py"))
TECHNIQUES = [path for path in ROOT.glob("recipes/*/*.py") if path.name not in ("__init__.py", "minimal.py")]
TECHNIQUES = sorted(path for path in TECHNIQUES if path.parent.name != "common")
"""Each train.py, and the files beside it."""
PARALLEL = ("torch.distributed", "horovod", "apex", "mpi4py")
SCHEDULERS = ("SLURM_", "OMPI_", "PET_", "JOB_", "PMI_", "PMIX_")


@functools.cache
def nodes_of(path, at_runtime=False):
    """Return the nodes of a file's syntax tree; at_runtime: without what only type checkers read."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if at_runtime and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    return list(ast.walk(tree))


def imports(path, at_runtime=False):
    """Yield every module that a file imports, anywhere in it, and the names imported from it."""
    for node in nodes_of(path, at_runtime):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_actions_of_others_are_pinned_by_commit():
    """A tag can be moved, and the action then runs other code."""
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", name)] == []


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_below(module, parents):
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def imports_below(path, parents):
    """Return a line for each import of a module at or below one of these."""
    return [f"{identify(path)} imports {module}" for module in imports(path) if is_below(module, parents)]


def identify(path):
    return str(path.relative_to(ROOT))


def test_there_are_recipes():
    assert {"single", "ddp"} <= set(RECIPES)


def in_circles(graph):
    """Return the part of a graph that contains circles; the graph maps each node to the nodes it points to."""
    graph = dict(graph)
    while leaves := [name for name, imported in graph.items() if not imported & graph.keys()]:
        for name in leaves:
            del graph[name]
    return graph


def test_no_files_import_each_other_in_a_circle():
    """Imports in functions and for type checkers count too: they only hide a circle."""
    graph = {module_of(path): set(imports(path)) - {module_of(path)} for path in FILES}
    assert in_circles(graph) == {}, "each of these imports another of these"


def test_no_rooms_of_common_import_each_other_in_a_circle():
    """A room is a folder, or a file beside the folders."""
    graph = {}
    for path in COMMON:
        room = ".".join(module_of(path).split(".")[:3])
        found = {".".join(name.split(".")[:3]) for name in imports(path)} - {room, "recipes.common"}
        graph.setdefault(room, set()).update(found)
    assert graph["recipes.common.loop"] & graph.keys()
    assert in_circles(graph) == {}, "each of these imports another of these"


@pytest.mark.parametrize("recipe", RECIPES)
def test_options_have_types(recipe):
    """With types, mypy sees a misspelt option, and one that only another recipe has."""
    kind = importlib.import_module(f"recipes.{recipe}.train").options.args[0]
    hints = typing.get_type_hints(kind)
    assert {field.name for field in dataclasses.fields(kind)} == set(hints)
    assert typing.Any not in hints.values()
    assert not hasattr(kind, "__getattr__")


def test_no_recipe_imports_another():
    found = []
    for path in FILES:
        home = path.relative_to(ROOT / "recipes").parts[0]
        # Spawn replaces only ddp's launcher: its ranks are ddp's.
        allowed = {home, "ddp"} if home == "spawn" else {home}
        others = [f"recipes.{name}" for name in RECIPES if name not in allowed]
        found += imports_below(path, [*others, "scripts", "tests"])
    assert found == []


def test_of_common_only_the_world_and_parallel_use_torch_distributed():
    found = []
    for path in COMMON:
        allowed = {"torch.distributed"} if path == WORLD or path.parent.name == "parallel" else set()
        found += imports_below(path, [name for name in PARALLEL if name not in allowed])
        uses = [ast.unparse(node) for node in nodes_of(path) if isinstance(node, ast.Attribute)]
        found += [f"{identify(path)} uses {use}" for use in uses if is_below(use, PARALLEL)]
    assert found == []


def test_the_world_is_for_recipes_alone():
    """Single and dataparallel have no ranks: nothing that they import may import what connects ranks."""
    found = []
    for path in COMMON:
        is_parallel = path.parent.name == "parallel"
        banned = ["recipes.common.world.world", *([] if is_parallel else ["recipes.common.parallel"])]
        found += imports_below(path, banned)
    assert found == []


def test_no_variable_of_a_scheduler_is_read():
    found = []
    for path in FILES:
        constants = [node.value for node in nodes_of(path) if isinstance(node, ast.Constant)]
        words = [value for value in constants if isinstance(value, str) and value.startswith(SCHEDULERS)]
        found += [f"{identify(path)}: {word}" for word in words]
    # Horovod asks MPI for its ranks; another MPI than its own connects none.
    assert found == [f"recipes/horovod/train.py: {word}" for word in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")]


FLOORS = (
    *(("recipes",), ("scripts.launch",), ("scripts.lab", "scripts.dev"), ("scripts.doctor",)),
    ("scripts.drill", "scripts.plan"),
    *(("scripts.bench", "scripts.same"), ("docker", "slurm", "k8s", "scripts.make")),
)
"""Rooms, from the ground up: a file imports from its own room and from lower floors. docs/architecture.md."""

ROOMS = [room for floor in FLOORS[1:] for room in floor]


MODULES = {module_of(path): path for room in ROOMS for path in ROOT.glob(f"{room.replace('.', '/')}/**/*.py")}
MODULES |= {"scripts.make": ROOT / "scripts/make.py"}


def room_of(module):
    return next((room for floor in FLOORS for room in floor if is_below(module, [room])), None)


def floor_of(module):
    return next(number for number, floor in enumerate(FLOORS) if is_below(module, floor))


def test_every_file_has_a_room():
    """Every room has files as well: a new folder must be added to FLOORS."""
    folders = ("scripts", "docker", "slurm", "k8s")
    files = {module_of(path) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert files == {"scripts", *MODULES}
    assert {room_of(module) for module in MODULES} == set(ROOMS)


def test_a_file_imports_from_its_own_room_and_from_below():
    found = [
        f"{module} imports {imported}"
        for module, path in sorted(MODULES.items())
        for imported in imports(path)
        if room_of(imported) not in (None, room_of(module)) and floor_of(imported) >= floor_of(module)
    ]
    assert found == []


def test_no_file_imports_itself_by_way_of_others():
    graph = {module: set(imports(path, at_runtime=True)) - {module} for module, path in MODULES.items()}
    assert in_circles(graph) == {}, "each of these imports another of them"


@pytest.mark.parametrize("recipe", TRAINING)
def test_every_recipe_has_the_same_shape(recipe):
    path = ROOT / "recipes" / recipe / "train.py"
    tree = ast.parse(path.read_text())
    docstring = ast.get_docstring(tree)
    assert f"make run RECIPE={recipe}" in docstring
    assert f"result recipe={recipe} " in docstring
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert ast.unparse(assigned["options"]).startswith("partial(parse, ")
    assert list(functions)[-1] == "main"
    assert "recipes.common.loop.train_epochs" in imports(path) or recipe == "spawn"
    arguments = functions["main"].args
    assert [argument.arg for argument in arguments.args] == ["argv"]
    assert [ast.unparse(default) for default in arguments.defaults] == ["None"]
    assert (ROOT / "recipes" / recipe / "__init__.py").exists()


COLLECTIVES = (
    *("dist.all_reduce(", "dist.broadcast(", "dist.all_gather", "dist.broadcast_object_list("),
    *("dist.gather_object(", "hvd.allreduce", "hvd.broadcast", "hvd.allgather"),
    *("world.gather_objects(", "world.broadcast_object("),
    *("peers.begin_vote(", "peers.sum_tensor(", "peers.broadcast_tensor("),
)


@pytest.mark.parametrize("path", [*TECHNIQUES, WORLD, LOOP], ids=identify)
def test_every_collective_says_what_crosses_the_wire(path):
    """A comment that begins with the technique stands above each use of a collective, in the same function."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if any(word in line for word in COLLECTIVES):
            above = lines[max(0, number - 6) : number]
            assert any(text.strip().startswith("# ") and ": " in text for text in above), f"{path}:{number + 1}"


OF_OPTIONS = tuple(
    f"recipes.{name}"
    for name in (
        *("common.config_file", "common.language", "common.restore", "common.sample", "common.skipping"),
        *("common.user_code", "common.checkpoint.reading", "common.checkpoint.shard_files", "common.data.cache"),
        *("common.data.imagefolder", "common.data.user_data", "common.data.shards", "common.data.text"),
        *("common.data.synthetic", "common.data.torchvision_data", "common.data.workers"),
        *("common.models.batchnorm", "common.models.gpt", "common.models.layers", "common.models.user_model"),
        *("common.models.torchvision_models", "common.models.vit", "common.parallel.groups"),
        *("common.process.rendezvous_errors", "common.record.progress_bar", "common.record.earlier_launches"),
        *("common.record.resume", "common.world.transport", "common.profile", "ddp.compression", "ddp.zero"),
    )
)
"""Modules that only an option or a failure needs: a default run of ddp neither loads nor shows them."""


LIGHT = ("torch", "numpy", "yaml", "psutil")
HEAVY = ("torchvision", "sklearn", "tensorboard", "yaml", "PIL", "pandas")
LAUNCHERS = ("scripts.launch.local", "scripts.doctor.__main__", "scripts.launch.agent", "slurm.sweep")
UNWANTED = [
    {**dict.fromkeys(LAUNCHERS, LIGHT), "slurm.submit": (*LIGHT, "submitit")},
    {"recipes.single.train": HEAVY, "recipes.ddp.train": (*HEAVY, "torch._dynamo", *OF_OPTIONS)},
    dict.fromkeys(["recipes.context.train", "recipes.tensor.train"], ("recipes.common.models.user_model",)),
]
"""What modules may not load. One process imports those of a group: what one has loaded is found after the next."""

IMPORT = """
import importlib, json, sys
for module, unwanted in json.loads(sys.argv[1]).items():
    importlib.import_module(module)
    print(module, [name for name in unwanted if name in sys.modules])
"""


@pytest.mark.parametrize("group", UNWANTED, ids=["launchers", "recipes", "recipes on FSDP2"])
def test_importing_costs_no_more_than_it_must(group):
    assert [name for name in OF_OPTIONS if not (ROOT / f"{name.replace('.', '/')}.py").exists()] == []
    words = [sys.executable, "-c", IMPORT, json.dumps(group)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"{module} []" for module in group], done.stderr


def definitions(path):
    """Yield the lines of each function or class of a file, without comments and blank lines."""
    lines = path.read_text().splitlines()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            stripped = (line.strip() for line in lines[node.lineno - 1 : node.end_lineno])
            yield [line for line in stripped if line and not line.startswith("#")]


def test_no_six_lines_stand_in_two_recipes():
    """Code that recipes share belongs in recipes/common."""
    tests = ROOT.glob("tests/parallel/test_*.py")
    copies = {path.stem.removeprefix("test_") for path in tests if "Made by `make new`" in path.read_text()[:300]}
    seen = {}
    for path in TECHNIQUES:
        name = path.parent.name
        for lines in definitions(path) if name not in copies else ():
            for block in {tuple(lines[i : i + 6]) for i in range(len(lines) - 5)}:
                seen.setdefault(block, set()).add(name)
    assert {block: names for block, names in seen.items() if len(names) > 1} == {}


WAITS = ("all_reduce", "broadcast", "gather_object", "gather_objects", "broadcast_object", "barrier", "item")
WAITS += ("averages", "wrap", "build", "broadcast_parameters", "allreduce", "synchronize", "get_params")
WAITS += ("sum_tensor", "broadcast_tensor", "broadcast_bytes", "finish_vote")
WAITS += ("new_subgroups_by_enumeration", "gather_whole")
"""Calls that wait for other ranks, or that read from a GPU what NCCL has yet to deliver."""
WATCHED_BY_CALLERS = ("wrap", "__init__", "get_params", "all_reduce")
WATCHED_BY_CALLERS += ("build_shards", "_synchronize")  # these wait only for this rank's own work
WATCHED_BY_CALLERS += ("begin_vote", "gather_objects", "broadcast_object", "broadcast_tensor", "broadcast_bytes")
WATCHED_BY_CALLERS += ("sum_tensor", "barrier", "norm_over_ranks")
HERE = ("sharding.gather_whole(loss.detach())",)
"""Calls that wait for nobody: each rank of a replica has the whole loss, if not as a plain tensor."""


def unwatched_waits(node, function="", is_watched=False):
    """Yield the calls below a node that may wait for other ranks outside of `with world.watch(...)`."""
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.With):
        is_watched = is_watched or any(".watch(" in ast.unparse(item.context_expr) for item in node.items)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).split(".")[-1]
        is_async = any(keyword.arg == "async_op" for keyword in node.keywords)
        is_watched_elsewhere = function in WATCHED_BY_CALLERS or ast.unparse(node) in HERE
        if name in WAITS and not (is_watched or is_async or is_watched_elsewhere):
            yield f"{function}, line {node.lineno}: {ast.unparse(node)}"
    for child in ast.iter_child_nodes(node):
        yield from unwatched_waits(child, function, is_watched)


WAITING = [path for path in TECHNIQUES if path.parent.name not in ("single", "dataparallel", "probe")]
SHARED = ("loop", "models/rank_dependence", "world/agreement", "world/tree")
SHARED += ("parallel/buckets", "parallel/groups", "parallel/same_use", "parallel/sharding")
WAITING += [ROOT / "recipes" / "common" / f"{name}.py" for name in SHARED]


@pytest.mark.parametrize("path", WAITING, ids=identify)
def test_every_wait_for_other_ranks_is_watched(path):
    """If a rank is missing, the others must report in which wait: on GPUs, only reading the result blocks."""
    assert list(unwatched_waits(ast.parse(path.read_text()))) == []


MACHINES = [
    {"sys_platform": system, "platform_machine": machine, "python_full_version": f"{python}.0"}
    for system in ("linux", "darwin", "win32")
    for machine in ("x86_64", "aarch64", "arm64", "AMD64", "riscv64")
    for python in ("3.11", "3.12", "3.13", "3.14")
]


def locked(name):
    """Return the packages of a list in requirements/, each with its version, its hashes and who needs it.

    uv writes a marker in several ways, so that it is compared by the machines for which it holds.
    """
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    packages = {}
    for entry in re.split(r"\n(?=\S)", "\n".join(line for line in lines if not line.lstrip().startswith("#"))):
        head, *hashes = entry.split(" \\\n")
        package, _, marker = head.partition(" ; ")
        needed = [not marker or Marker(marker).evaluate(machine) for machine in MACHINES]
        packages[package.split("==")[0]] = package, needed, hashes
    return packages


@pytest.mark.parametrize("name", ["dev", "bench"])
def test_every_set_up_holds_what_recipes_need(name):
    """`make test` installs dev.txt alone, and `make bench` bench.txt: neither may lack a package of run.txt."""
    others = locked(name)
    assert {package for package, entry in locked("run").items() if others.get(package) != entry} == set()


@pytest.mark.parametrize("name", ["run", "dev", "bench", "horovod-build"])
def test_every_package_asked_for_is_locked(name):
    lines = (ROOT / "requirements" / f"{name}.in").read_text().splitlines()
    asked = {re.match(r"[\w-]*", line)[0].lower() for line in lines if not line.startswith("-r")} - {""}
    assert asked <= {package.split("[")[0] for package in locked(name)}


@pytest.mark.parametrize(
    ("folder", "arguments", "visible"),
    [
        (".", ["tests"], ""),
        (".", ["tests/gpu", "tests/unit"], ""),
        (".", ["tests/gpu/../unit/test_job.py"], ""),
        (".", ["tests/gpu"], "0"),
        (".", ["tests/gpu/test_apex.py::test_levels_follow_single[O1-torch]", str(ROOT / "tests/gpu")], "0"),
        ("tests/gpu", ["test_apex.py"], "0"),
    ],
)
def test_only_tests_gpu_alone_sees_gpus(monkeypatch, folder, arguments, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    pytest_configure(SimpleNamespace(args=arguments, invocation_params=SimpleNamespace(dir=ROOT / folder)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
