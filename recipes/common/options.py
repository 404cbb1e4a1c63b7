"""The options that every recipe takes, from the command line and from a small YAML file (--config).

A recipe adds its own in a dataclass that inherits from Options. Invalid options raise a UserError: one line with
the offending value and how to fix it.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, fields
from inspect import get_annotations
from pathlib import Path
from typing import TypeVar

from recipes.common.arguments import (
    Parser,
    choice,
    fraction,
    is_user_code,
    non_negative_float,
    non_negative_int,
    one_of_or_own,
    option,
    path_or_url,
    plain_name,
    positive_float,
    positive_int,
    seconds,
    switch,
    two_or_more,
    url_of,
    whole_number,
)
from recipes.common.errors import UserError

TEXTS = ("text", "tokens")
"""The values of --data whose samples are --seq-len tokens."""
DATA = ("digits", "fashion-mnist", "cifar10", "imagefolder", "shards", "synthetic", *TEXTS)
TASKS = ("auto", "classification", "language-model")

ONLY_FOR = {
    "cache_dir": ("shards",),
    "download": ("fashion-mnist", "cifar10"),
    "image_size": ("imagefolder", "shards", "synthetic"),
    "eval_resize": ("imagefolder", "shards"),
    "augment": ("cifar10", "fashion-mnist"),
    "num_samples": ("synthetic",),
    "decode": ("imagefolder", "shards"),
    "shuffle_block": ("shards",),
    "skip_bad_images": ("imagefolder", "shards"),
    "seq_len": TEXTS,
    "vocab_size": ("tokens",),
}
"""The values of --data to which an option applies; other options apply to all."""

MOST_GRAPHS = 8
"""Times that torch compiles a model before it leaves the rest uncompiled: torch.compiler's recompile_limit."""

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
TEXT_DEFAULTS = {"model": "gpt-tiny", "optimizer": "adamw"}
"""Defaults for TEXTS that differ from those for images; text also has a --data-dir, STANDARD_LIBRARY."""
TEXT_STEPS = 300
"""Length of a run on TEXTS without --epochs and --max-steps: minutes on two cores."""

ADAMW_LR = {"gpt-tiny": 0.004, "gpt-small": 0.0006, "gpt-medium": 0.0003, "gpt-xl": 0.0002}
"""The default --lr of adamw by model: Brown et al. 2020, arXiv 2005.14165, table 2.1; gpt-tiny's: tried here."""
OTHER_ADAMW_LR = 0.001
"""The default --lr of adamw for other models: torch's."""
TORCHVISION_WEIGHT_DECAY = 0.0001
"""The default --weight-decay of sgd for torchvision's models: as in torchvision's references/classification."""
OWN_MODELS = ("lenet", "vit-tiny", *ADAMW_LR)
"""The models of this repository; other names are torchvision's, or the user's code."""

HOOKED = "_recipes_hooked_parameters"
"""Attribute of a user's model: the names of the parameters that had gradient hooks when it was built."""
HALVES = "_recipes_half_parameters"
"""Attribute of a user's model: the names and types of the 16-bit parameters that it had when it was built."""


def option_applies(name: str, data: str) -> bool:
    """Return whether the option of this name, with underscores, has a meaning with this value of --data."""
    return name not in ONLY_FOR or data in ONLY_FOR[name]


def resume_mode(text: str) -> str:
    """Return a value of --resume if it is valid."""
    if text not in ("none", "auto"):
        raise argparse.ArgumentTypeError(f"expects none or auto, got {text!r}; a new run: --start-from {text}")
    return text


@dataclass(frozen=True)
class RunOptions:
    """Run and record."""

    config: Path | None = option(None, Path, "YAML file of options; flags given here win", "FILE")
    name: str | None = option(None, plain_name, "the run's name (default: RECIPE-001, -002, ...)")
    runs_dir: Path = option(Path("runs"), Path, "where runs are kept", "DIR")
    overwrite: bool = switch("replace an earlier run of the same name")
    resume: str = option(
        "none",
        resume_mode,
        "auto: resume the run --name (without it: this recipe's most recently launched run) from its newest good "
        "checkpoint, with the options given now, or begin it if it has none; none: begin a new run",
        "{none,auto}",
    )
    start_from: Path | None = option(
        None,
        Path,
        "begin a new run from this checkpoint, or this run folder's newest one: at its step, with its state",
        "PATH",
    )
    checkpoint_every: int = option(
        0, non_negative_int, "steps between checkpoints besides those at each epoch's end; 0: none", "STEPS"
    )
    evaluate_every: int = option(
        0,
        non_negative_int,
        "steps between evaluations, each with a checkpoint, besides those at each epoch's end; 0: none",
        "STEPS",
    )
    async_checkpoints: bool = switch(
        "write checkpoints from a copy of the state while training continues", default=True
    )
    sharded_checkpoints: bool = switch(
        "fsdp, tensor, and context with --fully-shard: every rank writes and reads its own part of a checkpoint"
    )
    keep_checkpoints: int = option(3, positive_int, "keep the newest K and the best", "K")
    log_every: int = option(10, positive_int, "steps between logged losses", "STEPS")
    tensorboard: bool = switch("write TensorBoard events", default=True)
    profile_steps: int = option(
        0,
        whole_number(0, 100),
        "record N steps of rank 0 with torch.profiler in the run's trace.json.gz, after up to 10 steps; 0: none",
        "N",
    )
    timeout_s: float = option(
        300.0, seconds, "longest wait for another rank, in seconds, before the job ends with an error", "S"
    )
    straggler_share: float = option(
        0.25,
        non_negative_float,
        "warn about a rank whose own work exceeds the others' by this share of a step; 0: never",
        "X",
    )
    straggler_window_s: float = option(10.0, positive_float, "window of --straggler-share, in seconds", "S")


@dataclass(frozen=True)
class DataOptions(RunOptions):
    """Data and model."""

    data: str = option(
        "digits",
        one_of_or_own(*DATA),
        f"one of {', '.join(DATA)}, or package.module:function for your own; text and tokens have other "
        "defaults: gpt-tiny, adamw, 300 steps",
    )
    data_dir: Path = option(
        Path("data"),
        path_or_url,
        "folder of the data set; shards: also a URL (https://, or a protocol of fsspec such as s3://); text: "
        "default is Python's standard library",
        "DIR",
    )
    cache_dir: Path | None = option(
        None, Path, "cache the shards of a server in this folder, on a local disk of each node", "DIR"
    )
    download: bool = switch("fetch fashion-mnist or cifar10 into --data-dir when missing")
    image_size: int = option(
        224,
        whole_number(1, 2**14),
        "height and width of the images of imagefolder, shards and synthetic",
        "PIXELS",
    )
    eval_resize: int | None = option(
        None,
        whole_number(1, 2**14),
        "imagefolder, shards: scale the shorter side of a test image to this, before the centre of --image-size "
        "is cut out (default: 256/224 of that)",
        "PIXELS",
    )
    augment: str = choice(
        "cifar10, fashion-mnist: crop-flip moves each training image by up to 4 pixels and mirrors half of them",
        *("none", "crop-flip"),
    )
    num_samples: int = option(2048, whole_number(1, 2**31), "training images of synthetic data", "N")
    workers: int = option(
        2,
        non_negative_int,
        "processes that read samples, per rank (imagefolder, shards, tokens, your own data sets)",
        "N",
    )
    decode: str = choice(
        "where JPEGs of imagefolder and shards are decoded: by --workers, or a batch at once on each rank's GPU",
        *("workers", "gpu"),
    )
    shuffle_block: int = option(
        1,
        positive_int,
        "shards: shuffle blocks of N adjacent images; one request to a server fetches a block",
        "N",
    )
    skip_bad_images: bool = switch("count images that do not decode and train without them")
    seq_len: int = option(128, positive_int, "tokens of a sample; of text: bytes", "N")
    vocab_size: int = option(
        50_304,
        whole_number(1, 2**31),
        "tokens: size of the tokenizer's vocabulary; the default is GPT-2's, rounded up to a multiple of 128",
        "N",
    )
    model: str = option(
        "lenet",
        one_of_or_own(),
        "lenet, vit-tiny, a classification model of torchvision, gpt-tiny, -small, -medium or -xl for text and "
        "tokens, or package.module:function for your own",
    )
    task: str = option(
        "auto",
        one_of_or_own(*TASKS),
        "the loss and metrics: classification, language-model, or package.module:Class for your "
        "own; auto: what the data are for",
    )
    weights: Path | None = option(
        None,
        Path,
        "start a new run from these weights: a file with a state dict, a checkpoint, or a run's folder (its best "
        "checkpoint); what does not fit keeps its initial values",
        "PATH",
    )
    evaluate: bool = switch("evaluate --weights on the test set, and end without training")

    @property
    def may_start_from_file(self) -> bool:
        """Whether the run may start from a checkpoint or from given weights."""
        return self.resume == "auto" or bool(self.start_from or self.weights)

    def check_start(self) -> None:
        """Raise UserError unless the run starts from one thing, or nothing, and can write its record."""
        if self.tensorboard and str(self.runs_dir).encode(errors="ignore") != os.fsencode(self.runs_dir):
            fix = "choose another name, set LC_ALL=C.UTF-8, or add --no-tensorboard"
            raise UserError(f"--runs-dir {self.runs_dir}: TensorBoard writes only to names in UTF-8; {fix}")
        if self.weights and self.start_from:
            raise UserError("--weights and --start-from: a run starts from one of the two; drop one")
        if self.evaluate and not self.weights:
            raise UserError("--evaluate: it takes the weights of a file or a run; add --weights PATH")
        if self.evaluate and self.profile_steps:
            raise UserError("--profile-steps: with --evaluate there are no steps; drop one of the two")


@dataclass(frozen=True)
class TrainingOptions(DataOptions):
    """Training."""

    global_batch_size: int = option(
        64, positive_int, "samples per optimizer step over all ranks, whatever their number", "N"
    )
    accumulate_steps: int = option(
        1, positive_int, "split each rank's batch into N passes and sum the gradients: 1/N of the activations", "N"
    )
    epochs: int | None = option(
        40, positive_int, "passes over the data; no limit if only --max-steps is given", "N"
    )
    max_steps: int | None = option(
        None, positive_int, "total number of optimizer steps; the learning-rate schedule ends there, too", "N"
    )
    optimizer: str = option(
        "sgd",
        one_of_or_own("sgd", "adamw"),
        "sgd with --momentum, adamw, or package.module:function for your own",
    )
    lr: float = option(
        0.02,
        positive_float,
        "peak learning rate; default with adamw, or with your own optimizer for text: 0.004 for gpt-tiny, "
        "0.0006 for gpt-small, 0.0003 for gpt-medium, 0.0002 for gpt-xl, otherwise 0.001",
    )
    scale_lr: bool = switch("linear scaling rule: --lr is for 256 samples, use lr * global_batch_size / 256")
    momentum: float = option(0.9, fraction, "momentum of sgd", "X")
    beta2: float = option(0.999, fraction, "decay of adamw's mean of squared gradients", "X")
    weight_decay: float = option(
        0.01,
        non_negative_float,
        "an L2 penalty in sgd, decoupled in adamw; default of torchvision's models with sgd: 0.0001",
        "X",
    )
    decay_norm_bias: bool = switch(
        "apply weight decay to norms and biases, too (parameters with fewer than two dimensions)", default=True
    )
    lr_schedule: str = choice("the learning rate after the warm-up", "cosine", "linear", "constant")
    min_lr_share: float = option(0.0, fraction, "cosine and linear: end at this share of the peak rate", "X")
    warmup_steps: int = option(100, non_negative_int, "steps in which the learning rate rises linearly", "N")
    warmup_epochs: float | None = option(None, non_negative_float, "the warm-up in epochs, such as 5 or 0.5", "X")
    label_smoothing: float = option(
        0.0, fraction, "classification: share of a target that is spread over all classes, in test_loss too", "X"
    )
    clip_grad_norm: float | None = option(
        None, positive_float, "scale a larger gradient of the model down to this L2 norm (default: off)", "NORM"
    )
    on_nonfinite: str = choice(
        "a loss or gradient that is not finite: stop the job with its step and ranks, or skip that step; "
        "with a dynamic loss scale (fp16) the scaler skips it, and stop ends the job only at a logged loss",
        *("stop", "skip"),
    )


@dataclass(frozen=True)
class Options(TrainingOptions):
    """Precision, speed and repeatability."""

    device: str = choice("auto: GPUs where there are any", "auto", "cpu", "cuda")
    amp: str = choice("mixed precision; fp16: with a gradient scaler", "none", "bf16", "fp16")
    tf32: bool | None = switch(
        "TF32 for float32 matrix products and convolutions of GPUs, or for neither (default: convolutions)", None
    )
    sync_batchnorm: bool = switch("batch-norm statistics over each pass of all ranks (GPUs)")
    batchnorm_group: int | None = option(
        None,
        two_or_more,
        "batch-norm statistics over each G samples of the global batch, the same at every number of processes",
        "G",
    )
    channels_last: bool = switch(
        "NHWC memory layout, the faster one for convolutions; off by default for a model of your own", default=True
    )
    activation_checkpointing: bool = switch("keep only the inputs of blocks, and run them again in backward")
    compile: bool = switch("torch.compile the model")
    compile_mode: str = choice(
        "torch.compile's mode; reduce-overhead records CUDA graphs, which speed up small models",
        *("default", "reduce-overhead", "max-autotune"),
    )
    seed: int = option(0, whole_number(0, 2**63 - 1), "seed of weights, order and augmentation")
    deterministic: bool = switch("bit-for-bit repeatable kernels")

    def check(self) -> None:
        """Raise UserError if options do not combine."""
        self.check_start()
        self.check_data()
        if self.sharded_checkpoints and not self.has_shards:
            fix = "drop it, or use fsdp, tensor, or context with --fully-shard"
            raise UserError(f"--sharded-checkpoints: the ranks of this recipe hold no shards; {fix}")
        self.check_optimizer()
        if self.compile_mode != "default" and not self.compile:
            raise UserError(f"--compile-mode {self.compile_mode} is for compiled models; add --compile")
        if self.records_graphs and self.exchanges_in_forward:
            # NCCL waits for all graphs that hold a communicator before it ends it, and torch keeps its graphs.
            what = "a CUDA graph must not hold the collectives that forward() and backward() have here"
            raise UserError(f"--compile-mode {self.compile_mode}: {what}; use --compile-mode default")
        if self.records_graphs and self.accumulate_steps > 1:
            # A pass's gradients are in the graph's memory, which the next pass overwrites: pytorch#169545.
            flags = f"--compile-mode {self.compile_mode} with --accumulate-steps {self.accumulate_steps}"
            what = "a CUDA graph overwrites the gradients of the pass before"
            raise UserError(f"{flags}: {what}; use --compile-mode default")
        if self.compile and self.batchnorm_group and self.passes >= MOST_GRAPHS:
            # A group's weight in the running statistics depends on its pass; evaluation is one more graph.
            what = f"each of {self.passes} passes is compiled by itself, and torch compiles {MOST_GRAPHS} at most"
            fix = f"use up to {MOST_GRAPHS - 1} passes, or drop --compile"
            raise UserError(f"--compile with --batchnorm-group {self.batchnorm_group}: {what}; {fix}")
        if self.batchnorm_group and self.activation_checkpointing:
            fix = "drop --activation-checkpointing"
            raise UserError(f"--batchnorm-group: blocks that run again would count their statistics twice; {fix}")
        if self.batchnorm_group and self.sync_batchnorm:
            what = "statistics are over groups or the batch"
            raise UserError(f"--batchnorm-group and --sync-batchnorm: {what}; drop one")

    def check_data(self) -> None:
        """Raise UserError if options of the data do not combine."""
        is_remote = self.data == "shards" and url_of(self.data_dir)
        if url_of(self.data_dir) and not is_remote:
            fix = "pack images by `make shards`, and give --data shards; or copy the data to a disk"
            raise UserError(f"--data-dir {url_of(self.data_dir)}: only shards can be read from a server; {fix}")
        for name, sources in ONLY_FOR.items():
            value = getattr(self, name)
            if value != getattr(Options, name) and not option_applies(name, self.data):
                words = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
                raise UserError(f"{words} is for --data {' and '.join(sources)}; drop it")
        if self.cache_dir and not is_remote:
            raise UserError(f"--cache-dir {self.cache_dir} is for --data shards on a server; drop it")
        if self.shuffle_block > self.global_batch_size:
            what = f"more images than --global-batch-size {self.global_batch_size}"
            raise UserError(f"--shuffle-block {self.shuffle_block}: {what}; a block of 1 MB is long enough")
        if self.eval_resize and self.eval_resize < self.image_size:
            what = f"the centre of --image-size {self.image_size} does not fit into it"
            raise UserError(f"--eval-resize {self.eval_resize}: {what}; use at least {self.image_size}")

    def check_optimizer(self) -> None:
        """Raise UserError if options of the optimizer and its schedule do not combine."""
        if self.lr_schedule == "constant" and self.min_lr_share:
            what = f"--min-lr-share {self.min_lr_share} is for --lr-schedule cosine and linear"
            raise UserError(f"{what}; drop one of the two")
        if self.warmup_epochs is not None and self.warmup_steps != Options.warmup_steps:
            flags = f"--warmup-epochs {self.warmup_epochs:g} and --warmup-steps {self.warmup_steps}"
            raise UserError(f"{flags}: both are the length of the warm-up; drop one of the two")
        if self.optimizer != "adamw" and self.beta2 != Options.beta2:
            raise UserError(f"--beta2 {self.beta2} is for adamw; drop it, or use --optimizer adamw")
        if self.optimizer != "sgd" and self.momentum != Options.momentum:
            raise UserError(f"--momentum {self.momentum} is for sgd; drop it, or use --optimizer sgd")
        if is_user_code(self.optimizer) and not self.decay_norm_bias:
            raise UserError("--no-decay-norm-bias is for sgd and adamw; drop it, and set each group's decay")

    def check_world_size(self, world_size: int) -> None:
        """Raise UserError if the recipe cannot share out its work among so many processes."""

    @property
    def has_shards(self) -> bool:
        """Whether ranks hold shards of the model."""
        return False

    @property
    def has_user_code(self) -> bool:
        """Whether --data, --model, --task or --optimizer names the user's own code."""
        return any(map(is_user_code, (self.data, self.model, self.task, self.optimizer)))

    @property
    def takes_sparse_gradients(self) -> bool:
        """Whether gradients that hold only some rows, as of nn.Embedding(sparse=True), are summed and applied.

        Recipes with shards exchange them as whole tensors.
        """
        return self.optimizer == "sgd" and not self.weight_decay and not self.has_shards

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of the whole run."""
        limits = [self.max_steps, self.epochs and self.epochs * steps_per_epoch]
        return min(limit for limit in limits if limit)

    def total_warmup_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of the warm-up."""
        return self.warmup_steps if self.warmup_epochs is None else round(self.warmup_epochs * steps_per_epoch)

    @property
    def passes(self) -> int:
        """Number of a rank's passes through a model in a step, one after another."""
        return self.accumulate_steps

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether the model's own operations, which --compile compiles, are collectives in part."""
        return self.sync_batchnorm

    @property
    def records_graphs(self) -> bool:
        """Whether --compile-mode records CUDA graphs, if there is a GPU; all modes except the default one do."""
        return self.compile_mode != "default" and self.device != "cpu"


T = TypeVar("T")


def parse(kind: type[T], recipe: str, doc: str | None, argv: Sequence[str] | None = None) -> T:
    """Return a recipe's options from the command line and a --config file, which the command line overrides.

    `kind` is the dataclass of its options: each class that it inherits from is a group of --help. `doc` is the
    recipe's docstring, `argv` has the command line's arguments (default: this process's).

    Raises UserError for an unknown option (with the nearest one), a bad value or file, or options that do not
    combine.
    """
    parser = Parser(f"python -m recipes.{recipe}.train", doc)
    declared = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    for part in reversed(kind.__mro__):
        names = [name for name in get_annotations(part) if name in declared]
        group = parser.add_argument_group((part.__doc__ or "").split("\n")[0].rstrip(".")) if names else parser
        for name in names:
            flag, default = f"--{name.replace('_', '-')}", declared[name].default
            group.add_argument(flag, default=default, **declared[name].metadata)
    words = list(sys.argv[1:] if argv is None else argv)
    found = parser.parse_words(words)
    if config := getattr(found, "config", None):
        from recipes.common.config_file import config_to_argv  # importing PyYAML takes 20 ms

        from_file = config_to_argv(config, parser.flags())
        if any(word.startswith("--warmup-") for word in words):  # in steps or epochs: it replaces the file's
            from_file = [word for word in from_file if not word.startswith("--warmup-")]
        words = [*from_file, *words]
        found = parser.parse_words(words)
    if issubclass(kind, Options):
        found = fill_defaults(parser, words, found)
    args = kind(**vars(found))
    if isinstance(args, Options):
        args.check()
    return args


def fill_defaults(parser: Parser, words: Sequence[str], found: argparse.Namespace) -> argparse.Namespace:
    """Return the options in `words` with the defaults that depend on other options; `found` has the plain ones."""
    if found.data in TEXTS:
        folder = {"data_dir": STANDARD_LIBRARY} if found.data == "text" else {}
        parser.set_defaults(**TEXT_DEFAULTS, **folder)
    parser.set_defaults(epochs=None)
    found = parser.parse_words(words)
    if is_user_code(found.model):
        parser.set_defaults(channels_last=False)  # your code may need torch's own layout, as tensor.view() does
    elif found.model not in OWN_MODELS and found.optimizer == "sgd":
        parser.set_defaults(weight_decay=TORCHVISION_WEIGHT_DECAY)
    if found.optimizer == "adamw" or (found.data in TEXTS and is_user_code(found.optimizer)):
        parser.set_defaults(lr=ADAMW_LR.get(found.model, OTHER_ADAMW_LR))
    found = parser.parse_words(words)
    if found.epochs is None and found.max_steps is None:
        length = {"max_steps": TEXT_STEPS} if found.data in TEXTS else {"epochs": Options.epochs}
        vars(found).update(length)
    return found


def check_batch(args: Options, world_size: int, num_train: int) -> None:
    """Raise UserError if a batch leaves a rank without a sample, or is larger than the training set.

    The error names the smallest or largest size that works. A remainder is allowed: the global batch is spread
    over the ranks as evenly as possible, in whole groups of --batchnorm-group.
    """
    size, group, parts = args.global_batch_size, args.batchnorm_group, world_size * args.accumulate_steps
    if world_size > num_train:
        raise UserError(f"{world_size} processes for {num_train} training samples; start at most {num_train}")
    if size > num_train:
        raise UserError(f"--global-batch-size {size} is larger than the training set; use at most {num_train}")
    if group:
        check_divides(args, group, f"groups of --batchnorm-group {group}", num_train)
    if size < parts * (group or 1):
        shares, fix = f"{world_size} processes x {args.accumulate_steps} accumulation steps", ""
        if group:
            shares += f" x a group of {group}"
            smaller = [n for n in range(2, size // parts + 1) if size % n == 0]
            fix = f" or --batchnorm-group {smaller[-1]}" if smaller else ""
        least = parts * (group or 1)
        raise UserError(f"--global-batch-size {size} is too small for {shares}; use at least {least}{fix}")


def check_processes(flag: str, size: int, world_size: int, other: int) -> None:
    """Raise UserError unless the world size is a multiple of a flag's value; `other` is a value that works."""
    if world_size % size:
        fix = f"start {nearest_multiples(world_size, size)}, or give {flag} {other}"
        raise UserError(f"{flag} {size} does not divide {world_size} processes; {fix}")


def nearest_multiples(count: int, size: int) -> str:
    """Return the multiples of `size` next to a count that is none, as "8 or 12"; 0 is left out."""
    below = count // size * size
    return f"{below} or {below + size}" if below else f"{size}"


def check_divides(args: Options, size: int, parts: str, num_train: int) -> None:
    """Raise UserError, with the nearest sizes that work, unless the global batch is a multiple of `size`."""
    if args.global_batch_size % size == 0 and args.global_batch_size <= num_train:
        return
    below = min(args.global_batch_size, num_train) // size * size
    sizes = [str(size) for size in (below, below + size) if 0 < size <= num_train]
    fix = f"use {' or '.join(sizes)}" if sizes else f"that is more than the {num_train} training samples"
    raise UserError(f"--global-batch-size {args.global_batch_size} does not divide into {parts}; {fix}")
