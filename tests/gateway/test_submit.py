"""Tests that a job's fields reach the verifier under the same names."""

from dataclasses import fields, replace
from typing import Any

import pytest

from foredraft.config.api_keys import Limits
from foredraft.sampling.seeds import derive_seed
from foredraft.types import RANGES, Grammar, GrammarKind, Range, SamplingParams, SpeculationParams
from gateway.jobs import Job, submit_request
from gateway.security.limits import Caller


def number(allowed: Range, index: int) -> float:
    """Returns a number that float32 has exactly, different for each index."""
    if allowed.most > 1000:
        return 50 + index
    return allowed.least + (allowed.most - allowed.least) * (2 * index + 1) / 64


# No two alike, and none a default.
SAMPLING: dict[str, Any] = {
    **{name: number(allowed, i) for i, (name, allowed) in enumerate(RANGES.items())},
    "logit_bias": {3: -2.0, 9: 4.0},
    "seed": 11,
    "max_new_tokens": 40,
    "min_new_tokens": 13,
    "stop_token_ids": (5, 6),
    "ignore_eos": True,
    "logprobs": 4,
    "prompt_logprobs": 3,
    "bad_words": ((8, 9), (7,)),
    "allowed_token_ids": (8, 12, 5),
}
SPECULATION: dict[str, Any] = {"enabled": False, "num_steps": 3, "topk": 2, "num_draft_tokens": 8}
JOB = Job([1, 2, 3], SamplingParams(**SAMPLING), name="the-name")


def plain(value: Any) -> Any:
    """Returns a message's field in the dataclasses' form."""
    if hasattr(value, "add"):
        return tuple(tuple(each.ids) for each in value)
    if hasattr(value, "items"):
        return dict(value)
    return tuple(value) if hasattr(value, "__len__") and not isinstance(value, str) else value


def test_every_sampling_parameter() -> None:
    values = [value for value in SAMPLING.values() if isinstance(value, float | int)]
    assert len(set(values)) == len(values)
    assert all(getattr(SamplingParams(), name) != value for name, value in SAMPLING.items())
    assert {field.name for field in fields(SamplingParams)} == {*SAMPLING, "grammar"}
    sent = submit_request(JOB, 0).sampling
    assert {name: plain(getattr(sent, name)) for name in SAMPLING} == SAMPLING
    assert sent.grammar.WhichOneof("kind") is None
    assert not submit_request(replace(JOB, sampling=SamplingParams()), 0).sampling.HasField(
        "logprobs"
    )


@pytest.mark.parametrize("kind", list(GrammarKind))
def test_every_kind_of_grammar(kind: GrammarKind) -> None:
    sampling = SamplingParams(grammar=Grammar(kind, "its text"))
    sent = submit_request(replace(JOB, sampling=sampling), 0).sampling.grammar
    assert sent.WhichOneof("kind") == kind.value
    assert getattr(sent, kind.value) == "its text"


def test_every_wish_for_speculation() -> None:
    assert {field.name for field in fields(SpeculationParams)} == set(SPECULATION)
    job = replace(JOB, speculation=SpeculationParams(**SPECULATION))
    sent = submit_request(job, 0).speculation
    assert {name: getattr(sent, name) for name in SPECULATION} == SPECULATION
    left_out = submit_request(JOB, 0).speculation
    assert not any(left_out.HasField(name) for name in SPECULATION)


def test_what_is_beside_the_sampling() -> None:
    job = replace(
        JOB, priority=-3, return_provenance=True, caller=Caller("alice", Limits()), call="the-call"
    )
    sent = submit_request(job, 0)
    assert list(sent.prompt) == [1, 2, 3]
    assert (sent.priority, sent.return_provenance) == (-3, True)
    assert (sent.key_label, sent.request_name) == ("alice", "the-name")


def test_every_choice_has_a_seed_of_its_own_and_the_only_one_that_of_the_request() -> None:
    assert submit_request(JOB, 0).sampling.seed == 11
    several = replace(JOB, num_choices=3)
    seeds = [submit_request(several, choice).sampling.seed for choice in range(3)]
    assert seeds == [derive_seed(11, choice) for choice in range(3)]
    assert len({*seeds, 11}) == 4
