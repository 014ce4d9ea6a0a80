"""Files of training text: what is read of them, and what is named."""

import lzma
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from foredraft.errors import ConfigError
from training.text_data import read_documents, read_tokenizer


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "\\ud83d one half"}\n', r"line 1: the text has half a surrogate"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, r"line 1: not an object with a text"),
        ("a.jsonl.xz", b'{"text": "plain"}\n', r"a\.jsonl\.xz cannot be unpacked: "),
        ("a.txt.xz", lzma.compress(b"text" * 99)[:-9], r"a\.txt\.xz cannot be unpacked: "),
    ],
)
def test_text_that_cannot_be_read_is_named(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(read_documents([tmp_path]))


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n', encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("two", encoding="utf-8-sig")
    assert [document.text for document in read_documents([tmp_path])] == ["one", "two"]


def test_texts_are_neither_cut_nor_filled_up_as_a_tokenizer_file_asks(tmp_path: Path) -> None:
    """Files that were saved after a training with transformers ask for both."""
    tokenizer = Tokenizer(WordLevel({"[PAD]": 0, "word": 1}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(pad_token="[PAD]")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = read_tokenizer(tmp_path)
    encodings = read.encode_batch_fast(["word " * 5, "word"], add_special_tokens=False)
    assert [encoding.ids for encoding in encodings] == [[1] * 5, [1]]
