"""With `--exactness strict` texts in 16 bits are the same tokens, whatever drafts, steps and chunks
there are.
"""

from pathlib import Path

import pytest

from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from testing.engines import Job, running_engine
from testing.family_texts import TEXTS, draft_flags, jobs, plain_jobs, texts_of
from testing.triton_device import needs_gpu
from verify_service.executor.captured import shared_keys
from verify_service.metrics import SHARED_KEY_STEPS

pytestmark = [pytest.mark.gpu, needs_gpu]

# A pool so small that sequences preempt each other, and chunks that end anywhere.
PRESSURE = {"max_total_tokens": 448, "chunked_prefill_size": 24, "max_running_requests": 6}


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(demo: Path, dtype: str) -> list[list[int]]:
    return texts_of(demo, "NONE", "cuda", jobs(demo, 160), dtype=dtype)


@pytest.mark.parametrize(
    "flags",
    [{"max_running_requests": 1}, {"disable_cuda_graph": True}, PRESSURE],
    ids=["alone", "eager", "under pressure"],
)
def test_steps_change_no_token(demo, expected, dtype, flags):
    assert texts_of(demo, "NONE", "cuda", jobs(demo, 160), dtype=dtype, **flags) == expected


@pytest.mark.parametrize("shape", [(3, 1, 4), (5, 4, 16)], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["NGRAM", *BUNDLED_DRAFTS])
def test_speculation_changes_no_token(demo, expected, dtype, algorithm, shape):
    flags = draft_flags(algorithm, shape)
    assert texts_of(demo, algorithm, "cuda", jobs(demo, 160), dtype=dtype, **flags) == expected


def test_speculation_under_pressure_changes_no_token(demo, expected, dtype):
    flags = draft_flags("EAGLE3", (5, 4, 16)) | PRESSURE
    assert texts_of(demo, "EAGLE3", "cuda", jobs(demo, 160), dtype=dtype, **flags) == expected


def test_cached_prefixes_and_company_change_no_token(demo, expected, dtype):
    flags = draft_flags("EAGLE3", (4, 4, 12))
    work = jobs(demo, 160)
    settings = {"device": "cuda", "dtype": dtype, "max_total_tokens": 16384, **flags}
    with running_engine(demo, "EAGLE3", draft_step_timeout=60.0, **settings) as harness:
        for order in (work, work[::-1], work[3:] + work[:3]):
            results = harness.run(order, timeout=300)
            found = {id(job): result.tokens for job, result in zip(order, results, strict=True)}
            assert [found[id(job)] for job in work] == expected


@pytest.mark.parametrize("kv_type", ["fp8_e4m3", "fp8_e5m2"])
def test_keys_and_values_of_8_bits_change_no_token_either(demo, kv_type):
    settings = {"dtype": "bfloat16", "kv_cache_dtype": kv_type}
    work = jobs(demo, 160)
    expected = texts_of(demo, "NONE", "cuda", work, **settings)
    for algorithm, shape in (("NGRAM", (3, 1, 4)), ("EAGLE3", (5, 4, 16))):
        flags = draft_flags(algorithm, shape) | PRESSURE
        assert texts_of(demo, algorithm, "cuda", work, **settings, **flags) == expected


def with_beginnings(demo: Path, num_tokens: int) -> list[Job]:
    """Returns jobs: a third begins with 520 common tokens, a third with 330, a third with none."""
    beginning = Tokenizer.from_dir(demo).encode("\n".join(TEXTS)) * 9
    lengths = (520, 330, 0)
    return [
        Job([*beginning[: lengths[i % 3]], *job.prompt], job.sampling)
        for i, job in enumerate(plain_jobs(demo, num_tokens, spread=3))
    ]


@pytest.fixture(scope="module")
def expected_behind(demo: Path, dtype: str) -> list[list[int]]:
    work = with_beginnings(demo, 96)
    return texts_of(demo, "NONE", "cuda", work, dtype=dtype, disable_radix_cache=True)


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [("NONE", (0, 0, 0)), ("EAGLE3", (3, 1, 4)), ("EAGLE3", (5, 4, 16)), ("NGRAM", (3, 1, 4))],
)
def test_a_common_beginning_that_is_read_once_changes_no_token(
    demo, expected_behind, dtype, algorithm, shape, monkeypatch
):
    monkeypatch.setattr(shared_keys, "LEAST_BYTES", 0)
    flags = {} if algorithm == "NONE" else draft_flags(algorithm, shape)
    before = SHARED_KEY_STEPS._value.get()
    work = with_beginnings(demo, 96)
    assert texts_of(demo, algorithm, "cuda", work, dtype=dtype, **flags) == expected_behind
    assert SHARED_KEY_STEPS._value.get() - before > 10
