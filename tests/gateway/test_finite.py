"""Numbers that JSON has no word for: in log-probabilities, and in the arguments of calls."""

import json
import math
import sys
from typing import Any

import pytest

from gateway.anthropic.answers import _object
from gateway.openai.prompt_logprobs import finite

LARGEST = sys.float_info.max


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1e9, -9999.5])
def test_what_json_cannot_say_is_said_as_impossible(value: float) -> None:
    assert finite(value) == -9999.0
    json.dumps(finite(value), allow_nan=False)


def test_what_it_can_stays() -> None:
    assert [finite(value) for value in (-0.0, -1.5, -9998.5)] == [0.0, -1.5, -9998.5]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1e999, "b": [-1e999, {"c": NaN}]}', {"a": LARGEST, "b": [-LARGEST, {"c": None}]}),
        ('{"a": 9e99', {"a": 9e99}),
        ('{"a": 1e99999999', {"a": LARGEST}),
        ('{"a": [0.5, "1e999"]}', {"a": [0.5, "1e999"]}),
    ],
)
def test_arguments_of_calls_are_json(text: str, found: dict[str, Any]) -> None:
    assert _object(text) == found
    json.dumps(_object(text), allow_nan=False)
