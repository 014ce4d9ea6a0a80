"""Prompts of benchmarks that measure real acceptance: pieces of code and prose that the bundled
family was not trained on.
"""

import json
from pathlib import Path

from foredraft.text.tokenizer import Tokenizer

FILE = Path(__file__).with_name("accept_length_prompts.json")


def real_prompts(tokenizer: Tokenizer, longest: int = 200) -> list[list[int]]:
    """Returns token ids of each prompt, cut to at most `longest`."""
    return [tokenizer.encode(text)[:longest] for text in json.loads(FILE.read_text())]
