"""Addresses of services: TCP and Unix sockets."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import ConfigError
from foredraft.rpc.address import Address, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:50051", Address(host="127.0.0.1", port=50051)),
        ("example.org:0", Address(host="example.org", port=0)),
        (":8080", Address(host="127.0.0.1", port=8080)),
        ("[::1]:50051", Address(host="::1", port=50051)),
        ("unix:/run/a.sock", Address(path="/run/a.sock")),
        ("unix:///run/a.sock", Address(path="/run/a.sock")),
    ],
)
def test_parse(text: str, expected: Address) -> None:
    assert parse(text) == expected


def test_a_relative_socket_path_is_made_absolute() -> None:
    assert parse("unix:a.sock") == Address(path=os.path.abspath("a.sock"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "localhost:",
        "localhost:http",
        "localhost:65536",
        "localhost:-1",
        "::1:50051",
        "[::1:50051",
        "unix:",
        "unix:/" + "a" * 107,
        "localhost:\u0663",
        "http://localhost:1",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        parse(text)


@given(
    st.sampled_from(["127.0.0.1", "localhost", "::1", "fe80::1", "a.example"]),
    st.integers(0, 65535),
)
def test_targets_parse_back(host: str, port: int) -> None:
    address = Address(host=host, port=port)
    assert parse(address.target) == address
