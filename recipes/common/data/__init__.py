"""Data sets, and batches of them by index: a recipe decides which indices are its rank's share.

Small data sets are on the device as one uint8 tensor, which is indexed. Worker processes read and decode images in
folders and in shards, and read files of tokens (imagefolder.py, shards.py, tokens.py). A recipe sees a `Split` of
either.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.common.arguments import is_user_code, url_of
from recipes.common.data.splits import EVAL_BATCH_SIZE, Batch, Data, RawSplits, Spec, Split, TensorSplit
from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.task import Classification, Task

__all__ = ["EVAL_BATCH_SIZE", "Batch", "Data", "Spec", "Split", "TensorSplit", "load_data"]


def find_for_all_ranks(args: Options) -> bytes:
    """Return what one rank finds for all: a folder's images or files of tokens, or a server's index of shards.

    Raises UserError if the data are missing or malformed.
    """
    if args.data == "imagefolder":
        from recipes.common.data.imagefolder import find_images

        return find_images(args.data_dir).to_bytes()
    if args.data == "tokens":
        from recipes.common.data.tokens import find_token_files

        return find_token_files(args)
    if args.data == "shards" and url_of(args.data_dir):
        from recipes.common.data.shards import read_index

        return read_index(args)
    return b""


def unread_folder(args: Options) -> str:
    """Return a warning if --data does not read the folder that --data-dir names, else "".

    An empty folder causes none: the manifests name one for data that may come later.
    """
    if args.data not in ("digits", "synthetic") or args.data_dir == Options.data_dir:
        return ""
    with contextlib.suppress(OSError):
        if not any(args.data_dir.iterdir()):
            return ""
    fix = "give --data imagefolder, cifar10, ..., or drop it"
    return f"warning: --data {args.data} does not read --data-dir {args.data_dir}; {fix}"


def load_data(
    args: Options, device: torch.device, on_bad_image: Callable[[UserError], None], found: bytes = b""
) -> Data:
    """Return the data set of --data; data that are held in memory are on the device.

    `on_bad_image` gets the error of an image that cannot be read or decoded (unless --skip-bad-images counts it),
    of tokens, or of a user's sample. It must not raise: the batch has a substitute for that sample, so that this
    rank takes part in collectives until all ranks stop together. `found` is rank 0's find_for_all_ranks().

    Raises UserError if the data are missing, empty or malformed, or --task does not accept them.
    """
    data = _load(args, device, on_bad_image, found)
    return replace(data, task=build_task(args, data.kind, data.target.shape))


def _load(args: Options, device: torch.device, on_bad_image: Callable[[UserError], None], found: bytes) -> Data:
    if args.data == "imagefolder":
        from recipes.common.data.imagefolder import load_imagefolder

        return load_imagefolder(args, device, on_bad_image, found)
    if args.data == "shards":
        from recipes.common.data.shards import load_shards

        return load_shards(args, device, on_bad_image, found)
    if args.data == "text":
        from recipes.common.data.text import load_text

        return load_text(args, device)
    if args.data == "tokens":
        from recipes.common.data.tokens import load_tokens

        return load_tokens(args, device, on_bad_image, found)
    if is_user_code(args.data):
        from recipes.common.data.user_data import load_user_data

        return load_user_data(args, device, on_bad_image)
    (train_images, train_labels), (test_images, test_labels) = _load_images(args)
    pixels = train_images.transpose(0, 1).flatten(1).float()
    mean, std = pixels.mean(dim=1), pixels.std(dim=1).clamp(min=1e-6)

    def split(images: Tensor, labels: Tensor, make: Callable[..., TensorSplit] = TensorSplit) -> TensorSplit:
        return make(images.to(device), labels.to(device), mean, std, args.channels_last)

    make_train: Callable[..., TensorSplit] = TensorSplit
    if args.augment == "crop-flip":
        from recipes.common.data.crop_flip import CropFlipSplit

        make_train = partial(CropFlipSplit, seed=args.seed)
    return Data.of_images(
        train=split(train_images, train_labels, make_train),
        test=split(test_images, test_labels),
        channels=train_images.shape[1],
        image_size=train_images.shape[2],
        num_classes=int(train_labels.max()) + 1,
    )


def _load_images(args: Options) -> RawSplits:
    if args.data == "digits":
        return _digits(args)
    if args.data == "synthetic":
        from recipes.common.data.synthetic import draw_images

        return draw_images(args)
    from recipes.common.data.torchvision_data import load_torchvision

    return load_torchvision(args)


def _digits(args: Options) -> RawSplits:
    """Return the UCI handwritten digits that scikit-learn includes: 1,797 real images of 8x8, 10 classes.

    Source: E. Alpaydin and C. Kaynak, https://doi.org/10.24432/C50P49 (CC BY 4.0).
    """
    # The file is read directly: importing scikit-learn would cost each rank over a second.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("--data digits needs scikit-learn; install it with `pip install scikit-learn`")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        rows = torch.from_numpy(np.loadtxt(path, np.uint8, delimiter=","))
    except OSError as error:
        raise UserError(f"--data digits: cannot read {path}: {error}; reinstall scikit-learn") from None
    images, labels = rows[:, :64].reshape(-1, 1, 8, 8), rows[:, 64].long()
    # The file is sorted by writer: shuffle once, the same for every --seed, and hold out a fifth.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return (images[train], labels[train]), (images[test], labels[test])


def build_task(args: Options, kind: str, shape: Sequence[int]) -> Task:
    """Return the task of --task; with auto, the one for targets of this kind. `shape` is one target's.

    Raises UserError if the task does not fit the data, or is not a Task.
    """
    if args.label_smoothing and (is_user_code(args.task) or kind != "class"):
        raise UserError(f"--label-smoothing {args.label_smoothing} is for --task classification; drop it")
    if is_user_code(args.task):
        from recipes.common.user_code import build_user_task

        return build_user_task(args)
    if kind == "values" and args.task == "auto":
        fix = "add --task package.module:Class (docs/your-model.md)"
        raise UserError(f"--data {args.data}: no built-in task takes values; {fix}")
    needed = "classification" if kind == "class" else "language-model"
    if args.task not in ("auto", needed) or kind == "values":
        raise UserError(f"--task {args.task} does not fit --data {args.data}, whose targets are {kind}")
    if needed == "classification":
        return Classification(args.label_smoothing)
    if len(shape) != 1:
        raise UserError(f"--data {args.data}: targets of shape {shape}; tokens have the shape (T,)")
    from recipes.common.language import LanguageModel

    return LanguageModel(shape[0], kind.removesuffix("s"), args.seed)
