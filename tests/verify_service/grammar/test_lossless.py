"""Grammars behind a real engine on the bundled model: whatever is drafted, the same seed gives the
same, valid text.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest

from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason, GrammarKind, SamplingParams, SpeculationParams
from testing.engines import Harness, Job, Result, running_engine
from verify_service.grammar.matcher import CompiledGrammar
from verify_service.grammar.source import to_llguidance
from verify_service.grammar.vocabulary import LIMITS, load_vocabulary

MODELS = Path(__file__).parents[3] / "models"
TARGET = MODELS / "foredraft-demo"
TOKENIZER = Tokenizer.from_dir(TARGET)
VOCABULARY = load_vocabulary(TARGET, 8192, frozenset({0}))
TREE = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 8,
    "draft_step_timeout": 20.0,
}
DRAFTS: dict[str, dict[str, Any]] = {
    "NGRAM": {},
    "STANDALONE": {
        "speculative_draft_model_path": str(MODELS / "foredraft-demo-draft"),
        **TREE,
    },
    "EAGLE3": {"speculative_draft_model_path": str(MODELS / "foredraft-demo-eagle3"), **TREE},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["dog", "cat", "bird"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
REGEX = r"(Yes|No), (the [a-z]{1,12} )+(is|was) [0-9]{1,4}\."
PROMPT = TOKENIZER.encode(
    'Question: Who lives in the small house? Answer: {"name": "Lily", "age": 7}\n'
)
OFF = SpeculationParams(enabled=False)
WORDS = tuple(tuple(TOKENIZER.encode(f"{word} ", False)) for word in ("was", " was", "the", " the"))


def compiled(kind: GrammarKind, text: str) -> CompiledGrammar:
    matcher = llguidance.LLMatcher(VOCABULARY, to_llguidance(kind, text), limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return CompiledGrammar(matcher, VOCABULARY.vocab_size)


@pytest.fixture(scope="module", params=sorted(DRAFTS))
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with running_engine(TARGET, request.param, **DRAFTS[request.param]) as running:
        running.engine.draft_everything()  # drafts, whatever it costs here
        yield running


def jobs(speculation: SpeculationParams) -> list[Job]:
    schema = compiled(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    regex = compiled(GrammarKind.REGEX, REGEX)
    extra: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8, "top_k": 40},
        {"frequency_penalty": 0.5, "logit_bias": {5: 4.0}, "logprobs": 1},
        {"bad_words": WORDS, "temperature": 0.5},
    ]
    return [
        Job(
            PROMPT[: len(PROMPT) - i % 5],
            SamplingParams(**{"max_new_tokens": 64, "seed": i, **extra[i % len(extra)]}),
            speculation=speculation,
            grammar=None if i % 6 == 5 else (schema, regex)[i % 3 == 2],
        )
        for i in range(18)
    ]


def test_the_same_seed_gives_the_same_valid_text(harness: Harness) -> None:
    plain, drafted = (harness.run(jobs(asked)) for asked in (OFF, SpeculationParams()))
    harness.check_nothing_left()
    for i, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        assert one.tokens == other.tokens, (i, text(one), text(other))
        if i % 5 == 4:
            spelt = ",".join(map(str, ["", *one.tokens, ""]))
            assert not any(f",{','.join(map(str, word))}," in spelt for word in WORDS)
        if i % 6 == 5:
            continue
        assert reason(one) == reason(other)
        if reason(one) is FinishReason.LENGTH:
            assert i % 3 == 2  # the regular expression alone has no longest text
        elif i % 3 == 2:
            assert re.fullmatch(REGEX, text(one)), text(one)
        else:
            jsonschema.validate(json.loads(text(one)), SCHEMA)
    constrained = [result for i, result in enumerate(drafted) if i % 6 != 5]
    assert sum(finished(result).accepted_tokens for result in constrained) > 0
    assert sum(finished(result).drafted_tokens for result in plain) == 0


def test_a_grammar_that_leaves_no_allowed_token_ends_in_an_error() -> None:
    grammar = compiled(GrammarKind.REGEX, "(Yes|No)")
    allowed = SamplingParams(allowed_token_ids=tuple(TOKENIZER.encode("Yes No")), max_new_tokens=9)
    others = SamplingParams(allowed_token_ids=(0, *TOKENIZER.encode("dog")), max_new_tokens=9)
    with running_engine(TARGET, "NGRAM") as harness:
        good, bad = harness.run([Job(PROMPT, each, grammar=grammar) for each in (allowed, others)])
        harness.check_nothing_left()
    assert text(good) in ("Yes", "No")
    assert reason(bad) is FinishReason.ERROR
    assert "allowed_token_ids" in str(finished(bad).error)


def test_what_stands_before_a_failure_is_output(harness: Harness) -> None:
    said = TOKENIZER.encode("Yes, the dog sat. " * 4)
    grammar = compiled(GrammarKind.REGEX, "(Yes, the dog sat. ){3}No")
    sampling = SamplingParams(allowed_token_ids=(*said,), max_new_tokens=64, temperature=0.0)
    plain, drafted = (
        harness.run([Job(said, sampling, grammar=grammar, speculation=asked)])[0]
        for asked in (OFF, SpeculationParams())
    )
    harness.check_nothing_left()
    assert text(plain) == "Yes, the dog sat. " * 3
    for result in (plain, drafted):
        assert reason(result) is FinishReason.ERROR
        assert result.tokens == plain.tokens
        assert finished(result).completion_tokens == len(result.tokens)
    assert finished(drafted).accepted_tokens > 0


def test_preempted_sequences_find_their_place_again() -> None:
    long = compiled(GrammarKind.REGEX, "([a-z]{1,6}( |, )){60}")
    flags = {"page_size": 8, "max_total_tokens": 8 * 23, "max_running_requests": 4}
    asked = [
        Job(PROMPT[: 20 + i], SamplingParams(max_new_tokens=110, seed=i), grammar=long)
        for i in range(4)
    ]
    with running_engine(TARGET, "NGRAM", **flags) as harness:
        together = harness.run(asked)
        alone = [harness.run([job])[0] for job in asked]
        harness.check_nothing_left()
    assert sum(finished(result).preemptions for result in together) > 0
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens
        assert re.match("([a-z]{1,6}( |, )){10}", text(one))


def finished(result: Result) -> Any:
    assert result.finish is not None
    return result.finish


def reason(result: Result) -> FinishReason:
    return finished(result).reason


def text(result: Result) -> str:
    return TOKENIZER.decode(result.tokens)
