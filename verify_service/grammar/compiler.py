"""Compiles grammars: the worker process tries them out, then this process compiles and caches
them.
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import ForedraftError, InvalidRequest, Overloaded
from foredraft.rpc.lifetime import child_environment
from foredraft.types import Grammar
from verify_service import metrics
from verify_service.grammar.wire import HEAD, pack

if TYPE_CHECKING:
    from verify_service.grammar.matcher import CompiledGrammar

logger = logging.getLogger(__name__)

FIELD = "grammar"
MAX_WAITING = 128  # grammars that may wait to be tried
CACHED = 256  # grammars kept, refused ones among them
CACHED_BYTES = 2**28  # maximum size of cached grammars, estimated from the memory of their trials
BOUND_SECONDS = 60.0  # how long a grammar that ran over its bounds is refused without another trial


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits for compiling one grammar."""

    seconds: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A grammar that is refused until a time.monotonic()."""

    message: str
    until: float


class GrammarCompiler:
    """Compiles grammars for one model.

    For one event loop; the worker starts with the first grammar.

    Args:
        path: Directory of the model, for its tokenizer.
        vocab_size: Tokens that the model has logits for.
        eos_token_ids: The model's end tokens.
    """

    def __init__(
        self, path: Path, vocab_size: int, eos_token_ids: frozenset[int], limits: GrammarLimits
    ) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._limits = limits
        self._cache: OrderedDict[Grammar, CompiledGrammar | _Refusal] = OrderedDict()
        self._bytes: dict[Grammar, int] = {}  # estimated size of each compiled grammar
        self._running: dict[Grammar, asyncio.Task[CompiledGrammar]] = {}
        self._worker: _Worker | None = None
        self._starting = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._vocabulary: Any = None

    def cached(self, grammar: Grammar) -> "CompiledGrammar | None":
        """Returns the compiled grammar, if it is cached.

        Raises:
            InvalidRequest: It was refused before.
        """
        found = self._cache.get(grammar)
        if found is None:
            return None
        if isinstance(found, _Refusal):
            if found.until <= time.monotonic():
                del self._cache[grammar], self._bytes[grammar]
                return None
            raise InvalidRequest(FIELD, found.message)
        self._cache.move_to_end(grammar)
        metrics.GRAMMAR_CACHE_HITS.inc()
        return found

    async def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """The compiled grammar. Requests for the same one share the work.

        Raises:
            InvalidRequest: It is wrong, or takes too much.
            Overloaded: Too many grammars wait.
        """
        found = self.cached(grammar)
        if found is not None:
            return found
        task = self._running.get(grammar)
        if task is None:
            if why := _unavailable(self._path):
                raise InvalidRequest(FIELD, why)
            if len(self._running) >= MAX_WAITING:
                raise Overloaded("too many grammars wait to be compiled")
            task = self._running[grammar] = asyncio.create_task(self._compile(grammar))
            task.add_done_callback(lambda done: self._done(grammar, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ends the worker."""
        for task in self._running.values():
            task.cancel()
        if self._worker is not None:
            await self._worker.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _done(self, grammar: Grammar, task: "asyncio.Task[CompiledGrammar]") -> None:
        del self._running[grammar]
        if not task.cancelled():
            task.exception()  # the waiting request may have gone

    async def _compile(self, grammar: Grammar) -> "CompiledGrammar":
        started = time.monotonic()
        answer = await self._try({"kind": grammar.kind.value, "text": grammar.text})
        if "error" in answer:
            is_bound = answer.get("is_bound", False)
            metrics.GRAMMARS_REFUSED.labels("bound" if is_bound else "invalid").inc()
            until = time.monotonic() + BOUND_SECONDS if is_bound else float("inf")
            self._keep(grammar, _Refusal(answer["error"], until))
            raise InvalidRequest(FIELD, answer["error"])
        loop = asyncio.get_running_loop()
        compiled = await loop.run_in_executor(self._thread, self._build, answer["grammar"])
        metrics.GRAMMAR_COMPILE_SECONDS.observe(time.monotonic() - started)
        self._keep(grammar, compiled, answer["bytes"])
        return compiled

    async def _try(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the worker's answer; restarts a lost worker once."""
        try:
            return await (await self._started()).ask(request)
        except _WorkerLost:
            return await (await self._started()).ask(request)

    def _keep(self, grammar: Grammar, value: "CompiledGrammar | _Refusal", size: int = 0) -> None:
        self._cache[grammar] = value
        self._bytes[grammar] = size + len(grammar.text)
        while len(self._cache) > CACHED or sum(self._bytes.values()) > CACHED_BYTES:
            oldest, _ = self._cache.popitem(last=False)
            del self._bytes[oldest]

    def _build(self, text: str) -> "CompiledGrammar":
        import llguidance

        from verify_service.grammar.matcher import CompiledGrammar
        from verify_service.grammar.vocabulary import LIMITS, load_vocabulary

        if self._vocabulary is None:
            self._vocabulary = load_vocabulary(self._path, self._vocab_size, self._eos_token_ids)
        matcher = llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(FIELD, matcher.get_error()[:500])
        return CompiledGrammar(matcher, self._vocabulary.vocab_size)

    async def _started(self) -> "_Worker":
        async with self._starting:
            if self._worker is None or self._worker.has_ended:
                self._worker = await _Worker.start(
                    str(self._path),
                    str(self._vocab_size),
                    ",".join(map(str, sorted(self._eos_token_ids))),
                    str(self._limits.seconds),
                    str(self._limits.memory_mb),
                )
            return self._worker


class _WorkerLost(ForedraftError):
    """Raised when the worker ended before it answered."""


class _Worker:
    """Holds the worker process and the requests that it has not answered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_asked = 0
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, *arguments: str) -> "_Worker":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "verify_service.grammar.worker",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**child_environment(), "TOKENIZERS_PARALLELISM": "false"},
        )
        return cls(process)

    @property
    def has_ended(self) -> bool:
        """Whether the worker has stopped answering."""
        return self._reader.done()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the answer."""
        self._num_asked += 1
        number = self._num_asked
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(pack({"id": number, **request}))
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Ends the process."""
        self._reader.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _read(self) -> None:
        out = self._process.stdout
        assert out is not None
        try:
            while True:
                size = HEAD.unpack(await out.readexactly(HEAD.size))[0]
                answer = json.loads(await out.readexactly(size))
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, OSError):
            logger.warning("the grammar worker has ended")
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(_WorkerLost("the grammar worker was lost; retry"))


def _unavailable(path: Path) -> str:
    """Returns why grammars cannot be served for a model here; empty where they can."""
    if importlib.util.find_spec("llguidance") is None:
        return "cannot be honoured: llguidance is not installed at the verifier"
    if not (path / "tokenizer.json").is_file():
        return "cannot be honoured: the verifier's model directory has no tokenizer.json"
    return ""
