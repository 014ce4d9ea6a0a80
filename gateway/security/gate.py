"""The gate before both fronts: identifies callers and limits running requests.

Follows the key file as it changes.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foredraft.config import api_keys
from foredraft.config.api_keys import Limits
from foredraft.config.services import GatewayConfig
from foredraft.errors import ConfigError, Overloaded, Unauthenticated
from gateway import metrics
from gateway.security.hosts import is_local
from gateway.security.limits import CONCURRENCY_RETRY_SECONDS, Caller, acting_for

logger = logging.getLogger(__name__)

_SCHEME = "bearer "


class Gate:
    """Identifies callers and admits their requests.

    Args:
        config: Keys, the limits of each key, and the limit of all together.

    Raises:
        ConfigError: Keys cannot be read.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        limits = Limits(
            config.key_concurrent_requests,
            config.key_requests_per_minute,
            config.key_tokens_per_minute,
        )
        self._everybody = Caller("", limits)
        self._callers: dict[str, Caller] = {}
        self._version = self._file_version()
        self._keys = self._read()
        self._num_running = 0

    @property
    def asks_for_keys(self) -> bool:
        """Whether there are any keys."""
        return bool(self._keys)

    @property
    def checks_hosts(self) -> bool:
        """Whether the Host header of requests is checked.

        It is where names are configured, or where only being on this machine gives access.
        """
        config = self._config
        return bool(config.allowed_host) or (not self._keys and is_local(config.host))

    def identify(self, authorization: str) -> Caller:
        """Returns the caller that sends this Authorization header.

        Raises:
            Unauthenticated: No key, or an unknown one.
        """
        if not self._keys:
            return self._everybody
        secret = ""
        if authorization[: len(_SCHEME)].lower() == _SCHEME:
            secret = authorization[len(_SCHEME) :].strip()
        key = api_keys.find(self._keys, secret)
        if key is None:
            metrics.refused.labels("key", "").inc()
            raise Unauthenticated(
                "this API key is not known here"
                if secret
                else "an API key is needed: Authorization: Bearer KEY"
            )
        return self._callers[key.name]

    @contextmanager
    def admit(self, authorization: str) -> Iterator[None]:
        """Admits a request that does work, until the block ends.

        Args:
            authorization: Header or metadata of the request; empty without one.

        Raises:
            Unauthenticated: No key, or an unknown one.
            RateLimited: The caller exceeds a limit.
            Overloaded: All callers together exceed the limit.
        """
        caller = self.identify(authorization)
        with acting_for(caller), self.running(caller):
            yield

    @contextmanager
    def running(self, caller: Caller) -> Iterator[None]:
        """Counts a running request, until the block ends.

        Raises:
            RateLimited: The caller exceeds a limit.
            Overloaded: All callers together exceed the limit.
        """
        most = self._config.max_concurrent_requests
        if most and self._num_running >= most:
            metrics.refused.labels("total", caller.name).inc()
            raise Overloaded(
                f"as many requests run as --max-concurrent-requests allows ({most}); try again in"
                f" {CONCURRENCY_RETRY_SECONDS:g} s",
                CONCURRENCY_RETRY_SECONDS,
            )
        with caller.running():
            self._num_running += 1
            try:
                yield
            finally:
                self._num_running -= 1

    def reload(self) -> None:
        """Reads the key file again if it has changed. If it cannot be read, the keys stay."""
        version = self._file_version()
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("read %d API keys", len(self._keys))

    def _read(self) -> list[api_keys.ApiKey]:
        found = api_keys.configured(self._config)
        for key in found:
            caller = self._callers.setdefault(key.name, Caller(key.name, key.limits))
            caller.change(key.limits)
        return found

    def _file_version(self) -> tuple[int, int, int] | None:
        if not self._config.api_key_file:
            return None
        try:
            status = Path(self._config.api_key_file).stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
