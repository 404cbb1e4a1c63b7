"""Keep this node in an elastic job: run its agent, and run it again if it was killed or has lost the store.

    MIN_NODES=2 NNODES=4 NODE_RANK=1 MASTER_ADDR=node-a python -m scripts.launch.rejoin ddp --name mine

scripts/launch.sh calls it if MIN_NODES is set. The nodes meet in the store at RDZV_ENDPOINT (host:port); without
it, node 0 serves a store at MASTER_ADDR:MASTER_PORT. MAX_RESTARTS (3) limits the agent's restarts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from recipes.common.arguments import read_number
from recipes.common.errors import UserError
from recipes.common.folders import refresh_names
from recipes.common.process.entry import USAGE_STATUS
from recipes.common.process.node import check_host, check_port, how_ended, read_master
from recipes.common.process.parent import end_with_launcher
from recipes.common.process.ranks import bind_address
from recipes.common.process.rendezvous_errors import MissingNodeError, MissingStoreError
from recipes.common.process.signals import STOP_SIGNALS
from scripts.launch import script
from scripts.launch.command import check_elastic, command
from scripts.launch.processes import run, start_process
from scripts.launch.recipe_options import read_option

LOST_STATUS = 69
"""Exit status of an agent that has lost the store; its node may rejoin (EX_UNAVAILABLE of sysexits.h)."""

RETURN_AFTER_S = 1.0
"""Wait before an agent is restarted: what broke it may need a moment to recover."""

HAS_RETURNED = "HAS_RETURNED"
"""Variable of an agent, not empty if an earlier agent of its node was lost, together with its ranks."""

MOST_NODES = 512
"""Elastic jobs were tried with up to this many nodes: see docs/elastic.md."""

STORE_LINGER_S = 3.0
"""How long node 0's store outlives its ranks: other nodes read from it how the job has ended."""


def say(text: str) -> None:
    """Print a line about the job's nodes to standard error, apart from the recipe's output."""
    print(f"elastic: {text}", file=sys.stderr, flush=True)


def resume_hint() -> str:
    """Return the hint to print if an elastic job ends before its run is complete."""
    return f"to resume: the same command with {'RESUME=auto' if script.is_set() else '--resume auto'}"


class UnsavedStopError(UserError):
    """This node was stopped, but its ranks had ended without a checkpoint."""

    status = 1


def report_unsaved_stop(number: int) -> int:
    """Print that a stop signal came while no ranks ran, since they were killed or failed; return the status."""
    name = signal.Signals(number).name
    reason = f"stopped by {name} while no ranks ran: this node's ranks had ended without a checkpoint"
    print(f"error: {reason}; {resume_hint()}", file=sys.stderr, flush=True)
    return UnsavedStopError.status


def last_launch(options: list[str]) -> str:
    """Return what identifies the newest launch of the run that the options name; "none" if it has none."""
    folder = Path(read_option("--runs-dir", "runs", options)) / read_option("--name", "", options)
    refresh_names(folder)  # another node may have begun the launch just now
    try:
        return str(json.loads((folder / "config.json").read_text())["launches"][-1].get("id", "unknown"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # there is none, or it is damaged
        return "none"


def options_of_later_rounds(options: list[str], replaced: str) -> list[str]:
    """Return the options of a round after the first: they resume the run from its newest checkpoint.

    `replaced` is what last_launch() returned before the first round: --overwrite replaces a run whose launch it
    still is, since no round has begun a new one. A script reads RESUME instead of options, which is set here for
    everything that this process starts from now on.
    """
    if script.is_set():
        os.environ["RESUME"] = "auto"
        return options
    if read_option("--resume", "none", options) != "auto" and last_launch(options) == replaced != "none":
        return options
    return [*options, "--resume", "auto"]


def check_variables(options: list[str]) -> int:
    """Check the job's variables and return MAX_RESTARTS; raises UserError for invalid ones or a missing --name."""
    nnodes, min_nodes = read_number("NNODES", 1, at_least=1), read_number("MIN_NODES", 1, at_least=1)
    if min_nodes > nnodes:
        raise UserError(f"MIN_NODES {min_nodes} is more than NNODES {nnodes}; lower it")
    if nnodes > MOST_NODES and read_number("NODE_RANK", 0, at_least=0) == 0:
        say(
            f"warning: elastic jobs are for up to {MOST_NODES} nodes, and of {nnodes} healthy ones may count as "
            "lost; use fewer, or unset MIN_NODES and resume from checkpoints"
        )
    endpoint = os.environ.get("RDZV_ENDPOINT", "")
    host, _, port = endpoint.rpartition(":")
    if endpoint and not (host and port.isdigit() and int(port) <= 65535):
        raise UserError(f"RDZV_ENDPOINT expects host:port, got {endpoint!r}")
    check_host(host)
    if host.startswith("["):  # [fd00::1]:29500, as IPv6 addresses are written; connections take them without
        os.environ["RDZV_ENDPOINT"] = f"{host.strip('[]')}:{port}"
    if not script.is_set() and not read_option("--name", "", options):
        raise UserError("an elastic job needs a name to resume after a restart; add --name")
    return read_number("MAX_RESTARTS", 3, at_least=0)


def start_store(store: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes] | None:
    """Start the job's store unless it runs already; return its process, or None if this node serves none."""
    if os.environ.get("RDZV_ENDPOINT") or read_number("NODE_RANK", 0, at_least=0) > 0:
        return None
    address, port = read_master(1)
    if store is None:
        check_port(port)
    elif store.poll() is None:
        return store
    command = [sys.executable, "-m", "scripts.launch.elastic", str(port), bind_address(address)]
    return start_process(command, os.environ)


def run_with_restarts(options: list[str], max_restarts: int, agent: list[str]) -> int:
    """Run the agent, again each time it is lost, up to max_restarts times; return this node's exit status."""
    store: subprocess.Popen[bytes] | None = None
    replaced = last_launch(options)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # also in the agents, until they handle them
    for restart in range(max_restarts + 1):
        store = start_store(store)
        status, was_stopped = run([*agent, *options], {**os.environ, HAS_RETURNED: "1" if restart else ""})
        # was_stopped holds the signals received so far. Later ones wait until the next agent runs.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        if was_stopped or (status <= 128 and status != LOST_STATUS):
            # A refusal ends the whole job. After a restart it concerns only this node, which then counts as lost.
            if restart and status in (USAGE_STATUS, MissingStoreError.status):
                status = LOST_STATUS
            elif status == MissingStoreError.status:
                status = MissingNodeError.status
            break
        how = "lost the store" if status == LOST_STATUS else how_ended(128 - status)
        if restart == max_restarts:
            say(f"this node's agent {how}; no more returns (MAX_RESTARTS {max_restarts})")
            status = LOST_STATUS  # lost for good; the other nodes continue
            break
        say(f"this node's agent {how}; return {restart + 1} of at most {max_restarts}")
        options = options_of_later_rounds(options, replaced)
        if stop := signal.sigtimedwait(STOP_SIGNALS, RETURN_AFTER_S):
            status = report_unsaved_stop(stop.si_signo)
            break
    if store:
        time.sleep(STORE_LINGER_S)
        store.kill()
    return status


@command
def main(argv: list[str]) -> int:
    """Run this node; return its exit status."""
    end_with_launcher()
    recipe, *options = argv
    check_elastic(recipe)
    agent = [sys.executable, "-m", "scripts.launch.agent", recipe]
    return run_with_restarts(options, check_variables(options), agent)


if __name__ == "__main__":
    sys.exit(main())
