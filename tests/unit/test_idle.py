"""For how long a device waits for data, and the line that says so; where the sockets of workers are."""

import multiprocessing
import shutil
import signal
import tempfile
import time
from multiprocessing import connection, util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.common.data import workers
from recipes.common.data.idle_clock import IdleClock
from recipes.common.data.splits import Normalise
from recipes.common.data.workers import WorkerError
from recipes.common.metrics import Throughput
from recipes.common.task import Classification
from recipes.single.train import options
from tests.tiny import tiny_job

CPU = torch.device("cpu")


def make_split():
    normalise = Normalise(torch.zeros(3), torch.ones(3), 8, CPU)
    return workers.LoadedSplit([0] * 6, options(["--workers", "0"]), CPU, print, normalise)


def test_a_split_measures_the_waits_for_its_loader_and_nothing_else():
    class Loader:
        def __iter__(self):
            for _ in range(3):
                time.sleep(0.05)
                yield (
                    torch.zeros(2, 8, 8, 3, dtype=torch.uint8),
                    torch.zeros(2).long(),
                    ["", ""],
                    *[[False] * 2] * 2,
                )

    split = make_split()
    split.loader = Loader()
    assert split.idle.seconds() == 0
    began_at, worked_s = time.perf_counter(), 0.0
    for images, _ in split.batches(torch.arange(6).split(2), 0):
        assert images.shape == (2, 3, 8, 8)
        since = time.perf_counter()
        time.sleep(0.2)
        worked_s += time.perf_counter() - since
    assert 0.15 <= split.idle.seconds() <= time.perf_counter() - began_at - worked_s


def test_a_gpu_is_idle_between_two_events_of_its_queue(monkeypatch):
    class Event:
        done = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_ms = times.pop(0)

        def query(self):
            return self.at_ms <= Event.done

        def elapsed_time(self, end):
            return end.at_ms - self.at_ms

    times = [100.0, 100.0, 250.0, 290.0]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = IdleClock(torch.device("cuda", 0))
    for _ in range(2):
        with clock.waiting():
            pass
    assert clock.seconds() == 0
    Event.done = 260.0
    assert clock.seconds() == 0, "the first wait was over before the GPU had nothing to do"
    Event.done = 300.0
    assert clock.seconds() == clock.seconds() == pytest.approx(0.04)


def test_the_share_is_that_of_a_window():
    clock, shares = IdleClock(CPU), []
    for idle_s, train_s in ((30.0, 2.0), (35.0, 11.0), (36.0, 12.0), (37.0, 32.0)):
        clock.seconds = lambda idle_s=idle_s: idle_s
        shares.append(clock.end_window(train_s))
    assert shares == pytest.approx([0, 0, 0.6, 0.05]), "starting does not count"


@pytest.mark.parametrize(("idle_s", "lines"), [(1.9, 0), (2.1, 1)])
def test_a_run_that_waits_for_data_says_so_once(monkeypatch, idle_s, lines):
    said, clock = [], SimpleNamespace(now=0.0)
    monkeypatch.setattr(Throughput, "seconds", lambda self: clock.now)
    train = make_split()
    train.idle.seconds = lambda: clock.now / 10 * idle_s
    train.loader = SimpleNamespace(num_workers=3)
    job = tiny_job()
    job.data = SimpleNamespace(train=train, task=Classification())
    progress = SimpleNamespace(say=said.append)
    job.record = SimpleNamespace(progress=progress, log_step=lambda **values: None)
    for clock.now in (0.0, 10.0, 20.0, 30.0):
        job.log_step(1.0, 0.1)
    assert len(said) == lines
    warning = "warning: 21% of the time rank 0 waits for data; raise --workers (3"
    assert all(text.startswith(warning) for text in said)


def test_a_wait_for_workers_that_hang_or_die_ends_in_one_line():
    """Outside of collectives, and with one process alone, nothing else would end the wait."""
    split = make_split()
    assert split.bound_s == 660
    handler, (left_s, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    hangs = r"rank 0 on \S+ got no samples for 0.05 s: a worker hangs.*--resume auto"
    with pytest.raises(WorkerError, match=hangs), workers.limit_worker_wait(0.05):
        time.sleep(60)
    # An earlier alarm, such as pytest-timeout's, is kept; without one, none is left.
    assert signal.getsignal(signal.SIGALRM) is handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) is (left_s > 0)
    no_space = "Caught RuntimeError in worker 0.\nunable to allocate shared memory(shm) for file </torch_1>"
    for error, message in (
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), r"DataLoader worker .* unexpectedly\)"),
        (ConnectionResetError(104, "Connection reset by peer"), r"lost a worker \(.*reset by peer\); is memory"),
        (FileNotFoundError(2, "No such file or directory"), r"lost a worker \(.*No such file.*\); is memory"),
        (EOFError(), r"lost a worker \(EOFError\); is memory short\? lower --workers"),
        (RuntimeError(no_space), r"^rank 0 on \S+ has no shared memory left .*; enlarge /dev/shm .*, or lower"),
        (OSError(30, "Read-only file system"), r"cannot reach its workers \(Read-only .*\); make /dev/shm "),
        (OSError(24, "Too many open files"), r"cannot reach its workers \(Too many open files\); .* ulimit -n"),
    ):
        with pytest.raises(WorkerError, match=message), workers.limit_worker_wait(60):
            raise error
    with pytest.raises(RuntimeError, match="no such kernel"), workers.limit_worker_wait(60):
        raise RuntimeError("no such kernel")


@pytest.mark.parametrize(("length", "is_used"), [(75, True), (76, False)])
def test_the_sockets_of_workers_are_in_tmp_if_their_paths_would_be_too_long(monkeypatch, length, is_used):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = f"{short}/".ljust(length, "x")
        Path(folder).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
        monkeypatch.setattr(util, "Finalize", lambda *_, **__: None)  # it would remove the folder at exit
        workers.choose_socket_folder()
        address = connection.arbitrary_address("AF_UNIX")
        shutil.rmtree(Path(address).parent)
        assert len(address) <= 107
        assert address.startswith(f"{folder}/") is is_used
        assert tempfile.gettempdir() == folder
