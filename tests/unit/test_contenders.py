"""What make bench measures the recipes against does the same work."""

import argparse
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from recipes.common.data import load_data
from recipes.common.models.models import LeNet
from recipes.single.train import options
from scripts.bench import gpu, jpeg, programs
from scripts.bench.contenders import bare_step, lenet
from scripts.bench.figures import Figure, unmeasured
from tests.support import has_ended, wait_until


def test_the_lenet_of_the_tutorials_is_that_of_the_recipes(tmp_path):
    """The recipes pool before ReLU; the loss and the gradients differ by rounding only."""
    torch.manual_seed(0)
    ours = LeNet(1, 28, 10)
    torch.save({"weights": [parameter.detach() for parameter in ours.parameters()]}, tmp_path / "start.pt")
    theirs = lenet.model_of(argparse.Namespace(begin_with=tmp_path / "start.pt"))
    images, labels = torch.randn(32, 1, 28, 28), torch.arange(32) % 10
    losses = [cross_entropy(model(images), labels) for model in (ours, theirs)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_the_photographs_are_like_those_of_imagenet(tmp_path):
    assert 100 < jpeg.write_photos(tmp_path, 6) < 120
    assert len(list(tmp_path.rglob("*.jpg"))) == 8


def test_nothing_of_a_contender_outlives_its_time_limit(monkeypatch, tmp_path):
    """Torchrun's workers do not end with it."""
    pid = tmp_path / "pid"
    monkeypatch.setattr(programs, "TIMEOUT_S", 1)
    with pytest.raises(RuntimeError, match="ended with status 137:\ntook longer than 1 s"):
        programs.run(["bash", "-c", f"sleep 60 & echo $! > {pid}; wait"])
    sleeping = int(pid.read_text())
    wait_until(lambda: has_ended(sleeping), 5, "its end")


@pytest.mark.parametrize("after", ["", "\n", "[Gloo] Rank 0 is connected to 1 peer ranks\n", "12\n"])
def test_a_contender_s_result_is_found_between_the_lines_of_libraries(monkeypatch, after):
    monkeypatch.setattr(programs, "run", lambda *_: 'warmed up\n{"step_ms": 1.5}\n' + after)
    assert programs.contender("bare_step", []) == {"step_ms": 1.5}


def test_a_contender_without_a_result_is_an_error_that_shows_what_it_printed(monkeypatch):
    monkeypatch.setattr(programs, "run", lambda *_: "no server\n")
    with pytest.raises(RuntimeError, match=r"contenders.bare_step.* printed no result, but: 'no server\\n'"):
        programs.contender("bare_step", [])


def test_a_bare_loop_reports_the_median_of_windows_as_a_recipe_logs_them(capsys, monkeypatch):
    """One step that waits for the machine changes the mean."""
    ticks = iter([*range(5), 100, 101, 102, 103, 104, 204, 205, 206, 207, 208, 208])  # the first are the warm-up's
    monkeypatch.setattr(bare_step, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    flags = argparse.Namespace(steps=9, tf32=False, alone=False, horovod=None, without_backward=False)
    flags.options = ["--data=synthetic", "--image-size=8", "--num-samples=64", "--device=cpu", "--log-every=2"]
    bare_step.measure(flags, None)
    found = json.loads(capsys.readouterr().out)
    assert found == {"step_ms": 12000.0, "median_ms": 1000.0}
    assert torch.backends.cudnn.benchmark, "on a GPU it has the recipes' choice of convolutions"


def test_what_fails_in_a_later_round_does_not_lose_what_works(capsys):
    calls = []

    def fail_late():
        calls.append("late")
        if len(calls) == 3:
            raise RuntimeError("python ... ended with status 1:\nCUDA error: an illegal memory access")
        return 2.0

    outcomes = dict(gpu.results_of({"late": fail_late, "ours": lambda: 1.0}, 4))
    assert outcomes == {"ours": [1.0] * 4, "late": "CUDA error: an illegal memory access"}
    assert len(calls) == 3, "it is not called again"
    assert capsys.readouterr().err.startswith("warning: late: python ... ended")


def test_what_fails_on_a_gpu_does_not_lose_what_works(monkeypatch, tmp_path, capsys):
    def recipe(name, folder, options):
        assert options[:2] == ["--device", "cuda"], "it does not turn to the CPU"
        if "--decode" in options:
            raise RuntimeError("python ... ended with status 2:\nerror: --decode gpu needs nvImageCodec")
        return {"samples_per_s": 3000.0, "peak_memory_bytes": 2**30}

    # The first is of samples that were read while torch compiled; an evaluation follows.
    rates = [9000.0, 3000.0, 2500.0]
    rows = [{"loss": 1.0, "samples_per_s": rate} for rate in rates] + [{"test_loss": 1.0}]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(programs, "read_metrics", lambda run: rows)
    monkeypatch.setattr(gpu, "count_cores", lambda: 2)
    monkeypatch.setattr(gpu, "recipe", recipe)
    monkeypatch.setattr(gpu, "contender", lambda *_: {"step_ms": 256.0})
    monkeypatch.setattr(gpu, "matmul_tflops", lambda: 700.0)
    monkeypatch.setattr(gpu.small_data, "write_data", lambda folder: None)
    monkeypatch.setattr(gpu, "IMAGES", 2048 // 8)
    monkeypatch.setattr(gpu, "STEPS", 3)
    figures = list(gpu.measure(2, tmp_path))
    found = {figure.peer: figure.measured for figure in figures if figure.measured}
    assert len(figures) == 9
    assert found["eager fp32, on ready tensors"] == 3.0
    assert found["eager fp32, by the same recipe"] == 1.0
    of_peak = {figure.name: figure.measured for figure in figures if figure.is_limit}
    assert of_peak[f"{gpu.JPEGS}, decoded by 2 cores: images/s"] == 2500 / 3000
    assert of_peak[gpu.RESNET] == pytest.approx(3000 * 24.54e9 / 700e12)
    assert of_peak[gpu.GPT] == pytest.approx(3000 * 1024 * 566.6e6 / 700e12, rel=1e-4)
    assert found["the tutorial's epoch, on its authors' GPU"] == 20.0
    (lost,) = [figure for figure in figures if figure.measured is None]
    assert lost.name == f"{gpu.JPEGS}, decoded by the GPU: images/s"
    assert lost.note.startswith(
        "not measured: error: --decode gpu needs nvImageCodec (the same with the images on"
    )
    assert "warning: JPEGs, decoded by the GPU: python ... ended with status 2" in capsys.readouterr().err
    assert len(list((tmp_path / "photos/train").rglob("*.jpg"))) == gpu.BATCH * 9, "3 steps beyond 1 + 2 x 2"


@pytest.mark.parametrize("workers", [1, 16, 29, 30, 192])
def test_the_measured_steps_take_no_images_that_were_read_ahead(workers):
    total = gpu.photo_steps(workers)
    assert total % gpu.STEPS == 0, "a run logs its speed in its last steps"
    assert total - gpu.STEPS >= 1 + DataLoader([0], num_workers=1).prefetch_factor * workers


def test_what_one_model_lacks_on_a_gpu_does_not_lose_the_others(monkeypatch, tmp_path):
    def fail(rounds, folder):
        raise OSError("no space")

    figure = Figure("ours", 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "resnet", fail)
    monkeypatch.setattr(gpu, "gpt", lambda rounds, folder: [figure])
    monkeypatch.setattr(gpu, "lenet", fail)
    monkeypatch.setattr(gpu, "write_dataset", fail)
    lost = [unmeasured(gpu.LENET, "no space", gpu.LENET_GOAL), unmeasured(gpu.RESNET, "no space")]
    assert list(gpu.measure(1, tmp_path)) == [*lost, figure, unmeasured(gpu.JPEGS, "no space")]


def test_a_stopped_measurement_of_a_gpu_keeps_each_figure_before():
    calls = []

    def call(name):
        calls.append(name)
        if name == "stopped":
            raise KeyboardInterrupt
        if name == "broken":
            raise LookupError
        return 2.0 * len(calls)

    contenders = {name: partial(call, name) for name in ("ours", "limit", "broken", "peer", "stopped")}
    pairs = {("ours", name): ("images/s", name) for name in contenders if name != "ours"}
    figures, found = gpu.ratios(contenders, 1, pairs, "images/s"), []
    with pytest.raises(KeyboardInterrupt):
        found.extend(figures)
    assert [(one.peer or one.note, one.measured) for one in found] == [
        ("limit", 0.5),
        ("not measured: LookupError (broken)", None),
        ("peer", 0.25),
    ]


def test_what_nothing_can_be_compared_with_is_not_measured(capsys):
    def fail():
        raise RuntimeError

    contenders = {"ours": fail, "peer": lambda: pytest.fail("measured")}
    assert [one.note for one in gpu.ratios(contenders, 1, {("ours", "peer"): ("a", "b")}, "images/s")] == [
        "not measured: RuntimeError (b)"
    ]


def test_photos_and_synthetic_images_are_of_one_shape(monkeypatch, tmp_path):
    """Otherwise torch compiles resnet50 for each of the two, which takes a minute or more."""
    monkeypatch.setattr(jpeg, "WIDTH", 16)
    monkeypatch.setattr(jpeg, "HEIGHT", 16)
    monkeypatch.setattr(gpu, "STEPS", 3)  # 1,024 images, one or two of each class
    gpu.write_dataset(tmp_path, 4)
    words = ["--image-size", "8", "--workers", "0"]
    sources = (["--data", "imagefolder", "--data-dir", str(tmp_path)], ["--num-samples", str(gpu.IMAGES)])
    photos, drawn = (
        load_data(options([*words, "--data", "synthetic", *own]), torch.device("cpu"), print) for own in sources
    )
    assert (photos.num_classes, len(photos.test)) == (drawn.num_classes, len(drawn.test)) == (1000, 256)
