"""Attention of prompts on Hopper cards, with the bits of `exact_triton`.

The kernel is in Gluon, Triton's language for explicit layouts, memory and synchronisation, which
may change with any release of Triton.
"""

import importlib.metadata
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from foredraft.attention.base import Batch, SequenceSpan
from foredraft.attention.prompts import PROMPT_ROWS, PromptPlan, PromptsApart
from foredraft.attention.segments import LARGE, NEAR, SMALL, TILE
from foredraft.attention.triton_plan import TritonPlan
from foredraft.device_limits import compute_units
from foredraft.kvcache.paged_kv import PagedKV

BLOCK_M = 128  # rows times query heads of a KV head of a block
_STAGES = 3  # number of tiles of keys, and of values, in shared memory
_HOPPER = (9, 0)
_TRITON = "3.6."  # release that the kernel was tested with
# The kernel takes what it was compared with `exact_triton` for, bit by bit, on a card.
_DTYPE = torch.bfloat16
_HEAD_DIMS = (64, 128)
_GROUP = 4  # query heads of a KV head
_PAGE_SIZE = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Describes prompts to the kernel.

    Attributes:
        plan: The other backend's plan of them.
        blocks: See `blocks_of`; on the device.
    """

    plan: TritonPlan
    blocks: torch.Tensor


def has_kernel(device: torch.device) -> bool:
    """Returns whether the kernel runs on a device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return False
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    if version.startswith(_TRITON):
        return True
    logger.info("attention: prompts by the slower kernel, since Triton is %s", version)
    return False


class HopperAttention(PromptsApart):
    """Computes prompts by a kernel for Hopper cards where it can, and everything else by another
    backend.
    """

    def prompt_rows(self, group_size: int, kv: PagedKV) -> int | None:
        """See AttentionBackend."""
        if not _fits(kv, group_size):
            return None
        num_blocks = -(-compute_units(kv.data.device) // (2 * kv.num_kv_heads))
        return max(PROMPT_ROWS, (num_blocks - 1) * BLOCK_M // group_size + 1)

    def _takes(
        self,
        spans: Sequence[SequenceSpan],
        kv: PagedKV,
        windows: Sequence[int | None],
        group_size: int,
    ) -> bool:
        if any(window is not None for window in windows) or not _fits(kv, group_size):
            return False
        # With fewer blocks much of the card is idle, unless keys are cut into parts.
        num_blocks = sum(-(-span.num_rows * group_size // BLOCK_M) for span in spans)
        return 2 * num_blocks * kv.num_kv_heads >= compute_units(kv.data.device)

    def _plan_prompts(self, batch: Batch, kv: PagedKV, group_size: int) -> _Prompts:
        blocks = torch.from_numpy(blocks_of(batch.spans, group_size))
        if kv.data.is_cuda:
            blocks = blocks.pin_memory()
        plan = self.others.plan(batch, kv, (None,), group_size)
        return _Prompts(plan, blocks.to(kv.data.device, non_blocking=True))

    def _attend_prompts(
        self, plan: PromptPlan, queries: torch.Tensor, layer: int, scale: float, out: torch.Tensor
    ) -> None:
        from foredraft.attention.hopper_prompt_kernels import attend_prompts, pages_of

        kv, blocks, spans = plan.kv, plan.prompts.blocks, plan.prompts.plan
        if queries.dtype != kv.data.dtype:
            self.others.attend(spans, queries, layer, None, scale, out)
            return
        keys, values = kv.keys(layer), kv.values(layer)
        num_heads, head_dim = queries.shape[1:]
        num_blocks, kv_heads = blocks.shape[1], kv.num_kv_heads
        attend_prompts[(num_blocks * kv_heads,)](
            queries, pages_of(keys, kv.page_size), pages_of(values, kv.page_size), out, spans.page_tables,
            spans.first_row, spans.num_rows, spans.prefix_len, blocks, num_blocks, scale * math.log2(math.e),
            queries.stride(0), queries.stride(1), keys.shape[1], spans.page_tables.stride(0),
            GROUP=num_heads // kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=kv.page_size,
            BLOCK_M=BLOCK_M, TILE=TILE, STAGES=_STAGES, NEAR=NEAR, SMALL=SMALL, LARGE=LARGE, num_warps=4,
        )  # fmt: skip


def _fits(kv: PagedKV, group_size: int) -> bool:
    """Returns whether the kernel takes such a cache and such groups of heads."""
    is_known = kv.data.dtype == _DTYPE and kv.data.shape[-1] in _HEAD_DIMS
    return is_known and kv.page_size == _PAGE_SIZE and group_size == _GROUP


def blocks_of(spans: Sequence[SequenceSpan], group_size: int) -> npt.NDArray[np.int32]:
    """Returns int32 [2, n], the sequence and the block of each program, those of the most keys
    first.
    """
    rows = np.array([span.num_rows for span in spans])
    counts = -(-rows * group_size // BLOCK_M)
    sequence = np.repeat(np.arange(len(spans)), counts)
    block = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    last_row = np.minimum(((block + 1) * BLOCK_M - 1) // group_size, rows[sequence] - 1)
    num_keys = np.array([span.prefix_len for span in spans])[sequence] + last_row
    order = np.argsort(-num_keys, kind="stable")
    return np.stack((sequence[order], block[order])).astype(np.int32)
