"""Anthropic's Messages API over what chat completions run."""
