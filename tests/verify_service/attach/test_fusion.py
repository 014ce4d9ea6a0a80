"""The projection of hidden states by the verifier, with the draft's weights: the same drafts of
fewer numbers, and weights that are not what the draft says cost the draft alone.
"""

import math
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from draft_service.drafters.heads import HeadDrafter
from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.config.services import DraftConfig
from foredraft.errors import AttachRefused
from foredraft.layers.fusion import Fusion
from foredraft.transport import codec
from foredraft.transport.fusion import describe, fill, parts_of, shape_of
from foredraft.types import FusionShape
from testing.block_drafts import tiny_block
from testing.checkpoints import make_checkpoint
from testing.draft_heads import HIDDEN, TinyHead, save_head, tiny_head
from testing.engines import Job, Result, running_engine
from testing.repeated_texts import jobs_with_prefix
from verify_service.attach.fusion import FusionSource
from verify_service.connection.client import DraftClient

CPU = torch.device("cpu")
HEADS: dict[str, TinyHead] = {
    "eagle3": tiny_head(
        "EAGLE3", 3, fc_norm=True, norm_before_fc=True, norm_output=True, fc_bias=True, bias=True
    ),
    "dflash": tiny_block("DFLASH", 1, ids=(0, 1, 2)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


def jobs() -> list[Job]:
    return jobs_with_prefix(4, 20, 40)


@pytest.mark.parametrize(
    ("kind", "transport", "overlap"),
    [("eagle3", "shm", True), ("dflash", "inline", True), ("dflash", "shm", False)],
)
def test_features_by_either_end_give_the_same_drafts(
    kind: str,
    transport: str,
    overlap: bool,
    target: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    head = HEADS[kind]
    flags: dict[str, Any] = {
        "speculative_draft_model_path": str(save_head(head, tmp_path)),
        "require_transport": transport,
        "draft_step_timeout": 20.0,
        "chunked_prefill_size": 20,
        "max_running_requests": 4,
        "disable_overlap_schedule": not overlap,
    }
    results: dict[str, list[Result]] = {}
    for where in ("draft", "verifier"):
        with running_engine(target, head.algorithm, draft_projection=where, **flags) as harness:
            results[where] = harness.run(jobs())
    # What is drafted for a sequence does not depend on the batch, so it is the same token by token.
    drafted = [[result.drafted for result in results[where]] for where in results]
    assert drafted[0] == drafted[1]
    assert [r.tokens for r in results["draft"]] == [r.tokens for r in results["verifier"]]
    widths = re.findall(rf"hidden states of (\d+) x float32 through {transport}", caplog.text)
    assert widths == [str(head.width), str(HIDDEN)]


def test_a_killed_draft_brings_its_weights_again(target: Path, tmp_path: Path) -> None:
    head = HEADS["dflash"]
    flags = {"speculative_draft_model_path": str(save_head(head, tmp_path))}
    with running_engine(target, "DFLASH", draft_projection="verifier", **flags) as harness:
        first = harness.run(jobs())
        assert harness.draft is not None
        harness.draft.kill()
        without = harness.run(jobs())
        # Another draft with other weights takes its place.
        other = tiny_block("DFLASH", 77, ids=(0, 1, 2))
        save_head(other, tmp_path)
        harness.draft.start()
        harness.wait_for_draft()
        again = harness.run(jobs())
        fusion = harness.engine._drafts.each[0]._hidden.features.fusion  # type: ignore[union-attr]
        assert fusion is not None
        torch.testing.assert_close(fusion.tensors()["weight"], other.tensors["fc.weight"])
    assert [r.tokens for r in first] == [r.tokens for r in without] == [r.tokens for r in again]
    assert sum(r.finish.drafted_tokens for r in again if r.finish) > 0


SHAPE = FusionShape(12, 4, num_stream_norms=3, normalizes_input=True, has_bias=True)
INFO = draft_pb2.GetDraftInfoResponse(
    hidden=draft_pb2.HiddenNeeds(layers=[0, 1, 2], width=12, dtype=codec.to_message(torch.float32)),
    fusion=describe(SHAPE),
)


def random_fusion() -> Fusion:
    fusion = Fusion(SHAPE, torch.float32, CPU)
    for index, weight in enumerate(fusion.tensors().values()):
        generator = torch.Generator().manual_seed(index)
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return fusion


def test_weights_arrive_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.transport.fusion.PART_BYTES", 100)  # two rows
    own, other = random_fusion(), Fusion(shape_of(INFO), torch.float32, CPU)
    assert other.shape == own.shape
    parts = list(parts_of(own.tensors()))
    assert len(parts) > 2
    fill(other.tensors(), parts)
    x = torch.randn(5, 12)
    assert torch.equal(own(x), other(x))


Change = Callable[[draft_pb2.GetFusionResponse], None]


def changed(name: str, change: Change) -> Iterator[draft_pb2.GetFusionResponse]:
    for part in parts_of(random_fusion().tensors()):
        if part.name == name:
            change(part)
        yield part


def poison(part: draft_pb2.GetFusionResponse) -> None:
    rows = codec.decode(part.rows)
    rows[0, 0] = math.nan
    part.rows.CopyFrom(codec.encode(rows))


WRONG: dict[str, tuple[Change, str]] = {
    "nan": (poison, r"fusion\.weight: has values that are infinite or no numbers"),
    "type": (lambda p: p.rows.CopyFrom(codec.encode(torch.ones(4, 12).half())), "is torch.float16"),
    "shape": (lambda p: p.rows.CopyFrom(codec.encode(torch.ones(4, 11))), r"\(4, 11\).*\(4, 12\)"),
    "many": (lambda p: p.rows.CopyFrom(codec.encode(torch.ones(5, 12))), r"\(5, 12\) from 0"),
    "few": (lambda p: p.rows.CopyFrom(codec.encode(torch.ones(3, 12))), "3 of 4 rows were sent"),
    "late": (lambda p: setattr(p, "first_row", 1), "row 1 came after 0 rows"),
    "bytes": (lambda p: setattr(p.rows, "data", b"1234"), r"fusion\.weight: 4 bytes"),
    "unknown": (lambda p: setattr(p, "name", "gate"), "no weight named 'gate'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_are_not_as_said_are_refused_by_name(wrong: str) -> None:
    change, message = WRONG[wrong]
    fusion = Fusion(shape_of(INFO), torch.float32, CPU)
    with pytest.raises(AttachRefused, match=message):
        fill(fusion.tensors(), changed("weight", change))


@pytest.mark.parametrize(
    "said",
    [
        draft_pb2.Fusion(width=0, epsilon=1e-5),
        draft_pb2.Fusion(width=13, epsilon=1e-5),
        draft_pb2.Fusion(width=4, num_stream_norms=5, epsilon=1e-5),
        draft_pb2.Fusion(width=4, epsilon=math.nan),
    ],
)
def test_a_description_that_cannot_be_is_refused(said: draft_pb2.Fusion) -> None:
    info = draft_pb2.GetDraftInfoResponse(hidden=INFO.hidden, fusion=said)
    with pytest.raises(AttachRefused, match="fusion"):
        shape_of(info)


def test_bad_weights_cost_the_draft_alone(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"speculative_draft_model_path": str(save_head(HEADS["dflash"], tmp_path))}
    monkeypatch.setattr(
        "verify_service.attach.fusion.FusionSource._parts",
        lambda self, may_cancel: iter(()),
    )
    with running_engine(
        target, "DFLASH", wait=False, draft_projection="verifier", **flags
    ) as harness:
        results = harness.run(jobs())
        assert all(len(result.tokens) == 40 for result in results)
        assert not harness.engine.load().draft_available
    assert "fusion.weight: 0 of 48 rows were sent" in caplog.text


class StuckDraft(draft_pb2_grpc.DraftServiceServicer):
    """Offers a projection, and then does not send it."""

    def __init__(self) -> None:
        self.was_asked, self.go = threading.Event(), threading.Event()

    def GetDraftInfo(self, request: Any, context: Any) -> draft_pb2.GetDraftInfoResponse:
        return INFO

    def GetFusion(self, request: Any, context: Any) -> Iterator[draft_pb2.GetFusionResponse]:
        self.was_asked.set()
        self.go.wait(100)
        return iter(())


def test_a_close_does_not_wait_for_weights() -> None:
    server, draft = grpc.server(ThreadPoolExecutor(4)), StuckDraft()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    source = FusionSource(address, None, CPU)

    def make_attach(info: draft_pb2.GetDraftInfoResponse, epoch: int) -> draft_pb2.AttachRequest:
        source.get(info, client.may_cancel)
        raise AssertionError("there are no weights")

    client = DraftClient(address, make_attach, step_timeout=60)
    try:
        client.start()
        client.allow_attach()
        assert draft.was_asked.wait(60)
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(60)  # the draft would take longer
        assert not closing.is_alive()
    finally:
        draft.go.set()
        server.stop(0).wait()


def test_quantised_projections_stay_with_the_draft(target: Path, tmp_path: Path) -> None:
    drafter = HeadDrafter.load(
        DraftConfig(
            model_path=str(target),
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=str(save_head(HEADS["dflash"], tmp_path)),
            speculative_draft_model_quantization="int8",
            num_threads=1,
            device="cpu",
        )
    )
    assert not drafter.info().HasField("fusion")
    assert list(drafter.fusion_parts()) == []
