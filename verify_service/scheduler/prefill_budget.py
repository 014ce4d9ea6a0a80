"""Bounds the prompt tokens of a step, so that running streams wait no longer than allowed."""

import math
from collections.abc import Sequence

from verify_service.scheduler.step_plan import PrefillChunk

FEWEST_TOKENS = 64  # computed in a step whatever they cost, so that every prompt ends
FORGET = 1 / 16  # share of earlier observations that each step replaces


class PrefillBudget:
    """Bounds the prompt tokens of a step by the chunk size and by the delay of running streams.

    Work is counted in tokens: a token of a prompt costs the model's weights once, and `key_cost` of
    that for each key before it. How many seconds a unit of work takes is learnt from the steps that
    held prompts, less what a step without prompts takes.

    Args:
        chunk_size: Maximum number of prompt tokens of a step.
        max_delay: Maximum seconds that prompts may add to a step beside running streams; infinite
            for no bound.
        key_cost: Cost of one key for one query, relative to a token's weights.
        bounds_rows: Whether the chunk size bounds all rows of a step, as long as half of it is left
            for prompts. A GPU's library computes a few rows more than 8,192 as if they were 9,216.
    """

    def __init__(
        self,
        chunk_size: int,
        max_delay: float = math.inf,
        key_cost: float = 0.0,
        bounds_rows: bool = False,
    ) -> None:
        self.chunk_size = chunk_size
        self.max_delay = max_delay
        self._bounds_rows = bounds_rows
        self._key_cost = key_cost
        self._seconds = self._work = 0.0  # sums over recent prompts, forgotten slowly
        self._plain_seconds: float | None = None  # seconds of a step without prompts

    def tokens(self, num_keys: int, num_rows: int = 0) -> int:
        """Returns the maximum number of prompt tokens of a step beside running streams.

        Args:
            num_keys: Tokens that stand before the longest of the prompts' chunks.
            num_rows: Rows of the streams in the same forward.
        """
        most = self.chunk_size
        if self._bounds_rows:
            most -= min(num_rows, self.chunk_size // 2)
        if self.max_delay == math.inf or self._work == 0:
            return most
        allowed = self.max_delay * self._work / max(self._seconds, 1e-9)
        # n tokens after c keys are n (1 + key_cost (c + n / 2)) of work.
        first = 1 + self._key_cost * num_keys
        if self._key_cost:
            root = math.sqrt(first * first + 2 * self._key_cost * allowed)
            allowed = (root - first) / self._key_cost
        return max(min(int(allowed), most), min(FEWEST_TOKENS, most))

    def observe(self, seconds: float, chunks: Sequence[PrefillChunk], has_decodes: bool) -> None:
        """Learns from a step that has ended.

        Args:
            seconds: Whole step, with what was waited for drafts.
            chunks: Prompts' parts that it computed.
            has_decodes: Whether it computed next tokens of running streams too.
        """
        if not chunks:
            plain = self._plain_seconds
            self._plain_seconds = seconds if plain is None else plain + FORGET * (seconds - plain)
            return
        if has_decodes:
            seconds = max(seconds - (self._plain_seconds or 0.0), 0.0)
        work = sum(
            chunk.num_tokens * (1 + self._key_cost * (chunk.start + chunk.num_tokens / 2))
            for chunk in chunks
        )
        self._seconds += seconds - FORGET * self._seconds
        self._work += work - FORGET * self._work
