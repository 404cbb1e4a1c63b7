r"""Run one node's processes of the Horovod recipe over Gloo: no ssh, no MPI, the variables of every launch file.

    NNODES=2 NODE_RANK=0 NPROC_PER_NODE=1 MASTER_ADDR=node-a MASTER_PORT=29500 \
        python -m scripts.launch.horovod horovod

horovodrun needs ssh access to the other nodes and starts everything from one of them. Here each node starts its
own processes, as a scheduler does with every other recipe, and node 0 serves Horovod's rendezvous at
MASTER_ADDR:MASTER_PORT over IPv4. Signals, exit codes and orphans are handled as in scripts/launch/agent.py.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

from recipes.common.errors import UserError
from recipes.common.process.node import Node, check_head, missing_nodes_error
from recipes.common.process.open_files import allow_open_files
from recipes.common.process.ranks import bind_address
from recipes.common.process.rendezvous_errors import MissingNodeError, port_taken_error
from scripts.launch.agent import main
from scripts.launch.rank_processes import rank_command, run_processes

SERVER_LINGER_S = 2.0
"""How long node 0 serves the rendezvous after a refusal, so that the other nodes can read it."""


@contextlib.contextmanager
def rendezvous(node: Node) -> Iterator[None]:
    """On node 0, serve the rendezvous through which Horovod's processes find each other; raises UserError."""
    if node.node_rank > 0:
        yield
        return
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    hosts = ",".join(f"node-{i}:{node.nproc_per_node}" for i in range(node.nnodes))
    try:
        # Not MASTER_ADDR's alone: on Debian, node 0's own name resolves there to 127.0.1.1, out of others' reach.
        server = RendezvousHTTPServer((bind_address(node.master_addr), node.master_port), RendezvousHandler, 0)
    except OSError:
        raise port_taken_error(node.master_port) from None
    server.socket.listen(4096)  # ranks that connect at once; Python's own 5 would let the others try again later
    server.init(get_host_assignments(parse_hosts(hosts), node.nnodes * node.nproc_per_node))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        ask(node, "PUT", "nnodes", str(node.nnodes))
        yield
    finally:
        server.shutdown()


def meet_nodes(node: Node, own: str) -> None:
    """Wait until all nodes have come to node 0's rendezvous, before their processes start; `own` names this node.

    If these wait for a node that does not come, Horovod aborts them without its number. Raises MissingNodeError
    for a late node, and UserError if nodes share a rank or differ in NNODES.
    """
    is_head, has_come, missing = node.node_rank == 0, False, list(range(1, node.nnodes))
    deadline = time.monotonic() + node.rdzv_timeout_s
    while True:
        # Node 0 looks for all, and the others for its word: "" if all have come, else why they cannot start.
        word = ask(node, "GET", "all")
        if refusal := word or find_conflict(node, own, has_come):
            if not word:
                ask(node, "PUT", "all", refusal)
            time.sleep(SERVER_LINGER_S if is_head else 0)
            raise UserError(refusal)
        if is_head:
            missing = [rank for rank in missing if ask(node, "GET", str(rank)) is None]
            if not missing and ask(node, "PUT", "all") is not None:
                return
        elif has_come and word is not None:
            return
        elif word is not None:
            what = f"node {node.node_rank} has come to {node.master_addr}:{node.master_port} after all"
            raise MissingNodeError(f"{what} {node.nnodes} nodes; is its NODE_RANK that of another one?")
        else:
            has_come = has_come or ask(node, "PUT", str(node.node_rank), own) is not None
        if time.monotonic() > deadline:
            raise missing_nodes_error(node, missing if is_head else [0])
        time.sleep(0.2)


def find_conflict(node: Node, own: str, has_come: bool) -> str:
    """Return why the job cannot have this node, which may have put its name under its rank; "" if it can."""
    rank, size = node.node_rank, str(node.nnodes)
    if (given := ask(node, "GET", "nnodes") or size) != size:
        return f"NNODES is {given} on node 0 and {size} on node {rank}; give all the same"
    # A node that starts again overwrites its old name; if its new one is overwritten, two nodes have this rank.
    if has_come and (other := ask(node, "GET", str(rank)) or own) != own:
        return f"NODE_RANK {rank} is that of two nodes, {own} and {other}; number them from 0"
    return ""


def ask(node: Node, method: str, key: str, value: str = "") -> str | None:
    """Put a key with this value into the rendezvous, or return its value, None if there is none."""
    address = resolve_ipv4(node.master_addr) if node.node_rank else "127.0.0.1"
    connection = http.client.HTTPConnection(address, node.master_port, timeout=5)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request(method, f"/nodes/{key}", body=value.encode() if method == "PUT" else None)
        response = connection.getresponse()
        if response.status == http.HTTPStatus.OK:
            return response.read().decode()
    return None


def resolve_ipv4(name: str) -> str:
    """Return a name's IPv4 address: Horovod's processes reach the rendezvous over IPv4 only. Raises UserError."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        what = f"MASTER_ADDR {name} has no IPv4 address, and Horovod meets by IPv4 only"
        raise UserError(f"{what}; name one of node 0's") from None


def environment(node: Node, local_rank: int) -> dict[str, str]:
    """Return a process's environment, with the variables that Horovod's Gloo controller reads."""
    rank = node.node_rank * node.nproc_per_node + local_rank
    own = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": resolve_ipv4(node.master_addr),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(node.master_port),
        "HOROVOD_HOSTNAME": f"node-{node.node_rank}",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(node.nnodes * node.nproc_per_node),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(node.nproc_per_node),
        "HOROVOD_CROSS_RANK": str(node.node_rank),
        "HOROVOD_CROSS_SIZE": str(node.nnodes),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
    }
    shared = dict(os.environ)
    if "GLOO_SOCKET_IFNAME" in shared:
        shared.setdefault("HOROVOD_GLOO_IFACE", shared["GLOO_SOCKET_IFNAME"])
    shared.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(node.rdzv_timeout_s))
    return {**shared, **own}


def run(node: Node, recipe: str, options: list[str], logs: str) -> int:
    """Start this node's processes and wait for them; return the job's exit status on this node."""
    check_head(node)
    if importlib.util.find_spec("horovod") is None:
        raise UserError("Horovod is not installed; `make horovod` builds it for this torch")
    command = rank_command(recipe, options)
    first = node.node_rank * node.nproc_per_node
    # Gloo: each rank connects with all others, in each of Horovod's groups. Ranks have the limit of this process.
    allow_open_files(4 * node.nnodes * node.nproc_per_node)
    environments = {first + i: environment(node, i) for i in range(node.nproc_per_node)}
    with rendezvous(node):
        meet_nodes(node, f"{socket.gethostname()} (pid {os.getpid()})")
        return run_processes(command, environments, logs)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(run)
