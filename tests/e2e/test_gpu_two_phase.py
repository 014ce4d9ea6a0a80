"""Grammars, penalties and log-probabilities inside steps that run ahead on a GPU, against the CPU's
own way, in float32.
"""

import json
from pathlib import Path

import llguidance
import pytest

from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import GrammarKind, SamplingParams
from testing.engines import Job, Result, running_engine
from testing.triton_device import needs_gpu
from verify_service.grammar.matcher import CompiledGrammar
from verify_service.grammar.source import to_llguidance
from verify_service.grammar.vocabulary import LIMITS, load_vocabulary
from verify_service.metrics import LATE_MASKS, OVERLAPPED_STEPS

pytestmark = [pytest.mark.gpu, needs_gpu]
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": 9},
            "minItems": 6,
            "maxItems": 9,
        },
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["names", "age"],
    "additionalProperties": False,
}
REGEX = r"((the|a|one) [a-z]{1,9} (is|was|has) [a-z]{1,9}[.,] ){20}"
TEXT = 'Question: Who lives in the small house? Answer: {"names": ["Lily", "Tom"]}\n'
ASKED = (
    {},
    {"temperature": 0.0},
    {"repetition_penalty": 1.3, "temperature": 0.7},
    {"frequency_penalty": 0.6, "presence_penalty": -0.4, "top_p": 0.9},
    {"logit_bias": {5: 4.0, 30: -50.0}, "logprobs": 3},
    {"min_new_tokens": 40, "temperature": 0.0},
    {"top_p": 0.8, "top_k": 40, "logprobs": 0},
    {"bad_words": tuple((i, j) for i in range(3, 30) for j in range(30, 60)), "temperature": 0.0},
    {"allowed_token_ids": tuple(range(1, 2000)), "bad_words": ((13,), (12, 14))},
)
TREES = {"chain": (3, 1, 4), "tree": (4, 4, 12)}


def work(path: Path) -> list[Job]:
    """Plain sequences, such that ask for more, and such that follow a grammar, with and without; no
    two end together.
    """
    tokenizer, vocabulary = Tokenizer.from_dir(path), load_vocabulary(path, 8192, frozenset({0}))

    def compiled(kind: GrammarKind, text: str) -> CompiledGrammar:
        matcher = llguidance.LLMatcher(vocabulary, to_llguidance(kind, text), limits=LIMITS)
        assert not matcher.is_error(), matcher.get_error()
        return CompiledGrammar(matcher, vocabulary.vocab_size)

    grammars = [
        compiled(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        compiled(GrammarKind.REGEX, REGEX),
    ]
    prompt = tokenizer.encode(TEXT)
    made = []
    for i in range(2 * len(ASKED)):
        asked = dict(ASKED[i % len(ASKED)])
        grammar = grammars[i % 2] if i >= len(ASKED) else None
        if grammar is not None:
            asked.pop("min_new_tokens", None)
        asked["ignore_eos"] = grammar is None and "min_new_tokens" not in asked
        sampling = SamplingParams(**{"max_new_tokens": 60 + 5 * i, "seed": i, **asked})
        made.append(Job(prompt[: len(prompt) - i % 5], sampling, grammar=grammar))
    return made


def results_of(path: Path, algorithm: str, device: str, **flags) -> list[Result]:
    settings = {"dtype": "float32", "max_total_tokens": 16384, "max_running_requests": 16, **flags}
    with running_engine(path, algorithm, device=device, draft_step_timeout=60.0, **settings) as h:
        results = h.run(work(path), timeout=300)
        h.check_nothing_left()
    return results


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


@pytest.fixture(scope="module")
def expected(demo: Path) -> list[Result]:
    return results_of(demo, "NONE", "cpu")


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in-turn"])
@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [("NONE", "chain"), ("STANDALONE", "tree"), ("EAGLE3", "chain"), ("EAGLE3", "tree")],
)
def test_nobody_waits_and_no_token_changes(demo, expected, algorithm, shape, overlap):
    flags = {"disable_overlap_schedule": not overlap}
    if algorithm != "NONE":
        steps, topk, tokens = TREES[shape]
        draft = {"STANDALONE": "foredraft-demo-draft", "EAGLE3": "foredraft-demo-eagle3"}
        flags |= {
            "speculative_draft_model_path": str(resolve_model_path(draft[algorithm])),
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": tokens,
            "require_transport": "cuda_ipc",
        }
    overlapped, masks = OVERLAPPED_STEPS._value.get(), LATE_MASKS._value.get()
    got = results_of(demo, algorithm, "cuda", **flags)
    assert LATE_MASKS._value.get() - masks > 50
    if overlap:
        assert OVERLAPPED_STEPS._value.get() - overlapped > 20
    ties = 0
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert ours.finish is not None
        if ours.tokens != theirs.tokens:
            pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=False))
            print("first difference of", i, next((at for at, (a, b) in pairs if a != b), None))
            ties += 1
            continue
        assert ours.finish.reason is theirs.finish.reason
        assert len(ours.logprobs) == len(theirs.logprobs)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=2e-3)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=2e-3)
            assert len(one.top_tokens) == len(other.top_tokens)
    assert ties <= 1  # two tokens within rounding of each other
    if algorithm != "NONE":
        assert sum(result.finish.accepted_tokens for result in got[len(ASKED) :]) > 0
