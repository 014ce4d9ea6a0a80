"""Ports that are chosen for services: nobody's outgoing connection can take one before the service
listens.
"""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.cli import ports

ROOT = Path(__file__).parents[2]


def test_a_chosen_port_is_no_outgoing_connection_s() -> None:
    first, last = map(int, ports.EPHEMERAL_RANGE.read_text().split())
    with socket.socket() as probe:
        port = ports.bind_free(probe, "127.0.0.1")
        assert not first <= port <= last
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        busy = ports.bind_free(taken, "127.0.0.1")
        draw, picks = ports.random.randrange, iter([busy, busy])
        monkeypatch.setattr(ports.random, "randrange", lambda *bounds: next(picks, draw(*bounds)))
        with socket.socket() as probe:
            assert ports.bind_free(probe, "127.0.0.1") != busy


def test_a_port_that_another_process_has_chosen_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = (
        "import socket; from foredraft.cli import ports\n"
        "with socket.socket() as probe: port = ports.bind_free(probe, '127.0.0.1')\n"
        "print(port, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as other:
        assert other.stdout
        theirs = int(other.stdout.readline())  # free, since nothing listens there yet
        draw, picks = ports.random.randrange, iter([theirs, theirs])
        monkeypatch.setattr(ports.random, "randrange", lambda *bounds: next(picks, draw(*bounds)))
        with socket.socket() as probe:
            assert ports.bind_free(probe, "127.0.0.1") != theirs
        other.communicate(b"\n")


def test_a_host_of_another_machine_is_an_error() -> None:
    with socket.socket() as probe, pytest.raises(OSError, match="assign"):
        ports.bind_free(probe, "192.0.2.1")


def test_the_system_chooses_where_its_range_leaves_no_room(monkeypatch, tmp_path) -> None:
    (tmp_path / "range").write_text("1024 65535\n")
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", tmp_path / "range")
    assert ports.first_ephemeral_port() == 65_536
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", tmp_path / "none")
    assert ports.first_ephemeral_port() == 32_768
