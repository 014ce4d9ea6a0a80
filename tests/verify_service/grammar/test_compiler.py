"""Grammars as clients send them, good and hostile, through the real worker process."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.errors import InvalidRequest, Overloaded
from foredraft.telemetry.metrics import value
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import Grammar, GrammarKind
from testing import tiny_tokenizers
from verify_service.grammar import compiler as compilers
from verify_service.grammar.compiler import GrammarCompiler, GrammarLimits

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
RIGID = json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
SPACIOUS = json.dumps({**SCHEMA, "x-guidance": {"whitespace_pattern": r"\x20|\n\x20\x20"}})
EBNF = 'root ::= "yes" | no+\nno ::= "no" [0-9]'
LARK = 'start: "yes" | no+\nno: "no" /[0-9]/'
TAGS = {
    "structures": [
        {"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"},
        {"begin": "<g>", "schema": {"type": "boolean"}, "end": "</g>"},
    ],
    "triggers": ["<"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), folder)
    return folder


@contextlib.asynccontextmanager
async def running(
    model: Path, seconds: float = 60, mb: int = 256
) -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(model, 600, frozenset({1}), GrammarLimits(seconds, mb))
    try:
        yield compiler
    finally:
        await compiler.close()


async def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str, model: Path) -> bool:
    """Whether a text is in the grammar's language."""
    matcher = (await compiler.compile(grammar)).start()
    tokens = Tokenizer.from_dir(model).encode(text, False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


THINK: dict[str, Any] = {"begin": "<r>", "end": "</r>"}
OPEN = {"is_open": True}

# Formats that JSON Schema does not know say nothing, as its standard has it.
FORMATS = json.dumps(
    {
        "type": "object",
        "properties": {
            "format": {"type": "array", "items": {"type": "string", "format": "path"}},
            "d": {"type": "string", "format": "date"},
        },
        "additionalProperties": False,
    }
)
UNIQUE = json.dumps(
    {
        "type": "array",
        "items": {"type": "integer"},
        "uniqueItems": True,
        "x-guidance": {"lenient": True},
    }
)


def structural(**options: Any) -> Grammar:
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({**TAGS, **options}))


def schema_after(reasoning: dict[str, Any]) -> Grammar:
    """JSON of a schema, and reasoning before it."""
    tags = {"structures": [], "at_least_one": True, "answer": SCHEMA, "reasoning": reasoning}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tags))


def test_every_kind(model: Path) -> None:
    cases = [
        (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), '{"a": -7}', '{"a": "x"}'),
        (Grammar(GrammarKind.JSON_SCHEMA, "true"), "[1, {}]", "[1, {]"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), '{ "x" : [null] }', "[]"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), '{"x":1}', '{"x":  1}'),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), '{"x": 1}', '{\n"x": 1}'),
        (Grammar(GrammarKind.JSON_SCHEMA, SPACIOUS), '{\n  "a": 1}', '{\n"a": 1}'),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["/", 1]}'), '"/"', '"'),
        (Grammar(GrammarKind.JSON_SCHEMA, RIGID), '{"a":1}', '{"a": 1}'),
        (Grammar(GrammarKind.JSON_SCHEMA, FORMATS), '{"format": ["a/b", "c"]}', '{"format": 1}'),
        (Grammar(GrammarKind.JSON_SCHEMA, FORMATS), '{"d": "2026-11-28"}', '{"d": "now"}'),
        (Grammar(GrammarKind.JSON_SCHEMA, UNIQUE), "[1, 1]", '["a"]'),
        (Grammar(GrammarKind.REGEX, r"a/b\d\n{2}é"), "a/b7\n\né", "a/b7\né"),
        (Grammar(GrammarKind.EBNF, EBNF), "no1no2", "no1no"),
        (Grammar(GrammarKind.EBNF, LARK), "yes", "yesno1"),
        (structural(), "so: <f>2</f>, <g>true</g>!", "<f>3</f>"),
        (structural(), "nothing to call", "see <h>"),
        (structural(at_least_one=True), "<f>1</f>\n<g>false</g>", "hm <f>1</f>"),
        (structural(at_least_one=True, stop_after_first=True), "<f>1</f>", "<f>1</f>\n<f>1</f>"),
        (structural(stop_after_first=True), "hm <f>1</f>", "<f>1</f> and"),
        (structural(at_least_one=True, answer=SCHEMA), '{"a": 1}', "hm"),
        (structural(at_least_one=True, answer=SCHEMA), "<f>1</f>\n<f>2</f>", '<f>1</f>\n{"a": 1}'),
        (structural(reasoning=THINK, at_least_one=True), "<r>a <f></r><f>2</f>", "<r>a</r> so"),
        (structural(reasoning=THINK, at_least_one=True), "<f>2</f>", "<r>a <f>2</f>"),
        (structural(reasoning=THINK | OPEN), "a</r>\n\n<f>2</f>", "<f>2</f>"),
        (structural(reasoning=THINK | OPEN, at_least_one=True), "a</r>\n<f>2</f>", "a</r> b"),
        (schema_after(THINK), '<r>a</r> {"a": 1}', "<r>a</r> so"),
        (schema_after(THINK), '{"a": 1}', '<r>a {"a": 1}'),
        (schema_after(THINK | OPEN), 'a</r>\n\n{"a": 1}', '{"a": 1}'),
    ]

    async def run() -> None:
        async with running(model) as compiler:
            for grammar, good, bad in cases:
                assert await accepts(compiler, grammar, good, model), (grammar, good)
                assert not await accepts(compiler, grammar, bad, model), (grammar, bad)

    asyncio.run(run())


WRONG = [
    (GrammarKind.JSON_SCHEMA, "{", "property name"),
    (GrammarKind.JSON_SCHEMA, "[1]", "object"),
    (GrammarKind.JSON_SCHEMA, '{"type": "strange"}', "strange"),
    (GrammarKind.JSON_SCHEMA, '{"type": "object", "dependencies": {"a": ["b"]}}', "dependencies"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "http://example.com/x"}', "example"),
    (GrammarKind.JSON_SCHEMA, '{"x-guidance": 1}', "x-guidance"),
    (GrammarKind.JSON_SCHEMA, "[" * 100_000, "deep"),
    (GrammarKind.REGEX, "(a", "regex"),
    (GrammarKind.REGEX, "a(?=b)", "look"),
    (GrammarKind.EBNF, "root ::= (", "Expected"),
    (GrammarKind.EBNF, 'start: "a" undefined', "undefined"),
    (GrammarKind.EBNF, 'start: call_1\ncall_1: %json {"not": {}}', "^grammar: rule call_1: .*not"),
    (
        GrammarKind.JSON_SCHEMA,
        '{"oneOf": [{"type": "integer"}, {"type": "number"}]}',
        r'or "x-guidance": \{"coerce_one_of": true\}',
    ),
    (GrammarKind.JSON_SCHEMA, '{"const": 9007199254740993}', "9007199254740993"),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "iri"}', "iri; leave it out, or give"),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "format": ["uri"]}', "format"),
    (
        GrammarKind.JSON_SCHEMA,
        '{"uniqueItems": true}',
        r'uniqueItems.*"x-guidance": \{"lenient": t',
    ),
    (GrammarKind.STRUCTURAL_TAG, "{}", "structures"),
    (
        GrammarKind.STRUCTURAL_TAG,
        '{"structures": [{"begin": "a"}, {"begin": "b", "schema": {"not": {}}}], "triggers": ["a",'
        ' "b"]}',
        r"^grammar: structures\.1: .*not",
    ),
    (
        GrammarKind.STRUCTURAL_TAG,
        '{"structures": [{"begin": "a", "schema": {"not": {}}}], "triggers": ["a"]}',
        r"^grammar: structures\.0: failed .*not",
    ),
    (
        GrammarKind.STRUCTURAL_TAG,
        '{"structures": [], "at_least_one": true, "answer": {"not": {}}}',
        r"^grammar: failed .*not",
    ),
    (GrammarKind.STRUCTURAL_TAG, '{"structures": [], "at_least_one": true}', "at least one"),
    (
        GrammarKind.STRUCTURAL_TAG,
        '{"structures": [], "triggers": [], "answer": {}}',
        "^grammar: answer: needs at_least_one",
    ),
    (
        GrammarKind.STRUCTURAL_TAG,
        '{"structures": [{"begin": "<a>"}], "triggers": ["b"]}',
        "trigger",
    ),
    (
        GrammarKind.STRUCTURAL_TAG,
        '{"structures": [{"begin": "<a>"}], "triggers": ["<a>"], "reasoning": {"begin": "<r>"}}',
        "reasoning has",
    ),
    (
        GrammarKind.STRUCTURAL_TAG,
        (
            '{"structures": [{"begin": "a"}], "triggers": ["a"], "reasoning": {"begin": "b", "end":'
            ' "c"}}'
        ),
        "is_open or at_least_one",
    ),
]


def test_wrong_ones_say_what_is_wrong_and_are_remembered(model: Path) -> None:
    async def run() -> None:
        async with running(model) as compiler:
            for kind, text, said in WRONG:
                with pytest.raises(InvalidRequest, match=said) as raised:
                    await compiler.compile(Grammar(kind, text))
                assert raised.value.field == "grammar"
                with pytest.raises(InvalidRequest, match=said):
                    compiler.cached(Grammar(kind, text))

    asyncio.run(run())


def deep_schema(levels: int) -> str:
    """Every level doubles what the one above has."""
    definitions = {
        f"d{i}": {
            "type": "object",
            "properties": {
                f"p{j}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for j in range(60)
            },
        }
        for i in range(levels)
    }
    definitions[f"d{levels}"] = {"type": "string", "pattern": "(a|b)*a(a|b){12}"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def test_hostile_ones_are_ended_while_good_ones_go_on(model: Path) -> None:
    hostile = [
        Grammar(GrammarKind.EBNF, "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
        Grammar(GrammarKind.REGEX, "(" * 3000 + "a" + "{1,9})" * 3000),
        Grammar(GrammarKind.REGEX, r"(.*\w{1,400}\d){1,400}"),
        Grammar(GrammarKind.JSON_SCHEMA, deep_schema(200)),
    ]

    async def run() -> None:
        # Far less than what the worker needs to give up by itself; so whatever takes long is killed
        # here.
        async with running(model, seconds=5.0, mb=64) as compiler:
            await compiler.compile(Grammar(GrammarKind.REGEX, "warm"))
            attempts = [asyncio.create_task(compiler.compile(grammar)) for grammar in hostile]
            for i in range(5):
                await compiler.compile(Grammar(GrammarKind.REGEX, f"good{i}"))
            for outcome in await asyncio.gather(*attempts, return_exceptions=True):
                # Either it is harmless after all, or it is refused by the request's fault.
                assert not isinstance(outcome, BaseException) or isinstance(outcome, InvalidRequest)

    asyncio.run(run())


def test_time_and_memory_are_bounded(model: Path) -> None:
    schema = Grammar(GrammarKind.JSON_SCHEMA, deep_schema(400))

    async def refused(seconds: float, mb: int, said: str) -> None:
        async with running(model, seconds, mb) as compiler:
            with pytest.raises(InvalidRequest, match=said):
                await compiler.compile(schema)
            with pytest.raises(InvalidRequest, match=said):
                compiler.cached(schema)  # without another trial

    asyncio.run(refused(0.02, 1024, "0.02 s"))
    asyncio.run(refused(60, 1, "1 MiB"))


def test_what_ran_over_its_bounds_may_be_tried_again_later(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(compilers, "time", SimpleNamespace(monotonic=lambda: now))
    schema = Grammar(GrammarKind.JSON_SCHEMA, deep_schema(400))
    wrong = Grammar(GrammarKind.REGEX, "(")

    async def refuse(compiler: GrammarCompiler, grammar: Grammar) -> None:
        with pytest.raises(InvalidRequest):
            await compiler.compile(grammar)
        with pytest.raises(InvalidRequest):
            compiler.cached(grammar)

    async def run() -> None:
        nonlocal now
        async with running(model, 0.02) as hurried, running(model) as patient:
            await refuse(hurried, schema)
            await refuse(patient, wrong)
            now += compilers.BOUND_SECONDS
            assert hurried.cached(schema) is None
            # What is wrong stays wrong.
            with pytest.raises(InvalidRequest):
                patient.cached(wrong)

    asyncio.run(run())


def test_the_cache_is_bounded_by_bytes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running(model) as compiler:
            grammars = [Grammar(GrammarKind.REGEX, f"{letter}{{1,50}}") for letter in "abc"]
            await compiler.compile(grammars[0])
            one = sum(compiler._bytes.values())
            assert one > len(grammars[0].text)
            monkeypatch.setattr(compilers, "CACHED_BYTES", 2.5 * one)
            for grammar in grammars[1:]:
                await compiler.compile(grammar)
            assert [compiler.cached(each) is not None for each in grammars] == [False, True, True]
            monkeypatch.setattr(compilers, "CACHED_BYTES", one / 2)
            await compiler.compile(Grammar(GrammarKind.REGEX, "d{1,50}"))
            assert not compiler._bytes
            assert not compiler._cache

    asyncio.run(run())


def test_no_more_wait_than_may(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "MAX_WAITING", 2)

    async def run() -> None:
        async with running(model) as compiler:
            grammars = [Grammar(GrammarKind.REGEX, text) for text in "abcd"]
            waiting = [asyncio.create_task(compiler.compile(each)) for each in grammars[:2]]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await compiler.compile(grammars[2])
            # Whoever asks for one that is on its way adds none.
            assert await compiler.compile(grammars[0]) is await waiting[0]
            await waiting[1]
            assert await compiler.compile(grammars[3]) is not None

    asyncio.run(run())


def test_the_cache_is_bounded_and_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "CACHED", 3)

    async def run() -> None:
        async with running(model) as compiler:
            grammars = [Grammar(GrammarKind.REGEX, text) for text in "abcd"]
            hits = value("foredraft_grammar_cache_hits_total")
            count = value("foredraft_grammar_compile_seconds_count")
            same = await asyncio.gather(*(compiler.compile(grammars[0]) for _ in range(8)))
            assert len(set(map(id, same))) == 1
            for grammar in grammars[1:3]:
                await compiler.compile(grammar)
            assert compiler.cached(grammars[0]) is same[0]
            await compiler.compile(grammars[3])
            assert [compiler.cached(g) is not None for g in grammars] == [True, False, True, True]
            assert value("foredraft_grammar_compile_seconds_count") == count + 4
            assert value("foredraft_grammar_cache_hits_total") == hits + 4

    asyncio.run(run())


def test_a_worker_that_is_killed_is_started_again(model: Path) -> None:
    async def run() -> None:
        async with running(model) as compiler:
            await compiler.compile(Grammar(GrammarKind.REGEX, "a"))
            assert compiler._worker is not None
            os.kill(compiler._worker._process.pid, signal.SIGKILL)
            assert await accepts(compiler, Grammar(GrammarKind.REGEX, "b"), "b", model)

    asyncio.run(run())
