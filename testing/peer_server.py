"""A minimal foreign server with OpenAI's API, which refuses unknown fields as a stranger to
Foredraft.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, StreamingResponse

FIELDS = {"model", "prompt", "messages", "max_tokens", "temperature", "stream", "stream_options"}


class PeerServer:
    """Answers each prompt with a number of `word`s, one event each.

    Pauses before the first and between them.

    Attributes:
        bodies: Requests that it received.
        arrived: Their times by `time.perf_counter`.
        fail_every: Distance of requests that get a 500; 0 for none.
        slots: Maximum number of requests in work; others wait.
        key: Key that /v1/models asks for; empty for none.
    """

    def __init__(self, first: float = 0.05, between: float = 0.01, slots: int = 1000) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.arrived: list[float] = []
        self.fail_every = 0
        self.key = ""
        self.url = ""
        self._first = first
        self._between = between
        self._slots = slots
        app = FastAPI()
        app.get("/v1/models")(self._models)
        app.post("/v1/completions")(self._answer)
        app.post("/v1/chat/completions")(self._answer)
        self._app = app

    def _models(self, request: Request) -> Any:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "a key is needed"}}, 401)
        return {"object": "list", "data": [{"id": "words-1", "owned_by": "somebody else"}]}

    async def _answer(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self.arrived.append(time.perf_counter())
        if unknown := set(body) - FIELDS:
            return JSONResponse({"error": {"message": f"unknown: {sorted(unknown)}"}}, 400)
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return JSONResponse({"error": {"message": "out of luck"}}, 500)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        async with self._semaphore:
            for i in range(body["max_tokens"]):
                await asyncio.sleep(self._between if i else self._first)
                choice: dict[str, Any] = {"index": 0, "finish_reason": None}
                choice |= {"text": "word "} if "prompt" in body else {"delta": {"content": "word "}}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": body["max_tokens"]}
        end = {"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}]}
        yield f"data: {json.dumps(end)}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

    @contextlib.contextmanager
    def running(self) -> Iterator["PeerServer"]:
        """Serves on a free port until the block ends."""
        server = uvicorn.Server(uvicorn.Config(self._app, port=0, log_level="error"))

        async def serve() -> None:
            self._semaphore = asyncio.Semaphore(self._slots)
            await server.serve()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            yield self
        finally:
            server.should_exit = True
            thread.join()
