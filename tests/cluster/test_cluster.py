"""The test cluster itself: up once, down without a trace, and one line for what it cannot do."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import require_slurm
from tests.support import ROOT, Command, has_ended, run_command, wait_until, write_program

pytestmark = pytest.mark.slow


def test_down_leaves_nothing(tmp_path_factory):
    require_slurm()
    cluster = Cluster(tmp_path_factory.mktemp("s") / "c")
    assert "no test cluster is up" in cluster.script("status").stdout
    up = cluster.script("up", "2")
    assert up.returncode == 0, up.stderr
    assert f"source {cluster.folder}/activate" in up.stdout
    mknod = run_command("mknod", str(cluster.folder / "own"), "c", "195", "1")
    if mknod.status == 0:  # else a container forbids it
        assert (cluster.folder / "gpu1").is_char_device()  # newer slurmd accepts nothing else without an error
    inside = cluster.processes()
    assert {"munged", "slurmctld", "slurmd"} <= {process.name() for process in inside}
    # A running job, and a command that was started inside the cluster from outside.
    cluster.run("sbatch", "--wrap", "sleep 1000", cwd=cluster.folder)
    command = [str(ROOT / "scripts/lab/slurm_cluster.sh"), "run", "srun", "sleep", "1000"]
    outside = subprocess.Popen(command, env={**os.environ, "SLURM_CLUSTER_DIR": str(cluster.folder)})
    wait_until(lambda: len(cluster.run("squeue", "-h", "-t", "R").splitlines()) == 2, 30, "two jobs")

    again = cluster.script("up", "2")
    assert again.returncode == 2
    assert again.stderr.startswith("error: a test cluster runs already (process ")
    shown = cluster.script("status").stdout
    assert "n1 " in shown
    assert "wrap" in shown

    assert cluster.script("down").returncode == 0
    assert outside.wait(10) != 0
    assert not cluster.folder.exists()
    assert not cluster.processes()
    assert all(map(has_ended, inside))
    mounts = subprocess.run(["findmnt", "--raw"], capture_output=True, text=True).stdout
    assert "/run/netns" not in mounts  # a Docker engine has its namespaces in /run/docker/netns
    # Slurm's commands now print what to do.
    result = cluster.script("run", "sinfo")
    assert (result.returncode, result.stderr) == (2, "error: no test cluster is up; make slurm-up starts one\n")


@pytest.mark.parametrize("moment", ["slurm.conf", "init.out", "pid", "munge.sock"])
def test_up_that_is_interrupted_leaves_no_process(tmp_path, moment):
    require_slurm()
    cluster = Cluster(tmp_path / "c")
    write_program(tmp_path / "nsenter", "exit 1")  # never seen to be ready: the signal does not come too late
    own = {"SLURM_CLUSTER_DIR": str(cluster.folder), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    up = Command("scripts/lab/slurm_cluster.sh", "up", "1", **own)
    wait_until((cluster.folder / moment).exists, 20, lambda: up.text)
    os.killpg(up.process.pid, signal.SIGINT)
    assert up.wait(20).status in (130, -signal.SIGINT)
    assert cluster.script("down").stdout == "no test cluster is up\n"
    assert not cluster.folder.exists()


def test_hosts_of_other_names_and_two_threads_a_core(tmp_path):
    """As on many clusters, NodeName is not the host's name, and CPUs counts threads."""
    require_slurm()
    cluster = Cluster(tmp_path / "c")
    up = cluster.script("up", "2", HOST_PREFIX="rack7-", THREADS_PER_CORE="2")
    assert up.returncode == 0, up.stderr
    try:
        (tmp_path / "train.py").write_text("import os, socket; print(os.environ['RANK'], socket.gethostname())")
        for file in ("ddp-srun.sbatch", "ddp-elastic.sbatch"):
            job = cluster.submit(tmp_path, file, SCRIPT="train.py", PYTHON=sys.executable)
            assert job.wait() == "COMPLETED", job.text
            assert {"0 rack7-n1", "1 rack7-n1"} <= set(job.text.splitlines()), "the head's ranks are in its output"
            assert "n1 gives this job 2 of 2 GPUs, 8 of 8 cores" in job.text
            [other] = (job.run / "slurm").glob("*n2.txt")  # since Slurm 25.11, it has the NodeName
            assert {"2 rack7-n2", "3 rack7-n2"} <= set(other.read_text().splitlines())
    finally:
        assert cluster.script("down").returncode == 0


def test_plain_commands_work_in_the_shell_that_sources_it(cluster, tmp_path):
    script = f"source {cluster.folder}/activate && srun -N3 hostname && pwd -P"
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    *hosts, folder = result.stdout.split()
    assert sorted(hosts) == ["n1", "n2", "n3"]
    assert folder == str(tmp_path)


@pytest.mark.parametrize("nodes", ["0", "-1", "two", "100", ""])
def test_a_number_of_nodes(tmp_path, nodes):
    result = Cluster(tmp_path / "c").script("up", nodes)
    assert result.returncode == 2
    assert result.stderr.startswith("error: NODES expects a whole number from 1 to 99")


def test_a_user_without_root_is_told():
    as_nobody = ["setpriv", f"--reuid={pwd.getpwnam('nobody').pw_uid}", "--clear-groups"] * (os.geteuid() == 0)
    with tempfile.TemporaryDirectory() as folder:  # any user may read this folder
        Path(folder).chmod(0o755)
        script = shutil.copy(ROOT / "scripts/lab/slurm_cluster.sh", folder)
        result = subprocess.run([*as_nobody, script, "up"], cwd=folder, capture_output=True, text=True)
    error = "error: a test cluster needs root, for namespaces and slurmd; start it with sudo\n"
    assert (result.returncode, result.stderr) == (2, error)
