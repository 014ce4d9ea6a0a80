"""Checks of a request's fields before a verifier is asked; each names the field that is wrong."""

import math
from dataclasses import replace

from foredraft.api.verify.v1 import verify_pb2
from foredraft.errors import InvalidRequest, PromptTooLong
from foredraft.types import MAX_COUNT, SamplingParams
from gateway.jobs import JobOptions

MAX_STOPS = 32
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 64
MAX_NAME_CHARACTERS = 128
MAX_BATCH = 256
MAX_PROMPT_ENTRIES = 2**18


def checked_sampling(
    sampling: SamplingParams, info: verify_pb2.GetModelInfoResponse, may_be_empty: bool
) -> SamplingParams:
    """Returns the parameters once they are found to suit the model.

    Args:
        info: The served model.
        may_be_empty: Whether a request for zero tokens is allowed. Its minimum is ignored.

    Raises:
        InvalidRequest: A parameter is wrong.
    """
    if may_be_empty and not 0 <= sampling.max_new_tokens <= MAX_COUNT:
        raise InvalidRequest(
            "max_new_tokens", f"must be in [0, {MAX_COUNT}], not {sampling.max_new_tokens}"
        )
    if not may_be_empty or sampling.max_new_tokens > 0:
        sampling.validate(info.vocab_size, info.eos_token_ids)
        return sampling
    if sampling.min_new_tokens > 0:
        raise InvalidRequest("min_new_tokens", "must be 0 where no tokens are asked for")
    # The verifier is not asked; what else is wrong is told all the same.
    replace(sampling, max_new_tokens=1).validate(info.vocab_size, info.eos_token_ids)
    return replace(sampling, min_new_tokens=0)


def check_options(options: JobOptions) -> None:
    """Raises InvalidRequest for the first option outside its range."""
    check_choices(options.num_choices)
    name, stop, timeout = options.name, options.stop, options.timeout
    if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():  # it stands in logs
        raise InvalidRequest(
            "request_id", f"must have at most {MAX_NAME_CHARACTERS} characters, all printable"
        )
    if len(stop) > MAX_STOPS:
        raise InvalidRequest("stop", f"at most {MAX_STOPS} stop strings, not {len(stop)}")
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest("stop", f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
    if not -(2**31) <= options.priority < 2**31:
        raise InvalidRequest("priority", "must fit 32 bits")
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise InvalidRequest("timeout", "must be a positive number of seconds")


def check_prompt_length(num_tokens: int, longest: int | None) -> None:
    """Raises PromptTooLong if a prompt has more tokens than the operator allows."""
    if longest and num_tokens > longest:
        raise PromptTooLong(
            "prompt",
            f"it has {num_tokens} tokens; this model's maximum context length is {longest}"
            " tokens here, as the server was started",
        )


def check_length(
    sampling: SamplingParams,
    fitting: SamplingParams,
    num_tokens: int,
    info: verify_pb2.GetModelInfoResponse,
    longest: int | None,
) -> None:
    """Checks the output length of a client that has given one.

    Args:
        sampling: The parameters as they were given.
        fitting: The parameters with the length that fits the context.
        num_tokens: Number of tokens of the prompt.
        info: The served model.
        longest: Maximum number of output tokens that the operator allows, if any.

    Raises:
        InvalidRequest: The output is longer than the operator allows.
        PromptTooLong: Prompt and output do not fit the context.
    """
    if longest and sampling.max_new_tokens > longest:
        raise InvalidRequest(
            "max_new_tokens",
            f"{sampling.max_new_tokens} is more than the {longest} tokens that are given here at"
            " most",
        )
    if sampling.max_new_tokens > fitting.max_new_tokens:
        raise PromptTooLong(
            "max_new_tokens",
            f"{sampling.max_new_tokens} tokens after a prompt of {num_tokens}; this model's"
            f" maximum context length is {info.context_length} tokens, with the output:"
            f" {fitting.max_new_tokens} are left",
        )


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
