"""Eight clients at once get what each would get alone, and leave nothing behind."""

import json
import random
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from foredraft.cli.stack import LocalStack
from testing import stack as stacks
from testing.chaos import processes

NUM_CLIENTS, NUM_ROUNDS = 8, 4
# gRPC's and Python's pools open a few more when they are first needed.
SLACK_DESCRIPTORS, SLACK_THREADS = 4, 4


@dataclass
class Task:
    """A request; `cut` characters end it from the client's side, `expected` is its whole text
    alone.
    """

    body: dict[str, object]
    expected: str = ""
    cut: int | None = None


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    model = stacks.make_model(tmp_path_factory.mktemp("eight") / "model")
    with stacks.running_stack(model, max_total_tokens=2048) as running:
        yield running


def tasks() -> list[Task]:
    draw = random.Random(8)
    found = []
    for number in range(NUM_CLIENTS * NUM_ROUNDS):
        words = " ".join(draw.choices(["one", "two", "three", "night", "river"], k=draw.choice((2, 20, 60))))  # fmt: skip  # noqa: E501
        body: dict[str, object] = {
            "prompt": words,
            "max_tokens": draw.choice((5, 40, 150)),
            "temperature": draw.choice((0.0, 0.9)),
            "seed": number,
            "ignore_eos": True,
            "stream": True,
        }
        found.append(Task(body))
    return found


def run(url: str, task: Task) -> tuple[str, int, str]:
    """Text, tokens and the reason of the end: stop, length, or left where the client went away."""
    text, tokens = "", 0
    with httpx.stream("POST", url + "/v1/completions", json=task.body, timeout=120) as got:
        assert got.status_code == 200, got.read()
        for line in got.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            (choice,) = event["choices"]
            text += choice["text"]
            tokens += choice["num_tokens"]
            if task.cut is not None and len(text) >= task.cut:
                return text, tokens, "left"
            if choice["finish_reason"] is not None:
                return text, tokens, choice["finish_reason"]
    raise AssertionError("the stream ended without a reason")


def page(url: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for line in urllib.request.urlopen(url, timeout=60).read().decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            sums[name.partition("{")[0]] = sums.get(name.partition("{")[0], 0.0) + float(value)
    return sums


def footprints(stack: LocalStack) -> dict[str, processes.Footprint]:
    return {state.name: processes.footprint(state.pid) for state in stack.states() if state.pid}


def left_over(stack: LocalStack, before: dict[str, processes.Footprint]) -> list[str]:
    """Returns resources in use although no request runs."""
    verify, gateway = page(stack.urls["verify_metrics"]), page(stack.urls["metrics"])
    found = [
        f"{name} {values[name]}"
        for values, names in (
            (
                verify,
                (
                    "foredraft_kv_pages_used",
                    "foredraft_running_sequences",
                    "foredraft_queue_depth",
                ),
            ),
            (
                gateway,
                ("foredraft_gateway_running_requests", "foredraft_gateway_queued_requests"),
            ),
        )
        for name in names
        if values[name]
    ]
    now = footprints(stack)
    if now.keys() != before.keys():
        found.append(f"services {sorted(now)}")
    for name in now.keys() & before.keys():
        if now[name].descriptors > before[name].descriptors + SLACK_DESCRIPTORS:
            found.append(f"{name}: {now[name].descriptors} of {before[name].descriptors} descriptors")  # fmt: skip  # noqa: E501
        if now[name].threads > before[name].threads + SLACK_THREADS:
            found.append(f"{name}: {now[name].threads} of {before[name].threads} threads")
        if now[name].segments > before[name].segments:
            found.append(f"{name}: {now[name].segments} segments")
    return found


def test_eight_clients_get_what_each_gets_alone(
    stack: LocalStack,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, work = stack.urls["http"], tasks()
    alone_tokens, began = 0, time.perf_counter()
    for task in work:
        task.expected, tokens, reason = run(url, task)
        assert reason == "length"
        assert tokens == task.body["max_tokens"]
        alone_tokens += tokens
    alone_rate = alone_tokens / (time.perf_counter() - began)

    began, together_tokens = time.perf_counter(), 0
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        before = footprints(stack)  # a warm stack's
        for task, (text, tokens, _) in zip(work, pool.map(lambda t: run(url, t), work), strict=True):  # fmt: skip  # noqa: E501
            assert text == task.expected
            together_tokens += tokens
    together_rate = together_tokens / (time.perf_counter() - began)

    # Now some leave in the middle, and some give a stop string from their own text.
    draw = random.Random(9)
    for number, task in enumerate(work):
        if number % 3 == 0:
            task.cut = draw.randrange(len(task.expected)) + 1
        elif number % 3 == 1 and len(task.expected) > 8:
            start = draw.randrange(len(task.expected) - 3)
            task.body = {**task.body, "stop": task.expected[start : start + 3]}
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        results = list(pool.map(lambda t: run(url, t), work))
    reasons = [reason for *_, reason in results]
    for task, (text, _, reason) in zip(work, results, strict=True):
        stop = task.body.get("stop")
        if reason == "left":
            assert task.expected.startswith(text)
        elif reason == "stop":
            assert isinstance(stop, str)
            assert text == task.expected[: task.expected.index(stop)]
        else:
            assert (text, stop) == (task.expected, None)
    assert min(reasons.count(reason) for reason in ("left", "stop", "length")) >= 5

    children = len(processes.descendants(stack_pid(stack, "gateway")))
    stacks.eventually(lambda: not left_over(stack, before))
    assert left_over(stack, before) == []
    assert len(processes.descendants(stack_pid(stack, "verify"))) == 0
    assert children <= 4  # encoding processes
    page_now = page(stack.urls["verify_metrics"])
    assert page_now["foredraft_accepted_tokens_total"] > 0
    with capsys.disabled():
        print(
            f"\n{NUM_CLIENTS} clients: {together_rate:.0f} tokens/s; one client: {alone_rate:.0f}"
            " tokens/s"
        )


def stack_pid(stack: LocalStack, name: str) -> int:
    return next(state.pid for state in stack.states() if state.name == name and state.pid)
