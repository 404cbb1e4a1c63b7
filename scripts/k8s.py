"""Render a manifest of k8s/ for a recipe, apply it, follow node 0's log, and end with the job's status.

    make k8s RECIPE=ddp NODES=4 [KIND=pytorchjob] [GPUS=8] [IMAGE=registry/ddp:1] [FABRIC=ib] [NAME=mine]
    python -m scripts.k8s ddp --nodes 4 --render         # print what would be applied
    python -m scripts.k8s --delete mine

Success: the recipe's last line, `result recipe=ddp world_size=4 ...`, and status 0. The file is parsed, edited
and written again: what it says is what runs, but for the values given here. kubectl does the rest (KUBECTL names
another one); its errors and those of pods that cannot start become one line with the mend. Ctrl-C leaves the job
running.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipes.common.entry import USAGE_STATUS
from recipes.common.errors import UserError, nearest
from scripts.local import check_recipe

ROOT = Path(__file__).resolve().parent.parent
INSTANCE = "app.kubernetes.io/instance"
OURS = "app.kubernetes.io/name=cluster-recipes"
GPU = "nvidia.com/gpu"
ONCE = "kubectl apply -f k8s/cluster.yaml makes it, once for a namespace"

CALL_S = 60
"""Longest wait for kubectl to answer."""
POLL_S = float(os.environ.get("K8S_POLL_S", "2"))
END_S = 120
"""Longest wait for the job to be called finished, after node 0's last line."""


@dataclass(frozen=True)
class Kind:
    """A manifest, the resource that it makes, and how to know the pod that holds rank 0 or speaks for it."""

    file: str
    resource: str
    head: dict[str, str]
    operator: str = ""


INDEX_0 = {"batch.kubernetes.io/job-completion-index": "0"}
KINDS = {
    "indexed-job": Kind("indexed-job.yaml", "jobs.batch", INDEX_0),
    "jobset": Kind("jobset.yaml", "jobsets.jobset.x-k8s.io", INDEX_0, "the JobSet controller"),
    "pytorchjob": Kind(
        "pytorchjob.yaml",
        "pytorchjobs.kubeflow.org",
        {"training.kubeflow.org/replica-type": "master"},
        "the Kubeflow training operator",
    ),
    "pytorchjob-elastic": Kind(
        "pytorchjob-elastic.yaml",
        "pytorchjobs.kubeflow.org",
        {"training.kubeflow.org/replica-index": "0"},
        "the Kubeflow training operator",
    ),
    "mpijob": Kind(
        "mpijob.yaml", "mpijobs.kubeflow.org", {"training.kubeflow.org/job-role": "launcher"}, "the MPI operator"
    ),
    "trainjob": Kind("trainjob.yaml", "trainjobs.trainer.kubeflow.org", INDEX_0, "the Kubeflow trainer"),
    "doctor": Kind("doctor.yaml", "jobs.batch", INDEX_0),
}
DELETED = [*dict.fromkeys(kind.resource for kind in KINDS.values()), "trainingruntimes.trainer.kubeflow.org"]
DELETED += ["services", "secrets"]


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


# ---- the manifest


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


def load(file: str) -> list[dict[str, Any]]:
    """Return the documents of a file of k8s/."""
    return list(yaml.safe_load_all((ROOT / "k8s" / file).read_text()))


def render(request: Request) -> list[dict[str, Any]]:
    """Return the documents of the kind's file with the request's values.

    Raises:
        UserError: the kind cannot run the recipe or the number of nodes.
    """
    check(request)
    documents = load(KINDS[request.kind].file)
    rename(documents, documents[-1]["metadata"]["name"], request.name)
    job = documents[-1]["spec"]
    containers = [template["spec"]["containers"][0] for template in pod_templates(documents)]
    set_nodes(request, job, containers)
    if request.gpus is not None:
        set_gpus(request.gpus, job, containers)
        if request.gpus == 0:
            make_small(documents, job, containers)
    for container in containers:
        container["image"] = request.image or f"cluster-recipes/{image_of(request.recipe)}:latest"
        for variable in container.get("env", []):
            if request.fabric and variable["name"] == "FABRIC":
                variable.pop("valueFrom", None)
                variable["value"] = request.fabric
    for holder in [*containers, job.get("trainer", {})]:
        if "args" in holder:
            holder["args"] = arguments(request, holder["args"])
    if request.kind == "pytorchjob-elastic":
        documents.insert(0, secret_of(request.name, documents[-1]["metadata"]["labels"]))
    return documents


def check(request: Request) -> None:
    """Refuse a recipe that the kind does not start, and a number of nodes that it does not have."""
    if request.kind == "mpijob" and request.recipe != "horovod":
        raise UserError(f"KIND=mpijob runs horovod, not {request.recipe}; KIND=indexed-job runs every recipe")
    if request.kind == "doctor" and request.recipe != "probe":
        raise UserError(f"KIND=doctor runs probe, not {request.recipe}")
    if request.kind == "pytorchjob-elastic" and request.recipe in ("single", "dataparallel", "probe"):
        raise UserError(
            f"KIND=pytorchjob-elastic goes on with fewer nodes, which {request.recipe} cannot; RECIPE=ddp"
        )
    if request.recipe in ("single", "dataparallel") and request.nodes != 1:
        raise UserError(f"{request.recipe} is one process; NODES=1, or RECIPE=ddp")
    if request.kind == "pytorchjob" and request.nodes < 2:
        raise UserError("KIND=pytorchjob has a Master and at least one Worker; NODES=2, or KIND=indexed-job")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", request.name):
        raise UserError(
            f"NAME wants at most 40 small letters, digits and '-', the first a letter, got {request.name!r}"
        )


def secret_of(name: str, labels: dict[str, str]) -> dict[str, Any]:
    """Return the Secret by which the nodes of an elastic job know one another."""
    metadata = {"name": name, "labels": dict(labels)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "stringData": {"RDZV_ID": secrets.token_hex(16)},
    }


def image_of(recipe: str) -> str:
    """Return the name of the image that holds a recipe: ddp's holds all that need neither Horovod nor apex."""
    return recipe if recipe in ("horovod", "apex") else "ddp"


def rename(tree: Any, old: str, new: str) -> None:
    """Give the job, all that belongs to it and all that points to it another name."""
    if isinstance(tree, list):
        for value in tree:
            rename(value, old, new)
    if not isinstance(tree, dict):
        return
    for key, value in tree.items():
        if key in (INSTANCE, "subdomain", "rdzvId") and value == old:
            tree[key] = new
        elif key in ("metadata", "runtimeRef", "secretKeyRef") and value.get("name") == old:
            value["name"] = new
        rename(value, old, new)
    if tree.get("name") == "MASTER_ADDR" and "value" in tree:
        tree["value"] = re.sub(rf"^{old}-(.*)\.{old}$", rf"{new}-\1.{new}", tree["value"])


def set_env(container: dict[str, Any], name: str, value: str) -> None:
    """Set a variable that the container has; leave one alone that it has not."""
    for variable in container.get("env", []):
        if variable["name"] == name:
            variable["value"] = value


def set_nodes(request: Request, job: dict[str, Any], containers: list[dict[str, Any]]) -> None:
    """Set the number of nodes wherever the kind has it."""
    nodes = request.nodes
    if request.kind in ("indexed-job", "doctor", "jobset"):
        spec = job["replicatedJobs"][0]["template"]["spec"] if request.kind == "jobset" else job
        spec.update(completions=nodes, parallelism=nodes)
        if request.kind == "indexed-job":
            spec["backoffLimit"] = 3 * nodes
        set_env(containers[0], "NNODES", str(nodes))
    elif request.kind == "trainjob":
        job["trainer"]["numNodes"] = nodes
    elif request.kind == "pytorchjob":
        job["pytorchReplicaSpecs"]["Worker"]["replicas"] = nodes - 1
        job["runPolicy"]["backoffLimit"] = 3 * nodes  # the operator adds up the restarts of all containers
    elif request.kind == "mpijob":
        job["mpiReplicaSpecs"]["Worker"]["replicas"] = nodes
    else:
        job["pytorchReplicaSpecs"]["Worker"]["replicas"] = nodes
        job["elasticPolicy"]["maxReplicas"] = max(nodes, job["elasticPolicy"]["maxReplicas"])


def set_gpus(gpus: int, job: dict[str, Any], containers: list[dict[str, Any]]) -> None:
    """Set the GPUs of a node, and as many processes; without GPUs one process."""
    nproc = max(gpus, 1)
    for container in containers:
        set_env(container, "NPROC_PER_NODE", str(nproc))
    if "nprocPerNode" in job:
        job["nprocPerNode"] = str(nproc)
    if "slotsPerWorker" in job:
        job["slotsPerWorker"] = nproc
    if "trainer" in job:
        job["trainer"]["numProcPerNode"] = nproc
    for limits in limits_of(job, containers):
        if GPU in limits and gpus:
            limits[GPU] = gpus
        elif GPU in limits:
            del limits[GPU]


def limits_of(job: dict[str, Any], containers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the limits of all containers, where the kind keeps them."""
    resources = [container.get("resources", {}) for container in containers]
    resources.append(job.get("trainer", {}).get("resourcesPerNode", {}))
    return [one["limits"] for one in resources if "limits" in one]


def make_small(documents: list[dict[str, Any]], job: dict[str, Any], containers: list[dict[str, Any]]) -> None:
    """Ask for what a laptop's cluster has: a core and 4 GiB a node."""
    for container in [*containers, {"resources": job.get("trainer", {}).get("resourcesPerNode", {})}]:
        if container.get("resources"):
            container["resources"]["requests"] = {"cpu": "1", "memory": "4Gi"}
            container["resources"]["limits"]["memory"] = "4Gi"
    for template in pod_templates(documents):
        for volume in template["spec"]["volumes"]:
            if "emptyDir" in volume:
                volume["emptyDir"]["sizeLimit"] = "1Gi"


def arguments(request: Request, words: Sequence[str]) -> list[str]:
    """Return a container's arguments: the manifest's with this recipe and name, then the user's options."""
    if request.kind == "doctor":
        return [*words, *request.options]
    starts_with_recipe = not words[0].startswith("-")
    kept = [word for word in words if word.startswith("-") and not word.startswith("--name=")]
    if request.gpus == 0:
        kept = [word for word in kept if not word.startswith("--device=")]
    if request.recipe == "probe":
        kept = [word for word in kept if word.startswith(("--timeout-s", "--device"))]
    else:
        kept.insert(0, f"--name={request.name}")
    return [*([request.recipe] if starts_with_recipe else []), *kept, *request.options]


STRING_TAG = "tag:yaml.org,2002:str"


class Dumper(yaml.SafeDumper):
    """YAML with scripts as blocks of text, as they stand in the files."""


Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def to_text(documents: list[dict[str, Any]]) -> str:
    """Return documents as YAML."""
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=110)


# ---- the cluster


class Cluster:
    """What kubectl says and does."""

    def __init__(self, namespace: str | None) -> None:
        self.command = [os.environ.get("KUBECTL", "kubectl")]
        if not shutil.which(self.command[0]):
            raise UserError(f"{self.command[0]} is not there; install kubectl, or set KUBECTL to where it is")
        if namespace:
            self.command.append(f"--namespace={namespace}")

    def run(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Return what one call of kubectl printed, and its status; raises UserError when no cluster answers."""
        try:
            done = subprocess.run(
                [*self.command, *words], input=stdin, capture_output=True, text=True, timeout=CALL_S
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"no answer from the cluster within {CALL_S} s to kubectl {words[0]}") from None
        unreachable = r"refused|Unable to connect|no such host|current-context|i/o timeout|provide credentials"
        if done.returncode and re.search(unreachable, done.stderr):
            raise UserError(f"kubectl reaches no cluster ({last_line(done.stderr)}); set KUBECONFIG")
        return done

    def get(self, *words: str) -> dict[str, Any]:
        """Return an object or a list; raises UserError for one that is not there."""
        done = self.run("get", *words, "--output=json")
        if done.returncode:
            raise UserError(f"kubectl get {' '.join(words)}: {last_line(done.stderr)}")
        content: dict[str, Any] = json.loads(done.stdout)
        return content


def last_line(text: str) -> str:
    """Return the last line that says something, without kubectl's own prefix."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("Error from server ").removeprefix("error: ") if lines else "no reason given"


def create(cluster: Cluster, request: Request, documents: list[dict[str, Any]]) -> None:
    """Create all documents or, after a failure, none; raises UserError with the mend."""
    text = to_text(documents)
    done = cluster.run("create", "--filename=-", stdin=text)
    if done.returncode == 0:
        return
    said = done.stderr
    if "AlreadyExists" in said or "already exists" in said:
        raise UserError(
            f"there is a job named {request.name}; make k8s-delete NAME={request.name}, or choose another NAME="
        )
    cluster.run("delete", "--ignore-not-found", "--wait=false", "--filename=-", stdin=text)
    if "no matches for kind" in said:
        raise UserError(
            f"the cluster does not know {documents[-1]['kind']}: {KINDS[request.kind].operator} is not installed "
            "(k8s/README.md says how); KIND=indexed-job needs none"
        )
    raise UserError(f"the cluster refuses the job: {explain(last_line(said))}")


REMEDIES = [
    (r"exceeded quota", "wait for other jobs, ask for fewer NODES or GPUS, or for a larger quota"),
    (r"Insufficient nvidia\.com/gpu", "wait for other jobs, or ask for fewer NODES or GPUS; GPUS=0 needs none"),
    (r"persistentvolumeclaim \"?[\w-]+\"? not found", ONCE),
    (r"configmap \"?[\w-]+\"? not found", ONCE),
    (r"secret \"?[\w-]+\"? not found", "k8s/pytorchjob-elastic.yaml begins with the command that makes it"),
    (r"unbound immediate PersistentVolumeClaims", "name a storageClassName that exists in k8s/cluster.yaml"),
    (r"violates PodSecurity", "k8s/README.md tells which operator needs what under the restricted standard"),
    (r"Insufficient (cpu|memory)", "lower the requests in the manifest; GPUS=0 asks for one core and 4 GiB"),
]


def explain(message: str) -> str:
    """Return a cluster's message with its mend, as one line."""
    message = " ".join(message.split())
    remedy = next((mend for pattern, mend in REMEDIES if re.search(pattern, message)), "")
    return f"{message}; {remedy}" if remedy else message


def pod_problem(pod: dict[str, Any]) -> tuple[str, bool] | None:
    """Return why a pod does not start, and whether waiting cannot help; None for one that is on its way."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = container.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
            image = container.get("image", "")
            return (
                f"{name} cannot get the image {image} ({reason}); make it (docker/), push it, name it by IMAGE=; "
                "a private registry wants an imagePullSecret",
                True,
            )
        if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
            return f"{name}: {explain(message or reason)}", True
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message", condition.get("reason", ""))
            return f"{name} finds no place: {explain(message)}", "not found" in message
    return None


def created_problem(cluster: Cluster, name: str, since: str) -> str | None:
    """Return why the cluster makes no pods for a job that it has since that time: a quota, or a policy."""
    for event in cluster.get("events", "--field-selector=reason=FailedCreate")["items"]:
        owner, said = event["involvedObject"].get("name", ""), event.get("message", "")
        is_ours = owner == name or owner.startswith(f"{name}-")
        # A job of the same name may have left events; the cluster's own clock tells them apart.
        is_new = (event.get("lastTimestamp") or event.get("eventTime") or since) >= since
        if is_ours and is_new and re.search(r"exceeded quota|violates PodSecurity|forbidden", said):
            return explain(said)
    return None


def job_state(job: dict[str, Any]) -> tuple[str, str]:
    """Return "done", "failed" or "" for a job that goes on, and what its condition says."""
    for condition in job.get("status", {}).get("conditions", []):
        if condition.get("status") == "True":
            if condition["type"] in ("Complete", "Completed", "Succeeded"):
                return "done", ""
            if condition["type"] == "Failed":
                return "failed", condition.get("message", "")
    return "", ""


class Watch:
    """One job in the cluster, from its first pod to its end."""

    def __init__(self, cluster: Cluster, request: Request, start_timeout_s: float) -> None:
        self.cluster, self.request, self.start_timeout_s = cluster, request, start_timeout_s
        self.kind, self.name = KINDS[request.kind], request.name
        self.said = ""
        self.created = ""
        """When the cluster took the job, by its own clock."""
        self.status = 0
        """Exit status of node 0's last container."""

    def say(self, text: str) -> None:
        """Print what is being waited for, once."""
        if text != self.said:
            print(text, flush=True)
            self.said = text

    def pods(self) -> list[dict[str, Any]]:
        """Return the job's pods, the oldest first."""
        found: list[dict[str, Any]] = self.cluster.get("pods", f"--selector={OURS},{INSTANCE}={self.name}")[
            "items"
        ]
        return sorted(found, key=lambda pod: pod["metadata"].get("creationTimestamp", ""))

    def head(self, pods: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the newest pod of node 0 that has a container which runs or has run."""
        wanted = self.kind.head.items()
        heads = [pod for pod in pods if wanted <= pod["metadata"].get("labels", {}).items()]
        started = [pod for pod in heads if {"running", "terminated"} & container_state(pod).keys()]
        return started[-1] if started else None

    def state(self) -> tuple[str, str]:
        """Return what the cluster says of the job."""
        job = self.cluster.get(self.kind.resource, self.name)
        self.created = job.get("metadata", {}).get("creationTimestamp", "")
        return job_state(job)

    def check_pods(self, pods: list[dict[str, Any]], is_late: bool) -> str:
        """Return what pods wait for; raise UserError for what waiting does not mend."""
        waiting = f"{len(pods)} of {self.request.nodes} pods are there"
        for pod in pods:
            problem = pod_problem(pod)
            if problem and (problem[1] or is_late):
                raise UserError(f"{problem[0]}; make k8s-delete NAME={self.name} removes the job")
            waiting = problem[0] if problem else waiting
        return waiting

    def wait_for_head(self, seen: str) -> dict[str, Any] | None:
        """Return node 0's pod once a container that was not seen yet runs, or None when the job has ended."""
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            is_late = time.monotonic() > deadline
            state = self.state()[0]  # before the pods, so that the log of a job that has just ended is shown
            pods = self.pods()
            head = self.head(pods)
            if head and instance(head) != seen:
                return head
            if state:
                return None
            waiting = self.check_pods(pods, is_late)
            problem = None
            if len(pods) < self.request.nodes:
                problem = created_problem(self.cluster, self.name, self.created)
            if problem or is_late:
                missing = "the job has not gone on" if seen else "node 0 has not started"
                reason = problem or f"{missing} within {self.start_timeout_s:g} s ({waiting})"
                raise UserError(f"{reason}; make k8s-delete NAME={self.name} removes the job")
            is_done = head and container_state(head).get("terminated", {}).get("exitCode") == 0
            if not is_done:  # the job will be known to be complete in a moment
                self.say(f"waiting, {self.start_timeout_s:g} s at most: {waiting}")
            time.sleep(POLL_S)

    def follow(self, head: dict[str, Any]) -> None:
        """Print the log of node 0's container until it ends; another pod that cannot start ends it, too."""
        pod, container = head["metadata"]["name"], head["spec"]["containers"][0]["name"]
        logs = subprocess.Popen([*self.cluster.command, "logs", "--follow", pod, f"--container={container}"])
        try:
            while logs.poll() is None:
                time.sleep(POLL_S)
                self.check_pods(self.pods(), is_late=False)
        finally:
            logs.terminate()
            logs.wait()

    def run(self) -> int:
        """Follow every container that node 0 has until the job has ended; return the exit status."""
        seen = ""
        while head := self.wait_for_head(seen):
            seen = instance(head)
            self.follow(head)
            self.wait_for_end_of(seen)
        state, reason = self.state()
        if state == "done":
            return 0
        print(f"error: the job {self.name} has failed: {explain(reason)}", file=sys.stderr, flush=True)
        return self.status or 1

    def wait_for_end_of(self, seen: str) -> None:
        """Wait until the cluster knows how node 0's container has ended; its log may end a moment earlier."""
        deadline = time.monotonic() + END_S
        while not self.state()[0]:
            head = self.head(self.pods())
            if head is None or instance(head) != seen or "running" not in container_state(head):
                break
            if time.monotonic() > deadline:
                raise UserError(
                    f"the log of node 0 has ended {END_S} s ago, and its container runs on; look with "
                    f"kubectl logs {head['metadata']['name']}"
                )
            time.sleep(POLL_S)
        head = self.head(self.pods())
        ended = container_state(head).get("terminated", {}) if head else {}
        self.status = ended.get("exitCode", self.status)


def container_state(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a pod's only container: running, waiting or terminated."""
    statuses = pod.get("status", {}).get("containerStatuses", [])
    state: dict[str, Any] = statuses[0].get("state", {}) if statuses else {}
    return state


def instance(pod: dict[str, Any]) -> str:
    """Tell one start of a pod's container from the next."""
    restarts = pod["status"]["containerStatuses"][0].get("restartCount", 0)
    return f"{pod['metadata'].get('uid', pod['metadata']['name'])} {restarts}"


def delete(cluster: Cluster, name: str) -> int:
    """Delete a job and what belongs to it, of whatever kind; its record stays on the volume."""
    deleted = ""
    for resource in DELETED:
        done = cluster.run("delete", resource, f"--selector={OURS},{INSTANCE}={name}", "--ignore-not-found")
        if resource == "secrets" and "forbidden" in done.stderr:  # only elastic jobs have one
            print("no permission to delete secrets: that of an elastic job would stay", file=sys.stderr)
        elif done.returncode and "doesn't have a resource type" not in done.stderr:
            raise UserError(f"kubectl delete {resource}: {last_line(done.stderr)}")
        deleted += "".join(line + "\n" for line in done.stdout.splitlines() if "deleted" in line)
    if not deleted:
        raise UserError(f"there is no job named {name} in this namespace")
    print(deleted, end="", flush=True)
    return 0


# ---- the command


def whole_number(name: str, text: str, at_least: int) -> int:
    """Return the number in a variable's text; raises UserError for anything else."""
    if not (text.isascii() and text.isdigit()) or not at_least <= int(text) <= 1024:
        raise UserError(f"{name} wants a whole number from {at_least} to 1024, got {text!r}")
    return int(text)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the command's own arguments and, after --, the recipe's options; empty values count as not given."""
    own, options = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, options = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(prog="python -m scripts.k8s", allow_abbrev=False)
    parser.add_argument("recipe", nargs="?", default="")
    parser.add_argument("--kind", default="", help=f"one of {', '.join(KINDS)} (default: indexed-job)")
    parser.add_argument("--nodes", default="2", help="number of nodes (default: %(default)s)")
    parser.add_argument("--gpus", default="", help="GPUs and processes of a node; 0: one process on the CPU")
    parser.add_argument("--image", default="", help="the image (default: cluster-recipes/RECIPE:latest)")
    parser.add_argument("--fabric", default="", help="auto, ib, roce, efa or tcp (default: the ConfigMap's)")
    parser.add_argument("--name", default="", help="the job's and the run's name (default: the recipe's)")
    parser.add_argument("--namespace", default="", help="(default: that of the kubectl context)")
    parser.add_argument("--start-timeout-s", default="900", help="longest wait for node 0 (default: %(default)s)")
    parser.add_argument("--render", action="store_true", help="print the manifest and end")
    parser.add_argument("--delete", default="", metavar="NAME", help="delete a job")
    return parser.parse_args(own), options


def make_request(args: argparse.Namespace, options: Sequence[str]) -> Request:
    """Return the request of a command line; raises UserError for values that make no sense."""
    check_recipe(args.recipe)
    kind = args.kind or ("doctor" if args.recipe == "probe" else "indexed-job")
    if kind not in KINDS:
        raise UserError(f"KIND wants one of {', '.join(KINDS)}, got {kind!r}{nearest(kind, list(KINDS))}")
    fabrics = ("auto", "ib", "roce", "efa", "tcp")
    if args.fabric and args.fabric not in fabrics:
        raise UserError(f"FABRIC wants one of {', '.join(fabrics)}, got {args.fabric!r}")
    return Request(
        kind,
        args.recipe,
        name=args.name or args.recipe,
        nodes=whole_number("NODES", args.nodes, at_least=1),
        gpus=whole_number("GPUS", args.gpus, at_least=0) if args.gpus else None,
        image=args.image or None,
        fabric=args.fabric or None,
        options=options,
    )


def main(argv: Sequence[str]) -> int:
    """Render, apply and follow, or delete; return the exit status."""
    args, options = parse(argv)
    if args.delete:
        return delete(Cluster(args.namespace), args.delete)
    request = make_request(args, options)
    start_timeout_s = whole_number("--start-timeout-s", args.start_timeout_s, at_least=1)
    documents = render(request)
    if args.render:
        print(to_text(documents), end="")
        return 0
    cluster = Cluster(args.namespace)
    create(cluster, request, documents)
    print(f"job {request.name}: {request.recipe} on {request.nodes} nodes as {documents[-1]['kind']}", flush=True)
    try:
        return Watch(cluster, request, start_timeout_s).run()
    except KeyboardInterrupt:
        print(f"\nthe job goes on; make k8s-delete NAME={request.name} ends it", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(USAGE_STATUS)
