"""How a running server shows that it honours a field: one proof for each kind of effect."""

import json
from collections.abc import Callable
from typing import Any

import httpx

from tests.gateway.request_fields import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    SAMPLING,
    Field,
)

PROMPT = "ab ab ab ab"
MESSAGES = [{"role": "user", "content": PROMPT}]


class Ask:
    """Requests to one route that differ from a plain one by some fields."""

    def __init__(self, http: httpx.Client, route: str) -> None:
        self.http = http
        self.route = route
        self.is_native = route in (GENERATE, SAMPLING)

    def post(self, **fields: Any) -> httpx.Response:
        sampling = {"max_new_tokens": 8, "temperature": 0}
        body: dict[str, Any]
        if self.route == SAMPLING:
            body = {"text": PROMPT, "sampling_params": {**sampling, **fields}}
        elif self.route == GENERATE:
            body = {"text": PROMPT, "sampling_params": sampling, **fields}
            if "input_ids" in fields:
                del body["text"]
        else:
            body = {"max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
            if "max_completion_tokens" in fields:
                del body["max_tokens"]
            name, prompt = ("messages", MESSAGES) if self.route == CHAT else ("prompt", PROMPT)
            body.setdefault(name, prompt)
        path = GENERATE if self.is_native else self.route
        return self.http.post(path, json=body)

    def all(self, **fields: Any) -> list[dict[str, Any]]:
        """Returns every choice."""
        answer = self.post(**fields)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        if self.is_native:
            return found if isinstance(found, list) else [found]
        return list(found["choices"])

    def one(self, **fields: Any) -> dict[str, Any]:
        return self.all(**fields)[0]

    def ids(self, **fields: Any) -> list[int]:
        found = self.one(**fields)
        return list(found["output_ids"] if self.is_native else found["token_ids"])

    def text(self, **fields: Any) -> str:
        found = self.one(**fields)
        if self.route == CHAT:
            return str(found["message"]["content"])
        return str(found["text"])

    def whole(self, **fields: Any) -> dict[str, Any]:
        """Returns the whole answer, or SGLang's meta_info."""
        found: dict[str, Any] = self.post(**fields).json()
        return found["meta_info"] if self.is_native else found

    def events(self, **fields: Any) -> list[dict[str, Any]]:
        lines = self.post(**fields).text.splitlines()
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line]


def changes(ask: Ask, value: Field) -> bool:
    beside = dict(value.beside)
    return ask.ids(**beside, **{value.name: value.example}) != ask.ids(**beside)


def first_of(text: str) -> str:
    """Returns a character that stands early in a text."""
    return text[2]


def shorter(ask: Ask, field: Field) -> bool:
    return len(ask.ids(**{field.name: 3})) == 3


def stops(ask: Ask, field: Field) -> bool:
    text = ask.text()
    stop = first_of(text)
    return ask.text(stop=stop) == text[: text.index(stop)]


def keeps_stop(ask: Ask, field: Field) -> bool:
    text = ask.text()
    stop = first_of(text)
    return ask.text(stop=stop, **{field.name: True}) == text[: text.index(stop) + 1]


def waits_for_stop(ask: Ask, field: Field) -> bool:
    stop = ask.text()[0]
    found = [len(ask.ids(stop=stop, **{field.name: least})) for least in (0, 6)]
    return found[0] < 6 <= found[1]


def stops_at_token(ask: Ask, field: Field) -> bool:
    ids = ask.ids()
    return ask.ids(**{field.name: [ids[2]]}) == ids[: ids.index(ids[2]) + 1]


def goes_on(ask: Ask, field: Field) -> bool:
    # The token that ends a text is forced; it ends the text unless that is ignored.
    eos = {"logit_bias": {"1": 100, "2": 100}}
    lengths = [len(ask.ids(**eos, **{field.name: ignore})) for ignore in (False, True)]
    return lengths[0] <= lengths[1] == 8


def is_greedy(ask: Ask, field: Field) -> bool:
    beside = dict(field.beside)
    return ask.ids(**beside, **{field.name: field.example}) == ask.ids()


def names_choices(ask: Ask, field: Field) -> bool:
    hot = {"temperature": 2.0}
    found = ask.all(n=2, **hot)
    return len(found) == 2 and len(ask.all(**hot)) == 1


def seeds(ask: Ask, field: Field) -> bool:
    def ids(seed: int) -> list[int]:
        return ask.ids(**{"temperature": 1.0, field.name: seed})

    return ids(7) == ids(7) != ids(8)


def biases(ask: Ask, field: Field) -> bool:
    return ask.ids(logit_bias={"65": 100}) == [65] * 8


def never_says(ask: Ask, field: Field) -> bool:
    always = {"logit_bias": {"65": 100}}
    word = ask.http.post("/detokenize", json={"tokens": [65]}).json()["text"]
    return ask.ids(**always) == [65] * 8 and 65 not in ask.ids(bad_words=[word], **always)


def streams(ask: Ask, field: Field) -> bool:
    events = ask.events(stream=True)
    if ask.is_native:
        return bool(events[-1]["text"] == ask.text())
    pieces = [event["choices"][0] for event in events]
    key = "delta" if ask.route == CHAT else "text"
    texts = [piece[key].get("content", "") if key == "delta" else piece[key] for piece in pieces]
    return "".join(texts) == ask.text() and sum(p["num_tokens"] for p in pieces) == 8


def tells_usage(ask: Ask, field: Field) -> bool:
    usage = ask.events(stream=True, stream_options={"include_usage": True})[-1]["usage"]
    every = ask.events(stream=True, stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in every]
    return bool(usage["completion_tokens"] == counts[-1] == 8) and counts == sorted(counts)


def has_logprobs(ask: Ask, field: Field) -> bool:
    found = ask.one(**dict(field.beside), **{field.name: field.example})
    if ask.is_native:
        meta = found["meta_info"]
        if field.name == "top_logprobs_num":
            return len(meta["output_top_logprobs"][0]) == 2
        entry = meta["output_token_logprobs"][0]
        return (entry[2] is not None) == (field.name == "return_text_in_logprobs")
    logprobs = found["logprobs"]
    if ask.route == COMPLETIONS:
        return len(logprobs["top_logprobs"][0]) == 2
    return len(logprobs["content"]) == 8 and len(logprobs["content"][0]["top_logprobs"]) == (
        2 if field.name == "top_logprobs" else 0
    )


def scores_prompt(ask: Ask, field: Field) -> bool:
    found = ask.whole(**dict(field.beside), **{field.name: field.example})
    if ask.is_native:
        num_tokens = found["prompt_tokens"]
        return len(found["input_token_logprobs"]) == num_tokens - 1
    holder = found if ask.route == CHAT else found["choices"][0]
    return len(holder["prompt_logprobs"]) == found["usage"]["prompt_tokens"]


def is_name(ask: Ask, field: Field) -> bool:
    return bool(ask.whole(**{field.name: "a-name"})["id"] == "a-name")


def is_taken(ask: Ask, field: Field) -> bool:
    """Checks a field whose effect no answer shows: right values pass, wrong ones do not."""
    return ask.ids(**{field.name: field.example}) == ask.ids()


def other_prompt(ask: Ask, field: Field) -> bool:
    return ask.whole(**{field.name: field.example}) != ask.whole() and changes(ask, field)


def fewer_prompt_tokens(ask: Ask, field: Field) -> bool:
    def count(**fields: Any) -> int:
        found = ask.whole(**fields)
        return int(found["usage"]["prompt_tokens"])

    before, after = count(), count(**{field.name: field.example})
    return (
        after == field.example if isinstance(field.example, int) and after == 2 else after < before
    )


def refuses_others(*others: Any) -> Callable[[Ask, Field], bool]:
    def check(ask: Ask, field: Field) -> bool:
        beside = dict(field.beside)
        bad = [ask.post(**beside, **{field.name: other}).status_code for other in others]
        good = ask.post(**beside, **{field.name: field.example}).status_code
        return good == 200 and set(bad) <= {400, 404}

    return check


def shows_special(ask: Ask, field: Field) -> bool:
    special = {"logit_bias": {"0": 100}, "ignore_eos": True}
    return len(ask.text(**special, skip_special_tokens=False)) > len(
        ask.text(**special, skip_special_tokens=True)
    )


def has_provenance(ask: Ask, field: Field) -> bool:
    found = ask.one(return_provenance=True)
    return len((found["meta_info"] if ask.is_native else found)["provenance"]) == 8


def echoes(ask: Ask, field: Field) -> bool:
    return ask.text(echo=True) == PROMPT + ask.text()


def same_without_drafts(ask: Ask, field: Field) -> bool:
    off = ask.one(speculation={"enabled": False})
    stats = off["meta_info"] if ask.is_native else off["speculation"]
    drafted = stats["drafted"] if ask.is_native else stats["drafted_tokens"]
    return drafted == 0 and ask.ids(speculation={"enabled": False}) == ask.ids()


def chooses(ask: Ask, field: Field) -> bool:
    text = ask.text(**{field.name: field.example})
    return text in ("yes", "no", '"yes"', '"no"', "<f>1</f>")


def changes_prompt(ask: Ask, field: Field) -> bool:
    plain = ask.whole()["usage"]["prompt_tokens"]
    return bool(ask.whole(tools=field.example)["usage"]["prompt_tokens"] > plain)


def leaves_open(ask: Ask, field: Field) -> bool:
    # Neither the message's end nor the opening of another are there.
    beside = dict(field.beside)
    usages = [
        ask.whole(**beside, **more)["usage"]["prompt_tokens"]
        for more in ({field.name: True}, {"add_generation_prompt": False}, {})
    ]
    bad = ask.post(**beside, add_generation_prompt=True, **{field.name: True})
    return usages == sorted(set(usages)) and bad.status_code == 400


def calls(ask: Ask, field: Field) -> bool:
    message = ask.one(**dict(field.beside), tool_choice="required", max_tokens=190)["message"]
    return bool(message["tool_calls"][0]["function"]["name"] == "f")


def calls_once(ask: Ask, field: Field) -> bool:
    asked = {**dict(field.beside), "tool_choice": "required", "max_tokens": 190}
    return len(ask.one(parallel_tool_calls=False, **asked)["message"]["tool_calls"]) == 1


# What is not here changes the tokens.
PROOFS: dict[str, Callable[[Ask, Field], bool]] = {
    "prompt": other_prompt,
    "messages": other_prompt,
    "text": other_prompt,
    "input_ids": other_prompt,
    "sampling_params": lambda ask, field: len(ask.ids(sampling_params=field.example)) == 3,
    "echo": echoes,
    "logprobs": has_logprobs,
    "top_logprobs": has_logprobs,
    "return_logprob": has_logprobs,
    "return_text_in_logprobs": has_logprobs,
    "top_logprobs_num": has_logprobs,
    "logprob_start_len": scores_prompt,
    "prompt_logprobs": scores_prompt,
    "best_of": refuses_others(2, 0),
    "modalities": refuses_others(["audio"], []),
    "model": refuses_others("other"),
    "logit_bias": biases,
    "bad_words": never_says,
    "allowed_token_ids": lambda ask, field: set(ask.ids(allowed_token_ids=[66, 67])) <= {66, 67},
    "max_tokens": shorter,
    "max_completion_tokens": shorter,
    "max_new_tokens": shorter,
    "min_tokens": waits_for_stop,
    "min_new_tokens": waits_for_stop,
    "n": names_choices,
    "seed": seeds,
    "sampling_seed": seeds,
    "stop": stops,
    "stop_token_ids": stops_at_token,
    "include_stop_str_in_output": keeps_stop,
    "no_stop_trim": keeps_stop,
    "ignore_eos": goes_on,
    "skip_special_tokens": shows_special,
    "stream": streams,
    "stream_options": tells_usage,
    "top_p": is_greedy,
    "top_k": is_greedy,
    "min_p": is_greedy,
    "rid": is_name,
    "request_id": is_name,
    "priority": is_taken,
    "timeout": refuses_others(0, -1.0),
    "return_token_ids": lambda ask, field: "token_ids" in ask.one(),
    "return_provenance": has_provenance,
    "speculation": same_without_drafts,
    "truncate_prompt_tokens": fewer_prompt_tokens,
    "add_special_tokens": fewer_prompt_tokens,
    "add_generation_prompt": fewer_prompt_tokens,
    "chat_template_kwargs": fewer_prompt_tokens,
    # It can be seen with --reasoning-parser alone: test_reasoning.py.
    "separate_reasoning": is_taken,
    "continue_final_message": leaves_open,
    "response_format": chooses,
    "tools": changes_prompt,
    "tool_choice": calls,
    "parallel_tool_calls": calls_once,
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), chooses),
    "structured_outputs": chooses,
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), chooses),
    "documents": refuses_others("a", [1]),
}
