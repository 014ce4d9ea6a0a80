"""`python -m verify_service`: loads the target model and serves it."""

# ruff: noqa: E402
import gc

gc.disable()  # imports, of torch above all, take a sixth longer with it

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from foredraft.api.verify.v1.verify_pb2_grpc import add_VerifyServiceServicer_to_server
from foredraft.attention.choice import device_for
from foredraft.config.options import parse
from foredraft.config.ranks import Nodes
from foredraft.config.services import VerifyConfig
from foredraft.config.speculation import each_draft, with_tree_defaults
from foredraft.config.speculation_checks import check_transport
from foredraft.errors import ForedraftError
from foredraft.models.speculation import resolve
from foredraft.rpc import address, lifetime
from foredraft.rpc.server import RpcServer, serve
from foredraft.rpc.tls import service_identity
from foredraft.runner.compile_ahead import first_kernel
from foredraft.telemetry import logging as telemetry_logging
from foredraft.telemetry import tracing
from foredraft.telemetry.metrics import metrics_page
from foredraft.transport import cuda
from verify_service.attach.links import DraftLink, connect_drafts
from verify_service.engine.engine import Engine
from verify_service.executor.ranks.watchdog import RANK_LOST
from verify_service.executor.ranks.workers import start_further
from verify_service.grammar.compiler import GrammarCompiler, GrammarLimits
from verify_service.metrics import AnyMetrics, speculation_metrics
from verify_service.service import ServedDraft, ServedModel, VerifyService
from verify_service.startup import build_engine, check_flags, load_target
from verify_service.target import Target

gc.freeze()  # the start need not look through what was imported
gc.enable()

SERVICE_NAME = "foredraft.api.verify.v1.VerifyService"
DESCRIPTION = """The verifier: owns the target model and decides every output token. Takes token ids over gRPC
from a gateway and asks a draft service for guesses."""  # noqa: E501

STUCK_SECONDS = 180.0  # far longer than any step, kernels that are compiled in it included

logger = logging.getLogger(__name__)


def main() -> int:
    """Runs the verifier until SIGTERM; the exit status is 1 when it could not start or its engine
    failed, DEVICE_LOST when its GPU did.
    """
    config = parse(VerifyConfig, None, "python -m verify_service", DESCRIPTION)
    telemetry_logging.setup("verify", config.log_level, config.log_format)
    try:
        # These raise for wrong flags before anything is loaded.
        address.check("--draft", config.draft_addresses().values())
        address.check("--listen", [config.listen])
        nodes = config.nodes()
        if nodes.rank:
            return lifetime.run(lambda: _serve_further(config, nodes))
        tracing.setup("verify", config.otlp_traces_endpoint)
        on_cpu = device_for(config.device).type == "cpu"
        check_transport(config.require_transport, on_cpu)
        for one in each_draft(config):
            resolve(one, on_cpu)
        resolved = resolve(config, on_cpu)
        return lifetime.run(lambda: _serve(resolved))
    except ForedraftError as error:
        logger.error("cannot start: %s", error)
        return 1
    finally:
        tracing.shut_down()


async def _serve(config: VerifyConfig) -> int:
    # Whoever watches a verifier sees it while it loads, too.
    with metrics_page(config.metrics_port, config.metrics_host):
        return await _serve_model(config)


async def _serve_model(config: VerifyConfig) -> int:
    server = RpcServer(config.listen, identity=service_identity(config))
    speculation = speculation_metrics(config.algorithms)
    # Loading takes a while; health answers NOT_SERVING meanwhile. OpenMP keeps a team for every
    # thread that computed, and no team spins while there are more threads in teams than cores: the
    # thread that loads ends, and its team with it.
    loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
    starting = asyncio.get_running_loop().run_in_executor(loader, _build, config, speculation)
    service = VerifyService()
    server.add(add_VerifyServiceServicer_to_server, service, SERVICE_NAME)
    await server.start()
    try:
        target, engine, links = await starting
    except BaseException:
        await server.stop(0)
        raise
    loader.shutdown()
    grammars = GrammarCompiler(
        target.path,
        engine.limits.vocab_size,
        engine.limits.eos_token_ids,
        GrammarLimits(config.grammar_timeout, config.grammar_memory_mb),
    )
    service.open(engine, _served(config, target, links), grammars)
    engine.start()
    # What was loaded stays: looking through it all would stop a step for a tenth of a second, now
    # and then.
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
    return 1 if engine.failure is not None else 0


async def _serve_further(config: VerifyConfig, nodes: Nodes) -> int:
    """Runs the ranks of a host that has no verifier, until rank 0 ends them or is lost."""
    check_flags(config)
    server = RpcServer(config.listen, identity=service_identity(config))
    await server.start()
    stop = lifetime.stop_event()
    workers = start_further(config, nodes)
    where = f"{nodes.host}:{nodes.port}"
    logger.info("host %d of %d: waiting for host 0 at %s", nodes.rank, nodes.count, where)
    is_serving = False
    while not stop.is_set() and (ended := workers.ended()) is None:
        if not is_serving and workers.have_joined():
            is_serving = True
            logger.info("host %d of %d: its ranks have joined", nodes.rank, nodes.count)
            await server.set_serving()
        await asyncio.sleep(0.1)
    status = 0
    if not stop.is_set() and ended is not None:
        rank, how = ended
        if how == "ended with status 0":
            logger.info("host 0 has stopped")
            await asyncio.to_thread(workers.wait)
        else:
            name = f"rank {rank} of {config.tensor_parallel_size} (pid {workers.pid(rank)})"
            logger.error("%s %s: ending this host's ranks", name, how)
            status = RANK_LOST
    workers.kill()
    workers.wait()
    await server.stop(0)
    return status


def _build(config: VerifyConfig, speculation: AnyMetrics) -> tuple[Target, Engine, list[DraftLink]]:
    with first_kernel(device_for(config.device)):
        target = load_target(config)
        links = connect_drafts(config, target, speculation)
    return target, build_engine(config, target, speculation, links), links


async def _watch(engine: Engine, stop: asyncio.Event, device: torch.device) -> None:
    """Ends the process when its engine has failed, so that its supervisor restarts it.

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


def _served(config: VerifyConfig, target: Target, links: Sequence[DraftLink]) -> ServedModel:
    config = with_tree_defaults(config, target.model.config.architecture)
    drafts = [
        ServedDraft(
            link.config.speculative_algorithm,
            Path(link.config.speculative_draft_model_path).name,
            link,
        )
        for link in links
    ]
    return ServedModel(
        name=target.name,
        path=str(target.path),
        architecture=target.model.config.architecture,
        dtype=str(target.dtype).removeprefix("torch."),
        quantization=str(target.model.config.quantization or ""),
        device=target.device.type,
        weight_bytes=target.weight_bytes,
        algorithm=config.speculative_algorithm,
        draft_model=",".join(draft.model for draft in drafts if draft.model),
        checksum=target.checksum,
        tree_limits=config.tree_limits,
        drafts=drafts,
        tensor_parallel_size=config.tensor_parallel_size,
        exactness=target.exactness,
    )


if __name__ == "__main__":
    sys.exit(main())
