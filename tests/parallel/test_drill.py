"""A short fire drill: a fault is planted, survived and measured."""

import json
import sys

import pytest

from scripts.lab import network
from tests.support import Command

pytestmark = pytest.mark.slow


def test_a_fault_is_survived_and_measured(tmp_path):
    """Cut a link if nodes can have their own networks, else kill a rank."""
    words = ("cut", "--seed=0") if not network.why_not() else ("--plain", "kill-rank")
    command = (sys.executable, "-m", "scripts.drill", *words, "--steps=240", "--runs-dir", str(tmp_path))
    result = Command(*command).wait(timeout_s=170)
    assert result.status == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "1 fault survived"
    [fault] = json.loads((tmp_path / "drill-001/drill.json").read_text())["faults"]
    assert fault["survived"]
    # Ranks wait for each other for --timeout-s, 6 s, before they end.
    assert (5 if "cut" in words else 0) < fault["noticed_s"] < 15
    assert fault["noticed_s"] < fault["training_again_s"] < 75
    assert 0 <= fault["steps_lost"] <= 20
    assert fault["weights"] == "equal"
    assert fault["left_over"] == []
    assert fault["starts"] == 2
    assert fault["victim"] in ("node 0", "node 1", "rank 0", "rank 1")
    assert [path.name for path in (tmp_path / "drill-001").iterdir() if path.is_dir()] == ["undisturbed-ddp-lenet"]
