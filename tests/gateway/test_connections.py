"""Who gets a place among connections, and who has to give way."""

import pytest

from foredraft.errors import Unavailable
from gateway.http_server.connections import Connections, Seat, network_of, shares


class Clients:
    """Clients that record which of them were closed."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self.places = Connections(most, most_per_address)
        self.closed: list[str] = []

    def connect(self, address: str, name: str = "") -> Seat:
        return self.places.admit(address, lambda: self.closed.append(name or address))


def test_the_one_that_waits_longest_gives_way() -> None:
    clients = Clients(2, 2)
    first, _ = clients.connect("a", "first"), clients.connect("a", "second")
    first.wait()  # a part of a request has come
    clients.connect("a", "third")
    assert clients.closed == ["second"]
    assert clients.places.num_open == 2
    clients.places.leave(first)
    clients.places.leave(first)
    assert clients.places.num_open == 1
    clients.connect("a")
    assert clients.closed == ["second"]


def test_one_that_works_keeps_its_place() -> None:
    clients = Clients(2, 2)
    working, waiting = clients.connect("a", "working"), clients.connect("a", "waiting")
    working.work()
    clients.connect("b").work()
    assert clients.closed == ["waiting"]
    with pytest.raises(Unavailable, match="2 connections are in use"):
        clients.connect("c")
    working.wait()
    clients.connect("c")
    assert clients.closed == ["waiting", "working"]
    waiting.wait()  # it was closed already
    clients.places.leave(waiting)
    assert clients.places.num_open == 2


def test_a_crowd_gives_way_to_others() -> None:
    clients = Clients(6, 4)
    clients.connect("quiet")
    for i in range(9):
        clients.connect("loud", f"loud {i}")
    # An address has at most its own number, and takes them from itself.
    assert clients.closed == [f"loud {i}" for i in range(5)]
    assert clients.places.num_open == 5
    clients.connect("new")
    clients.connect("newer")
    assert clients.closed[5:] == ["loud 5"]
    for _ in range(3):
        clients.connect("loud").work()
    assert "quiet" not in clients.closed
    assert "new" not in clients.closed


def test_an_address_whose_connections_all_work_is_refused() -> None:
    clients = Clients(6, 1)
    clients.connect("a").work()
    with pytest.raises(Unavailable, match="1 connections of your address"):
        clients.connect("a")
    clients.connect("b")
    assert not clients.closed


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:0:1:aaaa::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1::", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("somewhere", "somewhere"),
    ],
)
def test_networks(address: str, network: str) -> None:
    assert network_of(address) == network


@pytest.mark.parametrize(
    ("files", "found"), [(256, (120, 40)), (1024, (696, 232)), (65_536, (4096, 4096)), (64, (4, 4))]
)
def test_shares(files: int, found: tuple[int, int]) -> None:
    assert shares(files, 4096) == found
    assert sum(found) < files
