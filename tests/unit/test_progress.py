"""What rank 0 shows while it trains."""

import io
import shlex
import sys

import pytest

from recipes.common.errors import UserError
from recipes.common.record.progress import Progress
from recipes.common.record.progress_bar import ProgressBar
from recipes.common.record.record import start_progress
from tests.support import run_command, words_for


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_bar_counts_the_steps_of_the_whole_run(monkeypatch):
    terminal = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    progress = start_progress()
    assert isinstance(progress, ProgressBar)
    progress.begin_epoch(2, 10, 4, run_steps=40, run_done=14)
    progress.show("loss 1.0000  5 samples/s")
    for _ in range(6):
        progress.advance()
    progress.begin_evaluation()
    assert "epoch 2: evaluating  50%|" in terminal.getvalue()
    progress.say("epoch 2  step 20  test_loss 1.0000")
    progress.begin_epoch(3, 10, 0, run_steps=40, run_done=20)
    last = terminal.getvalue().split("\r")[-1]
    assert last.startswith("epoch 3  50%|")
    assert "| step 20/40 " in last
    assert " left, loss 1.0000  5 samples/s" in last
    assert "it/s" not in terminal.getvalue(), "the speed has one unit"
    assert "epoch 2  step 20  test_loss 1.0000\n" in terminal.getvalue()
    progress.close()


def test_a_run_whose_reader_has_gone_ends_in_one_line(tmp_path):
    words = words_for(tmp_path, "piped", "--epochs", "400", "--device", "cpu")
    train = shlex.join([sys.executable, "-m", "recipes.single.train", *words])
    result = run_command("bash", "-c", f"{train} | head -1; exit ${{PIPESTATUS[0]}}")
    assert (result.status, result.stdout.count("\n")) == (2, 1)
    remedy = "to resume: --resume auto, with the output in a file"
    assert result.stderr == f"error: standard output is closed; {remedy}\n"


def test_a_run_whose_output_goes_to_a_full_disk_ends_in_one_line(monkeypatch):
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(UserError, match=r"^standard output failed: No space left on device; to resume: "):
            Progress().say("epoch 1")
        print("more", flush=True)  # as at exit


def test_without_a_terminal_there_are_lines(capsys):
    progress = start_progress()
    assert type(progress) is Progress
    progress.begin_epoch(2, 10, 4, run_steps=40, run_done=14)
    progress.advance()
    progress.begin_evaluation()
    progress.show("loss 1.0000")
    assert capsys.readouterr() == ("", ""), "too early"
    progress._spoke_at -= 11
    progress.show("loss 1.0000")
    assert capsys.readouterr() == ("epoch 2  step 5/10  loss 1.0000\n", "")
