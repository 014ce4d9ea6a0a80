"""Kinds of bad input with the answer to each: data for the tests and for docs/errors.md."""

import json
from dataclasses import dataclass
from typing import Any

from gateway.errors import HTTP_ERRORS

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
USER = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
DEEP = "[" * 100_000 + "]" * 100_000


@dataclass(frozen=True, slots=True)
class Bad:
    """A request and its answer.

    Attributes:
        path: Path of the route.
        body: Body as an object, or as raw bytes.
        status: HTTP status of the answer.
        param: The field that the answer names.
        message: Error message of the answer; empty where the request is valid after all.
    """

    path: str
    body: Any
    status: int
    param: str | None
    message: str

    @property
    def content(self) -> bytes:
        """Bytes that are sent."""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    @property
    def title(self) -> str:
        """The request in a few words."""
        text = self.content.decode("utf-8", "backslashreplace")
        if not text:
            return "(nothing)"
        return text if len(text) <= 100 else f"{text[:60]}... ({len(self.content)} bytes)"


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 2, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, "max_tokens": 2, **fields}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def native(**sampling: Any) -> dict[str, Any]:
    return {"text": "x", "sampling_params": {"max_new_tokens": 2, **sampling}}


def schema(given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}


TABLE: dict[str, list[Bad]] = {
    "Not JSON, or not an object": [
        Bad(COMPLETIONS, b"", 400, "prompt", "prompt: Field required"),
        Bad(COMPLETIONS, b"{", 400, "body", "body: is not valid JSON: EOF while parsing an object at line 1 column 1"),
        Bad(COMPLETIONS, b"[]", 400, "body", "body: Input should be an object"),
        Bad(COMPLETIONS, b"null", 400, "body", "body: Input should be an object"),
        Bad(COMPLETIONS, b"\xff\xfe{}", 400, "body", "body: is not valid JSON: expected value at line 1 column 1"),
        Bad(COMPLETIONS, b'{"prompt": "\xff"}', 400, "body", "body: is not valid JSON: invalid unicode code point at line 1 column 13"),
        Bad(COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "body", "body: is not valid JSON: unexpected end of hex escape at line 1 column 19"),
        Bad(COMPLETIONS, b'{"prompt": "x", "max_tokens": 1e999}', 400, "max_tokens", "max_tokens: Input should be a valid integer"),
        Bad(COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400, "temperature", "temperature: Input should be a finite number"),
        Bad(COMPLETIONS, b'{"prompt": "x", "temperature": Infinity}', 400, "temperature", "temperature: Input should be a finite number"),
        Bad(COMPLETIONS, b'{"prompt": "x", "temperature": -1e400}', 400, "temperature", "temperature: Input should be a finite number"),
        Bad("/v1/responses", b'{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": NaN}}]}', 400, "tools.0.parameters.a", "tools.0.parameters.a: Input should be a finite number"),
        Bad("/v1/responses", b'{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"properties": {"n": {"default": [1, 1e999]}}}}]}', 400, "tools.0.parameters.properties.n.default.1", "tools.0.parameters.properties.n.default.1: Input should be a finite number"),
        Bad("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": -Infinity}}', 400, "chat_template_kwargs.a", "chat_template_kwargs.a: Input should be a finite number"),
        Bad(COMPLETIONS, b'{"a":{' + b",".join(b'"%d":0' % i for i in range(16_385)) + b"}}", 400, "body", "body: has an object of 16385 members; at most 16384 are taken"),
        Bad(COMPLETIONS, {"prompt": [{}] * 30_000}, 400, "prompt", "prompt: Input should be a valid string or a valid integer or a valid array"),
        Bad("/v1/chat/completions", b'{"messages": [' + b",".join([b"{}"] * 50_000) + b"]}", 400, "messages.0.role", "messages.0.role: Field required"),
        Bad(COMPLETIONS, b'{"prompt": ' + DEEP.encode()[:90_000] + b"}", 400, "body", "body: is not valid JSON: recursion limit exceeded at line 1 column 212"),
        Bad(COMPLETIONS, b'{"prompt": "x", "metadata": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}", 400, "body", "body: is not valid JSON: recursion limit exceeded at line 1 column 234"),
        Bad(COMPLETIONS, b'{"prompt": "' + b"x" * 300_000 + b'"}', 413, None, "the body has 300014 bytes; at most 200000 are taken"),
        Bad(COMPLETIONS, b'{"prompt": "x"} trailing', 400, "body", "body: is not valid JSON: trailing characters at line 1 column 17"),
    ],
    "Types": [
        Bad(COMPLETIONS, completion(prompt=None), 400, "prompt", "prompt: Input should be a valid string or a valid array"),
        Bad(COMPLETIONS, completion(prompt=5), 400, "prompt", "prompt: Input should be a valid string or a valid array"),
        Bad(COMPLETIONS, completion(prompt={}), 400, "prompt", "prompt: Input should be a valid string or a valid array"),
        Bad(COMPLETIONS, completion(prompt=[1.5]), 400, "prompt", "prompt: Input should be a valid string or a valid integer or a valid array"),
        Bad(COMPLETIONS, completion(prompt=["a", 1]), 400, "prompt", "prompt: Input should be a valid string or a valid integer or a valid array"),
        Bad(COMPLETIONS, completion(prompt=[[1], "a"]), 400, "prompt", "prompt: Input should be a valid string or a valid integer or a valid array"),
        Bad(COMPLETIONS, completion(prompt=[True]), 400, "prompt", "prompt: Input should be a valid string or a valid integer or a valid array"),
        Bad(COMPLETIONS, completion(max_tokens="5"), 400, "max_tokens", "max_tokens: Input should be a valid integer"),
        Bad(COMPLETIONS, completion(max_tokens=1.5), 400, "max_tokens", "max_tokens: Input should be a valid integer"),
        Bad(COMPLETIONS, completion(max_tokens=True), 400, "max_tokens", "max_tokens: Input should be a valid integer"),
        Bad(COMPLETIONS, completion(stream="yes"), 400, "stream", "stream: Input should be a valid boolean"),
        Bad(COMPLETIONS, completion(stop=5), 400, "stop", "stop: Input should be a valid string or a valid array"),
        Bad(COMPLETIONS, completion(stop=[1]), 400, "stop", "stop: Input should be a valid string"),
        Bad(COMPLETIONS, completion(logit_bias=[1]), 400, "logit_bias", "logit_bias: Input should be an object"),
        Bad(COMPLETIONS, completion(seed="a"), 400, "seed", "seed: Input should be a valid integer"),
        Bad(COMPLETIONS, completion(speculation={"enabled": 1}), 400, "speculation.enabled", "speculation.enabled: Input should be a valid boolean"),
        Bad(COMPLETIONS, completion(model=5), 400, "model", "model: Input should be a valid string"),
    ],
    "Ranges": [
        Bad(COMPLETIONS, completion(prompt=[]), 400, "prompt", "prompt: it has no tokens"),
        Bad(COMPLETIONS, completion(prompt=[[]]), 400, "prompt", "prompt: it has no tokens"),
        Bad(COMPLETIONS, completion(prompt=[-1]), 400, "prompt", "prompt: token id -1 is not in the vocabulary, which has ids 0 to 599"),
        Bad(COMPLETIONS, completion(prompt=[600]), 400, "prompt", "prompt: token id 600 is not in the vocabulary, which has ids 0 to 599"),
        Bad(COMPLETIONS, completion(prompt=[10**30]), 400, "prompt", "prompt: token id 1000000000000000000000000000000 is not in the vocabulary, which has ids 0 to 599"),
        Bad(COMPLETIONS, completion(prompt=[5] * 600), 400, "prompt", "prompt: it has 600 tokens; this model's maximum context length is 512 tokens, with the output"),
        Bad(COMPLETIONS, completion(prompt="word " * 30_000), 400, "prompt", "prompt: it has 150000 characters; this model's maximum context length is 512 tokens, which no more than 7680 can fit"),
        Bad(COMPLETIONS, completion(prompt=["x"] * 300), 400, "prompt", "prompt: at most 256 continuations in one call, not 300"),
        Bad(COMPLETIONS, completion(prompt=["x"] * 100, n=3), 400, "prompt", "prompt: at most 256 continuations in one call, not 300"),
        Bad(COMPLETIONS, completion(max_tokens=-1), 400, "max_tokens", "max_tokens: must be in [0, 2147483647], not -1"),
        Bad(COMPLETIONS, completion(max_tokens=0, min_tokens=2), 400, "min_tokens", "min_tokens: must be 0 where no tokens are asked for"),
        Bad(COMPLETIONS, completion(max_tokens=10**12), 400, "max_tokens", "max_tokens: must be in [0, 2147483647], not 1000000000000"),
        Bad(COMPLETIONS, completion(min_tokens=5), 400, "min_tokens", "min_tokens: must be in [0, 2], not 5"),
        Bad(COMPLETIONS, completion(temperature=-0.1), 400, "temperature", "temperature: must be in [0, 100], not -0.1"),
        Bad(COMPLETIONS, completion(temperature=101), 400, "temperature", "temperature: must be in [0, 100], not 101.0"),
        Bad(COMPLETIONS, completion(top_p=-0.1), 400, "top_p", "top_p: must be in (0, 1], not -0.1"),
        Bad(COMPLETIONS, completion(top_p=1.1), 400, "top_p", "top_p: must be in (0, 1], not 1.1"),
        Bad(COMPLETIONS, completion(top_k=-2), 400, "top_k", "top_k: must be -1 (all) or in [1, 2147483647], not -2"),
        Bad(COMPLETIONS, completion(top_k=2**40), 400, "top_k", "top_k: must be -1 (all) or in [1, 2147483647], not 1099511627776"),
        Bad(COMPLETIONS, completion(min_p=2), 400, "min_p", "min_p: must be in [0, 1], not 2.0"),
        Bad(COMPLETIONS, completion(repetition_penalty=0), 400, "repetition_penalty", "repetition_penalty: must be in (0, 2], not 0.0"),
        Bad(COMPLETIONS, completion(frequency_penalty=3), 400, "frequency_penalty", "frequency_penalty: must be in [-2, 2], not 3.0"),
        Bad(COMPLETIONS, completion(presence_penalty=-3), 400, "presence_penalty", "presence_penalty: must be in [-2, 2], not -3.0"),
        Bad(COMPLETIONS, completion(n=0), 400, "n", "n: must be in [1, 64], not 0"),
        Bad(COMPLETIONS, completion(n=65), 400, "n", "n: must be in [1, 64], not 65"),
        Bad(COMPLETIONS, completion(n=2**70), 400, "n", "n: must be in [1, 64], not 1180591620717411303424"),
        Bad(COMPLETIONS, completion(seed=2**64), 400, "seed", "seed: must fit 64 bits"),
        Bad(COMPLETIONS, completion(priority=2**40), 400, "priority", "priority: must fit 32 bits"),
        Bad(COMPLETIONS, completion(timeout=0), 400, "timeout", "timeout: must be a positive number of seconds"),
        Bad(COMPLETIONS, completion(logprobs=21), 400, "logprobs", "logprobs: must be in [0, 20], not 21"),
        Bad(COMPLETIONS, completion(logprobs=-1), 400, "logprobs", "logprobs: must be in [0, 20], not -1"),
        Bad(COMPLETIONS, completion(logit_bias={"x": 1}), 400, "logit_bias", "logit_bias: 'x' is not a token id"),
        Bad(COMPLETIONS, completion(logit_bias={"600": 1}), 400, "logit_bias", "logit_bias: token id 600 is not in the vocabulary, which has ids 0 to 599"),
        Bad(COMPLETIONS, completion(logit_bias={"5": 101}), 400, "logit_bias", "logit_bias: must be in [-100, 100], not 101.0"),
        Bad(COMPLETIONS, completion(logit_bias={"\u0665": 1}), 400, "logit_bias", "logit_bias: '\u0665' is not a token id"),
        Bad(COMPLETIONS, completion(stop=""), 400, "stop", "stop: a stop string has 1 to 1024 characters"),
        Bad(COMPLETIONS, completion(stop=["a"] * 33), 400, "stop", "stop: at most 32 stop strings, not 33"),
        Bad(COMPLETIONS, completion(stop="a" * 2000), 400, "stop", "stop: a stop string has 1 to 1024 characters"),
        Bad(COMPLETIONS, completion(stop_token_ids=[600]), 400, "stop_token_ids", "stop_token_ids: token id 600 is not in the vocabulary, which has ids 0 to 599"),
        Bad(COMPLETIONS, completion(stop_token_ids=[5] * 601), 400, "stop_token_ids", "stop_token_ids: there are more than the vocabulary has"),
        Bad(COMPLETIONS, completion(stop_token_ids=[-1]), 400, "stop_token_ids", "stop_token_ids: token id -1 is not in the vocabulary, which has ids 0 to 599"),
        Bad(COMPLETIONS, completion(bad_words=["", "a"]), 400, "bad_words", "bad_words: a word has 1 to 128 characters beside spaces"),
        Bad(COMPLETIONS, completion(bad_words=["a"] * 513), 400, "bad_words", "bad_words: at most 512 words, not 513"),
        Bad(COMPLETIONS, completion(allowed_token_ids=[]), 400, "allowed_token_ids", "allowed_token_ids: give at least one, or leave it out to allow all"),
        Bad(COMPLETIONS, completion(allowed_token_ids=[600]), 400, "allowed_token_ids", "allowed_token_ids: token id 600 is not in the vocabulary, which has ids 0 to 599"),
        Bad(COMPLETIONS, completion(speculation={"num_steps": 0}), 400, "speculation.num_steps", "speculation.num_steps: must be in [1, 1024], not 0"),
        Bad(COMPLETIONS, completion(request_id="x" * 1000), 400, "request_id", "request_id: must have at most 128 characters, all printable"),
        Bad(COMPLETIONS, completion(request_id="a\nINFO b"), 400, "request_id", "request_id: must have at most 128 characters, all printable"),
        Bad(COMPLETIONS, b'{"prompt": "x", "max_tokens": ' + b"9" * 320 + b"}", 400, "max_tokens", "max_tokens: must be in [0, 2147483647], not 99999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999"),
        Bad(COMPLETIONS, b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", 400, "body", "body: is not valid JSON: number out of range at line 1 column 4332"),
    ],
    "Fields that cannot be honoured, or that nobody knows": [
        Bad(COMPLETIONS, completion(best_of=3), 400, "best_of", "best_of: is not supported beyond n: ask for n choices and pick one"),
        Bad(COMPLETIONS, completion(suffix="after"), 400, "suffix", "suffix: models here complete text; they do not insert"),
        Bad(COMPLETIONS, completion(echo=True, logprobs=1, n=2), 400, "n", "n: must be 1 where log-probabilities of the prompt are asked for"),
        Bad(COMPLETIONS, completion(echo=True, logprobs=21), 400, "logprobs", "logprobs: must be in [0, 20], not 21"),
        Bad(COMPLETIONS, completion(prompt_logprobs=-1), 400, "prompt_logprobs", "prompt_logprobs: must be in [0, 20], not -1"),
        Bad(COMPLETIONS, completion(prompt_logprobs=1, stream=True), 400, "prompt_logprobs", "prompt_logprobs: comes with whole answers alone: leave stream out"),
        Bad(COMPLETIONS, completion(stream_options={}), 400, "stream_options", "stream_options: needs stream: true"),
        Bad(COMPLETIONS, completion(temprature=1), 400, "temprature", "temprature: is not a field of this request, or not one that can be honoured; did you mean temperature?"),
        Bad(COMPLETIONS, completion(maxTokens=1), 400, "maxTokens", "maxTokens: is not a field of this request, or not one that can be honoured; did you mean max_tokens?"),
        Bad(COMPLETIONS, completion(**{"top-p": 1}), 400, "top-p", "top-p: is not a field of this request, or not one that can be honoured; did you mean top_p?"),
        Bad(COMPLETIONS, completion(**{"": 1}), 400, "body", "body: is not a field of this request, or not one that can be honoured"),
        Bad(COMPLETIONS, completion(**{"ü" * 100: 1}), 400, "ü" * 64, f"{'ü' * 64}: is not a field of this request, or not one that can be honoured"),
        Bad(COMPLETIONS, completion(stream=True, stream_options={"includeUsage": True}), 400, "stream_options.includeUsage", "stream_options.includeUsage: is not a field of this request, or not one that can be honoured; did you mean include_usage?"),
        Bad(COMPLETIONS, completion(messages=USER), 400, "messages", "messages: is not a field of this request, or not one that can be honoured; send it to /v1/chat/completions"),
        Bad(COMPLETIONS, completion(model="other"), 404, "model", "model: the model 'other' does not exist: this server has 'tiny'"),
    ],
    "Chats": [
        Bad(CHAT, {}, 400, "messages", "messages: Field required"),
        Bad(CHAT, chat(messages=[]), 400, "messages", "messages: it has no messages"),
        Bad(CHAT, chat(messages="Hi"), 400, "messages", "messages: Input should be a valid array"),
        Bad(CHAT, chat(messages=[{"content": "Hi"}]), 400, "messages.0.role", "messages.0.role: Field required"),
        Bad(CHAT, chat(messages=[*USER, {"role": "wizard", "content": "Hi"}]), 400, "messages.1.role", "messages.1.role: must be 'system', 'developer', 'user', 'assistant' or 'tool'; the model's chat template does not know 'wizard'"),
        Bad(CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages.0.content", "messages.0.content: Input should be a valid string or a valid array"),
        Bad(CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), 400, "messages.0.content.0.type", "messages.0.content.0.type: only text is taken, not 'image_url'"),
        Bad(CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]), 200, None, ""),
        Bad(CHAT, chat(messages=[{"role": "user", "content": [{}]}]), 400, "messages.0.content.0.type", "messages.0.content.0.type: Field required"),
        Bad(CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a", "cash": {}}]}]), 400, "messages.0.content.0.cash", "messages.0.content.0.cash: is not a field of a part of text"),
        Bad(CHAT, chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400, "messages.0.content.0.text", "messages.0.content.0.text: Field required"),
        Bad(CHAT, chat(messages=USER * 20_000), 413, None, "the body has 700031 bytes; at most 200000 are taken"),
        Bad(CHAT, chat(messages=USER * 2000), 400, "messages", "messages: it has 16012 tokens; this model's maximum context length is 512 tokens, with the output"),
        Bad(CHAT, chat(messages=[{"role": "user", "contents": "Hi"}]), 400, "messages.0.content", "messages.0.content: Field required"),
        Bad(CHAT, chat(messages=[{"role": "assistant"}, {"role": "tool", "tool_call_id": "a"}, *USER]), 200, None, ""),
        Bad(CHAT, chat(tools=[{"type": "custom", "custom": {"name": "f"}}]), 400, "tools.0.type", "tools.0.type: Input should be 'function'"),
        Bad(CHAT, chat(tools=[{"type": "function", "name": "f", "parameters": {}}]), 400, "tools.0.name", "tools.0.name: is not a field of this request, or not one that can be honoured; put name, description and parameters into \"function\": {...}"),
        Bad(CHAT, chat(tools=TOOLS, tool_choice={"type": "function", "name": "f"}), 400, "tool_choice.name", "tool_choice.name: is not a field of this request, or not one that can be honoured; give \"function\": {\"name\": ...} instead"),
        Bad(CHAT, chat(tools=TOOLS, tool_choice={"type": "custom", "custom": {"name": "f"}}), 400, "tool_choice.type", "tool_choice.type: Input should be 'function' or 'allowed_tools'"),
        Bad(CHAT, chat(response_format={"type": "json_object", "schema": {}}), 400, "response_format.schema", "response_format.schema: is not a field of this request, or not one that can be honoured; give \"type\": \"json_schema\", \"json_schema\": {\"name\": ..., \"schema\": ...} instead"),
        Bad(CHAT, chat(tools=[{"type": "function"}]), 400, "tools.0.function", "tools.0.function: Field required"),
        Bad(CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "parametres": {}}}]), 400, "tools.0.function.parametres", "tools.0.function.parametres: is not a field of this request, or not one that can be honoured; did you mean parameters?"),
        Bad(CHAT, chat(tools=TOOLS, tool_choice={"type": "function", "function": {"nam": "f"}}), 400, "tool_choice.function.name", "tool_choice.function.name: Field required"),
        Bad(CHAT, chat(tools=[{"type": "function", "function": {"name": "a b"}}]), 400, "tools.0.function.name", "tools.0.function.name: must be 1 to 64 letters, digits, underscores and dashes"),
        Bad(CHAT, chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}}), 400, "tool_choice", "tool_choice: there is no function 'g' in tools"),
        Bad(CHAT, chat(tools=TOOLS, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}), 400, "response_format.json_schema.schema", "response_format.json_schema.schema: failed to compile JSON schema: Unimplemented keys: [\"not\"]; leave it out, or give the schema \"x-guidance\": {\"lenient\": true} to ignore it"),
        Bad(CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]), 400, "tools", "tools: the function 'f': failed to compile JSON schema: properties must be an object"),
        Bad(CHAT, chat(tools=TOOLS, tool_choice=allowed("auto")), 400, "tool_choice", "tool_choice: allows no tool; none is the choice for that"),
        Bad(CHAT, chat(tools=TOOLS, tool_choice=allowed("auto", "g")), 400, "tool_choice", "tool_choice: there is no function 'g' in tools"),
        Bad(CHAT, chat(tool_choice="required"), 400, "tool_choice", "tool_choice: needs tools"),
        Bad(CHAT, chat(messages=[*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]), 400, "messages.1.tool_calls", "messages.1.tool_calls: must be a list of calls, each with its function's name and arguments"),
        Bad(CHAT, chat(response_format={"type": "json_object"}, ignore_eos=True), 400, "ignore_eos", "ignore_eos: does not go with a grammar, which says when to end"),
        Bad(CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type", "response_format.type: Input should be 'text', 'json_object', 'json_schema' or 'structural_tag'"),
        Bad(CHAT, chat(response_format={"type": "json_schema", "json_schema": {}}), 400, "response_format.json_schema.name", "response_format.json_schema.name: Field required"),
        Bad(CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), 400, "response_format.json_schema.schema", "response_format.json_schema.schema: give a schema"),
        Bad(CHAT, chat(response_format=schema({"type": "strange"})), 400, "response_format.json_schema.schema", "response_format.json_schema.schema: Invalid type: strange"),
        Bad(CHAT, chat(response_format=schema({"$ref": "http://example.com/x"})), 400, "response_format.json_schema.schema", "response_format.json_schema.schema: Resource 'http://example.com/x' is not present in a registry and retrieving it failed: Default retriever does not fetch resources"),
        Bad(CHAT, chat(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "structured_outputs", "structured_outputs: give exactly one, not 2"),
        Bad(CHAT, chat(structured_outputs={"choice": []}), 400, "structured_outputs.choice", "structured_outputs.choice: give at least one choice"),
        Bad(CHAT, chat(structured_outputs={"regex": "[^\\s\\S]"}), 400, "structured_outputs", "structured_outputs: no text matches it"),
        Bad(CHAT, chat(structured_outputs={"json": "{"}), 400, "structured_outputs.json", "structured_outputs.json: is not valid JSON: EOF while parsing an object at line 1 column 1"),
        Bad(CHAT, chat(structured_outputs={"structural_tag": "[]"}), 400, "structured_outputs.structural_tag", "structured_outputs.structural_tag: must be the text of a JSON object"),
        Bad(CHAT, chat(guided_json="{"), 400, "guided_json", "guided_json: is not valid JSON: EOF while parsing an object at line 1 column 1"),
        Bad(CHAT, chat(guided_json={"type": "strange"}), 400, "guided_json", "guided_json: Invalid type: strange"),
        Bad(CHAT, chat(guided_regex="[^\\s\\S]", tools=TOOLS, tool_choice="none"), 400, "guided_regex", "guided_regex: no text matches it"),
        Bad(CHAT, chat(guided_choice=[]), 400, "guided_choice", "guided_choice: give at least one choice"),
        Bad(CHAT, chat(guided_choice=["a"], guided_regex="a"), 400, "guided_choice", "guided_choice: does not go with guided_regex: give one grammar"),
        Bad(CHAT, chat(structured_outputs={"regex": "a"}, ebnf="root ::= \"a\""), 400, "ebnf", "ebnf: does not go with structured_outputs: give one grammar"),
        Bad(CHAT, chat(response_format={"type": "json_object"}, guided_regex="a"), 400, "guided_regex", "guided_regex: does not go with response_format: give one grammar"),
        Bad(CHAT, chat(response_format={"type": "text"}, guided_regex="a", guided_json=None, regex=None), 200, None, ""),
        Bad(CHAT, chat(tools=TOOLS, guided_choice=["a"]), 400, "guided_choice", "guided_choice: does not go with functions that may be called: give a JSON schema, or no functions"),
        Bad(CHAT, chat(regex="a+", min_tokens=2), 400, "min_tokens", "min_tokens: does not go with a grammar, which says when to end"),
        Bad(COMPLETIONS, completion(regex="a("), 400, "regex", "regex: invalid regex \"a(\" (in regex): regex parse error: a( ^ error: unclosed group"),
        Bad(COMPLETIONS, completion(regex="a", ebnf="root ::= \"a\""), 400, "ebnf", "ebnf: does not go with regex: give one grammar"),
        Bad(COMPLETIONS, completion(guided_regex=5), 400, "guided_regex", "guided_regex: Input should be a valid string"),
        Bad(COMPLETIONS, completion(guided_decoding_backend="xgrammar:disable-any-whitespace"), 400, "guided_decoding_backend", "guided_decoding_backend: Input should be 'auto', 'guidance', 'lm-format-enforcer', 'outlines' or 'xgrammar'"),
        Bad(COMPLETIONS, completion(guided_whitespace_pattern="[ ]?"), 400, "guided_whitespace_pattern", "guided_whitespace_pattern: give the schema \"x-guidance\": {\"whitespace_pattern\": ...} instead"),
        Bad(COMPLETIONS, completion(guided_regex="a", guided_grammar=None, guided_whitespace_pattern=None), 200, None, ""),
        Bad(CHAT, chat(modalities=["audio"]), 400, "modalities", "modalities: only text can be honoured"),
        Bad(CHAT, chat(prediction={"type": "content"}), 400, "prediction", "prediction: predicted output cannot be honoured; n-gram drafting finds repetition by itself"),
        Bad(CHAT, chat(top_logprobs=2), 400, "top_logprobs", "top_logprobs: needs logprobs: true"),
        Bad(CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "top_logprobs: must be in [0, 20], not 21"),
        Bad(CHAT, chat(max_completion_tokens=3), 400, "max_tokens", "max_tokens: give it or max_completion_tokens, not both"),
        Bad(CHAT, {"messages": USER, "max_completion_tokens": -1}, 400, "max_completion_tokens", "max_completion_tokens: must be in [0, 2147483647], not -1"),
        Bad(CHAT, chat(chat_template_kwargs={"messages": 1}), 400, "chat_template_kwargs", "chat_template_kwargs: messages is not for requests to set"),
        Bad(CHAT, chat(chat_template_kwargs={"self": 1}), 400, "chat_template_kwargs", "chat_template_kwargs: self is not for requests to set"),
        Bad(CHAT, chat(chat_template_kwargs={"function": 1, "args": 2}), 200, None, ""),
    ],
    "Native": [
        Bad(GENERATE, {}, 400, "text", "text: give exactly one of text and input_ids"),
        Bad(GENERATE, {"text": "x", "input_ids": [1]}, 400, "text", "text: give exactly one of text and input_ids"),
        Bad(GENERATE, {"text": []}, 400, "text", "text: give at least one prompt"),
        Bad(GENERATE, {"text": ""}, 200, None, ""),
        Bad(GENERATE, {"input_ids": []}, 400, "input_ids", "input_ids: it has no tokens"),
        Bad(GENERATE, {"input_ids": [600]}, 400, "input_ids", "input_ids: token id 600 is not in the vocabulary, which has ids 0 to 599"),
        Bad(GENERATE, {"input_ids": [[1], [5] * 600]}, 400, "input_ids", "input_ids: it has 600 tokens; this model's maximum context length is 512 tokens, with the output"),
        Bad(GENERATE, {"text": "word " * 30_000}, 400, "text", "text: it has 150000 characters; this model's maximum context length is 512 tokens, which no more than 7680 can fit"),
        Bad(GENERATE, native(temperature=-1), 400, "sampling_params.temperature", "sampling_params.temperature: must be in [0, 100], not -1.0"),
        Bad(GENERATE, native(max_new_tokens=-1), 400, "sampling_params.max_new_tokens", "sampling_params.max_new_tokens: must be in [0, 2147483647], not -1"),
        Bad(GENERATE, native(sampling_seed=2**70), 400, "sampling_params.sampling_seed", "sampling_params.sampling_seed: must fit 64 bits"),
        Bad(GENERATE, native(regex="a("), 400, "sampling_params.regex", "sampling_params.regex: invalid regex \"a(\" (in regex): regex parse error: a( ^ error: unclosed group"),
        Bad(GENERATE, native(regex="a", ebnf="root ::= \"a\""), 400, "sampling_params.ebnf", "sampling_params.ebnf: does not go with regex: give one grammar"),
        Bad(GENERATE, native(regex="a+", min_new_tokens=2), 400, "sampling_params.min_new_tokens", "sampling_params.min_new_tokens: does not go with a grammar, which says when to end"),
        Bad(GENERATE, native(json_schema="{"), 400, "sampling_params.json_schema", "sampling_params.json_schema: is not valid JSON: EOF while parsing an object at line 1 column 1"),
        Bad(GENERATE, native(structural_tag={}), 400, "sampling_params.structural_tag", "sampling_params.structural_tag: structural tags have a list of structures"),
        Bad(GENERATE, native(unknown=1), 400, "sampling_params.unknown", "sampling_params.unknown: is not a field of this request, or not one that can be honoured"),
        Bad(GENERATE, native(max_tokens=1), 400, "sampling_params.max_tokens", "sampling_params.max_tokens: is not a field of this request, or not one that can be honoured; give max_new_tokens instead"),
        Bad(GENERATE, {"text": "x", "temperature": 0}, 400, "temperature", "temperature: is not a field of this request, or not one that can be honoured; put it into sampling_params"),
        Bad(GENERATE, {"text": "x", "sampling_params": [{"topP": 1}]}, 400, "sampling_params.0.topP", "sampling_params.0.topP: is not a field of this request, or not one that can be honoured; did you mean top_p?"),
        Bad(GENERATE, {"text": "x", "sampling_params": [{}, {}]}, 400, "sampling_params", "sampling_params: 2 given for 1 prompts"),
        Bad(GENERATE, {"text": ["x", "y"], "rid": ["a"]}, 400, "rid", "rid: 1 given for 2 prompts"),
        Bad(GENERATE, {"text": ["x", "y"], "rid": ["a", "a"]}, 400, "rid", "rid: 'a' is running already"),
        Bad(GENERATE, {"text": "x", "return_logprob": True, "logprob_start_len": -2}, 400, "logprob_start_len", "logprob_start_len: must be -1 (the output alone) or more, not -2"),
        Bad(GENERATE, {"text": "x", "return_logprob": True, "logprob_start_len": 9}, 400, "logprob_start_len", "logprob_start_len: must be less than the prompt's 2 tokens, not 9"),
        Bad(GENERATE, {"text": "x", "return_logprob": True, "top_logprobs_num": 99}, 400, "top_logprobs_num", "top_logprobs_num: must be in [0, 20], not 99"),
        Bad(GENERATE, {"text": "x", "image_data": "x"}, 400, "image_data", "image_data: only text can be honoured"),
        Bad(GENERATE, {"text": "x", "lora_path": "x"}, 400, "lora_path", "lora_path: LoRA adapters are not served"),
        Bad("/tokenize", {}, 400, "prompt", "prompt: give it or messages"),
        Bad("/tokenize", {"prompt": "x" * 150_000}, 400, "prompt", "prompt: it has 150000 characters; this model's maximum context length is 512 tokens, which no more than 7680 can fit"),
        Bad("/tokenize", {"prompt": []}, 400, "prompt", "prompt: give at least one prompt"),
        Bad("/tokenize", {"prompt": ["x"] * 300}, 400, "prompt", "prompt: at most 256 continuations in one call, not 300"),
        Bad("/tokenize", {"prompt": "x", "model": "other"}, 404, "model", "model: the model 'other' does not exist: this server has 'tiny'"),
        Bad("/detokenize", {"tokens": [2**70]}, 400, "tokens", "tokens: token id 1180591620717411303424 is not in the vocabulary, which has ids 0 to 599"),
        Bad("/detokenize", {"tokens": [[5]] * 300}, 400, "tokens", "tokens: at most 256 continuations in one call, not 300"),
        Bad("/detokenize", {"tokens": [5], "model": "other"}, 404, "model", "model: the model 'other' does not exist: this server has 'tiny'"),
        Bad("/detokenize", {"tokens": [-1]}, 400, "tokens", "tokens: token id -1 is not in the vocabulary, which has ids 0 to 599"),
        Bad("/detokenize", {"tokens": [[1], 2]}, 400, "tokens.0", "tokens.0: Input should be a valid integer"),
        Bad("/abort_request", {}, 400, "rid", "rid: give a request's id, or abort_all: true"),
    ],
    "Routes": [
        Bad("/v1/responses", {"input": "x", "max_tokens": 2}, 400, "max_tokens", "max_tokens: is not a field of this request, or not one that can be honoured; give max_output_tokens instead"),
        Bad("/v1/nothing", {}, 404, None, "POST /v1/nothing: Not Found; /openapi.json has all routes"),
        # A redirect would lead from https to http where a proxy speaks TLS.
        Bad("/v1/completions/", {}, 404, None, "POST /v1/completions/: Not Found; did you mean /v1/completions? /openapi.json has all routes"),
        # Clients whose base URL has no /v1, or one too much.
        Bad("/chat/completions", {}, 404, None, "POST /chat/completions: Not Found; did you mean /v1/chat/completions? /openapi.json has all routes"),
        Bad("/completions", {}, 404, None, "POST /completions: Not Found; did you mean /v1/completions? /openapi.json has all routes"),
        Bad("/v1/v1/messages", {}, 404, None, "POST /v1/v1/messages: Not Found; did you mean /v1/messages? /openapi.json has all routes"),
        Bad("/health", {}, 405, None, "POST /health: Method Not Allowed"),
    ],
}  # fmt: skip
ROWS = [row for rows in TABLE.values() for row in rows]


def page() -> str:
    """docs/errors.md."""
    lines = [
        "# Errors",
        "",
        (
            "<!-- Written by `make docs` from gateway/errors.py and tests/gateway/bad_input.py,"
            " which the tests hold against"
        ),
        "a running server; edit these instead. -->",
        "",
        (
            'HTTP answers have OpenAI\'s envelope, `{"error": {"message", "type", "param", "code",'
            ' "retryable"}}`; `param` names'
        ),
        (
            "the field at fault. gRPC statuses carry `google.rpc.ErrorInfo`, and `BadRequest` with"
            " the field or `RetryInfo` where"
        ),
        (
            "these apply. What goes wrong after the first token of a stream comes as the stream's"
            " last event."
        ),
        "",
        "## Statuses",
        "",
        "| HTTP | gRPC | `code` | `type` | when | try again |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind, http in sorted(HTTP_ERRORS, key=lambda row: row[1].status):
        when = (kind.__doc__ or "").splitlines()[0].replace("|", "\\|")
        again = "yes, after `Retry-After`" if http.retryable else "no"
        lines.append(
            f"| {http.status} | `{http.grpc}` | {_name(http.code)} | `{http.kind}` | {when} |"
            f" {again} |"
        )
    lines += [
        (
            "| 500 | `INTERNAL` | `internal_error` | `server_error` | A defect; the log has it"
            " under the request's id. | no |"
        ),
        "",
        "## Bad input",
        "",
        (
            f"{sum(row.status != 200 for row in ROWS)} kinds, each sent to a server whose model has"
            " 600 tokens in its vocabulary,"
        ),
        (
            "a context of 512, and which takes bodies of 200,000 bytes. None of them costs the"
            " others anything."
        ),
    ]
    for title, rows in TABLE.items():
        lines += ["", f"### {title}", "", "| to | request | | `param` | message |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for row in rows:
            if row.status != 200:
                cells = (f"`{row.path}`", _code(row.title), str(row.status), _name(row.param))
                lines.append("| " + " | ".join((*cells, _plain(row.message))) + " |")
    return "\n".join(lines) + "\n"


def _name(name: str | None) -> str:
    return "" if name is None else f"`{name}`"


def _code(text: str) -> str:
    text = text.replace("|", "\\|").replace("\n", " ")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _plain(text: str) -> str:
    short = text if len(text) <= 160 else text[:120] + "..."
    for sign in ("\\", "`", "*", "_", "<", "|", "["):
        short = short.replace(sign, "\\" + sign)
    return short
