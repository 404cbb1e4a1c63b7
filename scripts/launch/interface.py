"""Print the network interface by which this machine reaches a host: the one that gloo and NCCL are to use.

    python -m scripts.launch.interface node-a

It asks the kernel for the route and sends nothing. An unknown name is an error at once, or after RDZV_TIMEOUT_S if
that is set: in Kubernetes, a pod's name is known only once the pod runs.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from recipes.common.arguments import read_number
from recipes.common.errors import UserError
from recipes.common.process.node import check_host
from recipes.common.process.ranks import is_loopback
from recipes.common.process.rendezvous_errors import MissingNodeError
from scripts.launch.command import command

ROUTES = Path("/proc/net/route")
VIRTUAL = ("docker", "virbr", "veth", "br-", "cni", "flannel")
"""How the names of interfaces begin that lead to containers or virtual machines of this host."""


def resolve(host: str, timeout_s: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return the address family and the address of a name, waiting up to timeout_s for the name to become known.

    Raises MissingNodeError if it is still unknown then, or UserError if timeout_s is 0 or it cannot be a name.
    """
    check_host(host)
    begin, is_announced = time.monotonic(), False
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            return family, address  # type: ignore[return-value]
        except OSError as error:
            waited = time.monotonic() - begin
            if waited >= timeout_s:
                waiting = f" within {timeout_s} s" if timeout_s else ""
                raise (MissingNodeError if timeout_s else UserError)(
                    f"{socket.gethostname()} cannot resolve {host}{waiting} ({error.strerror}); "
                    "fix DNS or /etc/hosts"
                ) from None
        if waited > 5 and not is_announced:
            print(f"{socket.gethostname()} waits for the name {host}, {timeout_s} s at most", file=sys.stderr)
            is_announced = True
        time.sleep(0.5)


def local_end(host: str, family: socket.AddressFamily, address: tuple[str, int]) -> str:
    """Return this machine's address on the route to a host; sends nothing; raises UserError without a route."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise UserError(f"{socket.gethostname()} has no route to {host}: {error.strerror}") from None
        return str(probe.getsockname()[0]).split("%")[0]


def interface_addresses(*families: int) -> dict[str, list[str]]:
    """Return the addresses of each interface of this machine, of the given address families only."""
    import psutil

    return {
        name: [entry.address.split("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def interfaces_up(*families: int) -> dict[str, list[str]]:
    """Return interface_addresses() of the interfaces that are up."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {name: own for name, own in interface_addresses(*families).items() if name in up}


def by_preference(names: Iterable[str]) -> list[str]:
    """Return interfaces in this order: of the default route, other ones, virtual ones."""
    routes = [line.split() for line in ROUTES.read_text().splitlines()[1:]] if ROUTES.exists() else []
    of_default = {route[0] for route in routes if route[1:2] == route[7:8] == ["00000000"]}  # target and mask
    return sorted(names, key=lambda name: (name not in of_default, name.startswith(VIRTUAL)))


def interface_to(host: str, timeout_s: int = 0) -> str:
    """Return the name of the interface by which this machine reaches the host.

    On the host itself, its own name may resolve to 127.0.1.1 (Debian's default) or ::1, which others cannot
    reach. The result is then an interface that is up, has an address and is not a loopback: that of the default
    route, else one that is not virtual. Raises as resolve(), and UserError if no route leads to the host.
    """
    local, families = local_end(host, *resolve(host, timeout_s)), (socket.AF_INET, socket.AF_INET6)
    if is_loopback(local) and not is_loopback(host) and host != "localhost":
        up = interfaces_up(*families).items()
        if found := [name for name, own in up if own and not any(map(is_loopback, own))]:
            return by_preference(found)[0]
    return next((name for name, own in interface_addresses(*families).items() if local in own), "lo")


@command
def main(argv: list[str]) -> None:
    """Print the interface by which this machine reaches a host."""
    print(interface_to(argv[0], read_number("RDZV_TIMEOUT_S", 0, at_least=0)))


if __name__ == "__main__":
    sys.exit(main())
