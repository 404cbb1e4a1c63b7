"""Node ranks, world sizes, addresses and ends, by what each operator injects and by processes that run on it."""

import copy
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k8s.manifest import KINDS, Request, load, render
from recipes.common.errors import UserError
from scripts.doctor import __main__ as doctor
from scripts.launch.local import free_port
from tests.conftest import need_horovod_with_mpi, require
from tests.k8s import simulation
from tests.support import MPI_ENV, ROOT, TIMEOUT_S, last_step, launches, losses, train, wait_until, write_program

STATIC = ("indexed-job", "jobset", "pytorchjob", "trainjob", "doctor")
"""Kinds whose nodes are all started by scripts/launch.sh."""

FAKE_PYTHON = """
import json, os, sys
if sys.argv[1:3] == ["-m", "scripts.launch.interface"]:
    print("lo")
elif sys.argv[1:3] == ["-m", "scripts.launch.cores"]:
    print(8)
elif sys.argv[1] == "-m":
    print("launcher", json.dumps({"argv": sys.argv[1:], "env": dict(os.environ)}))
"""


@pytest.fixture
def fake_python(tmp_path):
    return str(write_program(tmp_path / "python", f"#!{sys.executable} -IS\n{FAKE_PYTHON}"))


def what_starts(pod, python):
    """Return the command and environment of the launcher that a pod's container executes."""
    result = simulation.run(pod, {}, PYTHON=python).wait(check=True)
    return json.loads(re.search(r"^launcher (.*)$", result.stdout, re.MULTILINE)[1])


def check_nodes(kind, documents, nodes, nproc, python):
    """Assert that each pod's launcher gets its own node rank, and that all meet at pod 0."""
    made = simulation.pods(kind, documents)
    assert len(made) == nodes
    (head,) = made[0].addresses
    ports = set()
    for rank, pod in enumerate(made):
        env = what_starts(pod, python)["env"]
        own = {"NODE_RANK": str(rank), "NNODES": str(nodes), "NPROC_PER_NODE": str(nproc), "MASTER_ADDR": head}
        assert {name: env[name] for name in own} == own
        ports.add(env["MASTER_PORT"])
        assert not {"RANK", "WORLD_SIZE"} & env.keys(), "what an operator calls a rank is a node"
    assert len(ports) == 1


@pytest.mark.parametrize("kind", STATIC)
def test_each_pod_learns_its_place(kind, fake_python):
    """It does so in the job of the file as it stands, and in a rendered one."""
    check_nodes(kind, load(f"{kind}.yaml"), nodes=2, nproc=1, python=fake_python)
    recipe = "probe" if kind == "doctor" else "apex"
    documents = render(Request(kind, recipe, "my-job", nodes=3, gpus=8, options=["--epochs", "3"]))
    check_nodes(kind, documents, nodes=3, nproc=8, python=fake_python)


@pytest.mark.parametrize("kind", STATIC)
def test_mistakes_in_a_file_are_found(kind, fake_python):
    """The mistakes: all pods share a node rank, the number of nodes is not the job's, the head has no name."""
    documents = load(f"{kind}.yaml")

    def find(break_it):
        broken = copy.deepcopy(documents)
        for template in simulation.pod_templates(broken):
            container = template["spec"]["containers"][0]
            break_it(container, {variable["name"]: variable for variable in container.get("env", [])})
        with pytest.raises((AssertionError, KeyError, StopIteration)):
            check_nodes(kind, broken, nodes=2, nproc=1, python=fake_python)

    def same_rank(container, env):
        env.get("NODE_RANK", {}).update(value="0")
        env.get("NODE_RANK", {}).pop("valueFrom", None)
        container["command"] = [word.replace("$PET_NODE_RANK", "0") for word in container["command"]]

    def other_size(container, env):
        env.get("NNODES", {}).update(value="4")
        container["command"] = [word.replace("$PET_NNODES", "4") for word in container["command"]]

    def unknown_variable(container, env):
        env.get("MASTER_ADDR", {}).update(value="$(JOB_NAME)-0")
        container["command"] = [word.replace("PET_", "PTE_") for word in container["command"]]

    find(same_rank)
    find(other_size)
    find(unknown_variable)


def test_without_its_service_a_job_has_no_names(fake_python):
    documents = load("indexed-job.yaml")
    simulation.named(documents, "Service")["spec"]["selector"] = {"app": "other"}
    with pytest.raises(ValueError, match="not enough values"):
        check_nodes("indexed-job", documents, nodes=2, nproc=1, python=fake_python)


def test_workers_that_relied_on_the_operator_would_have_no_rank(fake_python):
    documents = load("pytorchjob.yaml")
    (template,) = simulation.pod_templates(documents)
    container = template["spec"]["containers"][0]
    container["env"] = [one for one in container["env"] if one["name"] != "NODE_RANK"]
    with pytest.raises(KeyError, match="NODE_RANK"):
        check_nodes("pytorchjob", documents, nodes=2, nproc=1, python=fake_python)


def test_the_job_tells_its_store_from_that_of_an_older_job(fake_python):
    for kind in ("indexed-job", "jobset", "trainjob", "doctor"):
        for pod in simulation.pods(kind, load(f"{kind}.yaml")):
            assert what_starts(pod, fake_python)["env"]["RDZV_ID"] == simulation.JOB_UID


def test_the_fabric_comes_from_the_configmap_or_from_the_command(fake_python):
    for kind in STATIC:
        recipe = "probe" if kind == "doctor" else "ddp"
        for fabric, expected in ((None, "auto"), ("tcp", "tcp")):
            documents = render(Request(kind, recipe, "x", nodes=2, fabric=fabric))
            envs = [what_starts(pod, fake_python)["env"] for pod in simulation.pods(kind, documents)]
            assert [env["FABRIC"] for env in envs] == [expected] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_rendered", [False, True])
def test_every_option_is_one_of_the_recipe(kind, is_rendered, fake_python):
    """Each recipe's own parser parses the options of every container that starts the recipe."""
    documents = load(f"{kind}.yaml")
    recipe = {"mpijob": "horovod", "doctor": "probe"}.get(kind, "pipeline" if is_rendered else "ddp")
    if is_rendered:
        documents = render(Request(kind, recipe, "my-job", nodes=2, options=["--timeout-s", "60"]))
    pods = simulation.pods(kind, documents)
    options = doctor.parse_args if kind == "doctor" else importlib.import_module(f"recipes.{recipe}.train").options
    checked = 0
    for pod in pods:
        args = pod.spec["containers"][0].get("args")
        if args is None:
            assert kind == "mpijob"
            continue
        if kind != "mpijob":
            assert what_starts(pod, fake_python)["argv"][-len(args) :] == args
            if kind != "doctor":
                assert args[0] == recipe
                args = args[1:]
        parsed = options(args)
        if recipe != "probe":
            assert parsed.name == ("my-job" if is_rendered else documents[-1]["metadata"]["name"])
            assert parsed.resume == "auto"
            assert str(parsed.runs_dir) == "/runs"
        checked += 1
    assert checked == (1 if kind == "mpijob" else len(pods))


# ---- with real processes


def wait_for(pods):
    """Return the pods' results; once one has failed, the others get 10 s, because the Job would end them too."""
    failed_at = None
    while any(pod.process.poll() is None for pod in pods):
        if failed_at is None and any(pod.process.poll() for pod in pods):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + 10:
            for pod in pods:
                pod.process.kill()
        time.sleep(0.05)
    return [pod.wait() for pod in pods]


def start(kind, documents, folder, *options, is_head_late=False, **env):
    """Start all pods of a job here and return their commands; a late head starts once the others wait for it."""
    made = simulation.pods(kind, documents)
    for pod in made:  # the last value of an option wins
        pod.words += ("--device=cpu", *options)
        if "RDZV_TIMEOUT_S" in pod.env:  # 15 minutes in the file, so that images can be pulled
            pod.env["RDZV_TIMEOUT_S"] = "60"
    replaced = {"/runs": str(folder), "/data": str(folder), "/opt/cluster-recipes": str(simulation.ROOT)}
    port = str(free_port())
    for pod in made:
        for address in pod.addresses:
            replaced[address] = "127.0.0.1"
    for pod in made:
        for name in ("MASTER_PORT", "PET_MASTER_PORT"):
            if name in pod.env:
                pod.env[name] = port
        if "PET_RDZV_ENDPOINT" in pod.env:
            pod.env["PET_RDZV_ENDPOINT"] = f"{pod.env['PET_RDZV_ENDPOINT'].split(':')[0]}:{port}"
    env = {"OMP_NUM_THREADS": "1", **env}  # more threads would sum in another order
    others = [simulation.run(pod, replaced, **env) for pod in made[1:]]
    for other in others * is_head_late:
        wait_until(lambda other=other: ": fabric " in other.text, TIMEOUT_S, lambda other=other: other.text)
        assert other.process.poll() is None, other.text
    return [simulation.run(made[0], replaced, **env), *others]


@pytest.mark.slow
def test_the_pods_train_as_one_world_also_with_a_late_head(tmp_path):
    """These are the pods of a PyTorchJob, whose operator injects most; the drained node below is an Indexed Job's.

    check_nodes() shows that the launchers of other kinds start in the same way.
    """
    results = wait_for(start("pytorchjob", load("pytorchjob.yaml"), tmp_path, "--max-steps=2", is_head_late=True))
    assert_one_world(results, tmp_path / "ddp")
    assert last_step(tmp_path / "ddp") <= 2


def assert_one_world(results, run, starts=1):
    assert [result.status for result in results] == [0, 0], [result.stderr for result in results]
    assert results[0].stdout.splitlines()[-1].startswith("result recipe=ddp world_size=2 ")
    assert "result" not in results[1].stdout
    assert launches(run) == [2] * starts


@pytest.mark.slow
def test_a_wrong_node_rank_ends_the_job(tmp_path):
    """Two pods have the same rank, or a rank is too large; the job ends without waiting for the timeout."""
    for rank, words in (("0", "MASTER_PORT"), ("2", "NODE_RANK 2 of NNODES 2: node ranks count from 0")):
        documents = load("indexed-job.yaml")
        env = simulation.named(documents, "Job")["spec"]["template"]["spec"]["containers"][0]["env"]
        [variable] = [variable for variable in env if variable["name"] == "NODE_RANK"]
        variable.clear()
        variable.update(name="NODE_RANK", value=rank)
        begin = time.monotonic()
        results = wait_for(start("indexed-job", documents, tmp_path, "--max-steps=2"))
        assert time.monotonic() < begin + 40
        assert 2 in {result.status for result in results}
        assert any(words in result.stderr for result in results), [result.stderr for result in results]


@pytest.mark.slow
def test_the_doctor_shows_each_node_and_the_map(tmp_path):
    documents = render(Request("doctor", "probe", "doctor", nodes=2, gpus=1))
    results = wait_for(start("doctor", documents, tmp_path))
    assert [result.status for result in results] == [0, 0], [result.stderr for result in results]
    lines = results[0].stdout.splitlines()
    for rank in range(2):
        assert any(re.match(rf"node {rank} \(\S+ on machine-a\): .*/dev/shm [\d.]+ GiB", line) for line in lines)
    assert lines[-1].startswith("doctor: all is well on 2 nodes")
    (probe,) = [line for line in lines if line.startswith("probe ")]
    seen = json.loads(probe.removeprefix("probe "))
    assert (seen["world_size"], seen["sum"]) == (2, 3)
    ranks = [(row["rank"], row["node_rank"], row["local_rank"]) for row in seen["ranks"]]
    assert ranks == [(0, 0, 0), (1, 1, 0)]


@pytest.mark.slow
def test_the_elastic_job_goes_on_without_a_pod_that_is_lost(tmp_path):
    """One of two pods is killed for good: the other resumes from the checkpoint and ends the run."""
    documents = load("pytorchjob-elastic.yaml")
    documents[0]["spec"]["elasticPolicy"]["maxReplicas"] = 2
    words = ("--log-every=1", "--checkpoint-every=10", "--max-steps=80", "--lr=0.0005")
    pods = start("pytorchjob-elastic", documents, tmp_path, *words)
    pods[0].wait_for_step(tmp_path / "ddp-elastic", 22)
    pods[1].kill()
    result = pods[0].wait(gone_within_s=15, check=True)
    assert result.stdout.splitlines()[-1].startswith("result recipe=ddp world_size=1 ")
    assert launches(tmp_path / "ddp-elastic") == [2, 1]
    assert launches(tmp_path / "ddp-elastic", "step")[1] >= 20
    whole = train("single", tmp_path / "whole", 1, "--max-steps=80", "--lr=0.0005")
    assert losses(tmp_path / "ddp-elastic") == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.slow
def test_a_drained_node_stops_the_job_and_the_restart_goes_on(tmp_path):
    """One pod gets TERM: all write a checkpoint and fail with 143, and their successors end the same run.

    Its curve equals, to the last bit, that of ranks that nobody drains.
    """
    options = ["--log-every", "1", "--epochs", "3"]
    documents = render(Request("indexed-job", "ddp", "mine", nodes=2, options=options))
    pods = start("indexed-job", documents, tmp_path)
    pods[0].wait_for_step(tmp_path / "mine", 5)
    (first,) = [process for process in pods[1].processes() if process.pid == pods[1].process.pid]
    first.send_signal(signal.SIGTERM)
    results = wait_for(pods)
    assert [result.status for result in results] == [143, 143]
    assert "resume with --name mine --resume auto" in results[0].stdout
    assert all(result.stdout.endswith("so that a restart continues\n") for result in results)
    whole = train("ddp", tmp_path / "whole", 2, "--epochs", "3", nodes=2)
    assert last_step(tmp_path / "mine") < last_step(whole)

    results = wait_for(start("indexed-job", documents, tmp_path, is_head_late=True))
    assert_one_world(results, tmp_path / "mine", starts=2)
    assert losses(tmp_path / "mine") == losses(whole)


SCRIPT = """
import json, os, pathlib, signal, sys, time
run_dir = pathlib.Path(os.environ["RUN_DIR"])
seen = [sys.argv[1:], os.getcwd(), os.environ["NODE_RANK"], os.environ["NNODES"], os.environ["RESUME"]]
def stop(*_):
    (run_dir / "checkpoint").touch()
    sys.exit()


signal.signal(signal.SIGTERM, stop)
(run_dir / f"seen-{os.environ['NODE_RANK']}").write_text(json.dumps(seen))
while "--wait" in sys.argv and not (run_dir / "checkpoint").exists():
    time.sleep(0.1)
"""


def script_job(folder, *options):
    """Start two pods of a script on the data volume; its launcher needs no torch."""
    (folder / "train.py").write_text(SCRIPT)
    request = Request("indexed-job", "spawn", "mine", nodes=2, gpus=0, options=options, script="/data/train.py")
    return start("indexed-job", render(request), folder)


def test_a_script_from_a_volume_runs_in_its_runs_folder(tmp_path):
    results = wait_for(script_job(tmp_path, "--out={run_dir}"))
    assert [result.status for result in results] == [0, 0], [result.stderr for result in results]
    run = tmp_path / "mine"
    for rank in ("0", "1"):
        argv = [f"--out={run}", "--device=cpu"]  # start() adds the last one
        assert json.loads((run / f"seen-{rank}").read_text()) == [argv, str(run), rank, "2", "auto"]


@pytest.mark.parametrize("drained", [1, 2])
def test_a_stopped_script_ends_with_the_status_that_does_not_count(tmp_path, drained):
    """Also on a node that gets no signal, whose ranks end with those of the drained one."""
    pods = script_job(tmp_path, "--wait")
    wait_until(lambda: len(list(tmp_path.glob("mine/seen-*"))) == 2, TIMEOUT_S, "both scripts")
    for pod in pods[:drained]:
        pod.process.send_signal(signal.SIGTERM)
    results = wait_for(pods)
    assert [result.status for result in results] == [143, 143], [result.stderr for result in results]
    again = wait_for(script_job(tmp_path))
    assert [result.status for result in again] == [0, 0], "the stop was of the start before"


@pytest.mark.parametrize("kind", ["indexed-job", "jobset", "pytorchjob", "pytorchjob-elastic", "trainjob"])
def test_a_script_gets_its_own_options_alone_in_every_kind(kind):
    request = Request(kind, "ddp", "mine", nodes=2, gpus=0, options=["--lr", "1"], script="/data/train.py")
    for pod in simulation.pods(kind, render(request)):
        assert pod.words[-3:] == ["ddp", "--lr", "1"]
        assert pod.env["SCRIPT"] == "/data/train.py"
        assert pod.env["RUN_DIR"] == pod.env["WORKDIR"] == "/runs/mine"


def test_a_script_that_no_pod_has_is_refused():
    with pytest.raises(UserError, match=r"my/train.py is not in the image; .*: /data/train.py$"):
        render(Request("indexed-job", "ddp", "mine", nodes=2, script="my/train.py"))
    with pytest.raises(UserError, match="KIND=mpijob is for recipes; "):
        render(Request("mpijob", "horovod", "mine", nodes=2, script="/data/train.py"))
    render(Request("indexed-job", "ddp", "mine", nodes=2, script="recipes/ddp/minimal.py"))


@pytest.mark.slow
def test_a_refusal_has_the_status_that_the_job_does_not_retry(tmp_path):
    results = wait_for(start("indexed-job", load("indexed-job.yaml"), tmp_path, "--global-batch-size=1"))
    assert [result.status for result in results] == [2, 2]
    [error] = {line for result in results for line in result.errors}
    assert "--global-batch-size" in error


@pytest.mark.parametrize("kind", ["indexed-job", "jobset", "trainjob"])
def test_a_refusal_ends_the_job_and_a_stop_does_not_count(kind):
    """The file's policy has rules for the pods' statuses, 2 and STOPPED_STATUS."""
    for pod in simulation.pods(kind, load(f"{kind}.yaml")):
        assert pod.env["STOPPED_STATUS"] == "143"
        assert pod.spec["restartPolicy"] == "Never", "with another one the policy is refused"
    rules = re.findall(
        r"- action: (\w+).*\n +(on\w+): .*?(?:containerName: (\w+).*values: (\[\d+\])|type: (\w+))",
        (ROOT / "k8s" / f"{kind}.yaml").read_text(),
    )
    name = pod.spec["containers"][0]["name"]
    assert rules == [
        ("FailJob", "onExitCodes", name, "[2]", ""),
        ("Ignore", "onExitCodes", name, "[143]", ""),
        ("Ignore", "onPodConditions", "", "", "DisruptionTarget"),
    ]


FAKE_MPIRUN = """#!/usr/bin/env bash
echo "mpirun $*"
exit "${FAKE_STATUS:-0}"
"""


@pytest.fixture
def mpi_launcher(tmp_path):
    """Return the file's launcher with an mpirun that prints its arguments; the run on its volume has ended."""
    launcher = simulation.pods("mpijob", load("mpijob.yaml"))[0]
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin/mpirun", FAKE_MPIRUN)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.1 slots=1\n")
    launcher.env["OMPI_MCA_orte_default_hostfile"] = str(tmp_path / "hosts")
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod/config.json").touch()
    (tmp_path / "horovod/result.json").touch()
    os.utime(tmp_path / "horovod/result.json", (4e9, 4e9))  # later than the launcher's start on any machine
    return launcher


def start_launcher(launcher, folder, port, **env):
    path = f"{folder}/bin:/usr/bin:/bin"
    replaced = {"/runs": str(folder), "/2222": f"/{port}", **known_hosts(folder)}
    return simulation.run(launcher, replaced, PATH=path, **env)


def known_hosts(folder):
    """Return the replacement for the file of host keys, which is not to be written to this machine's /tmp."""
    return {"/tmp/known_hosts": str(folder / "known_hosts")}


def test_the_launcher_waits_for_every_worker_and_passes_on_its_variables(mpi_launcher, tmp_path):
    """It passes on those of the ConfigMap and of the image, such as HOME: sshd's HOME is on the read-only root."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    env = {"NCCL_IB_HCA": "=mlx5_0", "HTTPS_PROXY": "p", "LD_LIBRARY_PATH": "/nccl", "HOME": "/tmp"}
    own = {"NVIDIA_VISIBLE_DEVICES": "void", "KUBERNETES_PORT": "1", "HOSTNAME": "launcher"}
    result = start_launcher(mpi_launcher, tmp_path, port, **env, **own).wait(check=True)
    passed = set(re.findall(r"-x (\w+)", result.stdout))
    assert {*env, "FABRIC", "PATH", "PYTHON", "MASTER_ADDR", "NPROC_PER_NODE"} <= passed
    assert not passed & {*own, "SSH_OPTIONS", "OMPI_MCA_orte_default_hostfile", "K_MPI_JOB_ROLE", "PWD", "_"}
    server.close()
    result = start_launcher(mpi_launcher, tmp_path, port, RDZV_TIMEOUT_S="1").wait()
    assert result.status == 1
    assert result.errors == ["error: 127.0.0.1:2222 does not answer within 1 s; see that worker's log"]
    assert "mpirun" not in result.stdout


def test_a_launcher_whose_run_was_stopped_by_a_worker_fails(mpi_launcher, tmp_path):
    """mpirun ends with 0 when all ranks have stopped with a checkpoint and no result. A refusal keeps status 2."""
    (tmp_path / "horovod/result.json").unlink()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = start_launcher(mpi_launcher, tmp_path, port).wait()
        refused = start_launcher(mpi_launcher, tmp_path, port, FAKE_STATUS="2").wait()
    assert (result.status, refused.status) == (143, 2), result.stderr + refused.stderr


@pytest.mark.parametrize(("ahead_s", "finishes"), [(3600, True), (-3600, False)])
def test_a_launcher_compares_times_of_one_clock(mpi_launcher, tmp_path, ahead_s, finishes):
    """A file server dates the record: its clock may differ from that of the launcher's node."""
    result = tmp_path / "horovod/result.json"
    os.utime(result, (time.time() - 600,) * 2)  # of an earlier run
    write_program(tmp_path / "bin/date", f"echo $(($(/bin/date +%s) + {ahead_s}))")
    write_program(tmp_path / "bin/mpirun", f"touch {result}" if finishes else "exit 0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = start_launcher(mpi_launcher, tmp_path, server.getsockname()[1]).wait()
    assert done.status == (0 if finishes else 143), done.stderr


FAKE_RANK = """import pathlib, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: (pathlib.Path(sys.argv[1]).write_text("USR1"), sys.exit(0)))
pathlib.Path(sys.argv[2]).touch()
signal.pause()
"""


def test_a_worker_passes_a_stop_on_to_its_ranks(tmp_path):
    """On TERM, the worker sends USR1 to the rank below its sshd; then sshd ends, and the worker."""
    (tmp_path / "recipes/horovod").mkdir(parents=True)
    (tmp_path / "recipes/horovod/train.py").write_text(FAKE_RANK)
    rank = f"cd {tmp_path}; python -m recipes.horovod.train {tmp_path}/seen {tmp_path}/ready --name x"
    sshd = write_program(tmp_path / "sshd", f"#!/usr/bin/env bash\n{rank} & exec sleep 60\n")
    worker = simulation.pods("mpijob", load("mpijob.yaml"))[-1]
    command = simulation.run(worker, {"/usr/sbin/sshd": str(sshd), **known_hosts(tmp_path)})
    wait_until((tmp_path / "ready").exists, 60, "a rank")
    command.process.terminate()
    command.wait()
    assert (tmp_path / "seen").read_text() == "USR1"


def test_mpirun_starts_a_process_for_each_slot_and_term_writes_a_checkpoint(tmp_path):
    """A real mpirun, but no ssh: all workers are this machine."""
    need_horovod_with_mpi()
    options = ["--device=cpu", "--log-every", "1", "--epochs", "400"]
    documents = render(Request("mpijob", "horovod", "mine", nodes=2, options=options))
    launcher, *workers = simulation.pods("mpijob", documents)
    assert len(workers) == 2
    slots = documents[0]["spec"]["slotsPerWorker"]
    hosts = tmp_path / "hostfile"  # the operator's hostfile has the workers' names
    hosts.write_text(f"localhost slots={slots * len(workers)}\n")
    launcher.env["OMPI_MCA_orte_default_hostfile"] = str(hosts)
    launcher.env["MASTER_ADDR"] = "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as sshd:  # accepts connections; nothing more is asked of it
        replaced = {"/runs": str(tmp_path), "/data": str(tmp_path), "/opt/cluster-recipes": str(simulation.ROOT)}
        replaced |= {"/2222": f"/{sshd.getsockname()[1]}", **known_hosts(tmp_path)}
        command = simulation.run(launcher, replaced, OMP_NUM_THREADS="1", HOME=str(tmp_path), **MPI_ENV)
        command.wait_for_step(tmp_path / "mine", 5)
        command.process.terminate()
        result = command.wait()
    assert result.status == 143, result.stderr
    assert "resume with --name mine --resume auto" in result.stdout
    assert launches(tmp_path / "mine") == [2]


def sshd_and_key(folder):
    """Make the operator's key in a folder, as its Secret has it; skip the test without sshd."""
    sshd, keygen = shutil.which("sshd", path="/usr/sbin"), shutil.which("ssh-keygen")
    require("sshd", sshd and keygen, "there is no sshd", "as root: apt-get install openssh-server")
    if os.geteuid() == 0:  # on a host, the service creates this folder; an ordinary user's sshd needs none
        Path("/run/sshd").mkdir(exist_ok=True)
    folder.mkdir()
    subprocess.run([keygen, "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", folder / "id_rsa"], check=True)
    shutil.copy(folder / "id_rsa.pub", folder / "authorized_keys")


def test_the_launcher_connects_with_no_host_but_those_that_have_the_operators_key(tmp_path):
    """Another one that answers by a worker's name would get all variables of the job."""
    own, other = tmp_path / "own", tmp_path / "other"
    sshd_and_key(own)
    sshd_and_key(other)
    launcher, *_, worker = simulation.pods("mpijob", load("mpijob.yaml"))
    made = re.search(r"^.*>/tmp/known_hosts$", launcher.words[2], re.MULTILINE)
    said = {}
    for folder in (own, other):
        port = str(free_port())
        replaced = {"-p 2222": f"-p {port}", **known_hosts(tmp_path)}
        host_key = {"HostKey=/run/mpi-ssh": f"HostKey={folder}", "/run/mpi-ssh": str(own)}
        sshd = simulation.run(worker, replaced | host_key)
        wait_until(lambda port=port: is_open(port), 60, "sshd")
        command = f"{made[0]}; exec ssh -o BatchMode=yes -F none {launcher.env['SSH_OPTIONS']} 127.0.0.1 echo here"
        for before, after in (replaced | host_key).items():
            command = command.replace(before, after)
        said[folder.name] = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        sshd.process.terminate()
        sshd.wait()
    assert (said["own"].returncode, said["own"].stdout) == (0, "here\n"), said["own"].stderr
    assert (said["other"].returncode, said["other"].stdout) == (255, ""), said["other"].stderr
    assert "Host key verification failed" in said["other"].stderr


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


def test_sshd_takes_the_workers_options(tmp_path):
    """With -t, sshd checks its configuration and ends."""
    sshd_and_key(tmp_path / "keys")
    worker = simulation.pods("mpijob", load("mpijob.yaml"))[-1]
    script = worker.words[2]
    worker.words[2] = re.sub(r"sshd -D -e(.*?)&\n.*", r"sshd -t -e\1\n", script, flags=re.DOTALL)
    assert worker.words[2] != script
    result = simulation.run(worker, {"/run/mpi-ssh": f"{tmp_path}/keys", **known_hosts(tmp_path)}).wait()
    assert (result.status, result.stderr) == (0, "")
