"""Reads documents, trains a byte-level BPE tokenizer, and packs tokens into windows."""

import json
import lzma
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor

from foredraft.errors import CheckpointError, ConfigError
from training.export import save_array
from training.progress import say

END_OF_TEXT = "<|endoftext|>"
LEAST_TOKENS = 1 + 256  # of a tokenizer: END_OF_TEXT and the bytes
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' +"
    " message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' +"
    " message['content'] | trim + eos_token + '\\n' }}{% else %}{{ message['content'] + '\\n' }}{%"
    " endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_SPLIT = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".jsonl", ".xz"})


@dataclass(frozen=True, slots=True)
class Document:
    """One text and the domain it belongs to (the name of its JSON lines file, else its file
    suffix).
    """

    text: str
    domain: str


def read_documents(paths: Iterable[Path]) -> Iterator[Document]:
    """Reads the documents of files and, recursively, folders.

    A `.jsonl[.xz]` file has one in each line's `text` field; another text file is one document.

    Documents without a text are left out.

    Raises:
        ConfigError: A path does not exist or is not text.
    """
    for path in paths:
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.is_file() and p.suffix in TEXT_SUFFIXES)
            yield from read_documents(sorted(inside))
        elif not path.is_file():
            raise ConfigError(f"no such file or folder: {path}")
        else:
            yield from _read_file(path)


def _read_file(path: Path) -> Iterator[Document]:
    data = path.read_bytes()
    name = path.name
    if name.endswith(".xz"):
        try:
            data, name = lzma.decompress(data), name.removesuffix(".xz")
        except lzma.LZMAError as error:
            raise ConfigError(f"{path} cannot be unpacked: {error}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    if name.endswith(".jsonl"):
        # Not splitlines: a JSON text may hold other ends of lines, U+2028 among them.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip() and (content := _text_of(line, path, number)).strip():
                yield Document(content, name.removesuffix(".jsonl"))
    elif text.strip():
        yield Document(text, name.rpartition(".")[2])


def _text_of(line: str, path: Path, number: int) -> str:
    try:
        content = json.loads(line)["text"]
    except (ValueError, LookupError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise ConfigError(f'{path}, line {number}: not an object with a text, {{"text": "..."}}')
    try:
        content.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{path}, line {number}: the text has half a surrogate pair, which is no character"
        ) from None
    return content


def train_tokenizer(
    documents: Sequence[Document],
    vocab_size: int,
    max_bytes: int,
    repeats: Mapping[str, int],
    seed: int,
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer whose id 0 is END_OF_TEXT.

    It reads a random sample of about `max_bytes` characters, drawn from the documents as often as
    `repeats` says (see `pack`).
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = AddedToken(END_OF_TEXT, special=True, normalized=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    sample, size = [], 0
    for index in _shuffled(documents, repeats, seed):
        sample.append(documents[index].text.replace(END_OF_TEXT, ""))
        size += len(sample[-1])
        if size >= max_bytes:
            break
    tokenizer.train_from_iterator(sample, trainer=trainer, length=len(sample))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return tokenizer


def read_tokenizer(source: Path) -> Tokenizer:
    """Reads a tokenizer.json, given by its folder or its own path.

    Raises:
        CheckpointError: It is missing or broken.
    """
    file = source / "tokenizer.json" if source.is_dir() else source
    if not file.is_file():
        raise CheckpointError(f"no tokenizer.json in {source}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        raise CheckpointError(f"{file}: no tokenizer: {error}") from error
    # Whoever saved the file may have asked for both, for batches of their own.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def num_ids(tokenizer: Tokenizer) -> int:
    """Returns the least vocabulary that has all ids of a tokenizer; they may have gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def save_tokenizer(tokenizer: Tokenizer, out: Path, context_length: int) -> None:
    """Writes `tokenizer.json` and a `tokenizer_config.json` that transformers reads, with a plain
    chat template.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def pack(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    marks: tuple[int, int],
    repeats: Mapping[str, int],
    seed: int,
) -> np.ndarray:
    """Packs documents in random order into one stream of token ids, uint16 or uint32.

    Args:
        documents: The training text.
        tokenizer: Tokenizer of the model.
        marks: Tokens that begin and end each document; where they are one, it stands before.
        repeats: Number of times that a domain's documents occur; 1 where a domain is not named.
        seed: Seed of the order.

    Raises:
        ConfigError: There are no documents, or none of a domain that is named.
    """
    domains = {document.domain for document in documents}
    if not domains:
        raise ConfigError("--data: there is no text")
    if unknown := sorted(repeats.keys() - domains):
        raise ConfigError(
            f"--repeat {', '.join(unknown)}: the text has {', '.join(sorted(domains))}"
        )
    order = _shuffled(documents, repeats, seed)
    if not order:
        raise ConfigError("--data: there is no text where every --repeat is 0")
    dtype = np.uint16 if num_ids(tokenizer) <= 65536 else np.uint32
    begin, end = marks
    tail = [] if begin == end else [end]
    encoded: list[np.ndarray] = []
    for start in range(0, len(documents), 4096):
        texts = [document.text for document in documents[start : start + 4096]]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        encoded.extend(
            np.array([begin, *encoding.ids, *tail], dtype=dtype) for encoding in encodings
        )
    return np.concatenate([encoded[index] for index in order])


def _shuffled(documents: Sequence[Document], repeats: Mapping[str, int], seed: int) -> list[int]:
    order = [
        index
        for index, document in enumerate(documents)
        for _ in range(repeats.get(document.domain, 1))
    ]
    random.Random(seed).shuffle(order)
    return order


def load_or_pack(
    cache: Path,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    marks: tuple[int, int],
    repeats: Mapping[str, int],
    seed: int,
) -> np.ndarray:
    """Loads the result of `pack` from a file next to the checkpoint, or packs and saves it."""
    if not cache.is_file():
        tokens = pack(documents, tokenizer, marks, repeats, seed)
        save_array(cache, tokens)
        say(f"packed {len(tokens) / 1e6:.1f} M tokens into {cache}")
    return np.load(cache, mmap_mode="r")


class WindowSampler:
    """Training windows of a token stream: every epoch visits all windows once, in a new order and
    from a new offset.

    A batch depends only on (seed, step), so a resumed run sees the same as an unbroken one.

    Args:
        tokens: Stream of tokens, on the device where batches are wanted.
        length: Number of tokens in a window; one more is read for the targets.
        batch: Number of windows in a batch.
        seed: Seed of order and offsets.
    """

    def __init__(self, tokens: Tensor, length: int, batch: int, seed: int) -> None:
        self.tokens, self.length, self.batch, self.seed = tokens, length, batch, seed
        self.windows = (len(tokens) - 1) // length - 1
        if self.windows < 1:
            raise ConfigError(f"{len(tokens)} tokens are too few for windows of {length}")
        self._epoch, self._starts = -1, torch.empty(0, dtype=torch.int64)

    def batch_at(self, step: int) -> Tensor:
        """Returns the windows of one step, int64 [batch, length + 1]."""
        first = step * self.batch
        starts = torch.stack([self._start(first + row) for row in range(self.batch)])
        device = self.tokens.device
        offsets = torch.arange(self.length + 1, device=device)
        return self.tokens[starts.to(device)[:, None] + offsets].long()

    def _start(self, window: int) -> Tensor:
        epoch, position = divmod(window, self.windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            offset = torch.randint(0, self.length, (1,), generator=generator)
            order = torch.randperm(self.windows, generator=generator)
            self._epoch, self._starts = epoch, order * self.length + offset
        return self._starts[position]
