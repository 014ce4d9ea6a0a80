"""An answer that is held to a JSON schema, token by token."""

import json
import sys

import openai

SCHEMA = {
    "type": "object",
    "properties": {
        "language": {"enum": ["python", "go", "rust"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 99},
        "typed": {"type": "boolean"},
    },
    "required": ["language", "lines", "typed"],
    "additionalProperties": False,
}

server = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Describe a small program."}],
    response_format={"type": "json_schema", "json_schema": {"name": "program", "schema": SCHEMA}},
    max_tokens=200,
    temperature=0,
)
program = json.loads(answer.choices[0].message.content or "")
print(f"{program['lines']} lines of {program['language']}, typed: {program['typed']}")
