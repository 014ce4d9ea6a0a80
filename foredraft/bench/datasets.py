"""Prompts of a benchmark, selected by flags: files, random words, shared prefixes, small tasks."""

import argparse
import json
import random
from pathlib import Path
from typing import Any, Self

from foredraft.bench import prompts
from foredraft.bench.http_client import HttpClient
from foredraft.bench.load import LoadGenerator, Stage
from foredraft.bench.peers import Peer
from foredraft.bench.prompts import Prompt, PromptSource, WordLength
from foredraft.config.options import flag_of
from foredraft.errors import ConfigError

NAMES = ("tasks", "random", "generated-shared-prefix", "custom", "sharegpt")
_ALL_DIFFERENT = ("tasks", "random")  # prompts of a seed, which have nothing in common
_AT_LEAST_ONE = (
    "output_len",
    "random_input_len",
    "gsp_num_groups",
    "gsp_system_prompt_len",
    "gsp_question_len",
)
_CALIBRATION_WORDS = (40, 160)


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of prompts and of their answers."""
    group.add_argument(
        "--dataset-name",
        choices=NAMES,
        default="",
        help=(
            "tasks: openings of code, prose, lists; random: words of a wanted length;"
            " generated-shared-prefix; custom or sharegpt: the file --dataset-path [custom with a"
            " file, else tasks]"
        ),
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        help=(
            "JSONL or a JSON array; of each line `prompt`, `text`, `messages`, `turns` or"
            " `conversations`"
        ),
    )
    group.add_argument(
        "--random-input-len", type=int, default=256, metavar="N", help="tokens [256]"
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=1.0,
        metavar="R",
        help=(
            "random lengths, of prompts and outputs: uniform from R times the length to the"
            " length [1]"
        ),
    )
    group.add_argument(
        "--random-output-len",
        "--output-len",
        dest="output_len",
        type=int,
        default=64,
        metavar="N",
        help="most tokens of an answer [64]",
    )
    group.add_argument("--gsp-num-groups", type=int, default=8, metavar="N", help="prefixes [8]")
    group.add_argument("--gsp-system-prompt-len", type=int, default=256, metavar="N")
    group.add_argument("--gsp-question-len", type=int, default=32, metavar="N")
    group.add_argument("--temperature", type=float, default=0.0, help="[0]")
    group.add_argument(
        "--disable-ignore-eos",
        action="store_true",
        help=(
            "let answers end by themselves; else all have their full length, where the server can"
            " do that"
        ),
    )
    group.add_argument(
        "--extra-request-body", default="{}", metavar="JSON", help="fields added to each request"
    )


class Requests:
    """An endless supply of request bodies.

    Args:
        source: Source of the prompts.
        description: Description of the prompts, for people.

    Attributes:
        is_alike: Whether prompts share text by themselves, or are the same with each seed.
    """

    def __init__(
        self, source: PromptSource, peer: Peer, arguments: argparse.Namespace, description: str
    ) -> None:
        self.source = source
        self.description = description
        self.is_alike = arguments.dataset_name not in _ALL_DIFFERENT
        self._peer = peer
        self._arguments = arguments
        self._extra = _extra(arguments.extra_request_body)
        self._choose = random.Random(f"{arguments.seed}/lengths")

    @classmethod
    async def make(cls, client: HttpClient, peer: Peer, arguments: argparse.Namespace) -> Self:
        """Prepares the prompts that the flags select.

        Random words are first measured in tokens, with two requests.

        Raises:
            ConfigError: A flag or the file is invalid.
        """
        name = arguments.dataset_name or ("custom" if arguments.dataset_path else "tasks")
        if (name in ("custom", "sharegpt")) != (arguments.dataset_path is not None):
            raise ConfigError("--dataset-path goes with --dataset-name custom or sharegpt")
        if not 0 <= arguments.random_range_ratio <= 1:
            raise ConfigError("--random-range-ratio must be in [0, 1]")
        for field in _AT_LEAST_ONE:
            if getattr(arguments, field) < 1:
                raise ConfigError(f"{flag_of(field)} must be at least 1")
        arguments.dataset_name = name
        if name == "tasks":
            return cls(prompts.tasks(arguments.seed), peer, arguments, "small tasks, all different")
        if arguments.dataset_path is not None:
            source = prompts.from_file(arguments.dataset_path, arguments.seed)
            about = f"{source.size} of {arguments.dataset_path}"
            return cls(source, peer, arguments, about)
        length = await _measure_words(client, peer, arguments)
        if name == "random":
            longest = arguments.random_input_len
            shortest = max(1, round(longest * arguments.random_range_ratio))
            source = prompts.random_words(arguments.seed, shortest, longest, length)
            about = f"random words, {shortest} to {longest} tokens"
        else:
            source = prompts.shared_prefixes(
                arguments.seed,
                arguments.gsp_num_groups,
                arguments.gsp_system_prompt_len,
                arguments.gsp_question_len,
                length,
            )
            about = (
                f"{arguments.gsp_num_groups} prefixes of {arguments.gsp_system_prompt_len} tokens, "
                f"questions of {arguments.gsp_question_len}"
            )
        return cls(source, peer, arguments, about)

    def next(self) -> tuple[Prompt, bytes]:
        """Returns a prompt and the request that carries it."""
        prompt = self.source.take()
        longest = self._arguments.output_len
        shortest = max(1, round(longest * self._arguments.random_range_ratio))
        body = self._peer.body(
            prompt,
            self._choose.randint(shortest, longest),
            self._arguments.temperature,
            ignore_eos=not self._arguments.disable_ignore_eos,
            extra=self._extra,
        )
        return prompt, body


async def _measure_words(
    client: HttpClient, peer: Peer, arguments: argparse.Namespace
) -> WordLength:
    """Asks the server for the number of tokens of two prompts of random words."""
    generator = random.Random(f"{arguments.seed}/calibration")
    sent = iter([prompts.words(generator, count) for count in _CALIBRATION_WORDS])

    def request() -> tuple[Prompt, bytes]:
        prompt = next(sent)
        return prompt, peer.body(prompt, 1, 0.0, ignore_eos=False, extra={})

    loader = LoadGenerator(client, peer, request, timeout=arguments.timeout)
    result = await loader.run(Stage(len(_CALIBRATION_WORDS), max_concurrency=1))
    length = WordLength()
    for record in result.records:
        if not record.ok:
            raise ConfigError(f"the server cannot be measured: {record.error}: {record.detail}")
    first, second = (record.prompt_tokens for record in result.records)
    if first and second:
        length.fit(_CALIBRATION_WORDS, (first, second))
    return length


def _extra(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-request-body: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError("--extra-request-body: not a JSON object")
    return fields
