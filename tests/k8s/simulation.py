"""Do to a manifest what the operators and the kubelet do, as far as a container's process can tell.

`pods` returns a job's pods with the environment that each would have: the manifest's variables, those that the
controller injects (a function for each kind, following the controllers' sources), and $(NAME) expanded. `run`
starts a pod's command on this machine with exactly that environment; only addresses, ports and folders are local.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k8s.manifest import load, pod_templates
from tests.k8s.schemas import quantity
from tests.support import ROOT, Command

Document = dict[str, Any]

CONFIG = {
    (document["metadata"]["name"], key): value
    for document in load("cluster.yaml")
    if document["kind"] == "ConfigMap"
    for key, value in document["data"].items()
}
"""Values of the ConfigMaps in k8s/cluster.yaml, by name and key."""

FRUGAL = ("PYTHONPATH", "GOMP_SPINCOUNT", "OMPI_MCA_mpi_yield_when_idle")
"""Variables of tests/conftest.py that make processes use less of the cores."""

JOB_UID = "8f6c1e0a-5f0e-4d5e-9c55-0c5ad1b6c1d5"


@dataclass
class Pod:
    """A pod as the kubelet gets it, reduced to its only container's process."""

    hostname: str
    addresses: list[str]
    """Names by which other pods reach it."""
    spec: Document
    labels: dict[str, str]
    injected: dict[str, str]
    env: dict[str, str] = field(init=False)
    words: list[str] = field(init=False)

    def __post_init__(self) -> None:
        container = self.spec["containers"][0]
        names = [variable["name"] for variable in container.get("env", [])]
        assert len(names) == len(set(names)), f"{names}: a variable twice"
        self.env = {}
        for source in container.get("envFrom", []):
            name = source["configMapRef"]["name"]
            self.env |= {key: value for (owner, key), value in CONFIG.items() if owner == name}
        for variable in container.get("env", []):  # $(NAME) sees earlier variables, but no injected ones
            self.env[variable["name"]] = expand(self._value(variable), self.env)
        self.env.update(self.injected)
        words = [*container.get("command", []), *container.get("args", [])]
        self.words = [expand(word, self.env) for word in words]

    def _value(self, variable: Document) -> str:
        if "value" in variable:
            assert isinstance(variable["value"], str), f"{variable}: the value of a variable is a string"
            return variable["value"]
        source = variable["valueFrom"]
        if "configMapKeyRef" in source:
            return str(CONFIG[source["configMapKeyRef"]["name"], source["configMapKeyRef"]["key"]])
        if "resourceFieldRef" in source:  # whole cores, rounded up, because the divisor is 1
            assert source["resourceFieldRef"] == {"resource": "requests.cpu"}
            return str(math.ceil(quantity(self.spec["containers"][0]["resources"]["requests"]["cpu"])))
        path = source["fieldRef"]["fieldPath"]
        if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
            return self.labels[label[1]]
        return {"status.podIP": "10.0.0.7", "spec.nodeName": "machine-a"}[path]


def expand(text: str, known: dict[str, str]) -> str:
    """Replace $(NAME) with a known variable's value and $$ with $, as Kubernetes does; keep the rest."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))", lambda found: "$" if found[1] == "$" else known.get(found[2], found[0]), text
    )


def recipe_for(kind: str) -> str:
    """Return a recipe that a kind of job runs."""
    return {"mpijob": "horovod", "doctor": "probe"}.get(kind, "ddp")


def named(documents: list[Document], kind: str) -> Document:
    """Return the document of a kind."""
    return next(document for document in documents if document["kind"] == kind)


def indexed_job(name: str, spec: Document, subdomain: str, prefix: str) -> Iterator[Pod]:
    """Yield the pods of an Indexed Job; the Job controller injects the index last."""
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"], "all nodes have to run at once"
    for index in range(spec["completions"]):
        labels = {
            **spec["template"]["metadata"]["labels"],
            "batch.kubernetes.io/job-completion-index": str(index),
            "batch.kubernetes.io/job-name": name,
            "batch.kubernetes.io/controller-uid": JOB_UID,
        }
        hostname = f"{prefix}-{index}"
        addresses = [f"{hostname}.{subdomain}"] if subdomain else []
        yield Pod(hostname, addresses, spec["template"]["spec"], labels, {"JOB_COMPLETION_INDEX": str(index)})


def pods_of_job(documents: list[Document]) -> Iterator[Pod]:
    """Yield an Indexed Job's pods; they have DNS names only below a headless Service that selects them."""
    job = named(documents, "Job")
    spec, name = job["spec"], job["metadata"]["name"]
    service = named(documents, "Service")
    is_found = (
        service["spec"]["clusterIP"] == "None"
        and service["metadata"]["name"] == spec["template"]["spec"].get("subdomain")
        and service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    )
    yield from indexed_job(name, spec, service["metadata"]["name"] if is_found else "", name)


def pods_of_jobset(documents: list[Document]) -> Iterator[Pod]:
    """Yield a JobSet's pods: JOBSET-GROUP-0-INDEX.SUBDOMAIN."""
    jobset = named(documents, "JobSet")
    (group,) = jobset["spec"]["replicatedJobs"]
    assert group["replicas"] == 1
    network = jobset["spec"]["network"]
    assert network["enableDNSHostnames"]
    name = f"{jobset['metadata']['name']}-{group['name']}-0"
    yield from indexed_job(name, group["template"]["spec"], network["subdomain"], name)


def pods_of_pytorchjob(documents: list[Document]) -> Iterator[Pod]:
    """Yield the pods of a PyTorchJob (training operator 1.9), elastic or not."""
    job = named(documents, "PyTorchJob")
    name, spec = job["metadata"]["name"], job["spec"]
    groups = spec["pytorchReplicaSpecs"]
    total = sum(group["replicas"] for group in groups.values())
    elastic = spec.get("elasticPolicy")
    for role in ("Master", "Worker"):
        for index in range(groups.get(role, {"replicas": 0})["replicas"]):
            template = groups[role]["template"]
            (container,) = (one for one in template["spec"]["containers"] if one["name"] == "pytorch")
            ports = {one["name"]: one["containerPort"] for one in container.get("ports", [])}
            port = str(ports.get("pytorchjob-port", 23456))
            nproc = {"PET_NPROC_PER_NODE": spec["nprocPerNode"]} if "nprocPerNode" in spec else {}
            injected = {"PYTHONUNBUFFERED": "1", **nproc}
            rank = index + (role == "Worker" and "Master" in groups)
            if "Master" in groups:
                addr = f"{name}-master-0"
                injected |= {"MASTER_ADDR": addr, "MASTER_PORT": port, "RANK": str(rank)}
                injected |= {"PET_MASTER_ADDR": addr, "PET_MASTER_PORT": port}
                injected |= {"PET_NNODES": str(total), "PET_NODE_RANK": str(rank)}
                injected["WORLD_SIZE"] = str(total * int(spec.get("nprocPerNode", "1")))
            elif not elastic:
                injected["PET_NNODES"] = str(total)  # but no rank: torchrun's default makes every pod node 0
            if elastic:
                injected |= {
                    "PET_RDZV_ENDPOINT": f"{name}-worker-0:{port}",
                    "PET_RDZV_BACKEND": elastic["rdzvBackend"],
                    "PET_RDZV_ID": elastic["rdzvId"],
                    "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
                    "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
                }
            labels = {
                **template["metadata"]["labels"],
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/replica-type": role.lower(),
                "training.kubeflow.org/replica-index": str(index),
            }
            hostname = f"{name}-{role.lower()}-{index}"
            yield Pod(hostname, [hostname], template["spec"], labels, injected)


def pods_of_trainjob(documents: list[Document]) -> Iterator[Pod]:
    """Yield a TrainJob's pods (trainer 2.3): the runtime's template with the job's arguments and resources."""
    job, runtime = named(documents, "TrainJob"), named(documents, "TrainingRuntime")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    (group,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert group["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    template = group["template"]["spec"]["template"]
    (container,) = (one for one in template["spec"]["containers"] if one["name"] == "node")
    assert not [one for one in container["env"] if one["name"].startswith("PET_")], "the trainer refuses them"
    changes = {key: trainer[key] for key in ("command", "args") if key in trainer}
    merged = {**container, **changes, "resources": trainer["resourcesPerNode"]}
    spec = {**template["spec"], "containers": [merged]}
    for index in range(trainer["numNodes"]):
        injected = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29400",
            "JOB_COMPLETION_INDEX": str(index),
        }
        labels = {
            **template["metadata"]["labels"],
            "batch.kubernetes.io/job-completion-index": str(index),
            "batch.kubernetes.io/controller-uid": JOB_UID,
        }
        yield Pod(f"{name}-node-0-{index}", [f"{name}-node-0-{index}.{name}"], spec, labels, injected)


def pods_of_mpijob(documents: list[Document]) -> Iterator[Pod]:
    """Yield the pods of an MPIJob (MPI operator 0.8), the launcher first; the test has to write its hostfile."""
    job = named(documents, "MPIJob")
    name, spec = job["metadata"]["name"], job["spec"]
    groups = spec["mpiReplicaSpecs"]
    launcher = {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }
    for role, injected in (("Launcher", launcher), ("Worker", {"K_MPI_JOB_ROLE": "worker"})):
        for index in range(groups[role]["replicas"]):
            template = groups[role]["template"]
            hostname = f"{name}-{role.lower()}" + (f"-{index}" if role == "Worker" else "")
            labels = {**template["metadata"]["labels"], "training.kubeflow.org/job-role": role.lower()}
            yield Pod(hostname, [hostname], template["spec"], labels, injected)


CONTROLLERS: dict[str, Callable[[list[Document]], Iterator[Pod]]] = {
    "indexed-job": pods_of_job,
    "doctor": pods_of_job,
    "jobset": pods_of_jobset,
    "pytorchjob": pods_of_pytorchjob,
    "pytorchjob-elastic": pods_of_pytorchjob,
    "trainjob": pods_of_trainjob,
    "mpijob": pods_of_mpijob,
}


def pods(kind: str, documents: list[Document]) -> list[Pod]:
    """Return the pods that the cluster would create from a manifest."""
    for template in pod_templates(documents):
        assert len(template["spec"]["containers"]) == 1
    return list(CONTROLLERS[kind](documents))


def run(pod: Pod, replaced: dict[str, str], **env: str) -> Command:
    """Start a pod's command here: its own words and variables, with addresses, ports and folders replaced."""

    def local(text: str) -> str:
        for old, new in replaced.items():
            text = text.replace(old, new)
        return text

    own = {name: local(value) for name, value in pod.env.items()}
    image = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "PYTHON": sys.executable}
    frugal = {name: os.environ[name] for name in FRUGAL}
    words = [f"{name}={value}" for name, value in {**image, **frugal, **own, **env}.items()]
    words += [local(word) for word in pod.words]
    # Nothing else of this process's environment, except the mark by which a test finds its processes.
    script = 'exec env -i TEST_COMMAND="$TEST_COMMAND" "$@"'
    return Command("bash", "-c", script, "bash", *words, cwd=ROOT)
