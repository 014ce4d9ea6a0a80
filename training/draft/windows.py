"""Makes the windows a head is trained on: text that the target wrote, and plain text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from foredraft.errors import ConfigError
from training.draft.config import DraftTrainingConfig
from training.draft.target import Target
from training.export import save_array, write_json
from training.progress import Progress, say
from training.text_data import Document


def encode_stream(
    documents: Sequence[Document], tokenizer: Tokenizer, start: Sequence[int]
) -> np.ndarray:
    """Encodes documents into one stream of tokens, with `start` tokens before each, int32.

    Raises:
        ConfigError: There are no documents.
    """
    if not documents:
        raise ConfigError("--data: there is no text")
    parts: list[np.ndarray] = []
    for first in range(0, len(documents), 4096):
        texts = [document.text for document in documents[first : first + 4096]]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        parts.extend(np.array([*start, *encoding.ids], dtype=np.int32) for encoding in encodings)
    return np.concatenate(parts)


def check_length(stream: np.ndarray, length: int) -> None:
    """Raises ConfigError where a stream is too short for windows of a length."""
    if len(stream) <= length:
        raise ConfigError(f"{len(stream)} tokens of text are too few for windows of {length}")


def check_vocabulary(tokens: np.ndarray, flag: str, size: int) -> None:
    """Raises ConfigError where a text has tokens that a target with `size` tokens lacks."""
    if tokens.max() >= size:
        raise ConfigError(
            f"{flag}: the text has token {tokens.max()}, and the target's vocabulary ids 0 to"
            f" {size - 1}; leave such text out"
        )


def cut(stream: np.ndarray, count: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Cuts `count` random windows from a stream, int32 [count, length]."""
    check_length(stream, length)
    starts = generator.integers(0, len(stream) - length, count)
    return stream[starts[:, None] + np.arange(length)]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Which windows the target writes.

    Attributes:
        count: Number of windows.
        prompt, length: Number of tokens of a prompt and of a whole window.
        batch: Number of windows written at once.
        temperatures: Sampling temperatures used in turn, one for a batch; 0 is greedy.
        seed: Seed of prompts and sampling.
    """

    count: int
    prompt: int
    length: int
    batch: int
    temperatures: Sequence[float]
    seed: int


def written_windows(
    target: Target, stream: np.ndarray, start: Sequence[int], config: DraftTrainingConfig
) -> np.ndarray:
    """Has the target write a run's windows, behind prompts from the stream and from nothing, int32
    [count, length].
    """
    folder = config.generated or config.out
    folder.mkdir(parents=True, exist_ok=True)
    plan = WindowPlan(
        count=config.windows,
        prompt=config.prompt,
        length=config.window,
        batch=config.generate_batch,
        temperatures=config.temperatures,
        seed=config.seed,
    )
    windows = write_windows(target, stream, folder, plan)
    if not config.free_windows:
        return windows
    (folder / "free").mkdir(exist_ok=True)
    begin = np.full(2, start[0] if start else 0, dtype=np.int32)
    plan = replace(plan, count=config.free_windows, prompt=1, temperatures=(1.0,))
    return np.concatenate((windows, write_windows(target, begin, folder / "free", plan)))


def write_windows(target: Target, stream: np.ndarray, out: Path, plan: WindowPlan) -> np.ndarray:
    """Has the target continue prompts from the stream; finished windows come from a file.

    The file is `<out>/generated.npy`.

    Args:
        target: Model that writes.
        stream: Text to take prompts from.
        out: Folder of the file, rewritten after every batch, so that a later run goes on from
            there.
        plan: Which windows to write.

    Returns:
        int32 [count, length].

    Raises:
        ConfigError: The file has another target's windows, or windows of other settings.
    """
    path, author = out / "generated.npy", out / "generated.json"
    identity = target.identity()
    windows = _written(path, author, identity, plan.length)
    count, num_new = plan.count, plan.length - plan.prompt
    if len(windows) >= count:
        return windows[:count]
    turns = -(-(count - len(windows)) // plan.batch)
    with Progress(turns * num_new, 0, f"the target writes {count} windows") as progress:
        while len(windows) < count:
            done = len(windows)
            rows = min(plan.batch, count - done)
            # Seeded by place, since a later run may write more, and in other batches.
            generator = np.random.default_rng((plan.seed, done))
            prompts = torch.from_numpy(cut(stream, rows, plan.prompt, generator).astype(np.int64))
            turn = -(-done // plan.batch)
            tokens = target.generate(
                prompts.to(target.device),
                num_new,
                plan.temperatures[turn % len(plan.temperatures)],
                plan.seed * 1_000_003 + done,
                lambda: progress.advance(1),
            )
            windows = np.concatenate((windows, tokens.cpu().numpy().astype(np.int32)))
            save_array(path, windows)
            write_json(author, identity)
    return windows[:count]


def _written(path: Path, author: Path, identity: dict[str, str], length: int) -> np.ndarray:
    """Returns the windows that an earlier run has written, int32 [n, length].

    Args:
        path: File of the windows.
        author: File with the identity of the target that wrote them.
        identity: Identity of the target that is to write more.
        length: Number of tokens of a window.

    Raises:
        ConfigError: See `write_windows`.
    """
    windows = np.zeros((0, length), dtype=np.int32)
    if path.is_file():
        try:
            windows = np.load(path)
        except (OSError, EOFError, ValueError) as error:
            raise _unreadable(path) from error
        if windows.ndim != 2 or windows.dtype != np.int32:
            raise _unreadable(path)
    if author.is_file():
        try:
            wrote = json.loads(author.read_bytes())
        except ValueError as error:
            raise _unreadable(author) from error
        if wrote != identity:
            raise ConfigError(
                f"another model wrote {path}; delete it and {author.name}, or set --generated to"
                " another folder"
            )
    if windows.shape[1] != length:
        raise ConfigError(
            f"{path} holds windows of {windows.shape[1]} tokens; delete it or set --window"
        )
    return windows


def _unreadable(path: Path) -> ConfigError:
    return ConfigError(f"{path}: cannot be read; delete it")


def heldout_prompts(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    start: Sequence[int],
    per_domain: int,
    length: int,
    seed: int,
) -> dict[str, np.ndarray]:
    """Cuts held-out prompts by domain, each int32 [per_domain, length].

    A domain with less text than one prompt is left out.
    """
    by_domain: dict[str, list[Document]] = {}
    for document in documents:
        by_domain.setdefault(document.domain, []).append(document)
    prompts = {}
    for domain, members in sorted(by_domain.items()):
        stream = encode_stream(members, tokenizer, start)
        if len(stream) > length:
            prompts[domain] = cut(stream, per_domain, length, np.random.default_rng(seed))
        else:
            say(f"held-out {domain} is left out: it has {len(stream)} tokens, a prompt {length}")
    return prompts


def heldout_continuations(
    target: Target, prompts: Mapping[str, np.ndarray], new_tokens: int, seed: int
) -> dict[str, Tensor]:
    """Writes greedy continuations of held-out prompts by domain.

    Each domain's are int64 [count, prompt + new_tokens] on the target's device.
    """
    texts = {}
    for domain, rows in prompts.items():
        on_device = torch.from_numpy(rows.astype(np.int64)).to(target.device)
        with Progress(new_tokens, 0, f"the target writes held-out {domain}") as progress:
            texts[domain] = target.generate(
                on_device, new_tokens, 0.0, seed, lambda: progress.advance(1)
            )
    return texts
