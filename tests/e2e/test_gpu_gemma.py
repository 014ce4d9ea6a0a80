"""Gemma's shapes on a GPU in float32: heads of 256, layers with windows; every token is the rule's
over transformers' logits.
"""

from pathlib import Path

import pytest
import torch
import transformers

from foredraft.sampling.noise import gumbel
from foredraft.types import SamplingParams
from testing.checkpoints import VOCAB_SIZE, make_checkpoint
from testing.draft_heads import save_head, tiny_head
from testing.engines import Job, running_engine
from testing.triton_device import needs_gpu

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, needs_gpu]
SHAPE = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 40,
}
# Each crosses the window: some in their prompt, one while it decodes.
PROMPT_TOKENS = (20, 41, 90, 150)
STEPS = {"chain": (3, 1, 4), "tree": (4, 4, 12)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gemma"), "Gemma3ForCausalLM", **SHAPE)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model that is much like the target, with windows of its own, and a head that knows
    nothing.
    """
    standalone = tmp_path_factory.mktemp("draft")
    make_checkpoint(standalone, "Gemma3ForCausalLM", noise=0.03, **SHAPE)
    eagle3 = save_head(tiny_head("EAGLE3"), tmp_path_factory.mktemp("eagle3"))
    return {"STANDALONE": standalone, "EAGLE3": eagle3}


def jobs() -> list[Job]:
    made = []
    for i, size in enumerate(PROMPT_TOKENS):
        prompt = [(7 * i + j * j + j // 3) % 97 + 2 for j in range(size)]
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(
                temperature=temperature, seed=i, max_new_tokens=48, ignore_eos=True
            )
            made.append(Job(prompt, sampling))
    return made


def assert_the_rules(path: Path, work: list[Job], texts: list[list[int]]) -> None:
    """No other token is preferred by more than float32 rounds."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    tokens = torch.arange(VOCAB_SIZE)
    for job, text in zip(work, texts, strict=True):
        assert len(text) == job.sampling.max_new_tokens
        first = len(job.prompt)
        with torch.no_grad():
            scores = model(torch.tensor([job.prompt + text])).logits[0, first - 1 : -1]
        if job.sampling.temperature > 0:
            positions = torch.arange(first, first + len(text))
            seeds = torch.full_like(positions, job.sampling.seed)
            scores = scores / job.sampling.temperature + gumbel(seeds, positions, tokens).double()
        lost = scores.amax(1) - scores[torch.arange(len(text)), torch.tensor(text)]
        assert lost.max() < 1e-4, f"token {int(lost.argmax())} of {first}: {float(lost.max())}"


def texts_of(path: Path, algorithm: str, **flags) -> tuple[list[list[int]], int]:
    """Texts, and how many of their tokens a draft had proposed."""
    settings = {"device": DEVICE, "dtype": "float32", "chunked_prefill_size": 64, **flags}
    with running_engine(path, algorithm, draft_step_timeout=60.0, **settings) as harness:
        results = harness.run(jobs(), timeout=300)
        harness.check_nothing_left()
    accepted = sum(result.finish.accepted_tokens for result in results if result.finish)
    return [result.tokens for result in results], accepted


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_gemma_decodes_by_the_rule(target, graphs):
    texts, _ = texts_of(target, "NONE", disable_cuda_graph=not graphs)
    assert_the_rules(target, jobs(), texts)


@pytest.mark.parametrize("shape", list(STEPS))
@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3"])
def test_trees_under_windows_change_no_token(target, drafts, algorithm, shape):
    steps, topk, tokens = STEPS[shape]
    texts, accepted = texts_of(
        target,
        algorithm,
        speculative_draft_model_path=str(drafts[algorithm]),
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=tokens,
    )
    assert accepted > (150 if algorithm == "STANDALONE" else 0)
    assert_the_rules(target, jobs(), texts)
