"""What one node sees of another: whether its names lead to it, its port answers, and large packets come back.

Every node answers at a port that the kernel has chosen, as it does for gloo and NCCL, on the address of gloo's
interface (see node.network). A client that does not know the job's secret gets no answer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from scripts.launch.echo import try_port

NAME_TIMEOUT_S = 5.0
PARALLEL = 16

T = TypeVar("T")


def try_name(name: str) -> list[str] | str:
    """Return the addresses that a name resolves to on this node, or why it does not resolve."""
    try:
        # getaddrinfo has no time limit: if the resolver does not answer, the call stays in its thread.
        found = call_within(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), NAME_TIMEOUT_S)
    except OSError as error:
        return error.strerror or str(error)
    return sorted({str(entry[4][0]).split("%")[0].removeprefix("::ffff:") for entry in found})


def look_at_peers(peers: Sequence[dict[str, Any]], secret: str) -> dict[str, dict[str, Any]]:
    """Check each peer {"rank", "names", "address", "port"} from this node; return the results by its rank."""

    def look(peer: dict[str, Any]) -> dict[str, Any]:
        names = {name: try_name(name) for name in peer["names"]}
        return {"names": names, "port": peer["port"], **try_port(peer["address"], peer["port"], secret)}

    with ThreadPoolExecutor(PARALLEL) as pool:
        return {str(peer["rank"]): found for peer, found in zip(peers, pool.map(look, peers), strict=True)}


def call_within(function: Callable[[], T], timeout_s: float) -> T:
    """Return the result of a function; after timeout_s, leave it in its thread and raise TimeoutError."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(function).result(timeout_s)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer within {timeout_s:.0f} s") from None
    finally:
        pool.shutdown(wait=False)
