"""A draft service that drafts by n-grams, as a process: its proposals, its sessions, and how it
ends.
"""

import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.rpc.channel import channel, check_health
from testing.drafts import ROOT, DraftProcess, DraftStream, attach_request

COPY = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7]


@pytest.fixture(scope="module")
def draft() -> Iterator[DraftProcess]:
    with DraftProcess("--speculative-num-draft-tokens", "6") as process:
        yield process


def begin(slot: int, tokens: list[int], scope: str = "", nodes: int = 5) -> draft_pb2.SequenceStep:
    sequence = draft_pb2.SequenceStep(slot=slot, tokens=tokens)
    sequence.begin.scope = scope
    sequence.propose.num_draft_tokens = nodes + 1
    return sequence


def go_on(slot: int, position: int, tokens: list[int]) -> draft_pb2.SequenceStep:
    sequence = draft_pb2.SequenceStep(slot=slot, position=position, tokens=tokens)
    sequence.propose.num_draft_tokens = 6
    return sequence


def test_info_asks_for_no_vocabulary_and_no_pages(draft: DraftProcess) -> None:
    with channel(draft.target) as connection:
        info = draft_pb2_grpc.DraftServiceStub(connection).GetDraftInfo(
            draft_pb2.GetDraftInfoRequest()
        )
    assert info.algorithm == "NGRAM"
    assert info.limits.num_draft_tokens == 6
    assert (info.uses_pages, info.vocab_size, info.tokenizer_fingerprint) == (False, 0, "")


def test_proposes_what_followed_the_same_text(draft: DraftProcess) -> None:
    with DraftStream(draft.target, attach_request(epoch=7)) as stream:
        assert stream.attached.epoch == 7
        assert stream.step(begin(0, COPY)) == {0: ((8, 9, 10, 11, 5), (-1, 0, 1, 2, 3))}
        # Two were accepted and 20 was added: nothing like it was seen.
        assert stream.step(go_on(0, 10, [8, 9, 20])) == {}
        assert stream.step(go_on(0, 13, [5, 6]))[0][0][:2] == (7, 8)


def test_limits_of_a_step_and_of_the_service_hold(draft: DraftProcess) -> None:
    with DraftStream(draft.target, attach_request()) as stream:
        assert stream.step(begin(0, COPY, nodes=2)) == {0: ((8, 9), (-1, 0))}
        assert stream.step(begin(1, COPY, nodes=0)) == {}
        # At most two steps' trees and the token between them.
        assert len(stream.step(begin(2, [5] * 60, nodes=100))[2][0]) == 5 + 1 + 5


def test_a_request_may_ask_for_less_depth_and_breadth(draft: DraftProcess) -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2]

    def asked(slot: int, **limits: int) -> draft_pb2.SequenceStep:
        step = begin(slot, tokens, scope=str(slot))
        step.propose.MergeFrom(draft_pb2.TreeLimits(**limits))
        return step

    with DraftStream(draft.target, attach_request()) as stream:
        proposals = stream.step(
            asked(0), asked(1, num_steps=1), asked(2, topk=1), asked(3, num_steps=2, topk=2)
        )
    # The newest of three continuations comes first.
    assert proposals[0] == ((5, 4, 3, 1, 1), (-1, -1, -1, 0, 1))
    assert proposals[1] == ((5, 4, 3), (-1, -1, -1))
    assert proposals[2] == ((5, 1, 2), (-1, 0, 1))
    assert proposals[3] == ((5, 4, 1, 1), (-1, -1, 0, 1))


def test_a_chunk_without_propose_gets_no_tree(draft: DraftProcess) -> None:
    with DraftStream(draft.target, attach_request()) as stream:
        chunk = begin(3, COPY[:6])
        chunk.ClearField("propose")
        assert stream.step(chunk) == {}
        assert stream.step(go_on(3, 6, COPY[6:]))[3][0] == (8, 9, 10, 11, 5)


def test_long_prompts_go_through_the_worker(draft: DraftProcess) -> None:
    prompt = list(range(100)) + [127] * 100
    with DraftStream(draft.target, attach_request(max_context=2000)) as stream:
        tokens = prompt * 8 + [3, 4, 5]
        assert stream.step(begin(0, tokens))[0][0] == (6, 7, 8, 9, 10)


def test_tokens_that_are_sent_again_count_once(draft: DraftProcess) -> None:
    with DraftStream(draft.target, attach_request()) as stream:
        stream.step(begin(0, COPY[:8]))
        assert stream.step(go_on(0, 4, COPY[4:]))[0][0] == (8, 9, 10, 11, 5)
        assert stream.step(go_on(0, 2, COPY[2:4]))[0][0] == (8, 9, 10, 11, 5)


def test_scopes_share_and_separate(draft: DraftProcess) -> None:
    tail = COPY[-2:]
    with DraftStream(draft.target, attach_request()) as stream:
        stream.step(begin(0, COPY, "a"), begin(1, COPY))
        same, other, none = stream.step(begin(2, tail, "a")), begin(3, tail, "b"), begin(4, tail)
        assert same[2][0][0] == 8
        assert stream.step(other, none) == {}


def test_another_verifier_sees_nothing_of_it(draft: DraftProcess) -> None:
    with (
        DraftStream(draft.target, attach_request()) as one,
        DraftStream(draft.target, attach_request()) as two,
    ):
        one.step(begin(0, COPY, "a"))
        assert two.step(begin(0, COPY[-2:], "a")) == {}
        assert one.step(begin(1, COPY[-2:], "a"))[1][0][0] == 8


def test_released_slots_are_taken_again_in_the_same_step(draft: DraftProcess) -> None:
    with DraftStream(draft.target, attach_request()) as stream:
        stream.step(begin(0, COPY))
        assert stream.step(begin(0, COPY[-2:]), released=(0, 5)) == {}
        # A begin on a live slot takes it over as well.
        assert stream.step(begin(0, [1, 2, 1])) == {0: ((2, 1), (-1, 0))}


def refusal(stream: DraftStream, *sequences: draft_pb2.SequenceStep) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        stream.step(*sequences)
    return caught.value


@pytest.mark.parametrize(
    ("sequence", "field"),
    [
        (go_on(1, 0, [1]), "slot"),
        (begin(8, [1]), "slot"),
        (begin(0, [1, 128]), "tokens"),
        (begin(0, [2**32 - 1]), "tokens"),
        (go_on(0, 11, [1]), "position"),
        (go_on(0, 10, [1] * 191), "tokens"),
    ],
)
def test_a_wrong_step_ends_the_stream_and_nothing_else(
    draft: DraftProcess, sequence: draft_pb2.SequenceStep, field: str
) -> None:
    with DraftStream(draft.target, attach_request()) as stream:
        stream.step(begin(0, COPY))
        error = refusal(stream, sequence)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(field + ":")
    assert check_health(draft.target) == "SERVING"
    with DraftStream(draft.target, attach_request()) as stream:
        assert stream.step(begin(0, COPY))


def test_a_slot_comes_once_in_a_step(draft: DraftProcess) -> None:
    with DraftStream(draft.target, attach_request()) as stream:
        error = refusal(stream, begin(0, COPY), begin(0, COPY))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("number", [0, 2, 5])
def test_steps_are_numbered_from_one(draft: DraftProcess, number: int) -> None:
    step = draft_pb2.SpeculateRequest(step=draft_pb2.StepRequest(step=number))
    with (
        DraftStream(draft.target, attach_request()) as stream,
        pytest.raises(grpc.RpcError, match="step"),
    ):
        stream.exchange(step)


def test_the_attach_comes_first_and_once(draft: DraftProcess) -> None:
    attach = draft_pb2.SpeculateRequest(attach=attach_request())
    with (
        DraftStream(draft.target, attach_request()) as stream,
        pytest.raises(grpc.RpcError, match="step"),
    ):
        stream.exchange(attach)
    with channel(draft.target) as connection:
        stub = draft_pb2_grpc.DraftServiceStub(connection)
        step = draft_pb2.SpeculateRequest(step=draft_pb2.StepRequest(step=1))
        for messages in ([step], [draft_pb2.SpeculateRequest()]):
            with pytest.raises(grpc.RpcError, match="attach") as caught:
                next(stub.Speculate(iter(messages)))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_an_attach_without_a_batch_is_refused(draft: DraftProcess) -> None:
    with pytest.raises(grpc.RpcError, match="max_batch") as caught:
        DraftStream(draft.target, attach_request(max_batch=0))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def test_sessions_leave_nothing_behind(draft: DraftProcess) -> None:
    def use(times: int) -> None:
        for _ in range(times):
            with DraftStream(draft.target, attach_request()) as stream:
                stream.step(begin(0, COPY))

    use(5)
    descriptors, threads = draft.num_descriptors(), draft.num_threads()
    use(50)
    # The last connections may not be gone yet.
    assert draft.num_descriptors() <= descriptors + 3
    assert draft.num_threads() <= threads + 1


def test_sigterm_ends_it_with_a_stream_open() -> None:
    with DraftProcess() as process, DraftStream(process.target, attach_request()):
        assert process.terminate() == 0


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, draft_service.__main__, draft_service.drafters as d\n"
        "from foredraft.config.services import DraftConfig\n"
        "d.create_drafter(DraftConfig())\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_none_needs_no_draft_service() -> None:
    command = [sys.executable, "-m", "draft_service", "--listen", "127.0.0.1:0"]
    ended = subprocess.run(
        [*command, "--speculative-algorithm", "NONE"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "--speculative-algorithm NONE" in ended.stderr
