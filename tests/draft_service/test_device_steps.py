"""Steps that stay on the device: the trees and the KV that steps by value give, whatever came
between them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from draft_service.drafters import graph_drafting
from draft_service.drafters.graph_drafting import GraphSettings
from draft_service.drafters.heads import HeadDrafter
from draft_service.drafters.paged import PagedDrafter
from draft_service.drafters.paged_proposer import PagedProposer
from draft_service.steps.graphs import DraftGraphs
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import AttachRefused, InvalidRequest, Unavailable
from foredraft.transport.device_exchange import StepSizes
from foredraft.transport.rows import RowFormat
from testing.device_drafts import Driver, LocalExchange, LocalReader, Turn, schedule
from testing.draft_cases import SAMPLINGS, SHAPES, limits_of
from testing.draft_heads import VOCAB
from testing.drafts import attach_request
from testing.head_verifier import request_of
from testing.plan_attention import PlanAttention

PAGE, NUM_PAGES, MAX_BATCH = 4, 320, 8


@contextmanager
def driver(
    drafter: PagedDrafter,
    target: Path,
    shape: tuple[int, int, int],
    ordering: str = "coupled",
    max_batch: int = MAX_BATCH,
) -> Iterator[Driver]:
    ordinary, drafter.attention = drafter.attention, PlanAttention()
    drafter.graphs = GraphSettings(max_batch, captures=False)
    changes = {
        "num_pages": NUM_PAGES,
        "page_size": PAGE,
        "limits": limits_of(shape),
        "draft_sampling": ordering,
        "max_batch": MAX_BATCH,
    }
    is_head = isinstance(drafter, HeadDrafter)
    request = request_of(target, **changes) if is_head else attach_request(**changes)
    proposer, _ = drafter.attach(request)
    row = RowFormat.of(drafter.info().hidden) if is_head else RowFormat(0, torch.float32)
    sizes = StepSizes(MAX_BATCH, shape[0] + 1, shape[2] - 1)
    exchange = LocalExchange(sizes, row.width, row.dtype)
    proposer.exchange = exchange
    if is_head:
        proposer.hidden = LocalReader(exchange)
    proposer.prepare()
    yield Driver(proposer.step, exchange, row.width, PAGE, limits_of(shape), SAMPLINGS)
    proposer.close()
    drafter.attention = ordinary


def proposer_of(made: Driver) -> PagedProposer:
    """Returns the proposer behind a driver."""
    return made.step.__self__  # type: ignore[attr-defined]


def graphs_of(made: Driver) -> DraftGraphs:
    """Its steps of fixed shape."""
    fast = proposer_of(made)._fixed_steps
    assert fast is not None
    return fast.graphs


def committed_kv(made: Driver) -> dict[int, torch.Tensor]:
    """The draft's KV of each live sequence's keys."""
    kv = graphs_of(made).step.kv
    found = {}
    for slot, tokens in made.tokens.items():
        keys = torch.arange(len(tokens) - (made.width > 0))
        places = torch.tensor(made.pages[slot])[keys // PAGE] * PAGE + keys % PAGE
        found[slot] = kv.data[:, :, places].clone()
    return found


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "standalone", "windowed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_trees_and_kv_as_by_value(
    kind: str, shape: str, drafters: dict[str, PagedDrafter], target: Path
) -> None:
    turns = schedule(len(kind) + len(shape), 24, SHAPES[shape][0], VOCAB, 70)
    assert sum(turn.on_device for turn in turns) > 8
    found = []
    for by_device in (False, True):
        with driver(drafters[kind], target, SHAPES[shape]) as made:
            trees = made.run(turns, lambda turn, allowed=by_device: allowed)  # type: ignore[misc]
            found.append((trees, committed_kv(made)))
    (trees, kv), (device_trees, device_kv) = found
    assert any(trees)
    assert trees == device_trees
    assert kv.keys() == device_kv.keys()
    for slot, data in kv.items():
        assert torch.equal(data, device_kv[slot]), slot


def test_batches_larger_than_a_graph(drafters: dict[str, PagedDrafter], target: Path) -> None:
    turns = schedule(3, 16, 3, VOCAB, 70)
    found = []
    for max_batch in (8, 2):
        with driver(drafters["eagle3"], target, SHAPES["tree"], max_batch=max_batch) as made:
            found.append(made.run(turns, lambda turn: True))
    assert found[0] == found[1]


def test_nothing_committed_changes_nothing(drafters: dict[str, PagedDrafter], target: Path) -> None:
    with driver(drafters["eagle"], target, SHAPES["chain"]) as made:
        turns = schedule(5, 3, 3, VOCAB, 70)
        made.run(turns, lambda turn: False)
        before = committed_kv(made)
        slots = list(made.tokens)
        for _ in range(2):
            made.num_steps += 1
            request = draft_pb2.StepRequest(step=made.num_steps)
            for row, slot in enumerate(slots):
                made.end.put(row, [], None)
                message = request.sequences.add(slot=slot, device_row=row)
                message.propose.CopyFrom(made.limits)
            made.step(request)
        for slot, data in committed_kv(made).items():
            assert torch.equal(data, before[slot])


def test_a_path_beyond_the_page_table_is_cut(
    drafters: dict[str, PagedDrafter], target: Path
) -> None:
    """A sequence that has ended may be told of once more; one that goes on for ever writes nothing
    outside.
    """
    with driver(drafters["standalone"], target, SHAPES["tree"]) as made:
        request = draft_pb2.StepRequest(step=1)
        message = request.sequences.add(slot=2, tokens=[5, 6, 7], new_pages=range(60))
        message.begin.sampling.top_p = 1
        made.step(request)
        for step in range(2, 90):
            made.end.put(4, [3, 4, 5, 6], None)
            request = draft_pb2.StepRequest(step=step)
            request.sequences.add(slot=2, device_row=4).propose.CopyFrom(made.limits)
            made.step(request)
        graphs = graphs_of(made)
        assert int(graphs.step.inputs.num_keys[2]) == graphs.shape.max_pages * PAGE


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device_row": 8}, "device_row"),
        ({"device_row": 1, "tokens": [4]}, "device_row"),
        ({"device_row": 1, "slot": 5}, "slot"),
        ({"device_row": 1, "begin": draft_pb2.Begin()}, "device_row"),
        ({"device_row": 0}, "device_row"),
        ({"position": 3}, "device_row"),
    ],
)
def test_steps_that_break_the_protocol(
    changes: dict, field: str, drafters: dict[str, PagedDrafter], target: Path
) -> None:
    with driver(drafters["standalone"], target, SHAPES["tree"]) as made:
        request = draft_pb2.StepRequest(step=1)
        for slot in (0, 1):
            message = request.sequences.add(slot=slot, tokens=[5, 6, 7], new_pages=[slot])
            message.begin.sampling.top_p = 1
        made.step(request)
        request = draft_pb2.StepRequest(step=2)
        request.sequences.add(slot=0, device_row=0)
        request.sequences.add(**{"slot": 1, **changes})
        with pytest.raises(InvalidRequest) as raised:
            made.step(request)
        assert raised.value.field == field


def test_a_verifier_that_stands_still(
    drafters: dict[str, PagedDrafter],
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_drafting, "STEP_SECONDS", 0.05)
    with driver(drafters["standalone"], target, SHAPES["tree"]) as made:
        exchange = made.end
        assert isinstance(exchange, LocalExchange)
        made.take(Turn([(0, [5, 6, 7], True)], [], False), False)
        made.take(Turn([(0, [5], True)], [], True), True)
        is_done = False
        monkeypatch.setattr(DraftGraphs, "is_free", property(lambda self: is_done))
        monkeypatch.setattr(DraftGraphs, "is_done", property(lambda self: is_done))
        for by_device in (True, False):
            with pytest.raises(Unavailable):
                made.take(Turn([(0, [5], True)], [], by_device), by_device)
        assert exchange.num_abandoned == 2
    assert exchange.num_abandoned == 3, "steps under way at the end"


def test_an_exchange_of_another_shape_is_refused(
    drafters: dict[str, PagedDrafter], target: Path
) -> None:
    drafter = drafters["standalone"]
    drafter.graphs = GraphSettings(None, captures=False)
    proposer, _ = drafter.attach(attach_request(limits=limits_of((3, 3, 9))))
    proposer.exchange = LocalExchange(StepSizes(8, 4, 9), 0, torch.float32)
    with pytest.raises(AttachRefused) as raised:
        proposer.prepare()
    assert raised.value.field == "arena.tensors"


def test_without_an_exchange_there_are_no_such_steps(
    drafters: dict[str, PagedDrafter], target: Path
) -> None:
    drafter = drafters["standalone"]
    drafter.graphs = GraphSettings(None, captures=False)
    proposer, _ = drafter.attach(attach_request())
    proposer.prepare()
    request = draft_pb2.StepRequest(step=1)
    request.sequences.add(slot=0, device_row=0)
    with pytest.raises(InvalidRequest, match="no exchange"):
        proposer.step(request)
    proposer.close()
