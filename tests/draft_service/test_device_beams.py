"""Beam trees by Triton kernels against those by torch."""

import pytest
import torch

from draft_service.steps.static_beams import StaticBeams
from foredraft.sampling.rows import SamplingRows
from foredraft.trees.tree_building import Ordering
from foredraft.types import SamplingParams
from testing.triton_device import DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.gpu]


@pytest.mark.parametrize(
    ("ordering", "mapped", "temperatures"),
    [("topk", False, (0, 0, 0)), ("coupled", True, (0, 0, 0)), ("coupled", False, (0.8, 0, 1.5))],
)
@pytest.mark.parametrize(
    ("shape", "vocab"),
    [((3, 1, 3), 50), ((4, 1, 2), 4100), ((3, 3, 9), 50), ((2, 4, 60), 4096), ((5, 8, 31), 300)],
)
def test_the_same_trees(
    ordering: Ordering,
    shape: tuple[int, int, int],
    vocab: int,
    mapped: bool,
    temperatures: tuple[float, ...],
) -> None:
    from draft_service.steps.device_beams import DeviceBeams

    steps, topk, num_nodes = shape
    batch = 3
    generator = torch.Generator().manual_seed(steps * 100 + topk)
    token_map = torch.randperm(2 * vocab, generator=generator)[:vocab] if mapped else None
    rows = None
    if ordering == "coupled":
        params = [
            SamplingParams(temperature=t, min_p=0.001 * i, seed=77 + i)
            for i, t in enumerate(temperatures)
        ]
        rows = SamplingRows.from_params(params, [5, 6, 7])
    expected = StaticBeams(batch, steps, topk, num_nodes + 1, ordering, rows)
    own = None
    if any(temperatures):
        own = SamplingRows.from_params(params, [5, 6, 7], DEVICE)
    found = DeviceBeams(batch, steps, topk, vocab, ordering, DEVICE, own)
    on_device = None if token_map is None else token_map.to(DEVICE)
    for level in range(steps):
        width = topk if level else 1
        # Values that are so different that rounding cannot order them otherwise; of noise that is
        # very likely.
        order = torch.stack(
            [torch.randperm(vocab, generator=generator) for _ in range(batch * width)]
        )
        logits = order.float() * (40 / vocab)
        logits[:, 7] = float("-inf")
        if level == 1 and topk > 1:
            logits[-1] = float("nan")  # a row without any token
        tokens, beams = expected.expand(logits.view(batch, width, vocab), token_map)
        # As of a draft with more tokens than its target.
        padded = torch.nn.functional.pad(logits.to(DEVICE), (0, 24), value=99.0)
        got, sources = found.grow(padded[:, :vocab], on_device)
        assert torch.equal(got.cpu(), tokens)
        owner = torch.arange(batch)[:, None] * width
        assert torch.equal(sources.cpu().view(batch, topk), beams + owner)
        if topk > 1:
            mask = found.seen().cpu()
            assert torch.equal(mask.view(batch, topk, -1), expected.ancestor_rows())
    results = torch.empty(batch, 2, num_nodes, dtype=torch.int32, device=DEVICE)
    found.write(results)
    want_tokens, want_parents = expected.nodes()
    is_node = want_tokens >= 0
    got_tokens, got_parents = results.cpu().long().unbind(1)
    assert torch.equal(got_tokens, want_tokens)
    assert torch.equal(got_parents[is_node], want_parents[is_node])


@pytest.mark.parametrize("temperatures", [(0, 0, 0), (0.8, 0, 1.5)])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("shape", "vocab"), [((3, 1, 3), 50), ((8, 1, 5), 4100), ((3, 3, 9), 4100), ((5, 8, 31), 300)]
)
def test_levels_that_do_not_depend_on_each_other(
    shape: tuple[int, int, int], vocab: int, mapped: bool, temperatures: tuple[float, ...]
) -> None:
    """All of them at once, as level by level by torch."""
    from draft_service.steps.device_beams import DeviceBeams

    (steps, topk, num_nodes), batch = shape, 3
    generator = torch.Generator().manual_seed(steps * 100 + topk)
    token_map = torch.randperm(2 * vocab, generator=generator)[:vocab] if mapped else None
    params = [SamplingParams(temperature=t, seed=77 + i) for i, t in enumerate(temperatures)]
    given = [SamplingRows.from_params(params, [5, 6, 7], device) for device in ("cpu", DEVICE)]
    logits = torch.stack(
        [torch.randperm(vocab, generator=generator) for _ in range(steps * batch)]
    ).float() * (40 / vocab)
    logits[:, 7] = float("-inf")
    expected = StaticBeams(batch, steps, topk, num_nodes + 1, "coupled", given[0])
    expected.grow_all(logits, token_map)
    rows = given[1] if any(temperatures) else None
    found = DeviceBeams(batch, steps, topk, vocab, "coupled", DEVICE, rows)
    found.grow_all(logits.to(DEVICE), None if token_map is None else token_map.to(DEVICE))
    results = torch.empty(batch, 2, num_nodes, dtype=torch.int32, device=DEVICE)
    found.write(results)
    want_tokens, want_parents = expected.nodes()
    is_node = want_tokens >= 0
    got_tokens, got_parents = results.cpu().long().unbind(1)
    assert torch.equal(got_tokens, want_tokens)
    assert torch.equal(got_parents[is_node], want_parents[is_node])


@pytest.mark.parametrize(("topk", "vocab"), [(1, 300), (4, 300)])
def test_the_kernels_work_here(topk: int, vocab: int) -> None:
    from draft_service.steps.device_beams import works

    assert works(3, topk, vocab, DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_read_as_they_are(dtype: torch.dtype) -> None:
    """Few of them differ: of equal ones the first counts, and what is not a number never does."""
    from draft_service.steps.device_beams import DeviceBeams

    batch, steps, topk, vocab = 2, 3, 4, 4500
    generator = torch.Generator().manual_seed(5)
    given = [
        torch.randn(batch * (topk if level else 1), vocab, generator=generator).to(dtype)
        for level in range(steps)
    ]
    given[0][0, 100:104] = torch.tensor([float("inf"), float("nan"), float("inf"), -0.0])
    given[1][0] = float("-inf")
    given[1][1] = -3.5
    given[2][2, :4400] = float("nan")
    trees = []
    for kind in (dtype, torch.float32):
        beams = DeviceBeams(batch, steps, topk, vocab, "topk", DEVICE)
        for logits in given:
            beams.grow(logits.to(kind).to(DEVICE), None)
        trees.append(torch.empty(batch, 2, 20, dtype=torch.int32, device=DEVICE))
        beams.write(trees[-1])
    assert torch.equal(*trees)
    assert trees[0][0, 0, 0] == 100
