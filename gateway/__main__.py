"""`python -m gateway`: the HTTP and gRPC fronts in one event loop."""

import asyncio
import contextlib
import gc
import logging
import resource
import socket
import sys
from collections.abc import Callable, Sequence

import uvicorn
from fastapi import FastAPI

from foredraft.api.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from foredraft.config.options import parse
from foredraft.config.services import GatewayConfig
from foredraft.errors import CheckpointError, ConfigError, ForedraftError
from foredraft.rpc import address, lifetime
from foredraft.rpc.server import RpcServer, Strangers, serve
from foredraft.rpc.tls import Identity, public_identity, service_identity
from foredraft.telemetry import logging as telemetry_logging
from foredraft.telemetry import tracing
from gateway import discovery
from gateway.app import make_app
from gateway.event_streams import DirectSend
from gateway.figures import Figures
from gateway.grpc_front import SERVICE_NAME, InferenceService
from gateway.http_server.connections import Connections, shares
from gateway.http_server.protocol import BoundedHttpProtocol
from gateway.http_server.server import HttpServer
from gateway.security.certificates import HttpContext
from gateway.security.gate import Gate
from gateway.security.hosts import is_local
from gateway.serving import Serving
from gateway.verifier_pool import VerifierPool

DESCRIPTION = """The gateway: takes text over HTTP (OpenAI-compatible and native) and gRPC, and streams text back."""  # noqa: E501

FILES_SECONDS = 1.0  # between checks of files that may change
# Number of new objects that starts a collection of the youngest generation, and number of
# collections that starts one of the next.
COLLECTOR_THRESHOLDS = (20_000, 20, 20)
# Most open files: every connection takes one, and many systems start processes with 1024.
MAX_FILES = 65_536
HEALTH_SECONDS = 0.5  # between checks of health while no verifier reports a change

logger = logging.getLogger(__name__)


def main() -> int:
    """Runs the gateway until SIGTERM; the exit status is 1 when it could not start."""
    config = parse(GatewayConfig, None, "python -m gateway", DESCRIPTION)
    telemetry_logging.setup("gateway", config.log_level, config.log_format)
    try:
        tracing.setup("gateway", config.otlp_traces_endpoint)
        num_files = _allow_files()
        return lifetime.run(lambda: _serve(config, num_files))
    except ForedraftError as error:
        logger.error("cannot start: %s", error)
        return 1
    finally:
        tracing.shut_down()


async def _serve(config: GatewayConfig, num_files: int) -> int:
    config.check_hosts()
    address.check("--verifier", [name.removeprefix(discovery.PREFIX) for name in config.verifier])
    gate = Gate(config)
    if not gate.asks_for_keys and not is_local(config.host):
        logger.warning("no API keys: whoever reaches %s may use it", config.host)
    identity = public_identity(config)
    async with contextlib.AsyncExitStack() as parts:
        pool = VerifierPool(config.verifier, service_identity(config))
        parts.push_async_callback(pool.close)
        serving = Serving(config, pool)
        parts.push_async_callback(serving.close)
        return await _open_fronts(serving, gate, identity, num_files)


async def _open_fronts(
    serving: Serving, gate: Gate, identity: Identity | None, num_files: int
) -> int:
    """Answers HTTP and gRPC until SIGTERM; returns the exit status."""
    config = serving.config
    figures = Figures(serving, config.dashboard_metrics)
    listener = _listen(config)
    num_http, num_grpc = shares(num_files, config.max_connections)
    if num_grpc < config.max_connections:
        logger.warning(
            "at most %d connections of HTTP and %d of gRPC, since the system allows this process %d"
            " files; ulimit -n raises it",
            num_http,
            num_grpc,
            num_files,
        )
    rpc = _grpc_server(config, identity, num_grpc)
    rpc.add(add_InferenceServiceServicer_to_server, InferenceService(serving, gate), SERVICE_NAME)
    await rpc.start()
    tls = None if identity is None else HttpContext(identity)
    http = _http_server(config, make_app(serving, gate, figures), tls, num_http)
    follow = [gate.reload] if tls is None else [gate.reload, tls.reload]
    http_task = asyncio.create_task(http.serve([listener]))
    stop = lifetime.stop_event()
    health_task = asyncio.create_task(_follow_health(serving, rpc, stop))
    background = [
        asyncio.create_task(_follow_files(follow)),
        asyncio.create_task(figures.follow()),
    ]

    async def drain() -> None:
        http.end_connections()  # clients turn to another gateway; what runs here goes on
        health_task.cancel()
        for task in background:
            task.cancel()
        await serving.drain()

    await serve(rpc, drain_timeout=config.drain_timeout, drain=drain, stop=stop, leaves=True)
    http.should_exit = True
    await http_task
    return 1 if health_task.done() and not health_task.cancelled() else 0


def _grpc_server(config: GatewayConfig, identity: Identity | None, most: int) -> RpcServer:
    """Returns the public gRPC server, for at most `most` connections."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return RpcServer(
        f"{host}:{config.grpc_port}",
        max_message_bytes=config.max_body_bytes,
        identity=identity,
        socket=config.grpc_socket,
        strangers=Strangers(most, config.max_concurrent_requests, config.client_timeout),
    )


def _http_server(
    config: GatewayConfig, app: FastAPI, tls: HttpContext | None, most: int
) -> HttpServer:
    """Returns the HTTP server of an app, for at most `most` connections."""
    http_config = uvicorn.Config(
        DirectSend(app),
        http=BoundedHttpProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
        lifespan="off",
    )
    http_config.load()
    of_one = max(1, config.max_connections_per_address * most // config.max_connections)
    return HttpServer(
        http_config,
        Connections(most, of_one),
        config.client_timeout,
        None if tls is None else tls.current,
    )


async def _follow_health(serving: Serving, rpc: RpcServer, stop: asyncio.Event) -> None:
    """Opens the fronts as soon as possible, then reports SERVING while a verifier is usable.

    Ends, and sets `stop`, only where the tokenizer is missing or broken and a verifier has
    answered.
    """
    opened = was_ready = False
    while True:
        if not opened and serving.can_open:
            try:
                await serving.open()
                opened = True
                _relieve_collector()
            except CheckpointError as error:
                if serving.pool.info is not None:
                    logger.error("cannot start: %s", error)
                    stop.set()
                    return
                # A verifier that cannot start either says more about the model.
            except (ForedraftError, OSError):
                logger.exception("the tokenizer cannot be loaded; trying again")
                await asyncio.sleep(2.0)
        if serving.is_ready != was_ready:
            was_ready = serving.is_ready
            await rpc.set_serving(was_ready)
            logger.info("a verifier is usable" if was_ready else "no verifier is usable")
        await serving.pool.wait_changed(HEALTH_SECONDS)


def _relieve_collector() -> None:
    """Excludes all present objects from garbage collection and makes collections rarer.

    With hundreds of streams, default collection takes a fifth of a token's time, although almost
    all objects of streams are freed by reference counts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def _allow_files() -> int:
    """Raises the limit of open files up to MAX_FILES as far as allowed; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft


async def _follow_files(reloads: Sequence[Callable[[], None]]) -> None:
    """Calls each reload function every second, so that changed files need no restart."""
    while True:
        await asyncio.sleep(FILES_SECONDS)
        for reload in reloads:
            try:
                reload()
            except Exception:  # the next second tries again
                logger.exception("changed files were not read")


def _listen(config: GatewayConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {config.host} --port {config.port}: {error.strerror}") from None
    return listener


if __name__ == "__main__":
    sys.exit(main())
