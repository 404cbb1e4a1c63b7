"""Claims and what shows them: what is wrong with a claim, and how a run of its tests or command is judged."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import date
from types import SimpleNamespace

import pytest

from recipes.common.errors import UserError
from scripts.bench import claims, evidence, programs
from scripts.bench.claims import Claim, page, read_claims, rounds_to
from scripts.bench.programs import run_program
from scripts.launch.command import ROOT
from tests.conftest import refused


def faults(claim):
    """Return what is wrong with a claim: its text, its keys, its tests, or the figures of its record."""
    document = " ".join((ROOT / claim.document).read_text(encoding="utf-8").split())
    found = [f"{claim.document} has no {part!r}" for part in claim.text if part not in document]
    ways = (claim.tests, claim.record, claim.not_run and not claim.tests, claim.command and claim.is_runnable)
    if sum(map(bool, ways)) != 1:
        found.append("needs one of tests, command, record and not_run")
    found += [f"there is no test {test}" for test in claim.tests if not is_test(test)]
    found += [f"{shown!r} is not in its text" for shown in claim.finds if shown not in " ".join(claim.text)]
    if claim.record and not (claim.date and claim.commit and claim.on and claim.command):
        found.append("a record needs its date, commit, on and command")
    if claim.record and not (ROOT / claim.record).is_file():
        found.append(f"there is no {claim.record}")
    elif claim.record:
        found += claim.differences((ROOT / claim.record).read_text())
    return found


def is_test(name):
    """Return whether a file or folder of tests, or a test in a file, exists."""
    path, _, rest = name.partition("::")
    if not rest:
        return (ROOT / path).exists()
    text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
    return all(re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE) for part in rest.split("::"))


TEXT = ("# cluster-recipes",)
TEST = ("tests/unit/test_evidence.py::test_a_claim_is_whole_or_says_what_it_lacks",)


@pytest.mark.parametrize(
    ("claim", "fault"),
    [
        (Claim("a", TEXT, tests=TEST), None),
        (Claim("a", TEXT, tests=TEST, not_run="needs a GPU"), None),
        (Claim("a", TEXT, command="true"), None),
        (Claim("a", TEXT, not_run="no GPU"), None),
        (Claim("a", ("no such sentence",), command="true"), "README.md has no 'no such sentence'"),
        (Claim("a", TEXT), "needs one of tests, command, record and not_run"),
        (Claim("a", TEXT, tests=TEST, command="true"), "needs one of tests, command, record and not_run"),
        (Claim("a", TEXT, tests=(TEST[0] + "_not",)), f"there is no test {TEST[0]}_not"),
        (Claim("a", TEXT, tests=("tests/none.py",)), "there is no test tests/none.py"),
        (Claim("a", TEXT, command="true", finds={"7 s": "(7)"}), "'7 s' is not in its text"),
        (Claim("a", TEXT, command="x", record="README.md"), "a record needs its date, commit, on and command"),
        (
            Claim("a", TEXT, command="x", record="docs/none.md", date="d", commit="c", on="a machine"),
            "there is no docs/none.md",
        ),
    ],
)
def test_a_claim_is_whole_or_says_what_it_lacks(claim, fault):
    assert faults(claim) == ([fault] if fault else [])


def test_a_figure_is_what_was_measured_rounded():
    claim = Claim("a", ("at most 6e-5",), command="true", finds={"6e-5": r"^x (\S+)$"})
    assert claim.differences("x 5.7e-05") == []
    assert claim.differences("x 5.4e-05") == ["6e-5: measured 5.4e-05"]
    assert claim.differences("y") == ["6e-5: not measured"]


@pytest.mark.parametrize(
    ("measured", "shown", "fits"),
    [
        *(("5.7", "6", True), ("5.4", "6", False), ("14,650", "14650", True), ("31.5", "30", True)),
        *(("36", "30", False), ("1.004", "1.00", True), ("1.02", "1.00", False), ("2.14.1", "2.14.1", True)),
    ],
)
def test_rounding(measured, shown, fits):
    assert rounds_to(measured, shown) is fits


CASES = [
    evidence.Case("tests.unit.test_a.test_b", "passed", seconds=1.6),
    evidence.Case("tests.unit.test_a.test_b[1.2::x]", "passed", seconds=1),
    evidence.Case("tests.unit.test_a.TestC.test_d", "skipped", "needs mpi: none; install it"),
    evidence.Case("tests.unit.test_a.test_bcd", "failed"),
    evidence.Case("tests.gpu.test_e", "skipped", "needs gpu: 0 of 1"),
    evidence.Case("tests.unit.test_g", "failed"),  # it could not be imported
]


@pytest.mark.parametrize(
    ("tests", "judged"),
    [
        (["tests/unit/test_a.py::test_b"], (True, "2 passed, 3 s")),
        (["tests/unit/test_a.py::test_b", "tests/gpu"], (True, "2 passed, 1 skipped (needs gpu), 3 s")),
        (["tests/unit/test_a.py::TestC"], (None, "needs mpi: none; install it")),
        (["tests/unit"], (False, "2 failed, 2 passed, 1 skipped (needs mpi), 3 s")),
        (["tests/unit/"], (False, "2 failed, 2 passed, 1 skipped (needs mpi), 3 s")),
        (["tests/gpu/test_e.py"], (None, "needs gpu: 0 of 1")),
        (["tests/unit/test_none.py"], (None, "tests/unit/test_none.py did not run")),
        (["tests/unit/test_a.py::test_b", "tests/gpu/test_f.py"], (None, "tests/gpu/test_f.py did not run")),
        (["tests/unit/test_a.py::test_b", "tests/unit/test_g.py::test_h"], (False, "1 failed, 2 passed, 3 s")),
    ],
)
def test_the_tests_of_a_claim_are_judged(tests, judged):
    assert evidence.judge_tests(tests, CASES) == judged


TESTS = """import pytest
def test_passes(): pass
@pytest.mark.parametrize("x", [1, 2])
def test_fails_once(x): assert x == 1
class TestThis:
    def test_skips(self): pytest.skip("needs it")
@pytest.fixture
def broken():
    yield
    assert 0
def test_fails_at_its_end(broken): pass
"""


PARTIAL = [
    (["-k", "passes"], "0.xml: -k passes has left tests out; run all of them"),
    (["-m", "not slow"], "1.xml: -m not slow has left tests out; run all of them"),
    (["--deselect", "test_a.py::test_passes"], "--deselect ['test_a.py::test_passes'] has left tests out"),
    (["--ignore=test_b.py"], "--ignore ['test_b.py'] has left tests out"),
    (["test_a.py::test_passes"], "4.xml: test_a.py::test_passes has left tests out; run all of them"),
    (["-x"], "5.xml: --maxfail 1 has left tests out; run all of them"),
]
CHOSEN = ["test_a.py::test_passes", "test_a.py::TestThis"]
RUN = """import json, sys, pytest
own = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
runs = enumerate(json.loads(sys.argv[1]))
statuses = [pytest.main([*own, f"--junit-xml={number}.xml", *options]) for number, options in runs]
open("statuses.json", "w").write(json.dumps(statuses))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run small tests with this repository's conftest.py; return the folder of N.xml and statuses.json.

    One process runs them for all options: most of its time goes into importing torch, as a report has its version.
    """
    folder = tmp_path_factory.mktemp("reports")
    conftest = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.conftest import pytest_sessionfinish"
    own = {"conftest.py": conftest, "test_a.py": TESTS}
    own["test_b.py"] = "import pytest; pytest.skip('no', allow_module_level=True)"
    for name, text in own.items():
        (folder / name).write_text(text)
    options = json.dumps([*(options for options, _ in PARTIAL), CHOSEN, []])
    subprocess.run([sys.executable, "-c", RUN, options], cwd=folder, capture_output=True, check=True)
    return folder


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git; install it")
def test_figures_that_a_part_has_written_do_not_make_the_code_of_the_next_dirty(tmp_path, monkeypatch):
    for name in ("docs/benchmarks/2026-01-31-cpu.json", "docs/claims.toml", "scripts/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    for name in ("ROOT", "CLAIMS", "OUTCOMES", "PAGE", "FIGURES"):
        monkeypatch.setattr(claims, name, tmp_path / getattr(claims, name).relative_to(ROOT))
    (tmp_path / "docs/benchmarks/2026-01-31-cpu.json").write_text("2")
    assert re.fullmatch("[0-9a-f]+", claims.revision())
    (tmp_path / "scripts/a.py").write_text("2")
    assert re.fullmatch("[0-9a-f]+-dirty", claims.revision())
    monkeypatch.setenv("SOURCE_REVISION", "0123456789abcdef")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert claims.revision() == "0123456789ab", "an image has no git"


def test_a_report_of_pytest_is_read(reports):
    assert json.loads((reports / "statuses.json").read_text())[-1] == 1
    report = evidence.read_report(reports / "7.xml")
    assert abs(date.fromisoformat(report.date) - date.today()).days <= 1
    assert report.revision == evidence.revision()
    assert "torch" in report.on
    assert {case.name: case.outcome for case in report.cases} == {
        "test_a.test_passes": "passed",
        "test_a.test_fails_once[1]": "passed",
        "test_a.test_fails_once[2]": "failed",
        "test_a.TestThis.test_skips": "skipped",
        "test_a.test_fails_at_its_end": "failed",
        "test_b": "skipped",
    }
    assert "needs it" in {case.reason for case in report.cases}


def test_a_report_of_chosen_tests_is_one_of_these_tests_alone(reports):
    assert json.loads((reports / "statuses.json").read_text())[-2] == 0
    path = reports / "6.xml"
    assert len(evidence.read_report(path, CHOSEN).cases) == 2
    with pytest.raises(UserError, match=r"test_passes has left tests out"):
        evidence.read_report(path, CHOSEN[:1])


def test_a_report_of_some_tests_is_refused(reports):
    for number, (_, words) in enumerate(PARTIAL):
        with refused(words):
            evidence.read_report(reports / f"{number}.xml")


REPORT = """<testsuite timestamp="2026-01-31T10:00:00"><properties><property name="revision" value="123456789abc"/>
<property name="on" value="there"/><property name="partial" value=""/><property name="status" value="0"/>
<property name="tests" value=""/></properties></testsuite>"""


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (None, "report.xml is not a report of these tests ([Errno 2] No such file"),
        ("<testsuites", "report.xml is not a report of these tests (unclosed token"),
        ("<testsuites/>", "report.xml is not a report of these tests ("),
        ('<testsuite timestamp="2026-01-31T10:00:00"/>', " is not a report of these tests ('revision'); give one"),
        (REPORT, "report.xml: its tests are of 123456789abc, and this is "),
        (REPORT.replace("123456789abc", "1-dirty"), "report.xml: its tests ran on files that differ from"),
    ],
)
def test_a_report_that_shows_nothing_of_this_commit_is_refused(monkeypatch, capsys, tmp_path, report, words):
    path = tmp_path / "report.xml"
    if report:
        path.write_text(report)
    before = claims.OUTCOMES.read_text()
    monkeypatch.setattr(evidence, "revision", lambda: "1-dirty")
    assert evidence.main(["digits", f"--report={path}"]) == 2
    assert words in capsys.readouterr().err
    assert claims.OUTCOMES.read_text() == before


def test_tests_run_once_and_all_together(monkeypatch, tmp_path):
    ways = [
        Claim("a", TEXT, tests=("tests/unit/test_a.py::test_b", "tests/gpu")),
        Claim("b", TEXT, tests=("tests/unit/test_a.py", "tests/gpu/test_e.py")),
        Claim("c", TEXT, command="x"),
    ]
    ran = []

    def run(words, env, timeout_s, shows):
        ran.extend(words)
        return 4, ""

    monkeypatch.setattr(evidence, "run_program", run)
    with pytest.raises(UserError, match=r"^the tests did not run to their end \(status 4\)$"):
        evidence.run_tests(ways, ["-x"])
    assert [word for word in ran if "report" not in word] == [
        *("scripts/dev/test.sh", "all", "tests/gpu", "tests/gpu/test_e.py", "tests/unit/test_a.py"),
        *("tests/unit/test_a.py::test_b", "-x"),
    ]
    assert evidence.run_tests(ways[2:], []) is None


def test_a_command_has_to_print_what_the_document_shows():
    printing = Claim("a", ("epoch 1 loss 2.0",), command="x", prints=True)
    assert evidence.judge_command(printing, 0, "run\nepoch 1   loss 2.0\n") == (True, "as printed")
    assert evidence.judge_command(printing, 0, "epoch 1 loss 2.1")[0] is False
    assert evidence.judge_command(printing, 1, "epoch 1 loss 2.0")[0] is False
    finding = Claim("a", ("6 GB",), command="x", finds={"6": "([0-9.]+)G"})
    assert evidence.judge_command(finding, 0, "5.9G") == (True, "5.9")


def test_an_interrupted_command_ends_by_itself(tmp_path):
    """Pytest ends the jobs of its tests, which run in sessions of their own."""
    up, ended = tmp_path / "up", tmp_path / "ended"

    def interrupt():
        while not up.exists():
            time.sleep(0.01)
        time.sleep(0.5)  # the command is up before the main thread waits for it
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_program(["bash", "-c", f"trap 'touch {ended}; exit' INT; touch {up}; sleep 60 & wait"], {}, 60)
    assert ended.exists()


@pytest.mark.parametrize(
    ("waits", "met"),
    [
        ([KeyboardInterrupt, KeyboardInterrupt], KeyboardInterrupt),  # Ctrl-C twice
        ([KeyboardInterrupt, subprocess.TimeoutExpired("x", 1)], KeyboardInterrupt),
        ([subprocess.TimeoutExpired("x", 1), None], None),
        ([None], None),
    ],
)
@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_of_a_command_is_left_behind_however_it_ends(monkeypatch, waits, met, is_there):
    sent, left = [], iter(waits)

    def wait(bound_s=None):
        if bound_s and (found := next(left)):
            raise found

    def kill(pid, number):
        sent.append((pid, number))
        if not is_there:
            raise ProcessLookupError

    process = SimpleNamespace(pid=7, returncode=0, wait=wait)
    monkeypatch.setattr(programs.subprocess, "Popen", lambda *args, **kwargs: process)
    monkeypatch.setattr(programs, "killpg", kill)
    with pytest.raises(met) if met else contextlib.nullcontext():
        run_program(["x"], {}, 60)
    assert sent == [(7, signal.SIGINT)] * (waits != [None]) + [(7, signal.SIGKILL)]


def test_the_page_has_each_claim_once_and_says_what_was_not_run():
    ways = [
        Claim("ran", ("a | b",), command="x"),
        Claim("failed", ("c",), tests=("tests/unit/a.py::t",)),
        Claim("gpu", ("d",), "docs/plan.md", tests=("tests/gpu",), not_run="needs a GPU"),
        Claim("kept", ("e",), record="docs/plan.md", command="y", date="2026-01-01", commit="abc", on="here"),
    ]
    common = {"date": "2026-02-02", "revision": "def", "on": "there"}
    outcomes = {
        "ran": {"passed": True, "result": "6", **common},
        "failed": {"passed": False, "result": "1 failed", **common},
    }
    lines = page({claim.name: claim for claim in ways}, outcomes).splitlines()
    assert "4 rows, 1 of them not run." in lines
    assert "| ran | a \\| b | `x` | def | 2026-02-02 | A | 6 |" in lines
    failed = "| failed | c | [a.py](../tests/unit/a.py): `t` | def | 2026-02-02 | A | **FAILED**: 1 failed |"
    assert failed in lines
    assert "| kept | e | `y` | abc | 2026-01-01 | B | recorded in `docs/plan.md` |" in lines
    assert "| gpu | d | [gpu](../tests/gpu) | - | - | - | **not run**: needs a GPU |" in lines
    assert lines[-2:] == ["- A: there", "- B: here"]


@pytest.mark.parametrize(
    ("text", "words"),
    [('[a]\ntext = "x"\ntest = "y"\n', "a: 'test' is unknown"), ("[a]\n", "'text' is"), ("[a", "cannot be read")],
)
def test_a_file_of_claims_that_is_wrong_is_one_line(tmp_path, text, words):
    path = tmp_path / "claims.toml"
    path.write_text(text)
    with refused(words):
        read_claims(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one-curv", "invalid choice 'one-curv'; did you mean 'one-curve'?"),
        ("macos", "macos has nothing to run here; see its row in evidence.md"),
    ],
)
def test_a_claim_that_cannot_be_run_is_one_line_and_status_2(capsys, name, words):
    before = claims.OUTCOMES.read_text()
    assert evidence.main([name]) == 2
    assert capsys.readouterr().err.startswith(f"error: CLAIMS: {words}")
    assert claims.OUTCOMES.read_text() == before


def test_an_interrupt_leaves_a_whole_page(tmp_path, monkeypatch):
    """A link keeps the earlier file only if the next one is another file, written before it takes the name."""
    outcomes, shown = tmp_path / "evidence.json", tmp_path / "evidence.md"
    for name, path in (("ROOT", tmp_path), ("OUTCOMES", outcomes), ("PAGE", shown)):
        monkeypatch.setattr(evidence, name, path)
    for path in (outcomes, shown):
        path.write_text("earlier")
        path.with_name(f"{path.name}.link").hardlink_to(path)
    monkeypatch.setattr(evidence, "evidence", lambda: "今")
    monkeypatch.setattr(evidence, "run_program", lambda *_: (1, "no space left"))
    name = next(name for name, claim in read_claims().items() if claim.is_runnable and claim.command)
    assert evidence.main([name]) == 1
    assert not json.loads(outcomes.read_text())[name]["passed"]
    assert shown.read_text(encoding="utf-8") == "今"
    assert [path.read_text() for path in tmp_path.glob("*.link")] == ["earlier"] * 2
