"""The Slurm cluster of the tests: real daemons and three nodes with a network each, one for a test worker."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.conftest import require
from tests.support import ROOT

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "unshare", "nsenter")


def require_slurm():
    """Skip the test, or fail it with REQUIRE=slurm, if no cluster can be started."""
    require("slurm", os.geteuid() == 0, "a cluster of namespaces requires root", "run `make test-all` as root")
    missing = [command for command in COMMANDS if not shutil.which(command)]
    remedy = "as root: apt-get install --no-install-recommends slurm-wlm munge iproute2"
    require("slurm", not missing, f"there is no {', '.join(missing)}", remedy)


@pytest.fixture(scope="session")
def cluster():
    """Return a cluster of three nodes; Slurm notices a lost slurmd within 6 s."""
    require_slurm()
    folder = Path(tempfile.mkdtemp(prefix="cluster-recipes-"))
    cluster = Cluster(folder / "slurm")
    up = cluster.script("up", "3", SLURMD_TIMEOUT_S="6", KILL_WAIT_S="5")
    assert up.returncode == 0, up.stderr
    # If the test worker is killed, no fixture ends the cluster: this process does.
    wait = f"while kill -0 {os.getpid()} 2>/dev/null; do sleep 1; done; exec scripts/lab/slurm_cluster.sh down"
    env = {**os.environ, "SLURM_CLUSTER_DIR": str(cluster.folder)}
    watch = subprocess.Popen(["bash", "-c", wait], cwd=ROOT, env=env, start_new_session=True)
    yield cluster
    watch.kill()
    watch.wait()
    down = cluster.script("down")
    shutil.rmtree(folder)
    assert down.returncode == 0, down.stderr


@pytest.fixture(autouse=True)
def no_job_is_left(request):
    """Cancel the jobs that a failed test leaves behind: they would take nodes and cores from the next test."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").script("run", "scancel", "--user=root")
