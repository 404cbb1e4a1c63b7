"""Run a job of several nodes in containers on this machine: docker/compose.yaml with as many nodes as asked for.

    python -m docker.compose ddp --nodes 2 --nproc-per-node 1 -- --epochs 3

`make run RECIPE=ddp NODES=2 WITH=docker` calls it; it needs an image (make image), a Docker engine and Compose,
but no .venv. Each node gets its share of the GPUs and cores. Output, signals and the end of a failed job are those
of scripts/launch/local.py. The record is in runs/NAME; no container or network is left, however this process ends.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.options import url_of
from recipes.common.record.facts import revision
from scripts.launch import script
from scripts.launch.command import ROOT, check_recipe, command, make_folder, next_folder
from scripts.launch.cores import count_cores
from scripts.launch.local import LocalJob, parse_args, processes_per_node, share_out, visible_gpus
from scripts.launch.stopped_status import option

FILE = ROOT / "docker/compose.yaml"
TRAINER = "10001:10001"
"""The images' own user, who trains for a caller who is root."""

ENGINE_TIMEOUT_S = 120.0
END_GRACE_S = 60
"""How long nodes may take to write a checkpoint when this process was killed."""


@dataclass(frozen=True)
class Folders:
    """Folders of this machine that are mounted into the containers, and the run's folder."""

    runs: Path
    data: Path
    run: Path
    cache: Path | None = None


def take_modules(options: list[str]) -> dict[str, Any]:
    """Return what each node's service has so that options such as --model mine:net find the caller's modules.

    The recipes themselves are the image's: its folder comes before PYTHONPATH.
    """
    if not any(":" in option(flag, "", options) for flag in ("--model", "--data", "--task")):
        return {}
    return {
        "environment": {"PYTHONPATH": "/code"},
        "volumes": [{"type": "bind", "source": os.getcwd(), "target": "/code", "read_only": True}],
    }


def take_folders(recipe: str, options: list[str]) -> tuple[Folders, list[str]]:
    """Return the folders that the options name, and the options with the containers' names of these."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # Those of a --config file, too: what is added here overrides them in the containers.
    parser.add_argument("--runs-dir", type=Path, default=option("--runs-dir", "runs", options))
    for flag in ("--data-dir", "--cache-dir"):
        parser.add_argument(flag, type=Path, default=option(flag, "", options) or None)
    parser.add_argument("--name", default=option("--name", "", options))
    own, rest = parser.parse_known_args(options)
    name = own.name or next_folder(recipe, own.runs_dir).name
    if not name or Path(name).name != name:
        raise UserError(f"NAME expects a plain name, without folders, got {name!r}")
    url = url_of(own.data_dir) if own.data_dir else None
    data_dir = Path("data") if url or not own.data_dir else own.data_dir
    runs = own.runs_dir.resolve()
    folders = Folders(runs, data_dir.resolve(), runs / name, own.cache_dir and own.cache_dir.resolve())
    if recipe == "probe":  # it keeps no record
        return folders, rest
    # Text without a folder is the standard library's, in the container as elsewhere.
    is_installed = own.data_dir is None and option("--data", "", options) == "text"
    data = [] if is_installed else ["--data-dir", url or "/data"]
    cache = ["--cache-dir", "/cache"] if folders.cache else []
    return folders, [*rest, "--name", name, "--runs-dir", "/runs", *data, *cache]


def bind_cache(own: dict[str, Any], cache: Path | None) -> dict[str, Any]:
    """Make the folder of --cache-dir; return what each node's service has, and that folder."""
    if not cache:
        return own
    if not cache.exists():
        make_run_folder(cache)
    volume = {"type": "bind", "source": str(cache), "target": "/cache"}
    return {**own, "volumes": [*own.get("volumes", []), volume]}


def take_script(name: str) -> tuple[Folders, dict[str, Any]]:
    """Return the folders of a script's run, and what each node's service has beside a recipe's.

    The script's folder and its working directory have their own paths in the containers, too.
    """
    own = script.job_environment(name)
    run = Path(own["RUN_DIR"])
    folders = dict.fromkeys((own["WORKDIR"], str(Path(own["SCRIPT"]).parent)))
    if "/tmp" in folders:
        raise UserError(
            "SCRIPT, WORKDIR: /tmp is another folder in containers; move the script to a folder below it"
        )
    environment = {**own, "RUN_DIR": f"/runs/{run.name}"}
    return Folders(run.parent, ROOT / "data", run), {
        "environment": environment,
        "volumes": [{"type": "bind", "source": folder, "target": folder} for folder in folders],
    }


def make_run_folder(folder: Path) -> None:
    """Make a folder such as the run's, where the containers' user can write even when the caller is root."""
    make_folder(folder)
    if os.geteuid() == 0:
        uid, gid = map(int, TRAINER.split(":"))
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, gid, follow_symlinks=False)


def find_compose(docker: str) -> list[str]:
    """Return the command of Compose, version 2 or the older program, or refuse."""
    if engine_output([docker, "compose", "version"]).returncode == 0:
        return [docker, "compose"]
    older = shutil.which("docker-compose")
    if not older:
        raise UserError("there is no Compose; install Docker's compose plugin (Debian: docker-compose)")
    return [older]


def check_image(docker: str, image: str, recipe: str) -> None:
    """Refuse a missing engine or image; warn if the image holds other code than this checkout."""
    if engine_output([docker, "info"]).returncode:
        raise UserError(
            f"no Docker engine answers {docker}; start it (systemctl start docker), or join the group docker"
        )
    form = '{{index .Config.Labels "org.opencontainers.image.revision"}}'
    shown = engine_output([docker, "image", "inspect", "--format", form, image])
    if shown.returncode:
        raise UserError(f"there is no image {image}; make image RECIPE={recipe} builds it")
    here = revision()
    if here and shown.stdout.strip() != here:
        print(
            f"warning: {image} holds revision {shown.stdout.strip()[:12]}, this checkout is {here[:12]}"
            f"{'-dirty' if here.endswith('-dirty') else ''}; make image RECIPE={recipe} builds it anew",
            file=sys.stderr,
        )


def override(nodes: int, shares: list[list[str]], own: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what is added to docker/compose.yaml: more nodes, each one's GPUs, and what `own` adds to all."""
    services: dict[str, dict[str, Any]] = {}
    for node in range(nodes):
        service: dict[str, Any] = copy.deepcopy(own or {})
        if node > 1:
            service["extends"] = {"file": str(FILE), "service": "node1"}
            service["hostname"] = f"node{node}"
            service.setdefault("environment", {})["NODE_RANK"] = str(node)
        if shares[node]:
            device = {"driver": "nvidia", "device_ids": shares[node], "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
            service["ulimits"] = {"memlock": -1}
        if service:
            services[f"node{node}"] = service
    return {"services": services}


@contextlib.contextmanager
def taken_down(compose: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Remove all containers and networks, even if this process is killed: a helper outlives it."""
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
    args = parse_args(argv)
    recipe = check_recipe(args.recipe)
    if args.min_nodes or args.max_restarts:
        raise UserError("MIN_NODES: WITH=docker does not restart lost containers; drop one of the two")
    nodes, shares = args.nodes, share_out(visible_gpus(), args.nodes)
    processes = processes_per_node(args, recipe, shares)
    docker = shutil.which(os.environ.get("DOCKER", "docker"))
    if not docker:
        raise UserError(
            "there is no docker; install Docker (Debian: docker.io docker-compose), or drop WITH=docker"
        )
    image_name = recipe if (ROOT / f"docker/{recipe}.Dockerfile").exists() else "ddp"
    image = os.environ.get("IMAGE") or f"cluster-recipes/{image_name}:latest"
    check_image(docker, image, recipe)
    compose = find_compose(docker)
    if script.is_set():
        (folders, own), options = take_script(args.name), args.options
    else:
        (folders, options), own = take_folders(recipe, args.options), take_modules(args.options)
    make_run_folder(folders.run)
    own = bind_cache(own, folders.cache)
    make_folder(folders.data)

    cores = count_cores()
    environment = {
        # docker-compose is in Python, and imports a package that is called docker as well.
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
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
    job.listen()
    with tempfile.TemporaryDirectory(prefix="cluster-recipes-") as scratch:
        more = Path(scratch, "nodes.json")
        added = override(nodes, shares, own)
        more.write_text(json.dumps(added).replace("$", "$$"))  # Compose expands $NAME, and $$ to $
        compose += ["--file", str(FILE), *(["--file", str(more)] if added["services"] else [])]
        with taken_down(compose, environment):
            status = run_nodes(docker, compose, environment, nodes, job)
    with contextlib.suppress(OSError):  # nothing is in the folder of a run that was refused
        folders.run.rmdir()
    return status


def run_nodes(docker: str, compose: list[str], environment: dict[str, str], nodes: int, job: LocalJob) -> int:
    """Make the containers, then run each below a client that passes its output, signals and status on."""
    names = [f"node{node}" for node in range(nodes)]
    made = engine_output([*compose, "up", "--no-start", *names], environment)
    if made.returncode:
        raise UserError(f"Compose could not make the containers: {' '.join(made.stderr.split())}")
    containers = [
        engine_output([*compose, "ps", "--all", "--quiet", name], environment).stdout.strip() for name in names
    ]
    for container in containers:
        job.start([docker, "start", "--attach", container], environment)
    status = job.wait()
    if status:  # what a client was killed for goes on in its container
        engine_output([docker, "kill", *containers])
    return status


def engine_output(
    command: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run docker or Compose and return what it printed; raises UserError where the engine does not answer."""
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
