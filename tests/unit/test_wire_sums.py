"""The limits that the benchmark of the wire holds bytes against."""

import contextlib
import json
import threading
from types import SimpleNamespace

import pytest
import torch

from recipes.common.data import load_data
from recipes.common.models.models import build_model
from recipes.single.train import options
from scripts.bench import plan, programs, wire
from scripts.bench.wire import IMAGE_SIZE, MODEL, PARAMETERS, Measured, Variant
from scripts.lab.network import Network
from scripts.plan.cost_model import ring_bytes


def test_the_gradients_are_those_of_the_model():
    words = ["--model", MODEL, "--data", "synthetic", "--image-size", str(IMAGE_SIZE)]
    args = options([*words, "--num-samples", "1000", "--device", "cpu"])
    model = build_model(args, load_data(args, torch.device("cpu"), print))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS


def test_figures_by_hand():
    """Four nodes send 1.5 times 46.7 MB; in packets at 1 Gbit/s that takes 586 ms."""
    limit = ring_bytes(4 * PARAMETERS, 4)
    assert limit == 1.5 * 4 * 11_681_832
    sent = [1.001 * limit, 1.002 * limit, limit, limit]
    seen = Measured(Variant("ddp-fp32", "ddp"), 4, sent, [0.7, 0.7, 0.65], [0.5, 0.6, 0.65], [0.05, 0.01, 0.0])
    figure = seen.bytes_figure()
    assert (round(figure.measured, 6), figure.low, round(figure.high, 6)) == (1.002, 1.0, 1.002)
    assert figure.is_met
    assert figure.note == "70.23 MB per node and step"
    figure = seen.time_figure()
    wire_s = limit * 1514 / 1448 * 8 / 1e9
    # The wire, forward and update take longest in the first round, the work in the others.
    assert figure.values == pytest.approx((0.7 / (wire_s + 0.05), 1, 0.7 / 0.6), abs=1e-4)
    assert figure.is_met
    least = "sending takes 586 ms and cannot overlap with forward and update, 10 ms; the cores' work takes 600 ms"
    assert figure.note == f"700 ms a step; {least}"
    seen.variant = Variant("scratch", "scratch", overlaps=False)
    seen.alone_s = [0.05, 0.06, 0.07]  # of scratch, all computing
    assert seen.time_figure().low == pytest.approx(0.65 / (wire_s + 0.07))
    assert "cannot overlap with computing, 60 ms;" in seen.time_figure().note
    horovod = Measured(Variant("horovod-fp16", "horovod"), 2, [], [0.3, 0.4, 0.5], [1.0] * 3, [0.0] * 3, [0.4] * 3)
    # Horovod chooses when to send a gradient, so the goal is a bare loop with Horovod.
    assert not horovod.time_figure().goal
    figure = horovod.bare_figure()
    assert (figure.values, figure.note) == (pytest.approx((1.0, 0.75, 1.25)), "400 ms against 400 ms")
    halves = Variant("ddp-fp16", "ddp", bytes_per_parameter=2)
    figure = Measured(halves, 4, [limit / 2]).bytes_figure()
    assert (figure.measured, figure.peer, figure.is_limit) == (1.0, "ring limit, 16 bits", True)


@pytest.mark.parametrize("last", [28, 32])
def test_the_steps_in_which_links_are_narrowed_count_for_neither(tmp_path, monkeypatch, last):
    """Links are free up to step 16; line 20 comes while they are narrowed, and steps 21 to 24 may begin so."""
    path, limited = tmp_path / "run" / "metrics.jsonl", []

    def log(speeds):
        with path.open("a") as file:
            for step, speed in speeds.items():
                file.write(json.dumps({"kind": "step", "step": step, "loss": 1.0, "samples_per_s": speed}) + "\n")

    @contextlib.contextmanager
    def running(command, is_reached, *_):
        assert is_reached()
        yield
        log({24: 9.0} | dict.fromkeys(range(28, last + 1, 4), 5.0))

    class Net:
        option = staticmethod(lambda: "n0=a,n1=b")
        narrowed = Network.narrowed
        restore = staticmethod(lambda node: limited.remove(node))

        @staticmethod
        def narrow(node, mbit):
            if not limited:
                log({20: 7.0})
            limited.append(node)

    path.parent.mkdir()
    log({4: 99.0, 8: 10.0, 12: 10.0, 16: 20.0})
    monkeypatch.setattr(programs, "running", running)
    variant = Variant("ddp-fp32", "ddp")
    if last == 28:
        with pytest.raises(RuntimeError, match="its steps ended before the links were narrow; raise NARROW"):
            wire.time_steps(variant, Net(), 2, tmp_path)
    else:
        assert wire.time_steps(variant, Net(), 2, tmp_path) == (4 / 5, 4 / 10)
    assert (limited, path.exists()) == ([], False)


def test_ranks_sleep_while_exchanges_are_measured_alone(monkeypatch):
    """Ranks that look for the end again and again take time of the cores that move the bytes."""
    looks = []

    def all_reduce(tensor, async_op=False):
        calls = []
        ended = threading.Timer(0.02, lambda: [call(None) for call in calls])
        ended.start()
        tensor *= 2
        return SimpleNamespace(wait=ended.join, get_future=lambda: SimpleNamespace(add_done_callback=calls.append))

    ranks = SimpleNamespace(all_reduce=all_reduce, barrier=lambda: None, get_world_size=lambda: 2)
    monkeypatch.setattr(plan, "dist", ranks)
    monkeypatch.setattr(plan, "COMPUTE_S", 0.02)
    monkeypatch.setattr(plan.time, "sleep", looks.append)
    probed = plan.probe(lambda: [0.1, 0.2, 0.3])
    assert looks == []
    assert probed["bucket_s"] >= 0.02 / 6
    assert 0 < probed["busy_step_s"] < 0.01
