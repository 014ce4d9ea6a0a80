"""Heads as drafters against their equations in float64: the same trees, whatever the batch, the
chunks and the pages.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters.heads import HeadDrafter
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import AttachRefused, CheckpointError, ConfigError, InvalidRequest
from foredraft.sampling.noise import gumbel
from foredraft.sampling.seeds import to_int64
from foredraft.types import SamplingParams
from testing.draft_cases import KINDS
from testing.draft_heads import (
    VOCAB,
    HeadReference,
    TinyHead,
    module_chain,
    paths_of,
    tiny_head,
)
from testing.head_verifier import NUM_PAGES, Verifier, ask, attached, request_of, text
from testing.speculation_reference import distribution

MODULES = tiny_head("MTP", 6, num_layers=4)
CHAIN = (4, 1, 5)
BUSHY = (3, 3, 9)
Make = Callable[..., HeadDrafter]


@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_a_batch_of_eight_that_grows(kind: str, make: Make, target: Path) -> None:
    head = KINDS[kind]
    reference = HeadReference(head, target)
    shapes = [CHAIN, BUSHY, (1, 1, 2), (2, 2, 7), (3, 3, 4), (1, 3, 4), BUSHY, (4, 2, 15)]
    lengths = [2, 3, 4, 5, 9, 17, 23, 30]
    with attached(make(head), target) as verifier:
        for round_number in range(3):
            messages = []
            for slot, shape in enumerate(shapes):
                seed = 10 * round_number + slot
                # What was accepted last time, and one more token: as many as the tree is deep, at
                # most.
                count = lengths[slot] if round_number == 0 else 1 + (slot + round_number) % shape[0]
                messages.append(verifier.news(slot, text(seed, count), shape))
            trees = verifier.step(*messages)
            for slot, shape in enumerate(shapes):
                assert paths_of(trees[slot]) == verifier.paths(reference, slot, shape), slot


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_alone_as_in_a_batch_and_by_chunks(kind: str, make: Make, target: Path) -> None:
    head = KINDS[kind]
    reference, drafter = HeadReference(head, target), make(head)
    whole = text(5, 41)
    for chunk in (1, 3, 4, 25, 41):
        with attached(drafter, target) as verifier:
            # The first chunk of c rows comes with c + 1 tokens; only the last one asks for a tree.
            for start in range(0, 41, chunk):
                part = whole[start : start + chunk]
                is_last = start + chunk >= 41
                tree = verifier.step(verifier.news(2, part, BUSHY if is_last else None))
            assert paths_of(tree[2]) == verifier.paths(reference, 2, BUSHY)


def test_many_rows_in_forwards_of_bounded_size(make: Make, target: Path) -> None:
    head = KINDS["eagle3"]
    reference = HeadReference(head, target)
    with attached(make(head), target) as verifier:
        trees = verifier.step(*(verifier.news(s, text(s, 99), (2, 1, 3)) for s in range(8)))
        for slot in range(8):
            assert paths_of(trees[slot]) == verifier.paths(reference, slot, (2, 1, 3))


@pytest.mark.parametrize("kind", ["eagle", "eagle3.1-qwen3"])
def test_a_prefix_that_another_sequence_filled(kind: str, make: Make, target: Path) -> None:
    head = KINDS[kind]
    reference = HeadReference(head, target)
    with attached(make(head), target) as verifier:
        verifier._hidden[1] = verifier.hidden(0).clone()
        verifier._hidden[1][13:] += 1
        filling = verifier.news(0, text(1, 20))
        common = verifier.tokens[0][:13]  # slots 0 .. 11 are whole pages
        verifier.tokens[1], verifier.pages[1] = list(common), verifier.pages[0][:3]
        message = verifier.news(1, text(2, 5), BUSHY)
        message.begin.sampling.top_p = 1
        message.first_page = 0
        pages = [*verifier.pages[0][:3], *message.new_pages]
        del message.new_pages[:]
        message.new_pages.extend(pages)
        # In the very step in which they are filled.
        tree = verifier.step(filling, message)[1]
        assert paths_of(tree) == verifier.paths(reference, 1, BUSHY)


def test_a_hole_is_not_attended(make: Make, target: Path) -> None:
    head = KINDS["eagle3"]
    reference, drafter = HeadReference(head, target), make(head)
    for hole in (1, 5, 8, 13):
        with attached(drafter, target) as verifier:
            verifier.tokens[0] = text(4, hole + 1)
            message = verifier.news(0, text(5, 6), BUSHY)
            message.begin.valid_from = hole
            message.begin.sampling.top_p = 1
            tree = verifier.step(message)[0]
            assert paths_of(tree) == verifier.paths(reference, 0, BUSHY, valid_from=hole)
            tree = verifier.step(verifier.news(0, text(6, 2), BUSHY))[0]
            assert paths_of(tree) == verifier.paths(reference, 0, BUSHY, valid_from=hole)


def test_pages_may_be_replaced_and_state_voided(make: Make, target: Path) -> None:
    head = KINDS["mtp"]
    reference = HeadReference(head, target)
    with attached(make(head), target) as verifier:
        verifier.step(verifier.news(0, text(3, 22)))
        # Entries 2 .. 5 are other pages now: the slots from 8 on are sent again.
        tokens, pages = verifier.tokens[0], [verifier._free.pop() for _ in range(4)]
        message = draft_pb2.SequenceStep(slot=0, position=9, tokens=tokens[9:], first_page=2)
        message.new_pages.extend(pages)
        verifier.add_hidden(message, 8, 21)
        ask(message, BUSHY)
        tree = verifier.step(message)[0]
        assert paths_of(tree) == verifier.paths(reference, 0, BUSHY)
        verifier.pages[0][2:] = pages
        tree = verifier.step(verifier.news(0, text(4, 3), CHAIN))[0]
        assert paths_of(tree) == verifier.paths(reference, 0, CHAIN)


def test_released_slots_and_new_begins(make: Make, target: Path) -> None:
    head = KINDS["eagle"]
    reference = HeadReference(head, target)
    with attached(make(head), target) as verifier:
        for round_number in range(4):
            verifier._free = list(range(NUM_PAGES))  # the same pages every time
            verifier.tokens.clear()
            verifier.pages.clear()
            messages = [verifier.news(s, text(9 * round_number + s, 9 + s), BUSHY) for s in (0, 3)]
            trees = verifier.step(*messages, released=(0, 3) if round_number % 2 else ())
            for slot in (0, 3):
                assert paths_of(trees[slot]) == verifier.paths(reference, slot, BUSHY)


PARAMS = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=77)


def chosen(scores: np.ndarray, position: int, params: SamplingParams = PARAMS) -> int:
    """Returns the token that the sampling rule chooses by these logits."""
    noise = gumbel(
        torch.tensor([to_int64(params.seed)]), torch.tensor([position]), torch.arange(len(scores))
    )[0].numpy()
    with np.errstate(divide="ignore"):
        return int((np.log(distribution(scores, params)) + noise).argmax())


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_coupled_trees_hold_what_the_rule_would_choose(kind: str, make: Make, target: Path) -> None:
    head = KINDS[kind]
    reference = HeadReference(head, target)
    sampling = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 77}
    with attached(make(head), target, draft_sampling="coupled") as verifier:
        shapes = [CHAIN, BUSHY, (4, 3, 12)]
        messages = [
            verifier.news(s, text(s, 8 + s), shape, sampling) for s, shape in enumerate(shapes)
        ]
        trees = verifier.step(*messages)
        for slot, shape in enumerate(shapes):
            drafting, path = verifier.drafting(reference, slot), ()
            for _ in range(shape[0]):
                scores = drafting.scores(path)
                path = (*path, chosen(scores, 8 + slot + len(path)))
            assert path in paths_of(trees[slot])


def test_a_reduced_vocabulary(make: Make, target: Path, tmp_path: Path) -> None:
    ids = random.Random(1).sample(range(VOCAB), 40)
    torch.save(ids, tmp_path / "map.pt")
    for kind in ("eagle", "mtp"):
        head = KINDS[kind]
        reference = HeadReference(head, target, token_map=ids)
        drafter = make(head, speculative_token_map=str(tmp_path / "map.pt"))
        with attached(drafter, target) as verifier:
            tree = verifier.step(verifier.news(0, text(1, 12), BUSHY))[0]
            assert paths_of(tree) == verifier.paths(reference, 0, BUSHY)
            assert set(tree[0]) <= set(ids)


def chain_of(reference: HeadReference, verifier: Verifier, slot: int, steps: int) -> list[int]:
    tokens = verifier.tokens[slot]
    hidden = verifier.hidden(slot)[: len(tokens) - 1].double().numpy()
    return module_chain(reference, tokens, hidden, lambda _, row: int(row.argmax()))[:steps]


def test_one_module_for_each_depth(make: Make, target: Path) -> None:
    reference = HeadReference(MODULES, target)
    drafter = make(MODULES, enable_multi_layer_eagle=True)
    info = drafter.info()
    assert (info.limits.num_steps, info.limits.topk, info.limits.num_draft_tokens) == (4, 1, 5)
    assert info.kv_bytes_per_token == 4 * 2 * 2 * 12 * 4  # modules, K and V, heads, width, float32
    limits = draft_pb2.TreeLimits(num_steps=4, topk=1, num_draft_tokens=5)
    with attached(drafter, target, limits=limits) as verifier:
        wanted = [4, 1, 2, 3, 4]
        lengths = [2, 3, 5, 9, 30]
        for round_number in range(5):
            messages = []
            for slot, steps in enumerate(wanted):
                count = lengths[slot] if round_number == 0 else 1 + (slot + round_number) % 4
                seed = 10 * round_number + slot
                # Now and then a step only extends.
                shape = None if (slot + round_number) % 4 == 3 else (steps, 1, steps + 1)
                messages.append(verifier.news(slot, text(seed, count), shape))
            trees = verifier.step(*messages)
            for slot, steps in enumerate(wanted):
                assert (slot in trees) == messages[slot].HasField("propose")
                if slot in trees:
                    tokens, parents = trees[slot]
                    assert list(tokens) == chain_of(reference, verifier, slot, steps)
                    assert parents == tuple(range(-1, steps - 1))


def test_modules_by_chunks_and_after_a_rewind(make: Make, target: Path) -> None:
    reference = HeadReference(MODULES, target)
    drafter = make(MODULES, enable_multi_layer_eagle=True)
    limits = draft_pb2.TreeLimits(num_steps=4, topk=1, num_draft_tokens=5)
    for chunk in (1, 2, 5, 19):
        with attached(drafter, target, limits=limits) as verifier:
            for start in range(0, 19, chunk):
                verifier.step(verifier.news(0, text(start, min(chunk, 19 - start))))
            tokens = verifier.tokens[0]
            # Sent again from slot 16 on: deeper modules fall back on what they keep of the slots
            # before.
            message = draft_pb2.SequenceStep(slot=0, position=17, tokens=tokens[17:])
            verifier.add_hidden(message, 16, 18)
            verifier.step(message)
            tree = verifier.step(verifier.news(0, text(7, 3), CHAIN))[0]
            assert list(tree[0]) == chain_of(reference, verifier, 0, 4)


def test_coupled_chains_of_modules(make: Make, target: Path) -> None:
    reference = HeadReference(MODULES, target)
    drafter = make(MODULES, enable_multi_layer_eagle=True)
    limits = draft_pb2.TreeLimits(num_steps=4, topk=1, num_draft_tokens=5)
    sampling = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 77}
    with attached(drafter, target, limits=limits, draft_sampling="coupled") as verifier:
        tree = verifier.step(verifier.news(0, text(1, 10), CHAIN, sampling))[0]
        hidden = verifier.hidden(0)[:9].double().numpy()
        expected = module_chain(
            reference, verifier.tokens[0], hidden, lambda depth, row: chosen(row, 10 + depth)
        )
        assert list(tree[0]) == expected


def test_int8_weights_draft_almost_the_same(make: Make, target: Path) -> None:
    plain = make(KINDS["eagle3"])
    small = make(KINDS["eagle3"], speculative_draft_model_quantization="int8")
    assert small.info().weight_bytes < 0.6 * plain.info().weight_bytes  # the embedding stays
    firsts = []
    for drafter in (plain, small):
        with attached(drafter, target) as verifier:
            trees = verifier.step(*(verifier.news(s, text(s, 20), CHAIN) for s in range(8)))
            firsts.append([trees[slot][0][0] for slot in range(8)])
    assert sum(a == b for a, b in zip(*firsts, strict=True)) >= 6


def test_info(make: Make) -> None:
    info = make(KINDS["eagle3"]).info()
    assert (info.algorithm, info.uses_pages, info.vocab_size) == ("EAGLE3", True, VOCAB)
    assert (list(info.hidden.layers), info.hidden.width) == ([2, 1, 0], 3 * 48)
    assert (info.limits.num_steps, info.limits.topk, info.limits.num_draft_tokens) == (5, 1, 6)
    assert info.kv_bytes_per_token == 2 * 2 * 12 * 4
    info = make(KINDS["eagle"]).info()
    assert (list(info.hidden.layers), info.hidden.width) == ([], 48)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vocab_size": 127}, "vocab_size"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"num_layers": 4}, "num_layers"),
        ({"target_fingerprint": "0" * 64}, "target_fingerprint"),
        ({"page_size": 0}, "page_size"),
        ({"draft_sampling": "best"}, "draft_sampling"),
        ({"num_pages": 2**31, "page_size": 2**15}, "num_pages"),
        ({"limits": draft_pb2.TreeLimits(num_draft_tokens=1)}, "limits.num_draft_tokens"),
        (
            {"limits": draft_pb2.TreeLimits(num_steps=2, topk=81, num_draft_tokens=9)},
            "limits.topk",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], field: str, make: Make, target: Path
) -> None:
    with pytest.raises(AttachRefused) as refused:
        make(KINDS["eagle3"]).attach(request_of(target, **changes))
    assert refused.value.field == field


def test_steps_that_break_the_protocol(make: Make, target: Path) -> None:
    def broken(change: Callable[[draft_pb2.SequenceStep], None]) -> str:
        with attached(make(KINDS["eagle"]), target) as verifier:
            verifier.step(verifier.news(0, text(1, 9)))
            message = verifier.news(0, text(2, 3), BUSHY)
            change(message)
            with pytest.raises(InvalidRequest) as error:
                verifier.step(message)
        return error.value.field

    assert broken(lambda m: m.ClearField("hidden")) == "hidden"
    assert broken(lambda m: m.hidden.ClearField("source")) == "hidden"
    assert broken(lambda m: setattr(m.hidden, "num_rows", 2)) == "hidden"
    assert broken(lambda m: m.ClearField("tokens")) == "tokens"
    assert broken(lambda m: m.ClearField("new_pages")) == "new_pages"
    assert broken(lambda m: setattr(m, "position", 10)) == "position"


def test_a_single_token_has_no_state_to_draft_from(make: Make, target: Path) -> None:
    with attached(make(KINDS["eagle"]), target) as verifier:
        assert verifier.step(verifier.news(0, [5], BUSHY)) == {}
        assert verifier.step(verifier.news(0, [6], BUSHY))[0]


def test_flags_that_do_not_fit_the_head(make: Make) -> None:
    with pytest.raises(ConfigError, match="there is one MTP layer"):
        make(KINDS["mtp"], enable_multi_layer_eagle=True)
    with pytest.raises(ConfigError, match=r"--speculative-num-steps 5 .* 4 MTP layers"):
        make(MODULES, enable_multi_layer_eagle=True, speculative_num_steps=5)
    with pytest.raises(ConfigError, match="a head for EAGLE"):
        make(KINDS["eagle"], enable_multi_layer_eagle=True)
    wrong = TinyHead("EAGLE3", KINDS["eagle"].config, KINDS["eagle"].tensors)
    with pytest.raises(CheckpointError, match="not EAGLE3"):
        make(wrong)
