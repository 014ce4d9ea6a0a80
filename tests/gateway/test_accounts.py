"""Tests that answers and metrics report the verifier's counts and the measured times."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.api.verify.v1 import verify_pb2
from foredraft.errors import InvalidRequest, PromptTooLong
from foredraft.telemetry.metrics import value
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason, SamplingParams
from gateway import errors
from gateway import stopwatch as stopwatch_module
from gateway.decoding import Chunk, Completion
from gateway.errors import RequestTimeout
from gateway.jobs import Job, fitted
from gateway.native.answers import Answer
from gateway.native.schemas import GenerateBody
from gateway.openai import replies
from gateway.security.limits import Charge
from gateway.stopwatch import Stopwatch
from testing import tiny_tokenizers

ACCOUNT = verify_pb2.Finish(
    prompt_tokens=21,
    completion_tokens=99,  # behind a stop string some are not given
    cached_tokens=16,
    verify_steps=4,
    drafted_tokens=12,
    accepted_tokens=6,
    preemptions=3,
    queue_seconds=0.25,
    lossy=True,
    accepted_histogram=[1, 0, 3],
)
END = Completion(FinishReason.LENGTH, None, None, 10, ACCOUNT, seed=77)


def test_usage_counts_a_prompt_once_however_many_choices_it_has() -> None:
    # Two prompts with two choices each.
    usage = replies.usage([END] * 4, num_choices=2, num_reasoning_tokens=7)
    assert usage == {
        "prompt_tokens": 42,
        "completion_tokens": 40,
        "total_tokens": 82,
        "prompt_tokens_details": {"cached_tokens": 32},
        "completion_tokens_details": {
            "reasoning_tokens": 7,
            "accepted_prediction_tokens": 24,
            "rejected_prediction_tokens": 24,
        },
    }


def test_figures_of_speculation() -> None:
    assert replies.speculation(END) == {
        "verify_steps": 4,
        "drafted_tokens": 12,
        "accepted_tokens": 6,
        "accept_length": 2.5,
        "accept_rate": 0.5,
        "lossy": True,
    }
    nothing = Completion(FinishReason.CANCELLED, None, None, 0, verify_pb2.Finish(), 0)
    assert (nothing.accept_length, nothing.accept_rate) == (0.0, 0.0)


def test_the_account_in_sglangs_words() -> None:
    job = Job([5] * 21, SamplingParams(), name="the-name")
    answer = Answer(job, GenerateBody(text="x"), Tokenizer(tiny_tokenizers.byte_level()))
    meta = answer.add(Chunk(0, completion=END))["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "the-name",
        "finish_reason": {"type": "length", "length": 10},
        "prompt_tokens": 21,
        "completion_tokens": 10,
        "cached_tokens": 16,
        "num_retractions": 3,
        "seed": 77,
        "queue_time": 0.25,
        "drafted": 12,
        "accepted": 6,
        "accept_length": 2.5,
        "accept_rate": 0.5,
        "lossy": True,
        "spec_accept_rate": 0.5,
        "spec_accept_length": 2.5,
        "spec_num_correct_drafts": 6,
        "spec_num_proposed_drafts": 12,
        "spec_verify_ct": 4,
        "spec_correct_drafts_histogram": [1, 0, 3],
    }


NAMES = {
    "first": "time_to_first_token_seconds_count",
    "first_seconds": "time_to_first_token_seconds_sum",
    "gaps": "inter_token_latency_seconds_count",
    "gap_seconds": "inter_token_latency_seconds_sum",
    "ends": "end_to_end_seconds_count",
    "prompt": "prompt_tokens_total",
    "cached": "cached_tokens_total",
    "output": "output_tokens_total",
    "queued": "queued_requests",
    "running": "running_requests",
}


class Measured:
    """A stopwatch with the test's own clock, and the growth of the metrics since its start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(stopwatch_module, "time", clock)
        self._before = self._values()
        self.charge = Charge()
        self.watch = Stopwatch("name", self.now, 30.0, "", self.charge)

    def gained(self, *names: str) -> list[float]:
        now = self._values()
        return [round(now[name] - self._before[name], 6) for name in names]

    def ended(self, outcome: str) -> float:
        return value("foredraft_gateway_requests_total", outcome=outcome)

    @staticmethod
    def _values() -> dict[str, float]:
        return {name: value(f"foredraft_gateway_{metric}") for name, metric in NAMES.items()}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


def test_a_continuation_is_measured(measured: Measured) -> None:
    watch, ended = measured.watch, measured.ended("length")
    assert measured.gained("queued", "running") == [1, 0]
    watch.tokens(0)
    assert measured.gained("first", "queued") == [0, 1]
    measured.now += 2.0
    watch.tokens(3)  # the first, and two that came with it
    assert measured.gained("first", "first_seconds", "queued", "running") == [1, 2.0, 0, 1]
    assert measured.gained("gaps", "gap_seconds") == [2, 0]
    measured.now += 0.5
    watch.tokens(5)
    assert measured.gained("gaps", "gap_seconds") == [7, 0.5]
    assert measured.charge.num_tokens == 8
    assert watch.remaining() == 27.5
    watch.finish(END)
    watch.fail(RequestTimeout("too late to matter"))
    watch.stop()
    assert measured.gained("ends", "prompt", "cached", "output") == [1, 21, 16, 10]
    assert measured.gained("first", "queued", "running") == [1, 0, 0]
    assert measured.ended("length") == ended + 1


def test_kinds_of_errors_are_counted_from_zero() -> None:
    """The rate of a counter that begins at 1 is 0: a single error would be in no graph."""
    program = "from gateway import stopwatch; from foredraft.telemetry import metrics; "
    page = subprocess.run(
        [sys.executable, "-c", program + "print(metrics.render().decode())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for _, label in errors.OUTCOMES:
        assert f'foredraft_gateway_requests_total{{outcome="{label}"}} 0.0' in page


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_failure_is_counted_by_its_kind(measured: Measured, num_tokens: int) -> None:
    ended = measured.ended("deadline")
    measured.watch.tokens(num_tokens)
    measured.watch.fail(RequestTimeout("late"))
    measured.watch.fail(ValueError("afterwards"))
    measured.watch.stop()
    assert measured.ended("deadline") == ended + 1
    assert measured.gained("queued", "running", "ends", "output") == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("num_prompt", "asked", "expected"),
    [
        (10, {"max_new_tokens": 5, "min_new_tokens": 5}, (5, 5)),
        (10, {"max_new_tokens": 90, "min_new_tokens": 80}, (90, 80)),
        (10, {"max_new_tokens": 91, "min_new_tokens": 91}, (90, 90)),
        (99, {"max_new_tokens": 91, "min_new_tokens": 0}, (1, 0)),
    ],
)
def test_an_output_ends_at_the_context_length(
    num_prompt: int, asked: dict[str, Any], expected: tuple[int, int]
) -> None:
    sampling = fitted(SamplingParams(temperature=0.5, **asked), num_prompt, 100)
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == expected
    assert sampling.temperature == 0.5


def test_a_prompt_must_leave_room_for_a_token() -> None:
    with pytest.raises(PromptTooLong):
        fitted(SamplingParams(), 100, 100)
    with pytest.raises(InvalidRequest, match="no tokens"):
        fitted(SamplingParams(), 0, 100)
