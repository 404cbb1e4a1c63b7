"""The parts of recipes/common, one by one."""

import contextlib
import dataclasses
import errno
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.ops import StochasticDepth

from recipes.common import loop, metrics
from recipes.common.checkpoint.checkpoint import Position, pack
from recipes.common.data import Data, TensorSplit
from recipes.common.data.workers import WorkerError
from recipes.common.errors import UserError, nearest
from recipes.common.job import MOST_MS, Job
from recipes.common.loop import begin_run
from recipes.common.models import dropout
from recipes.common.models.models import build_model
from recipes.common.optim import build_optimizer, build_scaler, learning_rate
from recipes.common.process.ranks import read_ranks
from recipes.common.process.signals import FAIL, GO, STOP, Stop, vote_interval
from recipes.common.record import facts
from recipes.common.record.earlier_launches import rename_report
from recipes.common.record.facts import hardware, versions
from recipes.common.record.record import open_run
from recipes.common.restore import restore
from recipes.common.seeding import mix, permutation, seed_step
from recipes.common.task import SKIPPED, Classification, in_float
from recipes.common.world.agreement import shard
from recipes.common.world.peers import Peers
from recipes.common.world.places import Place, describe, shorten
from recipes.single.train import options
from tests.conftest import refused
from tests.support import contents

CPU = torch.device("cpu")


class TestLearningRate:
    def test_warm_up_is_linear_then_cosine_to_zero(self):
        args = options(["--lr", "0.8", "--warmup-steps", "4"])
        rates = [learning_rate(args, step, 12) for step in range(13)]
        assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
        assert rates[4] == pytest.approx(0.8)
        assert rates[8] == pytest.approx(0.4)  # half way
        assert rates[6] == pytest.approx(0.8 * (1 + math.cos(math.pi / 4)) / 2)
        assert rates[12] == pytest.approx(0, abs=1e-12)

    def test_constant_stays(self):
        args = options(["--lr", "0.8", "--warmup-steps", "0", "--lr-schedule", "constant"])
        assert {learning_rate(args, step, 12) for step in range(12)} == {0.8}

    @pytest.mark.parametrize(("batch", "rate"), [(256, 0.5), (64, 0.125), (1024, 2.0)])
    def test_the_linear_scaling_rule(self, batch, rate):
        argv = ["--lr", "0.5", "--scale-lr", "--global-batch-size", str(batch), "--warmup-steps", "0"]
        assert learning_rate(options(argv), 0, 10) == pytest.approx(rate)

    def test_a_warm_up_longer_than_the_run(self):
        args = options(["--lr", "1", "--warmup-steps", "100"])
        assert learning_rate(args, 9, 10) == pytest.approx(0.1)


class TestSeeding:
    def test_permutations_are_whole_and_differ(self):
        orders = [permutation(100, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
        for order in orders:
            assert sorted(order.tolist()) == list(range(100))
        assert len({tuple(order.tolist()) for order in orders}) == 4
        assert torch.equal(permutation(100, 1, 1), orders[3])

    def test_a_permutation_takes_no_more_memory_than_itself(self):
        """Of 100 million samples, each rank would take 3.3 GB for its 0.8 GB, in each epoch."""
        made = []

        class Made(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                made.append(func(*args, **(kwargs or {})))
                return made[-1]

        with Made():
            permutation(1000, 0, 0)
        assert sum({tensor.data_ptr(): tensor.nbytes for tensor in made}.values()) == 8 * 1000

    @pytest.mark.parametrize("size", [12, 14])
    def test_blocks_stay_together(self, size):
        order = permutation(size, 1, 0, 4).tolist()
        assert sorted(order) == list(range(size))
        starts = [order.index(first) for first in range(0, size, 4)]
        assert sorted(starts) != starts, "in another order"
        for first, start in zip(range(0, size, 4), starts, strict=True):
            block = list(range(first, min(first + 4, size)))
            assert order[start : start + len(block)] == block

    def test_permutation_is_the_same_in_every_version(self):
        """A checkpoint must always continue with the same samples: their order is part of its format."""
        assert permutation(10, 0, 0).tolist() == [2, 1, 7, 8, 6, 0, 3, 5, 9, 4]
        assert (mix(0, 0), mix(1, 2, 3)) == (6017775124710473527, 7510213797696614745)

    def test_mix_spreads_close_numbers(self):
        values = {mix(seed, step, rank) for seed in range(8) for step in range(32) for rank in range(8)}
        assert len(values) == 8 * 32 * 8
        assert all(0 <= value < 2**63 for value in values)
        ones = sum(value.bit_count() for value in values) / len(values)
        assert ones == pytest.approx(31.5, abs=0.3)  # 2048 values: a standard deviation of 4 / sqrt(2048) = 0.09

    def test_a_step_draws_the_same_again_and_ranks_differ(self):
        def draw(*place):
            seed_step(*place, [CPU])
            return [*torch.rand(2).tolist(), np.random.rand(), random.random()]

        assert draw(0, 5, 1) == draw(0, 5, 1)
        assert len({tuple(draw(seed, step, rank)) for seed in (0, 1) for step in (5, 6) for rank in (0, 1)}) == 8


def test_a_model_that_draws_numbers_has_a_warning():
    drawing = (
        *(nn.Dropout(0.1), nn.Dropout2d(), nn.MultiheadAttention(4, 2, dropout=0.1)),
        *(nn.LSTM(2, 2, num_layers=2, dropout=0.1), StochasticDepth(0.1, "row")),
    )
    for layer in drawing:
        said = dropout.warning(nn.Sequential(nn.Linear(2, 2), layer))
        assert said.startswith("warning: dropout draws other numbers on each rank")
    still = (
        nn.Dropout(0.0),
        nn.MultiheadAttention(4, 2),
        nn.LSTM(2, 2),
        nn.Linear(2, 2),
        StochasticDepth(0.0, "row"),
    )
    assert [dropout.warning(nn.Sequential(layer)) for layer in still] == [""] * 5


def test_a_complex_output_keeps_its_imaginary_part():
    output = torch.tensor([1 + 2j])
    assert in_float(output) is output
    assert in_float(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32


class TestShares:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
    @pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 360])
    def test_shares_are_disjoint_whole_and_even(self, world_size, count):
        indices = torch.arange(count) * 3
        shares = [shard(indices, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat(shares), indices)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def tiny_data(channels=1, size=8, classes=10):
    def split(count):
        images = torch.randint(256, (count, channels, size, size), dtype=torch.uint8)
        return TensorSplit(images, torch.arange(count) % classes, torch.zeros(channels), torch.ones(channels))

    return Data.of_images(split(100), split(10), channels, size, classes)


class TestJob:
    def job(self, *argv):
        args = options(["--global-batch-size", "30", *argv])
        model = torch.nn.Linear(1, 1)
        optimizer = build_optimizer(args, model.parameters())
        stop = SimpleNamespace(error=None, vote=GO)
        return Job(args, "single", tiny_data(), Peers(CPU), model, optimizer, build_scaler(args, CPU), stop)

    def test_a_run_is_complete_although_its_sample_does_not_fit_the_device(self):
        """A pipeline's model may be spread over several devices because it is too large for one."""

        class Telling(Classification):
            def sample(self, model, device):
                return "a sample"

        job, printed = self.job("--epochs", "1"), []
        job.data = dataclasses.replace(job.data, task=Telling())
        job.position = Position(step=job.total_steps, epoch=1)
        job.model.register_parameter("elsewhere", torch.nn.Parameter(torch.empty(1, device="meta")))
        progress = SimpleNamespace(say=printed.append)
        job.record = SimpleNamespace(
            progress=progress, write_result=lambda **result: result, print_result=printed.append
        )
        job.writer = SimpleNamespace(stalls_s=[0.25, 0.75], wait=lambda bound_s: printed.append("waited") is None)
        job.finish()
        waited, warning, result = printed
        assert waited == "waited", "for the last checkpoint, before the result"
        assert (result["checkpoints"], result["checkpoint_stall_s"]) == (2, 0.5)
        assert result["peak_memory_bytes"] > 50e6, "as torch alone has"
        assert warning.startswith("warning: the sample failed: NotImplementedError: Cannot copy out of meta")
        assert result["step"] == job.total_steps

    @pytest.mark.parametrize("value", [0.5, math.nan, math.inf])
    def test_an_evaluation_that_is_not_finite_is_said(self, value):
        job, printed = self.job("--epochs", "1"), []
        job.data = dataclasses.replace(job.data, task=Classification())
        progress = SimpleNamespace(say=printed.append)
        job.record = SimpleNamespace(log_epoch=lambda **values: None, progress=progress)
        job.end_epoch({"test_loss": 1.0, "test_accuracy": value})
        why = ": look at the test data, and at what the model returns"
        assert printed == ([] if value == 0.5 else [f"warning: test_accuracy is {value}{why}"])

    def test_a_line_that_nobody_reads_is_a_vote(self):
        job, errors = self.job(), []
        say = Mock(side_effect=UserError("nobody reads standard output any more"))
        job.stop, job.record = (
            SimpleNamespace(fail=errors.append),
            SimpleNamespace(progress=SimpleNamespace(say=say)),
        )
        job.say("warning: skipped step 3")
        assert [str(error) for error in errors] == ["nobody reads standard output any more"]

    @pytest.mark.parametrize(
        ("error", "gathers", "saved"),
        [
            (UserError("of all ranks"), False, ["all"]),
            (UserError("of all ranks"), True, ["all"]),
            (WorkerError("of one rank"), False, ["alone", "written"]),
            (WorkerError("of one rank"), True, []),
            (RuntimeError("of one rank"), False, ["alone", "written"]),
            (RuntimeError("of one rank"), True, []),
        ],
    )
    def test_a_rank_that_alone_fails_in_an_evaluation_waits_for_no_other(self, monkeypatch, error, gathers, saved):
        job, found = self.job("--epochs", "1"), []
        job.save, job.writer = lambda: found.append("alone"), SimpleNamespace(wait=lambda: found.append("written"))
        monkeypatch.setattr(loop, "train_one_epoch", lambda job, technique: GO)
        monkeypatch.setattr(loop, "evaluate", Mock(side_effect=error))
        monkeypatch.setattr(loop, "save_checkpoint", lambda job, technique: found.append("all"))
        with pytest.raises(type(error)):
            loop.train_epochs(job, SimpleNamespace(gather_state=found.copy if gathers else None))
        assert found == saved

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
        job, seen = self.job("--epochs", "4", "--checkpoint-every", "2", flag), []
        job.position.step, job.position.epoch = place
        job.record = SimpleNamespace()
        job.writer = SimpleNamespace(
            begin=lambda content, is_best, copies: seen.append("copy" if copies else "itself"),
            wait=lambda bound_s: seen.append("waited") is None,
        )
        loop.save_checkpoint(job, SimpleNamespace(gather_state=None))
        assert seen == expected

    def test_steps(self):
        job = self.job("--epochs", "4")
        assert (job.steps_per_epoch, job.total_steps, job.epoch_end) == (3, 12, 3)
        assert job.eval_batch_size == 30, "no more samples than in a pass of training, which fits in memory"
        assert self.job("--epochs", "4", "--max-steps", "7").total_steps == 7
        assert self.job("--epochs", "4", "--max-steps", "70").total_steps == 12

    def test_batches_of_an_epoch_are_disjoint_and_go_on_at_the_step(self):
        job = self.job()
        batches = list(job.global_batches())
        assert [len(batch) for batch in batches] == [30, 30, 30]
        assert len(set(torch.cat(batches).tolist())) == 90
        job.position.step = 2
        assert torch.equal(next(job.global_batches()), batches[2])
        assert len(list(job.global_batches())) == 1
        job.position.step, job.position.epoch = 3, 1
        assert not torch.equal(next(job.global_batches()), batches[0])

    @pytest.mark.parametrize(
        ("world_size", "voting"),
        [
            (1, range(6)),
            (64, range(6)),
            (65, [0, 1, 2, 3, 5]),
            (4096, [0, 1, 2, 3, 5]),
        ],
    )
    def test_many_ranks_vote_seldom_but_before_all_that_is_saved(self, world_size, voting):
        """Epochs end after steps 3 and 6, and every fourth step writes a checkpoint: all vote before these.

        In the first two steps, they do not know yet how long a step takes.
        """
        job = self.job("--epochs", "2", "--checkpoint-every", "4")
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
        job = self.job()
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
        job = self.job("--epochs", "4")
        job.position.step, job.position.epoch = step, epoch
        assert job.is_complete is complete

    def test_when_things_are_due(self):
        job = self.job("--log-every", "2", "--checkpoint-every", "2", "--epochs", "4")
        due = []
        for step in range(1, 4):
            job.position.step = step
            due.append((job.is_log_due(), job.is_checkpoint_due()))
        assert due == [(False, False), (True, True), (False, False)]

    def test_the_scale_of_fp16_is_restored(self):
        job, other = self.job("--amp", "fp16"), self.job("--amp", "fp16")
        state = {**other.scaler.state_dict(), "scale": 8.0, "_growth_tracker": 5}
        model, optimizer = other.model.state_dict(), other.optimizer.state_dict()
        position = {"step": 3, "epoch": 1, "test_accuracy": 0.5, "best_accuracy": 0.5}
        content = {"model": model, "optimizer": optimizer, "scaler": state, "position": position}
        restore(job, {**content, "skipped_steps": 2})
        assert job.scaler.state_dict() == state
        assert job.guard.skipped == 2
        assert (job.position.step, job.position.epoch) == (3, 1)
        # Written before there were tasks other than classification.
        assert (job.position.averages, job.position.best_score) == ({"test_accuracy": 0.5}, 0.5)

    def test_a_checkpoint_of_another_model_is_refused_in_one_line(self):
        job = self.job()
        other = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
        with pytest.raises(UserError) as caught:
            restore(job, {"model": other, "optimizer": job.optimizer.state_dict(), "scaler": {}})
        assert str(caught.value) == (
            "the checkpoint does not fit this run: weight is (2, 2) there, and (1, 1) in --model lenet (2 tensors "
            "differ); use the model that it is of, or start a new run without --resume"
        )


class TestModels:
    @pytest.mark.parametrize("size", [8, 11, 12, 28, 32, 64])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_lenet_fits_any_size(self, size, channels):
        data = tiny_data(channels=channels, size=size)
        model = build_model(options([]), data)
        assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)

    def test_lenet_on_mnist_is_the_one_of_the_paper(self):
        model = build_model(options([]), tiny_data(size=28))
        assert sum(parameter.numel() for parameter in model.parameters()) == 61_706

    @pytest.mark.parametrize(
        ("name", "channels", "size"),
        [
            ("resnet18", 1, 8),
            ("resnet18", 3, 32),
            ("resnet18", 3, 96),
            ("mobilenet_v2", 3, 32),
            ("vit_b_16", 3, 32),
        ],
    )
    def test_torchvision_models_fit(self, name, channels, size):
        data = tiny_data(channels=channels, size=size, classes=7)
        model = build_model(options(["--model", name]), data).to("meta").eval()
        assert model(torch.empty(2, channels, size, size, device="meta")).shape == (2, 7)

    def test_resnet_keeps_its_own_stem_for_large_images(self):
        stems = [
            build_model(options(["--model", "resnet18"]), tiny_data(channels=3, size=s)).conv1 for s in (32, 96)
        ]
        assert [stem.kernel_size for stem in stems] == [(3, 3), (7, 7)]

    @pytest.mark.parametrize(
        ("name", "size", "words"),
        [
            ("lenet", 7, "needs images of 8 pixels and more, got 7"),
            ("vit_b_16", 28, "--model vit_b_16 does not take images of 28x28"),
            ("alexnet", 8, "--model alexnet does not take images of 8x8"),
            ("resnet19", 32, "torchvision has no classification model 'resnet19'; did you mean 'resnet1"),
            ("lenett", 32, "did you mean 'lenet'?"),
        ],
    )
    def test_what_does_not_fit_is_refused_in_one_line(self, name, size, words):
        with refused(words):
            build_model(options(["--model", name]), tiny_data(channels=3, size=size))

    def test_weights_depend_on_the_seed_alone(self):
        torch.manual_seed(99)
        one = build_model(options(["--seed", "5"]), tiny_data())
        torch.manual_seed(98)
        two, other = (build_model(options(["--seed", seed]), tiny_data()) for seed in ("5", "6"))
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
        assert not torch.equal(next(one.parameters()), next(other.parameters()))

    def test_channels_last_changes_the_layout_alone(self):
        plain, other = (build_model(options(argv), tiny_data(channels=3)) for argv in (["--no-channels-last"], []))
        assert other.features[3].weight.is_contiguous(memory_format=torch.channels_last)
        # With one input channel, weights of torch's own strides are in both layouts, and bf16 is a fifth slower.
        model = build_model(options([]), tiny_data(channels=1))
        strides = [p.stride()[1:] for p in model.parameters() if p.ndim == 4]
        assert strides == [(1, 5, 1), (1, 30, 6)]
        assert torch.equal(plain.features[3].weight, other.features[3].weight)

    def test_an_expanded_buffer_of_your_own_model_gets_memory_for_all_its_numbers(self):
        """A broadcast writes to all its elements, and a resume copies into them."""
        words = ["--model", f"{__name__}:with_expanded_buffer"]
        model = build_model(options(words), dataclasses.replace(tiny_data(), task=TASK))
        model.load_state_dict(model.state_dict())
        assert [(len(b), b.untyped_storage().nbytes()) for b in model.buffers()] == [(8, 32), (9, 36)]


def with_expanded_buffer(data):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    model.register_buffer("scale", torch.ones(1).expand(8))
    model[1].register_buffer("mask", torch.ones(1).expand(9), persistent=False)
    return model


TASK = Classification()


class TestTotals:
    def test_sums_over_parts_equal_the_whole(self):
        logits, labels = torch.randn(11, 4, generator=torch.Generator().manual_seed(0)), torch.arange(11) % 4
        labels[3] = SKIPPED
        whole, parts = metrics.new_totals(TASK, CPU), metrics.new_totals(TASK, CPU)
        metrics.add_batch(whole, TASK, logits, labels)
        for one, two in zip(logits.split(3), labels.split(3), strict=True):
            metrics.add_batch(parts, TASK, one, two)
        assert whole.dtype == torch.float64
        assert whole.tolist() == pytest.approx(parts.tolist(), rel=1e-6)
        assert whole[0] == 10
        correct = sum(int(logits[i].argmax() == labels[i]) for i in range(11))
        loss = sum(-float(logits[i].log_softmax(0)[labels[i]]) for i in range(11) if i != 3)
        result = metrics.averages(whole, TASK, 11)
        assert result == {"test_loss": pytest.approx(loss / 10, rel=1e-6), "test_accuracy": correct / 10}

    def test_a_metric_may_have_the_shape_that_keepdim_leaves(self):
        class Kept(Classification):
            def metric_sums(self, output, target):
                return (super().metric_sums(output, target)[0].reshape(1, 1),)

        logits, labels = torch.eye(4), torch.tensor([0, 1, 2, 2])
        totals = metrics.new_totals(TASK, CPU)
        metrics.add_batch(totals, Kept(), logits, labels)
        assert metrics.averages(totals, TASK, 4)["test_accuracy"] == 3 / 4

    def test_skipped_images_are_told_and_nothing_divides_by_zero(self):
        totals = torch.tensor([0.0, 2.0, 3.0, 0.0, 0.0], dtype=torch.float64)
        assert metrics.averages(totals, TASK, 2) == {"test_loss": 0.0, "test_accuracy": 0.0, "skipped_images": 3}

    @pytest.mark.parametrize(("evaluated", "skipped"), [(9, 0), (11, 0), (9, 2), (8, 1)])
    def test_a_sample_that_is_missing_or_counted_twice(self, evaluated, skipped):
        totals = torch.tensor([evaluated, skipped, skipped, 0.0, 0.0], dtype=torch.float64)
        with pytest.raises(AssertionError, match=f"evaluated {evaluated} samples and skipped {skipped} of 10: "):
            metrics.averages(totals, TASK, 10)


class TestThroughput:
    def test_the_first_step_and_pauses_do_not_count(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(time, "perf_counter", lambda: now[0])
        clock = metrics.Throughput(64, CPU)

        def pass_time(seconds):
            now[0] += seconds

        clock.start()
        pass_time(50)  # warm-up
        clock.count_step()
        assert clock.overall() == 0
        for _ in range(4):
            pass_time(0.5)
            clock.count_step()
        assert clock.recent() == pytest.approx(4 * 64 / 2)
        clock.pause()
        pass_time(1000)  # an evaluation
        clock.start()
        for _ in range(2):
            pass_time(0.25)
            clock.count_step()
        assert clock.recent() == pytest.approx(2 * 64 / 0.5)
        assert clock.overall() == pytest.approx(6 * 64 / 2.5)

    def test_bytes_count_while_training_and_an_interface_that_goes_takes_none_away(self, monkeypatch):
        before = [{"lo": 10, "veth": 9000}, {"lo": 110, "veth": 9000}, {"lo": 999, "veth": 70}]
        after = [{"lo": 410}, {"lo": 1199, "veth": 60, "new": 50}]  # one is gone, another has taken its name
        counts = [before[0], before[1], after[0], before[2], after[1]]
        monkeypatch.setattr(metrics, "sent_bytes", lambda: counts.pop(0))
        clock = metrics.Throughput(64, CPU)
        clock.start()
        for _ in range(3):
            clock.count_step()  # the first step restarts the count
        clock.pause()
        assert clock.sent_per_step() == 300 / 2
        clock.start()
        clock.pause()
        assert clock.sent_per_step() == (300 + 200 + 50) / 2


class TestRanks:
    VARIABLES: ClassVar = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }

    def test_all_set(self, monkeypatch):
        for name, value in self.VARIABLES.items():
            monkeypatch.setenv(name, value)
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
        for other, good in self.VARIABLES.items():
            monkeypatch.setenv(other, good)
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


class TestRecord:
    def open(self, folder, *argv, recipe="single"):
        args = options(["--runs-dir", str(folder), "--no-tensorboard", *argv])
        record, content = open_run(args, recipe, [Place("a", "CPU, 1 thread a process")] * 2)
        record.begin(content["position"]["step"] if content else 0, total_steps=100, is_complete=False)
        return record, content

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
        if not torch.cuda.is_available():  # also where torch counts GPUs that its CUDA cannot use
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
            assert hardware()["gpus"] == []
        assert [launch["world_size"] for launch in config["launches"]] == [2]
        assert config["launches"][0]["make"] == "make run RECIPE=single"

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("make run RECIPE=single", "resume with: make run RECIPE=single NAME=a ARGS='--resume auto'"),
            (
                "make run NAME=b NODES=2 ARGS='--data-dir \"my data\"'",
                "resume with: make run NAME=a NODES=2 ARGS='--data-dir \"my data\" --resume auto'",
            ),
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
        record.log_epoch(epoch=1, step=100, test_loss=1.0, test_accuracy=0.5, train_s=1.0)
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
        """The task's code may have another headline by now; results of version 0.1.0 do not name theirs."""
        record, _ = self.open(tmp_path, "--name", "a")
        record.write_result(headline="test_error", world_size=2, step=9, test_error=0.25, samples_per_s=1.0)
        path = record.folder / "result.json"
        old = {"recipe": "a", "world_size": 2, "step": 9, "samples_per_s": 1, "test_accuracy": 0.5}
        args = options(["--runs-dir", str(tmp_path), "--name", "a", "--resume", "auto"])
        self.write_checkpoint(record, 9)
        for result, last in ((json.loads(path.read_text()), "test_error=0.2500"), (old, "test_accuracy=0.5000")):
            path.write_text(json.dumps(result))
            record, _ = open_run(args, "single", [])
            record.begin(9, total_steps=9, is_complete=True)
            record.print_result(record.write_result(headline="test_bits", world_size=1, test_bits=1.0))
            assert last in capsys.readouterr().out.splitlines()[-1]

    def test_a_result_that_is_not_finite_is_null_and_printed_as_nan(self, tmp_path, capsys):
        """JSON has no NaN: other programs would refuse the whole file."""
        record, _ = self.open(tmp_path, "--name", "a")
        values = {"world_size": 1, "step": 9, "test_loss": math.nan, "best_test_loss": math.inf}
        record.print_result(record.write_result(headline="test_loss", **values, samples_per_s=1.0))
        written = json.loads((record.folder / "result.json").read_text(), parse_constant=pytest.fail)
        assert (written["test_loss"], written["best_test_loss"]) == (None, None)
        args = options(["--runs-dir", str(tmp_path), "--name", "a", "--resume", "auto"])
        self.write_checkpoint(record, 9)
        again, _ = open_run(args, "single", [])
        again.begin(9, total_steps=9, is_complete=True)
        again.print_result(again.write_result(headline="test_loss", **values, samples_per_s=1.0))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("result ")]
        assert [line.split()[3] for line in lines] == ["test_loss=nan"] * 2

    def test_events_that_cannot_be_written_are_one_line(self, tmp_path):
        """TensorBoard's thread keeps the error and raises it in a later call."""
        record, _ = self.open(tmp_path, "--name", "a")
        fail = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        for call in (lambda: self.log(record, 1), record.close):
            record._events = SimpleNamespace(add_scalar=fail, close=fail)
            with pytest.raises(UserError, match=r"cannot write .*a.*: No space left on device"):
                call()

    def test_names_count_up(self, tmp_path):
        names = [self.open(tmp_path)[0].folder.name for _ in range(3)]
        assert names == ["single-001", "single-002", "single-003"]
        assert self.open(tmp_path, recipe="ddp")[0].folder.name == "ddp-001"
        (tmp_path / "single-1203").mkdir()
        assert self.open(tmp_path)[0].folder.name == "single-1204"

    def test_a_taken_name_is_refused(self, tmp_path):
        self.open(tmp_path, "--name", "a")
        with pytest.raises(UserError, match=r"a exists; add --resume auto .*--overwrite .*another --name"):
            self.open(tmp_path, "--name", "a")

    def test_overwrite_of_what_is_no_run_is_not_told_to_overwrite(self, tmp_path):
        args = options(["--runs-dir", str(tmp_path), "--name", "a", "--overwrite"])
        open_run(args, "single", [])  # claims the name; config.json is written once all ranks have restored
        with pytest.raises(UserError, match=r"a exists and is not a run; choose another --name"):
            open_run(args, "single", [])

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

    @pytest.mark.parametrize("flags", [[], ["--overwrite"]])
    def test_what_another_rank_refuses_changes_no_record(self, tmp_path, flags):
        """For example, a pipeline stage does not fit its part of the checkpoint, but rank 0's stage does."""
        if flags:
            self.open(tmp_path, "--name", "a")
        before = contents(tmp_path)
        job = TestJob().job("--runs-dir", str(tmp_path), "--name", "a", "--no-tensorboard", *flags)
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
        with pytest.raises(UserError, match=r"--resume .*(no such file|no checkpoints)"):
            self.open(tmp_path, "--resume", str(tmp_path / target))
        assert sorted(os.listdir(tmp_path)) == ["empty"], "a refusal leaves no run behind"

    def test_a_runs_folder_that_cannot_be_made_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"cannot write .*file"):
            self.open(tmp_path / "file" / "runs")

    def test_tensorboard_events_hold_the_same_numbers(self, tmp_path):
        """A launch that resumes from step 1 takes the later ones back."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        for begun, steps, expected in (
            (0, (1, 2, 3), [(1, 0.5), (2, 1.0), (3, 1.5)]),
            (1, (2,), [(1, 0.5), (2, 1.0)]),
        ):
            args = options(["--runs-dir", str(tmp_path), "--name", "a", *["--resume", "auto"] * begun])
            record, _ = open_run(args, "single", [Place("a", "CPU, 1 thread a process")])
            record.begin(begun, total_steps=100, is_complete=False)
            for step in steps:
                self.log(record, step, step / 2)
            record.checkpoints.write(pack(args, Position(step=1), {}, {}, {}))
            record.close()
            events = EventAccumulator(str(record.folder)).Reload()
            assert [(event.step, event.value) for event in events.Scalars("loss")] == expected

    def test_no_report_of_a_hang_takes_the_place_of_another(self, tmp_path):
        for text in ("first", "second"):
            (tmp_path / "hang-report.txt").write_text(text)
            rename_report(tmp_path)
        assert [(tmp_path / f"hang-report-{i}.txt").read_text() for i in (1, 2)] == ["first", "second"]


def test_nearest_names_one_word_or_none():
    assert nearest("digit", ["digits", "cifar10"]) == "; did you mean 'digits'?"
    assert nearest("zzz", ["digits"]) == ""


def test_options_are_read_only():
    args = options([])
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.seed = 5
    assert args.data_dir == Path("data")


@pytest.mark.parametrize(
    ("places", "lines"),
    [
        ([Place("a", "CPU")], ["rank 0 on a: CPU"]),
        ([Place("a", "CPU")] * 2 + [Place("b", "CPU")], ["ranks 0-1 on a: CPU", "rank 2 on b: CPU"]),
        ([Place("a", "H200", i) for i in range(4)], ["ranks 0-3 on a: cuda:0-3 H200"]),
        ([Place("a", "H200", 1), Place("a", "H200", 0)], ["ranks 0-1 on a: cuda:1,0 H200"]),
        (
            [Place("a", "H200", 0, "IB"), Place("b", "H200", 0, "IB")],
            [f"rank {i} on {h}: cuda:0 H200, NCCL over IB" for i, h in enumerate("ab")],
        ),
        ([Place("a", "H200", i, "Socket") for i in range(2)], ["ranks 0-1 on a: cuda:0-1 H200"]),
        ([Place("a", "A", 0), Place("a", "B", 1)], ["rank 0 on a: cuda:0 A", "rank 1 on a: cuda:1 B"]),
    ],
)
def test_a_line_tells_where_ranks_are(places, lines):
    assert describe(places) == lines


def test_a_thousand_nodes_are_told_in_eight_lines():
    lines = describe([Place(f"node-{i // 8}", "H100", i % 8) for i in range(1024)])
    assert len(lines) == 128
    shown = shorten(lines)
    assert shown[:7] == lines[:7]
    assert shown[7:] == ["... and 121 more such lines in config.json"]
    assert shorten(lines[:8]) == lines[:8]


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git; install it")
def test_an_archive_within_another_repository_has_no_revision(tmp_path, monkeypatch):
    def git(*words):
        own = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(own, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.delenv("SOURCE_REVISION", raising=False)
    path = tmp_path / "archive/facts.py"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setattr(facts, "__file__", str(path))
    assert facts.revision() is None
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message=a")
    assert facts.revision() is None
    git("add", ".")
    assert facts.revision() == git("rev-parse", "HEAD") + "-dirty"
