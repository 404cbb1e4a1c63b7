"""Worker processes that decode for a rank: a fork server starts them, and they block the stop signals.

A fork of the rank itself could hang: one of its threads (checkpoints, pinned memory, network) may hold a lock of
the C library, which then stays locked in the worker (https://github.com/pytorch/pytorch/issues/130610).

Slurm may send USR1 and TERM, "write a checkpoint, then exit", to every process of a job. A worker killed by them
would end its rank before there is a checkpoint. So workers block these signals, and end when their rank ends.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.common.data.idle_clock import MAX_IDLE_SHARE, IdleClock
from recipes.common.data.splits import Batch, Split
from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.process.open_files import WORKER_FILES, allow_open_files
from recipes.common.process.signals import STOP_SIGNALS, block_signals
from recipes.common.process.sockets import choose_socket_folder

MAX_WARNINGS = 10
"""Most warnings about skipped images; all of them are counted."""


MAX_COPIED_BYTES = 2**30
"""Most bytes of NumPy arrays that each worker gets a copy of without a warning."""


class WorkerError(UserError):
    """A worker process of this rank died or hangs; the next launch may succeed."""

    status = 1

    def __init__(self, message: str) -> None:
        super().__init__(message, on_one_rank=True)


def start_tracker() -> None:
    """Start multiprocessing's resource tracker, which removes what killed processes leave behind, and protect it.

    Slurm may send the stop signals to every process of a job, and the launcher ends a rank by USR2 to its group.
    """
    with block_signals(*STOP_SIGNALS, signal.SIGUSR2):
        resource_tracker.ensure_running()


@functools.cache
def start_server() -> BaseContext:
    """Start the fork server, which has to import torch; return the context that starts workers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recipes.common.data.imagefolder"])
    # After a rank was killed, the tracker removes what workers shared with it. It need not warn about that.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    start_tracker()
    choose_socket_folder()
    with block_signals(*STOP_SIGNALS, signal.SIGINT):  # its workers inherit this, and end with the rank
        forkserver.ensure_running()
    # At the rank's exit, this runs before multiprocessing sends TERM to the workers, which block it, and waits.
    util.Finalize(None, _kill_all, exitpriority=100)
    return context


def _kill_all() -> None:
    """Kill the workers and the fork server, which would take a second to exit by itself with torch imported."""
    for process in multiprocessing.active_children():
        process.kill()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keep processes that are started here from importing the main module, which is the recipe."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def end_with_rank(worker_id: int) -> None:
    """End this worker when its rank has ended; the loader's own check would watch the fork server instead."""
    rank = multiprocessing.parent_process()
    assert rank

    def wait() -> NoReturn:
        rank.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def limit_worker_wait(seconds: float) -> Iterator[None]:
    """Raise a WorkerError if a wait for workers takes longer than `seconds`, or one of them has died.

    No other time-out may apply: if all ranks wait for the same file system, none of them is in a collective.
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
    except (RuntimeError, ConnectionError, FileNotFoundError, EOFError) as error:
        reason = (str(error) or type(error).__name__).split("\n")[0]
        fix = "lower --workers, then add --resume auto"
        if "shared memory" in str(error):
            what = f"{place} has no shared memory left for its workers' samples"
            raise WorkerError(f"{what}; enlarge /dev/shm (docker run --shm-size), or {fix}") from error
        if isinstance(error, RuntimeError) and "exited unexpectedly" not in reason:
            raise
        # The other errors come from a worker that was killed before it handed over its samples.
        raise WorkerError(f"{place} lost a worker ({reason}); is memory short? {fix}") from error
    except OSError as error:  # of the semaphores and pipes between this rank and its workers
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENOMEM):
            raise
        fix = "make /dev/shm writable and larger, raise ulimit -n, or lower --workers"
        raise WorkerError(f"{place} cannot reach its workers ({error.strerror}); {fix}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)
        signal.signal(signal.SIGALRM, handler)


class _Unwritten(ForkingPickler):
    """Pickle as for a worker process, but into nothing, and without the values of tensors and arrays."""

    def __init__(self) -> None:
        super().__init__(types.SimpleNamespace(write=len))
        self.array_bytes = 0
        """Bytes of NumPy arrays; a numpy.memmap is one, and pickled whole."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            self.array_bytes += value.nbytes
        return (int, ()) if isinstance(value, Tensor | np.ndarray) else NotImplemented


def check_sendable(dataset: Any, what: str) -> None:
    """Raise UserError if worker processes cannot get this data set, which is called `what` in the message.

    Print a warning on rank 0 if it has large arrays.
    """
    pickler = _Unwritten()
    try:
        pickler.dump(dataset)
    except RuntimeError:
        pass  # a lock or queue can be pickled only for a process that is being started
    except Exception as error:
        fix = "define its functions and classes at module level, drop open files in __getstate__"
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{what}: worker processes cannot get it: {reason}; {fix}, or add --workers 0") from None
    if pickler.array_bytes > MAX_COPIED_BYTES and os.environ.get("RANK", "0") == "0":
        size = f"{pickler.array_bytes / 2**30:.1f} GB"
        fix = "use a torch tensor, which is shared, or drop it in __getstate__"
        print(f"warning: {what}: {size} of NumPy arrays are copied to each worker: {fix}", file=sys.stderr)


class Sample(NamedTuple):
    """A sample as a dataset returns it; for a batch, each field holds the values of all samples."""

    input: Any
    """A tensor; or Encoded (gpu_decode.py)."""
    target: Tensor
    fault: str = ""
    """Why the sample could not be read, if this one is a substitute for it."""
    is_damaged: bool = False
    """Whether it was read but is not an image, which --skip-bad-images may skip. Other faults say what to do."""
    is_passing: bool = False
    """Whether another launch may be able to read it."""


def read_evenly(dataset: Any, most: int) -> list[Sample]:
    """Return up to `most` samples of a data set, evenly spaced; raises UserError if one cannot be read."""
    samples = [dataset[0, index] for index in range(0, len(dataset), -(-len(dataset) // most))]
    for sample in samples:
        if sample.fault:
            raise UserError(sample.fault, is_passing=sample.is_passing)
    return samples


class Keys(list[tuple[int, int]]):
    """(epoch, index) of each sample of a batch."""

    ahead: Sequence[tuple[int, int]] = ()
    """The keys of the batches that the same worker loads next."""


class BatchKeys:
    """Yields the Keys of each batch of an epoch when the loader asks: all at once take 100 bytes a sample.

    `samples` is how many a worker is to know ahead, rounded up to whole batches.
    """

    def __init__(self, workers: int, samples: int) -> None:
        self.workers, self.samples = max(1, workers), samples
        self.epoch = 0
        self.batches: Iterable[Tensor] = ()
        """The indices of each batch's samples: int64."""

    def __iter__(self) -> Iterator[Keys]:
        batches = iter(self.batches)
        later = deque(itertools.islice(batches, 1))
        while later:
            batch = later.popleft()
            reach = self.workers * -(-self.samples // len(batch))
            later.extend(itertools.islice(batches, max(0, max(1, reach) - len(later))))
            keys = Keys(self._keys(batch))
            of_worker = itertools.islice(later, self.workers - 1, reach, self.workers)
            keys.ahead = [key for indices in of_worker for key in self._keys(indices)]
            yield keys

    def _keys(self, batch: Tensor) -> Iterator[tuple[int, int]]:
        return ((self.epoch, index) for index in batch.tolist())


class LoadedSplit(Split):
    """Samples that --workers processes read by (epoch, index), batch by batch.

    Args:
        dataset: returns each sample as a Sample; without workers, it is read in this process.
        device: the device that gets the batches.
        on_fault: gets the error of a sample that cannot be read, unless --skip-bad-images skips it.
        prepare: turns the inputs that were read, on the device, into a batch of inputs.
        collate: makes a batch of samples, in the workers (default: tensors of all their fields).
        decode: turns what collate() returns into a batch of the fields of Sample.
    """

    def __init__(
        self,
        dataset: Any,
        args: Options,
        device: torch.device,
        on_fault: Callable[[UserError], None],
        prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        decode: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.decode = decode
        self.bound_s = 2 * args.timeout_s + 60  # by then, other ranks have reported that they wait for this one
        self.dataset, self.device, self.on_fault, self.prepare = dataset, device, on_fault, prepare
        self.skips_damaged = args.skip_bad_images
        self.idle, self.has_warned = IdleClock(device), False
        self.keys = BatchKeys(args.workers, getattr(dataset, "ahead", 0))
        if args.workers:
            allow_open_files(WORKER_FILES * args.workers, f"--workers {args.workers}")
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self.keys,
            num_workers=args.workers,
            pin_memory=device.type == "cuda",
            collate_fn=collate,
            worker_init_fn=end_with_rank,
            multiprocessing_context=start_server() if args.workers else None,
            persistent_workers=args.workers > 0,
            generator=torch.Generator(),  # otherwise it draws from the one that the step has seeded
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def fingerprint(self) -> str:
        """Return a string that identifies this split; raises UserError if it cannot be read."""
        return str(self.dataset.fingerprint())

    def storage_order(self) -> Tensor:
        """Return the samples' indices in storage order: int64, shape (N,)."""
        return self.dataset.storage_order()

    def take_warnings(self, train_s: float) -> list[str]:
        """Return a warning, once, if the device waits for samples for too large a share of the training."""
        share = self.idle.end_window(train_s)
        if share <= MAX_IDLE_SHARE or self.has_warned:
            return []
        self.has_warned = True
        workers = f"{self.loader.num_workers} per rank now, {os.cpu_count()} CPUs on this node"
        return [f"{share:.0%} of the time rank 0 waits for data; raise --workers ({workers})"]

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each index tensor that is not empty (a rank without samples has empty ones).

        Raises WorkerError if a worker died, or no batch came within the bound.
        """
        # The loader keeps its workers, and reads the keys again in each epoch.
        self.keys.epoch, self.keys.batches = epoch, (index for index in indices if len(index))
        with without_main(), limit_worker_wait(self.bound_s):  # if workers are kept, this waits for each of them
            loaded = iter(self.loader)
        while True:
            with self.idle.waiting(), limit_worker_wait(self.bound_s):
                batch = next(loaded, None)
            if batch is None:
                break
            inputs, targets, *faults = self.decode(batch)
            for fault, is_damaged, is_passing in zip(*faults, strict=True):
                if fault:
                    self._report(fault, bool(is_damaged), bool(is_passing))
            inputs, targets = (tensor.to(self.device, non_blocking=True) for tensor in (inputs, targets))
            yield self.prepare(inputs), targets
        self.keys.batches = ()

    def unreported(self) -> Split:
        """Return this split, whose samples that cannot be read are neither counted nor reported."""
        other = copy.copy(self)
        other.skips_damaged, other.on_fault = False, lambda error: None
        return other

    def _report(self, fault: str, is_damaged: bool, is_passing: bool) -> None:
        if not is_damaged:
            self.on_fault(UserError(fault, is_passing=is_passing))
        elif not self.skips_damaged:
            self.on_fault(UserError(f"{fault}; fix or remove it, or add --skip-bad-images"))
        else:
            self.skipped += 1
            if self.skipped <= MAX_WARNINGS:
                print(f"warning: skipped {fault}", file=sys.stderr, flush=True)
