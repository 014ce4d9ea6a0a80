"""Measures the wait for n-gram trees where text is copied: requested while the target computes, or
not.

    python -m benchmarks.draft_ahead --rounds 5

The bundled model is made to repeat a token, so that every proposal is right; engine in this
process, draft service beside it. Each round decodes the same requests both ways. Prints
milliseconds between the schedule of a step and its forward, and tokens/s.
"""

import argparse
import statistics
import time
from pathlib import Path
from unittest import mock

from foredraft.models.registry import resolve_model_path
from foredraft.types import SamplingParams
from testing.engines import Harness, Job, running_engine
from verify_service.drafts.draft_ahead import DraftAhead
from verify_service.metrics import DRAFT_WAIT_SECONDS, DRAFTS_AHEAD

TOKEN = 100


def run(harness: Harness, batch: int, num_tokens: int) -> tuple[float, float, float]:
    """Returns the mean wait in ms, tokens/s, and the share of steps that had their trees
    already.
    """
    sampling = SamplingParams(
        temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True, logit_bias={TOKEN: 100.0}
    )
    waited, steps = _waits()
    ahead, started = DRAFTS_AHEAD._value.get(), time.perf_counter()
    harness.run([Job([TOKEN + 1 + i, TOKEN], sampling) for i in range(batch)])
    seconds = time.perf_counter() - started
    all_waited, all_steps = _waits()
    count = all_steps - steps
    share = (DRAFTS_AHEAD._value.get() - ahead) / count
    return 1e3 * (all_waited - waited) / count, batch * num_tokens / seconds, share


def _waits() -> tuple[float, float]:
    samples = {s.name: s.value for s in DRAFT_WAIT_SECONDS.collect()[0].samples if not s.labels}
    name = "foredraft_draft_wait_seconds"
    return samples[f"{name}_sum"], samples[f"{name}_count"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="foredraft-demo")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    path: Path = resolve_model_path(args.model)
    print("| batch | trees asked for | wait ms | tokens/s | steps without a wait |")
    print("| --- | --- | --- | --- | --- |")
    with running_engine(path, "NGRAM", max_total_tokens=8192) as harness:
        for batch in args.batch:
            run(harness, batch, 100)
            found: dict[str, list[tuple[float, float, float]]] = {"in turn": [], "ahead": []}
            for _ in range(args.rounds):
                with mock.patch.object(DraftAhead, "take", return_value=None):
                    found["in turn"].append(run(harness, batch, args.tokens))
                found["ahead"].append(run(harness, batch, args.tokens))
            for way, rows in found.items():
                wait, rate, share = (
                    statistics.median(column) for column in zip(*rows, strict=True)
                )
                print(f"| {batch} | {way} | {wait:.2f} | {rate:.0f} | {share:.0%} |")


if __name__ == "__main__":
    main()
