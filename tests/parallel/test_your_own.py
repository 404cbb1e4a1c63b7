"""A script of the user's own in a recipe's place: the contract of docs/your-own.md, on this machine.

The scripts here need no torch. Most run as one process, whose launcher needs no torch either.
"""

import ast
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from recipes.common.errors import UserError
from scripts.bench.claims import read_claims
from scripts.launch import script as contract
from scripts.launch.command import check_recipe
from scripts.launch.local import free_port
from tests.conftest import need_horovod, refused, slow
from tests.page import shuffle_as_the_pages
from tests.support import ROOT, TIMEOUT_S, Command, losses, train, wait_until

SHOW = """
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "NNODES", "NODE_RANK")
names += ("NPROC_PER_NODE", "RUN_DIR", "RESUME", "SCRIPT", "LAUNCHER_PID", "PET_NNODES")
shown = {name: os.environ[name] for name in names if name in os.environ}
# One write: lines of several ranks may not mix.
os.write(1, f"shown {(sys.argv[1:], os.getcwd(), os.path.isdir(os.environ['RUN_DIR']), shown)!r}\\n".encode())
"""

WAIT = """
import os, pathlib, time
run_dir, rank = pathlib.Path(os.environ["RUN_DIR"]), os.environ.get("RANK", "0")
def wait(number=60):
    (run_dir / f"up-{rank}").touch()
    time.sleep(number)
"""

SAVE = """
import signal, sys
def save(number, frame):
    with open(run_dir / "saved", "a") as file:
        print(f"{signal.Signals(number).name} begin", file=file, flush=True)
        time.sleep(2.5)
        print("end", file=file)
    sys.exit(0)
"""

LEAVES_ONE = "import subprocess\nsubprocess.Popen(['sleep', '60'])"
UNAWARE = f"{WAIT}\n{LEAVES_ONE}\nprint('waits')\nwait()"
AWARE = f"{WAIT}\n{SAVE}\nfor number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, save)\nwait()"
ONE_IS_AWARE = f"{WAIT}\n{SAVE}\n{LEAVES_ONE}\nif rank == '0': signal.signal(signal.SIGTERM, save)\nwait()"
ELASTIC = f"""{WAIT}\n{SAVE}
if rank == "0": signal.signal(signal.SIGUSR1, save), signal.signal(signal.SIGTERM, save)
names = ("WORLD_SIZE", "RESUME", "TORCHELASTIC_RESTART_COUNT")
line = " ".join(["round of", *(os.environ[name] for name in names), sys.argv[1], "rank", rank])
os.write(1, (line + "\\n").encode())
if (rank, sys.argv[1]) == ("0", "none"):
    while len(list(run_dir.glob("up-*"))) < 3: time.sleep(0.1)
    sys.exit(7)
wait(600)"""
DEAF = f"{WAIT}\nimport signal\nfor number in (10, 15): signal.signal(number, signal.SIG_IGN)\nwait()"


class Job(Command):
    """`make run SCRIPT=... NAME=mine`, in its own folder."""

    def __init__(self, folder, source, recipe="single", nodes=1, nproc=1, argv=(), stop_grace_s=60, own=(), **env):
        self.script, self.run = folder / "train.py", folder / "runs/mine"
        self.script.write_text(textwrap.dedent(source))
        own = ("--nodes", str(nodes), "--nproc-per-node", str(nproc), "--name=mine", *own)
        code = "import sys; from scripts.launch import local; "
        code += f"local.STOP_GRACE_S = {stop_grace_s}; sys.exit(local.main())"
        env = {"SCRIPT": str(self.script), "WORKDIR": str(folder), "RUNS_DIR": str(folder / "runs"), **env}
        env["PYTHONUNBUFFERED"] = ""
        super().__init__(sys.executable, "-c", code, recipe, *own, "--", *argv, **env)

    def wait_for_ranks(self, count=1):
        wait_until(lambda: len(list(self.run.glob("up-*"))) == count, TIMEOUT_S, lambda: f"ranks up\n{self.text}")

    def stop(self, number, ranks=1):
        """Send the launcher a signal once all ranks are up; return what it ends with."""
        self.wait_for_ranks(ranks)
        self.process.send_signal(number)
        return self.wait(timeout_s=50)


def shown(result):
    assert (result.status, result.errors) == (0, [])
    return [ast.literal_eval(text) for text in re.findall(r"shown (.*)", result.stdout + result.stderr)]


def test_it_gets_the_variables_of_torchrun_and_no_option_of_ours(tmp_path):
    options = ("--lr", "0.1", "--out={run_dir}/x", "--resume", "{resume}", "{a}")
    job = Job(tmp_path, SHOW, "ddp", 2, 2, options, PET_NNODES="9")
    result = job.wait()
    assert result.stdout.startswith(f"{job.script}: 2 nodes x 2, WORKDIR {tmp_path}, RUN_DIR {job.run}\n")
    found = sorted(shown(result), key=lambda one: one[3]["RANK"])
    assert [one[0] for one in found] == [["--lr", "0.1", f"--out={job.run}/x", "--resume", "none", "{a}"]] * 4
    assert [one[1:3] for one in found] == [(str(tmp_path), True)] * 4
    ranks = [[one[3][name] for name in ("RANK", "LOCAL_RANK", "NODE_RANK")] for one in found]
    assert ranks == [["0", "0", "0"], ["1", "1", "0"], ["2", "0", "1"], ["3", "1", "1"]]
    same = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "RUN_DIR": str(job.run)}
    for one in found:
        assert one[3].items() >= {**same, "RESUME": "none"}.items()
        # PET_: an operator sets it for a torchrun in place of our agent; a torchrun of the script is another job.
        assert not one[3].keys() & {"SCRIPT", "LAUNCHER_PID", "PET_NNODES"}
    assert not job.run.exists(), "nothing was written to it"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import os\nos.environ['MASTER_PORT'] = '1'", 2),
        ("import os\ndef setup(rank):\n    os.environ['MASTER_PORT'] = '1'", 3),
        ("from os import environ\nif __name__ == '__main__':\n    environ['MASTER_PORT'] = str(1)", 3),
        ("import os\nif 'RANK' not in os.environ:\n    os.environ['MASTER_PORT'] = '1'", 0),
        ("import os\nos.environ.setdefault('MASTER_PORT', '1')\nprint(os.environ['MASTER_PORT'])", 0),
        ("import os\nos.environ['MASTER_PORT'] = os.environ.get('MASTER_PORT', '1')", 0),
        ("import os\nos.environ['MASTER_PORT'] = args.port\nos.environ['MASTER_PORT'] = '1'", 3),
        ("import os\ntry:\n    os.environ['MASTER_PORT']\nexcept KeyError:\n  os.environ['MASTER_PORT'] = '1'", 0),
        (f"import os\nx = {' + '.join(['1'] * 1500)}\nos.environ['MASTER_PORT'] = '1'", 3),
    ],
)
def test_a_script_that_sets_its_own_port_is_told_from_others(source, line):
    assert contract.line_of_own_port(ast.parse(source)) == line


def test_a_port_of_the_scripts_own_is_warned_of_once_where_torchrun_starts_it(tmp_path):
    """torchrun's agent serves the ranks' store, and no rank does: they would wait for each other's time-out."""
    source = f"{SHOW}\nos.environ['MASTER_PORT'] = '12355'"
    result = Job(tmp_path, source, "ddp", 2, 1).wait()
    lines = [line for line in result.stderr.splitlines() if "warning" in line]
    assert lines[0] == (
        "warning: train.py sets MASTER_PORT in line 9: ranks that torchrun starts may wait there, where none of "
        "them listens; use os.environ.setdefault(), or RECIPE=spawn if it starts ranks itself"
    )
    assert len(lines) == 2  # and that the ranks have not met
    assert "warning" not in Job(tmp_path, source, "spawn").wait().stderr


MEET = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # else one rank may have left while the other still connects
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("source", "nodes", "nproc", "is_alone"),
    [
        (SHOW, 2, 1, True),
        (SHOW, 1, 1, False),
        *slow((MEET, 1, 2, False)),
    ],
)
def test_ranks_that_have_not_met_are_warned_of(tmp_path, source, nodes, nproc, is_alone):
    """As by Lightning's defaults, or in a script for one GPU: each rank trains on all data."""
    result = Job(tmp_path, source, "ddp", nodes, nproc).wait()
    found = [line for line in result.stderr.splitlines() if "ranks have not met" in line]
    line = "the 2 ranks have not met in a process group: each may train alone, on all data; docs/your-own.md"
    assert (result.status, found) == (0, [f"warning: {line}"] * is_alone)


def test_spawn_starts_one_process_a_node_which_is_told_the_nodes(tmp_path):
    found = shown(Job(tmp_path, SHOW, "spawn", 2, 3, RANK="7", WORLD_SIZE="9").wait())
    variables = [one[3] for one in found]
    assert sorted(one["NODE_RANK"] for one in variables) == ["0", "1"]
    for one in variables:
        assert (one["NNODES"], one["NPROC_PER_NODE"], one["MASTER_ADDR"]) == ("2", "3", "127.0.0.1")
        assert not one.keys() & {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


@pytest.mark.parametrize(("recipe", "is_free"), [("spawn", True), ("ddp", False)])
def test_only_spawn_leaves_the_port_to_a_script_that_listens_at_it(tmp_path, recipe, is_free):
    """JAX's coordinator, for one: it ends with SIGSEGV if another process listens there."""
    source = "import os, socket\nsocket.create_server(('', int(os.environ['MASTER_PORT'])))"
    result = Job(tmp_path, source, recipe).wait()
    assert ("Address already in use" in result.stderr) != is_free
    assert (result.status == 0) == is_free


def test_horovods_launcher_starts_it(tmp_path):
    need_horovod()
    found = shown(Job(tmp_path, SHOW, "horovod", 1, 2).wait())
    assert sorted(one[3]["RANK"] for one in found) == ["0", "1"]


def test_a_run_is_not_overwritten_and_resumes_if_asked(tmp_path):
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/snapshot.pt").touch()
    result = Job(tmp_path, SHOW).wait()
    remedy = "set RESUME=auto to resume this run, or choose another NAME"
    assert (result.status, result.stderr) == (2, f"error: {tmp_path}/runs/mine is not empty; {remedy}\n")
    assert shown(Job(tmp_path, SHOW, RESUME="auto").wait())[0][3]["RESUME"] == "auto"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_one_that_does_not_handle_signals_is_ended_by_them_with_status_0(tmp_path, number):
    result = Job(tmp_path, UNAWARE).stop(number)
    assert (result.status, result.errors) == (0, [])
    assert "waits\n" in result.stdout, "output is not lost in a buffer"
    assert f"stopped by {number.name}, for which a rank had no handler\n" in result.stdout


def test_one_that_handles_them_gets_each_once_and_writes_its_checkpoint(tmp_path):
    """The launcher repeats a signal every second; a second signal would interrupt the handler."""
    job = Job(tmp_path, AWARE)
    result = job.stop(signal.SIGTERM)
    assert (result.status, result.stderr) == (0, "")
    assert result.stdout.endswith("got SIGTERM; to resume: the same command with NAME=mine RESUME=auto\n")
    assert (job.run / "saved").read_text() == "SIGTERM begin\nend\n"


@pytest.mark.parametrize("nodes", [1, *slow(2)])
def test_a_rank_that_saves_is_left_to_finish_when_the_signal_ends_the_others(tmp_path, nodes):
    job = Job(tmp_path, ONE_IS_AWARE, "ddp", nodes, 2 // nodes)
    result = job.stop(signal.SIGTERM, ranks=2)
    assert (result.status, result.errors) == (0, [])
    assert (job.run / "saved").read_text() == "SIGTERM begin\nend\n"


@pytest.mark.parametrize(("flags", "status"), [(("--task",), 0), ((), -signal.SIGTERM)])
def test_a_task_that_a_signal_ends_has_not_failed(tmp_path, flags, status):
    """srun and mpirun would end the ranks that are saving."""
    (tmp_path / "train.py").write_text(f"{WAIT}\nwait()")
    words, env = ("-m", "scripts.launch.script", *flags, str(tmp_path / "train.py")), {"RUN_DIR": str(tmp_path)}
    rank = Command(sys.executable, *words, **env)
    wait_until(lambda: list(tmp_path.glob("up-*")), TIMEOUT_S, lambda: rank.text)
    rank.process.send_signal(signal.SIGTERM)
    assert rank.wait().status == status


def test_one_that_ignores_them_is_killed_at_the_bound(tmp_path):
    result = Job(tmp_path, DEAF, stop_grace_s=2).stop(signal.SIGTERM)
    assert result.status == 1
    assert result.errors == ["error: still running 2 s after the signal; killed"]


def agent(folder, *before, **env):
    """Return a node with two waiting ranks, started without make, as by Slurm and pods."""
    (folder / "train.py").write_text(f"{WAIT}\nwait()")
    env = {"SCRIPT": str(folder / "train.py"), "RUN_DIR": str(folder), "NPROC_PER_NODE": "2", **env}
    job = Command(*before, "scripts/launch.sh", "ddp", PYTHON=sys.executable, MASTER_PORT=str(free_port()), **env)
    wait_until(lambda: len(list(folder.glob("up-*"))) == 2, TIMEOUT_S, lambda: f"ranks that are up\n{job.text}")
    return job


@pytest.mark.parametrize("min_nodes", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_ctrl_c_at_an_agent_ends_its_ranks_without_a_word(tmp_path, min_nodes):
    job = agent(tmp_path, MIN_NODES=min_nodes)
    os.killpg(job.process.pid, signal.SIGINT)
    result = job.wait(timeout_s=15)
    assert (result.status, result.stdout, result.stderr) == (130, "", "")


def test_an_agent_under_nohup_outlives_its_terminal(tmp_path):
    job = agent(tmp_path, "nohup")
    os.killpg(job.process.pid, signal.SIGHUP)
    time.sleep(1)
    job.process.send_signal(signal.SIGTERM)
    result = job.wait(timeout_s=50)
    assert (result.status, result.errors) == (0, [])
    assert "stopped by SIGTERM, for which a rank had no handler\n" in result.stdout


@pytest.mark.parametrize("status", [7, 3])
def test_its_status_is_the_jobs_with_one_line_that_names_the_rank(tmp_path, status):
    result = Job(tmp_path, f"import sys; sys.exit({status})").wait()
    assert result.status == status
    ended = rf"error: rank 0 \(pid \d+ on \S+\) ended with status {status}; its own error is above"
    assert re.fullmatch(ended, result.errors[0])


@pytest.mark.parametrize(("recipe", "nodes"), [("ddp", 1), *slow(("ddp", 2), ("horovod", 1))])
def test_a_rank_that_has_left_the_others_is_named(tmp_path, recipe, nodes):
    """The others fail because they have lost it: by their errors alone, nobody knows whom."""
    if recipe == "horovod":
        need_horovod()
    source = "import os, sys, time; time.sleep(2 * (os.environ['RANK'] == '1')); sys.exit(int(os.environ['RANK']))"
    result = Job(tmp_path, source, recipe, nodes, 2 // nodes).wait()
    [line] = [line for line in result.stderr.splitlines() if "error: rank 1 " in line]
    early = "rank 0 ended with status 0, perhaps too early"
    assert line.endswith(f"ended with status 1; its own error is above; {early}")


@pytest.mark.slow
def test_a_failure_on_another_node_ends_ranks_that_do_not_notice_it(tmp_path):
    """As those on GPUs, which wait in the driver."""
    source = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)"
    (tmp_path / "train.py").write_text(source)
    place = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHON": sys.executable}
    place |= {"SCRIPT": "train.py", "RUN_DIR": str(tmp_path / "run"), "GLOO_SOCKET_IFNAME": "lo"}
    launch = str(ROOT / "scripts/launch.sh")
    head, other = (Command(launch, "ddp", cwd=tmp_path, NODE_RANK=node, **place) for node in "01")
    assert other.wait().status == 3
    result = head.wait()
    assert result.status == 1
    what = r"error: node 1 failed: rank 1 \(pid \d+ on \S+\) ended with status 3"
    assert re.fullmatch(f"{what}; ranks of this node still ran, and are ended", result.errors[-1])


def test_one_that_asks_for_another_start_is_told_to_resume(tmp_path):
    source = f"{SHOW}\nimport pathlib, sys\n(pathlib.Path(os.environ['RUN_DIR']) / 'snapshot.pt').touch()\n"
    result = Job(tmp_path, f"{source}sys.exit(75 if os.environ['RESUME'] == 'none' else 0)").wait()
    assert result.status == 0
    found = map(ast.literal_eval, re.findall("shown (.*)", result.stdout))
    assert [one[3]["RESUME"] for one in found] == ["none", "auto"]
    assert "ended with status 75; its own error is above" in result.stderr


def test_it_ends_with_its_launcher(tmp_path):
    job = Job(tmp_path, f"{WAIT}\nwait()")
    job.wait_for_ranks()
    [agent] = job.processes("-m scripts.launch.agent")
    agent.kill()
    assert job.wait(timeout_s=10, gone_within_s=10).status == 137


@pytest.mark.slow
def test_in_an_elastic_job_it_starts_again_and_is_told_to_resume(tmp_path):
    """A rank fails; then a node is lost and joins again. Only rank 0 handles the signal that ends a round."""
    job = Job(tmp_path, ELASTIC, "ddp", 2, 2, ["{resume}"], own=("--min-nodes", "1", "--max-restarts", "1"))
    ranks = lambda count, line: wait_until(  # noqa: E731
        lambda: job.text.count(f"round of {line} ") == count, TIMEOUT_S, lambda: f"{line}\n{job.text}"
    )
    ranks(4, "4 none 0 none rank")
    ranks(2, "4 auto 1 auto rank")  # each node counts the failures of its own ranks
    ranks(2, "4 auto 0 auto rank")
    # Either node can hold rank 0.
    [restarted] = re.findall(r"node (\d)\] elastic: rank 0 .* restart 1 of at most 1", job.text)
    [node] = [one for one in job.processes("-m scripts.launch.rejoin ") if one.environ()["NODE_RANK"] != restarted]
    command, environment = node.cmdline(), {**node.environ(), "LAUNCHER_PID": str(os.getpid())}
    node.kill()
    ranks(2, "2 auto 1 auto rank")
    assert not (job.run / "saved").exists()
    with open(tmp_path / "returned", "w") as output:
        returned = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, start_new_session=True)
    try:
        ranks(4, "4 auto 1 auto rank")
        wait_until(lambda: (tmp_path / "returned").read_text().count("4 auto 0 auto") == 2, TIMEOUT_S, "its ranks")
        assert (job.run / "saved").read_text() == "SIGUSR1 begin\nend\n"
        for process in (job.process, returned):
            process.send_signal(signal.SIGTERM)
        result = job.wait()
        assert (result.status, result.errors) == (0, [])
        assert (job.run / "saved").read_text() == "SIGUSR1 begin\nend\nSIGTERM begin\nend\n"
        assert result.stdout.count("stopped by SIGTERM, for which a rank had no handler\n") == 1
        assert "ended with status 7; its own error is above; restart 1 of at most 1\n" in result.stderr
        assert returned.wait(30) == 0
    finally:
        returned.kill()


def test_launch_sh_takes_paths_from_the_callers_folder(tmp_path):
    (tmp_path / "train.py").write_text(SHOW)
    env = {"SCRIPT": "train.py", "RUNS_DIR": str(tmp_path / "runs"), "PYTHON": sys.executable}
    command = Command(str(ROOT / "scripts/launch.sh"), "single", "--lr", "1", cwd=tmp_path, **env)
    [(options, folder, _, variables)] = shown(command.wait())
    assert (options, folder) == (["--lr", "1"], str(tmp_path))
    assert variables["RUN_DIR"] == str(tmp_path / "runs/train")


def test_each_point_of_the_contract_is_a_claim_with_tests():
    contract_text = (ROOT / "docs/your-own.md").read_text().split("\n## The contract\n")[1]
    points = re.findall(r"^- (?:.+\n)(?:  .+\n)*", contract_text, re.MULTILINE)
    points = [" ".join(point.split()) for point in points]
    claims = [claim for claim in read_claims().values() if claim.document == "docs/your-own.md" and claim.tests]
    assert len(points) > 20
    assert [point for point in points if not any(claim.text[0] in point for claim in claims)] == []


def fail(monkeypatch, **env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        contract.job_environment(env.get("NAME", ""))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("source", ["#!/bin/bash\nif [[ -e x ]]; then echo; fi\n", "1\na = (2,\n", "1\0"])
def test_a_file_that_is_not_python_is_refused(monkeypatch, tmp_path, source):
    path = tmp_path / "train"
    path.write_text(source)
    message = fail(monkeypatch, SCRIPT=str(path))
    assert message.startswith(f"SCRIPT {path} is not Python: ")
    assert message.endswith(" (line 2); fix it, or name a Python file" if "\n" in source else "name a Python file")


def test_data_is_refused_as_it_would_run_and_do_nothing(monkeypatch, tmp_path):
    path = tmp_path / "train.ipynb"
    path.write_text('{"cells": [{"source": ["train()"]}],\n "metadata": {}, "nbformat": 4}\n')
    assert fail(monkeypatch, SCRIPT=str(path)).startswith(f"SCRIPT {path} is JSON; convert a notebook by jupyter ")
    path.write_text("# options\nlr: 0.1\nepochs: 3\n")
    assert fail(monkeypatch, SCRIPT=str(path)) == f"SCRIPT {path} is YAML; name a Python file"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_signal_handler_of_the_page_stops_all_ranks_after_the_same_step(tmp_path, number):
    section = (ROOT / "docs/your-own.md").read_text().split("\n## A signal handler\n")[1]
    handler, check = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:2]
    source = f"""{WAIT}{handler}
dist.init_process_group("gloo")
rank, device, model = dist.get_rank(), "cpu", torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
dist.barrier()
(run_dir / f"up-{{rank}}").touch()
for step in range(6000):
    time.sleep(0.01 * rank)
{textwrap.indent(check, "    ")}"""
    job = Job(tmp_path, source, "ddp", 2)
    result = job.stop(number, ranks=2)
    assert (result.status, result.errors) == (0, [])
    saved = torch.load(job.run / "last.pt", weights_only=True)
    assert saved.keys() == {"step", "model", "optimizer"}
    assert 0 <= saved["step"] < 5980
    assert saved["step"] % 20 == 0
    assert not (job.run / "last.pt.tmp").exists()


def test_what_no_launcher_can_run_is_refused(monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text("'\\d'\n")  # Python warns of it, but not twice
    path = tmp_path / "tran.py"
    assert fail(monkeypatch, SCRIPT=str(path)) == f"SCRIPT {path} does not exist; did you mean 'train.py'?"
    assert fail(monkeypatch, SCRIPT="package.train").endswith(
        "does not exist; for a module, name a file with the line: "
        "import runpy; runpy.run_module('package.train', None, '__main__', True)"
    )
    assert fail(monkeypatch, SCRIPT="~nobody-here/train.py").startswith("SCRIPT /")  # not a traceback
    assert fail(monkeypatch, SCRIPT=str(tmp_path)).endswith("cannot be read: Is a directory; name a Python file")
    recipe = str(ROOT / "recipes/ddp/train.py")
    assert fail(monkeypatch, SCRIPT=recipe).endswith("is a recipe, not a script; set RECIPE=ddp and no SCRIPT")
    script = str(tmp_path / "train.py")
    assert fail(monkeypatch, SCRIPT=script, NAME="a/b") == "NAME expects a name without folders, got 'a/b'"
    assert fail(monkeypatch, SCRIPT=script, RESUME="yes") == "RESUME expects auto or none, got 'yes'"
    assert fail(monkeypatch, SCRIPT=script, RESUME="", WORKDIR="/no").startswith("WORKDIR /no is not a folder; ")


def test_a_script_in_recipes_place_is_refused():
    with refused("RECIPE my/train.py is a file; set SCRIPT=my/train.py, and RECIPE to how"):
        check_recipe("my/train.py")


def test_runs_without_a_name_are_numbered(monkeypatch, tmp_path):
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("SCRIPT", str(tmp_path / "train.py"))
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    found = [Path(contract.job_environment("")["RUN_DIR"]).name for _ in range(2)]
    assert found == ["train-001", "train-002"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["single", "ddp", "spawn", "horovod"])
def test_the_pages_run_unchanged(tmp_path, recipe):
    """They have no code for launchers; test_minimal.py compares their losses and resumes with the recipes'.

    spawn's losses are compared here, because `python minimal.py` starts it even without our launcher.
    """
    if recipe == "horovod":
        need_horovod()
    nproc_per_node = 1 if recipe == "single" else 2
    own = ("--nproc-per-node", "2") if recipe == "spawn" else ()
    source = (ROOT / f"recipes/{recipe}/minimal.py").read_text()
    options = (*own, "--log-every", "1", "--epochs", "1", "--checkpoint", "{run_dir}/lenet.pt")
    env = {"MASTER_PORT": str(free_port())}
    job = Job(tmp_path, source, recipe, 1, nproc_per_node, options, **env)
    result = job.wait(check=True)
    assert f"result recipe={recipe} world_size={nproc_per_node} test_accuracy=0." in result.stdout
    assert (job.run / "lenet.pt").exists()
    if recipe == "spawn":
        found = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", result.stdout, re.MULTILINE)]
        single = train("single", tmp_path, 1, "--max-steps", "22", "--seed", "1", setup=shuffle_as_the_pages)
        assert found == pytest.approx(losses(single), rel=1e-5)
    if recipe == "single":  # the others get the same: the folder, and RESUME
        options = ("--epochs", "2", *options[-2:])
        again = Job(tmp_path, source, recipe, 1, nproc_per_node, options, RESUME="auto", **env)
        assert re.findall(r"^epoch (\d)", again.wait().stdout, re.MULTILINE) == ["2"]
