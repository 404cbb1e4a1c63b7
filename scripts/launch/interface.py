"""Print the network interface by which this machine reaches a host: the one that gloo and NCCL are to use.

    python -m scripts.launch.interface node-a

The kernel is asked for the route; nothing is sent. A name that is not known yet is an error at once, or after
RDZV_TIMEOUT_S where that is set: in Kubernetes a pod has a name only once it runs.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import time

from recipes.common.errors import UserError
from recipes.common.options import read_number
from recipes.common.process.meeting import MissingNodeError
from scripts.launch.command import command


def resolve(host: str, timeout_s: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return the family and the address of a name, which may take timeout_s to become known.

    Raises:
        MissingNodeError: it has not become known in that time; UserError: there was none.
    """
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
    """Return this machine's address on the way to another, that of the host; nothing is sent; raises UserError."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise UserError(f"{socket.gethostname()} has no route to {host}: {error.strerror}") from None
        return str(probe.getsockname()[0]).split("%")[0]


def interface_addresses(*families: int) -> dict[str, list[str]]:
    """Return the addresses of each interface of this machine, of these families alone."""
    import psutil

    return {
        name: [entry.address.split("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def interface_to(host: str, timeout_s: int = 0) -> str:
    """Return the name of the interface that holds the local end of a way to the host.

    The host's own name may stand for 127.0.1.1 on the host itself, as Debian sets it up: others cannot reach that,
    so the first interface that is up, has an address and is not a loopback is taken.

    Raises:
        UserError: the name is unknown, or no route leads there. MissingNodeError: the name stays unknown.
    """
    import psutil

    local = local_end(host, *resolve(host, timeout_s))
    interfaces = interface_addresses(socket.AF_INET, socket.AF_INET6)
    by_name = local.startswith("127.") and not _is_address(host) and host != "localhost"
    if by_name:
        up = {name for name, state in psutil.net_if_stats().items() if state.isup}
        others = [name for name, own in interfaces.items() if name in up and own and "127.0.0.1" not in own]
        if others:
            return others[0]
    return next((name for name, addresses in interfaces.items() if local in addresses), "lo")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
        return True
    except ValueError:
        return False


@command
def main(argv: list[str]) -> None:
    """Print the interface to a host."""
    print(interface_to(argv[0], read_number("RDZV_TIMEOUT_S", 0, at_least=0)))


if __name__ == "__main__":
    sys.exit(main())
