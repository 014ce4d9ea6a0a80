"""The bundled heads behind a real engine: no token changes whatever happens to pages and draft, and
as many drafted tokens are accepted as the same weights get in the trainer's own modules, with the
prefix cache, without it, and in any batch.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from foredraft.models.registry import BUNDLED_DRAFTS
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engines import Collector, Harness, Job, Result, accept_length, running_engine
from training.draft.acceptance import head_chain, head_tree
from training.draft.heads import HeadShape, default_aux_layers, load_head
from training.draft.target import Target
from training.draft.unroll import DraftInputs
from training.lm.model import LlamaShape
from verify_service.outputs import Load, StepOutput

MODELS = Path(__file__).parents[2] / "models"
TARGET = MODELS / "foredraft-demo"
HEADS = {name: MODELS / BUNDLED_DRAFTS[name] for name in ("EAGLE", "EAGLE3", "MTP")}
STEPS, TOPK, NODES = 3, 3, 8
CHAIN = {
    "speculative_num_steps": STEPS,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": STEPS + 1,
    "speculative_draft_sampling": "topk",  # which the trainer measures
    "draft_step_timeout": 20.0,
}
TREE = {**CHAIN, "speculative_eagle_topk": TOPK, "speculative_num_draft_tokens": NODES}
# A pool so small that four sequences preempt each other, chunks far shorter than the prompts.
PRESSURE = {
    "page_size": 8,
    "max_total_tokens": 8 * 27,
    "chunked_prefill_size": 20,
    "max_running_requests": 4,
}
STORY = (
    "Once upon a time there was a little girl named Lily. She lived with her mother and her father"
    " in a small house at the edge of a big forest. Every morning she put on her red shoes and went"
    " to the garden to feed the birds. One day a blue bird with a hurt wing sat on the fence and"
    " did not eat. Lily was sad and wanted to help it. She asked her mother for some bread and a"
    " soft blanket. The bird looked at Lily and said, thank you. Then it began to rain, and they"
    " all went into the house, where it was warm and dry. The next day the bird could fly again. It"
    " came back every week and sang a song for her. "
)
PROMPT, NEW = 44, 32
LONG = 96  # more output than admission keeps room for, so that pages run out


@pytest.fixture(scope="module")
def text() -> list[int]:
    return Tokenizer.from_dir(TARGET).encode(STORY)


def windows(text: list[int], count: int) -> list[Job]:
    """Prompts of equal length that share no prefix, greedy."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    return [Job(text[i * 11 : i * 11 + PROMPT], sampling) for i in range(count)]


def family(text: list[int]) -> list[Job]:
    """Prompts with a long prefix in common, greedy and seeded in turn."""
    return [
        Job(
            text[:60] + text[60 + 9 * i : 64 + 12 * i],
            SamplingParams(temperature=0.9 * (i % 2), max_new_tokens=LONG, ignore_eos=True, seed=i),
        )
        for i in range(4)
    ]


@pytest.fixture(scope="module")
def plain(text: list[int]) -> list[list[int]]:
    """Returns plain decoding's continuation of `family`."""
    with running_engine(TARGET, page_size=8) as harness:
        return [result.tokens for result in harness.run(family(text))]


class KilledMidway(Collector):
    """Kills the draft with SIGKILL when about half of all tokens have come, and starts it again."""

    def __init__(self, harness: Harness, num_requests: int) -> None:
        super().__init__(harness.engine, num_requests)
        self._harness = harness
        self._half = threading.Event()

    def run(self, jobs: Sequence[Job], timeout: float) -> list[Result]:
        killer = threading.Thread(target=self._kill)
        killer.start()
        results = super().run(jobs, timeout)
        killer.join(timeout)
        return results

    def _take(self, outputs: list[StepOutput], load: Load) -> None:
        super()._take(outputs, load)
        if sum(len(result.tokens) for result in self.results) > len(self.results) * LONG // 2:
            self._half.set()

    def _kill(self) -> None:
        assert self._half.wait(120)
        self._harness.draft.kill()
        self._harness.draft.start()


@pytest.mark.parametrize("algorithm", [*HEADS, "DSPARK"])
def test_no_token_changes(algorithm: str, text: list[int], plain: list[list[int]]) -> None:
    head = MODELS / BUNDLED_DRAFTS[algorithm]
    flags = {**PRESSURE, **TREE, "speculative_draft_model_path": str(head)}
    jobs = family(text)
    with running_engine(TARGET, algorithm, **flags) as harness:
        killed = KilledMidway(harness, len(jobs)).run(jobs, 120)
        harness.wait_for_draft()
        healed = harness.run(jobs)
        harness.check_nothing_left()
    for results in (killed, healed):
        assert [result.tokens for result in results] == plain
        assert sum(result.finish.preemptions for result in results) > 0
        assert sum(result.finish.accepted_tokens for result in results) > 0
    assert sum(result.finish.cached_tokens for result in healed) > 0
    length = accept_length(healed)
    print(f"{algorithm}: accept length {length:.3f} after the kill")
    assert length > 1.5


def accepted(result: Result) -> list[int]:
    """Accepted tokens of every verify: the runs of drafted tokens, each before a token of the
    target's own.
    """
    counts, run = [], 0
    for drafted in result.drafted[1:]:
        if drafted:
            run += 1
        else:
            counts.append(run)
            run = 0
    return counts


@torch.no_grad()
def trainers_measure(algorithm: str, texts: list[list[int]], topk: int) -> Iterator[list[int]]:
    """Accepted tokens of every verify of each text, by the trainer's modules and its own walk."""
    target = Target(TARGET, torch.device("cpu"), torch.float32)
    layers = default_aux_layers(target.shape.num_layers) if algorithm == "EAGLE3" else ()
    config = json.loads((HEADS[algorithm] / "config.json").read_text())
    layer = LlamaShape.from_dir(HEADS[algorithm])
    shape = HeadShape(algorithm, layer, layers, config.get("draft_vocab_size", 0))
    head = load_head(HEADS[algorithm], shape)
    weights = target.embed_weight, target.output_weight
    for text in texts:
        tokens = torch.tensor([text])
        hidden, captured = target.features(tokens, layers)
        inputs = DraftInputs(F.embedding(tokens, target.embed_weight), hidden, captured)
        if topk == 1:
            counts = head_chain(head, inputs, tokens, weights[1], PROMPT, STEPS)
        else:
            counts = head_tree(head, inputs, tokens, *weights, PROMPT, STEPS, topk, NODES)
        yield counts


@pytest.mark.parametrize(("algorithm", "topk"), [("EAGLE", 1), ("EAGLE3", 1), ("MTP", TOPK)])
def test_acceptance_is_the_trainers_in_every_batch_and_with_prefix_hits(
    algorithm: str, topk: int, text: list[int]
) -> None:
    flags = {
        "page_size": 16,
        "chunked_prefill_size": 64,
        "speculative_draft_model_path": str(HEADS[algorithm]),
        **(CHAIN if topk == 1 else TREE),
    }
    jobs = windows(text, 6)
    with running_engine(TARGET, algorithm, **flags) as harness:
        alone = [harness.run([job])[0] for job in jobs]
        assert sum(result.finish.cached_tokens for result in alone) == 0
        batch = harness.run(jobs)
        assert min(result.finish.cached_tokens for result in batch) > 0
    assert [result.tokens for result in batch] == [result.tokens for result in alone]
    # The server's last drafts are cut to the output that is left, so the trainer sees a little less
    # text.
    texts = [(job.prompt + result.tokens)[:-2] for job, result in zip(jobs, alone, strict=True)]
    measured = list(trainers_measure(algorithm, texts, topk))
    num_verifies = sum(len(counts) for counts in measured)
    lengths = [1 + sum(map(sum, measured)) / num_verifies]
    for results in (alone, batch):
        served = [accepted(r)[: len(m)] for r, m in zip(results, measured, strict=True)]
        lengths.append(1 + sum(map(sum, served)) / num_verifies)
        # Nothing but rounding tells them apart: nearly every verify accepts as many tokens as the
        # trainer's.
        num_same = sum(one == other for one, other in zip(served, measured, strict=True))
        assert num_same >= len(jobs) - 1
    print(
        f"{algorithm}, topk {topk}, {num_verifies} verifies: accept length {lengths[0]:.4f} by the"
        f" trainer, {lengths[1]:.4f} at batch 1, {lengths[2]:.4f} at batch {len(jobs)} with prefix"
        " hits"
    )
    assert lengths[0] > 1.5
    assert lengths[1:] == pytest.approx([lengths[0]] * 2, rel=0.02)
