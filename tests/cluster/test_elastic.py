"""The elastic job on a real Slurm: an agent is lost and comes back; a node that Slurm has lost stays away."""

import contextlib
import sys

import psutil
import pytest

from tests.support import TIMEOUT_S, last_step, launches, wait_until

pytestmark = pytest.mark.slow


def test_the_job_goes_on_without_a_node_and_takes_it_in_again(cluster, tmp_path):
    flags = ("--nodes=3", "--gpus-per-node=1")
    env = {"PYTHON": sys.executable, "MIN_NODES": "2", "MAX_RESTARTS": "3", "SLOW_UNTIL": str(tmp_path / "end")}
    words = ("--log-every", "1", "--checkpoint-every", "20", "--device", "cpu", "--max-steps", "1200")
    words += ("--data", "tests.slow_data:slower_images", "--workers", "0", "--epochs", "1000")
    words += ("--global-batch-size", "16")
    job = cluster.submit(tmp_path, "ddp-elastic.sbatch", *words, flags=flags, **env)
    job.wait_for_text("epoch 1 ")
    wait_until(lambda: last_step(job.run) > 30, TIMEOUT_S, "some steps")
    [agent] = cluster.processes("-m scripts.launch.agent", "n2")
    agent.kill()
    wait_until(lambda: launches(job.run)[1:][-1:] == [3], TIMEOUT_S, lambda: f"n2 is back: {job.text}")
    sizes = launches(job.run)
    try:
        for process in [*cluster.processes("slurmd -D -N n3"), *cluster.processes(job.run.name, "n3")]:
            with contextlib.suppress(psutil.NoSuchProcess):  # some end together with earlier ones
                process.kill()
        wait_until(lambda: launches(job.run)[len(sizes) :] == [2], TIMEOUT_S, lambda: f"without n3: {job.text}")
        (tmp_path / "end").touch()
        assert job.wait() == "COMPLETED", job.text
        assert (job.run / "result.json").exists()
    finally:
        cluster.script("restart", "n3")
    cluster.wait_for_idle("n3")
