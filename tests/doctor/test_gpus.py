"""The check of one node's GPUs: for a prolog, a health check, and jobs that have failed."""

import os
import re
import subprocess
import sys
import time

import pytest

from scripts.doctor import gpus, kernel_log
from tests.support import ROOT, write_program

XID = "3,1,{us};NVRM: Xid (PCI:0000:3b:00): {xid}, pid=77, name=python, what the driver says\n"

COLD, HOT = ", ".join(["Not Active"] * 4), ", ".join(["Active"] * 4)
H100 = 'echo "0, NVIDIA H100, 580.1, 81559, 4, 31"'
NVIDIA_SMI = {
    "healthy": f'case $1 in *ecc*) echo "0, {COLD}" ;; *) {H100} ;; esac',
    "without ECC": 'case $1 in *ecc*) exit 2 ;; *) echo "0, NVIDIA L4, 580.1, 81559, 4, 31" ;; esac',
    "hot": f'case $1 in *ecc*) echo "0, {HOT}" ;; *) echo "0, NVIDIA H100, 580.1, 81559, 80000, 91" ;; esac',
    "ecc": f'case $1 in *ecc*) echo "3, {COLD}" ;; *) {H100} ;; esac',
    "ecc, throttle renamed": f'case $1 in *throttle*) exit 2 ;; *ecc*) echo "3, {COLD}" ;; *) {H100} ;; esac',
    "ecc alone": f"case $1 in *slowdown*) exit 2 ;; *ecc*) echo 3 ;; *) {H100} ;; esac",
    "one is gone": f'case $1 in *ecc*) echo "0, {COLD}" ;; *) {H100}; {H100.replace("0, N", "1, N")} ;; esac',
    "no table": "echo No devices were found",
    "lost": 'echo "0, [GPU is lost], 580.1, [GPU is lost], [GPU is lost], [GPU is lost]"',
    "off the bus": "echo 'Unable to determine the device handle for GPU0: 0000:3B:00.0: Unknown Error'; exit 15",
    "hangs": "exec sleep 60",
}


@pytest.fixture
def check(tmp_path):
    """Return a function that checks a node with a given nvidia-smi and Xid, and returns status and output."""

    def run(*options, smi="healthy", xid=None, ago_s=60.0):
        write_program(tmp_path / "nvidia-smi", NVIDIA_SMI[smi])
        us = int((time.clock_gettime(time.CLOCK_BOOTTIME) - ago_s) * 1e6)
        (tmp_path / "kmsg").write_text(XID.format(us=us, xid=xid) if xid else "")
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "KMSG": str(tmp_path / "kmsg")}
        words = [sys.executable, "-m", "scripts.doctor.gpus", *options]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("smi", ["healthy", "without ECC", "hot"])
def test_a_node_that_works_has_no_line(check, smi):
    """A hot GPU, or one whose memory is in use, is not reported either: another job may be the cause."""
    assert check(smi=smi) == (0, "")


@pytest.mark.parametrize(
    ("planted", "status", "said"),
    [
        *(
            ({"smi": smi}, 1, ": GPU 0 (NVIDIA H100) has 3 uncorrected ECC errors; reset it or replace it")
            for smi in ("ecc", "ecc, throttle renamed", "ecc alone")
        ),
        ({"smi": "one is gone"}, 1, ": gpus: nvidia-smi listed 2 GPUs, and 1 a moment later; see nvidia-smi"),
        ({"smi": "no table"}, 0, ": gpus: nvidia-smi says No devices were found; see nvidia-smi and dmesg there"),
        ({"smi": "hangs"}, 0, ": gpus: nvidia-smi did not end within 4 s; see nvidia-smi and dmesg there"),
        ({"smi": "lost"}, 1, ": GPU 0 ([GPU is lost]): nvidia-smi says GPU is lost; see dmesg; restart the node"),
        ({"smi": "off the bus"}, 1, ": gpus: nvidia-smi ended with status 15: Unable to determine the device"),
        ({"xid": 79}, 1, ": GPU PCI:0000:3b:00, Xid 79 once: fallen off the bus; drain the node and switch"),
        ({"xid": 94}, 0, "Xid 94 once: contained ECC error; keep using it; reset the GPU"),
    ],
)
def test_a_broken_gpu_is_a_line_with_its_remedy(check, planted, status, said):
    """A slow driver and GPUs that a job may not use are warnings: status 1 in a prolog drains the node."""
    found, text = check(**planted)
    assert (found, len(text.splitlines())) == (status, 1)
    assert text.startswith("error: " if status else "warning: ")
    assert said in text


def test_what_was_before_does_not_count(check):
    # Seconds, because a machine that has just started cannot have events that are ten minutes old.
    assert check("--since-s", "40", xid=79, ago_s=45.0) == (0, "")
    assert check("--since-s", "40", xid=79, ago_s=5.0)[0] == 1


def test_a_hung_driver_that_also_floods_the_log_fits_in_the_promised_10_s():
    """Both limits are reached then, one after the other; Python's start takes the rest."""
    assert kernel_log.READ_S + gpus.NVIDIA_SMI_S <= 9


def test_bad_usage_is_one_line(check):
    assert check("--since-s", "-1") == (2, "error: --since-s: expects a number above 0, got '-1'\n")


@pytest.mark.parametrize(
    ("python", "is_fault"),
    [
        ("echo 'error: n2: Xid 79'; exit 1", True),
        ("echo 'warning: n2: Xid 94'", False),
        ("echo 'ImportError: no module' >&2; exit 1", False),
        (None, False),  # there is no checkout
    ],
)
def test_an_administrators_scripts_drain_a_node_for_a_fault_alone(tmp_path, python, is_fault):
    """A checkout that is missing or broken on many nodes must not drain them all."""
    page = (ROOT / "docs/slurm-admin.md").read_text()
    scripts = re.findall(r"```bash\n(#!/bin/sh\n# (?:Prolog|HealthCheckProgram)=.*?)```", page, re.DOTALL)
    if python:
        (tmp_path / "checkout/.venv/bin").mkdir(parents=True)
        write_program(tmp_path / "checkout/.venv/bin/python", python)
    write_program(tmp_path / "scontrol", f'echo "$*" >>{tmp_path}/drained')
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    statuses = []
    for script in scripts:
        words = ["sh", "-c", script.replace("/opt/cluster-recipes", f"{tmp_path}/checkout")]
        statuses.append(subprocess.run(words, env=env, capture_output=True, timeout=60).returncode)
    assert statuses == [int(is_fault), 0]
    assert (tmp_path / "drained").exists() is is_fault
