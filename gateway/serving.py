"""Shared state of all fronts: the served model, its tokenizer, and the checks that make jobs."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from foredraft.api.verify.v1 import verify_pb2
from foredraft.config.services import GatewayConfig
from foredraft.errors import (
    InvalidRequest,
    PromptTooLong,
    Unavailable,
)
from foredraft.models.hub import tokenizer_directory
from foredraft.sampling.seeds import random_seed
from foredraft.text.chat_template import read_template
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams, check_tokens
from gateway.bodies import Bounds
from gateway.encoding.pool import EncodingPool
from gateway.errors import UnknownModel
from gateway.generation import Generator
from gateway.job_checks import (
    check_length,
    check_options,
    check_prompt_length,
    check_prompt_logprobs,
    checked_sampling,
)
from gateway.jobs import Job, JobOptions, fitted, shortened
from gateway.verifier_pool import VerifierPool

MAX_BAD_TEXTS = 512
MAX_BAD_CHARACTERS = 128
STOPPING = "the gateway is stopping"
NOT_YET = "no verifier has answered yet: the server is starting, or its log says why not; try again"


class _Opened(NamedTuple):
    """What needs the tokenizer's files."""

    tokenizer: Tokenizer
    generator: Generator
    encoding: EncodingPool


class Serving:
    """The model behind the fronts. `open` it once it `can_open`.

    Attributes:
        started: Unix time.

    Raises:
        ConfigError: --chat-template cannot be read.
    """

    def __init__(self, config: GatewayConfig, pool: VerifierPool) -> None:
        self.config = config
        self._template = read_template(config.chat_template)
        self.bounds = Bounds(config.max_body_bytes, config.client_timeout)  # of HTTP clients
        self.pool = pool
        self.started = int(time.time())
        self._opened: _Opened | None = None
        self._draining = False

    @property
    def can_open(self) -> bool:
        """Whether it is known where the tokenizer is: by a flag, or from a verifier's answer."""
        return bool(self.config.tokenizer_path) or self.pool.info is not None

    async def open(self) -> None:
        """Loads the tokenizer, here and in the processes that encode.

        Raises:
            CheckpointError: The tokenizer is missing or broken.
        """
        named = self.config.tokenizer_path or self.info.model_path
        path = await asyncio.to_thread(tokenizer_directory, named)
        config = self.config
        encoding = EncodingPool(
            path,
            config.chat_template,
            num_processes=config.tokenizer_processes,
            timeout=config.tokenizer_timeout,
            memory_mb=config.tokenizer_memory_mb,
        )
        try:
            tokenizer, _ = await asyncio.gather(
                asyncio.to_thread(self._load, path), encoding.start()
            )
        except BaseException:
            await encoding.close()
            raise
        generator = Generator(self.pool, tokenizer, config.max_queue_seconds)
        self._opened = _Opened(tokenizer, generator, encoding)

    def _load(self, path: str) -> Tokenizer:
        tokenizer = Tokenizer.from_dir(path, self._template)
        # Found once, which takes a look through the vocabulary: no request should wait for it.
        _ = tokenizer.longest_token
        return tokenizer

    async def drain(self) -> None:
        """Refuses new requests from here on; returns when no request runs.

        Where it is cancelled, requests that still run end with Unavailable, and so do those that
        have not arrived whole.
        """
        self._draining = True
        opened = self._opened
        try:
            if opened is not None:
                await opened.generator.wait_idle()
        finally:
            if opened is not None:
                opened.generator.end_all(Unavailable(STOPPING))
            self.pool.stop_waiting()
            self.bounds.refuse_all(STOPPING)

    async def close(self) -> None:
        """Ends the processes that encode."""
        if self._opened is not None:
            await self._opened.encoding.close()

    @property
    def is_ready(self) -> bool:
        """Whether a request can be served now."""
        return self._opened is not None and not self._draining and self.pool.num_usable > 0

    @property
    def info(self) -> verify_pb2.GetModelInfoResponse:
        """Information on the model that the verifiers serve."""
        if self.pool.info is None:
            raise Unavailable(NOT_YET)
        return self.pool.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._ready().tokenizer

    @property
    def generator(self) -> Generator:
        """The generator that runs jobs."""
        return self._ready().generator

    def check_model(self, name: str) -> None:
        """Raises UnknownModel for a name that is not served; an empty name means the only model."""
        if name and name != self.info.model:
            raise UnknownModel(name, self.info.model)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns a text's token ids.

        Raises:
            PromptTooLong: The text has more characters than the context can hold.
        """
        limit = self.info.context_length * self.tokenizer.longest_token
        if len(text) > limit:
            raise PromptTooLong(
                "prompt",
                f"it has {len(text)} characters; this model's maximum context length is"
                f" {self.info.context_length} tokens, which no more than {limit} can fit",
            )
        return await self._ready().encoding.encode(text, add_special_tokens, "prompt")

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], /, **variables: Any
    ) -> list[int]:
        """Returns a conversation's token ids, by the model's chat template."""
        return await self._ready().encoding.encode_chat(messages, variables, "messages")

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        return await self._ready().encoding.decode(tokens, skip_special_tokens, "tokens")

    def bad_words(self, texts: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences of texts that an output must not contain.

        Each text has two: at the beginning of a word, and inside one.

        Raises:
            InvalidRequest: They are too many, or one is empty or too long.
        """
        texts = texts or ()
        if len(texts) > MAX_BAD_TEXTS:
            raise InvalidRequest("bad_words", f"at most {MAX_BAD_TEXTS} words, not {len(texts)}")
        found: dict[tuple[int, ...], None] = {}
        for text in texts:
            word = text.lstrip()
            if not 1 <= len(word) <= MAX_BAD_CHARACTERS:
                raise InvalidRequest(
                    "bad_words", f"a word has 1 to {MAX_BAD_CHARACTERS} characters beside spaces"
                )
            for variant in (word, f" {word}"):
                found[tuple(self.tokenizer.encode(variant, add_special_tokens=False))] = None
        return tuple(found)

    def job(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        options: JobOptions,
        *,
        prompt_field: str = "prompt",
        must_fit: bool = True,
        may_be_empty: bool = False,
    ) -> Job:
        """Creates a job; refuses all that the verifier would refuse, with the client's field names.

        Args:
            prompt_field: The client's name for the prompt.
            must_fit: Whether a length that does not fit is an error, as where the client chose it;
                else it is cut.
            may_be_empty: Whether a request for zero tokens is allowed.

        Raises:
            InvalidRequest: A field is wrong.
            Unavailable: The gateway is stopping, or no verifier has answered yet.
        """
        if self._draining:
            raise Unavailable(STOPPING)
        info, config = self.info, self.config
        check_tokens(prompt_field, prompt, info.vocab_size)
        sampling = checked_sampling(sampling, info, may_be_empty)
        check_options(options)
        check_prompt_length(len(prompt), config.max_prompt_tokens)
        if sampling.prompt_logprobs is not None:
            check_prompt_logprobs(sampling, len(prompt), options.num_choices)
        fitting = fitted(sampling, len(prompt), info.context_length)
        if must_fit:
            check_length(sampling, fitting, len(prompt), info, config.max_output_tokens)
        fitting = shortened(fitting, config.max_output_tokens or info.context_length)
        return Job.of(prompt, fitting, options, config.request_timeout)

    def _ready(self) -> _Opened:
        if self._opened is None:
            raise Unavailable(NOT_YET)
        return self._opened


def seed_or_random(seed: int | None) -> int:
    """Returns the client's seed as 64 unsigned bits, or a random seed that is reported back.

    A negative seed wraps.
    """
    if seed is None:
        return random_seed()
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequest("seed", "must fit 64 bits")
    return seed % 2**64
