"""N-grams over a head: a long enough match proposes in the head's place, everything else is the
head's, and the head has read what n-grams answered for.
"""

from pathlib import Path
from typing import Any

import pytest

from draft_service.drafters.heads import HeadDrafter
from foredraft.config.services import DraftConfig
from foredraft.errors import ConfigError
from testing.draft_cases import KINDS
from testing.draft_heads import HeadReference, paths_of, save_head
from testing.head_verifier import ask, attached

LIMITS = (4, 1, 5)
SEEN = [9, 8, 7, 6, 40, 41, 42, 43, 44]


def loaded(target: Path, folder: Path, kind: str, **flags: Any) -> HeadDrafter:
    head = KINDS[kind]
    config = DraftConfig(
        model_path=str(target),
        speculative_algorithm=head.algorithm,
        speculative_draft_model_path=str(save_head(head, folder)),
        num_threads=1,
        device="cpu",
        speculative_ngram_override=True,
        **flags,
    )
    return HeadDrafter.load(config)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_a_long_match_proposes_and_the_head_goes_on_behind_it(
    kind: str, target: Path, tmp_path: Path
) -> None:
    drafter, reference = loaded(target, tmp_path, kind), HeadReference(KINDS[kind], target)
    with attached(drafter, target) as verifier:
        texts = {0: [*SEEN, 50, 9, 8, 7, 6], 1: [*SEEN, 50, 9, 8, 7], 2: [9, 8, 7, 6]}
        trees = verifier.step(*(verifier.news(slot, text, LIMITS) for slot, text in texts.items()))
        assert trees[0] == ((40, 41, 42, 43), (-1, 0, 1, 2))
        # Three tokens are no match, and what another request wrote is not this one's.
        for slot in (1, 2):
            assert paths_of(trees[slot]) == verifier.paths(reference, slot, LIMITS)
        # Half of the copy was right, and then the text goes another way.
        trees = verifier.step(verifier.news(0, [40, 41, 77], LIMITS))
        assert paths_of(trees[0]) == verifier.paths(reference, 0, LIMITS)


def test_the_shortest_match_is_a_flag_and_a_scope_shares_text(target: Path, tmp_path: Path) -> None:
    drafter = loaded(target, tmp_path, "eagle3", speculative_ngram_override_min_match=2)
    with attached(drafter, target) as verifier:
        first = verifier.news(0, SEEN)
        first.begin.scope = "key:a"
        verifier.step(first)
        messages = [verifier.news(slot, [3, 8, 7], LIMITS) for slot in (1, 2)]
        messages[0].begin.scope, messages[1].begin.scope = "key:a", "key:b"
        trees = verifier.step(*messages)
        assert trees[1] == ((6, 40, 41, 42), (-1, 0, 1, 2))
        reference = HeadReference(KINDS["eagle3"], target)
        assert paths_of(trees[2]) == verifier.paths(reference, 2, LIMITS)


def test_a_tree_of_n_grams_keeps_to_the_limits_that_were_asked_for(
    target: Path, tmp_path: Path
) -> None:
    with attached(loaded(target, tmp_path, "eagle3"), target) as verifier:
        text = [*SEEN, 50, 9, 8, 7, 6, 60, 61, 62, 63, 51, 9, 8, 7, 6]
        tree = verifier.step(verifier.news(0, text, (2, 2, 4)))[0]
        assert paths_of(tree) <= {(40,), (60,), (40, 41), (60, 61)}
        assert len(tree[0]) == 3
        message = verifier.news(0, [60])
        ask(message, (1, 1, 2))
        assert verifier.step(message)[0] == ((61,), (-1,))


def test_a_released_slot_begins_anew(target: Path, tmp_path: Path) -> None:
    reference = HeadReference(KINDS["eagle3"], target)
    with attached(loaded(target, tmp_path, "eagle3"), target) as verifier:
        verifier.step(verifier.news(0, SEEN))
        verifier.tokens.pop(0), verifier.pages.pop(0)
        trees = verifier.step(verifier.news(0, [9, 8, 7, 6], LIMITS), released=(0,))
        assert paths_of(trees[0]) == verifier.paths(reference, 0, LIMITS)


def test_the_draft_asks_for_tokens_by_value(target: Path, tmp_path: Path) -> None:
    assert not loaded(target, tmp_path, "eagle3").info().device_steps


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"speculative_algorithm": "NGRAM"}, "--speculative-ngram-override"),
        ({"speculative_ngram_override_min_match": 13}, "--speculative-ngram-override-min-match"),
        ({"speculative_ngram_override_min_match": 0}, "--speculative-ngram-override-min-match"),
    ],
)
def test_flags_that_do_not_fit_are_named(flags: dict[str, Any], named: str) -> None:
    settings = {
        "model_path": "x",
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "" if "speculative_algorithm" in flags else "y",
        "speculative_ngram_override": True,
    }
    with pytest.raises(ConfigError, match=f"^{named} "):
        DraftConfig(**(settings | flags))
