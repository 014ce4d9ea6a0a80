"""A cache of 8-bit keys and values on a GPU: kernels, graphs, trees and moves of KV together, and the CPU's beside them."""

import pytest
import torch

from foredraft.models.registry import resolve_model_path
from tests.e2e.test_gpu import DRAFTS, plain_jobs, texts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def demo():
    return resolve_model_path("foredraft-demo")


def test_speculation_changes_no_token(demo):
    work = plain_jobs(demo)
    head = resolve_model_path(DRAFTS["EAGLE3"]["speculative_draft_model_path"])
    tree = {
        "speculative_draft_model_path": str(head),
        "speculative_num_steps": 4,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 12,
    }
    plain = texts_of(demo, "NONE", "cuda", work, kv_cache_dtype="fp8_e4m3")
    others = [
        texts_of(demo, "EAGLE3", "cuda", work, kv_cache_dtype="fp8_e4m3", **tree),
        texts_of(demo, "NONE", "cuda", work, kv_cache_dtype="fp8_e4m3", disable_cuda_graph=True),
        texts_of(demo, "NONE", "cpu", work, kv_cache_dtype="fp8_e4m3"),
    ]
    # Where a number lies between two of 8 bits, its last bits of float32 decide; what that moves may decide a close race.
    same = [sum(a == b for a, b in zip(texts, plain, strict=True)) for texts in others]
    assert min(same) >= len(work) - 1, same


def test_8_bit_keys_and_values_of_bfloat16_weights(demo):
    """Prompts, plain steps and trees of bfloat16 take other tiles than those of float32."""
    work = plain_jobs(demo)
    flags = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "speculative_num_draft_tokens": 12}
    exact = texts_of(demo, "NONE", "cpu", work)
    found = texts_of(demo, "NGRAM", "cuda", work, **flags)
    firsts = sum(a[:4] == b[:4] for a, b in zip(found, exact, strict=True))
    assert firsts >= len(work) // 3, f"{firsts} of {len(work)} texts begin as without rounding"
