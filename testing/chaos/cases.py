"""Requests with known right answers, and ways to send them: gRPC, HTTP streamed, HTTP whole."""

import asyncio
import dataclasses
import json
import random
from dataclasses import dataclass, field

import grpc
import httpx

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.errors import Unavailable
from foredraft.rpc.channel import aio_channel
from foredraft.rpc.errors import from_rpc_error

PREAMBLE = "Rule 1: answer briefly. Rule 2: say what you do not know. " * 4
PROMPTS = (
    f"{PREAMBLE}The capital of France is",
    f"{PREAMBLE}The capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "To be, or not to be, that is the question:",
    "One two three four one two three four one two three",
    "Once upon a time there was a little",
)
KINDS = ("grpc", "stream", "whole")


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its fault-free answer.

    Attributes:
        answer: Token ids, decoded without a draft and without a fault.
    """

    prompt: str
    num_tokens: int
    temperature: float
    seed: int
    answer: tuple[int, ...] = ()


@dataclass(slots=True)
class Result:
    """Result of one request.

    Attributes:
        outcome: "right", "wrong", "unavailable", "deadline", "overloaded", "broken" (the connection
            ended), "late" (nothing by the deadline), or what else the server said.
        num_seen: Number of tokens that had come.
        started, ended: Seconds of time.monotonic().
        is_retryable: Whether the error said that a retry makes sense.
    """

    kind: str
    case: Case
    started: float
    ended: float = 0.0
    outcome: str = ""
    detail: str = ""
    num_seen: int = 0
    is_retryable: bool = False
    tokens: list[int] = field(default_factory=list)


def make_cases(rng: random.Random) -> list[Case]:
    """Returns greedy and sampled requests of several lengths."""
    return [
        Case(prompt, rng.choice((12, 24, 40)), temperature, rng.randrange(2**31))
        for prompt in PROMPTS
        for temperature in (0.0, 0.8)
    ]


class Asker:
    """Sends requests to one stack.

    Args:
        http: Base URL.
        grpc_address: host:port.
        deadline: Seconds that a request may take; the server has the same limit.
        grace: Seconds after the deadline in which its end may be told.
    """

    def __init__(self, http: str, grpc_address: str, deadline: float, grace: float) -> None:
        self._http = http
        self._grpc_address = grpc_address
        self.deadline = deadline
        self._grace = grace

    async def answered(self, case: Case) -> Case:
        """Returns the case with its answer, decoded without a draft.

        Raises:
            Unavailable: It was not answered.
        """
        async with aio_channel(self._grpc_address) as channel:
            request = _message(case)
            request.speculation.enabled = False
            try:
                tokens = [
                    token.id
                    async for response in _stub(channel).Generate(request, timeout=self.deadline)
                    for token in response.tokens
                ]
            except grpc.aio.AioRpcError as error:
                raise Unavailable(f"no fault-free answer: {error.details()}") from error
        return dataclasses.replace(case, answer=tuple(tokens))

    async def ask(self, kind: str, case: Case, result: Result) -> None:
        """Sends one request over a connection of its own, and fills in its result."""
        try:
            async with asyncio.timeout(self.deadline + self._grace):
                if kind == "grpc":
                    await self._ask_grpc(case, result)
                else:
                    await self._ask_http(case, result, streams=kind == "stream")
        except TimeoutError:
            result.outcome = "late"

    async def _ask_grpc(self, case: Case, result: Result) -> None:
        async with aio_channel(self._grpc_address) as channel:
            call = _stub(channel).Generate(_message(case), timeout=self.deadline)
            is_complete = False
            try:
                async for response in call:
                    result.tokens += [token.id for token in response.tokens]
                    result.num_seen = len(result.tokens)
                    is_complete = is_complete or response.HasField("completion")
            except grpc.aio.AioRpcError as error:
                known = from_rpc_error(error)
                has_details = any(
                    key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ()
                )
                result.detail = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    result.outcome = "deadline"
                elif has_details:
                    result.outcome = type(known).__name__.lower()
                    result.is_retryable = isinstance(known, Unavailable)
                else:
                    is_transport = error.code() is grpc.StatusCode.UNAVAILABLE
                    result.outcome = "broken" if is_transport else error.code().name.lower()
                return
            _judge(result, case, is_complete)

    async def _ask_http(self, case: Case, result: Result, *, streams: bool) -> None:
        body = {
            "text": case.prompt,
            "sampling_params": {
                "max_new_tokens": case.num_tokens,
                "temperature": case.temperature,
                "sampling_seed": case.seed,
            },
            "stream": streams,
        }
        # A new connection for each: what a fault does to connecting is part of the question.
        limits = httpx.Limits(max_keepalive_connections=0)
        try:
            async with (
                httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client,
                client.stream("POST", f"{self._http}/generate", json=body) as response,
            ):
                if response.status_code != 200:
                    _refused(result, json.loads(await response.aread())["error"])
                    result.is_retryable &= "retry-after" in response.headers
                elif streams:
                    await _read_events(response, case, result)
                else:
                    answer = json.loads(await response.aread())
                    result.tokens = answer["output_ids"]
                    _judge(result, case, answer["meta_info"]["finish_reason"] is not None)
        except (httpx.TransportError, ConnectionError) as error:
            result.outcome, result.detail = "broken", f"{type(error).__name__}: {error}"


async def _read_events(response: httpx.Response, case: Case, result: Result) -> None:
    is_complete = False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            if not result.outcome:
                _judge(result, case, is_complete)
            return
        event = json.loads(line[6:])
        if "error" in event:
            _refused(result, event["error"])
            continue
        result.tokens = event["output_ids"]
        result.num_seen = len(result.tokens)
        is_complete = event["meta_info"]["finish_reason"] is not None
    result.outcome = result.outcome or "broken"


def _refused(result: Result, error: dict[str, object]) -> None:
    names = {"deadline_exceeded": "deadline", "internal_error": "internal"}
    code = str(error["code"])
    result.outcome, result.detail = names.get(code, code), str(error["message"])
    result.is_retryable = bool(error["retryable"])


def _judge(result: Result, case: Case, is_complete: bool) -> None:
    if not is_complete:
        result.outcome, result.detail = "incomplete", "the answer ended without a reason"
    else:
        result.outcome = "right" if tuple(result.tokens) == case.answer else "wrong"


def is_prefix(result: Result) -> bool:
    """Returns whether the received tokens are the beginning of the right answer, or all of it."""
    return tuple(result.tokens) == result.case.answer[: len(result.tokens)]


def _stub(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceServiceStub:
    return inference_pb2_grpc.InferenceServiceStub(channel)


def _message(case: Case) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(text=case.prompt)
    request.sampling.max_new_tokens = case.num_tokens
    request.sampling.temperature = case.temperature
    request.sampling.seed = case.seed
    return request
