"""What slurm/job.sh decides and says, with stand-ins for Slurm: options, the port, what becomes of a status."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT, write_program

JOB = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_ON_NODE": "8"}
SCONTROL = """#!/bin/sh
echo "$*" >>"$(dirname "$0")/scontrol.txt"
case $* in
"show hostnames n[3-4]") printf 'n3\\nn4\\n' ;;
"show hostnames n[8-9]") printf 'n8\\nn9\\n' ;;
"show hostnames "*) printf 'n1\\nn2\\n' ;;
"show job "*) echo "JobId=7 JobState=RUNNING PreemptTime=None" ;;
requeue*) exit 1 ;;
esac
"""


def bash(folder, *words, **env):
    """Run bash with the programs of a folder before all others, in the environment of a job."""
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable, **JOB, **env}
    return subprocess.run(["bash", *words], cwd=ROOT, env=own, capture_output=True, text=True, timeout=60)


def is_requeued(folder, job="7"):
    return f"requeue {job}" in (folder / "scontrol.txt").read_text().splitlines()


def preempt(folder, version="22.05.8", mode="REQUEUE", job="Requeue=1 BatchFlag=1"):
    """Let scontrol show the job as preempted, in a partition of this PreemptMode."""
    shown = f"PreemptTime=2026-11-22T10:00:00 {job} "
    config = f"MaxBatchRequeue = 5\\nPreemptType = preempt/partition_prio\\nSLURM_VERSION = {version}\\n"
    script = (folder / "scontrol").read_text().replace("PreemptTime=None", shown)
    script = script.replace("requeue*)", f"'show config') printf '{config}' ;;\nrequeue*)")
    script = script.replace("requeue*)", f"'show partition main') echo ' PreemptMode={mode}' ;;\nrequeue*)")
    (folder / "scontrol").write_text(script)


@pytest.fixture
def job(tmp_path):
    """Return a function that runs lines after begin_job with options, in the batch script's environment."""
    sleep = f'[ "$1" = 5 ] || exec {shutil.which("sleep")} "$1"'  # 5: between two questions to the controller
    for name, script in {"scontrol": SCONTROL, "srun": "", "sleep": sleep}.items():
        write_program(tmp_path / name, script)

    def run(*options, begin='begin_job ddp "$@"', then="", **env):
        lines = f"set -u; source slurm/job.sh; {begin}\n{then}"
        return bash(tmp_path, "-c", lines, "bash", *options, "--runs-dir", str(tmp_path / "runs"), **env)

    return run


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        ("4", [], ["--device", "cuda"]),
        ("4", ["--device", "cpu"], ["--device", "cuda", "--device", "cpu"]),  # the last one counts
        ("0", [], []),
        ("", [], []),
        ("4", ["--config", "cpu.yaml"], []),
        ("4", ["--config", "quoted.yaml"], []),
        ("4", ["--config", "auto.yaml"], ["--device", "cuda"]),
        ("4", ["--config=other.yaml"], ["--device", "cuda"]),
    ],
)
def test_a_job_with_gpus_trains_on_gpus(job, tmp_path, gpus, options, expected):
    (tmp_path / "cpu.yaml").write_text("epochs: 3\ndevice: cpu\n")
    (tmp_path / "quoted.yaml").write_text('{"device": "cpu"}\n')
    (tmp_path / "auto.yaml").write_text("device: auto\n")
    (tmp_path / "other.yaml").write_text("epochs: 3\n")
    options = [re.sub(r"(\w+\.yaml)", rf"{tmp_path}/\1", word) for word in options]
    done = job(*options, then='printf "%s\\n" "${options[@]}"', SLURM_GPUS_ON_NODE=gpus)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[1:]
    at = [i for i, word in enumerate(words) if word == "--device"]
    assert [word for i in at for word in words[i : i + 2]] == expected


@pytest.mark.parametrize(("recipe", "processes"), [("ddp", 4), ("dataparallel", 1), ("single", 1)])
def test_a_process_for_each_gpu_except_where_the_recipe_is_one_process(job, recipe, processes):
    done = job(begin=f'begin_job {recipe} "$@"', then='echo "$NPROC_PER_NODE"', SLURM_GPUS_ON_NODE="4")
    assert done.stdout.splitlines()[-1] == str(processes), done.stderr


def port_of(done):
    assert done.returncode == 0, done.stderr
    return int(re.search(r"head n1:(\d+),", done.stdout)[1])


STORE = """#!/bin/sh
if [ "$3" = "$HELD" ]; then echo "error: MASTER_PORT $3 has been taken" >&2; exit ${STATUS:-75}; fi
touch "$5"; exec sleep 60
"""


def test_a_job_whose_elastic_store_loses_its_port_is_requeued(job, tmp_path):
    """Otherwise its nodes would wait until RDZV_TIMEOUT_S, or meet another program at the port."""
    write_program(tmp_path / "python", STORE)
    own = {"PYTHON": str(tmp_path / "python")}
    earlier = 'touch "$logs/.store-$job" "$logs/.ended-$job"'
    show = '[[ ! -e $ENDED_FILE ]] && echo "$MASTER_PORT $RDZV_ENDPOINT"; echo "${srun[*]}"'
    done = job(then=f"{earlier}; make_elastic; {show}", **own)
    assert re.search(r"^(\d+) n1:\1$", done.stdout, re.MULTILINE), done.stderr
    assert done.stdout.endswith(" --no-kill --kill-on-bad-exit=0\n"), "others outlive a lost node"
    assert "\nsrun --wait=0 " in done.stdout, "a site's WaitTime is for other jobs"
    then = f"{earlier}; export HELD=$MASTER_PORT; make_elastic; echo more"
    done = job(then=then, **own)
    assert "job 7: another process took port 2" in done.stdout
    assert is_requeued(tmp_path)
    done = job(then=then, STATUS="3", **own)
    assert (done.returncode, "more" in done.stdout.splitlines()) == (1, False)
    fix = "its error is above, fix it and submit again"
    assert re.search(rf"error: job 7: its store did not start on n1:\d+ \(status 3\); {fix}\n$", done.stderr)


@pytest.mark.parametrize(
    ("said", "is_complete"),
    [
        ("", True),
        ("srun: error: n2: task 1: Killed", True),
        ("srun: error: n2: task 1: Exited with exit code 69", True),
        ("srun: error: n2: task 1: Exited with exit code 137", True),
        ("srun: error: n2: task 1: Exited with exit code 1", False),
    ],
)
def test_an_elastic_script_has_ended_where_one_node_says_so_and_none_has_failed(script, said, is_complete):
    then = f'RDZV_ENDPOINT=n1:7 ENDED_FILE=$logs/.ended-$job status=137; echo "{said}" >"$logs/.srun-$job"'
    done = script(f'{then}; touch "$ENDED_FILE"; is_complete && echo yes')
    assert done.stdout.endswith("yes\n") is is_complete, done.stderr
    done = script(f'{then}; rm -f "$ENDED_FILE"; is_complete && echo yes', RESUME="auto")
    assert not done.stdout.endswith("yes\n"), done.stderr


@pytest.mark.parametrize(("signal", "said"), [("", "ended with status 3"), ("USR1", "it was stopped before its")])
def test_a_file_of_a_script_does_not_end_an_elastic_job(script, signal, said):
    """result.json is the record of a recipe, not of a script."""
    ended = f"RDZV_ENDPOINT=n1:7 status=3 greatest=3 signal={signal}"
    done = script(f'{ended}; sleep 0.02; touch "$run_dir/result.json"; end_job')
    assert done.returncode != 0
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize("is_complete", [True, False])
def test_an_elastic_recipe_that_has_lost_a_node_has_ended_once_its_record_says_so(job, tmp_path, is_complete):
    write_program(tmp_path / "srun", "case $* in *n2*) exit 1 ;; esac")  # n2 does not answer
    ended = f'touch "$run_dir/config.json"; if {str(is_complete).lower()}; then touch "$run_dir/result.json"; fi'
    done = job(then=f"sleep 0.02; {ended}; RDZV_ENDPOINT=n1:7 status=137 greatest=137; end_job")
    assert (done.returncode == 0) is is_complete, done.stderr
    assert is_requeued(tmp_path) is not is_complete
    assert is_complete or "job 7: no answer from n2; it is requeued" in done.stdout


def test_a_port_that_is_taken_on_any_address_is_passed_over(job):
    own = {"SLURM_JOB_ID": str(os.getpid())}  # unlike other tests' ids, since ports are shared on this machine
    first = port_of(job(**own))
    addresses = ["127.0.0.1", "127.0.0.2", "0.0.0.0"]
    if Path("/proc/net/if_inet6").exists():
        addresses += ["::1", "::"]
    for address in addresses:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as holder:
            holder.bind((address, first))
            holder.listen()
            assert port_of(job(**own)) > first, address
    assert port_of(job(SLURM_RESTART_COUNT="1", **own)) > first


def test_the_port_follows_from_the_job(job):
    assert 20000 + 7 * 16 <= port_of(job()) < 20000 + 8 * 16


@pytest.mark.parametrize(
    ("status", "greatest", "restarts", "requeues", "said"),
    [
        (75, 75, "0", True, "job 7: another process took port 2"),
        (75, 75, "10", False, " 11 times (MAX_REQUEUES=10); to resume: sbatch ... --name ddp-job7 --resume auto"),
        (2, 75, "0", True, "job 7: another process took port 2"),  # the status of a node that reached that process
        (2, 2, "0", False, "error: job 7 ended with status 2"),
    ],
)
def test_a_lost_race_for_the_port_is_requeued(job, tmp_path, status, greatest, restarts, requeues, said):
    then = f'touch "$run_dir/config.json"; status={status} greatest={greatest}; end_job'
    done = job(then=then, SLURM_RESTART_COUNT=restarts)
    assert done.returncode != 0
    assert is_requeued(tmp_path) is requeues
    assert said in done.stdout + done.stderr
    assert "PORT_IS_CHOSEN=1" in job(then="env").stdout


@pytest.fixture
def script(job, tmp_path):
    """Return a function that runs lines after begin_job for the user's own script."""
    (tmp_path / "train.py").touch()

    def run(then, **env):
        own = {"SCRIPT": str(tmp_path / "train.py"), "RUNS_DIR": str(tmp_path / "runs"), "NAME": "mine", **env}
        return job("--lr", "1", then=then, SLURM_GPUS_ON_NODE="4", **own)

    return run


@pytest.fixture
def submitted(job, tmp_path):
    """Return a function that runs end_submitted after rank 0 has left its own status and srun has ended."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "runs/mine").mkdir(parents=True)

    def run(left, status, then="", script="", max_requeues=10, others=(), **env):
        own = [sys.executable, script, str(max_requeues), f"{tmp_path}/logs", *others, f"{tmp_path}/runs/mine"]
        leave = f'echo "{left}" >"$STATUS_FILE"; ' if left else ""
        return job(
            begin=f"begin_submitted {shlex.join(own)}",
            then=f"sleep 0.02; {then or ':'}; {leave}end_submitted {status}",
            SLURM_JOB_PARTITION="main",
            **env,
        )

    return run


RECORD = 'touch "$run_dir/config.json"'
SIGNALLED = """run_step bash -c 'touch "$STOPPED_FILE"'"""
"""A step whose ranks got a signal, but not their batch script; its status is 0."""
TOLD = "error: job 7: its ranks were asked to stop before their end"


@pytest.mark.parametrize(
    ("then", "left", "status", "ends_with", "said"),
    [
        (f'{RECORD} "$run_dir/result.json"', "0", 0, 0, ""),
        (f'{RECORD} "$run_dir/result.json"', "0 USR1", 0, 0, ""),  # the signal came as the run ended
        (f'{RECORD} "$run_dir/result.json"', "0", 9, 9, ""),  # another rank's status
        (f'{RECORD}; touch -d 2020-01-01 "$run_dir/result.json"', "0 USR1", 0, "requeue", "it was stopped before"),
        (RECORD, "0 TERM", 0, 1, f"{TOLD}; to resume: make submit "),
        (RECORD, "2", 137, 2, ""),
        (RECORD, "2 USR1", 138, 2, ""),  # its checkpoint could not be written
        (RECORD, "75", 143, "requeue", "another process took port"),
        (RECORD, "", 137, 137, ""),  # rank 0 was killed
        ("", "0", 0, 0, ""),  # the probe keeps no record
    ],
)
def test_a_submitted_job_is_requeued_or_ends_as_rank_0(submitted, tmp_path, then, left, status, ends_with, said):
    done = submitted(left, status, then)
    assert is_requeued(tmp_path) is (ends_with == "requeue"), done.stdout + done.stderr
    assert is_requeued(tmp_path) or done.returncode == ends_with
    assert said in done.stdout + done.stderr
    if ends_with not in (0, "requeue"):
        assert (tmp_path / "logs/7_status").read_text() == f"{ends_with}\n"


@pytest.mark.parametrize(
    ("then", "left", "preempted", "requeues", "said"),
    [
        ("", "0", False, False, ""),
        ("", "3", False, False, ""),
        ("", "0 USR1", False, False, "it has written nothing to "),
        ('touch "$run_dir/saved"', "0 USR1", False, True, "it was stopped before its end"),
        ("", "0 USR1", True, True, "it was stopped before its end"),
        ("", "0 TERM", True, True, "it was stopped before its end"),
        ("", "0 TERM", False, False, "its ranks were asked to stop"),
    ],
)
def test_a_submitted_script_is_requeued_if_a_restart_would_go_on(
    submitted, tmp_path, then, left, preempted, requeues, said
):
    if preempted:
        preempt(tmp_path)
    done = submitted(left, 0, then, script="train.py")
    assert (done.returncode == 0) is (left == "0"), done.stderr
    assert is_requeued(tmp_path) is requeues
    assert said in done.stdout + done.stderr


def test_requeues_of_a_submitted_job_have_a_bound(submitted, tmp_path):
    done = submitted("0 USR1", 0, RECORD, max_requeues=1, SLURM_RESTART_COUNT="1")
    assert done.returncode == 1
    assert "it was stopped before its end, and it has started 2 times (MAX_REQUEUES=1); to resume: " in done.stderr
    assert "requeue" not in (tmp_path / "scontrol.txt").read_text()


def test_a_task_of_an_array_requeues_itself_alone_and_has_its_own_run(submitted, tmp_path):
    """Its SLURM_JOB_ID belongs to the whole array; here another task is preempted."""
    text = (tmp_path / "scontrol").read_text()
    own = '"show job 101_3 "*) echo " JobState=RUNNING PreemptTime=None " ;;'
    others = '"show job "*) echo " JobState=RUNNING PreemptTime=2026 " ;;'
    (tmp_path / "scontrol").write_text(text.replace('"show job "*)', f'{own}\n{others}\n"never "*)'))
    array = {"SLURM_JOB_ID": "104", "SLURM_ARRAY_JOB_ID": "101", "SLURM_ARRAY_TASK_ID": "3"}
    for left, requeues in (("1", False), ("0 USR1", True)):
        done = submitted(left, 0, RECORD, others=("a", "b", "c"), **array)
        assert is_requeued(tmp_path, "101_3") is requeues, done.stderr
    assert (tmp_path / "runs/mine/config.json").exists()


def test_each_start_of_a_submitted_job_has_a_port_and_ends_by_its_own_status(submitted, tmp_path):
    seen = set()
    for env in ({}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "8"}):
        (tmp_path / "logs/7_status").write_text("0\n")
        done = submitted("", 2, 'env; [[ ! -e $STATUS_FILE ]] && echo "none is left"', **env)
        assert "none is left" in done.stdout
        assert "PORT_IS_CHOSEN=1" in done.stdout.splitlines()
        seen |= set(re.findall(r"MASTER_PORT=(\d+)", done.stdout))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("cores", "sees", "said"),
    [
        ("8", "96 515000 gpu:h100:8", ("88 of 96 cores", "CPUS=12")),
        ("64", "96 515000 gpu:h100:8", None),
        ("8", "128 515000 gpu:h100:32", ("24 of 32 GPUs and 120 of 128 cores", "GPUS=32 CPUS=4")),
    ],
)
def test_a_submitted_job_warns_about_cores_that_it_does_not_use(submitted, tmp_path, cores, sees, said):
    write_program(tmp_path / "sinfo", f"echo '{sees}'")
    share = {"SLURM_CPUS_ON_NODE": cores, "SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "8"}
    done = submitted("0", 0, **share)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == bool(said)
    assert not said or warnings[0].endswith("{} of a node; to use them: make submit {}".format(*said))


def test_a_script_gets_its_own_options_alone(script, tmp_path):
    then = 'printf "%s\\n" "${options[@]}" "${rank[@]}" "$RUN_DIR" "$RESUME" "$WORKDIR"'
    for restarts, resume in (("0", "none"), ("1", "auto")):
        said = script(then, SLURM_RESTART_COUNT=restarts).stdout.splitlines()
        program = ["scripts.launch.script", "--task", f"{tmp_path}/train.py"]
        expected = ["--lr", "1", "--runs-dir", f"{tmp_path}/runs", *program]
        assert said[-10:] == [*expected, f"{tmp_path}/runs/mine", resume, str(ROOT)]
    done, fix = script(then), "set RESUME=auto to resume this run, or choose another NAME"
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path}/runs/mine is not empty; {fix}\n")


@pytest.mark.parametrize(
    ("then", "preempted", "requeues", "said"),
    [
        ("status=0", False, False, ""),
        ("status=3", False, False, "error: job 7 ended with status 3"),
        ("status=75 greatest=75", False, True, "another process took port"),
        ("signal=USR1 status=0", False, False, "its time is up, and it has written nothing to "),
        ('touch -d 2020-01-01 "$run_dir/old"; signal=USR1 status=0', False, False, "it has written nothing to "),
        ("signal=USR1 status=138", False, False, "its time is up, and it has written nothing to "),
        ('touch "$run_dir/saved"; signal=USR1 status=138', False, True, "job 7: it was stopped before its end"),
        ("signal=USR1 status=0", True, True, "job 7: it was stopped before its end"),
        ("signal=USR1 status=143", True, True, "job 7: it was stopped before its end"),
        (SIGNALLED, False, False, TOLD),
        (SIGNALLED, True, True, "job 7: it was stopped before its end"),
        ("status=0", True, False, ""),  # it completed without a signal
    ],
)
def test_a_stopped_script_is_requeued_if_a_restart_would_go_on(script, tmp_path, then, preempted, requeues, said):
    """A restart would continue after a preemption, or if the script has written to RUN_DIR since its start."""
    if preempted:
        preempt(tmp_path)
    done = script(f"greatest=0; sleep 0.02; {then}; end_job")
    assert (done.returncode == 0) is (then == "status=0"), done.stderr
    assert is_requeued(tmp_path) is requeues
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("shown", "requeues"),
    [
        ({"version": "23.11.10"}, True),
        ({"version": "24.05.0"}, False),
        ({"version": "25.11.2"}, False),
        ({"version": "25.11.2", "mode": "GANG,REQUEUE"}, False),
        ({"version": "25.11.2", "mode": "CANCEL"}, True),
        ({"version": "25.11.2", "job": "Requeue=0 BatchFlag=1"}, True),  # then scontrol prints why it cannot
        ({"version": "25.11.2", "job": "Requeue=1 BatchFlag=5"}, True),  # after one more, Slurm holds the job
    ],
)
def test_a_preempted_job_is_requeued_once(script, tmp_path, shown, requeues):
    """Since 24.05, Slurm requeues it at its script's end; asked to as well, it requeues the next start, too."""
    preempt(tmp_path, **shown)
    done = script("greatest=0; signal=USR1 status=0; end_job", SLURM_JOB_PARTITION="main")
    assert done.returncode == 1, "a job that Slurm does not requeue after all has failed"
    assert "job 7: it was stopped before its end; it is requeued" in done.stdout
    assert is_requeued(tmp_path) is requeues


def test_a_preempted_job_has_a_bound_too(script, tmp_path):
    preempt(tmp_path, version="24.11.5")
    env = {"SLURM_JOB_PARTITION": "main", "SLURM_RESTART_COUNT": "10"}
    done = script("greatest=0; signal=USR1 status=0; end_job", **env)
    assert "and it has started 11 times (MAX_REQUEUES=10)" in done.stderr
    calls = (tmp_path / "scontrol.txt").read_text().splitlines()
    assert "update JobId=7 Requeue=0" in calls, "else Slurm requeues it at its script's end"


def test_a_job_that_has_completed_trains_no_more(job, tmp_path):
    """Since 24.05, Slurm starts it once more if a preemption used up the grace time of an earlier start."""
    ends = 'echo trains; sleep 0.02; touch "$run_dir/config.json" "$run_dir/result.json"; status=0; end_job'
    done = job(then=ends)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "trains"), done.stderr
    again = job(then=ends, SLURM_RESTART_COUNT="1")
    said = "job 7, start 2: an earlier start has completed; to run it again, submit another job\n"
    assert (again.returncode, again.stdout) == (0, said), again.stderr
    other = {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}  # of the same run
    assert job("--name", "ddp-job7", then="echo trains", **other).stdout.endswith("\ntrains\n")
    # Another cluster's job 7: it may resume the run, and none of its starts has completed.
    for restarts in ("0", "1"):
        done = job(then="echo trains; status=1 greatest=2; end_job", SLURM_RESTART_COUNT=restarts)
        assert (done.returncode, "trains" in done.stdout.splitlines()) == (1, True), done.stdout


def test_a_submitted_job_that_has_completed_trains_no_more(submitted):
    ends = f'echo trains; {RECORD} "$run_dir/result.json"'
    assert submitted("0", 0, ends).returncode == 0
    again = submitted("0", 0, ends, SLURM_RESTART_COUNT="1")
    assert (again.returncode, "trains" in again.stdout) == (0, False), again.stderr


def test_a_node_needs_no_program_hostname(job, tmp_path):
    write_program(tmp_path / "hostname", "exit 127")
    done = job(then='basename "$head_log"')
    assert (done.stdout.splitlines()[-1], done.stderr) == (f"{socket.gethostname().split('.')[0]}.txt", "")


def test_the_head_nodes_log_has_slurms_name_and_the_hosts(job):
    """srun writes to %N.txt, named after the host, which need not be the NodeName that Slurm uses elsewhere."""
    show = 'basename "$head_log"; echo said >>"$logs/$(hostname -s).txt"; cat "$head_log"'
    done = job(then=show, SLURMD_NODENAME="rack7-n12")
    assert done.stdout.splitlines()[-2:] == ["rack7-n12.txt", "said"], done.stderr
    then = 'echo "error: once" >>"$head_log"; status=1 greatest=1; touch "$run_dir/config.json"; sleep 0.02; '
    then += 'for n in 3 4; do echo "error: of n$n" >"$logs/n$n.txt"; done; touch -d 2020-01-01 "$logs/n4.txt"'
    done = job(then=f"{then}; end_job")
    assert "error: once" not in done.stderr, "the head's lines are in the job's output already"
    assert re.findall(".*: of n.*", done.stderr) == ["[n3] error: of n3"], "n4's is of an earlier start"


@pytest.mark.parametrize(
    ("of_head", "is_shown"),
    [
        ("error: rank 0 on n1 lost another rank: reset", True),
        ("n1: fabric tcp", True),
        ("error: n1: FABRIC=ib, and no port is active", False),
    ],
)
def test_a_refusal_of_another_node_is_shown_unless_the_head_has_one(job, of_head, is_shown):
    """The head's lines are in the job's output already, and most refusals are those of all nodes."""
    said = "error: n2: FABRIC=ib, and no port is active"
    then = f'sleep 0.1; echo "{of_head}" >>"$head_log"; echo "{said}" >"$logs/n2.txt"; status=2 greatest=2'
    done = job(then=f"{then}; end_job")
    *others, last = done.stderr.splitlines()
    assert others == [f"[n2] {said}"] * is_shown
    assert last.startswith("error: job 7 ended with status 2; ")


@pytest.mark.parametrize("status", [1, 2])
def test_an_error_of_an_earlier_start_is_not_blamed(job, tmp_path, status):
    """Logs are appended to, and each node writes a line about its network in each start."""
    (tmp_path / "runs/mine/slurm").mkdir(parents=True)
    for log in ("n3", "n4", socket.gethostname().split(".")[0]):
        (tmp_path / f"runs/mine/slurm/{log}.txt").write_text("error: old\n")
    write = 'for n in 3 4; do echo "n$n: fabric tcp" >>"$logs/n$n.txt"; done; echo "error: new" >>"$logs/n4.txt"'
    done = job(then=f"sleep 0.1; {write}; status={status} greatest=2; end_job", NAME="mine")
    first, last = done.stderr.splitlines()
    assert first == "[n4] error: new"
    assert last.startswith(f"error: job 7 ended with status {status}; ")


@pytest.mark.parametrize("earlier", ["", "of an earlier start"])
def test_a_start_shows_what_its_head_node_adds_to_the_log(job, earlier):
    """This also holds if the log has a second name: the size of a link is not that of the log."""
    log = 'log=$logs/$(hostname -s).txt; printf "%s" "$EARLIER" >>"$log"'
    step = 'run_step bash -c "sleep 0.5; echo of this one >>\\$0; sleep 0.5" "$log"'
    done = job(then=f"{log}; {step}", SLURMD_NODENAME="rack7-n12", EARLIER=f"{earlier}\n" * bool(earlier))
    assert done.stdout.splitlines()[1:] == ["of this one"]
    assert done.stderr == ""


def test_all_nodes_are_asked_at_once_whether_they_answer(job, tmp_path):
    """Answers come only once every node has been asked; n2 does not start the command."""
    script = f"""cd {tmp_path}
case $* in *n1*) touch n1 ;; *n2*) touch n2 ;; esac
until [ -e n1 ] && [ -e n2 ]; do sleep 0.05; done
case $* in *n2*) exit 1 ;; esac"""
    write_program(tmp_path / "srun", script)
    done = job(then='echo "lost: $(lost_nodes)"')
    assert done.stdout.splitlines()[-1] == "lost: n2", done.stderr
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    done = job(then='echo "lost: $(lost_nodes)"')
    assert done.stdout.splitlines()[-1] == "lost: ", "srun itself does not work: a restart would not help"


def test_a_hundred_of_many_nodes_are_asked_at_once(job, tmp_path):
    """Slurm's controller would begin some of a thousand steps too late, and their nodes would seem lost."""
    (tmp_path / "running").mkdir()
    script = f"""cd {tmp_path}
touch running/$$
ls running | wc -l >>counts
case $* in *"=n7 "* | *"=n120 "*) echo "error: its GPU"; status=1 ;; esac
sleep 0.3
rm running/$$
exit ${{status:-0}}"""
    write_program(tmp_path / "srun", script)
    for question, answer in (
        ('echo "lost: $(lost_nodes)"', ["lost: n7 n120"]),
        ("broken_nodes | sort", ["n120: its GPU", "n7: its GPU"]),
    ):
        done = job(then=f"nodes=$(seq -f n%g 130); {question}")
        assert done.stdout.splitlines()[-len(answer) :] == answer, done.stderr
        counts = [int(line) for line in (tmp_path / "counts").read_text().splitlines()]
        assert len(counts) == 130
        assert 2 < max(counts) <= 100
        (tmp_path / "counts").unlink()


def test_of_a_thousand_nodes_errors_a_few_are_printed_causes_first(job, tmp_path):
    logs = tmp_path / "runs/mine/slurm"
    write = f'for i in $(seq 300); do echo "error: rank $i lost another rank: reset" >{logs}/n$i.txt; done'
    cause = f'echo "error: rank 77 was killed by SIGKILL" >>{logs}/n77.txt'
    done = job(then=f"sleep 0.1; {write}; {cause}; status=1 greatest=1; end_job", NAME="mine")
    lines = done.stderr.splitlines()
    assert len(lines) == 22, done.stderr
    assert lines[0] == "[n77] error: rank 77 was killed by SIGKILL"
    assert lines[20] == "... and 280 more nodes with errors"
    assert lines[21].startswith("error: job 7 ended with status 1; all nodes' logs are in ")


def test_steps_get_all_variables_and_all_cores(job):
    """This holds whatever sbatch --export names, and if sbatch was called by a task of another job."""
    leaked = {"SLURM_EXPORT_ENV": "NONE", "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}
    leaked |= {"SLURM_DISTRIBUTION": "cyclic", "SLURM_SRUN_COMM_PORT": "60001"}
    done = job(then="env", **leaked)
    assert done.returncode == 0, done.stderr
    left = {line.split("=")[0] for line in done.stdout.splitlines()} & set(leaked)
    assert left == {"SLURM_SRUN_COMM_PORT"}
    assert "SLURM_DISTRIBUTION=cyclic\n" in job(then="env", SLURM_DISTRIBUTION="cyclic").stdout, "the user's own"


@pytest.mark.parametrize("begin", ["share_cores", 'begin_submitted python "" 3 "$logs" "$run_dir"'])
def test_ranks_that_are_tasks_fill_one_socket_after_another(job, begin):
    """As GPUs do. By default, Slurm binds task 1 to the second socket, and task 2 to the first again."""
    assert "SLURM_DISTRIBUTION=block:block\n" in job(then=f"{begin}; env").stdout
    assert "SLURM_DISTRIBUTION=cyclic\n" in job(then=f"{begin}; env", SLURM_DISTRIBUTION="cyclic").stdout
    assert "SLURM_DISTRIBUTION" not in job(then="env").stdout


def test_the_probe_gets_no_option_of_a_record(job, tmp_path):
    own = {"begin": 'begin_job probe "$@"', "then": 'echo "${options[@]}"', "SLURM_GPUS_ON_NODE": "2"}
    for restarts in "01":
        done = job(SLURM_RESTART_COUNT=restarts, **own)
        assert done.stdout.splitlines()[-1] == f"--device cuda --runs-dir {tmp_path}/runs", done.stderr


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE expects a whole number of at least 1, got 'two'"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE expects a whole number of at least 1, got '0'"),
        ({"SLURM_HET_SIZE": "2"}, "a heterogeneous job (sbatch ... : ...) would use only its first component"),
        ({"MAX_REQUEUES": "many"}, "MAX_REQUEUES expects a whole number, got 'many'"),
        ({"MAX_EXCLUDED": "many"}, "MAX_EXCLUDED expects a whole number, got 'many'"),
        ({"PYTHON": "/nowhere/python"}, "there is no /nowhere/python; run make setup in "),
        ({"NAME": "../mine"}, "NAME expects at most 100 letters, digits, '.', '_' and '-', the first"),
        ({"NAME": "école", "LC_ALL": "C.UTF-8"}, "NAME expects at most 100 letters, digits, '.', '_' and '-'"),
        ({"FABRIC": "efb"}, "FABRIC expects auto, ib, roce, efa or tcp, got 'efb'"),
        ({"CONTAINER_IMAGE": "ddp.sqsh"}, "CONTAINER_IMAGE is set, but srun has no --container-image"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start_and_not_at_the_end(job, env, said):
    done = job(**env)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {said}")


def test_a_script_is_signalled_until_its_launcher_notes_that(script, tmp_path):
    """Slurm is busy at first; then the step has not begun, and the signal reaches nobody."""
    scancel = f'echo "$*" >>{tmp_path}/said\n[ $(wc -l <{tmp_path}/said) = 1 ] && exit 1\n'
    scancel += f'[ $(wc -l <{tmp_path}/said) = 3 ] && touch "$STOPPED_FILE"\n:\n'
    write_program(tmp_path / "scancel", scancel)
    begun = "export STOPPED_FILE=$logs/.stopped-$job step=srun step_pid=$$"
    done = script(begun + '; read() { :; }; stop_step USR1; wait "${stopper[0]}"')
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text() == "--signal=USR1 7\n" * 3


def test_a_name_that_does_not_resolve_gives_way_to_slurms_address(job, tmp_path):
    """DNS and /etc/hosts need not know a NodeName."""
    shown = 'case $* in "show node n1 "*) echo "NodeName=n1 NodeAddr=10.7.0.1 X=" ;; esac\n'
    (tmp_path / "scontrol").write_text(SCONTROL + shown)
    for known, address in ((1, "10.7.0.1"), (0, "n1")):
        write_program(tmp_path / "getent", f"exit {known}")
        assert job(then='echo "$MASTER_ADDR"').stdout.splitlines()[-1] == address
    assert job(then='echo "$MASTER_ADDR"', MASTER_ADDR="ib-n1").stdout.splitlines()[-1] == "ib-n1"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"STAGE": "/nowhere.tar"}, "STAGE: there is no /nowhere.tar; on the login node: tar -C "),
        ({"STAGE": str(ROOT / "README.md")}, f"STAGE: cannot unpack {ROOT}/README.md to "),
        ({"STAGE": "x.tar", "CONTAINER_IMAGE": "docker://ddp"}, "STAGE is for a venv, and CONTAINER_IMAGE is one"),
        ({"CONTAINER_IMAGE": "/nowhere.sif"}, "there is no CONTAINER_IMAGE /nowhere.sif; make it on the login"),
    ],
)
def test_what_is_to_be_prepared_on_the_login_node_is_asked_for(job, tmp_path, env, said):
    write_program(tmp_path / "apptainer", "")
    (tmp_path / "srun").write_text(RUNS_ON_ONE_NODE)
    done = job(STAGE_DIR=str(tmp_path / "stage"), **env)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith(f"error: {said}")], done.stderr


APPTAINER = """#!/bin/bash
    echo "$*" >>"$(dirname "$0")/asked"
    while [[ $1 != *.sif ]]; do
        for mount in $(test "$1" != --bind || tr , ' ' <<<"$2"); do
            [[ -e ${mount%%:*} ]] || { echo "FATAL: mount source ${mount%%:*} doesn't exist" >&2; exit 255; }
        done
        shift
    done
    shift
    export PYTHON=/image/python SOURCE_REVISION=image # of the image: Apptainer prefers them to the job's
    for name in ${!APPTAINERENV_*}; do export "${name#APPTAINERENV_}=${!name}"; done
    exec "$@"
"""


def test_an_images_variables_do_not_replace_the_jobs(job, tmp_path):
    """An image has the revision that it was built from; a job in it runs the code of this checkout."""
    write_program(tmp_path / "apptainer", APPTAINER)
    (tmp_path / "ddp.sif").touch()
    names = "NNODES NPROC_PER_NODE MASTER_ADDR MASTER_PORT FABRIC PYTHON SOURCE_REVISION"
    here = " ".join(f"${name}" for name in names.split())
    then = f"""echo "{here}"; "${{container[@]}}" bash -c 'echo "{here}"'"""
    done = job(then=then, CONTAINER_IMAGE=str(tmp_path / "ddp.sif"), NPROC_PER_NODE="3", FABRIC="tcp")
    of_job, of_rank = done.stdout.splitlines()[-2:]
    assert of_rank == of_job, done.stderr
    assert re.fullmatch(rf"2 3 n1 \d+ tcp {sys.executable} ([0-9a-f]{{40}}(-dirty)?|unknown)", of_job)
    write_program(tmp_path / "srun", "#!/bin/bash\necho --container-image")
    done = job(then='printf "%s\\n" "${srun[@]}"', CONTAINER_IMAGE="ddp.sqsh")
    assert f"--container-env={names.replace(' ', ',')}" in done.stdout.splitlines()


def test_a_folder_of_runs_need_not_exist_to_be_mounted(script, tmp_path):
    """Apptainer and pyxis do not make what they mount."""
    write_program(tmp_path / "apptainer", APPTAINER)
    image, runs = tmp_path / "ddp.sif", tmp_path / "new/runs"
    image.touch()
    done = script("echo begun", CONTAINER_IMAGE=str(image), RUNS_DIR=str(runs))
    assert done.stdout.endswith("begun\n"), done.stderr
    assert f",{runs}:{runs} " in (tmp_path / "asked").read_text()


def test_a_mount_that_does_not_exist_is_refused_in_one_line(job, tmp_path):
    write_program(tmp_path / "apptainer", APPTAINER)
    (tmp_path / "ddp.sif").touch()
    image = {"CONTAINER_IMAGE": str(tmp_path / "ddp.sif")}
    done = job(CONTAINER_MOUNTS=f"{tmp_path}:/data:ro,/nowhere/x:/x", **image)
    assert done.returncode == 2
    assert re.fullmatch(r"error: CONTAINER_MOUNTS: there is no /nowhere/x on \S+; correct it\n", done.stderr)


def test_pyxis_has_time_to_unpack_the_image_for_the_check_of_gpus(job, tmp_path):
    write_program(tmp_path / "timeout", f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\n')
    for begins, option in (("30 srun ", ""), ("300 srun ", "--container-image")):
        write_program(tmp_path / "srun", f"#!/bin/sh\necho {option}")
        done = job(then="broken_nodes", **({"CONTAINER_IMAGE": "ddp.sqsh"} if option else {}))
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "asked").read_text().splitlines()[-1].startswith(begins)


RUNS_ON_ONE_NODE = """#!/bin/sh
while [ "$1" != bash ]; do if [ $# = 0 ]; then exit; fi; shift; done
exec "$@"
"""


def test_an_environment_is_staged_once(job, tmp_path):
    (tmp_path / "srun").write_text(RUNS_ON_ONE_NODE)
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").symlink_to(sys.executable)
    tar, target = tmp_path / "env.tar", tmp_path / "env-1.tar"
    tar.symlink_to(target)
    subprocess.run(["tar", "-C", tmp_path / "env", "-cf", target, "."], check=True, timeout=30)
    seen = []
    for _ in range(2):
        done = job(then='echo "$PYTHON"', STAGE=str(tar), STAGE_DIR=str(tmp_path / "stage"))
        assert f"staged {tar} on 2 nodes in " in done.stdout
        seen.append((done.stdout.splitlines()[-1], Path(done.stdout.splitlines()[-1]).lstat().st_ino))
    assert seen[0] == seen[1], "the second job has unpacked nothing"
    assert seen[0][0].startswith(f"{tmp_path}/stage/cluster-recipes-{os.getuid()}/")
    os.utime(target, (1, 1))
    done = job(then='echo "$PYTHON"', STAGE=str(tar), STAGE_DIR=str(tmp_path / "stage"))
    assert done.stdout.splitlines()[-1] != seen[0][0]


@pytest.mark.parametrize("own", ["open", "link", "file"])
def test_what_another_user_may_have_put_there_is_not_run(job, tmp_path, own):
    """The path of the staged environment can be guessed."""
    (tmp_path / "srun").write_text(RUNS_ON_ONE_NODE)
    tar, folder = tmp_path / "env.tar", tmp_path / f"stage/cluster-recipes-{os.getuid()}"
    tar.touch()
    there = tmp_path / "other" if own == "link" else folder
    planted = there / f"{tar.stat().st_size}-{int(tar.stat().st_mtime)}/bin/python"
    folder.parent.mkdir()
    if own == "file":
        folder.touch()
    else:
        planted.parent.mkdir(parents=True)
        write_program(planted, f"touch {tmp_path}/ran")
        there.chmod(0o777 if own == "open" else 0o700)
    if own == "link":
        folder.symlink_to(there)
    done = job(then='"$PYTHON" -V', STAGE=str(tar), STAGE_DIR=str(folder.parent))
    assert done.returncode == 2
    not_own = rf"error: STAGE: \S+: {folder} is not your own folder of mode 700; remove it, or .*\n"
    said = r"(.*\n)*error: STAGE: cannot unpack (.*\n)*" if own == "file" else not_own
    assert re.fullmatch(said, done.stderr)
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def file(job, tmp_path):
    """Return a function that runs an sbatch file and returns its output and the calls of srun."""

    def run(name, *words, plugins="", command="", **env):
        (tmp_path / "srun").write_text(
            f'#!/bin/sh\ncase $* in --mpi=list) echo "{plugins}"; exit ;; esac\n'
            f'echo "$RDZV_ID $*" >>{tmp_path}/srun.txt\n'
            f'for run in {tmp_path}/runs/*/; do touch "$run/result.json"; done\n'
        )
        called = [command or f"{ROOT}/slurm/{name}", *words, "--runs-dir", str(tmp_path / "runs")]
        shown = f'"JobId=7\n   Command={" ".join(called)}\n'
        (tmp_path / "scontrol").write_text(SCONTROL.replace('"JobId=7 ', shown))
        done = bash(tmp_path, f"slurm/{name}", *called[1:], **env)
        assert done.returncode == 0, done.stderr
        return done.stdout, (tmp_path / "srun.txt").read_text()

    return run


@pytest.mark.parametrize(
    ("plugins", "start", "said", "asked"),
    [
        ("none pmi2", "", "this Slurm has no PMIx (srun --mpi=list): START=gloo, without MPI\n", "launch.sh"),
        ("none pmix pmix_v4", "", "", "--mpi=pmix"),
        ("none pmi2", "pmix", "", "--mpi=pmix"),  # as the user asks
    ],
)
def test_horovod_goes_by_gloo_where_slurm_has_no_pmix(file, plugins, start, said, asked):
    output, called = file("horovod.sbatch", plugins=plugins, START=start)
    assert ("this Slurm" in output, said in output) == (bool(said), True)
    assert asked in called


def test_another_start_of_horovod_is_refused(file):
    with pytest.raises(AssertionError, match="error: START expects pmix, gloo or mpirun, got 'ssh'"):
        file("horovod.sbatch", START="ssh")


@pytest.mark.parametrize("recipe", ["ddp", "apex", "context", "fsdp", "pipeline", "spawn", "tensor"])
def test_a_file_starts_the_recipe_of_its_name(file, recipe):
    _, called = file(f"{recipe}.sbatch")
    assert f' exec scripts/launch.sh "$@" bash {recipe} --name {recipe}-job7 --runs-dir ' in called
    assert " --kill-on-bad-exit=1 " in called, "all nodes end with the first that fails"


ARRAY = {
    **{f"SLURM_ARRAY_{name}": value for name, value in (("JOB_ID", "6"), ("TASK_ID", "1"))},
    **{"SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "1", "SWEEP": "lr=0.01,0.02"},
}


@pytest.mark.parametrize("name", ["ddp", "apex", "ddp-elastic", "ddp-srun", "horovod"])
def test_a_task_of_an_array_has_its_point_of_the_sweep(file, tmp_path, name):
    for_a_sweep = f'if [ "$2" = slurm.sweep ]; then exec {sys.executable} "$@"; fi\n'
    python = write_program(tmp_path / "python", for_a_sweep + STORE)
    _, called = file(f"{name}.sbatch", **ARRAY, PYTHON=str(python))
    assert f" --name {name.split('-')[0]}-job6_1 --lr 0.02 --runs-dir " in called


def test_every_file_has_the_signal_two_minutes_before_the_time_limit_and_is_requeued():
    """So do an elastic job and the tasks of an array; the doctor has nothing to save."""
    wanted = r"^#SBATCH +(--signal=\S+|--(?:no-)?requeue)"
    paths = sorted(ROOT.glob("slurm/*.sbatch"))
    asked = {path.stem: re.findall(wanted, path.read_text(), re.MULTILINE) for path in paths}
    assert asked.pop("doctor") == ["--no-requeue"]
    assert len(asked) == 10
    assert asked == {name: ["--signal=B:USR1@120", "--requeue"] for name in asked}


def test_the_tasks_of_an_array_cannot_share_a_run(file):
    """With --resume auto, each would continue the run of another point of the grid."""
    with pytest.raises(AssertionError, match="error: --name is one run for all tasks; NAME=mine sbatch"):
        file("apex.sbatch", "--name=mine", **ARRAY)


def test_a_sweep_of_a_job_that_is_no_array_is_refused(file):
    with pytest.raises(AssertionError, match="error: SWEEP needs a task for each point of its grid; sbatch --arr"):
        file("ddp.sbatch", SWEEP="lr=0.1,0.2")


def test_all_nodes_are_asked_for_the_cores_of_the_smallest(file):
    nodes = {"SLURM_JOB_CPUS_PER_NODE": "96(x2),64,128", "SLURM_CPUS_ON_NODE": "96"}
    assert " --cpus-per-task=64 " in file("ddp.sbatch", **nodes)[1]
    assert " --cpus-per-task=32 " in file("ddp-srun.sbatch", NPROC_PER_NODE="2", **nodes)[1]


@pytest.mark.parametrize("name", ["ddp-srun.sbatch", "horovod.sbatch"])
def test_fewer_cores_than_ranks_are_refused_where_each_rank_is_a_task(file, name):
    """srun's own error is: Invalid numeric value "0" for --cpus-per-task."""
    said = "error: a node gives this job 4 cores for 6 ranks; sbatch --cpus-per-task=6, or NPROC_PER_NODE=4$"
    with pytest.raises(AssertionError, match=f"(?m)^{said}"):
        file(name, plugins="pmix", NPROC_PER_NODE="6", SLURM_CPUS_ON_NODE="4")


def test_each_doctor_has_a_secret_of_its_own(file, tmp_path):
    seen = file("doctor.sbatch")[1] + file("doctor.sbatch", SWEEP="lr=0.1,0.2")[1]  # which is not for it
    assert len(set(re.findall("^[0-9a-f]{32}(?= )", seen, re.MULTILINE))) == 2


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_doctor_that_is_stopped_before_its_step_has_not_passed(file, tmp_path, name):
    write_program(tmp_path / "od", f"kill -{name} $(cut -d ' ' -f 4 /proc/$PPID/stat)")
    with pytest.raises(AssertionError, match="error: job 7: it was stopped before its nodes were checked"):
        file("doctor.sbatch")


def test_the_repository_may_have_spaces_in_its_path(file, tmp_path):
    (tmp_path / "my work").symlink_to(ROOT)
    said, called = file("ddp.sbatch", "--lr", "1", command=f"{tmp_path}/my work/slurm/ddp.sbatch")
    assert "ddp on 2 nodes" in said
    assert " exec scripts/launch.sh " in called


def root_of(path):
    """Return the repository's root as job.sh finds it when it is sourced by this path."""
    command = ["bash", "-c", f'source "{path}"; echo "$root"']
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout


def test_the_folder_of_sbatch_files_may_be_a_link(tmp_path):
    (tmp_path / "jobs").symlink_to(ROOT / "slurm")
    assert root_of(tmp_path / "jobs/job.sh") == f"{ROOT}\n"
    (tmp_path / "checkout").symlink_to(ROOT)
    kept = f"{tmp_path}/checkout\n"
    assert root_of(tmp_path / "checkout/slurm/job.sh") == kept, "nodes may know the repository by this name only"


def test_an_exported_cdpath_leads_no_script_to_another_folder(tmp_path):
    (tmp_path / "scripts/dev").mkdir(parents=True)
    env = {**os.environ, "CDPATH": str(tmp_path), "PYTHON": sys.executable}
    command = ["scripts/dev/python.sh", "-c", "import os; print(os.getcwd())"]
    shown = subprocess.run(["bash", *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)
    assert shown.stdout == f"{ROOT}\n", shown.stderr
    files = [ROOT / ".ci/run", ROOT / "slurm/job.sh", *ROOT.glob("docker/*.sh"), *ROOT.glob("scripts/**/*.sh")]
    lines = [line for path in files for line in path.read_text().splitlines() if 'cd "$(dirname "${BASH' in line]
    assert len(lines) > 9
    assert [line for line in lines if "CDPATH='' cd " not in line] == []


def test_a_file_that_sbatch_reads_from_a_pipe_cannot_find_the_others(file):
    with pytest.raises(AssertionError, match="error: submit this file by its path: sbatch slurm/"):
        file("ddp.sbatch", command="(null)")


KMSG = "3,1,{us};NVRM: Xid (PCI:0000:3b:00): {xid}, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
PARTITION = "n1-alloc n2-alloc n3-idle n4-mix"


@pytest.fixture
def fault(job, submitted, tmp_path):
    """Return a function: a job on n1 and n2 fails, and n2's kernel has logged an Xid some time before.

    The function returns the ended process, and the calls of scontrol that change the job.
    """
    write_program(tmp_path / "sinfo", f"cat {tmp_path}/partition")
    srun = f"""#!/bin/sh
case $* in *--output=all*--nodelist=n2*) ;; *) exit 0 ;; esac
while [ "$1" != -m ]; do shift; done
KMSG={tmp_path}/kmsg exec "{sys.executable}" "$@"
"""
    write_program(tmp_path / "srun", srun)

    def run(xid=79, ago_s=1.0, excluded="(null)", partition=PARTITION, status=1, takes=True, **env):
        uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        (tmp_path / "kmsg").write_text(KMSG.format(us=int((uptime_s - ago_s) * 1e6), xid=xid))
        (tmp_path / "partition").write_text("".join(f"{node.replace('-', ' ')}\n" for node in partition.split()))
        scontrol = SCONTROL.replace("PreemptTime=None", f"PreemptTime=None ExcNodeList={excluded} ")
        # Slurm ends the batch script of a job that is requeued, which has more to say to it.
        requeued = "requeue*) kill -TERM $PPID ;;"
        scontrol = scontrol.replace("requeue*) exit 1", f"{requeued}\nupdate*) exit {int(not takes)}")
        (tmp_path / "scontrol").write_text(scontrol)
        (tmp_path / "scontrol.txt").write_text("")
        record = "" if "SCRIPT" in env else 'touch "$run_dir/config.json"; '
        then = f"{record}status={status} greatest={status}; end_job"
        if env.pop("is_submitted", False):
            done = submitted("", status, RECORD, **env)
        else:
            done = job(then=then, SLURM_JOB_PARTITION="main", NAME="mine", **env)
        calls = (tmp_path / "scontrol.txt").read_text().splitlines()
        return done, [call for call in calls if not call.startswith("show")]

    return run


EXCLUDED = ["requeue 7", "update JobId=7 ExcNodeList=n2"]


@pytest.mark.parametrize(("how", "logs"), [({}, "runs/mine/slurm"), ({"is_submitted": True}, "logs")])
def test_a_job_goes_on_without_a_node_whose_gpu_is_broken(fault, tmp_path, how, logs):
    """Slurm refuses to change a running job, so the nodes are excluded once it is requeued.

    Rank 0 of a submitted job may have been on that node, and have left no status.
    """
    done, calls = fault(**how)
    assert calls == EXCLUDED, done.stderr
    line = "job 7: n2: .*: GPU PCI:0000:3b:00, Xid 79 once: fallen off the bus; drain the node and .*"
    assert re.search(f"^{line}$", done.stdout, re.MULTILINE)
    assert "job 7: fault on n2, excluded from now on; it is requeued" in done.stdout
    assert re.fullmatch(line + "\n", (tmp_path / logs / "excluded.txt").read_text())


def test_what_the_user_has_excluded_stays_so(fault):
    _, calls = fault(excluded="n[3-4]", partition="n1-alloc n2-alloc n3-idle n4-idle n5-idle")
    assert calls == ["requeue 7", "update JobId=7 ExcNodeList=n[3-4],n2"]
    assert fault(ago_s=90.0, SECONDS="200")[1] == EXCLUDED, "in a longer job"


@pytest.mark.parametrize("status", [1, 3, 134, 137])
def test_a_script_goes_on_without_such_a_node_too_whatever_its_status(fault, tmp_path, status):
    """Its next start is told to resume, although it has written nothing yet: the failure was not its own."""
    (tmp_path / "train.py").touch()
    own = {"SCRIPT": str(tmp_path / "train.py"), "RUNS_DIR": str(tmp_path / "runs")}
    done, calls = fault(status=status, **own)
    assert calls == EXCLUDED, done.stderr
    assert re.search("^job 7: n2: .*: GPU PCI:0000:3b:00, Xid 79 once: ", done.stdout, re.MULTILINE)
    done, calls = fault(status=status, xid=31, SLURM_RESTART_COUNT="1", **own)
    assert (calls, done.returncode) == ([], status), "its own mistake"


TOO_FEW = "error: job 7: fault on n2, and partition main has 1 other working nodes for 2; have"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"xid": 31}, "error: job 7 ended with status 1"),  # the program's own mistake
        ({"xid": 63}, "error: job 7 ended with status 1"),  # a fault to be watched
        ({"ago_s": 3600.0}, "error: job 7 ended with status 1"),  # before this job
        ({"status": 2}, "error: job 7 ended with status 2"),
        ({"partition": "n1-alloc n2-alloc"}, TOO_FEW),
        ({"partition": "n1-alloc n2-alloc n3-down* n4-drain n5-drng"}, TOO_FEW),
        ({"excluded": "n[3-4]"}, TOO_FEW),
        ({"MAX_EXCLUDED": "0"}, "job 7: fault on n2, and a job may exclude at most 0 nodes (MAX_EXCLUDED); have"),
        ({"SLURM_RESTART_COUNT": "10"}, "error: job 7: fault on n2, excluded from now on, and it has started 11"),
        ({"is_submitted": True, "MAX_EXCLUDED": "0"}, "a job may exclude at most 0 nodes (MAX_EXCLUDED); have"),
        ({"is_submitted": True, "max_requeues": 0}, "now on, and it has started 1 times (MAX_REQUEUES=0)"),
    ],
)
def test_a_job_is_not_requeued_without_a_fault_or_without_bound(fault, changed, said):
    done, calls = fault(**changed)
    assert calls == []
    assert done.returncode == changed.get("status", 1)
    assert said in done.stderr


def test_the_bound_of_excluded_nodes_is_kept_over_requeues(fault, tmp_path):
    (tmp_path / "runs/mine/slurm").mkdir(parents=True)
    earlier = "".join(f"job {job}: {node}: GPU\n" for job, node in (("7", "n8"), ("7", "n9"), ("6", "n5")))
    (tmp_path / "runs/mine/slurm/excluded.txt").write_text(earlier)
    _, calls = fault(excluded="n[8-9]", SLURM_RESTART_COUNT="2")
    assert calls[-1] == "update JobId=7 ExcNodeList=n[8-9],n2", "the third of three; job 6 had its own bound"
    done, calls = fault(excluded="n[2,8-9]", MAX_EXCLUDED="2", SLURM_RESTART_COUNT="3")
    assert (calls, done.returncode) == ([], 1)


def test_a_list_of_nodes_that_slurm_does_not_take_is_printed(fault):
    done, calls = fault(takes=False)
    assert calls == EXCLUDED
    assert "error: job 7: Slurm did not take ExcNodeList=n2; it may get these nodes again" in done.stderr


@pytest.mark.parametrize(
    ("smi", "is_fault"),
    [
        ("exec sleep 5", False),
        ("echo No devices were found; exit 6", False),  # what a job without GPUs may see
        ("echo Unable to determine the device handle for GPU0; exit 15", True),
    ],
)
def test_only_a_fault_that_nvidia_smi_names_excludes_a_node(fault, tmp_path, smi, is_fault):
    write_program(tmp_path / "nvidia-smi", smi)
    done, calls = fault(xid=31)
    assert calls == EXCLUDED * is_fault
    assert ("ended with status 1" in done.stderr) is not is_fault


@pytest.mark.parametrize(
    ("then", "requeues", "said"),
    [
        ("signal=USR1 status=0", True, "job 7: it was stopped before its end"),  # nodes waited for each other
        ("signal=USR1 status=2", False, "error: job 7 ended with status 2"),  # its checkpoint could not be written
        # Its ranks got a signal that the batch script did not see (scancel --signal=TERM) before rank 0 had begun.
        ("status=0", False, f"{TOLD}; to resume: "),
    ],
)
def test_a_recipe_that_was_stopped_is_not_complete(job, tmp_path, then, requeues, said):
    done = job(then=f"{then}; greatest=$status; end_job")
    assert is_requeued(tmp_path) is requeues
    assert said in done.stdout + done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("state", ["CANCELLED", "REQUEUED"])
def test_a_job_that_slurm_ends_is_not_requeued(job, submitted, tmp_path, state):
    (tmp_path / "scontrol").write_text(SCONTROL.replace("RUNNING", state))
    for done in (job(then="signal=USR1 status=0 greatest=0; end_job"), submitted("0 USR1", 0, RECORD)):
        assert f"job 7 is {state} and its ranks have left; to resume: " in done.stdout, done.stderr
        assert done.returncode == 1
    assert not is_requeued(tmp_path)


def answer_late(folder, failures):
    """Let scontrol fail so often for each question to Slurm's controller, as while it is busy or restarts."""
    busy = f'echo x >>"$0.$1"; [ $(grep -c x "$0.$1") -gt {failures} ] || exit 1'
    answers = (folder / "scontrol").read_text().replace('job "*)', f'job "*) {busy};')
    (folder / "scontrol").write_text(answers.replace(") exit 1", f") {busy}; kill $PPID"))


@pytest.mark.parametrize("failures", [2, 9])
def test_a_controller_that_does_not_answer_is_asked_again(job, tmp_path, failures):
    """Otherwise a job at its time limit would not go on."""
    answer_late(tmp_path, failures)
    done = job(then="signal=USR1 status=0 greatest=0; end_job")
    assert "it was stopped before its end; it is requeued" in done.stdout, done.stderr
    assert ("error: job 7: it could not be requeued; to resume: " in done.stderr) is (failures > 2)


@pytest.mark.parametrize("name", ["ddp", "ddp-elastic", "ddp-srun", "doctor", "horovod"])
def test_a_file_asks_a_controller_that_does_not_answer_again(job, tmp_path, name):
    words = ("--runs-dir", str(tmp_path / "runs"))
    shown = f'echo "JobId=7\n   Command={ROOT}/slurm/{name}.sbatch {" ".join(words)}\n   '
    (tmp_path / "scontrol").write_text(SCONTROL.replace('echo "JobId=7 ', shown))
    answer_late(tmp_path, 2)
    done = bash(tmp_path, f"slurm/{name}.sbatch", *words, NAME="not/plain")
    assert "error: NAME expects " in done.stderr


@pytest.mark.parametrize(
    ("begin", "options"),
    [('begin_job probe "$@"', ()), ('begin_job ddp "$@"', ("--help",)), ('begin_job ddp "$@"', ("-h",))],
)
def test_what_keeps_no_record_is_complete_without_one(job, begin, options):
    done = job(*options, begin=begin, then="status=0 greatest=0; end_job")
    assert (done.returncode, done.stderr) == (0, "")


def test_jobs_of_one_name_leave_each_others_marks_alone(job, tmp_path):
    """The older one ends as the newer one takes over the run, and then reads when it began and what srun said."""
    marks = []
    for number in ("7", "8"):
        assert job("--name", "mine", then="run_step true", SLURM_JOB_ID=number).returncode == 0
        marks.append({path: path.stat().st_mtime_ns for path in (tmp_path / "runs/mine/slurm").glob(".*")})
    assert {f".{name}-7" for name in ("started", "srun", "first-start")} <= {path.name for path in marks[0]}
    assert marks[1].items() > marks[0].items()


@pytest.mark.parametrize(
    "line", ["runs-dir: /scratch", "runs_dir: /scratch", '{"runs_dir": "/scratch"}', "name: mine"]
)
def test_what_the_job_has_to_know_stands_in_no_configuration(job, tmp_path, line):
    (tmp_path / "own.yaml").write_text(f"epochs: 3\n{line}\n")
    done = job("--config", str(tmp_path / "own.yaml"))
    assert done.returncode == 2
    assert re.search(r"^error: .*own.yaml has (runs-dir|name); give it on the command line", done.stderr)


@pytest.mark.timeout(30)
def test_a_configuration_that_is_a_pipe_is_refused(job, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    done = job("--config", str(tmp_path / "pipe"))
    fix = "it is a pipe, a device or a socket, not a file"
    assert (done.returncode, done.stderr) == (2, f"error: --config {tmp_path}/pipe: {fix}\n")


def test_a_second_signal_abandons_no_step(job, tmp_path):
    """The step ends 1 s after the first signal; the second signal comes in between."""
    trap = "#!/bin/bash\ntrap 'sleep 1; exit 5' USR1\ntouch begun\nwhile :; do sleep 0.1; done\n"
    step = write_program(tmp_path / "step.sh", trap)
    signals = "while [[ ! -e begun ]]; do sleep 0.05; done; kill -USR1 $$; sleep 0.3; kill -USR1 $$"
    ends = f'run_step {step}; echo "ended with $status"; wait "${{stopper[0]}}"'
    # Not to the pipes, which a process that is left would keep open until it ends.
    job(then=f"cd {tmp_path}; exec >said 2>&1; ({signals}) & {ends}")
    assert "ended with 5" in (tmp_path / "said").read_text()
    folders = {process.info["cwd"] for process in psutil.process_iter(["cwd"])}
    assert str(tmp_path) not in folders, "what waits to repeat the signal ends with the job"


def test_a_term_to_the_batch_script_alone_stops_the_step_as_usr1_does(job, tmp_path):
    """Users add --signal=B:TERM@120 by habit. mpirun itself would end its ranks at TERM."""
    step = write_program(tmp_path / "step.sh", "trap 'exit 5' USR1\ntouch begun\nwhile :; do sleep 0.1; done\n")
    send = "(while [[ ! -e begun ]]; do sleep 0.05; done; kill -TERM $$) &"
    done = job(then=f'cd {tmp_path}; {send} run_step {step}; echo "ended with $status"; end_job')
    assert "job 7 got TERM: ranks write a checkpoint\n" in done.stdout
    assert "ended with 5\n" in done.stdout
    assert is_requeued(tmp_path)


@pytest.mark.parametrize(("state", "is_sent"), [("RUNNING", True), ("", True), ("COMPLETING", False)])
def test_a_term_by_which_slurm_ends_the_job_is_not_sent_to_its_steps_again(job, tmp_path, state, is_sent):
    """They have got it, and scancel would wait until the job has been requeued, and stop its next start."""
    write_program(tmp_path / "scancel", f"echo sent to $2 >> {tmp_path}/said")
    write_program(tmp_path / "srun", f"touch {tmp_path}/begun; for i in {{1..30}}; do sleep 0.1; done")
    send = f"(while [[ ! -e {tmp_path}/begun ]]; do sleep 0.05; done; kill -TERM $$) &"
    done = job(then=f"job_field() {{ echo {state}; }}; {send} run_step srun")
    assert "job 7 got TERM: ranks write a checkpoint\n" in done.stdout
    assert (tmp_path / "said").exists() == is_sent


def test_a_signal_after_the_step_is_sent_to_nobody(job):
    """It would hit the tasks that ask all nodes whether they answer."""
    done = job(then='run_step true; kill -TERM $$; echo "${#stopper[@]} wait to repeat it"')
    assert done.stdout.endswith("\n0 wait to repeat it\n"), done.stdout


def test_after_a_term_a_job_whose_state_slurm_does_not_tell_may_have_been_cancelled(job, tmp_path):
    done = job(then="kill -TERM $$; job_field() { :; }; greatest=0 status=0; end_job")
    assert done.returncode == 1
    assert "job 7 is perhaps CANCELLED and its ranks have left" in done.stdout
    assert not is_requeued(tmp_path)


def test_a_signal_that_comes_as_the_step_begins_reaches_it(job, tmp_path):
    """It comes once the step has been started, and before its process id is known."""
    trap = "#!/bin/bash\ntrap 'exit 5' USR1\nfor i in {1..200}; do sleep 0.1; done\n"
    step = write_program(tmp_path / "step.sh", trap)
    send = """trap 'if [[ $BASH_COMMAND == step_pid=* ]]; then sleep 0.5; kill -USR1 $$; fi' DEBUG; set -T"""
    done = job(then=f'{send}; run_step {step}; trap - DEBUG; echo "ended with $status"')
    assert done.stdout.endswith("ended with 5\n"), done.stdout


def test_after_a_signal_no_step_begins(job, tmp_path):
    done = job(then=f'kill -TERM $$; run_step touch {tmp_path}/ran; echo "$signal $status"')
    assert done.stdout.endswith("USR1 0\n"), done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "sweep"), [("ddp", ""), ("ddp", "lr=0.1,0.2"), ("ddp-elastic", ""), ("ddp-srun", ""), ("horovod", "")]
)
def test_a_signal_that_comes_first_of_all_is_not_lost(job, tmp_path, name, sweep):
    """A job may be preempted as soon as it has started."""
    write_program(tmp_path / "srun", f"#!/bin/sh\ncase $* in *launch*) touch {tmp_path}/ran;; esac")
    write_program(tmp_path / "python", STORE)
    once = f"[ -e {tmp_path}/sent ] || kill -USR1 $(cut -d ' ' -f 4 /proc/$PPID/stat); touch {tmp_path}/sent\n"
    words = ("--runs-dir", str(tmp_path / "runs"))
    shown = f'{once} echo "JobId=7\n   Command={ROOT}/slurm/{name}.sbatch {" ".join(words)}\n   '
    (tmp_path / "scontrol").write_text(SCONTROL.replace('echo "JobId=7 ', shown))
    array = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "1"}
    own = {**array, "SWEEP": sweep, "PYTHON": sys.executable if sweep else str(tmp_path / "python")}
    done = bash(tmp_path, f"slurm/{name}.sbatch", *words, **own)
    assert (tmp_path / "sent").exists()
    assert "it was stopped before its end; it is requeued" in done.stdout, done.stderr
    assert not (tmp_path / "ran").exists()
    bash(tmp_path, f"slurm/{name}.sbatch", *words, **own, early="no signal, but a variable of the user")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(("first", "status"), [("Exited with exit code 2", 2), ("Killed", 137)])
def test_the_status_of_a_step_is_that_of_the_task_that_failed_first(job, tmp_path, first, status):
    """srun kills the other tasks, and its own status is the greatest."""
    said = f'srun: error: n2: tasks 1-3: {first}"; echo "srun: error: n1: task 0: Exited with exit code 3'
    write_program(tmp_path / "srun", f'exec >&2; echo "{said}"; exit 137')
    assert job(then='run_step srun; echo "$status of $greatest"').stdout.endswith(f"\n{status} of 137\n")


def test_a_folder_of_runs_that_cannot_be_made_is_one_line(job, tmp_path):
    (tmp_path / "runs").touch()
    done = job(NAME="mine")
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: cannot make {tmp_path}/runs/mine/slurm; choose another folder of runs\n")


def test_a_folder_of_runs_may_be_below_the_home_folder(job, tmp_path):
    """bash leaves the ~ in --runs-dir=~/runs: logs would be in a folder named ~, and the record elsewhere."""
    begin = 'begin_job ddp "$@" --runs-dir=~/own --name=mine'
    done = job(begin=begin, then='echo "$run_dir ${options[@]: -2}"', HOME=str(tmp_path))
    expected = f"{tmp_path}/own/mine --runs-dir {tmp_path}/own"  # the ranks' HOME may be that of a container
    assert done.stdout.splitlines()[-1:] == [expected], done.stderr
    assert (tmp_path / "own/mine/slurm").is_dir()


@pytest.mark.parametrize("option", ["--runs-dir=elsewhere", "--name=mine"])
def test_a_container_can_write_where_the_record_goes(job, tmp_path, option):
    """Elsewhere the record would be in the container alone, and lost with it; the last --runs-dir counts."""
    (tmp_path / "srun").write_text("#!/bin/sh\n[ $1 != --help ] || echo --container-image\n")
    done = job(option, then='printf "%s\\n" "${srun[@]}"', CONTAINER_IMAGE="ddp")
    assert done.returncode == 0, done.stderr
    assert f"--container-mounts={ROOT}:{ROOT},{tmp_path}/runs:{tmp_path}/runs" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SLURM_GPUS": "8"}, "4"),
        ({"SLURM_GPUS": "h100:8"}, "4"),
        ({"SLURM_GPUS": "6"}, "- 6"),  # the nodes have different numbers
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:1"}, "4"),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1", "SLURM_TRES_BIND": "gres/gpu:per_task:1"}, "4"),  # 24.11
        ({"SLURM_GPUS_PER_NODE": "4", "SLURM_TRES_PER_TASK": "cpu=4"}, "4 cpu=4"),
        ({"SLURM_GPUS_PER_NODE": "h100:4"}, "h100:4"),
        ({"SLURM_GPUS_PER_NODE": "2"}, "4"),  # --gres=gpu:4 beside the file's --gpus-per-node=2
        ({"SLURM_GPUS_PER_SOCKET": "2"}, "-"),
        ({}, "4"),  # --exclusive without a request: a step would have none
        ({"SLURM_GPUS_ON_NODE": "0"}, "-"),
    ],
)
def test_each_step_has_all_gpus_of_its_nodes_however_they_were_asked_for(job, env, expected):
    """Otherwise no step on one node would start under sbatch --gpus, such as the search for a lost node."""
    names = (
        "${SLURM_GPUS_PER_NODE:--}",
        *(f"${{SLURM_{name}:-}}" for name in ("GPUS", "GPUS_PER_TASK", "TRES_PER_TASK", "TRES_BIND")),
    )
    done = job(then=f"echo {' '.join(names)}", **{"SLURM_GPUS_ON_NODE": "4", **env})
    assert done.stdout.splitlines()[-1] == expected, done.stderr


@pytest.mark.parametrize(
    ("sinfo", "env", "share", "warning"),
    [
        ("8 16000 gpu:2", {}, "2 of 2 GPUs, 8 of 8 cores, 15 of 15 GB of memory", None),
        ("96 515000 gpu:h100:8(S:0-1)", {"SLURM_MEM_PER_NODE": "65536"},
            "2 of 8 GPUs, 8 of 96 cores, 64 of 502 GB of memory",
            "6 of 8 GPUs and 88 of 96 cores of a node; to use them: sbatch --gpus-per-node=8 --cpus-per-task=96"),
        ("96 515000 gpu:a100:2(S:0,3),nvme:4,gpu:2(S:1)", {"SLURM_MEM_PER_CPU": "2048"},
            "2 of 4 GPUs, 8 of 96 cores, 16 of 502 GB of memory",
            "88 of 96 cores of a node; to use them: sbatch --cpus-per-task=96"),
        ("8 16384 gpu:8", {"SLURM_MEM_PER_GPU": "1024", "SLURM_CPUS_ON_NODE": "4"},
            "2 of 8 GPUs, 4 of 8 cores, 2 of 16 GB of memory",
            "6 of 8 GPUs of a node; to use them: sbatch --gpus-per-node=8"),
        ("64 16384 (null)", {"SLURM_GPUS_ON_NODE": "0", "SLURM_NTASKS_PER_NODE": "4"},
            "0 of 0 GPUs, 8 of 64 cores, 16 of 16 GB of memory",
            "56 of 64 cores of a node; to use them: sbatch --cpus-per-task=16"),
    ],
)  # fmt: skip
def test_the_first_lines_compare_the_job_with_the_node(job, tmp_path, sinfo, env, share, warning):
    write_program(tmp_path / "sinfo", f"echo '{sinfo}'")
    own = {"SLURMD_NODENAME": "n1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "2"}
    done = job(**{**own, **env})
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = done.stdout.splitlines()
    assert re.match(r"job 7, start 1: ddp on 2 nodes x \d, head n1:\d+, record and logs in ", first)
    expected = [f"n1 gives this job {share}"]
    if warning:
        expected.append(f"warning: this job does not use {warning}")
    assert others == expected


def test_a_slurm_that_does_not_answer_is_no_obstacle(job, tmp_path):
    write_program(tmp_path / "sinfo", "")
    done = job(SLURMD_NODENAME="n1", SLURM_GPUS_ON_NODE="2")
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")


BEGIN_RECORD = 'echo "{}" >"$run_dir/config.json"'
"""What rank 0 does once the ranks have met."""


@pytest.mark.parametrize("given", ["--resume none", "--resume auto", "--start-from other.pt"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_job_that_starts_again_goes_on_with_its_record(job, given, has_begun):
    given = f"--name mine {given}"
    assert job(begin=f'begin_job ddp "$@" {given}', then=BEGIN_RECORD if has_begun else "").returncode == 0
    done = job(begin=f'begin_job ddp "$@" {given}', then='echo "${options[*]}"', SLURM_RESTART_COUNT="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith(f"{given} --resume auto")


@pytest.mark.parametrize(
    ("then", "goes_on"),
    [
        (BEGIN_RECORD, True),
        (f'{BEGIN_RECORD}; touch -d 2020-01-01 "$run_dir/config.json"', True),  # by the clock of a file server
        (":", False),
        (RECORD, False),
        ('rm "$run_dir/config.json"', True),
        ("", False),
    ],
)
def test_a_job_that_starts_again_resumes_no_record_that_it_replaces(job, tmp_path, then, goes_on):
    """Its first start may end before its ranks meet (a port is taken), or before its script (a node is lost)."""
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.json").write_text("another launch")
    given = ("--name", "mine", "--overwrite")
    assert not then or job(*given, then=then).returncode == 0
    again = job(*given, then='echo "${options[*]}"', SLURM_RESTART_COUNT="1")
    assert (again.returncode, again.stderr) == (0, "")
    options = [*given, "--runs-dir", str(tmp_path / "runs"), *("--resume", "auto") * goes_on]
    assert again.stdout.splitlines()[-1].endswith(" ".join(options))


def test_a_job_that_starts_again_in_a_folder_that_looks_new_warns(job, tmp_path):
    """The disk of the runs may not be mounted on this node: its run would begin again from step 0."""
    logs = tmp_path / "runs/ddp-job7/slurm"
    said = f"warning: job 7, start 2: no earlier start has written to {logs}; is this the same disk?"
    first, again = (job(then=":", SLURM_RESTART_COUNT=count) for count in ("0", "1"))
    assert (said in first.stderr, said in again.stderr) == (False, False)
    shutil.rmtree(tmp_path / "runs")
    assert said in job(then=":", SLURM_RESTART_COUNT="1").stderr


def test_a_script_whose_first_start_never_ran_resumes_nothing_unasked(script, tmp_path):
    """Slurm counts a start whose node was lost before."""
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/model.pt").touch()
    done = script("echo begun", SLURM_RESTART_COUNT="1")
    assert (done.returncode, "begun" in done.stdout.splitlines()) == (2, False)
    assert "is not empty; set RESUME=auto to resume this run, or choose another NAME" in done.stderr


def test_the_command_that_resumes_a_script_can_be_pasted(job, tmp_path):
    path = tmp_path / "my train.py"
    path.touch()
    own = {"SCRIPT": str(path), "RUNS_DIR": str(tmp_path / "runs"), "NAME": "mine"}
    command = job(then='echo "$go_on"', **own).stdout.splitlines()[-1]
    assert shlex.split(command.removeprefix("to resume: ")) == [
        "NAME=mine",
        "RESUME=auto",
        f"SCRIPT={path}",
        "sbatch",
        "...",
    ]


@pytest.mark.parametrize(
    ("then", "says"), [(BEGIN_RECORD, "1"), (":", ""), ('rm "$run_dir/config.json"', "1"), ("", "")]
)
def test_a_submitted_job_that_starts_again_tells_its_ranks_whether_it_resumes(submitted, tmp_path, then, says):
    (tmp_path / "runs/mine/config.json").write_text("another launch")
    says_so = 'echo "resumes: $RESUMES"; '
    assert not then or "resumes: \n" in submitted("", 1, f"{says_so} {then}").stdout
    assert f"resumes: {says}\n" in submitted("", 1, says_so + ":", SLURM_RESTART_COUNT="1").stdout


# ---- SWEEP: the grid is read by the job's Python, not by the host's python3


@pytest.fixture
def sweep(job, tmp_path):
    """Return a function that begins a task of an array, on a host whose python3 is too old."""
    write_program(tmp_path / "python3", "echo an old Python >&2\nexit 1")

    def run(**env):
        """Return the status, what the task said before its usual line, its point, and its errors."""
        own = {f"SLURM_ARRAY_TASK_{name}": value for name, value in (("ID", "1"), ("MIN", "0"), ("MAX", "1"))}
        own |= {"SWEEP": "lr=0.1,0.2 seed=3", "SLURM_GPUS_ON_NODE": "2", "NAME": "mine"}
        done = job(then='echo "${options[@]}"', **{**own, **env})
        said, _, rest = done.stdout.partition("job 7, start 1: ddp on ")
        point = re.sub("^--name mine-1 --device cuda (.*) --runs-dir .*$", r"\1", rest.partition("\n")[2])
        return done.returncode, said, point, done.stderr

    return run


POINT = "--lr 0.2 --seed 3\n"


def test_a_sweep_uses_the_venvs_python(sweep):
    assert sweep() == (0, "", POINT, "")


def test_the_first_task_warns_of_points_without_one(sweep):
    _, said, _, _ = sweep(SLURM_ARRAY_TASK_MIN="1", SWEEP="lr=0.1,0.2 seed=3,4")
    assert said == (
        "warning: SWEEP has 4 points, and the array ends with task 1; for the others: sbatch --array=2-3 ...\n"
    )
    assert sweep(SLURM_ARRAY_TASK_MIN="1") == (0, "", POINT, "")


@pytest.mark.parametrize(
    ("own", "command"),
    [
        ({}, "sbatch ... --lr 0.02 --name mine-1 --resume auto"),
        ({"SCRIPT": "{}/train.py"}, "NAME=mine-1 RESUME=auto SCRIPT={}/train.py sbatch ... --lr 0.02"),
    ],
)
def test_a_task_says_how_its_run_resumes_by_itself(job, tmp_path, own, command):
    """As an array, it would be another run; without SWEEP, its point is an option like others."""
    (tmp_path / "train.py").touch()
    own = {name: value.format(tmp_path) for name, value in own.items()}
    own |= {**ARRAY, "NAME": "mine", "RUNS_DIR": str(tmp_path / "runs"), "PYTHON": sys.executable}
    done = job(then='echo "$go_on"', **own)
    assert done.stdout.splitlines()[-1] == f"to resume, without SWEEP and --array: {command.format(tmp_path)}"


def test_a_sweep_that_makes_no_sense_is_status_2(sweep):
    assert sweep(SLURM_GPUS_ON_NODE="0", PYTHON=shutil.which("false")) == (2, "", "", "")


@pytest.mark.parametrize(
    ("program", "image", "asked"),
    [
        ("apptainer", "ddp.sif", rf"exec --bind {ROOT}:{ROOT},\S+/runs:\S+/runs --pwd {ROOT} --nv ddp.sif "),
        ("srun", "ddp.sqsh", r"(?=.*--container-image=ddp.sqsh).* --overlap --nodes=1 --ntasks=1 --nodelist=\S+ "),
    ],
)
def test_a_sweep_uses_the_containers_python(sweep, tmp_path, program, image, asked):
    script = f"""#!/usr/bin/env bash
        if [[ $1 == --help ]]; then exec echo "--container-image=[USER@]IMAGE"; fi
        echo "$*" >{tmp_path}/asked
        while [[ $1 != python3 ]]; do shift; done
        exec {sys.executable} "${{@:2}}"
    """
    write_program(tmp_path / program, script)
    assert sweep(CONTAINER_IMAGE=image, PYTHON="") == (0, "", POINT, "")
    assert re.match(asked + "python3 -m slurm.sweep ", (tmp_path / "asked").read_text())
