"""What `foredraft serve` fills in for a draft that is named by its path alone."""

from pathlib import Path

import pytest

from foredraft.cli import serve_config
from foredraft.errors import CheckpointError
from foredraft.models.registry import BUNDLED_DRAFTS
from testing.block_drafts import tiny_block, tiny_peagle
from testing.draft_heads import save_head, tiny_head

DRAFTS = {
    "EAGLE": tiny_head("EAGLE", 1),
    "EAGLE3": tiny_head("EAGLE3", 2),
    "MTP": tiny_head("MTP", 3),
    "PEAGLE": tiny_peagle(4),
    "DFLASH": tiny_block("DFLASH", 5),
    "DSPARK": tiny_block("DSPARK", 6, layout="modelopt"),
}


@pytest.mark.parametrize("algorithm", DRAFTS)
def test_a_drafts_files_say_its_algorithm(algorithm: str, tmp_path: Path) -> None:
    given = {"speculative_draft_model_path": str(save_head(DRAFTS[algorithm], tmp_path))}
    values, found = serve_config.settle_draft(given)
    assert values == given | {"speculative_algorithm": algorithm}
    assert f"a draft for {algorithm}" in found
    asked = given | {"speculative_algorithm": "NONE"}
    assert serve_config.settle_draft(asked) == (asked, "")


def test_a_whole_model_drafts_by_itself_and_bundled_heads_are_found() -> None:
    for algorithm, name in BUNDLED_DRAFTS.items():
        values, _ = serve_config.settle_draft({"speculative_draft_model_path": name})
        assert values["speculative_algorithm"] == algorithm


def test_a_draft_that_names_its_target_is_enough(tmp_path: Path) -> None:
    head = tiny_block("DSPARK", 7, layout="speculators")
    head.config["speculators_config"] = {"verifier": {"name_or_path": "organisation/target"}}
    given = {"speculative_draft_model_path": str(save_head(head, tmp_path))}
    values, found = serve_config.settle_draft(given)
    assert values["model_path"] == "organisation/target"
    assert found.endswith("of the target organisation/target")
    named, _ = serve_config.settle_draft(given | {"model_path": "mine"})
    assert named["model_path"] == "mine"


def test_what_is_no_draft_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(CheckpointError, match="is not a draft head"):
        serve_config.settle_draft({"speculative_draft_model_path": str(tmp_path)})
