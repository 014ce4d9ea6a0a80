"""The HTTP application: routes, health, metrics, and errors in OpenAI's envelope."""

import asyncio
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response

from foredraft import __version__
from foredraft.errors import ForedraftError, InvalidRequest, Unavailable
from foredraft.telemetry import metrics as telemetry_metrics
from foredraft.types import SamplingParams
from gateway import envelopes, openapi, pages, reference
from gateway.anthropic import routes as anthropic
from gateway.anthropic.schemas import CountBody, MessagesBody
from gateway.figures import Figures
from gateway.http import HeadAsGet, RequestNames, error_response
from gateway.jobs import JobOptions
from gateway.native import routes as native
from gateway.native.schemas import AbortBody, DetokenizeBody, GenerateBody, TokenizeBody
from gateway.openai import routes as openai
from gateway.openai.schemas import ChatBody, CompletionBody
from gateway.responses import routes as responses
from gateway.responses.schemas import ResponsesBody
from gateway.security.gate import Gate
from gateway.security.http import GateMiddleware
from gateway.serving import Serving

PROBE_SECONDS = 20.0
BODIES = (
    CompletionBody,
    ChatBody,
    ResponsesBody,
    MessagesBody,
    CountBody,
    GenerateBody,
    TokenizeBody,
    DetokenizeBody,
    AbortBody,
)


def make_app(serving: Serving, gate: Gate, figures: Figures) -> FastAPI:
    """Creates the application that serves one model behind a gate."""
    app = FastAPI(
        title="Foredraft",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        # It would lead to http where a proxy speaks TLS, and the client's prompt with it.
        redirect_slashes=False,
    )
    app.include_router(openai.make_router(serving))
    app.include_router(responses.make_router(serving))
    app.include_router(anthropic.make_router(serving))
    app.include_router(native.make_router(serving))
    app.include_router(pages.make_router(figures))
    app.include_router(reference.make_router(app))
    _add_health(app, serving)
    app.add_middleware(GateMiddleware, gate=gate, config=serving.config)
    _add_errors(app)
    app.add_middleware(HeadAsGet)
    if serving.config.allowed_origin:
        # Outermost, so that a page may read refusals too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=serving.config.allowed_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
            max_age=3600,
        )
    openapi.install(app, BODIES)
    return app


def _add_health(app: FastAPI, serving: Serving) -> None:
    @app.get("/version", tags=["health"])
    async def version() -> dict[str, Any]:
        """Foredraft's version."""
        return {"version": __version__}

    @app.api_route("/ping", methods=["GET", "POST"], tags=["health"], include_in_schema=False)
    @app.get("/health", tags=["health"])
    async def health() -> dict[str, Any]:
        """Ready when a verifier is usable.

        A draft that is down, or one of several verifiers, is told: degraded.
        """
        if not serving.is_ready:
            raise Unavailable("no verifier is ready")
        pool = serving.pool
        drafting = serving.info.speculative_algorithm == "NONE" or all(
            load.draft_available for load in pool.loads.values()
        )
        is_whole = drafting and pool.num_usable == pool.num_known
        return {
            "status": "ok" if is_whole else "degraded",
            "draft_available": drafting,
            "verifiers": {"usable": pool.num_usable, "known": pool.num_known},
        }

    @app.get("/health_generate", tags=["health"])
    async def health_generate() -> dict[str, Any]:
        """Ready when one token can be generated."""
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1)
        probe = serving.job([0], sampling, JobOptions(timeout=PROBE_SECONDS))
        async with aclosing(serving.generator.stream(probe)) as chunks:
            async for _ in chunks:
                pass
        return {"status": "ok"}

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text format."""
        page = await asyncio.to_thread(telemetry_metrics.render)
        return Response(page, media_type=telemetry_metrics.CONTENT_TYPE)


def _add_errors(app: FastAPI) -> None:
    app.add_middleware(RequestNames)

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        return error_response(error, request.url.path)

    for kind in (ForedraftError, ExceptionGroup):
        app.add_exception_handler(kind, on_error)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return PlainTextResponse("the client has gone", 499)

    @app.exception_handler(RequestValidationError)
    async def on_validation(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        invalid = InvalidRequest(str(first["loc"][-1]), str(first["msg"]))
        return error_response(invalid, request.url.path)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        message = f"{request.method} {path}: {error.detail}"
        if error.status_code == 404:
            message += f"; {_nearest_route(app, path)}/openapi.json has all routes"
        body = envelopes.envelope_of(error.status_code, message, path)
        return JSONResponse(body, error.status_code, error.headers)


def _nearest_route(app: FastAPI, path: str) -> str:
    """Returns a question for a path with a beginning too much or too little, empty for others.

    A client's base URL may lack `/v1`, or have it twice.
    """
    asked = path.rstrip("/")
    near = [
        route for route in app.openapi()["paths"] if route.endswith(asked) or asked.endswith(route)
    ]
    found = min(near, key=lambda route: abs(len(route) - len(asked)), default="")
    return f"did you mean {found}? " if asked and found else ""
