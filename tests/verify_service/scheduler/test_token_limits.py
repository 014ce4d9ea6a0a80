"""Bad words and allowed tokens: masks against transformers' processor and by trying every token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from foredraft.errors import InvalidRequest
from foredraft.trees.draft_tree import DraftTree, paths
from foredraft.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from verify_service.scheduler.token_limits import TokenLimits, biases, is_biased

VOCAB = 70  # no whole number of words of a mask
few = st.sampled_from((0, 1, 31, 32, 69))
bad_words = st.lists(
    st.lists(few, min_size=1, max_size=4).map(tuple), min_size=1, max_size=8, unique=True
)
trees = st.lists(st.tuples(few, st.integers(0, 100)), max_size=7).map(
    lambda nodes: DraftTree(
        tuple(token for token, _ in nodes),
        tuple(number % (i + 1) - 1 for i, (_, number) in enumerate(nodes)),
    )
)


def allowed_by(masks: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return bits[:, :VOCAB].astype(bool)


@settings(max_examples=200)
@given(words=bad_words, output=st.lists(few, max_size=6), tree=trees)
def test_masks_are_those_of_transformers(
    words: list[tuple[int, ...]], output: list[int], tree: DraftTree
) -> None:
    limits = TokenLimits(SamplingParams(bad_words=tuple(words)), VOCAB)
    masks = np.full((1 + len(tree), -(-VOCAB // 32)), -1, np.int32)
    limits.fill(output[len(output) - min(len(output), limits.num_before) :], tree, masks)
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=VOCAB + 5)
    for path, allowed in zip(paths(tree), allowed_by(masks), strict=True):
        ids = torch.tensor([[*output, *path]], dtype=torch.int64)
        want = processor(ids, torch.zeros(1, VOCAB))[0] > -np.inf
        assert allowed.tolist() == want.tolist()


@settings(max_examples=200)
@given(
    words=bad_words,
    allowed=st.lists(few, max_size=4),
    output=st.lists(few, max_size=5),
    tokens=st.lists(few, max_size=5),
)
def test_what_is_kept_holds_nothing_forbidden(
    words: list[tuple[int, ...]], allowed: list[int], output: list[int], tokens: list[int]
) -> None:
    params = SamplingParams(bad_words=tuple(words), allowed_token_ids=tuple(allowed))
    limits = TokenLimits(params, VOCAB)

    def is_fine(count: int) -> bool:
        text = (*output, *tokens[:count])
        ends = range(len(output) + 1, len(text) + 1)
        is_bad = any(text[:end][-len(word) :] == word for end in ends for word in words)
        return not is_bad and all(not allowed or token in allowed for token in tokens[:count])

    kept = limits.num_kept(output, tokens)
    assert is_fine(kept)
    assert kept == len(tokens) or not is_fine(kept + 1)


def test_what_is_forbidden_everywhere_is_a_bias() -> None:
    params = SamplingParams(
        bad_words=((3,), (4, 5)), allowed_token_ids=(3, 5, 6), logit_bias={5: 2.0, 7: 1.0}
    )
    made = biases(params, VOCAB)
    assert {v: b for v, b in enumerate(made) if b > -np.inf} == {5: 2.0, 6: 0.0}
    assert is_biased(params)
    assert not is_biased(SamplingParams(bad_words=((4, 5),)))
    assert TokenLimits(params, VOCAB).need_history
    assert not TokenLimits(SamplingParams(bad_words=((4,),)), VOCAB).need_history


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((VOCAB,),)}, "bad_words"),
        ({"bad_words": ((1, -1),)}, "bad_words"),
        ({"bad_words": ((1,) * (MAX_BAD_WORD_TOKENS + 1),)}, "bad_words"),
        ({"bad_words": ((1, 2),) * (MAX_BAD_WORDS + 1)}, "bad_words"),
        ({"bad_words": tuple((v,) for v in range(VOCAB))}, "bad_words"),
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1,) * (VOCAB + 1)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1,), "bad_words": ((2, 1),)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1, 9), "min_new_tokens": 1, "stop_token_ids": (1,)}, "allowed_tok"),
    ],
)
def test_what_is_refused(given: dict, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**given).validate(VOCAB, [9])
    assert refused.value.field.startswith(field)


def test_a_token_outside_the_vocabulary_is_named_with_the_range() -> None:
    for name, tokens in (("stop_token_ids", (1, VOCAB)), ("logit_bias", {VOCAB: 1.0})):
        with pytest.raises(InvalidRequest, match=r"70 is not in the vocabulary, .* ids 0 to 69"):
            SamplingParams(**{name: tokens}).validate(VOCAB)
    SamplingParams().validate(0)  # drafts are told of none


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_no_more_alternatives_than_tokens(name: str) -> None:
    SamplingParams(**{name: 5}).validate(5)
    for vocab_size, count in ((5, 6), (VOCAB, 21)):
        with pytest.raises(InvalidRequest) as refused:
            SamplingParams(**{name: count}).validate(vocab_size)
        assert refused.value.field == name


def test_what_leaves_a_token_is_taken() -> None:
    words = tuple((v,) for v in range(1, VOCAB))
    SamplingParams(bad_words=words).validate(VOCAB)
    SamplingParams(allowed_token_ids=(1, 9), stop_token_ids=(1,)).validate(VOCAB, [9])
