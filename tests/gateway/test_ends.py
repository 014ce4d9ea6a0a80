"""How answers end: stop strings, stop tokens, end tokens, a least number of tokens."""

from typing import Any

import openai
import pytest

from foredraft.text.tokenizer import Tokenizer
from testing import tiny_tokenizers
from testing.checkpoints import EOS

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
PROMPT = "The quick brown fox"
FIXED: Any = {"model": "tiny", "max_tokens": 40, "temperature": 0.8, "seed": 7}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_never_leak_and_usage_ends_there(client: openai.OpenAI, stream: bool) -> None:
    asked = {**FIXED, "max_tokens": 120, "temperature": 0}
    extra = {"return_token_ids": True, "return_provenance": True}
    whole: Any = client.completions.create(prompt=PROMPT, **asked, extra_body=extra).choices[0]
    # A stop string that spans tokens, after the first third. Whether half a character is one is
    # only known with the next token, so the count below could not tell.
    start = len(whole.text) // 3
    spans = (whole.text[i : i + 5] for i in range(start, len(whole.text) - 5))
    stop = next(span for span in spans if "�" not in span)
    before = whole.text[: whole.text.index(stop)]
    created: Any = client.completions.create(
        prompt=PROMPT,
        stop=["never said", stop],
        stream=stream,
        **asked,
        extra_body=extra,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    chunks = list(created) if stream else [created]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == before
    tokens = [token for choice in choices for token in choice.provenance]
    assert "".join(token["text"] for token in tokens) == before
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == stop
    # Counted: the shortest run of tokens whose text holds the stop string.
    ids = whole.token_ids
    needed = next(n for n in range(len(ids) + 1) if stop in TOKENIZER.decode(ids[:n]))
    assert chunks[-1].usage.completion_tokens == needed == len(tokens)


def test_the_stop_string_can_be_kept(client: openai.OpenAI) -> None:
    asked = {**FIXED, "temperature": 0}
    whole = client.completions.create(prompt=PROMPT, **asked).choices[0].text
    stop = whole[5:8]
    kept = client.completions.create(
        prompt=PROMPT, stop=stop, extra_body={"include_stop_str_in_output": True}, **asked
    )
    assert kept.choices[0].text == whole[: whole.index(stop) + len(stop)]


def test_stop_tokens(client: openai.OpenAI) -> None:
    asked = {**FIXED, "temperature": 0}
    whole: Any = client.completions.create(
        prompt=PROMPT, extra_body={"return_token_ids": True}, **asked
    ).choices[0]
    stop = whole.token_ids[6]
    first = whole.token_ids.index(stop)
    cut: Any = client.completions.create(
        prompt=PROMPT, extra_body={"stop_token_ids": [stop], "return_token_ids": True}, **asked
    ).choices[0]
    assert cut.token_ids == whole.token_ids[: first + 1]
    assert cut.text == TOKENIZER.decode(whole.token_ids[:first])
    assert cut.stop_reason == stop


def test_an_end_token_is_no_stop_reason(client: openai.OpenAI) -> None:
    """Like vLLM's, stop_reason names an end token only if the client gave it."""
    asked = {**FIXED, "temperature": 0, "logit_bias": {str(EOS): 100}}
    ended: Any = client.completions.create(prompt=PROMPT, **asked).choices[0]
    assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", None, "")
    extra = {"stop_token_ids": [EOS]}
    given: Any = client.completions.create(prompt=PROMPT, extra_body=extra, **asked).choices[0]
    assert (given.finish_reason, given.stop_reason) == ("stop", EOS)


def test_min_tokens_and_ignore_eos(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        prompt=PROMPT, extra_body={"min_tokens": 40, "stop_token_ids": list(range(300))}, **FIXED
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40
