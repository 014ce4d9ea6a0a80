"""Log-probabilities of prompts on a GPU, beside running sequences and drafts, against the CPU's
own, in float32.
"""

from pathlib import Path

import pytest

from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engines import Job, Result, running_engine
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
TEXT = "Once upon a time there was a small house at the edge of a wood, and in it lived a girl. "


def work(path: Path) -> list[Job]:
    """Prompts of many lengths, some with a common beginning; every third asks for nothing of its
    prompt.
    """
    prompt = Tokenizer.from_dir(path).encode(TEXT * 12)
    return [
        Job(
            prompt[: 5 + 23 * i],
            SamplingParams(
                temperature=0.0,
                max_new_tokens=30,
                ignore_eos=True,
                prompt_logprobs=None if i % 3 == 2 else i % 5,
                prompt_logprobs_from=3 * (i % 2),
            ),
        )
        for i in range(12)
    ]


def results_of(path: Path, algorithm: str, device: str, **flags) -> list[Result]:
    settings = {"dtype": "float32", "max_total_tokens": 16384, "max_running_requests": 16, **flags}
    with running_engine(path, algorithm, device=device, draft_step_timeout=60.0, **settings) as h:
        results = [result for _ in range(2) for result in h.run(work(path), timeout=300)]
        h.check_nothing_left()
    return results


@pytest.mark.parametrize(("algorithm", "chunk"), [("NONE", 4096), ("NONE", 64), ("EAGLE3", 512)])
def test_they_are_those_of_the_cpu(algorithm: str, chunk: int) -> None:
    demo = resolve_model_path("foredraft-demo")
    flags = {"chunked_prefill_size": chunk}
    if algorithm != "NONE":
        flags["speculative_draft_model_path"] = str(resolve_model_path("foredraft-demo-eagle3"))
    got = results_of(demo, algorithm, "cuda", **flags)
    for job, ours, theirs in zip(
        [*work(demo), *work(demo)], got, results_of(demo, "NONE", "cpu"), strict=True
    ):
        assert ours.tokens == theirs.tokens
        wanted = job.sampling.prompt_logprobs is not None
        count = len(job.prompt) - 1 - job.sampling.prompt_logprobs_from
        assert len(ours.prompt_logprobs) == wanted * count
        for one, other in zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=2e-3)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=2e-3)
