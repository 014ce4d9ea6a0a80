"""The engine with a real model and a real draft process: what requests ask for, how they end, what
is left behind.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.errors import InvalidRequest, Overloaded, PromptTooLong, Unavailable
from foredraft.telemetry.metrics import value
from foredraft.types import FinishReason, SamplingParams, SpeculationParams
from testing.checkpoints import EOS, VOCAB_SIZE, make_checkpoint
from testing.engines import Harness, Job, running_engine
from testing.reference import Reference
from testing.stack import eventually
from verify_service.controller.controller import Controller
from verify_service.controller.messages import Candidate, DraftKind, Plan
from verify_service.engine import engine as engine_module
from verify_service.engine.live_requests import EngineRequest
from verify_service.outputs import Load, StepOutput

ENDS = frozenset({EOS})
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
REPEATING = [5, 6, 7, 8] * 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "target")


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Harness]:
    with running_engine(target, max_queued_requests=4, max_running_requests=2) as harness:
        yield harness


@pytest.fixture(scope="module")
def ngram(target: Path) -> Iterator[Harness]:
    with running_engine(target, "NGRAM", draft_step_timeout=4.0) as harness:
        yield harness


def test_logprobs_are_transformers(target: Path, plain: Harness) -> None:
    prompt = [9, 8, 7, 6]
    sampling = SamplingParams(
        temperature=0.7,
        repetition_penalty=1.3,
        seed=4,
        max_new_tokens=8,
        ignore_eos=True,
        logprobs=3,
    )
    result = plain.run([Job(prompt, sampling)])[0]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + result.tokens])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 :]
    assert len(result.logprobs) == len(result.tokens) == 8
    for i, logprob in enumerate(result.logprobs):
        assert logprob.logprob == pytest.approx(float(expected[i, result.tokens[i]]), abs=1e-4)
        best = expected[i].topk(3)
        assert logprob.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)
        assert logprob.top_tokens == best.indices.tolist()


def test_a_stop_token_ends_exactly_there(plain: Harness) -> None:
    free = plain.run([Job([5, 6, 7], GREEDY)])[0]
    stop = free.tokens[5]
    first = free.tokens.index(stop)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=16, stop_token_ids=(stop,))
    stopped = plain.run([Job([5, 6, 7], sampling)])[0]
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.finish.reason is FinishReason.STOP
    assert stopped.finish.stop_token == stop


def test_no_end_before_min_new_tokens(target: Path, plain: Harness) -> None:
    bias = {EOS: 100.0}
    early = plain.run(
        [Job([5, 6], SamplingParams(temperature=0.0, logit_bias=bias, max_new_tokens=16))]
    )[0]
    assert early.tokens == [EOS]
    sampling = SamplingParams(temperature=0.0, logit_bias=bias, min_new_tokens=5, max_new_tokens=16)
    late = plain.run([Job([5, 6], sampling)])[0]
    assert len(late.tokens) == 6
    assert late.tokens[-1] == EOS
    assert Reference(target).check([5, 6], late.tokens, sampling, ENDS) == 0


def test_a_cancelled_request_ends_and_the_others_do_not(plain: Harness) -> None:
    long = SamplingParams(temperature=0.0, max_new_tokens=300, ignore_eos=True)
    cancelled, kept = plain.run([Job([5, 6], long, cancel_after=3), Job([7, 8], long)])
    assert cancelled.finish.reason is FinishReason.CANCELLED
    assert 3 <= len(cancelled.tokens) < 300
    assert kept.finish.reason is FinishReason.LENGTH
    assert len(kept.tokens) == 300
    plain.check_nothing_left()


def test_a_deadline_ends_a_request(plain: Harness) -> None:
    long = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)
    result = plain.run([Job([5, 6], long, timeout_seconds=0.05)])[0]
    assert result.finish.reason is FinishReason.DEADLINE
    assert len(result.tokens) < 400
    plain.check_nothing_left()


def test_a_full_queue_refuses_at_once(plain: Harness) -> None:
    long = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)
    refused = 0
    jobs = []
    deadline = time.monotonic() + 60
    while refused < 4:  # requests come far faster than they end
        assert time.monotonic() < deadline
        try:
            number = plain.engine.submit(
                EngineRequest(tag=0, prompt=[5], sampling=long, sink=lambda outputs, load: None)
            )
            jobs.append(number)
        except Overloaded:
            refused += 1
        time.sleep(0.002)
    for number in jobs:
        plain.engine.cancel(number)
    eventually(lambda: plain.engine.is_idle)
    plain.check_nothing_left()


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "field"),
    [
        ([], {}, InvalidRequest, "prompt"),
        ([VOCAB_SIZE], {}, InvalidRequest, "prompt"),
        ([5, -1], {}, InvalidRequest, "prompt"),
        ([5] * 600, {}, PromptTooLong, "prompt"),
        ([5], {"temperature": -1.0}, InvalidRequest, "temperature"),
        ([5], {"top_p": 0.0}, InvalidRequest, "top_p"),
        ([5], {"top_k": 0}, InvalidRequest, "top_k"),
        ([5], {"min_p": 2.0}, InvalidRequest, "min_p"),
        ([5], {"temperature": float("nan")}, InvalidRequest, "temperature"),
        ([5], {"seed": 2**64}, InvalidRequest, "seed"),
        ([5], {"logit_bias": {VOCAB_SIZE: 1.0}}, InvalidRequest, "logit_bias"),
        ([5], {"stop_token_ids": (VOCAB_SIZE,)}, InvalidRequest, "stop_token_ids"),
        (
            [5],
            {"stop_token_ids": tuple(range(VOCAB_SIZE)), "min_new_tokens": 2},
            InvalidRequest,
            "stop_token_ids",
        ),
        ([5], {"max_new_tokens": 0}, InvalidRequest, "max_new_tokens"),
        ([5], {"min_new_tokens": 17}, InvalidRequest, "min_new_tokens"),
        ([5], {"logprobs": 21}, InvalidRequest, "logprobs"),
    ],
)
def test_a_bad_request_names_its_field(
    plain: Harness, prompt: list[int], sampling: dict, error: type, field: str
) -> None:
    params = SamplingParams(**{"max_new_tokens": 16, **sampling})
    with pytest.raises(error) as raised:
        plain.run([Job(prompt, params)])
    assert raised.value.field == field


def test_output_stops_where_the_context_ends(plain: Harness) -> None:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=5000, ignore_eos=True)
    result = plain.run([Job([5] * 500, sampling)])[0]
    assert len(result.tokens) == 12
    assert result.finish.reason is FinishReason.LENGTH


def test_prefixes_are_shared(plain: Harness) -> None:
    prompt = list(range(2, 100))
    first = plain.run([Job(prompt, GREEDY)])[0]
    second = plain.run([Job(prompt, GREEDY)])[0]
    assert second.tokens == first.tokens
    assert second.finish.cached_tokens >= 64
    assert plain.engine.flush_cache().result(60) > 0
    third = plain.run([Job(prompt, GREEDY)])[0]
    assert third.finish.cached_tokens == 0
    assert third.tokens == first.tokens


def test_a_flush_that_was_given_up_does_not_end_the_engine(plain: Harness) -> None:
    gate = threading.Event()
    plain.engine._inbox.put(lambda: gate.wait(60))
    flushed = plain.engine.flush_cache()
    assert flushed.cancel()
    gate.set()
    assert len(plain.run([Job([5, 6], GREEDY)])[0].tokens) == 16
    assert plain.engine.failure is None


def test_a_stop_answers_whoever_still_waits(target: Path) -> None:
    long = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)
    begun = threading.Event()
    answers: dict[int, list[StepOutput]] = {0: [], 1: [], 2: []}

    def take(outputs: list[StepOutput], load: Load) -> None:
        for output in outputs:
            answers[output.tag].append(output)
        begun.set()

    with running_engine(target, max_running_requests=2) as harness:
        for tag in answers:  # two run and one waits
            harness.engine.submit(EngineRequest(tag, [5], long, take))
        assert begun.wait(60)
        harness.engine.stop()
        with pytest.raises(Unavailable, match="stopping"):
            harness.engine.submit(EngineRequest(3, [5], long, take))
    for outputs in answers.values():
        finish = outputs[-1].finish
        assert finish is not None
        assert finish.reason is FinishReason.ERROR
        assert isinstance(finish.error, Unavailable)


def test_a_defect_in_a_step_answers_everybody_and_no_more_is_taken(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect = ZeroDivisionError("a defect")

    def fail(*arguments: object) -> None:
        raise defect

    with running_engine(target) as harness:
        monkeypatch.setattr(harness.engine._steps, "_execute", fail)
        result = harness.run([Job([5, 6], GREEDY)])[0]
        assert result.finish is not None
        assert isinstance(result.finish.error, Unavailable)
        assert harness.engine.failure is defect
        with pytest.raises(Unavailable, match="stopping"):
            harness.run([Job([5, 6], GREEDY)])
        harness.engine._failure = None  # what `running_engine` looks for at its end


def test_a_defect_answers_requests_that_it_leaves_unreadable(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked before the defect was seen fails too; its sender is answered all the same."""
    defect = ZeroDivisionError("a defect")
    answers: list[StepOutput] = []

    def fail(*arguments: object) -> None:
        raise defect

    with running_engine(target) as harness:
        gate = threading.Event()
        harness.engine._inbox.put(lambda: gate.wait(60))
        harness.engine._inbox.put(fail)
        monkeypatch.setattr(harness.engine._scheduler, "add", fail)
        for tag in range(2):
            request = EngineRequest(tag, [5], GREEDY, lambda outputs, load: answers.extend(outputs))
            harness.engine.submit(request)
        gate.set()
        eventually(lambda: len(answers) == 2)
        assert all(output.finish and output.finish.error for output in answers)
        assert harness.engine.failure is defect
        harness.engine._failure = None  # what `running_engine` looks for at its end


def test_a_stopped_engine_flushes_nothing(target: Path) -> None:
    with running_engine(target) as harness:
        harness.engine.stop()
        with pytest.raises(Unavailable, match="stopping"):
            harness.engine.flush_cache()


def test_an_engine_is_not_idle_while_it_takes_a_request(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier that drains would stop, and break the request off."""
    taken, gate = threading.Event(), threading.Event()
    with running_engine(target) as harness:
        add = harness.engine._add

        def slowly(number: int, request: EngineRequest) -> None:
            taken.set()
            assert gate.wait(60)
            add(number, request)

        monkeypatch.setattr(harness.engine, "_add", slowly)
        job = threading.Thread(target=harness.run, args=([Job([5, 6], GREEDY)],))
        job.start()
        assert taken.wait(60)
        was_idle = harness.engine.is_idle
        gate.set()
        job.join()
        assert not was_idle
        eventually(lambda: harness.engine.is_idle)


def test_pages_are_looked_at_once_after_work_and_not_all_the_time(
    plain: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, looks = plain.engine._scheduler, threading.Semaphore(0)
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.001)
    while not plain.engine._is_checked:  # after the tests before
        time.sleep(0.001)
    monkeypatch.setattr(scheduler, "check_integrity", looks.release)
    plain.run([Job([5, 6], GREEDY)])
    assert looks.acquire(timeout=60)
    assert not looks.acquire(timeout=0.05)


def test_a_preemption_is_one_request_in_the_metrics(target: Path) -> None:
    """The prompt that it computes again was counted, as was its wait in the queue."""
    names = ("prompt_tokens", "prefix_cache_hit_tokens", "generation_tokens", "preemptions")

    def counts() -> dict[str, float]:
        found = {name: value(f"foredraft_{name}_total") for name in names}
        ended = value("foredraft_verifier_requests_total", outcome="length")
        return {**found, "ended": ended, "queued": value("foredraft_queue_seconds_count")}

    prompts = [[5 + i, 6, 7, 8] * 8 for i in range(2)]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=120, ignore_eos=True)
    before = counts()
    with running_engine(target, max_total_tokens=208) as harness:
        results = harness.run([Job(prompt, sampling) for prompt in prompts])
        harness.check_nothing_left()
    found = {name: number - before[name] for name, number in counts().items()}
    preemptions = sum(result.finish.preemptions for result in results)
    assert preemptions > 0
    assert found == {
        "prompt_tokens": 64,
        "prefix_cache_hit_tokens": 0,
        "generation_tokens": 240,
        "preemptions": preemptions,
        "ended": 2,
        "queued": 2,
    }
    for prompt, result in zip(prompts, results, strict=True):
        assert result.finish.prompt_tokens == 32
        assert result.finish.cached_tokens == 0
        assert Reference(target).check(prompt, result.tokens, sampling, ENDS) == 0


def test_a_long_prompt_delays_a_stream_by_one_chunk_a_step(target: Path) -> None:
    with running_engine(target, chunked_prefill_size=16) as harness:
        stream = Job([5, 6], SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True))
        short, long = harness.run([stream, Job(list(range(2, 122)) * 3, GREEDY)])
    # The prompt of 360 tokens takes 23 steps; the stream got a token in each of them.
    assert len(short.arrivals) == 60
    assert len(long.tokens) == 16


def test_speculation_can_be_turned_off_per_request(ngram: Harness) -> None:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)
    on, off = ngram.run(
        [
            Job(REPEATING, sampling),
            Job(REPEATING, sampling, speculation=SpeculationParams(enabled=False)),
        ]
    )
    assert on.tokens == off.tokens
    assert off.finish.drafted_tokens == 0
    assert on.finish.drafted_tokens > 0
    assert sum(on.drafted) == on.finish.accepted_tokens
    narrow = ngram.run(
        [Job(REPEATING, sampling, speculation=SpeculationParams(num_draft_tokens=2))]
    )[0]
    assert narrow.tokens == on.tokens
    assert narrow.finish.drafted_tokens <= narrow.finish.verify_steps


def test_a_key_never_drafts_from_anothers_text(target: Path) -> None:
    with running_engine(target, "NGRAM") as harness:
        sampling = SamplingParams(temperature=1.0, seed=5, max_new_tokens=60, ignore_eos=True)
        first = harness.run([Job([9, 10, 11], sampling, key_label="alice")])[0]
        other = harness.run([Job([9, 10, 11], sampling, key_label="bob")])[0]
        same = harness.run([Job([9, 10, 11], sampling, key_label="alice")])[0]
    assert first.tokens == other.tokens == same.tokens
    assert same.finish.accepted_tokens > other.finish.accepted_tokens


def test_a_stopped_draft_delays_one_step_and_changes_nothing(ngram: Harness) -> None:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)
    expected = ngram.run([Job(REPEATING, sampling)])[0].tokens
    since = ngram.engine.load().drafting_since
    assert 0 < time.time() - since < 600
    ngram.draft.pause()
    paused = ngram.run([Job(REPEATING, sampling)])[0]
    assert paused.tokens == expected
    ngram.draft.kill()
    killed = ngram.run([Job(REPEATING, sampling)])[0]
    assert killed.tokens == expected
    assert killed.finish.drafted_tokens == 0
    eventually(lambda: ngram.engine.load().drafting_since == 0)
    ngram.draft.start()
    eventually(lambda: ngram.engine.load().drafting_since > since)
    again = ngram.run([Job(REPEATING, sampling)])[0]
    assert again.tokens == expected
    assert again.finish.drafted_tokens > 0
    ngram.check_nothing_left()


def test_a_draft_with_the_targets_weights_is_always_right(target: Path) -> None:
    flags = {
        "speculative_draft_model_path": str(target),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "speculative_draft_sampling": "coupled",
    }
    with running_engine(target, "STANDALONE", **flags) as harness:
        jobs = [
            Job([i + 3, 5, 9], SamplingParams(temperature=t, seed=i, top_k=k, max_new_tokens=41, ignore_eos=True))  # noqa: E501
            for i, (t, k) in enumerate([(0.0, -1), (0.6, -1), (1.0, 20), (1.5, -1)])
        ]  # fmt: skip
        results = harness.run(jobs)
        # Ends inside what a step accepted: what comes behind is neither given nor counted.
        text, end = results[0].tokens, 14
        while text[end] in text[:end]:
            end += 1
        stops = SamplingParams(temperature=0.0, max_new_tokens=41, stop_token_ids=(text[end],))
        stopped = harness.run([Job(jobs[0].prompt, stops)])[0]
        harness.check_nothing_left()
    assert stopped.tokens == text[: end + 1]
    for result in (*results, stopped):
        assert len(result.drafted) == len(result.tokens)
        assert sum(result.drafted) == result.finish.accepted_tokens
        histogram = enumerate(result.finish.accepted_histogram)
        assert sum(length * count for length, count in histogram) == sum(result.drafted)
    for result in results:
        assert result.finish.accepted_tokens == result.finish.drafted_tokens > 0


class Pausing(Controller):
    """Drafts nothing for a while, then all."""

    PAUSE, rests = 40, False

    def __init__(self) -> None:
        super().__init__(None, [DraftKind(3, 3)])
        self.num_plans = 0

    def plan(
        self, candidates: Sequence[Candidate], other_rows: int = 0, is_ahead: bool = False
    ) -> Plan:
        self.num_plans += 1
        self.is_drafting = [self.num_plans > self.PAUSE or not self.rests]
        plan = super().plan(candidates, other_rows, is_ahead)
        return Plan([0] * len(candidates), 1) if self.num_plans <= self.PAUSE else plan


class Resting(Pausing):
    """As one that measures: what does not pay for now need not be told of."""

    rests = True


@pytest.mark.parametrize("rest", [Pausing, Resting])
def test_a_draft_that_is_not_asked_is_told_seldom_and_misses_nothing(
    target: Path, monkeypatch: pytest.MonkeyPatch, rest: type[Pausing]
) -> None:
    flags = {
        "speculative_draft_model_path": str(target),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    with running_engine(target, "STANDALONE", **flags) as harness:
        policy = rest()
        harness.engine._sizes._decider.controller = policy
        sent: list[int] = []
        client = harness.engine._drafts.each[0]._client
        send = client.send
        monkeypatch.setattr(
            client, "send", lambda *a, **k: (sent.append(policy.num_plans), send(*a, **k))
        )
        sampling = SamplingParams(temperature=0.0, max_new_tokens=90, ignore_eos=True)
        results = harness.run([Job([i + 3, 5, 9], sampling) for i in range(3)])
        harness.check_nothing_left()
    # In the pause come the prompts, but for the first, whose plan comes too late, and what had come
    # after 32 tokens.
    told = len([plan for plan in sent if plan < policy.PAUSE])
    assert told <= (4 if rest is Pausing else 2)
    assert len(sent) > 10
    for result in results:
        assert result.finish.accepted_tokens == result.finish.drafted_tokens > 0


def test_a_lossy_threshold_says_so_and_never_touches_greedy(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"speculative_accept_threshold_single": 0.001}
    with running_engine(target, "NGRAM", **flags) as harness:
        sampled = SamplingParams(temperature=1.0, seed=3, max_new_tokens=200, ignore_eos=True)
        lossy = harness.run([Job(REPEATING, sampled)])[0]
        greedy = harness.run([Job(REPEATING, GREEDY)])[0]
        plain = SpeculationParams(enabled=False)
        exact = harness.run([Job(REPEATING, sampled, plain)])[0]
        # Texts that end early: the first token that the rule did not choose may lie behind the end.
        stops = [replace(sampled, stop_token_ids=(token,)) for token in set(lossy.tokens[1:9])]
        cut = harness.run([Job(REPEATING, sampling) for sampling in stops])
    for result in (lossy, exact, *cut):
        assert result.finish.lossy == (result.tokens != exact.tokens[: len(result.tokens)])
    assert "LOSSY: --speculative-accept-threshold-single 0.001" in caplog.text
    assert lossy.finish.lossy
    assert not greedy.finish.lossy
    assert Reference(target).check(REPEATING, greedy.tokens, GREEDY, ENDS) == 0
