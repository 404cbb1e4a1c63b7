"""What one node sees of another: whether its names lead to it, its port answers, and large packets come back.

Every node answers at a port that the kernel has chosen, as it does for gloo and NCCL, on the address of gloo's
interface (see node.network). A client that does not know the job's secret gets no answer.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from recipes.common.process.threads import begin_in_threads, call_within
from scripts.launch.echo import try_port

NAME_TIMEOUT_S = 5.0
PARALLEL = 16

MOST_NAMES = 32
"""A node looks up the names of at most this many others: of 512, the name server would get 260,000 questions."""


def try_name(name: str) -> list[str] | str:
    """Return the addresses that a name resolves to on this node, or why it does not resolve."""
    try:
        # getaddrinfo has no time limit: if the resolver does not answer, the call stays in its thread.
        found = call_within(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), NAME_TIMEOUT_S)
    except OSError as error:
        return error.strerror or str(error)
    return sorted({str(entry[4][0]).split("%")[0].removeprefix("::ffff:") for entry in found})


def look_at_peers(peers: Sequence[dict[str, Any]], own_rank: int, secret: str) -> dict[str, dict[str, Any]]:
    """Check each peer {"rank", "names", "address", "port"} from this node; return the results by its rank."""
    # Begin with the node after this one: otherwise all would connect with the first ones at once.
    peers = sorted(peers, key=lambda peer: (peer["rank"] < own_rank, peer["rank"]))
    peers = [peer for peer in peers if peer["rank"] != own_rank]
    looked_up = {peer["rank"] for peer in peers[:MOST_NAMES]}

    def look(peer: dict[str, Any]) -> dict[str, Any]:
        names = {name: try_name(name) for name in peer["names"] if peer["rank"] in looked_up}
        return {"names": names, "port": peer["port"], **try_port(peer["address"], peer["port"], secret)}

    looks = begin_in_threads([partial(look, peer) for peer in peers], PARALLEL)
    return {str(peer["rank"]): done.result() for peer, done in zip(peers, looks, strict=True)}
