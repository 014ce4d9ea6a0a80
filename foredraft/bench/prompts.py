"""Sources of prompts:

JSONL files, random words of a given length, and a mix of small tasks. All are repeatable by seed.
"""

# Word lists read better as text.
# ruff: noqa: SIM905

import contextlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError

Message = Mapping[str, str]

WORDS = (
    "the of and to in is was for on that with as by at from his an were are which this also be has"
    " or had its one two time year day way city water music house name world part place work life"
    " school state family group country problem hand system program question number night point"
    " home area money story fact month lot right study book eye job word business issue side kind"
    " head service friend father power hour game line end member law car community president team"
    " minute idea body information back parent face level office door health person art war history"
    " party result change morning reason research girl guy moment air teacher force education foot"
    " boy age policy process market river bridge garden window winter summer letter paper table"
    " chair mountain island ship train road field stone light make take come see know get give find"
    " think tell become show leave feel put bring begin keep hold write stand hear let mean set"
    " meet run pay sit speak lie lead read grow lose fall send build understand draw break spend"
    " cut rise drive buy wear choose new good high old great big small large young early long"
    " little important bad real best free able sure clear close open full hard easy low late deep"
    " strong whole common simple cold warm quiet bright dark"
).split()

_TASKS = (
    "def {verb}_{noun}s({noun}s, limit={number}):\n    ",
    "class {Noun}{Agent}:\n    def __init__(self, {noun}s, {other}=None):\n        ",
    (
        "Write a Python function that reads a list of {noun}s and returns the {number} with the"
        " largest {other}.\n"
    ),
    "Once upon a time there was a {adjective} {noun} near the {other}. One {season} morning ",
    "The most important thing to know about a {noun} is ",
    "A numbered list of {number} ways to {verb} a {noun}:\n1. ",
    "| {noun} | {other} | number |\n| --- | --- | --- |\n| {adjective} | {season} | {number} |\n| ",
    "Dear {Noun} team,\n\nI am writing about the {adjective} {other} that you sent in {season}. ",
    (
        "import json\n\nwith open('{noun}s.json') as file:\n    {noun}s = json.load(file)\n\nfor"
        " {noun} in {noun}s:\n    "
    ),
    (
        "Question: if a {noun} costs {number} coins and a {other} costs {number2}, what do"
        " {number3} of each cost?\nAnswer: "
    ),
    "How to {verb} a {adjective} {noun}\n\nFirst, ",
    '{{"{noun}": {{"{other}": {number}, "{season}": {number2}}}, "{adjective}": [{number3}, ',
)
_SLOTS = {
    "verb": (
        "sort count merge clean measure find move paint repair store share split open pack".split()
    ),
    "noun": (
        "book river ship garden letter train market window stone bridge lamp clock map boat tree"
        " wheel".split()
    ),
    "other": (
        "price weight length colour height school road island table storm shadow harbour engine"
        " field".split()
    ),
    "adjective": (
        "small old bright quiet heavy cold simple strange clean broken round tall green".split()
    ),
    "season": "spring summer autumn winter".split(),
    "Agent": "Store Reader Index Queue Cache Parser Report Counter".split(),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text, and as a conversation where its file had one."""

    text: str
    messages: tuple[Message, ...] = ()

    @property
    def conversation(self) -> list[Message]:
        """Returns the messages of a chat completion."""
        return list(self.messages) or [{"role": "user", "content": self.text}]


class PromptSource:
    """An endless supply of prompts.

    Attributes:
        size: Different prompts that it has; None without end.
        num_taken: Prompts that were taken.
    """

    def __init__(self, prompts: Iterator[Prompt], size: int | None = None) -> None:
        self._prompts = prompts
        self.size = size
        self.num_taken = 0

    @property
    def repeats(self) -> bool:
        """Whether a prompt was taken twice: prefix caches and n-gram drafts then look better
        than they are.
        """
        return self.size is not None and self.num_taken > self.size

    def take(self) -> Prompt:
        """Returns the next prompt."""
        self.num_taken += 1
        return next(self._prompts)


def from_file(path: Path, seed: int | None = None, part: tuple[int, int] = (0, 1)) -> PromptSource:
    """Returns prompts of a JSONL file, in its order (or shuffled by a seed), again and again.

    Args:
        part: Number of a case and number of cases, which share no prompt.

    Raises:
        ConfigError: See `read_file`; or there are fewer prompts than cases.
    """
    prompts = read_file(path)
    if seed is not None:
        random.Random(seed).shuffle(prompts)
    case, num_cases = part
    if len(prompts) < num_cases:
        raise ConfigError(
            f"--dataset-path {path}: {len(prompts)} prompts are too few for {num_cases} cases, each"
            " with prompts of its own"
        )
    prompts = prompts[case::num_cases]
    return PromptSource(itertools.cycle(prompts), len(prompts))


def read_file(path: Path) -> list[Prompt]:
    """Reads the prompts of a JSONL file, or of a JSON array of such objects.

    An object's prompt is the first entry of `turns` or `conversations` (ShareGPT's), or `messages`,
    `prompt` or `text`.

    Raises:
        ConfigError: The file cannot be read, or a line has none of them; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: {error}") from None
    prompts = []
    for number, line in enumerate(_objects(text), 1):
        if not line:
            continue
        try:
            prompts.append(_parse(json.loads(line) if isinstance(line, str) else line))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            reason = (
                f"line {number}: {error or 'no turns, conversations, messages, prompt or text'}"
            )
            raise ConfigError(f"--dataset-path {path}: {reason}") from None
    if not prompts:
        raise ConfigError(f"--dataset-path {path}: it is empty")
    return prompts


def _objects(text: str) -> list[Any]:
    """Returns the lines of JSONL, or the elements of a JSON array."""
    if text.lstrip()[:1] == "[":
        with contextlib.suppress(ValueError):
            return list(json.loads(text))
    # Not splitlines: a JSON text may hold other ends of lines, U+2028 among them.
    return [line.strip() for line in text.split("\n")]


def _parse(value: Any) -> Prompt:
    if isinstance(value, str):
        return Prompt(value)
    if not isinstance(value, dict):
        raise ValueError("neither an object nor a string")
    if "messages" in value:
        try:
            messages = tuple(
                {"role": m["role"], "content": m["content"]} for m in value["messages"]
            )
            text = "\n\n".join(m["content"] for m in messages)
        except (TypeError, KeyError):
            raise ValueError("messages is no list of a role and a content, a text, each") from None
        if not text:
            raise ValueError("messages holds no text")
        return Prompt(text, messages)
    for name in ("turns", "conversations", "prompt", "text"):
        if name in value:
            text = value[name][0] if name in ("turns", "conversations") else value[name]
            if name == "conversations":
                text = text["value"]
            if isinstance(text, str) and text:
                return Prompt(text)
            raise ValueError(f"{name} holds no text")
    raise ValueError("no turns, conversations, messages, prompt or text")


def tasks(seed: int) -> PromptSource:
    """Returns openings of code, prose, lists, tables and JSON, each different, which a base
    model can continue.
    """
    return PromptSource(_task(random.Random(f"{seed}/{i}"), i) for i in itertools.count())


def _task(generator: random.Random, index: int) -> Prompt:
    slots: dict[str, Any] = {name: generator.choice(words) for name, words in _SLOTS.items()}
    for name in ("number", "number2", "number3"):
        slots[name] = generator.randrange(2, 1000)
    slots["Noun"] = slots["noun"].capitalize()
    return Prompt(_TASKS[index % len(_TASKS)].format(**slots))


@dataclass(slots=True)
class WordLength:
    """Estimates the number of tokens of random words from a server's counts.

    One word is one token at first.
    """

    per_word: float = 1.0
    fixed: float = 0.0

    def fit(self, words: tuple[int, int], tokens: tuple[int, int]) -> None:
        """Fits two measured lengths; the chat template's tokens are the constant part."""
        per_word = (tokens[1] - tokens[0]) / (words[1] - words[0])
        if per_word > 0:
            self.per_word, self.fixed = per_word, tokens[0] - per_word * words[0]

    def num_words(self, num_tokens: int) -> int:
        """Returns the number of words for a prompt of about this many tokens; at least one."""
        return max(1, round((num_tokens - self.fixed) / self.per_word))


def random_words(seed: int, shortest: int, longest: int, length: WordLength) -> PromptSource:
    """Returns prompts of random words with about `shortest` to `longest` tokens, uniformly."""

    def prompt(index: int) -> Prompt:
        generator = random.Random(f"{seed}/{index}")
        return words(generator, length.num_words(generator.randint(shortest, longest)))

    return PromptSource(prompt(i) for i in itertools.count())


def words(generator: random.Random, count: int) -> Prompt:
    """Returns a prompt of `count` random words."""
    return Prompt(" ".join(generator.choices(WORDS, k=count)))


def shared_prefixes(
    seed: int, num_groups: int, prefix_tokens: int, question_tokens: int, length: WordLength
) -> PromptSource:
    """Returns questions of random words behind one of `num_groups` long openings, in turn.

    Prefix caches speed up such prompts.
    """

    def prompt(index: int) -> Prompt:
        group = index % num_groups
        opening = words(random.Random(f"{seed}/group/{group}"), length.num_words(prefix_tokens))
        question = words(random.Random(f"{seed}/{index}"), length.num_words(question_tokens))
        return Prompt(f"{opening.text}\n\n{question.text}")

    return PromptSource(prompt(i) for i in itertools.count())
