"""Log-probabilities that JSON has no word for."""

import json
import math

import pytest

from gateway.openai.prompt_logprobs import finite


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1e9, -9999.5])
def test_what_json_cannot_say_is_said_as_impossible(value: float) -> None:
    assert finite(value) == -9999.0
    json.dumps(finite(value), allow_nan=False)


def test_what_it_can_stays() -> None:
    assert [finite(value) for value in (-0.0, -1.5, -9998.5)] == [0.0, -1.5, -9998.5]
