"""Checks the host names in requests, against DNS rebinding.

There, a page gives its own name this machine's address.
"""

import ipaddress
from collections.abc import Sequence

LOCAL_NAME = "localhost"


def is_local(host: str) -> bool:
    """Returns whether an address or name is this machine's own, which no other machine reaches."""
    name = _bare(host)
    address = _address(name)
    if address is not None:
        return address.is_loopback
    return name == LOCAL_NAME or name.endswith("." + LOCAL_NAME)


def is_allowed(host: str, allowed: Sequence[str]) -> bool:
    """Returns whether a request with this Host header may be answered.

    Addresses are allowed: a page has a name, so no page's request has an address there. This
    machine's own names are allowed, and an empty header, which browsers never send.

    Args:
        allowed: Further names; `*.name` allows every name below `name`, and `*` all.
    """
    name = _bare(host)
    if not name or _address(name) is not None or is_local(name):
        return True
    return any(
        pattern == "*" or (name.endswith(pattern[1:]) if pattern[:2] == "*." else name == pattern)
        for pattern in map(str.lower, allowed)
    )


def _bare(host: str) -> str:
    """Strips a Host header's port, an address's brackets and a full name's final dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if host.count(":") == 1:
        host = host.partition(":")[0]
    return host.removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
