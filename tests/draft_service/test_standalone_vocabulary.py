"""STANDALONE with a part of its vocabulary, another tokenizer, and a target that pads the same
tokens to more.
"""

import random
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.rpc.channel import channel
from foredraft.text.tokenizer import tokenizer_fingerprint
from testing import tiny_tokenizers
from testing.checkpoints import VOCAB_SIZE, make_checkpoint
from testing.draft_heads import paths_of
from testing.drafts import ForkedDraft, open_stream
from testing.standalone_reference import BUSHY, Reference, Sequences, attach, flags, prompt


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", seed=3)


@pytest.fixture
def reference(path: Path) -> Reference:
    return Reference(path)


def test_a_token_map_drafts_its_tokens_alone(
    path: Path, reference: Reference, tmp_path: Path
) -> None:
    ids = random.Random(2).sample(range(VOCAB_SIZE), 50)
    torch.save(ids, tmp_path / "map.pt")
    others = [token for token in range(VOCAB_SIZE) if token not in ids]

    class Reduced(Reference):
        def logits(self, tokens: list[int], valid_from: int = 0) -> np.ndarray:
            row = reference.logits(tokens, valid_from).copy()
            row[others] = -np.inf
            return row

    reduced = Reduced.__new__(Reduced)
    sequences = Sequences()
    with (
        ForkedDraft(*flags(path), f"--speculative-token-map={tmp_path / 'map.pt'}") as process,
        open_stream(process.target, attach(3, 3, 9)) as stream,
    ):
        for slot, length in enumerate((3, 11)):
            text = prompt(slot, length)
            tree = stream.step(sequences.begin(slot, text, **BUSHY))[slot]
            assert paths_of(tree) == reduced.paths(text, 3, 3, 8)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "draft")
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), path)
    with ForkedDraft(*flags(path)) as process:
        with channel(process.target) as connection:
            info = draft_pb2_grpc.DraftServiceStub(connection).GetDraftInfo(
                draft_pb2.GetDraftInfoRequest()
            )
        with pytest.raises(grpc.RpcError, match="tokenizer_fingerprint"):
            open_stream(process.target, attach(tokenizer_fingerprint="0" * 64))
        same = attach(tokenizer_fingerprint=info.tokenizer_fingerprint)
        with open_stream(process.target, same):
            pass


def test_a_target_may_pad_the_same_tokens_to_more(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "draft", seed=3)
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), path)
    reference, sequences = Reference(path), Sequences()
    own = tokenizer_fingerprint(path)
    with ForkedDraft(*flags(path)) as process:
        for size in (120, 140):
            with pytest.raises(grpc.RpcError, match="vocab_size"):
                open_stream(process.target, attach(3, 3, 9, vocab_size=size))
        padded = attach(3, 3, 9, vocab_size=140, tokenizer_fingerprint=own)
        with open_stream(process.target, padded) as stream:
            text = prompt(0, 9)
            tree = stream.step(sequences.begin(0, text, **BUSHY))[0]
            assert paths_of(tree) == reference.paths(text, 3, 3, 8)
            tree = stream.step(sequences.begin(1, [*text, 139, 5], **BUSHY))[1]
            assert paths_of(tree) == reference.paths([*text, VOCAB_SIZE - 1, 5], 3, 3, 8)


def test_a_target_may_have_fewer_padding_tokens(tmp_path: Path) -> None:
    """Tokens that it has not are never proposed, and again are where the next target has them."""
    path = make_checkpoint(tmp_path / "draft", seed=3)
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), path)
    whole, own, size = Reference(path), tokenizer_fingerprint(path), 70

    class Padded(Reference):
        def logits(self, tokens: list[int], valid_from: int = 0) -> np.ndarray:
            row = whole.logits(tokens, valid_from).copy()
            row[size:] = -np.inf
            return row

    padded, found = Padded.__new__(Padded), []
    texts = [[token % size for token in prompt(slot, 9)] for slot in range(4)]
    with ForkedDraft(*flags(path)) as process:
        for vocab_size, reference in ((size, padded), (VOCAB_SIZE, whole)):
            request = attach(3, 3, 9, vocab_size=vocab_size, tokenizer_fingerprint=own)
            sequences = Sequences()
            with open_stream(process.target, request) as stream:
                for slot, text in enumerate(texts):
                    tree = stream.step(sequences.begin(slot, text, **BUSHY))[slot]
                    paths = paths_of(tree)
                    assert paths == reference.paths(text, 3, 3, 8)
                    found += [vocab_size for path in paths if max(path) >= size]
    assert set(found) == {VOCAB_SIZE}


def test_a_token_map_of_tokens_that_the_target_has_not_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "draft", seed=3)
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), path)
    torch.save([3, 100, 7], tmp_path / "map.pt")
    own = tokenizer_fingerprint(path)
    with ForkedDraft(*flags(path), f"--speculative-token-map={tmp_path / 'map.pt'}") as process:
        with pytest.raises(grpc.RpcError, match="--speculative-token-map has token 100"):
            open_stream(process.target, attach(vocab_size=100, tokenizer_fingerprint=own))
        with open_stream(process.target, attach(vocab_size=101, tokenizer_fingerprint=own)):
            pass
