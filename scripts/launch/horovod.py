r"""Run one node's processes of the Horovod recipe over Gloo: no ssh, no MPI, the variables of every launch file.

    NNODES=2 NODE_RANK=0 NPROC_PER_NODE=1 MASTER_ADDR=node-a MASTER_PORT=29500 \
        python -m scripts.launch.horovod horovod

horovodrun needs ssh access to the other nodes and starts everything from one of them. Here each node starts its
own processes, as a scheduler does with every other recipe. Nodes meet in the store at MASTER_ADDR:MASTER_PORT,
where they find the port of Horovod's rendezvous, which node 0 serves over IPv4. Signals, exit codes and orphans
are handled as in scripts/launch/agent.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator

from recipes.common.errors import UserError
from recipes.common.process.node import Node, check_head
from recipes.common.process.open_files import allow_open_files
from recipes.common.process.ranks import bind_address
from scripts.launch.agent import main, quiet_import
from scripts.launch.command import warn
from scripts.launch.rank_processes import rank_command, run_processes

MANY = 256
"""More ranks than this take minutes to meet: 2 W^2 requests, at some thousand a second."""


@contextlib.contextmanager
def rendezvous(node: Node, port: int = 0) -> Iterator[int]:
    """Serve the rendezvous of Horovod's processes, on node 0, at a port (0: a free one); yield the port."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    hosts = ",".join(f"node-{i}:{node.nproc_per_node}" for i in range(node.nnodes))
    # Not MASTER_ADDR's alone: on Debian, node 0's own name resolves there to 127.0.1.1, out of others' reach.
    server = RendezvousHTTPServer((bind_address(node.master_addr), port), RendezvousHandler, 0)
    server.socket.listen(4096)  # ranks that connect at once; Python's own 5 would let the others try again later
    server.init(get_host_assignments(parse_hosts(hosts), node.nnodes * node.nproc_per_node))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()


def resolve_ipv4(name: str) -> str:
    """Return a name's IPv4 address: Horovod's processes reach the rendezvous over IPv4 only. Raises UserError."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        what = f"MASTER_ADDR {name} has no IPv4 address, and Horovod meets by IPv4 only"
        raise UserError(f"{what}; name one of node 0's") from None


def environment(node: Node, local_rank: int, port: int) -> dict[str, str]:
    """Return a process's environment, with the variables that Horovod's Gloo controller reads."""
    rank = node.node_rank * node.nproc_per_node + local_rank
    own = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": resolve_ipv4(node.master_addr),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_HOSTNAME": f"node-{node.node_rank}",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(node.nnodes * node.nproc_per_node),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(node.nproc_per_node),
        "HOROVOD_CROSS_RANK": str(node.node_rank),
        "HOROVOD_CROSS_SIZE": str(node.nnodes),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(node.nproc_per_node),
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
    if node.node_rank == 0 and (ranks := node.nnodes * node.nproc_per_node) > MANY:
        fix = "start them by MPI (recipes/horovod/README.md)"
        warn(f"{ranks} ranks of Horovod ask node 0 for one another's addresses, which takes minutes; {fix}")
    command = rank_command(recipe, options)
    first = node.node_rank * node.nproc_per_node
    # Gloo: each rank connects with all others, in each of Horovod's groups. Ranks have the limit of this process.
    allow_open_files(4 * node.nnodes * node.nproc_per_node)
    resolve_ipv4(node.master_addr)  # refuse a name without one before this node waits for others
    with quiet_import():
        from scripts.launch.torch_agent import explain_lost_store, meet_nodes
    with contextlib.ExitStack() as served:
        with explain_lost_store(node):
            store = meet_nodes(node, os.environ.get("RDZV_ID") or "none")  # node 0 serves it to the end
            if node.node_rank == 0:
                store.set("horovod/port", str(served.enter_context(rendezvous(node))))
            port = int(store.get("horovod/port"))
        environments = {first + i: environment(node, i, port) for i in range(node.nproc_per_node)}
        return run_processes(command, environments, logs)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(run)
