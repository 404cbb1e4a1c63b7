"""A rank that does not answer, or does not come, is named within the bound, with the stacks of the others."""

import functools
import os
import re
import signal
import time

import pytest
import torch.distributed as dist

from recipes.common import job as jobs
from recipes.common.checkpoint.checkpoint import CheckpointFolder
from recipes.common.record import resume
from recipes.common.watch.timeouts import HANG_STATUS
from recipes.tensor import train as tensor
from tests.conftest import slow
from tests.support import Interrupt, local, newest_checkpoint, start_run, train, words_for

TIMEOUT_S = 4
WORDS = ("--timeout-s", str(TIMEOUT_S), "--epochs", "1000", "--device", "cpu")
STEP = 7


def assert_reported(run, line, silent, others):
    """Assert that the error line is the report's first line, and that the report has all other ranks' stacks."""
    report = (run / "hang-report.txt").read_text()
    assert line == f"error: {report.splitlines()[0]}; stacks of the others: {run / 'hang-report.txt'}"
    assert sorted(path.name for path in (run / "hang").iterdir()) == [f"rank-{rank}.txt" for rank in others]
    for rank in others:
        text = (run / "hang" / f"rank-{rank}.txt").read_text()
        assert f"==== rank {rank}\n{text}" in report
        assert "thread MainThread:" in text
        # It may be between two epochs.
        assert re.search(r"in (train_until_evaluation|evaluate|train)\b", text), text
    assert f"==== rank {silent}\n" not in report


@pytest.mark.slow
def test_a_stopped_rank_ends_the_job_and_is_named(tmp_path):
    """Suspend rank 0 under `make run`. A suspended process handles no signal but KILL, and prints nothing."""
    job = local("ddp", 2, 2, *words_for(tmp_path, "stopped", *WORDS))
    job.wait_for_step(tmp_path / "stopped", STEP)
    ranks = {process.environ()["RANK"]: process for process in job.processes("-m recipes.ddp.train")}
    assert len(ranks) == 4
    ranks["0"].suspend()
    stopped_at = time.monotonic()
    result = job.wait(timeout_s=30, gone_within_s=1)
    assert time.monotonic() - stopped_at < TIMEOUT_S + 8
    assert result.status == HANG_STATUS
    lines = re.findall(r"error: .*", result.stderr)
    assert len(lines) == 1, "one line, and nothing from launchers that adds nothing"
    assert_reported(tmp_path / "stopped", lines[0], 0, [1, 2, 3])
    assert "error: rank 0 on " in lines[0]
    assert " does not answer, last seen " in lines[0]
    waits = "gradients|stop vote|metrics|evaluation|agreement"
    assert re.search(rf'waited [45] s in "({waits})" after step \d+', lines[0])
    assert "Traceback" not in result.stderr


def interrupted(recipe, folder, world_size, interrupt, *argv):
    """Start ranks, some of which stop or sleep; return those that end, their one line, and the run."""
    ranks = start_run(recipe, folder, world_size, *WORDS, *argv, interrupt=interrupt)
    awake = [rank for rank in range(world_size) if rank not in interrupt.ranks or interrupt.sleep_s]
    deadline = time.monotonic() + 40
    for rank in awake:
        ranks.processes[rank].join(max(0.1, deadline - time.monotonic()))
    outputs = {rank: ranks.output(rank) for rank in awake}
    assert {ranks.processes[rank].exitcode for rank in awake} == {HANG_STATUS}, outputs
    ranks.kill()
    [line] = [line for output in outputs.values() for line in re.findall("error: .*", output)]
    return awake, line, folder / "run"


@pytest.mark.parametrize(
    ("recipe", "world_size", "victim"),
    [("scratch", 3, 1), *slow(("spawn", 2, 0), ("pipeline", 4, 2), ("apex", 2, 1))],
)
def test_every_recipe_names_a_stopped_rank(tmp_path, recipe, world_size, victim):
    """Here rank 0 hosts the store: once it has stopped, nobody can look up what it was doing."""
    stop = Interrupt(signal.SIGSTOP, STEP, [victim])
    awake, line, run = interrupted(recipe, tmp_path, world_size, stop, "--log-every", "1000")
    assert re.match(f"error: rank {victim} (on .* )?does not answer, ", line)
    assert f" after step {STEP}" in line
    assert_reported(run, line, victim, awake)


def test_a_rank_that_stops_is_named_by_the_second_of_two_collectives_that_wait_for_it(tmp_path):
    """Gloo ends the count of targets, which waits behind the vote, with another message than the vote."""
    stop = Interrupt(signal.SIGSTOP, STEP, [1])
    argv = ("--data", "tests.slow_data:images", "--workers", "0", "--log-every", "1000")
    awake, line, run = interrupted("ddp", tmp_path, 2, stop, *argv)
    assert line.startswith("error: rank 1 on ")
    assert re.search(rf' waited [45] s in "targets" after step {STEP}; ', line)
    assert_reported(run, line, 1, awake)


def test_a_rank_that_does_not_come_is_named_and_shows_what_it_does_instead(tmp_path):
    sleep = Interrupt(signal.SIGCONT, STEP, [1], sleep_s=600)
    _, line, run = interrupted("ddp", tmp_path, 3, sleep)
    assert re.match(r"error: rank 1 does not come, rank 1 \(pid \d+ on .*\) is past \"gradients\" ", line)
    assert re.search(r'; ranks 0, 2 waited 4 s in "metrics" after step 7; ', line)
    assert "time.sleep(interrupt.sleep_s)" in (run / "hang" / "rank-1.txt").read_text()
    assert_reported(run, line, None, [0, 1, 2])


def stay_away():
    """Make rank 1 sleep where the others make the groups of a replica."""
    if os.environ["RANK"] == "1":
        tensor.grid_mesh = lambda *_: time.sleep(600)


def test_a_rank_that_does_not_come_to_make_groups_is_named(tmp_path):
    """The store's own time-out ends that wait, with another error than gloo's."""
    ranks = start_run("tensor", tmp_path, 2, *WORDS, setup=stay_away)
    ranks.processes[0].join(40)
    assert ranks.processes[0].exitcode == HANG_STATUS, ranks.output(0)
    ranks.kill()
    lines = [line for rank in (0, 1) for line in re.findall("error: .*", ranks.output(rank))]
    assert len(lines) == 1, lines
    assert re.match(r"error: rank 1 does not come, rank 1 \(pid \d+ on .*\) is past \"agreement\" ", lines[0])
    assert re.search(r'; rank 0 waited [45] s in "groups"; ', lines[0])


def never_disconnect():
    dist.destroy_process_group = lambda: time.sleep(600)


def test_ranks_that_do_not_disconnect_at_the_end_are_ended(tmp_path):
    """NCCL waits without a limit, for CUDA graphs that hold its operations."""
    argv = ("--timeout-s", "1", "--max-steps", "1", "--device", "cpu")
    outcome = start_run("ddp", tmp_path, 2, *argv, setup=never_disconnect).wait()
    assert outcome.statuses == [HANG_STATUS] * 2, outcome.text
    for rank, output in enumerate(outcome.outputs):
        assert re.search(
            rf"error: rank {rank} on \S+ did not disconnect from the other ranks within 6 s; its", output
        )


def test_a_run_that_is_well_leaves_no_report_and_puts_an_old_one_away(tmp_path):
    run = train("ddp", tmp_path, 2, "--max-steps", "4")
    assert not list(run.glob("*hang*"))
    (run / "hang").mkdir()
    (run / "hang-report.txt").write_text("old")
    train("ddp", tmp_path, 2, "--max-steps", "6", "--resume", "auto")
    assert [path.name for path in run.glob("*hang*")] == ["hang-report-1.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ddp", "scratch"])
def test_a_rank_that_others_wait_for_is_named_while_training(tmp_path, recipe):
    late = Interrupt(signal.SIGCONT, 0, [1], sleep_s=0.1)
    argv = ("--max-steps", "70", "--straggler-window-s", "2", "--device", "cpu")
    outcome = start_run(recipe, tmp_path, 3, *argv, interrupt=late).wait(check=True)
    pattern = r"^warning: rank (\d) on \S+ is slow: of a step of (\d+) ms, its own work takes (\d+) ms, "
    said = re.findall(pattern, outcome.outputs[0], re.MULTILINE)
    assert {rank for rank, *_ in said} == {"1"}, outcome.text
    assert all(int(step_ms) >= int(work_ms) >= 50 for *_, step_ms, work_ms in said)
    assert "is slow" not in "".join(outcome.outputs[1:])
    assert outcome.outputs[0].splitlines()[-1].startswith(f"result recipe={recipe} world_size=3 ")


def slow_disk(bytes_per_s):
    """Make reads and writes of checkpoints take twice --timeout-s, on disks that are known to be that slow."""
    jobs.SLOWEST = bytes_per_s
    write, read = CheckpointFolder.write, resume.read_newest

    def write_late(*args):
        time.sleep(2 * TIMEOUT_S)
        return write(*args)

    def read_late(*args):
        time.sleep(2 * TIMEOUT_S)
        return read(*args)

    CheckpointFolder.write, resume.read_newest = write_late, read_late


@pytest.mark.parametrize(
    ("recipe", "argv"), [("ddp", []), *slow(("horovod", []), ("fsdp", ["--sharded-checkpoints"]))]
)
def test_ranks_wait_for_a_large_checkpoint(tmp_path, recipe, argv):
    """Written or read at 10 kB/s, LeNet's may take 26 s longer than --timeout-s."""
    argv = (*WORDS, *argv, "--resume", "auto", "--max-steps")
    for step, setup in (("2", None), ("4", functools.partial(slow_disk, 1e4))):
        outcome = start_run(recipe, tmp_path, 2, *argv, step, setup=setup).wait(check=True)
    assert "resumed from" in outcome.outputs[0]
    assert newest_checkpoint(tmp_path / "run")["position"]["step"] == 4


@pytest.mark.slow
def test_a_write_that_takes_too_long_for_its_size_is_named(tmp_path):
    setup = functools.partial(slow_disk, 1e9)
    outcome = start_run("ddp", tmp_path, 2, *WORDS, "--max-steps", "2", setup=setup).wait()
    assert outcome.statuses == [HANG_STATUS] * 2, outcome.text
    assert re.search(r'error: rank 0 .*waited [45] s in "checkpoint"', outcome.text), outcome.text
