"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F
from torch import nn

from foredraft.layers.linear import Linear
from foredraft.layers.normed import Normed, RoundedRows
from foredraft.layers.parameters import new_parameter
from foredraft.layers.row_kernels import kernels_for
from foredraft.parallel.group import SINGLE, SumGroup


class RMSNorm(nn.Module):
    """Computes x / rms(x) * weight over the last dimension, in float32.

    By Zhang and Sennrich 2019 (arXiv 1910.07467).

    Args:
        size: Size of the last dimension.
        eps: Number added to the mean square.
        full_precision: Whether the weight stays in float32 and is applied before rounding to x's
            type (Gemma), not after.

    Attributes:
        weight: [size]. The loader adds an offset that checkpoints leave out (Gemma's 1).
    """

    def __init__(
        self, size: int, eps: float, full_precision: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.eps = eps
        self.full_precision = full_precision and dtype in (torch.bfloat16, torch.float16)
        self.weight = new_parameter(
            (size,), torch.float32 if self.full_precision else dtype, device
        )

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Normalises [..., size]; the result has the same shape and type.

        Args:
            out: Result of [num_rows, size]; may be a part of wider rows. None allocates it.
        """
        weight = self.weight
        if (kernels := kernels_for(x, weight, out)) is not None:
            return kernels.rms_norm(x, weight, self.eps, self.full_precision, out)
        result = self._norm(x)
        return result if out is None else out.copy_(result)

    def of_rows(
        self,
        table: torch.Tensor,
        rows: torch.Tensor,
        out: torch.Tensor,
        copy: torch.Tensor | None = None,
        reader: Linear | None = None,
    ) -> RoundedRows | None:
        """Writes the norm of the rows int64 [m] of a table [n, size] to `out` [m, size], and
        the rows themselves to `copy`.

        Both may be parts of wider rows.

        Args:
            reader: See `add`.

        Returns:
            `out` as 8-bit floats, where the reader wants them.
        """
        weight = self.weight
        if (kernels := kernels_for(table, weight, out, copy)) is not None:
            method = None if reader is None else reader.method
            eps, full = self.eps, self.full_precision
            return kernels.norm_of_rows(table, rows, weight, eps, full, out, copy, method)
        picked = table.index_select(0, rows)
        if copy is not None:
            copy.copy_(picked)
        out.copy_(self._norm(picked))
        return None

    def add(
        self,
        stream: torch.Tensor,
        delta: torch.Tensor,
        post: "RMSNorm | None" = None,
        copy: torch.Tensor | None = None,
        group: SumGroup = SINGLE,
        reader: Linear | None = None,
    ) -> Normed:
        """Adds `delta`, or its norm by `post`, to `stream` in place, and returns the norm of
        the sum.

        Args:
            stream: [num_rows, size].
            delta: [num_rows, size], or the parts that `Linear.deferred` gives.
            copy: Second place for the sum; may be a part of wider rows.
            group: Ranks whose deltas are added up first.
            reader: Layer that reads the norm first. On a GPU its method decides whether the rows
                are rounded to 8-bit floats at once, and when it may start.
        """
        weight = self.weight
        post_weight = None if post is None else post.weight
        if (kernels := kernels_for(stream, weight, delta, post_weight, copy)) is not None:
            first = None if post is None else (post.weight, post.eps)
            return kernels.add_norm(
                stream,
                delta,
                weight,
                self.eps,
                self.full_precision,
                first,
                copy,
                group,
                None if reader is None else reader.method,
            )
        if group.size > 1:
            delta = group.all_reduce(delta)
        stream.add_(delta if post is None else post(delta))
        if copy is not None:
            copy.copy_(stream)
        return Normed(self._norm(stream))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        if self.full_precision:
            return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
