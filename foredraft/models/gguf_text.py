"""How a GGUF file says that text is split into tokens, where transformers passes it over."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers, processors

from foredraft.errors import CheckpointError

PREFIX = "tokenizer.ggml."
# Keys of a file that `follow_metadata` reads, without the prefix.
KEYS = (
    "model",
    "pre",
    "add_space_prefix",
    "add_bos_token",
    "add_eos_token",
    "bos_token_id",
    "eos_token_id",
)
# Names in `tokenizer.ggml.pre`, of Llama 3's kind and tekken. A text begins with BOS unless the
# file says otherwise, and a piece of text that is a token is that token, whatever the merges give.
_LLAMA3 = "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"
_WHOLE_PIECES = frozenset((*_LLAMA3, "tekken"))
# These split as GPT-2 does, but every digit from the others.
_DIGITS = frozenset(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
)
# These split as GPT-2 does; files without a name, or with `default`, count among them.
_GPT2 = frozenset(
    ("", "default", "gpt-2", "phi-2", "mpt", "olmo", "trillion", "exaone4", "gigachat", "a.x-4.0")
)


def follow_metadata(backend: tokenizers.Tokenizer, values: Mapping[str, Any], where: str) -> None:
    """Changes a tokenizer that transformers made of a GGUF file such that texts begin and are split
    as the file says.

    What it does not say is as in llama.cpp, but for the space before a text that follows a special
    token or begins with a space: there are models of both kinds.

    Args:
        values: Values of `KEYS`; None for those that the file does not have.
        where: The file, for errors.

    Raises:
        CheckpointError: The file names a way to split text that is not known.
    """
    if values["model"] == "llama" and values["add_space_prefix"] is False:
        _drop_space_prefix(backend)
    if values["model"] == "gpt2":
        _split(backend, values, where)


def drop_foreign_tokens(file: Path, num_tokens: int) -> None:
    """Removes tokens that a file of GGUF does not have from the tokenizer.json made of it:
    transformers adds the end of text that its class of GPT-2's kind has by default.

    Args:
        file: The tokenizer.json.
        num_tokens: Number of tokens of the GGUF file.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < num_tokens]
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _drop_space_prefix(backend: tokenizers.Tokenizer) -> None:
    """Makes texts begin as they are, without a space before the first word."""
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )


def _split(backend: tokenizers.Tokenizer, values: Mapping[str, Any], where: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = values["pre"] or ""
    if name in _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif name not in _GPT2 and name not in GGUF_PRE_TOKENIZER_SPLITS:
        raise CheckpointError(
            f"{where}: {PREFIX}pre {name!r} is a way to split text that is not known; serve the"
            " model's Hugging Face directory"
        )
    if name not in _WHOLE_PIECES:
        return
    backend.model.ignore_merges = True
    bos, eos = values["bos_token_id"], values["eos_token_id"]
    if bos is None or values["add_bos_token"] is not None:
        return
    ends = [eos] if eos is not None and values["add_eos_token"] else []
    tokens = {number: backend.id_to_token(number) for number in (bos, *ends)}
    backend.post_processor = processors.TemplateProcessing(
        single=[tokens[bos], "$A", *(tokens[end] for end in ends)],
        special_tokens=[(text, number) for number, text in tokens.items()],
    )
