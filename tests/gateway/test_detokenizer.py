"""Incremental detokenizing against the library's decode of everything."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from foredraft.errors import CheckpointError
from foredraft.text.tokenizer import Tokenizer
from gateway.detokenizer import Detokenizer
from testing import tiny_tokenizers
from testing.whole_text import byte_tokens, whole_text

BUILT = {name: Tokenizer(make()) for name, make in tiny_tokenizers.FAMILIES.items()}
families = pytest.mark.parametrize("family", list(BUILT))
TEXT = "naïve 你好 🙂 x=1;\n  y\té Привет 🙃"


def streamed(
    tokenizer: Tokenizer, tokens: list[int], skip: bool, context: tuple[int, ...] = ()
) -> str:
    detokenizer = Detokenizer(tokenizer, context, skip)
    return "".join(map(detokenizer.feed, tokens)) + detokenizer.flush()


@families
@given(data=st.data())
def test_pieces_join_to_the_decoded_text(family: str, data: st.DataObject) -> None:
    tokenizer = BUILT[family]
    spelling = byte_tokens(tokenizer)
    ids = st.integers(0, tokenizer.vocab_size + 1) | st.sampled_from(sorted(tokenizer.special_ids))
    if spelling:
        ids |= st.sampled_from(spelling)
    tokens = data.draw(st.lists(ids, max_size=40))
    skip = data.draw(st.booleans())
    assert streamed(tokenizer, tokens, skip) == whole_text(tokenizer, tokens, skip)


@families
def test_text_survives(family: str) -> None:
    tokenizer = BUILT[family]
    tokens = tokenizer.encode(TEXT)
    assert streamed(tokenizer, tokens, True) == tokenizer.decode(tokens)


@families
def test_never_half_a_character(family: str) -> None:
    tokenizer = BUILT[family]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(token) for token in tokenizer.encode("🙂 你好")]
    assert all("�" not in piece for piece in pieces)


@families
def test_a_continuation_reads_as_in_the_whole_text(family: str) -> None:
    tokenizer = BUILT[family]
    tokens = tokenizer.encode("The quick brown fox, 你好 the dog")
    whole = tokenizer.decode(tokens)
    for cut in range(2, len(tokens)):
        before = tokenizer.decode(tokens[:cut])
        if before.endswith("�"):
            continue
        after = streamed(tokenizer, tokens[cut:], True, tuple(tokens[:cut]))
        assert before + after == whole


@pytest.mark.parametrize("family", ["byte_level", "gemma"])
def test_a_prompt_may_end_inside_a_character(family: str) -> None:
    tokenizer = BUILT[family]
    tokens = tokenizer.encode("dog 𓀀")
    assert (
        streamed(tokenizer, tokens[-2:] + tokenizer.encode("x", False), True, tuple(tokens[:-2]))
        == "𓀀x"
    )


@pytest.mark.parametrize("family", ["llama_2", "gemma"])
def test_characters_in_byte_tokens_come_one_by_one(family: str) -> None:
    tokenizer = BUILT[family]
    text = "\n\tไทย🙂\n"
    tokens = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("x"))
    pieces = [detokenizer.feed(token) for token in tokens]
    assert [piece for piece in pieces if piece] == list(text)
    assert detokenizer.flush() == ""
    assert whole_text(tokenizer, tokens).strip(" ") == text


def test_text_comes_token_by_token() -> None:
    tokenizer = BUILT["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    tokens = tokenizer.encode("The quick dog", add_special_tokens=False)
    assert [detokenizer.feed(token) for token in tokens] == [
        tokenizer.token_bytes(token).decode() for token in tokens
    ]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 2, 0)]),
        decoders.Strip("a", 1, 0),
        decoders.Metaspace(prepend_scheme="never"),
        None,
    ],
)
@given(words=st.lists(st.text("ab▁", min_size=1, max_size=4), max_size=6))
def test_other_decoders(decoder: decoders.Decoder | None, words: list[str]) -> None:
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*words, "[UNK]"]))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    tokens = [vocabulary[word] for word in words]
    assert streamed(tokenizer, tokens, True) == tokenizer.decode(tokens)


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.CTC()
    with pytest.raises(CheckpointError, match="CTC"):
        Tokenizer(backend)
