"""Request fields of OpenAI's Responses and Anthropic's Messages, and what becomes of them: data for
tests and docs/request-fields.md.
"""

from typing import Any

from tests.gateway.request_fields import EXTRA_SAMPLING, Fate, Field

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def _rows(route: str, origin: Any, fate: Fate, *rows: tuple[Any, ...]) -> tuple[Field, ...]:
    return tuple(Field((route,), name, origin, fate, how, example) for name, example, how in rows)


def _extensions(route: str) -> tuple[Field, ...]:
    """Returns the extension fields of chat completions."""
    return (
        *_rows(
            route, "vLLM", "honoured",
            *(row[:3] for row in EXTRA_SAMPLING),
            ("min_tokens", 2, "neither stop strings nor the end before"),
            ("priority", 3, "higher runs first"),
            ("request_id", "a-name", "a name for /abort_request"),
            ("chat_template_kwargs", {"a": 1}, "variables of the template"),
        ),
        *_rows(
            route, "OpenAI", "honoured",
            ("seed", 7, "64 bits, as in chat completions; a random one is told"),
            ("presence_penalty", 1.0, "-2 to 2, as in chat completions"),
            ("frequency_penalty", 1.0, "-2 to 2, as in chat completions"),
            ("logit_bias", {"65": 10}, "token ids to -100 to 100, as in chat completions"),
        ),
        *_rows(
            route, "Foredraft", "honoured",
            ("timeout", 60.0, "seconds; at most --request-timeout"),
            ("speculation", {"enabled": False}, "as in chat completions; the text stays the same"),
        ),
    )  # fmt: skip


RESPONSES_FIELDS: tuple[Field, ...] = (
    *_rows(
        RESPONSES, "OpenAI", "honoured",
        ("model", "tiny", "the served name, or empty; another is 404"),
        ("input", "x", "a text, or items: messages, function calls, their outputs, reasoning; text alone"),
        ("instructions", "x", "a system message before the input; not carried over by previous_response_id"),
        ("max_output_tokens", 3, "most tokens; the rest of the context when absent"),
        ("temperature", 0.5, "0 to 100"),
        ("top_p", 0.5, "0 to 1; 0 is the likeliest token alone"),
        ("top_logprobs", 2, "0 to 20 alternatives of each token of the text"),
        ("text", {"format": {"type": "text"}}, "format: text, json_object, json_schema; a schema is always kept to; beside tools the answer is calls or JSON"),
        ("reasoning", {"summary": "auto"}, "effort as reasoning_effort in chat completions; reasoning comes whole, not in summaries"),
        ("tools", [_TOOL], "functions; built-in tools are refused"),
        ("tool_choice", "none", "none, auto, required, a function, or allowed_tools"),
        ("parallel_tool_calls", False, "false: one call at most"),
        ("previous_response_id", None, "goes on from a response of the same key, while it is kept; otherwise 404"),
        ("store", False, "kept in memory for --response-lifetime, within --response-store-mb, unless false"),
        ("metadata", {"a": "b"}, "up to 16 texts, told with the response"),
        ("include", ["message.output_text.logprobs"], "log-probabilities; reasoning.encrypted_content changes nothing, as reasoning comes in plain"),
        ("stream", True, "server-sent events"),
        ("truncation", "disabled", "disabled; auto is refused"),
    ),
    *_rows(
        RESPONSES, "OpenAI", "ignored",
        ("stream_options", None, "include_obfuscation: nothing is obfuscated"),
        ("user", "me", "keys have names; a user changes nothing"),
        ("safety_identifier", "me", "nothing is reported"),
        ("service_tier", "auto", "there is one tier"),
        ("prompt_cache_key", "a", "prefixes are found by their tokens"),
        ("prompt_cache_options", {}, "prefixes are found by their tokens"),
        ("prompt_cache_retention", "24h", "prefixes stay as long as there is room"),
        ("client_metadata", {"x-codex-installation-id": "x"}, "what Codex says of itself"),
    ),
    *_rows(
        RESPONSES, "OpenAI", "refused",
        ("background", True, "wait for the answer, or stream it"),
        ("background_options", {"completion_window": "2h"}, "answers are not made in the background"),
        ("conversation", "conv_x", "give previous_response_id"),
        ("prompt", {"id": "x"}, "give input and instructions"),
        ("context_management", [{"type": "compaction"}], "send a shorter input"),
        ("moderation", {"model": "m"}, "nothing is moderated"),
        ("max_tool_calls", 2, "there are no built-in tools"),
        ("image", {"context_compression": "auto"}, "only text"),
        ("access_programs", {"cyber": "standard"}, "there are no such programs"),
    ),
    *_rows(
        RESPONSES, "vLLM", "honoured",
        ("top_k", 1, "0 and -1 are all"),
        ("stop", "a", "up to 32 strings; they are left out of the text"),
    ),
    *_extensions(RESPONSES),
)  # fmt: skip
_ONLY_RESPONSES = frozenset(
    {
        "max_output_tokens", "temperature", "top_p", "top_logprobs", "store", "metadata", "include",
        "stream", "stream_options", "user", "safety_identifier", "service_tier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "client_metadata", "background",
        "background_options", "prompt", "context_management", "moderation", "max_tool_calls",
        "image", "access_programs", "top_k", "stop",
    }
)  # fmt: skip
# POST /v1/responses/input_tokens has these alone.
INPUT_TOKENS_FIELDS = tuple(
    field for field in RESPONSES_FIELDS if field.name not in _ONLY_RESPONSES
)

_ONLY_MESSAGES = frozenset(
    {
        "max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p", "metadata",
        "service_tier", "thread",
    }
)  # fmt: skip
_CUSTOM = {"name": "f", "input_schema": {"type": "object"}}

MESSAGES_FIELDS: tuple[Field, ...] = (
    *_rows(
        MESSAGES, "Anthropic", "honoured",
        ("model", "tiny", "the served name, or empty; another is 404"),
        ("messages", [{"role": "user", "content": "x"}], "text, tool_use, tool_result and thinking blocks, a line each; one role's in a row are one; the assistant's at the end is gone on with; an is_error's text begins with `Error: `"),
        ("max_tokens", 3, "most tokens; where less fits the context, that (model_context_window_exceeded)"),
        ("system", "x", "a text, or blocks of text"),
        ("stop_sequences", ["a"], "up to 32 strings; they are left out of the text"),
        ("stream", True, "Anthropic's events"),
        ("temperature", 0.5, "0 to 100"),
        ("top_k", 1, "0 and -1 are all"),
        ("top_p", 0.5, "0 to 1; 0 is the likeliest token alone"),
        ("tools", [_CUSTOM], "the client's own; cache_control is ignored"),
        ("tool_choice", {"type": "none"}, "auto, any, tool, none; disable_parallel_tool_use"),
        ("thinking", {"type": "disabled"}, "enabled and disabled set the template's switch; enabled needs --reasoning-parser; budget_tokens does not bound it"),
        ("output_config", {"format": None}, "format: json_schema, beside tools calls or JSON; effort as reasoning_effort in chat completions"),
    ),
    *_rows(
        MESSAGES, "Anthropic", "ignored",
        ("cache_control", {"type": "ephemeral"}, "prefixes are found by their tokens"),
        ("metadata", {"user_id": "x"}, "keys have names; a user changes nothing"),
        ("service_tier", "auto", "there is one tier"),
        ("speed", "standard", "there is one speed; fast is refused"),
        ("user_profile_id", "x", "keys have names; a user changes nothing"),
        ("workspace_id", "x", "keys have names; a workspace changes nothing"),
        ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "edits that clear nothing; others are refused: send a shorter conversation"),
    ),
    *_rows(
        MESSAGES, "Anthropic", "refused",
        ("container", "x", "there are no containers"),
        ("mcp_servers", [{"type": "url"}], "give the tools"),
        ("diagnostics", {"a": 1}, "there are none"),
        ("inference_geo", "us", "the server is where it is"),
        ("thread", {"type": "create"}, "conversations are not kept; Anthropic's client sends them whole then"),
    ),
    *_extensions(MESSAGES),
)  # fmt: skip
# POST /v1/messages/count_tokens has these alone.
COUNT_FIELDS = tuple(field for field in MESSAGES_FIELDS if field.name not in _ONLY_MESSAGES)
NEWER_FIELDS = (*RESPONSES_FIELDS, *MESSAGES_FIELDS)
