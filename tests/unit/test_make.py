"""The front door: variables reach programs as typed, and each target becomes the right command."""

import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest.mock import Mock

import pytest

from scripts import make
from tests.conftest import slow
from tests.support import ROOT, Command, run_command, wait_until, write_program

VARIABLES = [*make.VARIABLES, "FABRIC", "RESUME", "PYTHON"]

PYTHON_THAT_DUMPS_ITS_ENVIRONMENT = """#!/usr/bin/env bash
if [[ $1 == -I ]]; then exit 0; fi # scripts/dev/python.sh asks for the version
echo "$@" >"${0%/*}/argv"
env --null >"${0%/*}/environment"
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


TEXTS = (
    *("`touch MARKER`", "$(touch MARKER)", "$(shell touch MARKER)", "$$(touch MARKER)"),
    *("${eval $(shell touch MARKER)}", '2"; touch MARKER; "', "2'; touch MARKER; '", "2; touch MARKER"),
    *("2 && touch MARKER #", "a\nb\ttouch MARKER", "it's", '"', "$5 ${HOME} $HOME 100%", "back\\slash \\"),
    *("-- --flag", "two  spaces "),
)


@pytest.mark.parametrize("way", ["command line", "environment"])
def test_what_is_typed_is_data(tmp_path, monkeypatch, way):
    """Each text is set in a variable that make knows, and in one that it does not know."""
    marker, python = tmp_path / "marker", tmp_path / "python"
    texts = [text.replace("MARKER", str(marker)) for text in TEXTS]
    write_program(python, PYTHON_THAT_DUMPS_ITS_ENVIRONMENT)
    unknown = {f"UNKNOWN_{i}": text for i, text in enumerate(texts)}
    typed = dict(zip(VARIABLES, texts, strict=False)) | unknown | {"PYTHON": str(python)}
    if way == "environment":
        result = run_command("make", "run", **typed)
    else:
        result = run_command("make", "run", *(f"{name}={value}" for name, value in typed.items()))
    assert (result.status, result.stderr) == (0, "")
    assert (tmp_path / "argv").read_text() == "-m scripts.make run\n"
    environment = dict(item.split("=", 1) for item in (tmp_path / "environment").read_text().split("\0") if item)
    assert {name: environment[name] for name in typed} == typed
    assert not marker.exists()
    monkeypatch.setenv("MAKEFLAGS", environment.get("MAKEFLAGS", ""))
    assert make.typed_variables() == (typed if way == "command line" else {})


@pytest.mark.parametrize("flags", [" -- ", "s -- ", ""], ids=["make 4", "make -s", "make 3"])
def test_what_is_typed_is_read_from_the_flags_of_every_make(monkeypatch, flags):
    monkeypatch.setenv("MAKEFLAGS", flags + "NAME=mine ARGS=--\\ --x\\ y=$$z")
    assert make.typed_variables() == {"NAME": "mine", "ARGS": "-- --x y=$z"}
    monkeypatch.setenv("MAKEFLAGS", "k --jobserver-fds=3,4 -j")
    assert make.typed_variables() == {}


RUN = (".venv/bin/python", "-m", "scripts.launch.local")


@pytest.mark.parametrize(
    ("target", "variables", "command"),
    [
        ("run", "RECIPE=ddp", "scripts.launch.local ddp --"),
        ("run", "RECIPE=ddp NODES=2 NPROC_PER_NODE=4 NAME=mine ARGS='--epochs 3'",
            "scripts.launch.local ddp --nodes=2 --nproc-per-node=4 -- --name=mine --epochs 3"),
        ("run", "SCRIPT=train.py NODES=2 NAME=mine ARGS='--lr 0.1 --out {run_dir}'",
            "scripts.launch.local ddp --nodes=2 --name=mine -- --lr 0.1 --out {run_dir}"),
        ("run", "SCRIPT=train.py RECIPE=spawn", "scripts.launch.local spawn --"),
        ("run", "RECIPE=ddp NODES=2 MIN_NODES=1 MAX_RESTARTS=2",
            "scripts.launch.local ddp --nodes=2 --min-nodes=1 --max-restarts=2 --"),
        ("run", "RECIPE=ddp WITH=docker NODES=2 ARGS='--lr 0.1'", "HOST docker.compose ddp --nodes=2 -- --lr 0.1"),
        ("list", "", "HOST scripts.launch.local --list"),
        ("new", "NAME=mine FROM=ddp", "HOST scripts.dev.new --name=mine --from=ddp"),
        ("shards", "DATA_DIR='a b' OUT=c", "scripts.dev.shards 'a b' c"),
        ("export", "RUN='a b' OUT=-c", "scripts.dev.export -- 'a b' -c"),
        ("export", "RUN='~/a b' OUT='~/c'", "scripts.dev.export -- '/home/me/a b' /home/me/c"),
        ("doctor", "ARGS=--quick", "scripts.doctor --nodes=1 --quick"),
        ("image", "RECIPE=apex", "./docker/image.sh build apex"),
        ("push", "RECIPE=apex", "./docker/image.sh push apex"),
        ("horovod", "", "./scripts/horovod/build.sh"),
        ("report", "", "scripts.bench.report"),
        ("slurm-up", "", "./scripts/lab/slurm_cluster.sh up 2"),
        ("slurm-up", "NODES=3", "./scripts/lab/slurm_cluster.sh up 3"),
        ("test", "ARGS=\"-k 'a or b' -x\"", "./scripts/dev/test.sh quick -k 'a or b' -x"),
        ("test-all", "", "./scripts/dev/test.sh all"),
        ("submit", "RECIPE=ddp LOCAL=0", "slurm.submit ddp --"),
        ("submit", "RECIPE=ddp GPUS=h100:8", "slurm.submit ddp --gpus-per-node=h100:8 --"),
        ("submit",
            "RECIPE=ddp NODES=2 GPUS=8 CPUS=12 MEM=64GB TIME=2:00:00 PARTITION=gpu CONSTRAINT='a&b' ACCOUNT=c "
            "QOS=d NAME=mine LOCAL=1 SWEEP='lr=0.1,0.2 seed=1,2' NPROC_PER_NODE=4 ARGS='--epochs 3'",
            "slurm.submit ddp --nodes=2 --nproc-per-node=4 --partition=gpu --time=2:00:00 --mem=64GB "
            "'--constraint=a&b' --account=c --qos=d --name=mine '--sweep=lr=0.1,0.2 seed=1,2' --gpus-per-node=8 "
            "--cpus-per-task=12 --local -- --epochs 3"),
        ("compare", "RECIPES='single ddp' NODES=2 ARGS='--epochs 1'",
            "scripts.bench.compare single ddp --nodes=2 -- --epochs 1"),
        ("compare", "RECIPES=single,ddp", "scripts.bench.compare single ddp --"),
        ("same", "SCRIPT='my train.py' GLOBAL_BATCH=48 RESUME=auto ARGS='-b {local_batch}'",
            "scripts.same 'my train.py' --global-batch=48 --resume=auto -- -b {local_batch}"),
        ("drill", "FAULTS='kill-rank truncate' ROUNDS=5 SEED=3 NODES=4",
            "scripts.drill kill-rank truncate --nodes=4 --rounds=5 --seed=3"),
        ("drill", "", "scripts.drill"),
        ("bench", "PARTS=wire ROUNDS=7", "scripts.bench wire --rounds=7"),
        ("commbench", "BACKENDS='gloo mpi' NODES=2 ARGS='--link-gbit 10'",
            "scripts.bench.commbench gloo mpi --nodes=2 --link-gbit 10"),
        ("plan", "RECIPE=ddp MODEL=resnet50 NODES=512 GPUS=8 FABRIC=ib-400",
            "scripts.plan ddp --nodes=512 --gpus=8 --fabric=ib-400 --model=resnet50"),
        ("plan", "CHECK=1 ROUNDS=2", "scripts.bench.namespaces plan --rounds=2"),
        ("plan", "CHECK=mlperf", "scripts.plan.published"),
        ("k8s", "RECIPE=ddp KIND=jobset GPUS=0 IMAGE=r/ddp:1 NAME=a RENDER=1",
            "k8s.apply ddp --nodes=1 --kind=jobset --gpus=0 --image=r/ddp:1 --name=a --render --"),
        ("k8s", "RECIPE=ddp COMPONENTS='kueue rdma'", "k8s.apply ddp --nodes=1 '--components=kueue rdma' --"),
        ("k8s-delete", "NAME=--all NAMESPACE=b", "k8s.apply --namespace=b --delete=--all"),
    ],
)  # fmt: skip
def test_the_command_of_a_target(monkeypatch, target, variables, command):
    """The command is a module in .venv; HOST: run by this Python; ./: a script."""
    for word in ("HOME=/home/me", *shlex.split(variables)):
        monkeypatch.setenv(*word.split("=", 1))
    first, *words = shlex.split(command)
    if first == "HOST":
        start = [sys.executable, "-m"]
    else:
        start = [first.removeprefix("./")] if first.startswith("./") else [".venv/bin/python", "-m", first]
    assert make.TARGETS[target]().argv == [*start, *words]


def test_args_are_words_as_a_shell_quotes_them_and_nothing_is_expanded(monkeypatch):
    monkeypatch.setenv("RECIPE", "ddp")
    monkeypatch.setenv("ARGS", "--data-dir 'two words' --name=\"it's\"\n--x $HOME `a` $(b) ~/data x~/y --y=~/z")
    words = ["--data-dir", "two words", "--name=it's", "--x", "$HOME", "`a`", "$(b)"]
    words += [f"{Path.home()}/data", "x~/y", f"--y={Path.home()}/z"]
    assert make.TARGETS["run"]().argv == [*RUN, "ddp", "--", *words]


@pytest.mark.parametrize("words", ["--name b", "--epochs 1 --name=b"])
def test_a_run_has_one_name(monkeypatch, words):
    for name, text in {"RECIPE": "ddp", "NAME": "a", "ARGS": words}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(make.UserError, match=r"^NAME=a, and ARGS has --name; give one of them$"):
        make.TARGETS["run"]()
    monkeypatch.delenv("NAME")
    assert make.TARGETS["run"]().argv == [*RUN, "ddp", "--", *words.split()]


@pytest.mark.parametrize(
    ("name", "distribution", "typed", "is_kept"),
    [("PC", "Ubuntu", "", 0), ("pc", "Ubuntu", " -- NAME=pc", 1), ("mine", "Ubuntu", "", 1), ("pc", "", "", 1)],
)
def test_the_name_that_wsl_exports_is_no_name_of_a_run(monkeypatch, name, distribution, typed, is_kept):
    """NAME is the host's name in every shell of WSL 2: the second run would be refused, as its name exists."""
    monkeypatch.setattr(socket, "gethostname", lambda: "pc")
    variables = {"NAME": name, "WSL_DISTRO_NAME": distribution, "MAKEFLAGS": typed, "RECIPE": "ddp"}
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    execv = Mock()
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(make, "run_installer", Mock())
    make.main(["run"])
    assert execv.call_args[0][1] == [*RUN, "ddp", "--", *[f"--name={name}"] * is_kept]


@pytest.mark.parametrize(
    ("target", "variables", "packages", "needs_horovod"),
    [
        ("run", {"RECIPE": "horovod", "MIN_NODES": "1"}, "run", False),  # the launcher refuses it
        ("run", {"RECIPE": "ddp"}, "run", False),
        ("run", {"RECIPE": "horovod"}, "run", True),
        ("run", {"RECIPE": "horovod", "WITH": "docker"}, "", False),
        ("compare", {"RECIPES": "single horovod"}, "run", True),
        ("commbench", {"BACKENDS": "gloo"}, "run", False),
        ("bench", {}, "bench", True),
        ("bench", {"PARTS": "step wire"}, "bench", True),
        ("bench", {"PARTS": "gpu"}, "bench", False),
        ("test", {}, "dev", False),
        ("list", {}, "", False),
        ("image", {"RECIPE": "ddp"}, "", False),
    ],
)
def test_what_a_target_installs(monkeypatch, target, variables, packages, needs_horovod):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = make.TARGETS[target]()
    assert (command.packages, command.needs_horovod) == (packages, needs_horovod)


@pytest.mark.parametrize(
    ("target", "variables", "error"),
    [
        ("run", {"RECIPE": "`reboot`"}, "RECIPE: invalid choice "),
        ("run", {"RECIPE": ""}, "RECIPE is missing (choose from apex, "),
        ("image", {"RECIPE": "../ddp"}, "RECIPE: invalid choice "),
        ("compare", {"RECIPES": "single dpd"}, "RECIPE: invalid choice 'dpd'; did you mean 'ddp'?"),
        ("bench", {"PARTS": "wire setp"}, "PARTS: invalid choice 'setp'; did you mean 'step'? (choose from small"),
        ("commbench", {"BACKENDS": "glo"},
            "BACKENDS: invalid choice 'glo'; did you mean 'gloo'? (choose from gloo"),
        ("run", {"RECIPE": "ddp", "NODES": '2"; x'}, "NODES expects a whole number of at least 1, got '2\"; x'"),
        ("run", {"RECIPE": "ddp", "NPROC_PER_NODE": "-1"},
            "NPROC_PER_NODE expects a whole number of at least 1, got '-1'"),
        ("slurm-up", {"NODES": "2; x"}, "NODES expects a whole number of at least 1, got '2; x'"),
        ("submit", {"RECIPE": "ddp", "CPUS": "²"}, "CPUS expects a whole number of at least 1, got '²'"),
        ("plan", {"RECIPE": "ddp", "GPUS": "two"}, "GPUS expects a whole number of at least 0, got 'two'"),
        ("run", {"RECIPE": "ddp", "WITH": "podman"}, "WITH: unknown 'podman'; WITH=docker runs in containers"),
        ("run", {"RECIPE": "ddp", "ARGS": "--name it's"},
            'ARGS: no closing quotation in "--name it\'s"; put \\ before a quote or backslash '),
        ("test", {"ARGS": "x\n\\"}, "ARGS: no escaped character in 'x\\n\\\\'; "),
        ("drill", {"FAULTS": "kill-rank --plain"}, "FAULTS expects names separated by spaces, got '--plain'"),
        ("drill", {"FAULTS": "kil-rank"}, "FAULTS: invalid choice 'kil-rank'; did you mean 'kill-rank'? (choose"),
        ("evidence", {"CLAIMS": "one-cruve"}, "CLAIMS: invalid choice 'one-cruve'; did you mean 'one-curve'? (ch"),
        ("submit", {"RECIPE": "ddp", "GPUS": "8:h100"}, "GPUS expects a whole number, or a type and a "),
        ("k8s", {"RECIPE": "ddp", "GPUS": "h100:8"}, "GPUS expects a whole number of at least 0, got 'h100:8'"),
        ("same", {"GLOBAL_BATCH": "many"}, "GLOBAL_BATCH expects a whole number of at least 1, got 'many'"),
        ("plan", {"RECIPE": "ddp", "CHECK": "2"}, "CHECK is 1 (real runs on this machine) or mlperf ("),
        ("drill", {"SCRIPT": "train.py"}, "SCRIPT is for make run, submit, k8s and same; unset it"),
        ("k8s-delete", {}, "NAME is empty; name the job: make k8s-delete NAME=mine"),
        ("export", {"RUN": "runs/mine"}, "OUT is empty; make export RUN=runs/ddp-001 OUT=model.pt"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_before_anything_is_installed(monkeypatch, capsys, target, variables, error):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(make, "run_installer", lambda argv: pytest.fail(f"it runs {argv}"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert make.main([target]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {error}")
    assert text.count("\n") == 1


def check_typed(monkeypatch, target, flags):
    """Do what make.main() does with variables that are typed."""
    monkeypatch.setattr(make, "USED", set())
    monkeypatch.setenv("MAKEFLAGS", f"s -- {flags}")
    for name, text in make.typed_variables().items():
        monkeypatch.setenv(name, text)
    make.TARGETS[target]()
    make.check_used(target)


@pytest.mark.parametrize(
    ("target", "flags", "name", "said"),
    [
        ("run", "MODEL=resnet50 RECIPE=ddp", "MODEL", '; give the recipe\'s option: ARGS="--model resnet50"'),
        ("run", "RECIPE=ddp SEED=3", "SEED", '; give the recipe\'s option: ARGS="--seed 3"'),
        ("run", "RECIPE=ddp NNODES=2", "NNODES", "; did you mean 'NODES'?"),
        ("doctor", "NODE=2", "NODE", "; did you mean 'NODES'?"),
        ("run", "RECIPE=ddp nodes=2", "nodes", "; did you mean 'NODES'?"),
        ("run", "RECIPE=ddp GPUS=8", "GPUS", " (it has ARGS, MAX_RESTARTS, MIN_NODES"),
        ("submit", "RECIPE=ddp WITH=docker", "WITH", " (it has ACCOUNT, "),
        ("run", "RECIPE=ddp BATCH_SIZE=8", "BATCH_SIZE", " (it has ARGS, MAX_RESTARTS"),
        ("compare", "RECIPES=ddp WORLD_SIZE=2", "WORLD_SIZE", " (it has ARGS, NODES, NPROC_PER_NODE, RECIPES)"),
        ("list", "NODES=2", "NODES", " (it has none)"),
    ],
)
def test_a_typed_variable_that_a_target_ignores_is_refused(monkeypatch, target, flags, name, said):
    with pytest.raises(make.UserError, match=re.escape(f"{name} is not a variable of make {target}{said}")):
        check_typed(monkeypatch, target, flags)


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        ("run", "SCRIPT=train.py BATCH_SIZE=8"),
        ("submit", "RECIPE=ddp GPUS=h100:8 SITE_ENV=a.env CONTAINER_IMAGE=b MAX_REQUEUES=3 STAGE=venv.tar"),
        ("run", "RECIPE=ddp FABRIC=tcp"),
        ("plan", "RECIPE=ddp MODEL=resnet50"),
        ("drill", "SEED=3"),
        ("run", "SCRIPT=train.py RUNS_DIR=there RESUME=auto NCCL_DEBUG=INFO"),
        ("run", "RECIPE=ddp OMP_NUM_THREADS=1 MASTER_PORT=29501 RDZV_TIMEOUT_S=9 PYTHON=python3"),
    ],
)
def test_a_typed_variable_that_something_reads_is_taken(monkeypatch, target, flags):
    check_typed(monkeypatch, target, flags)


@pytest.mark.parametrize("command", ["make list", "scripts/launch.sh probe"])
def test_python_gets_all_standard_streams_and_no_variables_of_another_python(tmp_path, command):
    """Closed streams, as daemons have them, would be the next files that are opened."""
    wanted = "-z ${PYTHONHOME:-}${PYTHONSAFEPATH:-} && -e /dev/fd/0 && -e /dev/fd/1 && -e /dev/fd/2"
    python = write_program(tmp_path / "python", f"#!/usr/bin/env bash\n[[ {wanted} ]]\n")
    own = {"PYTHON": str(python), "PYTHONHOME": "/nowhere", "PYTHONSAFEPATH": "1"}
    assert run_command("bash", "-c", f"{command} <&- >&- 2>&-", **own).status == 0


def test_a_command_needs_no_standard_output():
    assert run_command("bash", "-c", f"{sys.executable} -m scripts.launch.local --list >&-").status == 0


def test_horovod_needs_no_home(tmp_path):
    """Services and some containers have no HOME."""
    python = write_program(tmp_path / "python", "")
    command = ["env", "-u", "HOME", "-u", "XDG_CACHE_HOME", "scripts/horovod/build.sh", "--if-missing"]
    result = run_command(*command, PYTHON=str(python))
    assert (result.status, result.stderr) == (0, "")


@pytest.mark.parametrize(("target", "variable"), [("drill", "FAULTS"), ("evidence", "CLAIMS")])
def test_names_are_checked_by_a_python_without_packages(target, variable):
    words = [sys.executable, "-S", "-m", "scripts.make", target]
    result = run_command(*words, **{variable: "x"})
    assert (result.status, len(result.errors)) == (2, 1), result.stderr
    assert result.stderr.startswith(f"error: {variable}: invalid choice 'x' (choose from ")


def test_a_folder_as_a_name_is_refused_before_anything_is_installed(monkeypatch):
    monkeypatch.setenv("RECIPE", "ddp")
    for name in ("/tmp/mine", "--list"):
        monkeypatch.setenv("NAME", name)
        with pytest.raises(make.UserError, match=r"^NAME expects at most 100 .*; --runs-dir in ARGS chooses"):
            make.run()


def test_the_list_of_variables_is_complete():
    names = set(re.findall(r'"([A-Z][A-Z_]+)"', (ROOT / "scripts/make.py").read_text()))
    others = {"FABRIC", "MAKEFLAGS", "MAKE_LINE", "PYTHON", "RESUME", "WSL_DISTRO_NAME"}
    assert names - set(make.VARIABLES) == others


def test_installation_comes_before_the_command(monkeypatch):
    calls = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(make, "run_installer", calls.append)
    monkeypatch.setattr(os, "execv", lambda path, argv: calls.append((os.environ.get("PYTHON"), path, argv)))
    monkeypatch.setenv("RECIPE", "horovod")
    monkeypatch.setenv("PYTHON", "python3.12")
    monkeypatch.setenv("ARGS", "--epochs 3")
    monkeypatch.setenv("MAKEFLAGS", " -- ARGS=--epochs\\ 3")
    monkeypatch.setenv("MAKE_LINE", "")  # the command sets it
    make.main(["run"])
    assert not {"ARGS", "MAKEFLAGS"} & set(os.environ)  # a make that the command calls starts afresh
    assert os.environ["MAKE_LINE"] == "make run ARGS='--epochs 3'"
    argv = [*RUN, "horovod", "--", "--epochs", "3"]
    assert calls == [
        ["scripts/dev/setup.sh", "run"],
        ["scripts/horovod/build.sh", "--if-missing"],
        (None, argv[0], argv),
    ]


def test_the_line_of_the_record_has_no_secrets(monkeypatch):
    secrets = ["HF_TOKEN=t", "AWS_SECRET_ACCESS_KEY=k", "X_PASSWD=p", "wandb_api_key=k", "GIT_PAT=p", "DB_PWD=p"]
    words = ["RECIPE=ddp", "AWS_REGION=eu", "HF_HOME=/x", "NCCL_IB_PKEY=1", "TOKENIZERS_PARALLELISM=false"]
    monkeypatch.setenv("MAKEFLAGS", " ".join([" --", *secrets, *words]))
    assert make.make_line("run") == f"make run {' '.join(reversed(words))}"


def test_the_line_of_the_record_has_the_order_in_which_it_was_typed(tmp_path, monkeypatch):
    """make itself lists the last variable first."""
    python = tmp_path / "python"
    write_program(python, PYTHON_THAT_DUMPS_ITS_ENVIRONMENT)
    typed = [f"PYTHON={python}", "RECIPE=ddp", "NODES=2", "NAME=mine", "ARGS=--epochs"]
    assert run_command("make", "run", *typed).status == 0
    environment = dict(item.split("=", 1) for item in (tmp_path / "environment").read_text().split("\0") if item)
    monkeypatch.setenv("MAKEFLAGS", environment["MAKEFLAGS"])
    assert make.make_line("run") == f"make run {' '.join(typed)}"


def test_a_failed_installation_is_the_end(monkeypatch):
    with pytest.raises(SystemExit) as caught:
        make.run_installer(["false"])
    assert caught.value.code == 1


def test_make_turns_every_failure_into_status_2():
    result = run_command("make", "run", "RECIPE=ddp", "ARGS=--name it's")
    assert result.status == 2
    fix = "put \\ before a quote or backslash that stands for itself"
    assert result.errors == [f'error: ARGS: no closing quotation in "--name it\'s"; {fix}']


# ---- scripts/dev/python.sh: which Python

RECENT, OLD = "exit 0", "exit 1"


def find_python(folder, pythons, **env):
    """Run python.sh with these Pythons in PATH (or .venv); return its status, output and errors."""
    bash = shutil.which("bash")
    (folder / "scripts/dev").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/dirname").symlink_to(shutil.which("dirname"))
    shutil.copy(ROOT / "scripts/dev/python.sh", folder / "scripts/dev")
    for name, version_check in pythons.items():
        path = folder / (name if name.startswith(".venv") else f"bin/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_program(path, f'#!{bash}\nif [[ $1 == -I ]]; then {version_check}; fi\necho "{name} $*"\n')
    command = [bash, str(folder / "scripts/dev/python.sh"), "-m", "module", "two words"]
    own = {"PATH": str(folder / "bin"), **env}
    result = subprocess.run(command, env=own, capture_output=True, text=True, timeout=30)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({".venv/bin/python": RECENT, "python3": RECENT}, ".venv/bin/python"),
        ({".venv/bin/python": OLD, "python3": RECENT}, "python3"),
        ({"python3": OLD, "python3.12": RECENT}, "python3.12"),
        ({"python3.11": RECENT}, "python3.11"),
    ],
)
def test_the_python_that_is_found(tmp_path, pythons, chosen):
    assert find_python(tmp_path, pythons) == (0, f"{chosen} -m module two words\n", "")


TOO_OLD = " is missing or older than Python 3.11; install it, or name one: PYTHON=python3.12 make ...\n"


@pytest.mark.parametrize(
    ("pythons", "env", "error"),
    [
        ({}, {}, f"python3{TOO_OLD}"),
        ({"python3": OLD}, {}, f"python3{TOO_OLD}"),
        ({"python3": RECENT, "python3.9": OLD}, {"PYTHON": "python3.9"}, f"python3.9{TOO_OLD}"),
        ({"p": "echo no libpython >&2; exit 127"}, {"PYTHON": "p"}, "p does not start: no libpython;"),
    ],
)
def test_no_python_is_recent_enough_or_starts(tmp_path, pythons, env, error):
    status, output, text = find_python(tmp_path, pythons, **env)
    assert (status, output) == (2, "")
    assert text.startswith(f"error: {error}")


def test_make_list_runs_without_a_recent_python3(tmp_path):
    """On RHEL 8 and 9, python3 is 3.6 or 3.9."""
    write_program(tmp_path / "python3", "exit 1")
    (tmp_path / "python3.13").symlink_to(sys.executable)
    result = run_command("make", "list", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (result.status, result.stderr) == (0, "")


# ---- scripts/dev/setup.sh: what it shows

PIP = """#!/usr/bin/env bash
case "$*" in
*" pip install "*)
    for i in {1..19}; do echo "Processing /wheels/small-$i.whl"; done
    echo "Collecting torch==2.14.1 (from -r requirements/run.txt (line 9))"
    echo "  Downloading torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl (888.1 MB)"
    echo "  Downloading https://files.example.com/packages/nvidia_cublas-13.1-py3-none-linux.whl (49.9 MB)"
    echo "  Using cached https://files.example.com/packages/triton-3.1-py3-none-linux.whl (50 MB)"
    echo "Installing collected packages: mpmath, triton, torch"
    exit "${PIP_STATUS:-0}"
    ;;
*" compileall "*)
    echo "$*" >>compiled
    exit 1 # as where a template is no Python
    ;;
*) exec REAL "$@" ;;
esac
"""


LIBRARY = Path(sysconfig.get_path("stdlib")).name


@pytest.fixture
def checkout(tmp_path):
    """Return a copy of the scripts and requirements with a .venv whose pip only prints."""
    for name in ("scripts/dev/setup.sh", "scripts/dev/python.sh", "requirements/run.txt", "requirements/dev.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    (tmp_path / ".venv/lib" / LIBRARY).mkdir(parents=True)
    write_program(python, PIP.replace("REAL", sys.executable))
    return tmp_path


@pytest.mark.parametrize("want", ["run", "dev"])
def test_setup_shows_what_it_installs_and_keeps_its_log(checkout, want):
    result = run_command(str(checkout / "scripts/dev/setup.sh"), want)
    assert (result.status, result.stdout) == (0, "")
    first, *others = result.stderr.splitlines()
    start = rf"setup: installing requirements/{want}\.txt into \.venv \(PyTorch with CUDA: about 6 GB"
    assert re.fullmatch(rf"{start} of the \d+ GB that are free, some minutes\); log: \.venv/setup\.log", first)
    assert others == [
        "setup: 20 packages",
        "setup: Downloading torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl (888 MB)",
        "setup: Using triton-3.1-py3-none-linux.whl (50 MB)",
        "setup: unpacking 3 packages",
        "setup: done",
    ]
    assert len((checkout / ".venv/setup.log").read_text().splitlines()) == 24
    assert (checkout / "compiled").read_text() == "-m compileall -q -j 0 .venv/lib\n"
    assert {path.name for path in (checkout / ".venv/.installed").iterdir()} == {"run.txt", f"{want}.txt"}
    write_program(checkout / "cmp", "echo not installed >&2; exit 127")
    again = run_command(str(checkout / "scripts/dev/setup.sh"), want, PATH=f"{checkout}:{os.environ['PATH']}")
    assert (again.status, again.stderr) == (0, "")
    (checkout / f".venv/.installed/{want}.txt").unlink()
    more = run_command(str(checkout / "scripts/dev/setup.sh"), want).stderr
    assert ("into .venv (only what is missing);" in more) == (want == "dev")


@pytest.mark.parametrize(
    "fault", ["has gone", *slow("has no pip, after an interruption", "is newer than its packages")]
)
def test_an_environment_whose_python_does_not_work_is_made_anew(checkout, fault):
    (checkout / "requirements/run.txt").write_text("")
    python = checkout / ".venv/bin/python"
    if fault != "has gone":
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", checkout / ".venv"], check=True)
    if "pip" not in fault:
        (checkout / ".venv/.installed").mkdir()
        (checkout / ".venv/.installed/run.txt").write_text("")
    if fault == "has gone":
        python.unlink()
        python.symlink_to("/nowhere/python3")
    elif "newer" in fault:
        (checkout / ".venv/lib" / LIBRARY).rename(checkout / ".venv/lib/python3.10")
    run_command(str(checkout / "scripts/dev/setup.sh"), "run", check=True)
    assert run_command(str(python), "-m", "pip", "--version").status == 0


def test_a_python_that_is_newer_than_the_packages_is_refused_in_a_line(checkout):
    lock = (ROOT / "requirements/run.txt").read_text()
    assert re.findall(r"triton==.*python_full_version < '(.*?)'", lock) == ["3.15"], "as setup.sh has it"
    shutil.rmtree(checkout / ".venv")
    (checkout / "requirements/run.txt").write_text("")
    newer = f"""#!/usr/bin/env bash
    case "$*" in
    *sys.executable*) echo "$0" ;;
    *"(3, 15)"*) exit 0 ;;
    -V) echo Python 3.15.0 ;;
    *) exec {sys.executable} "$@" ;;
    esac
    """
    write_program(checkout / "python3.15", newer)
    result = run_command(str(checkout / "scripts/dev/setup.sh"), "run", PYTHON=str(checkout / "python3.15"))
    assert (result.status, result.stdout) == (2, "")
    fix = "name an older one: PYTHON=python3.14 make setup"
    what = f"{checkout}/python3.15 is Python 3.15.0, for which requirements/ has no torch yet"
    assert result.stderr == f"error: {what}; {fix}\n"
    assert not (checkout / ".venv").exists()


def test_a_folder_in_which_no_environment_can_be_made_is_refused_in_a_line(checkout):
    folder = checkout.rename(checkout.with_name("a:b"))  # PATH could not hold its .venv
    shutil.rmtree(folder / ".venv")
    result = run_command(str(folder / "scripts/dev/setup.sh"), "run", PYTHON=sys.executable)
    assert result.status == 2
    assert "because it contains the PATH separator :" in result.stderr
    assert result.errors[0].endswith(f" could not make {folder}/.venv; its reason is above")


def test_setup_that_fails_shows_pips_last_lines(checkout):
    result = run_command(str(checkout / "scripts/dev/setup.sh"), "run", PIP_STATUS="1")
    assert result.status == 2
    assert "Installing collected packages: mpmath, triton, torch\n" in result.stderr
    fix = "its last lines are above, all of them in .venv/setup.log"
    assert result.errors == [f"error: pip could not install requirements/run.txt; {fix}"]
    assert not (checkout / ".venv/.installed/run.txt").exists()


def test_setup_installs_into_its_environment_whatever_pip_is_told(checkout):
    python = checkout / ".venv/bin/python"
    install = '*" pip install "*)\n'
    checks = "[[ -z ${PIP_TARGET:-}${PIP_PREFIX:-}${PIP_CONSTRAINT:-} && ${PIP_USER:-} == 0 ]] || exit 1\n"
    checks += "[[ $* == *' --target= '* ]] || exit 1\n"
    python.write_text(python.read_text().replace(install, install + checks))
    own = {"PIP_TARGET": "/elsewhere", "PIP_PREFIX": "/elsewhere", "PIP_USER": "1"}
    own["PIP_CONSTRAINT"] = "/etc/pip/constraint.txt"  # as NVIDIA's images of PyTorch set it
    assert run_command(str(checkout / "scripts/dev/setup.sh"), "run", **own).status == 0


def test_setup_in_a_folder_that_is_read_only_is_refused_in_a_line(checkout):
    (checkout / ".venv.lock").mkdir()  # root may write everywhere
    result = run_command(str(checkout / "scripts/dev/setup.sh"), "run")
    assert result.status == 2
    [line] = result.stderr.splitlines()
    said = f" cannot write {checkout}/.venv.lock, and .venv is to be made beside it; use a copy of your own"
    assert line.endswith(said)


def test_a_second_setup_waits_for_the_first_and_says_so(checkout):
    with open(checkout / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = Command(str(checkout / "scripts/dev/setup.sh"), "run")
        wait_until(lambda: second.text, 20, "the second set-up to say what it waits for")
        assert second.text == "setup: waiting for another set-up of .venv\n"
        assert second.process.poll() is None
    assert second.wait().status == 0


def test_a_setup_that_waits_ends_at_ctrl_c_without_a_word(checkout):
    with open(checkout / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = Command(str(checkout / "scripts/dev/setup.sh"), "run")
        wait_until(lambda: second.processes("flock(9, fcntl.LOCK_EX | 0)"), 20, lambda: second.text)
        os.killpg(second.process.pid, signal.SIGINT)
        result = second.wait(20)
    said = "setup: waiting for another set-up of .venv\n"
    assert (result.status, result.stdout, result.stderr) == (-signal.SIGINT, "", said)


@pytest.mark.parametrize("step", ["pip install", "compileall"])
def test_ctrl_c_ends_a_setup_and_the_next_begins_again(checkout, step):
    """pip and compileall handle it, and end with status 1."""
    python = checkout / ".venv/bin/python"
    whole = python.read_text()
    # Not at once: bash may end with 130 at a signal while it starts a pipeline, whatever its trap does.
    stop = 'sleep 0.5; trap "" INT; kill -INT 0; exit 1'
    python.write_text(whole.replace(f'*" {step} "*)\n', f'*" {step} "*)\n{stop}\n'))
    result = run_command(str(checkout / "scripts/dev/setup.sh"), "run")
    assert (result.status, result.errors) == (-signal.SIGINT, [])
    assert "setup: done" not in result.stderr
    assert not (checkout / ".venv/.installed/run.txt").exists()
    python.write_text(whole)
    again = run_command(str(checkout / "scripts/dev/setup.sh"), "run", check=True)
    assert again.stderr.endswith("setup: unpacking 3 packages\nsetup: done\n")


def test_a_script_without_arguments_shows_its_usage():
    for script, usage in (("scripts/launch.sh", "RECIPE [OPTIONS]"), ("scripts/dev/setup.sh", "run|dev|bench")):
        result = run_command(script)
        assert (result.status, result.stdout, result.stderr) == (2, "", f"usage: {script} {usage}\n")
