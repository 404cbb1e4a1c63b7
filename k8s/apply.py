"""Render a manifest of k8s/ for a recipe, apply it, follow node 0's log, and end with the job's status.

    make k8s RECIPE=ddp NODES=4 [KIND=pytorchjob] [GPUS=8] [IMAGE=registry/ddp:1] [FABRIC=ib] [NAME=mine]
        [COMPONENTS="rdma topology"]
    python -m k8s.apply ddp --nodes 4 --render         # print what would be applied
    python -m k8s.apply --delete mine

Success: the recipe's last line, `result recipe=ddp world_size=4 ...`, and status 0. k8s/manifest.py puts the
values given here into the file. kubectl does the work (KUBECTL names another one); its errors and those of pods
that cannot start become one line with the remedy. Ctrl-C leaves the job running.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k8s.manifest import INSTANCE, KINDS, PLACEHOLDER, Request, render, to_text
from recipes.common.errors import UserError
from recipes.common.options import whole_number
from scripts.launch.command import (
    CommandParser,
    check_names,
    check_recipe,
    command,
    count,
    parse,
)

OURS = "app.kubernetes.io/name=cluster-recipes"
ONCE = "kubectl apply -f k8s/cluster.yaml makes it, once for a namespace"

CALL_S = 60
"""Longest wait for kubectl to answer."""
POLL_S = float(os.environ.get("K8S_POLL_S", "2"))
RETRY_S = float(os.environ.get("K8S_RETRY_S", "120"))
"""How long a transient fault may last: a busy registry, a late mount, a silent API server."""
INTERRUPTED = 128 + signal.SIGINT
END_S = 120
"""Longest wait for the job's end after node 0's last line."""

OWN_CONTAINERS = ("trainer", "pytorch", "node", "launcher")
"""The containers of node 0's pods, by their names in the files."""
DELETED = [*dict.fromkeys(kind.resource for kind in KINDS.values()), "trainingruntimes.trainer.kubeflow.org"]
DELETED += ["services", "networkpolicies"]


# ---- the cluster


class NoAnswerError(UserError):
    """kubectl got no answer, or lost it; the request may have been executed."""


LOST = re.compile(
    r"\((Server|Gateway)?Timeout\)|etcdserver: |prevented the request|\bEOF\b|GOAWAY|connection reset"
    r"|client connection lost|deadline exceeded|awaiting headers|(read|write) tcp"
)
"""kubectl's messages for a request that it sent and that got no complete answer."""


class Cluster:
    """A cluster, through kubectl."""

    def __init__(self, namespace: str | None) -> None:
        self.command = [os.environ.get("KUBECTL", "kubectl")]
        if not shutil.which(self.command[0]):
            raise UserError(f"{self.command[0]} not found; install kubectl, or set KUBECTL to its path")
        if namespace:
            self.command.append(f"--namespace={namespace}")

    def run(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Return what one call of kubectl printed, and its status; raises UserError when no cluster answers."""
        try:
            done = subprocess.run(
                [*self.command, *words], input=stdin, capture_output=True, text=True, timeout=CALL_S
            )
        except subprocess.TimeoutExpired:
            raise NoAnswerError(f"no answer from the cluster within {CALL_S} s to kubectl {words[0]}") from None
        except OSError as error:
            raise UserError(f"cannot run {self.command[0]}: {error.strerror}") from None
        said = [line for line in done.stderr.splitlines() if "failed calling webhook" not in line]
        if done.returncode and words[0] == "create" and any(map(LOST.search, said)):
            raise NoAnswerError(f"kubectl create lost its answer ({last_line(done.stderr)})")
        unreachable = r"refused|Unable to connect|no such host|current-context|i/o timeout|provide credentials"
        # An object that was printed comes from a cluster: what was refused then is a call inside, of a webhook.
        if done.returncode and not done.stdout and re.search(unreachable, done.stderr):
            raise UserError(f"kubectl reaches no cluster ({last_line(done.stderr)}); set KUBECONFIG")
        return done

    def get(self, *words: str) -> dict[str, Any]:
        """Return an object or a list; raises UserError for one that is not there."""
        done = self.run("get", *words, "--output=json")
        if done.returncode:
            raise UserError(f"kubectl get {' '.join(words)}: {last_line(done.stderr)}")
        try:
            content: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise UserError(f"kubectl get {' '.join(words)} printed no JSON: {last_line(done.stdout)}") from None
        return content


def last_line(text: str) -> str:
    """Return the last line that is not empty, without kubectl's own prefix."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("Error from server ").removeprefix("error: ") if lines else "no reason given"


ATTEMPT = "cluster-recipes/attempt"
"""A label of the objects that one call creates; those of an older job of this name have another."""


def create(cluster: Cluster, request: Request, documents: list[dict[str, Any]]) -> None:
    """Create all documents or, after a failure, none; raises UserError with the remedy."""
    attempt = f"a{secrets.token_hex(4)}"  # a word, where digits alone would be a number
    for document in documents:
        document["metadata"].setdefault("labels", {})[ATTEMPT] = attempt
    try:
        done = cluster.run("create", "--filename=-", stdin=to_text(documents))
    except (NoAnswerError, KeyboardInterrupt) as error:  # what has been created is not known
        kinds = ",".join(dict.fromkeys(resource_of(document) for document in documents))
        made = [kinds, f"--selector={ATTEMPT}={attempt}"]
        look = " ".join([*cluster.command, "get", *made])
        found = f"what was found of it is deleted; look for more before you try again: {look}"
        failure = UserError(f"{str(error) or 'interrupted'}; {undo(cluster, made) or found}")
        if isinstance(error, KeyboardInterrupt):
            failure.status = INTERRUPTED
        raise failure from None
    if done.returncode == 0:
        return
    said = done.stderr
    created = re.findall(r"^(\S+) created$", done.stdout, re.MULTILINE)
    left_over = f"; {undone}" if created and (undone := undo(cluster, created)) else ""
    if there := re.findall(r'([\w.-]+ "[^"]+") already exists', said):
        raise UserError(f"{', '.join(there)} already exists; {request.delete}, or choose another NAME={left_over}")
    if "no matches for kind" in said:
        raise UserError(
            f"the cluster does not know {documents[-1]['kind']}: {KINDS[request.kind].operator} is not installed "
            f"(k8s/README.md says how); KIND=indexed-job needs none{left_over}"
        )
    raise UserError(f"the cluster refuses the job: {explain(last_line(said))}{left_over}")


def resource_of(document: dict[str, Any]) -> str:
    """Return a document's kind as kubectl takes it on the command line: Service, Job.v1.batch."""
    group, _, version = document["apiVersion"].rpartition("/")
    return f"{document['kind']}.{version}.{group}" if group else str(document["kind"])


def undo(cluster: Cluster, created: list[str]) -> str:
    """Delete what one call created, by names or by a selector; return a note of what could not be deleted."""
    try:
        done = cluster.run("delete", *created, "--ignore-not-found", "--wait=false")
        reason = last_line(done.stderr) if done.returncode else ""
    except UserError as error:
        reason = str(error)
    return f"left over: {', '.join(created)} ({reason})" if reason else ""


REMEDIES = [
    (
        r"failed quota: .*must specify",
        "set these in the manifest's limits or requests, or defaults by a LimitRange",
    ),
    (r"exceeded quota", "wait for other jobs, ask for fewer NODES or GPUS, or for a larger quota"),
    (r"Insufficient nvidia\.com/gpu", "wait for other jobs, or ask for fewer NODES or GPUS; GPUS=0 needs none"),
    (r"persistentvolumeclaim \"?[\w-]+\"? not found", ONCE),
    (r"configmap \"?[\w-]+\"? not found", ONCE),
    (r"unbound immediate PersistentVolumeClaims", "name a storageClassName that exists in k8s/cluster.yaml"),
    (r"field is immutable", "a job's pods cannot be edited: delete the job first, make k8s-delete NAME=..."),
    (r"security context constraint", "OpenShift: oc adm policy add-scc-to-user nonroot-v2 -z default"),
    (r"violates PodSecurity", "remove that field, or use a namespace of a weaker standard"),
    (r"Insufficient (cpu|memory)", "lower the requests in the manifest; GPUS=0 asks for one core and 4 GiB"),
]


def explain(message: str) -> str:
    """Return a cluster's message with its remedy, as one line."""
    message = " ".join(message.split())
    remedy = next((text for pattern, text in REMEDIES if re.search(pattern, message)), "")
    return f"{message}; {remedy}" if remedy else message


def pod_problem(pod: dict[str, Any]) -> tuple[str, bool | None] | None:
    """Return why a pod does not start, and whether that is final; None for one that is on its way.

    True: waiting cannot help, as nothing of that name is there. None: the kubelet tries again by itself, and may
    succeed (a busy registry; "failed to sync configmap cache", kubernetes#117972). False: no room yet.
    """
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = container.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
            image = container.get("image", "")
            return (
                f"{name} cannot get the image {image} ({reason}); make it (docker/), push it, name it by IMAGE=; "
                "a private registry requires an imagePullSecret",
                reason in ("InvalidImageName", "ErrImageNeverPull")
                or "not found" in message
                or image.startswith(PLACEHOLDER)
                or None,
            )
        if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
            return f"{name}: {explain(message or reason)}", "not found" in message or None
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message", condition.get("reason", ""))
            return f"{name} cannot be scheduled: {explain(message)}", "not found" in message
    return None


def created_problem(events: list[dict[str, Any]], name: str, since: str) -> str | None:
    """Return why the cluster makes no pods for a job created at `since`: a quota or a policy."""
    for event in events:
        owner, said = event["involvedObject"].get("name", ""), event.get("message", "")
        is_ours = owner in (name, f"{name}-node-0", f"{name}-launcher")  # of a JobSet or TrainJob; of an MPIJob
        # A job of the same name may have left events; the cluster's own clock tells them apart.
        is_new = (event.get("lastTimestamp") or event.get("eventTime") or since) >= since
        if is_ours and is_new and re.search(r"exceeded quota|violates PodSecurity|forbidden", said):
            return explain(said)
    return None


def killed_for_memory(pods: list[dict[str, Any]]) -> str:
    """Return which pods the kernel killed for their memory, and what helps; "" for none."""
    killed = []
    for pod in pods:
        for status in pod.get("status", {}).get("containerStatuses", []):
            ends = (status.get(key, {}).get("terminated", {}) for key in ("state", "lastState"))
            if any(end.get("reason") == "OOMKilled" for end in ends):
                killed.append(pod["metadata"]["name"])
    remedy = "OOMKilled; a larger memory limit in the manifest, or fewer --workers"
    return f"{', '.join(killed)}: {remedy}" if killed else ""


def job_state(job: dict[str, Any]) -> tuple[str, str]:
    """Return "done", "failed" or "" for a running job, and the message of its condition."""
    for condition in job.get("status", {}).get("conditions", []):
        if condition.get("status") == "True":
            if condition["type"] in ("Complete", "Completed", "Succeeded"):
                return "done", ""
            if condition["type"] == "Failed":
                return "failed", condition.get("message", "")
    return "", ""


class LostSightError(UserError):
    """The job cannot be followed any longer; it continues."""

    status = 1


class Watch:
    """One job in the cluster, from its first pod to its end."""

    def __init__(self, cluster: Cluster, request: Request, start_timeout_s: float) -> None:
        self.cluster, self.request, self.start_timeout_s = cluster, request, start_timeout_s
        self.kind, self.name = KINDS[request.kind], request.name
        self.said = ""
        self.is_suspended = False
        """Whether the job waits in a queue, such as Kueue's, and has no pods until it is admitted."""
        self.problems: dict[str, float] = {}
        """When a problem that the kubelet retries began, by pod."""
        self.created = ""
        """When the job was created, by the cluster's clock."""
        self.status = 0
        """Exit status of node 0's last container."""

    def say(self, text: str) -> None:
        """Print what is being waited for, once."""
        if text != self.said:
            print(text, flush=True)
            self.said = text

    def get(self, *words: str) -> dict[str, Any]:
        """Return kubectl's answer; retry while the API server restarts.

        Raises:
            LostSightError: no answer within RETRY_S.
            UserError: the object is not there.
        """
        deadline = time.monotonic() + RETRY_S
        while True:
            try:
                return self.cluster.get(*words)
            except UserError as error:
                if "(NotFound)" in str(error):
                    raise
                if time.monotonic() > deadline:
                    raise LostSightError(
                        f"the job cannot be followed ({error}); the job goes on; {self.request.delete} ends it"
                    ) from None
                self.say(f"waiting, {RETRY_S:g} s at most: the cluster does not answer ({error})")
            time.sleep(POLL_S)

    def pods(self) -> list[dict[str, Any]]:
        """Return the job's pods, the oldest first."""
        found: list[dict[str, Any]] = self.get("pods", f"--selector={OURS},{INSTANCE}={self.name}")["items"]
        return sorted(found, key=lambda pod: pod["metadata"].get("creationTimestamp", ""))

    def head(self, pods: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the newest pod of node 0 that has a container which runs or has run."""
        wanted = self.kind.head.items()
        heads = [pod for pod in pods if wanted <= pod["metadata"].get("labels", {}).items()]
        started = [pod for pod in heads if {"running", "terminated"} & container_state(pod).keys()]
        return started[-1] if started else None

    def state(self) -> tuple[str, str]:
        """Return the state of the job, as job_state()."""
        try:
            job = self.get(self.kind.resource, self.name)
        except UserError as error:
            if "NotFound" not in str(error):
                raise
            raise UserError(f"the job {self.name} has been deleted while it was followed") from None
        conditions = job.get("status", {}).get("conditions", [])
        self.is_suspended = any((one["type"], one.get("status")) == ("Suspended", "True") for one in conditions)
        self.created = job.get("metadata", {}).get("creationTimestamp", "")
        return job_state(job)

    def check_pods(self, pods: list[dict[str, Any]], is_late: bool) -> str:
        """Return what pods wait for; raise UserError for what waiting does not fix."""
        waiting = f"{len(pods)} of {self.request.nodes} pods are there"
        for pod in pods:
            problem = pod_problem(pod)
            if problem is None or problem[1] is False:
                self.problems.pop(pod["metadata"]["name"], None)
            elif problem[1] is None:
                since = self.problems.setdefault(pod["metadata"]["name"], time.monotonic())
                is_late = is_late or time.monotonic() - since > RETRY_S
            if problem and (problem[1] or is_late):
                raise UserError(f"{problem[0]}; {self.request.delete} removes the job")
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
            if self.is_suspended:  # in a queue: that may take days, and is no failure
                deadline = time.monotonic() + self.start_timeout_s
                self.say(f"the job {self.name} is suspended: it waits in its queue (Ctrl-C leaves it there)")
                time.sleep(POLL_S)
                continue
            waiting = self.check_pods(pods, is_late)
            problem = None
            if len(pods) < self.request.nodes:
                with contextlib.suppress(UserError):  # events are a hint: not every user may read them
                    events = self.cluster.get("events", "--field-selector=type=Warning")["items"]
                    problem = created_problem(events, self.name, self.created)
            if problem or is_late:
                missing = "the job has not continued" if seen else "node 0 has not started"
                reason = problem or f"{missing} within {self.start_timeout_s:g} s ({waiting})"
                raise UserError(f"{reason}; {self.request.delete} removes the job")
            is_done = head and container_state(head).get("terminated", {}).get("exitCode") == 0
            if not is_done:  # the job will be known to be complete in a moment
                self.say(f"waiting, {self.start_timeout_s:g} s at most: {waiting}")
            time.sleep(POLL_S)

    def follow(self, head: dict[str, Any]) -> None:
        """Print the log of node 0's container until it ends; another pod that cannot start ends it, too."""
        words = [
            "logs",
            "--follow",
            head["metadata"]["name"],
            f"--container={own_status(head)['name']}",
        ]
        since: list[str] = []
        deadline = 0.0
        while True:
            begun = time.monotonic()
            broken = self.print_log([*words, *since])
            if broken is None:
                return
            # The connection broke: follow again from there, but not for ever one that breaks at once.
            if not since or broken - begun > RETRY_S:
                deadline = time.monotonic() + RETRY_S
            elif time.monotonic() > deadline:
                return
            time.sleep(POLL_S)
            newest = self.head(self.pods())
            if newest is None or instance(newest) != instance(head):
                return
            since = [f"--since={math.ceil(time.monotonic() - broken) + 1}s"]

    def print_log(self, words: list[str]) -> float | None:
        """Print a log while it lasts; return when it was last seen unbroken, or None if it came to its end."""
        logs = subprocess.Popen([*self.cluster.command, *words])
        last_seen = time.monotonic()
        try:
            while logs.poll() is None:
                last_seen = time.monotonic()
                time.sleep(POLL_S)
                self.check_pods(self.pods(), is_late=False)
        finally:
            logs.terminate()
            logs.wait()
        return last_seen if logs.returncode else None

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
        reason = killed_for_memory(self.pods()) or explain(reason)
        print(f"error: the job {self.name} has failed: {reason}", file=sys.stderr, flush=True)
        return self.status or 1

    def wait_for_end_of(self, seen: str) -> None:
        """Wait until the cluster knows how node 0's container has ended; its log may end a moment earlier."""
        deadline = time.monotonic() + END_S
        while not self.state()[0]:
            head = self.head(self.pods())
            if head is None or instance(head) != seen or "running" not in container_state(head):
                break
            if time.monotonic() > deadline:
                raise LostSightError(
                    f"the log of node 0 has ended {END_S} s ago, and its container runs on; the job goes on; look "
                    f"with {' '.join(self.cluster.command)} logs {head['metadata']['name']}"
                )
            time.sleep(POLL_S)
        head = self.head(self.pods())
        ended = container_state(head).get("terminated", {}) if head else {}
        self.status = ended.get("exitCode", self.status)


def container_state(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a pod's own container: running, waiting or terminated."""
    state: dict[str, Any] = own_status(pod).get("state", {})
    return state


def own_status(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a pod's own container: a webhook, such as Istio's, may have added others."""
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return next((status for status in statuses if status["name"] in OWN_CONTAINERS), {})


def instance(pod: dict[str, Any]) -> str:
    """Return an identifier of one start of a pod's container."""
    restarts = own_status(pod).get("restartCount", 0)
    return f"{pod['metadata'].get('uid', pod['metadata']['name'])} {restarts}"


def delete(cluster: Cluster, name: str) -> int:
    """Delete a job and what belongs to it, of whatever kind; its record stays on the volume."""
    deleted = ""
    for resource in DELETED:
        done = cluster.run("delete", resource, f"--selector={OURS},{INSTANCE}={name}", "--ignore-not-found")
        if done.returncode and resource == "networkpolicies" and "(Forbidden)" in done.stderr:
            continue  # a Role that has no right to them has made none
        if done.returncode and "doesn't have a resource type" not in done.stderr:
            raise UserError(f"kubectl delete {resource}: {last_line(done.stderr)}")
        deleted += "".join(line + "\n" for line in done.stdout.splitlines() if "deleted" in line)
    if not deleted:
        raise UserError(f"there is no job named {name} in this namespace")
    print(deleted, end="", flush=True)
    return 0


# ---- the command


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the command's own arguments, with the recipe's in `options`; raises UserError."""
    parser = CommandParser("python -m k8s.apply", (__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", nargs="?", default="", metavar="RECIPE")
    parser.add_argument("--kind", default="", help=f"one of {', '.join(KINDS)} (default: indexed-job)")
    parser.add_argument("--nodes", type=count, default=2, metavar="N", help="number of nodes")
    parser.add_argument(
        "--gpus",
        type=whole_number(0, 1024),
        metavar="G",
        help="GPUs and processes of a node; 0: one process on the CPU",
    )
    parser.add_argument(
        "--image", help="the image (default: the manifest's, once edited, or cluster-recipes/RECIPE:latest)"
    )
    parser.add_argument("--fabric", help="auto, ib, roce, efa or tcp (default: the ConfigMap's)")
    parser.add_argument("--components", default="", help="folders of k8s/components, separated by spaces")
    parser.add_argument("--name", help="the job's and the run's name (default: the recipe's)")
    parser.add_argument("--namespace", help="(default: that of the kubectl context)")
    parser.add_argument("--start-timeout-s", type=count, default=900, metavar="S", help="longest wait for node 0")
    parser.add_argument("--render", action="store_true", help="print the manifest and end")
    parser.add_argument("--delete", metavar="NAME", help="delete a job")
    return parse(parser, argv)


def make_request(args: Namespace) -> Request:
    """Return the request of a command line; raises UserError for values that make no sense."""
    check_recipe(args.recipe)
    script = os.environ.get("SCRIPT", "")
    kind = args.kind or ("doctor" if args.recipe == "probe" else "indexed-job")
    check_names("KIND", [kind], list(KINDS))
    check_names("FABRIC", [args.fabric or "auto"], ("auto", "ib", "roce", "efa", "tcp"))
    name = args.name or re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-") or args.recipe
    own = (args.nodes, args.gpus, args.image, args.fabric)
    components = args.components.split()
    return Request(kind, args.recipe, name, *own, args.options, script or None, components, args.namespace)


@command
def main(argv: list[str]) -> int:
    """Render, apply and follow, or delete; return the exit status."""
    args = parse_args(argv)
    if args.delete:
        return delete(Cluster(args.namespace), args.delete)
    request = make_request(args)
    documents = render(request)
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
        print(f"\nthe job goes on; {request.delete} ends it", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
