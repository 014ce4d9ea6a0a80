"""Waits for a gRPC service that a test or a benchmark has started."""

import time

from foredraft.errors import Unavailable
from foredraft.rpc.address import Address
from foredraft.rpc.channel import check_health

_POLL_SECONDS = 0.05


def wait_ready(target: str | Address, timeout: float, *, service: str = "") -> None:
    """Returns when the service says SERVING.

    Raises:
        Unavailable: It did not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = min(2.0, max(0.05, deadline - time.monotonic()))
        status = check_health(target, service=service, timeout=left)
        if status == "SERVING":
            return
        if time.monotonic() >= deadline:
            raise Unavailable(f"{target} is {status} after {timeout:g} s")
        time.sleep(_POLL_SECONDS)
