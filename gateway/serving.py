"""Shared state of all fronts: the served model, its tokenizer, and the checks that make jobs."""

import asyncio
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from foredraft.types import MAX_COUNT, SamplingParams, SpeculationParams, check_tokens
from gateway.encoding.pool import EncodingPool
from gateway.errors import UnknownModel
from gateway.generation import Generator
from gateway.http import Bounds
from gateway.jobs import Job, fitted
from gateway.verifier_pool import VerifierPool

MAX_STOPS = 32
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 64
MAX_BAD_TEXTS = 512
MAX_BAD_CHARACTERS = 128
MAX_NAME_CHARACTERS = 128
MAX_BATCH = 256
MAX_PROMPT_ENTRIES = 2**18
NOT_YET = "no verifier has answered yet: the server is starting, or its log says why not; try again"


class Serving:
    """The model behind the fronts. `open` it once it `can_open`.

    Raises:
        ConfigError: --chat-template cannot be read.
    """

    def __init__(self, config: GatewayConfig, pool: VerifierPool) -> None:
        self.config = config
        self._template = read_template(config.chat_template)
        self.bounds = Bounds(config.max_body_bytes, config.client_timeout)  # of HTTP clients
        self.pool = pool
        self._opened: tuple[Tokenizer, Generator, EncodingPool] | None = None
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
        self._opened = (
            tokenizer,
            Generator(self.pool, tokenizer, config.max_queue_seconds),
            encoding,
        )

    def _load(self, path: str) -> Tokenizer:
        tokenizer = Tokenizer.from_dir(path, self._template)
        # Found once, which takes a look through the vocabulary: no request should wait for it.
        _ = tokenizer.longest_token
        return tokenizer

    async def drain(self) -> None:
        """Refuses new requests from here on; returns when no request runs."""
        self._draining = True
        if self._opened is not None:
            await self._opened[1].wait_idle()

    async def close(self) -> None:
        """Ends the processes that encode."""
        if self._opened is not None:
            await self._opened[2].close()

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
        return self._ready()[0]

    @property
    def generator(self) -> Generator:
        """The generator that runs jobs."""
        return self._ready()[1]

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
        return await self._ready()[2].encode(text, add_special_tokens, "prompt")

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], /, **variables: Any
    ) -> list[int]:
        """Returns a conversation's token ids, by the model's chat template."""
        return await self._ready()[2].encode_chat(messages, variables, "messages")

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        return await self._ready()[2].decode(tokens, skip_special_tokens, "tokens")

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
        *,
        prompt_field: str = "prompt",
        max_new_tokens_given: bool = True,
        may_be_empty: bool = False,
        name: str = "",
        call: str = "",
        stop: Sequence[str] = (),
        num_choices: int = 1,
        skip_special_tokens: bool = True,
        keep_stop: bool = False,
        return_provenance: bool = False,
        speculation: SpeculationParams | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Job:
        """Creates a job; refuses all that the verifier would refuse, with the client's field names.

        Args:
            may_be_empty: Whether a request for zero tokens is allowed.
            max_new_tokens_given: Whether the client chose the length. If so, a length that cannot
                fit is an error; else it is cut.

        Raises:
            InvalidRequest: A field is wrong.
        """
        if self._draining:
            raise Unavailable("the gateway is stopping")
        info = self.info
        check_tokens(prompt_field, prompt, info.vocab_size)
        if may_be_empty and not 0 <= sampling.max_new_tokens <= MAX_COUNT:
            raise InvalidRequest(
                "max_new_tokens", f"must be in [0, {MAX_COUNT}], not {sampling.max_new_tokens}"
            )
        if may_be_empty and sampling.max_new_tokens == 0:
            if sampling.min_new_tokens > 0:
                raise InvalidRequest("min_new_tokens", "must be 0 where no tokens are asked for")
            # The verifier is not asked; what else is wrong is told all the same.
            replace(sampling, max_new_tokens=1).validate(info.vocab_size, info.eos_token_ids)
            sampling = replace(sampling, min_new_tokens=0)
        else:
            sampling.validate(info.vocab_size, info.eos_token_ids)
        check_choices(num_choices)
        if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
            raise InvalidRequest(
                "request_id", f"must have at most {MAX_NAME_CHARACTERS} characters, all printable"
            )
        if len(stop) > MAX_STOPS:
            raise InvalidRequest("stop", f"at most {MAX_STOPS} stop strings, not {len(stop)}")
        for text in stop:
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequest(
                    "stop", f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters"
                )
        if not -(2**31) <= priority < 2**31:
            raise InvalidRequest("priority", "must fit 32 bits")
        limit = self.config.request_timeout
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
            raise InvalidRequest("timeout", "must be a positive number of seconds")
        longest = self.config.max_prompt_tokens
        if longest and len(prompt) > longest:
            raise PromptTooLong(
                "prompt",
                f"it has {len(prompt)} tokens; this model's maximum context length is {longest}"
                " tokens here, as the server was started",
            )
        if sampling.prompt_logprobs is not None:
            check_prompt_logprobs(sampling, len(prompt), num_choices)
        fitting = fitted(sampling, len(prompt), info.context_length)
        most = self.config.max_output_tokens or info.context_length
        if (
            max_new_tokens_given
            and sampling.max_new_tokens > most
            and self.config.max_output_tokens
        ):
            raise InvalidRequest(
                "max_new_tokens",
                f"{sampling.max_new_tokens} is more than the {most} tokens that are given here at"
                " most",
            )
        if max_new_tokens_given and sampling.max_new_tokens > fitting.max_new_tokens:
            raise PromptTooLong(
                "max_new_tokens",
                f"{sampling.max_new_tokens} tokens after a prompt of {len(prompt)}; this model's"
                f" maximum context length is {info.context_length} tokens, with the output:"
                f" {fitting.max_new_tokens} are left",
            )
        if fitting.max_new_tokens > most:
            fitting = replace(
                fitting, max_new_tokens=most, min_new_tokens=min(fitting.min_new_tokens, most)
            )
        return Job(
            name=name or uuid.uuid4().hex,
            call=call,
            prompt=prompt,
            sampling=fitting,
            stop=tuple(stop),
            num_choices=num_choices,
            skip_special_tokens=skip_special_tokens,
            keep_stop=keep_stop,
            return_provenance=return_provenance,
            speculation=speculation or SpeculationParams(),
            priority=priority,
            timeout=limit if timeout is None else min(timeout, limit),
        )

    def _ready(self) -> tuple[Tokenizer, Generator, EncodingPool]:
        if self._opened is None:
            raise Unavailable(NOT_YET)
        return self._opened


def check_choices(num_choices: int) -> None:
    """Raises InvalidRequest if a prompt has no continuation or too many."""
    if not 1 <= num_choices <= MAX_CHOICES:
        raise InvalidRequest("n", f"must be in [1, {MAX_CHOICES}], not {num_choices}")


def check_prompt_logprobs(sampling: SamplingParams, num_tokens: int, num_choices: int) -> None:
    """Raises InvalidRequest if a request for a prompt's log-probabilities is too large or out of
    range.
    """
    if num_choices > 1:
        raise InvalidRequest("n", "must be 1 where log-probabilities of the prompt are asked for")
    if sampling.prompt_logprobs_from >= num_tokens:
        raise InvalidRequest(
            "prompt_logprobs_from",
            f"must be less than the prompt's {num_tokens} tokens, not"
            f" {sampling.prompt_logprobs_from}",
        )
    count = num_tokens - sampling.prompt_logprobs_from
    entries = count * (1 + (sampling.prompt_logprobs or 0))
    if entries > MAX_PROMPT_ENTRIES:
        raise InvalidRequest(
            "prompt_logprobs",
            f"{entries} log-probabilities of the prompt are more than the {MAX_PROMPT_ENTRIES} that"
            " one request may have; ask for fewer alternatives",
        )


def check_batch(field: str, num_prompts: int, num_choices: int) -> None:
    """Raises InvalidRequest, with the field, if a call has no prompt or too many continuations."""
    if num_prompts < 1:
        raise InvalidRequest(field, "give at least one prompt")
    check_choices(num_choices)
    if num_prompts * num_choices > MAX_BATCH:
        raise InvalidRequest(
            field,
            f"at most {MAX_BATCH} continuations in one call, not {num_prompts * num_choices}",
        )


def seed_or_random(seed: int | None) -> int:
    """Returns the client's seed as 64 unsigned bits, or a random seed that is reported back.

    A negative seed wraps.
    """
    if seed is None:
        return random_seed()
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequest("seed", "must fit 64 bits")
    return seed % 2**64
