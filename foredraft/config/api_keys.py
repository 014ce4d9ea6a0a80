"""API keys: read from a flag, a variable or a file, and compared without telling by the time it
takes.
"""

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foredraft.config.services import MAX_KEY_LIMIT, GatewayConfig
from foredraft.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_NAME = "default"  # name of the key in --api-key
MAX_SECRET_CHARACTERS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_COMMENT = re.compile(r"(^|\s)#.*")
_LIMITS = ("concurrent", "requests", "tokens")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a caller; 0 is no limit.

    Attributes:
        concurrent: Maximum number of requests at a time.
        requests: Maximum number of requests per minute.
        tokens: Maximum number of tokens per minute, of prompts and outputs.
    """

    concurrent: int = 0
    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key: its name, its secret's SHA-256, and the limits of its holder."""

    name: str
    digest: bytes
    limits: Limits


def configured(config: GatewayConfig, *, warns: bool = True) -> list[ApiKey]:
    """Returns the keys of a gateway; none where everybody may use it.

    Args:
        config: Configuration that names the keys or their file.
        warns: Whether to log a warning if other users may read the file.

    Raises:
        ConfigError: They cannot be read; names the flag and the line.
    """
    limits = Limits(
        config.key_concurrent_requests,
        config.key_requests_per_minute,
        config.key_tokens_per_minute,
    )
    found = [single(config.api_key, limits)] if config.api_key else []
    if config.api_key_file:
        found += read_file(Path(config.api_key_file), limits, warns=warns)
    check(found)
    return found


def find(keys: Iterable[ApiKey], secret: str) -> ApiKey | None:
    """Returns the key with this secret.

    Takes as long for every secret: digests are compared, all of them, in constant time.
    """
    digest = _digest(secret[: MAX_SECRET_CHARACTERS + 1])
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def single(secret: str, limits: Limits) -> ApiKey:
    """Returns the key of --api-key.

    Raises:
        ConfigError: It cannot be sent in a header.
    """
    _check_secret(secret, "--api-key")
    return ApiKey(DEFAULT_NAME, _digest(secret), limits)


def read_file(path: Path, limits: Limits, *, warns: bool = True) -> list[ApiKey]:
    """Reads the keys of a file: lines of `name secret [concurrent=N] [requests=N] [tokens=N]`.

    A secret may be given as `sha256:` and its digest in hexadecimal. `#` begins a comment at the
    start of a line or after white space; a secret may have one.

    Args:
        path: The file.
        limits: Limits that apply where a line gives none.
        warns: Whether to log a warning if other users may read the file.

    Raises:
        ConfigError: It cannot be read; names the line, and never what is in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from None
    if warns and mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
        logger.warning("--api-key-file %s: others may read or write it; chmod 600 it", path)
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = _COMMENT.sub("", line).split()
        if parts:
            keys.append(_read_line(parts, limits, f"--api-key-file {path}, line {number}"))
    if not keys:
        raise ConfigError(f"--api-key-file {path}: there are no keys in it")
    check(keys)
    return keys


def check(keys: Sequence[ApiKey]) -> None:
    """Raises ConfigError where two keys have one name or one secret."""
    if len({key.name for key in keys}) < len(keys):
        raise ConfigError("two API keys have the same name")
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError("two API keys have the same secret")


def _read_line(parts: Sequence[str], limits: Limits, where: str) -> ApiKey:
    if len(parts) < 2:
        raise ConfigError(f"{where}: needs a name and a secret")
    name, secret, *options = parts
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has 1 to 64 letters, digits, dots, dashes, underscores")
    given = _DIGEST.fullmatch(secret)
    if given is None:
        if secret.startswith("sha256:"):
            raise ConfigError(f"{where}: sha256: needs 64 hexadecimal digits")
        _check_secret(secret, where)
    digest = bytes.fromhex(given[1]) if given else _digest(secret)
    for option in options:
        what, equals, number = option.partition("=")
        if what not in _LIMITS or not equals or not (number.isascii() and number.isdigit()):
            raise ConfigError(f"{where}: after the secret come {', '.join(_LIMITS)} as name=number")
        limit = float(number)  # int() refuses thousands of digits
        if limit > MAX_KEY_LIMIT:
            raise ConfigError(f"{where}: {what}= must be at most {MAX_KEY_LIMIT:g}")
        limits = replace(limits, **{what: int(limit)})
    return ApiKey(name, digest, limits)


def _check_secret(secret: str, where: str) -> None:
    if not 1 <= len(secret) <= MAX_SECRET_CHARACTERS or not (
        secret.isascii() and secret.isprintable() and " " not in secret
    ):
        raise ConfigError(
            f"{where}: a secret has 1 to {MAX_SECRET_CHARACTERS} printable ASCII characters, no"
            " spaces"
        )


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
