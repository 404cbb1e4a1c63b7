"""--profile-steps: which steps the trace has, what it names, and that it changes nothing else."""

import gzip
import json
import re
import signal
import time
from unittest.mock import Mock

import pytest
import torch

from recipes.common.profile import Profile, divide_time
from recipes.common.world.peers import Peers
from recipes.single.train import options
from tests.conftest import refused, slow
from tests.support import Interrupt, local, losses, start_run, train, words_for

STEPS = ("--max-steps", "30", "--seed", "1", "--deterministic")
"""An epoch has 22 steps."""


def trace(run):
    """Return the whole events of a run's trace."""
    with gzip.open(run / "trace.json.gz") as file:
        return [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]


def names(events):
    return {event["name"] for event in events}


def steps(events):
    """Return the numbers of the marked steps, counted from 0."""
    found = (re.fullmatch(r"ProfilerStep#(\d+)", name) for name in names(events))
    return sorted(int(match[1]) for match in found if match)


def shares(text):
    """Return the shares that a line names, in percent."""
    return {name: int(share) for name, share in re.findall(r"[ (]([a-z ]+) (\d+)%", text)}


@pytest.mark.parametrize(
    ("recipe", "exchange"),
    [
        ("ddp", {"gloo:all_reduce", "stop vote"}),
        ("scratch", {"gloo:send", "gloo:recv", "gradients"}),
        *slow(
            ("fsdp", {"stop vote"}),
            ("tensor", {"gloo:all_reduce"}),
            ("pipeline", {"gloo:send", "gloo:recv"}),
            ("apex", {"gloo:all_reduce"}),
            ("horovod", {"gradients"}),
        ),
    ],
)
def test_the_trace_has_the_steps_and_the_exchange_and_the_curve_stays(tmp_path, recipe, exchange):
    ranks = start_run(recipe, tmp_path, 2, *STEPS, "--profile-steps", "15")
    outcome, run = ranks.wait(check=True), tmp_path / "run"
    events = trace(run)
    assert steps(events) == list(range(10, 25))
    phases = {"data", "forward and backward", "optimizer", "evaluation", "checkpoint"}
    assert names(events) >= phases | exchange
    (line,) = [line for line in outcome.outputs[0].splitlines() if line.startswith("profile ")]
    assert line.startswith("profile from step 11: ")
    assert line.endswith(f"; {run}/trace.json.gz opens in https://ui.perfetto.dev")
    found = shares(line.split(";")[0])
    assert found.keys() == {"computing", "optimizer", "waiting for the exchange", "data", "other"}
    assert sum(found.values()) - found["optimizer"] == pytest.approx(100, abs=2)
    assert ("hidden behind computing" in line) == (recipe != "horovod")
    assert "profile" not in outcome.outputs[1]
    assert "ERROR" not in outcome.text, "of torch.profiler, where there is no GPU"
    assert [path.parent for path in tmp_path.rglob("*trace*")] == [run], "rank 0 alone writes"
    plain = train(recipe, tmp_path, 2, *STEPS)
    assert losses(run) == losses(plain)
    assert not list(plain.glob("*trace*")), "off by default"


@pytest.mark.slow
def test_the_launcher_starts_it_as_well_and_a_later_launch_replaces_it(tmp_path):
    words = words_for(tmp_path, "run", "--max-steps", "14", "--profile-steps", "2")
    printed = local("ddp", 2, 1, *words).wait(check=True).stdout
    assert "profile from step 11: " in printed
    assert steps(trace(tmp_path / "run")) == [10, 11]
    again = [*words, "--resume", "auto", "--max-steps", "20", "--profile-steps", "3"]
    printed = local("ddp", 2, 1, *again).wait(check=True).stdout
    assert "profile from step 18: " in printed, "three of the six steps that were left"
    assert steps(trace(tmp_path / "run")) == [3, 4, 5]


@pytest.mark.parametrize(
    ("steps_in_all", "recorded"), [("1", [0]), ("4", [1, 2, 3]), ("12", [2, *range(3, 12)])], ids=str
)
def test_a_short_run_has_a_shorter_warm_up_and_is_recorded_to_its_end(tmp_path, steps_in_all, recorded):
    run = train("single", tmp_path, 1, "--max-steps", steps_in_all, "--profile-steps", "10")
    assert steps(trace(run)) == recorded


@pytest.mark.parametrize(("step", "recorded"), [(13, [10, 11, 12, 13]), (3, [])])
def test_a_signal_ends_the_recording_and_the_run_as_ever(tmp_path, step, recorded):
    """The vote of the step after the signal ends the run."""
    words = (*STEPS, "--profile-steps", "10")
    ranks = start_run("ddp", tmp_path, 2, *words, interrupt=Interrupt(signal.SIGUSR1, step))
    printed, run = ranks.wait(check=True).outputs[0], tmp_path / "run"
    assert f"wrote {run}/checkpoints/step-{step + 1:09}.pt" in printed
    if recorded:
        assert steps(trace(run)) == recorded
    else:
        assert "no profile: the job ends before step 11, the first to record" in printed
        assert not list(run.glob("*trace*"))


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    said, args = [], options(["--profile-steps", "1"])
    peers = Peers(torch.device("cpu"))
    profile = Profile(args, 0, 2, peers, tmp_path, said.append)
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    profile.end_step()
    profile.end_step()
    profile.close()
    assert said == [f"warning: cannot write {tmp_path}/trace.json.gz: [Errno 28] No space left on device"]
    assert not list(tmp_path.iterdir())


def write_slowly():
    """Make a trace take two windows of stragglers."""
    write = torch.profiler.profile.export_chrome_trace

    def write_late(*args):
        time.sleep(4)
        return write(*args)

    torch.profiler.profile.export_chrome_trace = write_late


@pytest.mark.slow
def test_a_rank_that_writes_a_trace_is_no_straggler(tmp_path):
    argv = ("--max-steps", "400", "--profile-steps", "2", "--straggler-window-s", "2")
    outcome = start_run("ddp", tmp_path, 2, *argv, setup=write_slowly).wait(check=True)
    assert "profile from step 11: " in outcome.outputs[0]
    assert "is slow" not in outcome.text


def test_more_steps_than_a_viewer_opens_are_refused():
    with refused("--profile-steps: expects a whole number from 0 to 100, got '101'"):
        options(["--profile-steps", "101"])


# ---- how time divides


def event(kind, name, start, end, pid=7):
    return {"ph": "X", "cat": kind, "name": name, "ts": 1000.0 * start, "dur": 1000.0 * (end - start), "pid": pid}


def test_on_a_cpu_operators_compute_and_the_rest_of_an_exchange_is_waited_for():
    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", "ProfilerStep#3", -50, 0),
        event("user_annotation", "ProfilerStep#4", 0, 100),
        event("user_annotation", "ProfilerStep#5", 100, 250),
        event("user_annotation", "data", 0, 10),
        event("cpu_op", "aten::index", 2, 8),  # of data
        event("cpu_op", "autograd::engine::evaluate_function: AddBackward0", 10, 60),
        event("cpu_op", "aten::conv2d", 10, 50),
        event("cpu_op", "aten::convolution", 10, 50),
        event("user_annotation", "gloo:all_reduce", 30, 70),  # 20 of 40 beside an operator
        event("user_annotation", "optimizer", 70, 90),
        event("cpu_op", "aten::add_", 75, 85),
        event("cpu_op", "aten::add_", 90, 96),
        event("cpu_op", "_c10d_functional::wait_tensor", 92, 96),
        event("user_annotation", "evaluation", 100, 150),
        event("cpu_op", "aten::conv2d", 110, 140),
    ]
    assert divide_time(events, is_gpu=False) == (
        ": 100 ms a step, computing 26% (optimizer 5%), waiting for the exchange 12%, data 5%, other 57%"
        "; 50% of the exchange is hidden behind computing"
    )


def test_of_horovod_the_wait_for_gradients_is_known():
    events = [
        event("user_annotation", "ProfilerStep#0", 0, 100),
        event("user_annotation", "ProfilerStep#1", 100, 200),
        event("user_annotation", "forward and backward", 100, 192),
        event("cpu_op", "aten::conv2d", 100, 160),
        event("user_annotation", "gradients", 150, 190),
        event("user_annotation", "gradients", 195, 199),  # the check
    ]
    text = ": 100 ms a step, computing 60%, waiting for the exchange 30%, other 10%"
    assert divide_time(events, is_gpu=False) == text


def test_on_a_gpu_kernels_count_and_data_only_where_it_is_idle():
    events = [
        event("user_annotation", "ProfilerStep#4", 0, 10),  # the host is ahead of the GPU
        event("gpu_user_annotation", "ProfilerStep#3", -90, 0, pid=0),
        event("gpu_user_annotation", "ProfilerStep#4", 20, 100, pid=0),
        event("gpu_user_annotation", "optimizer", 80, 100, pid=0),
        event("user_annotation", "data", -5, 15),
        event("cpu_op", "aten::conv2d", 0, 90),
        event("gpu_memcpy", "Memcpy HtoD", 15, 20, pid=0),
        event("kernel", "sm90_xmma_fprop", 20, 60, pid=0),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 75, pid=0),
        event("kernel", "multi_tensor_apply_kernel", 80, 100, pid=0),
    ]
    text = (
        ": 100 ms a step, computing 60% (optimizer 20%), waiting for the exchange 15%, copies 5%, data 15%, "
        "idle 5%; 57% of the exchange is hidden behind computing"
    )
    assert divide_time(events, is_gpu=True) == text
    assert divide_time([*events, event("kernel", "gemm", 0, 5, pid=1)], is_gpu=True) == "", "whose idle time?"
    unseen = [one for one in events if one["pid"]]
    assert divide_time(unseen, is_gpu=True) == ": no kernel of a GPU was seen (KINETO_LOG_LEVEL=4 shows why)"


def test_one_step_is_not_divided():
    events = [event("user_annotation", "ProfilerStep#0", 0, 9), event("cpu_op", "aten::add", 1, 2)]
    assert divide_time(events, is_gpu=False) == ""
