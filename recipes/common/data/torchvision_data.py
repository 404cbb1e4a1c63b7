"""--data fashion-mnist and cifar10: torchvision's data sets. Their import takes over a second."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
from torchvision import datasets

from recipes.common.data.splits import Batch, RawSplits
from recipes.common.errors import UserError
from recipes.common.options import Options


def load_torchvision(args: Options) -> RawSplits:
    """Return Fashion-MNIST (60,000 + 10,000 of 1x28x28) or CIFAR-10 (50,000 + 10,000 of 3x32x32).

    Raises UserError if files are missing or damaged, or a download fails.
    """
    load = {"fashion-mnist": datasets.FashionMNIST, "cifar10": datasets.CIFAR10}[args.data]

    def read(train: bool) -> Batch:
        dataset = load(str(args.data_dir), train=train, download=args.download)
        images = torch.as_tensor(dataset.data)
        labels = torch.as_tensor(dataset.targets, dtype=torch.int64)
        return (images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)), labels

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(args.timeout_s)  # for a download: torchvision would wait forever for a silent server
    try:
        with _one_process_at_a_time(args.data_dir) if args.download else contextlib.nullcontext():
            return read(train=True), read(train=False)
    except UserError:
        raise
    except OSError as error:  # a failed download is a URLError, which is an OSError
        raise UserError(f"--data {args.data} from --data-dir {args.data_dir}: {error}") from None
    except (RuntimeError, ValueError, AssertionError) as error:  # files are missing, cut or damaged
        what = f"--data {args.data} is missing or damaged in --data-dir {args.data_dir}"
        if not args.download:
            raise UserError(f"{what}; add --download to fetch it") from None
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        fix = "remove what is there of it, or copy it from a machine with a network"
        raise UserError(f"{what}, and --download does not replace it ({reason}); {fix}") from None
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Let one rank of a node download while the others wait; they then find the files in place."""
    path = folder / ".download.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS):
            raise
        yield  # all files may be there; if not, torchvision raises the same error
        return
    with open(path, "a") as lock:  # "w" would empty what a link leads to
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            what = f"cannot lock {lock.name}: {error.strerror} (Lustre without the mount option flock?)"
            fix = "download once without a job, on a local disk, and copy the files there"
            raise UserError(f"--download: {what}; {fix}") from None
        yield
