"""Start a recipe under mpirun: MPI assigns the ranks, then each process becomes its rank of the recipe.

    mpirun -np 4 python -m scripts.launch.mpirun recipes.ddp.train --epochs 3
    mpirun -np 4 python -m scripts.launch.mpirun train.py --lr 0.1           # a script of your own
    mpirun -np 4 python -m scripts.launch.mpirun --nproc-per-node 2 recipes.ddp.train   # two nodes on one host

It sets the variables that torchrun would set (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT) and numbers the ranks as torchrun does: node by node, whatever --map-by says. On several hosts it also
sets the network's environment (scripts/launch/fabric.sh). Then it closes MPI and replaces itself with
`python -m MODULE`, so that training runs without MPI. MASTER_ADDR and MASTER_PORT are kept if they are set.

- When a rank fails, mpirun adds lines of its own to the recipe's reason (Open MPI 4's `-q` omits them). The job's
  exit status is that of the rank that failed first, 2 for a refusal.
- USR1 sent to mpirun reaches the ranks: they write a checkpoint and leave with status 0. Use it to stop a job.
- TERM and Ctrl-C sent to mpirun kill the job: Open MPI 4 gives the ranks a TERM after one second and a KILL after
  another (`--mca odls_base_sigkill_timeout 10` makes both waits 10 s), Open MPI 5 a TERM at once and a KILL after
  half a second. It ends with status 1 in any case.
- A rank that is killed ends the job. If mpirun itself is killed, the ranks end too.
- MPICH's mpirun passes TERM on, and the ranks write a checkpoint. MPI4PY_MPIABI=mpich selects MPICH if Open MPI is
  installed, too. mpi4py loads libmpi.so.12, which Debian calls libmpich.so.12: link it into LD_LIBRARY_PATH.
- Horovod uses MPI itself: `mpirun -np 4 python -m recipes.horovod.train`, without this module.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
from argparse import REMAINDER, Namespace
from typing import TYPE_CHECKING, NoReturn

from recipes.common.arguments import Parser, positive_int
from recipes.common.errors import UserError, nearest
from recipes.common.process.entry import USAGE_STATUS, wait_for_rank_0
from recipes.common.process.parent import end_with_parent, exec_python
from recipes.common.process.ranks import bind_address, is_loopback
from recipes.common.process.signals import STOP_SIGNALS
from scripts.launch import script
from scripts.launch.command import recipes
from scripts.launch.echo import Echo, try_port
from scripts.launch.fabric import fabric_environment
from scripts.launch.interface import by_preference, interfaces_up
from scripts.launch.local import LOOPBACK, free_port

if TYPE_CHECKING:
    from mpi4py import MPI

SHELLS_OWN = ("PWD", "OLDPWD", "SHLVL", "_", "PYTHON")
"""Variables that a shell changes by itself, and PYTHON, the interpreter."""

USAGE = "mpirun -np 4 python -m scripts.launch.mpirun [--nproc-per-node N] recipes.ddp.train [OPTIONS]"

MPI_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
MPI_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
"""What mpirun (Open MPI, MPICH and its derivatives) and srun set before MPI starts; the first one set counts."""


def first_set(names: tuple[str, ...], default: int) -> int:
    """Return the number in the first of these variables that holds one, else the default."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), default)


def refuse(message: str, rank: int | None = None, status: int = USAGE_STATUS) -> NoReturn:
    """Exit with a status; rank 0 prints the reason in one line."""
    if (first_set(MPI_RANK, 0) if rank is None else rank) == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        wait_for_rank_0(status)
    sys.exit(status)


def parse_args(argv: list[str]) -> Namespace:
    """Return this module's own arguments, the module to start and its options; raises UserError."""
    parser = Parser("python -m scripts.launch.mpirun", __doc__)
    parser.add_argument("--nproc-per-node", type=positive_int, metavar="N", help="simulate nodes of N processes")
    parser.add_argument("module", nargs="?", default="", metavar="MODULE")
    parser.add_argument("options", nargs=REMAINDER, metavar="OPTIONS")
    args, unknown = parser.parse_known_args(argv)
    if unknown or not args.module:
        what = f"unknown option {unknown[0]}" if unknown else "no module to start"
        raise UserError(f"{what}; usage: {USAGE}")
    if args.module.endswith(".py"):
        os.environ["SCRIPT"] = args.module
        args.options = [str(script.read_script()), *args.options]
        args.module = "scripts.launch.script"
    check_module(args.module)
    return args


def check_module(name: str) -> None:
    """Raise UserError for a module that does not exist or that does not work with this launcher."""
    try:
        is_known = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        is_known = False
    if not is_known:
        known = sorted(f"recipes.{recipe}.train" for recipe in recipes())
        hint = nearest(name, known) or f"; one of {', '.join(known)}"
        raise UserError(f"there is no module {name}{hint}")
    if name == "recipes.horovod.train":
        raise UserError(f"horovod uses MPI itself; run mpirun -np 4 .venv/bin/python -m {name}")


def start_mpi() -> MPI.Comm:
    """Return the communicator of all processes; refuse if there is no MPI, or another one than mpirun's."""
    remedy = "pip install mpi4py, and apt-get install openmpi-bin or your cluster's MPI module"
    try:
        from mpi4py import MPI
    except ImportError as error:
        missing = "mpi4py is not installed" if error.name == "mpi4py" else f"mpi4py finds no MPI: {error}"
        refuse(f"{missing}; {remedy}")
    except RuntimeError as error:
        refuse(f"mpi4py finds no MPI: {' '.join(str(error).split())}; {remedy}")
    world = MPI.COMM_WORLD
    started = first_set(MPI_SIZE, 1)
    if world.size == 1 and started > 1:
        vendor = f"{MPI.get_vendor()[0]} {'.'.join(map(str, MPI.get_vendor()[1]))}"
        refuse(
            f"the launcher has started {started} processes, but mpi4py's MPI ({vendor}) sees only itself: "
            "it is not the launcher's; use the mpirun of that MPI, or srun --mpi=pmix"
        )
    return world


def own_addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this one, the most likely first."""
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        by_name = interfaces_up(family)
        found += [address for name in by_preference(by_name) for address in by_name[name]]
    return [address for address in found if not is_loopback(address) and not address.startswith("fe80:")]


def choose_address(world: MPI.Comm, local: MPI.Comm, is_one_host: bool) -> tuple[str, int]:
    """Return an address of rank 0 that every node has reached, and a free port there; call it on all ranks."""
    given = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if is_one_host else "")
    echo = None
    offer: tuple[list[str], int, str] | None = None
    if world.rank == 0:
        try:
            token = secrets.token_hex(16)
            place = bind_address(given)
            echo = Echo(place, token, int(os.environ.get("MASTER_PORT") or free_port(place)))
            candidates = [given] if given else [*own_addresses(), socket.getfqdn()]
            offer = candidates, echo.port, token
        except (OSError, ValueError, OverflowError) as error:
            what = f"MASTER_PORT {os.environ.get('MASTER_PORT')}: {error}"
            print(f"error: {what}; choose another one", file=sys.stderr)
    offer = world.bcast(offer)
    if offer is None:
        sys.exit(USAGE_STATUS)
    candidates, port, token = offer
    chosen = None
    for address in candidates:
        # One process of each node tries; the others vote yes.
        answer = local.rank > 0 or try_port(address, port, token, size=0)["stage"] == "done"
        if all(world.allgather(answer)):
            chosen = address
            break
    if echo:
        echo.close()
    if chosen is None:
        refuse(f"no node reaches rank 0 at {', '.join(candidates)}, port {port}; set MASTER_ADDR", world.rank)
    return chosen, port


def process_variables(world: MPI.Comm, nproc_per_node: int | None) -> dict[str, str]:
    """Return the environment variables of this process's rank; call it on all ranks."""
    from mpi4py import MPI

    host = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    local = host.Split(host.rank // nproc_per_node, key=host.rank) if nproc_per_node else host
    # Order the nodes by their lowest MPI rank, and the ranks within a node as MPI does.
    nodes = world.allgather((local.bcast(world.rank), local.rank, world.rank))
    rank = [mpi_rank for _, _, mpi_rank in sorted(nodes)].index(world.rank)
    is_one_host = host.size == world.size
    address, port = choose_address(world, local, is_one_host)
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(local.size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # By this one, Lightning knows torchrun's variables; otherwise it asks MPI, which is closed and aborts it.
        "TORCHELASTIC_RUN_ID": "mpirun",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1",
    }
    if not os.environ.get("MASTER_PORT"):
        variables["PORT_IS_CHOSEN"] = "1"
    if is_one_host and not os.environ.get("GLOO_SOCKET_IFNAME"):
        variables["GLOO_SOCKET_IFNAME"] = LOOPBACK
    if not is_one_host:
        os.environ.update(variables)
        variables |= fabric_variables(world, local)
    return variables


def fabric_variables(world: MPI.Comm, local: MPI.Comm) -> dict[str, str]:
    """Return what fabric.sh sets on this host; the first rank of each prints it; call it on all ranks."""
    environment, said, problem = dict(os.environ), "", ("", 0)
    try:
        environment, said = fabric_environment(FABRIC="auto")
    except UserError as error:
        problem = str(error), error.status
    except subprocess.TimeoutExpired as error:
        problem = str(error), USAGE_STATUS
    if problems := [(text, status) for text, status in world.allgather(problem) if text]:
        text, status = problems[0]
        refuse(text, world.rank, status)
    if local.rank == 0:
        print(said, end="", flush=True)
    changed = environment.items() - os.environ.items()
    return {name: value for name, value in changed if name not in SHELLS_OWN}


def main() -> None:
    """Agree on the ranks with the other processes, then become the module."""
    # A stop signal waits until the recipe listens: a blocked signal stays pending across exec.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    end_with_parent()
    try:
        args = parse_args(sys.argv[1:])
    except UserError as error:
        refuse(str(error))
    world = start_mpi()
    os.environ.update(process_variables(world, args.nproc_per_node))
    from mpi4py import MPI

    MPI.Finalize()  # mpirun still watches the processes after this call
    exec_python(["-m", args.module, *args.options])


if __name__ == "__main__":
    main()
