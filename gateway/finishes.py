"""Turns a verifier's account of a continuation into its end, or into the error to raise."""

import re
from collections.abc import Sequence

from foredraft.api.verify.v1 import verify_pb2
from foredraft.errors import ForedraftError, InvalidRequest, Overloaded, PromptTooLong
from foredraft.types import FinishReason
from gateway.decoding import Chunk, Completion, SequenceDecoder
from gateway.errors import RequestTimeout
from gateway.jobs import Job
from gateway.verifier_connection import VerifierConnection, VerifierLost


def chunk_without_tokens(job: Job, choice: int, num_cached: int = 0) -> Chunk:
    """Returns the chunk of a continuation without tokens."""
    finish = verify_pb2.Finish(
        reason=verify_pb2.FINISH_REASON_LENGTH,
        prompt_tokens=len(job.prompt),
        cached_tokens=num_cached,
    )
    seed = job.seed_of(choice)
    return Chunk(choice, completion=Completion(FinishReason.LENGTH, None, None, 0, finish, seed))


def completion_of(
    job: Job, choice: int, decoder: SequenceDecoder, finish: verify_pb2.Finish
) -> Completion:
    """Returns how a continuation with tokens ended."""
    stop_token = None
    if decoder.stop_text is not None or finish.reason == verify_pb2.FINISH_REASON_STOP:
        reason = FinishReason.STOP
        if decoder.stop_text is None and finish.HasField("stop_token"):
            stop_token = finish.stop_token
    elif finish.reason == verify_pb2.FINISH_REASON_LENGTH:
        reason = FinishReason.LENGTH
    else:
        reason = FinishReason.CANCELLED
    return Completion(
        reason,
        decoder.stop_text,
        stop_token,
        decoder.num_tokens,
        finish,
        job.seed_of(choice),
        decoder.stop_text is not None or stop_token in job.sampling.stop_token_ids,
    )


def raise_failure(finish: verify_pb2.Finish, connection: VerifierConnection, job: Job) -> None:
    """Raises the error that a verifier reports, if it does; avoids a verifier that stops.

    Raises:
        RequestTimeout: The deadline passed.
        VerifierLost: The verifier is stopping; another one may run the request.
        ForedraftError: It refused or broke off the request.
    """
    if finish.reason == verify_pb2.FINISH_REASON_DEADLINE:
        raise RequestTimeout("the deadline passed")
    if finish.reason != verify_pb2.FINISH_REASON_ERROR:
        return
    error = finish.error
    if error.code == verify_pb2.ERROR_CODE_INVALID_ARGUMENT:
        if error.field == "prompt":
            raise PromptTooLong(error.field, error.message)
        if error.field == "grammar" and job.functions:
            raise _wrong_grammar(error.message, job.functions)
        raise InvalidRequest(error.field, error.message)
    if error.code == verify_pb2.ERROR_CODE_OVERLOADED:
        raise Overloaded(error.message, error.retry_after_seconds)
    if error.code == verify_pb2.ERROR_CODE_UNAVAILABLE:
        connection.avoid()
        raise VerifierLost(error.message)
    raise ForedraftError(error.message)


def _wrong_grammar(message: str, functions: Sequence[str]) -> InvalidRequest:
    """Returns the error for a grammar of calls; it names the function whose part is wrong, if one
    is.
    """
    part = re.match(r"(?:structures\.|rule (?:call|parameter)_)(\d+)(?:_\d+)?: ", message)
    if part is None:
        return InvalidRequest("grammar", message.removeprefix("rule text: "))
    return InvalidRequest(
        "tools", f"the function {functions[int(part[1])]!r}: {message[part.end() :]}"
    )
