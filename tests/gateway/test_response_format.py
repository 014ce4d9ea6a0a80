"""response_format as SGLang's and vLLM's examples send it."""

import json
from typing import Any

import httpx
import pytest

from tests.gateway.scripted import Rig, answer

TAGS: dict[str, Any] = {
    "structures": [{"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}],
    "triggers": ["<f"],
}


def ask(http: httpx.Client, **form: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    return http.post("/v1/chat/completions", json=body)


def test_structural_tags(rig: Rig) -> None:
    rig.verifier.script = answer
    assert ask(rig.http, type="structural_tag", **TAGS).status_code == 200
    assert json.loads(rig.verifier.submitted[-1].sampling.grammar.structural_tag) == TAGS


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "structural_tag", "triggers": ["<f"]}, "response_format.structures"),
        ({"type": "structural_tag", "structures": [1]}, "response_format.structures.0"),
        ({"type": "structural_tag", **TAGS, "triggers": ["<g"]}, "response_format"),
        ({"type": "text", **TAGS}, "response_format.structures"),
        ({"type": "json_object", "triggers": ["<f"]}, "response_format.triggers"),
    ],
)
def test_tags_that_are_wrong_are_named(http: httpx.Client, form: Any, field: str) -> None:
    refused = ask(http, **form)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field, refused.text


def test_the_remedy_of_a_schema_in_the_wrong_place(http: httpx.Client) -> None:
    refused = ask(http, type="json_object", schema={"type": "object"})
    assert 'give "type": "json_schema", "json_schema": {' in refused.text.replace("\\", "")
