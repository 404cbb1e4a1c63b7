"""Worker processes that decode for a rank: they come from a fork server, and stop signals are not meant for them.

A rank is not forked: in that moment one of its threads (checkpoints, pinned memory, network) may hold a lock of
the C library, which stays locked in the worker for ever (https://github.com/pytorch/pytorch/issues/130610).

Slurm may send USR1 and TERM, "write a checkpoint, then leave", to every process of a job. A worker that died of
them would take its rank along before there is a checkpoint. So workers end with their rank, and not before.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.common.data.idle import IdleClock
from recipes.common.data.splits import Split
from recipes.common.errors import WorkerError
from recipes.common.process.signals import STOP_SIGNALS


@contextlib.contextmanager
def _blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals, also in what is started here; afterwards all is as it was (the tracker unblocks TERM)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_tracker() -> None:
    """Start multiprocessing's helper that removes what processes leave behind; what ends them does not end it.

    Slurm may send the stop signals to every process of a job, and torchrun ends a rank by USR2 to its group.
    """
    with _blocked(*STOP_SIGNALS, signal.SIGUSR2):
        resource_tracker.ensure_running()


def start_server() -> BaseContext:
    """Let the fork server start, which takes as long as to import torch; return the context to make workers by."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recipes.common.data.imagefolder"])
    # Of a rank that was killed, the tracker removes what workers shared with it. It need not warn of that.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    start_tracker()
    with _blocked(*STOP_SIGNALS):  # and so they are in workers that it starts
        forkserver.ensure_running()
    # At the rank's exit, before multiprocessing ends workers by TERM, which they block, and waits for them.
    util.Finalize(None, _kill_all, exitpriority=100)
    return context


def _kill_all() -> None:
    """Kill the workers, and the server: to end by itself, with torch imported, takes it a second."""
    for process in multiprocessing.active_children():
        process.kill()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Let processes that are started here not import the main module: the recipe, and all that it imports."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def prepare_worker(worker_id: int) -> None:
    """Prepare a worker process: a DataLoader's worker_init_fn."""
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    """End this worker when its rank has gone; the loader itself takes the fork server for the rank."""
    rank = multiprocessing.parent_process()
    assert rank
    rank.join()
    os._exit(0)


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise a WorkerError where a wait for workers takes longer, or one of them has died.

    All ranks may wait for the same file system: then none of them is in a collective, which has a bound.
    """

    def error_of(what: str) -> WorkerError:
        return WorkerError(f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()} {what}")

    def give_up(number: int, frame: types.FrameType | None) -> NoReturn:
        why = "a worker hangs, perhaps in a file system that does not answer"
        fix = "fix this, then add --resume auto; for samples that take so long, raise --timeout-s"
        raise error_of(f"got no samples for {seconds:g} s: {why}; {fix}")

    can_signal = threading.current_thread() is threading.main_thread()
    if can_signal:
        handler, (left_s, _) = (
            signal.signal(signal.SIGALRM, give_up),
            signal.setitimer(signal.ITIMER_REAL, seconds),
        )
    try:
        yield
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        fix = "is memory short? lower --workers, then add --resume auto"
        raise error_of(f"lost a worker ({error}); {fix}") from error
    finally:
        if can_signal:
            signal.setitimer(signal.ITIMER_REAL, left_s)
            signal.signal(signal.SIGALRM, handler)


class Keys(list[tuple[int, int]]):
    """(epoch, index) of each sample of a batch."""

    ahead: Sequence[tuple[int, int]] = ()
    """Those of the batches that the same worker loads next."""


def add_ahead(batches: Sequence[Keys], workers: int, samples: int) -> None:
    """Let each batch know the next ones of its worker, up to so many samples or a few more."""
    for number, batch in enumerate(batches):
        count = -(-samples // len(batch))
        batch.ahead = list(itertools.chain(*batches[number + workers : number + workers * count + 1 : workers]))


class LoadedSplit(Split):
    """Samples that --workers processes read by (epoch, index), batch by batch.

    Args:
        dataset: the samples; of --workers 0, read in this process.
        workers: their number.
        device: the one that waits for batches.
        context: the workers' fork server, None without workers.
        timeout_s: longest wait for another rank.
        collate: what makes a batch of samples (torch's own).
    """

    def __init__(
        self,
        dataset: Any,
        workers: int,
        device: torch.device,
        context: BaseContext | None,
        timeout_s: float,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.bound_s = 2 * timeout_s + 60  # by then, other ranks have said that they wait for this one
        self.dataset, self.device, self.idle = dataset, device, IdleClock(device)
        # Of each batch, (epoch, index) of its samples: the loader keeps its workers, and asks in each epoch anew.
        self.keys: list[Keys] = []
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self.keys,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=device.type == "cuda",
            worker_init_fn=prepare_worker,
            multiprocessing_context=context,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # else it draws from the one that the step has seeded
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def idle_s(self) -> float:
        """Return for how long the device has had nothing to do but to wait for batches."""
        return self.idle.seconds()

    def load(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Any]:
        """Yield what collate makes of each index tensor that is not empty (the share of a rank too many is).

        Raises:
            WorkerError: a worker died, or no batch came within the bound.
        """
        self.keys[:] = [Keys((epoch, i) for i in index.tolist()) for index in indices if len(index)]
        if samples := getattr(self.dataset, "ahead", 0):
            add_ahead(self.keys, max(1, self.loader.num_workers), samples)
        with without_main(), bounded(self.bound_s):  # of workers that are kept, it waits for each
            loaded = iter(self.loader)
        while True:
            with self.idle.waiting(), bounded(self.bound_s):
                batch = next(loaded, None)
            if batch is None:
                break
            yield batch
        self.keys.clear()
