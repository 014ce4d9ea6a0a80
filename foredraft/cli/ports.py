"""Ports of services: those asked for, checked, and free ones that stay free until they are used."""

import collections
import contextlib
import errno
import random
import socket
from collections.abc import Mapping
from pathlib import Path

from foredraft.config.options import flag_of
from foredraft.errors import ConfigError

LOWEST = 20_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 64
# Names of abstract sockets: each tells other processes of this network namespace that a port was
# chosen. The last ones are kept for as long as this process lives.
_marks: collections.deque[socket.socket] = collections.deque(maxlen=32)


def choose_ports(wanted: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """Returns the requested ports, if they are free, and free ones for 0.

    They are left for the services to take.

    Args:
        wanted: Host and port by name; the name is the field of the port's flag.

    Raises:
        ConfigError: Two ports are the same, or one cannot be taken.
    """
    chosen: dict[str, int] = {}
    with contextlib.ExitStack() as probes:
        for name in sorted(wanted, key=lambda name: wanted[name][1] == 0):
            host, port = wanted[name]
            for other in chosen:
                if port and chosen[other] == port:
                    raise ConfigError(f"{flag_of(other)} and {flag_of(name)} are both {port}")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            probe = probes.enter_context(socket.socket(family))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                if port:
                    probe.bind((host, port))
                chosen[name] = port or bind_free(probe, host)
            except OSError as error:
                reason = error.strerror or error
                if error.errno == errno.EADDRINUSE:
                    reason = f"{reason}; give another port, or 0 for any free one"
                raise ConfigError(f"{flag_of(name)} {port} on {host}: {reason}") from error
    return chosen


def bind_free(probe: socket.socket, host: str) -> int:
    """Binds a socket to a free port of a host, outside the range of outgoing connections if
    possible.

    The system's own choice lies in that range: between the choice and the service's start any
    client's connection may take it. No other process that chooses in this way gets the port
    meanwhile.

    Returns:
        The port.

    Raises:
        OSError: The host has no free port, or is none of this machine's.
    """
    for _ in range(ATTEMPTS):
        port = random.randrange(LOWEST, first_ephemeral_port())
        with contextlib.suppress(OSError):
            _mark(port)
            probe.bind((host, port))
            break
    else:
        probe.bind((host, 0))
    return int(probe.getsockname()[1])


def _mark(port: int) -> None:
    """Raises OSError where a living process has chosen the port."""
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0foredraft-port-{port}")
    except OSError:
        mark.close()
        raise
    _marks.append(mark)


def first_ephemeral_port() -> int:
    """Returns the lowest port that the system uses for outgoing connections; Linux's default
    where it cannot be read.
    """
    try:
        first = int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
    return first if first > LOWEST + ATTEMPTS else 65_536
