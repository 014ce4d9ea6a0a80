"""`python -m draft_service`: loads a drafter and serves it to verifiers."""

import asyncio
import gc
import logging
import sys
from concurrent.futures import ThreadPoolExecutor

from draft_service.drafters import create_drafter
from draft_service.drafters.base import Drafter
from draft_service.service import SERVICE_NAME, DraftService
from foredraft.api.draft.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from foredraft.config.options import parse
from foredraft.config.services import DraftConfig
from foredraft.errors import ForedraftError
from foredraft.rpc import lifetime
from foredraft.rpc.server import RpcServer, serve
from foredraft.rpc.tls import service_identity
from foredraft.telemetry import logging as telemetry_logging
from foredraft.telemetry import tracing
from foredraft.telemetry.metrics import metrics_page

DESCRIPTION = """The draft: proposes tokens to a verifier, which decides. Keeps nothing that cannot be lost, so that it
may be stopped and started at any time."""  # noqa: E501

CLOSE_SECONDS = 3.0  # time for a step that runs when everything stops

logger = logging.getLogger(__name__)


def main() -> int:
    """Runs the draft until SIGTERM; the exit status is 1 when it could not start, DEVICE_LOST when
    its GPU failed it.
    """
    config = parse(DraftConfig, None, "python -m draft_service", DESCRIPTION)
    telemetry_logging.setup("draft", config.log_level, config.log_format)
    try:
        tracing.setup("draft", config.otlp_traces_endpoint)
        return lifetime.run(lambda: _serve(config))
    except ForedraftError as error:
        logger.error("cannot start: %s", error)
        return 1
    finally:
        tracing.shut_down()


async def _serve(config: DraftConfig) -> int:
    stop = lifetime.stop_event()
    # Whoever watches a draft sees it while it loads, too.
    with (
        metrics_page(config.metrics_port, config.metrics_host),
        ThreadPoolExecutor(1, thread_name_prefix="drafter") as worker,
    ):
        server = RpcServer(config.listen, identity=service_identity(config))
        service = DraftService(worker, lambda: lifetime.end_at_once(lifetime.DEVICE_LOST))
        server.add(add_DraftServiceServicer_to_server, service, SERVICE_NAME)
        await server.start()
        # Loading takes a while; health answers NOT_SERVING meanwhile.
        gc.disable()  # imports, of torch above all, take a sixth longer with it
        try:
            drafter = await _load(config, worker, stop)
        except BaseException:
            await server.stop(0)
            raise
        if drafter is None:
            await server.stop(0)
            lifetime.end_at_once(0)  # the thread that loads cannot be interrupted
        service.open(drafter)
        gc.enable()
        # What was loaded stays: looking through it all would stop a step for a tenth of a second,
        # now and then.
        gc.collect()
        gc.freeze()
        await server.set_serving()
        await serve(server, stop=stop)
        await service.wait_closed(CLOSE_SECONDS)
    return 0


async def _load(
    config: DraftConfig, worker: ThreadPoolExecutor, stop: asyncio.Event
) -> Drafter | None:
    """Returns the drafter; None where `stop` is set before it is loaded."""
    loading = asyncio.get_running_loop().run_in_executor(worker, create_drafter, config)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return await loading if loading.done() else None


if __name__ == "__main__":
    sys.exit(main())
