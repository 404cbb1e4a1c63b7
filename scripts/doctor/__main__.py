"""Check a cluster before training, and print a line for each fault, with its remedy.

    make doctor NODES=2                                   nodes on this machine
    NNODES=2 NODE_RANK=0 MASTER_ADDR=node-a MASTER_PORT=29500 python -m scripts.doctor      on each node

Success: the last line of node 0 is `doctor: all is well on 2 nodes, 12 s`, and its exit status is 0. The status is
1 if something is wrong and 2 for bad usage. The examination takes at most two minutes once all nodes have
connected; each wait has a time limit. docs/doctor.md explains each finding.

It reads the node-level variables of scripts/launch.sh. RDZV_ID is also the job's secret: a node that does not know
it is rejected. RDZV_TIMEOUT_S limits the wait for the other nodes (default: 60 s).
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from recipes.common.arguments import one_of, positive_float, positive_int
from recipes.common.errors import UserError
from recipes.common.process.node import Node
from recipes.common.process.rendezvous_errors import MissingNodeError
from recipes.common.process.threads import begin_in_threads
from scripts.doctor import collectives_job, folder, network, node, rendezvous, report
from scripts.doctor.case import Case
from scripts.doctor.folder import RunsFolder
from scripts.doctor.rules import judge, tally
from scripts.launch import local
from scripts.launch.agent import read_node
from scripts.launch.command import ROOT, CommandParser, command, parse, probe_folder, temporary_folder
from scripts.launch.echo import CONNECT_TIMEOUT_S, Echo, listen

DEFAULT_RDZV_TIMEOUT_S = 60
"""Time limit for the other nodes to connect, unless RDZV_TIMEOUT_S is set."""

FACTS_TIMEOUT_S = node.TORCH_TIMEOUT_S + 2 * node.COMMAND_TIMEOUT_S

EXAMINATION_S = 115.0
"""Time limit for all checks once all nodes have connected. The report names the checks that were skipped."""

HEALTH_CHECK_S = 9.0
"""The same limit for --quick on one node, which has to end within 10 s."""

say = partial(print, flush=True)


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the options; raises UserError."""
    parser = CommandParser("python -m scripts.doctor", __doc__)
    add = parser.add_argument
    add("--nodes", type=positive_int, metavar="N", help="start N nodes on this machine")
    add("--as-node", action="store_true", help=SUPPRESS)  # one of the N that --nodes starts
    add("--nproc-per-node", type=positive_int, metavar="P", help="processes per node, with --nodes")
    add("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="the folder that all nodes share")
    add("--json", type=Path, metavar="FILE", help="file for the full report, written by node 0")
    add("--quick", action="store_true", help="leave torch out: no all-reduce and bandwidth checks")
    add("--device", type=one_of("auto", "cpu", "cuda"), default="auto", help="auto, cpu or cuda")
    longest = "longest time for the all-reduce checks"
    add("--timeout-s", type=positive_float, default=60.0, metavar="S", help=longest)
    args = parse(parser, argv)
    if args.nproc_per_node and not args.nodes:
        raise UserError("--nproc-per-node needs --nodes; without it, set NPROC_PER_NODE")
    if args.json:
        check_report(args.json)
    return args


def check_report(path: Path) -> None:
    """Raise UserError unless node 0 can write its report there at the end."""
    try:
        if path.is_dir() or not path.name:
            raise UserError(f"--json {path} is a folder; name a file in it")
        if os.environ.get("NODE_RANK", "0") in ("", "0"):
            probe_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --json") from None


class Checks:
    """This node's checks: those of itself start at once, those with other nodes when node 0 orders them."""

    def __init__(self, this_node: Node, args: Namespace, secret: str) -> None:
        self.this_node, self.args, self.secret = this_node, args, secret
        self.folder = RunsFolder(args.runs_dir, secret, this_node.node_rank)
        within_s = node.QUICK_S if args.quick and this_node.nnodes == 1 else inf
        arguments = (this_node.master_addr, this_node.rdzv_timeout_s, args.runs_dir, args.quick, within_s)
        [self.own] = begin_in_threads([partial(node.gather, *arguments)], 1)
        self.echo: Echo | None = None
        self.facts: dict[str, Any] = {}

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out one of node 0's orders and return the answer."""
        orders: dict[str, Callable[[], dict[str, Any]]] = {
            "facts": self.answer_facts,
            "write": lambda: {"error": self.folder.write()},
            "see": lambda: {"seen": self.folder.see(order["writers"])},
            "peers": lambda: network.look_at_peers(order["peers"], self.this_node.node_rank, self.secret),
            "ranks": lambda: self.run_ranks(order),
        }
        return orders[order["do"]]()

    def answer_facts(self) -> dict[str, Any]:
        """Return this node's facts, with the port of its echo server, which answers from now on."""
        self.facts = self.own.result(FACTS_TIMEOUT_S)
        if self.facts["network"]:
            self.echo = Echo(self.facts["network"]["address"], self.secret)
            self.facts["echo_port"] = self.echo.port
        return self.facts

    def run_ranks(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run this node's ranks of the doctor's own job and return what they have found."""
        this_node = replace(self.this_node, master_addr=order["address"], master_port=order["port"])
        interface = self.facts["network"]["interface"]
        return collectives_job.run_ranks(this_node, interface, self.args.device, order["timeout_s"])

    def close(self) -> None:
        """Stop the echo server, and remove the probe's files from the runs folder."""
        if self.echo:
            self.echo.close()
        self.folder.remove()


def examine(case: Case, coordinator: rendezvous.Coordinator, args: Namespace) -> None:
    """Ask all nodes for what the rules need and store it in the case; skip an all-reduce that cannot succeed."""
    is_health_check = args.quick and case.nnodes == 1
    deadline = time.monotonic() + (HEALTH_CHECK_S if is_health_check else EXAMINATION_S)

    def ask(order: dict[str, Any], timeout_s: float, *keys: str) -> dict[int, dict[str, Any]]:
        left = deadline - time.monotonic()
        if left < min(0.5 if is_health_check else 10.0, timeout_s):
            case.skipped.append(order["do"])
            return {}
        return coordinator.ask_all(order, min(timeout_s, left), keys)

    facts = ("host", "names", "machine", "network", "cores", "errors", "gpus", "torch", "disk", "limits")
    case.facts = ask({"do": "facts"}, FACTS_TIMEOUT_S, *facts)
    case.written = ask({"do": "write"}, folder.WRITE_S + 5, "error")
    seen = ask({"do": "see", "writers": case.probed()}, folder.SEEN_TIMEOUT_S + 10, "seen")
    case.seen = {rank: answer["seen"] for rank, answer in seen.items()}
    peers = [
        {"rank": rank, "names": facts["names"], "address": facts["network"]["address"], "port": facts["echo_port"]}
        for rank, facts in case.facts.items()
        if facts["network"]
    ]
    # At worst each peer takes CONNECT_TIMEOUT_S, because its port does not answer, and NAME_TIMEOUT_S for each of
    # its two names, because the name server does not. PARALLEL peers are checked at a time.
    bound = 20 + (CONNECT_TIMEOUT_S + 2 * network.NAME_TIMEOUT_S) * (1 + len(peers) / network.PARALLEL)
    case.peers = ask({"do": "peers", "peers": peers}, bound)
    if args.quick or not can_all_reduce(case):
        return
    address = case.facts[0]["network"]["address"]
    bound = min(args.timeout_s, deadline - time.monotonic() - 5)
    order = {"do": "ranks", "address": address, "port": local.free_port(address), "timeout_s": bound}
    case.ranks = ask(order, args.timeout_s + node.COMMAND_TIMEOUT_S, "ranks")


def can_all_reduce(case: Case) -> bool:
    """Return whether all nodes are present, reach one another and have a working torch, as an all-reduce needs."""
    has_all = len(case.facts) == case.nnodes and not case.lost
    reach = all(found["stage"] == "done" for _, _, found in case.each_pair())
    torch = all("error" not in (facts["torch"] or {}) for facts in case.facts.values())
    return has_all and reach and torch and all(facts["network"] for facts in case.facts.values())


def lead(this_node: Node, args: Namespace, secret: str) -> int:
    """Act as node 0: gather the nodes, examine them and report; return the exit status."""
    began_at = time.monotonic()
    checks = Checks(this_node, args, secret)
    case = Case(this_node.nnodes, f"{this_node.master_addr}:{this_node.master_port}", this_node.rdzv_timeout_s)
    coordinator = rendezvous.Coordinator(case, secret, checks.carry_out)
    say(f"doctor: {report.count(this_node.nnodes, 'node')} at {case.master}")
    if this_node.nnodes > 1:
        try:
            address = node.listening_address(this_node.master_addr, this_node.rdzv_timeout_s)
            coordinator.gather(listen(address, this_node.master_port), this_node.rdzv_timeout_s, say)
        except (OSError, UserError) as error:
            what = f"node 0 ({socket.gethostname()}) cannot listen at {case.master}"
            why = getattr(error, "strerror", None) or error
            say(f"error: {what}: {why}; choose another MASTER_PORT, or fix MASTER_ADDR")
            return 1
    try:
        examine(case, coordinator, args)
        case.messages = checks.folder.read_messages() if this_node.nnodes > 1 else {}
        status = report_findings(case, args.json, began_at)
    finally:  # also at Ctrl-C, or if nobody reads the output any more
        checks.close()
    coordinator.end(status)
    return status


def report_findings(case: Case, path: Path | None, began_at: float) -> int:
    """Judge the case, write the file of --json and print the report; return the exit status."""
    findings = judge(case)
    seconds = time.monotonic() - began_at
    lines = report.lines(case, findings, seconds)
    status = 1 if tally(findings)["error"] else 0
    if path:
        try:
            report.write_json(path, case, findings, seconds)  # first: printing fails if nobody reads the output
        except OSError as error:
            lines.append(f"error: cannot write {path}: {error.strerror}; choose another --json")
            status = 1
    for line in lines:
        say(line)
    return status


def follow(this_node: Node, args: Namespace, secret: str) -> int:
    """Act as another node: connect to node 0 and carry out its orders; return the status that it sends."""
    checks = Checks(this_node, args, secret)
    here = f"node {this_node.node_rank} ({socket.gethostname()})"
    # Wait longer than node 0 does, even if this node has started earlier. Node 0 then gives up first and reports;
    # if this node failed first, a launcher would end node 0 before its report.
    wait_s = this_node.rdzv_timeout_s * 1.25 + 2
    try:
        try:
            channel = rendezvous.join(this_node, secret, wait_s / 2)
        except MissingNodeError as error:
            checks.folder.leave_message(str(error))  # node 0 reads it at the end of its own wait
            channel = rendezvous.join(this_node, secret, wait_s / 2)
        status = rendezvous.serve(channel, checks.carry_out, this_node.rdzv_timeout_s)
    except UserError as error:
        say(f"error: {here}: {error}")
        return 1
    checks.close()
    say(f"doctor: {here} is done; node 0 has the report (status {status})")
    return status


class LocalNodes(local.LocalJob):
    """The doctor's nodes on this machine; only node 0 reports."""

    def report(self, failed: list[int]) -> int:
        """Return the worst exit status of the nodes."""
        if self.interrupted_by:
            return super().report(failed)
        return max((abs(self.nodes[number].returncode) for number in failed), default=0)


def run_local(args: Namespace, words: Sequence[str]) -> int:
    """Start the nodes on this machine; return their worst exit status."""
    job = LocalNodes()
    signal.signal(signal.SIGINT, job.interrupt)
    signal.signal(signal.SIGTERM, job.interrupt)
    shares = local.assign_gpus(args.nodes, words)
    nproc = args.nproc_per_node or max(1, len(shares[0]))
    port, secret = local.free_port(), secrets.token_hex(16)
    with temporary_folder() as scratch:
        for rank in range(args.nodes):
            environment = local.node_environment(rank, args.nodes, nproc, shares[rank], port)
            environment |= {"RDZV_ID": secret, "TMPDIR": scratch}
            job.start([sys.executable, "-m", "scripts.doctor", *words], environment)
        status = job.wait()
    if any(node.returncode < 0 for node in job.nodes):  # killed before they could remove the probe's files
        RunsFolder(ROOT / args.runs_dir, secret, 0).remove()
    return status


@command
def main(argv: list[str]) -> int:
    """Return the exit status."""
    args = parse_args(argv)
    if args.nodes and not args.as_node:
        return run_local(args, [*argv, "--as-node"])
    this_node = read_node(DEFAULT_RDZV_TIMEOUT_S)
    # One node alone shares it with nobody. The name of its folder in --runs-dir, which may be /tmp, then cannot be
    # guessed by other users.
    secret = os.environ.get("RDZV_ID") or ("none" if this_node.nnodes > 1 else secrets.token_hex(16))
    return lead(this_node, args, secret) if this_node.node_rank == 0 else follow(this_node, args, secret)


if __name__ == "__main__":
    sys.exit(main())
