"""State of decode steps on a GPU: begins a step from the previous one's, and ends it for the next.

The host sends one record for each sequence, see `records`. The kernels are imported on first use.
"""

from dataclasses import dataclass

import torch

from foredraft.kernel_launch import power_of_two
from foredraft.sampling.columns import FLOATS
from foredraft.sampling.rows import SamplingRows
from verify_service.executor.records import STEP

FILLER = 100  # the token that pretended paths consist of


@dataclass(slots=True)
class Begun:
    """Trees of a step.

    Attributes:
        tokens: int32 [B, R], the root first.
        parents: int32 [B, R], parent rows, see `trees.walk_trees`.
        committed: int32 [B].
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    committed: torch.Tensor


def begin_step(
    records: torch.Tensor,
    max_rows: int,
    num_rows: int,
    state: torch.Tensor,
    trees: torch.Tensor,
    tables: torch.Tensor,
    has_branches: bool = True,
) -> Begun:
    """Reads the records, and sets the entries of page tables that they name.

    Args:
        records: int32 [B, STEP.size + 2 * max_rows], contiguous in the last dimension.
        num_rows: R of this step, at most max_rows.
        state: int32 [slots, 2]: committed keys and newest token of each slot.
        trees: int32 [n, 2, N], tokens and parent nodes (-1 for the root's children) as a draft
            wrote them; read once. Invalid nodes there are absent.
        tables: int32 [slots, pages].
        has_branches: Whether nodes may follow others than the one before them, which are absent
            else.
    """
    from verify_service.executor.kernels import step_kernels

    batch, device = len(records), records.device
    tokens = torch.empty(batch, num_rows, dtype=torch.int32, device=device)
    parents = torch.empty_like(tokens)
    committed = torch.empty(batch, dtype=torch.int32, device=device)
    step_kernels.begin[(batch,)](
        records, state, trees, tokens, parents, committed, tables,
        records.stride(0), num_rows, trees.shape[2], tables.stride(0),
        FIRST_TOKEN=STEP.size, FIRST_PARENT=STEP.size + max_rows, ROWS=power_of_two(num_rows),
        **STEP.constants("slot", "committed", "tree", "entry", "new_page"), BRANCHED=has_branches,
        num_warps=1,
    )  # fmt: skip
    return Begun(tokens, parents, committed)


def sampling_rows(
    records: torch.Tensor, positions: torch.Tensor, any_filtered: bool
) -> SamplingRows:
    """Copies the sampling parameters of the records to each row of their sequences.

    Args:
        records: int32, as in `begin_step`.
        positions: int64 [B * R], positions of the rows' own tokens.
        any_filtered: Whether top-k, top-p and min-p are applied.
    """
    from verify_service.executor.kernels import step_kernels

    num_rows, device = len(positions), positions.device

    def values(dtype: torch.dtype) -> torch.Tensor:
        # Separate tensors: unaligned pointers would need another variant of each kernel.
        return torch.empty(num_rows, dtype=dtype, device=device)

    # Each column begins at a multiple of 16 bytes, for the same reason.
    floats = torch.empty(len(FLOATS), -(-num_rows // 4) * 4, dtype=torch.float32, device=device)
    rows = SamplingRows(
        **dict(zip(FLOATS, floats[:, :num_rows], strict=True)),
        top_k=values(torch.int64),
        seed=values(torch.int64),
        position=values(torch.int64),
        any_filtered=any_filtered,
    )
    step_kernels.spread[(-(-num_rows // 128),)](
        records, positions, floats, rows.top_k, rows.seed, rows.position,
        records.stride(0), floats.stride(0), num_rows // len(records), num_rows,
        FIRST_FLOAT=STEP[FLOATS[0]], NUM_FLOATS=len(FLOATS), **STEP.constants("top_k", "seed"),
        BLOCK=128, num_warps=4,
    )  # fmt: skip
    return rows


def pretended_path(rows: int, length: int) -> list[int]:
    """Returns the rows of a tree that a pretended path of `length` tokens takes."""
    stride = _pretended_stride(rows)
    return [max(i * stride - (stride - 1), 0) for i in range(min(length, rows // stride))]


def _pretended_stride(rows: int) -> int:
    # Rows apart, so that their KV has to be moved like the KV of a real tree's path.
    return 2 if rows > 16 else 1


def pretend_paths(
    records: torch.Tensor, path: torch.Tensor, length: torch.Tensor, emitted: torch.Tensor
) -> None:
    """Replaces outcomes of `walk_trees` in place where a record asks for it.

    The accepted rows are spread over the tree.
    """
    from verify_service.executor.kernels import step_kernels

    batch, rows = path.shape
    step_kernels.pretend[(batch,)](
        records, path, length, emitted,
        records.stride(0), rows, _pretended_stride(rows), FILLER,
        **STEP.constants("forced"), ROWS=power_of_two(rows), num_warps=1,
    )  # fmt: skip


@dataclass(slots=True)
class Ended:
    """Memory that a step's outcome is written to.

    Attributes:
        results: int32 [B, 1 + 4 * max_rows], for the host: length, then path, emitted tokens,
            tree's tokens and parents.
        state: int32 [slots, 2], as in `begin_step`.
        accepted: int32 [B, 1 + max_path], for a draft: number of emitted tokens, then the tokens.
        index: int64 [B * max_path]: for each of these tokens, the row of the forward that chose it.
    """

    results: torch.Tensor
    state: torch.Tensor
    accepted: torch.Tensor
    index: torch.Tensor


def end_step(
    records: torch.Tensor,
    begun: Begun,
    path: torch.Tensor,
    length: torch.Tensor,
    emitted: torch.Tensor,
    ended: Ended,
) -> None:
    """Writes an outcome of `walk_trees` for host, draft and next step.

    The draft gets only the first max_path tokens of a longer path.
    """
    from verify_service.executor.kernels import step_kernels

    batch, rows = path.shape
    max_path = ended.accepted.shape[1] - 1
    step_kernels.end[(batch,)](
        records, ended.state, begun.committed, path, length, emitted,
        begun.tokens, begun.parents, ended.results, ended.accepted, ended.index,
        records.stride(0), ended.results.stride(0), rows, (ended.results.shape[1] - 1) // 4, max_path,  # noqa: E501
        **STEP.constants("slot"), ROWS=power_of_two(rows), PATH=power_of_two(max_path), num_warps=1,
    )  # fmt: skip
