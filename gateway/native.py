"""SGLang's native routes: POST /generate and what belongs to it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from foredraft import __version__
from foredraft.errors import InvalidRequest
from foredraft.types import FinishReason, SamplingParams
from gateway.decoding import Chunk, OutputToken
from gateway.generation import Job
from gateway.http import Body, event_stream, read, refuse, unless_disconnected
from gateway.openai.replies import provenance
from gateway.openai.schemas import Speculation
from gateway.serving import MAX_BATCH, Serving, seed_or_random

_REFUSED = {
    "input_embeds": "prompts are text or token ids",
    "image_data": "only text can be honoured",
    "video_data": "only text can be honoured",
    "audio_data": "only text can be honoured",
    "lora_path": "LoRA adapters are not served",
    "session_params": "sessions are not served; prefixes are cached by themselves",
    "custom_logit_processor": "code in requests is not run",
    "return_hidden_states": "hidden states do not leave the verifier",
    "token_ids_logprob": "log-probabilities of chosen ids are not computed",
}
_REFUSED_SAMPLING = {
    "json_schema": "grammars cannot be honoured",
    "regex": "grammars cannot be honoured",
    "ebnf": "grammars cannot be honoured",
    "structural_tag": "grammars cannot be honoured",
    "stop_regex": "stop expressions cannot be honoured; use stop",
    "custom_params": "there is no custom logit processor",
}


class NativeSampling(Body):
    """sampling_params of /generate, with SGLang's names and defaults."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    n: int = 1
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    stop_regex: Any = None
    custom_params: Any = None


class GenerateBody(Body):
    """POST /generate."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool = False
    rid: str | list[str] | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    priority: int = 0
    log_metrics: bool = True
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: bool = False
    token_ids_logprob: Any = None
    # Extensions.
    return_provenance: bool = False
    speculation: Speculation | None = None
    timeout: float | None = None


class TokenizeBody(Body):
    """POST /tokenize."""

    prompt: str | list[str]
    add_special_tokens: bool = True
    model: str = ""


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int] | list[list[int]]
    skip_special_tokens: bool = True
    model: str = ""


class AbortBody(Body):
    """POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


@dataclass(slots=True)
class Answer:
    """One continuation so far."""

    job: Job
    body: GenerateBody
    index: int
    text: str = ""
    tokens: list[OutputToken] | None = None

    def add(self, chunk: Chunk) -> dict[str, Any]:
        """Takes a chunk; returns the answer so far, as SGLang streams it."""
        self.tokens = [*(self.tokens or []), *chunk.tokens]
        self.text += chunk.text
        return self._dict(chunk)

    def _dict(self, chunk: Chunk) -> dict[str, Any]:
        tokens = self.tokens or []
        meta: dict[str, Any] = {
            "id": self.job.name,
            "finish_reason": None,
            "prompt_tokens": len(self.job.prompt),
            "completion_tokens": len(tokens),
        }
        if self.body.return_logprob:
            meta["output_token_logprobs"] = [
                [t.logprob.logprob, t.id, t.text if self.body.return_text_in_logprobs else None]
                for t in tokens
                if t.logprob is not None
            ]
            meta["output_top_logprobs"] = [
                [
                    [value, other, None]
                    for other, value in zip(
                        t.logprob.top_tokens, t.logprob.top_logprobs, strict=True
                    )
                ]
                for t in tokens
                if t.logprob is not None
            ]
        if self.body.return_provenance:
            meta["provenance"] = provenance(tokens)
        end = chunk.completion
        if end is not None:
            account = end.account
            if end.reason is FinishReason.STOP:
                matched = end.stop_text if end.stop_text is not None else end.stop_token
                meta["finish_reason"] = {"type": "stop", "matched": matched}
            elif end.reason is FinishReason.LENGTH:
                meta["finish_reason"] = {"type": "length", "length": end.completion_tokens}
            else:
                meta["finish_reason"] = {"type": "abort", "message": "aborted"}
            meta |= {
                "completion_tokens": end.completion_tokens,
                "cached_tokens": account.cached_tokens,
                "num_retractions": account.preemptions,
                "seed": end.seed,
                "queue_time": account.queue_seconds,
                "e2e_latency": time.monotonic() - self.job.arrived,
                "drafted": account.drafted_tokens,
                "accepted": account.accepted_tokens,
                "accept_length": end.accept_length,
                "accept_rate": end.accept_rate,
                "lossy": account.lossy,
            }
            if account.verify_steps:
                meta |= {
                    "spec_accept_rate": end.accept_rate,
                    "spec_accept_length": end.accept_length,
                    "spec_num_correct_drafts": account.accepted_tokens,
                    "spec_num_proposed_drafts": account.drafted_tokens,
                    "spec_verify_ct": account.verify_steps,
                    "spec_correct_drafts_histogram": list(account.accepted_histogram),
                }
        return {"text": self.text, "output_ids": [t.id for t in tokens], "meta_info": meta}


def make_router(serving: Serving) -> APIRouter:
    """The routes over one model."""
    router = APIRouter(tags=["native"])
    limit = serving.config.max_body_bytes

    @router.api_route("/generate", methods=["POST", "PUT"], response_model=None)
    async def generate(request: Request) -> Response:
        body = await read(request, GenerateBody, limit)
        jobs, is_batch = await _jobs(serving, body)
        if body.stream:
            return await event_stream(_events(serving, body, jobs, is_batch))
        answers = await unless_disconnected(request, _whole(serving, body, jobs))
        return JSONResponse(answers if is_batch else answers[0])

    @router.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read(request, TokenizeBody, limit)
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        ids = [await serving.encode(text, body.add_special_tokens) for text in texts]
        counts = [len(tokens) for tokens in ids]
        single = isinstance(body.prompt, str)
        return {
            "tokens": ids[0] if single else ids,
            "count": counts[0] if single else counts,
            "max_model_len": serving.info.context_length,
        }

    @router.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await read(request, DetokenizeBody, limit)
        batch = _token_batch(body.tokens)
        for token in (token for tokens in batch for token in tokens):
            if not 0 <= token < serving.info.vocab_size:
                raise InvalidRequest("tokens", f"{token} is not in the vocabulary")
        texts = [await serving.decode(tokens, body.skip_special_tokens) for tokens in batch]
        return {"text": texts if _is_nested(body.tokens) else texts[0]}

    @router.post("/abort_request")
    async def abort_request(request: Request) -> dict[str, Any]:
        body = await read(request, AbortBody, limit)
        if body.abort_all:
            return {"aborted": serving.generator.abort_all()}
        if not body.rid:
            raise InvalidRequest("rid", "give a request's id, or abort_all: true")
        return {"aborted": int(serving.generator.abort(body.rid))}

    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> dict[str, Any]:
        return {"pages": await serving.pool.flush_cache()}

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> dict[str, Any]:
        info = serving.info
        return {
            "model_path": info.model_path,
            "tokenizer_path": serving.config.tokenizer_path or info.model_path,
            "is_generation": True,
            "served_model_name": info.model,
            "architecture": info.architecture,
            "context_length": info.context_length,
            "vocab_size": info.vocab_size,
            "has_chat_template": serving.tokenizer.chat_template is not None,
        }

    @router.get("/get_server_info")
    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        info = serving.info
        return {
            "version": __version__,
            "model_path": info.model_path,
            "served_model_name": info.model,
            "device": info.device,
            "dtype": info.dtype,
            "max_total_num_tokens": info.kv_tokens,
            "page_size": info.page_size,
            "context_length": info.context_length,
            "max_running_requests": info.max_running_requests,
            "speculative_algorithm": info.speculative_algorithm,
            "speculative_draft_model_path": info.draft_model,
            "speculative_num_steps": info.speculative_num_steps,
            "speculative_eagle_topk": info.speculative_eagle_topk,
            "speculative_num_draft_tokens": info.speculative_num_draft_tokens,
            "verifiers": {
                target: {
                    "waiting": load.waiting,
                    "running": load.running,
                    "free_pages": load.free_pages,
                    "total_pages": load.total_pages,
                    "draft_available": load.draft_available,
                }
                for target, load in serving.pool.loads.items()
            },
        }

    return router


async def _jobs(serving: Serving, body: GenerateBody) -> tuple[list[Job], bool]:
    """One job for each prompt, and whether the answer is a list."""
    refuse(body.model_dump(include=set(_REFUSED)), _REFUSED)
    if body.return_logprob and body.logprob_start_len != -1:
        raise InvalidRequest(
            "logprob_start_len", "log-probabilities of the prompt are not computed"
        )
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("text", "give exactly one of text and input_ids")
    if body.text is not None:
        is_batch = isinstance(body.text, list)
        texts = body.text if isinstance(body.text, list) else [body.text]
        prompts = [await serving.encode(text) for text in texts[: MAX_BATCH + 1]]
        field = "text"
    else:
        assert body.input_ids is not None
        is_batch = _is_nested(body.input_ids)
        prompts, field = _token_batch(body.input_ids), "input_ids"
    if not 1 <= len(prompts) <= MAX_BATCH:
        raise InvalidRequest(field, f"give 1 to {MAX_BATCH} prompts, not {len(prompts)}")
    given = body.sampling_params or NativeSampling()
    samplings = given if isinstance(given, list) else [given] * len(prompts)
    names = body.rid if isinstance(body.rid, list) else [body.rid or ""]
    if not isinstance(body.rid, list) and len(prompts) > 1:
        names = [f"{body.rid}-{i}" if body.rid else "" for i in range(len(prompts))]
    for name, values in (("sampling_params", samplings), ("rid", names)):
        if len(values) != len(prompts):
            raise InvalidRequest(name, f"{len(values)} given for {len(prompts)} prompts")
    jobs = [
        _job(serving, body, prompt, sampling, name, field)
        for prompt, sampling, name in zip(prompts, samplings, names, strict=True)
    ]
    return jobs, is_batch or any(job.num_choices > 1 for job in jobs)


def _job(
    serving: Serving,
    body: GenerateBody,
    prompt: list[int],
    given: NativeSampling,
    name: str,
    field: str,
) -> Job:
    refuse(given.model_dump(include=set(_REFUSED_SAMPLING)), _REFUSED_SAMPLING)
    biases = {}
    for key, bias in (given.logit_bias or {}).items():
        if not key.isdecimal() or len(key) > 9:
            raise InvalidRequest("logit_bias", f"{key!r} is not a token id")
        biases[int(key)] = bias
    sampling = SamplingParams(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        logit_bias=biases,
        seed=seed_or_random(given.sampling_seed),
        max_new_tokens=128 if given.max_new_tokens is None else given.max_new_tokens,
        min_new_tokens=given.min_new_tokens,
        stop_token_ids=tuple(given.stop_token_ids or ()),
        ignore_eos=given.ignore_eos,
        logprobs=body.top_logprobs_num if body.return_logprob else None,
    )
    stop = (given.stop,) if isinstance(given.stop, str) else tuple(given.stop or ())
    return serving.job(
        prompt,
        sampling,
        prompt_field=field,
        max_new_tokens_given=given.max_new_tokens is not None,
        name=name,
        stop=stop,
        num_choices=given.n,
        skip_special_tokens=given.skip_special_tokens,
        keep_stop=given.no_stop_trim,
        return_provenance=body.return_provenance,
        speculation=None if body.speculation is None else body.speculation.params(),
        priority=body.priority,
        timeout=body.timeout,
    )


async def _whole(serving: Serving, body: GenerateBody, jobs: list[Job]) -> list[dict[str, Any]]:
    async def collect(job: Job) -> list[dict[str, Any]]:
        async with contextlib.aclosing(serving.generator.stream(job, whole=True)) as chunks:
            found = [chunk async for chunk in chunks]
        found.sort(key=lambda chunk: chunk.index)
        return [Answer(job, body, chunk.index).add(chunk) for chunk in found]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(collect(job)) for job in jobs]
    return [answer for task in tasks for answer in task.result()]


async def _events(
    serving: Serving, body: GenerateBody, jobs: list[Job], is_batch: bool
) -> AsyncIterator[dict[str, Any]]:
    """Each chunk holds the whole answer so far, and its index in a batch."""
    if len(jobs) > 1:
        raise InvalidRequest("stream", "stream one prompt at a time")
    job = jobs[0]
    answers = [Answer(job, body, i) for i in range(job.num_choices)]
    async with contextlib.aclosing(serving.generator.stream(job)) as chunks:
        async for chunk in chunks:
            answer = answers[chunk.index].add(chunk)
            yield {"index": chunk.index, **answer} if is_batch else answer


def _is_nested(tokens: list[int] | list[list[int]]) -> bool:
    return bool(tokens) and isinstance(tokens[0], list)


def _token_batch(tokens: list[int] | list[list[int]]) -> list[list[int]]:
    return list(tokens) if _is_nested(tokens) else [list(tokens)]  # type: ignore[arg-type]
