"""Tokens per second with each draft and with several together, on kinds of text that suit one or
the other.

    python -m benchmarks.several_drafts --rounds 3

The bundled model and its drafts, engines in this process, draft services beside it, n-grams of the
request alone. All engines take turns on the same requests, so that a busy machine slows all alike.
Prints medians as factors of plain decoding, or of whatever --kinds names first.
"""

import argparse
import contextlib
import logging
import random
import statistics
import time

from benchmarks.gpu.needed import need_gpu
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engines import Job, running_engine

KINDS = ("NONE", "NGRAM", "EAGLE3", "EAGLE3,NGRAM")
LIST = " ".join(f"item {i}: value {random.Random(i).randrange(1000)};" for i in range(20))
TEXTS = {
    "prose": "Once upon a time there was a little girl named Lily. She lived with her mother and",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return fib",
    "copy": f"{LIST} {LIST[:200]}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--kinds", nargs="+", default=list(KINDS), help="the first is what others are compared with"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    need_gpu(args.device)
    logging.disable(logging.INFO)
    target = resolve_model_path("foredraft-demo")
    tokenizer = Tokenizer.from_dir(target)
    print(f"| batch | text | temperature | {' | '.join(args.kinds)} |")
    print("| --- " * (3 + len(args.kinds)) + "|")
    with contextlib.ExitStack() as stack:
        engines = {}
        for kind in args.kinds:
            models = [
                f"{name}={BUNDLED_DRAFTS[name]}"
                for name in kind.split(",")
                if name in BUNDLED_DRAFTS
            ]
            engines[kind] = stack.enter_context(
                running_engine(
                    target,
                    kind,
                    device=args.device,
                    speculative_adaptive=True,
                    speculative_ngram_scope="request",
                    speculative_draft_model_path=",".join(models),
                )
            )
        for batch in args.batch:
            for name, text in TEXTS.items():
                for temperature in (0.0, 0.8):
                    jobs = [
                        Job(
                            tokenizer.encode(text),
                            SamplingParams(
                                temperature=temperature,
                                seed=i,
                                max_new_tokens=args.tokens,
                                ignore_eos=True,
                            ),
                        )
                        for i in range(batch)
                    ]
                    seconds: dict[str, list[float]] = {kind: [] for kind in args.kinds}
                    for _ in range(args.rounds):
                        for kind, harness in engines.items():
                            started = time.perf_counter()
                            harness.run(jobs)
                            seconds[kind].append(time.perf_counter() - started)
                    plain = statistics.median(seconds[args.kinds[0]])
                    rates = (
                        f"{plain / statistics.median(seconds[kind]):.2f}" for kind in args.kinds
                    )
                    print(f"| {batch} | {name} | {temperature} | {' | '.join(rates)} |", flush=True)


if __name__ == "__main__":
    main()
