"""What a decode step on a GPU takes over from the step before it without the host, and what it leaves to the next.

A step's host part is a record of int32 for each sequence: the columns below, then R tokens and R parents. A record may say
that its sequence goes on where the device stands (`COMMITTED` -1), and that its tree is one that a draft on the same device
has written (`TREE`). The kernels are imported on first use.
"""

from dataclasses import dataclass

import torch

from foredraft.kernel_launch import power_of_two
from foredraft.sampling.rows import SamplingRows

# Columns of a record. Sampling is packed as "<fffiQ". What follows FORCED is read by steps that adjust logits
# (`triton_adjust`), packed as "<iifff" from ADJUSTED on, but for MASK.
(
    SLOT,
    COMMITTED,  # keys before the root, or -1: where the step before left the slot
    NUM_ROWS,
    TREE,  # row of the draft's trees, or -1: the tree is in the record
    TEMPERATURE,
    TOP_P,
    MIN_P,
    TOP_K,
    SEED_LOW,
    SEED_HIGH,
    FORCED,  # tokens to pretend that were accepted, for benchmarks; 0 for none
    MASK,  # 1 + the first of the sequence's masks, 0 for none
    ADJUSTED,  # bits: what the slot's tables are read for
    LEAST,  # index of the first token that may be an end
    REPETITION,
    FREQUENCY,
    PRESENCE,
    ENTRY,  # of the slot's page table, that is set before anything is read
    NEW_PAGE,  # 1 + what it is set to, 0 for nothing
) = range(19)
HEADER = 20
SAMPLING = slice(TEMPERATURE, SEED_HIGH + 1)
ADJUSTMENT = slice(ADJUSTED, PRESENCE + 1)
FILLER = 100  # the token that pretended paths consist of


@dataclass(slots=True)
class Begun:
    """Trees of a step.

    Attributes:
        tokens: int32 [B, R], the root first.
        parents: int32 [B, R], see `triton_sampling`.
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
) -> Begun:
    """Reads the records, and sets the entries of page tables that they name.

    Args:
        records: int32 [B, HEADER + 2 * max_rows], contiguous in the last dimension.
        num_rows: R of this step, at most max_rows.
        state: int32 [slots, 2]: committed keys and newest token of each slot.
        trees: int32 [n, 2, N], tokens and parent nodes (-1 for the root's children) as a draft wrote them; read once. What
            makes no sense there stands for nothing.
        tables: int32 [slots, pages].
    """
    from verify_service.executor import step_kernels

    batch, device = len(records), records.device
    tokens = torch.empty(batch, num_rows, dtype=torch.int32, device=device)
    parents = torch.empty_like(tokens)
    committed = torch.empty(batch, dtype=torch.int32, device=device)
    step_kernels.begin[(batch,)](
        records, state, trees, tokens, parents, committed, tables,
        records.stride(0), num_rows, trees.shape[2], tables.stride(0),
        SLOT=SLOT, COMMITTED=COMMITTED, TREE=TREE, ENTRY=ENTRY, NEW_PAGE=NEW_PAGE,
        FIRST_TOKEN=HEADER, FIRST_PARENT=HEADER + max_rows, ROWS=power_of_two(num_rows), num_warps=1,
    )  # fmt: skip
    return Begun(tokens, parents, committed)


def sampling_rows(records: torch.Tensor, positions: torch.Tensor) -> SamplingRows:
    """What the records say of sampling, for each row of their sequences.

    Args:
        records: As in `begin_step`.
        positions: int64 [B * R], of the rows' own tokens.
    """
    from verify_service.executor import step_kernels

    num_rows, device = len(positions), positions.device

    def values(dtype: torch.dtype) -> torch.Tensor:
        # Each apart, as a kernel is compiled anew for pointers that are not aligned.
        return torch.empty(num_rows, dtype=dtype, device=device)

    rows = SamplingRows(
        temperature=values(torch.float32),
        top_p=values(torch.float32),
        min_p=values(torch.float32),
        top_k=values(torch.int64),
        seed=values(torch.int64),
        position=values(torch.int64),
    )
    step_kernels.spread[(-(-num_rows // 128),)](
        records, positions, rows.temperature, rows.top_p, rows.min_p, rows.top_k, rows.seed, rows.position,
        records.stride(0), num_rows // len(records), num_rows,
        TEMPERATURE=TEMPERATURE, TOP_P=TOP_P, MIN_P=MIN_P, TOP_K=TOP_K,
        SEED_LOW=SEED_LOW, SEED_HIGH=SEED_HIGH, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return rows


def pretended_path(rows: int, length: int) -> list[int]:
    """The rows of a tree of so many that a pretended path of `length` tokens takes."""
    stride = _pretended_stride(rows)
    return [max(i * stride - (stride - 1), 0) for i in range(min(length, rows // stride))]


def _pretended_stride(rows: int) -> int:
    # Rows apart, so that their KV has to be moved, as that of a real tree's path.
    return 2 if rows > 16 else 1


def pretend_paths(
    records: torch.Tensor, path: torch.Tensor, length: torch.Tensor, emitted: torch.Tensor
) -> None:
    """Replaces outcomes of `walk_trees` in place where a record asks for it, by rows spread over the tree."""
    from verify_service.executor import step_kernels

    batch, rows = path.shape
    step_kernels.pretend[(batch,)](
        records, path, length, emitted,
        records.stride(0), rows, _pretended_stride(rows), FILLER,
        FORCED=FORCED, ROWS=power_of_two(rows), num_warps=1,
    )  # fmt: skip


@dataclass(slots=True)
class Ended:
    """Where a step's outcome goes.

    Attributes:
        results: int32 [B, 1 + 4 * max_rows], for the host: length, then path, emitted tokens, tree's tokens and parents.
        state: int32 [slots, 2], as in `begin_step`.
        accepted: int32 [B, 1 + max_path], for a draft: how many tokens were emitted, and these.
        index: int64 [B * max_path]: for each of them the row of the forward that chose it.
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
    """Writes down an outcome of `walk_trees`. Paths longer than max_path are told to the draft in part."""
    from verify_service.executor import step_kernels

    batch, rows = path.shape
    max_path = ended.accepted.shape[1] - 1
    step_kernels.end[(batch,)](
        records, ended.state, begun.committed, path, length, emitted,
        begun.tokens, begun.parents, ended.results, ended.accepted, ended.index,
        records.stride(0), ended.results.stride(0), rows, (ended.results.shape[1] - 1) // 4, max_path,
        SLOT=SLOT, ROWS=power_of_two(rows), PATH=power_of_two(max_path), num_warps=1,
    )  # fmt: skip
