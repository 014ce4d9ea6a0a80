"""POST /generate and the other routes of SGLang's own API."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from foredraft.errors import InvalidRequest
from foredraft.types import SamplingParams, check_tokens
from gateway.bodies import read, refuse
from gateway.event_streams import event_stream, unless_disconnected
from gateway.field_names import naming_by
from gateway.job_checks import MAX_BATCH, check_batch
from gateway.jobs import Job, JobOptions
from gateway.native import info
from gateway.native.answers import Answer, Pace
from gateway.native.schemas import (
    REFUSED,
    REFUSED_SAMPLING,
    AbortBody,
    DetokenizeBody,
    GenerateBody,
    NativeSampling,
    TokenizeBody,
)
from gateway.openai import chats
from gateway.openai.schemas import Speculation
from gateway.openapi import reads
from gateway.sampling_fields import given_sampling
from gateway.serving import Serving, seed_or_random


def make_router(serving: Serving) -> APIRouter:
    """Creates the routes."""
    router = APIRouter(tags=["native"])
    bounds = serving.bounds

    @router.post("/generate", response_model=None, openapi_extra=reads(GenerateBody))
    @router.put("/generate", response_model=None, openapi_extra=reads(GenerateBody))
    async def generate(request: Request) -> Response:
        """Goes on with a text or token ids, in SGLang's form; `meta_info` tells of the drafts."""
        body = await read(request, GenerateBody, bounds)
        with naming_by(body.field):
            jobs, is_batch = await _jobs(serving, body)
            if body.stream:
                events = _events(serving, body, jobs, is_batch)
                return await event_stream(request, events, field=body.field)
            answers = await unless_disconnected(request, _whole(serving, body, jobs))
            return JSONResponse(answers if is_batch else answers[0])

    _add_tokenizer(router, serving)
    _add_control(router, serving)
    return router


def _add_tokenizer(router: APIRouter, serving: Serving) -> None:
    bounds = serving.bounds

    @router.post("/tokenize", response_model=None, openapi_extra=reads(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of a conversation by the chat template."""
        body = await read(request, TokenizeBody, bounds)
        serving.check_model(body.model)
        chat = body.chat()
        if chat is not None:
            ids = [(await chats.render(serving, chat)).ids]
            return _tokens(serving, ids, is_single=True)
        assert body.prompt is not None
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        check_batch("prompt", len(texts), 1)
        ids = [await serving.encode(text, body.add_special_tokens) for text in texts]
        return _tokens(serving, ids, is_single=isinstance(body.prompt, str))

    @router.post("/detokenize", response_model=None, openapi_extra=reads(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await read(request, DetokenizeBody, bounds)
        serving.check_model(body.model)
        batch = _token_batch(body.tokens)
        check_batch("tokens", len(batch), 1)
        for tokens in batch:
            check_tokens("tokens", tokens, serving.info.vocab_size)
        texts = [await serving.decode(tokens, body.skip_special_tokens) for tokens in batch]
        return JSONResponse({"text": texts if _is_nested(body.tokens) else texts[0]})


def _add_control(router: APIRouter, serving: Serving) -> None:
    @router.post("/abort_request", openapi_extra=reads(AbortBody))
    async def abort_request(request: Request) -> dict[str, Any]:
        """Ends a running request of the same key, or all of them."""
        body = await read(request, AbortBody, serving.bounds)
        if body.abort_all:
            return {"aborted": serving.generator.abort_all()}
        if not body.rid:
            raise InvalidRequest("rid", "give a request's id, or abort_all: true")
        return {"aborted": serving.generator.abort(body.rid)}

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache() -> dict[str, Any]:
        """Forgets cached prefixes; `pages` says how many pages they had."""
        return {"pages": await serving.pool.flush_cache()}

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> dict[str, Any]:
        """The model: names, context length, vocabulary."""
        return info.model_info(serving)

    @router.get("/get_server_info")
    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """The server: version, device, KV pool, drafts."""
        return info.server_info(serving)


def _tokens(serving: Serving, ids: list[list[int]], *, is_single: bool) -> JSONResponse:
    """Returns the answer of /tokenize, not as a dict: FastAPI would check every id for seconds."""
    counts = [len(tokens) for tokens in ids]
    return JSONResponse(
        {
            "tokens": ids[0] if is_single else ids,
            "count": counts[0] if is_single else counts,
            "max_model_len": serving.info.context_length,
        }
    )


async def _jobs(serving: Serving, body: GenerateBody) -> tuple[list[Job], bool]:
    """Makes one job for each prompt; also returns whether the answer is a list."""
    refuse(body.model_dump(include=set(REFUSED)), REFUSED)
    if body.logprob_start_len < -1:
        raise InvalidRequest(
            "logprob_start_len",
            f"must be -1 (the output alone) or more, not {body.logprob_start_len}",
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
    check_batch(field, len(prompts), 1)
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
    check_batch("sampling_params.n", len(jobs), max(job.num_choices for job in jobs))
    return jobs, is_batch or any(job.num_choices > 1 for job in jobs)


def _job(
    serving: Serving,
    body: GenerateBody,
    prompt: list[int],
    given: NativeSampling,
    name: str,
    field: str,
) -> Job:
    refuse(given.model_dump(include=set(REFUSED_SAMPLING)), REFUSED_SAMPLING)
    scores_prompt = body.return_logprob and body.logprob_start_len >= 0
    sampling = SamplingParams(
        **given_sampling(given),
        seed=seed_or_random(given.sampling_seed),
        max_new_tokens=128 if given.max_new_tokens is None else given.max_new_tokens,
        min_new_tokens=given.min_new_tokens,
        logprobs=body.top_logprobs_num if body.return_logprob else None,
        prompt_logprobs=body.top_logprobs_num if scores_prompt else None,
        prompt_logprobs_from=body.logprob_start_len if scores_prompt else 0,
        grammar=given.grammar(),
        bad_words=serving.bad_words(given.bad_words),
    )
    stop = (given.stop,) if isinstance(given.stop, str) else tuple(given.stop or ())
    options = JobOptions(
        name=name,
        call=body.rid if isinstance(body.rid, str) else "",
        stop=stop,
        num_choices=given.n,
        skip_special_tokens=given.skip_special_tokens,
        keep_stop=given.no_stop_trim,
        return_provenance=body.return_provenance,
        speculation=(body.speculation or Speculation()).params(),
        priority=body.priority,
        timeout=body.timeout,
    )
    must_fit = given.max_new_tokens is not None
    return serving.job(
        prompt, sampling, options, prompt_field=field, must_fit=must_fit, may_be_empty=True
    )


async def _whole(serving: Serving, body: GenerateBody, jobs: list[Job]) -> list[dict[str, Any]]:
    found = await serving.generator.complete(jobs)
    return [
        Answer(job, body, serving.tokenizer).add(chunk)
        for job, chunks in zip(jobs, found, strict=True)
        for chunk in chunks
    ]


async def _events(
    serving: Serving, body: GenerateBody, jobs: list[Job], is_batch: bool
) -> AsyncGenerator[bytes, None]:
    """Yields events, each with the whole answer so far, and its index in a batch."""
    answers = [
        [(Answer(job, body, serving.tokenizer), Pace()) for _ in range(job.num_choices)]
        for job in jobs
    ]
    async with contextlib.aclosing(serving.generator.stream_all(jobs)) as chunks:
        async for i, chunk in chunks:
            answer, pace = answers[i][chunk.index]
            so_far = answer.add(chunk)
            if chunk.completion is None and not pace.is_due:
                continue
            index = sum(job.num_choices for job in jobs[:i]) + chunk.index
            yield pace.encode({"index": index, **so_far} if is_batch else so_far)


def _is_nested(tokens: list[int] | list[list[int]]) -> bool:
    return bool(tokens) and isinstance(tokens[0], list)


def _token_batch(tokens: list[int] | list[list[int]]) -> list[list[int]]:
    return list(tokens) if _is_nested(tokens) else [list(tokens)]  # type: ignore[arg-type]
