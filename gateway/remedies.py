"""Advice for fields that other servers accept: what to send instead, by API."""

_BEAMS = "there is no beam search; leave it out, or ask for n choices"
_LORA = "LoRA adapters are not served: merge one into its model, and serve that"
_TEXT_ALONE = "only text is taken"
_CODE = "code in requests is not run"
_BEST = "leave it out"
_INSIDE = "put what is in it into the request itself"

_IN_FUNCTION = 'put name, description and parameters into "function": {...}'

OPENAI = {
    "stop_words": "give stop instead",
    "json": "give guided_json or response_format instead",
    # vLLM's.
    "use_beam_search": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "chat_template": "templates are the server's: start it with --chat-template",
    "mm_processor_kwargs": _TEXT_ALONE,
    "logits_processors": _CODE,
    "return_tokens_as_token_ids": "give return_token_ids: true instead",
    "kv_transfer_params": f"prompts are computed where they are continued; {_BEST}",
    "vllm_xargs": _BEST,
    "cache_salt": (
        f"keys do not tell prefixes apart; {_BEST}, or start the server with --disable-radix-cache"
    ),
    # SGLang's.
    "max_new_tokens": "give max_tokens instead",
    "min_new_tokens": "give min_tokens instead",
    "no_stop_trim": "give include_stop_str_in_output: true instead",
    "sampling_seed": "give seed instead",
    "sampling_params": _INSIDE,
    "rid": "give request_id instead",
    "stop_regex": "give stop instead",
    "lora_path": _LORA,
    "lora_request": _LORA,
    "custom_logit_processor": _CODE,
    "return_hidden_states": "hidden states do not leave the verifier",
    # Fields of clients and of other servers.
    "extra_body": _INSIDE,
    "extra_headers": f"clients send them beside the request; {_BEST}",
    "enable_thinking": 'give chat_template_kwargs: {"enable_thinking": ...} instead',
    "thinking": (
        'give chat_template_kwargs: {"enable_thinking": ...}, if the template knows it, instead'
    ),
    "stopping_strings": "give stop instead",
    "repeat_penalty": "give repetition_penalty instead",
    "num_predict": "give max_tokens instead",
    "n_predict": "give max_tokens instead",
    "grammar": 'give structured_outputs: {"grammar": ...} instead',
    "best_of": "ask for n choices and pick one",
    "echo": "chats have no prompt to repeat; /v1/completions takes it",
    "text": "give prompt at /v1/completions, or messages at /v1/chat/completions, instead",
    "messages": "send it to /v1/chat/completions",
    "prompt": "send it to /v1/completions, or give messages instead",
    "input": "give prompt at /v1/completions, or messages at /v1/chat/completions, instead",
    "input_ids": "give prompt at /v1/completions instead, which takes token ids",
    "system": "give it as the first of messages, with role: system",
    "image_data": _TEXT_ALONE,
    # Inside fields.
    "response_format.schema": (
        'give "type": "json_schema", "json_schema": {"name": ..., "schema": ...} instead'
    ),
    "tools.name": _IN_FUNCTION,
    "tools.description": _IN_FUNCTION,
    "tools.parameters": _IN_FUNCTION,
    "tools.input_schema": _IN_FUNCTION,
    "tools.function.input_schema": "give parameters instead",
    "tool_choice.name": 'give "function": {"name": ...} instead',
}

_FORMS = {
    **dict.fromkeys(
        (
            "structured_outputs",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "regex",
            "ebnf",
            "structural_tag",
        ),
        "send it to /v1/chat/completions, which takes it",
    ),
    "guided_decoding_backend": f"grammars have one backend here; {_BEST}",
}
_CONVERSATION = "give input instead, a text or a list of messages"
_RESPONSES_SCHEMA = 'give text: {"format": {"type": "json_schema", ...}} instead'
RESPONSES = {
    **_FORMS,
    "max_tokens": "give max_output_tokens instead",
    "max_completion_tokens": "give max_output_tokens instead",
    "messages": _CONVERSATION,
    "prompt": _CONVERSATION,
    "n": "one answer is made for each request",
    "prompt_logprobs": "send it to /v1/completions, which takes it",
    **dict.fromkeys(("guided_json", "json_schema", "response_format"), _RESPONSES_SCHEMA),
}
_MESSAGES_SCHEMA = 'give output_config: {"format": {"type": "json_schema", ...}} instead'
MESSAGES = {
    **_FORMS,
    "stop": "give stop_sequences instead",
    "max_completion_tokens": "give max_tokens instead",
    "n": "one answer is made for each request",
    **dict.fromkeys(("guided_json", "json_schema", "response_format"), _MESSAGES_SCHEMA),
}

_SAMPLING = {
    "max_tokens": "give max_new_tokens instead",
    "max_completion_tokens": "give max_new_tokens instead",
    "min_tokens": "give min_new_tokens instead",
    "seed": "give sampling_seed instead",
    "structured_outputs": "give json_schema, regex, ebnf or structural_tag instead",
    "response_format": "give json_schema instead",
    "guided_json": "give json_schema instead",
    "guided_regex": "give regex instead",
    "guided_grammar": "give ebnf instead",
    "guided_choice": 'give regex: "one|other" instead',
    "include_stop_str_in_output": "give no_stop_trim: true instead",
    "length_penalty": _BEAMS,
    "use_beam_search": _BEAMS,
}
GENERATE = {
    "prompt": "give text instead",
    "input": "give text instead",
    "messages": "send it to /v1/chat/completions",
    "model": f"one model is served here; {_BEST}",
    "request_id": "give rid instead",
    "stream_options": f"every event has the usage; {_BEST}",
    "logprobs": "give return_logprob: true instead",
    "bootstrap_host": f"prompts are computed where they are continued; {_BEST}",
    **{name: f"inside sampling_params, {remedy}" for name, remedy in _SAMPLING.items()},
    **{f"sampling_params.{name}": remedy for name, remedy in _SAMPLING.items()},
}
