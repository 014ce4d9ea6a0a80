"""Records which guesses of each draft are right, at each place of real texts, for the model of cold
starts (`testing/cold_start.py`).

    python -m benchmarks.record_guesses

Starts `foredraft serve` with the bundled model and each draft in turn, always drafting, and asks
for held-out pieces of code and prose, at temperature 0 and 1. Each text is then asked for again
from each of its tokens on; the provenance of these answers says how many leading guesses of the
first verification were right. A text is a function of its seed and its tokens so far, so these
answers are parts of the same text, which is checked. N-grams need no model: the drafter itself
reads the texts, one after another, and is asked at each token.

The file has a line for each text. A head or a small model has a digit for each place, its number of
right guesses. N-grams have a word for each place, in hexadecimal digits: the proposal's confidence,
its number of nodes, and the nodes on the path that was right. "00" is no proposal.
"""

import argparse
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.first_requests import fresh_server
from benchmarks.fresh_stacks import LONGEST, TOKENS, is_drafting
from benchmarks.real_prompts import FILE
from draft_service.drafters.seen_text import SeenText, rules_of
from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.speculation import SpeculationConfig
from foredraft.trees.draft_tree import DraftTree
from testing.cold_start import DRAFTS, GUESSES

TEMPERATURES = (0, 1)
Texts = list[tuple[list[int], list[int]]]  # token ids of each prompt, and of its continuation


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--texts", type=int, help="number of texts [all]")
    parser.add_argument(
        "--out", type=Path, default=GUESSES, help="[the table that `adaptive --cold` plays]"
    )
    args = parser.parse_args()
    prompts = [text[:LONGEST] for text in json.loads(FILE.read_text())[: args.texts]]
    found: dict[str, dict[str, list[str]]] = {draft.name: {} for draft in DRAFTS}
    texts: dict[int, Texts] = {}
    for draft in DRAFTS:
        if draft.has_matches:
            continue
        with fresh_server(draft.name, speculative_adaptive=False) as url:
            while not is_drafting(url):
                time.sleep(0.05)
            for temperature in TEMPERATURES:
                given = [_text(url, prompt, temperature, n) for n, prompt in enumerate(prompts)]
                if texts.setdefault(temperature, given) != given:
                    raise RuntimeError(f"{draft.name} changed a text")
                found[draft.name][str(temperature)] = [
                    _rights(url, *text, temperature, n, draft.nodes) for n, text in enumerate(given)
                ]
                print(draft.name, temperature, flush=True)
    for temperature in TEMPERATURES:
        found["NGRAM"][str(temperature)] = _ngrams(texts[temperature])
    content = {"command": "python -m benchmarks.record_guesses", **found}
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {args.out}")
    return 0


def _text(url: str, prompt: str, temperature: float, seed: int) -> tuple[list[int], list[int]]:
    """Returns the token ids of a prompt and of its continuation."""
    prompt_ids = _post(url, "/tokenize", {"prompt": prompt})["tokens"]
    [choice] = _choices(url, [prompt_ids], TOKENS, temperature, seed)
    return prompt_ids, choice["token_ids"]


def _rights(
    url: str, prompt: list[int], text: list[int], temperature: float, seed: int, most: int
) -> str:
    """Returns the number of right guesses behind each token of a text but the last."""
    known = [prompt + text[:place] for place in range(len(text) - 1)]
    # A prompt brings the first token, a verification one more than its right guesses.
    choices = _choices(url, known, most + 2, temperature, seed)
    for place, choice in enumerate(choices):
        tokens = choice["token_ids"]
        if tokens[: len(text) - place] != text[place : place + most + 2]:
            raise RuntimeError(f"text {seed} goes on otherwise from its token {place} on")
    verified = [next(s for s in choice["steps"] if s["drafted"]) for choice in choices]
    return "".join(str(len(step["accepted"])) for step in verified)


def _choices(
    url: str, prompts: list[list[int]], tokens: int, temperature: float, seed: int
) -> list[dict[str, Any]]:
    """Requests continuations of several prompts with one seed, end tokens or not."""
    body = {"prompt": prompts, "max_tokens": tokens, "temperature": temperature, "seed": seed}
    asked = {"ignore_eos": True, "return_token_ids": True, "return_provenance": True}
    choices: list[dict[str, Any]] = _post(url, "/v1/completions", body | asked)["choices"]
    return choices


def _post(url: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def _ngrams(texts: Texts) -> list[str]:
    """Returns what n-grams propose behind each token of each text but the last, in words."""
    config = SpeculationConfig(speculative_algorithm="NGRAM")
    rules = rules_of(config, config.speculative_ngram_min_match_window_size)
    seen = SeenText(rules, config.speculative_ngram_capacity)
    most, lines = config.tree_limits[2] - 1, []
    for slot, (prompt, text) in enumerate(texts):
        begin = draft_pb2.Begin(scope="all")
        seen.begin(draft_pb2.SequenceStep(slot=slot, begin=begin))
        seen.extend(slot, 0, prompt)
        words = []
        for place in range(len(text) - 1):
            seen.extend(slot, len(prompt) + place, text[place : place + 1])
            response = draft_pb2.StepResponse()
            if not seen.propose(slot, most, None, response):
                words.append("00")
                continue
            [one] = response.proposals
            right = DraftTree(tuple(one.tokens), tuple(one.parents)).follow(text[place + 1 :])
            digits = [one.confidence, len(one.tokens), *right]
            words.append("".join(f"{digit:x}" for digit in digits))
        seen.extend(slot, len(prompt) + len(text) - 1, text[-1:])
        lines.append(" ".join(words))
    return lines


if __name__ == "__main__":
    sys.exit(main())
