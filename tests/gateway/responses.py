"""Asks for responses by the official openai client."""

from typing import Any

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

FIXED: Any = {"model": "tiny", "max_output_tokens": 24, "temperature": 0.8}
SEED: Any = {"seed": 7}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a town.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"town": {"enum": ["Bern", "Rome"]}, "unit": {"enum": ["C", "F"]}},
        "required": ["town", "unit"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    },
}


def create(client: openai.OpenAI, said: Any = "Hi é", **fields: Any) -> Response:
    found: Response = client.responses.create(input=said, extra_body=SEED, **{**FIXED, **fields})
    return Response.model_validate(found.to_dict())


def chat_text(client: openai.OpenAI, messages: Any) -> tuple[str | None, int]:
    """Returns text and number of prompt tokens of chat completions for a conversation."""
    found = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=24, temperature=0.8, seed=7
    )
    assert found.usage is not None
    return found.choices[0].message.content, found.usage.prompt_tokens


def told(client: openai.OpenAI, response: Response) -> tuple[str | None, int]:
    assert response.usage is not None
    return response.output_text, response.usage.input_tokens


def events_of(client: openai.OpenAI, **fields: Any) -> list[Any]:
    stream = client.responses.create(
        input="Hi é", extra_body=SEED, stream=True, **{**FIXED, **fields}
    )
    events = [EVENT.validate_python(event.to_dict()) for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events
