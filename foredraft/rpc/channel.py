"""Channels to a service, for asyncio and for threads, and a question for its health."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foredraft.rpc import address
from foredraft.rpc.address import Address
from foredraft.rpc.tls import Identity

MAX_MESSAGE_BYTES = 64 * 2**20
KEEPALIVE_SECONDS = 20
INT_MAX = 2**31 - 1  # of gRPC's options


def options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int | str]]:
    """Returns the options of channels and servers alike: message limits and keepalive."""
    max_message_bytes = min(max_message_bytes, INT_MAX)
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_SECONDS * 1000),
        # Ends the connection to a peer that hangs; gRPC's default is a minute.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def aio_channel(
    target: str | Address,
    *,
    identity: Identity | None = None,
) -> grpc.aio.Channel:
    """Creates a channel for asyncio. It connects on first use and reconnects by itself.

    Args:
        target: Address of the service.
        identity: Certificate for TLS; not used for Unix sockets.
    """
    where = _parse(target)
    chosen = options() + _client_options(where, identity)
    if identity is None or where.is_unix:
        return grpc.aio.insecure_channel(where.target, options=chosen)
    return grpc.aio.secure_channel(where.target, identity.channel_credentials(), options=chosen)


def channel(
    target: str | Address,
    *,
    identity: Identity | None = None,
) -> grpc.Channel:
    """Creates a channel for threads; otherwise like `aio_channel`."""
    where = _parse(target)
    chosen = options() + _client_options(where, identity)
    if identity is None or where.is_unix:
        return grpc.insecure_channel(where.target, options=chosen)
    return grpc.secure_channel(where.target, identity.channel_credentials(), options=chosen)


def check_health(
    target: str | Address,
    *,
    service: str = "",
    timeout: float = 2.0,
    identity: Identity | None = None,
) -> str:
    """Asks a service for its health once.

    Returns SERVING, NOT_SERVING, UNKNOWN, SERVICE_UNKNOWN or, when nobody answers, UNREACHABLE.
    """
    with channel(target, identity=identity) as connection:
        try:
            return _ask(connection, service, timeout)
        except grpc.RpcError as error:
            return _health_of(error)


class HealthProbe:
    """Asks a service for its health repeatedly over one connection."""

    def __init__(self, target: str | Address) -> None:
        self._target = target
        self._channel: grpc.Channel | None = None

    def check(self, timeout: float = 2.0) -> str:
        """Asks once, like `check_health`."""
        if self._channel is None:
            self._channel = channel(self._target)
        try:
            return _ask(self._channel, "", timeout)
        except grpc.RpcError as error:
            # A slow service keeps its connection. One that is gone is connected again, without
            # gRPC's pauses.
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                self.close()
            return _health_of(error)

    def close(self) -> None:
        """Closes the connection; the next check opens another."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _ask(connection: grpc.Channel, service: str, timeout: float) -> str:
    answer = health_pb2_grpc.HealthStub(connection).Check(
        health_pb2.HealthCheckRequest(service=service), timeout=timeout
    )
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _parse(target: str | Address) -> Address:
    return target if isinstance(target, Address) else address.parse(target)


def _client_options(where: Address, identity: Identity | None) -> list[tuple[str, int | str]]:
    chosen: list[tuple[str, int | str]] = [
        # Traffic between services must never go through a proxy of the environment.
        ("grpc.enable_http_proxy", 0),
        # A service that came back is found within a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        # Channels do not share connections, so closing one closes its socket.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if where.is_unix:
        # The path would otherwise be the authority, which some servers refuse.
        chosen.append(("grpc.default_authority", "localhost"))
    elif identity is not None and identity.name:
        chosen.append(("grpc.ssl_target_name_override", identity.name))
    return chosen


def _health_of(error: grpc.RpcError) -> str:
    if error.code() == grpc.StatusCode.NOT_FOUND:
        return "SERVICE_UNKNOWN"
    return "UNREACHABLE"
