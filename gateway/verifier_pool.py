"""Connects to all verifiers of a gateway and chooses among them."""

import asyncio
from collections.abc import Sequence

import grpc

from foredraft.api.verify.v1 import verify_pb2
from foredraft.errors import ForedraftError, Unavailable
from foredraft.rpc.address import Address
from foredraft.rpc.tls import Identity
from gateway import discovery, metrics
from gateway.routing import Router
from gateway.verifier_connection import AVOID_SECONDS, VerifierConnection


class VerifierPool:
    """All verifiers. They must serve the same model, which the first one to answer tells.

    Args:
        targets: `host:port`, `unix:/path`, or `dns:name:port` for every address that a name has,
            now and later.

    A request goes where most of its prompt's pages are, unless that verifier is much busier than
    another.

    Attributes:
        info: Information on the served model; None until a verifier has answered.
    """

    def __init__(self, targets: Sequence[str], identity: Identity | None = None) -> None:
        self.info: verify_pb2.GetModelInfoResponse | None = None
        self._identity = identity
        self._checksum = ""  # of the model that connected verifiers serve
        self._changed = asyncio.Event()
        self._is_stopping = False
        self._routes = Router()
        names = [target for target in targets if target.startswith(discovery.PREFIX)]
        self._connections = [self._connect(target) for target in targets if target not in names]
        self._lookups = [
            asyncio.create_task(self._follow(discovery.parse(name)), name=name) for name in names
        ]
        metrics.waiting_requests.set_function(
            lambda: sum(load.waiting for load in self.loads.values())
        )
        metrics.kv_usage.set_function(self._kv_usage)

    @property
    def num_usable(self) -> int:
        """Number of verifiers that can take a request now."""
        return sum(connection.usable for connection in self._connections)

    @property
    def num_known(self) -> int:
        """Number of verifiers, usable or not; a name counts once per known address."""
        return len(self._connections)

    @property
    def loads(self) -> dict[str, verify_pb2.Load]:
        """Last known load of the connected verifiers by address."""
        return {c.target: c.load for c in self._connections if c.ready}

    async def pick(self, prompt: Sequence[int], patience: float) -> VerifierConnection:
        """Chooses the verifier for a prompt; waits up to `patience` seconds for a usable one.

        Raises:
            Unavailable: No verifier is usable.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while True:
            usable = [connection for connection in self._connections if connection.usable]
            if usable:
                usable = [connection for connection in usable if not connection.silent] or usable
                return self._route(prompt, usable)
            remaining = deadline - loop.time()
            if remaining <= 0 or self._is_stopping:
                raise Unavailable("no verifier is ready")
            await self.wait_changed(min(remaining, AVOID_SECONDS))

    async def wait_changed(self, seconds: float) -> None:
        """Waits until a verifier came, went or changed its health, at most `seconds`.

        A verifier that is avoided for a moment becomes usable again without a change.
        """
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def flush_cache(self) -> int:
        """Drops cached prefixes at all verifiers; returns the number of pages freed.

        Raises:
            Unavailable: A verifier did not answer, or none is ready.
        """
        ready = [connection for connection in self._connections if connection.ready]
        if not ready:
            raise Unavailable("no verifier is ready")
        try:
            return sum(await asyncio.gather(*(c.flush_cache() for c in ready)))
        except grpc.RpcError as error:
            raise Unavailable(f"a verifier did not answer: {error.details()}") from error

    def stop_waiting(self) -> None:
        """Fails the requests that wait for a usable verifier."""
        self._is_stopping = True
        self._changed.set()

    async def close(self) -> None:
        """Ends all streams."""
        for lookup in self._lookups:
            lookup.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in self._connections))

    def _route(
        self, prompt: Sequence[int], usable: Sequence[VerifierConnection]
    ) -> VerifierConnection:
        if len(self._connections) == 1:
            return usable[0]
        by_life = {connection.life: connection for connection in usable}
        route = self._routes.choose(prompt, {life: c.busy for life, c in by_life.items()})
        metrics.routed.labels(route.reason.value).inc()
        return by_life[route.holder]

    def _connect(self, target: str) -> VerifierConnection:
        return VerifierConnection(target, self._accept, self._on_change, self._identity)

    async def _follow(self, name: Address) -> None:
        """Keeps a connection to every address of a name, without end."""
        mine: dict[str, VerifierConnection] = {}

        async def update(targets: set[str]) -> None:
            for target in targets - mine.keys():
                mine[target] = self._connect(target)
                self._connections.append(mine[target])
            # A verifier that drains has left the name already; it is let go with its stream.
            for target in [t for t in mine.keys() - targets if not mine[t].ready]:
                gone = mine.pop(target)
                self._connections.remove(gone)
                await gone.close()

        await discovery.follow(name, update)

    def _kv_usage(self) -> float:
        loads = self.loads.values()
        total = sum(load.total_pages for load in loads)
        return 1 - sum(load.free_pages for load in loads) / total if total else 0.0

    def _accept(self, info: verify_pb2.GetModelInfoResponse) -> None:
        if self.info is None:
            self.info = info
        for field in ("model", "vocab_size"):
            ours, theirs = getattr(self.info, field), getattr(info, field)
            if ours != theirs:
                raise ForedraftError(f"it serves another model: {field} {theirs}, not {ours}")
        # Older verifiers give no checksum. Where none is connected, its weights may have changed.
        ours, theirs = self._checksum, info.checksum
        if ours and theirs not in ("", ours) and any(each.ready for each in self._connections):
            raise ForedraftError(f"it serves another model: checksum {theirs}, not {ours}")
        self._checksum = theirs or ours

    def _on_change(self) -> None:
        metrics.verifiers.set(self.num_usable)
        self._changed.set()
