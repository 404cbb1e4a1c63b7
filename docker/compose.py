"""Run a job of several nodes in containers on this machine: docker/compose.yaml with as many nodes as asked for.

    python -m docker.compose ddp --nodes 2 --nproc-per-node 1 -- --epochs 3

`make run RECIPE=ddp NODES=2 WITH=docker` calls it; it needs an image (make image), a Docker engine and Compose,
but no .venv. Each node gets its share of the GPUs and cores. Output, signals and failures are handled as in
scripts/launch/local.py. The record is in runs/NAME; no container or network is left, however this process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.common.arguments import url_of
from recipes.common.errors import UserError
from recipes.common.record.provenance import revision
from scripts.launch import script
from scripts.launch.command import (
    ROOT,
    check_recipe,
    command,
    image_of,
    make_folder,
    next_folder,
    temporary_folder,
)
from scripts.launch.local import LocalJob, assign_gpus, parse_args, processes_per_node, threads_per_process
from scripts.launch.recipe_options import read_option

COMPOSE_FILE = ROOT / "docker/compose.yaml"
CONTAINER_USER = "10001:10001"
"""The images' own user and group, used if the caller is root."""

ENGINE_TIMEOUT_S = 120.0
DOWN_TIMEOUT_S = 60
"""How long nodes may take to write a checkpoint after this process was killed."""


@dataclass(frozen=True)
class ContainerSpec:
    """The folders and variables that the containers get, and the options with the containers' own paths."""

    run: Path
    """The run's folder, below the folder of runs."""
    data: Path
    options: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    cache: Path | None = None


def bind(source: Path | str, target: str) -> dict[str, Any]:
    """Return a volume that mounts a path of this machine at `target` in the containers."""
    return {"type": "bind", "source": str(source), "target": target}


def recipe_spec(recipe: str, options: list[str]) -> ContainerSpec:
    """Return what containers of a recipe get, with the folders that its options name."""
    runs_dir = Path(read_option("--runs-dir", "runs", options))
    name = read_option("--name", "", options) or next_folder(recipe, runs_dir).name
    if Path(name).name != name:
        raise UserError(f"NAME expects a plain name, without folders, got {name!r}")
    data_dir, cache_dir = read_option("--data-dir", "", options), read_option("--cache-dir", "", options)
    url = url_of(Path(data_dir))
    cache = Path(cache_dir).resolve() if cache_dir else None
    environment: dict[str, str] = {}
    volumes = [bind(cache, "/cache")] if cache else []
    if any(":" in read_option(flag, "", options) for flag in ("--model", "--data", "--task", "--optimizer")):
        # The caller's modules. The recipes are those of the image, whose folder comes before PYTHONPATH.
        environment = {"PYTHONPATH": "/code"}
        volumes.append({**bind(os.getcwd(), "/code"), "read_only": True})
    own = []  # these come last, so that they override the user's, also those of a --config file
    if recipe != "probe":  # the probe keeps no record
        own += ["--name", name, "--runs-dir", "/runs"]
        # Without a folder, --data text reads the standard library's, in the container as elsewhere.
        if data_dir or read_option("--data", "", options) != "text":
            own += ["--data-dir", url or "/data"]
        own += ["--cache-dir", "/cache"] if cache else []
    data = Path("data" if url else data_dir or "data").resolve()
    return ContainerSpec(runs_dir.resolve() / name, data, [*options, *own], environment, volumes, cache)


def script_spec(name: str, options: list[str]) -> ContainerSpec:
    """Return what containers of a script get; its folder and its WORKDIR have the same paths in them."""
    own = script.job_environment(name)
    script.lock_run_dir(Path(own["RUN_DIR"]))
    run = Path(own["RUN_DIR"])
    folders = dict.fromkeys((own["WORKDIR"], str(Path(own["SCRIPT"]).parent)))
    if "/tmp" in folders:
        raise UserError(
            "SCRIPT, WORKDIR: /tmp is another folder in containers; move the script to a folder below it"
        )
    environment = {**own, "RUN_DIR": f"/runs/{run.name}"}
    return ContainerSpec(run, ROOT / "data", options, environment, [bind(path, path) for path in folders])


def make_writable(folder: Path) -> None:
    """Make a folder to which the containers' user can write even if the caller is root."""
    make_folder(folder)
    if os.geteuid() == 0:
        uid, gid = map(int, CONTAINER_USER.split(":"))
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, gid, follow_symlinks=False)


def find_compose(docker: str) -> list[str]:
    """Return the command of Compose, version 2 or the older program; raises UserError if there is neither."""
    if engine_output([docker, "compose", "version"]).returncode == 0:
        return [docker, "compose"]
    if older := shutil.which("docker-compose"):
        return [older]
    raise UserError("Docker Compose not found; install its plugin (Debian: docker-compose)")


def check_image(docker: str, image: str, recipe: str) -> None:
    """Raise UserError without an engine or the image; warn if the image holds other code than this checkout."""
    if engine_output([docker, "info"]).returncode:
        raise UserError(
            f"no Docker engine answers {docker}; start it (systemctl start docker), or join the group docker"
        )
    form = '{{index .Config.Labels "org.opencontainers.image.revision"}}'
    shown = engine_output([docker, "image", "inspect", "--format", form, image])
    if shown.returncode:
        raise UserError(f"there is no image {image}; make image RECIPE={recipe} builds it")
    here, inside = revision(), shown.stdout.strip()
    if here and inside != here:
        inside, here = (text[:12] + "-dirty" * text.endswith("-dirty") for text in (inside, here))
        print(
            f"warning: {image} holds revision {inside}, this checkout is {here}; "
            f"make image RECIPE={recipe} builds it again",
            file=sys.stderr,
        )


def compose_override(nodes: int, shares: list[list[str]], spec: ContainerSpec) -> dict[str, Any]:
    """Return the additions to docker/compose.yaml: more nodes, each node's GPUs, and what all get."""
    services: dict[str, dict[str, Any]] = {}
    for node in range(nodes):
        environment = {**spec.environment, "NODE_RANK": str(node)}
        service = {"hostname": f"node{node}", "environment": environment, "volumes": spec.volumes}
        if node > 1:
            service["extends"] = {"file": str(COMPOSE_FILE), "service": "node1"}
        if shares[node]:
            device = {"driver": "nvidia", "device_ids": shares[node], "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
            service["ulimits"] = {"memlock": -1}
            # As in the manifests: what 8 workers of each of 8 GPUs prefetch of ImageNet takes 2.5 GB.
            service["shm_size"] = f"{8 * len(shares[node])}gb"
        services[f"node{node}"] = service
    return {"services": services}


@contextlib.contextmanager
def removed_at_end(compose: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Remove all containers and networks at the end, even if this process is killed: a helper outlives it."""
    # The helper reads a pipe whose other end only this process holds, so that it closes with this process.
    down = f"cat >/dev/null; exec {shlex.join([*compose, 'down', '--volumes', '--timeout', str(DOWN_TIMEOUT_S)])}"
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
        try:
            helper.wait(ENGINE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(
                f"warning: after {ENGINE_TIMEOUT_S:g} s Compose is still removing the containers of "
                f"{environment['COMPOSE_PROJECT_NAME']}; docker ps --all shows what is left",
                file=sys.stderr,
            )


@command
def main(argv: list[str]) -> int:
    """Start a container for each node, wait for all, and return the job's exit status."""
    args = parse_args(argv, "python -m docker.compose", __doc__, hides=True)
    recipe = check_recipe(args.recipe)
    if (args.min_nodes, args.max_restarts) != (None, None):
        raise UserError("MIN_NODES: WITH=docker does not restart lost containers; drop one of the two")
    nodes, shares = args.nodes, assign_gpus(args.nodes, args.options)
    processes = processes_per_node(args, shares)
    docker = shutil.which(os.environ.get("DOCKER", "docker"))
    if not docker:
        raise UserError("docker not found; install Docker (Debian: docker.io docker-compose), or drop WITH=docker")
    image = os.environ.get("IMAGE") or f"cluster-recipes/{image_of(recipe)}:latest"
    check_image(docker, image, recipe)
    compose = find_compose(docker)
    spec = script_spec(args.name, args.options) if script.is_set() else recipe_spec(recipe, args.options)
    make_writable(spec.run)
    if spec.cache and not spec.cache.exists():
        make_writable(spec.cache)
    make_folder(spec.data)

    environment = {
        # docker-compose is a Python program, which imports a package that is called docker as well.
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "COMPOSE_PROJECT_NAME": f"cluster-recipes-{uuid.uuid4().hex[:8]}",
        "IMAGE": image,
        "RECIPE": recipe,
        "OPTIONS": shlex.join(spec.options),
        "NNODES": str(nodes),
        "NPROC_PER_NODE": str(processes),
        "OMP_NUM_THREADS": threads_per_process(nodes, processes),
        "RUNS": str(spec.run.parent),
        "DATA": str(spec.data),
        "CONTAINER_USER": CONTAINER_USER if os.geteuid() == 0 else f"{os.geteuid()}:{os.getegid()}",
    }
    job = LocalJob()
    job.handle_signals()
    with temporary_folder() as scratch:
        more = Path(scratch, "nodes.json")
        override = json.dumps(compose_override(nodes, shares, spec))
        more.write_text(override.replace("$", "$$"))  # Compose expands $NAME
        compose += ["--file", str(COMPOSE_FILE), "--file", str(more)]
        try:
            with removed_at_end(compose, environment):
                return run_nodes(docker, compose, environment, nodes, job)
        finally:
            with contextlib.suppress(OSError):  # the folder of a refused run is empty
                spec.run.rmdir()


def run_nodes(docker: str, compose: list[str], environment: dict[str, str], nodes: int, job: LocalJob) -> int:
    """Create the containers, then start each one through a client that relays its output, signals and status."""
    names = [f"node{node}" for node in range(nodes)]
    made = engine_output([*compose, "up", "--no-start", *names], environment)
    if job.interrupted_by or job.stop_signals:  # Compose got the signal as well
        return job.report([])
    if made.returncode:
        said = made.stderr
        if "Traceback (" in said:  # docker-compose finds no engine: that of Podman or of a context is elsewhere
            said = f"{said.strip().splitlines()[-1]}; DOCKER_HOST=unix:///path names the engine's socket"
        raise UserError(f"Compose could not make the containers: {' '.join(said.split())}")
    containers = [
        engine_output([*compose, "ps", "--all", "--quiet", name], environment).stdout.strip() for name in names
    ]
    for container in containers:
        job.start([docker, "start", "--attach", container], environment)
    status = job.wait()
    if status:  # the container of a client that was killed still runs
        engine_output([docker, "kill", *containers])
    return status


def engine_output(
    command: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run docker or Compose and return what it printed; raises UserError if the engine does not answer."""
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S)
    except OSError as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        words = " ".join([Path(command[0]).name, *command[1:2]])
        raise UserError(
            f"the Docker engine gave {words} no answer within {ENGINE_TIMEOUT_S:g} s; restart it "
            "(systemctl restart docker)"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
