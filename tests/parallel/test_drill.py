"""A short fire drill: the faults are planted, survived and measured."""

import json
import sys

from scripts import network
from tests.conftest import require
from tests.support import Command


def drill(folder, *words):
    """Run a drill; return its report."""
    command = Command(sys.executable, "-m", "scripts.drill", *words, "--runs-dir", str(folder))
    result = command.wait(timeout_s=170)
    assert result.status == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == f"all {len(words) - 2} faults survived"
    report = json.loads((folder / "drill-001/drill.json").read_text())
    return report["faults"]


def test_plain_processes(tmp_path):
    [fault] = drill(tmp_path, "--plain", "kill-rank", "--steps=240")
    assert fault["survived"]
    assert 0 < fault["noticed_s"] < 15 < 60 + fault["noticed_s"] > fault["training_again_s"]
    assert 0 <= fault["steps_lost"] <= 20
    assert fault["weights"] == "equal"
    assert fault["left_over"] == []
    assert fault["starts"] == 2
    assert fault["victim"] in ("rank 0", "rank 1")
    assert [path.name for path in (tmp_path / "drill-001").iterdir() if path.is_dir()] == ["undisturbed-lenet"]


def test_a_cut_link(tmp_path):
    require("netns", not network.why_not(), network.why_not(), "run `make test` as root")
    [fault] = drill(tmp_path, "cut", "--seed=0", "--steps=240")
    # Ranks wait --timeout-s for each other, 6 s, before they end.
    assert 5 < fault["noticed_s"] < 15
    assert fault["training_again_s"] > fault["noticed_s"]
    assert fault["steps_lost"] <= 20
    assert fault["weights"] == "equal"
    assert fault["starts"] == 2
