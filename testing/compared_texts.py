"""Requests of every kind whose answers are compared with plain decoding's, over HTTP."""

import asyncio
import collections
import json
import random
from dataclasses import dataclass, field
from typing import Any

from foredraft.bench import prompts
from foredraft.bench.http_client import HttpClient

PREFIX = " ".join(f"Rule {i}: say what you know in plain words, and no more." for i in range(8))
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"name": "city", "schema": TOOL["function"]["parameters"]}  # type: ignore[index]
REGEX = r"((the|a|one) [a-z]{1,9} (is|was|has) [a-z]{1,9}[.,] ){6}"
KINDS = ("text", "chat", "prefix", "tool", "schema", "regex", "penalties", "stop")


class Gone(Exception):
    """The client hangs up."""


@dataclass(slots=True)
class Ask:
    """A request, and what plain decoding answers."""

    kind: str
    path: str
    body: dict[str, Any]
    expected: str = ""


@dataclass(slots=True)
class Findings:
    """Results of the comparison.

    Attributes:
        compared: Answers by kind.
        others: Answers that plain decoding does not give.
        failures: Requests that got none.
    """

    compared: collections.Counter[str] = field(default_factory=collections.Counter)
    others: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    kills: int = 0

    def __str__(self) -> str:
        return (
            f"{self.compared.total()} answers compared, {len(self.others)} others than plain"
            f" decoding's, {len(self.failures)} failures; the draft was killed {self.kills} times"
        )


def requests(count: int, seed: int) -> list[Ask]:
    """Different requests of every kind, each with a seed of its own."""
    choose, source = random.Random(seed), prompts.tasks(seed)
    made = []
    for number in range(count):
        text = source.take().text
        body: dict[str, Any] = {"seed": number, "max_tokens": choose.choice((8, 24, 64, 120))}
        kind = KINDS[number % len(KINDS)]
        if number // len(KINDS) % 2:
            body |= {"temperature": choose.choice((0.7, 1.0)), "top_p": 0.95}
        else:
            body["temperature"] = 0.0
        path = "/v1/completions"
        if kind in ("chat", "tool", "schema"):
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if kind == "prefix":
            body["prompt"] = f"{PREFIX}\n{text}"
        elif kind == "tool":
            body |= {"tools": [TOOL], "tool_choice": "required"}
        elif kind == "schema":
            body["response_format"] = {"type": "json_schema", "json_schema": SCHEMA}
        elif kind == "regex":
            body["regex"] = REGEX
        elif kind == "penalties":
            body |= {"frequency_penalty": 0.5, "presence_penalty": 0.2, "logit_bias": {"30": 2}}
        elif kind == "stop":
            body["stop"] = [" the", "\n\n"]
        made.append(Ask(kind, path, body))
    return made


async def answer_all(url: str, asks: list[Ask]) -> None:
    """Fills in what a stack without drafts answers, to a few clients at a time."""
    left = list(asks)

    async def client() -> None:
        http = HttpClient(url)
        while left:
            ask = left.pop()
            response = await http.post(ask.path, json.dumps(ask.body).encode())
            if response.status != 200:
                raise RuntimeError(f"{ask.kind}: {response.status} {response.body[:300]!r}")
            ask.expected = text_of(response.json())
        http.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(client())


async def compare(http: HttpClient, ask: Ask, choose: random.Random, found: Findings) -> None:
    """Asks once, in one of three ways, and compares."""
    way = choose.choice(("whole", "stream", "stream", "cut off"))
    if way == "whole":
        response = await http.post(ask.path, json.dumps(ask.body).encode())
        if response.status != 200:
            raise ValueError(f"{response.status} {response.body[:200]!r}")
        got, is_same = text_of(response.json()), None
    else:
        got = await _streamed(http, ask, choose.randint(1, 6) if way == "cut off" else None)
        # What a stream has said so far: the end may be missing.
        is_same = ask.expected.startswith(got) if way == "cut off" else None
    found.compared[f"{ask.kind}, {way}"] += 1
    if not (got == ask.expected if is_same is None else is_same):
        found.others.append(
            {
                "kind": ask.kind,
                "way": way,
                "body": json.dumps(ask.body),
                "expected": ask.expected,
                "got": got,
            }
        )


async def _streamed(http: HttpClient, ask: Ask, num_reads: int | None) -> str:
    """The text of a stream; of a part of it, where the client goes after some reads."""
    parts: list[bytes] = []

    def on_body(now: float, data: bytes) -> None:
        parts.append(data)
        if num_reads is not None and len(parts) >= num_reads:
            raise Gone

    try:
        response = await http.post(
            ask.path, json.dumps({**ask.body, "stream": True}).encode(), on_body
        )
        if response.status != 200:
            raise ValueError(f"{response.status} {response.body[:200]!r}")
    except Gone:
        pass
    lines = b"".join(parts).split(b"\n\n")
    if num_reads is not None:
        lines = lines[:-1]  # the last may be cut in the middle
    events = [
        json.loads(line[6:])
        for line in lines
        if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]"
    ]
    for event in events:
        if "error" in event:
            raise ValueError(str(event["error"]))
    return "".join(_piece(event["choices"][0]) for event in events if event.get("choices"))


def text_of(answer: dict[str, Any]) -> str:
    """All that a whole answer says, with the arguments of its tool calls and why it ended."""
    return _piece(answer["choices"][0])


def _piece(choice: dict[str, Any]) -> str:
    said = choice.get("message") or choice.get("delta") or {}
    calls = "".join(
        (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        for call in said.get("tool_calls") or ()
    )
    reason = choice.get("finish_reason")
    text = (choice.get("text") or "") + (said.get("content") or "") + calls
    return text + (f" [{reason}]" if reason else "")
