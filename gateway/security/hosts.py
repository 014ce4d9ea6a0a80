"""Which names a request may call the server by: against pages that give their own name this machine's address (DNS rebinding)."""

import ipaddress
from collections.abc import Sequence

LOCAL_NAME = "localhost"


def is_local(host: str) -> bool:
    """Whether an address or name is this machine's own, which nobody else reaches."""
    name = _bare(host)
    address = _address(name)
    if address is not None:
        return address.is_loopback
    return name == LOCAL_NAME or name.endswith("." + LOCAL_NAME)


def is_allowed(host: str, allowed: Sequence[str]) -> bool:
    """Whether a request with this Host header is to be answered.

    Addresses are: a page has a name, so what a browser sends to an address is no page's. So are this machine's own names, and
    none, which browsers never send.

    Args:
        allowed: Names besides, of which `*.name` is every name under one, and `*` all.
    """
    name = _bare(host)
    if not name or _address(name) is not None or is_local(name):
        return True
    return any(
        pattern == "*" or (name.endswith(pattern[1:]) if pattern[:2] == "*." else name == pattern)
        for pattern in map(str.lower, allowed)
    )


def _bare(host: str) -> str:
    """A Host header without its port, the brackets of an address and the dot that ends a full name."""
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
