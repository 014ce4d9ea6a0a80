"""Addresses that services listen on: `host:port` or `unix:/path`."""

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass

from foredraft.errors import ConfigError

# sun_path holds 108 bytes on Linux, the closing zero included (unix(7)).
_MAX_UNIX_PATH = 107


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address. Either `path` (a Unix socket) or `host` and `port` are set.

    Attributes:
        path: Absolute path of a Unix socket; empty for TCP.
        host: Name or number, without the brackets of IPv6.
        port: 0 lets the kernel choose where a server listens.
    """

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def is_local(self) -> bool:
        """Whether it is a Unix socket or on the loopback interface."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def target(self) -> str:
        """The address in gRPC's form, for servers and channels."""
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return self.target


def check(flag: str, texts: Iterable[str]) -> None:
    """Raises ConfigError, naming the flag, if one of its values is no address."""
    for text in texts:
        try:
            parse(text)
        except ConfigError as error:
            raise ConfigError(f"{flag}: {error}") from None


def parse(text: str) -> Address:
    """Reads `host:port`, `[::1]:port`, `:port` (this machine), `unix:/path` or `unix:///path`.

    Raises:
        ConfigError: It is neither, or the path is too long for a socket.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("//"):
            path = path[2:]
        if not path:
            raise ConfigError(f"address {text!r}: unix: needs a path")
        path = os.path.abspath(path)
        if len(os.fsencode(path)) > _MAX_UNIX_PATH:
            raise ConfigError(
                f"address {text!r}: a Unix socket's path has at most {_MAX_UNIX_PATH} bytes"
            )
        return Address(path=path)
    if "://" in text:
        raise ConfigError(f"address {text!r}: host:port is taken, without a scheme")
    host, colon, port_text = text.rpartition(":")
    if not colon or not (port_text.isascii() and port_text.isdigit()):
        raise ConfigError(f"address {text!r} is neither host:port nor unix:/path")
    if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
        raise ConfigError(f"address {text!r}: an IPv6 address needs brackets, as in [::1]:50051")
    port = int(port_text)
    if port > 65535:
        raise ConfigError(f"address {text!r}: port {port} is above 65535")
    return Address(host=host.strip("[]") or "127.0.0.1", port=port)
