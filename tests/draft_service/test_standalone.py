"""STANDALONE against transformers: the same trees, whatever the batch, the chunks and the pages."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.rpc.channel import channel, check_health
from foredraft.types import SamplingParams
from testing.checkpoints import VOCAB_SIZE, make_checkpoint
from testing.draft_heads import paths_of
from testing.drafts import DraftProcess, DraftStream, ForkedDraft, open_stream
from testing.standalone_reference import (
    BUSHY,
    NUM_PAGES,
    Reference,
    Sequences,
    attach,
    flags,
    prompt,
)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    known: dict[str, Path] = {}

    def checkpoint(architecture: str) -> Path:
        if architecture not in known:
            folder = tmp_path_factory.mktemp(architecture)
            known[architecture] = make_checkpoint(folder, architecture, seed=3)
        return known[architecture]

    return checkpoint


@pytest.fixture(scope="module")
def draft(make: Callable[[str], Path]) -> Iterator[DraftProcess]:
    with DraftProcess(*flags(make("LlamaForCausalLM"))) as process:
        yield process


@pytest.fixture(scope="module")
def reference(make: Callable[[str], Path]) -> Reference:
    return Reference(make("LlamaForCausalLM"))


CHAIN = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}


def test_info_names_vocabulary_and_costs(draft: DraftProcess) -> None:
    with channel(draft.target) as connection:
        info = draft_pb2_grpc.DraftServiceStub(connection).GetDraftInfo(
            draft_pb2.GetDraftInfoRequest()
        )
    assert (info.algorithm, info.uses_pages, info.vocab_size) == ("STANDALONE", True, VOCAB_SIZE)
    assert info.kv_bytes_per_token == 2 * 3 * 2 * 12 * 4  # K and V, layers, heads, width, float32
    assert (info.limits.num_steps, info.limits.topk, info.limits.num_draft_tokens) == (3, 1, 4)
    assert info.weight_bytes > 0


def test_a_chain_is_the_greedy_continuation(draft: DraftProcess, reference: Reference) -> None:
    sequences = Sequences()
    text = prompt(1, 23)
    with open_stream(draft.target, attach(4, 1, 5)) as stream:
        for position in (9, 10, 13, 16, 17, 23):
            known = len(sequences.tokens.get(0, []))
            news = text[known:position]
            message = (
                sequences.extend(0, news, **CHAIN) if known else sequences.begin(0, news, **CHAIN)
            )
            tokens, parents = stream.step(message)[0]
            assert list(tokens) == reference.greedy(text[:position], 4)
            assert parents == (-1, 0, 1, 2)


@pytest.mark.parametrize(
    ("steps", "topk", "tokens"), [(1, 1, 2), (1, 4, 4), (2, 2, 7), (3, 3, 9), (4, 2, 16)]
)
def test_a_tree_is_the_best_of_a_beam(
    draft: DraftProcess, reference: Reference, steps: int, topk: int, tokens: int
) -> None:
    sequences = Sequences()
    limits = {"num_steps": steps, "topk": topk, "num_draft_tokens": tokens}
    with open_stream(draft.target, attach(steps, topk, tokens)) as stream:
        for slot, length in enumerate((1, 7, 8, 30)):
            text = prompt(slot, length)
            tree = stream.step(sequences.begin(slot, text, **limits))[slot]
            candidates = topk + (steps - 1) * topk * topk
            assert paths_of(tree) == reference.paths(
                text, min(steps, tokens - 1), topk, min(tokens - 1, candidates)
            )


@pytest.mark.parametrize(
    "architecture", ["MistralForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
)
def test_trees_of_other_architectures(make: Callable[[str], Path], architecture: str) -> None:
    reference, sequences = Reference(make(architecture)), Sequences()
    with (
        ForkedDraft(*flags(make(architecture))) as process,
        open_stream(process.target, attach(3, 3, 9)) as stream,
    ):
        # Past the sliding window of 24 as well.
        for slot, length in enumerate((5, 22, 60)):
            text = prompt(slot, length)
            tree = stream.step(sequences.begin(slot, text, **BUSHY))[slot]
            assert paths_of(tree) == reference.paths(text, 3, 3, 8)


def test_a_batch_with_different_limits(draft: DraftProcess, reference: Reference) -> None:
    sequences = Sequences()
    shapes = [(3, 3, 9), (1, 1, 2), (3, 3, 4), (2, 1, 3), (2, 3, 9), (3, 2, 7)]
    texts = [prompt(slot, 5 + 7 * slot) for slot in range(len(shapes))]
    with open_stream(draft.target, attach(3, 3, 9)) as stream:
        for _ in range(3):
            messages = []
            for slot, (steps, topk, tokens) in enumerate(shapes):
                limits = {"num_steps": steps, "topk": topk, "num_draft_tokens": tokens}
                known = len(sequences.tokens.get(slot, []))
                call = sequences.extend if known else sequences.begin
                messages.append(call(slot, texts[slot][known:], **limits))
            trees = stream.step(*messages)
            for slot, (steps, topk, tokens) in enumerate(shapes):
                expected = reference.paths(texts[slot], min(steps, tokens - 1), topk, tokens - 1)
                assert paths_of(trees[slot]) == expected
                texts[slot] = texts[slot] + prompt(slot, slot % 3 + 1)


def test_extending_by_chunks_changes_nothing(draft: DraftProcess, reference: Reference) -> None:
    text = prompt(5, 61)
    expected = reference.paths(text, 3, 3, 8)
    for chunk in (1, 3, 4, 25, 61):
        sequences = Sequences(chunk)
        with open_stream(draft.target, attach(3, 3, 9)) as stream:
            stream.step(sequences.begin(2, text[:chunk]))
            for start in range(chunk, 60, chunk):
                stream.step(sequences.extend(2, text[start : min(60, start + chunk)]))
            known = len(sequences.tokens[2])
            tree = stream.step(sequences.extend(2, text[known:], **BUSHY))[2]
        assert paths_of(tree) == expected


def test_a_long_gap_is_caught_up_in_bounded_forwards(
    draft: DraftProcess, reference: Reference
) -> None:
    sequences = Sequences()
    texts = [prompt(slot, 180) for slot in range(8)]  # 1440 rows in one step
    with open_stream(draft.target, attach(2, 1, 3)) as stream:
        limits = {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}
        trees = stream.step(*[sequences.begin(i, text, **limits) for i, text in enumerate(texts)])
        for slot, text in enumerate(texts):
            assert list(trees[slot][0]) == reference.greedy(text, 2)


def test_released_slots_and_pages_are_used_again(draft: DraftProcess, reference: Reference) -> None:
    with open_stream(draft.target, attach(3, 3, 9)) as stream:
        for round_number in range(4):
            sequences = Sequences(7)  # the same pages every time
            texts = {slot: prompt(10 * round_number + slot, 9 + slot) for slot in (0, 3)}
            trees = stream.step(
                *[sequences.begin(slot, text, **BUSHY) for slot, text in texts.items()],
                released=(0, 3) if round_number % 2 else (),
            )
            for slot, text in texts.items():
                assert paths_of(trees[slot]) == reference.paths(text, 3, 3, 8)


def test_a_prefix_that_another_sequence_filled(draft: DraftProcess, reference: Reference) -> None:
    sequences = Sequences()
    first, second = prompt(1, 20), prompt(1, 12) + prompt(2, 5)
    with open_stream(draft.target, attach(3, 3, 9)) as stream:
        filling = sequences.begin(0, first)
        message = sequences.begin(1, second, **BUSHY)
        shared = filling.new_pages[:3]
        del message.tokens[:12], message.new_pages[:3]
        message.position = 12
        pages = [*shared, *message.new_pages]
        del message.new_pages[:]
        message.new_pages.extend(pages)
        # In the very step in which they are filled.
        tree = stream.step(filling, message)[1]
        assert paths_of(tree) == reference.paths(second, 3, 3, 8)


def test_pages_may_be_replaced_and_state_voided(draft: DraftProcess, reference: Reference) -> None:
    sequences = Sequences()
    text = prompt(3, 22)
    with open_stream(draft.target, attach(3, 3, 9)) as stream:
        stream.step(sequences.begin(0, text[:18]))
        # Entries 2 and 3 are now other pages, and what lay there is to be computed again.
        message = draft_pb2.SequenceStep(
            slot=0, position=8, tokens=text[8:], first_page=2, new_pages=[1, 390, 2, 391]
        )
        message.propose.MergeFrom(draft_pb2.TreeLimits(**BUSHY))
        sequences.pages[0][2:] = [1, 390, 2, 391]
        assert paths_of(stream.step(message)[0]) == reference.paths(text, 3, 3, 8)


@pytest.mark.parametrize("valid_from", [3, 8, 17])
def test_keys_before_valid_from_are_not_attended(
    draft: DraftProcess, reference: Reference, valid_from: int
) -> None:
    text = prompt(4, 26)
    with open_stream(draft.target, attach(3, 3, 9)) as stream:
        # Whatever another sequence left on the same pages.
        stream.step(Sequences(1).begin(0, prompt(5, 26)))
        sequences = Sequences(1)
        message = sequences.begin(0, text[:20])
        del message.tokens[:valid_from]
        message.position = message.begin.valid_from = valid_from
        stream.step(message)
        tree = stream.step(sequences.extend(0, text[20:], **BUSHY))[0]
        assert paths_of(tree) == reference.paths(text, 3, 3, 8, valid_from)
        assert paths_of(tree) != reference.paths(text, 3, 3, 8)


def test_the_newest_token_may_be_asked_for_again(draft: DraftProcess, reference: Reference) -> None:
    sequences = Sequences()
    text = prompt(6, 13)
    with open_stream(draft.target, attach(3, 3, 9)) as stream:
        stream.step(sequences.begin(0, text))
        for _ in range(2):
            tree = stream.step(sequences.extend(0, [], **BUSHY))[0]
            assert paths_of(tree) == reference.paths(text, 3, 3, 8)


def test_trees_end_with_the_context(draft: DraftProcess, reference: Reference) -> None:
    sequences = Sequences()
    text = prompt(8, 40)
    with open_stream(draft.target, attach(4, 1, 5, max_context=40)) as stream:
        tokens, _ = stream.step(sequences.begin(0, text[:38], **CHAIN))[0]
        assert list(tokens) == reference.greedy(text[:38], 2)
        assert stream.step(sequences.extend(0, text[38:], **CHAIN)) == {}


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "top_p": 1.0},
    {"temperature": 1.0, "top_p": 1.0, "seed": 5},
    {"temperature": 1.0, "top_p": 1.0, "seed": 2**63 + 11},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 7},
]


@pytest.mark.parametrize(("steps", "topk", "tokens"), [(4, 1, 5), (3, 3, 9)])
def test_coupled_with_the_targets_own_weights_proposes_the_targets_choices(
    draft: DraftProcess, reference: Reference, steps: int, topk: int, tokens: int
) -> None:
    limits = {"num_steps": steps, "topk": topk, "num_draft_tokens": tokens}
    request = attach(steps, topk, tokens, draft_sampling="coupled")
    sequences = Sequences()
    texts = [prompt(slot, 6 + slot) for slot in range(len(SAMPLINGS))]
    with open_stream(draft.target, request) as stream:
        for round_number in range(6):
            messages = []
            for slot, sampling in enumerate(SAMPLINGS):
                if round_number == 0:
                    messages.append(sequences.begin(slot, texts[slot], sampling, **limits))
                else:
                    news = texts[slot][len(sequences.tokens[slot]) :]
                    messages.append(sequences.extend(slot, news, **limits))
            trees = stream.step(*messages)
            for slot, sampling in enumerate(SAMPLINGS):
                chosen = reference.chosen(texts[slot], steps + 1, SamplingParams(**sampling))
                assert tuple(chosen[:-1]) in paths_of(trees[slot])
                # All were accepted, and the target added one.
                texts[slot] = texts[slot] + chosen


def expect_end(stream: DraftStream, *messages: draft_pb2.SequenceStep) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        stream.step(*messages)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def test_wrong_steps_end_the_stream_and_nothing_else(
    draft: DraftProcess, reference: Reference
) -> None:
    text = prompt(9, 10)

    def step(**fields: Any) -> draft_pb2.SequenceStep:
        return draft_pb2.SequenceStep(**({"slot": 0, "position": 10, "first_page": 3} | fields))

    nan = draft_pb2.Begin(sampling=draft_pb2.Sampling(temperature=math.nan))
    wrong = {
        "slot: 1 is used": step(slot=1, tokens=[5]),
        "slot: 8 is not": step(slot=8, tokens=[5]),
        "position": step(position=11, tokens=[5]),
        "tokens: slot 0: 128": step(tokens=[128]),
        "new_pages: slot 0: page 400": step(tokens=[5], new_pages=[NUM_PAGES]),
        "new_pages: slot 0: 3 pages": step(tokens=[5] * 3),
        "first_page": step(tokens=[5], first_page=4, new_pages=[1]),
        "tokens: slot 0: none": step(position=5, propose=draft_pb2.TreeLimits()),
        "temperature": step(begin=nan, tokens=[5]),
    }
    for start, message in wrong.items():
        sequences = Sequences()
        with open_stream(draft.target, attach(3, 3, 9)) as stream:
            tree = stream.step(sequences.begin(0, text, **BUSHY))[0]
            assert paths_of(tree) == reference.paths(text, 3, 3, 8)
            assert expect_end(stream, message).startswith(start)
        assert check_health(draft.target) == "SERVING"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vocab_size": 129}, "vocab_size"),
        ({"max_context": 513}, "max_context"),
        ({"num_pages": 0}, "num_pages"),
        ({"page_size": 0}, "page_size"),
        ({"draft_sampling": "best"}, "draft_sampling"),
        ({"num_pages": 2**31, "page_size": 2**15}, "num_pages"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    draft: DraftProcess, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        open_stream(draft.target, attach(**changes))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details().startswith(field + ":")


def test_one_verifier_at_a_time(draft: DraftProcess) -> None:
    with open_stream(draft.target, attach()), pytest.raises(grpc.RpcError) as caught:
        DraftStream(draft.target, attach())
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    with open_stream(draft.target, attach(epoch=2)) as stream:
        assert stream.attached.epoch == 2
        assert stream.attached.kv_bytes > 0


def test_attaching_again_and_again_leaves_nothing(draft: DraftProcess) -> None:
    def use(times: int) -> None:
        for _ in range(times):
            sequences = Sequences()
            with open_stream(draft.target, attach(3, 3, 9)) as stream:
                stream.step(sequences.begin(0, prompt(0, 9), **BUSHY))

    use(3)
    descriptors, threads, memory = draft.num_descriptors(), draft.num_threads(), draft.resident()
    use(20)
    assert draft.num_descriptors() <= descriptors + 3
    assert draft.num_threads() <= threads + 1
    assert draft.resident() < memory + 8 * 2**20
