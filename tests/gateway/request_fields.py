"""Every request field of OpenAI, SGLang's native API and vLLM, and what becomes of it: data for
tests and docs/request-fields.md.
"""

from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["honoured", "refused", "ignored"]
COMPLETIONS, CHAT, GENERATE, SAMPLING = (
    "/v1/completions",
    "/v1/chat/completions",
    "/generate",
    "/generate: sampling_params",
)
BOTH = (COMPLETIONS, CHAT)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a request, and how to test it.

    Attributes:
        routes: Routes that the field may be sent to.
        name: The client's name of the field.
        origin: API or server that the field comes from.
        fate: Outcome of sending the field.
        how: Explanation of the outcome for readers.
        example: A value that asks for something; what is refused is refused for it.
        beside: Fields that have to be sent with it.
    """

    routes: tuple[str, ...]
    name: str
    origin: Literal["OpenAI", "Anthropic", "SGLang", "vLLM", "Foredraft"]
    fate: Fate
    how: str
    example: Any
    beside: tuple[tuple[str, Any], ...] = ()


def _rows(
    routes: tuple[str, ...], origin: Any, fate: Fate, *rows: tuple[Any, ...]
) -> tuple[Field, ...]:
    return tuple(
        Field(routes, name, origin, fate, how, example, tuple(*beside))
        for name, example, how, *beside in rows
    )


# Sampling parameters that every API takes, beyond OpenAI's and Anthropic's own: name, example, how,
# fields beside it.
EXTRA_SAMPLING: tuple[tuple[Any, ...], ...] = (
    ("min_p", 1.0, "0 to 1", (("temperature", 2.0),)),
    ("repetition_penalty", 2.0, "above 0, to 2"),
    ("stop_token_ids", [97], "ids that end the text"),
    ("ignore_eos", True, "the end token does not end the text"),
    ("bad_words", ["a"], "up to 512 texts that the output does not hold, inside words and at their beginning, by their tokens"),
    ("allowed_token_ids", [66, 67], "no other token is chosen; an end is one if it is among them"),
)  # fmt: skip

FIELDS: tuple[Field, ...] = (
    # OpenAI's.
    *_rows(
        (COMPLETIONS,), "OpenAI", "honoured",
        ("prompt", "ab", "a text, a list of texts, token ids, or a list of these"),
        ("echo", True, "the prompt stands before the text; with logprobs, its tokens have theirs too"),
        ("logprobs", 2, "0 to 20 alternatives of each token"),
        ("best_of", 1, "as much as n, which changes nothing; more is refused"),
    ),
    *_rows(
        (CHAT,), "OpenAI", "honoured",
        ("messages", [{"role": "user", "content": "b"}], "rendered by the model's chat template, a developer's as the system's where it knows none; parts of type text or refusal alone"),
        ("max_completion_tokens", 3, "most tokens of the answer; the rest of the context when absent"),
        ("logprobs", True, "log-probabilities of the tokens"),
        ("top_logprobs", 2, "0 to 20 alternatives of each token", (("logprobs", True),)),
        ("modalities", ["text"], "text alone; others are refused"),
    ),
    *_rows(
        BOTH, "OpenAI", "honoured",
        ("model", "tiny", "the served name, or empty; another is 404"),
        ("frequency_penalty", 2.0, "-2 to 2, along each path of the draft tree"),
        ("logit_bias", {"65": 100}, "token ids to -100 to 100"),
        ("max_tokens", 3, "most tokens, 400 for more than the context leaves; when absent 16 for completions, as OpenAI, fewer where the context ends"),
        ("n", 2, "1 to 64 choices; choice i has a seed of its own"),
        ("presence_penalty", 2.0, "-2 to 2"),
        ("seed", 7, "64 bits; the same seed gives the same text, with drafting on or off; a random one is told"),
        ("stop", "a", "up to 32 strings; they are left out of the text"),
        ("stream", True, "server-sent events"),
        ("stream_options", {"include_usage": True}, "include_usage, continuous_usage_stats (vLLM's); include_obfuscation is ignored", (("stream", True),)),
        ("temperature", 2.0, "0 to 100"),
        ("top_p", 0.0, "0 to 1; 0 is the likeliest token alone", (("temperature", 2.0),)),
    ),
    *_rows(
        (COMPLETIONS,), "OpenAI", "ignored",
        ("user", "me", "keys have names; a user changes nothing"),
    ),
    *_rows(
        (COMPLETIONS,), "OpenAI", "refused",
        ("suffix", "end", "models here complete; they do not insert"),
    ),
    *_rows(
        (CHAT,), "OpenAI", "ignored",
        ("user", "me", "keys have names; a user changes nothing"),
        ("metadata", {"a": "b"}, "nothing is stored"),
        ("store", True, "nothing is stored"),
        ("service_tier", "auto", "there is one tier"),
        ("safety_identifier", "me", "nothing is reported"),
        ("prompt_cache_key", "a", "prefixes are found by their tokens"),
        ("prompt_cache_options", {}, "prefixes are found by their tokens"),
        ("prompt_cache_retention", "24h", "prefixes stay as long as there is room"),
    ),
    *_rows(
        (CHAT,), "OpenAI", "refused",
        ("audio", {"voice": "alloy", "format": "wav"}, "only text"),
        ("functions", [{"name": "f"}], "OpenAI's old form of tools"),
        ("function_call", {"name": "f"}, "OpenAI's old form of tool_choice"),
        ("moderation", {"model": "m"}, "nothing is moderated"),
        ("prediction", {"type": "content", "content": "a"}, "n-gram drafting finds repetition by itself"),
        ("reasoning_effort", "low", "refused where the chat template has neither reasoning_effort nor a switch, which `none` turns off; honoured elsewhere"),
        ("verbosity", "low", "models here have no such setting"),
        ("web_search_options", {"search_context_size": "low"}, "there is no web search"),
    ),
    # SGLang's.
    *_rows(
        (GENERATE,), "SGLang", "honoured",
        ("text", "b", "a text or a list of them; or input_ids"),
        ("input_ids", [65, 66], "token ids, or a list of lists; or text"),
        ("sampling_params", {"max_new_tokens": 3}, "an object, or one for each prompt"),
        ("stream", True, "events, each with the whole answer so far; large ones less often than tokens come"),
        ("rid", "a-name", "a name for /abort_request, of all prompts, or one for each prompt"),
        ("return_logprob", True, "output_token_logprobs in meta_info"),
        ("logprob_start_len", 1, "-1, the output alone; from 0 on, input_token_logprobs of the prompt from this token on", (("return_logprob", True),)),
        ("top_logprobs_num", 2, "0 to 20", (("return_logprob", True),)),
        ("return_text_in_logprobs", True, "each token's text, too", (("return_logprob", True),)),
        ("priority", 3, "higher runs first"),
    ),
    *_rows(
        (GENERATE,), "SGLang", "ignored",
        ("no_logs", True, "prompts and texts are never logged"),
        ("conversation_id", "x", "prefixes are found by their tokens"),
        ("log_metrics", False, "all requests are counted"),
    ),
    *_rows(
        (GENERATE,), "SGLang", "refused",
        ("input_embeds", [[0.5]], "prompts are text or token ids"),
        ("image_data", "x", "only text"),
        ("video_data", "x", "only text"),
        ("audio_data", "x", "only text"),
        ("modalities", ["image"], "only text"),
        ("lora_path", "x", "adapters are not served"),
        ("session_params", {"id": "x"}, "prefixes are cached by themselves"),
        ("session_id", "x", "prefixes are cached by themselves"),
        ("custom_logit_processor", "x", "code in requests is not run"),
        ("return_hidden_states", True, "hidden states do not leave the verifier"),
        ("return_routed_experts", True, "there are no experts"),
        ("return_entropy", True, "entropies are not computed"),
        ("return_prompt_token_ids", True, "/tokenize gives them"),
        ("token_ids_logprob", [5], "log-probabilities of chosen ids are not computed"),
        ("extra_key", "x", "the prefix cache is not divided by requests"),
        ("cache_salt", "x", "the prefix cache is not divided by requests"),
        ("bootstrap_host", "x", "prefill and decoding are not apart"),
        ("routed_dp_rank", 0, "the gateway chooses the verifier"),
        ("max_thinking_tokens", 5, "models here have no such setting"),
    ),
    *_rows(
        (SAMPLING,), "SGLang", "honoured",
        ("max_new_tokens", 3, "400 for more than the context leaves; 128 when absent, fewer where the context ends"),
        ("min_new_tokens", 6, "neither stop strings nor the end before", (("stop", "a"),)),
        ("stop", "a", "a string or several"),
        ("temperature", 2.0, "0 to 100"),
        ("top_p", 0.01, "above 0, to 1", (("temperature", 2.0),)),
        ("top_k", 1, "-1 is all", (("temperature", 2.0),)),
        ("frequency_penalty", 2.0, "-2 to 2"),
        ("presence_penalty", 2.0, "-2 to 2"),
        *EXTRA_SAMPLING,
        ("n", 2, "choices, each with a seed of its own"),
        ("skip_special_tokens", False, "special tokens stay in the text"),
        ("no_stop_trim", True, "the stop string stays in the text", (("stop", "a"),)),
        ("logit_bias", {"65": 100}, "token ids to -100 to 100"),
        ("sampling_seed", 7, "64 bits", (("temperature", 1.0),)),
    ),
    *_rows(
        (SAMPLING,), "SGLang", "ignored",
        ("spaces_between_special_tokens", True, "the tokenizer's own decoder puts the spaces"),
    ),
    *_rows(
        (SAMPLING,), "SGLang", "refused",
        ("stop_regex", "a+", "use stop"),
        ("custom_params", {"a": 1}, "there is no custom logit processor"),
        ("stream_interval", 2, "a chunk comes with every step"),
    ),
    # vLLM's, beside OpenAI's.
    *_rows(
        BOTH, "vLLM", "honoured",
        ("top_k", 1, "0 and -1 are all", (("temperature", 2.0),)),
        *EXTRA_SAMPLING,
        ("include_stop_str_in_output", True, "the stop string stays in the text", (("stop", "a"),)),
        ("min_tokens", 6, "neither stop strings nor the end before", (("stop", "a"),)),
        ("skip_special_tokens", False, "special tokens stay in the text"),
        ("truncate_prompt_tokens", 2, "the prompt's last so many tokens"),
        ("priority", 3, "higher runs first (vLLM's is the other way round)"),
        ("request_id", "a-name", "a name for /abort_request; it is the answer's id"),
        ("return_token_ids", True, "token_ids in each choice"),
        ("prompt_logprobs", 1, "0 to 20 alternatives of each token of the prompt, in all at most 262,144; not with stream or n; at the top of a chat's answer"),
    ),
    *_rows(
        (COMPLETIONS,), "vLLM", "honoured",
        ("add_special_tokens", False, "no BOS before the prompt"),
    ),
    *_rows(
        (CHAT,), "vLLM", "honoured",
        ("add_generation_prompt", False, "the template does not open the answer"),
        (
            "continue_final_message", True, "the answer goes on where the last message ends, which is the assistant's",
            (("messages", [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ab a"}]),),
        ),
        ("chat_template_kwargs", {"add_generation_prompt": False}, "variables of the template"),
        ("documents", [{"title": "a", "text": "b"}], "a variable of the template"),
    ),
    *_rows(
        (CHAT,), "SGLang", "honoured",
        ("separate_reasoning", False, "false: reasoning stays in the text, with --reasoning-parser"),
    ),
    *_rows(
        BOTH, "vLLM", "ignored",
        ("spaces_between_special_tokens", False, "the tokenizer's own decoder puts the spaces"),
    ),
    *_rows(
        BOTH, "vLLM", "refused",
        ("use_beam_search", True, "ask for n choices"),
        ("length_penalty", 0.5, "there is no beam search"),
        ("logits_processors", ["x"], "code in requests is not run"),
        ("return_tokens_as_token_ids", True, "return_token_ids gives them"),
        ("cache_salt", "x", "the prefix cache is not divided by requests"),
        ("kv_transfer_params", {"a": 1}, "prefill and decoding are not apart"),
        ("vllm_xargs", {"a": 1}, "there are no extensions"),
        ("detokenize", False, "text is always given"),
    ),
    *_rows(
        (CHAT,), "vLLM", "refused",
        ("echo", True, "for completions alone"),
        ("add_special_tokens", True, "the template has them"),
        ("chat_template", "{{ 1 }}", "the server's own; see --chat-template"),
        ("mm_processor_kwargs", {"a": 1}, "only text"),
        ("include_reasoning", False, "reasoning stays in the answer"),
        ("thinking_token_budget", 5, "models here have no such setting"),
    ),
    # Ours.
    *_rows(
        (*BOTH, GENERATE), "Foredraft", "honoured",
        ("return_provenance", True, "which tokens a draft had proposed, and each step's tree"),
        ("speculation", {"enabled": False}, "enabled, num_steps, topk, num_draft_tokens, each at most the server's; the text stays the same"),
        ("timeout", 60.0, "seconds; at most --request-timeout"),
    ),
)  # fmt: skip

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_WORD, _EBNF = "(yes|no)", 'root ::= "yes" | "no"'
_TAGS = {
    "structures": [{"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}],
    "triggers": ["<f>"],
    "at_least_one": True,
}

GRAMMARS: tuple[Field, ...] = (
    *_rows(
        (CHAT,), "OpenAI", "honoured",
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}, "text, json_object, json_schema, structural_tag; a schema is always kept to, whatever `strict` says; beside tools the answer is calls or JSON"),
        ("tools", [_TOOL], "functions; how they are told and found: [Structured output](structured-output.md)"),
        ("tool_choice", "required", "none, auto, required, a function, or allowed_tools", (("tools", [_TOOL]),)),
        ("parallel_tool_calls", False, "false: one call at most", (("tools", [_TOOL]),)),
    ),
    *_rows(
        (SAMPLING,), "SGLang", "honoured",
        ("json_schema", '{"enum": ["yes", "no"]}', "text of a JSON schema, or the schema; one grammar alone"),
        ("regex", _WORD, "the whole text matches"),
        ("ebnf", _EBNF, "GBNF or Lark"),
        ("structural_tag", _TAGS, "structures that begin with a trigger; also `at_least_one`, `stop_after_first`"),
    ),
    *_rows(
        BOTH, "vLLM", "honoured",
        ("structured_outputs", {"choice": ["yes", "no"]}, "one of json, regex, choice, grammar, json_object, structural_tag"),
        ("guided_json", {"enum": ["yes", "no"]}, "as structured_outputs' json; one grammar alone"),
        ("guided_regex", _WORD, "as structured_outputs' regex"),
        ("guided_choice", ["yes", "no"], "as structured_outputs' choice"),
        ("guided_grammar", _EBNF, "as structured_outputs' grammar"),
    ),
    *_rows(
        BOTH, "SGLang", "honoured",
        ("regex", _WORD, "as structured_outputs' regex"),
        ("ebnf", _EBNF, "as structured_outputs' grammar"),
        ("json_schema", '{"enum": ["yes", "no"]}', "as structured_outputs' json; its text, or the schema"),
        ("structural_tag", _TAGS, "as structured_outputs' structural_tag; its text, or the object"),
    ),
    *_rows(
        BOTH, "vLLM", "ignored",
        ("guided_decoding_backend", "xgrammar", "grammars have one backend here; a name with options is refused"),
    ),
    *_rows(
        BOTH, "vLLM", "refused",
        ("guided_whitespace_pattern", "[ ]?", "the schema's x-guidance has whitespace_pattern"),
    ),
)  # fmt: skip
