"""A recipe's process: its rank, as launchers set it, and its stop signals."""

import signal
import subprocess
import sys
from typing import ClassVar

import pytest

from recipes.common.errors import UserError
from recipes.common.process.ranks import read_ranks
from recipes.common.process.signals import FAIL, GO, STOP, Stop
from tests.conftest import refused
from tests.support import ROOT


class TestRanks:
    VARIABLES: ClassVar = {
        **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
    }

    @pytest.fixture(autouse=True)
    def all_set(self, monkeypatch):
        for name, value in self.VARIABLES.items():
            monkeypatch.setenv(name, value)

    def test_all_set(self):
        ranks = read_ranks("ddp")
        assert (ranks.rank, ranks.local_rank, ranks.world_size, ranks.local_world_size) == (1, 1, 2, 2)

    BAD: ClassVar = [
        *((name, value) for name in VARIABLES for value in (None, "")),
        *((name, value) for name in list(VARIABLES)[:4] for value in ("-1", "x", "1.5", "²")),
        *((name, "7") for name in ("RANK", "LOCAL_RANK")),
        *(("MASTER_PORT", value) for value in ("0", "65536", "http", "tcp://10.0.0.1:80")),
    ]

    @pytest.mark.parametrize(("name", "value"), BAD)
    def test_a_missing_or_senseless_one_is_refused(self, monkeypatch, name, value):
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
        with refused(name):
            read_ranks("ddp")


class TestStop:
    @pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
    def test_a_signal_is_a_vote(self, number):
        stop = Stop()
        assert stop.vote == GO
        signal.raise_signal(number)
        assert (stop.vote, stop.signal) == (STOP, number)

    def test_an_error_weighs_more_and_the_first_counts(self):
        stop = Stop()
        signal.raise_signal(signal.SIGUSR1)
        stop.fail(UserError("first"))
        stop.fail(UserError("second"))
        assert stop.vote == FAIL > STOP > GO
        assert str(stop.error) == "first"

    def test_a_signal_that_was_blocked_before_is_delivered(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal.raise_signal(signal.SIGUSR1)
        assert Stop().signal == signal.SIGUSR1


@pytest.mark.parametrize("module", ["recipes.single.train", "scripts.plan", "scripts.dev.export", "scripts.same"])
def test_ctrl_c_while_packages_are_imported_is_no_traceback(monkeypatch, tmp_path, module):
    for package in ("torch", "numpy"):
        (tmp_path / f"{package}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (-signal.SIGINT, "")  # a shell's status 130
