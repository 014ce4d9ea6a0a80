"""Free ports that stay free until the service that was given one listens on it."""

import contextlib
import random
import socket
from pathlib import Path

LOWEST = 20_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 64


def bind_free(probe: socket.socket, host: str) -> int:
    """Binds a socket to a free port of a host, outside the range of outgoing connections if
    possible.

    The system's own choice lies in that range: between the choice and the service's start any
    client's connection may take it.

    Returns:
        The port.

    Raises:
        OSError: The host has no free port, or is none of this machine's.
    """
    for _ in range(ATTEMPTS):
        with contextlib.suppress(OSError):
            probe.bind((host, random.randrange(LOWEST, first_ephemeral_port())))
            break
    else:
        probe.bind((host, 0))
    return int(probe.getsockname()[1])


def first_ephemeral_port() -> int:
    """Returns the lowest port that the system uses for outgoing connections; Linux's default
    where it cannot be read.
    """
    try:
        first = int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
    return first if first > LOWEST + ATTEMPTS else 65_536
