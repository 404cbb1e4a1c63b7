"""What faults cost a job: restarts, delays and ends by the controllers' counting and the manifests' numbers."""

import json

import pytest

from k8s.manifest import KINDS, Request, load, render, set_restarts
from tests.k8s import simulation
from tests.k8s.controllers import DRAINED, GAVE_UP, Job, MPIJob, PyTorchJob, give_up, pulled_at

NODES = 8
ALL = range(NODES)


def spec_of(kind, nodes=NODES):
    documents = render(Request(kind, simulation.recipe_for(kind), "mine", nodes=nodes))
    return next(one for one in documents if one["kind"] != "Service")["spec"]


def job_of(kind, nodes=NODES):
    """Return the Job that results from the kind; JobSet and trainer create one from the template's spec."""
    spec = spec_of(kind, nodes)
    if kind == "jobset":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    elif kind == "trainjob":
        spec = spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"] | {"completions": nodes}
    return Job(spec)


JOBS = ["indexed-job", "jobset", "trainjob"]


@pytest.mark.parametrize("kind", JOBS)
def test_a_drain_of_many_nodes_costs_no_more_than_one_of_two(kind):
    """All pods end with 143, the drained one with a disruption; new pods start after 10, then 20, then 40 s."""
    job = job_of(kind)
    for expected in (10, 20, 40):
        assert set(job.fail(dict.fromkeys(ALL[1:], 143) | {0: DRAINED}).values()) == {expected}
    for _ in range(20):
        job.fail(dict.fromkeys(ALL, 143))
    assert job.failed == "", "stops are not counted"


@pytest.mark.parametrize("nodes", [2, NODES])
def test_a_failing_rank_is_started_again_three_times(nodes):
    job = job_of("indexed-job", nodes)
    assert [set(job.fail(dict.fromkeys(range(nodes), 1)).values()) for _ in range(4)] == [{10}, {20}, {40}, set()]
    assert job.failed == "MaxFailedIndexesExceeded"


@pytest.mark.parametrize(("nodes", "gpus", "restarts"), [(2, 8, 3), (26, 8, 3), (27, 8, 4), (1024, 8, 118)])
def test_large_jobs_may_restart_as_often_as_they_are_expected_to_fail_in_30_days(nodes, gpus, restarts):
    """419 unexpected stops of 16,384 GPUs in 54 days are one per 50,000 GPU hours."""

    def spec_for(kind):
        documents = render(Request(kind, simulation.recipe_for(kind), "mine", nodes=nodes, gpus=gpus))
        return documents[0]["spec"]["template"]["spec"] if kind == "trainjob" else documents[-1]["spec"]

    assert spec_for("indexed-job")["backoffLimitPerIndex"] == restarts
    for kind in ("jobset", "trainjob"):
        spec = spec_for(kind)
        assert spec["failurePolicy"]["maxRestarts"] == restarts
        assert spec["replicatedJobs"][0]["template"]["spec"]["backoffLimitPerIndex"] == 0
    assert spec_for("pytorchjob")["runPolicy"]["backoffLimit"] == restarts * nodes + 1
    assert spec_for("mpijob")["runPolicy"]["backoffLimit"] == restarts + 1
    assert spec_for("pytorchjob-elastic")["elasticPolicy"]["maxRestarts"] == 100
    assert spec_for("doctor")["backoffLimit"] == 0


@pytest.mark.parametrize("kind", ["indexed-job", "trainjob"])
def test_a_large_job_may_have_its_gpus_from_the_file(monkeypatch, kind):
    content = json.dumps(load(f"{kind}.yaml"))
    assert '"nvidia.com/gpu": 1' in content
    edited = content.replace('"nvidia.com/gpu": 1', '"nvidia.com/gpu": 8')
    monkeypatch.setattr("k8s.manifest.load", lambda name: json.loads(edited))
    rendered = json.dumps(render(Request(kind, "ddp", "mine", nodes=1024)))
    limit = {"indexed-job": "backoffLimitPerIndex", "trainjob": "maxRestarts"}[kind]
    assert f'"{limit}": 118' in rendered


def test_an_edited_limit_of_restarts_stays():
    documents = load("jobset.yaml")
    documents[-1]["spec"]["failurePolicy"]["maxRestarts"] = 1
    set_restarts(118, documents)
    assert documents[-1]["spec"]["failurePolicy"]["maxRestarts"] == 1


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_failing_rank_hands_the_job_to_its_jobset_at_once(kind):
    job = job_of(kind)
    assert job.fail({3: 1}) == {}
    assert job.failed == "MaxFailedIndexesExceeded", "no reason of the rule that ends the JobSet"
    spec = spec_of(kind) if kind == "jobset" else spec_of(kind)["template"]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 3


@pytest.mark.parametrize("kind", JOBS)
def test_a_refusal_ends_the_job(kind):
    job = job_of(kind)
    assert job.fail({5: 2}) == {}
    assert job.failed == "PodFailurePolicy"


@pytest.mark.parametrize("nodes", [1, 2, NODES])
def test_all_containers_of_a_pytorchjob_start_again_three_times(nodes):
    job = PyTorchJob(spec_of("pytorchjob", nodes))
    assert [job.fail(dict.fromkeys(range(nodes), 1)) for _ in range(3)] == [True] * 3
    assert job.fail({0: 1}) is False


def test_a_pytorchjob_has_no_part_of_the_operators_in_its_pods():
    """With a Master, Workers get an init container (pkg/controller.v1/pytorch/initcontainer.go).

    The restricted standard refuses it, and its restarts would count.
    """
    for kind in ("pytorchjob", "pytorchjob-elastic"):
        assert spec_of(kind)["pytorchReplicaSpecs"].keys() == {"Worker"}


def test_stops_of_a_pytorchjob_count():
    """Exit status 143 counts like any other, as k8s/README.md says."""
    job = PyTorchJob(spec_of("pytorchjob"))
    drains = [job.fail(dict.fromkeys(ALL[1:], 143) | {0: DRAINED}) for _ in range(4)]
    assert drains == [True, True, True, False]


def test_drains_of_an_elastic_job_do_not_count_and_failures_of_its_pods_do():
    """The others go on without the drained node; the agent counts failures of the ranks (MAX_RESTARTS)."""
    job = PyTorchJob(spec_of("pytorchjob-elastic", 2))
    assert all(job.fail({drain % 2: DRAINED}) for drain in range(20))
    assert [job.fail({0: 1}) for _ in range(13)] == [True] * 12 + [False]


@pytest.mark.parametrize("status", [1, 143])
def test_an_mpijobs_launcher_starts_again_three_times(status):
    """It also restarts after a stop of its workers, as k8s/README.md says."""
    job = MPIJob(spec_of("mpijob"))
    assert [job.fail(status) for _ in range(4)] == [True] * 3 + [False]
    job = MPIJob(spec_of("mpijob"))
    assert [job.fail(DRAINED) for _ in range(5)] == [True] * 4 + [False]
    assert not job.fail(status)


# ---- nodes that start late


@pytest.mark.parametrize(
    ("image_at_s", "expected"), [(0, 0), (5, 10), (30, 30), (60, 70), (300, 310), (600, 610), (620, 910)]
)
def test_an_image_that_comes_late_is_pulled_by_the_kubelets_back_off(image_at_s, expected):
    assert pulled_at(image_at_s) == expected


def bound_of(kind):
    """Return how long the pods of a kind's file wait for their head; the bound is the same for all."""
    envs = [pod.env for pod in simulation.pods(kind, load(f"{kind}.yaml"))]
    [bound_s] = {int(env["RDZV_TIMEOUT_S"]) for env in envs if "RDZV_TIMEOUT_S" in env}
    return bound_s


WITH_HEAD = [kind for kind in KINDS if kind != "mpijob"]


@pytest.mark.parametrize("kind", WITH_HEAD)
@pytest.mark.parametrize("late", ["head", "worker", "all"])
def test_a_node_that_starts_late_costs_no_restart(kind, late):
    """The registry is away for up to 10 minutes (the doctor: 2), for the head's pod, another, or all pods."""
    outage_s = pulled_at(120 if kind == "doctor" else 600)
    started = {"head": [outage_s, 0, 0], "worker": [0, outage_s, 0], "all": [outage_s, outage_s - 60, 10]}[late]
    assert give_up(started, bound_of(kind)) == {}


@pytest.mark.parametrize("kind", WITH_HEAD)
def test_a_head_that_never_starts_is_waited_for_four_times_at_most(kind):
    """The others hold their GPUs for at most four times RDZV_TIMEOUT_S."""
    gave_up = give_up([10**6, *[0] * (NODES - 1)], bound_of(kind))
    assert gave_up == dict.fromkeys(ALL[1:], GAVE_UP)
    if kind == "indexed-job":
        job = job_of(kind)
        assert [set(job.fail(gave_up).values()) for _ in range(4)] == [{10}, {20}, {40}, set()]
        assert job.failed == "MaxFailedIndexesExceeded"
    elif kind in JOBS:  # its JobSet restarts all pods three times: the head's pod may fit in another place
        job = job_of(kind)
        assert job.fail(gave_up) == {}
        assert job.failed == "MaxFailedIndexesExceeded"
    elif kind == "doctor":
        spec = spec_of(kind)
        assert spec["backoffLimit"] == 0, "the first failure ends it"
        assert bound_of(kind) < spec["activeDeadlineSeconds"], "it says which node is missing before it is ended"
    else:
        job = PyTorchJob(spec_of(kind, NODES))
        rounds = [job.fail(gave_up) for _ in range(4)]
        assert rounds == [True] * 3 + [False]


def test_a_head_that_is_later_than_one_wait_costs_one_restart_of_the_others():
    """The registry is away for 20 minutes: the second pods of the others meet the head."""
    bound_s, head_s = bound_of("indexed-job"), pulled_at(1200)
    job, started = job_of("indexed-job"), [head_s, *[0] * (NODES - 1)]
    gave_up = give_up(started, bound_s)
    delays = job.fail(gave_up)
    again = [head_s, *(bound_s + delays[node] for node in ALL[1:])]
    assert give_up(again, bound_s) == {}
    assert job.counted == [0, *[1] * (NODES - 1)]


def test_an_mpijobs_launcher_comes_once_all_workers_are_there():
    """However late images are: its Job is made once all workers are ready, and sshd waits for it without bound.

    pkg/controller/mpi_job_controller.go, syncHandler.
    """
    assert spec_of("mpijob")["launcherCreationPolicy"] == "WaitForWorkersReady"


def test_every_kind_is_simulated_or_counted_elsewhere():
    assert {*JOBS, "pytorchjob", "pytorchjob-elastic", "mpijob", "doctor"} == set(KINDS)
