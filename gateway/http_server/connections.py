"""Limits connections, in all and per address, and chooses which gives way when none is free."""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field

from foredraft.errors import Unavailable
from gateway import metrics

# An IPv6 customer has at least this network, and may call from any address in it.
IPV6_PREFIX = 64
# Descriptors that the gateway needs itself: for verifiers and its processes that encode, pipes,
# files that it reads again, and the probes of whoever watches it.
RESERVED_FILES = 96


class Seat:
    """The place of one connection.

    Attributes:
        address: Address or network of the client.
        evict: Function that ends the connection, set by its present handler.
    """

    __slots__ = ("_crowd", "_is_left", "address", "evict")

    def __init__(self, address: str, crowd: "_Crowd", evict: Callable[[], None]) -> None:
        self.address = address
        self.evict = evict
        self._crowd = crowd
        self._is_left = False

    def wait(self) -> None:
        """Marks that the server waits for the client, and the connection may have to give way."""
        waiting = self._crowd.waiting
        waiting.pop(self, None)
        if not self._is_left:
            waiting[self] = None

    def work(self) -> None:
        """Marks that the client waits for the server, so that the connection keeps its place."""
        self._crowd.waiting.pop(self, None)

    def leave(self) -> bool:
        """Gives the place up; returns False if that was done already."""
        if self._is_left:
            return False
        self._is_left = True
        self._crowd.waiting.pop(self, None)
        self._crowd.num_seats -= 1
        return True


@dataclass(slots=True)
class _Crowd:
    """The connections of one address.

    Attributes:
        num_seats: Number of connections.
        waiting: Connections whose client the server waits for, longest first.
    """

    num_seats: int = 0
    waiting: dict[Seat, None] = field(default_factory=dict)


class Connections:
    """Gives places to connections.

    A new one always gets a place as long as the server only waits for another: the one that has
    waited longest gives way, of the same address if that has too many, else of the address that
    has most. So a flood of silent or half-sent requests ends itself, and clients that send a
    whole request are served.

    Args:
        most: Most connections at a time.
        most_per_address: Most connections of one IPv4 address or one /64 network of IPv6 at a time.
    """

    def __init__(self, most: int, most_per_address: int) -> None:
        self.most = most
        self.most_per_address = min(most_per_address, most)
        self.num_open = 0
        self._crowds: dict[str, _Crowd] = {}

    def admit(self, address: str, evict: Callable[[], None]) -> Seat:
        """Gives a place to a connection from `address`, at first waiting for its client.

        Raises:
            Unavailable: No place is free; the error says what to do.
        """
        where = network_of(address)
        crowd = self._crowds.get(where)
        if crowd is not None and crowd.num_seats >= self.most_per_address:
            if not self._make_room(crowd):
                raise self._refusal("address", f"{crowd.num_seats} connections of your address")
        elif self.num_open >= self.most and not self.make_room():
            raise self._refusal("connections", f"{self.num_open} connections")
        crowd = self._crowds.setdefault(where, _Crowd())
        crowd.num_seats += 1
        self.num_open += 1
        metrics.connections.set(self.num_open)
        seat = Seat(where, crowd, evict)
        seat.wait()
        return seat

    def make_room(self) -> bool:
        """Ends the connection that waited longest, of the address with the most connections.

        Returns False if no connection waits.
        """
        crowds = [crowd for crowd in self._crowds.values() if crowd.waiting]
        crowd = max(crowds, key=lambda each: each.num_seats, default=None)
        return crowd is not None and self._make_room(crowd)

    def leave(self, seat: Seat) -> None:
        """Frees the place of a connection that is gone. May be called again."""
        if not seat.leave():
            return
        if not self._crowds[seat.address].num_seats:
            del self._crowds[seat.address]
        self.num_open -= 1
        metrics.connections.set(self.num_open)

    def _make_room(self, crowd: _Crowd) -> bool:
        seat = next(iter(crowd.waiting), None)
        if seat is None:
            return False
        self.leave(seat)
        metrics.evicted.inc()
        seat.evict()
        return True

    def _refusal(self, limit: str, what: str) -> Unavailable:
        metrics.refused.labels(limit, "").inc()
        return Unavailable(f"{what} are in use already; close some, or try again in a second")


def network_of(address: str) -> str:
    """Returns the network that counts as one client: an IPv4 address or an IPv6 /64.

    An IPv4 address may be written as an IPv6 one.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), IPV6_PREFIX), strict=False))


def shares(num_files: int, wanted: int) -> tuple[int, int]:
    """Returns how many connections HTTP and gRPC may have, given the limit of descriptors.

    Args:
        num_files: The limit of descriptors.
        wanted: Number of connections of each, where there are descriptors enough.
    """
    left = num_files - RESERVED_FILES
    grpc = min(wanted, max(4, left // 4))
    return min(wanted, max(4, left - grpc)), grpc
