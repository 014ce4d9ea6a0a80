"""Collects the dashboard's numbers: the gateway's metrics, verifier loads, configured metrics
pages.

Only metrics named here leave the process, and only configured addresses are asked.
"""

import asyncio
import http.client
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from foredraft.errors import ConfigError, Unavailable
from foredraft.telemetry.metrics import REGISTRY
from gateway import draft_states
from gateway.serving import Serving

logger = logging.getLogger(__name__)

CACHE_SECONDS = 1.0
SCRAPE_SECONDS = 0.8
MAX_PAGE_BYTES = 1 << 20
MAX_PAGES = 64
HISTORY_SECONDS = 5.0  # between rows of the history
HISTORY_ROWS = 121  # ten minutes

# Columns of the history. Each takes the first of its metrics that is there.
_HISTORY = {
    # The gateway counts tokens at the end of a continuation, the verifier as they come.
    "tokens": ("generation_tokens_total", "gateway_output_tokens_total"),
    "emitted": ("emitted_tokens_total",),
    "verifies": ("verifies_total",),
    "running": ("running_sequences", "gateway_running_requests"),
    "waiting": ("queue_depth", "gateway_queued_requests"),
}
# Samples that are summed over their labels and over all pages.
_SUMS = frozenset(
    {
        "foredraft_gateway_cached_tokens_total",
        "foredraft_gateway_output_tokens_total",
        "foredraft_gateway_prompt_tokens_total",
        "foredraft_gateway_queued_requests",
        "foredraft_gateway_running_requests",
        "foredraft_accepted_tokens_total",
        "foredraft_draft_available",
        "foredraft_draft_failures_total",
        "foredraft_draft_tokens_total",
        "foredraft_drafts_total",
        "foredraft_emitted_tokens_total",
        "foredraft_generation_tokens_total",
        "foredraft_kv_pages",
        "foredraft_kv_pages_cached",
        "foredraft_kv_pages_used",
        "foredraft_preemptions_total",
        "foredraft_prefix_cache_hit_tokens_total",
        "foredraft_prompt_tokens_total",
        "foredraft_queue_depth",
        "foredraft_running_sequences",
        "foredraft_verifies_total",
        "foredraft_drafter_trie_nodes",
        *(
            f"foredraft_{part}_seconds_{of}"
            for part in ("step", "draft_wait", "draft", "target_forward", "verify")
            for of in ("sum", "count")
        ),
    }
)
# Samples that are kept apart by labels, whose values have spaces between them.
_BY_LABEL = {
    "foredraft_accepted_tokens_per_position_total": ("position",),
    "foredraft_gateway_requests_total": ("outcome",),
    "foredraft_rank_seconds_total": ("rank", "part"),
    "foredraft_gateway_time_to_first_token_seconds_bucket": ("le",),
    "foredraft_gateway_inter_token_latency_seconds_bucket": ("le",),
    "foredraft_gateway_end_to_end_seconds_bucket": ("le",),
}


class Figures:
    """Holds the numbers that the dashboard shows, read at most once per CACHE_SECONDS.

    Args:
        serving: The model that is served.
        addresses: `host:port` of each metrics page.

    Raises:
        ConfigError: An address is not `host:port`, or there are too many.
    """

    def __init__(self, serving: Serving, addresses: Sequence[str]) -> None:
        if len(addresses) > MAX_PAGES:
            raise ConfigError(f"--dashboard-metrics: at most {MAX_PAGES} pages")
        self._serving = serving
        self._pages = [_host_and_port(address) for address in addresses]
        self._lock = asyncio.Lock()
        self._cached: dict[str, Any] | None = None
        self._expires = -math.inf
        self._samples: deque[draft_states.Sample] = deque(maxlen=64)
        self._rows: deque[tuple[list[float | None], dict[str, Any]]] = deque(maxlen=HISTORY_ROWS)

    async def get(self) -> dict[str, Any]:
        """Returns all numbers as a JSON object.

        Raises:
            Unavailable: No verifier has answered yet.
        """
        async with self._lock:
            if self._cached is None or time.monotonic() >= self._expires:
                self._cached = await self._gather()
                self._expires = time.monotonic() + CACHE_SECONDS
            return self._cached

    async def history(self) -> dict[str, Any]:
        """Returns rows of the last ten minutes, so that a chart is full when it first opens.

        Also returns the present time, and all metrics at the time of the first row, so that a
        client can compute what each counter grew by.
        """
        now = await self.get()
        return {
            "now": now["time"],
            "columns": ["time", *_HISTORY],
            "rows": [row for row, _ in self._rows],
            "oldest": self._rows[0][1],
        }

    async def follow(self) -> None:
        """Adds rows to the history until it is cancelled, whether or not the dashboard is open."""
        while True:
            try:
                await self.get()
            except Unavailable:
                pass  # nothing is served yet
            except Exception:
                logger.exception("the dashboard's figures cannot be read")
            await asyncio.sleep(HISTORY_SECONDS)

    async def _gather(self) -> dict[str, Any]:
        info = self._serving.info
        pages = await asyncio.gather(*(asyncio.to_thread(_scrape, *page) for page in self._pages))
        found = [page for page in pages if page is not None]
        loads = self._serving.pool.loads.values()
        now, families = time.monotonic(), [list(REGISTRY.collect()), *found]
        metrics = _merge(families)
        self._remember(now, metrics)
        self._samples.append(_drafts_at(now, families))
        is_attached = bool(loads) and all(load.draft_available for load in loads)
        drafts = [
            draft_states.describe(name, self._samples, is_attached)
            for name in info.speculative_algorithm.split(",")
            if name not in ("", "NONE")
        ]
        return {
            "time": now,
            "model": info.model,
            "algorithm": info.speculative_algorithm,
            "draft_model": info.draft_model.rpartition("/")[2],
            "num_draft_tokens": info.speculative_num_draft_tokens,
            "device": info.device,
            "dtype": info.dtype,
            "context_length": info.context_length,
            "kv_tokens": info.kv_tokens,
            "page_size": info.page_size,
            "max_running_requests": info.max_running_requests,
            "version": info.version,
            "pages": {"configured": len(pages), "answering": len(found)},
            # As the verifiers said with their last tokens: older than the metrics when nothing
            # runs.
            "load": {
                "verifiers": len(loads),
                "waiting": sum(load.waiting for load in loads),
                "running": sum(load.running for load in loads),
                "free_pages": sum(load.free_pages for load in loads),
                "total_pages": sum(load.total_pages for load in loads),
                "draft_available": all(load.draft_available for load in loads),
            },
            "drafts": drafts,
            "metrics": metrics,
        }

    def _remember(self, now: float, metrics: dict[str, Any]) -> None:
        """Adds a row to the history if the last one is old enough."""
        if self._rows and now - (self._rows[-1][0][0] or 0.0) < HISTORY_SECONDS - CACHE_SECONDS / 2:
            return
        there = [
            next((metrics[name] for name in names if name in metrics), None)
            for names in _HISTORY.values()
        ]
        self._rows.append(([now, *there], metrics))


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or parts.netloc != address or "@" in address:
        raise ConfigError(f"--dashboard-metrics {address}: not host:port")
    return host, port


def _scrape(host: str, port: int) -> list[Metric] | None:
    """Reads one metrics page; None if that fails. Follows no redirect and uses no proxy."""
    connection = http.client.HTTPConnection(host, port, timeout=SCRAPE_SECONDS)
    try:
        connection.request("GET", "/metrics", headers={"accept": "text/plain;version=0.0.4"})
        response = connection.getresponse()
        if response.status != 200:
            return None
        page = b""
        # The connection's own timeout is for each read.
        deadline = time.monotonic() + SCRAPE_SECONDS
        while chunk := response.read1(1 << 16):
            page += chunk
            if len(page) > MAX_PAGE_BYTES or time.monotonic() > deadline:
                return None
        return list(text_string_to_metric_families(page.decode()))
    except (OSError, http.client.HTTPException, ValueError) as error:
        logger.debug("no metrics at %s:%d: %s", host, port, error)
        return None
    finally:
        connection.close()


def _drafts_at(now: float, pages: Iterable[Iterable[Metric]]) -> draft_states.Sample:
    values: dict[str, dict[str, float]] = {}
    verifiers: dict[str, int] = {}
    for page in pages:
        for family in page:
            for sample in family.samples:
                if sample.name in draft_states.NAMES and math.isfinite(sample.value):
                    name = sample.labels.get("algorithm", "")
                    of_metric = values.setdefault(sample.name, {})
                    of_metric[name] = of_metric.get(name, 0.0) + sample.value
                    if sample.name == draft_states.AVAILABLE:
                        verifiers[name] = verifiers.get(name, 0) + 1
    return draft_states.Sample(now, values, verifiers)


def _merge(pages: Iterable[Iterable[Metric]]) -> dict[str, Any]:
    sums: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {}
    for page in pages:
        for family in page:
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    continue
                if sample.name in _SUMS:
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                elif (names := _BY_LABEL.get(sample.name)) is not None:
                    values = labelled.setdefault(sample.name, {})
                    key = " ".join(sample.labels.get(name, "") for name in names)
                    values[key] = values.get(key, 0.0) + sample.value
    return {
        name.removeprefix("foredraft_"): value
        for name, value in sorted({**sums, **labelled}.items())
    }
