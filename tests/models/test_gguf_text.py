"""Tokens of texts by GGUF files: those of the tokenizer that a file was written from."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from foredraft.errors import CheckpointError
from foredraft.models.gguf_convert import convert
from foredraft.text.tokenizer import Tokenizer, fingerprint_of
from testing import gguf_files, tiny_tokenizers

PRE = "tokenizer.ggml.pre"
TEXTS = ("The quick dog", "def add(a, b):\n    return a + b", "naïve 你好 🙂", "x 1234 5", "<s>dog")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    "gpt-2": pre_tokenizers.ByteLevel(False),
}


def converted(folder: Path, tokenizer: tokenizers.Tokenizer, **metadata: float | str) -> Tokenizer:
    values = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    file = gguf_files.write(
        folder / "tiny.gguf", lambda _: "F16", metadata=values, tokenizer=tokenizer
    )
    target = folder / "converted"
    target.mkdir()
    convert(file, target)
    return Tokenizer.from_dir(target)


def check(got: Tokenizer, want: tokenizers.Tokenizer) -> None:
    for text in TEXTS:
        tokens = want.encode(text, add_special_tokens=False).ids
        assert got.encode(text, add_special_tokens=False) == tokens, text
        assert got.decode(tokens, False) == want.decode(tokens, skip_special_tokens=False), text


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_as_the_file_says(pre: str, tmp_path: Path) -> None:
    """The merges are learned from whole numbers, which not every split leaves whole."""
    tokenizer = tiny_tokenizers.byte_level()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(tiny_tokenizers.SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*tiny_tokenizers.TEXTS, *["x 1234 5 1234 12345"] * 50]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = SPLITS[pre]
    check(converted(tmp_path, tokenizer, pre=pre), tokenizer)


def test_a_way_to_split_text_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre 'deepseek-llm'"):
        converted(tmp_path, tiny_tokenizers.byte_level(), pre="deepseek-llm")


@pytest.mark.parametrize(
    ("pre", "said", "begins"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
    ],
)
def test_texts_begin_with_bos_unless_the_file_says_otherwise(
    pre: str, said: bool | None, begins: bool, tmp_path: Path
) -> None:
    """Files of Llama 3 do not say that they do, and llama.cpp knows it by their way to split."""
    original = tiny_tokenizers.byte_level()
    values: dict[str, float | str] = {} if said is None else {"add_bos_token": said}
    tokenizer = converted(tmp_path, original, pre=pre, **values)
    plain = tokenizer.encode("The dog", add_special_tokens=False)
    bos = [original.token_to_id("<s>")]
    assert tokenizer.encode("The dog") == [*(bos if begins else []), *plain]


def test_a_piece_that_is_a_token_is_taken_whole(tmp_path: Path) -> None:
    """As in Llama 3, whose merges do not lead to all tokens."""
    content = json.loads(tiny_tokenizers.byte_level().to_str())
    words = [word for word in content["model"]["vocab"] if word.isascii() and len(word) > 3]
    word = next(word for word in words if word.isalpha())
    merges = content["model"]["merges"]
    content["model"]["merges"] = [merge for merge in merges if "".join(merge) != word]
    original = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokens = [original.token_to_id(word)]
    for pre, is_whole in (("llama-bpe", True), ("gpt-2", False)):
        folder = tmp_path / pre
        folder.mkdir()
        got = converted(folder, original, pre=pre).encode(word, add_special_tokens=False)
        assert (got == tokens) == is_whole


@pytest.mark.parametrize("family", ["byte_level", "llama_2", "gemma"])
def test_the_vocabulary_is_the_files(family: str, tmp_path: Path) -> None:
    """transformers adds a token to it, which a prompt could hold and no model has."""
    original = tiny_tokenizers.FAMILIES[family]()
    got = converted(tmp_path, original)
    assert got.fingerprint == fingerprint_of(original.get_vocab())
    assert got.vocab_size == original.get_vocab_size()
    assert max(got.encode("dog<|endoftext|>")) < original.get_vocab_size()


@pytest.mark.parametrize("said", [False, True, None])
def test_a_space_before_the_text_as_the_file_says(said: bool | None, tmp_path: Path) -> None:
    original = tiny_tokenizers.byte_fallback(strip=said is not False)
    values: dict[str, float | str] = {} if said is None else {"add_space_prefix": said}
    got = converted(tmp_path, original, **values)
    for text in TEXTS[:-1]:
        tokens = original.encode(text, add_special_tokens=False).ids
        assert got.encode(text, add_special_tokens=False) == tokens, text
        assert got.decode(tokens) == original.decode(tokens) == text
