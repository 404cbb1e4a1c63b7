"""Count failures and delay new pods as the controllers do: what a fault costs a job, without a cluster.

Each class holds the rules of one controller, with the lines that they were read from. It is given the manifest's
own numbers and policies, and driven by exit statuses. The controllers themselves are not run.
"""

from __future__ import annotations

from typing import Any

from recipes.common.process.meeting import MissingNodeError

DRAINED = "DisruptionTarget"
"""In place of an exit status: the pod was evicted, preempted or lost with its machine."""


GAVE_UP = MissingNodeError.status
"""That of a node that waited RDZV_TIMEOUT_S for the head or its name."""


def pulled_at(image_at_s: int) -> int:
    """Return when the kubelet has an image that its registry gives only after a while (1.32, ErrImagePull).

    pkg/kubelet/images/image_manager.go, EnsureImageExists: each failed pull doubles the wait before the next one,
    from imageBackOffPeriod, 10 s, to MaxImageBackOff, 300 s (pkg/kubelet/kubelet.go, NewMainKubelet). The pod is
    Pending all that time: it has not failed, and nothing counts. The time of the pull itself is left out.
    """
    now, wait = 0, 10
    while now < image_at_s:
        now, wait = now + wait, min(300, 2 * wait)
    return now


def give_up(started_s: list[int], bound_s: int) -> dict[int, int | str]:
    """Return the nodes that wait in vain for the head, and their status; started_s: when each container starts."""
    return {node: GAVE_UP for node, start in enumerate(started_s) if node > 0 and started_s[0] - start > bound_s}


class Job:
    """The Job controller (Kubernetes 1.32, pkg/controller/job) for an Indexed Job."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.failed = spec, ""
        nodes = spec["completions"]
        self.counted, self.ignored = [0] * nodes, [0] * nodes

    def action(self, status: int | str) -> str:
        """Return what the first matching rule does: pod_failure_policy.go, matchPodFailurePolicy."""
        for rule in self.spec.get("podFailurePolicy", {}).get("rules", []):
            codes = rule.get("onExitCodes", {}).get("values", [])
            conditions = [pattern["type"] for pattern in rule.get("onPodConditions", [])]
            if status in codes or status in conditions:
                return str(rule["action"])
        return "Count"

    def fail(self, statuses: dict[int, int | str]) -> dict[int, int]:
        """Let pods of these indexes fail at once; return the seconds until each has a new pod.

        An empty result means that the job has failed, for the reason in `failed`.
        """
        for index, status in statuses.items():
            action = self.action(status)
            if action == "FailJob":
                self.failed = "PodFailurePolicy"
            elif action == "Ignore":
                self.ignored[index] += 1
            else:
                self.counted[index] += 1
        if "backoffLimitPerIndex" in self.spec:
            # indexed_job_utils.go, isIndexFailed: a counted failure with as many before it as the limit
            lost = sum(count > self.spec["backoffLimitPerIndex"] for count in self.counted)
            # job_controller.go, syncJob; without maxFailedIndexes the other indexes would run on
            if lost > self.spec.get("maxFailedIndexes", len(self.counted)):
                self.failed = self.failed or "MaxFailedIndexesExceeded"
            # backoff_utils.go:199, getRemainingTimePerIndex: the index's own failures, ignored ones too
            delays = {index: wait_s(self.counted[index] + self.ignored[index]) for index in statuses}
        else:
            # job_controller.go, syncJob: exceedsBackoffLimit
            if sum(self.counted) > self.spec["backoffLimit"]:
                self.failed = self.failed or "BackoffLimitExceeded"
            # backoff_utils.go:91, newBackoffRecord: all pods that failed, ignored ones too, since the last success
            delays = dict.fromkeys(statuses, wait_s(sum(self.counted) + sum(self.ignored)))
        return {} if self.failed else delays


def wait_s(failures: int) -> int:
    """Return the Job controller's delay: 10 s, doubled with each failure, 600 s at most (backoff_utils.go:210)."""
    return min(600, 10 * 2 ** (failures - 1)) if failures else 0


class PyTorchJob:
    """The training operator 1.9: containers start again in their pods, and a job counts them all together."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.limit = spec["runPolicy"]["backoffLimit"]
        groups = spec["pytorchReplicaSpecs"]
        assert {group["restartPolicy"] for group in groups.values()} == {"OnFailure"}
        self.restarts = [0] * sum(group["replicas"] for group in groups.values())
        # pkg/controller.v1/pytorch/initcontainer.go: Workers wait for a Master's name in an init container
        self.has_init_container = "Master" in groups

    def fail(self, statuses: dict[int, int | str]) -> bool:
        """Let pods fail, and run again; return whether the job goes on.

        pkg/core/job.go:101-132: the restart counts of all containers of running pods are added up, whatever the
        exit status. The job has failed when the sum reaches the limit, and its pods are deleted. A drained node's
        pod is made anew and counts from 0 (pkg/controller.v1/common/pod.go:350).
        """
        for index, status in statuses.items():
            self.restarts[index] = 0 if status == DRAINED else self.restarts[index] + 1
        return sum(self.restarts) < self.limit


class MPIJob:
    """The MPI operator 0.8: pods of workers stay, and the launcher alone counts."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.waits_for_workers = spec["launcherCreationPolicy"] == "WaitForWorkersReady"
        self.limit, self.restarts, self.drained = spec["runPolicy"]["backoffLimit"], 0, 0
        assert spec["mpiReplicaSpecs"]["Launcher"]["restartPolicy"] == "OnFailure"

    def fail(self, status: int | str) -> bool:
        """Let the launcher fail, and run again; return whether the job goes on.

        pkg/controller/mpi_job_controller.go:1543, newLauncherJob: its Job has the MPIJob's backoffLimit.
        Kubernetes, pastBackoffLimitOnFailure: restarts of its container, whatever the exit status, end the
        Job when they reach the limit. A pod that was drained counts as one that failed (exceedsBackoffLimit), and
        its successor's container from 0.
        """
        if status == DRAINED:
            self.restarts, self.drained = 0, self.drained + 1
        else:
            self.restarts += 1
        return self.restarts < self.limit and self.drained <= self.limit

    def launcher_at(self, workers_s: list[int], late_s: int) -> int:
        """Return when the launcher's container starts, whose image comes so late after its pod was made.

        pkg/controller/mpi_job_controller.go, syncHandler: with that policy the launcher's Job is made once all
        workers are ready, however long that takes. A worker waits in sshd for the launcher without a bound.
        """
        return (max(workers_s) if self.waits_for_workers else 0) + late_s
