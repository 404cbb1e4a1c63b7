"""Interrupted at any step, by any means, resumed: the run ends with the weights of the uninterrupted one.

The weights are equal bit for bit at the same world size, and up to rounding if the number of processes changes.
"""

import functools
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from scripts.launch.local import free_port
from tests.conftest import slow
from tests.support import (
    TIMEOUT_S,
    Command,
    Interrupt,
    Result,
    accuracies,
    assert_same_run,
    contents,
    is_equal,
    largest_difference,
    last_step,
    local,
    losses,
    metrics,
    newest_checkpoint,
    run_command,
    run_ranks,
    start_run,
    train,
    wait_until,
    weights,
    words_for,
    write_program,
)

STEPS = 60
"""Not more: some comparisons are to 1e-5, and a difference in the last bit grows with every further step."""
WORDS = ("--max-steps", str(STEPS), "--seed", "1", "--deterministic", "--device", "cpu")
FREQUENT = ("--checkpoint-every", "7", "--keep-checkpoints", "2")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """Return a function that returns the uninterrupted run of a recipe at a world size; each is trained once."""

    def run(recipe, world_size, *argv):
        return train(recipe, tmp_path_factory.mktemp("uninterrupted"), world_size, *WORDS, *argv)

    return functools.cache(run)


def assert_equal_bits(run, other):
    ours, theirs = newest_checkpoint(run), newest_checkpoint(other)
    assert ours["position"] == theirs["position"]
    for part in ("model", "optimizer", "scaler"):
        assert is_equal(ours[part], theirs[part]), part
    assert losses(run) == losses(other)  # which also checks that each step is there exactly once, in order
    assert accuracies(run) == accuracies(other)
    clocks = {"samples_per_s": 0, "tokens_per_s": 0, "train_s": 0}
    lines = [[{**line, **clocks} for line in metrics(path)] for path in (run, other)]
    assert lines[0] == lines[1]


def interrupt(recipe, folder, world_size, step, number, ranks, *argv, where="step"):
    """Train, send the ranks the signal after the step, and return the run's folder and the Outcome."""
    name, when = f"{recipe}-{world_size}", Interrupt(number, step, ranks, where)
    outcome = start_run(recipe, folder, world_size, *WORDS, *argv, name=name, interrupt=when).wait()
    return folder / name, outcome


def assert_checkpointed_and_left(run, outcome, signal_words, step):
    """Assert that the step that was running when the signal came was completed and saved."""
    assert set(outcome.statuses) == {0}, outcome.text
    step = step + 1
    assert newest_checkpoint(run)["position"]["step"] == step
    assert step == last_step(run), "the checkpoint stands at the last step that was trained"
    path = run / "checkpoints" / f"step-{step:09d}.pt"
    assert f"stopped by {signal_words}: wrote {path}\n" in outcome.outputs[0]
    assert f"resume with --name {run.name} --resume auto" in outcome.outputs[0]
    assert all(text == "" for text in outcome.outputs[1:]), "rank 0 alone prints"


def assert_resumes_exactly(uninterrupted, folder, recipe, world_size, step, number, ranks, signal_words, *argv):
    """Stop a run by a signal and resume it: it ends with the very bits of the uninterrupted one."""
    run, outcome = interrupt(recipe, folder, world_size, step, number, ranks, *argv)
    assert_checkpointed_and_left(run, outcome, signal_words, step)
    assert train(recipe, folder, world_size, *WORDS, *argv, "--resume", "auto") == run
    assert_equal_bits(run, uninterrupted(recipe, world_size, *argv))


@pytest.mark.parametrize(
    ("number", "ranks", "signal_words"),
    [
        (signal.SIGUSR1, None, "SIGUSR1"),
        (signal.SIGTERM, [1], "a signal to another rank"),
        *slow(
            (signal.SIGUSR1, [1], "a signal to another rank"),
            (signal.SIGUSR1, [0], "SIGUSR1"),
            (signal.SIGTERM, None, "SIGTERM"),
        ),
    ],
    ids=["usr1-all", "term-rank1", "usr1-rank1", "usr1-rank0", "term-all"],
)
def test_a_stop_signal_saves_at_the_same_step_on_all_ranks(uninterrupted, tmp_path, number, ranks, signal_words):
    step = random.Random(f"{number} {ranks}").randrange(1, STEPS // 2)
    assert_resumes_exactly(uninterrupted, tmp_path, "ddp", 2, step, number, ranks, signal_words)


REPLICAS = ("--global-batch-size", "48", "--num-microbatches", "2")


@pytest.mark.parametrize(
    ("recipe", "world_size", "own"),
    [
        ("ddp", 3, ()),
        *slow(
            ("ddp", 4, ()),
            ("spawn", 3, ()),
            ("apex", 3, ("--opt-level", "O0")),
            ("apex", 3, ("--opt-level", "O2")),
            ("pipeline", 3, (*REPLICAS, "--stages", "1")),
            ("pipeline", 3, (*REPLICAS, "--split", "in-process")),
            ("scratch", 3, ()),
            ("fsdp", 3, ()),
            ("context", 3, ("--context-parallel", "1")),
            ("tensor", 3, ("--tensor-parallel", "1")),
            ("horovod", 3, ("--compression", "none")),
        ),
    ],
)
def test_more_than_two_ranks_repeat_the_very_bits(uninterrupted, tmp_path, recipe, world_size, own):
    """Three or more numbers can be added in different orders."""
    how = (11, signal.SIGUSR1, None, "SIGUSR1")
    assert_resumes_exactly(uninterrupted, tmp_path, recipe, world_size, *how, *own)


def test_single_saves_and_goes_on(uninterrupted, tmp_path):
    assert_resumes_exactly(uninterrupted, tmp_path, "single", 1, 13, signal.SIGTERM, None, "SIGTERM")


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_killed_at_a_random_step(uninterrupted, tmp_path, seed):
    """One rank or all at once are killed, twice; each time the run resumes from its newest checkpoint."""
    chance = random.Random(seed)
    run, resume = tmp_path / "ddp-2", ()
    steps = sorted(chance.sample(range(8, STEPS - 25), 2))
    for step in steps:
        ranks = chance.choice([[0], [1], None])
        _, outcome = interrupt("ddp", tmp_path, 2, step, signal.SIGKILL, ranks, *FREQUENT, *resume)
        killed = range(2) if ranks is None else ranks
        assert all(outcome.statuses[rank] == -signal.SIGKILL for rank in killed)
        for rank in set(range(2)) - set(killed):
            assert outcome.statuses[rank] == 1
            assert outcome.outputs[rank].count("error: ") == 1
            assert f"rank {rank} on " in outcome.outputs[rank]
        resume = ("--resume", "auto")
    train("ddp", tmp_path, 2, *WORDS, *FREQUENT, "--resume", "auto")
    assert_equal_bits(run, uninterrupted("ddp", 2))


@pytest.mark.parametrize("call", [1, *slow(2, 3, 4, 5)])
def test_killed_while_it_writes_a_checkpoint(uninterrupted, tmp_path, call):
    """A checkpoint, like config.json before it, flushes the file before its rename and the folder after it."""
    run, outcome = interrupt("ddp", tmp_path, 2, 2 + call, signal.SIGKILL, [0], *FREQUENT, where="fsync")
    assert outcome.statuses[0] == -signal.SIGKILL
    assert len(list(run.glob("checkpoints/*.tmp"))) == call % 2
    steps = [int(path.stem[5:]) for path in sorted(run.glob("checkpoints/step-*.pt"))]
    assert steps == [7, 14][: call // 2]
    train("ddp", tmp_path, 2, *WORDS, *FREQUENT, "--resume", "auto")
    assert_equal_bits(run, uninterrupted("ddp", 2))
    assert not list(run.glob("checkpoints/*.tmp"))


@pytest.mark.parametrize(
    "argv",
    [
        ["--accumulate-steps", "3", "--optimizer", "adamw", "--lr", "0.002"],
        *slow(
            ["--zero", "--optimizer", "adamw", "--lr", "0.002"],
            ["--amp", "fp16", "--clip-grad-norm", "0.5"],
            ["--global-batch-size", "50"],
        ),
    ],
    ids=["accumulate-adamw", "zero-adamw", "fp16", "remainder"],
)
def test_resume_is_exact_with_options(uninterrupted, tmp_path, argv):
    assert_resumes_exactly(uninterrupted, tmp_path, "ddp", 2, 17, signal.SIGUSR1, None, "SIGUSR1", *argv)


def sparse_model(data):
    """Return a model whose embedding has sparse gradients."""
    return nn.Sequential(nn.Embedding(data.num_classes, 8, sparse=True), nn.Linear(8, data.num_classes))


@pytest.mark.parametrize(
    ("recipe", "world_size", "own"),
    [
        ("ddp", 2, ()),
        *slow(
            ("single", 1, ()),
            ("ddp", 2, ("--zero", "--clip-grad-norm", "0.5")),
            ("horovod", 2, ("--compression", "none")),
            ("pipeline", 2, ("--clip-grad-norm", "0.5")),
        ),
    ],
)
def test_resume_is_exact_with_sparse_gradients(uninterrupted, tmp_path, text, recipe, world_size, own):
    argv = ("--data", "text", *text, "--model", "tests.parallel.test_interruptions:sparse_model")
    argv += ("--seq-len", "8", "--optimizer", "sgd", "--lr", "0.02", "--weight-decay", "0", *own)
    assert_resumes_exactly(uninterrupted, tmp_path, recipe, world_size, 5, signal.SIGUSR1, None, "SIGUSR1", *argv)


@pytest.mark.parametrize(("first", "then"), [(2, 3), (3, 1)], ids=["2-to-3", "3-to-1"])
def test_another_number_of_processes_goes_on(uninterrupted, tmp_path, first, then):
    """The record is the same up to rounding; in test_contract.py another recipe resumes."""
    run, outcome = interrupt("ddp", tmp_path, first, 20, signal.SIGUSR1, None)
    assert_checkpointed_and_left(run, outcome, "SIGUSR1", 20)
    step = newest_checkpoint(run)["position"]["step"]
    start_run("ddp", tmp_path, then, *WORDS, "--resume", "auto", name=run.name).wait(check=True)
    whole = uninterrupted("ddp", first)
    assert losses(run)[:step] == losses(whole)[:step]
    assert_same_run(run, whole)


def test_a_run_that_lacks_only_its_evaluation_gets_it(uninterrupted, tmp_path):
    """The signal comes in the last step, whose checkpoint is written before the evaluation."""
    run, outcome = interrupt("ddp", tmp_path, 2, 59, signal.SIGUSR1, None)
    assert_checkpointed_and_left(run, outcome, "SIGUSR1", 59)
    assert accuracies(run) == accuracies(uninterrupted("ddp", 2))[:-1]
    before = weights(run)
    train("ddp", tmp_path, 2, *WORDS, "--resume", "auto")
    whole = uninterrupted("ddp", 2)
    assert newest_checkpoint(run)["position"] == newest_checkpoint(whole)["position"]
    assert is_equal(weights(run), weights(whole))
    assert is_equal(weights(run), before)
    assert losses(run) == losses(whole)
    assert accuracies(run) == accuracies(whole)


@pytest.mark.parametrize(("before", "after"), [([], ["--zero"]), (["--zero"], [])], ids=["to-sharded", "to-whole"])
def test_sharded_and_whole_optimizers_read_each_other(uninterrupted, tmp_path, before, after):
    run, _ = interrupt("ddp", tmp_path, 2, 20, signal.SIGUSR1, None, *before)
    start_run("ddp", tmp_path, 3, *WORDS, *after, "--resume", "auto", name=run.name).wait(check=True)
    assert losses(run) == pytest.approx(losses(uninterrupted("ddp", 2)), rel=1e-5)


@pytest.mark.slow
def test_resume_from_a_path_begins_a_new_run(uninterrupted, tmp_path):
    whole = uninterrupted("ddp", 2)
    middle = max((whole / "checkpoints").glob("step-*.pt"))
    run, _ = interrupt("ddp", tmp_path, 2, 30, signal.SIGUSR1, None)
    before = (run / "metrics.jsonl").read_bytes()
    step = newest_checkpoint(run)["position"]["step"]
    for source in (run, run / "checkpoints" / f"step-{step:09d}.pt"):
        new = tmp_path / f"new-{source.suffix[1:]}"
        start_run("single", tmp_path, 1, *WORDS, "--start-from", str(source), name=new.name).wait(check=True)
        assert len(losses(new, after=step)) == STEPS - step
        ours, theirs = newest_checkpoint(new)["position"], torch.load(middle, weights_only=True)["position"]
        assert ours.pop("averages") == pytest.approx(theirs.pop("averages"), rel=1e-6)  # summed in other parts
        assert ours == theirs
        assert largest_difference(weights(new), weights(whole)) < 1e-5
    assert (run / "metrics.jsonl").read_bytes() == before, "the other run stays as it is"


def test_a_longer_run_goes_on_within_the_epoch(tmp_path):
    """--max-steps ends within an epoch; with a larger one, the run completes the epoch as if it had not ended."""
    constant = ("--lr-schedule", "constant", "--seed", "1", "--deterministic")
    train("ddp", tmp_path, 2, *constant, "--max-steps", "50")
    run = train("ddp", tmp_path, 2, *constant, "--max-steps", "70", "--resume", "auto")
    whole = train("single", tmp_path, 1, *constant, "--max-steps", "70")
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    assert accuracies(run)[-1] == accuracies(whole)[-1]
    assert newest_checkpoint(run)["position"]["epoch"] == newest_checkpoint(whole)["position"]["epoch"]


def test_resume_of_a_finished_run_says_its_result_again(uninterrupted, tmp_path):
    run = shutil.copytree(uninterrupted("ddp", 2), tmp_path / "ddp-2")
    before = contents(run)
    result = json.loads((run / "result.json").read_text())
    assert result["train_s"] > 0
    outcome = start_run("ddp", tmp_path, 3, *WORDS, "--resume", "auto", name=run.name).wait(check=True)
    figures = f"test_accuracy={result['test_accuracy']:.4f} samples_per_s={result['samples_per_s']:.0f}"
    assert outcome.outputs[0].splitlines()[-1] == f"result recipe=ddp world_size=2 {figures} record={run}"
    assert contents(run) == before


@pytest.mark.parametrize(
    ("recipe", "argv"),
    [("ddp", ()), ("ddp", ("--zero",)), ("fsdp", ()), ("tensor", ()), ("pipeline", ()), ("scratch", ())],
)
def test_a_resume_applies_the_optimizers_options(uninterrupted, tmp_path, recipe, argv):
    """They apply on each rank, sharded or not: the weights equal a one-process run's that resumes with them."""
    resumed = ("--max-steps", "14", "--start-from", str(uninterrupted("single", 1, "--max-steps", "10")))
    changed = (*resumed, "--momentum", "0.3", "--weight-decay", "0.5")
    expected = uninterrupted("single", 1, *changed)
    assert largest_difference(weights(expected), weights(uninterrupted("single", 1, *resumed))) > 1e-3
    run = train(recipe, tmp_path, 2, *WORDS, *changed, *argv)
    assert largest_difference(weights(run), weights(expected)) < 1e-6
    ours, theirs = (newest_checkpoint(path)["optimizer"]["param_groups"] for path in (run, expected))
    assert is_equal(ours, theirs)


# ---- through the launcher that `make run` uses, and the agent of each node


ENDLESS = shlex.split("--epochs 2000 --max-steps 20000 --lr-schedule constant --seed 1 --deterministic")


@pytest.mark.slow
def test_a_signal_to_the_launcher(tmp_path):
    job = local("ddp", 2, 1, *words_for(tmp_path, "real", *ENDLESS))
    job.wait_for_step(tmp_path / "real", 9)
    (rank_1,) = (rank for rank in VICTIMS["rank"](job) if rank.environ()["RANK"] == "1")
    rank_1.suspend()  # else rank 0 may learn of the signal by its vote, before its own agent passes it on
    job.process.send_signal(signal.SIGUSR1)
    time.sleep(3)
    rank_1.resume()
    result = job.wait(check=True)
    assert "stopped by SIGUSR1: wrote " in result.stdout
    assert result.errors == []
    step = newest_checkpoint(tmp_path / "real")["position"]["step"]
    assert last_step(tmp_path / "real") == step > 0


def has_handler(pid, number):
    caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "delay_s"), [(2, 0.0), (1, 0.5), (1, 1.2), (2, 2.5)])
def test_a_signal_that_comes_early_ends_with_status_0(tmp_path, nodes, delay_s):
    """The signal comes while the launcher, the agents or the ranks are still importing."""
    job = local("ddp", nodes, 1, *words_for(tmp_path, "early", *ENDLESS))
    wait_until(lambda: has_handler(job.process.pid, signal.SIGTERM), 20, "the launcher's own handlers")
    time.sleep(delay_s)
    job.process.send_signal(signal.SIGTERM)
    result = job.wait(check=True)
    assert result.errors == []
    assert not list(tmp_path.glob("early/checkpoints/*.tmp"))


@pytest.mark.slow
def test_a_signal_to_an_agent_reaches_its_ranks(tmp_path):
    """Send TERM as Slurm and Kubernetes do, to scripts/launch.sh, which has become the agent."""
    words = words_for(tmp_path, "agent", *ENDLESS)
    node = {"NNODES": "1", "NODE_RANK": "0", "NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    job = Command("scripts/launch.sh", "ddp", *words, PYTHON=sys.executable, GLOO_SOCKET_IFNAME="lo", **node)
    job.wait_for_step(tmp_path / "agent", 5)
    job.process.send_signal(signal.SIGTERM)
    job.wait(check=True)
    assert last_step(tmp_path / "agent") == newest_checkpoint(tmp_path / "agent")["position"]["step"] > 0


def without_prctl(folder):
    """Return an environment in which Python finds no prctl, as on macOS."""
    (folder / "sitecustomize.py").write_text(NO_PRCTL)
    return {"PYTHONPATH": str(folder)}


def without_setpriv(folder):
    """Return an environment in which setpriv fails, as on RHEL 8, whose setpriv has no --pdeathsig."""
    write_program(folder / "setpriv", "echo setpriv: unrecognized option >&2\nexit 127")
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


NO_PRCTL = """
import ctypes

class CDLL(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = CDLL
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "without"),
    [(signal.SIGINT, None), (signal.SIGINT, without_prctl), (signal.SIGHUP, None)],
    ids=["ctrl-c", "without-prctl", "hang-up"],
)
def test_ctrl_c_and_a_lost_terminal_end_everything_at_once(tmp_path, number, without):
    env = without(tmp_path) if without else {}
    (tmp_path / "tmp").mkdir()
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    job = local("ddp", 2, 1, *words_for(tmp_path, "c", *ENDLESS), TMPDIR=str(tmp_path / "tmp"), **env)
    signal.signal(number, before)
    job.wait_for_step(tmp_path / "c", 5)
    job.process.send_signal(number)
    result = job.wait(timeout_s=10)
    assert result.status == 128 + number
    assert "interrupted; " in result.stderr
    [kept] = (tmp_path / "tmp").iterdir()  # for compiled code, of which this job has none
    assert (kept.name, [*kept.iterdir()]) == (f"torchinductor_{os.geteuid()}", [])


VICTIMS = {
    "rank": lambda job: job.processes("-m recipes.ddp.train"),
    "agent": lambda job: job.processes("-m scripts.launch.agent"),
    "launcher": lambda job: job.processes("-m scripts.launch.local"),
}


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_9_of_any_process_ends_all_within_10_s(uninterrupted, tmp_path, victim):
    words = words_for(tmp_path, "killed", "--checkpoint-every", "5", *ENDLESS)
    per_node = 2 if victim == "rank" else 1
    job = local("ddp", 2, per_node, *words, **without_setpriv(tmp_path))
    job.wait_for_step(tmp_path / "killed", 16)  # step 15 waits until the checkpoint of step 10 is on the disk
    found = VICTIMS[victim](job)
    assert len(found) == {"rank": 4, "agent": 2, "launcher": 1}[victim]
    random.Random(victim).shuffle(found)
    if victim == "rank":  # another rank is suspended: it notices nothing, and handles no signal but KILL
        found.sort(key=lambda process: process.environ()["RANK"])
        found[3].suspend()
    found[0].kill()
    killed_at = time.monotonic()
    result = job.wait(timeout_s=10, gone_within_s=10)
    assert time.monotonic() - killed_at < 10
    assert result.status == 137 if victim == "rank" else result.status not in (0, 2)
    if victim != "launcher":
        assert "was killed by SIGKILL" in result.stderr
    assert victim != "rank" or "rank 0 (pid " in result.stderr

    step = newest_checkpoint(tmp_path / "killed")["position"]["step"]
    assert step >= 10
    end = ("--max-steps", str(step + 10), "--resume", "auto")
    run_ranks("ddp", [*words, *end], 2 * per_node, tmp_path / "on")  # a launcher resumes in test_injection.py
    whole = train("ddp", tmp_path / "whole", 2 * per_node, *ENDLESS, *end)
    assert losses(tmp_path / "killed") == losses(whole)
    assert largest_difference(weights(tmp_path / "killed"), weights(whole)) == 0


ENDS_LATE = """
import os, threading, time
from torch import nn

class Net(nn.Sequential):
    def __init__(self, data):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        if self.passes == 10:
            if os.environ["RANK"] == "1":
                RANK_1
            RANK_0
        return super().forward(x)
"""


def write_model(path, rank_1, rank_0="pass"):
    """Write a module with a model whose ranks execute these statements in their tenth pass."""
    path.write_text(ENDS_LATE.replace("RANK_1", rank_1).replace("RANK_0", rank_0))


@pytest.mark.parametrize("recipe", ["ddp", *slow("spawn")])
def test_the_rank_with_an_error_of_its_own_is_blamed_and_not_the_one_that_lost_it(tmp_path, recipe):
    write_model(tmp_path / "late.py", 'raise ValueError("no such shape")')
    words = ("scripts.launch.local", recipe, "--nproc-per-node", "2", "--", "--model", "late:Net")
    result = run_command(sys.executable, "-m", *words, "--runs-dir", str(tmp_path), PYTHONPATH=str(tmp_path))
    lines = [re.sub(r"^\[rank1\]: ", "", line) for line in result.stderr.splitlines()]
    assert "ValueError: no such shape" in lines, result.stderr
    at = lines.index("ValueError: no such shape")
    assert lines[at + 1] == "on rank 1, after step 9"  # a traceback of the user's code, and where it was
    [blamed] = [line for line in lines if "ended with status 1; its own error is above" in line]
    assert re.fullmatch(r"error: rank 1 \(pid .*\) ended with status 1; its own error is above", blamed)
    lost = [line for line in lines if "lost another rank" in line]  # rank 0 may be ended before it says so
    assert all(re.fullmatch(r"error: rank 0 on \S+ lost another rank: .*", line) for line in lost)
    last = "error: node 0 ended with status 1; all nodes are stopped"
    assert (result.status, set(lines[at + 2 :])) == (1, {*lost, blamed, last})


@pytest.mark.slow
def test_ctrl_c_while_a_checkpoint_is_read_ends_a_rank_at_once(tmp_path):
    big = tmp_path / "big.pt"
    with big.open("wb") as file:
        file.truncate(400 << 30)  # a minute or more to read, and no space on the disk
    words = words_for(tmp_path, "run", "--start-from", str(big))
    job = Command(sys.executable, "-m", "recipes.single.train", *words)
    open_files = psutil.Process(job.process.pid).open_files
    wait_until(lambda: any(file.path == str(big) for file in open_files()), TIMEOUT_S, "reading")
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait(10) == Result(-signal.SIGINT, "", "")


NOTICED = "error: node 1 failed: rank 1 (pid PID on HOST) ended with status 5"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("threading.Event().wait()", f"{NOTICED}; ranks of this node still ran, and are ended"),
        ("time.sleep(6); os.abort()", NOTICED),
    ],
)
def test_a_failure_on_another_node_ends_ranks_that_do_not_notice_it(tmp_path, then, said):
    """On GPUs, a rank waits in the driver, until NCCL aborts it or for ever, as this one does."""
    write_model(tmp_path / "mine.py", "os._exit(5)", then)
    words = words_for(tmp_path, "mine", "--model", "mine:Net")
    place = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    head, other = (Command("scripts/launch.sh", "ddp", *words, NODE_RANK=rank, **place) for rank in "01")
    assert other.wait().status == 5
    result = head.wait()
    place = re.escape(said).replace("PID", r"\d+").replace("HOST", r"\S+")
    assert result.status == 1
    assert [line for line in result.errors if re.fullmatch(place, line)], result.stderr
    assert "SIGABRT" not in result.stderr
