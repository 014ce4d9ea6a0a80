"""Keys that sequences share are read once: with the bits of sequences that share nothing."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from foredraft.attention.base import SequenceSpan
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.segments import TILE
from foredraft.attention.triton_plan import SharedKeys, TritonPlan, plan_of_spans
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import ancestor_mask
from testing.attention_spans import SCALE, batch_of, brute_force, slots_of
from testing.triton_device import DEVICE, needs_gpu, needs_triton
from tests.attention.segment_sharing import sharing_from

pytestmark = [needs_triton, pytest.mark.gpu]
PAGE_SIZE = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences that begin with the same keys.

    Attributes:
        shared: Number of keys that they share.
        lengths: For each of them the number of keys before its rows.
    """

    shared: int
    lengths: tuple[int, ...]


class Step:
    """Sequences with one number of rows each: those of some blocks, and some that share nothing.

    Args:
        alone: Numbers of keys before the rows of those that share nothing.
        nodes: Tree nodes of each sequence; a chain where `branches` is false.
    """

    def __init__(
        self,
        blocks: tuple[Block, ...],
        alone: tuple[int, ...],
        nodes: int,
        *,
        branches: bool,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.rng = rng = np.random.default_rng(nodes)
        self.blocks, self.heads, self.num_rows = blocks, heads, 1 + nodes
        lengths = [length for block in blocks for length in block.lengths] + list(alone)
        num_pages = sum(-(-(length + self.num_rows) // PAGE_SIZE) for length in lengths)
        self.nowhere = num_pages
        self.kv = PagedKV(
            1, num_pages + 1, PAGE_SIZE, heads[1], head_dim, kv_dtype or dtype, DEVICE
        )
        slots = torch.arange((num_pages + 1) * PAGE_SIZE, device=DEVICE)
        numbers = self._random(len(slots), 2 * heads[1], head_dim)
        # Some are far larger than the others, and so is what another order of sums would change.
        numbers[::97, : heads[1]] *= 6
        numbers[::53, heads[1] :] *= 30
        numbers[num_pages * PAGE_SIZE :] = torch.nan
        self.kv.write(0, slots, numbers.to(DEVICE, dtype))
        free = list(rng.permutation(num_pages))
        # Sequences of a block are not neighbours in the step.
        self.order = list(rng.permutation(len(lengths)))
        spans: dict[int, SequenceSpan] = {}
        place = iter(self.order)
        for shared, own in [(block.shared, block.lengths) for block in blocks] + [(0, alone)]:
            common = [free.pop() for _ in range(-(-shared // PAGE_SIZE))]
            for length in own:
                spans[next(place)] = self._span(length, common, free, branches)
        self.spans = [spans[index] for index in range(len(lengths))]
        for index, span in enumerate(self.spans):
            span.first_row = index * self.num_rows
        size = len(lengths) * self.num_rows
        self.queries = self._random(size, heads[0], head_dim).to(DEVICE, dtype)

    def _span(
        self, length: int, common: list[int], free: list[int], branches: bool
    ) -> SequenceSpan:
        count = -(-(length + self.num_rows) // PAGE_SIZE) - len(common)
        pages = np.array(common + [free.pop() for _ in range(count)])
        parents = [int(self.rng.integers(-1, i)) if branches and i else i - 1 for i in range(self.num_rows - 1)]  # fmt: skip  # noqa: E501
        mask = ancestor_mask(parents)
        positions = length + mask.sum(1).numpy() - 1
        return SequenceSpan(0, positions, pages, 0, length, length, mask, positions)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.normal(size=shape)).float()

    def plan(self, keys_read_once: bool) -> TritonPlan:
        """Returns the plan of a captured step.

        Pages that hold what a launch must not read are full of NaN.
        """
        batch = batch_of(self.spans, PAGE_SIZE)
        batch.positions = batch.positions.to(DEVICE)
        plan = plan_of_spans(batch, self.kv, self.heads[0] // self.heads[1])
        if self.num_rows == 1:  # a captured step has no mask then
            plan.tail_mask = plan.tail_positions = None
        plan.is_causal = None
        if keys_read_once:
            plan.shared = self._shared(plan)
        batch.plan = plan
        return ExactAttention().plan(batch, self.kv, (None,), self.heads[0] // self.heads[1])

    def _shared(self, plan: TritonPlan) -> SharedKeys:
        keys, rows, place = np.zeros(len(self.spans), dtype=np.int32), [], iter(self.order)
        numbers, first = [], 0
        for block in (*self.blocks, Block(0, ())):  # the last one is padding
            members = [next(place) for _ in block.lengths]
            num_keys = block.shared // TILE * TILE
            keys[members] = num_keys
            rows += [index * self.num_rows + row for index in members for row in range(self.num_rows)]  # fmt: skip  # noqa: E501
            leader = members[-1] if members else 0
            numbers.append((first, len(members) * self.num_rows, num_keys, leader))
            first += len(members) * self.num_rows
        rows += [0] * (len(self.queries) - len(rows))
        found = torch.tensor(numbers, dtype=torch.int32, device=DEVICE).t().contiguous()
        tables = plan.page_tables[found[3].long()].clone()
        for table, (_, count, num_keys, _) in zip(tables, numbers, strict=True):
            table[(num_keys if count else 0) // PAGE_SIZE :] = self.nowhere
        plan.page_tables = plan.page_tables.clone()
        for table, num_keys in zip(plan.page_tables, keys, strict=True):
            table[: num_keys // PAGE_SIZE] = self.nowhere
        index = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        return SharedKeys(torch.from_numpy(keys).to(DEVICE), index, *found[:3], tables)

    def attend(self, keys_read_once: bool) -> torch.Tensor:
        plan, size = self.plan(keys_read_once), self.heads[0] * self.kv.data.shape[-1]
        out = torch.full(
            (len(self.queries), size), torch.nan, dtype=self.queries.dtype, device=DEVICE
        )
        ExactAttention().attend(plan, self.queries, 0, None, SCALE, out)
        return out


sharing = sharing_from(300)


# Shared keys that end at a segment's end, inside of one, behind position 1,024, and right before
# a sequence's rows.
STEPS = [
    ((Block(192, (192, 200, 400)), Block(128, (130, 128))), (90, 0)),
    ((Block(1152, (1152, 1170)), Block(64, (64, 200))), (70,)),
]


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize(
    ("nodes", "branches", "heads", "dtype"),
    [
        (0, False, (4, 2), torch.float32),
        (3, False, (4, 2), torch.float16),
        (2, True, (7, 1), torch.float16),
    ],
)
@pytest.mark.parametrize(("blocks", "alone"), STEPS)
def test_equals_brute_force(blocks, alone, nodes, branches, heads, dtype):
    step = Step(blocks, alone, nodes, branches=branches, heads=heads, dtype=dtype)
    got = step.attend(True).cpu().double()
    for span in step.spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        slots = slots_of(span, PAGE_SIZE, 0, span.num_keys)
        keys, values = (x.cpu().double()[:, slots] for x in (step.kv.keys(0), step.kv.values(0)))
        want = brute_force(span, step.queries[rows].cpu().double(), keys, values, None)
        torch.testing.assert_close(got[rows], want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


KINDS = [
    ((32, 8), 128, torch.bfloat16, None),
    ((28, 4), 128, torch.float16, None),
    ((8, 4), 64, torch.bfloat16, None),
    ((8, 2), 256, torch.bfloat16, None),
    ((32, 8), 128, torch.bfloat16, torch.float8_e4m3fn),
    ((32, 8), 128, torch.bfloat16, torch.float8_e5m2),
]
# Blocks of as many rows as fit one, with shared keys that end at a segment's end, inside of one,
# and right before the rows.
BLOCKS = {
    0: (
        Block(2048, (2048, 2100, 3000)),
        Block(1600, (1603, 2500, 4000, 1601)),
        Block(64, (64, 900)),
    ),
    3: (Block(1984, (1990, 3000)), Block(128, (128, 600)), Block(1088, (1100, 1088))),
    6: (Block(1024, (1024, 1500)), Block(576, (600, 577))),
}


@needs_gpu
@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize(("nodes", "branches"), [(0, False), (3, False), (3, True), (6, True)])
@pytest.mark.parametrize(("heads", "head_dim", "dtype", "kv_dtype"), KINDS)
def test_bits_are_those_of_keys_that_are_not_shared(
    heads, head_dim, dtype, kv_dtype, nodes, branches
):
    blocks = BLOCKS[nodes]
    if kv_dtype is not None and nodes == 6:  # two sequences' rows are more than a block of 32 lines
        blocks = tuple(Block(block.shared, block.lengths[:1]) for block in blocks)
    kinds = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "kv_dtype": kv_dtype}
    step = Step(blocks, (0, 700, 63), nodes, branches=branches, **kinds)
    alone, once = step.attend(False), step.attend(True)
    assert not alone.isnan().any()
    assert torch.equal(once.view(torch.uint8), alone.view(torch.uint8))


@needs_gpu
def test_a_sequence_in_the_wrong_block_is_found():
    step = Step(BLOCKS[0], (), 0, branches=False, heads=(32, 8), head_dim=128, dtype=torch.bfloat16)
    alone = step.attend(False)
    first, second, *others = step.blocks
    step.blocks = (
        Block(first.shared, first.lengths[:2]),
        Block(second.shared, (first.lengths[2], *second.lengths)),
        *others,
    )
    changed = (step.attend(True) != alone).any(1) | step.attend(True).isnan().any(1)
    assert changed.nonzero().flatten().tolist() == [step.order[2]]
