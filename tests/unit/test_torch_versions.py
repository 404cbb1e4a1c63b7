"""What is done otherwise than by torch: how ranks end, on which cores they run, where compiled code is kept."""

import os
import shutil
import signal
import tempfile
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from recipes.common import compiled_code
from recipes.common.errors import UserError
from recipes.common.process.node import Failure, Node
from recipes.common.watch.notes import Notes
from scripts.launch import rank_processes, torch_agent
from tests.support import write_program

NODE = Node(2, 0, 2, "127.0.0.1", 29500, 5)


def test_ranks_end_at_once(monkeypatch):
    """This holds for each way in which torch asks its context to close."""
    closed = []
    close = lambda self, *how, **named: closed.append([*how, *named.values()])  # noqa: E731
    monkeypatch.setattr(SubprocessContext, "_close", close)
    context = SubprocessContext.__new__(SubprocessContext)
    context._tail_logs, context.filtered_stdout, context.filtered_stderr = [], None, None
    monkeypatch.setattr(LocalElasticAgent, "_start_workers", lambda self, group: {})
    agent = torch_agent.Agent.__new__(torch_agent.Agent)
    agent._pcontext = context
    agent._start_workers(None)
    context.close()
    context.close(signal.SIGTERM, 30)
    assert closed == [[rank_processes.END_SIGNAL, rank_processes.END_SIGNAL_GRACE_S]] * 2


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs and numactl."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def test_ranks_with_gpus_are_bound_to_their_cores(gpus):
    chosen = torch_agent.choose_numa_options(NODE, [])
    assert (chosen.affinity_mode.value, chosen.should_fall_back_if_binding_fails) == ("node", True)


@pytest.mark.parametrize("without", ["gpus", "enough", "numactl", "wish", "one"])
def test_other_ranks_are_not(gpus, monkeypatch, without):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: {"gpus": 0, "enough": 1}.get(without, 2))
    if without == "numactl":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    options = {"wish": ["--device=cpu"], "one": ["--split", "in-process"]}.get(without, [])
    assert torch_agent.choose_numa_options(NODE, options) is None


def test_compiled_code_is_run_from_a_folder_of_this_user(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):  # the second run finds the first one's folder
        compiled_code.check_folder()
        [folder] = tmp_path.iterdir()
        assert folder.name.startswith("torchinductor_")
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o775)  # as torch makes it under the umask 002
    compiled_code.check_folder()
    with monkeypatch.context() as other:
        other.setattr(compiled_code, "os", SimpleNamespace(geteuid=lambda: os.geteuid() + 1))
        with pytest.raises(UserError, match="is not a folder of yours; remove it"):
            compiled_code.check_folder()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is not a folder of yours"):
        compiled_code.check_folder()
    folder.unlink()
    folder.touch()
    with pytest.raises(UserError, match="is a file; remove it"):
        compiled_code.check_folder()


def test_a_machine_that_cannot_compile_for_its_cpu_is_refused(tmp_path, monkeypatch):
    """Torch itself finds out in the first step, and prints a traceback of sixty lines."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-g++")}):
        compiled_code.check_compiler(torch.device("cuda", 0))
        with pytest.raises(UserError, match=r"^--compile: .* has no C\+\+ compiler; install g\+\+, "):
            compiled_code.check_compiler(torch.device("cpu"))
    compiled_code.check_compiler(torch.device("cpu"))


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ("", r"has no C compiler; install gcc, set CC to"),
        ("#!/bin/sh\nexit 1", r"\.h; install Python's headers \(python3-dev\), set CC to another C compiler, or"),
    ],
    ids=["none", "no headers"],
)
def test_a_machine_that_cannot_compile_for_a_gpu_is_refused(tmp_path, monkeypatch, found, fault):
    """Triton, which runs what torch compiles for GPUs, compiles a Python extension in C before anything else."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compiled_code.check_compiler(torch.device("cuda", 0))
    if found:
        write_program(tmp_path / "gcc", found)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=f"^--compile: .*{fault}"):
        compiled_code.check_compiler(torch.device("cuda", 0))


def test_ranks_that_have_not_met_after_a_while_are_warned_of_once(monkeypatch, capsys):
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: RunResult(WorkerState.HEALTHY))
    monkeypatch.setattr(torch_agent, "LOOK_EVERY_S", -1)
    monkeypatch.setenv("SCRIPT", "train.py")
    agent, keys = torch_agent.Agent.__new__(torch_agent.Agent), ["none/nodes/0", "default_pg/0//cpu//0/0"]
    agent._worker_group = SimpleNamespace(workers=[SimpleNamespace(id=0, global_rank=0, world_size=2)])
    agent.own_keys, agent.store = "none/", SimpleNamespace(list_keys=lambda: keys)
    agent._monitor_workers(agent._worker_group)
    assert agent.store, "too early to look"
    monkeypatch.setattr(torch_agent, "MEET_WITHIN_S", -1)
    for agent._warns_at in (0, 0):
        agent._monitor_workers(agent._worker_group)
    assert not capsys.readouterr().err
    del keys[1]
    agent.store = SimpleNamespace(list_keys=lambda: keys)
    for _ in range(2):
        agent._monitor_workers(agent._worker_group)
    assert capsys.readouterr().err.count("warning: the 2 ranks have not met in a process group") == 1


def test_a_node_that_fails_asks_once_if_no_other_has_left(monkeypatch):
    """The nodes of a large job fail together and ask one store, twice for each key that it lacks."""
    monkeypatch.setattr(torch_agent, "NOTICE_S", 0)
    monkeypatch.setattr(LocalElasticAgent, "_exit_barrier", lambda self: None)
    store, agents = Mock(wraps=HashStore()), []
    for node_rank in range(2):
        agent = torch_agent.Agent.__new__(torch_agent.Agent)
        workers = [SimpleNamespace(world_size=32)]
        agent._worker_group = SimpleNamespace(group_rank=node_rank, group_world_size=16, workers=workers)
        agent.notes = Notes(store, 16)
        agents.append(agent)
    first, second = agents
    assert first.ranks_that_left_elsewhere() == {}
    assert [request for request, _, _ in store.method_calls] == ["check"]
    second.ranks_that_left = lambda: {2: Failure(0, 7), 3: Failure(0, 8)}
    second._exit_barrier()
    assert [key for key, _ in (request.args for request in store.set.mock_calls)] == ["left/any", "left/1"]
    assert first.ranks_that_left_elsewhere() == {2: Failure(0, 0), 3: Failure(0, 0)}
