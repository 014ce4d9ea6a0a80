"""A gateway process in front of a scripted verifier."""

import json
import threading
from typing import Any

import grpc
import httpx

from foredraft.api.inference.v1 import inference_pb2_grpc
from foredraft.api.verify.v1 import verify_pb2
from foredraft.text.tokenizer import Tokenizer
from testing import tiny_tokenizers
from testing.scripted_verifier import Conversation, ScriptedVerifier, Submit
from testing.stack import metric

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
TEXT = "The dog sleeps."
TOKENS = TOKENIZER.encode(TEXT, False)
LENGTH = verify_pb2.FINISH_REASON_LENGTH
BODY = {"prompt": "x", "max_tokens": 50}


class Rig:
    """A gateway whose verifier can be given another script."""

    def __init__(self, verifier: ScriptedVerifier, http: str, grpc_address: str) -> None:
        self.verifier = verifier
        self.http = httpx.Client(base_url=http, timeout=30)
        self.channel = grpc.insecure_channel(grpc_address)
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)

    def is_ready(self) -> bool:
        return self.http.get("/health").status_code == 200

    def metric(self, line: str) -> float:
        return metric(self.http.get("/metrics").text, line)

    def stream(
        self, seen: threading.Event | None = None, **fields: Any
    ) -> tuple[str, dict[str, Any]]:
        """Returns the text of a streamed completion, and its last event; sets `seen` once text has
        come.
        """
        text, last = "", {}
        with self.http.stream(
            "POST", "/v1/completions", json={**BODY, **fields, "stream": True}
        ) as got:
            for line in got.iter_lines():
                if line and line != "data: [DONE]":
                    last = json.loads(line.removeprefix("data: "))
                    text += "".join(choice["text"] for choice in last.get("choices", []))
                    if text and seen is not None:
                        seen.set()
        return text, last


async def answer(talk: Conversation, submit: Submit) -> None:
    """Answers token by token, then with the end."""
    for token in TOKENS:
        await talk.say(submit.id, [token])
    await talk.say(submit.id, reason=LENGTH, prompt_tokens=2, completion_tokens=len(TOKENS))


async def nothing(talk: Conversation, submit: Submit) -> None:
    """Never answers."""
