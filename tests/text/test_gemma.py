"""The detokenizer on a real tokenizer: Gemma's, where the demo model has been converted on this
machine.
"""

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.models.registry import DEMO_GEMMA, cache_dir
from foredraft.text.tokenizer import Tokenizer
from gateway.detokenizer import Detokenizer
from testing.whole_text import whole_text

FOLDER = next(iter(sorted(cache_dir().glob(f"{DEMO_GEMMA}-*/tokenizer.json"))), None)
TEXT = "The dog 你好 🙂 naïve\n\n\tdef f(x):\n    return x  # 𓀀 ﷽ e\u0301"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    if FOLDER is None:
        pytest.skip("demo-gemma has not been converted here")
    return Tokenizer.from_dir(pathlib.Path(FOLDER).parent)


def streamed(tokenizer: Tokenizer, tokens: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, (), skip)
    return [*map(detokenizer.feed, tokens), detokenizer.flush()]


@given(data=st.data())
def test_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    spelling = [t for t in range(1000) if (tokenizer.token(t) or "").startswith("<0x")]
    ids = (
        st.integers(0, tokenizer.vocab_size - 1)
        | st.sampled_from(spelling)
        | st.sampled_from(sorted(tokenizer.special_ids))
    )
    tokens = data.draw(st.lists(ids, max_size=60))
    skip = data.draw(st.booleans())
    assert "".join(streamed(tokenizer, tokens, skip)) == whole_text(tokenizer, tokens, skip)


def test_text_survives_without_half_characters(tokenizer: Tokenizer) -> None:
    pieces = streamed(tokenizer, tokenizer.encode(TEXT), True)
    assert "".join(pieces) == TEXT
    assert not any("�" in piece for piece in pieces)


def test_bos_is_there_once(tokenizer: Tokenizer) -> None:
    bos = tokenizer.encode("")[0]
    assert tokenizer.encode("Hi").count(bos) == 1
    if tokenizer.chat_template is not None:
        chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
        assert chat.count(bos) == 1
