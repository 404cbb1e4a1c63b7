"""Look at a cluster before training on it, and name what is wrong with its remedy, a line each.

    make doctor NODES=2                                   nodes on this machine
    NNODES=2 NODE_RANK=0 MASTER_ADDR=node-a MASTER_PORT=29500 python -m scripts.doctor      on each node

Success: the last line of node 0 is `doctor: all is well on 2 nodes, 12 s`, and the status 0; it is 1 where
something is wrong and 2 for bad usage. It takes two minutes at most from the moment that all nodes are there. Each
wait has a bound. docs/doctor.md explains each finding.

It reads the node-level variables of scripts/launch.sh. RDZV_ID is also the job's word: who does not know it is not
talked to. RDZV_TIMEOUT_S bounds the wait for the other nodes (60 s here).
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.options import one_of, positive_float, positive_int
from recipes.common.process.meeting import MissingNodeError
from recipes.common.process.node import Node
from scripts.doctor import folder, meeting, network, node, ranks, report
from scripts.doctor.folder import RunsFolder
from scripts.doctor.rules import Case, judge, tally
from scripts.launch import local
from scripts.launch.agent import read_node
from scripts.launch.command import CommandParser, command, parse
from scripts.launch.echo import CONNECT_TIMEOUT_S, Echo, listen

WAIT_S = 60
"""For the other nodes to come, where RDZV_TIMEOUT_S is not set."""

FACTS_TIMEOUT_S = node.TORCH_TIMEOUT_S + 2 * node.COMMAND_TIMEOUT_S

EXAMINATION_S = 115.0
"""For everything from the moment that all nodes are there; what does not fit is left out, and that is said."""

HEALTH_CHECK_S = 9.0
"""The same for --quick on one node, which is to end within 10 s."""


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the options; raises UserError."""
    parser = CommandParser("python -m scripts.doctor", (__doc__ or "").split("\n")[0])
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
    if args.json and (args.json.is_dir() or not args.json.name):
        raise UserError(f"--json {args.json} is a folder; name a file in it")
    return args


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


class Checks:
    """This node's checks: those of itself begin at once, the others by node 0's orders."""

    def __init__(self, place: Node, args: Namespace, word: str) -> None:
        self.place, self.args, self.word = place, args, word
        self.folder = RunsFolder(args.runs_dir, word, place.node_rank)
        self.pool = ThreadPoolExecutor(1)
        within_s = node.QUICK_S if args.quick and place.nnodes == 1 else None
        arguments = (place.master_addr, place.rdzv_timeout_s, args.runs_dir, args.quick, within_s)
        self.own = self.pool.submit(node.gather, *arguments)
        self.echo: Echo | None = None
        self.facts: dict[str, Any] = {}

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one of node 0's orders."""
        orders: dict[str, Callable[[], dict[str, Any]]] = {
            "facts": self.answer_facts,
            "write": lambda: {"error": self.folder.write()},
            "see": lambda: {"seen": self.folder.see(order["writers"])},
            "peers": lambda: network.look_at_peers(
                [peer for peer in order["peers"] if peer["rank"] != self.place.node_rank], self.word
            ),
            "ranks": lambda: self.run_ranks(order),
        }
        return orders[order["do"]]()

    def answer_facts(self) -> dict[str, Any]:
        """Return what this node knows of itself, and the port at which it answers from now on."""
        self.facts = self.own.result(FACTS_TIMEOUT_S)
        if self.facts["network"]:
            self.echo = Echo(self.facts["network"]["address"], self.word)
            self.facts["echo_port"] = self.echo.port
        return self.facts

    def run_ranks(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return what this node's ranks of the doctor's own job have found."""
        place = replace(self.place, master_addr=order["address"], master_port=order["port"])
        return ranks.run_ranks(place, self.facts["network"]["interface"], self.args.device, order["timeout_s"])

    def close(self) -> None:
        """Stop answering, and remove what the probe has left in the runs folder."""
        if self.echo:
            self.echo.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.folder.remove()


def examine(case: Case, met: meeting.Meeting, args: Namespace) -> None:
    """Ask all nodes for what the rules need, and write it into the case; what cannot work is left out."""
    is_health_check = args.quick and case.nnodes == 1
    deadline = time.monotonic() + (HEALTH_CHECK_S if is_health_check else EXAMINATION_S)

    def ask(order: dict[str, Any], timeout_s: float, *keys: str) -> dict[int, dict[str, Any]]:
        left = deadline - time.monotonic()
        if left < min(0.5 if is_health_check else 10.0, timeout_s):
            case.skipped.append(order["do"])
            return {}
        return met.ask_all(order, min(timeout_s, left), keys)

    facts = ("host", "names", "machine", "network", "cores", "errors", "gpus", "torch", "disk", "limits")
    case.facts = ask({"do": "facts"}, FACTS_TIMEOUT_S, *facts)
    case.written = ask({"do": "write"}, folder.WRITE_S + 5, "error")
    writers = [rank for rank, answer in case.written.items() if not answer["error"]]
    seen = ask({"do": "see", "writers": writers}, folder.SEEN_TIMEOUT_S + 10, "seen")
    case.seen = {rank: answer["seen"] for rank, answer in seen.items()}
    peers = [
        {"rank": rank, "names": facts["names"], "address": facts["network"]["address"], "port": facts["echo_port"]}
        for rank, facts in case.facts.items()
        if facts["network"]
    ]
    # A node that answers no port holds up each of the PARALLEL that look at it for CONNECT_TIMEOUT_S, and so does
    # a name server that does not answer, for each of a node's names.
    bound = 20 + (CONNECT_TIMEOUT_S + 2 * network.NAME_TIMEOUT_S) * (1 + len(peers) / network.PARALLEL)
    case.peers = ask({"do": "peers", "peers": peers}, bound)
    if args.quick or not can_meet(case):
        return
    address = case.facts[0]["network"]["address"]
    bound = min(args.timeout_s, deadline - time.monotonic() - 5)
    order = {"do": "ranks", "address": address, "port": local.free_port(address), "timeout_s": bound}
    case.ranks = ask(order, args.timeout_s + node.COMMAND_TIMEOUT_S, "ranks")


def can_meet(case: Case) -> bool:
    """Whether all nodes are there, reach one another and have a torch: else an all-reduce would only time out."""
    has_all = len(case.facts) == case.nnodes and not case.lost
    reach = all(found["stage"] == "done" for seen in case.peers.values() for found in seen.values())
    torch = all("error" not in (facts["torch"] or {}) for facts in case.facts.values())
    return has_all and reach and torch and all(facts["network"] for facts in case.facts.values())


def lead(place: Node, args: Namespace, word: str) -> int:
    """Be node 0: gather the nodes, examine them, report; return the status."""
    begin = time.monotonic()
    checks = Checks(place, args, word)
    met = meeting.Meeting(word, place.nnodes, checks.carry_out)
    case = Case(place.nnodes, f"{place.master_addr}:{place.master_port}", place.rdzv_timeout_s)
    case.lost, case.clocks = met.lost, met.clocks
    say(f"doctor: {report.count(place.nnodes, 'node')} at {case.master}")
    if place.nnodes > 1:
        try:
            address = node.listening_address(place.master_addr, place.rdzv_timeout_s)
            met.gather(listen(address, place.master_port), place.rdzv_timeout_s, say)
        except (OSError, UserError) as error:
            here = f"node 0 ({socket.gethostname()})"
            why = getattr(error, "strerror", None) or error
            remedy = "choose another MASTER_PORT, or fix MASTER_ADDR"
            say(f"error: {here} cannot listen at {case.master}: {why}; {remedy}")
            return 1
    examine(case, met, args)
    case.refused = sorted(met.refused)
    case.words = checks.folder.words_left()
    findings = judge(case)
    status = 1 if tally(findings)["error"] else 0
    for line in report.lines(case, findings, time.monotonic() - begin):
        say(line)
    if args.json:
        try:
            report.write_json(args.json, case, findings, time.monotonic() - begin)
        except OSError as error:
            say(f"error: cannot write {args.json}: {error.strerror}; choose another --json")
            status = 1
    checks.close()
    met.end(status)
    return status


def follow(place: Node, args: Namespace, word: str) -> int:
    """Be another node: find node 0, do what it asks; return the status that it gives."""
    checks = Checks(place, args, word)
    here = f"node {place.node_rank} ({socket.gethostname()})"
    # Longer than node 0 waits, also if this node has started earlier: node 0 gives up first and reports, where a
    # launcher would end it with the first node that fails.
    wait_s = place.rdzv_timeout_s * 1.25 + 2
    try:
        try:
            channel = meeting.join(place, word, wait_s / 2)
        except MissingNodeError as error:
            checks.folder.leave_word(str(error))  # node 0 reads it at the end of its own wait
            channel = meeting.join(place, word, wait_s / 2)
        status = meeting.serve(channel, checks.carry_out, place.rdzv_timeout_s)
    except UserError as error:
        say(f"error: {here}: {error}")
        return 1
    checks.close()
    say(f"doctor: {here} is done; node 0 has the report (status {status})")
    return status


class LocalNodes(local.LocalJob):
    """The doctor's nodes on this machine: node 0 alone reports."""

    def report(self, failed: list[int]) -> int:
        """Return the worst status of the nodes."""
        if self.interrupted_by:
            return 128 + self.interrupted_by
        return max((abs(self.nodes[number].returncode) for number in failed), default=0)


def run_local(args: Namespace, words: Sequence[str]) -> int:
    """Start the nodes on this machine; return their status."""
    job = LocalNodes()
    signal.signal(signal.SIGINT, job.interrupt)
    signal.signal(signal.SIGTERM, job.interrupt)
    shares = local.share_out(local.visible_gpus(), args.nodes)
    nproc = args.nproc_per_node or max(1, len(shares[0]))
    port, word = local.free_port(), secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="cluster-recipes-") as scratch:
        for rank in range(args.nodes):
            environment = local.node_environment(rank, args.nodes, nproc, shares[rank], port)
            environment |= {"RDZV_ID": word, "TMPDIR": scratch}
            job.start([sys.executable, "-m", "scripts.doctor", *words], environment)
        return job.wait()


@command
def main(argv: list[str]) -> int:
    """Return the exit status."""
    args = parse_args(argv)
    if args.nodes and not args.as_node:
        return run_local(args, [*argv, "--as-node"])
    place = read_node(WAIT_S)
    word = os.environ.get("RDZV_ID") or "none"
    return lead(place, args, word) if place.node_rank == 0 else follow(place, args, word)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a look-up that never answers would keep its thread, and the thread the interpreter
