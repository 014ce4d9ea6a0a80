"""Computes the number of KV pages that fit beside weights, workspace and the draft."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from foredraft.errors import ConfigError
from foredraft.parallel.group import Group
from foredraft.runner.aside import ran_out

CPU_FRACTION = 0.4
GPU_FRACTION = 0.85


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """Accounts for the memory of a GPU, in bytes.

    Attributes:
        total: Memory of the card.
        used: Memory of weights and whatever else was allocated when it was counted.
        kept_free: Memory that the memory fraction leaves to others.
        workspace: Memory of the target's steps, see `workspace`.
        arena: Memory of hidden states on their way to drafts.
        projection: Weights that project hidden states here for drafts.
        draft: Memory that drafts on the same card allocate when they are attached, beside their KV.
    """

    total: int
    used: int
    kept_free: int
    workspace: int
    arena: int
    projection: int
    draft: int

    @property
    def kv(self) -> int:
        """Memory left for the KV pages of target and draft together."""
        steps = self.workspace + self.arena + self.projection + self.draft
        return self.total - self.used - self.kept_free - steps

    def __str__(self) -> str:
        parts = dataclasses.asdict(self) | {"kv": self.kv}
        return ", ".join(f"{name} {size / 2**20:.0f}" for name, size in parts.items())


def num_pages(
    *,
    page_size: int,
    bytes_per_page: int,
    budget_bytes: int,
    max_total_tokens: int | None,
    max_useful_tokens: int,
    available_bytes: float = float("inf"),
) -> int:
    """Returns the number of pages of the KV pool.

    Args:
        bytes_per_page: Bytes of a page of target and draft together.
        budget_bytes: Memory that the memory fraction leaves for KV.
        max_total_tokens: Number of tokens that overrides the budget where given.
        max_useful_tokens: Number of tokens beyond which none could be used: running requests times
            context length.
        available_bytes: Memory that pages must not exceed, however many tokens are asked for.

    Raises:
        ConfigError: Not even one page fits, or more was asked for than fits; names the flags that
            help.
    """
    if max_total_tokens is not None:
        pages = max_total_tokens // page_size
        if pages < 1:
            raise ConfigError(f"--max-total-tokens must be at least one page of {page_size} tokens")
        if pages * bytes_per_page > available_bytes:
            raise ConfigError(
                f"no memory is left for the KV cache: --max-total-tokens {max_total_tokens} takes"
                f" {pages * bytes_per_page / 2**20:.0f} MiB, and {available_bytes / 2**20:.0f} MiB"
                " are free"
            )
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


def least_free_bytes(device: torch.device, group: Group) -> int:
    """Returns the free memory of the GPU of the rank that has least; all ranks call this."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(group.gathered(torch.tensor([free], device=device)).min())


@contextlib.contextmanager
def explained(what: str, flags: str) -> Iterator[None]:
    """Turns an out-of-memory error inside the block into one that names the remedy.

    Args:
        what: The part that needs the memory.
        flags: The flags to lower.

    Raises:
        ConfigError: The memory does not suffice.
    """
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"no memory is left for {what}: lower {flags} ({reason})") from error
