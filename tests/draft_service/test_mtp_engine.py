"""MTP layers that lie in their target's checkpoint, behind a real engine: no token changes,
whatever happens to the pages.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from foredraft.types import SamplingParams
from testing.checkpoints import VOCAB_SIZE, make_checkpoint
from testing.draft_heads import tiny_head
from testing.engines import Job, Result, running_engine

# So few pages that sequences preempt each other, and chunks shorter than most prompts.
PRESSURE = {
    "page_size": 8,
    "max_total_tokens": 8 * 32,
    "chunked_prefill_size": 20,
    "max_running_requests": 8,
    "draft_step_timeout": 20.0,
    "skip_draft_self_test": True,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 that says it is MiMo, with three random MTP layers."""
    folder = tmp_path_factory.mktemp("mimo")
    head = tiny_head("MTP", 3, num_layers=3)
    sizes = {"intermediate_size": head.config["intermediate_size"], "head_dim": 12}
    make_checkpoint(folder, "Qwen2ForCausalLM", seed=2, tie_word_embeddings=False, **sizes)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 3,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors") | head.tensors
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def jobs() -> list[Job]:
    rng = random.Random(5)
    families = [[rng.randrange(2, VOCAB_SIZE) for _ in range(40)] for _ in range(3)]
    prompts = [
        rng.choice(families)[: rng.randrange(41)] + [rng.randrange(2, VOCAB_SIZE) for _ in range(5)]
        for _ in range(20)
    ]
    return [
        Job(
            prompt,
            SamplingParams(temperature=0.7 * (i % 2), max_new_tokens=72, ignore_eos=True, seed=i),
        )
        for i, prompt in enumerate(prompts)
    ]


def run(target: Path, algorithm: str, **flags: Any) -> list[Result]:
    with running_engine(target, algorithm, **{**PRESSURE, **flags}) as harness:
        harness.engine.draft_everything()
        results = harness.run(jobs())
        harness.check_nothing_left()
    return results


def test_no_token_changes(target: Path) -> None:
    plain = [result.tokens for result in run(target, "NONE")]
    for flags in ({}, {"enable_multi_layer_eagle": True}):
        # Without a draft path EAGLE is MTP here; NEXTN is another name of it.
        results = run(target, "NEXTN", **flags)
        assert [result.tokens for result in results] == plain
        assert sum(result.finish.drafted_tokens for result in results) > 20 * 72
        assert sum(result.finish.preemptions for result in results) > 0
