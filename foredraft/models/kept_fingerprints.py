"""Fingerprints of tokenizers, kept from one start to the next."""

import contextlib
import hashlib
import os
from pathlib import Path

import tokenizers

from foredraft.models.registry import cache_dir
from foredraft.text.tokenizer import FINGERPRINTED, tokenizer_fingerprint

_LEAST_BYTES = 1 << 20  # of a tokenizer.json; a smaller one is read at once
_FORM = 1  # raised when fingerprints are computed in another way


def kept_fingerprint(path: str | os.PathLike[str]) -> str:
    """Returns `tokenizer_fingerprint`, which takes half a second for a large vocabulary, from a
    file of an earlier start where these very files were read.

    Raises:
        CheckpointError: A file is broken.
    """
    files = [Path(path) / name for name in FINGERPRINTED]
    if not files[0].is_file() or files[0].stat().st_size < _LEAST_BYTES:
        return tokenizer_fingerprint(path)
    read = hashlib.sha256(f"{_FORM} {tokenizers.__version__}".encode())
    for file in files:
        content = file.read_bytes() if file.is_file() else b""
        read.update(f" {len(content)} ".encode() + content)
    kept = cache_dir() / f"tokenizer-{read.hexdigest()}"
    with contextlib.suppress(OSError):
        return kept.read_text()
    found = tokenizer_fingerprint(path)
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        scratch = kept.with_suffix(f".{os.getpid()}")
        scratch.write_text(found)
        scratch.replace(kept)
    return found
