"""Requests on their way from the gateway to the engine, and what the engine says on its way
back.
"""

import numpy as np
import pytest

from foredraft.api.verify.v1 import verify_pb2
from foredraft.errors import InvalidRequest, Overloaded, Unavailable
from foredraft.types import FinishReason, Grammar, GrammarKind, SamplingParams, SpeculationParams
from gateway.jobs import Job, submit_request
from gateway.security.limits import Caller, Limits
from verify_service.engine.live_requests import EngineRequest
from verify_service.messages import FINISH_REASONS, engine_request, response
from verify_service.outputs import Finish, Load, StepOutput, TokenLogprob, VerifiedTree

SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


@pytest.mark.parametrize(
    "given",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_p=0.5, top_k=7, min_p=0.25, seed=2**64 - 1),
        SamplingParams(repetition_penalty=0.5, frequency_penalty=-2, presence_penalty=1.5),
        SamplingParams(logit_bias={3: -100, 5: 0.5}, stop_token_ids=(4, 2), ignore_eos=True),
        SamplingParams(max_new_tokens=3, min_new_tokens=2, logprobs=0),
        SamplingParams(bad_words=((4, 5), (6,)), allowed_token_ids=(9, 7)),
        SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a+"), logprobs=5),
    ],
)
def test_they_arrive_as_they_were_sent(given: SamplingParams) -> None:
    assert _sent(given) == given


def test_what_is_nearly_0_is_not_taken_for_left_out() -> None:
    sent = _sent(SamplingParams(top_p=1e-300, repetition_penalty=1e-300))
    assert sent.top_p == SMALLEST
    assert sent.repetition_penalty == SMALLEST


@pytest.mark.parametrize(
    "given",
    [
        SpeculationParams(),
        SpeculationParams(enabled=True),
        SpeculationParams(enabled=False, num_steps=3, topk=2, num_draft_tokens=8),
        SpeculationParams(num_draft_tokens=1),
    ],
)
def test_wishes_for_speculation_arrive(given: SpeculationParams) -> None:
    job = Job([1], SamplingParams(), name="name", speculation=given)
    assert _received(submit_request(job, 0)).speculation == given


def test_what_is_beside_the_sampling_arrives() -> None:
    caller = Caller("alice", Limits())
    job = Job(
        [4, 5], SamplingParams(), name="name", caller=caller, priority=-3, return_provenance=True
    )
    submit = submit_request(job, 0)
    submit.id, submit.timeout_seconds = 77, 2.5
    request = _received(submit)
    assert (request.tag, request.prompt, request.priority) == (77, [4, 5], -3)
    assert (request.key_label, request.timeout_seconds) == ("alice", 2.5)
    assert request.return_provenance
    assert not request.is_probe
    assert request.traceparent == "the-trace"
    assert _received(verify_pb2.SubmitRequest()).timeout_seconds is None


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_timeout_is_a_time(seconds: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _received(verify_pb2.SubmitRequest(timeout_seconds=seconds))
    assert refused.value.field == "timeout_seconds"


def test_every_figure_of_an_end_arrives_under_its_name() -> None:
    figures = {
        "stop_token": 9,
        "prompt_tokens": 21,
        "completion_tokens": 22,
        "cached_tokens": 23,
        "verify_steps": 24,
        "drafted_tokens": 25,
        "accepted_tokens": 26,
        "preemptions": 27,
        "queue_seconds": 1.5,
        "lossy": True,
    }
    finish = Finish(FinishReason.LENGTH, accepted_histogram=(3, 0, 2), **figures)  # type: ignore[arg-type]
    sent = _answered(StepOutput(5, finish=finish)).finish
    assert {name: getattr(sent, name) for name in figures} == figures
    assert list(sent.accepted_histogram) == [3, 0, 2]
    assert not sent.HasField("error")
    assert not _answered(StepOutput(5, finish=Finish(FinishReason.STOP))).finish.HasField(
        "stop_token"
    )


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_reason_has_a_name_of_its_own(reason: FinishReason) -> None:
    sent = _answered(StepOutput(5, finish=Finish(reason))).finish
    assert verify_pb2.FinishReason.Name(sent.reason) == f"FINISH_REASON_{reason.name}"
    assert len(set(FINISH_REASONS.values())) == len(FinishReason)


@pytest.mark.parametrize(
    ("error", "code", "field"),
    [
        (InvalidRequest("grammar", "why"), verify_pb2.ERROR_CODE_INVALID_ARGUMENT, "grammar"),
        (Overloaded("why", 4.5), verify_pb2.ERROR_CODE_OVERLOADED, ""),
        (Unavailable("why"), verify_pb2.ERROR_CODE_UNAVAILABLE, ""),
        (RuntimeError("why"), verify_pb2.ERROR_CODE_INTERNAL, ""),
    ],
)
def test_errors_keep_their_kind(error: Exception, code: int, field: str) -> None:
    finish = Finish(FinishReason.ERROR, error=error)  # type: ignore[arg-type]
    sent = _answered(StepOutput(5, finish=finish)).finish.error
    assert (sent.code, sent.field, sent.message) == (code, field, "why")
    assert sent.retry_after_seconds == (4.5 if isinstance(error, Overloaded) else 0)


def test_tokens_and_what_is_said_of_them_arrive() -> None:
    output = StepOutput(
        5,
        [7, 8],
        [True, False],
        [TokenLogprob(-0.5, [7, 1], [-0.5, -2.0]), TokenLogprob(-1.5, [8], [-1.5])],
        VerifiedTree([7, 3], [-1, 0], [0], "NGRAM"),
    )
    sent = _answered(output)
    assert (sent.id, list(sent.tokens), list(sent.drafted)) == (5, [7, 8], [True, False])
    assert [one.logprob for one in sent.logprobs] == [-0.5, -1.5]
    assert [list(one.top_tokens) for one in sent.logprobs] == [[7, 1], [8]]
    assert [list(one.top_logprobs) for one in sent.logprobs] == [[-0.5, -2.0], [-1.5]]
    tree = sent.tree
    assert (list(tree.tokens), list(tree.parents)) == ([7, 3], [-1, 0])
    assert (list(tree.accepted), tree.draft) == ([0], "NGRAM")
    assert not sent.HasField("finish")


def test_the_load_arrives_under_its_names() -> None:
    load = response([], LOAD).load
    assert (load.waiting, load.running, load.free_pages, load.total_pages) == (1, 2, 3, 4)
    assert load.draft_available
    assert load.drafting_since == 1234.5


LOAD = Load(1, 2, 3, 4, draft_available=True, drafting_since=1234.5)


def _sent(sampling: SamplingParams) -> SamplingParams:
    return _received(submit_request(Job([1], sampling, name="name"), 0)).sampling


def _received(submit: verify_pb2.SubmitRequest) -> EngineRequest:
    return engine_request(submit, "the-trace", lambda outputs, load: None)


def _answered(output: StepOutput) -> verify_pb2.SequenceOutput:
    (only,) = response([output], LOAD).outputs
    return only
