"""Run a job of several nodes in containers on this machine: docker/compose.yaml with as many nodes as asked for.

    python -m scripts.compose ddp --nodes 2 --nproc-per-node 1 -- --epochs 3

`make run RECIPE=ddp NODES=2 WITH=docker` calls it; it needs an image (make image), a Docker engine and Compose,
but no .venv. Each node gets its share of the GPUs and cores. Output, signals and the end of a failed job are those
of scripts/local.py. The record is in runs/NAME; no container or network is left, however this process ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.local import (
    ONE_PROCESS,
    ROOT,
    LocalJob,
    check_recipe,
    count,
    parse,
    refuse,
    share_out,
    visible_gpus,
)

FILE = ROOT / "docker/compose.yaml"
TRAINER = "10001:10001"
"""The images' own user, who trains for a caller who is root."""

ENGINE_TIMEOUT_S = 120.0
END_GRACE_S = 60
"""How long nodes may take to write a checkpoint when this process was killed."""


@dataclass(frozen=True)
class Folders:
    """What the containers see of this machine, and the run's name."""

    runs: Path
    data: Path
    run: Path


def take_folders(recipe: str, options: list[str]) -> tuple[Folders, list[str]]:
    """Return the folders that the options name, and the options with what these are called in the containers."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--name", default="")
    own, rest = parser.parse_known_args(options)
    name = own.name or free_name(own.runs_dir, recipe)
    if not name or Path(name).name != name:
        refuse(f"NAME wants a plain name, without folders, got {name!r}")
    folders = Folders(own.runs_dir.resolve(), own.data_dir.resolve(), own.runs_dir.resolve() / name)
    if recipe == "probe":  # it keeps no record
        return folders, rest
    return folders, [*rest, "--name", name, "--runs-dir", "/runs", "--data-dir", "/data"]


def free_name(runs_dir: Path, recipe: str) -> str:
    """Return the recipe's next free number as a run's name: ddp-001."""
    number = 1
    while (runs_dir / f"{recipe}-{number:03d}").exists():
        number += 1
    return f"{recipe}-{number:03d}"


def make_run_folder(folder: Path) -> None:
    """Make the run's folder, where the containers' user can write even when the caller is root."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        uid, gid = map(int, TRAINER.split(":"))
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, gid, follow_symlinks=False)


def find_compose(docker: str) -> list[str]:
    """Return the command of Compose, version 2 or the older program, or refuse."""
    if (
        subprocess.run([docker, "compose", "version"], capture_output=True, timeout=ENGINE_TIMEOUT_S).returncode
        == 0
    ):
        return [docker, "compose"]
    older = shutil.which("docker-compose")
    if not older:
        refuse("there is no Compose; install Docker's compose plugin (Debian: docker-compose)")
    return [older]


def check_image(docker: str, image: str, recipe: str) -> None:
    """Refuse where there is no engine or no image; warn of an image that holds other code than this checkout."""
    if subprocess.run([docker, "info"], capture_output=True, timeout=ENGINE_TIMEOUT_S).returncode:
        refuse(f"no Docker engine answers {docker}; start it (systemctl start docker), or join the group docker")
    form = '{{index .Config.Labels "org.opencontainers.image.revision"}}'
    command = [docker, "image", "inspect", "--format", form, image]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S)
    if shown.returncode:
        refuse(f"there is no image {image}; make image RECIPE={recipe} builds it")
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    here = subprocess.run(command, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S).stdout.strip()
    if here and shown.stdout.strip() != here:
        print(
            f"warning: {image} holds revision {shown.stdout.strip()[:12]}, this checkout is {here[:12]}"
            f"{'-dirty' if here.endswith('-dirty') else ''}; make image RECIPE={recipe} builds it anew",
            file=sys.stderr,
        )


def override(nodes: int, shares: list[list[str]]) -> dict[str, object]:
    """Return what is added to docker/compose.yaml: more nodes, and the GPUs of each."""
    services: dict[str, dict[str, object]] = {}
    for node in range(nodes):
        service: dict[str, object] = {}
        if node > 1:
            service["extends"] = {"file": str(FILE), "service": "node1"}
            service["hostname"] = f"node{node}"
            service["environment"] = {"NODE_RANK": str(node)}
        if shares[node]:
            device = {"driver": "nvidia", "device_ids": shares[node], "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
            service["ulimits"] = {"memlock": -1}
        if service:
            services[f"node{node}"] = service
    return {"services": services}


@contextlib.contextmanager
def taken_down(compose: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Leave no container and no network behind: a helper outlives this process and takes them down after it."""
    # It reads a pipe whose other end only this process holds, and which closes with it.
    down = f"cat >/dev/null; exec {shlex.join([*compose, 'down', '--volumes', '--timeout', str(END_GRACE_S)])}"
    helper = subprocess.Popen(
        ["bash", "-c", down],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert helper.stdin
        helper.stdin.close()
        helper.wait(ENGINE_TIMEOUT_S)


def main(argv: list[str] | None = None) -> int:
    """Start a container for each node, see them to their end, and return the job's exit status."""
    args = parse(sys.argv[1:] if argv is None else argv)
    recipe = check_recipe(args.recipe)
    if args.min_nodes or args.max_restarts:
        refuse("containers that are lost do not come back: MIN_NODES is not for WITH=docker")
    nodes = count("NODES", args.nodes)
    shares = share_out(visible_gpus(), nodes)
    default = 1 if recipe in ONE_PROCESS else max(1, len(shares[0]))
    processes = count("NPROC_PER_NODE", args.nproc_per_node or str(default))
    docker = shutil.which(os.environ.get("DOCKER", "docker"))
    if not docker:
        refuse("there is no docker; install Docker (Debian: docker.io docker-compose), or drop WITH=docker")
    image_name = recipe if (ROOT / f"docker/{recipe}.Dockerfile").exists() else "ddp"
    image = os.environ.get("IMAGE") or f"cluster-recipes/{image_name}:latest"
    check_image(docker, image, recipe)
    compose = find_compose(docker)
    folders, options = take_folders(recipe, args.options)
    make_run_folder(folders.run)
    folders.data.mkdir(parents=True, exist_ok=True)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {
        **os.environ,
        "COMPOSE_PROJECT_NAME": f"cluster-recipes-{uuid.uuid4().hex[:8]}",
        "IMAGE": image,
        "RECIPE": recipe,
        "OPTIONS": shlex.join(options),
        "NNODES": str(nodes),
        "NPROC_PER_NODE": str(processes),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // (nodes * processes)))),
        "RUNS": str(folders.runs),
        "DATA": str(folders.data),
        "CONTAINER_USER": TRAINER if os.geteuid() == 0 else f"{os.geteuid()}:{os.getegid()}",
    }
    job = LocalJob()
    signal.signal(signal.SIGINT, job.interrupt)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, job.pass_on)
    with tempfile.TemporaryDirectory(prefix="cluster-recipes-") as scratch:
        more = Path(scratch, "nodes.json")
        more.write_text(json.dumps(override(nodes, shares)))
        compose += ["--file", str(FILE), *(["--file", str(more)] if override(nodes, shares)["services"] else [])]
        with taken_down(compose, environment):
            status = run_nodes(docker, compose, environment, nodes, job)
    with contextlib.suppress(OSError):  # nothing is in the folder of a run that was refused
        folders.run.rmdir()
    return status


def run_nodes(docker: str, compose: list[str], environment: dict[str, str], nodes: int, job: LocalJob) -> int:
    """Make the containers, then run each below a client that passes its output, signals and status on."""
    names = [f"node{node}" for node in range(nodes)]
    made = compose_output([*compose, "up", "--no-start", *names], environment)
    if made.returncode:
        refuse(f"Compose could not make the containers: {' '.join(made.stderr.split())}")
    containers = [
        compose_output([*compose, "ps", "--all", "--quiet", name], environment).stdout.strip() for name in names
    ]
    for container in containers:
        job.start([docker, "start", "--attach", container], environment)
    status = job.wait()
    if status:  # what a client was killed for goes on in its container
        subprocess.run([docker, "kill", *containers], capture_output=True, timeout=ENGINE_TIMEOUT_S)
    return status


def compose_output(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Compose and return what it printed."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
