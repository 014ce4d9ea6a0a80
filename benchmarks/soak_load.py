"""The soak's clients: every kind of request that a stack gets, with an answer that is known to be
right or wrong.
"""

import asyncio
import collections
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

from foredraft.bench import prompts
from foredraft.bench.http_client import ConnectionBroken, HttpClient, Response

KEYS = ("alpha", "beta", "gamma")
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
PREFIX = " ".join(f"Rule {i}: say what you know in plain words, and no more." for i in range(8))


class Unexpected(Exception):
    """Raised for an answer that should have been another."""


class Gone(Exception):
    """Raised where the client hangs up."""


class Load:
    """Clients that ask one thing after another until they are stopped.

    Attributes:
        outcomes: Requests by kind.
        unexpected: Sentences about answers that were wrong.
    """

    def __init__(self, url: str, clients: int, pause: float, seed: int) -> None:
        self._url = url
        self._clients = clients
        self._pause = pause
        self._seed = seed
        self._stopping = asyncio.Event()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.unexpected: list[str] = []

    @property
    def num_done(self) -> int:
        """Number of requests that ended."""
        return self.outcomes.total()

    def stop(self) -> None:
        """Lets the clients end after the request that they wait for."""
        self._stopping.set()

    async def run(self) -> None:
        """Runs all clients until `stop`."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        choose = random.Random(f"{self._seed}/{number}")
        connections = [HttpClient(self._url, {"Authorization": f"Bearer {key}"}) for key in KEYS]
        stranger = HttpClient(self._url, {"Authorization": "Bearer omega"})
        asker = Asker(choose, prompts.tasks(self._seed * 1000 + number), stranger)
        while not self._stopping.is_set():
            kind, ask = choose.choice(asker.kinds)
            try:
                async with asyncio.timeout(300):
                    await ask(choose.choice(connections))
            except (Unexpected, ConnectionBroken, TimeoutError, ValueError, KeyError) as error:
                self.unexpected.append(f"{kind}: {type(error).__name__} {error}"[:400])
                kind = f"{kind}, WRONG"
            self.outcomes[kind] += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._pause)
        for connection in (*connections, stranger):
            connection.close()


class Asker:
    """Makes requests and checks their answers.

    Args:
        stranger: A client with a key that the server does not know.
    """

    def __init__(
        self, choose: random.Random, source: prompts.PromptSource, stranger: HttpClient
    ) -> None:
        self._stranger = stranger
        self._choose = choose
        self._source = source
        asks: dict[str, tuple[int, Callable[[HttpClient], Awaitable[None]]]] = {
            "stream": (6, self.stream),
            "chat stream": (3, self.chat),
            "whole answer, several choices": (2, self.choices),
            "stop string": (3, self.stop_string),
            "shared prefix": (3, self.shared_prefix),
            "log-probabilities and penalties": (1, self.logprobs),
            "native": (2, self.native),
            "client gone in the middle": (4, self.gone),
            "client gone at once": (1, self.gone_at_once),
            "bad request": (3, self.bad),
            "unknown key": (1, self.unknown_key),
            "tokenize": (1, self.tokenize),
            "pages and models": (1, self.pages),
        }
        self.kinds = [(name, ask) for name, (weight, ask) in asks.items() for _ in range(weight)]

    async def stream(self, client: HttpClient) -> None:
        events = await self._stream(client, "/v1/completions", self._completion())
        _check_stream(events)

    async def chat(self, client: HttpClient) -> None:
        body = self._completion()
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        _check_stream(await self._stream(client, "/v1/chat/completions", body))

    async def choices(self, client: HttpClient) -> None:
        answer = _ok(await _post(client, "/v1/completions", {**self._completion(), "n": 2}))
        _expect(len(answer["choices"]) == 2, "two choices", answer)

    async def stop_string(self, client: HttpClient) -> None:
        stops = self._choose.sample([" the", "\n", ".", "e", " of"], 2)
        answer = _ok(await _post(client, "/v1/completions", {**self._completion(), "stop": stops}))
        text = answer["choices"][0]["text"]
        _expect(not any(stop in text for stop in stops), f"no {stops} in the text", answer)

    async def shared_prefix(self, client: HttpClient) -> None:
        body = self._completion()
        body["prompt"] = f"{PREFIX}\n{body['prompt']}"
        _ok(await _post(client, "/v1/completions", body))

    async def logprobs(self, client: HttpClient) -> None:
        body = {
            **self._completion(),
            "logprobs": 3,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.1,
        }
        choice = _ok(await _post(client, "/v1/completions", body))["choices"][0]
        _expect(choice["logprobs"] is not None or not choice["text"], "log-probabilities", choice)

    async def native(self, client: HttpClient) -> None:
        sampling = {"max_new_tokens": 24, "temperature": self._choose.choice(TEMPERATURES)}
        answer = _ok(
            await _post(client, "/generate", {"text": self._prompt(), "sampling_params": sampling})
        )
        _expect(answer["meta_info"]["finish_reason"] is not None, "an end", answer)

    async def gone(self, client: HttpClient) -> None:
        num_reads = self._choose.randint(1, 5)

        def hang_up(now: float, data: bytes) -> None:
            nonlocal num_reads
            num_reads -= 1
            if num_reads == 0:
                raise Gone

        body = {**self._completion(), "stream": True, "max_tokens": 200}
        with contextlib.suppress(Gone):
            await client.post("/v1/completions", json.dumps(body).encode(), hang_up)

    async def gone_at_once(self, client: HttpClient) -> None:
        body = {**self._completion(), "max_tokens": 200}
        request = asyncio.ensure_future(_post(client, "/v1/completions", body))
        await asyncio.sleep(self._choose.uniform(0, 0.05))
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request

    async def bad(self, client: HttpClient) -> None:
        prompt = self._prompt()
        body, status = self._choose.choice(
            [
                ({"prompt": prompt, "temperature": -1}, 400),
                ({"prompt": prompt, "max_tokens": -1}, 400),
                ({"prompt": prompt, "no_such_field": 1}, 400),
                ({"prompt": prompt, "model": "no-such-model"}, 404),
                ({"prompt": [2**30]}, 400),
                ({"prompt": "word " * 20_000}, 400),
                ({}, 400),
            ]
        )
        response = await _post(client, "/v1/completions", body)
        _expect(
            response.status == status, f"status {status}", (response.status, response.body[:200])
        )

    async def unknown_key(self, client: HttpClient) -> None:
        response = await _post(self._stranger, "/v1/completions", self._completion())
        _expect(response.status == 401, "status 401", (response.status, response.body[:200]))

    async def tokenize(self, client: HttpClient) -> None:
        prompt = self._prompt()
        tokens = _ok(await _post(client, "/tokenize", {"prompt": prompt}))["tokens"]
        text = _ok(await _post(client, "/detokenize", {"tokens": tokens}))["text"]
        _expect(prompt.strip() in text, "the same text", (prompt, text))

    async def pages(self, client: HttpClient) -> None:
        for path in ("/v1/models", "/health", "/metrics", "/get_server_info"):
            response = await client.get(path)
            _expect(response.status == 200, f"200 of {path}", response.status)

    def _prompt(self) -> str:
        return self._source.take().text

    def _completion(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": self._prompt(),
            "max_tokens": self._choose.choice((1, 8, 24, 64)),
            "temperature": self._choose.choice(TEMPERATURES),
        }
        if self._choose.random() < 0.3:
            body |= {"seed": self._choose.randrange(2**31), "top_p": 0.9, "top_k": 40}
        return body

    async def _stream(self, client: HttpClient, path: str, body: dict[str, Any]) -> list[bytes]:
        parts: list[bytes] = []
        options = {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps({**body, **options}).encode()
        response = await client.post(path, data, lambda now, read: parts.append(read))
        _expect(response.status == 200, "status 200", (response.status, response.body[:200]))
        return [line for line in b"".join(parts).split(b"\n") if line.startswith(b"data:")]


async def _post(client: HttpClient, path: str, body: dict[str, Any]) -> Response:
    return await client.post(path, json.dumps(body).encode())


def _ok(response: Response) -> Any:
    _expect(response.status == 200, "status 200", (response.status, response.body[:200]))
    return response.json()


def _check_stream(events: list[bytes]) -> None:
    _expect(events[-1] == b"data: [DONE]", "[DONE]", events[-1])
    usage = json.loads(events[-2][5:])["usage"]
    _expect(usage["completion_tokens"] >= 1, "tokens", usage)
    _expect(b'"error"' not in b"".join(events), "no error", events[-2])


def _expect(condition: bool, what: str, found: Any) -> None:
    if not condition:
        raise Unexpected(f"not {what}: {found}")
