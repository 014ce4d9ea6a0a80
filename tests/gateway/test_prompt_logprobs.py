"""Log-probabilities of prompts through every front, by the official client, against transformers in
float32.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import torch
from google.protobuf import json_format
from transformers import AutoModelForCausalLM

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.cli.stack import LocalStack
from foredraft.text.tokenizer import Tokenizer
from testing.stack import CONTEXT_LENGTH

TEXT = "The quick brown fox jumps over the lazy dog, again and again"
Scores = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def scores(model: Path) -> Scores:
    """Computes log-probabilities of tokens, float32 [tokens, vocab]; row i is for token i + 1."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.no_grad()
    def found(ids: list[int]) -> torch.Tensor:
        return reference(torch.tensor([ids])).logits[0].log_softmax(-1)

    return found


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_dir(model)


def expected(table: torch.Tensor, ids: list[int]) -> list[float]:
    return [table[i, token].item() for i, token in enumerate(ids[1:])]


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(
    client: openai.OpenAI, tokenizer: Tokenizer, scores: Scores, max_tokens: int, stream: bool
) -> None:
    asked: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": max_tokens, "temperature": 0}
    answer = client.completions.create(**asked, echo=True, logprobs=2, stream=stream)
    choices = [event.choices[0] for event in answer] if stream else [answer.choices[0]]
    text = "".join(choice.text for choice in choices)
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens, own, tops, offsets = (
        [each for part in parts for each in getattr(part, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    prompt = tokenizer.encode(TEXT)
    plain = client.completions.create(**asked, extra_body={"return_token_ids": True})
    ids = [*prompt, *plain.choices[0].model_extra["token_ids"]]
    assert text == TEXT + plain.choices[0].text
    assert len(ids) == len(prompt) + max_tokens == len(tokens)
    table = scores(ids)
    assert [own[0], tops[0]] == [None, None]
    assert own[1:] == pytest.approx(expected(table, ids), abs=1e-4)
    for row, top in zip(table, tops[1:], strict=False):
        # Tokens without text look alike: the likeliest of them stays.
        assert max(top.values()) == pytest.approx(row.max().item(), abs=1e-4)
    for token, offset in list(zip(tokens, offsets, strict=True))[1 : len(prompt)]:
        assert TEXT[offset:].startswith(token)


def test_a_prompt_that_fills_the_context(client: openai.OpenAI, scores: Scores) -> None:
    """Evaluations send such prompts, and ask for no tokens."""
    ids = [65 + 7 * i % 60 for i in range(CONTEXT_LENGTH)]

    def ask(prompt: list[int], max_tokens: int, **fields: Any) -> Any:
        asked: Any = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens}
        return client.completions.create(**asked, **fields)

    answer = ask(ids, 0, echo=True, logprobs=0)
    found = answer.choices[0].logprobs.token_logprobs
    assert found[1:] == pytest.approx(expected(scores(ids), ids), abs=1e-4)
    assert answer.usage.prompt_tokens == CONTEXT_LENGTH
    by_token = ask(ids, 0, extra_body={"prompt_logprobs": 0}).choices[0].model_extra
    assert len(by_token["prompt_logprobs"]) == CONTEXT_LENGTH
    assert ask(ids, 0).choices[0].finish_reason == "length"
    for prompt, max_tokens in ((ids, 1), ([*ids, 65], 0)):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(prompt, max_tokens, echo=True, logprobs=0)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "fields"), [(f"</s></s>{TEXT}", {}), (TEXT, {"truncate_prompt_tokens": 3})]
)
def test_offsets_are_those_of_the_echoed_text(
    client: openai.OpenAI, prompt: str, fields: dict[str, Any], stream: bool
) -> None:
    bias = {str(token): 100 for token in range(70, 74)}  # letters
    asked: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "logit_bias": bias}
    answer = client.completions.create(
        **asked, echo=True, logprobs=0, stream=stream, extra_body=fields
    )
    choices = [event.choices[0] for event in answer] if stream else [answer.choices[0]]
    text = "".join(choice.text for choice in choices)
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in parts for token in part.tokens or []]
    offsets = [offset for part in parts for offset in part.text_offset or []]
    special = ("<s>", "</s>")
    shown = [pair for pair in zip(tokens, offsets, strict=True) if pair[0] not in special]
    assert text.startswith(prompt)
    assert shown[-1][1] == len(text) - len(shown[-1][0])
    for token, offset in shown:
        assert text[offset:].startswith(token), (token, offset, text)


def test_prompts_of_a_batch_have_each_its_own(client: openai.OpenAI, scores: Scores) -> None:
    prompts = [[65, 66, 67], [300], [70, 71, 72, 73, 74, 75]]
    answer = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=1, echo=True, logprobs=0
    )
    for ids, choice in zip(prompts, answer.choices, strict=True):
        assert choice.logprobs is not None
        found = choice.logprobs.token_logprobs
        assert found is not None
        assert len(found) == len(ids) + 1
        assert found[1 : len(ids)] == pytest.approx(expected(scores(ids), ids), abs=1e-4)


def check_by_token(found: list[Any], ids: list[int], table: torch.Tensor, count: int) -> None:
    """Checks vLLM's form: for each token itself and the likeliest, by id, with their ranks."""
    assert found[0] is None
    assert len(found) == len(ids)
    for row, token, entry in zip(table, ids[1:], found[1:], strict=False):
        best = row.argsort(descending=True, stable=True).tolist()
        assert set(entry) == {str(each) for each in (token, *best[:count])}
        assert len(entry) - count in (0, 1)
        for name, value in entry.items():
            assert value["logprob"] == pytest.approx(row[int(name)].item(), abs=1e-4)
            # Equal ones share a rank.
            least = 1 + int((row > row[int(name)] + 1e-4).sum())
            assert least <= value["rank"] <= 1 + best.index(int(name))


def test_vllms_prompt_logprobs(
    client: openai.OpenAI, http: httpx.Client, tokenizer: Tokenizer, scores: Scores
) -> None:
    body = {"prompt_logprobs": 3}
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=2, extra_body=body)
    ids = tokenizer.encode(TEXT)
    check_by_token(answer.choices[0].model_extra["prompt_logprobs"], ids, scores(ids), 3)
    messages: Any = [{"role": "user", "content": TEXT}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, extra_body={"prompt_logprobs": 0}
    )
    ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    check_by_token(chat.model_extra["prompt_logprobs"], ids, scores(ids), 0)


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_sglangs_logprob_start_len(
    http: httpx.Client, tokenizer: Tokenizer, scores: Scores, start: int, stream: bool
) -> None:
    body = {
        "text": TEXT,
        "sampling_params": {"max_new_tokens": 3, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 2,
        "stream": stream,
    }
    answer = http.post("/generate", json=body)
    if stream:
        last = answer.text.strip().splitlines()[-3]
        meta = json.loads(last.removeprefix("data: "))["meta_info"]
    else:
        meta = answer.json()["meta_info"]
    ids = tokenizer.encode(TEXT)
    table = scores(ids)
    found, tops = meta["input_token_logprobs"], meta["input_top_logprobs"]
    assert [entry[1] for entry in found] == ids[start:]
    assert [found[0], tops[0]] == [[None, ids[start], None], None]
    assert [entry[0] for entry in found[1:]] == pytest.approx(
        expected(table, ids)[start:], abs=1e-4
    )
    for row, top in zip(table[start:], tops[1:], strict=False):
        assert [entry[0] for entry in top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
    assert len(meta["output_token_logprobs"]) == 3


def test_grpc(stack: LocalStack, tokenizer: Tokenizer, scores: Scores) -> None:
    ids = tokenizer.encode(TEXT)
    sampling = {"prompt_logprobs": 1, "prompt_logprobs_from": 4, "max_new_tokens": 2}
    request = json_format.ParseDict(
        {"text": TEXT, "sampling": sampling}, inference_pb2.GenerateRequest()
    )
    with grpc.insecure_channel(stack.urls["grpc"]) as channel:
        first, *rest = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
    assert [token.id for token in first.prompt_tokens] == ids[4:]
    assert not first.prompt_tokens[0].HasField("logprob")
    assert [token.logprob for token in first.prompt_tokens[1:]] == pytest.approx(
        expected(scores(ids), ids)[4:], abs=1e-4
    )
    assert not any(response.prompt_tokens for response in rest)
