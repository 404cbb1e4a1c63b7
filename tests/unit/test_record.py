"""The record of a run: what rank 0 writes to runs/NAME, and which run a launch may write to."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import socket
import subprocess
import threading
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter

from recipes.common.checkpoint.checkpoint import Position, pack
from recipes.common.errors import UserError
from recipes.common.loop import begin_run
from recipes.common.record import provenance, record
from recipes.common.record.earlier_launches import remove_record, rename_report
from recipes.common.record.provenance import hardware, versions
from recipes.common.record.record import open_run
from recipes.common.world.places import Place
from recipes.single.train import options
from scripts.launch.runs import read_losses
from tests.support import contents
from tests.tiny import tiny_job


class TestRecord:
    def open(self, folder, *argv, recipe="single"):
        args = options(["--runs-dir", str(folder), "--no-tensorboard", *argv])
        record, content = open_run(args, recipe, [Place("a", "CPU, 1 thread a process")] * 2)
        step = content["position"]["step"] if content else 0
        record.begin(step, step, total_steps=100, is_complete=False)
        return record, content

    def open_complete(self, folder):
        """Open the run a, which has a checkpoint of all 9 steps, once more."""
        record, _ = open_run(options(["--runs-dir", str(folder), "--name", "a", "--resume", "auto"]), "single", [])
        record.begin(9, 9, total_steps=9, is_complete=True)
        return record

    def log(self, record, step, loss=1.0):
        record.log_step(step=step, epoch=1, loss=loss, lr=0.1, samples_per_s=1.0)

    def write_checkpoint(self, record, step, is_best=False):
        record.checkpoints.write(pack(record.args, Position(step=step), {}, {}, {}), is_best)

    def test_config_tells_what_was_run(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MAKE_LINE", "make run RECIPE=single")
        record, content = self.open(tmp_path, "--name", "a", "--seed", "3")
        assert content is None
        config = json.loads((record.folder / "config.json").read_text())
        assert config["recipe"] == "single"
        assert config["options"]["seed"] == 3
        assert config["options"]["runs_dir"] == str(tmp_path)
        assert config["versions"]["torch"] == torch.__version__
        assert config["versions"]["torchvision"] == version("torchvision")
        assert config["versions"].keys() >= {"cuda", "nccl", "driver"}
        assert config["hardware"]["cpus"] == os.cpu_count()
        models = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        assert config["hardware"]["cpu"] == (models[0] if models else None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # GPUs that torch's CUDA cannot use
        assert hardware()["gpus"] == []
        assert [launch["world_size"] for launch in config["launches"]] == [2]
        assert config["launches"][0]["make"] == "make run RECIPE=single"

    def test_a_url_is_recorded_as_it_was_given(self, tmp_path):
        argv = ("--data", "shards", "--data-dir", "https://host/shards", "--cache-dir", str(tmp_path / "cache"))
        record, _ = self.open(tmp_path, "--name", "a", *argv)
        config = json.loads((record.folder / "config.json").read_text())
        assert config["options"]["data_dir"] == "https://host/shards"
        assert config["options"]["cache_dir"] == str(tmp_path / "cache")

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("make run RECIPE=single", "resume with: make run RECIPE=single NAME=a ARGS='--resume auto'"),
            ("make run NAME=b ARGS='-x \"1 2\"'", "resume with: make run NAME=a ARGS='-x \"1 2\" --resume auto'"),
            ("make compare RECIPES=single", "resume with --name a --resume auto and the other options as before"),
        ],
    )
    def test_a_stopped_run_prints_how_to_resume_it(self, tmp_path, monkeypatch, capsys, line, words):
        monkeypatch.setenv("MAKE_LINE", line)
        record, _ = self.open(tmp_path, "--name", "a")
        record.leave("SIGTERM", tmp_path / "x.pt")
        assert capsys.readouterr().out.splitlines()[-2:] == [f"stopped by SIGTERM: wrote {tmp_path}/x.pt", words]

    def test_a_package_that_is_not_there_has_no_version(self, monkeypatch):
        monkeypatch.setattr("sys.path", [])
        assert versions()["torchvision"] is None

    def test_the_result_has_the_best_evaluation_and_when_the_run_ended(self, tmp_path, capsys):
        record, _ = self.open(tmp_path, "--name", "a")
        self.log(record, 100)
        record.log_averages("epoch", epoch=1, step=100, test_loss=1.0, test_accuracy=0.5, train_s=1.0)
        result = {"world_size": 2, "step": 100, "test_accuracy": 0.5, "best_test_accuracy": 0.75}
        record.print_result(record.write_result(headline="test_accuracy", **result, samples_per_s=1.0))
        written = json.loads((record.folder / "result.json").read_text())
        assert written["best_test_accuracy"] == 0.75
        assert abs(datetime.now().astimezone() - datetime.fromisoformat(written["ended"])) < timedelta(minutes=1)
        kinds = [json.loads(line)["kind"] for line in (record.folder / "metrics.jsonl").read_text().splitlines()]
        assert kinds == ["step", "epoch"]
        last = f"result recipe=single world_size=2 test_accuracy=0.5000 samples_per_s=1 record={record.folder}\n"
        assert capsys.readouterr().out.endswith(last)

    def test_a_complete_run_prints_the_headline_of_its_own_result(self, tmp_path, capsys):
        """The task's code may have another headline by now."""
        record, _ = self.open(tmp_path, "--name", "a")
        record.write_result(headline="test_error", world_size=2, step=9, test_error=0.25, samples_per_s=1.0)
        self.write_checkpoint(record, 9)
        record = self.open_complete(tmp_path)
        record.print_result(record.write_result(headline="test_bits", world_size=1, test_bits=1.0))
        assert "test_error=0.2500" in capsys.readouterr().out.splitlines()[-1]
        (record.folder / "result.json").unlink()  # as of a run that was killed before it could write it
        record.print_result(
            self.open_complete(tmp_path).write_result(headline="x", world_size=1, samples_per_s=1.0)
        )
        assert "x=nan" in capsys.readouterr().out.splitlines()[-1]

    @pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
    def test_a_result_that_is_not_finite_is_json_and_printed_as_it_is(self, tmp_path, capsys, value, shown):
        """JSON has no NaN and no Infinity: other programs would refuse the whole file."""
        record, _ = self.open(tmp_path, "--name", "a")
        values = {"world_size": 1, "step": 9, "test_loss": value}
        self.log(record, 9, loss=value)
        record.print_result(record.write_result(headline="test_loss", **values, samples_per_s=1.0))
        written = json.loads((record.folder / "result.json").read_text(), parse_constant=pytest.fail)
        assert written["test_loss"] == (None if math.isnan(value) else value)
        assert "Infinity" not in (record.folder / "metrics.jsonl").read_text()
        assert read_losses(record.folder) == {}, "a curve has finite values"
        self.write_checkpoint(record, 9)
        again = self.open_complete(tmp_path)
        again.print_result(again.write_result(headline="test_loss", **values, samples_per_s=1.0))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("result ")]
        assert [line.split()[3] for line in lines] == [f"test_loss={shown}"] * 2

    def test_events_that_cannot_be_written_are_one_line(self, tmp_path):
        """TensorBoard's thread keeps the error and raises it in a later call."""
        record, _ = self.open(tmp_path, "--name", "a")
        fail = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        for call in (lambda: self.log(record, 1), record.close):
            record._events = SimpleNamespace(add_scalar=fail, close=fail)
            with pytest.raises(UserError, match=r"cannot write .*a.*: No space left on device"):
                call()

    def test_the_thread_that_writes_events_prints_no_traceback(self, tmp_path, monkeypatch):
        """It keeps its error, which a later call raises: a full disk is one line."""
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(threading, "excepthook", printed := Mock())
        record, _ = self.open(tmp_path, "--name", "a", "--tensorboard")
        monkeypatch.setattr(RecordWriter, "write", Mock(side_effect=full))
        self.log(record, 1)
        with pytest.raises(OSError, match="No space left"):
            record._events.flush()
        assert not printed.called
        other = threading.Thread(target=Mock(side_effect=full))
        other.start()
        other.join()
        assert printed.called

    @pytest.mark.parametrize("number", [1, 2, 3], ids=["config", "metrics", "events"])
    def test_a_run_that_cannot_begin_leaves_its_name_to_the_next_try(self, tmp_path, monkeypatch, number):
        """As on a full disk: there is nothing to resume, and the retry is no second run of that name."""
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (tmp_path / "a" / "slurm").mkdir(parents=True)

        def fill_disk(writer, data):
            (tmp_path / "a" / "events.out.tfevents.1").touch()
            raise full

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", Mock(side_effect=[None] * (number - 1) + [full]))
            patch.setattr(RecordWriter, "write", fill_disk)
            with pytest.raises(UserError, match=r"cannot write .*: No space left"):
                self.open(tmp_path, "--name", "a", "--tensorboard")
        assert [path.name for path in (tmp_path / "a").rglob("*")] == ["slurm"]
        self.open(tmp_path, "--name", "a")

    def test_what_another_job_has_begun_is_not_removed(self, tmp_path, monkeypatch):
        """A new run fails to begin, and a second job of that name has begun meanwhile: the second continues."""
        options_of_one = options(["--runs-dir", str(tmp_path), "--name", "a", "--no-tensorboard"])
        one, _ = open_run(options_of_one, "single", [Place("a", "CPU, 1 thread a process")])
        other, _ = self.open(tmp_path, "--name", "a", "--resume", "auto")
        before = contents(other.folder)
        one.discard()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
            with pytest.raises(UserError, match="No space left"):
                one.begin(0, 0, total_steps=100, is_complete=False)
        assert contents(other.folder) == before
        other.check_owner()

    def test_names_count_up(self, tmp_path, monkeypatch):
        names = [self.open(tmp_path)[0].folder.name for _ in range(3)]
        assert names == ["single-001", "single-002", "single-003"]
        assert self.open(tmp_path, recipe="ddp")[0].folder.name == "ddp-001"
        (tmp_path / "single-1203").mkdir()
        assert self.open(tmp_path)[0].folder.name == "single-1204"
        monkeypatch.setattr(record, "names_in", lambda folder: {"single-001"})  # as if others had begun since
        assert self.open(tmp_path)[0].folder.name == "single-004"

    def test_the_record_is_on_the_disk_before_it_has_its_name(self, tmp_path, monkeypatch):
        """After a power cut, an empty config.json would be a damaged one."""
        calls, fsync, replace = [], os.fsync, Path.replace
        monkeypatch.setattr(os, "fsync", lambda handle: calls.append("fsync") or fsync(handle))
        monkeypatch.setattr(Path, "replace", lambda path, to: calls.append(to.name) or replace(path, to))
        self.open(tmp_path)
        assert calls == ["fsync", "config.json", "fsync", "metrics.jsonl"]

    def test_a_taken_name_is_refused(self, tmp_path):
        self.open(tmp_path, "--name", "a")
        with pytest.raises(UserError, match=r"a exists; add --resume auto .*--overwrite .*another --name"):
            self.open(tmp_path, "--name", "a")
        args = options(["--runs-dir", str(tmp_path), "--name", "b", "--overwrite"])
        open_run(args, "single", [])  # claims the name; config.json is written once all ranks have restored
        killed = "or give only --resume auto if a launch was killed there"
        with pytest.raises(UserError, match=rf"b exists and is not a run; choose another --name, {killed}"):
            open_run(args, "single", [])
        self.open(tmp_path, "--name", "b", "--resume", "auto")

    def test_overwrite_deletes_runs_only(self, tmp_path):
        record, _ = self.open(tmp_path, "--name", "a")
        self.log(record, 1)
        record, _ = self.open(tmp_path, "--name", "a", "--overwrite")
        assert (record.folder / "metrics.jsonl").read_text() == ""
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "thesis.txt").write_text("years of work")
        with pytest.raises(UserError, match="exists"):
            self.open(tmp_path, "--name", "precious", "--overwrite")
        assert (tmp_path / "precious" / "thesis.txt").read_text() == "years of work"

    def test_overwrite_removes_a_link_and_not_what_it_points_to(self, tmp_path):
        """Checkpoints may be on another disk."""
        record, _ = self.open(tmp_path, "--name", "a")
        (tmp_path / "scratch").mkdir()
        (tmp_path / "scratch" / "thesis.txt").write_text("years of work")
        (record.folder / "checkpoints").symlink_to(tmp_path / "scratch")
        record, _ = self.open(tmp_path, "--name", "a", "--overwrite")
        assert sorted(path.name for path in record.folder.iterdir()) == ["config.json", "metrics.jsonl"]
        assert (tmp_path / "scratch" / "thesis.txt").read_text() == "years of work"

    def test_overwrite_deletes_config_json_last(self, tmp_path, monkeypatch):
        """A job that is killed meanwhile and starts again sees from it that the run is not replaced yet."""
        for name in ("config.json", "a", "z"):
            (tmp_path / name).touch()
        deleted = []
        monkeypatch.setattr(Path, "unlink", lambda path: deleted.append(path.name))
        for names in (["config.json", "a", "z"], ["a", "config.json", "z"], ["z", "a", "config.json"]):
            monkeypatch.setattr(Path, "iterdir", lambda folder, names=names: (folder / name for name in names))
            remove_record(tmp_path, "slurm")
            assert deleted.pop() == "config.json"
        assert len(deleted) == 6

    @pytest.mark.parametrize("flags", [["--overwrite"], ["--resume", "auto"]])
    def test_a_launch_that_was_killed_as_it_replaced_a_run_is_no_obstacle(self, tmp_path, monkeypatch, flags):
        """Of config.json, it has left the temporary file."""

        def be_killed(temporary, path):
            temporary.rename(path.with_name(".config.json.node-7"))  # so that nothing removes it
            raise ZeroDivisionError

        self.open(tmp_path, "--name", "a")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", be_killed)
            with pytest.raises(ZeroDivisionError):
                self.open(tmp_path, "--name", "a", "--overwrite")
        assert [path.name for path in (tmp_path / "a").iterdir()] == [".config.json.node-7"]
        self.open(tmp_path, "--name", "a", *flags)
        assert len(json.loads((tmp_path / "a/config.json").read_text())["launches"]) == 1

    def test_a_launchers_logs_are_no_run_and_stay(self, tmp_path):
        log = tmp_path / "a" / "slurm" / "n1.txt"
        log.parent.mkdir(parents=True)
        log.write_text("n1: fabric tcp\n")
        for argv in ([], ["--overwrite"]):
            record, _ = self.open(tmp_path, "--name", "a", *argv)
            assert (record.folder / "config.json").exists()
            assert log.read_text() == "n1: fabric tcp\n"
        with pytest.raises(UserError, match="exists"):
            self.open(tmp_path, "--name", "a")

    @pytest.mark.parametrize("flag", ["--resume=auto", "--overwrite"])
    def test_of_two_jobs_of_a_run_the_older_writes_nothing_more(self, tmp_path, flag):
        def write_all(record, step):
            yield lambda: self.log(record, step)
            yield lambda: self.write_checkpoint(record, step)
            yield lambda: record.write_result(headline="test_loss", world_size=1, test_loss=1.0, samples_per_s=1.0)

        older, _ = self.open(tmp_path, "--name", "a")
        for write in write_all(older, 5):
            write()
        newer, _ = self.open(tmp_path, "--name", "a", flag)
        before = contents(older.folder)
        owner = rf"on {re.escape(socket.gethostname())} \(pid {os.getpid()}\) at 20.*; this job stops"
        for write in write_all(older, 9):
            with pytest.raises(UserError, match=f"another job has taken over the run .*a, {owner}"):
                write()
        assert contents(older.folder) == before
        for write in write_all(newer, 9):
            write()

    def test_a_job_that_takes_over_loses_no_step_that_the_older_one_saved_meanwhile(self, tmp_path):
        """Between the newer job's read and its begin, all ranks restore the checkpoint, which may take minutes."""

        def save(record, step):
            self.log(record, step)
            self.write_checkpoint(record, step)

        older, _ = self.open(tmp_path, "--name", "a")
        save(older, 10)
        args = options(["--runs-dir", str(tmp_path), "--no-tensorboard", "--name", "a", "--resume", "auto"])
        newer, content = open_run(args, "single", [Place("a", "CPU, 1 thread a process")])
        save(older, 20)
        said = r"older job wrote .*-000000020\.pt while this one started, and stops now; start this one again$"
        with pytest.raises(UserError, match=said) as caught:
            newer.begin(content["position"]["step"], 0, total_steps=100, is_complete=False)
        assert caught.value.status == 1
        with pytest.raises(UserError, match="another job has taken over the run"):
            save(older, 30)
        again, content = self.open(tmp_path, "--name", "a", "--resume", "auto")
        assert content["position"]["step"] == 20
        save(again, 30)
        lines = [json.loads(line) for line in (again.folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [10, 20, 30]

    def test_who_owns_a_run_is_read_again_only_if_its_file_has_changed(self, tmp_path, monkeypatch):
        """Of 1,024 hosts and 50 launches, config.json has megabytes, and each logged step asks."""
        record, _ = self.open(tmp_path, "--name", "a")
        config, read, read_text = record.folder / "config.json", [], Path.read_text
        monkeypatch.setattr(Path, "read_text", lambda path, **how: read.append(path) or read_text(path, **how))
        for step in range(5):
            self.log(record, step)
        assert read == [config]
        os.utime(config)
        self.log(record, 6)
        self.log(record, 7)
        assert read == [config] * 2

    def test_a_checkpoint_is_not_added_to_a_run_that_was_taken_over_meanwhile(self, tmp_path, monkeypatch):
        record, _ = self.open(tmp_path, "--name", "a")
        save = torch.save

        def save_late(*args):
            save(*args)
            self.open(tmp_path, "--name", "a", "--resume", "auto")

        monkeypatch.setattr(torch, "save", save_late)
        with pytest.raises(UserError, match="another job has taken over the run"):
            self.write_checkpoint(record, 5, is_best=True)
        assert [path.suffix for path in (record.folder / "checkpoints").iterdir()] == [".tmp"]

    @pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES, None])
    def test_what_cannot_be_read_for_a_moment_is_no_other_job(self, tmp_path, monkeypatch, error):
        record, _ = self.open(tmp_path, "--name", "a")
        config, read = record.folder / "config.json", Path.read_text

        def fail(path, *args, **options):
            if path != config:
                return read(path, *args, **options)
            if error:
                raise OSError(error, os.strerror(error), str(path))
            return read(path, *args, **options)[:100]  # as an editor leaves it that is saving it

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", fail)
            self.log(record, 1)
            self.write_checkpoint(record, 1)
        assert json.loads((record.folder / "metrics.jsonl").read_text())["step"] == 1
        assert [path.name for path in record.checkpoints.paths()] == ["step-000000001.pt"]
        self.open(tmp_path, "--name", "a", "--resume", "auto")
        with pytest.raises(UserError, match="another job has taken over the run"):
            self.log(record, 2)

    def test_a_run_that_another_job_is_about_to_replace_is_not_written_to(self, tmp_path):
        """Otherwise its checkpoint would count as one of the new run."""
        record, _ = self.open(tmp_path, "--name", "a")
        for path in record.folder.iterdir():
            path.unlink()  # as --overwrite does before it writes its own
        for write in (self.log, self.write_checkpoint):
            with pytest.raises(UserError, match=r"a/config\.json is gone: another job replaces the run,.* stops"):
                write(record, 1)
        assert list(record.folder.iterdir()) == []

    def test_a_folder_that_is_moved_away_is_no_other_jobs_doing(self, tmp_path):
        """Such as runs/, a file system that is unmounted."""
        record, _ = self.open(tmp_path, "--name", "a")
        shutil.move(tmp_path, tmp_path.with_name("elsewhere"))
        for write in (self.log, self.write_checkpoint):
            with pytest.raises(UserError, match=r"/a is gone: it was moved or deleted, .*, then --resume auto$"):
                write(record, 1)
        assert not tmp_path.exists()

    @pytest.mark.parametrize("flags", [[], ["--overwrite"]])
    def test_what_another_rank_refuses_changes_no_record(self, tmp_path, flags):
        """For example, a pipeline stage does not fit its part of the checkpoint, but rank 0's stage does."""
        if flags:
            self.open(tmp_path, "--name", "a")
        before = contents(tmp_path)
        job = tiny_job("--runs-dir", str(tmp_path), "--name", "a", "--no-tensorboard", *flags)
        errors = [None]

        def open_folder(value):
            errors.append(UserError("rank 1's part does not fit"))
            return value

        job.peers = SimpleNamespace(
            rank=0,
            watch=lambda name: contextlib.nullcontext(),
            gather_objects=lambda value: [value, errors[-1] if value is None else value],
            broadcast_object=open_folder,
        )
        with pytest.raises(UserError, match="rank 1's part does not fit"):
            begin_run(job)
        assert contents(tmp_path) == before
        assert os.listdir(tmp_path) == (["a"] if flags else [])

    def test_lines_beyond_the_checkpoint_and_a_cut_line_are_dropped(self, tmp_path):
        record, _ = self.open(tmp_path, "--name", "a")
        for step in range(1, 8):
            self.log(record, step)
        self.write_checkpoint(record, 5)
        with open(record.folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 8, "lo')
        record, content = self.open(tmp_path, "--name", "a", "--resume", "auto")
        assert content["position"]["step"] == 5
        self.log(record, 6, 2.0)
        lines = [json.loads(line) for line in (record.folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        assert lines[-1]["loss"] == 2.0

    @pytest.mark.parametrize("target", ["missing", "empty"])
    def test_resume_of_nothing_by_path_is_refused(self, tmp_path, target):
        (tmp_path / "empty").mkdir()
        with pytest.raises(UserError, match=r"--start-from .*(no such file|no checkpoints)"):
            self.open(tmp_path, "--start-from", str(tmp_path / target))
        assert sorted(os.listdir(tmp_path)) == ["empty"], "a refusal leaves no run behind"

    def test_a_runs_folder_that_cannot_be_made_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"cannot write .*file"):
            self.open(tmp_path / "file" / "runs")

    def test_tensorboard_events_hold_the_same_numbers(self, tmp_path):
        """A launch that begins again, from step 0 or 1, takes the later ones back."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        for resume, begun, steps, kept in (
            ("none", 0, (1, 2, 3), (1, 2, 3)),
            ("auto", 0, (1, 2), (1, 2)),
            ("auto", 1, (2,), (1, 2)),
        ):
            args = options(["--runs-dir", str(tmp_path), "--name", "a", "--resume", resume])
            record, _ = open_run(args, "single", [Place("a", "CPU, 1 thread a process")])
            record.begin(begun, 0, total_steps=100, is_complete=False)
            for step in steps:
                self.log(record, step, step / 2)
            if resume == "auto":
                record.checkpoints.write(pack(args, Position(step=1), {}, {}, {}))
            record.close()
            events = EventAccumulator(str(record.folder)).Reload()
            assert [(event.step, event.value) for event in events.Scalars("loss")] == [(i, i / 2) for i in kept]

    def test_no_report_of_a_hang_takes_the_place_of_another(self, tmp_path):
        for text in ("first", "second"):
            (tmp_path / "hang-report.txt").write_text(text)
            rename_report(tmp_path)
        assert [(tmp_path / f"hang-report-{i}.txt").read_text() for i in (1, 2)] == ["first", "second"]
        (tmp_path / "hang-report-1.txt").unlink()
        (tmp_path / "hang-report.txt").write_text("third")
        rename_report(tmp_path)
        assert [(tmp_path / f"hang-report-{i}.txt").read_text() for i in (1, 2)] == ["third", "second"]


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git; install it")
def test_an_archive_within_another_repository_has_no_revision(tmp_path, monkeypatch):
    def git(*words):
        own = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(own, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.delenv("SOURCE_REVISION", raising=False)
    path = tmp_path / "archive/provenance.py"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setattr(provenance, "__file__", str(path))
    assert provenance.revision() is None
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message=a")
    assert provenance.revision() is None
    git("add", ".")
    assert provenance.revision() == git("rev-parse", "HEAD") + "-dirty"
