"""The local launcher, with shell commands in the place of nodes: what it prints of how they ended."""

import errno
import io
import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest

from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.process.signals import STOP_SIGNALS
from scripts.launch import local
from scripts.launch.command import temporary_folder
from scripts.launch.rejoin import LOST_STATUS
from tests.conftest import refused
from tests.support import ROOT, wait_until

HELD_BACK = "echo 'error: a disk is slow'"


def start(job, *nodes):
    for script in nodes:
        job.start(["bash", "-c", script], dict(os.environ))
    return job


def test_lines_that_look_like_refusals_are_printed_when_all_goes_well(capsys):
    job = start(local.LocalJob(), "exit 0", HELD_BACK)
    assert (job.wait(), capsys.readouterr().err) == (0, "[node 1] error: a disk is slow\n")


def test_lines_that_look_like_refusals_are_printed_while_the_job_goes_on(monkeypatch, tmp_path):
    """A script may say of a sample in its first hour that it cannot be read. Node 0 ends once that is printed."""
    monkeypatch.setattr(local, "FAILURE_GRACE_S", 0.1)
    with open(tmp_path / "printed", "w", buffering=1) as file:
        monkeypatch.setattr(sys, "stderr", file)
        until_printed = f"timeout 20 bash -c 'until grep -q slow {tmp_path}/printed; do sleep 0.1; done'"
        assert start(local.LocalJob(), until_printed, HELD_BACK).wait() == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", []), ("n0=10.79.0.1,n1=10.79.0.2", [["n0", "10.79.0.1"], ["n1", "10.79.0.2"]])],
)
def test_the_networks_of_nodes_may_be_none(text, expected):
    """A benchmark without networks of its own gives an empty list."""
    assert local.parse_args(["ddp", "--networks", text]).networks == expected


@pytest.mark.parametrize(
    ("stop", "status", "last"),
    [
        ("interrupt", 130, "interrupted"),
        ("record_stop", 1, "error: still running 0 s after the signal; killed"),
    ],
)
def test_lines_that_look_like_refusals_are_printed_when_a_job_is_stopped(monkeypatch, capsys, stop, status, last):
    monkeypatch.setattr(local, "STOP_GRACE_S", 0.1)
    job = start(local.LocalJob(), "trap '' INT; sleep 60", f"trap '' INT; {HELD_BACK}; sleep 60")
    wait_until(lambda: job.refusals, 20, "the line")
    getattr(job, stop)(signal.SIGINT, None)
    assert (job.wait(), capsys.readouterr().err) == (status, f"[node 1] error: a disk is slow\n{last}\n")


@pytest.mark.parametrize(
    ("options", "is_script", "expected"),
    [
        ([], False, 60 + 2 * Options.timeout_s),
        (["--timeout-s", "20"], False, 100),
        (["--timeout-s=soon"], False, 60),
        ([], True, 60),
    ],
)
def test_a_recipe_may_end_its_step_after_a_stop_signal(monkeypatch, options, is_script, expected):
    """A step of many passes takes longer than a minute; if a rank hangs, the recipe ends by itself."""
    monkeypatch.setattr(local.script, "is_set", lambda: is_script)
    args = Namespace(recipe="ddp", networks=[], how_to_resume=None, options=options)
    assert local.make_job(args, None).stop_grace_s == expected


@pytest.mark.parametrize(
    ("options", "elastic", "own", "expected"),
    [
        (["--name", "mine"], None, None, "add --resume auto to resume"),
        ([], None, None, "add --resume auto and --name with the name of this run to resume"),
        ([], (1, 3), None, "add --resume auto and --name ddp-7 to resume"),
        (["--name", "mine-lr1"], None, "to resume, the same", "to resume, the same"),  # make submit LOCAL=1
        (["--name", "ddp"], None, "", ""),  # make compare
    ],
)
def test_ctrl_c_names_the_run_that_can_be_resumed(monkeypatch, capsys, options, elastic, own, expected):
    """Before this run has a record, --resume auto alone would continue the run before it."""
    monkeypatch.setattr(local, "name_run", lambda recipe: f"{recipe}-7")
    monkeypatch.setattr(local, "start_process", lambda *_, **__: Namespace(poll=lambda: None))
    monkeypatch.setattr(local.LocalJob, "handle_signals", lambda job: None)
    monkeypatch.setattr(local.LocalJob, "start", lambda *_: None)
    for kind in (local.LocalJob, local.ElasticJob):
        monkeypatch.setattr(kind, "wait", lambda job: job.interrupt(signal.SIGINT, None) or job.report([]))
    args = Namespace(recipe="ddp", networks=[], how_to_resume=own, options=options)
    local.make_job(args, elastic)  # another program took its port
    assert local.run_job(local.make_job(args, elastic), args, [[]], 1) == 130
    whole = f"; checkpoints so far are whole: {expected}" if expected else ""
    assert capsys.readouterr().err == f"interrupted{whole}\n"


def test_a_number_of_threads_that_is_none_is_refused(monkeypatch):
    monkeypatch.setattr(local, "count_cores", lambda: 8)
    for text, expected in (("2", "2"), ("4,2", "4,2"), ("", "4")):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert local.threads_per_process(1, 2) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    with refused("OMP_NUM_THREADS expects a number of threads, got 'all'; unset it"):
        local.threads_per_process(1, 2)


def test_an_output_that_cannot_be_written_is_one_line():
    """`make list >/dev/full`, and a report on a disk that is full."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "scripts.launch.local", "--list"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    reason = "No space left on device; free some space"
    assert (done.returncode, done.stderr) == (1, f"error: cannot write: {reason}\n")


def test_a_node_whose_output_nobody_reads_any_more_goes_on(monkeypatch):
    """As in `make run ... 2>&1 | head`: node 1 would wait forever for room in its pipe."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    assert start(local.LocalJob(), "exit 0", f"{HELD_BACK}; timeout 20 seq 100000").wait() == 0


def test_a_progress_bar_of_another_node_is_no_line_for_each_state(capsys):
    bar = r"for i in {1..50}; do printf '\r%s%%' $i; sleep 0.01; done; printf '\r100%%\nends\r\nlast'"
    assert start(local.LocalJob(), "exit 0", bar).wait() == 0
    assert capsys.readouterr().err == "".join(f"[node 1] {line}\n" for line in ("1%", "100%", "ends", "last"))


def test_a_stop_before_any_node_listens_is_told(capsys):
    job = start(local.LocalJob(), "sleep 60", "sleep 60")
    job.record_stop(signal.SIGTERM, None)
    assert (job.wait(), *capsys.readouterr()) == (0, "stopped by SIGTERM\n", "")


def test_a_stop_is_repeated_until_a_node_has_its_handlers(tmp_path):
    node = f"trap '' USR1; touch {tmp_path}/up; sleep 0.3; trap 'exit 0' USR1; until false; do sleep 0.1; done"
    job = start(local.LocalJob(), node)
    wait_until((tmp_path / "up").exists, 20, "the node")
    job.record_stop(signal.SIGUSR1, None)
    assert job.wait() == 0
    assert job.nodes[0].returncode == 0


def test_stop_signals_that_go_on_after_the_end_change_nothing():
    node = "trap '' USR1; echo up; sleep 0.3"
    code = f"""if True:
        import os, sys
        from scripts.launch.local import LocalJob
        job = LocalJob()
        job.handle_signals()
        job.start(["bash", "-c", {node!r}], dict(os.environ))
        sys.exit(job.wait())"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    while process.poll() is None:  # Python restores the signals' defaults while it ends
        process.send_signal(signal.SIGUSR1)
    assert process.returncode == 0


def test_a_stop_signal_that_comes_between_two_ports_reaches_the_second_job():
    job = start(local.LocalJob(), "exit 75")
    job.handle_signals()
    assert job.wait() == 75
    signal.raise_signal(signal.SIGTERM)
    again = local.LocalJob()
    again.handle_signals()
    assert (job.stop_signals, again.stop_signals) == (set(), {signal.SIGTERM})


def test_a_refusal_that_node_0_prints_is_not_repeated(capsys):
    """Although another node prints it earlier, and ends later."""
    job = start(local.LocalJob(), "sleep 0.3; exit 2", f"{HELD_BACK}; sleep 0.5; exit 2")
    assert (job.wait(), capsys.readouterr().err) == (2, "")


def test_the_death_of_an_elastic_job_s_store_is_named_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setattr(local, "FAILURE_GRACE_S", 0.1)
    job = start(local.ElasticJob(1, 3, "127.0.0.1", "to resume: again"), "sleep 60")
    job.store.kill()
    said = "error: the job's store was killed by SIGKILL, so all nodes are stopped; to resume: again\n"
    assert (job.wait(), capsys.readouterr().err) == (1, said)


def test_the_loss_of_all_nodes_of_an_elastic_job_is_named_with_the_remedy(capfd):
    """The results are those of rank 0, which may be on any node."""
    last = f"echo epoch 1; echo slow >&2; exit {LOST_STATUS}"
    job = start(local.ElasticJob(1, 3, "127.0.0.1", "to resume: again"), "kill -KILL $$", last)
    said = "[node 1] slow\nerror: all nodes are lost; to resume: again\n"
    assert (job.wait(), *capfd.readouterr()) == (1, "epoch 1\n", said)


def test_an_elastic_node_that_the_stop_signal_meets_as_it_ends_is_not_lost():
    """Signals are repeated, and Python no longer has handlers when it ends."""
    job = start(local.ElasticJob(1, 3, "127.0.0.1", "to resume: again"), "kill -KILL $$", "kill -TERM $$")
    job.stop_signals.add(signal.SIGTERM)
    assert job.wait() == 0


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_job_that_another_port_started_anew_hears_of_a_lost_terminal_too(before):
    signal.signal(signal.SIGHUP, before)
    for job in (local.LocalJob(), local.LocalJob()):
        job.handle_signals()
        expected = before if before == signal.SIG_IGN else job.interrupt
        assert signal.getsignal(signal.SIGHUP) == expected, "nohup ignores it"
        assert signal.getsignal(signal.SIGINT) == job.interrupt
        assert {signal.getsignal(number) for number in STOP_SIGNALS} == {job.record_stop}


def test_a_temporary_folder_that_is_full_is_named_and_no_other_file():
    with pytest.raises(UserError, match=r"^cannot write /.*/a: No space left on device; free .* TMPDIR$"):
        with temporary_folder() as folder:
            raise OSError(errno.ENOSPC, "No space left on device", f"{folder}/a")
    with pytest.raises(FileNotFoundError), temporary_folder() as folder:
        Path(folder, "missing").read_text()
    with pytest.raises(OSError, match="elsewhere"), temporary_folder():
        raise OSError(errno.ENOSPC, "No space left on device", "/elsewhere")


def test_a_temporary_folder_that_a_process_still_writes_to_is_no_error(monkeypatch):
    """A killed rank's child may do so: the job's own status stays."""
    with temporary_folder() as folder:
        monkeypatch.setattr(os, "rmdir", Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")))
    monkeypatch.undo()
    Path(folder).rmdir()


def test_a_temporary_folder_that_cannot_be_made_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with refused("cannot make a temporary folder: No such file or directory; free some space, or set TMPDIR"):
        temporary_folder().__enter__()


def test_code_that_torch_has_compiled_outlives_the_job_in_a_folder_of_this_user(tmp_path, monkeypatch):
    """It takes minutes to compile a large model again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = tmp_path / f"torchinductor_{os.geteuid()}"
    for _ in range(2):  # the second job finds the first one's folder
        environment = local.node_environment(0, 1, 1, [], 29500)
        assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # as another user may have made it
    assert "TORCHINDUCTOR_CACHE_DIR" not in local.node_environment(0, 1, 1, [], 29500)
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert local.keep_compiled_code() == {}
    folder.unlink()
    folder.touch()
    assert local.keep_compiled_code() == {}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert local.node_environment(0, 1, 1, [], 29500)["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_two_elastic_jobs_that_start_in_one_second_have_two_names(monkeypatch):
    monkeypatch.setattr(local.time, "strftime", lambda _: "20260131-100000")
    own = local.name_run("ddp")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert local.name_run("ddp") != own
