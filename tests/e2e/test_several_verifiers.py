"""Several verifiers behind one gateway, all real processes: one is killed under load, all are
restarted under load.
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.rpc.channel import check_health
from testing import stack as stacks
from testing import verifier_processes as processes
from testing.stack import eventually
from testing.verifier_processes import ServiceProcess

NUM_TOKENS = 160


@dataclass
class Cluster:
    url: str
    grpc: str
    verifiers: list[ServiceProcess]

    def health(self) -> dict[str, Any]:
        answer = httpx.get(self.url + "/health", timeout=60)
        return answer.json() if answer.status_code == 200 else {"status": answer.status_code}

    def metric(self, name: str) -> float:
        return stacks.metric(httpx.get(self.url + "/metrics", timeout=60).text, name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stacks.make_model(tmp_path_factory.mktemp("several") / "model")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    sockets = tmp_path_factory.mktemp("sockets")
    places = [f"unix:{sockets}/{name}" for name in ("one", "two")]
    with contextlib.ExitStack() as running:
        # Few places: some requests wait at a verifier without a token when it is killed.
        flags = {"max_total_tokens": 8192, "page_size": 16, "max_running_requests": 3}
        verifiers = [
            running.enter_context(processes.verifier(model, place, **flags)) for place in places
        ]
        _, url, grpc = running.enter_context(processes.gateway(places, log_level="warning"))
        eventually(lambda: processes.usable(url) == 2)
        yield Cluster(url, grpc, verifiers)


def body(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": f"{number} is a number that",
        "max_tokens": NUM_TOKENS,
        "temperature": 0.9,
        "seed": number,
        "ignore_eos": True,
        **fields,
    }


def whole(url: str, number: int, **fields: Any) -> str:
    answer = httpx.post(url + "/v1/completions", json=body(number, **fields), timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def streamed(
    url: str, number: int, started: threading.Semaphore | None = None, **fields: Any
) -> tuple[str, dict[str, Any] | None]:
    """The text, and the error that ended it."""
    text = ""
    with httpx.stream(
        "POST", url + "/v1/completions", json=body(number, stream=True, **fields), timeout=120
    ) as got:
        if got.status_code != 200:
            got.read()
            return text, {"status": got.status_code, **got.json()["error"]}
        for line in got.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return text, event["error"]
            text += event["choices"][0]["text"]
            if started is not None:
                started.release()
                started = None
    return text, None


def kill_under_load(cluster: Cluster, expected: list[str]) -> int:
    """Kills the first verifier while some requests stream and others wait; returns how many
    streams broke off.
    """
    url, victim = cluster.url, cluster.verifiers[0]
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(streamed, url, number, started) for number in range(8)]
        for _ in range(4):
            assert started.acquire(timeout=120)
        wholes = [pool.submit(whole, url, number) for number in range(8, 16)]
        eventually(
            lambda: (
                cluster.metric("foredraft_gateway_queued_requests") >= 4
                or all(future.done() for future in streams)
            )
        )
        victim.kill()
        eventually(lambda: cluster.health()["status"] == "degraded")
        assert cluster.health()["verifiers"] == {"usable": 1, "known": 2}
        assert [future.result() for future in wholes] == expected[8:]
        broken = 0
        for number, future in enumerate(streams):
            text, error = future.result()
            if error is None:
                assert text == expected[number]
                continue
            broken += 1
            # What had come was right, and the client may ask again.
            assert text
            assert expected[number].startswith(text)
            assert (error["code"], error["retryable"]) == ("unavailable", True)
            assert streamed(url, number)[0] == expected[number]
    return broken


def test_a_killed_verifier_costs_only_what_had_streamed(cluster: Cluster) -> None:
    url, (victim, other) = cluster.url, cluster.verifiers
    expected = [whole(url, number) for number in range(16)]
    retries = cluster.metric("foredraft_gateway_retries_total")
    deadline = time.monotonic() + 240
    # On a busy machine the victim may have answered all that it was asked by the time of its end.
    while not (broken := kill_under_load(cluster, expected)) or (
        cluster.metric("foredraft_gateway_retries_total") == retries
    ):
        assert time.monotonic() < deadline
        victim.start()
        eventually(lambda: processes.usable(url) == 2)
    assert broken <= 3  # no more than ran there
    eventually(lambda: check_health(cluster.grpc) == "SERVING")

    other.kill()
    eventually(lambda: cluster.health()["status"] == 503)
    eventually(lambda: check_health(cluster.grpc) == "NOT_SERVING")
    _, error = streamed(url, 0)
    assert error is not None
    assert (error["status"], error["code"], error["retryable"]) == (503, "unavailable", True)
    other.start()
    victim.start()
    eventually(lambda: processes.usable(url) == 2)
    assert cluster.health()["status"] == "ok"
    assert whole(url, 3) == expected[3]


def test_a_rolling_restart_under_load_fails_nothing(cluster: Cluster) -> None:
    url, stop = cluster.url, threading.Event()
    expected = [whole(url, number, max_tokens=60) for number in range(24)]

    def client(seed: int) -> list[Any]:
        draw, failures = random.Random(seed), []
        while not stop.is_set():
            number = draw.randrange(24)
            if draw.random() < 0.5:
                text, error = streamed(url, number, max_tokens=60)
            else:
                text, error = whole(url, number, max_tokens=60), None
            if error is not None or text != expected[number]:
                failures.append((number, text, error))
            counts[seed] += 1
        return failures

    counts = [0] * 6
    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, seed) for seed in range(6)]
        try:
            for verifier in cluster.verifiers:
                before = sum(counts)
                assert verifier.stop() == 0
                eventually(lambda: cluster.health()["status"] == "degraded")
                verifier.start()
                eventually(lambda: processes.usable(url) == 2)
                eventually(lambda before=before: sum(counts) > before + 10)
        finally:
            stop.set()
        assert [client.result() for client in clients] == [[]] * 6


def test_a_draft_that_is_away_degrades_health_and_nothing_else(model: Path, tmp_path: Path) -> None:
    where, drafts = f"unix:{tmp_path}/verify", f"unix:{tmp_path}/draft"
    flags = {"speculative_algorithm": "NGRAM", "model_path": str(model), "device": "cpu"}
    verifier = processes.verifier(model, where, draft=drafts, draft_wait=0.2, max_total_tokens=4096, **flags)  # fmt: skip  # noqa: E501
    draft = ServiceProcess("draft_service", drafts, listen=drafts, **flags)
    with verifier, processes.gateway([where], log_level="warning") as (_, url, grpc):
        cluster = Cluster(url, grpc, [verifier])
        eventually(lambda: processes.usable(url) == 1)
        away = {"status": "degraded", "draft_available": False}
        assert cluster.health().items() >= away.items()
        text = whole(url, 1)
        with draft:
            eventually(lambda: cluster.health()["status"] == "ok")
            assert whole(url, 1) == text
            draft.kill()
            eventually(lambda: cluster.health().items() >= away.items())
            eventually(lambda: check_health(grpc) == "SERVING")
            assert whole(url, 1) == text
