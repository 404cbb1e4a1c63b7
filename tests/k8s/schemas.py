"""Check manifests without a cluster: fields, types, quantities, and the restricted Pod Security Standard.

`faults` returns what an API server would refuse, and what it would silently drop, such as misspelt fields of
custom resources. Core kinds are checked with kubernetes-validate, others with the operators' own CRDs (CRD_DIR).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from k8s.manifest import parse, pod_templates
from tests.conftest import require

KUBERNETES = "1.32"
CRDS = {
    ("kubeflow.org/v1", "PyTorchJob"): "pytorchjobs.yaml",
    ("kubeflow.org/v2beta1", "MPIJob"): "mpijobs.yaml",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "trainjobs.yaml",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "trainingruntimes.yaml",
}
JOBSET = ("jobset.x-k8s.io/v1alpha2", "JobSet")
"""CRDS lacks its CRD, but a TrainingRuntime contains a whole JobSet: the schema comes from there."""

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"}
VOLUMES |= {"secret"}
SUFFIXES = {"": 0, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def needs_validator() -> None:
    """Skip the test if kubernetes-validate is not installed."""
    found = importlib.util.find_spec("kubernetes_validate")
    require("kubernetes-validate", found, "it is not installed", "run `scripts/dev/setup.sh dev`")


def needs_crds() -> None:
    """Skip the test if the operators' CRDs are not there."""
    needs_validator()  # jsonschema is installed with it
    folder = Path(os.environ.get("CRD_DIR") or "no-such-folder")
    found = all((folder / name).exists() for name in CRDS.values())
    require(
        "crds",
        found,
        f"CRD_DIR ({os.environ.get('CRD_DIR', 'not set')}) has not all of {', '.join(CRDS.values())}",
        "set it to a folder with the CRD files of kubeflow/training-operator 1.9 and kubeflow/trainer 2.3 "
        "(manifests/base/crds) and kubeflow/mpi-operator 0.8, named after their plurals",
    )


def strict(schema: Any) -> Any:
    """Return a CRD's schema in which every object with known fields refuses unknown ones."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = strict(schema[key])
    return result


@cache
def custom_schema(api_version: str, kind: str) -> dict[str, Any]:
    """Return the strict schema of a custom resource."""
    if (api_version, kind) == JOBSET:
        runtime = custom_schema("trainer.kubeflow.org/v1alpha1", "TrainingRuntime")
        spec = runtime["properties"]["spec"]["properties"]["template"]["properties"]["spec"]
        known = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
        return {"type": "object", "properties": {**known, "spec": spec}, "additionalProperties": False}
    text = (Path(os.environ["CRD_DIR"]) / CRDS[api_version, kind]).read_text()
    (schema,) = (
        version["schema"]["openAPIV3Schema"]
        for version in parse(text)[0]["spec"]["versions"]
        if version["name"] == api_version.split("/")[1]
    )
    found: dict[str, Any] = strict(schema)
    return found


def field_faults(document: dict[str, Any]) -> Iterator[str]:
    """Yield the violations of the schema of a document's kind."""
    import jsonschema

    api_version, kind = document["apiVersion"], document["kind"]
    if (api_version, kind) in CRDS or (api_version, kind) == JOBSET:
        validator = jsonschema.Draft7Validator(custom_schema(api_version, kind))
        for error in validator.iter_errors(document):
            yield f"{kind}.{'.'.join(map(str, error.path))}: {error.message[:200]}"
    else:
        yield from core_faults(document)
    for template in pod_templates(document):  # the operators' copies of a pod's schema may be older or laxer
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
        yield from core_faults(pod)


def core_faults(document: dict[str, Any]) -> Iterator[str]:
    """Yield the violations of Kubernetes' own schema by a document of a core kind."""
    import kubernetes_validate

    utils = kubernetes_validate.utils
    if not hasattr(utils.schema_contents, "cache_info"):  # without a cache, it reads two JSON files per document
        utils.schema_contents = cache(utils.schema_contents)
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{document['kind']}.{'.'.join(map(str, error.path))}: {error.message[:200]}"


def quantity(value: Any) -> Decimal:
    """Return a Kubernetes quantity as a number; raises ValueError if it is not valid (8GiB, 8 Gi)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([KMGTPE])i|([mkMGTPE]?))", str(value))
    if not found or isinstance(value, bool):
        raise ValueError(f"{value!r} is no quantity")
    if found[2]:
        return Decimal(found[1]) * 1024 ** (SUFFIXES[found[2]] // 3 if found[2] != "K" else 1)
    return Decimal(found[1]).scaleb(SUFFIXES[found[3]])


def resource_faults(tree: Any, at: str = "") -> Iterator[str]:
    """Yield invalid quantities, and requests above their limit, anywhere in a document."""
    if isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from resource_faults(value, f"{at}[{i}]")
    if not isinstance(tree, dict):
        return
    for key, value in tree.items():
        amounts = value if key in ("requests", "limits") else {key: value} if key == "sizeLimit" else {}
        for name, amount in amounts.items():
            try:
                quantity(amount)
            except ValueError as error:
                yield f"{at}.{key}.{name}: {error}"
                return
        yield from resource_faults(value, f"{at}.{key}")
    for name, limit in tree.get("limits", {}).items():
        if quantity(tree.get("requests", {}).get(name, 0)) > quantity(limit):
            yield f"{at}: the request of {name} is above its limit"


def security_faults(spec: dict[str, Any]) -> Iterator[str]:
    """Yield a pod's violations of the restricted Pod Security Standard (1.32), and a token that nobody needs."""
    pod = spec.get("securityContext", {})
    if spec.get("automountServiceAccountToken") is not False:
        yield "a service account's token is mounted"
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"{field} is set"
    for volume in spec.get("volumes", []):
        if not set(volume) - {"name"} <= VOLUMES:
            yield f"volume {volume['name']} is of no allowed type"
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        for fault in container_faults(pod, container):
            yield f"{container['name']} {fault}"


def container_faults(pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    """Yield a container's violations of the standard, given its pod's security context."""
    own = container.get("securityContext", {})
    merged = {**pod, **own}
    if merged.get("runAsNonRoot") is not True or merged.get("runAsUser") == 0:
        yield "may run as root"
    if merged.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "has no seccomp profile"
    if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
        yield "may gain privileges"
    capabilities = own.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "keeps capabilities"
    if own.get("readOnlyRootFilesystem") is not True:
        yield "can write its root file system"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield "takes a port of the machine"


def pod_faults(spec: dict[str, Any]) -> Iterator[str]:
    """Yield what a training pod lacks: shared memory, a folder for temporary files, time for a checkpoint."""
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    for container in spec["containers"]:
        mounts = {mount["mountPath"]: volumes.get(mount["name"]) for mount in container.get("volumeMounts", [])}
        if None in mounts.values():
            yield f"{container['name']} mounts a volume that is not there"
        if (mounts.get("/dev/shm") or {}).get("emptyDir", {}).get("medium") != "Memory":
            yield f"{container['name']} has 64 MB of /dev/shm"
        if "emptyDir" not in (mounts.get("/tmp") or {}):
            yield f"{container['name']} has no /tmp to write to"
    if int(spec.get("terminationGracePeriodSeconds", 30)) < 60:
        yield "TERM leaves no time for a checkpoint"
    if spec.get("enableServiceLinks") is not False:
        yield "a Service of the namespace could set MASTER_PORT"


def faults(documents: list[dict[str, Any]]) -> list[str]:
    """Return everything that is wrong with a manifest."""
    found = []
    for document in documents:
        found += [*field_faults(document), *resource_faults(document, document["kind"])]
        for template in pod_templates(document):
            found += [*security_faults(template["spec"]), *pod_faults(template["spec"])]
    return found
