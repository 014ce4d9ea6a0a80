"""Servers under test: their kind and model, request bodies, and their own counters."""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.bench.http_client import ConnectionBroken, HttpClient, Response
from foredraft.bench.prompts import Prompt
from foredraft.bench.records import Speculation
from foredraft.errors import ConfigError

# Route by backend; SGLang's and vLLM's benchmarks use the names in brackets.
ROUTES = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "native": "/generate",
}
ALIASES = {
    "foredraft": "openai",
    "sglang": "native",
    "sglang-native": "native",
    "sglang-oai": "openai",
    "sglang-oai-chat": "openai-chat",
    "vllm": "openai",
    "vllm-chat": "openai-chat",
}
# Servers that take `ignore_eos`; a strict one answers 400 to a field that it does not know.
_KINDS = ("foredraft", "vllm", "sglang", "llamacpp")


@dataclass(frozen=True, slots=True)
class Peer:
    """Describes a server under test.

    Attributes:
        kind: Owner of the model by /v1/models.
        model: Name of the model at the server.
        backend: Key of ROUTES.
    """

    kind: str
    model: str
    backend: str

    @property
    def path(self) -> str:
        """Route of the requests."""
        return ROUTES[self.backend]

    def body(
        self,
        prompt: Prompt,
        max_tokens: int,
        temperature: float,
        *,
        ignore_eos: bool,
        extra: Mapping[str, Any],
    ) -> bytes:
        """Returns the JSON of a streamed request."""
        if self.backend == "native":
            sampling = {
                "max_new_tokens": max_tokens,
                "temperature": temperature,
                "ignore_eos": ignore_eos,
            }
            told: dict[str, Any] = {"text": prompt.text, "sampling_params": sampling}
            return json.dumps({**told, "stream": True, **extra}).encode()
        options: dict[str, Any] = {"include_usage": True}
        told = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": options,
        }
        if self.backend == "openai-chat":
            told["messages"] = prompt.conversation
        else:
            told["prompt"] = prompt.text
        if self.kind in _KINDS and ignore_eos:
            told["ignore_eos"] = True
        # With this option the number of tokens of each read is known. Foredraft always reports it.
        if self.kind in ("vllm", "sglang"):
            options["continuous_usage_stats"] = True
        return json.dumps({**told, **extra}).encode()


def key_header() -> dict[str, str]:
    """Returns the header with the key in OPENAI_API_KEY; none where there is no key.

    Raises:
        ConfigError: No header can hold it; the key is not in the message.
    """
    key = os.environ.get("OPENAI_API_KEY", "")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError("OPENAI_API_KEY: a key has printable ASCII characters, no spaces")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def discover(client: HttpClient, backend: str, model: str = "") -> Peer:
    """Asks a server for its kind and model.

    Args:
        backend: Key of ROUTES or ALIASES.
        model: Name to ask for; the first that the server lists when empty.

    Raises:
        ConfigError: It does not answer, asks for a key, or names no model.
    """
    kind, listed = "", ""
    try:
        response = await client.get("/v1/models")
    except ConnectionBroken as error:
        raise ConfigError(
            f"no server to measure: {error}; `foredraft serve` starts one, --base-url names another"
        ) from None
    if response.status == 401:
        raise ConfigError(
            f"the server's /v1/models answers 401: {_reason(response)}; put a key into"
            " OPENAI_API_KEY, or give bench serve --header 'Authorization=Bearer KEY'"
        )
    if response.status == 200:
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError, AttributeError):
            first = response.json()["data"][0]
            kind, listed = str(first.get("owned_by", "")), str(first["id"])
    if not (model or listed) and ALIASES.get(backend, backend) != "native":
        if response.status != 200:
            answer = f"answers {response.status}: {_reason(response)}"
            raise ConfigError(f"the server's /v1/models {answer}; give --model to do without")
        raise ConfigError("the server's /v1/models names no model: give --model")
    return Peer(kind.lower(), model or listed, ALIASES.get(backend, backend))


def _reason(response: Response) -> str:
    """Returns what an answer other than 200 says, as one line."""
    try:
        error = response.json()["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = response.body.decode("utf-8", "replace")
    return " ".join(text.split())[:300] or "no reason"


async def spoken_of(client: HttpClient) -> Speculation | None:
    """Reads a server's own counters of speculation, for servers whose answers have no such
    figures.

    Reads vLLM's /metrics. Returns None where there are no counters.
    """
    try:
        response = await client.get("/metrics")
    except ConnectionBroken:
        return None
    if response.status != 200:
        return None
    totals: dict[str, float] = {}
    for line in response.body.decode("utf-8", "replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name.startswith("vllm:spec_decode_num_"):
            totals[name] = totals.get(name, 0.0) + float(line.rpartition(" ")[2])
    steps = int(totals.get("vllm:spec_decode_num_drafts_total", 0))
    accepted = int(totals.get("vllm:spec_decode_num_accepted_tokens_total", 0))
    drafted = int(totals.get("vllm:spec_decode_num_draft_tokens_total", 0))
    return Speculation(steps, steps + accepted, drafted, accepted) if totals else None
