"""Decodes a list of tokens by the library and, for byte tokens, by SentencePiece's rule."""

from collections.abc import Sequence

from foredraft.text.tokenizer import Tokenizer


def byte_tokens(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that stand for one byte, `<0x0A>`."""
    return [t for t in range(tokenizer.vocab_size) if (tokenizer.token(t) or "").startswith("<0x")]


def whole_text(tokenizer: Tokenizer, tokens: Sequence[int], skip: bool = True) -> str:
    """Returns the text of all tokens at once; `skip` leaves special ones out."""
    if not any((tokenizer.token(token) or "").startswith("<0x") for token in tokens):
        return tokenizer.decode(tokens, skip)
    pieces: list[str] = []
    run = b""
    for token in tokens:
        piece = tokenizer.token(token)
        if piece is None or (skip and token in tokenizer.special_ids):
            continue
        if piece.startswith("<0x"):
            run += bytes([int(piece[3:5], 16)])
        else:
            pieces += [_spelt(run), piece] if run else [piece]
            run = b""
    text: str = tokenizer._backend.decoder.decode([*pieces, _spelt(run)] if run else pieces)
    return text


def _spelt(run: bytes) -> str:
    """Returns characters as far as there are any, and a replacement character for every other
    byte.
    """
    text = ""
    while run:
        for size in (1, 2, 3, 4):
            try:
                text += run[:size].decode()
                break
            except UnicodeDecodeError:
                continue
        else:
            text, size = text + "\ufffd", 1
        run = run[size:]
    return text
