"""The engine over steps of fixed shape, whatever sequences ask for, against the CPU's own way; in
Triton's interpreter.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import pytest

from foredraft.attention.base import AttentionBackend
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.paged_triton import TritonAttention
from foredraft.types import SamplingParams
from testing.checkpoints import EOS, VOCAB_SIZE, make_checkpoint
from testing.engines import Job, Result, running_engine
from testing.triton_device import INTERPRETED, needs_triton
from verify_service.engine.overlap import OverlapScheduler
from verify_service.executor.captured import shared_keys, step
from verify_service.grammar.matcher import CompiledGrammar
from verify_service.metrics import LATE_MASKS, OVERLAPPED_STEPS, SHARED_KEY_STEPS

pytestmark = [needs_triton, pytest.mark.skipif(not INTERPRETED, reason="is for the interpreter")]
ASKED = (
    {"top_p": 0.7},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "logprobs": 2},
    {"logit_bias": {7: 3.0, 9: -20.0}, "min_new_tokens": 5, "temperature": 0.0},
    {"presence_penalty": 1.0, "top_k": 9},
    {"bad_words": (*((i, j) for i in range(9) for j in range(90)), (91,)), "temperature": 0.0},
)


class Bytes:
    """A vocabulary of single bytes, as llguidance asks for it."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id, special_token_ids = EOS, None, (0, EOS)
    tokens = tuple(bytes([i]) for i in range(VOCAB_SIZE))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def jobs() -> list[Job]:
    """Returns jobs; one follows a grammar, and the last forbids some words."""
    regex = llguidance.LLMatcher.grammar_from_regex("([a-f]{2,3} ){4}")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(Bytes()), regex)
    assert not matcher.is_error(), matcher.get_error()
    made = []
    for i, asked in enumerate(ASKED):
        sampling = SamplingParams(**{"max_new_tokens": 6 + 2 * i, "seed": i, **asked})
        prompt = [*[5, 6, 7, 98, 99] * 2, 40 + i]
        grammar = CompiledGrammar(matcher, VOCAB_SIZE) if i == len(ASKED) - 2 else None
        made.append(Job(prompt, sampling, grammar=grammar))
    return made


def run(path: Path, algorithm: str, breadth: int = 1) -> Sequence[Result]:
    flags: dict[str, Any] = {}
    if algorithm == "NGRAM":
        flags = {"speculative_num_draft_tokens": 4, "speculative_ngram_max_bfs_breadth": breadth}
    with running_engine(
        path, algorithm, page_size=8, max_total_tokens=512, max_running_requests=4, **flags
    ) as harness:
        harness.engine.draft_everything()
        results = harness.run(jobs(), timeout=300)
        harness.check_nothing_left()
    return results


@pytest.mark.parametrize("attention", [TritonAttention, ExactAttention])
@pytest.mark.parametrize(("algorithm", "breadth"), [("NONE", 1), ("NGRAM", 1), ("NGRAM", 2)])
def test_steps_of_fixed_shape_give_what_the_engine_gives(
    algorithm: str,
    breadth: int,
    attention: type[AttentionBackend],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make_checkpoint(tmp_path, num_hidden_layers=1)
    want = run(path, "NONE")
    from testing.eager_graphs import use_eager_graphs  # needs Triton

    use_eager_graphs(monkeypatch, attention)
    monkeypatch.setattr(step, "FILTERED_AT_ONCE", 6)  # so that there is more than one part
    overlapped, masks = OVERLAPPED_STEPS._value.get(), LATE_MASKS._value.get()
    got = run(path, algorithm, breadth)
    assert LATE_MASKS._value.get() - masks > 5
    if algorithm == "NONE":
        assert OVERLAPPED_STEPS._value.get() - overlapped > 5
    else:
        assert sum(result.finish.drafted_tokens for result in got if result.finish) > 5
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        assert len(one.logprobs) == len(other.logprobs)
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert ours.top_tokens == theirs.top_tokens


@pytest.mark.parametrize("attention", [TritonAttention, ExactAttention])
def test_prompts_behind_running_steps(
    attention: type[AttentionBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few sequences run at a time, so that prompts begin while others decode."""
    path, behind = make_checkpoint(tmp_path, num_hidden_layers=1), []
    work = []
    for i in range(8):
        sampling = SamplingParams(
            temperature=float(i % 2), seed=i, max_new_tokens=4 + 3 * (i % 3), ignore_eos=True
        )
        work.append(Job([5 + i, 6, 7, 98, 99, 40 + i] * (2 + i % 3), sampling))

    def texts() -> list[list[int]]:
        flags = {"page_size": 8, "max_total_tokens": 512, "chunked_prefill_size": 8}
        with running_engine(path, max_running_requests=3, **flags) as harness:
            results = harness.run(work)
            harness.check_nothing_left()
        return [result.tokens for result in results]

    want = texts()
    from testing.eager_graphs import use_eager_graphs  # needs Triton

    compute_behind = OverlapScheduler.compute_behind

    def counted(self: OverlapScheduler, running: Any, chunks: Any) -> Any:
        behind.append(chunks)
        return compute_behind(self, running, chunks)

    monkeypatch.setattr(OverlapScheduler, "compute_behind", counted)
    use_eager_graphs(monkeypatch, attention)
    assert texts() == want
    assert len(behind) > 3


@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_shared_keys_are_read_once(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts have a beginning in common; one of them joins later."""
    path = make_checkpoint(tmp_path, num_hidden_layers=1)
    beginning = [5 + i % 80 for i in range(70)]
    work = []
    for i, common in enumerate((70, 70, 0, 66)):
        sampling = SamplingParams(
            temperature=float(i % 2), seed=i, max_new_tokens=6 + 2 * (i % 3), ignore_eos=True
        )
        work.append(Job([*beginning[:common], 90 + i, *[7, 8, 9] * 2], sampling))

    def texts() -> list[list[int]]:
        flags = {"page_size": 8, "max_total_tokens": 384, "max_running_requests": 3}
        drafts = {"speculative_num_draft_tokens": 3} if algorithm == "NGRAM" else {}
        with running_engine(path, algorithm, **flags, **drafts) as harness:
            harness.engine.draft_everything()
            results = harness.run(work, timeout=300)
            harness.check_nothing_left()
        return [result.tokens for result in results]

    want = texts()
    from testing.eager_graphs import use_eager_graphs  # needs Triton

    use_eager_graphs(monkeypatch, ExactAttention)
    monkeypatch.setattr(shared_keys, "LEAST_BYTES", 0)
    before = SHARED_KEY_STEPS._value.get()
    assert texts() == want
    assert SHARED_KEY_STEPS._value.get() - before > 2
