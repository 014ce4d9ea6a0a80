"""Metrics are declared, counted and scraped."""

import contextlib
import itertools
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from foredraft.errors import ConfigError
from foredraft.telemetry import metrics
from foredraft.telemetry.metrics_page import MOST_CONNECTIONS
from testing.stack import free_port
from testing.tools import ROOT

STEPS = metrics.counter("foredraft_testing_steps_total", "Steps.", ["algorithm"])
SECONDS = metrics.histogram("foredraft_testing_seconds", "Seconds.", metrics.TOKEN_BUCKETS)
DEPTH = metrics.gauge("foredraft_testing_depth", "Depth.")


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_shows_what_was_counted() -> None:
    STEPS.labels("NGRAM").inc(3)
    SECONDS.observe(0.0021)
    DEPTH.set(7)
    server = metrics.start_metrics_server(0)
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", server.url)
        samples = scrape(server.url)
    finally:
        server.stop()
    assert samples["foredraft_testing_steps_total[('algorithm', 'NGRAM')]"] == 3
    assert samples["foredraft_testing_depth[]"] == 7
    assert samples["foredraft_testing_seconds_bucket[('le', '0.002')]"] == 0
    assert samples["foredraft_testing_seconds_bucket[('le', '0.0025')]"] == 1
    assert samples["process_open_fds[]"] > 0
    assert any(name.startswith("foredraft_build_info") for name in samples)
    assert metrics.render().decode().count("# TYPE foredraft_testing_steps_total counter") == 1
    with pytest.raises(urllib.error.URLError):
        scrape(server.url)


def test_a_value_can_be_read_back() -> None:
    before = metrics.value("foredraft_testing_steps_total", algorithm="NONE")
    STEPS.labels("NONE").inc()
    assert metrics.value("foredraft_testing_steps_total", algorithm="NONE") == before + 1


@pytest.mark.parametrize(
    ("service", "loader"), [("verify_service", "_build"), ("draft_service", "create_drafter")]
)
def test_a_service_is_scraped_while_it_loads(service: str, loader: str) -> None:
    """Loading takes minutes for a large model, and a target that is down is an alert."""
    port = free_port()
    program = (
        f"import sys, time, {service}.__main__ as main\n"
        f"main.{loader} = lambda *_: (print('loading', flush=True), time.sleep(3600))\n"
        "sys.exit(main.main())"
    )
    command = [sys.executable, "-c", program, f"--listen=127.0.0.1:{free_port()}"]
    with subprocess.Popen(
        [*command, f"--metrics-port={port}"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "loading\n"
            assert scrape(f"http://127.0.0.1:{port}/metrics")["process_open_fds[]"] > 0
        finally:
            process.kill()


def test_a_port_in_use_is_refused() -> None:
    server = metrics.start_metrics_server(0)
    try:
        with pytest.raises(ConfigError, match=r"--metrics-port \d+"):
            metrics.start_metrics_server(server.port)
    finally:
        server.stop()


def test_connections_that_say_nothing_take_neither_threads_nor_the_page() -> None:
    server = metrics.start_metrics_server(0)
    before = threading.active_count()
    try:
        with contextlib.ExitStack() as stack:
            for number in range(4 * MOST_CONNECTIONS):
                address = (server.host, server.port)
                silent = stack.enter_context(socket.create_connection(address, timeout=60))
                silent.sendall(b"GET /metr"[: number % 9])
            assert scrape(server.url)["foredraft_testing_depth[]"] >= 0
            # The last of them was taken before the scrape; those that gave way to others end by
            # themselves.
            deadline = time.monotonic() + 60
            while threading.active_count() > before + MOST_CONNECTIONS:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        server.stop()


def test_families_are_listed_for_the_docs() -> None:
    by_name = {family.name: family for family in metrics.families()}
    assert by_name["foredraft_testing_steps_total"].labels == ("algorithm",)
    assert by_name["foredraft_testing_steps_total"].kind == "counter"
    assert by_name["foredraft_testing_seconds"].buckets == metrics.TOKEN_BUCKETS


@pytest.mark.parametrize(
    ("name", "labels", "message"),
    [
        ("foredraft_testing_steps", [], "ends with _total"),
        ("testing_steps_total", [], "start with foredraft_"),
        ("foredraft_testing_steps_total", [], "declared twice"),
        ("foredraft_testing_other_total", ["request_id"], "a value per request"),
    ],
)
def test_bad_declarations_are_refused(name: str, labels: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.counter(name, "Text.", labels)


@pytest.mark.parametrize(
    "buckets",
    [
        metrics.STEP_BUCKETS,
        metrics.TOKEN_BUCKETS,
        metrics.REQUEST_BUCKETS,
        metrics.LENGTH_BUCKETS,
    ],
)
def test_buckets_ascend(buckets: tuple[float, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))


def test_two_milliseconds_lie_in_fine_buckets() -> None:
    near = [bound for bound in metrics.TOKEN_BUCKETS if 0.001 <= bound <= 0.004]
    assert all(upper / lower <= 1.5 for lower, upper in itertools.pairwise(near))


def test_many_equal_observations_count_as_one_by_one() -> None:
    bounds = (1.0, 2.0, 4.0)
    once = prometheus_client.Histogram("once", "x", buckets=bounds, registry=None)
    one_by_one = prometheus_client.Histogram("once", "x", buckets=bounds, registry=None)
    for value, count in ((0.5, 3), (1.0, 1), (2, 5), (3.5, 2), (9.0, 4)):
        metrics.observe_many(once, value, count)
        for _ in range(count):
            one_by_one.observe(value)

    def samples(histogram: prometheus_client.Histogram) -> list[tuple[str, float]]:
        (family,) = histogram.collect()
        return [
            (s.name + s.labels.get("le", ""), s.value)
            for s in family.samples
            if not s.name.endswith("_created")
        ]

    assert samples(once) == samples(one_by_one)
