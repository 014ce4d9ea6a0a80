"""Tests what docs/request-fields.md says of every field.

Honoured fields have an effect; others are refused by name or change nothing.
"""

import inspect
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from gateway.native.schemas import GenerateBody, NativeSampling
from gateway.openai.schemas import ChatBody, CompletionBody
from tests.gateway.field_proofs import PROOFS, Ask, changes
from tests.gateway.request_fields import (
    CHAT,
    COMPLETIONS,
    FIELDS,
    GENERATE,
    GRAMMARS,
    SAMPLING,
    Field,
)

# What the client keeps for itself.
CLIENTS_OWN = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
ROWS = [(route, field) for field in (*FIELDS, *GRAMMARS) for route in field.routes]


def ids_of(row: tuple[str, Field]) -> str:
    return f"{row[0]} {row[1].name} {row[1].origin}"


@pytest.mark.parametrize(("route", "field"), ROWS, ids=map(ids_of, ROWS))
def test_field(http: httpx.Client, route: str, field: Field) -> None:
    ask = Ask(http, route)
    given = {**dict(field.beside), field.name: field.example}
    if field.fate == "honoured":
        assert PROOFS.get(field.name, changes)(ask, field)
        return
    answer = ask.post(**given)
    if field.fate == "ignored":
        assert answer.status_code == 200, answer.text
        assert ask.ids(**given) == ask.ids(**dict(field.beside))
        return
    assert answer.status_code == 400, answer.text
    prefix = "sampling_params." if route == SAMPLING else ""
    assert answer.json()["error"]["param"].startswith(prefix + field.name)
    if field.example is not None:
        absent = ask.post(**dict(field.beside), **{field.name: None})
        assert absent.status_code == 200, absent.text


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (COMPLETIONS, {"use_beam_search": False, "length_penalty": 1.0, "detokenize": True}),
        (COMPLETIONS, {"logits_processors": [], "vllm_xargs": {}, "rid": None, "cache_salt": ""}),
        (CHAT, {"echo": False, "best_of": 1, "add_special_tokens": False}),
        (CHAT, {"include_reasoning": True, "return_hidden_states": False, "enable_thinkin": None}),
        # What SGLang's benchmark sends.
        (GENERATE, {"return_routed_experts": False, "lora_path": None, "logprob_start_len": -1}),
        (GENERATE, {"custom_logit_processor": "", "return_hidden_states": False}),
        (SAMPLING, {"stream_interval": None, "beam_width": None}),
    ],
)
def test_a_field_that_asks_for_nothing_counts_as_absent(
    http: httpx.Client, route: str, fields: dict[str, Any]
) -> None:
    ask = Ask(http, route)
    assert ask.ids(**fields) == ask.ids()


@pytest.mark.parametrize(
    "fields", [{"enable_thinking": False}, {"use_beam_search": 2}, {"vllm_xarg": {}}]
)
def test_beside_one_that_asks_for_nothing_others_are_refused(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    answer = Ask(http, CHAT).post(rid=None, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(fields))


KNOWN = {
    COMPLETIONS: set(CompletionBody.model_fields),
    CHAT: set(ChatBody.model_fields),
    GENERATE: set(GenerateBody.model_fields),
    SAMPLING: set(NativeSampling.model_fields),
}


@pytest.mark.parametrize(
    ("route", "method"), [(COMPLETIONS, Completions.create), (CHAT, ChatCompletions.create)]
)
def test_every_parameter_of_the_openai_client_is_there(
    route: str, method: Callable[..., Any]
) -> None:
    wanted = set(inspect.signature(method).parameters) - CLIENTS_OWN
    assert wanted <= {field.name for where, field in ROWS if where == route}


@pytest.mark.parametrize("route", list(KNOWN))
def test_every_field_that_is_taken_is_there_once(route: str) -> None:
    names = [field.name for where, field in ROWS if where == route]
    assert len(names) == len(set(names))
    shared = {"metadata", "store", "service_tier", "safety_identifier"} | {
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    }  # fmt: skip
    assert KNOWN[route] - set(names) <= (shared if route == COMPLETIONS else set())
