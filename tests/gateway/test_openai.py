"""The official openai client, unchanged, against the running stack."""

import concurrent.futures
import json
import time
from collections.abc import Iterable
from typing import Any

import httpx
import openai
import pytest

from foredraft.text.tokenizer import Tokenizer
from gateway.openai.schemas import Message
from testing import tiny_tokenizers
from testing.stack import CONTEXT_LENGTH, eventually, is_idle

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
PROMPT = "The quick brown fox"
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi é"}]
FIXED: Any = {"model": "tiny", "max_tokens": 40, "temperature": 0.8, "seed": 7}


def joined(chunks: Iterable[Any]) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def test_models(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == ["tiny"]
    assert time.time() - 3600 < models[0].created <= time.time()
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")


def test_a_completion_and_its_usage(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        prompt=PROMPT, extra_body={"return_token_ids": True}, **FIXED
    )
    choice = answer.choices[0]
    ids = choice.token_ids  # type: ignore[attr-defined]
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert choice.finish_reason in ("stop", "length")
    assert choice.text == TOKENIZER.decode(ids)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(PROMPT))
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(ids)


def test_streams_say_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **FIXED)
    chunks = list(
        client.completions.create(
            prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **FIXED
        )
    )
    assert joined(chunks) == whole.choices[0].text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    # The prefix cache knows the prompt the second time.
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=CHAT, **FIXED)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    expected = Tokenizer(
        tiny_tokenizers.byte_level(), {"bos_token": "<s>"}, tiny_tokenizers.CHAT_TEMPLATE
    ).encode_chat(CHAT)
    assert whole.usage.prompt_tokens == len(expected)
    chunks = list(client.chat.completions.create(messages=CHAT, stream=True, **FIXED))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_chat_content_may_come_in_parts(client: openai.OpenAI) -> None:
    parts: Any = [
        CHAT[0],
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "é"}],
        },
    ]
    one = client.chat.completions.create(messages=CHAT, **FIXED)
    two = client.chat.completions.create(messages=parts, **FIXED)
    assert one.choices[0].message.content == two.choices[0].message.content


def test_an_answers_message_can_be_sent_back(client: openai.OpenAI) -> None:
    """With its fields that are null: templates ask whether `tool_calls` is there."""
    message = client.chat.completions.create(messages=CHAT, **FIXED).choices[0].message
    sent = message.model_dump()
    assert sent["tool_calls"] is None
    plain = {"role": "assistant", "content": message.content}
    for given in (sent, {**plain, "tool_calls": []}):
        assert Message.model_validate(given).rendered("m") == plain
    parts = [{"type": "text", "text": "No: "}, {"type": "refusal", "refusal": "I will not"}]
    refused = Message.model_validate({"role": "assistant", "content": parts}).rendered("m")
    assert refused["content"] == "No: I will not"
    again: Any = [*CHAT, sent, CHAT[1]]
    assert client.chat.completions.create(messages=again, **FIXED).choices


def test_chat_without_a_limit_runs_to_the_context_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == CONTEXT_LENGTH
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(client: openai.OpenAI, field: str) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, extra_body={"ignore_eos": True, field: 5}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_choices_differ_and_each_is_its_seeds_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=PROMPT, n=3, **FIXED)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(PROMPT))
    for choice in answer.choices:
        seed = choice.seed  # type: ignore[attr-defined]
        again = client.completions.create(prompt=PROMPT, **{**FIXED, "seed": seed})
        assert again.choices[0].text == choice.text
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(prompt=PROMPT, n=3, stream=True, **FIXED):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in answer.choices]


def test_several_prompts_of_every_kind(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "def add(a, b):"]
    single = [client.completions.create(prompt=p, **FIXED).choices[0].text for p in prompts]
    ids = [TOKENIZER.encode(prompt) for prompt in prompts]
    for batch in (prompts, ids):
        answer = client.completions.create(prompt=batch, **FIXED)
        assert [choice.text for choice in answer.choices] == single
    assert client.completions.create(prompt=ids[0], **FIXED).choices[0].text == single[0]


def test_the_seed_is_reported_and_gives_the_text_again(client: openai.OpenAI) -> None:
    unseeded = {**FIXED, "seed": None}
    one = client.completions.create(prompt=PROMPT, **unseeded)
    two = client.completions.create(prompt=PROMPT, **unseeded)
    assert one.choices[0].text != two.choices[0].text
    seed = one.seed  # type: ignore[attr-defined]
    again = client.completions.create(prompt=PROMPT, **{**FIXED, "seed": seed})
    assert again.choices[0].text == one.choices[0].text


def test_speculation_changes_nothing_but_the_figures(client: openai.OpenAI) -> None:
    def run(enabled: bool) -> Any:
        return client.completions.create(
            prompt="ab ab ab ab ab",
            **{**FIXED, "max_tokens": 200},
            extra_body={"speculation": {"enabled": enabled}, "return_provenance": True},
        ).choices[0]

    run(True)  # the drafts learn the text
    on, off = run(True), run(False)
    assert on.text == off.text
    assert on.speculation["accepted_tokens"] > 0
    assert off.speculation["drafted_tokens"] == 0
    assert "".join(token["text"] for token in on.provenance) == on.text
    drafted = sum(token["drafted"] for token in on.provenance)
    assert drafted == on.speculation["accepted_tokens"]
    assert not any(token["drafted"] for token in off.provenance)


def test_logit_bias_and_penalties(client: openai.OpenAI) -> None:
    forced: Any = client.completions.create(
        prompt=PROMPT,
        logit_bias={"77": 100},
        extra_body={"return_token_ids": True, "ignore_eos": True},
        **{**FIXED, "temperature": 0},
    )
    assert set(forced.choices[0].token_ids) == {77}
    varied: Any = client.completions.create(
        prompt=PROMPT,
        logit_bias={"77": 30},
        presence_penalty=2,
        frequency_penalty=2,
        extra_body={"return_token_ids": True, "ignore_eos": True, "repetition_penalty": 2.0},
        **{**FIXED, "temperature": 0},
    )
    assert len(set(varied.choices[0].token_ids)) > 1


def test_log_probabilities_of_completions(client: openai.OpenAI) -> None:
    greedy = {**FIXED, "temperature": 0, "max_tokens": 12}
    answer = client.completions.create(prompt=PROMPT, logprobs=3, **greedy)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert answer.usage is not None
    assert len(found.tokens) == answer.usage.completion_tokens
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert logprob <= 0
        # Greedy takes the likeliest.
        assert max(top.values()) == pytest.approx(logprob)
        assert token in top
    streamed = list(client.completions.create(prompt=PROMPT, logprobs=3, stream=True, **greedy))
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [t for part in parts if part for t in part.tokens or []] == found.tokens
    assert [o for part in parts if part for o in part.text_offset or []] == found.text_offset


def test_log_probabilities_of_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=CHAT, logprobs=True, top_logprobs=2, **{**FIXED, "max_tokens": 8}
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert answer.usage is not None
    assert len(found.content) == answer.usage.completion_tokens
    for entry in found.content:
        assert len(entry.top_logprobs) == 2
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token


def test_a_chats_stream_begins_with_the_role_alone(client: openai.OpenAI) -> None:
    asked: Any = {"messages": CHAT, "n": 2, "logprobs": True, **FIXED, "max_tokens": 8}
    firsts: dict[int, Any] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        firsts.setdefault(chunk.choices[0].index, chunk.choices[0])
    assert sorted(firsts) == [0, 1]
    for first in firsts.values():
        assert first.delta.model_dump(exclude_unset=True) == {"role": "assistant", "content": ""}
        assert first.logprobs is None
    # The client's own way to join chunks takes the first one of the second choice twice.
    with client.chat.completions.stream(**asked) as stream:
        stream.until_done()
        joined = stream.current_completion_snapshot
    whole = client.chat.completions.create(**asked)
    for found, expected in zip(joined.choices, whole.choices, strict=True):
        assert found.logprobs is not None
        assert expected.logprobs is not None
        assert found.message.content == expected.message.content
        assert [token.token for token in found.logprobs.content or ()] == [
            token.token for token in expected.logprobs.content or ()
        ]


def test_echo(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt=PROMPT, **FIXED).choices[0].text
    assert client.completions.create(prompt=PROMPT, echo=True, **FIXED).choices[0].text == (
        PROMPT + plain
    )
    chunks = client.completions.create(prompt=PROMPT, echo=True, stream=True, **FIXED)
    assert joined(chunks) == PROMPT + plain


def test_fields_that_cannot_change_the_text_are_taken(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=CHAT, **FIXED).choices[0]
    beside = client.chat.completions.create(
        messages=CHAT,
        user="someone",
        metadata={"a": "b"},
        store=False,
        tools=[],
        response_format={"type": "text"},
        **FIXED,
    ).choices[0]
    assert plain.message.content
    assert (beside.message.content, beside.finish_reason) == (
        plain.message.content,
        plain.finish_reason,
    )
    assert beside.message.tool_calls is None


def test_a_client_that_goes_away_frees_its_place(client: openai.OpenAI, http: httpx.Client) -> None:
    long: Any = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 480,
        "extra_body": {"ignore_eos": True, "speculation": {"enabled": False}},
    }
    with client.completions.create(stream=True, **long) as chunks:
        next(iter(chunks))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(n=4, **long)
    eventually(lambda: is_idle(http))


def test_many_clients_at_once(client: openai.OpenAI, http: httpx.Client) -> None:
    def run(number: int) -> str:
        asked: Any = {**FIXED, "seed": number, "max_tokens": 10 + 7 * number}
        if number % 3 == 0:
            with client.completions.create(prompt=PROMPT, stream=True, **asked) as chunks:
                return next(iter(chunks)).choices[0].text
        return joined(client.completions.create(prompt=PROMPT, stream=True, **asked))

    alone = [run(number) for number in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        together = list(pool.map(run, range(12)))
    for number in range(12):
        if number % 3:
            assert together[number] == alone[number]
    eventually(lambda: is_idle(http))


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(prompt=[5] * (CONTEXT_LENGTH + 1), **FIXED)
    assert long.value.code == "context_length_exceeded"
    fitting = {**FIXED, "prompt": [5] * 500, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**fitting | {"max_tokens": CONTEXT_LENGTH - 500})
    assert whole.usage is not None
    assert whole.usage.total_tokens == CONTEXT_LENGTH
    with pytest.raises(openai.BadRequestError) as much:
        client.completions.create(**fitting | {"max_tokens": CONTEXT_LENGTH - 499})
    assert (much.value.code, much.value.param) == ("context_length_exceeded", "max_tokens")
    assert "12 are left" in much.value.message
    with pytest.raises(openai.BadRequestError) as hot:
        client.completions.create(prompt=PROMPT, **{**FIXED, "temperature": -1})
    assert hot.value.param == "temperature"


def test_errors_before_the_first_token_of_a_stream_have_a_status(http: httpx.Client) -> None:
    body = {"prompt": [5] * (CONTEXT_LENGTH + 1), "stream": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_requests_have_names(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"x-request-id": "my-name"})
    assert answer.headers["x-request-id"] == "my-name"
    assert len(http.get("/v1/models").headers["x-request-id"]) >= 8


def test_server_sent_events(http: httpx.Client) -> None:
    with http.stream(
        "POST", "/v1/completions", json={**FIXED, "prompt": "x", "stream": True}
    ) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in got.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: ")) for line in lines[:-1])
