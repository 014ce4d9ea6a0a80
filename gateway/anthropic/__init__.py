"""Anthropic's Messages API, built on chat completions."""
