"""The options that every recipe takes, from the command line and from a small YAML file (--config).

A recipe adds its own with `parser.add_argument` and calls `parse`. What cannot work is refused with a
UserError: one line that holds the offending value and the mend.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from recipes.common.errors import UserError, nearest

DATA = ("digits", "fashion-mnist", "cifar10", "imagefolder", "synthetic")


class Options(argparse.Namespace):
    """What the user asked for; read-only once parsed, so that no name changes its meaning half way."""

    _frozen = False

    def freeze(self) -> Options:
        """Refuse every later assignment."""
        object.__setattr__(self, "_frozen", True)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        if self._frozen:
            raise AttributeError(f"options are read-only: derive a local name instead of setting {name}")
        super().__setattr__(name, value)

    def as_dict(self) -> dict[str, Any]:
        """Return the options by name, without the private flag."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class Parser(argparse.ArgumentParser):
    """argparse, with refusals raised as UserError instead of a usage text and an exit."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=HelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print after its usage text."""
        raise UserError(message.removeprefix("argument "))

    def print_help(self, file: Any = None) -> None:
        """Print the help once, not once a rank."""
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)

    def flags(self) -> list[str]:
        """Return every --flag of this parser."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]

    def check(self, args: Options) -> None:
        """Raise UserError where options do not go together."""


class _RecipeParser(Parser):
    def check(self, args: Options) -> None:
        if args.optimizer != "sgd" and args.momentum != self.get_default("momentum"):
            raise UserError(f"--momentum {args.momentum} is for sgd; drop it, or use --optimizer sgd")
        if args.compile_mode != "default" and not args.compile:
            raise UserError(f"--compile-mode {args.compile_mode} is for compiled models; add --compile")


class HelpFormatter(argparse.HelpFormatter):
    """Show the default of every option that has a telling one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=110)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS) or not action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


def _number(convert: Callable[[str], Any], accept: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    def parse_value(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not accept(value):
            raise argparse.ArgumentTypeError(f"wants {wanted}, got {text!r}")
        return value

    return parse_value


positive_int = _number(int, lambda value: value >= 1, "a whole number of at least 1")
non_negative_int = _number(int, lambda value: value >= 0, "a whole number of at least 0")
positive_float = _number(float, lambda value: value > 0, "a number above 0")
non_negative_float = _number(float, lambda value: value >= 0, "a number of at least 0")
fraction = _number(float, lambda value: 0 <= value < 1, "a number of at least 0 and below 1")


def one_of(*words: str) -> Callable[[str], str]:
    """Accept one of the words; a refusal names the nearest one and all of them."""

    def parse_value(text: str) -> str:
        if text not in words:
            choice = ", ".join(words)
            raise argparse.ArgumentTypeError(f"does not know {text!r}{nearest(text, words)} (one of {choice})")
        return text

    return parse_value


def plain_name(text: str) -> str:
    """Accept a run's name: it becomes a folder below --runs-dir and cannot lead out of it."""
    allowed = all(char.isascii() and (char.isalnum() or char in "._-") for char in text)
    if not text or not allowed or not text[0].isalnum() or len(text) > 100:
        raise argparse.ArgumentTypeError(
            f"wants at most 100 letters, digits, '.', '_' and '-', the first a letter or digit, got {text!r}"
        )
    return text


def build_parser(recipe: str, description: str | None) -> Parser:
    """Return a parser with the options that all recipes share."""
    parser = _RecipeParser(f"python -m recipes.{recipe}.train", (description or "").split("\n")[0])
    _add_run_options(parser.add_argument_group("run and record"))
    _add_data_options(parser.add_argument_group("data and model"))
    _add_training_options(parser.add_argument_group("training"))
    _add_compute_options(parser.add_argument_group("precision, speed and repeatability"))
    return parser


def add_switch(group: argparse._ArgumentGroup, flag: str, help_text: str, default: bool = False) -> None:
    """Add --flag and --no-flag."""
    group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=help_text)


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--config", type=Path, metavar="FILE", help="YAML file of options; flags given here win")
    group.add_argument("--name", type=plain_name, help="the run's name (default: RECIPE-001, -002, ...)")
    group.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept")
    add_switch(group, "--overwrite", "replace an earlier run of the same name")
    group.add_argument(
        "--resume",
        default="none",
        metavar="auto|PATH|none",
        help="auto: go on with this run (without --name: the one this recipe was launched in last) from its "
        "newest good checkpoint, with the options given now; PATH: begin a new run from a checkpoint, or from "
        "another run's newest",
    )
    group.add_argument(
        "--checkpoint-every",
        type=non_negative_int,
        default=0,
        metavar="STEPS",
        help="steps between checkpoints besides those at each epoch's end",
    )
    add_switch(
        group,
        "--async-checkpoints",
        "write checkpoints from a copy of the state while training goes on",
        default=True,
    )
    group.add_argument(
        "--keep-checkpoints", type=positive_int, default=3, metavar="K", help="keep the newest K and the best"
    )
    group.add_argument(
        "--log-every", type=positive_int, default=10, metavar="STEPS", help="steps between logged losses"
    )
    add_switch(group, "--tensorboard", "write TensorBoard events", default=True)
    group.add_argument(
        "--timeout-s",
        type=positive_float,
        default=300.0,
        metavar="S",
        help="longest wait for another rank, in seconds, before the job ends with an error",
    )
    group.add_argument(
        "--straggler-share",
        type=non_negative_float,
        default=0.25,
        metavar="X",
        help="name a rank whose own work is longer than that of the others by this share of a step; 0: never",
    )
    group.add_argument(
        "--straggler-window-s", type=positive_float, default=10.0, metavar="S", help="seconds to judge that by"
    )


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data", type=one_of(*DATA), default="digits", help=f"one of {', '.join(DATA)}")
    group.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where the data lie")
    add_switch(group, "--download", "fetch fashion-mnist or cifar10 into --data-dir when missing")
    group.add_argument(
        "--image-size",
        type=positive_int,
        default=224,
        metavar="PIXELS",
        help="side of the images that imagefolder and synthetic yield",
    )
    group.add_argument(
        "--num-samples",
        type=positive_int,
        default=2048,
        metavar="N",
        help="training images of synthetic data",
    )
    group.add_argument(
        "--workers",
        type=non_negative_int,
        default=2,
        metavar="N",
        help="processes that decode images, per rank (imagefolder; other data need none)",
    )
    add_switch(group, "--skip-bad-images", "count images that do not decode and train without them")
    group.add_argument("--model", default="lenet", help="lenet, vit-tiny or a classification model of torchvision")


def _add_training_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--global-batch-size",
        type=positive_int,
        default=64,
        metavar="N",
        help="samples per optimizer step over all ranks, whatever their number",
    )
    group.add_argument(
        "--accumulate-steps",
        type=positive_int,
        default=1,
        metavar="N",
        help="split each rank's batch into N passes whose gradients are summed",
    )
    group.add_argument("--epochs", type=positive_int, default=40, metavar="N", help="passes over the data")
    group.add_argument(
        "--max-steps", type=positive_int, metavar="N", help="end after this many optimizer steps in all"
    )
    group.add_argument("--optimizer", type=one_of("sgd", "adamw"), default="sgd", help="sgd or adamw")
    group.add_argument("--lr", type=positive_float, default=0.02, help="peak learning rate")
    add_switch(
        group, "--scale-lr", "linear scaling rule: --lr is for 256 samples, use lr * global_batch_size / 256"
    )
    group.add_argument("--momentum", type=fraction, default=0.9, help="momentum of sgd")
    group.add_argument("--weight-decay", type=non_negative_float, default=0.01, help="weight decay")
    group.add_argument(
        "--lr-schedule",
        type=one_of("cosine", "constant"),
        default="cosine",
        help="how the learning rate goes on after the warm-up: cosine (to zero) or constant",
    )
    group.add_argument(
        "--warmup-steps", type=non_negative_int, default=100, metavar="N", help="steps of linear warm-up"
    )
    group.add_argument(
        "--clip-grad-norm", type=positive_float, metavar="NORM", help="largest norm of the whole gradient"
    )
    group.add_argument(
        "--on-nonfinite",
        type=one_of("stop", "skip"),
        default="stop",
        help="a loss or gradient that is not finite: stop the job with its step and ranks, or skip that step; "
        "with a dynamic loss scale (fp16) the scaler decides, and skips it",
    )


def _add_compute_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", type=one_of("auto", "cpu", "cuda"), default="auto", help="auto, cpu or cuda")
    group.add_argument(
        "--amp",
        type=one_of("none", "bf16", "fp16"),
        default="none",
        help="mixed precision: none, bf16, or fp16 with a gradient scaler",
    )
    group.add_argument(
        "--tf32",
        action=argparse.BooleanOptionalAction,
        help="TF32 for float32 matrix products and convolutions of GPUs, or for neither (default: convolutions)",
    )
    add_switch(group, "--sync-batchnorm", "batch-norm statistics over the global batch (GPUs)")
    add_switch(group, "--channels-last", "NHWC memory layout, the faster one for convolutions", default=True)
    add_switch(group, "--compile", "torch.compile the model")
    group.add_argument(
        "--compile-mode",
        type=one_of("default", "reduce-overhead", "max-autotune"),
        default="default",
        help="torch.compile's mode; reduce-overhead records CUDA graphs, which small models gain from",
    )
    group.add_argument("--seed", type=non_negative_int, default=0, help="seed of weights, order and augmentation")
    add_switch(group, "--deterministic", "bit-for-bit repeatable kernels")


def parse(parser: Parser, argv: Sequence[str] | None) -> Options:
    """Parse a --config file and then argv, which wins.

    Raises:
        UserError: an unknown option (with the nearest one), a bad value, a bad file.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    only_config = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    only_config.add_argument("--config", type=Path)
    try:
        config = only_config.parse_known_args(words)[0].config
    except argparse.ArgumentError as error:
        raise UserError(str(error).removeprefix("argument ")) from None
    from_file = _words_of_config(parser, config) if config else []
    args, unknown = parser.parse_known_args([*from_file, *words], Options())
    if unknown:
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            raise UserError(f"unexpected argument {word!r}; options begin with --")
        raise UserError(f"unknown option {word}{nearest(word, parser.flags())}; --help lists all")
    parser.check(args)
    return args.freeze()


def _words_of_config(parser: Parser, path: Path) -> list[str]:
    """Return the command-line words that a YAML file of `flag: value` lines stands for."""
    import yaml  # 20 ms, paid only by those who use a file

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise UserError(f"--config {path} must hold lines of the form `flag: value`")
    words = []
    known = [flag.removeprefix("--") for flag in parser.flags() if not flag.startswith("--no-")]
    for key, value in content.items():
        flag = str(key).replace("_", "-")
        if flag not in known or flag in ("config", "help"):
            raise UserError(f"--config {path}: unknown option {key!r}{nearest(flag, known)}")
        is_switch = f"--no-{flag}" in parser.flags()
        if is_switch and isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif is_switch or isinstance(value, bool | list | dict) or value is None:
            wanted = "true or false" if is_switch else "one word or number"
            raise UserError(f"--config {path}: {key} wants {wanted}, got {value!r}")
        else:
            words.append(f"--{flag}={value}")
    return words


def check_batch(args: Options, world_size: int, num_train: int) -> None:
    """Refuse a batch that leaves a rank without a sample, or that is larger than the training set.

    A remainder is no fault: the global batch is spread over the ranks as evenly as it goes.

    Raises:
        UserError: with the smallest or largest size that works.
    """
    parts = world_size * args.accumulate_steps
    if world_size > num_train:
        raise UserError(f"{world_size} processes for {num_train} training samples; start at most {num_train}")
    if args.global_batch_size < parts:
        shares = f"{world_size} processes x {args.accumulate_steps} accumulation steps"
        raise UserError(
            f"--global-batch-size {args.global_batch_size} is too small for {shares}; use at least {parts}"
        )
    if args.global_batch_size > num_train:
        raise UserError(
            f"--global-batch-size {args.global_batch_size} is larger than the training set; "
            f"use at most {num_train}"
        )
