"""Steps compute hidden states of all rows of a prompt only where somebody reads them."""

from collections.abc import Sequence
from typing import Any

import pytest

from foredraft.models.registry import resolve_model_path
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ForwardOutput, ModelRunner
from foredraft.types import SamplingParams
from testing.engines import Job, running_engine

LENGTH = 100


@pytest.mark.parametrize(
    ("draft", "options", "reads_all"),
    [
        ("NONE", {}, False),
        ("NONE", {"prompt_logprobs": 1}, True),
        ("EAGLE3", {}, False),
        ("EAGLE", {}, True),
        ("MTP", {}, True),
    ],
)
def test_who_reads_hidden_states_gets_them(
    monkeypatch: pytest.MonkeyPatch, draft: str, options: dict[str, Any], reads_all: bool
) -> None:
    seen = []
    forward = ModelRunner.forward

    def noted(
        runner: ModelRunner, rows: Sequence[SequenceRows], *args: Any, **kinds: Any
    ) -> ForwardOutput:
        output = forward(runner, rows, *args, **kinds)
        if sum(len(one.tokens) for one in rows) == LENGTH:
            seen.append(len(output.hidden))
        return output

    monkeypatch.setattr(ModelRunner, "forward", noted)
    path = resolve_model_path("foredraft-demo")
    heads = f"{path}-{draft.lower()}"
    flags = {} if draft == "NONE" else {"speculative_draft_model_path": heads}
    prompt = [2 + i % 90 for i in range(LENGTH)]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=4, **options)
    with running_engine(path, draft, max_total_tokens=2048, **flags) as harness:
        harness.run([Job(prompt, sampling)])
    assert seen == [LENGTH if reads_all else 1]
