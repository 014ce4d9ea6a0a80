"""No kernel is compiled while a verifier serves: prompts of any length behind any prefix, beside
trees and without, on a GPU.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.compiled_kernels import compiled, compiled_since
from testing.engines import Job, running_engine
from testing.stack import eventually
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
CONTEXT = 12_000
# Of requests that come together.
LENGTHS = (
    (5,), (1100,), (3000,), (5000, 5), (9000,), (700, 800, 900), (2100, 1, 40), (4000, 4000, 64, 65),  # noqa: E501
    (11_000, 300), tuple(range(1, 9)), (2049,) * 8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "num_kv_heads"), [("NONE", 2), ("NONE", 1), ("NGRAM", 2), ("eager", 2)]
)
def test_steps_compile_nothing(algorithm: str, num_kv_heads: int, tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        vocab_size=6016,
        max_position_embeddings=16_384,
    )
    flags = {"disable_cuda_graph": True} if algorithm == "eager" else {}
    if algorithm == "NGRAM":
        flags = {"speculative_num_draft_tokens": 12}
    rng = random.Random(algorithm)
    with running_engine(
        path,
        "NGRAM" if algorithm == "NGRAM" else "NONE",
        device="cuda",
        dtype="bfloat16",
        max_total_tokens=70_000,
        context_length=CONTEXT,
        max_running_requests=8,
        **flags,
    ) as harness:
        harness.engine.draft_everything()
        if algorithm != "eager":  # steps with filters are captured while the engine idles
            graphs = harness.engine._executor._graphs  # type: ignore[attr-defined]
            eventually(lambda: not graphs._later)
            harness.engine.flush_cache().result()  # behind the last of them
        before = compiled()
        for lengths in LENGTHS:
            work = []
            for seed, length in enumerate(lengths):
                sampling = SamplingParams(
                    temperature=float(seed % 3 > 0),
                    top_p=0.9 if seed % 3 == 2 else 1.0,
                    seed=seed,
                    max_new_tokens=rng.choice((2, 30)),
                    ignore_eos=True,
                )
                phrase = [rng.randrange(2, 6000) for _ in range(rng.randint(1, 40))]
                prompt = (phrase * (1 + length // len(phrase)))[:length]
                work.append(Job(prompt, sampling))
            harness.run(work)
            assert compiled_since(before) == Counter(), lengths
        harness.check_nothing_left()
