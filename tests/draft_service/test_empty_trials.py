"""What a capture that is thrown away has made is not used by a draft's steps."""

from pathlib import Path

import pytest

from draft_service.drafters.graph_drafting import GraphSettings
from draft_service.drafters.heads import HeadDrafter
from testing.block_cases import KINDS, check_batch_that_grows, check_peagle, load_on_cpu
from testing.block_drafts import BlockReference, tiny_peagle
from testing.draft_heads import TinyHead
from testing.empty_trials import capture_without_cuda


def load(head: TinyHead, target: Path, folder: Path) -> HeadDrafter:
    drafter = load_on_cpu(head, target, folder)
    drafter.graphs = GraphSettings(8, captures=True)
    return drafter


@pytest.mark.parametrize("kind", KINDS)
def test_chains_of_a_batch_that_grows(
    kind: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_without_cuda(monkeypatch)
    head, options = KINDS[kind]
    reference = BlockReference(head, target, **options)
    check_batch_that_grows(load(head, target, tmp_path), reference, target, is_prepared=True)


def test_peagle(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_without_cuda(monkeypatch)
    head = tiny_peagle(3)
    check_peagle(load(head, target, tmp_path), head, target, is_prepared=True)
