"""Converts a gateway's messages to engine requests, and the engine's outputs to messages."""

from foredraft.api.verify.v1 import verify_pb2
from foredraft.errors import InvalidRequest, Overloaded, Unavailable
from foredraft.rpc.sampling import read_sampling, read_speculation
from foredraft.types import FinishReason
from verify_service.engine.live_requests import EngineRequest
from verify_service.outputs import Finish, Load, Sink, StepOutput

FINISH_REASONS = {
    FinishReason.STOP: verify_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: verify_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: verify_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: verify_pb2.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: verify_pb2.FINISH_REASON_ERROR,
}


def engine_request(submit: verify_pb2.SubmitRequest, traceparent: str, sink: Sink) -> EngineRequest:
    """Returns the engine's request for a gateway's message, its grammar not compiled; 0 stands
    for absent values.

    Raises:
        InvalidRequest: A wish for speculation is out of range, or the timeout is no time.
    """
    # One that is NaN would be the earliest of all deadlines for ever, and no other would be seen.
    if not submit.timeout_seconds >= 0:
        raise InvalidRequest("timeout_seconds", f"must be at least 0, not {submit.timeout_seconds}")
    return EngineRequest(
        tag=submit.id,
        prompt=list(submit.prompt),
        sampling=read_sampling(submit.sampling),
        speculation=read_speculation(submit.speculation),
        priority=submit.priority,
        timeout_seconds=submit.timeout_seconds or None,
        key_label=submit.key_label,
        return_provenance=submit.return_provenance,
        sink=sink,
        traceparent=traceparent,
    )


def response(outputs: list[StepOutput], load: Load) -> verify_pb2.RunResponse:
    """Returns the outputs of a step for one gateway, and the engine's load."""
    return verify_pb2.RunResponse(
        outputs=[_output(output) for output in outputs],
        load=verify_pb2.Load(
            waiting=load.waiting,
            running=load.running,
            free_pages=load.free_pages,
            total_pages=load.total_pages,
            draft_available=load.draft_available,
            drafting_since=load.drafting_since,
        ),
    )


def _output(output: StepOutput) -> verify_pb2.SequenceOutput:
    message = verify_pb2.SequenceOutput(id=output.tag, tokens=output.tokens, drafted=output.drafted)
    for found, told in (
        (output.logprobs, message.logprobs),
        (output.prompt_logprobs, message.prompt_logprobs),
    ):
        for logprob in found:
            told.add(
                logprob=logprob.logprob,
                top_tokens=logprob.top_tokens,
                top_logprobs=logprob.top_logprobs,
                rank=logprob.rank,
            )
    if output.tree is not None:
        tree = output.tree
        message.tree.CopyFrom(
            verify_pb2.VerifiedTree(
                tokens=tree.tokens,
                parents=tree.parents,
                accepted=tree.accepted,
                draft=tree.draft,
            )
        )
    if output.finish is not None:
        _fill_finish(message.finish, output.finish)
    return message


def _fill_finish(message: verify_pb2.Finish, finish: Finish) -> None:
    message.reason = FINISH_REASONS[finish.reason]
    if finish.stop_token is not None:
        message.stop_token = finish.stop_token
    message.prompt_tokens = finish.prompt_tokens
    message.completion_tokens = finish.completion_tokens
    message.cached_tokens = finish.cached_tokens
    message.verify_steps = finish.verify_steps
    message.drafted_tokens = finish.drafted_tokens
    message.accepted_tokens = finish.accepted_tokens
    message.preemptions = finish.preemptions
    message.queue_seconds = finish.queue_seconds
    message.lossy = finish.lossy
    message.accepted_histogram.extend(finish.accepted_histogram)
    error = finish.error
    if error is None:
        return
    message.error.message = str(error)
    if isinstance(error, InvalidRequest):
        message.error.code = verify_pb2.ERROR_CODE_INVALID_ARGUMENT
        message.error.field, message.error.message = error.field, error.message
    elif isinstance(error, Overloaded):
        message.error.code = verify_pb2.ERROR_CODE_OVERLOADED
        message.error.retry_after_seconds = error.retry_after_seconds
    elif isinstance(error, Unavailable):
        message.error.code = verify_pb2.ERROR_CODE_UNAVAILABLE
    else:
        message.error.code = verify_pb2.ERROR_CODE_INTERNAL
