"""Worker processes that decode for a rank: they come from a fork server, and stop signals are not meant for them.

A rank is not forked: in that moment one of its threads (checkpoints, pinned memory, network) may hold a lock of
the C library, which stays locked in the worker for ever (https://github.com/pytorch/pytorch/issues/130610).

Slurm may send USR1 and TERM, "write a checkpoint, then leave", to every process of a job. A worker that died of
them would take its rank along before there is a checkpoint. So workers end with their rank, and not before.
"""

from __future__ import annotations

import contextlib
import functools
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
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.common.data.idle import MAX_IDLE_SHARE, IdleClock, IdleShare
from recipes.common.data.splits import Batch, Split
from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.process.signals import STOP_SIGNALS

MAX_WARNINGS = 10
"""Of images that are left out; all are counted."""


class WorkerError(UserError):
    """A worker process of this rank died or hangs; the next launch may have better luck."""

    status = 1

    def __init__(self, message: str) -> None:
        super().__init__(message, on_one_rank=True)


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


@functools.cache
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


def end_with_rank(worker_id: int) -> None:
    """Let this worker end when its rank has gone; the loader itself takes the fork server for the rank."""
    rank = multiprocessing.parent_process()
    assert rank

    def wait() -> NoReturn:
        rank.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise a WorkerError where a wait for workers takes longer, or one of them has died.

    All ranks may wait for the same file system: then none of them is in a collective, which has a bound.
    """
    place = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"

    def give_up(number: int, frame: types.FrameType | None) -> NoReturn:
        why = "a worker hangs, perhaps in a file system that does not answer"
        fix = "fix this, then add --resume auto; for samples that take so long, raise --timeout-s"
        raise WorkerError(f"{place} got no samples for {seconds:g} s: {why}; {fix}")

    handler = signal.signal(signal.SIGALRM, give_up)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        fix = "is memory short? lower --workers, then add --resume auto"
        raise WorkerError(f"{place} lost a worker ({error}); {fix}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)
        signal.signal(signal.SIGALRM, handler)


class Sample(NamedTuple):
    """A sample as a dataset gives it; of a batch, each field holds those of all samples."""

    input: Tensor
    target: Tensor
    fault: str = ""
    """Why it could not be read, so that this one stands in for it."""
    is_damaged: bool = False
    """It was read and is no image: --skip-bad-images may leave it out. Else the fault says what to do."""


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
        dataset: gives each as a Sample; without workers, it is read in this process.
        device: the one that waits for batches.
        on_fault: is told of a sample that is not read, unless --skip-bad-images leaves it out.
        prepare: what makes a batch of inputs, on the device, of those that are read.
    """

    def __init__(
        self,
        dataset: Any,
        args: Options,
        device: torch.device,
        on_fault: Callable[[UserError], None],
        prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs,
    ) -> None:
        self.bound_s = 2 * args.timeout_s + 60  # by then, other ranks have said that they wait for this one
        self.dataset, self.device, self.on_fault, self.prepare = dataset, device, on_fault, prepare
        self.skips_damaged = args.skip_bad_images
        self.idle, self.idle_share, self.has_warned = IdleClock(device), IdleShare(), False
        # Of each batch, (epoch, index) of its samples: the loader keeps its workers, and asks in each epoch anew.
        self.keys: list[Keys] = []
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self.keys,
            num_workers=args.workers,
            pin_memory=device.type == "cuda",
            worker_init_fn=end_with_rank,
            multiprocessing_context=start_server() if args.workers else None,
            persistent_workers=args.workers > 0,
            generator=torch.Generator(),  # else it draws from the one that the step has seeded
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def fingerprint(self) -> str:
        """Return what identifies this split; raises UserError where it cannot be read."""
        return str(self.dataset.fingerprint())

    def storage_order(self) -> Tensor:
        """Return the samples in the order in which they are stored: int64, shape (N,)."""
        order: Tensor = self.dataset.storage_order()
        return order

    def take_warnings(self, train_s: float) -> list[str]:
        """Return that the device waits for samples, once, with its share of the training."""
        share = self.idle_share.end_window(self.idle.seconds(), train_s)
        if share <= MAX_IDLE_SHARE or self.has_warned:
            return []
        self.has_warned = True
        workers = f"{self.loader.num_workers} per rank now, {os.cpu_count()} CPUs on this node"
        return [f"{share:.0%} of the time rank 0 waits for data; raise --workers ({workers})"]

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each index tensor that is not empty (the share of a rank too many is).

        Raises WorkerError if a worker died, or no batch came within the bound.
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
            inputs, targets, faults, are_damaged = batch
            for fault, is_damaged in zip(faults, are_damaged, strict=True):
                if fault:
                    self._report(fault, bool(is_damaged))
            inputs, targets = (tensor.to(self.device, non_blocking=True) for tensor in (inputs, targets))
            yield self.prepare(inputs), targets
        self.keys.clear()

    def _report(self, fault: str, is_damaged: bool) -> None:
        if not is_damaged:
            self.on_fault(UserError(fault))
        elif not self.skips_damaged:
            self.on_fault(UserError(f"{fault}; fix or remove it, or add --skip-bad-images"))
        else:
            self.skipped += 1
            if self.skipped <= MAX_WARNINGS:
                print(f"warning: skipped {fault}", file=sys.stderr, flush=True)
