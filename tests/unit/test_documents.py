"""What the documents say exists: links, targets of make, options, recipes."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import re
import shutil
import subprocess

import pytest

from k8s import apply
from recipes.common.arguments import Parser
from scripts.bench import claims, compare
from scripts.bench.commbench import __main__ as commbench
from scripts.bench.commbench import rank as commbench_rank
from scripts.bench.report import evidence
from scripts.doctor import __main__ as doctor
from scripts.doctor import gpus
from scripts.drill import __main__ as drill
from scripts.launch import local
from scripts.plan import __main__ as plan
from scripts.same import __main__ as same
from slurm import submit
from tests.support import ROOT, run_command
from tests.unit.test_evidence import faults

GIT = shutil.which("git") or "true"  # an archive has no .git folder, and its user may have no git
LIST = [GIT, "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
LISTED = subprocess.run(LIST, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout.split()
DOCUMENTS = LISTED or [path.name for path in ROOT.glob("*.md")]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE)
RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/train.py"))

OTHERS_COMMANDS = r"pip|docker|kubectl|helm|kind|git|uv|sbatch|srun|scancel|\.venv/bin/hf"
OTHERS_FLAGS = {
    *("--max-restarts", "--master-addr", "--master-port", "--gloo", "--check-build"),  # torchrun, horovodrun
    *("--array", "--container-image", "--exclusive", "--export", "--gres", "--hint", "--nodelist"),  # Slurm
    *("--kill-on-bad-exit", "--list-reasons", "--mem-bind", "--mpi", "--ntasks-per-node", "--signal"),
    *("--shm-size", "--chmod", "--zstd", "--max-count"),  # docker, Dockerfiles, tar, grep
    *("--junit-xml", "--require-hashes", "--logdir"),  # pytest, pip, tensorboard
    *("--batch-size", "--checkpoint", "--gradient", "--out"),  # a user's script
}
"""Flags in the documents of programs that are not ours."""


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
    """Return the anchors that GitHub generates for a document's headings."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@functools.cache
def known_flags():
    """Return every --flag of the parsers of the recipes and of scripts/."""
    found = set()

    class Known(Exception):  # noqa: N818 (not an error)
        pass

    parsers = [importlib.import_module(f"recipes.{recipe}.train").options for recipe in RECIPES]
    others = [submit.parse_args, doctor.parse_args, gpus.parse_args, commbench.options, commbench_rank.options]
    for parse in [*parsers, *others, plan.parse_args, drill.parse_args]:

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
        own = re.sub(rf"^\s*({OTHERS_COMMANDS}) .*", "", code, flags=re.MULTILINE)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", own):
            assert flag in known, f"{name}: {flag}"


def test_the_flags_of_the_parsers_are_found():
    assert {"--zero", "--no-zero", "--global-batch-size", "--resume", "--max-requeues", "--quick"} <= known_flags()


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"probe", "spawn"}))  # these have a launcher's, too
def test_the_readme_names_every_option(recipe):
    section = text_of("README.md").split("\n## Options\n")[1].split("\n## ")[0]
    named = set(re.findall(r"--(?:no-)?([a-z][a-z0-9-]+)", section))
    options = importlib.import_module(f"recipes.{recipe}.train").options.args[0]
    assert {field.name.replace("_", "-") for field in dataclasses.fields(options)} <= named


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_of_the_repository_exists(name):
    folders = "recipes|scripts|tests|docker|slurm|k8s|requirements"
    for code in code_of(text_of(name)):
        for path in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]+", code):
            assert (ROOT / path.rstrip("./")).exists(), f"{name}: {path}"


@pytest.mark.parametrize("name", [*DOCUMENTS, *(f"recipes/{recipe}/train.py" for recipe in RECIPES)])
def test_commands_name_the_environment_that_has_torch(name):
    """A shell that has just cloned the repository has no torchrun, and its python has no torch."""
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
            if line.startswith(("#SBATCH", "##SBATCH")) and "# EDIT:" in line:
                marked.add(line.split("# EDIT:")[0].strip())
            elif line.startswith("# EDIT:"):
                marked.add(following)
    section = text_of("slurm/README.md").split("\nThe lines marked EDIT ")[1].split("\nThe other lines ")[0]
    assert set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)) == marked


def test_make_help_lists_every_target_in_groups():
    shown = run_command("make", "--no-print-directory", "help", check=True).stdout.splitlines()
    named = [line.split() for line in shown if re.match(r"  \S", line)]
    assert [words[0] for words in named] == TARGETS
    assert all(len(words) > 2 for words in named), "each with its help"
    assert [line for line in shown if re.match(r"\S", line)] == re.findall(r"^##@ (.*)$", MAKEFILE, re.MULTILINE)
    assert max(map(len, shown)) <= 100
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert sorted(phony) == sorted(TARGETS)


@pytest.mark.parametrize("command", [local, submit, apply, compare, plan, same])
def test_help_says_where_the_options_of_the_recipe_or_script_go(command, capsys):
    with pytest.raises(SystemExit):
        getattr(command, "parse_args", command.main)(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Options of the (recipe|script) (come after --|are accepted, too), such as ", shown)


def test_make_list_names_every_recipe_in_a_line():
    shown = run_command("make", "--no-print-directory", "list", check=True).stdout
    assert [line.split()[0] for line in shown.splitlines()] == RECIPES
    assert all(len(line.split()) > 3 for line in shown.splitlines())


def test_the_chinese_readme_keeps_step_with_the_english_one():
    """It has the same examples, commands, options and links, and the same number of sections."""
    english, chinese = text_of("README.md"), text_of("README.zh-CN.md")
    for what in ("```.*?```", "`[^`\n]+`", r"\]\([^)#]+"):
        ours, theirs = (set(re.findall(what, text, re.DOTALL)) for text in (chinese, english))
        assert ours - {"](README.md"} == theirs - {"](README.zh-CN.md"}
    assert chinese.count("\n## ") == english.count("\n## ")
    assert chinese.count("\n| ") == english.count("\n| ")


CLAIMS = claims.read_claims()
UNITS = "%|(?:x|times|ms|s|seconds?|minutes?|hours?|[kM]B|Gi?B|samples/s|images/s|tokens/s)\\b"
WORDS = "two|three|four|five|six|seven|eight|nine|ten"
FIGURES = rf"\b(?:(?:\d[\d.]*|{WORDS}) ?(?:{UNITS})|\d{{1,3}}(?:,\d{{3}})+|\d[\d.]*e-\d+)"
DATES = r"\b(?:20\d\d-\d\d-\d\d|\d+ [A-Z][a-z]+ 20\d\d)\b"
WITHOUT_CLAIMS = r"CHANGELOG\.md|docs/evidence\.md|docs/benchmarks/.*|recipes/apex/README\.md"
"""Documents with dates of releases, with the records themselves, or with the day on which apex lost its amp."""


def marked(name, text):
    """Return a document's text without code and the benchmark table, with its claims replaced by a mark."""
    text = re.sub("<!-- benchmarks -->.*<!-- /benchmarks -->", "", text, flags=re.DOTALL)
    text = " ".join(text.split())
    for claim in CLAIMS.values():
        for part in claim.text * (claim.document == name):
            text = text.replace(part, "<claim>")
    return without_code(text)


def unclaimed(name, pattern):
    """Return the matches of a pattern in a document outside of all its claims."""
    text = marked(name, text_of(name))
    return [text[max(0, found.start() - 40) : found.end() + 10] for found in re.finditer(pattern, text)]


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_stands_in_its_document_and_something_shows_it(name):
    """If the sentence has changed, copy it to docs/claims.toml, then run `make report`."""
    assert faults(CLAIMS[name]) == []


def test_every_figure_of_the_readme_belongs_to_a_claim():
    """Give a new figure a claim in docs/claims.toml; the table of benchmarks has its own."""
    assert unclaimed("README.md", FIGURES) == []


def test_every_guarantee_and_place_of_the_readme_has_a_claim():
    section = text_of("README.md").split("\n## What is guaranteed")[1].split("\n## ")[0]
    said = re.findall(r"^- \*\*(?:.|\n)*?(?=\n- |\n\n)|^\| (?!where|---).*$", section, re.MULTILINE)
    assert len(said) > 8
    for line in said:
        assert "<claim>" in marked("README.md", line), line


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if not re.fullmatch(WITHOUT_CLAIMS, name)])
def test_every_dated_measurement_belongs_to_a_claim(name):
    assert unclaimed(name, DATES) == []


def test_what_was_run_holds_and_speaks_for_the_figures_that_stand_there():
    """`make evidence CLAIMS=NAME` repeats those that failed, or whose figures have changed since."""
    outcomes = claims.read_outcomes()
    assert [name for name in outcomes if name not in CLAIMS or not CLAIMS[name].is_runnable] == []
    assert [name for name, outcome in outcomes.items() if not outcome["passed"]] == []
    assert [name for name, outcome in outcomes.items() if outcome["numbers"] != CLAIMS[name].numbers()] == []


def test_the_page_of_evidence_is_the_one_of_its_files():
    """If not, run `make report` or `make evidence`."""
    assert text_of("docs/evidence.md") == evidence()
