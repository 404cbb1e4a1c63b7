"""slurm/job.sh without Slurm: a job's first lines, and which Python it uses; stubs play Slurm's commands."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT, write_program

JOB = {
    **{"SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURMD_NODENAME": "n1"},
    **{
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_ON_NODE": "8",
        "PYTHON": sys.executable,
    },
}


def run_job(folder, script, sinfo="8 16000 gpu:2", srun="", **env):
    """Run lines of an sbatch file after job.sh; return the status, the output and the errors."""
    stubs = {"scontrol": "printf 'n1\\nn2\\nn3\\nn4\\n'", "sinfo": f"printf '%s\\n' {sinfo!r}", "srun": srun}
    for name, body in stubs.items():
        write_program(folder / name, f"#!/usr/bin/env bash\n{body}\n")
    own = ("SLURM", "CONTAINER", "NAME", "NPROC_PER_NODE", "FABRIC", "MASTER_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    clean |= {**JOB, "PATH": f"{folder}:{clean['PATH']}", **env}
    command = ["bash", "-c", f"set -u; source slurm/job.sh; {script}", "bash", "--runs-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=30)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("sinfo", "env", "share", "warning"),
    [
        ("8 16000 gpu:2", {}, "2 of 2 GPUs, 8 of 8 cores, 15 of 15 GB of memory", None),
        (
            "96 515000 gpu:h100:8(S:0-1)",
            {"SLURM_MEM_PER_NODE": "65536"},
            "2 of 8 GPUs, 8 of 96 cores, 64 of 502 GB of memory",
            "6 of 8 GPUs and 88 of 96 cores of a node; to use them: sbatch --gpus-per-node=8 --cpus-per-task=96",
        ),
        (
            "96 515000 gpu:a100:2(S:0,3),nvme:4,gpu:2(S:1)",
            {"SLURM_MEM_PER_CPU": "2048"},
            "2 of 4 GPUs, 8 of 96 cores, 16 of 502 GB of memory",
            "88 of 96 cores of a node; to use them: sbatch --cpus-per-task=96",
        ),
        (
            "8 16384 gpu:8",
            {"SLURM_MEM_PER_GPU": "1024", "SLURM_CPUS_ON_NODE": "4"},
            "2 of 8 GPUs, 4 of 8 cores, 2 of 16 GB of memory",
            "6 of 8 GPUs of a node; to use them: sbatch --gpus-per-node=8",
        ),
        (
            "64 16384 (null)",
            {"SLURM_GPUS_ON_NODE": "0", "SLURM_NTASKS_PER_NODE": "4"},
            "0 of 0 GPUs, 8 of 64 cores, 16 of 16 GB of memory",
            "56 of 64 cores of a node; to use them: sbatch --cpus-per-task=16",
        ),
    ],
)
def test_the_first_lines_compare_the_job_with_the_node(tmp_path, sinfo, env, share, warning):
    status, text, errors = run_job(tmp_path, 'begin_job ddp "$@"', sinfo, **env)
    assert (status, errors) == (0, "")
    first, *others = text.splitlines()
    assert re.match(r"job 7, start 1: ddp on 4 nodes x \d, head n1:\d+, record and logs in ", first)
    expected = [f"n1 gives this job {share}"]
    if warning:
        expected.append(f"warning: this job does not use {warning}")
    assert others == expected


def test_a_slurm_that_does_not_answer_is_no_obstacle(tmp_path):
    status, text, errors = run_job(tmp_path, 'begin_job ddp "$@"', "")
    assert (status, len(text.splitlines()), errors) == (0, 1, "")


@pytest.mark.parametrize(
    ("resume", "has_begun", "added"),
    [("none", False, True), ("auto", False, True), ("other.pt", False, False), ("other.pt", True, True)],
)
def test_a_job_that_starts_again_goes_on_with_its_record(tmp_path, resume, has_begun, added):
    """A job that was to begin from another run's checkpoint, and has not begun, begins from it again."""
    if has_begun:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "config.json").touch()
    script = f'begin_job ddp "$@" --name mine --resume {resume}; echo "${{options[*]}}"'
    status, text, errors = run_job(tmp_path, script, SLURM_RESTART_COUNT="1")
    assert (status, errors) == (0, "")
    given = f"--name mine --resume {resume}"
    assert text.splitlines()[-1].endswith(f"{given} --resume auto" if added else given)


# ---- array.sbatch: the grid is read by the job's Python, not by the host's python3


def run_array(folder, **env):
    """Run array.sbatch up to begin_job on a host whose python3 is too old; return the results of run_job()."""
    write_program(folder / "python3", "echo an old Python >&2\nexit 1")
    text = (ROOT / "slurm/array.sbatch").read_text()
    head, tail = re.split(r'source "\$\(dirname "\$file"\)/job.sh".*\n', text)
    body = tail.replace("begin_job", "echo", 1).split("\nrun_step")[0]
    assert "#SBATCH" in head
    array = {f"SLURM_ARRAY_TASK_{name}": value for name, value in (("ID", "1"), ("MIN", "0"), ("MAX", "1"))}
    return run_job(folder, f"set --\n{body}", **{**array, "SWEEP": "lr=0.1,0.2 seed=3", **env})


def test_a_sweep_uses_the_venvs_python(tmp_path):
    assert run_array(tmp_path) == (0, "ddp --lr 0.2 --seed 3\n", "")


def test_the_first_task_warns_of_points_without_one(tmp_path):
    _, text, _ = run_array(tmp_path, SLURM_ARRAY_TASK_MIN="1", SWEEP="lr=0.1,0.2 seed=3,4")
    assert text.startswith(
        "warning: SWEEP has 4 points, and the array ends with task 1; for the others: sbatch --array=2-3 ...\n"
    )
    assert run_array(tmp_path, SLURM_ARRAY_TASK_MIN="1")[1] == "ddp --lr 0.2 --seed 3\n"


def test_a_sweep_that_makes_no_sense_is_status_2(tmp_path):
    status, text, errors = run_array(tmp_path, SLURM_GPUS_ON_NODE="0", PYTHON=shutil.which("false"))
    assert (status, text, errors) == (2, "", "")


def test_a_sweep_uses_apptainers_python(tmp_path):
    write_program(
        tmp_path / "apptainer",
        f'#!/bin/bash\necho "$*" >{tmp_path}/asked\nwhile [[ $1 != *.sif ]]; do shift; done\nshift 2\n'
        f'exec {sys.executable} "$@"\n',
    )
    result = run_array(tmp_path, CONTAINER_IMAGE="ddp.sif", PYTHON="")
    assert result == (0, "ddp --lr 0.2 --seed 3\n", "")
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith(f"exec --bind {ROOT}:{ROOT} --pwd {ROOT} --nv ddp.sif python3 -m slurm.sweep ")


def test_a_sweep_uses_pyxiss_python(tmp_path):
    srun = f"""
        if [[ $1 == --help ]]; then exec echo "--container-image=[USER@]IMAGE"; fi
        echo "$*" >{tmp_path}/asked
        while [[ $1 != python3 ]]; do shift; done
        shift
        exec {sys.executable} "$@"
    """
    (tmp_path / "asked").touch()
    status, text, errors = run_array(tmp_path, CONTAINER_IMAGE="ddp.sqsh", PYTHON="", srun=srun)
    assert (status, text, errors) == (0, "ddp --lr 0.2 --seed 3\n", "")
    asked = (tmp_path / "asked").read_text()
    assert "--container-image=ddp.sqsh" in asked
    assert re.search(r" --overlap --nodes=1 --ntasks=1 --nodelist=\S+ python3 -m slurm.sweep ", asked)
