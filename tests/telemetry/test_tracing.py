"""Spans of the real services, as a collector on this machine receives them."""

import threading
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from foredraft.cli import serve_config, stack
from foredraft.errors import ConfigError
from foredraft.telemetry import tracing
from testing.watched_stack import complete

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        service = pytest.importorskip(
            "opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc"
        )
        self.spans: list[tuple[str, Any]] = []
        self.changed = threading.Condition()
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        service.add_TraceServiceServicer_to_server(self, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.url = f"http://127.0.0.1:{port}"
        self.server.start()

    def Export(self, request: Any, context: object) -> Any:
        messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        with self.changed:
            for resource in request.resource_spans:
                name = attributes(resource.resource)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [(name, span) for span in scope.spans]
            self.changed.notify_all()
        return messages.ExportTraceServiceResponse()

    def wait_for(self, services: set[str], trace: str) -> dict[str, Any]:
        """The trace's spans by service, once each of them has sent one."""

        def found() -> dict[str, Any]:
            return {name: span for name, span in self.spans if span.trace_id.hex() == trace}

        with self.changed:
            assert self.changed.wait_for(lambda: services <= found().keys(), timeout=120), found()
            return found()


def attributes(described: Any) -> dict[str, Any]:
    """Attributes as a dictionary."""
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value"))
        for pair in described.attributes
    }


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    collector = Collector()
    yield collector
    collector.server.stop(0).wait()


def test_off_there_are_no_spans() -> None:
    assert tracing.begin("x", "server") is tracing.NO_SPAN
    tracing.NO_SPAN.end({"a": 1})
    assert tracing.NO_SPAN.traceparent == ""


@pytest.mark.parametrize(
    "value", ["", "00-1-2-3", f"01-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01\n"]
)
def test_a_malformed_parent_is_dropped(value: str) -> None:
    with tracing.bind_traceparent(value):
        assert tracing.incoming() == ""
    with tracing.bind_traceparent(f"00-{TRACE}-{PARENT}-01"):
        assert tracing.incoming() == f"00-{TRACE}-{PARENT}-01"
    assert tracing.incoming() == ""


def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(tracing.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"foredraft\[otel\]"):
        tracing.setup("test", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    "endpoint",
    ["garbage", "http://", "http://host", "ftp://host:4317", "host:99999", "http://[::1"],
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint .*: give an http or https URL"):
        tracing.setup("test", endpoint)


def test_a_span_joins_its_parent(collector: Collector) -> None:
    tracing.setup("test", collector.url)
    try:
        span = tracing.begin("work", "server", f"00-{TRACE}-{PARENT}-01")
        span.end({"n": 3}, error="broken")
        span.end({"n": 4})
    finally:
        tracing.shut_down()
    (sent,) = collector.wait_for({"foredraft-test"}, TRACE).values()
    assert sent.parent_span_id.hex() == PARENT
    assert attributes(sent) == {"n": 3}
    assert sent.status.message == "broken"


@pytest.mark.slow
def test_a_request_is_one_span_in_each_service(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    values = {**serve_config.resolve_models({}), "port": 0, "grpc_port": 0, "num_threads": 1}
    values |= {"max_total_tokens": 4096, "otlp_traces_endpoint": collector.url}
    values |= {"speculative_adaptive": False}  # the draft is asked, however busy the machine is
    with stack.make_supervisor(values) as supervisor:
        supervisor.wait_healthy(timeout=120)
        base = supervisor.urls["http"]
        opener = urllib.request.build_opener()
        opener.addheaders = [("traceparent", f"00-{TRACE}-{PARENT}-01")]
        urllib.request.install_opener(opener)
        try:
            answer = complete(base, "one two three one two three one two", 24, 0.0)
        finally:
            urllib.request.install_opener(urllib.request.build_opener())
        # The draft hears of the end with the next step.
        complete(base, "Another one", 4, 0.0)
        names = {f"foredraft-{name}" for name in ("gateway", "verify", "draft")}
        spans = collector.wait_for(names, TRACE)
    gateway, verify, draft = (spans[f"foredraft-{n}"] for n in ("gateway", "verify", "draft"))
    assert gateway.parent_span_id.hex() == PARENT
    assert verify.parent_span_id == gateway.span_id
    assert draft.parent_span_id == verify.span_id
    assert gateway.start_time_unix_nano <= verify.start_time_unix_nano
    assert verify.end_time_unix_nano <= gateway.end_time_unix_nano + 60e9
    said = attributes(verify)
    num_tokens = answer["usage"]["completion_tokens"]
    assert said["gen_ai.usage.output_tokens"] == num_tokens
    assert said["foredraft.verify_steps"] + said["foredraft.accepted_tokens"] >= num_tokens - 1
    for name in ("gen_ai.usage.input_tokens", "foredraft.verify_steps", "foredraft.drafted_tokens"):
        assert attributes(gateway)[name] == said[name]
    assert attributes(draft)["foredraft.proposed_tokens"] >= said["foredraft.drafted_tokens"]
