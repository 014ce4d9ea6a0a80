"""Attention of few rows after many keys on Hopper cards, with the bits of `exact_triton`.

The kernel is in Gluon, see `hopper_prompts`.
"""

from dataclasses import dataclass

import torch

from foredraft.attention.exact_triton import TREE_LINES
from foredraft.attention.segments import (
    LARGE,
    NEAR,
    SMALL,
    TILE,
    PartialSums,
    SegmentKernel,
    segment_of,
)
from foredraft.attention.triton_plan import TritonPlan
from foredraft.device_limits import compute_units
from foredraft.kernel_launch import overlapped, power_of_two

_LINES = 64  # rows times query heads of a KV head that one group of warps computes
_MOST_LINES = 2 * _LINES
# The kernel takes what it was compared with `exact_triton` for, bit by bit, on a card.
_DTYPE = torch.bfloat16
_HEAD_DIMS = (64, 128)
_PAGE_SIZE = 16
# All of these by the number of a program's groups of warps. Tiles of keys, and of values, in shared
# memory:
_STAGES = {1: 2, 2: 4}
# Registers of a thread. Two programs of one group fit a unit with so few.
_REGISTERS = {1: 128, 2: None}
# Maximum number of programs per unit. Segments differ in size, so a unit that is done with short
# ones starts a further program.
_PROGRAMS_PER_UNIT = {1: 4, 2: 1}
_LISTING_PROGRAMS = 32


@dataclass(frozen=True, slots=True)
class Listed:
    """Lists the segments of a step, see `segment_list_kernels.list_segments`.

    Attributes:
        records: int32 [n, 8], with room for the segments of a step's longest contexts.
        num_records: int32 [1].
    """

    records: torch.Tensor
    num_records: torch.Tensor


class HopperSegments(SegmentKernel):
    """Computes segments by a kernel for Hopper cards."""

    def plan(self, plan: TritonPlan, group_size: int, limit: int) -> Listed | None:
        """See SegmentKernel."""
        if not takes(plan, group_size):
            return None
        from foredraft.attention import segment_list_kernels as kernels

        kv, batch = plan.kv, len(plan.num_rows)
        most = segment_of(plan.page_tables.shape[1] * kv.page_size - 1) + 1
        device = kv.data.device
        records = torch.empty(batch * most, kernels.FIELDS, dtype=torch.int32, device=device)
        num_records = torch.empty(1, dtype=torch.int32, device=device)
        kernels.list_segments[(min(most, _LISTING_PROGRAMS),)](
            records, num_records, plan.first_row, plan.num_rows, plan.prefix_len, plan.positions, batch, limit,
            BLOCK=power_of_two(batch), BRANCHED=plan.tail_mask is not None, FIELDS=kernels.FIELDS, TILE=TILE,
            NEAR=NEAR, SMALL=SMALL, LARGE=LARGE, num_warps=1,
        )  # fmt: skip
        return Listed(records, num_records)

    def attend(
        self,
        listed: Listed,
        plan: TritonPlan,
        queries: torch.Tensor,
        layer: int,
        scale: float,
        sums: PartialSums,
    ) -> None:
        """See SegmentKernel."""
        from foredraft.attention.hopper_prompt_kernels import pages_of
        from foredraft.attention.hopper_segment_kernels import attend_segments

        kv = plan.kv
        keys, values = kv.keys(layer), kv.values(layer)
        num_heads, head_dim = queries.shape[1:]
        group = num_heads // kv.num_kv_heads
        parts = -(-plan.max_rows * group // _LINES)
        most = len(listed.records) * kv.num_kv_heads
        programs = min(most, _PROGRAMS_PER_UNIT[parts] * compute_units(kv.data.device))
        attend_segments[(programs,)](
            queries, pages_of(keys, kv.page_size), pages_of(values, kv.page_size), sums.acc, sums.best, sums.total,
            plan.page_tables, listed.records, listed.num_records, scale, queries.stride(0), queries.stride(1),
            keys.shape[1], plan.page_tables.stride(0), sums.num_slots,
            GROUP=group, KV_HEADS=kv.num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=kv.page_size, PARTS=parts, TILE=TILE,
            STAGES=_STAGES[parts], num_warps=4, maxnreg=_REGISTERS[parts], **overlapped(kv.data.device),
        )  # fmt: skip


def takes(plan: TritonPlan, group_size: int) -> bool:
    """Returns whether the kernel computes a step.

    With many sequences of few lines each the Triton kernel is as fast; trees of more lines it
    computes in blocks that read the same keys again.
    """
    kv, num_lines = plan.kv, plan.max_rows * group_size
    can_take = (
        kv.data.dtype == _DTYPE
        and kv.data.shape[-1] in _HEAD_DIMS
        and kv.page_size == _PAGE_SIZE
        and num_lines <= _MOST_LINES
    )
    are_few = len(plan.num_rows) * kv.num_kv_heads < compute_units(kv.data.device)
    return can_take and (are_few or (plan.tail_mask is not None and num_lines > TREE_LINES))
