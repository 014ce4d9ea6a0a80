"""The metrics of a process: one registry, names and buckets that fit tokens of 2 ms, a page to
scrape.

Each service declares its metrics in its own metrics.py; none are declared here but the version and
the process's own.
"""

import bisect
import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
    make_wsgi_app,
)

from foredraft import __version__
from foredraft.errors import ConfigError
from foredraft.telemetry.metrics_page import PageServer

logger = logging.getLogger(__name__)

REGISTRY = CollectorRegistry(auto_describe=True)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Parts of a step: a draft step takes tens of microseconds to milliseconds.
STEP_BUCKETS = (
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.0015,
    0.002,
    0.003,
    0.004,
    0.006,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.4,
    1.0,
    4.0,
)
# Between tokens and to the first token: 2 ms tokens lie in the middle of fine buckets.
TOKEN_BUCKETS = (
    0.0005,
    0.001,
    0.0015,
    0.002,
    0.0025,
    0.003,
    0.004,
    0.006,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.5,
    5.0,
    10.0,
)
# Whole requests and their wait in the queue.
REQUEST_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    320.0,
    640.0,
)
# Tokens emitted per verification.
LENGTH_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 64.0)

_declared: dict[str, "Family"] = {}
_FORBIDDEN_LABELS = frozenset({"request", "request_id", "id", "user", "prompt"})


@dataclass(frozen=True, slots=True)
class Family:
    """Describes a declared metric, for docs/metrics.md.

    Attributes:
        name: Name as scraped, `_total` of counters included.
        kind: counter, gauge or histogram.
        help: One sentence that says what is measured.
        labels: Label names.
        buckets: Upper bounds of a histogram.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()


def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
    """Declares a counter; its name ends with `_total`."""
    if not name.endswith("_total"):
        raise ValueError(f"{name}: a counter's name ends with _total")
    _declare(Family(name, "counter", help, tuple(labels)))
    return Counter(name, help, labels, registry=REGISTRY)


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    """Declares a gauge."""
    _declare(Family(name, "gauge", help, tuple(labels)))
    return Gauge(name, help, labels, registry=REGISTRY)


def histogram(
    name: str, help: str, buckets: Sequence[float], labels: Sequence[str] = ()
) -> Histogram:
    """Declares a histogram over one of the bucket sets above, in seconds, tokens or bytes."""
    _declare(Family(name, "histogram", help, tuple(labels), tuple(buckets)))
    return Histogram(name, help, labels, registry=REGISTRY, buckets=buckets)


def observe_many(histogram: Histogram, value: float, count: int) -> None:
    """Records `count` equal observations at the price of one; the client library has no call for
    it.
    """
    index = bisect.bisect_left(histogram._upper_bounds, value)
    histogram._sum.inc(value * count)
    histogram._buckets[index].inc(count)


def families() -> list[Family]:
    """Returns all metrics declared in this process, by name."""
    return sorted(_declared.values(), key=lambda family: family.name)


def value(name: str, **labels: str) -> float:
    """Returns the current value of a sample as it is scraped (`..._total`, `..._count`); 0 before
    its first change.
    """
    return REGISTRY.get_sample_value(name, labels) or 0.0


def render() -> bytes:
    """Returns the registry in Prometheus' text format; its content type is CONTENT_TYPE."""
    return generate_latest(REGISTRY)


class MetricsServer:
    """A running /metrics page. `stop()` frees the port."""

    def __init__(self, server: PageServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.host, self.port = str(server.server_address[0]), int(server.server_address[1])

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_metrics_server(port: int, host: str = "127.0.0.1") -> MetricsServer:
    """Serves the registry from a thread of its own; port 0 takes a free one.

    Raises:
        ConfigError: The port cannot be had.
    """
    try:
        server = PageServer(host, port)
    except OSError as error:
        raise ConfigError(f"--metrics-port {port}: {error.strerror or error}") from error
    server.set_app(make_wsgi_app(REGISTRY))
    return MetricsServer(server)


@contextlib.contextmanager
def metrics_page(port: int | None, host: str) -> Iterator[None]:
    """Serves the registry until the block ends, and logs where; does nothing without a port.

    Raises:
        ConfigError: The port cannot be had.
    """
    if port is None:
        yield
        return
    server = start_metrics_server(port, host)
    logger.info("metrics at %s", server.url)
    try:
        yield
    finally:
        server.stop()


def _declare(family: Family) -> None:
    if not family.name.startswith("foredraft_"):
        raise ValueError(f"{family.name}: names start with foredraft_")
    if bad := _FORBIDDEN_LABELS.intersection(family.labels):
        raise ValueError(f"{family.name}: labels {sorted(bad)} would take a value per request")
    if family.name in _declared:
        raise ValueError(f"{family.name} is declared twice")
    _declared[family.name] = family


ProcessCollector(registry=REGISTRY)
gauge("foredraft_build_info", "Version of the software; always 1.", ["version"]).labels(
    __version__
).set(1)
