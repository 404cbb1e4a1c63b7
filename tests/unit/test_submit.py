"""What slurm/submit.py decides before anything is queued: names, limits, refusals, and the sbatch file itself."""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from recipes.common.errors import UserError
from scripts.launch.fabric import fabric_environment
from slurm import submit, training
from slurm.sweep import report
from slurm.training import Run
from tests.support import ROOT, write_program


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A PATH with stand-ins for Slurm's commands; commands(name, script) writes one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def write(name, script="exit 0"):
        write_program(folder / name, script)

    return write


@pytest.fixture
def sbatch_file(commands):
    """Return a function that submits a job to a stand-in and returns what sbatch was given."""
    for name in ("srun", "squeue", "scontrol", "sinfo"):
        commands(name)
    commands("sbatch", 'case $* in *--test-only*) ;; *) echo "Submitted batch job 7" ;; esac')

    def submit_one(folder, *words):
        args = submit.parse_args(words)
        submit.check_job(args)
        [job] = submit.submit_runs(args, folder, [Run("ddp", [], folder)])
        assert job.job_id == "7"
        return (folder / "slurm/7_submission.sh").read_text()

    return submit_one


def test_the_sbatch_file(tmp_path, sbatch_file):
    words = "ddp --nodes 2 --gpus-per-node 4 --cpus-per-task 8 --mem 64GB --time 2:00:00 --partition gpu"
    folder = tmp_path / "mine/slurm"
    text = sbatch_file(folder.parent, *words.split(), "--constraint", "a100", "--account", "us", "--qos", "hi")
    assert [line for line in text.splitlines() if line.startswith("#SBATCH")] == [
        "#SBATCH --account=us",
        "#SBATCH --constraint=a100",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --job-name=mine",
        "#SBATCH --mem=64GB",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={folder}/%j_0_log.out",
        "#SBATCH --partition=gpu",
        "#SBATCH --qos=hi",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --time=120",
        "#SBATCH --wckey=submitit",
    ]
    python = shlex.quote(sys.executable)
    begin = f"begin_submitted {python} '' 10 {folder} {folder.parent}"
    assert f"source {shlex.quote(str(ROOT))}/slurm/job.sh\n{begin}\n" in text
    assert text.endswith("end_submitted $?")
    srun = f"srun --unbuffered --output {folder}/%j_%t_log.out --wait=0 --kill-on-bad-exit=1 --cpus-per-task=8"
    rank = f"{python} -m scripts.launch.hold_signals -u -m submitit.core._submit {folder}"
    assert f"{srun} {rank}" in text.splitlines()


def test_what_is_not_given_is_left_to_the_cluster(tmp_path, sbatch_file):
    text = sbatch_file(tmp_path / "mine", "ddp", "--gpus-per-node", "0", "--nproc-per-node", "2")
    flags = [line.split()[1].split("=")[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    given = {"--mem", "--gpus-per-node", "--cpus-per-task", "--partition", "--account", "--qos", "--time"}
    assert not given & set(flags)
    assert "#SBATCH --ntasks-per-node=2\n" in text
    text = sbatch_file(tmp_path / "one", "dataparallel", "--gpus-per-node", "4")
    assert "#SBATCH --ntasks-per-node=1\n" in text, "one process, all its GPUs"


LACKS_NODES = "allocation failure: Requested node configuration is not available"


@pytest.mark.parametrize(
    ("why", "sinfo", "is_refused"),
    [
        (LACKS_NODES, "printf 'n2 gpu 1-infinite\\nn3 gpu 2\\nn2 gpu 1-infinite\\n'", False),
        (LACKS_NODES, "echo n2 gpu 1", True),
        (LACKS_NODES, "exit 0", True),
        (LACKS_NODES, "exit 1", True),
        ("invalid partition specified: gpu", "echo n2 gpu 1-infinite", True),
    ],
)
def test_a_job_that_lacks_nodes_which_are_down_is_queued(
    tmp_path, sbatch_file, commands, capsys, why, sinfo, is_refused
):
    """sbatch --test-only leaves out nodes that are down or drained; sbatch itself lets a job wait for them."""
    test_only = f"*--test-only*) echo 'sbatch: error: {why}' >&2; exit 1"
    commands("sbatch", f'case $* in {test_only} ;; *) echo "Submitted batch job 7" ;; esac')
    commands("sinfo", f'echo "$*" >{tmp_path}/asked; {sinfo}')
    words = ("ddp", "--nodes", "2", "--partition", "gpu")
    if is_refused:
        with pytest.raises(UserError, match=f"^Slurm refuses the job: {why}; see sinfo$"):
            sbatch_file(tmp_path / "mine", *words)
        return
    assert "#SBATCH --nodes=2\n" in sbatch_file(tmp_path / "mine", *words)
    said = f"warning: the job may have to wait: {why}; 2 nodes are down or drained, see sinfo --list-reasons\n"
    assert capsys.readouterr().err == said
    asked = (tmp_path / "asked").read_text()
    assert asked == "--noheader --Node --format=%N %P %s --states=down,drain,fail --partition=gpu\n"


def test_without_a_partition_only_nodes_of_the_default_one_count(commands):
    commands("sinfo", "printf 'n1 debug 1-4\\nn2 gpu* 1-4\\nn3 gpu* 1-1\\n'")
    assert submit.unavailable_nodes({"nodes": 2}) == {"n2"}


def test_gpus_may_have_a_type_and_a_short_limit_leaves_a_quarter_for_the_checkpoint(tmp_path, sbatch_file):
    text = sbatch_file(tmp_path / "mine", "ddp", "--gpus-per-node", "h100:8", "--time", "1")
    for flag in ("gpus-per-node=h100:8", "ntasks-per-node=8", "signal=USR1@15"):
        assert f"#SBATCH --{flag}\n" in text


def test_times():
    texts = ("90", "90:30", "2:00:00", "1-12", "1-12:30", "1-0:0:1")
    assert [submit.minutes(text) for text in texts] == [90, 91, 120, 2160, 2190, 1441]
    for text in ("", "0", "0:00:00", "x", "1:2:3:4", "-5", "1h", "²"):
        with pytest.raises(argparse.ArgumentTypeError, match="expects minutes, 2:00:00 or 1-12:00:00"):
            submit.minutes(text)


def test_the_names_of_a_sweeps_runs():
    for points, names in (
        ([{}], ["mine"]),
        ([{"lr": "0.1", "seed": "1"}, {"lr": "0.2", "seed": "1"}], ["mine-lr0.1-seed1", "mine-lr0.2-seed1"]),
        ([{"data-dir": "/data/a"}, {"data-dir": "/data/b"}], ["mine-0", "mine-1"]),
        ([{"name": "a" * 100}], ["mine-0"]),
        ([{"a": "1", "b": "2-b3"}, {"a": "1-b2", "b": "3"}], ["mine-0", "mine-1"]),
    ):
        assert submit.run_names("mine", points) == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "horovod",
            "horovod has a launch file of its own: sbatch slurm/horovod.sbatch; on this machine: make run ",
        ),
        ("spawn", "spawn starts its ranks by itself"),
        (
            "ddp --local --nodes 2 --gpus-per-node 1 --sweep lr=1,2",
            "GPUS=1 on 2 nodes of this machine: 0 of 2 GPUs are there; lower GPUS, or leave it out",
        ),
        ("single --nodes 2", "single is one process; NODES=1 NPROC_PER_NODE=1, or RECIPE=ddp"),
        ("dataparallel --nproc-per-node 2", "dataparallel is one process"),
        ("ddp --nodes 0", "NODES expects a whole number of at least 1, got '0'"),
        ("ddp --time soon", "TIME expects minutes, 2:00:00 or 1-12:00:00 (a day and a half), got 'soon'"),
        ("ddp --gpus-per-node x", "GPUS expects a whole number, or a type and a number (h100:8), got 'x'"),
        ("ddp --cpus-per-task 0", "CPUS expects a whole number of at least 1, got '0'"),
        ("ddp --name ../x", "NAME expects at most 100 letters"),
        ("ddp --partitoin x", "unknown option --partitoin; did you mean '--partition'?"),
        ("ddp --epochs 3", "unknown option --epochs; those of a recipe come after --; --help lists all"),
        ("ddp --local --no-follow", "--local is followed to its end; drop --no-follow"),
        ("ddp", "there is no sbatch in PATH; use --local (make submit: LOCAL=1), or run this on the cluster's"),
        ("ddp --local -- --ephocs 3", "unknown option --ephocs; did you mean '--epochs'?"),
        ("ddp --local -- --resume auto", "--resume auto needs the run's name: NAME=... (--name)"),
        ("ddp --local --sweep lr", "SWEEP expects options such as lr=0.1,0.2, got 'lr'"),
        ("ddp --local --sweep lr=fast", "--lr: expects a number above 0, got 'fast'"),
        ("fsdp --local --nodes 2 --nproc-per-node 2 -- --replicas 3", "--replicas 3 does not divide 4 processes"),
    ],
)
def test_refusals_are_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_CLUSTER_DIR", str(tmp_path))  # there is no cluster of make slurm-up
    assert submit.main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", ""), ("--nproc-per-node 2", "--nproc-per-node 2"), ("--gpus-per-node 4", "--nproc-per-node 4")],
)
def test_the_local_launcher_decides_on_processes_that_are_not_given(tmp_path, monkeypatch, words, expected):
    """By default `make run` starts a process for each GPU of this machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(os, "execv", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        submit.main(["ddp", "--local", *words.split(), "--name", "mine", "--", "--runs-dir", str(tmp_path)])
    command = os.execv.call_args.args[1]
    how = "--how-to-resume=to resume, the same command with NAME=mine ARGS='... --resume auto'"
    assert command[3 : command.index("--")] == ["ddp", "--nodes", "1", *expected.split(), how]


def test_a_slurm_that_does_not_answer_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(submit, "check_job", lambda _: None)
    monkeypatch.setattr(submit, "plan_runs", lambda _: (tmp_path / "mine", []))
    monkeypatch.setattr(submit, "submit_to_slurm", Mock(side_effect=subprocess.TimeoutExpired(["sbatch"], 60)))
    assert submit.main(["ddp"]) == 1
    assert capsys.readouterr().err == "error: Slurm did not answer sbatch within 60 s; see sinfo\n"


def test_right_after_make_slurm_up_it_says_what_to_source(tmp_path, monkeypatch, capsys, commands):
    """Debian's sbatch may be in PATH without a configuration, or there may be no sbatch."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "activate").touch()
    monkeypatch.setenv("SLURM_CLUSTER_DIR", str(state))
    for command in ("sbatch", "srun", "squeue", "scontrol", "sinfo"):
        commands(command, "echo 'error: Could not establish a configuration source' >&2; exit 1")

    def refusal(path):
        monkeypatch.setenv("PATH", path)
        assert submit.main(["ddp", "--", "--runs-dir", str(tmp_path)]) == 2
        return capsys.readouterr().err

    stand_ins, none = os.environ["PATH"], "error: no Slurm is configured on this machine"
    fix = f"; for the cluster of make slurm-up: source {state}/activate\n"
    assert refusal(stand_ins) == none + fix
    assert not list(tmp_path.glob("ddp-*")), "a refused job leaves no folder"
    assert refusal(str(tmp_path / "empty")) == f"error: there is no sbatch in PATH{fix}"
    assert refusal(f"{state}/bin").startswith("error: there is no sbatch in PATH; use --local")
    (state / "activate").unlink()
    assert refusal(stand_ins) == f"{none}; submit from a login node, or use --local (make: LOCAL=1)\n"


def test_a_name_that_is_taken_is_refused_before_the_queue(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/metrics.jsonl").touch()
    words = ["ddp", "--local", "--name", "mine", "--", "--runs-dir", str(tmp_path)]
    assert submit.main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: the run {tmp_path}/mine exists; add --resume auto")
    for more in (["--resume", "auto"], ["--overwrite"]):
        _, [run] = submit.plan_runs(submit.parse_args([*words, *more]))
        assert run.argv[-2:] == ["--name", "mine"]


def test_the_default_name_is_the_next_number(tmp_path):
    for number in (1, 2):
        folder, [run] = submit.plan_runs(submit.parse_args(["ddp", "--local", "--", "--runs-dir", str(tmp_path)]))
        assert (folder, run.folder, run.argv[-1]) == (tmp_path / f"ddp-00{number}", folder, folder.name)
        assert folder.is_dir()


def test_squeue_knows_what_is_gone_and_the_last_state_outlives_a_controller_that_does_not_answer(commands):
    commands("squeue", "echo '8_0|COMPLETED|None|1|'; echo '8_1|PENDING|Resources|0|'")
    states = submit.ask_slurm("8", {})
    assert states == {"8_0": ("COMPLETED", "None", 1), "8_1": ("PENDING", "Resources", 0)}
    commands("squeue", "echo '8_1|RUNNING|None|0|'")
    assert submit.ask_slurm("8", states) == {"8_0": ("GONE", "None", 0), "8_1": ("RUNNING", "None", 0)}
    error = "slurm_load_jobs error: Unable to contact slurm controller"
    commands("squeue", f"echo '{error}' >&2; exit 1")
    assert submit.ask_slurm("7", {"7": ("RUNNING", "None", 0)}) == {"7": ("RUNNING", error, 0)}


def watched(folder, **seen):
    paths = SimpleNamespace(stdout=str(folder / "7_0_log.out"))
    job = submit.Watched(Run("ddp", [], folder), SimpleNamespace(job_id="7", paths=paths))
    vars(job).update(seen)
    return job


@pytest.mark.parametrize(("left", "status"), [("2", 2), ("137", 1), ("143 TERM", 1), ("1", 1), ("", 1)])
def test_a_refusal_is_2_and_every_other_failure_1(tmp_path, monkeypatch, left, status):
    (tmp_path / "7_0_log.out").write_text("")
    if left:
        (tmp_path / "7_status").write_text(left)
    assert watched(tmp_path, state="FAILED").end() == status


def test_a_status_for_which_the_disk_had_no_room_is_a_failure_with_its_causes(tmp_path, capsys):
    (tmp_path / "7_0_log.out").write_text("")
    (tmp_path / "7_1_log.out").write_text("error: cannot write x: No space left on device\n")
    (tmp_path / "7_status").write_text("")
    assert watched(tmp_path, state="FAILED").end() == 1
    assert "7_1_log.out: error: cannot write x: No space left on device\n" in capsys.readouterr().err


def test_an_error_that_several_ranks_have_printed_is_said_once(tmp_path, capsys):
    for rank, text in enumerate(["error: no gradient", "error: no gradient", "error: no room", "error: no room"]):
        (tmp_path / f"7_{rank}_log.out").write_text(f"{text}\n")
    watched(tmp_path, state="FAILED").end()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:-1] == ["7_2_log.out: error: no room"], "the watch has shown what rank 0 printed"


def test_slurms_word_is_enough_where_the_status_is_not_seen_yet(tmp_path):
    """On the login node, an NFS client may not see new files; the batch script ends well only if all ranks did."""
    assert watched(tmp_path, state="COMPLETED").end() == 0
    assert watched(tmp_path, state="GONE").end() == 1


def test_of_thousands_of_ranks_errors_a_few_are_printed_causes_first(tmp_path, capsys):
    for rank in range(100):
        (tmp_path / f"7_{rank}_log.out").write_text(f"error: rank {rank} lost another rank: reset\n")
    (tmp_path / "7_77_log.out").write_text("error: rank 77 was killed by SIGKILL\n")
    watched(tmp_path, state="FAILED").end()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 22
    assert lines[0] == "7_77_log.out: error: rank 77 was killed by SIGKILL"
    assert lines[20] == "... and 79 more ranks with errors"
    assert lines[21].startswith("error: job 7 ended before the run was complete (FAILED)")


def test_slurm_is_asked_seldom_and_each_second_once_rank_0_has_ended(tmp_path, monkeypatch):
    asked, now = [], [0.0]
    monkeypatch.setattr(submit.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(submit.time, "sleep", lambda s: now.__setitem__(0, round(now[0] + s, 1)))

    def answer(number, known):
        asked.append(now[0])
        if now[0] > 80:
            (tmp_path / "7_status").write_text("0")
        return {"7": ("COMPLETED" if len(asked) > 34 else "RUNNING", "None", 0)}

    monkeypatch.setattr(submit, "ask_slurm", answer)
    submit.watch([watched(tmp_path)], "7")
    gaps = [round(later - sooner, 1) for sooner, later in itertools.pairwise(asked)]
    assert set(gaps[:20]) == {2.1}
    assert 10.2 in gaps
    assert gaps[-1] == 1.2


def test_a_line_under_way_is_printed_when_it_is_whole(tmp_path, capsys):
    job, log = watched(tmp_path, state="RUNNING", shown="RUNNING"), tmp_path / "7_0_log.out"
    for text, state, printed in (
        ("submitit INFO x\none\ntw", "RUNNING", "one\n"),
        ("o\nthr", "RUNNING", "two\n"),
        ("", "COMPLETING", ""),  # it would come after the result
        ("ee", "COMPLETED", "three\n"),
    ):
        with open(log, "a") as file:
            file.write(text)
        assert job.look({"7": (state, "None", 0)}) is (state == "COMPLETED")
        assert capsys.readouterr().out == printed


def test_the_last_lines_are_looked_for_once_the_job_has_ended(tmp_path, monkeypatch, capsys):
    """Until then, the login node's NFS client may remember that there is no such file."""
    monkeypatch.setattr(submit, "refresh_names", lambda folder: (folder / "7_0_log.out").write_text("one\n"))
    job = watched(tmp_path, shown="RUNNING")
    for state, printed in (("RUNNING", ""), ("COMPLETED", "one\n")):
        job.look({"7": (state, "None", 0)})
        assert capsys.readouterr().out == printed


def test_a_long_silence_ends_and_points_of_a_sweep_share_no_output(tmp_path, capsys):
    running = {"7": ("RUNNING", "None", 0)}
    job = watched(tmp_path, shown="RUNNING", run=Run("ddp", [], tmp_path, {"lr": "0.1"}))
    job.log.write_text("step 5\n")
    job.last_output -= submit.SILENCE_S + 1
    for _ in range(2):
        job.look(running)
    assert capsys.readouterr().out == "job 7: RUNNING\n"


def test_the_cause_is_that_of_the_last_start():
    start = "submitit INFO (x) - Starting with JobEnvironment(job_id=1)\n"
    assert submit.cause_in(f"{start}error: old\n{start}all well\n") == ""
    log = f"{start}Traceback (most recent call last):\n  File x\ntorch.cuda.OutOfMemoryError: 3 GB\nmore\n"
    assert submit.cause_in(log) == "torch.cuda.OutOfMemoryError: 3 GB"
    assert submit.cause_in(f"{log}error: rank 1 lost another rank\n") == "error: rank 1 lost another rank"


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        ("--gpus-per-node 2", "", ["--device", "cuda"]),
        ("--gpus-per-node 2", "--device cpu", ["--device", "cpu"]),
        ("--gpus-per-node 2 --sweep lr=0.1,0.2", "", ["--device", "cuda"]),
        ("--gpus-per-node 0", "", []),
        ("", "", []),
    ],
)
def test_a_job_with_gpus_trains_on_gpus(tmp_path, words, given, expected):
    own = ["ddp", "--local", "--name", "mine", *words.split()]
    args = submit.parse_args([*own, "--", "--runs-dir", str(tmp_path), *given.split()])
    for run in submit.plan_runs(args)[1]:
        at = [i for i, word in enumerate(run.argv) if word == "--device"]
        assert [word for i in at for word in run.argv[i : i + 2]] == expected


class TestARank:
    @pytest.fixture
    def rank(self, tmp_path, monkeypatch):
        """Return a function that runs rank 0, whose process ends with `ended`; it returns what that leaves."""
        monkeypatch.setenv("SLURM_PROCID", "0")
        monkeypatch.setenv("STATUS_FILE", str(tmp_path / "7_status"))
        monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
        self.words, self.env = [], {}

        def run(job, ended=0, received=()):
            def end(command, env, process_group):
                self.words, self.env = command[4:], env
                return ended, list(received)

            monkeypatch.setattr(training, "run", end)
            path = tmp_path / "7_status"
            path.unlink(missing_ok=True)
            with pytest.raises(SystemExit) if ended else contextlib.nullcontext() as caught:
                job()
            return caught.value.code if ended else 0, path.read_text() if path.exists() else None

        return run

    def test_rank_0_leaves_how_it_has_ended(self, rank, monkeypatch, tmp_path):
        job = Run("ddp", [], tmp_path)
        assert rank(job) == (0, "0 \n")
        assert rank(job, received=[signal.SIGUSR1]) == (0, "0 USR1\n")
        assert rank(job, received=[signal.SIGTERM]) == (0, "0 TERM\n")
        assert rank(job, 2) == (2, "2 \n")
        monkeypatch.setenv("SLURM_PROCID", "1")
        assert rank(job) == (0, None)

    def test_on_a_full_disk_rank_0_says_by_its_own_status_how_it_has_ended(self, rank, monkeypatch, tmp_path):
        monkeypatch.setattr(training, "replace_text", Mock(side_effect=OSError("No space left on device")))
        job = Run("ddp", [], tmp_path)
        assert (rank(job, 2), rank(job)) == ((2, None), (0, None))
        with pytest.raises(SystemExit) as caught:
            rank(job, received=[signal.SIGUSR1])
        assert caught.value.code == 1, "the run is not complete"

    def test_a_start_after_the_first_goes_on_with_the_own_record(self, rank, monkeypatch, tmp_path):
        job, first = Run("ddp", ["--name", "mine"], tmp_path), ["recipes.ddp.train", "--name", "mine"]
        for resumes, more in (("", []), ("1", ["--resume", "auto"])):
            monkeypatch.setenv("RESUMES", resumes)
            rank(job)
            assert self.words == ["scripts.launch.hold_signals", *first, *more]

    def test_the_probe_keeps_no_record_to_resume(self, rank, monkeypatch, tmp_path):
        monkeypatch.setenv("RESUMES", "1")
        rank(Run("probe", [], tmp_path))
        assert self.words[2:] == []

    def test_a_script_in_its_place(self, rank, monkeypatch, tmp_path):
        job = Run("ddp", ["--lr", "1"], tmp_path, script={"SCRIPT": "/train.py", "RESUME": "none"})
        assert rank(job, 137) == (137, "137 \n")
        assert (self.words, self.env["RESUME"]) == (["scripts.launch.script", "/train.py", "--lr", "1"], "none")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert rank(job) == (0, "0 \n")
        assert self.env["RESUME"] == "auto"

    def test_a_script_that_a_signal_has_ended_has_not_failed(self, monkeypatch, tmp_path):
        """submitit's process receives the signal; the rank's environment names its rank and its network."""
        (tmp_path / "train.py").write_text(
            'import os, signal; seen = open(os.environ["RUN_DIR"] + "/seen", "w")\n'
            "names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GLOO_SOCKET_IFNAME RESUME'.split()\n"
            "is_alone = os.getpgrp() == os.getpid()  # else some Slurms would signal it, too\n"
            "print(*map(os.environ.get, names), is_alone, file=seen, flush=True)\n"
            "os.kill(os.getppid(), signal.SIGUSR1); signal.pause()"
        )
        script = {"SCRIPT": str(tmp_path / "train.py"), "RUN_DIR": str(tmp_path), "RESUME": "none"}
        slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}
        status_file = tmp_path / "7_status"
        for name, value in (slurm | {"STATUS_FILE": str(status_file), "MASTER_ADDR": "127.0.0.1"}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(ROOT)
        job = multiprocessing.get_context("spawn").Process(target=Run("ddp", [], tmp_path, script=script))
        job.start()
        job.join(60)
        assert (job.exitcode, status_file.read_text()) == (0, "0 USR1\n")
        assert (tmp_path / "seen").read_text() == "0 0 1 1 lo none True\n"


def test_fabric_sh_is_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("FABRIC", "carrier-pigeon")
    with pytest.raises(UserError, match="carrier-pigeon"):
        fabric_environment(FABRIC="tcp")


def test_the_table_of_a_sweep_has_what_the_task_measures(tmp_path, capsys):
    runs = [Run("ddp", [], tmp_path / name, {"--lr": name}) for name in ("0.1", "0.2")]
    runs[0].folder.mkdir()
    result = {"world_size": 2, "headline": "test_bits_per_byte", "test_bits_per_byte": 2.5, "samples_per_s": 40.0}
    (runs[0].folder / "result.json").write_text(json.dumps(result))
    report(runs, [0, 1])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", "--lr", "world_size", "test_bits_per_byte", "samples_per_s"]
    assert lines[2:] == [["0.1", "0.1", "2", "2.5000", "40"], ["0.2", "0.2", "-", "-", "-"]]
    (runs[0].folder / "result.json").write_text(json.dumps({**result, "test_bits_per_byte": None}))
    report(runs, [0, 1])
    row = capsys.readouterr().out.splitlines()[2]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["0.1", "0.1", "2", "-", "40"], "it was not finite"
    report(runs, [1, 1])
    assert "| test_accuracy |" in capsys.readouterr().out, "no run is complete: the default task's"


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ('{"val_loss": 0.5, "model": "net", "steps": 3}', {"val_loss": "0.5000", "steps": "3"}),
        ('{"val_loss": 0.00002, "images_per_s": 14650.3}', {"val_loss": "2.000e-05", "images_per_s": "14,650"}),
        *((text, {}) for text in ("[0.5]", "{0.5", None)),
    ],
)
def test_the_table_of_a_scripts_sweep_has_the_numbers_of_its_result(tmp_path, capsys, text, columns):
    assert Run.__module__ == "slurm.training", "a job unpickles by name"
    run = Run("ddp", [], tmp_path, {"lr": "0.1"}, {"SCRIPT": "train.py"})
    if text:
        (tmp_path / "result.json").write_text(text)
    report([run], [0])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["run", "lr", *columns]
    assert rows[2] == [tmp_path.name, "0.1", *columns.values()]


def test_a_local_sweep_whose_launcher_was_killed_has_failed(tmp_path, monkeypatch):
    killed = iter([-9, 0])
    monkeypatch.setattr(submit, "run_in_foreground", lambda _: next(killed))
    args = submit.parse_args(["ddp", "--local", "--sweep", "lr=0.1,0.2"])
    runs = [Run("ddp", [], tmp_path, point) for point in submit.grid_points(args.sweep)]
    assert submit.train_here(args, tmp_path, runs) == 137


def test_a_sweep_has_the_status_of_its_worst_run(tmp_path, monkeypatch, capsys):
    statuses = iter([0, 1, 0])
    monkeypatch.setattr(submit, "submit_runs", lambda *_: [SimpleNamespace(job_id=f"7_{i}") for i in range(3)])
    ended = SimpleNamespace(log=tmp_path / "log", end=lambda: next(statuses))
    monkeypatch.setattr(submit, "Watched", lambda run, job: ended)
    for name in ("watch", "report"):
        monkeypatch.setattr(submit, name, lambda *_: None)
    args = submit.parse_args(["ddp", "--sweep", "lr=0.1,0.2,0.3"])
    runs = [Run("ddp", [], tmp_path, point) for point in submit.grid_points(args.sweep)]
    assert submit.submit_to_slurm(args, tmp_path, runs) == 1
    monkeypatch.setattr(submit, "watch", Mock(side_effect=KeyboardInterrupt))
    assert submit.submit_to_slurm(args, tmp_path, runs) == 130
    assert "\njob 7 continues; to follow it: tail -n +1 -F " in capsys.readouterr().out


def test_ctrl_c_while_sbatch_runs_says_that_a_job_may_be_queued(tmp_path, monkeypatch, capsys):
    """The job may be queued before sbatch has said so: it would run unseen."""
    monkeypatch.setattr(submit, "submit_runs", Mock(side_effect=KeyboardInterrupt))
    assert submit.submit_to_slurm(submit.parse_args(["ddp"]), tmp_path, [Run("ddp", [], tmp_path, {})]) == 130
    assert capsys.readouterr().out == "\na job may have been queued: squeue --me lists yours\n"


def test_the_last_lines_of_a_start_come_before_its_requeue(tmp_path, capsys):
    watched(tmp_path, restarts=9).look({"7": ("RUNNING", "None", 10)})
    assert "job 7: requeued, start 11" in capsys.readouterr().out
    job = watched(tmp_path)
    job.log.write_text("step 5\n")
    job.look({"7": ("RUNNING", "None", 0)})
    job.look({"7": ("COMPLETING", "None", 1)})
    assert "requeued" not in capsys.readouterr().out, "its ranks still write"
    with job.log.open("a") as log:
        log.write("stopped by SIGTERM: wrote step 6\n")
    job.look({"7": ("PENDING", "BeginTime", 1)})
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["stopped by SIGTERM: wrote step 6", "job 7: requeued, start 2"]
    job.look({"7": ("RUNNING", "None", 1)})
    assert "requeued" not in capsys.readouterr().out, "said once"
