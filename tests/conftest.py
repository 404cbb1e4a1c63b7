"""What all tests share: skips that CI can forbid, and an end to every process that a test has started."""

import contextlib
import gc
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.common.errors import UserError
from recipes.common.process.threads import THREAD
from scripts.lab import network
from tests import fork_server

LIGHT = str(Path(__file__).parent / "light")
if LIGHT not in os.environ.get("PYTHONPATH", ""):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [LIGHT, os.environ.get("PYTHONPATH")]))

# Several jobs share the cores: threads and ranks that wait must yield their core, and mpirun must bind none.
for name, value in (
    ("GOMP_SPINCOUNT", "1000"),
    ("OPENBLAS_NUM_THREADS", "1"),  # its threads spin as soon as NumPy is imported
    ("OMPI_MCA_mpi_yield_when_idle", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("PRTE_MCA_hwloc_default_binding_policy", "none"),  # from Open MPI 5 on
):
    os.environ.setdefault(name, value)

# Modules that import torch are imported where they are used: the process that only distributes tests needs none.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--once", type=Path, metavar="FILE", help="leave out the tests in FILE; add those that pass to it"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from the tests, whose tolerances are those of CPUs; tests/gpu sees them if named alone."""
    paths = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    if not all(path.resolve().is_relative_to(Path(__file__).parent / "gpu") for path in paths):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that passed in an earlier run with the same --once, and distribute the rest."""
    once = config.getoption("once")
    if once and once.exists():
        passed = set(once.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
    share_out(items)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Add to the file of --once the tests that have passed, their teardown included."""
    once = config.getoption("once")
    if once and not hasattr(config, "workerinput"):
        of_kind = terminalreporter.stats.get
        passed, wrong = ({report.nodeid for report in of_kind(kind, ())} for kind in ("passed", "error"))
        with open(once, "a") as file:
            file.writelines(f"{test}\n" for test in sorted(passed - wrong))


def share_out(items: list[pytest.Item]) -> None:
    """Sort the tests so that each worker begins with its share of the slow ones, each file's on one worker.

    Files of tests/cluster come first; each of their tests counts as five. Other files with few tests come next:
    their tests are the longest.

    --dist worksteal cuts the list into a piece for each worker, and a worker that runs out takes the end of
    another piece. Quick tests there fill the gaps, and nobody waits for a long test that began last.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            files.setdefault(item.path, []).append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]

    def weight(path: Path) -> int:
        return 5 if path.parent.name == "cluster" else 1

    def place(path: Path) -> tuple[int, int]:
        return (0, -len(files[path])) if weight(path) > 1 else (1, len(files[path]))

    for path in sorted(files, key=place):
        min(shares, key=lambda share: sum(weight(item.path) for item in share)).extend(files[path])
    slow = {item for tests in files.values() for item in tests}
    quick = iter([item for item in items if item not in slow])
    total, left = len(items), len(items)
    items.clear()
    for i, share in enumerate(shares):
        size = max(left // (len(shares) - i), len(share))
        items += [*share, *itertools.islice(quick, size - len(share))]
        left = total - len(items)
    assert left == 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Start the fork server that all workers share, unless they run only tests/unit."""
    if not all(name.startswith("tests/unit/") for name in ids):
        fork_server.start(node.workerinput["testrunuid"])


@pytest.fixture(autouse=True, scope="session")
def _shared_fork_server():
    """Make this worker fork its ranks from the shared server."""
    fork_server.join(os.environ.get("PYTEST_XDIST_TESTRUNUID", ""))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Record in a report (--junit-xml) what was tested, where, and the exit status: `make evidence` reads it."""
    for plugin in session.config.pluginmanager.get_plugins():
        if hasattr(plugin, "add_global_property"):
            from scripts.bench import evidence

            for name, value in {**evidence.properties(session.config), "status": str(int(exitstatus))}.items():
                plugin.add_global_property(name, value)


@pytest.fixture(autouse=True)
def no_process_is_left():
    """End the processes that a failed or timed-out test leaves behind, so that they disturb no other test."""
    yield
    from tests import support

    support.end_all()


@pytest.fixture(autouse=True)
def nothing_is_inherited():
    """Undo what recipes and launchers set in this process, so that later tests and programs do not inherit it."""
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    environment = dict(os.environ)
    yield
    gc.unfreeze()  # run_main() has frozen the objects of earlier tests
    # With LAUNCHER_PID, a program would end itself at once: its parent is another process.
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def silent_port(capfd):
    """A port at which a program listens that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
    for thread in threading.enumerate():  # torch prints twenty lines once the connection ends: capfd takes them
        if thread.name == THREAD:
            thread.join(20)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small folder of images in ImageNet's layout."""
    from tests.images import make_images

    return make_images(tmp_path_factory.mktemp("images"))


def slow(*cases: object) -> list[Any]:
    """Return cases of a parametrised test that only `make test-all` runs."""
    words = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*each, marks=pytest.mark.slow) for each in words]


@contextlib.contextmanager
def refused(words: str) -> Iterator[None]:
    """Assert that the block raises a UserError of one line with these words."""
    with pytest.raises(UserError) as caught:
        yield
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def require(name: str, available: object, reason: str, remedy: str) -> None:
    """Skip the test if something is not available, or fail it if REQUIRE=NAME,... requires it."""
    if available:
        return
    message = f"needs {name}: {reason}; {remedy}"
    if name in os.environ.get("REQUIRE", "").replace(" ", "").split(","):
        pytest.fail(f"REQUIRE={name}: {message}", pytrace=False)
    pytest.skip(message)


def need_horovod() -> None:
    """Skip the test if Horovod is not built."""
    require("horovod", importlib.util.find_spec("horovod"), "Horovod is not built", "run `make horovod`")


def need_mpi() -> None:
    """Skip the test if there is no MPI; mpi4py is among the recipes' packages."""
    require("mpi", shutil.which("mpirun"), "there is no mpirun", "as root: apt-get install openmpi-bin")


def need_horovod_with_mpi() -> None:
    """Skip the test if Horovod is not built with MPI, or there is no mpirun."""
    need_horovod()
    need_mpi()
    import horovod.torch as hvd

    remedy = "as root: apt-get install libopenmpi-dev; then run `make horovod`"
    require("mpi", hvd.mpi_built(), "Horovod was built without MPI", remedy)


def need_namespaces(*tools: str) -> None:
    """Skip the test if nodes cannot have their own network namespaces, or a tool for them is missing."""
    require("netns", not network.why_not(), network.why_not(), "run `make test-all` as root")
    packages = {"iptables": "iptables", "tc": "iproute2"}
    for tool in tools:
        remedy = f"as root: apt-get install {packages[tool]}"
        require("netns", shutil.which(tool), f"there is no {tool}", remedy)


def need_gpus(count: int = 1, *, real: bool = False) -> None:
    """Skip the test if fewer GPUs are visible, or if it needs `real` ones and these are stand-ins."""
    import torch

    if real:
        remedy = "run it on a machine with NVIDIA GPUs"
        require("real-gpus", "STAND_IN_GPUS" not in os.environ, "a stand-in for a GPU cannot do this", remedy)

    found = torch.cuda.device_count()
    name = "gpu" if count == 1 else "two-gpus"
    remedy = "run `make test ARGS=tests/gpu` on a machine with NVIDIA GPUs"
    require(name, found >= count, f"{found} of {count} GPUs are visible", remedy)
