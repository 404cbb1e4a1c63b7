"""Images that a real Docker engine builds, and jobs of several containers: equal losses, no rights."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import require
from tests.support import (
    ROOT,
    Command,
    last_step,
    launches,
    losses,
    newest_checkpoint,
    train,
    wait_until,
    words_for,
)

pytestmark = pytest.mark.slow

DOCKER = os.environ.get("DOCKER", "docker")
STAND_IN = "cluster-recipes/stand-in"
PREFIX = "cluster-recipes/"
TAG = "test"


def docker(*words, check=True):
    """Run a docker command; return its output."""
    done = subprocess.run([DOCKER, *words], capture_output=True, text=True, timeout=120)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.strip()


def has_image(name):
    return subprocess.run([DOCKER, "image", "inspect", name], capture_output=True, timeout=60).returncode == 0


def is_engine_up():
    info = [DOCKER, "info"]
    return shutil.which(DOCKER) and subprocess.run(info, capture_output=True, timeout=60).returncode == 0


def require_engine():
    remedy = "as root: apt-get install docker.io docker-compose; dockerd &"
    require("docker", shutil.which(DOCKER), "there is no docker", remedy)
    require("docker", is_engine_up(), "no Docker engine answers", remedy)
    compose = [DOCKER, "compose", "version"]
    has_plugin = subprocess.run(compose, capture_output=True, timeout=60).returncode == 0
    require("docker", has_plugin or shutil.which("docker-compose"), "there is no Compose", remedy)


def base_image():
    """Return an image to build on: BASE_IMAGE, or one built from Debian packages."""
    given = os.environ.get("BASE_IMAGE")
    if given or has_image(STAND_IN):
        return given or STAND_IN
    can_make = os.geteuid() == 0 and shutil.which("debootstrap")
    remedy = "run `BASE_IMAGE=ubuntu:24.04 make test-all`, or as root: apt-get install debootstrap; make test-all"
    require("docker", can_make, "there is no base image to build on", remedy)
    subprocess.run([ROOT / "docker/stand-in.sh", STAND_IN], check=True, timeout=600)
    return STAND_IN


@contextlib.contextmanager
def alone(what):
    """Hold a lock, so that only one test worker at a time does this."""
    with open(Path(tempfile.gettempdir(), f"cluster-recipes-{what}-{os.getuid()}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def image(recipe):
    """Build a recipe's image, once for all test workers; return its name."""
    require_engine()
    with alone("image"):
        # Without changes this takes no time, because the engine has all layers.
        environment = {**os.environ, "TAG": TAG, "BASE_IMAGE": base_image()}
        build = [ROOT / "docker/image.sh", "build", recipe]
        done = subprocess.run(build, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(rf"image: {PREFIX}{recipe}:{TAG}, \d+ MB, revision \S+", done.stdout.splitlines()[-1])
    return f"{PREFIX}{recipe}:{TAG}"


@pytest.fixture(scope="session")
def ddp_image():
    return image("ddp")


@pytest.fixture(scope="session")
def horovod_image():
    return image("horovod")


@pytest.fixture
def folder(tmp_path):
    """Return a folder that other users can reach too, like a user's own folder."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    return tmp_path


def run_nodes(image, recipe, nodes, folder, name, *options, processes=1, start_in=ROOT):
    """Start a job like `make run WITH=docker`."""
    words = [recipe, "--nodes", str(nodes), "--nproc-per-node", str(processes), "--"]
    words += words_for(folder, name, *options)
    start = ("env", "-C", str(start_in), f"PYTHONPATH={ROOT}", sys.executable, "-m", "docker.compose")
    return Command(*start, *words, IMAGE=image, OMP_NUM_THREADS="1", NCCL_DEBUG="WARN")


def left():
    """Return the names of the containers and networks of jobs that are left."""
    containers = docker("ps", "--all", "--format", "{{.Names}}").split()
    networks = docker("network", "ls", "--format", "{{.Name}}").split()
    return [name for name in containers + networks if name.startswith("cluster-recipes-")]


@pytest.fixture(autouse=True)
def no_container_is_left():
    """Remove the containers that a failed test leaves behind: the engine's processes are not the test's own.

    Only one test at a time runs, because each asserts that nothing is left.
    """
    with alone("containers"):
        yield
        for name in left() if is_engine_up() else []:
            docker("rm", "--force", name, check=False)
            docker("network", "rm", name, check=False)


def containers_of(command):
    """Return the ids of a job's containers by host name, once all of them run."""
    [project] = {one.environ()["COMPOSE_PROJECT_NAME"] for one in command.processes(" start --attach ")}
    label = f"label=com.docker.compose.project={project}"
    ids = docker("ps", "--quiet", "--filter", label).split()
    return {docker("inspect", "--format", "{{.Config.Hostname}}", number): number for number in ids}


@pytest.mark.timeout(1500)
def test_two_containers_give_the_losses_of_single(ddp_image, folder):
    """The containers also find a model in the caller's folder, here LeNet."""
    options = ("--epochs", "2")
    (folder / "mine.py").write_text("from helper import LeNet\n\ndef net(data):\n    return LeNet(1, 8, 10)\n")
    (folder / "helper.py").write_text("from recipes.common.models.models import LeNet\n")
    mine = ("--model", "mine:net")
    command = run_nodes(ddp_image, "ddp", 2, folder, "two", *options, *mine, processes=2, start_in=folder)
    done = command.wait(timeout_s=120, gone_within_s=15)
    assert done.status == 0, done.stdout + done.stderr
    assert re.match(r"result recipe=ddp world_size=4 test_accuracy=0\.\d{4} ", done.stdout.splitlines()[-1])
    assert losses(folder / "two") == pytest.approx(losses(train("single", folder, 1, *options)), rel=1e-4)
    config = json.loads((folder / "two/config.json").read_text())
    places = [line.split(":")[0] for line in config["launches"][0]["ranks"]]
    assert places == ["ranks 0-1 on node0", "ranks 2-3 on node1"]
    label = '{{index .Config.Labels "org.opencontainers.image.revision"}}'
    assert config["revision"] == docker("inspect", "--format", label, ddp_image)
    assert left() == []


@pytest.mark.timeout(1500)
def test_a_script_has_the_same_paths_in_containers(ddp_image, folder):
    """Ctrl-C ends both nodes, too. spawn's launcher starts one process per node, and needs no torch."""
    (folder / "helper.py").write_text("names = ('NODE_RANK', 'NNODES', 'RUN_DIR', 'RESUME')\n")
    (folder / "train.py").write_text(
        "import os, helper, pathlib, sys, time\n"
        "seen = repr((sys.argv[1:], os.getcwd(), [os.environ[name] for name in helper.names]))\n"
        "(pathlib.Path(os.environ['RUN_DIR']) / os.environ['NODE_RANK']).write_text(seen)\n"
        "while '--wait' in sys.argv: time.sleep(0.1)\n"
    )
    env = {"IMAGE": ddp_image, "SCRIPT": str(folder / "train.py"), "WORKDIR": str(folder), "RUNS_DIR": str(folder)}

    def start(name, *options):
        words = ["spawn", "--nodes", "2", "--nproc-per-node", "1", "--name", name, "--", *options]
        return Command(sys.executable, "-m", "docker.compose", *words, **env)

    done = start("mine", "--out={run_dir}").wait(timeout_s=120, gone_within_s=15)
    assert done.status == 0, done.stdout + done.stderr
    for rank in "01":
        seen = (["--out=/runs/mine"], str(folder), [rank, "2", "/runs/mine", "none"])
        assert (folder / "mine" / rank).read_text() == repr(seen)
    assert left() == []

    command = start("stopped", "--wait")
    wait_until(lambda: len(list(folder.glob("stopped/[01]"))) == 2, 120, lambda: f"both scripts: {command.text}")
    command.process.send_signal(signal.SIGINT)
    assert command.wait(timeout_s=60, gone_within_s=15).status == 130
    assert left() == []


@pytest.mark.timeout(1500)
def test_horovod_in_two_containers_gives_the_losses_of_single(horovod_image, folder):
    options = ("--epochs", "2")
    command = run_nodes(horovod_image, "horovod", 2, folder, "two", *options, "--compression", "none")
    done = command.wait(timeout_s=120, gone_within_s=15)
    assert done.status == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("result recipe=horovod world_size=2 ")
    assert losses(folder / "two") == pytest.approx(losses(train("single", folder, 1, *options)), rel=1e-4)
    assert left() == []


def test_horovod_has_mpi_gloo_and_an_sshd_that_an_ordinary_user_can_start(horovod_image):
    script = (
        "import horovod.torch as hvd; assert hvd.mpi_built() and hvd.gloo_built(); "
        "from shutil import which; assert which('mpirun') and which('ssh') and (which('orted') or which('prted'))"
    )
    docker("run", "--rm", "--entrypoint", "python", horovod_image, "-c", script)
    key = "ssh-keygen -q -N '' -f /tmp/key"
    daemon = "/usr/sbin/sshd -t -f /dev/null -o HostKey=/tmp/key"
    bare = ("--rm", "--cap-drop", "ALL", "--read-only", "--tmpfs", "/tmp", "--entrypoint", "bash")
    shown = docker("run", *bare, horovod_image, "-c", f"{key} && {daemon} && getent passwd 10001")
    assert shown.endswith(":/bin/bash")


@pytest.mark.timeout(1500)
def test_a_third_node_a_lost_one_and_the_way_back(ddp_image, folder):
    """The job's containers have no rights, and end at once on all nodes; a stop signal writes a checkpoint."""
    options = ("--epochs", "400", "--deterministic")
    command = run_nodes(ddp_image, "ddp", 3, folder, "three", *options, "--checkpoint-every", "20")
    command.wait_for_step(folder / "three", 60)
    running = containers_of(command)
    assert sorted(running) == ["node0", "node1", "node2"]
    for number in running.values():
        [facts] = json.loads(docker("inspect", number))
        settings = facts["HostConfig"]
        assert settings["ReadonlyRootfs"]
        assert settings["CapDrop"] == ["ALL"]
        assert settings["SecurityOpt"] == ["no-new-privileges:true"]
        assert settings["PidsLimit"] == 4096
        assert facts["Config"]["User"] == (f"{os.getuid()}:{os.getgid()}" if os.getuid() else "10001:10001")
        assert settings["ShmSize"] == 1 << 30
        values = [text for text in facts["Config"]["Env"] if "=" in text]  # Compose 1 names the others, too
        passed_on = [text for text in values if text.startswith(("NCCL_", "RDZV_TIMEOUT_S"))]
        assert passed_on == ["NCCL_DEBUG=WARN"], "what is set here, and nothing that is not"
    docker("kill", running["node2"])
    done = command.wait(timeout_s=30, gone_within_s=15)
    assert done.status not in (0, 2)
    assert "error: node 2 ended with status 137; all nodes are stopped" in done.errors
    assert left() == []

    later = last_step(folder / "three") + 10  # the lost job may have logged more steps than it had saved
    command = run_nodes(ddp_image, "ddp", 2, folder, "three", *options, "--resume", "auto")
    command.wait_for_step(folder / "three", later)
    assert "resumed from" in command.text
    command.process.send_signal(signal.SIGUSR1)
    done = command.wait(timeout_s=60, gone_within_s=15)
    assert done.status == 0, done.stdout + done.stderr
    assert "stopped by SIGUSR1: wrote" in done.stdout
    assert newest_checkpoint(folder / "three")["position"]["step"] >= later
    assert launches(folder / "three") == [3, 2]
    assert left() == []


@pytest.mark.timeout(1500)
def test_nothing_is_left_of_a_job_whose_starter_was_killed(ddp_image, folder):
    command = run_nodes(ddp_image, "ddp", 2, folder, "killed", "--epochs", "400", "--deterministic")
    command.wait_for_step(folder / "killed", 30)
    command.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not left(), 60, lambda: f"nothing left: {left()}")
    assert newest_checkpoint(folder / "killed")["position"]["step"] >= 30  # the containers got TERM first


@pytest.mark.timeout(1500)
def test_what_is_in_an_image_and_what_its_user_may_do(ddp_image):
    find = ("--entrypoint", "find", ddp_image, ".", "-maxdepth", "1", "-printf", "%f\n")
    listed = docker("run", "--rm", *find).split()
    wanted = ["LICENSE", "README.md", "docker", "pyproject.toml", "recipes", "requirements", "scripts", "slurm"]
    assert sorted(name for name in listed if name != ".") == sorted(wanted)
    shown = docker(
        *("run", "--rm", "--entrypoint", "bash", "--read-only", "--cap-drop", "ALL", ddp_image),
        "-c", "id -u; grep CapEff /proc/self/status; touch /opt/x /tmp/x 2>&1 | grep -c Read-only; which git sudo",
        check=False,
    )  # fmt: skip
    assert shown.splitlines() == ["10001", "CapEff:\t0000000000000000", "2"]


@pytest.mark.timeout(1500)
def test_refusals(ddp_image, folder):
    no_image = "there is no image nobody/has-this; make image RECIPE=ddp builds it"
    for env, words, message in (
        ({"IMAGE": "nobody/has-this"}, ["ddp"], no_image),
        ({"DOCKER": "no-docker"}, ["ddp"], "docker not found; install Docker"),
        ({"DOCKER_HOST": "unix:///nowhere"}, ["ddp"], "no Docker engine answers "),
        ({"IMAGE": ddp_image}, ["single", "--nodes", "2"], "single is one process; "),
    ):
        words += ["--", "--runs-dir", str(folder / "runs")]
        done = Command(sys.executable, "-m", "docker.compose", *words, **env).wait(timeout_s=60)
        assert (done.status, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith(f"error: {message}")
        assert done.stderr.count("\n") == 1
    assert left() == []
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


def composer(file, **env):
    """Return a function that calls Compose as a user would by hand, and returns its output."""
    plugin = subprocess.run([DOCKER, "compose", "version"], capture_output=True, timeout=60).returncode == 0
    program = [DOCKER, "compose"] if plugin else ["docker-compose"]

    def compose(*words):
        command = [*program, "-f", str(ROOT / "docker" / file), *words]
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return compose


@pytest.mark.timeout(1500)
def test_the_compose_file_trains_by_hand(ddp_image, folder):
    """Follow the file's first lines: with its own defaults, as the user who owns the folders."""
    for name in ("runs", "data"):
        (folder / name).mkdir()
    own = {"CONTAINER_USER": f"{os.getuid()}:{os.getgid()}", "RUNS": f"{folder}/runs", "DATA": f"{folder}/data"}
    compose = composer("compose.yaml", COMPOSE_PROJECT_NAME="cluster-recipes-by-hand", IMAGE=ddp_image, **own)
    try:
        said = compose("up")
        assert re.search(r"result recipe=ddp world_size=2 test_accuracy=0\.9\d* ", said), said
        assert json.loads((folder / "runs/ddp-001/result.json").read_text())["world_size"] == 2
    finally:
        compose("down", "--timeout", "5")
    assert left() == []


@pytest.mark.timeout(1500)
def test_a_slurm_cluster_in_a_container(ddp_image, folder):
    own = {"IMAGE": f"registry.invalid/{ddp_image}", "NODES": "2", "RUNS": str(folder)}
    compose = composer("slurm.compose.yaml", COMPOSE_PROJECT_NAME="cluster-recipes-slurm", **own)
    try:
        compose("up", "--build", "--detach")
        wait_until(lambda: "is up" in compose("logs", "slurm"), 60, "the cluster")
        words = ("--name", "mine", "--epochs", "1", "--no-tensorboard")
        compose("exec", "-T", "slurm", "sbatch", "--gpus-per-node=0", "slurm/ddp.sbatch", *words)
        wait_until((folder / "mine/result.json").exists, 60, f"a result in {folder}")
        assert json.loads((folder / "mine/result.json").read_text())["world_size"] == 2
        assert sorted(path.name for path in folder.glob("mine/slurm/*.txt")) == ["n1.txt", "n2.txt"]
    finally:
        compose("down", "--timeout", "5")
    assert left() == []
