"""The tokenizer of a Hugging Face directory, read with the `tokenizers` library only."""

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from foredraft.errors import CheckpointError, InvalidRequest
from foredraft.text import stages
from foredraft.text.chat_template import ChatTemplate

# Files that a vocabulary is read from, the main one first.
FINGERPRINTED = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
SPECIAL_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Converts text to token ids and back.

    Args:
        backend: The library's tokenizer.
        special_tokens: Texts by role, such as bos_token; templates see them.
        chat_template: Jinja source, None for a model without one.
        tool_template: Jinja source for conversations with tools, None where that is the same.

    Attributes:
        decoder: The `decoder` entry of tokenizer.json.
        special_ids: Ids that `skip_special_tokens` leaves out.
        chat_template: None for a model without one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        roles = dict(special_tokens or {})
        own = backend.decoder  # all of a large tokenizer would take 0.2 s to write and to read
        self.decoder: Mapping[str, Any] | None = (
            None if own is None else json.loads(own.__getstate__())
        )
        stages.build_stages(self.decoder)  # raises for decoders that cannot be streamed
        self.special_ids = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )
        self.chat_template = ChatTemplate(chat_template, roles) if chat_template else None
        self._tool_template = ChatTemplate(tool_template, roles) if tool_template else None
        self.vocab_size: int = backend.get_vocab_size()
        self._settled_texts: dict[bool, dict[int, str]] = {True: {}, False: {}}
        self._token = functools.lru_cache(maxsize=2**16)(backend.id_to_token)
        self._token_bytes = functools.lru_cache(maxsize=2**14)(self._bytes_of)

    @classmethod
    def from_dir(
        cls, path: str | os.PathLike[str], chat_template: str | None = None
    ) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat
        template.

        Args:
            path: A directory.
            chat_template: Jinja source to use instead of the directory's.

        Raises:
            CheckpointError: A file is missing or broken.
        """
        folder = Path(path)
        backend, config = _load_backend(folder)
        roles = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        _mark_special(backend, [*roles.values(), *_additional_special_tokens(config)])
        found = {"default": chat_template} if chat_template else _find_templates(folder, config)
        try:
            return cls(backend, roles, found.get("default"), found.get("tool_use"))
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text; the tokenizer's own post-processor adds BOS or EOS when
        asked to.

        Nothing else does: as in transformers, `add_bos_token` of tokenizer_config.json is for files
        without a tokenizer.json.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> list[int]:
        """Returns the token ids of a conversation.

        Special tokens come from the template alone, so that BOS is not doubled.

        Raises:
            InvalidRequest: There is no template, or it refuses the messages.
        """
        template = self.template_for(bool(variables.get("tools")))
        if template is None:
            raise InvalidRequest("messages", "the model has no chat template")
        return self.encode(template.render(messages, **variables), False)

    def template_for(self, has_tools: bool) -> ChatTemplate | None:
        """Returns the template for a conversation: some models have a separate one for
        conversations with tools.
        """
        return (self._tool_template if has_tools else None) or self.chat_template

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; ids outside the vocabulary read as nothing."""
        text: str = self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token: int) -> str | None:
        """Returns the vocabulary's entry of a token, as the decoder sees it."""
        return self._token(token)

    def token_id(self, text: str) -> int | None:
        """Returns the id of a special token; None where no special token has this text."""
        token: int | None = self._backend.token_to_id(text)
        return token if token in self.special_ids else None

    def token_bytes(self, token: int) -> bytes:
        """Returns the UTF-8 of one token in the middle of a text; some are half a character."""
        return self._token_bytes(token)

    def _bytes_of(self, token: int) -> bytes:
        piece = self.token(token)
        return b"" if piece is None else stages.piece_bytes(piece, self.decoder)

    def settled_texts(self, skip_special_tokens: bool) -> dict[int, str]:
        """Returns a cache of texts of tokens that read the same after any others.

        Detokenizers fill it; it is no larger than the vocabulary.
        """
        return self._settled_texts[skip_special_tokens]

    @functools.cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest vocabulary entry."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the sorted map of tokens to ids: equal for tokenizers that can share
        drafts.
        """
        return fingerprint_of(self._backend.get_vocab())


def fingerprint_of(vocabulary: Mapping[str, int]) -> str:
    """Computes SHA-256 over the sorted map of tokens to ids, in hexadecimal."""
    text = json.dumps(sorted(vocabulary.items()), ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def tokenizer_fingerprint(path: str | os.PathLike[str]) -> str:
    """Computes the fingerprint of a directory's tokenizer, without building the rest of it; empty
    where there is none.

    Raises:
        CheckpointError: A file is broken.
    """
    if not (Path(path) / "tokenizer.json").is_file():
        return ""
    return fingerprint_of(_load_backend(Path(path))[0].get_vocab())


def _load_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Loads the library's tokenizer with every token the directory names, and
    tokenizer_config.json.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file}: not found; a fast tokenizer is needed")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"{file}: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    _add_missing_tokens(backend, folder, config)
    return backend, config


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: is not an object")
    return content


def _text_of(token: Any) -> str | None:
    """Returns the text of a token in a configuration file, which is a string or an object that
    holds it.
    """
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Returns texts of special tokens by role; the first file that names one wins."""
    roles: dict[str, str] = {}
    for config in configs:
        for key in SPECIAL_TOKEN_KEYS:
            text = _text_of(config.get(key))
            if text is not None:
                roles.setdefault(key, text)
    return roles


def _additional_special_tokens(config: Mapping[str, Any]) -> list[str]:
    """Returns texts of special tokens without a role: a list, or names and tokens.

    As in transformers, a list in the newer key marks none.
    """
    listed, named = config.get("additional_special_tokens"), config.get("extra_special_tokens")
    tokens = list(listed) if isinstance(listed, list) else []
    tokens += named.values() if isinstance(named, Mapping) else ()
    return [text for text in map(_text_of, tokens) if text is not None]


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]
) -> None:
    """Adds tokens that only the older files name, and checks that they get their ids."""
    older = _read_json(folder / "added_tokens.json")
    try:
        wanted = _named_tokens(older, config.get("added_tokens_decoder") or {})
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: added_tokens.json, or added_tokens_decoder of tokenizer_config.json, is"
            f" broken: {error!r}"
        ) from error
    for number, token in sorted(wanted.items()):
        if backend.token_to_id(token.content) is not None:
            continue
        add = backend.add_special_tokens if token.special else backend.add_tokens
        add([token])
        if backend.token_to_id(token.content) != number:
            raise CheckpointError(
                f"{folder}: token {token.content!r} should have id {number}, "
                f"not {backend.token_to_id(token.content)}"
            )


def _named_tokens(
    older: Mapping[str, Any], decoder: Mapping[str, Any]
) -> dict[int, tokenizers.AddedToken]:
    """Returns the tokens that the two files add, by id."""
    wanted = {
        int(number): tokenizers.AddedToken(text, normalized=False) for text, number in older.items()
    }
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for number, entry in decoder.items():
        options = {flag: bool(entry[flag]) for flag in flags if flag in entry}
        wanted[int(number)] = tokenizers.AddedToken(entry["content"], **options)
    return wanted


def _mark_special(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
    """Marks tokens that have a role as special where tokenizer.json does not.

    How they are found in a text stays.
    """
    known = {added.content: added for added in backend.get_added_tokens_decoder().values()}
    for text in texts:
        if backend.token_to_id(text) is None:
            continue
        added = known.get(text) or tokenizers.AddedToken(text, normalized=False)
        if not added.special:
            added.special = True
            backend.add_special_tokens([added])


def _find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns sources of chat templates by name; `default` and `tool_use` have a meaning.

    Reads chat_template.jinja with additional_chat_templates, chat_template.json or
    tokenizer_config.json, in the order of transformers.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files = {"default": file, **{other.stem: other for other in others}}
        try:
            return {name: each.read_text(encoding="utf-8") for name, each in files.items()}
        except ValueError as error:
            raise CheckpointError(f"{folder}: a chat template is no text: {error}") from error
    template = _read_json(folder / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    entries = template if isinstance(template, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, Mapping) and isinstance(entry.get("template"), str) and "name" in entry
    }
