"""Prompts of benchmarks that measure real acceptance: pieces of code and prose that the bundled
family was not trained on.
"""

import json
from pathlib import Path

from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engines import Job

FILE = Path(__file__).with_name("accept_length_prompts.json")


def real_prompts(tokenizer: Tokenizer, longest: int = 200) -> list[list[int]]:
    """Returns token ids of each prompt, cut to at most `longest`."""
    return [tokenizer.encode(text)[:longest] for text in json.loads(FILE.read_text())]


def first_turns(file: Path, most: int) -> list[str]:
    """Returns the first turn of each of a file's first lines: JSON with `turns`.

    Ends the program with the reason where the file holds something else.
    """
    try:
        return [json.loads(line)["turns"][0] for line in file.read_text().splitlines()[:most]]
    except OSError as error:
        raise SystemExit(f"--prompts {file}: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise SystemExit(f"--prompts {file}: not lines of JSON with `turns`") from None


def seeded_jobs(prompts: list[list[int]], temperature: float, tokens: int) -> list[Job]:
    """Returns a request of `tokens` output tokens for each prompt, each with a seed of its own."""
    return [
        Job(
            prompt,
            SamplingParams(
                temperature=temperature, seed=seed, max_new_tokens=tokens, ignore_eos=True
            ),
        )
        for seed, prompt in enumerate(prompts)
    ]
