"""Turns the target's hidden states into the features that a head reads."""

from collections.abc import Callable, Sequence

import torch

from draft_service.drafters.extending import Parts
from draft_service.drafters.hidden_source import HiddenSource
from draft_service.drafters.paged_sequences import Extension
from draft_service.steps.block_runner import BlockRunner
from draft_service.steps.head_runner import HeadRunner
from draft_service.steps.level_step import Features
from foredraft.errors import InvalidRequest
from foredraft.transport.base import HiddenReader


class TargetStates:
    """Reads the hidden states of one verifier, which may have projected them already.

    Args:
        runner: Runs the head.
        are_fused: Whether the verifier projects the rows before it sends them.

    Attributes:
        width: Number of elements of a row that the verifier sends.
    """

    def __init__(self, runner: HeadRunner | BlockRunner, are_fused: bool) -> None:
        self._runner, self._are_fused = runner, are_fused
        head = runner.head
        self.width = head.config.layer.hidden_size if are_fused else head.hidden_width

    def read(self, reader: HiddenReader | None, extension: Extension) -> torch.Tensor:
        """Returns the states of the positions before an extension's tokens, [n, width].

        Raises:
            InvalidRequest: There are none, or another number than tokens.
        """
        slot, wanted, hidden = extension.sequence.slot, len(extension.tokens), extension.hidden
        if hidden is None or reader is None:
            raise InvalidRequest("hidden", f"slot {slot}: there is none for {wanted} tokens")
        if hidden.num_rows != wanted:
            raise InvalidRequest(
                "hidden", f"slot {slot}: {hidden.num_rows} rows for {wanted} tokens"
            )
        return reader.read(hidden).to(self._runner.head.device)

    def features(
        self, reader: HiddenReader | None, extensions: Sequence[Extension]
    ) -> Callable[[Parts], torch.Tensor]:
        """Reads the states of all extensions; returns what projects those of a forward's parts.

        Raises:
            InvalidRequest: See `read`.
        """
        states = [self.read(reader, extension) for extension in extensions]
        return lambda parts: self.fuse(
            torch.cat([states[index][first:end] for index, first, end in parts])
        )

    def at(self, source: HiddenSource | None) -> Features:
        """Returns what projects rows of the source of a step of fixed shape, by their indexes.

        Unlike `fuse`, it runs in a graph, where any variant of a kernel may be taken.
        """
        assert source is not None
        rows, head, are_fused = source.rows, self._runner.head, self._are_fused
        return lambda indexes: rows[indexes] if are_fused else head.fuse(rows[indexes])

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """Converts rows [n, width] to features [n, hidden_size]."""
        return rows if self._are_fused else self._runner.fuse(rows)

    def blank(self, num_rows: int) -> torch.Tensor:
        """Returns meaningless features [num_rows, hidden_size], for warm-up."""
        head = self._runner.head
        return self.fuse(torch.zeros(num_rows, self.width, dtype=head.dtype, device=head.device))
