"""Count failures and delay new pods as the controllers do: what a fault costs a job, without a cluster.

Each class has the rules of one controller, with the source lines that they come from. It takes the manifest's own
numbers and policies, and the pods' exit statuses drive it. The controllers themselves are not run.
"""

from __future__ import annotations

from typing import Any

from recipes.common.process.rendezvous_errors import MissingNodeError

DRAINED = "DisruptionTarget"
"""Used instead of an exit status: the pod was evicted, preempted or lost with its machine."""


GAVE_UP = MissingNodeError.status
"""Exit status of a node that has waited RDZV_TIMEOUT_S for the head or its name."""


def pulled_at(image_at_s: int) -> int:
    """Return when the kubelet pulls an image that its registry serves from image_at_s on (1.32, ErrImagePull).

    pkg/kubelet/images/image_manager.go, EnsureImageExists: each failed pull doubles the wait before the next one,
    from imageBackOffPeriod, 10 s, to MaxImageBackOff, 300 s (pkg/kubelet/kubelet.go, NewMainKubelet). Meanwhile
    the pod is Pending: it has not failed, and nothing is counted. The duration of the pull itself is ignored.
    """
    now, wait = 0, 10
    while now < image_at_s:
        now, wait = now + wait, min(300, 2 * wait)
    return now


def give_up(started_s: list[int], bound_s: int) -> dict[int, int | str]:
    """Return the nodes that give up waiting for the head, with their status; started_s: start of each one."""
    return {node: GAVE_UP for node, start in enumerate(started_s) if node > 0 and started_s[0] - start > bound_s}


class Job:
    """The Job controller's rules for an Indexed Job (Kubernetes 1.32, pkg/controller/job)."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.failed = spec, ""
        nodes = spec["completions"]
        self.counted, self.ignored = [0] * nodes, [0] * nodes

    def action(self, status: int | str) -> str:
        """Return the first matching rule's action, or Count: pod_failure_policy.go, matchPodFailurePolicy."""
        for rule in self.spec.get("podFailurePolicy", {}).get("rules", []):
            codes = rule.get("onExitCodes", {}).get("values", [])
            conditions = [pattern["type"] for pattern in rule.get("onPodConditions", [])]
            if status in codes or status in conditions:
                return str(rule["action"])
        return "Count"

    def fail(self, statuses: dict[int, int | str]) -> dict[int, int]:
        """Record that pods of these indexes fail at once; return the seconds until each has a new pod.

        If the job has failed, the result is empty, and `failed` has the reason.
        """
        for index, status in statuses.items():
            action = self.action(status)
            if action == "FailJob":
                self.failed = "PodFailurePolicy"
            elif action == "Ignore":
                self.ignored[index] += 1
            else:
                self.counted[index] += 1
        # indexed_job_utils.go, isIndexFailed: an index fails when its counted failures exceed the limit
        lost = sum(count > self.spec["backoffLimitPerIndex"] for count in self.counted)
        # job_controller.go, syncJob; without maxFailedIndexes the other indexes would run on
        if lost > self.spec.get("maxFailedIndexes", len(self.counted)):
            self.failed = self.failed or "MaxFailedIndexesExceeded"
        # backoff_utils.go:199, getRemainingTimePerIndex: the index's own failures, ignored ones too
        delays = {index: wait_s(self.counted[index] + self.ignored[index]) for index in statuses}
        return {} if self.failed else delays


def wait_s(failures: int) -> int:
    """Return the Job controller's delay: 10 s, doubled with each failure, 600 s at most (backoff_utils.go:210)."""
    return min(600, 10 * 2 ** (failures - 1)) if failures else 0


class PyTorchJob:
    """The training operator 1.9: containers restart in their pods, and a job counts all restarts together."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.limit = spec["runPolicy"]["backoffLimit"]
        groups = spec["pytorchReplicaSpecs"]
        assert {group["restartPolicy"] for group in groups.values()} == {"OnFailure"}
        self.restarts = [0] * sum(group["replicas"] for group in groups.values())

    def fail(self, statuses: dict[int, int | str]) -> bool:
        """Record that pods fail and restart; return whether the job goes on.

        pkg/core/job.go:101-132: the restart counts of all containers of running pods are summed, whatever the exit
        status. When the sum reaches the limit, the job fails and its pods are deleted. A drained node's pod is
        created anew and counts from 0 (pkg/controller.v1/common/pod.go:350).
        """
        for index, status in statuses.items():
            self.restarts[index] = 0 if status == DRAINED else self.restarts[index] + 1
        return sum(self.restarts) < self.limit


class MPIJob:
    """The MPI operator 0.8: the workers' pods stay, and only the launcher's failures count."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.limit, self.restarts, self.drained = spec["runPolicy"]["backoffLimit"], 0, 0
        assert spec["mpiReplicaSpecs"]["Launcher"]["restartPolicy"] == "OnFailure"

    def fail(self, status: int | str) -> bool:
        """Record that the launcher fails and restarts; return whether the job goes on.

        pkg/controller/mpi_job_controller.go:1543, newLauncherJob: its Job has the MPIJob's backoffLimit.
        Kubernetes, pastBackoffLimitOnFailure: the Job ends when the restarts of its container, whatever the exit
        status, reach the limit. A drained pod counts as a failed pod (exceedsBackoffLimit), and the container of
        its successor counts from 0.
        """
        if status == DRAINED:
            self.restarts, self.drained = 0, self.drained + 1
        else:
            self.restarts += 1
        return self.restarts < self.limit and self.drained <= self.limit
