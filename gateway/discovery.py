"""Looks up verifiers behind a name whose addresses change, such as Kubernetes' headless services.

Opens no connection itself.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from foredraft.rpc import address
from foredraft.rpc.address import Address

logger = logging.getLogger(__name__)

PREFIX = "dns:"
LOOKUP_SECONDS = 3.0
# Errors of a resolver for a name that exists but has no address now.
_NO_ADDRESS = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


async def resolve(name: Address) -> set[str]:
    """Looks up the addresses of a name, each as `host:port`; the set may be empty.

    Raises:
        OSError: The look-up failed.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESS:
            return set()
        raise
    return {Address(host=str(where[0]), port=int(where[1])).target for *_, where in found}


def parse(target: str) -> Address:
    """Parses the name and port of `dns:name:port`.

    Raises:
        ConfigError: The target has another form.
    """
    return address.parse(target.removeprefix(PREFIX))


async def follow(name: Address, update: Callable[[set[str]], Awaitable[None]]) -> None:
    """Calls `update` with a name's addresses every few seconds, without end.

    A failed look-up is logged and leaves the last addresses in force.
    """
    said = ""
    while True:
        try:
            await update(await resolve(name))
            said = ""
        except OSError as error:
            if str(error) != said:
                logger.warning("cannot look up %s: %s", name.host, error)
            said = str(error)
        await asyncio.sleep(LOOKUP_SECONDS)
