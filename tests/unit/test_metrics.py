"""Totals of an evaluation, and the speed of training."""

import math
import time

import pytest
import torch

from recipes.common import metrics
from recipes.common.task import SKIPPED, Classification

CPU = torch.device("cpu")
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

    def test_a_metric_and_a_count_may_have_the_shape_that_keepdim_leaves(self):
        class Kept(Classification):
            def metric_sums(self, output, target):
                return (super().metric_sums(output, target)[0].reshape(1, 1),)

            def count(self, target):
                return super().count(target).reshape(1, 1)

        logits, labels = torch.eye(4), torch.tensor([0, 1, 2, 2])
        totals = metrics.new_totals(TASK, CPU)
        metrics.add_batch(totals, Kept(), logits, labels)
        assert metrics.averages(totals, TASK, 4)["test_accuracy"] == 3 / 4

    def test_averages_of_no_samples_are_not_a_number(self):
        """A loss of 0 would be the best one so far."""
        totals = torch.tensor([0.0, 2.0, 3.0, 0.0, 0.0], dtype=torch.float64)
        result = metrics.averages(totals, TASK, 2)
        assert result == pytest.approx(
            {"test_loss": math.nan, "test_accuracy": math.nan, "skipped_images": 3}, nan_ok=True
        )

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

    def test_every_interface_is_counted(self, monkeypatch):
        table = ["Inter-| Receive", " face |bytes", f"    lo: 1 {'2 ' * 7}410 3", f"  eth0:4 {'5 ' * 7}70 6"]
        monkeypatch.setattr(metrics.Path, "read_text", lambda path: "\n".join(table))
        assert metrics.sent_bytes() == {"lo": 410, "eth0": 70}

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

    def test_bytes_that_pass_no_interface_are_unknown(self, monkeypatch):
        """With RDMA, a step of GPUs would have a few kB in /proc/net/dev: the messages of stores and Gloo."""
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        counts = [{"eth0": sent} for sent in (0, 10, 30)]
        monkeypatch.setattr(metrics, "sent_bytes", lambda: counts.pop(0))
        clock = metrics.Throughput(64, torch.device("cuda", 0))
        clock.start()
        clock.count_step()
        clock.count_step()
        clock.pause()
        assert math.isnan(clock.sent_per_step())
