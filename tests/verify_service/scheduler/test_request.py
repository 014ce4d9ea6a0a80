"""The end of a sequence."""

import pytest

from foredraft.types import FinishReason, SamplingParams
from verify_service.scheduler.request import Sequence
from verify_service.scheduler.step_plan import PrefillChunk

EOS = frozenset([2])


def make(**sampling):
    return Sequence(0, [5, 6], SamplingParams(**sampling), eos_token_ids=EOS)


@pytest.mark.parametrize(
    ("sampling", "tokens", "kept", "reason", "stop_token"),
    [
        ({}, [7, 8, 9], 3, None, None),
        ({}, [7, 2, 9], 2, FinishReason.STOP, 2),
        ({"ignore_eos": True}, [7, 2, 9], 3, None, None),
        ({"stop_token_ids": (8,)}, [7, 8, 9], 2, FinishReason.STOP, 8),
        ({"stop_token_ids": (8,), "ignore_eos": True}, [2, 8], 2, FinishReason.STOP, 8),
        ({"max_new_tokens": 2}, [7, 8, 9], 2, FinishReason.LENGTH, None),
        ({"max_new_tokens": 2}, [7, 8], 2, FinishReason.LENGTH, None),
        ({"max_new_tokens": 2}, [7, 2], 2, FinishReason.STOP, 2),
        ({"max_new_tokens": 2}, [7, 8, 2], 2, FinishReason.LENGTH, None),
    ],
)
def test_append_tokens_trims_at_the_end(sampling, tokens, kept, reason, stop_token):
    seq = make(**sampling)
    assert seq.append_tokens(tokens) == (kept, reason)
    assert seq.output == tokens[:kept]
    assert seq.tokens == [5, 6, *tokens[:kept]]
    assert seq.finish_reason is reason
    assert seq.stop_token == stop_token


def test_lengths_follow_from_tokens():
    seq = make(max_new_tokens=5)
    assert (seq.num_prompt, seq.num_output, seq.num_output_left) == (2, 0, 5)
    assert not seq.is_decoding
    seq.num_computed = 2
    seq.append_tokens([7])
    assert seq.is_decoding
    assert (seq.tokens[2:], seq.num_output, seq.num_output_left) == ([7], 1, 4)
    seq.num_computed = 0
    assert seq.num_uncomputed == 3


def test_the_last_chunk_ends_with_the_newest_token():
    """After a preemption that is a token of the output: its row, not the prompt's last, chooses the
    next one.
    """
    seq = make()
    assert PrefillChunk(seq, 0, 2).is_last
    assert not PrefillChunk(seq, 0, 1).is_last
    seq.append_tokens([7, 8])
    assert not PrefillChunk(seq, 0, 2).is_last
    assert not PrefillChunk(seq, 1, 2).is_last
    assert PrefillChunk(seq, 1, 3).is_last


def test_steps_are_counted():
    seq = make()
    seq.count_step(5, 2)
    seq.count_step(0, 0)
    assert (seq.num_steps, seq.num_drafted, seq.num_accepted) == (2, 5, 2)


def test_the_output_is_copied_for_a_grammar_only_after_it_was_released():
    told = []

    class Grammar:
        is_current = False

        def resume(self, output):
            told.append(output)
            self.is_current = True

        def advance(self, tokens):
            return len(tokens), False

    sequence = make()
    sequence.grammar = grammar = Grammar()
    for tokens in ([7], [8, 9]):
        sequence.append_tokens(tokens)
    grammar.is_current = False
    assert sequence.follow_grammar() is grammar
    assert told == [[], [7, 8, 9]]
