"""Held-out loss: every token counts once, and nothing else does."""

import math

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from testing import tiny_tokenizers
from training.lm.evaluate import _windows, heldout_texts, score_domains
from training.lm.model import Llama, LlamaShape
from training.text_data import Document

LENGTH = 32


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizers.byte_level()


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Llama:
    shape = LlamaShape(tokenizer.get_vocab_size(), 32, 1, 2, 1, 16, 48, LENGTH)
    model = Llama(shape)
    model.initialize(3)
    return model


@torch.no_grad()
def nats(model: Llama, ids: list[int], first: int) -> float:
    """Returns the nats of ids[first:] given the ids before them: without padding, without a
    batch, in float64.
    """
    hidden, _ = model(torch.tensor([ids[:-1]]))
    log_probs = F.log_softmax(model.logits(hidden)[0].double(), -1)
    return -sum(float(log_probs[i - 1, ids[i]]) for i in range(first, len(ids)))


def test_short_documents_of_unlike_length(model: Llama, tokenizer: Tokenizer) -> None:
    # Each row is filled up to the context length, and the last batch with whole rows.
    texts = ["a", "two words", "the cat sat on it", "é🙂", "x = 1"]
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    assert len({len(one) for one in ids}) > 2
    assert max(map(len, ids)) <= LENGTH
    score = score_domains(model, tokenizer, {"one": texts[:2], "all": texts}, rows=3)["all"]
    total = sum(nats(model, one, 1) for one in ids)
    assert score.tokens == sum(len(one) - 1 for one in ids)
    assert score.bytes == sum(len(text.encode()) for text in texts)
    assert score.loss == pytest.approx(total / score.tokens, rel=1e-5)
    assert score.bits_per_byte == pytest.approx(total / math.log(2) / score.bytes, rel=1e-5)


def test_a_long_document_is_scored_with_half_a_context_before_it(
    model: Llama, tokenizer: Tokenizer
) -> None:
    text = "the quick brown fox jumps over the lazy dog; " * 10
    ids = tokenizer.encode(text).ids
    assert len(ids) > 3 * LENGTH
    total = nats(model, ids[: LENGTH + 1], 1)
    end = LENGTH + 1
    while end < len(ids):
        new_end = min(end + LENGTH // 2, len(ids))
        start = new_end - LENGTH - 1
        total += nats(model, ids[start:new_end], end - start)
        end = new_end
    score = score_domains(model, tokenizer, {"long": [text]}, rows=2)["long"]
    assert score.tokens == len(ids) - 1
    assert score.loss == pytest.approx(total / score.tokens, rel=1e-5)


@pytest.mark.parametrize("count", [2, LENGTH, LENGTH + 1, LENGTH + 2, 3 * LENGTH + 5])
def test_windows_score_every_token_once_with_enough_before_it(count: int) -> None:
    ids = list(range(count))
    scored = []
    for window, fresh in _windows(ids, LENGTH):
        assert len(window) <= LENGTH + 1
        assert window == ids[window[0] : window[-1] + 1]
        scored += window[len(window) - fresh :]
        history = len(window) - fresh
        assert history >= min(LENGTH // 2, window[-fresh])
    assert scored == ids[1:]


def test_documents_are_spread_over_each_domain() -> None:
    documents = [Document(f"{i:03}" * 10, "py" if i % 2 else "md") for i in range(40)]
    chosen = heldout_texts(documents, 150)
    assert list(chosen) == ["md", "py"]
    assert chosen["md"] == [f"{i:03}" * 10 for i in range(0, 40, 8)]
    everything = heldout_texts(documents, 10**9)
    assert sum(map(len, everything.values())) == 40
