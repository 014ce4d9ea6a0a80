"""`python -m verify_service`: loads the target model and serves it."""

import asyncio
import gc
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from foredraft.api.verify.v1.verify_pb2_grpc import add_VerifyServiceServicer_to_server
from foredraft.attention.choice import device_for
from foredraft.config.options import parse
from foredraft.config.services import VerifyConfig
from foredraft.config.speculation import each_draft, with_tree_defaults
from foredraft.errors import ForedraftError
from foredraft.models.speculation import resolve
from foredraft.rpc import lifetime
from foredraft.rpc.server import RpcServer, serve
from foredraft.rpc.tls import service_identity
from foredraft.telemetry import logging as telemetry_logging
from foredraft.telemetry import tracing
from foredraft.telemetry.metrics import start_metrics_server
from foredraft.transport import cuda
from verify_service.engine.engine import Engine
from verify_service.grammar.compiler import GrammarCompiler, GrammarLimits
from verify_service.metrics import AnyMetrics, speculation_metrics
from verify_service.service import ServedModel, VerifyService
from verify_service.startup import Target, build_engine, connect_draft, load_target

SERVICE_NAME = "foredraft.api.verify.v1.VerifyService"
DESCRIPTION = """The verifier: owns the target model and decides every output token. Takes token ids over gRPC
from a gateway and asks a draft service for guesses."""

STUCK_SECONDS = 180.0  # far longer than any step, kernels that are compiled in it included

logger = logging.getLogger(__name__)


def main() -> int:
    """Runs the verifier until SIGTERM; the exit status is 1 when it could not start or its engine failed, DEVICE_LOST when
    its GPU did."""
    config = parse(VerifyConfig, None, "python -m verify_service", DESCRIPTION)
    telemetry_logging.setup("verify", config.log_level, config.log_format)
    try:
        config.draft_addresses()  # says what is wrong before anything is loaded
        tracing.setup("verify", config.otlp_traces_endpoint)
        on_cpu = device_for(config.device).type == "cpu"
        for one in each_draft(config):
            resolve(one, on_cpu)  # likewise
        resolved = resolve(config, on_cpu)
        return lifetime.run(lambda: _serve(resolved))
    except ForedraftError as error:
        logger.error("cannot start: %s", error)
        return 1
    finally:
        tracing.shut_down()


async def _serve(config: VerifyConfig) -> int:
    server = RpcServer(config.listen, identity=service_identity(config))
    speculation = speculation_metrics(config.algorithms)
    # Loading takes a while; health answers NOT_SERVING meanwhile. OpenMP keeps a team for every thread that computed, and no
    # team spins while there are more threads in teams than cores: the thread that loads ends, and its team with it.
    loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
    starting = asyncio.get_running_loop().run_in_executor(loader, _build, config, speculation)
    service = VerifyService()
    server.add(add_VerifyServiceServicer_to_server, service, SERVICE_NAME)
    await server.start()
    try:
        target, engine = await starting
    except ForedraftError:
        await server.stop(0)
        raise
    loader.shutdown()
    grammars = GrammarCompiler(
        target.path,
        engine.limits.vocab_size,
        engine.limits.eos_token_ids,
        GrammarLimits(config.grammar_timeout, config.grammar_memory_mb),
    )
    service.open(engine, _served(config, target), grammars)
    metrics = None
    if config.metrics_port is not None:
        metrics = start_metrics_server(config.metrics_port, config.metrics_host)
    engine.start()
    # What was loaded stays: looking through it all would stop a step for a tenth of a second, now and then.
    gc.collect()
    gc.freeze()
    await server.set_serving()
    stop = lifetime.stop_event()
    watch = asyncio.create_task(_watch(engine, stop, target.device))

    async def drain() -> None:
        service.drain()
        while not engine.is_idle and engine.failure is None:
            await asyncio.sleep(0.02)

    await serve(server, drain_timeout=config.drain_timeout, drain=drain, stop=stop)
    watch.cancel()
    if engine.failure is not None and not cuda.works(target.device):
        lifetime.end_at_once(lifetime.DEVICE_LOST)
    await grammars.close()
    await asyncio.to_thread(engine.stop)
    if metrics is not None:
        metrics.stop()
    return 1 if engine.failure is not None else 0


def _build(config: VerifyConfig, speculation: AnyMetrics) -> tuple[Target, Engine]:
    target = load_target(config)
    links = connect_draft(config, target, speculation)
    return target, build_engine(config, target, speculation, links)


async def _watch(engine: Engine, stop: asyncio.Event, device: torch.device) -> None:
    """An engine that failed cannot serve: the process ends, for whoever supervises it to start anew.

    So it does where a GPU stands still, which lets nothing end in order.
    """
    last_idle = time.perf_counter()
    while engine.failure is None:
        await asyncio.sleep(0.2)
        now = time.perf_counter()
        if engine.is_idle or device.type != "cuda":
            last_idle = now
        elif now - max(last_idle, engine.ended_at) > STUCK_SECONDS:
            logger.error("the GPU has ended no step for %g s: ending this process", STUCK_SECONDS)
            lifetime.end_at_once(lifetime.DEVICE_LOST)
    stop.set()


def _served(config: VerifyConfig, target: Target) -> ServedModel:
    config = with_tree_defaults(config, target.model.config.architecture)
    drafts = [
        (one.speculative_algorithm, Path(one.speculative_draft_model_path).name)
        for one in each_draft(config)
        if one.speculative_algorithm != "NONE"
    ]
    return ServedModel(
        name=target.name,
        path=str(target.path),
        architecture=target.model.config.architecture,
        dtype=str(target.dtype).removeprefix("torch."),
        device=target.device.type,
        weight_bytes=target.weight_bytes,
        algorithm=config.speculative_algorithm,
        draft_model=",".join(model for _, model in drafts if model),
        tree_limits=config.tree_limits,
        drafts=drafts,
    )


if __name__ == "__main__":
    sys.exit(main())
