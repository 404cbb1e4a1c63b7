"""The page of the benchmarks: what stands in the tree is what the files beside it give."""

import json

import pytest

from recipes.common.errors import UserError
from scripts.bench import report
from scripts.bench.figures import Figure
from tests.support import ROOT


def write(folder, name, date, *figures, gpus=()):
    facts = {
        "date": date,
        "rounds": 5,
        "revision": "abc",
        "hardware": {"cpus": 2, "cpu": "A | B", "memory_gb": 24, "gpus": list(gpus)},
        "versions": {"python": "3.11.7", "torch": "2.14.1"},
    }
    path = folder / name
    path.write_text(json.dumps({**facts, "figures": [figure.as_dict() for figure in figures]}))
    return path


FAST = Figure("step", "overhead", 1.01, 1.0, 1.02, "<= 1.02", "bare loop", "5 ms | 6 ms")
SLOW = Figure("wire", "bytes", 1.2, 1.1, 1.3, "<= 1.01", "ring")
TOLD = Figure("step", "told", 3.0)
MISSED = Figure("wire", "nccl", None, goal="<= 1", note="not measured: no GPU")

README = f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n"


def test_the_page_in_the_tree_is_the_one_of_its_files():
    """Run `make report` after `make bench`."""
    path = ROOT / "docs/benchmarks/README.md"
    readme = (ROOT / "README.md").read_text()
    if not list(report.FOLDER.glob("*.json")):
        assert not path.exists(), "a page without files"
        assert report.between_markers(readme, "") == readme, "a table without files"
        return
    text, expected = report.render(report.FOLDER, readme)
    assert path.read_text() == text
    assert readme == expected


def test_the_newest_run_comes_first_with_all_its_figures(tmp_path):
    write(tmp_path, "2026-01-02-cpu.json", "2026-01-02", TOLD, FAST, SLOW, MISSED)
    write(tmp_path, "2026-02-01-gpu.json", "2026-02-01", FAST, gpus=["H200", "H200"])
    (tmp_path / "compare.md").touch()
    text, readme = report.render(tmp_path, README)
    assert text.index("## 2026-02-01, gpu") < text.index("## 2026-01-02, cpu")
    assert (
        "2 cores of A | B, 24 GB, 2 x H200. python 3.11.7, torch 2.14.1. Revision abc, 5 rounds; 1 of 1 " in text
    )
    assert "| overhead | <= 1.02 | 1.01 | 1.00 .. 1.02 | yes | bare loop | 5 ms \\| 6 ms |" in text
    assert "| bytes | <= 1.01 | 1.20 | 1.10 .. 1.30 | no | ring | - |" in text
    assert "| told | - | 3.00 | - | - | - | - |" in text
    assert "| nccl | <= 1 | - | - | - | - | not measured: no GPU |" in text
    assert "1 of 2 goals met" in text
    assert "[compare.md](compare.md)" in text
    assert report.render(tmp_path, README) == (text, readme), "the same files give the same text"
    # The short table is that of the newest run; what stands around it stays.
    assert readme.startswith(f"before\n\n{report.BEGIN}\n| what |")
    assert readme.endswith(f"{report.END}\n\nafter\n")
    assert "| step: overhead | <= 1.02 | 1.01 | bare loop |" in readme
    assert "wire" not in readme
    assert report.render(tmp_path, readme)[1] == readme


def test_the_short_table_has_a_line_for_each_part_with_a_goal(tmp_path):
    write(tmp_path, "a.json", "2026-01-02", TOLD, FAST, Figure("step", "second", 1.0, goal=">= 1"), SLOW, MISSED)
    readme = report.render(tmp_path, README)[1]
    assert [line.split(" | ")[0] for line in readme.splitlines() if line.startswith("| ")][2:] == [
        "| step: overhead",
        "| wire: bytes",
    ]


def test_the_picture_is_drawn(tmp_path):
    path = write(tmp_path, "a.json", "2026-01-02", FAST, SLOW, MISSED, Figure("step", "none", 0.0, goal="<= 1"))
    [run] = report.read_runs(tmp_path)
    report.plot(run, path.with_suffix(".png"))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_how_much_better_than_the_goal():
    assert report.gain(Figure("a", "b", 3.0, goal=">= 1.5")) == 2
    assert report.gain(Figure("a", "b", 0.5, goal="<= 1.5")) == 3
    assert report.gain(Figure("a", "b", 3.0, goal="<= 1.5")) == 0.5


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": [{"part": "a"}]}'])
def test_other_files_are_refused_with_their_name(tmp_path, text):
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(UserError, match=r"odd\.json is no benchmark's file"):
        report.render(tmp_path, README)


def test_nothing_to_render_is_said_in_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    assert report.main() == 2
    assert capsys.readouterr().err == f"error: no benchmark in {tmp_path}: `make bench` writes one\n"
    assert list(tmp_path.iterdir()) == []


def test_a_readme_without_markers_is_refused(tmp_path):
    write(tmp_path, "a.json", "2026-01-02", FAST)
    with pytest.raises(UserError, match=r"README\.md needs one line"):
        report.render(tmp_path, "nothing")
