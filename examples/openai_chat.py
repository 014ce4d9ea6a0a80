"""A chat with the official OpenAI client: once whole, once streamed."""

import sys

import openai

server = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Write a function that adds two numbers."}],
    max_tokens=48,
    temperature=0,
)
print(answer.choices[0].message.content)

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "And one that multiplies them."}],
    max_tokens=48,
    temperature=0.7,
    seed=1,  # the same seed gives the same text, with speculation on or off
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens")
