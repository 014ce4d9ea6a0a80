"""The soak of texts finds an answer that is not plain decoding's."""

import asyncio
import random
from pathlib import Path

import pytest
import uvloop

from foredraft.bench.http_client import HttpClient
from testing.compared_texts import KINDS, Findings, answer_all, compare, requests, text_of
from testing.stack import make_model, running_stack


def test_every_kind_of_request_is_asked_greedily_and_sampled() -> None:
    asks = requests(2 * len(KINDS), 1)
    assert {ask.kind for ask in asks} == set(KINDS)
    assert {ask.body["temperature"] > 0 for ask in asks} == {True, False}
    assert len({ask.body["seed"] for ask in asks}) == len(asks)
    assert requests(5, 1) == requests(5, 1) != requests(5, 2)


def test_tool_calls_and_ends_belong_to_the_text() -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "A"}'}}
    message = {"content": None, "tool_calls": [call]}
    answer = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    assert text_of(answer) == 'weather{"city": "A"} [tool_calls]'


@pytest.mark.slow
def test_answers_are_compared_whole_and_as_streams(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny", context_length=1024)
    asks = [ask for ask in requests(24, 3) if ask.kind in ("text", "chat", "penalties", "stop")]

    async def ask_all(url: str, found: Findings) -> None:
        http, choose = HttpClient(url), random.Random(1)
        async with asyncio.timeout(240):
            for ask in asks * 3:
                await compare(http, ask, choose, found)
        http.close()

    with running_stack(model, speculative_algorithm="NGRAM", device="cpu") as stack:
        url = stack.urls["http"]
        uvloop.run(answer_all(url, asks))
        assert all(ask.expected.endswith("]") for ask in asks)
        right = Findings()
        uvloop.run(ask_all(url, right))
        assert right.compared.total() == 3 * len(asks)
        assert {way for _, way in (kind.split(", ") for kind in right.compared)} == {
            "whole",
            "stream",
            "cut off",
        }
        assert right.others == []
        for ask in asks:  # another first token, and another end
            ask.expected = f"\0{ask.expected}"
        wrong = Findings()
        uvloop.run(ask_all(url, wrong))
    # What was cut off before its first word says nothing.
    assert len(wrong.others) >= sum(
        count for kind, count in wrong.compared.items() if "cut off" not in kind
    )
