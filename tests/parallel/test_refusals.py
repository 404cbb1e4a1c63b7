"""Bad input: one line that begins with `error: `, status 2 on every rank, and no process left, on every path."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch

from recipes.common.process import entry
from scripts.launch.local import free_port
from tests.conftest import require, slow
from tests.support import (
    ROOT,
    TIMEOUT_S,
    Command,
    Ranks,
    contents,
    is_equal,
    last_step,
    local,
    losses,
    newest_checkpoint,
    run_command,
    start_run,
    train,
    words_for,
)


def assert_refused(outcome, words):
    """Assert that every rank ends with status 2 and that only rank 0 prints the reason, in one line."""
    assert words in outcome.refusal
    assert outcome.refusal in outcome.outputs[0]


# ---- what ranks refuse, alone and together; test_options.py has more of what they refuse before they meet

REFUSED = {
    "option": (("--epoch", "3"), "unknown option --epoch; did you mean '--epochs'?"),
    "model": (("--model", "resnet81"), "no classification model 'resnet81'; did you mean 'resnet18'?"),
    "batch too large": (("--global-batch-size", "2000"), "use at most 1437"),
    "samples": (("--data", "synthetic", "--num-samples", "2", "--image-size", "8"), "training"),
    "missing folder": (("--data", "imagefolder", "--data-dir", "/no/such"), "cannot read /no/such/train"),
    "missing data": (("--data", "cifar10", "--data-dir", "/no/such"), "add --download to fetch it"),
    "start": (("--start-from", "/no/such"), "--start-from /no/such: no such file"),
    "weights": (("--weights", "/no/such"), "--weights /no/such: no such file"),
    "cuda": (("--device", "cuda"), "--device cuda: "),
    "runs": (("--runs-dir", "/proc/runs"), "cannot write /proc/runs"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize(("recipe", "world_size"), [("single", 1), ("ddp", 3)])
def test_ranks_refuse_in_one_line(tmp_path, recipe, world_size, case):
    argv, words = REFUSED[case]
    assert_refused(start_run(recipe, tmp_path, world_size, *argv).wait(), words)
    assert not (tmp_path / "run").exists(), "a refusal leaves no run behind"


@pytest.mark.parametrize("recipe", ["ddp", "pipeline"])
def test_blocks_with_batch_norm_do_not_run_again(tmp_path, recipe):
    outcome = start_run(
        recipe, tmp_path, 2, "--model", "resnet18", "--max-steps", "1", "--activation-checkpointing"
    ).wait()
    assert_refused(outcome, "--activation-checkpointing: --model resnet18 has batch norm, and blocks that run")


@pytest.mark.parametrize(("recipe", "world_size"), [("single", 1), ("fsdp", 3)])
def test_weights_of_another_model_are_refused_in_one_line(tmp_path, recipe, world_size):
    torch.save({"conv1.weight": torch.zeros(64, 3, 7, 7)}, tmp_path / "w.pt")
    outcome = start_run(recipe, tmp_path, world_size, "--weights", str(tmp_path / "w.pt")).wait()
    assert_refused(outcome, "it begins with conv1.weight (64, 3, 7, 7), --model lenet with features.0.weight")
    assert not (tmp_path / "run").exists(), "a refusal leaves no run behind"


def test_what_the_number_of_ranks_forbids(tmp_path):
    outcome = start_run("ddp", tmp_path, 3, "--global-batch-size", "8", "--accumulate-steps", "3").wait()
    assert_refused(outcome, "too small for 3 processes x 3 accumulation steps; use at least 9")


@pytest.mark.parametrize(
    ("recipe", "world_size", "batch", "least"),
    [("single", 1, 1, 2), ("ddp", 2, 2, 4), ("ddp", 2, 3, 4), ("fsdp", 2, 2, 4), ("pipeline", 2, 4, 8)],
)
def test_batch_norm_of_one_sample_is_refused(tmp_path, recipe, world_size, batch, least):
    argv = ("--model", "resnet18", "--global-batch-size", str(batch), "--max-steps", "1")
    outcome = start_run(recipe, tmp_path, world_size, *argv).wait()
    assert_refused(outcome, f"batch norm of --model resnet18 needs two; give at least {least}")


def leave_at_once():
    entry.REFUSAL_GRACE_S = 0.0  # no launcher ends these ranks


def test_what_one_node_alone_refuses_is_printed_by_its_first_rank(tmp_path):
    """Rank 0 has valid options, and still waits for the others."""
    own = {rank: ["--epoch", "3"] for rank in (2, 3)}
    job = start_run("ddp", tmp_path, 4, "--timeout-s", "60", nodes=2, own_argv=own, setup=leave_at_once)
    for process in job.processes[2:]:
        process.join(TIMEOUT_S)
    assert [process.exitcode for process in job.processes[2:]] == [2, 2]
    [line] = job.output(2).splitlines()
    assert line.startswith("error: unknown option --epoch; did you mean '--epochs'?")
    assert [job.output(rank) for rank in (0, 1, 3)] == [""] * 3
    job.kill()


def wait_long_with_signals_blocked():
    entry.REFUSAL_GRACE_S = TIMEOUT_S
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as scripts/launch/agent.py starts its ranks
    print("ready", flush=True)


def test_a_launcher_ends_a_node_before_it_repeats_what_rank_0_has_printed(tmp_path):
    job = start_run("ddp", tmp_path, 2, "--epoch", "3", nodes=2, setup=wait_long_with_signals_blocked)
    job.wait_for_text("ready", rank=1)
    job.processes[0].join(TIMEOUT_S)
    job.send(signal.SIGTERM, [1])
    outcome = job.wait()
    assert outcome.statuses == [2, 2], outcome.text
    assert "error: unknown option --epoch" in outcome.outputs[0]
    assert outcome.outputs[1] == "ready\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    words = shlex.split("--max-steps 25 --checkpoint-every 10 --deterministic")
    return train("ddp", tmp_path_factory.mktemp("trained"), 2, *words)


def test_a_taken_name_is_refused(trained, tmp_path):
    before = contents(trained)
    words = words_for(trained.parent, trained.name)
    outcome = Ranks("ddp", words, 2, tmp_path / "out").wait()
    assert_refused(outcome, "exists; add --resume auto to resume it, --overwrite to replace it")
    assert contents(trained) == before


@pytest.mark.parametrize(("recipe", "world_size"), [("single", 1), ("ddp", 2)])
def test_a_checkpoint_of_another_kind_of_run_is_refused(trained, tmp_path, recipe, world_size):
    """test_checkpoint.py has the other options that must be the same."""
    outcome = start_run(recipe, tmp_path, world_size, "--seed", "1", "--start-from", str(trained)).wait()
    assert_refused(outcome, "was written with --seed 0, this run has --seed 1")
    assert not (tmp_path / "run").exists()


def test_bad_checkpoints_are_passed_over_and_none_good_is_refused(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "ddp-2")
    paths = sorted(folder.glob("checkpoints/step-*.pt"), reverse=True)
    assert [path.name for path in paths] == [f"step-{step:09d}.pt" for step in (25, 22, 20)]
    paths[0].write_bytes(paths[0].read_bytes()[:-100])
    paths[1].write_bytes(os.urandom(5000))
    argv = ("--max-steps", "25", "--deterministic", "--resume", "auto")
    outcome = start_run("ddp", tmp_path, 2, *argv, name="ddp-2").wait(check=True)
    assert outcome.text.count("warning: skipped ") == 2
    assert f"resumed from {paths[2]} at step 20" in outcome.outputs[0]
    assert is_equal(newest_checkpoint(folder)["model"], newest_checkpoint(trained)["model"])
    assert len(losses(folder)) == 25

    paths = sorted(folder.glob("checkpoints/step-*.pt"))
    for path in paths:
        path.write_bytes(b"")
    outcome = start_run("ddp", tmp_path, 2, *argv, name="ddp-2").wait()
    assert_refused(outcome, f"none of the {len(paths)} checkpoints in {folder / 'checkpoints'} is good")
    assert sorted(folder.glob("checkpoints/step-*.pt")) == paths, "they stay, for the next launch to find"


# ---- a full disk


def test_a_full_disk_ends_all_ranks_and_spares_the_old_checkpoint(trained, tmp_path):
    """A limit on file sizes makes writes fail as on a full disk, without root."""
    folder = shutil.copytree(trained, tmp_path / "ddp-2")
    newest = max(folder.glob("checkpoints/step-*.pt"))
    before = newest.read_bytes()
    assert len(before) > 150_000
    argv = ("--max-steps", "60", "--resume", "auto")
    outcome = start_run("ddp", tmp_path, 2, *argv, name="ddp-2", file_limit_bytes=100_000).wait()
    assert_refused(outcome, "step-000000044.pt: File too large; ")
    assert f"{newest} is intact: fix this, then add --resume auto" in outcome.outputs[0]
    assert newest.read_bytes() == before
    assert not list(folder.glob("checkpoints/*.tmp"))
    train("ddp", tmp_path, 2, *argv)  # once there is space, the run goes on
    assert last_step(folder) == 60


def test_a_full_disk_in_single(tmp_path):
    argv = ("--max-steps", "30", "--checkpoint-every", "5", "--no-async-checkpoints")
    outcome = start_run("single", tmp_path, 1, *argv, file_limit_bytes=100_000).wait()
    assert_refused(outcome, "step-000000005.pt: File too large; there is no earlier one")
    assert last_step(tmp_path / "run") == 5, "the failure is a vote that ends the next step before it counts"


def test_a_metrics_file_that_cannot_grow_ends_all_ranks(tmp_path):
    argv = ("--global-batch-size", "16", "--max-steps", "80")  # an epoch has 89 steps
    outcome = start_run("ddp", tmp_path, 2, *argv, file_limit_bytes=6500).wait()
    assert_refused(outcome, "metrics.jsonl: File too large")


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 600 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=10) if shutil.which("mount") else None
    reason = "no mount" if done is None else done.stderr.strip().partition("\n")[0]
    require("mount", done and done.returncode == 0, f"cannot mount a tmpfs ({reason})", "run `make test` as root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


def test_a_really_full_disk(small_disk, tmp_path):
    words = words_for(small_disk, "a", "--epochs", "9")
    outcome = Ranks("ddp", words, 2, tmp_path / "out").wait()
    assert_refused(outcome, ": No space left on device (free some space); ")
    newest = max((small_disk / "a" / "checkpoints").glob("step-*.pt"))
    assert f"{newest} is intact" in outcome.outputs[0]
    assert newest_checkpoint(small_disk / "a")["position"]["step"] > 0
    assert not list((small_disk / "a" / "checkpoints").glob("*.tmp"))


# ---- through each way of launching

NODE = {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
NODE |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def by_local(*argv):
    return local("ddp", 2, 1, *argv).wait()


def by_torchrun(*argv):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return run_command(*torchrun, "-m", "recipes.ddp.train", *argv, OMP_NUM_THREADS="1")


def by_python(*argv):
    return run_command(sys.executable, "-m", "recipes.single.train", *argv)


PATHS = {"local": by_local, "torchrun": by_torchrun, "python": by_python}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "case"), [("local", "option"), *((path, "missing folder") for path in PATHS)])
def test_every_launch_path_says_it_once(tmp_path, path, case):
    """Ranks refuse before a process group exists ("option") and after ("missing folder").

    test_injection.py and test_sbatch.py do the same with scripts/launch.sh.
    """
    argv, words = REFUSED[case]
    result = PATHS[path](*words_for(tmp_path, "a", *argv))
    if path == "torchrun":  # it has no other status for a failure than 1, and adds its own report
        assert (result.status, len(result.errors)) == (1, 1), result.stderr
        assert words in result.errors[0]
    else:
        assert words in result.refusal


@pytest.mark.parametrize("recipe", ["single", "dataparallel"])
def test_two_processes_of_a_recipe_of_one_are_refused(tmp_path, recipe):
    """Each would train by itself, with its own run."""
    outcome = Ranks(recipe, words_for(tmp_path, "a"), 2, tmp_path / "out").wait()
    said = "error: 2 processes were started, and this recipe is one; start one, without torchrun"
    assert outcome.refusal.startswith(said)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("recipe", "env", "words"),
    [
        ("dpd", {}, "there is no recipe 'dpd'; make list shows all"),
        ("../single", {}, "there is no recipe '../single'"),
        ("common", {}, "there is no recipe 'common'"),
        ("ddp", {"PYTHON": "/no/such/python"}, "there is no /no/such/python; run make setup"),
        ("single", {"NNODES": "2"}, "single is one process; NODES=1 NPROC_PER_NODE=1, or RECIPE=ddp"),
        ("dataparallel", {"NPROC_PER_NODE": "2"}, "dataparallel is one process; NODES=1 NPROC_PER_NODE=1, or "),
        ("ddp", {"NNODES": "0"}, "NNODES expects a whole number of at least 1, got '0'"),
        ("ddp", {"FABRIC": "tcp", "NPROC_PER_NODE": "0"}, "NPROC_PER_NODE expects a whole number of at least 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) and " " not in value else "",
)
def test_launch_sh_refuses(recipe, env, words):
    assert words in run_command("scripts/launch.sh", recipe, **{**NODE, "PYTHON": sys.executable, **env}).refusal


def is_set_up():
    listed = ROOT / "requirements" / "run.txt"
    installed = ROOT / ".venv" / ".installed" / "run.txt"
    return installed.exists() and installed.read_bytes() == listed.read_bytes()


def test_make_run_refuses():
    """What the recipe refuses; test_make.py has what make itself does."""
    require("setup", is_set_up(), ".venv is not what requirements/dev.txt lists", "run `scripts/dev/setup.sh dev`")
    result = run_command("make", "run", "RECIPE=single", "ARGS=--epoch 3")
    assert (result.status, len(result.errors)) == (2, 1), result.stderr
    assert "unknown option --epoch" in result.errors[0]


# ---- addresses and ports


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1", "node 1 waited 2 s for node 0 at 127.0.0.1:"),
        ("no-such-host.invalid", f"{socket.gethostname()} cannot resolve no-such-host.invalid within 2 s ("),
    ],
)
def test_an_unreachable_head_node(address, words):
    env = {**NODE, "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": address, "RDZV_TIMEOUT_S": "2"}
    job = Command("scripts/launch.sh", "ddp", **env, MASTER_PORT=str(free_port()), PYTHON=sys.executable)
    result = job.wait(timeout_s=30)
    assert result.status == 1, "no refusal: the next start may find it"
    (error,) = result.errors
    assert words in error
    assert result.stderr.splitlines() == [error]


@pytest.mark.slow
def test_a_node_that_never_comes():
    env = {**NODE, "NNODES": "2", "MASTER_PORT": str(free_port()), "RDZV_TIMEOUT_S": "2", "PYTHON": sys.executable}
    result = Command("scripts/launch.sh", "ddp", **env).wait(timeout_s=60)
    assert result.status == 1, result.stderr
    (error,) = result.errors
    assert f"node 0 waited 2 s for node 1 of 2 at 127.0.0.1:{env['MASTER_PORT']}; is it up" in error


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        yield str(holder.getsockname()[1])


@pytest.mark.parametrize("recipe", ["ddp", *slow("spawn")])
def test_a_taken_port(taken_port, recipe):
    result = run_command("scripts/launch.sh", recipe, **NODE, MASTER_PORT=taken_port, PYTHON=sys.executable)
    assert result.refusal == f"error: MASTER_PORT {taken_port} is taken; choose another one"
    assert result.stdout == ""


@pytest.mark.parametrize("recipe", ["ddp", "spawn", "apex", "pipeline", "scratch", "probe"])
def test_a_taken_port_without_our_launcher(taken_port, tmp_path, recipe):
    """As if srun or mpirun started the ranks directly."""
    job = Ranks(recipe, ["--timeout-s", "3"], 2, tmp_path / "out", MASTER_PORT=taken_port)
    job.processes[0].join(30)
    assert job.processes[0].exitcode == 2, job.output(0)
    (error,) = [line for line in job.output(0).splitlines() if line.startswith("error: ")]
    assert f"rank 0 cannot meet the others at 127.0.0.1:{taken_port} (" in error
    assert "address already in use" in error
    assert "Traceback" not in job.output(0)
    job.kill()  # while a stranger holds the port, torch lets the others wait for ever; srun and mpirun end them


def test_a_lost_race_for_the_port_is_no_refusal(taken_port, tmp_path):
    """The launcher chose the port: status 75 makes it choose another."""
    env = {"MASTER_PORT": taken_port, "PORT_IS_CHOSEN": "1"}
    job = start_run("ddp", tmp_path, 2, "--timeout-s", "3", **env)
    job.processes[0].join(30)
    assert job.processes[0].exitcode == 75, job.output(0)
    errors = [line for line in job.output(0).splitlines() if line.startswith("error: ")]
    assert errors == [f"error: MASTER_PORT {taken_port} has been taken since the launcher chose it; try again"]
    job.kill()


@pytest.mark.slow
def test_an_unreachable_head_without_our_launcher(tmp_path):
    job = start_run("ddp", tmp_path, 2, "--timeout-s", "3", nodes=2)
    job.send(signal.SIGKILL, [0])
    outcome = job.wait(timeout_s=40)
    assert outcome.statuses[1] == 1, outcome.text
    (error,) = outcome.errors
    assert "rank 1 cannot meet the others at 127.0.0.1:" in error
    assert "Traceback" not in outcome.outputs[1]


@pytest.mark.slow
def test_launching_leaves_no_file_behind(tmp_path):
    """Agents keep logs in a temporary folder, and remove it when they end."""
    node = {**NODE, "MASTER_PORT": str(free_port()), "PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    assert "unknown option --epoch" in run_command("scripts/launch.sh", "ddp", "--epoch", "3", **node).refusal
    assert list(tmp_path.iterdir()) == []
