"""Render a manifest of k8s/ with the values of a request: the file is parsed, edited, and written again."""

from __future__ import annotations

import math
import os
import re
import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any

import yaml

from recipes.common.errors import UserError
from scripts.launch.command import NOT_ELASTIC, ONE_PROCESS, ROOT, check_names, image_of
from scripts.launch.recipe_options import read_option

INSTANCE = "app.kubernetes.io/instance"
PLACEHOLDER = "registry.invalid/"
"""The registry in the files until they are edited: nobody can own a name below .invalid (RFC 2606)."""
GPU = "nvidia.com/gpu"
RESTARTS = 3
"""How often the files let a failed job start again."""
MTBF_GPU_HOURS, MONTH_HOURS = 50_000, 30 * 24
"""A failure of the job is expected once in so many GPU hours (docs/plan.md)."""


@dataclass(frozen=True)
class Kind:
    """The resource that a manifest creates, and the labels of the pod that runs rank 0 or speaks for it."""

    resource: str
    head: dict[str, str]
    operator: str = ""


INDEX_0 = {"batch.kubernetes.io/job-completion-index": "0"}
REPLICA_0 = {"training.kubeflow.org/replica-index": "0"}
LAUNCHER = {"training.kubeflow.org/job-role": "launcher"}
KINDS = {
    "indexed-job": Kind("jobs.batch", INDEX_0),
    "jobset": Kind("jobsets.jobset.x-k8s.io", INDEX_0, "the JobSet controller"),
    "pytorchjob": Kind("pytorchjobs.kubeflow.org", REPLICA_0, "the Kubeflow training operator"),
    "pytorchjob-elastic": Kind("pytorchjobs.kubeflow.org", REPLICA_0, "the Kubeflow training operator"),
    "mpijob": Kind("mpijobs.kubeflow.org", LAUNCHER, "the MPI operator"),
    "trainjob": Kind("trainjobs.trainer.kubeflow.org", INDEX_0, "the Kubeflow trainer"),
    "doctor": Kind("jobs.batch", INDEX_0),
}
"""Kinds of jobs; KIND's manifest is k8s/KIND.yaml."""

WHOLE_RESOURCES = ("gpus", "cpu-only")
"""Components that replace a container's resources: they come before those that add devices (rdma, efa)."""


@dataclass(frozen=True)
class Request:
    """What the user asks for; None leaves a value as the manifest has it."""

    kind: str
    recipe: str
    name: str
    nodes: int
    gpus: int | None = None
    image: str | None = None
    fabric: str | None = None
    options: Sequence[str] = field(default_factory=list)
    script: str | None = None
    """A file in the image or on a volume that runs instead of the recipe."""
    components: Sequence[str] = ()
    """Folders of k8s/components, which change the manifest before the other values are put in."""
    namespace: str | None = None

    @property
    def delete(self) -> str:
        """The command that deletes the job."""
        return f"make k8s-delete NAME={self.name}" + (f" NAMESPACE={self.namespace}" if self.namespace else "")


def pod_templates(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod template below a parsed manifest."""
    if isinstance(tree, dict):
        if isinstance(tree.get("spec"), dict) and "containers" in tree["spec"]:
            yield tree
        for value in tree.values():
            yield from pod_templates(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from pod_templates(value)


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader, about ten times as fast, if PyYAML was built with it."""


def parse(text: str) -> list[dict[str, Any]]:
    """Return the documents of a YAML text."""
    return [document for document in yaml.load_all(text, LOADER) if document is not None]


def load(file: str) -> list[dict[str, Any]]:
    """Return the documents of a file of k8s/; raises UserError if an edited file is no longer YAML."""
    try:
        return parse((ROOT / "k8s" / file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"k8s/{file} is not YAML: {' '.join(str(error).split())}") from None


def add_component(documents: list[dict[str, Any]], name: str, kind: str) -> list[dict[str, Any]]:
    """Apply a folder of k8s/components to documents and return the result, with the job as the last one.

    Raises:
        UserError: there is no such component, it changes nothing here, or kubectl cannot build it.
    """
    if variable := {"nodes": "NODES", "image": "IMAGE"}.get(name):
        raise UserError(f"COMPONENTS: {name} is for kubectl apply -k; {variable}= sets it here")
    check_names("COMPONENTS", [name], sorted(path.name for path in (ROOT / "k8s/components").iterdir()))
    with tempfile.TemporaryDirectory() as folder:
        content = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "sortOptions": {"order": "fifo"},
            "resources": ["manifest.yaml"],
            "components": [os.path.relpath(ROOT / "k8s/components" / name, Path(folder).resolve())],
        }
        Path(folder, "manifest.yaml").write_text(to_text(documents))
        Path(folder, "kustomization.yaml").write_text(to_text([content]))
        command = [os.environ.get("KUBECTL", "kubectl"), "kustomize", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
            raise UserError(f"COMPONENTS: kubectl kustomize cannot build {name}: {reason}") from None
    built = parse(done.stdout)
    if built == documents:
        raise UserError(f"COMPONENTS: {name} does not change KIND={kind}; leave it out (k8s/README.md)")
    added = built[len(documents) :]
    for document in added:  # such as a NetworkPolicy, which is named after its own job
        rename(document, document["metadata"]["name"], documents[-1]["metadata"]["name"])
        document["metadata"]["name"] = documents[-1]["metadata"]["name"]
    return [*added, *built[: len(documents)]]


def render(request: Request) -> list[dict[str, Any]]:
    """Return the documents of the kind's file with the request's values.

    Raises:
        UserError: the request is invalid, or the kind cannot run it.
    """
    check(request)
    documents = load(f"{request.kind}.yaml")
    for component in sorted(request.components, key=lambda name: name not in WHOLE_RESOURCES):
        documents = add_component(documents, component, request.kind)
    rename(documents, documents[-1]["metadata"]["name"], request.name)
    job = documents[-1]["spec"]
    containers = [template["spec"]["containers"][0] for template in pod_templates(documents)]
    gpus = most_gpus(documents) if request.gpus is None else request.gpus
    restarts = max(RESTARTS, math.ceil(request.nodes * max(1, gpus) * MONTH_HOURS / MTBF_GPU_HOURS))
    set_nodes(request.nodes, job, containers, restarts)
    set_restarts(restarts, documents)
    if request.gpus is not None:
        nproc = 1 if request.recipe in ONE_PROCESS else max(request.gpus, 1)
        set_gpus(request.gpus, nproc, job, list(pod_templates(documents)))
    for container in containers:
        set_image(request, container)
        if request.fabric:
            set_env(container, "FABRIC", request.fabric)
        if request.script:
            container["env"] += script_variables(request.script, request.name)
            if request.gpus == 0:  # it has no --device, and images ask NVIDIA's runtime for all GPUs
                container["env"].append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    for holder in [*containers, job.get("trainer", {})]:
        if "args" in holder:
            holder["args"] = arguments(request, holder["args"])
    if "elasticPolicy" in job:
        # A pod of an older job of this name may still be terminating.
        job["elasticPolicy"]["rdzvId"] = f"{request.name}-{secrets.token_hex(4)}"
    return documents


def check(request: Request) -> None:
    """Raise UserError for a recipe, script or number of nodes that the kind cannot run, or for an invalid name."""
    if request.kind == "mpijob" and request.recipe != "horovod":
        raise UserError(f"KIND=mpijob runs horovod, not {request.recipe}; KIND=indexed-job runs every recipe")
    if request.kind == "doctor" and request.recipe != "probe":
        raise UserError(f"KIND=doctor runs probe, not {request.recipe}; KIND=indexed-job runs every recipe")
    if request.kind == "pytorchjob-elastic" and request.recipe in NOT_ELASTIC:
        raise UserError(
            f"KIND=pytorchjob-elastic: {request.recipe} cannot be elastic; use KIND=indexed-job, or RECIPE=ddp"
        )
    if request.script:
        check_script(request.script, request.kind)
    if request.recipe in ONE_PROCESS and request.nodes != 1:
        raise UserError(f"{request.recipe} is one process; NODES=1, or RECIPE=ddp")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", request.name):
        raise UserError(
            f"NAME expects at most 40 small letters, digits and '-', the first a letter, got {request.name!r}"
        )


def check_script(script: str, kind: str) -> None:
    """Raise UserError for a script that no container has, or for a kind that starts only recipes."""
    if kind in ("mpijob", "doctor"):
        raise UserError(f"KIND={kind} is for recipes; KIND=indexed-job runs SCRIPT, however its ranks start")
    if not script.startswith("/") and not (ROOT / script).is_file():
        raise UserError(
            f"SCRIPT {script} is not in the image; copy it to a volume and name it: /data/{Path(script).name}"
        )


def script_variables(script: str, name: str) -> list[dict[str, str]]:
    """Return the variables of a script (scripts/launch/script.py), which runs in its run's folder."""
    run_dir = f"/runs/{name}"
    values = {"SCRIPT": script, "WORKDIR": run_dir, "RUN_DIR": run_dir, "RESUME": "auto"}
    return [{"name": key, "value": value} for key, value in values.items()]


def set_image(request: Request, container: dict[str, Any]) -> None:
    """Set the request's image; without one, keep that of an edited file, or use the one that the nodes have."""
    of_file = "horovod" if request.kind == "mpijob" else "ddp"
    if request.image:
        container["image"] = request.image
    elif container["image"].startswith(PLACEHOLDER) or image_of(request.recipe) != of_file:
        container["image"] = f"cluster-recipes/{image_of(request.recipe)}:latest"
        container["imagePullPolicy"] = "Never"  # a public registry's image of that name is not ours


def rename(tree: Any, old: str, new: str) -> None:
    """Rename the job, its objects and all references to it."""
    if isinstance(tree, list):
        for value in tree:
            rename(value, old, new)
    if not isinstance(tree, dict):
        return
    for key, value in tree.items():
        if key in (INSTANCE, "subdomain") and value == old:
            tree[key] = new
        elif key in ("metadata", "runtimeRef") and value.get("name") == old:
            value["name"] = new
        rename(value, old, new)
    if tree.get("name") == "MASTER_ADDR" and "value" in tree:
        tree["value"] = re.sub(rf"^{old}(?=-)|(?<=\.){old}$", new, tree["value"])


def set_env(container: dict[str, Any], name: str, value: str) -> None:
    """Set a variable if the container has it, wherever its value comes from."""
    for variable in container.get("env", []):
        if variable["name"] == name:
            variable.pop("valueFrom", None)
            variable["value"] = value


def most_gpus(tree: Any) -> int:
    """Return the largest number of GPUs of a container."""
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    own = int(tree.get(GPU, 0)) if isinstance(tree, dict) else 0
    return max([own, *map(most_gpus, values)])


def set_restarts(restarts: int, tree: Any) -> None:
    """Let a failed job start again so often, wherever that is a number of its own and not edited."""
    if isinstance(tree, list):
        for value in tree:
            set_restarts(restarts, value)
    if not isinstance(tree, dict):
        return
    for key, value in tree.items():
        if (key, value) in (("maxRestarts", RESTARTS), ("backoffLimitPerIndex", RESTARTS)):
            tree[key] = restarts
        elif key == "runPolicy" and "mpiReplicaSpecs" in tree and value.get("backoffLimit") == RESTARTS + 1:
            value["backoffLimit"] = restarts + 1  # the launcher's Job fails at its limit
        set_restarts(restarts, value)


def set_nodes(nodes: int, job: dict[str, Any], containers: list[dict[str, Any]], restarts: int = RESTARTS) -> None:
    """Set the number of nodes in each place where the kind has it."""
    spec = job["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in job else job
    if "completions" in spec:
        spec.update(completions=nodes, parallelism=nodes)
        set_env(containers[0], "NNODES", str(nodes))
    if "trainer" in job:
        job["trainer"]["numNodes"] = nodes
    for replicas in {"pytorchReplicaSpecs", "mpiReplicaSpecs"} & job.keys():
        before, job[replicas]["Worker"]["replicas"] = job[replicas]["Worker"]["replicas"], nodes
    if "elasticPolicy" in job:
        before = job["elasticPolicy"]["maxReplicas"]
        job["elasticPolicy"]["maxReplicas"] = nodes = max(nodes, before)
    if "pytorchReplicaSpecs" in job:
        # The operator adds up the restarts of all containers, and fails at the limit: allow so many of each node.
        # A limit that the user has raised stays.
        policy = job.setdefault("runPolicy", {})
        limit = policy.get("backoffLimit", 0)
        policy["backoffLimit"] = max(limit * (limit > RESTARTS * before + 1), restarts * nodes + 1)


def set_gpus(gpus: int, nproc: int, job: dict[str, Any], templates: list[dict[str, Any]]) -> None:
    """Set a node's GPUs and processes, and sizes that scale with the GPUs; without GPUs, for one small process.

    Raises UserError for GPUs if the manifest has none.
    """
    has_gpus = False
    for key, value in (("nprocPerNode", str(nproc)), ("slotsPerWorker", nproc)):
        if key in job:
            job[key] = value
    if "trainer" in job:
        job["trainer"]["numProcPerNode"] = nproc
    for template in templates:
        container = template["spec"]["containers"][0]
        set_env(container, "NPROC_PER_NODE", str(nproc))
        # A TrainJob has its resources outside of its pod template.
        resources = job.get("trainer", {}).get("resourcesPerNode") or container["resources"]
        requests, limits = resources["requests"], resources["limits"]
        before = limits.pop(GPU, 0)
        if gpus == 0:  # one core and 4 GiB, for a cluster on a laptop
            resources["requests"] = {"cpu": "1", "memory": "4Gi"}
            limits["memory"] = "4Gi"
            kept = [one for one in template["spec"].get("tolerations", []) if one.get("key") != GPU]
            template["spec"]["tolerations"] = kept  # nodes with GPUs are for other jobs
            for volume in template["spec"]["volumes"]:
                if "emptyDir" in volume:
                    volume["emptyDir"]["sizeLimit"] = "1Gi"
        elif before:  # scale what one process needs by the number of processes
            limits[GPU] = gpus
            amounts = [(requests, "cpu"), (requests, "memory"), (limits, "memory")]
            holders = [volume.get("emptyDir", {}) for volume in template["spec"]["volumes"]]
            amounts += [(holder, "sizeLimit") for holder in holders if holder.get("medium") == "Memory"]
            for held, name in amounts:
                held[name] = scale(held[name], gpus, before)
            has_gpus = True
    if gpus and not has_gpus:
        fix = "add one, without the component cpu-only; set other devices in the file, without GPUS"
        raise UserError(f"GPUS {gpus}: the manifest has no limit of {GPU}; {fix}")


def scale(quantity: str | int | float, gpus: int, before: int) -> str:
    """Scale a quantity such as 1.5Gi from `before` GPUs to `gpus`.

    The result is rounded up and keeps the number of decimals. Raises UserError if it is not a quantity.
    """
    found = re.fullmatch(r"(\d+\.?\d*(?:[eE][+-]?\d+)?)([a-zA-Z]*)", str(quantity))
    if not found:
        raise UserError(f"{quantity!r} in the manifest is not a quantity; write one such as 8, 500m or 1.5Gi")
    number = Decimal(found[1])
    step = Decimal(1).scaleb(min(0, int(number.as_tuple().exponent)))
    return f"{(number * gpus / before).quantize(step, ROUND_CEILING):f}{found[2]}"


def arguments(request: Request, words: Sequence[str]) -> list[str]:
    """Return a container's arguments: the manifest's with this recipe and name, then the user's options.

    Raises:
        UserError: an argument in the manifest is not text.
    """
    for word in words:
        if not isinstance(word, str):
            raise UserError(
                f"k8s/{request.kind}.yaml: {word!r} in args is not text; put it in quotes (YAML reads 1.10 as 1.1)"
            )
    options = [word.replace("$", "$$") for word in request.options]  # Kubernetes expands $(NAME), and $$ to $
    if request.script:
        return [request.recipe, *options]
    if request.gpus == 0:  # where NVIDIA's runtime is the default, a pod without GPUs sees those of its node
        options = ["--device=cpu", *options]
    if request.kind == "doctor":
        return [*words, *options]
    has_recipe = not words[0].startswith("-")
    kept = [] if request.recipe == "probe" else [f"--name={request.name}"]
    flag, reads_text = "", read_option("--data", "", request.options) == "text"
    for word in words[has_recipe:]:
        flag = word.partition("=")[0] if word.startswith("--") else flag  # a word without -- is the flag's value
        is_replaced = flag == "--name" or (flag == "--device" and request.gpus == 0)
        is_replaced |= word == "--data-dir=/data" and reads_text  # by default the standard library's sources
        if not is_replaced and (request.recipe != "probe" or flag in ("--timeout-s", "--device")):
            kept.append(word)
    return [*([request.recipe] if has_recipe else []), *kept, *options]


class Dumper(yaml.SafeDumper):
    """Writes scripts as literal blocks, as in the files, and quotes strings that may look like numbers."""


def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Return a string as YAML, in quotes where kubectl but not PyYAML reads a number or a bool: 1e-3, 0o17, y."""
    style = "|" if "\n" in text else None if re.match(r"[A-Za-z/-][A-Za-z/-]", text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, represent_text)


def to_text(documents: list[dict[str, Any]]) -> str:
    """Return documents as YAML."""
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=110)
