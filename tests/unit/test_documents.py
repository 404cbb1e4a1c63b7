"""What the documents say exists: links, targets of make, options, recipes."""

import contextlib
import importlib
import itertools
import re
import subprocess

import pytest

from recipes.common.options import Parser
from scripts.bench.commbench import __main__ as commbench
from scripts.bench.commbench import rank as commbench_rank
from scripts.doctor import __main__ as doctor
from scripts.doctor import gpus
from scripts.plan import __main__ as plan
from scripts.plan import check
from slurm import submit
from tests.support import ROOT

LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=30,
).stdout.split()
DOCUMENTS = LISTED or [path.name for path in ROOT.glob("*.md")]  # an archive without git's folder
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE)
RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/train.py"))

OTHERS_FLAGS = {
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--standalone",
    "--master-addr",
    "--master-port",
    "--nodes",
    "--list",
    "--help",
    "--require-hashes",
    "--gpus",
    "--ntasks-per-node",
    "--gpus-per-node",
    "--cpus-per-task",
    "--time",
    "--partition",
    "--account",
    "--array",
    "--output",
    "--list-reasons",
    "--max-count",
    "--mpi",
    "--container-image",
    "--kill-on-bad-exit",
    "--signal",
    "--requeue",
    "--open-mode",
    "--export",
    "--rm",
    "--build",
    "--shm-size",
    "--logdir",
    "--gloo",
    "--check-build",
    "--max-restarts",
    "--render",
    "--out",
    "--batch-size",  # this and the next are of a script that a user brings
    "--checkpoint",
}


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def without_code(text):
    return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)


def code_of(text):
    """Return the fenced blocks and the inline code of a document."""
    blocks = re.findall(r"```.*?\n(.*?)```", text, flags=re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [*blocks, *inline]


def anchors(text):
    """Return the anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def known_flags():
    """Return every --flag that a parser of the recipes or of scripts/ has."""
    found = set()

    class Known(Exception):  # noqa: N818 (not an error)
        pass

    parsers = [importlib.import_module(f"recipes.{recipe}.train").options for recipe in RECIPES]
    others = [submit.parse_args, doctor.parse_args, gpus.parse_args, commbench.options, commbench_rank.options]
    for parse in [*parsers, *others, plan.parse_args, check.parse_args]:

        def note(parser, *_):
            found.update(parser.flags())
            raise Known

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Known):
            patch.setattr(Parser, "parse_known_args", note)
            parse([])
    return found


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_relative_link_exists(name):
    text = text_of(name)
    links = re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", without_code(text))
    links += re.findall(r"<(?:img|a)[^>]*?(?:src|href)=\"([^\"]+)\"", text)
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), f"{name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text()), f"{name} links to {link}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_target_of_make_exists(name):
    for code in code_of(text_of(name)):
        for target in re.findall(r"(?:^|[\s;&|(])make ((?:[A-Z_]+=\S+ )*)([a-z0-9-]+)", code):
            assert target[1] in TARGETS, f"{name}: make {target[1]}"
        for recipe in re.findall(r"RECIPE=([a-z0-9_]+)", code):
            assert recipe in RECIPES, f"{name}: RECIPE={recipe}"
        for recipe in re.findall(r"recipes\.([a-z0-9_]+)\.train", code):
            assert recipe in RECIPES, f"{name}: recipes.{recipe}.train"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_flag_exists(name):
    known = known_flags() | OTHERS_FLAGS
    for code in code_of(text_of(name)):
        lines = [
            line
            for line in code.splitlines()
            if not re.match(r"\s*(pip|docker|kubectl|helm|kind|git|uv|sbatch|srun) ", line)
        ]
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", "\n".join(lines)):
            assert flag in known, f"{name}: {flag}"


def test_the_flags_of_the_parsers_are_found():
    assert {"--zero", "--no-zero", "--global-batch-size", "--resume", "--max-requeues", "--quick"} <= known_flags()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_of_the_repository_exists(name):
    folders = "recipes|scripts|tests|docker|slurm|k8s|requirements"
    for code in code_of(text_of(name)):
        for path in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]+", code):
            assert (ROOT / path.rstrip("./")).exists(), f"{name}: {path}"


@pytest.mark.parametrize("name", [*DOCUMENTS, *(f"recipes/{recipe}/train.py" for recipe in RECIPES)])
def test_commands_name_the_environment_that_has_torch(name):
    """A shell that has just cloned has no torchrun, and a python without torch."""
    text = text_of(name)
    blocks = [text.split('"""')[1]] if name.endswith(".py") else re.findall(r"```.*?\n(.*?)```", text, re.DOTALL)
    for block in [*blocks, *re.findall(r"(?:^    .*\n)+", text, re.MULTILINE) * name.endswith(".md")]:
        for line in block.splitlines():
            command = line.split("#")[0]
            assert not re.search(r"(^|\s)(python3?|torchrun|horovodrun) -", command), f"{name}: {line}"


def test_the_lines_to_edit_are_those_that_the_sbatch_files_mark():
    marked = set()
    for path in ROOT.glob("slurm/*.sbatch"):
        lines = path.read_text().splitlines()
        for line, following in itertools.pairwise(lines):
            if line.startswith("#SBATCH") and "# EDIT:" in line:
                marked.add(line.split("# EDIT:")[0].strip())
            elif line.startswith("# EDIT:"):
                marked.add(following)
    section = text_of("slurm/README.md").split("\nThe lines marked EDIT ")[1].split("\nThe other lines ")[0]
    assert set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)) == marked


def test_make_help_lists_every_target_in_groups():
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    ).stdout.splitlines()
    named = [line.split() for line in shown if re.match(r"  \S", line)]
    assert [words[0] for words in named] == TARGETS
    assert all(len(words) > 2 for words in named), "each with its help"
    assert [line for line in shown if re.match(r"\S", line)] == re.findall(r"^##@ (.*)$", MAKEFILE, re.MULTILINE)
    assert max(map(len, shown)) <= 100
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert sorted(phony) == sorted(TARGETS)


def test_make_list_names_every_recipe_in_a_line():
    shown = subprocess.run(
        ["make", "--no-print-directory", "list"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert [line.split()[0] for line in shown.splitlines()] == RECIPES
    assert all(len(line.split()) > 3 for line in shown.splitlines())


def test_the_chinese_readme_keeps_step_with_the_english_one():
    """The same examples, commands, options and links, and as many sections; but for the table of benchmarks."""
    english = re.sub("<!-- benchmarks -->.*<!-- /benchmarks -->", "", text_of("README.md"), flags=re.DOTALL)
    chinese = text_of("README.zh-CN.md")
    for what in ("```.*?```", "`[^`\n]+`", r"\]\([^)#]+"):
        ours, theirs = (set(re.findall(what, text, re.DOTALL)) for text in (chinese, english))
        assert ours - {"](README.md"} == theirs - {"](README.zh-CN.md"}
    assert chinese.count("\n## ") == english.count("\n## ")
    assert chinese.count("\n| ") == english.count("\n| ")
