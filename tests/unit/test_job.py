"""A training job: which batches come next, what is due when, votes, evaluations and restored checkpoints."""

import dataclasses
import errno
import math
import socket
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from recipes.common import job as jobs
from recipes.common import loop
from recipes.common.checkpoint.checkpoint import Position
from recipes.common.data.workers import WorkerError
from recipes.common.errors import UserError
from recipes.common.job import MOST_MS, draw_order
from recipes.common.process.signals import GO, STOP, vote_interval
from recipes.common.restore import restore
from recipes.common.task import Classification, Task
from tests.conftest import refused
from tests.tiny import tiny_job


class TestJob:
    def test_a_run_is_complete_although_its_sample_does_not_fit_the_device(self):
        """A pipeline's model may be spread over several devices because it is too large for one."""

        class Telling(Classification):
            def sample(self, model, device):
                return "a sample"

        job, printed = tiny_job("--epochs", "1"), []
        job.data = dataclasses.replace(job.data, task=Telling())
        job.position = Position(step=job.total_steps, epoch=1)
        job.model.register_parameter("elsewhere", torch.nn.Parameter(torch.empty(1, device="meta")))
        job.record = SimpleNamespace(progress=SimpleNamespace(say=printed.append), print_result=printed.append)
        job.record.write_result = lambda **result: result
        job.writer = SimpleNamespace(stalls_s=[0.25, 0.75], wait=lambda bound_s: printed.append("waited") is None)
        job.finish()
        waited, warning, result = printed
        assert waited == "waited", "for the last checkpoint, before the result"
        assert (result["checkpoints"], result["checkpoint_stall_s"]) == (2, 0.5)
        assert result["peak_memory_bytes"] > 50e6, "as torch alone has"
        assert warning.startswith("warning: the sample failed: NotImplementedError: Cannot copy out of meta")
        assert result["step"] == job.total_steps

    @pytest.mark.parametrize("task", [Task, Classification])
    def test_a_run_whose_evaluations_are_no_numbers_has_no_best_result(self, task):
        job = tiny_job("--epochs", "1")
        job.data = dataclasses.replace(job.data, task=task())
        job.record = SimpleNamespace(write_result=lambda **result: result)
        result = job._write_result()
        assert math.isnan(result[f"best_test_{task.headline}"]), "its score is the lowest, as before the first one"

    @pytest.mark.parametrize("value", [0.5, math.nan, math.inf])
    def test_an_evaluation_that_is_not_finite_is_said(self, value):
        job, printed = tiny_job("--epochs", "1"), []
        job.data = dataclasses.replace(job.data, task=Classification())
        progress = SimpleNamespace(say=printed.append)
        job.record = SimpleNamespace(log_averages=lambda kind, **values: None, progress=progress)
        job.end_evaluation({"test_loss": 1.0, "test_accuracy": value})
        why = ": look at the test data, and at what the model returns"
        assert printed == ([] if value == 0.5 else [f"warning: test_accuracy is {value}{why}"])

    def test_a_line_that_nobody_reads_is_a_vote(self):
        job, errors = tiny_job(), []
        say = Mock(side_effect=UserError("nobody reads standard output any more"))
        job.stop = SimpleNamespace(fail=errors.append)
        job.record = SimpleNamespace(progress=SimpleNamespace(say=say))
        job.say("warning: skipped step 3")
        assert [str(error) for error in errors] == ["nobody reads standard output any more"]

    @pytest.mark.parametrize("gathers", [False, True])
    @pytest.mark.parametrize("error", [UserError("of all ranks"), WorkerError("of one"), RuntimeError("of one")])
    def test_a_rank_that_alone_fails_in_an_evaluation_waits_for_no_other(self, monkeypatch, error, gathers):
        job, found = tiny_job("--epochs", "1"), []
        job.save, job.writer = lambda: found.append("alone"), SimpleNamespace(wait=lambda: found.append("written"))
        monkeypatch.setattr(loop, "train_until_evaluation", lambda job, technique: GO)
        monkeypatch.setattr(loop, "evaluate", Mock(side_effect=error))
        monkeypatch.setattr(loop, "save_checkpoint", lambda job, technique: found.append("all"))
        with pytest.raises(type(error)):
            loop.train_epochs(job, SimpleNamespace(gather_state=found.copy if gathers else None))
        alone = [] if gathers else ["alone", "written"]
        assert found == (["all"] if type(error) is UserError else alone)

    @pytest.mark.parametrize(
        ("flag", "place", "expected"),
        [
            ("--async-checkpoints", (2, 0), ["waited", "copy"]),
            ("--async-checkpoints", (3, 1), ["waited", "copy"]),
            ("--async-checkpoints", (12, 4), ["waited", "itself", "waited"]),
            ("--no-async-checkpoints", (2, 0), ["waited", "itself", "waited"]),
        ],
        ids=["step", "epoch", "end", "not async"],
    )
    def test_training_goes_on_only_beside_a_copy(self, flag, place, expected):
        """What is written without a copy is on the disk before a weight changes."""
        job, seen = tiny_job("--epochs", "4", "--checkpoint-every", "2", flag), []
        job.position.step, job.position.epoch = place
        job.record = SimpleNamespace()
        job.writer = SimpleNamespace(
            begin=lambda content, is_best, copies: seen.append("copy" if copies else "itself"),
            wait=lambda bound_s: seen.append("waited") is None,
        )
        loop.save_checkpoint(job, SimpleNamespace(gather_state=None))
        assert seen == expected

    def test_ranks_wait_for_a_checkpoint_as_long_as_a_slow_disk_takes(self):
        """A million weights of 4 bytes and their two moments are 12 MB: 1.2 s at 10 MB/s."""
        job, waited_s = tiny_job("--timeout-s", "8"), []
        job.model = torch.nn.Linear(1000, 1000, bias=False)
        assert job.disk_s == 3 * 4e6 / 10e6
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jobs, "wait_for_all", lambda wait, peers, *bounds_s: waited_s.extend(bounds_s))
            job.wait_for_checkpoint()
        assert waited_s == [8, 1.2]

    @pytest.mark.parametrize(("log_every", "steps"), [("1000", [2, 3]), ("1", [1, 2, 3])])
    def test_a_gpu_is_asked_for_a_bad_step_before_what_is_logged_or_saved(self, log_every, steps):
        job, asked = tiny_job("--epochs", "4", "--log-every", log_every, "--checkpoint-every", "2"), []
        job.guard.read_back = asked.append
        for _ in range(3):
            job.count_step()
        assert asked == steps

    def test_steps(self):
        job = tiny_job("--epochs", "4")
        assert (job.steps_per_epoch, job.total_steps, job.epoch_end) == (3, 12, 3)
        assert job.eval_batch_size == 30, "no more samples than in a pass of training, which fits in memory"
        assert tiny_job("--epochs", "4", "--max-steps", "7").total_steps == 7
        assert tiny_job("--epochs", "4", "--max-steps", "70").total_steps == 12

    def test_batches_of_an_epoch_are_disjoint_and_go_on_at_the_step(self):
        job = tiny_job()
        batches = list(job.global_batches())
        assert [len(batch) for batch in batches] == [30, 30, 30]
        assert len(set(torch.cat(batches).tolist())) == 90
        job.position.step = 2
        assert torch.equal(next(job.global_batches()), batches[2])
        assert len(list(job.global_batches())) == 1
        job.position.step, job.position.epoch = 3, 1
        assert not torch.equal(next(job.global_batches()), batches[0])

    def test_the_order_of_an_epoch_is_drawn_once(self, monkeypatch):
        """Of a billion samples, it takes a minute."""
        job, drawn = tiny_job("--epochs", "2", "--evaluate-every", "1"), []
        monkeypatch.setattr(jobs, "draw_order", lambda *args: drawn.append(args[2]) or draw_order(*args))
        seen = []
        for step in range(6):
            job.position = Position(step=step, epoch=step // 3, evaluated_step=step)
            seen += job.global_batches()
        assert drawn == [0, 1]
        expected = [draw_order(job.data.train, job.args, epoch)[:90] for epoch in range(2)]
        assert torch.equal(torch.cat(seen), torch.cat(expected))

    def test_the_orders_of_two_epochs_are_not_in_memory_at_once(self, monkeypatch):
        """Each takes 8 bytes per sample, on each rank."""
        job, drawn = tiny_job("--epochs", "3"), []

        def draw(*args):
            assert not [epoch for epoch, order in enumerate(drawn) if order() is not None]
            order = draw_order(*args)
            drawn.append(weakref.ref(order))
            return order

        monkeypatch.setattr(jobs, "draw_order", draw)
        for epoch in range(3):
            job.position = Position(step=3 * epoch, epoch=epoch)
            list(job.global_batches())
        assert len(drawn) == 3

    def test_what_a_sharded_checkpoint_may_take(self):
        """A million weights of 4 bytes and their moments are 12 MB: 1.2 s at 10 MB/s, 12 ms at 1 GB/s in all."""

        def job_of(part):
            job = tiny_job()
            job.model = torch.nn.ParameterList([torch.empty(10**6)])
            if part:  # like a DTensor's, on a mesh of 2 x 3 ranks
                layout = {"device_mesh": torch.empty(2, 3), "placements": [SimpleNamespace(dim=0)] * 2}
                vars(job.model[0]).update(layout, to_local=None)
            return job

        assert job_of(part=True).write_s == pytest.approx(1.2)
        sharded = job_of(part=True)
        sharded.args = SimpleNamespace(sharded_checkpoints=True)
        assert sharded.write_s == pytest.approx(1.2 * 166_667 / 10**6), "the largest of 6 parts"
        assert sharded.disk_s == pytest.approx(1.2), "rank 0 may read a whole one"
        whole = job_of(part=False)
        whole.args = SimpleNamespace(sharded_checkpoints=True)
        assert whole.write_s == pytest.approx(1.2), "rank 0 writes what no rank shares"

    @pytest.mark.parametrize(
        ("world_size", "voting"), [(1, range(6)), (64, range(6)), (65, [0, 1, 2, 3, 5]), (4096, [0, 1, 2, 3, 5])]
    )
    def test_many_ranks_vote_seldom_but_before_all_that_is_saved(self, world_size, voting):
        """Epochs end after steps 3 and 6, and every fourth step writes a checkpoint: all vote before these.

        In the first two steps, they do not know yet how long a step takes.
        """
        job = tiny_job("--epochs", "2", "--checkpoint-every", "4")
        job.peers.world_size = world_size
        seen = []
        for step in range(6):
            job.position.step, job.position.epoch = step, step // 3
            if job.is_vote_due():
                seen.append(step)
                assert job.begin_vote()() == GO
        assert seen == list(voting)

    def test_ranks_with_long_steps_vote_more_often(self):
        assert [vote_interval(1024, step_s) for step_s in (0.05, 0.5, 1.0, 8.0)] == [16, 10, 5, 1]
        assert vote_interval(64, 0.05) == 1
        job = tiny_job()
        job.peers.world_size = 1024
        # The slowest rank's step takes a second.
        job.peers.begin_vote = lambda vote: lambda: max(vote, STOP * (MOST_MS + 1) + 1000)
        job.position.step = 3
        assert job.begin_vote()() == STOP
        job.position.step = 7
        assert not job.is_vote_due()
        job.position.step = 8
        assert job.is_vote_due()

    @pytest.mark.parametrize(
        ("step", "epoch", "complete"), [(0, 0, False), (11, 3, False), (12, 3, False), (12, 4, True)]
    )
    def test_complete_means_evaluated(self, step, epoch, complete):
        job = tiny_job("--epochs", "4")
        job.position.step, job.position.epoch = step, epoch
        assert job.is_complete is complete

    @pytest.mark.parametrize(
        ("step", "epoch", "evaluated", "expected"),
        [
            (0, 0, 0, 2),
            (1, 0, 0, 2),
            (2, 0, 0, 2),  # a signal has ended the evaluation
            (2, 0, 2, 3),  # the epoch's end
            (3, 1, 3, 4),
            (3, 1, 0, 4),  # a checkpoint of a version that knew only epochs
            (5, 1, 4, 6),
            (9, 2, 0, 9),
            (11, 3, 9, 12),  # both
        ],
    )
    def test_evaluations_within_epochs_and_at_their_ends(self, step, epoch, evaluated, expected):
        job = tiny_job("--epochs", "4", "--evaluate-every", "2")
        job.position = Position(step=step, epoch=epoch, evaluated_step=evaluated)
        assert job.next_evaluation == expected
        assert len(list(job.global_batches())) == expected - step

    def test_when_things_are_due(self):
        job = tiny_job("--log-every", "2", "--checkpoint-every", "2", "--epochs", "4")
        due = []
        for step in range(1, 4):
            job.position.step = step
            due.append((job.is_log_due(), job.is_checkpoint_due()))
        assert due == [(False, False), (True, True), (False, False)]

    def test_the_scale_of_fp16_is_restored(self):
        job, other = tiny_job("--amp", "fp16"), tiny_job("--amp", "fp16")
        state = {**other.scaler.state_dict(), "scale": 8.0, "_growth_tracker": 5}
        model, optimizer = other.model.state_dict(), other.optimizer.state_dict()
        position = {"step": 3, "epoch": 1, "averages": {"test_accuracy": 0.5}, "best_score": 0.5}
        content = {"model": model, "optimizer": optimizer, "scaler": state, "position": position}
        restore(job, {**content, "skipped_steps": 2})
        assert job.scaler.state_dict() == state
        assert job.guard.skipped == 2
        assert (job.position.step, job.position.epoch) == (3, 1)
        assert (job.position.averages, job.position.best_score) == ({"test_accuracy": 0.5}, 0.5)

    def test_a_checkpoint_of_another_model_is_refused_in_one_line(self):
        job = tiny_job()
        other = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
        with pytest.raises(UserError) as caught:
            restore(job, {"model": other, "optimizer": job.optimizer.state_dict(), "scaler": {}})
        what = "weight is (2, 2) there, and (1, 1) in --model lenet (2 tensors differ)"
        fix = "use the model that it is of, or start a new run from step 0"
        assert str(caught.value) == f"the checkpoint does not fit this run: {what}; {fix}"


def test_a_rank_whose_mount_is_gone_says_so_in_one_line(tmp_path, monkeypatch):
    error = OSError(errno.ENOTCONN, "Transport endpoint is not connected")
    monkeypatch.setattr(loop.Path, "stat", Mock(side_effect=error))
    with refused(f"cannot read {tmp_path} on {socket.gethostname()}: Transport endpoint is not connected; let"):
        loop.check_folder(tmp_path)


def test_a_rank_that_does_not_see_the_runs_folder_is_refused_before_it_trains(tmp_path):
    """Its part of the first checkpoint could not be written."""
    job = tiny_job("--runs-dir", str(tmp_path))
    job.args = dataclasses.replace(job.args, sharded_checkpoints=True)
    job.peers.rank = 1
    job.peers.broadcast_object = lambda own: (tmp_path / "run", False)
    fix = "let all ranks share --runs-dir, or drop --sharded-checkpoints"
    with refused(f"no {tmp_path}/run on {socket.gethostname()}, where rank 0 has the run; {fix}"):
        loop.begin_run(job)
