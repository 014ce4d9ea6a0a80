"""`foredraft train token-map`: makes FR-Spec's reduced draft vocabulary of frequent tokens."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from tokenizers import Tokenizer

from foredraft.errors import ConfigError
from training.text_data import num_ids


def count_tokens(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    """Counts the occurrences of each token id, int64 [vocab]."""
    counts = np.zeros(num_ids(tokenizer), dtype=np.int64)
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == 1024:
            _count(batch, tokenizer, counts)
            batch.clear()
    _count(batch, tokenizer, counts)
    return counts


def _count(batch: list[str], tokenizer: Tokenizer, counts: np.ndarray) -> None:
    for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
        np.add.at(counts, encoding.ids, 1)


def select_tokens(
    counts: np.ndarray, size: int, always: Sequence[int] = ()
) -> tuple[list[int], float]:
    """Returns the `size` most frequent ids, most frequent first, lower ids first among equals.

    Args:
        counts: Number of occurrences by token id.
        size: Number of ids.
        always: Ids that are in the map whatever their count (end of text); they displace the
            rarest.

    Returns:
        (ids, share of all occurrences they cover).

    Raises:
        ConfigError: More ids are wanted than there are, or one that there is not.
    """
    for token in always:
        if not 0 <= token < len(counts):
            raise ConfigError(f"--always must be in [0, {len(counts) - 1}], not {token}")
    least = max(1, len(always))
    if not least <= size <= len(counts):
        raise ConfigError(f"--size must be between {least} and {len(counts)}, not {size}")
    ranked = np.lexsort((np.arange(len(counts)), -counts)).tolist()
    kept = set(ranked[:size])
    missing = [token for token in dict.fromkeys(always) if token not in kept]
    ids = ranked[: size - len(missing)] + missing
    return ids, float(counts[ids].sum() / max(1, counts.sum()))


def check_out(path: Path) -> None:
    """Raises ConfigError for a path that `write_token_map` cannot write."""
    if path.is_dir():
        raise ConfigError(f"--out {path}: a folder; give a file in it, .pt")
    if path.suffix != ".pt":
        raise ConfigError(f"--out {path}: must end with .pt")


def write_token_map(ids: Sequence[int], path: Path) -> Path:
    """Writes ids to a file, a list for `torch.load` in SGLang's form, and to safetensors beside it.

    Args:
        ids: Token ids.
        path: The file, `.pt`.

    Returns:
        Path of the safetensors.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(list(ids), path)
    beside = path.with_suffix(".safetensors")
    beside.write_bytes(save({"token_map": torch.tensor(ids, dtype=torch.int64)}))
    return beside
