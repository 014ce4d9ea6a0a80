"""Selects the kernels that layers use for what they compute beside products."""

from typing import Protocol

import torch

from foredraft.layers import fused, fused_cpu
from foredraft.layers.heads import Heads
from foredraft.layers.linear import LinearMethod
from foredraft.layers.normed import Normed, RoundedRows
from foredraft.parallel.group import SINGLE, SumGroup


class RowKernels(Protocol):
    """The functions of a module with kernels; `fused` describes them."""

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        full_precision: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def norm_of_rows(
        self,
        table: torch.Tensor,
        rows: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        full_precision: bool,
        out: torch.Tensor,
        copy: torch.Tensor | None = None,
        reader: LinearMethod | None = None,
    ) -> RoundedRows | None: ...
    def add_norm(
        self,
        stream: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        full_precision: bool,
        post: tuple[torch.Tensor, float] | None = None,
        copy: torch.Tensor | None = None,
        group: SumGroup = SINGLE,
        reader: LinearMethod | None = None,
    ) -> Normed: ...
    def angles(
        self, positions: torch.Tensor, frequencies: torch.Tensor, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def rotate_and_store(
        self,
        heads: torch.Tensor,
        place: Heads,
        norms: tuple[torch.Tensor, torch.Tensor, float, bool] | None,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def gated(self, both: torch.Tensor, kind: str) -> torch.Tensor: ...


def kernels_for(
    x: torch.Tensor, *others: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> RowKernels | None:
    """Returns the kernels for some tensors of one device.

    On a CPU they take float32 whose last dimension lies in one piece; for others it is None, and
    layers use torch's own operations.

    Args:
        others: All other tensors that the kernel reads or writes floats of; None for absent ones.
        dtype: Type of the result, where the tensors do not say it.
    """
    if fused.on_gpu(x):
        return fused
    if dtype is not torch.float32:
        return None
    for tensor in (x, *others):
        if tensor is not None and not (
            tensor.dtype is torch.float32 and tensor.is_cpu and tensor.stride(-1) == 1
        ):
            return None
    return fused_cpu
