"""Manifests, rendered jobs and kustomize builds: valid to the last field, safe, and made of known words."""

import contextlib
import copy
import json
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import yaml

from k8s import manifest
from k8s.apply import check_options
from k8s.manifest import GPU, KINDS, Request, load, parse, pod_templates, render, set_nodes, to_text
from recipes.common.errors import UserError
from scripts.launch.recipe_options import read_option
from tests.conftest import require
from tests.k8s import schemas, simulation
from tests.k8s.simulation import recipe_for
from tests.support import ROOT

FILES = sorted(path.name for path in ROOT.glob("k8s/*.yaml") if path.name != "kustomization.yaml")
COMPONENTS = sorted(path.name for path in ROOT.glob("k8s/components/*"))
VOCABULARY = {"NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"}  # scripts/launch.sh
VOCABULARY |= {"FABRIC", "RDZV_TIMEOUT_S", "RDZV_ID", "STOPPED_STATUS", "MIN_NODES", "MAX_RESTARTS"}  # optional
VOCABULARY |= {"NODE_NAME", "SSH_OPTIONS", "CPU_REQUEST"}  # used only in manifests
CUSTOM = [name for name in FILES if name not in ("cluster.yaml", "indexed-job.yaml", "doctor.yaml")]


def check_faults(name, documents):
    (schemas.needs_crds if name in CUSTOM else schemas.needs_validator)()
    return schemas.faults(documents)


def rendered(kind="indexed-job", recipe="", name="mine", nodes=2, **own):
    """Return the documents that make k8s would apply, by default for the recipe that the kind's file runs."""
    return render(Request(kind, recipe or recipe_for(kind), name, nodes, **own))


def test_every_file_is_known():
    assert set(FILES) == {f"{kind}.yaml" for kind in KINDS} | {"cluster.yaml"}


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_valid_and_restricted(name):
    assert check_faults(name, load(name)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nodes", "gpus"), [(4, 8), (2, 0)])
def test_a_rendered_job_is_valid_and_restricted(kind, nodes, gpus):
    documents = rendered(kind, name="my-job", nodes=nodes, gpus=gpus, image="a/b:1", fabric="ib")
    assert check_faults(f"{kind}.yaml", documents) == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_image_is_pulled_from_a_name_that_somebody_else_may_own(kind):
    for template in pod_templates(load(f"{kind}.yaml")):
        assert one(template["spec"])["image"].startswith("registry.invalid/")
    for image, policy in ((None, "Never"), ("a/b:1", "IfNotPresent")):
        documents = rendered(kind, image=image)
        assert {one(template["spec"])["imagePullPolicy"] for template in pod_templates(documents)} == {policy}


@pytest.mark.parametrize(
    ("kind", "recipe", "expected"),
    [("indexed-job", "fsdp", "mine:1"), ("indexed-job", "apex", None), ("mpijob", "horovod", "mine:1")],
)
def test_an_image_in_an_edited_file_is_used(monkeypatch, kind, recipe, expected):
    """Unless it is not the recipe's image."""
    text = (ROOT / "k8s" / f"{kind}.yaml").read_text()
    edited(monkeypatch, parse(re.sub(r"registry\.invalid/\S+", "mine:1", text)))
    for image in (None, "a/b:1"):
        for template in pod_templates(rendered(kind, recipe, image=image)):
            found = (one(template["spec"])["image"], one(template["spec"])["imagePullPolicy"])
            own = (expected, "IfNotPresent") if expected else ("cluster-recipes/apex:latest", "Never")
            assert found == ((image, "IfNotPresent") if image else own)


def edited(monkeypatch, documents):
    """Let documents stand in the file of a kind, and return them: a test may go on to change them."""
    monkeypatch.setattr(manifest, "load", lambda file: copy.deepcopy(documents))
    return documents


def edit_args(monkeypatch, old, new):
    """Replace arguments in the Indexed Job's file."""
    text = (ROOT / "k8s/indexed-job.yaml").read_text()
    assert text.count(old) == 1
    monkeypatch.setattr(Path, "read_text", lambda path, **_: text.replace(old, new))


def test_arguments_of_an_edited_file_are_kept(monkeypatch):
    """Values in separate words are kept too; only options that the command line replaces are dropped."""
    new = "\n            ".join(("- --epochs", '- "90"', "- --name", "- old"))
    edit_args(monkeypatch, "- --name=ddp", new)
    kept = ["--epochs", "90", "--resume=auto", "--runs-dir=/runs", "--data-dir=/data", "--device=cuda"]
    for recipe, gpus, words in (
        ("ddp", None, ["ddp", "--name=mine", *kept]),
        ("fsdp", 0, ["fsdp", "--name=mine", *kept[:-1], "--device=cpu"]),
        ("probe", None, ["probe", "--device=cuda"]),
    ):
        documents = rendered(recipe=recipe, gpus=gpus)
        assert one(documents[-1]["spec"]["template"]["spec"])["args"] == words


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--data=text"], []),
        (["--data", "text", "--data-dir=/data/books"], ["--data-dir=/data/books"]),
        (["--data", "imagefolder"], ["--data-dir=/data"]),
    ],
)
def test_text_comes_from_the_standard_library_unless_a_folder_is_given(options, expected):
    """As under the other launchers; /data may be empty."""
    documents = rendered(options=options)
    words = one(documents[-1]["spec"]["template"]["spec"])["args"]
    assert [word for word in words if word.startswith("--data-dir")] == expected


def test_a_folder_of_text_in_an_edited_file_is_kept(monkeypatch):
    edit_args(monkeypatch, "- --data-dir=/data", "- --data-dir=/data/books")
    documents = rendered(options=["--data=text"])
    assert "--data-dir=/data/books" in one(documents[-1]["spec"]["template"]["spec"])["args"]


@pytest.mark.parametrize(("word", "is_refused"), [("--seed=$(SEED)", False), ("--seed=$$(SEED)", True)])
def test_what_kubernetes_expands_is_not_checked_before(monkeypatch, word, is_refused):
    edit_args(monkeypatch, "- --name=ddp", f"- {word}")
    request = Request("indexed-job", "ddp", "mine", nodes=2, options=["--epochs=3"])
    with pytest.raises(UserError, match="--seed") if is_refused else contextlib.nullcontext():
        check_options(request, render(request))


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ("- --dropout\n            - 1.10", "k8s/indexed-job.yaml: 1.1 in args is not text; put it in quotes"),
        ("- [", "k8s/indexed-job.yaml is not YAML: "),
        ("\t- --epochs=3", "k8s/indexed-job.yaml is not YAML: "),
    ],
)
def test_a_file_that_was_edited_wrongly_is_one_line(monkeypatch, new, expected):
    edit_args(monkeypatch, "- --name=ddp", new)
    with pytest.raises(UserError, match=f"^{re.escape(expected)}") as raised:
        rendered()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "doctor"])
def test_options_reach_a_process_as_they_were_typed(kind):
    """Kubernetes would replace $(NNODES), and turn $$ into $."""
    options = ["--a=$(NNODES)", "$$", "a$", "$(", 'it\'s "b c"', "", "1.10", "x\ny"]
    documents = parse(to_text(rendered(kind, options=options)))
    pods = [pod for pod in simulation.pods(kind, documents) if "args" in one(pod.spec)]
    assert pods
    for pod in pods:
        assert pod.words[-len(options) :] == options


@pytest.mark.parametrize("name", FILES)
def test_the_file_says_how_it_is_used(name):
    text = (ROOT / "k8s" / name).read_text()
    header = re.match(r"(?:#.*\n)+", text)[0]
    for command in (f"kubectl apply -f k8s/{name}", f"kubectl delete -f k8s/{name}"):
        assert command in header
    assert "EDIT" in text
    for document in load(name):
        assert document["metadata"]["labels"]["app.kubernetes.io/name"] == "cluster-recipes"


@pytest.mark.parametrize(
    ("words", "break_it"),
    [
        ("terminationGracePeriod", lambda spec: spec.update(terminationGracePeriod=120)),
        ("'80'.*'integer'", lambda spec: spec.update(terminationGracePeriodSeconds="80")),
        ("64 MB of /dev/shm", lambda spec: spec["volumes"].pop(0)),
        ("64 MB of /dev/shm", lambda spec: spec["volumes"][0]["emptyDir"].pop("medium")),
        ("no quantity", lambda spec: spec["volumes"][0]["emptyDir"].update(sizeLimit="8GiB")),
        ("readOnlyRootFileSystem", lambda spec: one(spec)["securityContext"].update(readOnlyRootFileSystem=True)),
        ("may run as root", lambda spec: spec["securityContext"].pop("runAsNonRoot")),
        ("may gain privileges", lambda spec: one(spec)["securityContext"].pop("allowPrivilegeEscalation")),
        (
            "keeps capabilities",
            lambda spec: one(spec)["securityContext"].update(capabilities={"add": ["IPC_LOCK"]}),
        ),
        ("no seccomp profile", lambda spec: spec["securityContext"].pop("seccompProfile")),
        ("token", lambda spec: spec.pop("automountServiceAccountToken")),
        ("no allowed type", lambda spec: spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}})),
        ("not there", lambda spec: one(spec)["volumeMounts"][0].update(name="smh")),
        ("no time for a checkpoint", lambda spec: spec.pop("terminationGracePeriodSeconds")),
        ("set MASTER_PORT", lambda spec: spec.pop("enableServiceLinks")),
    ],
)
@pytest.mark.parametrize("name", ["indexed-job.yaml", "trainjob.yaml"])
def test_a_fault_in_a_pod_is_found(name, words, break_it):
    documents = load(name)
    for template in pod_templates(documents):
        break_it(template["spec"])
    assert re.search(words, "\n".join(check_faults(name, documents)))


def one(spec):
    return spec["containers"][0]


@pytest.mark.parametrize(
    ("name", "words", "path", "value"),
    [
        ("pytorchjob.yaml", "nProcPerNode", ["spec", "nProcPerNode"], "1"),
        ("pytorchjob.yaml", "backOffLimit", ["spec", "runPolicy", "backOffLimit"], 3),
        ("pytorchjob-elastic.yaml", "maxRestart'", ["spec", "elasticPolicy", "maxRestart"], 3),
        ("mpijob.yaml", "'one'", ["spec", "slotsPerWorker"], "one"),
        ("mpijob.yaml", "slotPerWorker", ["spec", "slotPerWorker"], 1),
        ("trainjob.yaml", "numNode'", ["spec", "trainer", "numNode"], 2),
        ("jobset.yaml", "maxRestart'", ["spec", "failurePolicy", "maxRestart"], 3),
        ("jobset.yaml", "replicas", ["spec", "replicatedJobs", 0, "replicas"], "two"),
        ("indexed-job.yaml", "completion'", ["spec", "completion"], 2),
        ("doctor.yaml", "activeDeadlineSecond'", ["spec", "activeDeadlineSecond"], 2),
        ("cluster.yaml", "accessMode'", ["spec", "accessMode"], ["ReadWriteMany"]),
    ],
)
def test_a_misspelt_field_is_found(name, words, path, value):
    documents = load(name)
    place = documents[-1]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert words in "\n".join(check_faults(name, documents))


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), ("500m", "0.5"), ("1.5", "1.5"), ("2k", 2000), ("2Ki", 2048), ("8Gi", 8 * 1024**3), (4, 4)],
)
def test_quantities(text, number):
    assert schemas.quantity(text) == schemas.Decimal(number)


@pytest.mark.parametrize("text", ["8GiB", "8 Gi", "GB", "-1", "", "8gi", True, "1e3x"])
def test_what_is_no_quantity(text):
    with pytest.raises(ValueError, match="is no quantity"):
        schemas.quantity(text)


def test_requests_do_not_exceed_limits():
    resources = {"requests": {"memory": "9Gi"}, "limits": {"memory": "8Gi"}}
    [fault] = schemas.resource_faults({"resources": resources})
    assert fault == ".resources: the request of memory is above its limit"


@pytest.mark.parametrize("kind", KINDS)
def test_every_variable_is_of_the_vocabulary(kind):
    """Manifests set only known variables, and their commands read only set, injected or the image's variables."""
    for pod in simulation.pods(kind, load(f"{kind}.yaml")):
        container = pod.spec["containers"][0]
        own = {variable["name"] for variable in container.get("env", [])}
        assert own <= VOCABULARY
        script = " ".join(container["command"])
        read = set(re.findall(r"\$\{?([A-Z][A-Za-z_]+)", script))
        assert read <= set(pod.env) | {"PYTHON", "PATH", "BASHPID"}, pod.hostname
        exported = set(re.findall(r"\b([A-Z][A-Z_]+)=", script))
        assert exported <= VOCABULARY
        assert "$$" not in script, "Kubernetes makes one $ of two"


def test_pods_differ_in_nothing_but_their_part():
    """The security settings and the volumes of a pod are the same in every file."""
    specs = [template["spec"] for name in FILES for template in pod_templates(load(name))]
    assert len(specs) == 8
    for key in ("securityContext", "tolerations", "terminationGracePeriodSeconds"):
        assert all(spec[key] == specs[0][key] for spec in specs)
    assert specs[0]["terminationGracePeriodSeconds"] == 120
    containers = [one(spec) for spec in specs]
    assert all(container["securityContext"] == containers[0]["securityContext"] for container in containers)
    folders = {container["workingDir"] for container in containers if "args" in container}
    assert folders == {"/opt/cluster-recipes"}
    volumes = [volume for spec in specs for volume in spec["volumes"][2:]]
    claims = {document["metadata"]["name"] for document in load("cluster.yaml")[1:]}
    assert {volume["persistentVolumeClaim"]["claimName"] for volume in volumes} == claims
    names = [document["metadata"]["name"] for name in FILES for document in load(name)]
    for name in ("ddp-elastic", "horovod", "doctor"):
        assert name in names


PROCESSES = {"NPROC_PER_NODE", "PET_NPROC_PER_NODE"}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_without_gpus_leave_nodes_with_gpus_alone(monkeypatch, kind):
    """Those nodes have a taint. Tolerations that the user has added stay."""
    documents = edited(monkeypatch, load(f"{kind}.yaml"))
    own = {"key": "team", "operator": "Exists"}
    for template in pod_templates(documents):
        template["spec"]["tolerations"].append(own)
    kept = [template["spec"]["tolerations"] for template in pod_templates(rendered(kind, gpus=0))]
    assert kept == [[own]] * (2 if kind == "mpijob" else 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", [None, 0, 4])
def test_a_node_has_as_many_gpus_as_processes(kind, gpus):
    pods = simulation.pods(kind, rendered(kind, gpus=gpus))
    counts = {one(pod.spec).get("resources", {}).get("limits", {}).get(GPU) for pod in pods}
    processes = {pod.env[name] for pod in pods for name in PROCESSES & {*pod.env}}
    expected = {None: 1, 0: None, 4: 4}[gpus]
    assert counts - {None} == ({expected} if expected else set())
    assert processes == {str(expected or 1)}


@pytest.mark.parametrize("kind", ["indexed-job", "jobset", "pytorchjob", "trainjob"])
@pytest.mark.parametrize("recipe", ["single", "dataparallel"])
def test_a_recipe_of_one_process_is_one_process_with_all_gpus(kind, recipe):
    [pod] = simulation.pods(kind, rendered(kind, recipe, nodes=1, gpus=4))
    assert {pod.env[name] for name in PROCESSES & {*pod.env}} == {"1"}
    assert one(pod.spec)["resources"]["limits"][GPU] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_a_node_grow_with_its_gpus(kind):
    """Cores, memory and /dev/shm must grow: what one rank needs is too little for eight that import torch."""
    sizes, disks = {}, set()
    for gpus in (None, 1, 8):
        pods = simulation.pods(kind, rendered(kind, gpus=gpus))
        resources, spec = one(pods[-1].spec)["resources"], pods[-1].spec
        amounts = [*resources["requests"].values(), resources["limits"]["memory"]]
        shared_memory = spec["volumes"][0]["emptyDir"]["sizeLimit"]
        sizes[gpus] = [int(schemas.quantity(size)) for size in (*amounts, shared_memory)]
        assert amounts[1] == amounts[2], "memory is requested up to its limit"
        disks.add(spec["volumes"][1]["emptyDir"]["sizeLimit"])
    assert sizes[1] == sizes[None]
    assert sizes[8] == [8 * size for size in sizes[1]]
    assert len(disks) == 1, "temporary files on the disk do not"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (8, ("64", "250Gi", "60Gi")),
        (4, ("32", "125Gi", "30Gi")),
        (3, ("24", "94Gi", "23Gi")),
        (12, ("96", "375Gi", "90Gi")),
    ],
)
def test_sizes_of_an_edited_file_follow_its_number_of_gpus(monkeypatch, gpus, expected):
    """The file was edited for nodes with 8 GPUs."""
    spec = edited(monkeypatch, load("indexed-job.yaml"))[-1]["spec"]["template"]["spec"]
    resources = {"requests": {"cpu": "64", "memory": "250Gi"}, "limits": {"memory": "250Gi", GPU: 8}}
    one(spec)["resources"].update(resources)
    spec["volumes"][0]["emptyDir"]["sizeLimit"] = "60Gi"
    spec["volumes"][0]["name"] = "dshm"
    spec["volumes"].insert(0, {"name": "models", "hostPath": {"path": "/models"}})
    spec = rendered(gpus=gpus)[-1]["spec"]["template"]["spec"]
    resources, shm = one(spec)["resources"], spec["volumes"][1]["emptyDir"]["sizeLimit"]
    assert (resources["requests"]["cpu"], resources["requests"]["memory"], shm) == expected
    assert resources["limits"] == {"memory": expected[1], GPU: gpus}


@pytest.mark.parametrize("kind", KINDS)
def test_gpus_that_the_manifest_does_not_limit_are_refused(monkeypatch, kind):
    """As without GPUs in an edited file, or with COMPONENTS=cpu-only: 8 processes would train on the CPU."""
    documents = edited(monkeypatch, load(f"{kind}.yaml"))
    found = [one(template["spec"]).get("resources", {}) for template in pod_templates(documents)]
    for resources in (*found, documents[-1]["spec"].get("trainer", {}).get("resourcesPerNode", {})):
        resources.get("limits", {}).pop(GPU, None)
    with pytest.raises(UserError, match=r"^GPUS 8: the manifest has no limit of nvidia.com/gpu; add one"):
        rendered(kind, gpus=8)
    rendered(kind, gpus=0)


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [
        *(("1.5Gi", "4.5Gi"), ("0.5", "1.5"), ("0.25", "0.75"), ("500m", "1500m"), (8, "24"), (1.5, "4.5")),
        ("1e3", "3000"),
    ],
)
def test_any_quantity_is_scaled(quantity, expected):
    assert manifest.scale(quantity, 3, 1) == expected
    assert schemas.quantity(manifest.scale(quantity, 1, 7)) >= schemas.quantity(expected) / 21, "rounded up"


def test_what_is_no_quantity_is_not_scaled():
    with pytest.raises(UserError, match=r"^'8 Gi' in the manifest is not a quantity; write one such as"):
        manifest.scale("8 Gi", 2, 1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "doctor"])
def test_a_pod_knows_the_cores_that_it_requests(kind):
    """Without a CPU limit, a pod sees the cores of the whole machine, and would start a thread for each."""
    pod = simulation.pods(kind, rendered(kind, gpus=8))[-1]
    assert pod.env["CPU_REQUEST"] == str(one(pod.spec)["resources"]["requests"]["cpu"])


def device_of(pod):
    """Return the last --device of a pod that starts ranks; the default is auto."""
    return read_option("--device", "auto", pod.words)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "doctor"])
@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        *((None, [], "cuda"), (4, [], "cuda"), (0, [], "cpu"), (4, ["--device=cpu"], "cpu")),
        (0, ["--device=cuda"], "cuda"),
    ],
)
def test_pods_with_gpus_train_on_gpus(kind, gpus, options, expected):
    """Unless the user chooses another device."""
    pods = simulation.pods(kind, rendered(kind, gpus=gpus, options=options))
    assert {device_of(pod) for pod in pods if "args" in one(pod.spec)} == {expected}


@pytest.mark.parametrize(("options", "expected"), [([], "cpu"), (["--device=auto"], "auto")])
def test_the_doctor_of_pods_without_gpus_uses_none(options, expected):
    """Where NVIDIA's runtime is the default, such pods see all GPUs of their machine."""
    pods = simulation.pods("doctor", rendered("doctor", gpus=0, options=options))
    assert {device_of(pod) for pod in pods} == {expected}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("mpijob", "doctor")])
@pytest.mark.parametrize(("gpus", "expected"), [(None, None), (2, None), (0, "void")])
def test_a_script_in_pods_without_gpus_sees_none(kind, gpus, expected):
    """It has no --device."""
    pods = simulation.pods(kind, rendered(kind, gpus=gpus, script="/data/train.py"))
    assert {pod.env.get("NVIDIA_VISIBLE_DEVICES") for pod in pods} == {expected}


def test_limits_follow_the_number_of_nodes():
    def spec_of(kind, nodes):
        return rendered(kind, nodes=nodes)[-1]["spec"]

    most = [spec_of("pytorchjob-elastic", nodes)["elasticPolicy"]["maxReplicas"] for nodes in (2, 6)]
    assert most == [4, 6], "more may join than there are at first"
    limits = [spec_of("pytorchjob", nodes)["runPolicy"]["backoffLimit"] for nodes in (1, 2, 8)]
    assert limits == [4, 7, 25], "three restarts of each container"
    limits = [spec_of("pytorchjob-elastic", nodes)["runPolicy"]["backoffLimit"] for nodes in (2, 8)]
    assert limits == [13, 25], "of the most nodes"


@pytest.mark.parametrize("kind", ["pytorchjob", "pytorchjob-elastic"])
def test_a_limit_of_restarts_that_was_raised_stays(kind):
    """Where nodes are drained often, as k8s/README.md says."""
    [document] = load(f"{kind}.yaml")
    job = document["spec"]
    job["runPolicy"]["backoffLimit"] = 30
    for nodes, limit in ((4, 30), (16, 49)):
        set_nodes(nodes, job, [])
        assert job["runPolicy"]["backoffLimit"] == limit
    del job["runPolicy"]  # which the operator does not require
    set_nodes(20, job, [])
    assert job["runPolicy"]["backoffLimit"] == 61


def test_each_rendered_elastic_job_has_a_rendezvous_of_its_own():
    """Otherwise its pods could meet those of an older job of the same name."""
    ids = {rendered("pytorchjob-elastic")[-1]["spec"]["elasticPolicy"]["rdzvId"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch("mine-[0-9a-f]{8}", text) for text in ids)


# ---- kustomize


def kustomize(folder):
    """Return the documents that kubectl's own kustomize builds from a folder."""
    need_kubectl()
    command = ["kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


@cache
def build_all(*components):
    """Build the cluster's parts and every kind's file with some components, in one call to kubectl."""
    files = ["cluster.yaml", *(f"{kind}.yaml" for kind in KINDS)]
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"../k8s/{file}" for file in files],
        "components": [f"../k8s/components/{name}" for name in components],
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "k8s").symlink_to(ROOT / "k8s")
        mine = Path(folder, "mine")
        mine.mkdir()
        (mine / "kustomization.yaml").write_text(yaml.safe_dump(content))
        return kustomize(mine)


def build(file, *components):
    """Return a manifest and the cluster's parts as kubectl builds them with some components."""
    own = {(document["kind"], document["metadata"]["name"]) for document in [*load("cluster.yaml"), *load(file)]}
    built = build_all(*components)
    found = [document for document in built if (document["kind"], document["metadata"]["name"]) in own]
    assert len(found) == len(own)
    return copy.deepcopy(found)


def test_the_base_builds():
    documents = kustomize(ROOT / "k8s")
    expected = [*load("cluster.yaml"), *load("indexed-job.yaml")]
    order = {document["kind"] + document["metadata"]["name"]: document for document in documents}
    assert len(documents) == len(expected)
    for document in expected:
        assert order[document["kind"] + document["metadata"]["name"]] == document


EVERYWHERE = ("network-policy", "pull-secret", "runtime-class", "safe-to-evict", "topology")
"""Components that change any kind of job, and meet the restricted standard."""


def test_there_are_all_components():
    expected = {"cpu-only", "fabric", "gpus", "image", "kueue", "nodes", "one-machine"}
    assert set(COMPONENTS) == {*expected, *EVERYWHERE, "efa", "gke-rdma", "pod-group", "rdma"}
    table = re.findall(r"^\| \[([\w-]+)\]\(components/", (ROOT / "k8s/README.md").read_text(), re.MULTILINE)
    assert sorted(table) == COMPONENTS


def need_kubectl():
    why = "it is not there (no cluster is needed)"
    require("kubectl", shutil.which("kubectl"), why, "put kubectl on the PATH")


@pytest.mark.parametrize(
    "words",
    [
        "12345e67 1e-3 1e+3 0e7 1_0e3 1E5 -.5 +.5e3 .5 0.1 1. 09",
        "12 +5 0123 0o17 0O7 0x1f 0X1F 0b1 0B1 -0b1 0b-1 0b+1 1_000 -_1 0_x1f 1__2",
        "y Y n N yes no on off true ~ null NULL .inf -.inf .NaN = <<",
        "2026-11-01 12:30 190:20:30.15 8Gi 500m --lr - . 1.2.3 nccl:cu13 a12345e67",
    ],
)
def test_kubectl_reads_strings_as_strings(words):
    """kubectl reads more words as numbers than PyYAML, such as 1e-3; the API server refuses one for a string."""
    data = {f"k{number}": word for number, word in enumerate(words.split())}
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}
    assert yaml.safe_load(to_text([document])) == document
    need_kubectl()
    command = ["kubectl", "label", "--local", "--filename=-", "a=b", "--output=json"]
    done = subprocess.run(command, input=to_text([document]), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"] == data


def test_what_is_a_number_or_a_word_stays_plain():
    values = {"aa": 12, "bb": 0.5, "cc": 1e-5, "dd": True, "ee": None, "ff": "--lr", "gg": "ddp"}
    plain = "aa: 12\nbb: 0.5\ncc: 1.0e-05\ndd: true\nee: null\nff: --lr\ngg: ddp\n"
    assert to_text([values]) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_components_change_every_kind(kind):
    file = f"{kind}.yaml"
    documents = build(file, *EVERYWHERE, "pod-group")
    assert check_faults(file, documents) == []
    templates = list(pod_templates(documents))
    on_all, on_nodes = templates, [one for one in templates if not is_launcher(one)]
    stay = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
    assert all(stay.items() <= template["metadata"]["annotations"].items() for template in on_all)
    assert all(template["spec"]["imagePullSecrets"] == [{"name": "registry"}] for template in on_all)
    assert [template["spec"].get("runtimeClassName") for template in on_nodes] == ["nvidia"]
    key = "kueue.x-k8s.io/podset-preferred-topology"
    assert [key in template["metadata"]["annotations"] for template in on_nodes] == [True]
    if kind == "trainjob":
        pod_group = simulation.named(documents, "TrainingRuntime")["spec"]["podGroupPolicy"]
        assert pod_group == {"coscheduling": {"scheduleTimeoutSeconds": 600}}


@pytest.mark.parametrize("kind", KINDS)
def test_components_are_rendered_with_a_job(kind):
    need_kubectl()
    own = ["pod-group"] * (kind == "trainjob")
    documents = rendered(kind, gpus=8, components=["network-policy", *own])
    assert check_faults(f"{kind}.yaml", documents) == []
    policy = simulation.named(documents, "NetworkPolicy")
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert policy["metadata"]["name"] == "mine"
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": selector}}]}]
    for pod in simulation.pods(kind, documents):  # it selects its own pods, and no other job's
        assert selector.items() <= pod.labels.items()
    others = rendered(kind, name="other")
    assert not any(selector.items() <= one["metadata"]["labels"].items() for one in pod_templates(others))
    assert [document["spec"].get("podGroupPolicy") is not None for document in documents].count(True) == len(own)
    assert documents[-1]["kind"] == load(f"{kind}.yaml")[-1]["kind"]


def is_launcher(template):
    return one(template["spec"])["name"] == "launcher"


@pytest.mark.parametrize("kind", KINDS)
def test_pods_on_gke_have_their_networks_and_what_the_node_brings(kind):
    """No standard allows its hostPath volumes; nothing else is wrong with it."""
    documents = build(f"{kind}.yaml", "safe-to-evict", "gke-rdma")
    faults = [f"volume {name} is of no allowed type" for name in ("gib", "driver")]
    assert check_faults(f"{kind}.yaml", documents) == faults
    [template] = [template for template in pod_templates(documents) if not is_launcher(template)]
    annotations = template["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false", "both are there"
    networks = json.loads(annotations["networking.gke.io/interfaces"])
    assert [one["network"] for one in networks] == ["default", *(f"rdma-{number}" for number in range(8))]
    mounts = {mount["mountPath"]: mount for mount in one(template["spec"])["volumeMounts"]}
    assert mounts["/usr/local/gib"]["readOnly"]
    assert mounts["/usr/local/nvidia"]["readOnly"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("podgroup", "COMPONENTS: invalid choice 'podgroup'; did you mean 'pod-group'?"),
        ("nodes", "COMPONENTS: nodes is for kubectl apply -k; NODES= sets it here"),
        ("pod-group", "COMPONENTS: pod-group does not change KIND=indexed-job; leave it out"),
        ("rdma", "COMPONENTS: kubectl kustomize cannot build rdma: "),
    ],
)
def test_a_component_that_does_nothing_is_refused(name, words, monkeypatch):
    if name == "pod-group":
        need_kubectl()
    else:
        monkeypatch.setenv("KUBECTL", "no-such-kubectl")
    with pytest.raises(UserError, match=f"^{re.escape(words)}"):
        rendered(components=[name])


@pytest.mark.parametrize("kind", KINDS)
def test_components_do_what_they_say(kind):
    file = f"{kind}.yaml"
    documents = build(file, "gpus", "nodes", "image", "fabric", "kueue")
    if kind == "pytorchjob-elastic":
        schemas.needs_crds()
    assert check_faults(file, documents) == []
    assert simulation.named(documents, "ConfigMap")["data"] == {"FABRIC": "ib"}
    job = next(one for one in documents if one["kind"] in ("Job", "JobSet", "PyTorchJob", "MPIJob", "TrainJob"))
    queued = [one for one in documents if "kueue.x-k8s.io/queue-name" in one["metadata"].get("labels", {})]
    assert queued == [job]
    pods = simulation.pods(kind, documents)
    workers = [pod for pod in pods if not pod.hostname.endswith("launcher")]
    assert len(workers) == (2 if kind == "pytorchjob-elastic" else 4)
    for pod in pods:
        name = "horovod" if kind == "mpijob" else "ddp"
        assert one(pod.spec)["image"] == f"registry.example.com/cluster-recipes/{name}:0.1"
        for variable, value in (("NPROC_PER_NODE", "8"), ("PET_NPROC_PER_NODE", "8"), ("NNODES", "4")):
            assert pod.env.get(variable, value) == value
    assert {one(pod.spec)["resources"]["limits"][GPU] for pod in workers} == {8}
    if kind == "mpijob":
        assert job["spec"]["slotsPerWorker"] == 8
    if kind == "pytorchjob":
        assert job["spec"]["runPolicy"]["backoffLimit"] == 13


@pytest.mark.parametrize("kind", KINDS)
def test_components_give_pods_their_fabric(kind):
    """They meet the restricted standard, because IPC_LOCK has no effect for a non-root user."""
    documents = build(f"{kind}.yaml", "gpus", "efa", "topology")
    assert check_faults(f"{kind}.yaml", documents) == []
    worker = simulation.pods(kind, documents)[-1]
    limits = one(worker.spec)["resources"]["limits"]
    assert (limits["vpc.amazonaws.com/efa"], limits["hugepages-2Mi"], limits[GPU]) == (32, "5120Mi", 8)
    annotations = [template["metadata"].get("annotations", {}) for template in pod_templates(documents)]
    assert sum("kueue.x-k8s.io/podset-preferred-topology" in one for one in annotations) == 1
    documents = build(f"{kind}.yaml", "rdma")
    assert check_faults(f"{kind}.yaml", documents) == []
    assert one(simulation.pods(kind, documents)[-1].spec)["resources"]["limits"]["rdma/rdma_shared_device_a"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_components_give_pods_their_devices_in_any_order(kind):
    """The components gpus and cpu-only replace the resources to which the others add."""
    need_kubectl()
    devices = {"rdma": "rdma/rdma_shared_device_a", "efa": "vpc.amazonaws.com/efa"}
    for names in (["rdma", "gpus"], ["gpus", "rdma"], ["efa", "cpu-only"]):
        worker = simulation.pods(kind, rendered(kind, components=names))[-1]
        limits = one(worker.spec)["resources"]["limits"]
        assert [device in limits for name, device in devices.items() if name in names] == [True]
        assert limits.get(GPU) == (8 if "gpus" in names else None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_components_of_a_small_cluster(kind):
    documents = build(f"{kind}.yaml", "cpu-only", "one-machine")
    assert check_faults(f"{kind}.yaml", documents) == []
    assert GPU not in yaml.safe_dump(documents), "nor do they take the place of jobs on nodes with GPUs"
    pods = simulation.pods(kind, documents)
    assert {device_of(pod) for pod in pods if "args" in one(pod.spec)} == {"cpu"}
    claims = [document for document in documents if document["kind"] == "PersistentVolumeClaim"]
    assert [claim["spec"]["accessModes"] for claim in claims] == [["ReadWriteOnce"]] * 2
    assert not any("storageClassName" in claim["spec"] for claim in claims)


def test_the_folder_of_the_readme_builds(tmp_path):
    """The kustomization that k8s/README.md shows, beside a checkout."""
    (tmp_path / "cluster-recipes").symlink_to(ROOT)
    (tmp_path / "mine").mkdir()
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "k8s" / "README.md").read_text(), re.DOTALL)
    (text,) = (block for block in blocks if "kind: Kustomization" in block)
    (tmp_path / "mine" / "kustomization.yaml").write_text(text)
    documents = kustomize(tmp_path / "mine")
    assert simulation.named(documents, "Job")["spec"]["completions"] == 4
