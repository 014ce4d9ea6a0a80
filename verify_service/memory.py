"""Computes the number of KV pages that fit beside weights, workspace and the draft."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from foredraft.errors import ConfigError
from foredraft.models.config import ModelConfig
from verify_service.executor.captured.step import ROWS_AT_ONCE
from verify_service.executor.choice.sampler import CHOSEN_AT_ONCE
from verify_service.executor.choice.scoring import SCORED_AT_ONCE

CPU_FRACTION = 0.4
GPU_FRACTION = 0.85
# Of messages by which others than torch's allocator say that a GPU's memory is used up.
RAN_OUT = ("out of memory", "ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """Accounts for the memory of a GPU, in bytes.

    Attributes:
        total: Memory of the card.
        used: Memory of weights and whatever else was allocated when it was counted.
        kept_free: Memory that the memory fraction leaves to others.
        workspace: Memory of the target's steps: logits, activations, hidden states.
        draft: Memory that a draft on the same card allocates when it is attached, beside its KV.
    """

    total: int
    used: int
    kept_free: int
    workspace: int
    draft: int

    @property
    def kv(self) -> int:
        """Memory left for the KV pages of target and draft together."""
        return self.total - self.used - self.kept_free - self.workspace - self.draft

    def __str__(self) -> str:
        parts = ("total", "used", "kept_free", "workspace", "draft", "kv")
        return ", ".join(f"{name} {getattr(self, name) / 2**20:.0f}" for name in parts)


def workspace_bytes(
    config: ModelConfig,
    itemsize: int,
    chunk_rows: int,
    decode_rows: int,
    num_captured: int,
    num_sequences: int,
) -> int:
    """Returns an upper bound of the memory that steps need beside weights and KV.

    Args:
        itemsize: Bytes of an activation.
        chunk_rows: Number of prompt tokens of a step.
        decode_rows: Number of rows of the largest decode step, all with logits.
        num_captured: Number of layers whose streams a draft reads.
        num_sequences: Number of sequences that run together.
    """
    rows = chunk_rows + decode_rows
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # Residual stream, its normalised copy, projections and their inputs, gate, up and their
    # product; for two layers, since the sizes of freed blocks may not fit the next layer.
    activations = rows * (4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size)
    kept = rows * config.hidden_size * (1 + num_captured)
    # In captured steps filters and penalties work on some rows at a time, and keep a table of
    # tokens for each sequence.
    choice = (12 * min(decode_rows, ROWS_AT_ONCE) + 8 * num_sequences) * config.vocab_size
    # Outside them the logits of all rows are there once as they come, those of some rows twice in
    # float32.
    logits = (itemsize * decode_rows + 8 * min(decode_rows, CHOSEN_AT_ONCE)) * config.vocab_size
    # Log-probabilities of prompts: logits in their own type and in float32, and the results.
    scores = (itemsize + 12) * min(chunk_rows, SCORED_AT_ONCE) * config.vocab_size
    return 2 * itemsize * (activations + kept) + logits + choice + scores


def num_pages(
    *,
    page_size: int,
    bytes_per_page: int,
    budget_bytes: int,
    max_total_tokens: int | None,
    max_useful_tokens: int,
) -> int:
    """Returns the number of pages of the KV pool.

    Args:
        bytes_per_page: Bytes of a page of target and draft together.
        budget_bytes: Memory that the memory fraction leaves for KV.
        max_total_tokens: Number of tokens that overrides the budget where given.
        max_useful_tokens: Number of tokens beyond which none could be used: running requests times
            context length.

    Raises:
        ConfigError: Not even one page fits; names the flags that help.
    """
    if max_total_tokens is not None:
        pages = max_total_tokens // page_size
        if pages < 1:
            raise ConfigError(f"--max-total-tokens must be at least one page of {page_size} tokens")
        return pages
    pages = min(budget_bytes // bytes_per_page, -(-max_useful_tokens // page_size))
    if pages < 1:
        raise ConfigError(
            f"no memory is left for the KV cache ({budget_bytes / 2**20:.0f} MiB for pages of"
            f" {bytes_per_page / 2**20:.1f} MiB): raise --mem-fraction-static, or lower"
            " --max-running-requests, --cuda-graph-max-bs, --speculative-num-draft-tokens or"
            " --chunked-prefill-size"
        )
    return pages


@contextlib.contextmanager
def explained(what: str, flags: str) -> Iterator[None]:
    """Turns a GPU's out-of-memory error inside the block into one that names the remedy.

    Args:
        what: The part that needs the memory.
        flags: The flags to lower.

    Raises:
        ConfigError: The memory does not suffice.
    """
    try:
        yield
    except RuntimeError as error:
        if not _ran_out(error):
            raise
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"no memory is left on the GPU for {what}: lower {flags} ({reason})"
        ) from error


def _ran_out(error: BaseException | None) -> bool:
    """Returns whether memory was the cause.

    A capture that it broke off hides it behind an error of its own.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in RAN_OUT):
            return True
        error = error.__cause__ or error.__context__
    return False
