"""OpenAI's Responses API over what chat completions run."""
