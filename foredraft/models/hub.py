"""Fetches models by name from a Hugging Face hub: once, resumable, checked.

Torch-free; runs nothing of what it fetches.

HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to huggingface_hub.
"""

import hashlib
import json
import logging
import os
import re
import sys
from pathlib import Path

from foredraft.errors import CheckpointError

logger = logging.getLogger(__name__)

# Files that a model needs: never code, pickles, or other formats' copies of the weights.
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = "*.safetensors"
# Draft heads alone are published like this too; they are read without running what such a file may
# hold.
_BINS = "pytorch_model*.bin"
_NEVER = ("*/*", "consolidated*")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE = re.compile(rf"({_NAME.pattern})/([A-Za-z0-9][\w.-]*)")
_SNAPSHOT = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?$")
_BLOCK_BYTES = 1 << 20


def is_repository(path: str | os.PathLike[str]) -> bool:
    """Returns whether this reads `organisation/name` and does not exist on this machine."""
    text = os.fspath(path)
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def fetch(repository: str, revision: str = "", *, weights: bool = True, bins: bool = False) -> Path:
    """Fetches the missing files of a repository, checks them, and returns their directory.

    A connection that was cut off continues at the byte where it stopped, a start that was ended at
    the first incomplete file. Every file is compared once, after it came, with the checksum that
    the hub gave for it (SHA-256 for weights, Git's own for small files); one that differs is
    removed.

    Args:
        repository: `organisation/name`.
        revision: Commit, branch or tag; the default branch when empty.
        weights: Whether to fetch the weights; False for the tokenizer alone.
        bins: Whether to fetch pytorch_model.bin where there are no safetensors.

    Raises:
        CheckpointError: There is no such repository or revision, the hub cannot be reached and
            nothing is cached, or a file differs from the hub's checksum.
    """
    name = f"{repository} at {revision}" if revision else repository
    patterns = [*_SMALL_FILES, *((_WEIGHTS,) if weights else ())]
    directory = _fetched(repository, revision, patterns, name)
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{name}: no config.json; not a repository of a transformers model")
    has_weights = any(directory.glob(_WEIGHTS))
    if weights and bins and not has_weights:
        directory = _fetch_bins(repository, directory.name, name)
    elif weights and not has_weights:
        raise CheckpointError(f"{name}: no safetensors files; other formats are not read")
    _check(directory, name)
    logger.info("%s: commit %s", repository, directory.name)
    return directory


def is_file(path: str | os.PathLike[str]) -> bool:
    """Returns whether this reads `organisation/name/file` and does not exist on this machine."""
    text = os.fspath(path)
    return _FILE.fullmatch(text) is not None and not Path(text).exists()


def fetch_file(path: str) -> Path:
    """Fetches one file, `organisation/name/file`, of a repository's default branch; checked as
    `fetch` does.

    Raises:
        CheckpointError: There is no such file, it cannot be fetched, or it is not what the hub
            says.
    """
    found = _FILE.fullmatch(path)
    if found is None:
        raise CheckpointError(f"{path}: not a file's name on a hub, organisation/name/file")
    repository, file = found.groups()
    directory = _fetched(repository, "", [file], path)
    if not (directory / file).is_file():
        raise CheckpointError(f"{path}: {repository} has no file {file}")
    _check(directory, repository)
    return directory / file


def _fetched(repository: str, revision: str, patterns: list[str], name: str) -> Path:
    """Returns a snapshot's directory; the cached one where it cannot be fetched."""
    logger.info("fetching %s, as far as it is not here", name)
    # The library lets its HTTP client's own errors through, and which client that is differs
    # between its versions.
    try:
        return _snapshot(repository, revision, patterns, local_files_only=False)
    except Exception as error:
        reason = f"it cannot be fetched: {_first_line(error)}"
        try:
            directory = _snapshot(repository, revision, patterns, local_files_only=True)
        except Exception:
            raise CheckpointError(
                f"{name}: no such directory or file here, and {reason}"
            ) from error
        logger.warning("%s: using what is here; %s", name, reason)
        return directory


def _fetch_bins(repository: str, commit: str, name: str) -> Path:
    """Fetches the .bin weights of a commit into the directory of its other files.

    Raises:
        CheckpointError: There are none, or they cannot be fetched.
    """
    patterns = [*_SMALL_FILES, _BINS]
    try:
        try:
            directory = _snapshot(repository, commit, patterns, local_files_only=True)
        except Exception:
            directory = Path()
        if not any(directory.glob(_BINS)):
            directory = _snapshot(repository, commit, patterns, local_files_only=False)
    except Exception as error:
        raise CheckpointError(f"{name}: it cannot be fetched: {_first_line(error)}") from error
    if not any(directory.glob(_BINS)):
        raise CheckpointError(f"{name}: neither safetensors files nor pytorch_model.bin")
    return directory


def tokenizer_directory(path: str) -> str:
    """Returns the local directory of a model's tokenizer; the given directory may be another
    machine's.

    Args:
        path: A directory, the name of a repository, or a directory in another machine's cache of a
            hub, from which repository and commit are read.
    """
    if Path(path).is_dir():
        return path
    if is_repository(path):
        return str(fetch(path, weights=False))
    if match := _SNAPSHOT.search(path):
        return str(fetch(f"{match[1]}/{match[2]}", match[3], weights=False))
    return path


def _snapshot(
    repository: str, revision: str, patterns: list[str], *, local_files_only: bool
) -> Path:
    # Only here: it takes a twentieth of a second to import, and a restart of a local model need not
    # wait for that.
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    found = huggingface_hub.snapshot_download(
        repository,
        revision=revision or None,
        allow_patterns=patterns,
        ignore_patterns=list(_NEVER),
        local_files_only=local_files_only,
    )
    return Path(str(found))


def _check(directory: Path, name: str) -> None:
    """Compares the files of a snapshot with their checksums, each once as long as it does not
    change.
    """
    record = directory.parents[1] / "foredraft-checked.json"
    try:
        checked: dict[str, list[int]] = json.loads(record.read_text())
    except (OSError, ValueError):
        checked = {}
    before = dict(checked)
    for file in sorted(directory.iterdir()):
        # A snapshot's files are links to blobs, which are named by the hub's ETag.
        blob = file.resolve()
        state = [blob.stat().st_size, blob.stat().st_mtime_ns]
        if checked.get(blob.name) == state:
            continue
        if not _is_blob(blob):
            file.unlink()
            blob.unlink(missing_ok=True)
            raise CheckpointError(
                f"{name}: {file.name} is not what the hub says it is (checksum {blob.name}); it was"
                " removed, try again"
            )
        checked[blob.name] = state
    if checked != before:
        scratch = record.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(checked))
        scratch.replace(record)


def _is_blob(blob: Path) -> bool:
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        with blob.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == blob.name
    if re.fullmatch(r"[0-9a-f]{40}", blob.name):
        # Git's name of a file's content; see git-hash-object(1).
        digest = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
        with blob.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest() == blob.name
    return False


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
