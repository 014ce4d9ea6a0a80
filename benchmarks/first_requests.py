"""The first requests to fresh servers of the bundled model, with each of its drafts:
tokens per second and tokens per pass, on which the default of `foredraft serve` rests.

    python -m benchmarks.first_requests --rounds 3

A round starts `foredraft serve` anew for each draft, in turn, with that flag alone; after the last
of them stopped the next begins. Each server gets the README's request and one for each of five
held-out pieces of code, one after the other, 64 tokens each. Time is the client's, prompt included;
tokens per pass come from the answer's `usage`. A speed is divided by plain decoding's for the same
prompt in the same round. Tables have medians over rounds.
"""

import argparse
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.real_prompts import FILE
from benchmarks.results_folder import results_folder
from foredraft.cli import serve_config, stack
from foredraft.cli.serve import FIRST_PROMPT

PLAIN = "NONE"
# The algorithm and its draft's name beside the model's name.
DRAFTS = {
    PLAIN: "",
    "NGRAM": "",
    "EAGLE3": "foredraft-demo-eagle3",
    "EAGLE": "foredraft-demo-eagle",
    "MTP": "foredraft-demo-mtp",
    "STANDALONE": "foredraft-demo-draft",
    "EAGLE3,NGRAM": "foredraft-demo-eagle3",
}
HELD_OUT = (0, 3, 6, 10, 13)  # pieces of code among the prompts of `accept_length`
TOKENS = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: its tokens, seconds from sending to the last byte, and accepted drafts."""

    tokens: int
    seconds: float
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def per_pass(self) -> float:
        """Tokens per pass of the model, of those after the first."""
        return (self.tokens - 1) / max(self.tokens - 1 - self.accepted, 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    if PLAIN not in args.drafts:
        parser.error(f"--drafts must have {PLAIN}, which the others are compared with")
    rounds: list[dict[str, list[Answer]]] = []
    for number in range(args.rounds):
        # Every other round goes backwards, so that no draft always follows the same one.
        drafts = args.drafts if number % 2 == 0 else args.drafts[::-1]
        rounds.append({draft: _first_requests(draft, args.temperature) for draft in drafts})
        print(_tables(rounds, args.drafts), flush=True)
    kept = [
        {draft: [asdict(one) for one in answers] for draft, answers in r.items()} for r in rounds
    ]
    path = args.out / f"first_requests_{args.temperature}.json"
    path.write_text(json.dumps(kept, indent=1))
    print(f"wrote {path}")
    return 0


@contextmanager
def fresh_server(draft: str, **flags: Any) -> Iterator[str]:
    """Starts `foredraft serve` with the bundled model on the CPU; yields its HTTP address.

    Args:
        draft: Key of DRAFTS.
        flags: More values of flags, by field.
    """
    values: dict[str, Any] = {"speculative_algorithm": draft, "device": "cpu", **flags}
    if DRAFTS[draft]:
        values["speculative_draft_model_path"] = DRAFTS[draft]
    values |= {"port": 0, "grpc_port": 0, "log_level": "warning"}
    with stack.make_supervisor(serve_config.resolve_models(values)) as services:
        services.wait_healthy()
        yield services.urls["http"]


def ask(url: str, prompt: str, tokens: int, temperature: float, seed: int = 1) -> Answer:
    """Requests so many tokens, end tokens or not: texts of other lengths cannot be compared."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": temperature}
    data = json.dumps({**body, "seed": seed, "ignore_eos": True}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        usage = json.load(answer)["usage"]
    seconds = time.perf_counter() - began
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    return Answer(usage["completion_tokens"], seconds, accepted)


def _first_requests(draft: str, temperature: float) -> list[Answer]:
    prompts = [FIRST_PROMPT, *(json.loads(FILE.read_text())[index] for index in HELD_OUT)]
    with fresh_server(draft) as url:
        answers = [ask(url, prompt, TOKENS, temperature) for prompt in prompts]
    print(draft, " ".join(f"{one.rate:.0f}/{one.per_pass:.1f}" for one in answers), flush=True)
    return answers


def _tables(rounds: list[dict[str, list[Answer]]], drafts: list[str]) -> str:
    heads = ["README", *(f"code {number}" for number in range(1, len(HELD_OUT) + 1)), "all"]
    lines = ["| | " + " | ".join(heads) + " |", "| --- " * (len(heads) + 1) + "|"]
    for draft in drafts:
        cells = []
        for place in range(len(heads)):
            speeds, passes = [], []
            for r in rounds:
                ours, plain = (_cut(r[name], place) for name in (draft, PLAIN))
                speeds.append(ours.rate / plain.rate)
                passes.append(ours.per_pass)
            cells.append(f"{statistics.median(speeds):.2f} ({statistics.median(passes):.1f})")
        lines.append(f"| {draft} | " + " | ".join(cells) + " |")
    plain_rates = [_cut(r[PLAIN], len(HELD_OUT) + 1).rate for r in rounds]
    lines.append(f"plain: {', '.join(f'{rate:.1f}' for rate in plain_rates)} tokens/s")
    return "\n".join(lines)


def _cut(answers: list[Answer], place: int) -> Answer:
    """The answer at a place; behind the last, all of them as one."""
    if place < len(answers):
        return answers[place]
    tokens = sum(one.tokens for one in answers)
    return Answer(
        tokens,
        sum(one.seconds for one in answers),
        # Each answer's first token needs no pass of a draft; of the sum only one is taken off.
        sum(one.accepted for one in answers) + len(answers) - 1,
    )


if __name__ == "__main__":
    sys.exit(main())
