"""Run a target of the Makefile: turn make's variables into a command's arguments, and become that command.

    RECIPE=ddp NODES=2 ARGS="--epochs 3" scripts/dev/python.sh -m scripts.make run

`make run RECIPE=ddp NODES=2 ARGS="--epochs 3"` calls it. Variables arrive in the environment, as typed: neither
make nor a shell expands them; ~/ at the start of a path is the home folder. ARGS is split into arguments by a
shell's rules for quotes. An invalid variable is reported in one line, with status 2, before anything is
installed. This module needs no package: it creates .venv for the targets that use it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from recipes.common.arguments import plain_name, read_number
from recipes.common.errors import UserError, nearest
from recipes.common.options import Options
from recipes.common.process.node import shell_status
from scripts.bench.commbench.options import BACKENDS
from scripts.bench.figures import PARTS
from scripts.launch.command import ROOT, check_names, check_recipe, command, gpus

VENV_PYTHON = ".venv/bin/python"

LEAST = dict.fromkeys(("NODES", "NPROC_PER_NODE", "CPUS", "MIN_NODES", "ROUNDS", "GLOBAL_BATCH", "STOP_AFTER"), 1)
LEAST |= dict.fromkeys(("GPUS", "MAX_RESTARTS", "SEED"), 0)
"""The least value of each variable that is a whole number; the programs check other bounds."""

VARIABLES = """
    ACCOUNT ARGS BACKENDS CHECK CLAIMS COMPONENTS CONSTRAINT CPUS DATA_DIR FAULTS FROM GLOBAL_BATCH GPUS IMAGE KIND
    LAUNCH LOCAL LOSS MAX_RESTARTS MEM MIN_NODES MODEL NAME NAMESPACE NODES NPROC_PER_NODE OUT PARTITION PARTS QOS
    RECIPE RECIPES RENDER REPORT ROUNDS RUN SCRIPT SEED STOP_AFTER SWEEP TIME WITH WORLD_SIZES
""".split()  # noqa: SIM905 (a list takes a line for each)
"""Variables of some targets, which others refuse. Not FABRIC and RESUME: scripts/launch.sh reads them as well."""

PATHS = ("DATA_DIR", "OUT", "REPORT", "RUN")
"""Variables in which ~/ is the home folder: zsh, and bash within quotes, leave it as it is."""

WITH_OPTIONS = ("run", "submit", "k8s", "compare", "plan")
"""Targets whose ARGS take the options of a recipe."""

PASSED_ON = re.compile(
    r"(APT|AWS|CONTAINER|CUDA|DATA|DOCKER|FABRIC|FI|GLOO|GOMP|HF|HOROVOD|IMAGE|KMP|KUBECONFIG|KUBECTL|LD|MASTER|MAX|"
    r"MKL|NCCL|OMP|OMPI|PYTHON|PYTORCH|RDZV|REGISTRY|RESUME|RUNS|SBATCH|SITE|SLURM|STAGE|START|TAG|TORCH|"
    r"TORCHINDUCTOR|UCX|USE)(_|$)"
)
"""Variables that launchers, torch and its libraries read; make passes on those that are typed."""

SECRET = re.compile(r"(?<!IB_P)KEY|TOKEN(?!IZER)|SECRET|PASSW|PWD|CREDENTIAL|_PAT$", re.IGNORECASE)
"""Found in the names of variables that make_line() leaves out: a run's record and its output have that line."""

USED: set[str] = set()
"""The variables that the target reads."""


@dataclass(frozen=True)
class Command:
    """A command, and what must be installed before it runs."""

    argv: list[str]
    packages: str = "run"
    """The list of requirements/ that .venv must hold; "" if the command needs none."""
    needs_horovod: bool = False


def value(name: str) -> str:
    """Return a variable, "" if it is not set; raises UserError if it is none of the numbers that LEAST allows."""
    USED.add(name)
    if name in LEAST:
        read_number(name, LEAST[name], LEAST[name])
    text = os.environ.get(name, "")
    return at_home(text) if name in PATHS else text


def at_home(word: str) -> str:
    """Return a word in which a ~/ at its start, or after --option=, is the home folder."""
    home = os.path.expanduser("~")  # noqa: PTH111 (Path.expanduser() raises an error if there is no home)
    return re.sub(r"\A(--[\w-]+=)?~(?=/)", lambda found: (found[1] or "") + home, word)


def is_on(name: str) -> bool:
    """Whether a switch such as LOCAL=1 is set, and not to 0."""
    return value(name) not in ("", "0")


def recipe() -> str:
    """Return RECIPE, by default ddp for a SCRIPT; raises UserError if there is no such recipe."""
    return check_recipe(value("RECIPE") or ("ddp" if value("SCRIPT") else ""))


def choices(name: str, known: Iterable[str] = ()) -> list[str]:
    """Return the items of RECIPES="single ddp" or "single,ddp"; raises UserError for options or unknown names."""
    items = value(name).replace(",", " ").split()
    for item in items:
        if item.startswith("-"):
            raise UserError(f"{name} expects names separated by spaces, got {item!r}")
    return check_names(name, items, list(known)) if known else items


def args() -> list[str]:
    """Return the arguments in ARGS, ~/ being the home folder; raises UserError for an unfinished quote."""
    text = value("ARGS")
    try:
        words = shlex.split(text)
    except ValueError as error:
        fix = "put \\ before a quote or backslash that stands for itself"
        raise UserError(f"ARGS: {str(error).lower()} in {text!r}; {fix}") from None
    return [at_home(word) for word in words]


def flags(*names: str, **named: str) -> list[str]:
    """Return --flag=VALUE for each variable that is set: NODES is --nodes, and `named` holds variables by flag."""
    variables = {name: name for name in names} | named
    return [f"--{flag.lower().replace('_', '-')}={value(name)}" for flag, name in variables.items() if value(name)]


def one_node_unless_set() -> list[str]:
    """Return --nodes, by default 1, for programs whose own default is not one node on this machine."""
    return flags("NODES") or ["--nodes=1"]


def module(name: str, argv: list[str], packages: str = "run", needs_horovod: bool = False) -> Command:
    """Return the command that runs a module in .venv, or in this Python if it needs no packages."""
    return Command([VENV_PYTHON if packages else sys.executable, "-m", name, *argv], packages, needs_horovod)


def run() -> Command:
    """Return the command that runs a recipe on this machine, in processes or in containers."""
    if value("WITH") not in ("", "docker"):
        raise UserError(f"WITH: unknown {value('WITH')!r}; WITH=docker runs in containers")
    own, name = flags("NODES", "NPROC_PER_NODE", "MIN_NODES", "MAX_RESTARTS"), flags("NAME")
    if name and not value("SCRIPT"):
        try:
            plain_name(value("NAME"))
        except argparse.ArgumentTypeError as error:
            raise UserError(f"NAME {error}; --runs-dir in ARGS chooses the folder") from None
        if any(re.match("--name(=|$)", word) for word in args()):
            raise UserError(f"NAME={value('NAME')}, and ARGS has --name; give one of them")
    options = [recipe(), *own, "--", *name, *args()]
    if value("SCRIPT"):  # the launcher takes the name
        options = [recipe(), *own, *name, "--", *args()]
    if value("WITH"):  # runs on the host's Python
        return module("docker.compose", options, packages="")
    is_refused = value("MIN_NODES")  # the launcher refuses Horovod's elastic jobs: do not build it first
    return module("scripts.launch.local", options, needs_horovod=recipe() == "horovod" and not is_refused)


def plan() -> Command:
    """Return the command that runs the planner or, with CHECK, compares it with runs."""
    check = value("CHECK")
    if check not in ("", "0", "1", "mlperf"):
        raise UserError(f"CHECK is 1 (real runs on this machine) or mlperf (published runs), got {check!r}")
    if check == "mlperf":
        return module("scripts.plan.published", args())
    if check == "1":
        return module("scripts.bench.namespaces", ["plan", *flags("ROUNDS"), *args()])
    return module("scripts.plan", [recipe(), *flags("NODES", "GPUS", "FABRIC", "MODEL"), *args()])


def gpus_of_slurm() -> list[str]:
    """Return --gpus-per-node for GPUS=8, or with Slurm's name of their type, GPUS=h100:8; raises UserError."""
    USED.add("GPUS")
    text = os.environ.get("GPUS")
    try:
        return [f"--gpus-per-node={gpus(text)}"] if text else []
    except argparse.ArgumentTypeError as error:
        raise UserError(f"GPUS {error}") from None


def submit() -> Command:
    """Return the command that submits a recipe to Slurm."""
    own = flags("NODES", "NPROC_PER_NODE", "PARTITION", "TIME", "MEM", "CONSTRAINT", "ACCOUNT", "QOS")
    own += flags("NAME", "SWEEP") + gpus_of_slurm() + flags(cpus_per_task="CPUS")
    if is_on("LOCAL"):
        own.append("--local")
    return module("slurm.submit", [recipe(), *own, "--", *args()])


def k8s() -> Command:
    """Return the command that runs a recipe on Kubernetes."""
    own = one_node_unless_set() + flags("KIND", "GPUS", "IMAGE", "FABRIC", "COMPONENTS", "NAME", "NAMESPACE")
    if is_on("RENDER"):
        own.append("--render")
    return module("k8s.apply", [recipe(), *own, "--", *args()])


def required(example: str, *names: str) -> list[str]:
    """Return the values of variables; raises UserError with an example if one is empty."""
    for name in names:
        if not value(name):
            raise UserError(f"{name} is empty; {example}")
    return [value(name) for name in names]


def k8s_delete() -> Command:
    """Return the command that deletes a job from Kubernetes."""
    required("name the job: make k8s-delete NAME=mine", "NAME")
    return module("k8s.apply", flags("NAMESPACE", delete="NAME"))


def compare() -> Command:
    """Return the command that compares recipes."""
    recipes = [check_recipe(name) for name in choices("RECIPES")]
    own = [*recipes, *flags("NODES", "NPROC_PER_NODE"), "--", *args()]
    return module("scripts.bench.compare", own, needs_horovod="horovod" in recipes)


def same() -> Command:
    """Return the command that runs a script at several world sizes and compares what it does."""
    own = flags("GLOBAL_BATCH", "WORLD_SIZES", "RESUME", "STOP_AFTER", "LAUNCH", "LOSS")
    return module("scripts.same", [value("SCRIPT"), *own, "--", *args()])


def bench() -> Command:
    """Return the command that measures speed; one part of it compares with Horovod."""
    parts = choices("PARTS", PARTS)
    own = [*parts, *flags("ROUNDS"), *args()]
    return module("scripts.bench", own, packages="bench", needs_horovod=not parts or "wire" in parts)


def commbench() -> Command:
    """Return the command that measures collectives."""
    own = [*choices("BACKENDS", BACKENDS), *flags("NODES", "NPROC_PER_NODE"), *args()]
    return module("scripts.bench.commbench", own, needs_horovod="horovod" in choices("BACKENDS"))


def drill() -> Command:
    """Return the command that plants faults in jobs."""
    from scripts.drill.faults import FAULTS

    return module("scripts.drill", [*choices("FAULTS", FAULTS), *flags("NODES", "ROUNDS", "SEED")])


def evidence() -> Command:
    """Return the command that checks the claims of the documents."""
    from scripts.bench.claims import read_claims

    own = [*choices("CLAIMS", read_claims()), *flags("REPORT"), "--", *args()]
    return module("scripts.bench.evidence", own, packages="dev")


TARGETS: dict[str, Callable[[], Command]] = {
    "list": lambda: module("scripts.launch.local", ["--list"], packages=""),
    "run": run,
    "new": lambda: module("scripts.dev.new", flags("NAME", "FROM"), packages=""),
    "shards": lambda: module(
        "scripts.dev.shards",
        [*args(), *required("make shards DATA_DIR=/data/imagenet OUT=/data/imagenet-shards", "DATA_DIR", "OUT")],
    ),
    "export": lambda: module(
        "scripts.dev.export",
        [*args(), "--", *required("make export RUN=runs/ddp-001 OUT=model.pt", "RUN", "OUT")],
    ),
    "doctor": lambda: module("scripts.doctor", [*one_node_unless_set(), *flags("NPROC_PER_NODE"), *args()]),
    "image": lambda: Command(["docker/image.sh", "build", recipe()], packages=""),
    "push": lambda: Command(["docker/image.sh", "push", recipe()], packages=""),
    "submit": submit,
    "horovod": lambda: Command(["scripts/horovod/build.sh"]),
    "compare": compare,
    "same": same,
    "drill": drill,
    "bench": bench,
    "commbench": commbench,
    "plan": plan,
    "report": lambda: module("scripts.bench.report", []),
    "evidence": evidence,
    "slurm-up": lambda: Command(["scripts/lab/slurm_cluster.sh", "up", value("NODES") or "2"], packages=""),
    "k8s": k8s,
    "k8s-delete": k8s_delete,
    "test": lambda: Command(["scripts/dev/test.sh", "quick", *args()], packages="dev"),
    "test-all": lambda: Command(["scripts/dev/test.sh", "all", *args()], packages="dev"),
}


def run_installer(argv: list[str]) -> None:
    """Run a script that installs something; exit with its status if it fails."""
    if status := subprocess.run(argv).returncode:
        sys.exit(shell_status(status))


def typed_variables() -> dict[str, str]:
    """Return the variables as typed in make's command line; MAKEFLAGS lists them backwards after a lone --."""
    flags, _, variables = f" {os.environ.get('MAKEFLAGS', '')}".partition(" -- ")
    if re.match(r" \w+=", flags):  # make before 4.0 (macOS, RHEL 7) leaves out the dashes if there are no flags
        variables = flags
    # make escapes blanks and backslashes with a backslash, and leaves quotes and line breaks as they are.
    words = [re.sub(r"(?s)\\(.)", r"\1", word) for word in re.findall(r"(?s)(?:\\.|[^ ])+", variables)]
    return {name: text for name, _, text in (word.replace("$$", "$").partition("=") for word in reversed(words))}


def make_line(target: str) -> str:
    """Return what was typed, as a shell command, without secrets."""
    shown = {name: text for name, text in typed_variables().items() if not SECRET.search(name)}
    return " ".join([f"make {target}", *(f"{name}={shlex.quote(text)}" for name, text in shown.items())])


def check_used(target: str) -> None:
    """Raise UserError for a typed variable that the target ignores, such as a recipe's option or a misspelling."""
    has_options = target in WITH_OPTIONS and not os.environ.get("SCRIPT")
    options = {one.name for one in fields(Options)} if has_options else set()
    for name, text in typed_variables().items():
        if name in USED:
            continue
        what = f"{name} is not a variable of make {target}"
        if name.lower() in options:
            flag = name.lower().replace("_", "-")
            raise UserError(f'{what}; give the recipe\'s option: ARGS="--{flag} {shlex.quote(text)}"')
        if hint := nearest(name, USED, cutoff=0.8):
            raise UserError(f"{what}{hint}")
        if name in VARIABLES or (options and not PASSED_ON.match(name)):
            what += f" (it has {', '.join(sorted(USED)) or 'none'})"
            if name not in VARIABLES:
                what += f"; as an environment variable, it comes before make: {name}=... make"
            raise UserError(what)


def drop_name_of_wsl() -> None:
    """Remove a NAME that nobody typed: WSL 2 sets it to the host's name in every shell."""
    is_the_hosts = os.environ.get("NAME", "").lower() == socket.gethostname().lower()
    if is_the_hosts and os.environ.get("WSL_DISTRO_NAME") and "NAME" not in typed_variables():
        del os.environ["NAME"]


@command
def main(argv: list[str]) -> None:
    """Install what a target needs, then become its command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while something is installed: no traceback
    os.chdir(ROOT)
    drop_name_of_wsl()
    if os.environ.get("SCRIPT") and argv[0] not in ("run", "submit", "k8s", "same"):
        raise UserError("SCRIPT is for make run, submit, k8s and same; unset it")
    chosen = TARGETS[argv[0]]()
    check_used(argv[0])
    if argv[0] in ("run", "submit"):
        os.environ["MAKE_LINE"] = make_line(argv[0])  # for the run's record
    for name in ("ARGS", "MAKEFLAGS"):  # hidden from a make that the command itself calls: a test, a build
        os.environ.pop(name, None)
    if chosen.packages:
        run_installer(["scripts/dev/setup.sh", chosen.packages])
        os.environ.pop("PYTHON", None)  # it chose the Python that makes .venv, whose own is used from here on
    if chosen.needs_horovod:
        run_installer(["scripts/horovod/build.sh", "--if-missing"])
    os.execv(chosen.argv[0], chosen.argv)


if __name__ == "__main__":
    sys.exit(main())
