"""Tokens to text with stop strings, against brute force over the whole output."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.api.verify.v1 import verify_pb2
from foredraft.text.tokenizer import Tokenizer
from gateway.decoding import OutputToken, SequenceDecoder
from testing import tiny_tokenizers
from testing.whole_text import byte_tokens

BUILT = {
    name: Tokenizer(tiny_tokenizers.FAMILIES[name]()) for name in ("byte_level", "llama_2", "gemma")
}
WORDS = "a b aa ab ba é 🙂 dog 你好"


def run(
    decoder: SequenceDecoder, messages: list[list[int]]
) -> tuple[str, list[OutputToken], list[str]]:
    """Returns text, tokens and the text of every message."""
    pieces, tokens = [], []
    for message in messages:
        text, final = decoder.feed([verify_pb2.SequenceOutput(tokens=message)])
        pieces.append(text)
        tokens.extend(final)
    text, final = decoder.flush()
    return "".join(pieces) + text, [*tokens, *final], pieces


def fewest_tokens(
    tokenizer: Tokenizer, prompt: list[int], tokens: list[int], stops: list[str]
) -> int:
    """Returns the number of tokens until the text contains one of the stop strings."""
    for count in range(1, len(tokens)):
        text = run(SequenceDecoder(tokenizer, prompt, [], 0, False, True), [tokens[:count]])[0]
        if any(stop in text for stop in stops):
            return count
    return len(tokens)


@pytest.mark.parametrize("family", list(BUILT))
@given(data=st.data())
def test_equals_a_search_in_the_whole_text(family: str, data: st.DataObject) -> None:
    tokenizer = BUILT[family]
    known = tokenizer.encode(WORDS, False)
    newlines = byte_tokens(tokenizer)[10:11] or known
    ids = (
        st.sampled_from(known)
        | st.integers(0, tokenizer.vocab_size - 1)
        | st.sampled_from(newlines)
    )
    messages = data.draw(st.lists(st.lists(ids, max_size=5), max_size=8))
    stops = data.draw(st.lists(st.text("ab é🙂\n", min_size=1, max_size=3), max_size=3))
    keep = data.draw(st.booleans())
    flat = [token for message in messages for token in message]
    prompt = tokenizer.encode("x", False)
    whole = run(SequenceDecoder(tokenizer, prompt, [], 0, False, True), [flat])[0]
    decoder = SequenceDecoder(tokenizer, prompt, stops, 0, keep, True)
    text, tokens, pieces = run(decoder, messages)

    ends = {stop: whole.find(stop) + len(stop) for stop in stops if stop in whole}
    if not ends:
        assert decoder.stop_text is None
        assert text == whole
        assert decoder.num_tokens == len(flat)
    else:
        first = min(ends.values())
        stop = max((s for s, end in ends.items() if end == first), key=len)
        assert decoder.stop_text == stop
        assert decoder.num_tokens == fewest_tokens(tokenizer, prompt, flat, stops)
        assert text == whole[: first if keep else first - len(stop)]
    # No message may have shown what is no part of the text, and the tokens cover it exactly.
    assert text.startswith("".join(pieces))
    assert "".join(token.text for token in tokens) == text
    assert [token.id for token in tokens] == flat[: decoder.num_tokens]


def test_stop_strings_wait_for_the_least_tokens() -> None:
    tokenizer = BUILT["byte_level"]
    ids = tokenizer.encode("aXbXc", False)
    behind = len(tokenizer.encode("aX", False))
    decoder = SequenceDecoder(tokenizer, [], ["X"], behind, False, True)
    assert run(decoder, [ids])[0] == "aXb"


def test_the_stop_token_has_no_text_unless_kept() -> None:
    tokenizer = BUILT["byte_level"]
    ids = tokenizer.encode("ab cd", False)
    output = verify_pb2.SequenceOutput(tokens=ids)
    output.finish.stop_token = ids[-1]
    for keep, expected in ((False, tokenizer.decode(ids[:-1])), (True, "ab cd")):
        decoder = SequenceDecoder(tokenizer, [], [], 0, keep, True)
        text, tokens = decoder.feed([output])
        assert text + decoder.flush()[0] == expected
        assert len(tokens) == decoder.num_tokens == len(ids)


def test_steps_are_told_up_to_the_stop_and_no_further() -> None:
    tokenizer = BUILT["byte_level"]
    ids = tokenizer.encode("aXbXc", False)
    count = fewest_tokens(tokenizer, [], ids, ["Xb"])
    assert 2 < count < len(ids)
    tree = verify_pb2.VerifiedTree(tokens=[7], parents=[-1], draft="NGRAM")
    outputs = [
        verify_pb2.SequenceOutput(tokens=ids[:2], drafted=[True, False], tree=tree),
        verify_pb2.SequenceOutput(tokens=ids[2:], drafted=[False] * len(ids[2:])),
        verify_pb2.SequenceOutput(tokens=ids[:1], drafted=[True], tree=tree),
    ]
    decoder = SequenceDecoder(tokenizer, [], ["Xb"], 0, False, True)
    tokens = decoder.feed(outputs)[1] + decoder.flush()[1]
    assert [(step.num_tokens, step.tree) for step in decoder.take_steps()] == [
        (2, tree),
        (count - 2, None),
    ]
    assert decoder.take_steps() == []
    assert [token.drafted for token in tokens] == [True, *[False] * (count - 1)]
