"""Builds the corpus from packages: JSON lines of documents, and a manifest.

Run it where the packages are.
"""

import json
import random
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from foredraft.errors import ConfigError
from training.corpus import sources
from training.corpus.dedup import Deduplicator, drop_repeated_lines, is_readable
from training.corpus.extract import (
    chitchat_dialogues,
    html_to_text,
    read_text,
    reasoning_questions,
    turns_to_text,
    wordnet_glosses,
)
from training.progress import say

MAX_DOCUMENT = 200_000
PART_CHARACTERS = 6000  # size of the documents that a long text is cut into
MAX_DISTRIBUTION_BYTES = 45_000_000


@dataclass(slots=True)
class SourceRecord:
    """The manifest's record of one source."""

    name: str
    version: str
    licence: str
    domain: str
    split: str
    documents: int = 0
    bytes: int = 0
    dropped: int = 0


@dataclass(slots=True)
class CorpusWriter:
    """Writes documents to `<out>/train/<domain>.jsonl` and `<out>/heldout/<domain>.jsonl`.

    Also collects the manifest's records. Files of an earlier run in these two folders are removed.
    """

    out: Path
    dedup: Deduplicator = field(default_factory=Deduplicator)
    records: list[SourceRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        for old in (*self.out.glob("train/*.jsonl"), *self.out.glob("heldout/*.jsonl")):
            old.unlink()

    def write(self, record: SourceRecord, texts: Iterable[str]) -> None:
        """Appends the documents of one source that are new; bars held-out ones from training."""
        path = self.out / record.split / f"{record.domain}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            for text in texts:
                if not self.dedup.add(text):
                    record.dropped += 1
                    continue
                file.write(json.dumps({"text": text, "source": record.name}) + "\n")
                record.documents += 1
                record.bytes += len(text.encode("utf-8", "replace"))
        self.records.append(record)
        say(
            f"{record.split:8} {record.domain:10} {record.name:24} {record.documents:7} documents"
            f" {record.bytes / 1e6:8.2f} MB, {record.dropped} dropped"
        )

    def write_manifest(self) -> None:
        """Writes `manifest.json`: every source with version, licence, split, counts."""
        records = [asdict(record) for record in self.records if record.documents]
        (self.out / "manifest.json").write_text(json.dumps({"sources": records}, indent=1) + "\n")


def build_documents(packages: Path, wheels: Path, out: Path, seed: int = 1) -> None:
    """Builds the documentation, dialogue and question part.

    Args:
        packages: Folder with the downloaded `.deb` files of `sources.DEBIAN_SOURCES`, WORDNET and
            JARGON.
        wheels: Folder with the unpacked `chitchat-dataset` wheel; `reasoning-gym` must be
            importable.
        out: Folder to write the corpus to.
        seed: Seed of the generated questions.
    """
    writer = CorpusWriter(out)
    for source in sorted(sources.DEBIAN_SOURCES, key=lambda source: not source.heldout):
        root, version = _unpack(packages, source)
        split = "heldout" if source.heldout else "train"
        record = SourceRecord(source.package, version, source.licence, "docs", split)
        writer.write(record, _documentation(root, source))
    root, version = _unpack(packages, sources.JARGON)
    text = read_text(root / "jargon.dict.dz") or ""
    record = SourceRecord("dict-jargon", version, sources.JARGON.licence, "docs", "train")
    writer.write(record, _split_document(text))
    _write_conversations(writer, packages, wheels, seed)
    writer.write_manifest()


def _write_conversations(writer: CorpusWriter, packages: Path, wheels: Path, seed: int) -> None:
    shuffle = random.Random(seed)
    dialogues = list(chitchat_dialogues(wheels / "chitchat_dataset" / "dataset.json"))
    held = len(dialogues) // 20
    for split, part in (("heldout", dialogues[:held]), ("train", dialogues[held:])):
        writer.write(SourceRecord("chitchat-dataset", "0.9.0", "MIT", "chat", split), part)
    root, version = _unpack(packages, sources.WORDNET)
    pairs = [pair for path in sorted(root.glob("data.*")) for pair in wordnet_glosses(path)]
    shuffle.shuffle(pairs)
    asked = [(_word_question(word, shuffle), f"{gloss}.") for word, gloss in pairs]
    record = SourceRecord("wordnet-base", version, sources.WORDNET.licence, "chat", "train")
    writer.write(record, _grouped(asked, 8))
    for split, size, offset in (("heldout", 12, 1_000_003), ("train", 1400, 0)):
        questions = [
            pair
            for task in sources.REASONING_TASKS
            for pair in reasoning_questions(task, size, seed + offset)
        ]
        shuffle.shuffle(questions)
        version = metadata.version("reasoning-gym")
        record = SourceRecord("reasoning-gym", version, "Apache-2.0", "reasoning", split)
        writer.write(record, _grouped(questions, 4))


def _word_question(word: str, shuffle: random.Random) -> str:
    forms = (
        'What does "{}" mean?',
        "What is the meaning of {}?",
        "Define {}.",
        "Explain the word {}.",
    )
    return shuffle.choice(forms).format(word)


def _grouped(pairs: list[tuple[str, str]], size: int) -> Iterator[str]:
    for start in range(0, len(pairs), size):
        yield turns_to_text(pairs[start : start + size])


def _unpack(packages: Path, source: sources.DebianSource) -> tuple[Path, str]:
    archives = sorted(packages.glob(f"{source.package}_*.deb"))
    if not archives:
        raise ConfigError(
            f"no {source.package}_*.deb in {packages}; fetch it with: apt-get download"
            f" {source.package}"
        )
    version = archives[0].name.split("_")[1].replace("%3a", ":")
    target = packages / "unpacked" / source.package
    if not target.is_dir():
        target.mkdir(parents=True)
        subprocess.run(["dpkg", "-x", str(archives[0]), str(target)], check=True)
    return target / source.root, version


def _documentation(root: Path, source: sources.DebianSource) -> Iterator[str]:
    seen: set[int] = set()
    for path in sorted({path for pattern in source.include for path in root.glob(pattern)}):
        if not path.is_file() or any(mark in str(path) for mark in source.exclude):
            continue
        text = read_text(path)
        if text is None:
            continue
        if path.suffix == ".html":
            text = html_to_text(text)
        text = drop_repeated_lines(text, seen).strip()
        if len(text) <= MAX_DOCUMENT and is_readable(text, 400):
            yield text


def _split_document(text: str) -> Iterator[str]:
    paragraphs, part, length = re.split(r"\n(?=\S)", text), [], 0
    for paragraph in paragraphs:
        part.append(paragraph)
        length += len(paragraph)
        if length >= PART_CHARACTERS:
            yield "\n".join(part)
            part, length = [], 0
    if part:
        yield "\n".join(part)


def build_code(out: Path) -> None:
    """Builds the code part from the permissively licensed Python packages installed here and the
    standard library.

    Args:
        out: Folder to write the corpus to.
    """
    writer = CorpusWriter(out)
    distributions = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        licence = permissive_licence(distribution)
        if name and licence:
            distributions[name] = (distribution, licence)
    order = sorted(distributions, key=lambda name: (name not in sources.CODE_HELDOUT, name))
    for name in order:
        distribution, licence = distributions[name]
        split = "heldout" if name in sources.CODE_HELDOUT else "train"
        files = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
        record = SourceRecord(name, distribution.version, licence, "code", split)
        writer.write(record, _source_files(files))
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(library.rglob("*.py")) if "-packages" not in str(path)]
    record = SourceRecord("cpython", sysconfig.get_python_version(), "PSF-2.0", "code", "train")
    writer.write(record, _source_files(files))
    writer.write_manifest()


def permissive_licence(distribution: metadata.Distribution) -> str | None:
    """Returns the licence in a distribution's metadata, None unless it is clearly permissive."""
    fields = distribution.metadata
    classifiers = [
        value.split(" :: ")[-1]
        for value in fields.get_all("Classifier") or ()
        if value.startswith("License")
    ]
    named = (
        _field(fields, "License-Expression") or ", ".join(classifiers) or _field(fields, "License")
    )
    named = " ".join(named.split())[:60]
    copyleft = any(mark in named for mark in sources.COPYLEFT_MARKS)
    permissive = any(mark in named for mark in sources.PERMISSIVE_LICENCES)
    return named if permissive and not copyleft else None


def _field(fields: metadata.PackageMetadata, name: str) -> str:
    return (fields.get_all(name) or [""])[0]


def _source_files(files: Iterable[Path]) -> Iterator[str]:
    total = 0
    for path in files:
        parts = set(path.parts)
        if path.suffix != ".py" or parts & {
            "_vendor",
            "vendor",
            "third_party",
            "externals",
            "extern",
        }:
            continue
        if not path.is_file() or path.stat().st_size > MAX_DOCUMENT:
            continue
        text = read_text(path)
        if text is None or not is_readable(text) or "General Public License" in text[:4000]:
            continue
        total += len(text)
        if total > MAX_DISTRIBUTION_BYTES:
            return
        yield text.replace("\r\n", "\n")
