"""What a container's first process does: the end of a run told from a stop, and a head that gets its name late."""

import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from recipes.common.errors import UserError
from recipes.common.process.node import Node
from scripts.launch import interface, stopped_status, torch_agent
from scripts.launch.local import free_port
from scripts.launch.recipe_options import read_option
from tests.conftest import refused
from tests.support import Command, last_step, run_command, words_for, write_program


@pytest.mark.parametrize(
    ("words", "value"),
    [("", "none"), ("--name a", "a"), ("--name=a --name b", "b"), ("--name", "none"), ("--names=a x", "none")],
)
def test_the_last_value_of_an_option_counts(words, value):
    assert read_option("--name", "none", words.split()) == value


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path):
    """As the recipe reads it: else the launcher would look for the record in a folder named ~."""
    (tmp_path / "job.yaml").write_text("runs-dir: ~/b\n")
    for words, name in ((["--runs-dir=~/a"], "a"), (["--config", str(tmp_path / "job.yaml")], "b")):
        assert read_option("--runs-dir", "runs", words) == str(Path.home() / name)


def test_a_python_without_yaml_is_named_where_a_configuration_has_to_be_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "recipes.common.config_file", None)
    assert read_option("--name", "none", []) == "none"
    with refused(f"--config job.yaml: {sys.executable} has no PyYAML to read it by; install it"):
        read_option("--name", "none", ["--config", "job.yaml"])


def test_the_record_tells_whether_a_run_has_come_to_its_end(tmp_path):
    options = ["--runs-dir", str(tmp_path), "--name", "mine"]
    assert stopped_status.has_finished(options, 0) is None, "no record here"
    assert stopped_status.has_finished(options[:2], 0) is None, "no name"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    assert stopped_status.has_finished(options, 0) is False
    (tmp_path / "job.yaml").write_text(f"runs-dir: {tmp_path}\n")
    assert stopped_status.has_finished([*options[2:], f"--config={tmp_path}/job.yaml"], 0) is False
    assert stopped_status.has_finished([*options[2:], f"--config={tmp_path}"], 0) is None, "the recipe refuses it"
    (tmp_path / "job.yaml").write_text("name: 1.10\n")
    assert read_option("--name", "", [f"--config={tmp_path}/job.yaml"]) == "1.10"
    result = tmp_path / "mine" / "result.json"
    result.touch()
    os.utime(result, (1000, 1000))
    assert stopped_status.has_finished(options, 999) is True
    assert stopped_status.has_finished(options, 1003) is False, "of an earlier start"


def test_a_result_that_another_node_has_just_written_is_seen(tmp_path, monkeypatch):
    """An NFS client may remember for a minute that there was no such file; the pod would start again."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    monkeypatch.setattr(stopped_status, "refresh_names", lambda folder: (folder / "result.json").touch())
    assert stopped_status.has_finished(["--runs-dir", str(tmp_path), "--name", "mine"], 0) is True


def test_a_run_has_finished_also_by_the_clock_of_a_file_server(tmp_path, monkeypatch):
    """Pods whose run is complete would fail and start again for ever if the clock is an hour behind."""
    options, fstat = ["--runs-dir", str(tmp_path), "--name", "mine"], os.fstat
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    result = tmp_path / "mine" / "result.json"
    for behind_s in (3600, -3600):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", lambda file, s=behind_s: SimpleNamespace(st_mtime=fstat(file).st_mtime - s))
            begin = stopped_status.time_on_disk(options)
        result.touch()
        for age_s, has_finished in ((0, True), (60, False)):
            dated = time.time() - behind_s - age_s
            os.utime(result, (dated, dated))
            assert stopped_status.has_finished(options, begin) is has_finished
    without_folder = stopped_status.time_on_disk(["--runs-dir", str(tmp_path / "none")])
    assert without_folder == pytest.approx(time.time(), abs=60)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["single", "spawn"])
def test_a_stopped_run_fails_and_a_finished_one_does_not(recipe, tmp_path):
    """test_injection.py tests both with ddp's launcher, where a node is drained."""
    command = ["scripts/launch.sh", recipe, *words_for(tmp_path, "mine", "--resume", "auto")]
    env = {"STOPPED_STATUS": "143", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    env["MASTER_PORT"] = str(free_port())
    stopped = Command(*command, "--epochs", "400", **env)
    stopped.wait_for_step(tmp_path / "mine", 3)
    stopped.process.send_signal(signal.SIGTERM)
    result = stopped.wait()
    assert result.status == 143, result.stderr
    assert result.stdout.endswith("stopped before its end: status 143, so that a restart continues\n")
    if recipe == "spawn":
        return  # it ends like single
    rest = (*command, "--max-steps", str(last_step(tmp_path / "mine") + 2))
    result = run_command(*rest, check=True, **env)
    line = result.stdout.splitlines()[-1]
    assert line.startswith("result recipe=single ")
    # A pod that starts once more finds the run complete, and succeeds, so that no other follows.
    again = run_command(*rest, **env)
    assert (again.status, again.stdout.splitlines()[-1]) == (0, line), again.stderr


@pytest.mark.parametrize(
    ("what", "status", "expected"),
    [
        ("touch $4/mine/result.json", 3, 0),
        ("touch $4/mine/result.json", 137, 0),
        ("touch $4/mine/result.json", 2, 2),
        ("touch $4/mine/result.json", 0, 0),
        ("touch -d 2020-01-01 $4/mine/result.json", 3, 3),
        ("", 3, 3),
        ("rm $4/mine/config.json", 3, 3),
    ],
)
def test_a_node_that_fails_after_the_end_of_its_run_succeeds(tmp_path, monkeypatch, capfd, what, status, expected):
    """A new pod would wait for the others, which have ended with 0 and do not come back."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").touch()
    write_program(tmp_path / "scripts/launch.sh", f"#!/bin/sh\n{what}\nexit {status}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOPPED_STATUS", "143")
    assert stopped_status.main(["ddp", "--name=mine", "--runs-dir", str(tmp_path)]) == expected
    is_warned = f"warning: status {status} after the run was complete" in capfd.readouterr().out
    assert is_warned is (status != expected)


def test_statuses_pass_through(tmp_path):
    env = {"PYTHON": sys.executable}
    words = words_for(tmp_path, "mine", "--global-batch-size", "0")
    result = run_command("scripts/launch.sh", "single", *words, STOPPED_STATUS="143", **env)
    assert result.status == 2
    result = run_command("scripts/launch.sh", "single", STOPPED_STATUS="soon", **env)
    assert result.refusal == "error: STOPPED_STATUS expects a whole number of at least 1, got 'soon'"


def test_a_stop_before_the_first_process_listens_reaches_its_node(tmp_path, monkeypatch):
    """The kernel drops signals to a container's first process that it neither handles nor blocks."""
    (tmp_path / "scripts").mkdir()
    write_program(tmp_path / "scripts/launch.sh", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOPPED_STATUS", "143")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as scripts/launch.sh does
    signal.raise_signal(signal.SIGTERM)
    assert stopped_status.main(["ddp"]) == 128 + signal.SIGTERM


def test_the_stop_of_a_node_is_told_beside_the_run(tmp_path, monkeypatch):
    """Not in RUN_DIR, whose content means that there is something to resume."""
    for name, value in {"SCRIPT": "train.py", "RUN_DIR": str(tmp_path / "mine"), "MIN_NODES": ""}.items():
        monkeypatch.setenv(name, value)
    assert stopped_status.read_stop_file() == ""
    stopped_status.write_stop_file()
    assert stopped_status.read_stop_file().startswith(f"{socket.gethostname()} ")
    assert [path.name for path in tmp_path.iterdir()] == [".mine.stopped"]
    monkeypatch.setenv("MIN_NODES", "1")
    assert stopped_status.stop_file() is None, "the other nodes of an elastic job go on"
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "no" / "mine"))
    monkeypatch.setenv("MIN_NODES", "")
    stopped_status.write_stop_file()
    assert stopped_status.read_stop_file() == "", "there is no such folder"


def test_a_process_that_is_killed_counts_as_128_and_more():
    for line, ended in (("kill -KILL $$", (137, [])), ("kill $PPID; exec sleep 60", (143, [signal.SIGTERM]))):
        assert stopped_status.run(["bash", "-c", line], dict(os.environ)) == ended


def test_a_name_that_becomes_known_is_waited_for(monkeypatch):
    answers = [socket.gaierror(-2, "Name or service not known")] * 2
    original = socket.getaddrinfo

    def later(host, *args, **options):
        if host == "ddp-0.ddp" and answers:
            raise answers.pop()
        return original("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", later)
    monkeypatch.setattr(interface.time, "sleep", lambda _: None)
    said = r"cannot resolve ddp-0.ddp \(Name or service not known\); fix DNS"
    with pytest.raises(UserError, match=said) as caught:
        interface.resolve("ddp-0.ddp", timeout_s=0)
    assert caught.value.status == 2
    assert len(answers) == 1
    assert interface.resolve("ddp-0.ddp", timeout_s=60)[1] == ("127.0.0.1", 9)


def test_the_wait_for_a_name_has_a_bound_and_is_no_refusal():
    """A head whose pod is late has no name yet: if that counted as a refusal, the Job would end for good."""
    env = {"FABRIC": "tcp", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "no-such-host.invalid"}
    result = run_command("scripts/launch.sh", "ddp", **env, RDZV_TIMEOUT_S="1", PYTHON=sys.executable)
    assert result.status == 1
    assert "cannot resolve no-such-host.invalid within 1 s" in result.errors[0]


@pytest.mark.parametrize(("value", "expected"), [("8f6c", "8f6c"), ("", "none")])
def test_the_store_is_that_of_the_job(value, expected, monkeypatch, tmp_path):
    monkeypatch.setenv("RDZV_ID", value)
    monkeypatch.setenv("LAUNCHER_PID", "")
    seen = []

    def run(agent):
        seen.append(agent._worker_group.spec.rdzv_handler.get_run_id())
        return RunResult(state=WorkerState.SUCCEEDED)

    monkeypatch.setattr(torch_agent.Agent, "run", run)
    assert torch_agent.run(Node(1, 0, 1, "127.0.0.1", free_port(), 5), "ddp", [], str(tmp_path)) == 0
    assert seen == [expected]
