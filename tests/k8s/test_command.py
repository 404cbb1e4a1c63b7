"""make k8s and make k8s-delete: a kubectl plays recorded answers, and a real cluster where there is one."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from unittest.mock import Mock

import pytest
import yaml

from k8s import apply
from k8s.apply import job_state
from k8s.manifest import KINDS, load, pod_templates
from recipes.common.errors import UserError
from tests.conftest import require
from tests.k8s import simulation
from tests.support import ROOT, Command, Result, run_command, wait_until, write_program

RESULT = "result recipe=ddp world_size=2 test_accuracy=0.9806 samples_per_s=15686\n"
NO_EVENTS = [{"out": {"items": []}}]
RUNNING, SUCCESS = {"running": {"startedAt": "now"}}, {"terminated": {"exitCode": 0}}


def waiting(reason, message=""):
    return {"waiting": {"reason": reason, "message": message}}


def pod(state=None, index=0, restarts=0, labels=None, conditions=(), uid=None):
    """Return a pod as the API server shows it."""
    name = f"ddp-{index}-abcde"
    statuses = [{"name": "trainer", "image": "r/ddp:1", "restartCount": restarts, "state": state}] if state else []
    labels = labels or {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": name, "uid": uid or f"uid-{index}", "labels": labels, "creationTimestamp": f"{restarts}"}
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {"containerStatuses": statuses, "conditions": list(conditions)},
    }


def job(*conditions):
    shown = [{"type": one, "status": "True", "message": "why"} for one in conditions]
    return {"out": {"status": {"conditions": shown}}}


def pods(*items):
    return {"out": {"items": list(items)}}


def stand_in(folder, answers):
    """Write the answers of a stand-in for kubectl; return the variables with which it is used."""
    (folder / "play.json").write_text(json.dumps(answers))
    files = {"STAND_IN_PLAY": str(folder / "play.json"), "STAND_IN_CALLS": str(folder / "calls.jsonl")}
    script = f'exec "{sys.executable}" -IS "{ROOT}/tests/k8s/kubectl.py" "$@"'
    kubectl = write_program(folder / "kubectl", script)
    return {"KUBECTL": str(kubectl), **files}


def calls(folder):
    """Return the calls that the stand-in has got."""
    path = folder / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(folder, answers, *argv):
    """Start the command against recorded answers."""
    own = stand_in(folder, answers)
    return Command(sys.executable, "-m", "k8s.apply", *argv, **own, K8S_POLL_S="0.02")


@pytest.fixture
def run(monkeypatch, capfd):
    """Return a function that runs the command in this process, where there is no kubectl."""
    monkeypatch.setenv("KUBECTL", "no-such-kubectl")
    return lambda *argv: Result(apply.main(argv), *capfd.readouterr())


@pytest.fixture
def play(run, tmp_path, monkeypatch):
    """Return a function that runs it against recorded answers."""
    monkeypatch.setattr(apply, "POLL_S", 0.02)
    monkeypatch.setattr(apply, "LONG_POLL_S", 0.1)

    def played(answers, *argv):
        for name, value in stand_in(tmp_path, answers).items():
            monkeypatch.setenv(name, value)
        return run(*argv)

    return played


def success():
    return {
        "create": [{"out": "job.batch/ddp created\n"}],
        "get jobs.batch ddp": [job(), job(), job(), job("Complete")],
        "get pods": [
            pods(),
            pods(pod(waiting("ContainerCreating")), pod(index=1)),
            pods(pod(RUNNING), pod(RUNNING, 1)),
            pods(pod(SUCCESS), pod(SUCCESS, 1)),
        ],
        "get events": NO_EVENTS,
        "logs": [{"out": f"run runs/ddp\n{RESULT}", "sleep_s": 0.1}],
    }


def test_a_run_ends_with_its_result_line(tmp_path):
    words = ("ddp", "--nodes", "2", "--namespace", "team", "--", "--epochs", "3")
    result = start(tmp_path, success(), *words).wait()
    assert (result.status, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "job ddp: ddp on 2 nodes as Job"
    assert lines[1].startswith("waiting, 900 s at most: 0 of 2 pods are there")
    assert lines[-1] + "\n" == RESULT
    assert all(call["argv"][0] == "--namespace=team" for call in calls(tmp_path))
    applied = list(yaml.safe_load_all(calls(tmp_path)[0]["stdin"]))
    assert [document["kind"] for document in applied] == ["Service", "Job"]
    args = applied[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[-2:] == ["--epochs", "3"]
    logs = next(call["argv"] for call in calls(tmp_path) if "logs" in call["argv"])
    assert logs[1:] == ["logs", "--follow", "ddp-0-abcde", "--container=trainer"]


def test_a_job_that_has_ended_before_the_first_look_shows_its_log(play):
    ended = {"get jobs.batch ddp": [job("Complete")], "get pods": [pods(pod(SUCCESS), pod(SUCCESS, 1))]}
    result = play(success() | ended, "ddp")
    assert (result.status, result.stdout.splitlines()[-1] + "\n") == (0, RESULT)


def test_a_failed_job_ends_with_the_status_of_node_0(play):
    answers = success()
    answers["get jobs.batch ddp"][-1] = job("Failed")
    answers["get pods"][-1] = pods(pod({"terminated": {"exitCode": 2}}))
    result = play(answers, "ddp")
    assert (result.status, result.errors) == (2, ["error: the job ddp has failed: why"])


def test_a_pod_that_starts_again_is_followed_again(play, tmp_path):
    answers = success()
    stopped, second = pod({"terminated": {"exitCode": 143}}), pod(RUNNING, restarts=1)
    ended = pod(SUCCESS, restarts=1)
    answers["get jobs.batch ddp"] = [job()] * 6 + [job("Complete")]
    answers["get pods"] = [pods(pod(RUNNING)), *[pods(stopped)] * 2, pods(second), pods(ended)]
    answers["logs"] = [{"out": "stopped\n"}, {"out": RESULT}]
    result = play(answers, "ddp")
    assert result.status == 0, result.stderr
    assert "stopped\n" in result.stdout
    assert result.stdout.endswith(RESULT)
    assert sum("logs" in call["argv"] for call in calls(tmp_path)) == 2


NO_PLACE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
GPUS_GONE = {**NO_PLACE, "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}
NO_CLAIM = {**NO_PLACE, "message": 'persistentvolumeclaim "cluster-recipes-runs" not found'}
CONFIG_GONE = waiting("CreateContainerConfigError", 'configmap "cluster-recipes" not found')
ONCE = "; kubectl apply -f k8s/cluster.yaml makes it, once for a namespace"
REMOVES = "; make k8s-delete NAME=ddp removes the job"
NO_IMAGE = "; make it (docker/), push it, name it by IMAGE=; a private registry requires an imagePullSecret"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (pod(waiting("ImagePullBackOff", 'Back-off pulling image "r/ddp:1": ErrImagePull: r/ddp:1: not found')),
            f"ddp-0-abcde cannot get the image r/ddp:1 (ImagePullBackOff){NO_IMAGE}{REMOVES}"),
        (pod(waiting("ErrImagePull", "manifest for r/ddp:1 not found"), index=1),
            f"ddp-1-abcde cannot get the image r/ddp:1 (ErrImagePull){NO_IMAGE}{REMOVES}"),
        (pod(CONFIG_GONE), f'ddp-0-abcde: configmap "cluster-recipes" not found{ONCE}{REMOVES}'),
        (pod(conditions=[NO_CLAIM]),
            'ddp-0-abcde cannot be scheduled: persistentvolumeclaim "cluster-recipes-runs" '
            f"not found{ONCE}{REMOVES}"),
        (pod(conditions=[GPUS_GONE]),
            "ddp-0-abcde cannot be scheduled: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.; "
            f"wait for other jobs, or ask for fewer NODES or GPUS; GPUS=0 needs none{REMOVES}"),
        (pod(waiting("ContainerCreating")), f"node 0 has not started within 1 s (1 of 2 pods are there){REMOVES}"),
    ],
)  # fmt: skip
def test_a_pod_that_cannot_start_is_one_line(play, found, expected):
    answers = {"create": [{}], "get jobs.batch ddp": [job()], "get pods": [pods(found)], "get events": NO_EVENTS}
    result = play(answers, "ddp", "--start-timeout-s", "1")
    assert (result.status, result.stderr) == (2, f"error: {expected}\n")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ('pods "ddp-0" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, limited: 8',
            "wait for other jobs, ask for fewer NODES or GPUS, or for a larger quota"),
        ('pods "ddp-0" is forbidden: violates PodSecurity "restricted:latest": ...',
            "remove that field, or use a namespace of a weaker standard"),
        ('pods "ddp-0" is forbidden: failed quota: all: must specify limits.cpu for: trainer',
            "set these in the manifest's limits or requests, or defaults by a LimitRange"),
        ('pods "ddp-0" is forbidden: unable to validate against any security context constraint: ...',
            "OpenShift: oc adm policy add-scc-to-user nonroot-v2 -z default"),
    ],
)  # fmt: skip
def test_pods_that_are_not_made_are_one_line(play, message, expected):
    first, third = "2026-01-01T00:00:00Z", "2026-01-01T00:00:02Z"
    old = {"involvedObject": {"name": "ddp"}, "message": "exceeded quota: old", "lastTimestamp": first}
    new = {"involvedObject": {"name": "ddp"}, "message": message, "lastTimestamp": third}
    events = {"items": [{**new, "involvedObject": {"name": "other"}, "message": "exceeded quota"}, old, new]}
    created = {"out": {"metadata": {"creationTimestamp": "2026-01-01T00:00:01Z"}}}
    answers = {"create": [{}], "get jobs.batch ddp": [created], "get pods": [pods()]}
    result = play(answers | {"get events": [{"out": events}]}, "ddp")
    assert (result.status, result.stderr) == (2, f"error: {message}; {expected}{REMOVES}\n")


def test_an_event_of_a_job_of_a_similar_name_is_not_its_own():
    for kind, owner in (("jobset", "ddp-node-0"), ("mpijob", "ddp-launcher"), ("pytorchjob", "ddp")):
        event = {"involvedObject": {"name": owner}, "message": "pods is forbidden: exceeded quota: gpus"}
        assert apply.created_problem([event], "ddp", ""), kind
    event["involvedObject"]["name"] = "ddp-large"
    assert apply.created_problem([event], "ddp", "") is None


def test_an_event_of_the_second_in_which_the_job_was_created_is_its_own():
    event = {"involvedObject": {"name": "ddp"}, "message": "exceeded quota", "lastTimestamp": None}
    event["eventTime"] = "2026-01-01T00:00:01.250000Z"
    assert apply.created_problem([event], "ddp", "2026-01-01T00:00:01Z") is not None
    assert apply.created_problem([event], "ddp", "2026-01-01T00:00:02Z") is None


def test_a_user_who_may_not_read_events_follows_a_job(play, tmp_path):
    refused = {"err": "Error from server (Forbidden): events is forbidden: no right to list\n", "status": 1}
    result = play({**success(), "get events": [refused]}, "ddp", "--nodes", "2")
    assert (result.status, result.stderr) == (0, "")
    assert any("events" in call["argv"] for call in calls(tmp_path))
    assert "does not answer" not in result.stdout


def test_a_fault_of_another_pod_ends_the_wait_of_the_first(play):
    gone = pod(waiting("ErrImagePull", "r/ddp:1: not found"), 1)
    answers = {"get jobs.batch ddp": [job()], "get pods": [pods(pod(RUNNING)), pods(pod(RUNNING), gone)]}
    result = play(success() | answers | {"logs": [{"out": "node 0 waits\n", "sleep_s": 600}]}, "ddp")
    assert result.status == 2
    assert result.errors[0].startswith("error: ddp-1-abcde cannot get the image")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('error: resource mapping not found for name: "ddp" namespace: "" from "STDIN": no matches for kind '
            '"PyTorchJob" in version "kubeflow.org/v1"\nensure CRDs are installed first\n',
            "the cluster does not know PyTorchJob: the Kubeflow training operator is not installed "
            "(k8s/README.md says how); KIND=indexed-job needs none"),
        ('Error from server (AlreadyExists): error when creating "STDIN": pytorchjobs "ddp" already exists\n',
            'pytorchjobs "ddp" already exists; make k8s-delete NAME=ddp, or choose another NAME='),
        ("The connection to the server localhost:8080 was refused - did you specify the right host or port?\n",
            "kubectl reaches no cluster (The connection to the server localhost:8080 was refused - did you "
            "specify the right host or port?); set KUBECONFIG"),
        ("Error from server (Forbidden): exceeded quota: jobs, requested: count=1, used: count=9\n",
            "the cluster refuses the job: (Forbidden): exceeded quota: jobs, requested: count=1, used: count=9; "
            "wait for other jobs, ask for fewer NODES or GPUS, or for a larger quota"),
    ],
)  # fmt: skip
def test_a_job_that_is_not_taken_is_one_line(play, said, expected):
    result = play({"create": [{"err": said, "status": 1}], "delete": [{}]}, "ddp", "--kind", "pytorchjob")
    assert (result.status, result.stderr) == (2, f"error: {expected}\n")


EXISTS = 'Error from server (AlreadyExists): error when creating "STDIN": {} "ddp" already exists\n'
BOTH_EXIST = EXISTS.format("services") + EXISTS.format("jobs.batch")
OR_RENAME = "already exists; make k8s-delete NAME=ddp, or choose another NAME="
NO_WEBHOOK = (
    'Error from server (InternalError): error when creating "STDIN": Internal error occurred: '
    'failed calling webhook "policy": connect: connection refused\n'
)


IS_DELETED = "; what it had created is deleted"


@pytest.mark.parametrize(
    ("created", "said", "expected"),
    [
        ("job.batch/ddp", EXISTS.format("services"), f'services "ddp" {OR_RENAME}'),
        ("service/ddp", EXISTS.format("jobs.batch"), f'jobs.batch "ddp" {OR_RENAME}'),
        ("", BOTH_EXIST, f'services "ddp", jobs.batch "ddp" {OR_RENAME}'),
        ("service/ddp", "Error from server (Forbidden): no\n", "the cluster refuses the job: (Forbidden): no"),
        ("service/ddp", NO_WEBHOOK, f"the cluster refuses the job: {NO_WEBHOOK.strip()[18:]}"),
    ],
    ids=["job", "service", "nothing", "forbidden", "webhook"],
)
def test_a_half_of_a_job_is_taken_back_and_nothing_else(play, tmp_path, created, said, expected):
    """Objects are found by this call's label; an earlier job of the same name has none, or another."""
    done, undone = (f"{created} {verb}\n" if created else "" for verb in ("created", "deleted"))
    answers = {"create": [{"out": done, "err": said, "status": 1}], "delete": [{"out": undone}]}
    result = play(answers, "ddp", "--namespace", "team")
    expected = expected.replace("NAME=ddp,", "NAME=ddp NAMESPACE=team,") + (IS_DELETED if created else "")
    assert (result.status, result.stderr) == (2, f"error: {expected}\n")
    made = yaml.safe_load_all(calls(tmp_path)[0]["stdin"])
    [attempt] = {one["metadata"]["labels"]["cluster-recipes/attempt"] for one in made}
    deleted = [call["argv"][2:] for call in calls(tmp_path) if "delete" in call["argv"]]
    options = [f"--selector=cluster-recipes/attempt={attempt}", "--ignore-not-found", "--wait=false"]
    assert deleted == [["Service", *options], ["Job.v1.batch", *options]]


@pytest.mark.parametrize(("cause", "status"), [("no answer", 2), ("Ctrl-C", 130)])
@pytest.mark.parametrize("is_deleted", [True, False])
def test_what_kubectl_had_created_without_an_answer_is_taken_back(monkeypatch, cause, status, is_deleted):
    calls = []

    def run(words, timeout, **_):
        calls.append(words[1])
        if "create" in words and cause == "Ctrl-C":
            raise KeyboardInterrupt
        if "create" in words or not is_deleted:
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, 0, 'job "ddp" deleted', "")

    monkeypatch.setattr(apply.subprocess, "run", run)
    monkeypatch.setenv("KUBECTL", "true")
    request = apply.Request("indexed-job", "ddp", "ddp", nodes=2)
    reason = "interrupted" if cause == "Ctrl-C" else "no answer from the cluster within 60 s to kubectl create"
    left_over = r"; what it may have created has the label cluster-recipes/attempt=a\w{8} \(no answer .* delete\)"
    expected = f"^{reason}{IS_DELETED if is_deleted else left_over}$"
    with pytest.raises(UserError, match=expected) as raised:
        apply.create(apply.Cluster(None), request, apply.render(request))
    assert raised.value.status == status
    assert calls == ["create", "delete", "delete"][: 3 if is_deleted else 2]


@pytest.mark.parametrize(
    ("said", "is_reached"),
    [
        ("Error from server (Timeout): Timeout: request did not complete within requested timeout", True),
        ('Error from server (InternalError): an error on the server ("") has prevented the request', True),
        ("Unable to connect to the server: EOF", True),
        ("Unable to connect to the server: read tcp 10.0.0.9:4711->10.0.0.1:6443: i/o timeout", True),
        ("Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout", False),
        ("Unable to connect to the server: net/http: TLS handshake timeout", False),
        (NO_WEBHOOK.replace("connection refused", "context deadline exceeded"), True),
        (NO_WEBHOOK, True),
        ("Error from server (Forbidden): no", True),
    ],
)
def test_what_a_cluster_may_have_created_is_looked_for(monkeypatch, said, is_reached):
    calls = []

    def run(words, **_):
        calls.append(words[1])
        return subprocess.CompletedProcess(words, int("create" in words), "", said + "\n")

    monkeypatch.setattr(apply.subprocess, "run", run)
    monkeypatch.setenv("KUBECTL", "true")
    request = apply.Request("indexed-job", "ddp", "ddp", nodes=2)
    with pytest.raises(UserError, match="refuses the job" if is_reached else "reaches no cluster"):
        apply.create(apply.Cluster(None), request, apply.render(request))
    assert calls == ["create", "delete", "delete"][: 1 + 2 * is_reached]


def test_ctrl_c_before_the_job_is_made_has_no_traceback(monkeypatch):
    monkeypatch.setattr(apply, "render", Mock(side_effect=KeyboardInterrupt))
    assert apply.main(["ddp"]) == 130


def test_ctrl_c_leaves_the_job(tmp_path):
    running = {"get jobs.batch ddp": [job()], "get pods": [pods(pod(RUNNING))], "logs": [{"sleep_s": 60}]}
    command = start(tmp_path, success() | running, "ddp", "--namespace=team")

    def is_followed():
        """A later call shows that the command knows its kubectl, which in a terminal gets the signal itself."""
        asked = ["logs" in call["argv"] for call in calls(tmp_path)]
        return any(asked) and not asked[-1]

    wait_until(is_followed, 20, "a call after kubectl logs")
    command.process.send_signal(signal.SIGINT)
    result = command.wait()
    assert result.status == 130
    assert result.stderr.endswith("the job continues; make k8s-delete NAME=ddp NAMESPACE=team ends it\n")
    assert not any("delete" in call["argv"] for call in calls(tmp_path))


JOB_GONE, SERVICE_GONE = 'job.batch "mine" deleted\n', 'service "mine" deleted\n'
FORBIDDEN = 'Error from server (Forbidden): jobsets.jobset.x-k8s.io is forbidden: User "me" cannot list\n'
NO_POLICIES = FORBIDDEN.replace("jobsets.jobset.x-k8s.io", "networkpolicies.networking.k8s.io")


def test_delete_takes_all_kinds_and_no_volume(play, tmp_path):
    unknown = {"err": 'error: the server doesn\'t have a resource type "pytorchjobs"\n', "status": 1}
    answers = {"delete jobs.batch": [{"out": JOB_GONE}], "delete services": [{"out": SERVICE_GONE}]}
    result = play({**answers, "delete": [unknown]}, "--delete", "mine")
    assert (result.status, result.stdout, result.stderr) == (0, JOB_GONE + SERVICE_GONE, "")
    deleted = [call["argv"] for call in calls(tmp_path)]
    assert {kind.resource for kind in KINDS.values()} < {argv[1] for argv in deleted}
    assert not any("volume" in word for argv in deleted for word in argv)
    assert all("app.kubernetes.io/instance=mine" in argv[2] for argv in deleted)


@pytest.mark.parametrize(
    ("deleted", "refused", "expected"),
    [
        # A Role that allows only jobs and services: the user cannot list NetworkPolicies, nor have created one.
        ({"services": SERVICE_GONE}, {"networkpolicies": NO_POLICIES}, (0, SERVICE_GONE, "")),
        # A Role that allows only what Kubernetes itself has.
        ({"jobs.batch": JOB_GONE, "services": SERVICE_GONE}, {"": FORBIDDEN}, (0, JOB_GONE + SERVICE_GONE, "")),
        # Nothing found: it may be of the kind that was refused.
        ({}, {"jobsets": FORBIDDEN}, (2, "", f"error: kubectl delete jobsets.jobset.x-k8s.io: {FORBIDDEN[18:]}")),
        ({}, {}, (2, "", "error: there is no job named mine in this namespace\n")),
        ({}, {"networkpolicies": NO_POLICIES}, (2, "", "error: there is no job named mine in this namespace\n")),
    ],
)
def test_delete_needs_no_right_to_what_the_job_has_not(play, deleted, refused, expected):
    answers = {f"delete {kind}": [{"out": said}] for kind, said in deleted.items()}
    answers |= {f"delete {kind}".strip(): [{"err": said, "status": 1}] for kind, said in refused.items()}
    result = play({**answers, "delete": answers.get("delete", [{}])}, "--delete", "mine")
    assert (result.status, result.stdout, result.stderr) == expected


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["dpp"], "RECIPE: invalid choice 'dpp'; did you mean 'ddp'? (choose from apex, "),
        (["ddp", "--kind", "pytorch"], "KIND: invalid choice 'pytorch'; did you mean 'pytorchjob'?"),
        (["ddp", "--nodes", "0"], "NODES expects a whole number from 1 to 1024, got '0'"),
        (["ddp", "--gpus", "two"], "GPUS expects a whole number from 0 to 1024, got 'two'"),
        (["ddp", "--fabric", "wifi"], "FABRIC: invalid choice 'wifi' (choose from auto, ib, roce, efa, tcp)"),
        (["ddp", "--name", "My_Job"], "NAME expects at most 40 small letters, digits and '-', the first a letter"),
        (["ddp", "--kind", "mpijob"], "KIND=mpijob runs horovod, not ddp"),
        (["ddp", "--kind", "doctor"], "KIND=doctor runs probe, not ddp; KIND=indexed-job runs every recipe"),
        (["single", "--kind", "pytorchjob-elastic"], "single cannot be elastic; use KIND=indexed-job"),
        (["single", "--nodes", "2"], "single is one process; NODES=1, or RECIPE=ddp"),
        (["ddp", "--", "--epoch=3"], "unknown option --epoch; did you mean '--epochs'?"),
        (["ddp", "--kind", "trainjob", "--render", "--", "--lr", "0"], "--lr: expects a number above 0, got '0'"),
        (["horovod", "--kind", "mpijob", "--", "--resume"], "--resume: expected one argument"),
        (["probe", "--", "--quik"], "unknown option --quik; did you mean '--quick'?"),
        (["tensor", "--nodes", "3", "--gpus", "1"], "--tensor-parallel 2 does not divide 3 processes; start"),
    ],
)
def test_bad_input_is_refused_before_anything_is_asked(run, argv, words):
    assert words in run(*argv).refusal


@pytest.mark.parametrize(
    ("options", "script"),
    [(["--config=/data/of-the-volume.yaml", "--shuffle-block=8"], ""), (["--out={run_dir}"], "/data/train.py")],
)
def test_options_that_only_the_pods_can_check_are_left_to_them(run, monkeypatch, options, script):
    monkeypatch.setenv("SCRIPT", script)
    result = run("--render", "ddp", "--", *options)
    assert (result.status, result.stderr) == (0, "")


def test_without_kubectl(run):
    expected = "error: no-such-kubectl not found; install kubectl, or set KUBECTL to its path"
    assert run("ddp").refusal == expected


def test_a_kubectl_that_is_none_is_one_line(tmp_path, monkeypatch):
    kubectl = write_program(tmp_path / "kubectl", "echo is installed first")
    monkeypatch.setenv("KUBECTL", str(kubectl))
    with pytest.raises(UserError) as raised:
        apply.Cluster(None).get("pods")
    assert str(raised.value) == "kubectl get pods printed no JSON: is installed first"
    kubectl.write_text("of another machine")
    with pytest.raises(UserError) as raised:
        apply.Cluster(None).get("pods")
    assert str(raised.value) == f"cannot run {kubectl}: Exec format error"


def test_render_prints_what_would_be_created(run):
    own = ["--kind", "jobset", "--nodes", "3", "--gpus", "8", "--name", "mine", "--render"]
    result = run("scratch", *own, "--", "--lr=1")
    assert (result.status, result.stderr) == (0, "")
    (jobset,) = yaml.safe_load_all(result.stdout)
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    assert (jobset["metadata"]["name"], spec["completions"], spec["parallelism"]) == ("mine", 3, 3)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    fixed = ["--name=mine", "--resume=auto", "--runs-dir=/runs", "--data-dir=/data", "--device=cuda"]
    assert container["args"] == ["scratch", *fixed, "--lr=1"]
    assert {"name": "MASTER_ADDR", "value": "mine-node-0-0.mine"} in container["env"]


BUSY = [
    waiting("ErrImagePull", "failed to pull and unpack image: toomanyrequests"),
    waiting("ImagePullBackOff", 'Back-off pulling image "r/ddp:1"'),
    waiting("CreateContainerConfigError", "failed to sync configmap cache: timed out waiting for the condition"),
    waiting("CreateContainerError", "context deadline exceeded"),
]
GONE = [
    waiting("ErrImagePull", "r/ddp:1: not found"),
    waiting("InvalidImageName"),
    waiting("CreateContainerConfigError", 'configmap "cluster-recipes" not found'),
]


@pytest.fixture
def now(monkeypatch):
    """Time as the tested module reads it: its only entry, in seconds, which tests set."""
    time_s = [0.0]
    monkeypatch.setattr(apply.time, "monotonic", lambda: time_s[0])
    return time_s


def watch(monkeypatch, *answers, kind="indexed-job"):
    """Return a Watch of a job whose cluster gives these answers, one per call."""
    left = list(answers)
    cluster = types.SimpleNamespace(get=lambda *words: left.pop(0))
    monkeypatch.setattr(apply.time, "sleep", lambda _: None)
    return apply.Watch(cluster, apply.Request(kind, "ddp", "ddp", nodes=2), 900)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "doctor"])
def test_each_kind_has_its_own_head(monkeypatch, kind):
    """The labels that the kind's controller sets identify the head."""
    made = simulation.pods(kind, load(f"{kind}.yaml"))
    found = [pod(RUNNING, number, labels=one.labels) for number, one in enumerate(made)]
    assert watch(monkeypatch, kind=kind).head(found[::-1])["metadata"]["name"] == "ddp-0-abcde"


@pytest.mark.parametrize("state", BUSY)
def test_what_the_kubelet_tries_again_is_waited_for_a_while(monkeypatch, now, state):
    watching = watch(monkeypatch)
    for now[0] in (0, 60, 119):
        assert "ddp-0-abcde" in watching.check_pods([pod(state)], is_late=False)
    now[0] = 130
    watching.check_pods([pod(RUNNING)], is_late=False)
    watching.check_pods([pod(state)], is_late=False)  # it waits again: another 120 s
    now[0] = 251
    with pytest.raises(UserError, match="ddp-0-abcde"):
        watching.check_pods([pod(state)], is_late=False)


@pytest.mark.parametrize("state", GONE)
def test_what_is_not_there_is_final_at_once(monkeypatch, state):
    found = pod(state)
    with pytest.raises(UserError, match="ddp-0-abcde"):
        watch(monkeypatch).check_pods([found])
    found["status"]["initContainerStatuses"] = found["status"].pop("containerStatuses")
    with pytest.raises(UserError, match="ddp-0-abcde"):
        watch(monkeypatch).check_pods([found])


def test_an_image_that_nobody_has_named_is_none(monkeypatch):
    found = pod(waiting("ErrImagePull", "dial tcp: lookup registry.invalid: no such host"))
    found["status"]["containerStatuses"][0]["image"] = f"{apply.PLACEHOLDER}ddp:1"
    with pytest.raises(UserError, match="name it by IMAGE="):
        watch(monkeypatch).check_pods([found])


def test_a_job_in_a_queue_is_waited_for_without_a_bound(monkeypatch, now, capsys):
    """30 min in Kueue's queue do not count: the 900 s for node 0 begin when the job is admitted."""
    queued = [answer for _ in range(30) for answer in (job("Suspended")["out"], pods()["out"])]
    admitted = [job()["out"], pods(pod(waiting("ContainerCreating")), pod(index=1))["out"]]
    watching = watch(monkeypatch, *queued, *admitted * 2)
    for now[0] in range(0, 1800, 60):
        assert watching.step() is None
    assert capsys.readouterr().out == "the job ddp is suspended: it waits in its queue (Ctrl-C leaves it there)\n"
    now[0] += 899
    assert watching.step() is None
    now[0] += 2
    with pytest.raises(UserError, match=r"node 0 has not started within 900 s \(2 of 2 pods are there\)"):
        watching.step()


def test_while_a_log_grows_its_end_is_waited_for():
    """A list of all pods each 2 s is much for a cluster of thousands; the end of the log tells what matters."""
    log = apply.FollowedLog.__new__(apply.FollowedLog)
    begun = time.monotonic()
    with subprocess.Popen(["sleep", "1"]) as log.process:
        log.wait(0.01)
        log.wait(60)
        assert begun + 0.9 < log.last_seen < begun + 40
        ended = log.last_seen
        log.wait(60)
        assert log.last_seen == ended


def test_a_log_that_breaks_at_once_is_not_followed_more_often(monkeypatch, now):
    watching, slept, ends = watch(monkeypatch), [], iter([None, ("done", "")])
    monkeypatch.setattr(apply.time, "sleep", slept.append)
    monkeypatch.setattr(watching, "step", lambda: next(ends))
    watching.log = apply.FollowedLog.__new__(apply.FollowedLog)
    with subprocess.Popen(["true"]) as watching.log.process:
        pass
    assert watching.run() == 0
    assert slept == [apply.POLL_S]


def test_a_log_whose_connections_break_at_once_is_followed_for_a_while(now):
    """One that has lasted longer begins another while."""
    head, cluster = pod(RUNNING), types.SimpleNamespace(command=["false"])
    log, followed_s = apply.FollowedLog(cluster, head), []
    for now[0] in (1.0, 60.0, 121.0, 122.0):
        log.process.wait()
        if log.keep_following(head):
            followed_s.append(now[0])
    assert followed_s == [1.0, 60.0, 121.0]
    log.begun, log.last_seen = 0.0, 121.0
    assert log.keep_following(head)
    log.process.wait()
    assert not log.keep_following(pod(RUNNING, restarts=1)), "its container has started again: another log"
    assert not log.keep_following(None)


def test_the_head_is_the_newest_of_its_pods(monkeypatch):
    older, newer = (pod(RUNNING, restarts=number, uid=f"uid {number}") for number in (1, 2))
    watching = watch(monkeypatch, pods(newer, older)["out"])
    assert watching.head(watching.pods()) == newer


def test_a_container_that_runs_on_without_a_log_is_bounded(monkeypatch, now):
    watching = watch(monkeypatch, *[job()["out"], pods(pod(RUNNING))["out"]] * 4)
    watching.cluster.command = ["true"]
    watching.step()
    watching.log.process.wait()
    for now[0] in (1.0, 119.0):
        assert watching.step() is None
    now[0] = 121.0
    said = "the log of node 0 has ended 120 s ago, and its container runs on"
    with pytest.raises(UserError, match=said) as raised:
        watching.step()
    assert raised.value.status == 1


def test_a_node_0_that_is_gone_and_finds_no_place_is_told(monkeypatch, capsys):
    """Its machine was drained, and the watch has not seen how its container ended."""
    later = pod(conditions=[GPUS_GONE], uid="later")
    seen = [answer for found in (pod(RUNNING), later, later) for answer in (job()["out"], pods(found)["out"])]
    watching = watch(monkeypatch, *seen[:4], {"items": []}, *seen[4:], {"items": []})
    watching.cluster.command = ["true"]
    assert watching.step() is None
    watching.log.process.wait()
    for _ in range(2):
        assert watching.step() is None
    assert "ddp-0-abcde cannot be scheduled: 0/3 nodes are available" in capsys.readouterr().out


def test_a_job_that_is_deleted_while_followed_is_one_line(monkeypatch):
    watching = watch(monkeypatch)
    said = 'kubectl get jobs.batch ddp: (NotFound): jobs.batch "ddp" not found'
    watching.cluster.get = Mock(side_effect=UserError(said))
    with pytest.raises(UserError, match="the job ddp has been deleted while it was followed"):
        watching.step()


REFUSED = {"err": "The connection to the server 10.0.0.1:6443 was refused\n", "status": 1}
BUSY_SERVER = {"err": "Error from server (ServiceUnavailable): etcdserver: leader changed\n", "status": 1}


def test_a_cluster_that_does_not_answer_for_a_moment_ends_nothing(play, tmp_path):
    """Calls fail before node 0 runs and while its log is followed; the log's connection breaks too."""
    answers = success()
    answers["get jobs.batch ddp"] = [REFUSED, job(), BUSY_SERVER, job(), job(), job(), job("Complete")]
    answers["get pods"] = [REFUSED, *answers["get pods"][:3], REFUSED, BUSY_SERVER, *answers["get pods"][2:]]
    answers["logs"] = [{"out": "run runs/ddp\n", "sleep_s": 0.3, "status": 1}, {"out": RESULT}]
    result = play(answers, "ddp")
    assert (result.status, result.stderr) == (0, "")
    assert result.stdout.endswith(RESULT)
    assert "the cluster does not answer (kubectl reaches no cluster (The connection to " in result.stdout
    first, second = (call["argv"] for call in calls(tmp_path) if "logs" in call["argv"])
    assert second[:-1] == first
    assert second[-1].startswith("--since=")


def test_a_cluster_that_does_not_answer_for_long_ends_the_command_and_not_the_job(monkeypatch, capsys):
    now = iter(range(0, 100_000, 60))
    monkeypatch.setattr(apply.time, "monotonic", lambda: float(next(now)))
    watching = watch(monkeypatch)
    watching.cluster.get = Mock(side_effect=UserError("no answer from the cluster within 60 s to kubectl get"))
    with pytest.raises(UserError, match=r"; the job continues; make k8s-delete NAME=ddp ends it$") as raised:
        watching.run()
    assert raised.value.status == 1
    assert 120 <= next(now) < 400
    assert capsys.readouterr().out.count("\n") == 1, "it says so once"


def test_pods_killed_for_their_memory_are_named():
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    first, second, well = pod(killed), pod(RUNNING, 1), pod(RUNNING, 2)
    second["status"]["containerStatuses"][0]["lastState"] = killed
    fix = "a larger memory limit in the manifest, or fewer --workers"
    assert apply.killed_for_memory([first, second, well]) == f"ddp-0-abcde, ddp-1-abcde: OOMKilled; {fix}"
    assert apply.killed_for_memory([well]) == ""


def test_a_job_that_was_edited_is_to_be_deleted_first():
    said = 'The Job "ddp" is invalid: spec.template: Invalid value: ...: field is immutable'
    assert apply.explain(said).endswith("delete the job first, make k8s-delete NAME=...")


def test_the_state_of_a_pod_is_that_of_its_own_container():
    """It is not the state of a container that a webhook has added; statuses are sorted by name."""
    injected = {"name": "istio-proxy", "restartCount": 3, "state": RUNNING}
    for kind in KINDS:
        ended = pod(SUCCESS)
        [template, *_] = pod_templates(load(f"{kind}.yaml"))
        ended["status"]["containerStatuses"][0]["name"] = template["spec"]["containers"][0]["name"]
        ended["status"]["containerStatuses"].insert(0, injected)
        assert apply.container_state(ended) == SUCCESS, kind
        assert apply.container_start_id(ended) == "uid-0 0"
    assert apply.container_state(pod()) == {}


def test_the_state_of_a_job():
    for word in ("Complete", "Completed", "Succeeded"):
        assert job_state(job(word)["out"]) == ("done", "")
    assert job_state(job("Created", "Running", "Failed")["out"]) == ("failed", "why")
    assert job_state(job("Running", "Suspended")["out"]) == ("", "")
    assert job_state({"status": {"conditions": [{"type": "Failed", "status": "False"}]}}) == ("", "")
    assert job_state({}) == ("", "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(1200)
def test_in_a_real_cluster(kind):
    """With K8S_E2E=1, images must exist and k8s/cluster.yaml be applied; a missing operator skips the test."""
    require(
        "cluster",
        os.environ.get("K8S_E2E") == "1" and os.environ.get("KUBECONFIG"),
        "K8S_E2E and KUBECONFIG are not set",
        "see k8s/README.md for a small cluster, then KUBECONFIG=FILE K8S_E2E=1 make test ARGS=tests/k8s",
    )
    recipe = simulation.recipe_for(kind)
    name = f"e2e-{kind}"
    options = [] if recipe == "probe" else ["--max-steps=2", "--overwrite", "--resume=none"]
    nodes = "1" if recipe == "probe" else "2"  # the doctor needs a machine for each node
    argv = [recipe, "--kind", kind, "--nodes", nodes, "--gpus", os.environ.get("K8S_GPUS", "0"), "--name", name]
    try:
        result = run_command(sys.executable, "-m", "k8s.apply", *argv, "--", *options, timeout_s=1100)
    finally:
        run_command(sys.executable, "-m", "k8s.apply", "--delete", name)
    if "is not installed" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.status == 0, result.stderr
    said = "doctor: all is well on 1 node" if recipe == "probe" else f"result recipe={recipe} world_size=2"
    assert result.stdout.splitlines()[-1].startswith(said)
