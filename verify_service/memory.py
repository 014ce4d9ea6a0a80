"""How many KV pages fit: counts weights, the target's KV and the draft's."""

import os
from pathlib import Path

from foredraft.errors import ConfigError

CPU_FRACTION = 0.4
GPU_FRACTION = 0.85


def available_host_bytes() -> int:
    """Memory that this process may still take: the host's, or less under a cgroup limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


def num_pages(
    *,
    page_size: int,
    bytes_per_page: int,
    budget_bytes: int,
    max_total_tokens: int | None,
    max_useful_tokens: int,
) -> int:
    """Pages of the KV pool.

    Args:
        bytes_per_page: Of target and draft together.
        budget_bytes: What the memory fraction leaves for KV.
        max_total_tokens: Overrides the budget where given.
        max_useful_tokens: More could never be used: running requests times context length.

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
            f"no memory is left for the KV cache ({budget_bytes / 2**20:.0f} MiB for pages of "
            f"{bytes_per_page / 2**20:.1f} MiB): raise --mem-fraction-static, or lower --context-length"
        )
    return pages
