"""The sbatch files on a real Slurm: the numbers of single, the right map of ranks, and an end in every case."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.cluster.cluster import GPU_FAULT
from tests.conftest import need_horovod, need_horovod_with_mpi, need_mpi
from tests.support import (
    ROOT,
    TIMEOUT_S,
    accuracies,
    is_equal,
    launches,
    losses,
    train,
    wait_until,
    weights,
    write_program,
)

pytestmark = pytest.mark.slow

SETTINGS = (
    *("--global-batch-size", "96", "--seed", "2", "--lr", "0.01", "--warmup-steps", "5"),
    *("--max-steps", "24", "--log-every", "1"),
)
"""Few steps, at a learning rate that keeps rounding errors small."""

ENDLESS = ("--epochs", "100000", "--data", "tests.slow_data:images", "--workers", "0")

FILES = {name: (f"{name}.sbatch", {}) for name in ("ddp", "ddp-srun", "spawn", "apex", "fsdp")}
FILES |= {f"horovod-{start}": ("horovod.sbatch", {"START": start}) for start in ("pmix", "gloo", "mpirun")}

OPTIONS = dict.fromkeys((name for name in FILES if "horovod" in name), ("--compression", "none"))
OPTIONS["apex"] = ("--opt-level", "O0")
"""Options that make a recipe exact."""


def submit(cluster, folder, name, *options, flags=("--gpus-per-node=1",)):
    """Submit a file by its key in FILES; one rank per node is enough for most tests, and starts sooner."""
    if name.startswith("horovod"):
        need_horovod()
    if name in ("horovod-pmix", "horovod-mpirun"):
        need_horovod_with_mpi()
    file, env = FILES[name]
    options += OPTIONS.get(name, ())
    return cluster.submit(folder, file, *options, flags=flags, PYTHON=sys.executable, **env)


def assert_world_size(world_size, cluster, folder, file, flags, **env):
    """Submit a script that needs no torch; assert its number of ranks; return the completed job."""
    # One write, so that the lines of several ranks do not mix.
    source = "import os\nos.write(1, f'one of {os.environ[\"WORLD_SIZE\"]}\\n'.encode())\n"
    (folder / "train.py").write_text(source)
    job = cluster.submit(folder, file, flags=flags, SCRIPT="train.py", **{"PYTHON": sys.executable, **env})
    assert job.wait() == "COMPLETED", job.text
    logs = [path.read_text() for path in (job.run / "slurm").glob("*.txt")]
    assert sum(log.splitlines().count(f"one of {world_size}") for log in logs) == world_size
    return job


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return the run of one process, with which all others are compared."""
    return train("single", tmp_path_factory.mktemp("single"), 1, *SETTINGS)


ONE_PER_NODE = ("horovod-gloo", "horovod-mpirun")
"""Files tested with one rank per node; ddp.sbatch, test_horovod.py and test_mpirun.py start several per node."""

BESIDE = ("apex", "fsdp")
"""Both start like ddp, as tensor, context and pipeline do; here they run at the same time on the same nodes."""


def test_files_of_the_other_recipes_are_links_to_ddps():
    links = {path.stem: str(path.readlink()) for path in (ROOT / "slurm").glob("*.sbatch") if path.is_symlink()}
    assert links == dict.fromkeys(("apex", "context", "fsdp", "pipeline", "spawn", "tensor"), "ddp.sbatch")


class TestNumbers:
    def check(self, job, single, per_node):
        """Assert that a job ends with the losses of single, and had per_node ranks on each of n1 and n2."""
        result, _, record = job.complete().partition(" record=")
        figures = rf"result recipe=\w+ world_size={2 * per_node} test_accuracy=0\.\d+ samples_per_s=\d+"
        assert re.fullmatch(figures, result)
        assert record == str(job.run)
        assert losses(job.run) == pytest.approx(losses(single), rel=1e-4)
        assert accuracies(job.run) == accuracies(single)
        two = ["ranks 0-1 on n1", "ranks 2-3 on n2"]
        assert job.ranks() == (["rank 0 on n1", "rank 1 on n2"] if per_node == 1 else two)
        logs = sorted(path.name for path in (job.run / "slurm").glob("*.txt"))
        assert logs == ["n1.txt", "n2.txt"]
        for node in ("n1", "n2"):
            log = (job.run / f"slurm/{node}.txt").read_text()
            assert log.count(f"{node}: fabric tcp (no RDMA device), n1 by eth0:") == 1

    @pytest.mark.parametrize("name", [name for name in FILES if name not in BESIDE])
    def test_every_file_has_the_losses_of_single_and_the_same_map(self, cluster, tmp_path, single, name):
        per_node = 1 if name in ONE_PER_NODE else 2
        job = submit(cluster, tmp_path, name, *SETTINGS, flags=(f"--gpus-per-node={per_node}",))
        self.check(job, single, per_node)

    def test_two_jobs_on_the_same_nodes_do_not_collide(self, cluster, tmp_path, single):
        flags = ("--gpus-per-node=1", "--cpus-per-task=2", "--nodelist=n1,n2")
        jobs = [submit(cluster, tmp_path, name, *SETTINGS, flags=flags) for name in BESIDE]
        for job in jobs:
            self.check(job, single, 1)
        assert len({re.search(r"head n1:(\d+)", job.text)[1] for job in jobs}) == 2

    @pytest.mark.parametrize(
        ("file", "flags", "world_size"),
        [
            ("ddp-srun", ("--nodes=1",), 2),  # the file asks for two GPUs per node
            ("ddp", ("--gpus-per-node=0",), 2),
            ("ddp", ("--gpus-per-node=0", "--nodes=1", "--ntasks-per-node=3", "--cpus-per-task=1"), 3),
        ],
    )
    def test_sbatchs_own_flags_give_another_world(self, cluster, tmp_path, file, flags, world_size):
        assert_world_size(world_size, cluster, tmp_path, f"{file}.sbatch", flags)

    def test_the_doctors_job_maps_the_nodes(self, cluster, tmp_path):
        job = cluster.submit(tmp_path, "doctor.sbatch", PYTHON=sys.executable)
        assert job.complete().startswith("doctor: all is well on 2 nodes")
        found = json.loads((job.run / "doctor.json").read_text())["probe"]
        assert (found["world_size"], found["sum"]) == (4, 10)
        places = [(row["rank"], row["local_rank"], row["host"]) for row in found["ranks"]]
        assert places == [(0, 0, "n1"), (1, 1, "n1"), (2, 0, "n2"), (3, 1, "n2")]
        assert re.search(r"^node 0 \(n1\): 10\.77\.0\.1 by eth0 .*no GPU", job.text, re.MULTILINE)

    def test_the_doctors_job_fails_and_says_why(self, cluster, tmp_path):
        env = {"PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "eth7"}
        job = cluster.submit(tmp_path, "doctor.sbatch", "--quick", flags=("--nodes=2",), **env)
        assert job.wait() == "FAILED"
        assert job.field("ExitCode") == "1:0"
        assert "error: node 1 (n2): network: GLOO_SOCKET_IFNAME=eth7 is not an interface of this node" in job.text


LONG = ("--data", "tests.slow_data:slower_images", "--workers", "0", "--global-batch-size", "16")
LONG += ("--epochs", "30", "--checkpoint-every", "5", "--deterministic", "--seed", "2")
"""240 steps of 0.2 s, which leave the cores free, until the file of SLOW_UNTIL exists."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the weights after an undisturbed LONG run of two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return weights(train("ddp", folder, 2, *LONG, nodes=2, SLOW_UNTIL=str(folder)))


def near_the_limit(cluster, job, name="USR1"):
    """Send the signal that Slurm sends before the time limit (--signal=B:USR1@120)."""
    cluster.run("scancel", f"--signal={name}", "--batch", job.number)


def wait_for_both(job):
    """Wait until the ranks on n1 and n2 train: one may start later than the other."""
    job.wait_for_text("trains")
    for path in (job.run / "slurm/n1.txt", job.run / "slurm/n2.txt"):
        trains = lambda path=path: path.exists() and "trains" in path.read_text()  # noqa: E731
        wait_until(trains, TIMEOUT_S, f"'trains' in {path}")


def wait_for_epoch_of_resumed(job):
    """Wait until the job has been restarted and has then finished an epoch."""
    job.wait_for_text("resumed from")
    wait_until(lambda: "epoch " in job.text.partition("resumed from")[2], TIMEOUT_S, lambda: job.text)


class TestRequeue:
    def check_end(self, job, expected, restarts=1):
        """Assert that a disturbed job has resumed each time, and ends with the expected weights."""
        assert job.complete().startswith("result ")
        assert job.field("Restarts") == str(restarts)
        steps = launches(job.run, "step")
        assert steps == sorted(set(steps))
        assert (len(steps), steps[0]) == (restarts + 1, 0)
        assert "could not be requeued" not in job.text
        assert is_equal(weights(job.run), expected)

    def test_a_job_goes_on_and_ends_like_an_undisturbed_one(self, cluster, tmp_path, undisturbed):
        """An urgent job takes the job's nodes; later an operator requeues it."""
        end = tmp_path / "end"
        file, env = "ddp-srun.sbatch", {"PYTHON": sys.executable, "SLOW_UNTIL": str(end)}
        job = cluster.submit(tmp_path, file, *LONG, flags=("--gpus-per-node=1",), **env)
        job.wait_for_text("epoch 2 ")
        cluster.run("srun", "--partition=urgent", "--nodes=3", "--exclusive", "sleep", "1")
        wait_for_epoch_of_resumed(job)
        cluster.run("scontrol", "requeue", job.number)
        wait_until(lambda: job.text.count("resumed from") == 2, TIMEOUT_S, lambda: job.text)
        end.touch()
        self.check_end(job, undisturbed, restarts=2)

    @pytest.mark.parametrize(
        ("file", "flags", "name"),
        [
            ("ddp.sbatch", ("--gpus-per-node=1",), "USR1"),
            ("ddp.sbatch", ("--gpus-per-node=1",), "TERM"),
            ("spawn.sbatch", ("--nodes=1", "--gpus-per-node=2"), "USR1"),  # its ranks equal ddp's to the last bit
        ],
    )
    def test_near_the_time_limit(self, cluster, tmp_path, undisturbed, file, flags, name):
        """test_images.py sends the signal also to processes that decode images, as Slurm does."""
        end = tmp_path / "end"
        env = {"PYTHON": sys.executable, "SLOW_UNTIL": str(end)}
        job = cluster.submit(tmp_path, file, *LONG, flags=flags, **env)
        job.wait_for_text("epoch 2 ")
        near_the_limit(cluster, job, name)
        job.wait_for_text("resumed from")
        end.touch()
        self.check_end(job, undisturbed)
        assert f"stopped by SIG{name}: wrote" in job.text
        assert "resumed from" in job.text
        logs = "".join(path.read_text() for path in (job.run / "slurm").glob("*.txt"))
        faults = re.findall(r"^.*(?:Traceback|[Ww]arning).*$", logs, re.MULTILINE)
        # On a busy machine, a rank may be slow.
        assert [line for line in faults if " is slow: " not in line] == [], logs

    def test_the_time_limit_itself_and_only_so_often(self, cluster, tmp_path):
        """The job is a script, which needs no torch."""
        (tmp_path / "train.py").write_text(SAVES_EACH_TIME)
        flags = ("--time=30", "--signal=B:USR1@30", "--nodes=1", "--gpus-per-node=1")
        env = {"PYTHON": sys.executable, "SCRIPT": "train.py"}
        job = cluster.submit(tmp_path, "ddp-srun.sbatch", flags=(*flags, "--export=ALL,MAX_REQUEUES=1"), **env)
        job.wait_for_text("trains, RESUME=none")
        # Slurm counts time limits in minutes, and sends the signal up to 30 s early.
        hours, minutes, seconds = map(int, job.field("RunTime").split(":"))
        limit = 60 * hours + minutes + (1 if seconds < 20 else 2)
        cluster.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}")
        job.wait_for_text("it is requeued")
        # The job keeps this limit for the next start.
        cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
        job.wait_for_text("trains, RESUME=auto")
        assert "got USR1: ranks write a checkpoint" in job.text
        near_the_limit(cluster, job)
        assert job.wait() == "FAILED"
        words = r"error: job \d+: it was stopped .* \(MAX_REQUEUES=1\); to resume: NAME=\S+ RESUME=auto SCRIPT="
        assert re.match(words, job.text.splitlines()[-1])
        assert job.field("Restarts") == "1"

    def test_horovod_goes_on_too(self, cluster, tmp_path):
        job = submit(cluster, tmp_path, "horovod-mpirun", "--epochs", "10")
        job.wait_for_text("epoch 2 ")
        near_the_limit(cluster, job)
        assert job.complete().startswith("result ")
        assert "stopped by SIGUSR1: wrote" in job.text
        assert "resumed from" in job.text

    def test_a_sweep_gives_a_run_for_each_point_and_one_task_is_requeued_alone(self, cluster, tmp_path):
        env = {"PYTHON": sys.executable, "SLOW_UNTIL": str(tmp_path / "end")}
        env |= {"RECIPE": "single", "SWEEP": "lr=0.01,0.02"}
        flags = ("--array=0-1", "--nodes=1", "--gpus-per-node=1")
        array = cluster.submit(tmp_path, "ddp.sbatch", *LONG, flags=flags, **env)
        tasks = [type(array)(cluster, f"{array.number}_{index}", tmp_path) for index in range(2)]
        tasks[0].wait_for_text(", start 1: ")
        tasks[1].wait_for_text("epoch 2 ")  # the last task: it may end soon
        near_the_limit(cluster, tasks[1])  # its job number is the array's own
        tasks[1].wait_for_text("resumed from")
        (tmp_path / "end").touch()
        for task, rate, restarts in zip(tasks, (0.01, 0.02), "01", strict=True):
            assert re.match("result recipe=single world_size=1 ", task.complete()), task.text
            assert json.loads((task.run / "config.json").read_text())["options"]["lr"] == rate
            assert task.field("Restarts") == restarts

    def test_a_node_without_slurmd_is_left_out_and_scancel_leaves_a_checkpoint(self, cluster, tmp_path):
        job = submit(cluster, tmp_path, "ddp", *ENDLESS, "--checkpoint-every", "4")
        job.wait_for_text("epoch 2 ")
        assert job.ranks() == ["rank 0 on n1", "rank 1 on n2"]
        try:
            [slurmd] = cluster.processes("slurmd -D -N n2")
            slurmd.kill()
            wait_for_epoch_of_resumed(job)
            assert job.ranks() == ["rank 0 on n1", "rank 1 on n3"]
        finally:
            cluster.run("scancel", job.number)
            cluster.script("restart", "n2")
        assert job.wait() == "CANCELLED"
        assert "stopped by SIGTERM: wrote" in (job.run / "slurm/n1.txt").read_text()
        assert weights(job.run)
        cluster.wait_for_idle("n2")


class TestEnds:
    @pytest.mark.parametrize("name", ["ddp", "ddp-srun", "horovod-pmix", "horovod-mpirun"])
    def test_a_killed_rank_ends_the_job_everywhere(self, cluster, tmp_path, name):
        """The job is a script whose other rank notices nothing, so the launcher of the ranks has to."""
        if name.startswith("horovod"):
            need_mpi()
        (tmp_path / "train.py").write_text(MEETS if name.startswith("horovod") else WAITS)
        file, env = FILES[name]
        env = {"PYTHON": sys.executable, "SCRIPT": "train.py", **env}
        job = cluster.submit(tmp_path, file, "{run_dir}", flags=("--gpus-per-node=1",), **env)
        wait_until(lambda: len([*tmp_path.glob("train-job*/up-*")]) == 2, TIMEOUT_S, lambda: job.text)
        [rank] = [p for p in cluster.processes(f"train.py {job.run}", "n2") if "python" in p.name()][-1:]
        rank.kill()
        assert job.wait(20) == "FAILED"
        assert re.search(r"^error: job \d+ ended with status \d+; all nodes' logs are in ", job.text, re.MULTILINE)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--lr", "x"), "--lr"),
            (("--data", "imagefolder", "--data-dir", "/nowhere"), "cannot read /nowhere/train"),
        ],
    )
    def test_a_refusal_is_one_line_and_status_2(self, cluster, tmp_path, options, words):
        job = submit(cluster, tmp_path, "ddp", *options)
        assert job.wait() == "FAILED"
        assert job.field("ExitCode") == "2:0"
        refusals = {line for line in job.text.splitlines() if line.startswith("error: ") and words in line}
        assert len(refusals) == 1, job.text
        assert "Traceback" not in job.text

    def test_the_status_is_that_of_the_first_to_end_badly(self, cluster, tmp_path):
        """The status is not that of a node that srun has killed as a result."""
        python = write_program(
            tmp_path / "python",
            f"""#!/bin/bash
            if [[ $* != *scripts.launch.agent* ]]; then exec {sys.executable} "$@"; fi
            if [[ $SLURM_NODEID == 0 ]]; then sleep 2; exit 2; fi
            trap "" TERM # as a node that is slow to end: it is ended by KILL
            while :; do sleep 1; done
            """,
        )
        job = cluster.submit(tmp_path, "ddp.sbatch", flags=("--gpus-per-node=1",), PYTHON=python)
        assert job.wait() == "FAILED"
        assert job.field("ExitCode") == "2:0", job.text
        assert "srun: error: n1: task 0: Exited with exit code 2\n" in job.text
        assert "srun: error: n2: task 1: Killed\n" in job.text


WAITS = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], f"up-{os.getpid()}").touch()
time.sleep(100)
"""

MEETS = f"from mpi4py import MPI\nassert MPI.COMM_WORLD.allreduce(1) == 2\n{WAITS}"

SHOW = """
import os, pathlib, socket, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "NODE_RANK", "RESUME")
text = " ".join(os.environ.get(name, "-") for name in names)
print(text, socket.gethostname(), os.getcwd(), *sys.argv[1:], flush=True)
if log := os.environ.get("NCCL_DEBUG_FILE"):  # as NCCL does
    print("n1:7:7 [0] NCCL INFO Using network Socket", file=open(log, "w"), flush=True)
"""

SAVES = f"""{SHOW}
import signal, time
run_dir = pathlib.Path(os.environ["RUN_DIR"])
if os.environ["RESUME"] == "auto":
    print(f"resumed after {{sorted(path.name for path in run_dir.glob('saved-*'))}}", flush=True)
    sys.exit()
def save(number, frame):
    (run_dir / f"saved-{{os.environ['RANK']}}").touch()
    sys.exit()
signal.signal(signal.SIGUSR1, save)
print("trains", flush=True)
time.sleep(100)
"""


ONE_SAVES = SAVES.replace("def save(number, frame):", "def save(number, frame):\n    time.sleep(3)").replace(
    "signal.signal(signal.SIGUSR1, save)", "if os.environ['RANK'] == '0': signal.signal(signal.SIGUSR1, save)"
)
"""One whose other ranks are ended by the signal while rank 0 is saving."""

SAVES_EACH_TIME = """
import os, pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path(os.environ["RUN_DIR"], "saved").touch()
    sys.exit()
signal.signal(signal.SIGUSR1, save)
print(f"trains, RESUME={os.environ['RESUME']}", flush=True)
time.sleep(300)
"""


class TestYourOwn:
    """A script in place of the recipe; most start without torch."""

    def submit(self, cluster, folder, file, source, *options, **env):
        (folder / "train.py").write_text(source)
        env = {"PYTHON": sys.executable, "SCRIPT": "train.py", **env}
        return cluster.submit(folder, file, *options, flags=("--gpus-per-node=1",), **env)

    @pytest.mark.parametrize("file", ["ddp.sbatch", "ddp-srun.sbatch", "spawn.sbatch"])
    def test_it_runs_on_all_nodes_from_the_folder_of_sbatch(self, cluster, tmp_path, file):
        job = self.submit(cluster, tmp_path, file, SHOW, "--lr", "0.1", "--out={run_dir}")
        assert job.wait() == "COMPLETED", job.text
        assert job.run == tmp_path / f"train-job{job.number}"
        for rank, host in (("0", "n1"), ("1", "n2")):
            lines = (job.run / f"slurm/{host}.txt").read_text().splitlines()
            alone = [line for line in lines if line.startswith("warning: the 2 ranks have not met")]
            assert len(alone) == (host == "n1" and file == "ddp.sbatch")  # where torchrun starts them
            *_, last, network = (line for line in lines if line not in alone)
            assert network == f"{host}: NCCL over Socket", job.text
            node_rank = "-" if file == "ddp-srun.sbatch" else rank
            ranks = "- - - -" if file == "spawn.sbatch" else f"{rank} 0 2 1"
            end = f"n1 {node_rank} none {host} {tmp_path} --lr 0.1 --out={job.run}"
            assert last == f"{ranks} {end}", job.text

    def test_mpiruns_ranks_of_a_node_share_its_cores(self, cluster, tmp_path):
        need_mpi()
        # One write, so that the lines of several ranks do not mix.
        source = "import os; os.write(1, f'threads {os.environ[\"OMP_NUM_THREADS\"]}\\n'.encode())"
        env = {"START": "mpirun", "NPROC_PER_NODE": "2", "OMP_NUM_THREADS": ""}
        job = self.submit(cluster, tmp_path, "horovod.sbatch", source, **env)
        assert job.wait() == "COMPLETED", job.text
        threads = max(1, len(os.sched_getaffinity(0)) // 2)  # each node of the test cluster has all local cores
        assert job.text.count(f"threads {threads}\n") == 2, job.text

    def test_one_that_saves_is_requeued_and_told_to_resume(self, cluster, tmp_path):
        job = self.submit(cluster, tmp_path, "ddp-srun.sbatch", SAVES)
        wait_for_both(job)
        near_the_limit(cluster, job)
        assert job.wait() == "COMPLETED", job.text
        assert job.field("Restarts") == "1"
        assert "resumed after ['saved-0', 'saved-1']" in job.text

    def test_a_rank_that_saves_outlives_one_that_the_signal_ends(self, cluster, tmp_path):
        """Otherwise srun --kill-on-bad-exit ends it."""
        job = self.submit(cluster, tmp_path, "ddp-srun.sbatch", ONE_SAVES)
        wait_for_both(job)
        near_the_limit(cluster, job)
        assert job.wait() == "COMPLETED", job.text
        assert "resumed after ['saved-0']" in job.text

    def test_a_staged_environment_is_unpacked_on_each_node_once(self, cluster, tmp_path):
        venv.create(tmp_path / "venv", symlinks=True)
        [packages] = (tmp_path / "venv/lib").glob("python*/site-packages")
        (packages / "shared.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
        subprocess.run(["tar", "-C", tmp_path / "venv", "-cf", tmp_path / "venv.tar", "."], check=True, timeout=60)
        env = {"STAGE": str(tmp_path / "venv.tar"), "STAGE_DIR": "/dev/shm"}  # each node has its own /dev/shm
        for _ in range(2):  # the second job finds the unpacked environment
            job = self.submit(cluster, tmp_path, "ddp-srun.sbatch", "import sys; print(sys.prefix)", **env)
            assert job.wait() == "COMPLETED", job.text
            [line] = [line for line in job.text.splitlines() if line.startswith("staged ")]
            folder = line.rpartition(": ")[2]
            assert folder.startswith("/dev/shm/cluster-recipes-")
            for host in ("n1", "n2"):
                assert (job.run / f"slurm/{host}.txt").read_text().splitlines()[-1] == folder
        for host in ("n1", "n2"):
            there = cluster.script("on", host, "ls", str(Path(folder).parent)).stdout.split()
            cluster.script("on", host, "rm", "-r", str(Path(folder).parent))
            assert there == [Path(folder).name]

    def test_a_job_is_requeued_without_a_node_whose_gpu_is_broken(self, cluster, tmp_path):
        job = self.submit(cluster, tmp_path, "ddp-srun.sbatch", GPU_FAULT, KMSG="/dev/shm/kmsg")
        try:
            assert job.wait() == "COMPLETED", job.text
        finally:
            cluster.script("on", "n2", "rm", "-f", "/dev/shm/kmsg")
        assert (job.field("Restarts"), job.field("ExcNodeList"), job.field("NodeList")) == ("1", "n2", "n[1,3]")
        assert f"job {job.number}: fault on n2, excluded from now on; it is requeued" in job.text
        assert "Xid 79 once: fallen off the bus" in (job.run / "slurm/excluded.txt").read_text()

    @pytest.mark.parametrize("file", ["ddp.sbatch", "ddp-srun.sbatch"])
    def test_one_that_has_written_nothing_is_stopped_and_not_requeued(self, cluster, tmp_path, file):
        job = self.submit(cluster, tmp_path, file, 'import time; print("trains", flush=True); time.sleep(100)')
        job.wait_for_text("trains")
        near_the_limit(cluster, job)
        assert job.wait(30) == "FAILED"
        assert job.field("Restarts") == "0"
        assert f"its time is up, and it has written nothing to {job.run} since its start" in job.text

    @pytest.mark.parametrize("file", ["ddp.sbatch", "ddp-srun.sbatch", "ddp-elastic.sbatch"])
    def test_one_that_was_stopped_by_a_signal_to_its_ranks_alone_is_not_complete(self, cluster, tmp_path, file):
        """A preemption without send_user_signal is such a signal; then the job is requeued."""
        job = self.submit(cluster, tmp_path, file, SAVES.replace("SIGUSR1", "SIGTERM"))
        job.wait_for_text("trains")
        cluster.run("scancel", "--signal=TERM", job.number)
        assert job.wait() == "FAILED", job.text
        assert "its ranks were asked to stop before their end; to resume: NAME=" in job.text

    def test_what_cannot_run_is_one_line_and_status_2(self, cluster, tmp_path):
        job = self.submit(cluster, tmp_path, "ddp.sbatch", "if then\n")
        assert job.wait() == "FAILED"
        assert job.field("ExitCode") == "2:0"
        [line] = job.text.splitlines()
        assert line.startswith(f"error: SCRIPT {tmp_path}/train.py is not Python: ")


class TestContainers:
    """Stand-ins print their arguments and run the command outside of any container.

    As the real ones (Apptainer 1.4.5, pyxis 0.24.0), they prefer the image's variables to those that the job does
    not name, and refuse to mount what does not exist.
    """

    APPTAINER = """#!/bin/bash
        echo "$0 $*"
        while [[ $1 != *.sif ]]; do
            for mount in $(test "$1" != --bind || tr , ' ' <<<"$2"); do [[ -e ${mount%%:*} ]] || exit 255; done
            shift
        done
        shift
        export PYTHON=/image/python
        for name in ${!APPTAINERENV_*}; do export "${name#APPTAINERENV_}=${!name}"; done
        exec "$@"
    """

    PYXIS = f"""#!/bin/bash
        if [[ $1 == --help ]]; then exec echo "--container-image=[USER@]IMAGE"; fi
        for word; do
            if [[ $word == --container-* ]]; then echo "srun $word"; else words+=("$word"); fi
            if [[ $word == --container-env=* && $word, != *,PYTHON,* ]]; then export PYTHON=/image/python; fi
            for mount in $(test "$word" = "${{word#--container-mounts=}}" || tr , ' ' <<<"${{word#*=}}"); do
                [[ -e ${{mount%%:*}} ]] || exit 1
            done
        done
        exec {shutil.which("srun")} "${{words[@]}}"
    """

    def stand_in(self, folder, name, script):
        """Create a command; return the variables with which a job uses it."""
        tools = folder / "bin"
        tools.mkdir()
        write_program(tools / name, script)
        (folder / "ddp.sif").touch()
        env = {"PATH": f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin", "CONTAINER_IMAGE": str(folder / "ddp.sif")}
        return env | {"CONTAINER_MOUNTS": "/opt:/data", "PYTHON": sys.executable}

    def complete(self, cluster, folder, name, script):
        env = self.stand_in(folder, name, script)
        return assert_world_size(2, cluster, folder, "ddp-srun.sbatch", ("--gpus-per-node=1",), **env).text

    def test_apptainer(self, cluster, tmp_path):
        text = self.complete(cluster, tmp_path, "apptainer", self.APPTAINER)
        mounts = f"--bind {ROOT}:{ROOT},/opt:/data,{tmp_path}:{tmp_path} --pwd {ROOT}"
        assert f"/apptainer exec {mounts} --nv {tmp_path}/ddp.sif bash -c" in text

    def test_pyxis(self, cluster, tmp_path):
        text = self.complete(cluster, tmp_path, "srun", self.PYXIS)
        assert f"srun --container-image={tmp_path}/ddp.sif\n" in text
        assert f"srun --container-mounts={ROOT}:{ROOT},/opt:/data,{tmp_path}:{tmp_path}\n" in text
        assert f"srun --container-workdir={ROOT}\n" in text
        assert re.search(r"srun --container-env=.*MASTER_ADDR", text)

    def test_all_of_an_elastic_job_runs_in_pyxiss_containers(self, cluster, tmp_path):
        """The store runs there too, because the host may have no torch."""
        env, flags = self.stand_in(tmp_path, "srun", self.PYXIS), ("--gpus-per-node=1",)
        job = assert_world_size(2, cluster, tmp_path, "ddp-elastic.sbatch", flags, **env)
        assert job.text.count(f"srun --container-image={tmp_path}/ddp.sif\n") >= 2, "two nodes and the store"
