"""OpenAI's Responses API, built on chat completions."""
