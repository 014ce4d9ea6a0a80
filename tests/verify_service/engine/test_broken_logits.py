"""A model whose logits are infinite after one token: requests that meet it end with an error, and
nobody else's text changes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.telemetry.metrics import value
from foredraft.types import FinishReason, SamplingParams
from testing.checkpoints import make_checkpoint
from testing.engines import Harness, Job, Result, running_engine
from testing.triton_device import INTERPRETED, needs_gpu, needs_triton

BAD = 7  # the token after which logits are infinite; the model chooses it after one other alone
BEFORE = 11
LENGTH = 4 if INTERPRETED else 12
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=LENGTH, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_new_tokens=LENGTH, ignore_eos=True)
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20},
    "logprobs": {"temperature": 0.8, "seed": 3, "logprobs": 4},
    "penalised": {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.5, "logprobs": 0},
}

if INTERPRETED:  # which is slow
    KINDS = {name: KINDS[name] for name in ("filtered", "penalised")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights are finite.

    Three numbers of each hidden state say which token it is of, through all layers.
    """
    path = make_checkpoint(tmp_path_factory.mktemp("broken") / "target")
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:3] = 0
    table, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    table[:, :3] = torch.tensor([0.0, 0.0, 1.0])
    table[BAD, 0] = table[BEFORE, 1] = 30
    head[:, :3] = 0
    head[90, 0] = 3e38
    head[BAD, 1] = 1000
    head[[BAD, BEFORE], 2] = -1000
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param("cuda", marks=[needs_gpu, pytest.mark.gpu]),
        # The steps of a GPU, in Triton's interpreter.
        pytest.param(
            "interpreted",
            marks=[
                needs_triton,
                pytest.mark.skipif(not INTERPRETED, reason="is for the interpreter"),
            ],
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["NONE", "NGRAM"])
def engine(request: pytest.FixtureRequest, checkpoint: Path, device: str) -> Iterator[Harness]:
    flags: dict[str, Any] = {"dtype": "float32", "device": "cuda" if device == "cuda" else "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        if device == "interpreted":
            from testing.eager_graphs import use_eager_graphs  # needs Triton

            use_eager_graphs(patch)
            flags |= {"page_size": 8, "max_total_tokens": 512, "max_running_requests": 4}
            flags |= {"speculative_num_draft_tokens": 3} if request.param == "NGRAM" else {}
        with running_engine(checkpoint, request.param, **flags) as harness:
            harness.engine.draft_everything()
            yield harness


def params(kind: str, **changes: object) -> SamplingParams:
    values = {"max_new_tokens": LENGTH, "ignore_eos": True} | KINDS[kind] | changes
    return SamplingParams(**values)  # type: ignore[arg-type]


def check_broken(result: Result, tokens: list[int]) -> None:
    assert result.finish is not None
    assert result.finish.reason is FinishReason.ERROR
    assert "not finite" in str(result.finish.error)
    assert result.tokens == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_whose_logits_are_broken_ends_with_an_error(engine: Harness, kind: str) -> None:
    before = value("foredraft_broken_logits_total")
    forced = params(kind, logit_bias={BAD: 100.0, BEFORE: 50.0})
    good = Job([5, 6, 8] * 4, params(kind))
    alone = engine.run([good])[0]
    at_the_prompts_end, while_decoding = Job([5, 6, BAD], params(kind)), [5, 6, 8, 5, BEFORE]
    results = engine.run(
        [at_the_prompts_end, good, Job(while_decoding, params(kind)), Job(while_decoding, forced)]
    )
    check_broken(results[0], [])
    check_broken(results[2], [BAD])
    check_broken(results[3], [BAD])
    assert results[1].tokens == alone.tokens
    assert len(alone.tokens) == LENGTH
    assert alone.finish is not None
    assert alone.finish.reason is FinishReason.LENGTH
    assert value("foredraft_broken_logits_total") == before + 3
    engine.check_nothing_left()


def test_a_drafted_token_that_would_break_them_changes_nothing(engine: Harness) -> None:
    """N-grams propose it, the model does not choose it."""
    prompt = [5, 6, BAD, 9, 5, 6, BAD, 9, 5, 6]
    with_draft = engine.run([Job(prompt, GREEDY), Job(prompt, SAMPLED)])
    for result in with_draft:
        assert result.finish is not None
        assert result.finish.reason is FinishReason.LENGTH
        assert len(result.tokens) == LENGTH
