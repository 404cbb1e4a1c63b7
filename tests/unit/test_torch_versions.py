"""What the launcher changes in torch, and what it does with a torch in which that does not apply."""

import shutil
import signal
import sys

import pytest
import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import PContext

from recipes.common.process.node import Node
from scripts.launch import agent, elastic

NODE = Node(2, 0, 2, "127.0.0.1", 29500, 5)
WARNING = f"warning: torch {torch.__version__} is not as this launcher expects: "


class Context(PContext):
    """A context of ranks that notes how it is closed."""

    def __init__(self):
        self.closed, self._tail_logs = [], []
        self.filtered_stdout = self.filtered_stderr = None

    _start = _poll = pids = lambda self: None

    def _close(self, death_sig, timeout=30):
        self.closed.append((death_sig, timeout))


def test_ranks_end_at_once(monkeypatch, capsys):
    monkeypatch.setattr(PContext, "close", PContext.close)
    agent.end_ranks_at_once()
    context = Context()
    context.close()
    context.close(signal.SIGTERM, 30)
    assert context.closed == [(agent.END_SIGNAL, agent.END_GRACE_S)] * 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("close", [None, lambda self, how: None])
def test_a_torch_that_closes_otherwise_is_left_alone(monkeypatch, capsys, close):
    monkeypatch.setattr(PContext, "close", close)
    agent.end_ranks_at_once()
    assert PContext.close is close
    assert capsys.readouterr().err == f"{WARNING}a failed rank's peers may take 30 s to end\n"


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs and numactl; nothing stays changed in torchrun."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torchrun, "config_from_args", torchrun.config_from_args)


def numa_mode():
    """Return the binding that torchrun would use."""
    config, _, _ = torchrun.config_from_args(torchrun.parse_args(["--nproc-per-node=2", "script.py"]))
    return config.numa_options and (config.numa_options.affinity_mode.value, config.numa_options)


def test_ranks_with_gpus_are_bound_to_their_cores(gpus, capsys):
    agent.bind_to_numa_nodes(NODE, [])
    mode, options = numa_mode()
    assert (mode, options.should_fall_back_if_binding_fails) == ("node", True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("without", ["gpus", "enough", "numactl", "wish"])
def test_other_ranks_are_not(gpus, monkeypatch, without):
    if without in ("gpus", "enough"):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: {"gpus": 0, "enough": 1}[without])
    if without == "numactl":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    agent.bind_to_numa_nodes(NODE, ["--device=cpu"] if without == "wish" else [])
    assert numa_mode() is None


def test_a_torch_without_numa_binding(gpus, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.numa.binding", None)
    agent.bind_to_numa_nodes(NODE, [])
    assert capsys.readouterr().err == f"{WARNING}ranks are not bound to the cores near their GPUs\n"


@pytest.mark.parametrize("is_known", [True, False])
def test_an_elastic_job_on_another_torch(monkeypatch, capsys, tmp_path, is_known):
    """It runs on torchrun's own rendezvous, with one warning."""
    seen = []
    for name in ("MIN_NODES", "MAX_RESTARTS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LAUNCHER_PID", "")
    monkeypatch.setattr(torchrun, "run", seen.append)
    monkeypatch.setattr(agent, "wait_for_head", lambda *_: "127.0.0.1")
    monkeypatch.setattr(elastic, "install", lambda job: None)
    if not is_known:
        monkeypatch.setattr(elastic, "missing_parts", lambda: ["Agent.part"])
    assert agent.run_elastic(NODE, "ddp", ["--name=x"], str(tmp_path), []) == 0
    [args] = seen
    assert args.rdzv_backend == ("elastic" if is_known else "c10d")
    assert (args.nnodes, args.max_restarts, args.rdzv_endpoint) == ("1:2", 1, "127.0.0.1:29500")
    words = ["--name=x"] if is_known else ["--name=x", "--resume", "auto"]
    assert args.training_script_args[-len(words) :] == words
    told = "" if is_known else f"{WARNING}a silent node is noticed after --timeout-s, not 8 s (Agent.part)\n"
    assert capsys.readouterr().err == told
