"""Prompts and requests of `divergence`, the same in every engine."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from benchmarks.real_prompts import real_prompts
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import GrammarKind, SamplingParams
from testing.engines import Job

# Of sampled texts, in turn.
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 40, "min_p": 0.02},
    {"repetition_penalty": 1.1},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"logit_bias": {30: 2.0, 45: -4.0}, "temperature": 0.7},
)
GRAMMAR_EVERY = 9  # texts, where the model has a tokenizer
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["names", "age"],
    "additionalProperties": False,
}
REGEX = r"((the|a|one) [a-z]{1,9} (is|was|has) [a-z]{1,9}[.,] ){20}"


def text_prompts(path: Path, count: int) -> list[list[int]]:
    """Pieces of real texts that end anywhere, so that many have a beginning in common."""
    whole = real_prompts(Tokenizer.from_dir(path))
    return [
        whole[number % len(whole)][: max(20, 200 - 13 * (number // len(whole) % 14))]
        for number in range(count)
    ]


def random_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Tokens that repeat, so that n-grams have something to propose."""
    return [
        [
            2 + (7 * number + 31 * (place % (5 + number % 23))) % (vocab_size - 2)
            for place in range(40 + 7 * number % 600)
        ]
        for number in range(count)
    ]


def jobs_of(prompts: list[list[int]], num_tokens: int, grammars: list[Any]) -> list[Job]:
    """Every other one greedy; they end one after the other, so that others join all the time."""
    made = []
    for number, prompt in enumerate(prompts):
        temperature = float(number % 2)
        grammar = None
        if grammars and number % GRAMMAR_EVERY == GRAMMAR_EVERY - 1:
            grammar = grammars[number // GRAMMAR_EVERY % len(grammars)]
        asked = {
            "temperature": temperature,
            "seed": number,
            "max_new_tokens": num_tokens - number % 7,
            "ignore_eos": grammar is None,
            **(ASKED[number // 2 % len(ASKED)] if temperature else {}),
        }
        made.append(Job(prompt, SamplingParams(**asked), grammar=grammar))
    return made


def grammars_of(path: Path, vocab_size: int) -> list[Any]:
    """A JSON schema and a regular expression; none where llguidance is not installed."""
    if importlib.util.find_spec("llguidance") is None:
        print("without grammars: llguidance is not installed", flush=True)
        return []
    import llguidance

    from verify_service.grammar.matcher import CompiledGrammar
    from verify_service.grammar.source import to_llguidance
    from verify_service.grammar.vocabulary import LIMITS, load_vocabulary

    vocabulary = load_vocabulary(path, vocab_size, frozenset({0}))
    found = []
    sources = ((GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), (GrammarKind.REGEX, REGEX))
    for kind, text in sources:
        matcher = llguidance.LLMatcher(vocabulary, to_llguidance(kind, text), limits=LIMITS)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        found.append(CompiledGrammar(matcher, vocabulary.vocab_size))
    return found
