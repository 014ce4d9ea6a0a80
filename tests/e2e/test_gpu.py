"""The GPU path against the CPU's: captured graphs, Triton kernels and drafts on the device, in
float32.
"""

from pathlib import Path

import pytest

from foredraft.config.options import to_flags
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.types import SamplingParams
from testing.checkpoints import ARCHITECTURES, make_checkpoint
from testing.drafts import DraftProcess
from testing.engines import Job, running_engine
from testing.family_texts import assert_same, draft_flags, jobs, plain_jobs, texts_of
from testing.triton_device import needs_gpu
from verify_service.metrics import OVERLAPPED_STEPS

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


@pytest.fixture(scope="module")
def expected(demo: Path) -> list[list[int]]:
    return texts_of(demo, "NONE", "cpu")


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_plain_decoding_equals_the_cpus(demo, expected, graphs):
    assert_same(demo, texts_of(demo, "NONE", "cuda", disable_cuda_graph=not graphs), expected)


@pytest.mark.parametrize("shape", [(3, 1, 4), (4, 4, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["NGRAM", *BUNDLED_DRAFTS])
def test_speculation_changes_no_token(demo, expected, algorithm, shape):
    flags = draft_flags(algorithm, shape)
    assert_same(demo, texts_of(demo, algorithm, "cuda", **flags), expected)


@pytest.fixture(scope="module")
def expected_of_long(demo: Path) -> list[list[int]]:
    return texts_of(demo, "NONE", "cpu", plain_jobs(demo, 64, 8))


@pytest.mark.parametrize("shape", [(3, 1, 4), (4, 4, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["NONE", "STANDALONE", "EAGLE3", "EAGLE", "MTP"])
def test_steps_that_run_ahead_change_no_token(demo, expected_of_long, algorithm, shape):
    flags = {}
    if algorithm != "NONE":
        flags = {**draft_flags(algorithm, shape), "require_transport": "cuda_ipc"}
    work = plain_jobs(demo, 64, 8)
    before = OVERLAPPED_STEPS._value.get()
    got = texts_of(demo, algorithm, "cuda", work, **flags)
    # Sequences end one after the other, and each end is found out one step late.
    assert OVERLAPPED_STEPS._value.get() - before > 20
    assert_same(demo, got, expected_of_long, work)


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "inline"])
def test_features_by_the_verifier_change_no_token(demo, expected_of_long, transport):
    work = plain_jobs(demo, 64, 8)
    flags = {**draft_flags("EAGLE3", (3, 1, 4)), "require_transport": transport}
    for where in ("verifier", "draft"):
        got = texts_of(demo, "EAGLE3", "cuda", work, draft_projection=where, **flags)
        assert_same(demo, got, expected_of_long, work)


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3"])
def test_adaptive_speculation_changes_no_token(demo, expected_of_long, algorithm):
    work = plain_jobs(demo, 64, 8)
    flags = draft_flags(algorithm, (5, 4, 16))
    got = texts_of(demo, algorithm, "cuda", work, speculative_adaptive=True, **flags)
    assert_same(demo, got, expected_of_long, work)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
def test_a_draft_that_comes_after_the_start_is_verified(demo, expected, algorithm, adaptive):
    flags = {"device": "cuda", "dtype": "float32"}
    if algorithm != "NGRAM":
        flags["speculative_draft_model_path"] = BUNDLED_DRAFTS[algorithm]
    target = {"model_path": str(demo), "speculative_algorithm": algorithm}
    draft = DraftProcess(*to_flags(flags | target))
    settings = {
        **flags,
        "draft": (draft.target,),
        "draft_wait": 0.1,
        "draft_step_timeout": 60.0,
        "max_total_tokens": 16384,
        "max_running_requests": 16,
        "speculative_adaptive": adaptive,
    }
    with running_engine(demo, algorithm, wait=False, **settings) as harness:
        assert_same(demo, [result.tokens for result in harness.run(jobs(demo))], expected)
        with draft:
            harness.wait_for_draft()
            for _ in range(3):
                results = harness.run(jobs(demo), timeout=300)
                assert_same(demo, [result.tokens for result in results], expected)
            accepted = sum(result.finish.accepted_tokens for result in results)
            assert accepted > 0 or adaptive
            harness.check_nothing_left()


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_every_architecture_equals_the_cpus(architecture, tmp_path):
    path = make_checkpoint(tmp_path, architecture)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    prompts = [[(7 * i + j * j) % 97 for j in range(5 + 9 * i)] for i in range(4)]

    def run(device: str, **flags) -> list[list[int]]:
        settings = {"device": device, "dtype": "float32", "chunked_prefill_size": 16, **flags}
        with running_engine(path, "NONE", **settings) as harness:
            return [r.tokens for r in harness.run([Job(p, sampling) for p in prompts])]

    assert run("cuda") == run("cpu")
