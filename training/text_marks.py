"""The tokens that begin and end texts, which each tokenizer has of its own."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from foredraft.errors import ConfigError
from foredraft.models.config_reader import read_json
from training.text_data import END_OF_TEXT

_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


class TextMarks(NamedTuple):
    """Ids of the tokens that begin and end a text; one token may be both."""

    begin: int
    end: int


def read_marks(tokenizer: Tokenizer, source: Path) -> TextMarks:
    """Returns what the tokenizer puts before texts, and the `eos_token` of its folder; each stands
    in for the other where there is none.

    Args:
        source: Folder of the tokenizer, or its tokenizer.json.

    Raises:
        ConfigError: There is neither.
        CheckpointError: tokenizer_config.json cannot be read.
    """
    if tokenizer.token_to_id(END_OF_TEXT) == 0:  # one that was trained here
        return TextMarks(0, 0)
    file = (source if source.is_dir() else source.parent) / "tokenizer_config.json"
    role = read_json(file).get("eos_token") if file.is_file() else None
    text = role.get("content") if isinstance(role, Mapping) else role
    end = tokenizer.token_to_id(text) if isinstance(text, str) else None
    start = tokenizer.encode("", add_special_tokens=True).ids
    marks = [*start[:1], *([] if end is None else [end])]
    if not marks:
        raise ConfigError(
            f"--tokenizer {source}: no token begins its texts, and no eos_token in"
            " tokenizer_config.json beside it ends them"
        )
    return TextMarks(marks[0], marks[-1])


def copy_tokenizer(tokenizer: Tokenizer, source: Path, out: Path) -> None:
    """Writes a tokenizer with what its folder says of its roles and chats.

    Args:
        source: Folder of the tokenizer, or its tokenizer.json.
    """
    out.mkdir(parents=True, exist_ok=True)
    folder = source if source.is_dir() else source.parent
    tokenizer.save(str(out / "tokenizer.json"))
    for name in _FILES:
        if (folder / name).is_file() and folder.resolve() != out.resolve():
            shutil.copyfile(folder / name, out / name)
