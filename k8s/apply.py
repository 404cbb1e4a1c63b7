"""Render a manifest of k8s/ for a recipe, apply it, follow node 0's log, and end with the job's status.

    make k8s RECIPE=ddp NODES=4 [KIND=pytorchjob] [GPUS=8] [IMAGE=registry/ddp:1] [FABRIC=ib] [NAME=mine]
        [COMPONENTS="rdma topology"]
    python -m k8s.apply ddp --nodes 4 --render         # print what would be applied
    python -m k8s.apply --delete mine

On success, the last line is the recipe's own, `result recipe=ddp world_size=4 ...`, and the status is 0.
k8s/manifest.py puts the values given here into the file. kubectl does the work (or KUBECTL); its errors, and those
of pods that cannot start, become one line with the remedy. Ctrl-C leaves the job running.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from k8s.manifest import INSTANCE, KINDS, PLACEHOLDER, Request, pod_templates, render, to_text
from recipes.common.arguments import positive_int, whole_number
from recipes.common.errors import UserError
from recipes.common.options import Options
from scripts.doctor import __main__ as doctor
from scripts.launch.command import RECIPE_OPTIONS, CommandParser, check_names, check_recipe, command, count, parse
from scripts.launch.recipe_options import read_option

OWN_LABEL = "app.kubernetes.io/name=cluster-recipes"
APPLY_CLUSTER_YAML = "kubectl apply -f k8s/cluster.yaml makes it, once for a namespace"

KUBECTL_TIMEOUT_S = 60
"""Longest wait for kubectl to answer."""
POLL_S = float(os.environ.get("K8S_POLL_S", "2"))
LONG_POLL_S = 5 * POLL_S
"""Time between two looks at the job while node 0's log grows."""
RETRY_S = 120.0
"""How long a transient fault may last, such as a busy registry, a late mount or a silent API server."""
INTERRUPTED = 128 + signal.SIGINT
LOG_END_GRACE_S = 120
"""Longest wait for the end of the job after the last line of node 0's log."""

OWN_CONTAINERS = ("trainer", "pytorch", "node", "launcher")
"""Names that the files give to the containers of node 0's pods."""
DELETED = [*dict.fromkeys(kind.resource for kind in KINDS.values()), "trainingruntimes.trainer.kubeflow.org"]
DELETED += ["services", "networkpolicies"]


# ---- the cluster


class NoAnswerError(UserError):
    """kubectl got no answer; the request may have been executed."""


UNREACHABLE = r"refused|dial tcp|no such host|TLS handshake|x509|current-context|provide credentials"


class Cluster:
    """A cluster, through kubectl."""

    def __init__(self, namespace: str | None) -> None:
        self.command = [os.environ.get("KUBECTL", "kubectl")]
        if not shutil.which(self.command[0]):
            raise UserError(f"{self.command[0]} not found; install kubectl, or set KUBECTL to its path")
        if namespace:
            self.command.append(f"--namespace={namespace}")

    def run(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Call kubectl once; return its output and status. Raises UserError if it reaches no cluster."""
        try:
            done = subprocess.run(
                [*self.command, *words], input=stdin, capture_output=True, text=True, timeout=KUBECTL_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise NoAnswerError(
                f"no answer from the cluster within {KUBECTL_TIMEOUT_S} s to kubectl {words[0]}"
            ) from None
        except OSError as error:
            raise UserError(f"cannot run {self.command[0]}: {error.strerror}") from None
        # An error from the server may quote a call inside the cluster that was refused, such as a webhook's.
        is_answered = done.stdout or "Error from server" in done.stderr
        if done.returncode and not is_answered and re.search(UNREACHABLE, done.stderr):
            raise UserError(f"kubectl reaches no cluster ({last_line(done.stderr)}); set KUBECONFIG")
        return done

    def get(self, *words: str) -> dict[str, Any]:
        """Return an object or a list; raises UserError if kubectl cannot get it."""
        done = self.run("get", *words, "--output=json")
        if done.returncode:
            raise UserError(f"kubectl get {' '.join(words)}: {last_line(done.stderr)}")
        try:
            content: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise UserError(f"kubectl get {' '.join(words)} printed no JSON: {last_line(done.stdout)}") from None
        return content


def last_line(text: str) -> str:
    """Return the last non-empty line, without kubectl's own prefix."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("Error from server ").removeprefix("error: ") if lines else "no reason given"


ATTEMPT = "cluster-recipes/attempt"
"""A label of the objects that one call creates; objects of an older job of this name have another value."""


def create(cluster: Cluster, request: Request, documents: list[dict[str, Any]]) -> None:
    """Create all documents, or none if that fails; raises UserError with the remedy."""
    attempt = f"a{secrets.token_hex(4)}"  # begins with a letter, since digits alone would be a number
    for document in documents:
        document["metadata"].setdefault("labels", {})[ATTEMPT] = attempt
    status, note = UserError.status, "; nothing of it was found"
    try:
        done = cluster.run("create", "--filename=-", stdin=to_text(documents))
        if done.returncode == 0:
            return
        reason, note = why_not_created(done.stderr, request, documents[-1]["kind"]), ""
    except NoAnswerError as error:
        reason = str(error)
    except KeyboardInterrupt:
        reason, status = "interrupted", INTERRUPTED
    selector = f"{ATTEMPT}={attempt}"
    try:
        if remove(cluster, dict.fromkeys(map(resource_of, documents)), selector, "--wait=false"):
            note = "; what it had created is deleted"
    except UserError as error:
        note = f"; what it may have created has the label {selector} ({error})"
    failure = UserError(reason + note)
    failure.status = status
    raise failure


def why_not_created(said: str, request: Request, kind: str) -> str:
    """Return why the cluster has not accepted the job, with the remedy."""
    if there := re.findall(r'([\w.-]+ "[^"]+") already exists', said):
        return f"{', '.join(there)} already exists; {request.delete}, or choose another NAME="
    if "no matches for kind" in said:
        operator = KINDS[request.kind].operator
        how = "(k8s/README.md says how); KIND=indexed-job needs none"
        return f"the cluster does not know {kind}: {operator} is not installed {how}"
    return f"the cluster refuses the job: {explain(last_line(said))}"


def resource_of(document: dict[str, Any]) -> str:
    """Return a document's kind as kubectl takes it on the command line: Service, Job.v1.batch."""
    group, _, version = document["apiVersion"].rpartition("/")
    return f"{document['kind']}.{version}.{group}" if group else str(document["kind"])


def remove(cluster: Cluster, resources: Iterable[str], selector: str, *options: str) -> str:
    """Delete the objects of these kinds that a label selects; return kubectl's lines.

    Raises UserError; for a kind that this user may not delete, only if nothing was deleted.
    """
    deleted = forbidden = ""
    for resource in resources:
        done = cluster.run("delete", resource, f"--selector={selector}", "--ignore-not-found", *options)
        if done.returncode and "(Forbidden)" in done.stderr:
            if resource != "networkpolicies":  # a user without a right to them has created none
                forbidden = forbidden or f"kubectl delete {resource}: {last_line(done.stderr)}"
            continue
        if done.returncode and "doesn't have a resource type" not in done.stderr:
            raise UserError(f"kubectl delete {resource}: {last_line(done.stderr)}")
        deleted += "".join(line + "\n" for line in done.stdout.splitlines() if "deleted" in line)
    if forbidden and not deleted:
        raise UserError(forbidden)
    return deleted


REMEDIES = [
    (
        r"failed quota: .*must specify",
        "set these in the manifest's limits or requests, or defaults by a LimitRange",
    ),
    (r"exceeded quota", "wait for other jobs, ask for fewer NODES or GPUS, or for a larger quota"),
    (r"Insufficient nvidia\.com/gpu", "wait for other jobs, or ask for fewer NODES or GPUS; GPUS=0 needs none"),
    (r"persistentvolumeclaim \"?[\w-]+\"? not found", APPLY_CLUSTER_YAML),
    (r"configmap \"?[\w-]+\"? not found", APPLY_CLUSTER_YAML),
    (r"unbound immediate PersistentVolumeClaims", "name a storageClassName that exists in k8s/cluster.yaml"),
    (r"field is immutable", "a job's pods cannot be edited: delete the job first, make k8s-delete NAME=..."),
    (r"security context constraint", "OpenShift: oc adm policy add-scc-to-user nonroot-v2 -z default"),
    (r"violates PodSecurity", "remove that field, or use a namespace of a weaker standard"),
    (r"Insufficient (cpu|memory)", "lower the requests in the manifest; GPUS=0 asks for one core and 4 GiB"),
]


def explain(message: str) -> str:
    """Return a cluster's message as one line, with its remedy if there is one."""
    message = " ".join(message.split())
    remedy = next((text for pattern, text in REMEDIES if re.search(pattern, message)), "")
    return f"{message}; {remedy}" if remedy else message


def pod_problem(pod: dict[str, Any]) -> tuple[str, float] | None:
    """Return why a pod does not start, and for how many seconds to wait for it; None if it is on its way.

    The wait is 0 if something does not exist; RETRY_S if the kubelet tries again by itself and may succeed (a busy
    registry; "failed to sync configmap cache", kubernetes#117972); infinite if there is no room yet.
    """
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting, image = container.get("state", {}).get("waiting", {}), container.get("image", "")
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        is_final = "not found" in message or reason in ("InvalidImageName", "ErrImageNeverPull")
        if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
            return (
                f"{name} cannot get the image {image} ({reason}); make it (docker/), push it, name it by IMAGE=; "
                "a private registry requires an imagePullSecret",
                0.0 if is_final or image.startswith(PLACEHOLDER) else RETRY_S,
            )
        if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
            return f"{name}: {explain(message or reason)}", 0.0 if is_final else RETRY_S
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message", condition.get("reason", ""))
            wait_s = 0.0 if "not found" in message else math.inf
            return f"{name} cannot be scheduled: {explain(message)}", wait_s
    return None


def created_problem(events: list[dict[str, Any]], name: str, since: str) -> str | None:
    """Return why the cluster makes no pods for a job created at `since` (a quota or a policy), or None."""
    for event in events:
        owner, said = event["involvedObject"].get("name", ""), event.get("message", "")
        is_ours = owner in (name, f"{name}-node-0", f"{name}-launcher")  # of a JobSet or TrainJob; of an MPIJob
        # An older job of this name may have left events; times of the cluster's own clock separate them, to the
        # second: an eventTime also has microseconds.
        is_new = (event.get("lastTimestamp") or event.get("eventTime") or since)[:19] >= since[:19]
        if is_ours and is_new and re.search(r"exceeded quota|violates PodSecurity|forbidden", said):
            return explain(said)
    return None


def killed_for_memory(pods: list[dict[str, Any]]) -> str:
    """Return which pods were killed for lack of memory, and what helps; "" if none was."""
    killed = []
    for pod in pods:
        for status in pod.get("status", {}).get("containerStatuses", []):
            ends = (status.get(key, {}).get("terminated", {}) for key in ("state", "lastState"))
            if any(end.get("reason") == "OOMKilled" for end in ends):
                killed.append(pod["metadata"]["name"])
    remedy = "OOMKilled; a larger memory limit in the manifest, or fewer --workers"
    return f"{', '.join(killed)}: {remedy}" if killed else ""


def job_state(job: dict[str, Any]) -> tuple[str, str]:
    """Return "done", "failed", or "" for a running job, and the message of a failure."""
    for condition in job.get("status", {}).get("conditions", []):
        if condition.get("status") == "True":
            if condition["type"] in ("Complete", "Completed", "Succeeded"):
                return "done", ""
            if condition["type"] == "Failed":
                return "failed", condition.get("message", "")
    return "", ""


class LostSightError(UserError):
    """The job can no longer be followed; it continues."""

    status = 1


class FollowedLog:
    """The log of one start of node 0's container, printed as it grows."""

    def __init__(self, cluster: Cluster, pod: dict[str, Any]) -> None:
        name, container = pod["metadata"]["name"], own_status(pod)["name"]
        self.command = [*cluster.command, "logs", "--follow", name, f"--container={container}"]
        self.start_id = container_start_id(pod)
        self.retry_until = 0.0
        self.start()

    def start(self, *since: str) -> None:
        """Start kubectl, which prints the log to this process's output."""
        self.process = subprocess.Popen([*self.command, *since])
        self.begun = self.last_seen = time.monotonic()

    def wait(self, timeout_s: float) -> None:
        """Wait for the log's end, at most so long."""
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
            self.last_seen = time.monotonic()

    def keep_following(self, head: dict[str, Any] | None) -> bool:
        """Follow the log again if its connection broke; return whether it is followed."""
        now = time.monotonic()
        if self.process.poll() is None:
            return True
        if not self.process.returncode or head is None or container_start_id(head) != self.start_id:
            return False
        # A connection that breaks at once is not retried forever.
        if not self.retry_until or self.last_seen - self.begun > RETRY_S:
            self.retry_until = now + RETRY_S
        if now > self.retry_until:
            return False
        self.start(f"--since={math.ceil(now - self.last_seen) + 1}s")
        return True


class Watch:
    """One job in the cluster, from its first pod to its end."""

    def __init__(self, cluster: Cluster, request: Request, start_timeout_s: float) -> None:
        self.cluster, self.request, self.start_timeout_s = cluster, request, start_timeout_s
        self.kind, self.name = KINDS[request.kind], request.name
        self.start_by = time.monotonic() + start_timeout_s
        """Time by which node 0 must run, or run again."""
        self.log: FollowedLog | None = None
        self.said = ""
        self.problems: dict[tuple[str, float], float] = {}
        """When a pod's problem began, by the pod's name and how long to wait for it."""
        self.status = 0
        """Exit status of node 0's last container."""

    def run(self) -> int:
        """Follow every start of node 0's container until the job has ended; return the exit status."""
        try:
            while (end := self.step()) is None:
                again = time.monotonic() + POLL_S
                if self.log:
                    self.log.wait(LONG_POLL_S)
                time.sleep(max(0.0, again - time.monotonic()))  # the log may have broken at once
            state, reason = end
        finally:
            if self.log:
                self.log.process.terminate()
                self.log.process.wait()
        if state == "done":
            return 0
        reason = killed_for_memory(self.pods()) or explain(reason)
        print(f"error: the job {self.name} has failed: {reason}", file=sys.stderr, flush=True)
        return self.status or 1

    def step(self) -> tuple[str, str] | None:
        """Look at the job once; return its job_state() once it has ended and its log is printed, else None.

        Raises:
            UserError: the job cannot start.
            LostSightError: it can no longer be followed.
        """
        # The job before the pods, so that the log of a job that has just ended is shown.
        job = self.get(self.kind.resource, self.name)
        pods = self.pods()
        head = self.head(pods)
        if head:
            self.status = container_state(head).get("terminated", {}).get("exitCode", self.status)
        if self.log and self.log.keep_following(head):
            self.check_pods(pods)  # another pod that cannot start is an error, too
        elif head and (self.log is None or container_start_id(head) != self.log.start_id):
            self.log = FollowedLog(self.cluster, head)
        elif job_state(job)[0]:
            return job_state(job)
        elif self.log and head and "running" in container_state(head):
            if time.monotonic() > self.log.last_seen + LOG_END_GRACE_S:
                raise LostSightError(
                    f"the log of node 0 has ended {LOG_END_GRACE_S} s ago, and its container runs on; the job "
                    f"continues; look with {' '.join(self.cluster.command)} logs {head['metadata']['name']}"
                )
        else:
            self.check_start(job, pods, head)
            return None
        self.start_by = time.monotonic() + self.start_timeout_s
        return None

    def check_start(self, job: dict[str, Any], pods: list[dict[str, Any]], head: dict[str, Any] | None) -> None:
        """Print what node 0 waits for; raises UserError if waiting does not help, or has taken too long."""
        conditions = job.get("status", {}).get("conditions", [])
        if any((one["type"], one.get("status")) == ("Suspended", "True") for one in conditions):
            # The job waits in a queue, such as Kueue's: that may take days, and is no failure.
            self.start_by = time.monotonic() + self.start_timeout_s
            self.say(f"the job {self.name} is suspended: it waits in its queue (Ctrl-C leaves it there)")
            return
        is_late = time.monotonic() > self.start_by
        waiting = self.check_pods(pods, is_late)
        problem: str | None = None
        if len(pods) < self.request.nodes:
            created = job.get("metadata", {}).get("creationTimestamp", "")
            with contextlib.suppress(UserError):  # events are a hint: not every user may read them
                events = self.cluster.get("events", "--field-selector=type=Warning")["items"]
                problem = created_problem(events, self.name, created)
        if problem or is_late:
            missing = "the job has not continued" if self.log else "node 0 has not started"
            reason = problem or f"{missing} within {self.start_timeout_s:g} s ({waiting})"
            raise UserError(f"{reason}; {self.request.delete} removes the job")
        if head is None or self.status:  # otherwise the job is about to be complete
            self.say(f"waiting, {self.start_timeout_s:g} s at most: {waiting}")

    def check_pods(self, pods: list[dict[str, Any]], is_late: bool = False) -> str:
        """Return what pods wait for; raises UserError if waiting does not help, or has taken too long."""
        waiting = f"{len(pods)} of {self.request.nodes} pods are there"
        now, problems = time.monotonic(), self.problems
        self.problems = {}
        for pod in pods:
            if problem := pod_problem(pod):
                waiting, wait_s = problem
                key = (pod["metadata"]["name"], wait_s)
                self.problems[key] = problems.get(key, now)
                if is_late or now - self.problems[key] >= wait_s:
                    raise UserError(f"{waiting}; {self.request.delete} removes the job")
        return waiting

    def say(self, text: str) -> None:
        """Print what is being waited for, unless it was printed last."""
        if text != self.said:
            print(text, flush=True)
            self.said = text

    def get(self, *words: str) -> dict[str, Any]:
        """Return kubectl's answer; retry while the API server does not answer.

        Raises:
            LostSightError: no answer within RETRY_S.
            UserError: the object has been deleted.
        """
        deadline = time.monotonic() + RETRY_S
        while True:
            try:
                return self.cluster.get(*words)
            except UserError as error:
                if "(NotFound)" in str(error):
                    raise UserError(f"the job {self.name} has been deleted while it was followed") from None
                if time.monotonic() > deadline:
                    raise LostSightError(
                        f"the job cannot be followed ({error}); the job continues; {self.request.delete} ends it"
                    ) from None
                self.say(f"waiting, {RETRY_S:g} s at most: the cluster does not answer ({error})")
            time.sleep(POLL_S)

    def pods(self) -> list[dict[str, Any]]:
        """Return the job's pods, the oldest first."""
        found: list[dict[str, Any]] = self.get("pods", f"--selector={OWN_LABEL},{INSTANCE}={self.name}")["items"]
        return sorted(found, key=lambda pod: pod["metadata"].get("creationTimestamp", ""))

    def head(self, pods: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the newest pod of node 0 whose container runs or has run, or None."""
        wanted = self.kind.head.items()
        heads = [pod for pod in pods if wanted <= pod["metadata"].get("labels", {}).items()]
        started = [pod for pod in heads if {"running", "terminated"} & container_state(pod).keys()]
        return started[-1] if started else None


def container_state(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a pod's own container: running, waiting or terminated."""
    return own_status(pod).get("state", {})


def own_status(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a pod's own container; a webhook, such as Istio's, may have added others."""
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return next((status for status in statuses if status["name"] in OWN_CONTAINERS), {})


def container_start_id(pod: dict[str, Any]) -> str:
    """Return an identifier of one start of a pod's container."""
    restarts = own_status(pod).get("restartCount", 0)
    return f"{pod['metadata'].get('uid', pod['metadata']['name'])} {restarts}"


def delete(cluster: Cluster, name: str) -> None:
    """Delete a job of any kind and what belongs to it; its record stays on the volume. Raises UserError."""
    deleted = remove(cluster, DELETED, f"{OWN_LABEL},{INSTANCE}={name}")
    if not deleted:
        raise UserError(f"there is no job named {name} in this namespace")
    print(deleted, end="", flush=True)


# ---- the command


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the command's own arguments, with the recipe's in `options`; raises UserError."""
    parser = CommandParser("python -m k8s.apply", __doc__, RECIPE_OPTIONS)
    add = parser.add_argument
    add("recipe", nargs="?", default="", metavar="RECIPE")
    add("--kind", default="", help=f"{', '.join(KINDS)} (default: indexed-job)")
    add("--nodes", type=count, default=2, metavar="N", help="number of nodes")
    gpus = "GPUs and processes of a node; 0: one process on the CPU"
    add("--gpus", type=whole_number(0, 1024), metavar="G", help=gpus)
    add("--image", help="the image (default: the manifest's, once edited, or cluster-recipes/RECIPE:latest)")
    add("--fabric", help="auto, ib, roce, efa or tcp (default: the ConfigMap's)")
    add("--components", default="", help="folders of k8s/components, separated by spaces")
    add("--name", help="the job's and the run's name (default: the recipe's)")
    add("--namespace", help="namespace (default: the kubectl context's)")
    add("--start-timeout-s", type=positive_int, default=900, metavar="S", help="longest wait for node 0")
    add("--render", action="store_true", help="print the manifest and end")
    add("--delete", metavar="NAME", help="delete a job")
    return parse(parser, argv)


def make_request(args: Namespace) -> Request:
    """Return the request of a command line; raises UserError for an invalid value."""
    check_recipe(args.recipe)
    script = os.environ.get("SCRIPT", "")
    kind = args.kind or ("doctor" if args.recipe == "probe" else "indexed-job")
    check_names("KIND", [kind], list(KINDS))
    check_names("FABRIC", [args.fabric or "auto"], ("auto", "ib", "roce", "efa", "tcp"))
    name = args.name or re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-") or args.recipe
    own = (args.nodes, args.gpus, args.image, args.fabric)
    components = args.components.split()
    return Request(kind, args.recipe, name, *own, args.options, script or None, components, args.namespace)


def check_options(request: Request, documents: Sequence[dict[str, Any]]) -> None:
    """Raise UserError for what each pod would refuse, unless options go with a --config file of the pods."""
    config = read_option("--config", "", request.options)
    if request.script or (config and not Path(config).exists()):
        return
    if request.kind == "doctor":
        doctor.parse_args(request.options)
        return
    try:
        recipe = importlib.import_module(f"recipes.{request.recipe}.train")
    except ImportError:  # the pods have what it needs
        return
    specs = [documents[-1]["spec"].get("trainer", {})]
    specs += [template["spec"]["containers"][0] for template in pod_templates(documents)]
    words = next(spec["args"] for spec in specs if "args" in spec)
    if any("$(" in word.replace("$$", "") for word in words):
        return  # Kubernetes expands it in the pods
    own = recipe.options([word.replace("$$", "$") for word in words[not words[0].startswith("-") :]])
    if request.gpus is not None and isinstance(own, Options):
        own.check_world_size(request.nodes * max(request.gpus, 1))


@command
def main(argv: list[str]) -> int:
    """Render, create and follow a job, or delete one; return the exit status."""
    args = parse_args(argv)
    if args.delete:
        delete(Cluster(args.namespace), args.delete)
        return 0
    request = make_request(args)
    documents = render(request)
    check_options(request, documents)
    if args.render:
        print(to_text(documents), end="")
        return 0
    cluster = Cluster(args.namespace)
    create(cluster, request, documents)
    what, kind = request.script or request.recipe, documents[-1]["kind"]
    print(f"job {request.name}: {what} on {request.nodes} nodes as {kind}", flush=True)
    try:
        return Watch(cluster, request, args.start_timeout_s).run()
    except KeyboardInterrupt:
        print(f"\nthe job continues; {request.delete} ends it", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
