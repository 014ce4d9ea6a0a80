"""Speculation changes no token under a cache of 8-bit floats either: on the CPU in float32, against
transformers with such a cache.
"""

import random
from pathlib import Path

import pytest
import safetensors.torch
import torch

from foredraft.types import SamplingParams
from testing.checkpoints import EOS, VOCAB_SIZE, make_checkpoint
from testing.engines import Job, running_engine
from testing.reference import Reference
from testing.rounding_cache import RoundingCache

SCALES = [(0.0625, 0.02), (0.5, 0.125), (0.03, 0.25)]
SCALES32 = tuple(map(tuple, torch.tensor(SCALES).tolist()))  # as a checkpoint keeps them
TREES = {
    "NONE": {},
    "NGRAM": {"speculative_num_draft_tokens": 8},
    "STANDALONE": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 7,
    },
}
# Pages run out, and prefixes are found in the cache.
PRESSURE = {"page_size": 8, "max_total_tokens": 8 * 24, "max_running_requests": 6}


class RoundedReference(Reference):
    """The rule in float64 over keys and values of 8 bits.

    A number between two of 8 bits falls to one of them by its last bits of float32, which differ
    between steps of other widths.
    """

    tie_gap = 5e-3

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        super().__init__(path)
        self._dtype = dtype

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        model = self._float64
        cache = RoundingCache(model.config, self._dtype, SCALES)
        output = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        return output.logits[0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eight-bit")
    target = make_checkpoint(folder / "target", "Qwen3ForCausalLM")
    make_checkpoint(folder / "draft", "Qwen3ForCausalLM", noise=0.05)
    file = target / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for layer, (keys, values) in enumerate(SCALES):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(keys)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(values)
    safetensors.torch.save_file(tensors, file)
    return folder


def jobs() -> list[Job]:
    """Prompts in families that share prefixes, greedy and sampled."""
    rng = random.Random(5)
    families = [[rng.randrange(2, VOCAB_SIZE) for _ in range(24)] for _ in range(4)]
    made = []
    for i in range(24):
        tail = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(1, 9))]
        prompt = rng.choice(families)[: rng.randrange(0, 25)] + tail * 2
        temperature = 1.0 if i % 4 == 3 else 0.0
        sampling = SamplingParams(
            temperature=temperature, seed=i, max_new_tokens=40, ignore_eos=True
        )
        made.append(Job(prompt, sampling))
    return made


def outputs(directory: Path, algorithm: str, **flags: object) -> list[list[int]]:
    settings = {**PRESSURE, **TREES[algorithm], **flags}
    if algorithm == "STANDALONE":
        settings["speculative_draft_model_path"] = str(directory / "draft")
    with running_engine(directory / "target", algorithm, **settings) as harness:
        results = harness.run(jobs())
        harness.check_nothing_left()
    assert all(result.finish is not None for result in results)
    accepted = sum(result.finish.accepted_tokens for result in results if result.finish)
    assert (accepted > 0) == (algorithm != "NONE")
    assert any(result.finish.cached_tokens for result in results if result.finish)
    return [result.tokens for result in results]


def test_speculation_changes_no_token(directory: Path) -> None:
    reference = RoundedReference(directory / "target", torch.float8_e4m3fn)
    found = {name: outputs(directory, name, kv_cache_dtype="fp8_e4m3") for name in TREES}
    ties = 0
    for tokens in found.values():
        for job, output in zip(jobs(), tokens, strict=True):
            ties += reference.check(job.prompt, output, job.sampling, frozenset({EOS}))
    assert ties <= 1
    assert ties or found["NGRAM"] == found["STANDALONE"] == found["NONE"]


def test_the_same_memory_holds_more_tokens(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify_service.kv_budget.available_host_bytes", lambda: 4 << 20)
    pages = {}
    for name in ("auto", "bfloat16", "fp8_e4m3"):
        flags = {"kv_cache_dtype": name, "max_total_tokens": None, "page_size": 8}
        with running_engine(directory / "target", **flags) as harness:
            pages[name] = harness.engine.limits.num_pages
            kv = harness.engine._executor._runner.kv
            assert kv.scales == (((1.0, 1.0),) * 3 if kv.data.element_size() > 1 else SCALES32)
    assert pages["bfloat16"] // 2 == pages["auto"]
    assert pages["fp8_e4m3"] // 4 == pages["auto"]
