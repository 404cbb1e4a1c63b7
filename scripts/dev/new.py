"""Copy a recipe under a new name: train.py, minimal.py, README.md and a test, which run and pass as they are.

make new NAME=mine FROM=ddp
"""

from __future__ import annotations

import keyword
import re

from recipes.common.arguments import Parser
from recipes.common.errors import UserError, as_user_error
from scripts.launch.command import ROOT, check_names, command, recipes

SOURCES = ("ddp", "apex", "fsdp", "tensor", "context", "pipeline", "scratch")
"""Recipes whose ranks torchrun starts; launch files start each of the others in its own way, by its name."""

CALLS = "partial|train_as_rank|load_same_data|load_data_and_model|Job|train"
"""Functions that take the recipe's name as an argument."""

TEST = '''"""{name} against the one-process run, at 1, 2 and 3 processes: the same losses and the same evaluation.

Made by `make new`.
"""

import functools

import pytest

from tests.page import run_page
from tests.support import Ranks, accuracies, losses, train

OPTIONS = {options!r}
PAGE_OPTIONS = {page_options!r}
STEPS = ("--max-steps", "8", "--seed", "1", "--global-batch-size", "48")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_step_and_evaluation_equals_single(tmp_path, world_size):
    options = [str(world_size) if word == "WORLD_SIZE" else word for word in OPTIONS]
    run = train("{name}", tmp_path, world_size, *STEPS, *options)
    single = train("single", tmp_path, 1, *STEPS)
    assert len(losses(run)) == 8
    assert losses(run) == pytest.approx(losses(single), rel=1e-5)
    assert accuracies(run) == accuracies(single)


def test_the_page_runs(tmp_path):
    setup = functools.partial(run_page, "{name}", ["--epochs", "1", *PAGE_OPTIONS])
    outcome = Ranks("{name}", [], 2, tmp_path, setup=setup).wait()
    assert not any(outcome.statuses), outcome.text
    assert "result recipe={name} world_size=2 " in outcome.outputs[0]
'''

OPTIONS = {
    "apex": ["--opt-level", "O0"],
    "tensor": ["--tensor-parallel", "WORLD_SIZE"],
    "context": ["--context-parallel", "1"],
    "pipeline": ["--stages", "WORLD_SIZE", "--num-microbatches", "4"],
}
PAGE_OPTIONS = {
    "apex": ["--opt-level", "O0"],
    "context": ["--text", "README.md"],
    "pipeline": ["--stages", "2"],
}
"""Options with which a recipe, and its page, compute the same as single."""


def rename(text: str, source: str, name: str) -> str:
    """Return a recipe's file with the recipe's name changed wherever it means the recipe."""
    for before in ("RECIPE=", "recipe=", "recipes/", r"recipes\.", "--checkpoint "):
        text = re.sub(rf"(?<={before}){source}\b", name, text)
    text = re.sub(rf'(\b(?:{CALLS})\((?:\w+, )*)"{source}"', rf'\1"{name}"', text)
    return re.sub(rf"\A# {source}\b", f"# {name}", text)


@command
def main(argv: list[str]) -> None:
    """Copy a recipe; raises UserError if the name is taken or invalid, or torchrun does not start its ranks."""
    parser = Parser("make new", "Copy a recipe under a new name, with a test.")
    parser.add_argument("--name", default="")
    parser.add_argument("--from", dest="source", default="ddp")
    args = parser.parse_args(argv)
    name, source = args.name, check_names("FROM", [args.source], list(recipes()))[0]
    if source not in SOURCES:
        way = "launch files start this recipe in its own way, by its name"
        raise UserError(f"FROM={source}: {way}; copy {', '.join(SOURCES[:-1])} or {SOURCES[-1]}")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name):
        wanted = "up to 40 lower-case letters, digits and _, as for a Python module"
        raise UserError(f"NAME={name}: give {wanted}: NAME=mine")
    folder, test = ROOT / "recipes" / name, ROOT / "tests" / "parallel" / f"test_{name}.py"
    for path in (folder, *ROOT.glob(f"tests/*/{test.name}")):  # pytest takes a file name once
        if path.exists():
            raise UserError(f"NAME={name}: {path.relative_to(ROOT)} exists; choose another name, or remove it")
    options, page_options = OPTIONS.get(source, []), PAGE_OPTIONS.get(source, [])
    with as_user_error("write", folder):
        folder.mkdir()
        for path in sorted((ROOT / "recipes" / source).iterdir()):
            if path.is_file():
                (folder / path.name).write_text(rename(path.read_text(), source, name))
        test.write_text(TEST.format(name=name, options=options, page_options=page_options))
    print(f"copied recipes/{source} to recipes/{name}, with a test")
    print(f'try it: make run RECIPE={name} NODES=2   and   make test ARGS="tests/parallel/test_{name}.py"')


if __name__ == "__main__":
    raise SystemExit(main())
