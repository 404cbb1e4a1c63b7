"""Every launcher gives the same map of ranks: one node of four processes, and two nodes of two."""

import json
import os
import re
import subprocess
import sys

import pytest

from recipes.common.errors import UserError
from recipes.probe.train import check
from scripts.local import free_port
from tests.conftest import need_horovod, need_horovod_with_mpi, need_mpi
from tests.support import ROOT

MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def torchrun(nodes, nproc_per_node):
    words = ["--nodes", str(nodes), "--nproc-per-node", str(nproc_per_node)]
    return [sys.executable, "-m", "scripts.local", "probe", *words]


def mpirun(nodes, nproc_per_node):
    need_mpi()
    words = ["--nproc-per-node", str(nproc_per_node)] if nodes > 1 else []
    size = str(nodes * nproc_per_node)
    return ["mpirun", "-q", "-np", size, sys.executable, "-m", "scripts.mpirun", *words, "recipes.probe.train"]


def horovodrun(controller, nodes, nproc_per_node):
    need_horovod()
    words = [str(ROOT / ".venv/bin/horovodrun"), f"--{controller}", "--disable-cache", "-np", str(nproc_per_node)]
    return [*words, sys.executable, "-m", "recipes.probe.train", "--join", "horovod"]


def horovodrun_gloo(nodes, nproc_per_node):
    return horovodrun("gloo", nodes, nproc_per_node)


def horovodrun_mpi(nodes, nproc_per_node):
    need_horovod_with_mpi()
    return horovodrun("mpi", nodes, nproc_per_node)


def spawn(nodes, nproc_per_node):
    one = (
        f"{sys.executable} -m recipes.probe.train --join spawn --nnodes {nodes} --nproc-per-node {nproc_per_node}"
    )
    starters = [f"{one} --node-rank {node} &" for node in range(nodes)]
    environment = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1"
    return ["bash", "-c", f"export {environment}; {' '.join(starters)} wait"]


LAUNCHERS = [(torchrun, 2), (spawn, 2), (mpirun, 2), (mpirun, 1), (horovodrun_gloo, 1), (horovodrun_mpi, 1)]
"""Each returns the command that starts the probe on so many nodes, or skips. horovodrun starts other nodes by ssh;
scripts/horovod_agent.py is the way without."""


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "nodes"), LAUNCHERS)
def test_map(launcher, nodes):
    size = 4 // nodes
    command = launcher(nodes, size)
    outcome = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **MPI_ENV}, capture_output=True, text=True, timeout=120
    )
    assert outcome.returncode == 0, outcome.stderr
    [found] = re.findall(r"probe (\{.*\})", outcome.stdout)  # horovodrun marks each line with the rank
    content = json.loads(found)
    assert content["world_size"] == 4
    assert content["sum"] == 1 + 2 + 3 + 4
    expected = [
        {"rank": r, "local_rank": r % size, "node_rank": r // size, "world_size": 4, "local_world_size": size}
        for r in range(4)
    ]
    assert [{name: row[name] for name in expected[0]} for row in content["ranks"]] == expected
    assert len({row["pid"] for row in content["ranks"]}) == 4


def test_a_wrong_map_is_refused():
    rows = [{"rank": rank, "local_rank": local, "host": "a"} for rank, local in enumerate([0, 1, 1, 0])]
    with pytest.raises(UserError, match="rank 2 on a has local rank 1 after 1"):
        check(rows, 10)
    with pytest.raises(UserError, match="gave 9"):
        check(rows, 9)
