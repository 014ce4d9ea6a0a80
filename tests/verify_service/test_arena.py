"""Exchange regions by attach: which transport, how large, and when they end."""

import os
from pathlib import Path

import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import AttachRefused
from foredraft.telemetry.metrics import REGISTRY
from foredraft.transport import shared_memory
from foredraft.transport.base import ArenaError
from foredraft.types import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import Job
from tests.support.hidden_drafts import HiddenDrafter, engine_with
from tests.verify_service.test_self_test import until
from verify_service.arena import Arena, is_same_host

SHM, INLINE = tensor_pb2.TRANSPORT_SHM, tensor_pb2.TRANSPORT_INLINE


def make(draft: str = "unix:/tmp/draft.sock", **changes: object) -> Arena:
    limits = {"max_bytes": 1 << 20, "useful_rows": 100, "required": "any", **changes}
    return Arena(draft, hidden_size=64, num_layers=4, **limits)


def info(**needs: object) -> draft_pb2.GetDraftInfoResponse:
    hidden = {"width": 64, "dtype": tensor_pb2.DATA_TYPE_FLOAT32, **needs}
    return draft_pb2.GetDraftInfoResponse(
        hidden=draft_pb2.HiddenNeeds(**hidden), transports=[SHM, INLINE]
    )


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"foredraft-{os.getpid()}-*")}


def shown(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(
    ("address", "same"),
    [
        ("unix:/tmp/x", True),
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("127.8.9.1:1", True),
        ("[::1]:1", True),
        (":1", True),
        ("10.0.0.1:1", False),
        ("0.0.0.0:1", False),
        ("draft:1", False),
        ("[2001:db8::1]:1", False),
    ],
)
def test_only_addresses_of_this_host_are_on_it(address: str, same: bool) -> None:
    assert is_same_host(address) == same
    arena = make(address)
    assert arena.open(info(), 1).transport == (SHM if same else INLINE)
    arena.ended(1, None)


def test_each_attach_gets_a_region_of_its_own() -> None:
    arena = make()
    first = arena.open(info(), 1)
    assert first.epoch == 1
    assert len(segments()) == 1
    arena.attached(1)
    assert not segments()
    assert shown("foredraft_arena_bytes") == first.size == 4096 + 100 * 256
    assert shown("foredraft_draft_transport_info", transport="shm") == 1
    old = arena.exchange(1)
    arena.ended(1, None)
    assert shown("foredraft_arena_bytes") == 0
    assert shown("foredraft_draft_transport_info", transport="shm") == 0
    second = arena.open(info(), 2)
    assert second.handle != first.handle
    assert arena.exchange(1) is None
    arena.ended(1, None)  # late news change nothing
    assert arena.exchange(2) is not None
    with pytest.raises(ArenaError, match="ended"):
        old.writer.write(torch.zeros(1, 64))
    arena.ended(2, None)
    assert not segments()


def test_a_region_is_no_larger_than_allowed() -> None:
    arena = make(max_bytes=2560)
    assert arena.open(info(), 1).tensors[0].shape == [10, 64]
    arena.ended(1, None)
    with pytest.raises(AttachRefused, match="--arena-mb"):
        make(max_bytes=100).open(info(), 1)


def test_a_required_transport_is_the_only_one() -> None:
    assert make(required="inline").open(info(), 1).transport == INLINE
    with pytest.raises(AttachRefused, match="none in common"):
        make("10.0.0.1:1", required="shm").open(info(), 1)
    without = info()
    del without.transports[0]
    with pytest.raises(AttachRefused, match="none in common"):
        make(required="shm").open(without, 1)
    assert make().open(without, 1).transport == INLINE


@pytest.mark.parametrize(
    ("needs", "field"),
    [
        ({"width": 65}, "hidden.width"),
        ({"width": 64, "layers": [1, 2]}, "hidden.width"),
        ({"width": 128, "layers": [1, 5]}, "hidden.layers"),
        ({"dtype": tensor_pb2.DATA_TYPE_INT32}, "hidden"),
        ({"dtype": tensor_pb2.DATA_TYPE_UNSPECIFIED}, "hidden"),
    ],
)
def test_what_the_target_does_not_have_is_refused(needs: dict, field: str) -> None:
    with pytest.raises(AttachRefused) as raised:
        make().open(info(**needs), 1)
    assert raised.value.field == field


def test_a_draft_that_reads_nothing_gets_nothing() -> None:
    assert make().open(draft_pb2.GetDraftInfoResponse(transports=[INLINE]), 1) is None


def test_a_draft_that_cannot_map_gets_its_rows_in_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with a /dev/shm of its own."""

    def fails(arena: tensor_pb2.Arena) -> None:
        raise ArenaError("handle", "cannot open the segment: No such file or directory")

    monkeypatch.setattr(shared_memory, "_open", fails)
    path = make_checkpoint(tmp_path / "target")
    drafter = HiddenDrafter(48)
    with engine_with(drafter, path) as harness:
        until(lambda: harness.engine.load().draft_available)
        assert shown("foredraft_draft_transport_info", transport="inline") == 1
        sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
        result = harness.run([Job([5, 6, 7], sampling)])[0]
        drafter.texts = [[5, 6, 7, *result.tokens]]
    assert drafter.check(path) > 0
    assert not segments()
