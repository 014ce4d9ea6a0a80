"""Where a draft's graphs find the target's hidden states."""

from collections.abc import Sequence

import numpy as np
import torch

from draft_service.drafters.paged_sequences import Extension
from foredraft.errors import InvalidRequest
from foredraft.transport.base import HiddenReader


class HiddenSource:
    """The verifier's own memory, or a buffer that rows are copied to.

    Args:
        reader: Of the attach.
        num_rows: Of a step at most.
        width: Of a row.
        dtype: Of a row.
        device: Where the graphs run.

    Attributes:
        rows: [n, width] on the device, the same memory while the attach lasts: the verifier's ring, and behind it what
            is handed on without the host's knowledge.
    """

    def __init__(
        self,
        reader: HiddenReader,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._reader = reader
        ring, exchange = reader.ring, reader.exchange
        self._is_shared = ring is not None and ring.device == device
        if ring is not None and self._is_shared:
            self.rows, self._capacity = ring, len(ring)
        else:
            self.rows = torch.zeros(num_rows, width, dtype=dtype, device=device)
        if exchange is not None and exchange.hidden is not None:
            self.rows = exchange.hidden

    def has_room(self, num_rows: int) -> bool:
        """Whether the states of so many tokens of one step can be read."""
        return self._is_shared or num_rows <= len(self.rows)

    def places(
        self, extensions: Sequence[Extension], num_rows: np.ndarray, width: int
    ) -> np.ndarray:
        """Where in `rows` the states of each extension's tokens are, int [n, width]; copies them there where they must be.

        Args:
            num_rows: Of each extension.

        Raises:
            InvalidRequest: They are not as many as the tokens.
        """
        hidden = [extension.hidden for extension in extensions if extension.hidden is not None]
        given = [rows.num_rows for rows in hidden]
        if given != num_rows.tolist():
            raise InvalidRequest("hidden", f"{given} rows for {num_rows.tolist()} tokens")
        if self._is_shared:
            first = [rows.arena_row for rows in hidden]
            return (np.array(first)[:, None] + np.arange(width)) % self._capacity
        rows = torch.cat([self._reader.read(one) for one in hidden]).to(self.rows.dtype)
        if self.rows.is_cuda and not rows.is_cuda:
            rows = rows.pin_memory()
        self.rows[: len(rows)].copy_(rows, non_blocking=True)
        ends = num_rows.cumsum()
        return np.minimum((ends - num_rows)[:, None] + np.arange(width), len(self.rows) - 1)
