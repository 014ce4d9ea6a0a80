"""Provides the target's hidden states to a draft's graphs."""

from collections.abc import Sequence

import numpy as np
import torch

from draft_service.drafters.paged_sequences import Extension
from foredraft.errors import InvalidRequest
from foredraft.transport.base import HiddenReader


class HiddenSource:
    """Holds hidden states at a fixed address: in the verifier's memory, or in a buffer of its own.

    Args:
        reader: Reader of the attach.
        num_rows: Maximum number of rows of a step.
        width: Number of elements of a row.
        dtype: Data type of the rows.
        device: Device that the graphs run on.

    Attributes:
        rows: [n, width] on the device, at the same address while the attach lasts. Shared memory
            has the verifier's ring, followed by the rows of steps that stay on the GPU.
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
        """Returns whether the states of this many tokens of one step can be read."""
        return self._is_shared or num_rows <= len(self.rows)

    def hidden_rows(
        self, extensions: Sequence[Extension], num_rows: np.ndarray, width: int
    ) -> np.ndarray:
        """Returns the indices into `rows` of the extensions' states, int [n, width].

        Copies the states into the buffer first, where the memory is not shared.

        Args:
            extensions: The step's extensions.
            num_rows: Number of tokens of each extension.
            width: Number of indices for each extension; those beyond its tokens mean nothing.

        Raises:
            InvalidRequest: The numbers of states and tokens differ.
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
