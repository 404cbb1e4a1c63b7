"""The page of the benchmarks: what stands in the tree is what the files beside it give."""

import json
import re
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image

from recipes.common.errors import UserError
from scripts.bench import __main__ as bench
from scripts.bench import claims, namespaces, report
from scripts.bench.figures import PARTS, Figure
from scripts.bench.questions import QUESTIONS, draw, drill_figures


def write(folder, name, date, *figures, gpus=()):
    facts = {
        "date": date,
        "parts": {"small-data": {"rounds": 5, "revision": "abc"}, "wire": {"rounds": 3, "revision": "abc"}},
        "hardware": {"cpus": 2, "cpu": "A | B", "memory_gb": 24, "gpus": list(gpus)},
        "versions": {"python": "3.11.7", "torch": "2.14.1"},
    }
    path = folder / name
    path.write_text(json.dumps({**facts, "figures": [figure.as_dict() for figure in figures]}))
    return path


small_data, wire, gpu, drill = (partial(Figure, part=part) for part in ("small-data", "wire", "gpu", "drill"))
LOOP = small_data("LeNet fp32, 1 process", 2.0, 1.9, 2.2, ">= 1.8", "usual eager loop | workers", "4 | 2")
LIMIT = small_data(LOOP.name, 0.8, 0.7, 0.9, ">= 0.95", "bare compute", is_limit=True)
SLOW = wire("step at 1 Gbit/s, ddp-fp32, 2 nodes", 1.25, 1.2, 1.3, "<= 1.15", "wire", is_limit=True)
BYTES = wire("bytes sent", 1.0, goal="<= 1.01", peer="ring limit", is_limit=True)
MISSED = gpu("nccl", None, goal="<= 1", note="not measured: no GPU")
LOST = drill("lose-node, until it trains again", 24.1, goal="<= 30", peer="its bound", is_limit=True)

README = f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n"


def test_the_page_in_the_tree_is_the_one_of_its_files():
    """If not, run `make report` after `make bench`; the figures of the READMEs are those of the newest file."""
    page, *readmes = [path.read_text() for path in (claims.FIGURES / "README.md", *report.READMES)]
    assert report.render(claims.FIGURES, readmes, report.read_drill()) == (page, readmes)


def test_the_pictures_in_the_tree_are_small_and_each_is_shown():
    pictures = sorted(claims.FIGURES.glob("*.png"))
    names = sorted((path.name for path in pictures), key=order)
    names.sort(key=lambda name: name[:10], reverse=True)  # the newest run first, the drill last
    names.sort(key=lambda name: name == "failure.png")
    assert re.findall(r"\]\((.*?\.png)\)", (claims.FIGURES / "README.md").read_text()) == names
    for path in pictures:
        with Image.open(path) as image:
            assert image.width == 700
        assert path.stat().st_size <= 60_000, path


def order(name):
    return [question.name for question in QUESTIONS].index(name.removesuffix(".png").split("-")[-1])


def test_every_part_answers_one_question_and_every_figure_has_a_limit_or_a_reason():
    assert sorted(part for question in QUESTIONS for part in question.parts) == sorted([*PARTS, "drill"])
    figures = [figure for run in report.read_runs(claims.FIGURES) for figure in run.figures] + report.read_drill()
    held = {(figure.part, figure.name) for figure in figures if figure.is_limit}
    assert len(held) > 40
    for figure in figures:
        is_held = (figure.part, figure.name) in held
        assert figure.measured is None or is_held != bool(figure.no_limit), figure


def test_the_newest_run_comes_first_with_all_its_figures(tmp_path):
    write(tmp_path, "2026-01-02-cpu.json", "2026-01-02", LOOP, LIMIT, SLOW, BYTES, MISSED)
    write(tmp_path, "2026-02-01-gpu.json", "2026-02-01", SLOW, gpus=["H200", "H200"])
    (tmp_path / "compare.md").touch()
    text, [readme, chinese] = report.render(tmp_path, [README] * 2, [LOST])
    assert text.index("## 2026-02-01, gpu") < text.index("## 2026-01-02, cpu") < text.index("## The drill")
    answer = (
        "LeNet trains 2.00 times as fast as in the usual PyTorch loop with a DataLoader (4 | 2), "
        "and at 80% of the speed of forward, backward and step alone"
    )
    for part in (
        "2 cores of A | B, 24 GB, 2 x H200. python 3.11.7, torch 2.14.1. ",
        "Revision abc, rounds 5 (wire 3); 0 of 1 goals met",
        "| LeNet fp32, 1 process | >= 1.8 | 2.00 | 1.90 .. 2.20 | yes | usual eager loop \\| workers | 4 \\| 2 |",
        "| LeNet fp32, 1 process | >= 0.95 | 0.800 | 0.700 .. 0.900 | no | **limit:** bare compute | - |",
        "| nccl | <= 1 | - | - | - | - | not measured: no GPU |",
        "2 of 5 goals met, 1 not measured (",
        f"\n\n{answer}.\n\n",
        f"![How fast is the training loop? {answer}](2026-01-02-cpu-loop.png)",
        "Not measured in this run: step.",
        "[compare.md](compare.md)",
    ):
        assert part in text
    assert "2026-02-01-gpu-loop.png" not in text
    # The short table shows the newest run, which has one of the figures; the text around it stays.
    assert readme.startswith(f"before\n\n{report.BEGIN}\n| question |")
    assert readme.endswith(f"{report.END}\n\nafter\n")
    assert "| How fast is the training loop? | not measured in this run |" in readme
    assert (
        "| What does a second node cost? | On 2 nodes with a link of 1 Gbit/s, a step of ddp takes 1.25 times "
        "the lower bound |" in readme
    )
    assert "| An elastic job that loses a node trains again after 24.1 s; the bound is 30 s |" in readme
    # A run that answers none of its questions leaves it as it is.
    write(tmp_path, "2026-03-01-gpu.json", "2026-03-01", MISSED, gpus=["H200"])
    text, [unchanged, _] = report.render(tmp_path, [README] * 2, [LOST])
    assert "## 2026-03-01, gpu" in text
    assert unchanged == readme
    assert len(re.findall(r"^\| .* (?:1.25 倍|24.1 秒.*) \|$", chinese, re.MULTILINE)) == 2
    assert chinese.count("\n| ") == readme.count("\n| ")
    assert report.render(tmp_path, [readme, chinese], [LOST]) == (text, [readme, chinese]), "and it stays"


def test_a_goal_from_above_is_one_for_times():
    assert LOOP.share == (2.0, 1.9, 2.2)
    assert SLOW.share == (1 / 1.25, 1 / 1.3, 1 / 1.2)
    assert BYTES.share == (1.0, 1.0, 1.0)


def test_the_tables_of_the_drill_are_read():
    text = """fault  at step  noticed s  again s  lost
kill-rank    83        0.6         4.9       3      equal
cut-10s      50        -           13.2      0      equal
kill-rank    90        0.8         5.9       3      equal
lose-rank    86        0.3         13.9      6      equal
| kill-agent | KILL to a node's agent |
"""
    assert [(one.name, one.values, one.goal) for one in drill_figures(text)] == [
        ("kill-rank, until it has ended", (0.7, 0.6, 0.8), "<= 15"),
        ("lose-rank, until it trains again", (13.9, 13.9, 13.9), "<= 30"),
    ]


def test_a_picture_shows_what_has_a_limit_over_it_with_its_peers(tmp_path, monkeypatch):
    drawn, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda *args, **more: drawn.append(args[1:]) or plot(*args, **more))
    loop, _, node, *_ = QUESTIONS
    for question in (loop, node):
        draw(question, [LOOP, LIMIT, SLOW, BYTES, MISSED], tmp_path / f"{question.name}.png")
        assert (tmp_path / f"{question.name}.png").read_bytes().startswith(b"\x89PNG")
    points = [(args[0], args[2]) for args in drawn if isinstance(args[0], float)]
    # The limit is at 1; the loop reaches 0.8 of it, its peer half of that; the share of a time is inverted.
    assert points == [(0.8, "o"), (1.0, "|"), (0.95, "|"), (0.4, "s"), (0.8, "o"), (1.0, "|"), (1 / 1.15, "|")]
    draw(loop, [LOOP, MISSED], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists(), "no bar without its limit"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": [{"part": "a"}]}'])
def test_other_files_are_refused_with_their_name(tmp_path, text):
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(UserError, match=r"odd\.json is not from make bench"):
        report.render(tmp_path, [README])


def test_nothing_to_render_is_said_in_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(claims, "FIGURES", tmp_path)
    assert report.main() == 2
    assert capsys.readouterr().err == f"error: no benchmark in {tmp_path}: `make bench` writes one\n"
    assert list(tmp_path.iterdir()) == []


def test_a_readme_without_markers_is_refused(tmp_path):
    write(tmp_path, "a.json", "2026-01-02", LOOP)
    with pytest.raises(UserError, match=r"README\.md needs one line"):
        report.render(tmp_path, ["nothing"])


def test_an_interrupt_leaves_whole_pages(tmp_path, monkeypatch):
    """A link keeps the earlier page only if the next one is another file, written before it takes the name."""
    pages = {name: tmp_path / name for name in ("README.md", "one.md", "two.md", "evidence.md")}
    for name, path in pages.items():
        path.write_text("earlier")
        (tmp_path / f"{name}.link").hardlink_to(path)
    monkeypatch.setattr(claims, "FIGURES", tmp_path)
    monkeypatch.setattr(claims, "PAGE", pages["evidence.md"])
    monkeypatch.setattr(report, "READMES", (pages["one.md"], pages["two.md"]))
    monkeypatch.setattr(report, "QUESTIONS", ())
    monkeypatch.setattr(report, "render", lambda *_: ("page", ["one", "二"]))
    monkeypatch.setattr(report, "evidence", lambda: "claims")
    assert report.main([]) == 0
    assert [path.read_text(encoding="utf-8") for path in pages.values()] == ["page", "one", "二", "claims"]
    assert [path.read_text() for path in tmp_path.glob("*.link")] == ["earlier"] * 4


def test_what_is_measured_is_kept_where_a_later_part_is_interrupted(tmp_path, monkeypatch, capsys):
    def measure(part, rounds):
        if part == "jpeg":
            raise ImportError("no simplejpeg")
        yield replace(SLOW, part=part) if part != "small-data" else LOOP
        if part == "wire":
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", measure)
    path = tmp_path / "figures.json"
    assert bench.main(["small-data", "jpeg", "wire", "--output", str(path)]) == 128 + signal.SIGINT
    printed = capsys.readouterr()
    assert "error: jpeg: ImportError: no simplejpeg\n" in printed.err
    assert f"| wire | {SLOW.name}" in printed.out
    kept = json.loads(path.read_text())
    assert kept["figures"] == [LOOP.as_dict(), SLOW.as_dict()], "also of a part that is not complete"
    # A part measured later, at another commit, is added; the file says which rounds and commits it holds.
    now = kept["parts"]["small-data"]["revision"]
    assert kept["parts"] == {part: {"rounds": 3, "revision": now} for part in ("small-data", "wire")}
    kept["parts"]["small-data"]["revision"] = "abc"
    path.write_text(json.dumps({**kept, "remark": "Beside other work."}))
    assert bench.main(["checkpoint", "--output", str(path)]) == 0
    both = json.loads(path.read_text())
    assert [figure["part"] for figure in both["figures"]] == ["small-data", "wire", "checkpoint"]
    assert both["remark"] == "Beside other work."
    assert both["parts"] == {
        "small-data": {"rounds": 3, "revision": "abc"},
        "wire": {"rounds": 3, "revision": now},
        "checkpoint": {"rounds": 5, "revision": now},
    }


def test_the_figures_of_a_gpu_come_with_the_versions_of_its_libraries(monkeypatch):
    known = {"torch": "2.14.1+cu130", "cuda": "13.0", "nccl": "2.30.7", "driver": None}
    monkeypatch.setattr(bench, "versions", lambda: known)
    for gpus, shown in ((["H200"], {"cuda": "13.0", "nccl": "2.30.7"}), ([], {})):
        monkeypatch.setattr(bench, "hardware", lambda gpus=gpus: {"cpu": None, "machine": "x86_64", "gpus": gpus})
        found = bench.facts()["versions"]
        assert {name: found[name] for name in ("cuda", "nccl", "driver") if name in found} == shown
        assert found["torch"] == torch.__version__.partition("+")[0]


def test_a_part_replaces_an_earlier_measurement_once_it_is_complete(tmp_path, monkeypatch):
    figures, interrupts = [SLOW, BYTES], False

    def measure(part, rounds):
        yield from (replace(figure, part=part) for figure in figures)
        if interrupts:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", measure)
    path = tmp_path / "figures.json"
    kept = lambda: [row["measured"] for row in json.loads(path.read_text())["figures"]]  # noqa: E731
    assert (bench.main(["wire", "--output", str(path)]), kept()) == (0, [SLOW.measured, BYTES.measured])
    figures, interrupts = [replace(SLOW, measured=0.5)], True
    assert bench.main(["wire", "--output", str(path)]) == 128 + signal.SIGINT
    assert kept() == [SLOW.measured, BYTES.measured], "an interrupted part replaces no complete one"
    interrupts = False
    assert (bench.main(["wire", "--output", str(path)]), kept()) == (0, [0.5]), "there are fewer figures now"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not from make bench (JSONDecodeError"),
        ("[]", "is not from make bench (TypeError"),
        ("", "is of another day, machine or version"),
    ],
)
def test_a_file_that_cannot_be_added_to_is_refused_before_the_work(tmp_path, monkeypatch, capsys, text, said):
    monkeypatch.setattr(bench, "measure", lambda part, rounds: pytest.fail("measured"))
    path = write(tmp_path, "odd.json", "2020-01-01", LOOP)
    path.write_text(text or path.read_text())
    text = path.read_text()
    assert bench.main(["step", "--output", str(path)]) == 2
    assert said in capsys.readouterr().err
    assert path.read_text() == text


def test_parts_on_nodes_with_networks_say_why_there_are_none(monkeypatch, capsys):
    monkeypatch.setattr(namespaces.network, "why_not", lambda narrow: "no root")
    for part in namespaces.PARTS:
        [figure] = bench.measure(part, 1)
        assert (figure.part, figure.measured, figure.note) == (part, None, "not measured: no root")
    assert namespaces.main(["wire"]) == 2
    assert capsys.readouterr().err == "error: wire cannot be measured here: no root\n"
