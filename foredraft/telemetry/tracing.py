"""OpenTelemetry traces: one span per request and service, W3C trace context between them.

Off, it costs next to nothing.

Needs the extra `otel`. Sampling and batching follow OTEL_TRACES_SAMPLER, OTEL_BSP_* and the other
variables of the SDK.
"""

import contextvars
import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from foredraft import __version__
from foredraft.errors import ConfigError

Value = str | bool | int | float

# https://www.w3.org/TR/trace-context/#traceparent-header, version 00
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_incoming: contextvars.ContextVar[str] = contextvars.ContextVar("traceparent", default="")
_tracer: Any = None
_provider: Any = None


def setup(service: str, endpoint: str) -> None:
    """Sends this process's spans to an OTLP collector over gRPC; an empty endpoint leaves tracing
    off.

    Raises:
        ConfigError: The endpoint is no URL, or the extra `otel` is not installed.
    """
    global _tracer, _provider
    if not endpoint:
        return
    _check(endpoint)
    try:
        resources = importlib.import_module("opentelemetry.sdk.resources")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs pip install 'foredraft[otel]' ({error})"
        ) from error
    resource = resources.Resource.create(
        {"service.name": f"foredraft-{service}", "service.version": __version__}
    )
    _provider = sdk.TracerProvider(resource=resource)
    exporter = otlp.OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))
    _provider.add_span_processor(export.BatchSpanProcessor(exporter))
    _tracer = _provider.get_tracer("foredraft", __version__)


def _check(endpoint: str) -> None:
    """Raises ConfigError for an endpoint at which no collector can be."""
    try:
        url = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        is_good = url.scheme in ("http", "https") and bool(url.hostname)
        is_good = is_good and (url.port is not None or url.scheme == "https")
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint[:200]}: give an http or https URL with a port, such"
            " as http://localhost:4317"
        )


def shut_down() -> None:
    """Sends spans that have ended, and turns tracing off."""
    global _tracer, _provider
    if _provider is not None:
        _provider.shutdown()
    _tracer = _provider = None


@contextmanager
def bind_traceparent(value: str) -> Iterator[None]:
    """Makes a caller's `traceparent` the parent of spans begun inside; anything malformed is
    dropped.
    """
    token = _incoming.set(value if _TRACEPARENT.fullmatch(value) else "")
    try:
        yield
    finally:
        # An asynchronous generator may be closed from another context than the one that opened it.
        try:
            _incoming.reset(token)
        except ValueError:
            _incoming.set("")


def incoming() -> str:
    """Returns the traceparent bound in this context; empty outside a request or where none came."""
    return _incoming.get()


class Span:
    """Traces one request in one service; `NO_SPAN` while tracing is off.

    Attributes:
        traceparent: Trace context for the next service; empty where there is no trace to join.
    """

    def __init__(self, span: Any = None) -> None:
        self._span = span
        self.traceparent = ""
        if span is not None:
            context = span.get_span_context()
            self.traceparent = (
                f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
            )

    def end(
        self, attributes: Mapping[str, Value], *, error: str = "", ended: int | None = None
    ) -> None:
        """Ends the span, once.

        Args:
            attributes: Attributes that describe the outcome of the request.
            error: Error message; empty for success.
            ended: End of the request in time.time_ns(), where that was before now.
        """
        span, self._span = self._span, None
        if span is None:
            return
        span.set_attributes(dict(attributes))
        if error:
            trace = importlib.import_module("opentelemetry.trace")
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        span.end(ended)


NO_SPAN = Span()


def begin(name: str, kind: str, traceparent: str = "") -> Span:
    """Begins a span.

    Args:
        name: Name of the span, such as `verify`.
        kind: `server`, `internal` or another of OpenTelemetry's kinds.
        traceparent: Trace context of the parent; empty begins a new trace.
    """
    if _tracer is None:
        return NO_SPAN
    trace = importlib.import_module("opentelemetry.trace")
    parent = None
    if _TRACEPARENT.fullmatch(traceparent):
        _, trace_id, span_id, flags = traceparent.split("-")
        context = trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16))
        )
        parent = trace.set_span_in_context(trace.NonRecordingSpan(context))
    return Span(_tracer.start_span(name, context=parent, kind=trace.SpanKind[kind.upper()]))
