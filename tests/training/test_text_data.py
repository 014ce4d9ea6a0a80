"""Files of training text: what is read of them, and what is named."""

import lzma
from pathlib import Path

import pytest

from foredraft.errors import ConfigError
from training.text_data import read_documents


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
