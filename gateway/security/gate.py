"""The gate before both fronts: who asks, and whether there is room. Follows the key file as it changes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foredraft.config import api_keys
from foredraft.config.api_keys import Limits
from foredraft.config.services import GatewayConfig
from foredraft.errors import ConfigError, Unauthenticated, Unavailable
from gateway import metrics
from gateway.security.hosts import is_local
from gateway.security.limits import Caller, acting_for

logger = logging.getLogger(__name__)

_SCHEME = "bearer "


class Gate:
    """Lets requests in.

    Args:
        config: Keys, the limits of each key, and that of all together.

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
        """Whether requests must call the server by a known name: where names are given, or where only being on this machine
        gives access."""
        config = self._config
        return bool(config.allowed_host) or (not self._keys and is_local(config.host))

    def identify(self, authorization: str) -> Caller:
        """Who sends a request with this Authorization header.

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
        """A request that does work, from here to the end of the block.

        Args:
            authorization: Its header or metadata; empty without one.

        Raises:
            Unauthenticated: No key, or an unknown one.
            RateLimited: Its caller has too much.
            Unavailable: All callers together have.
        """
        caller = self.identify(authorization)
        with acting_for(caller), self.running(caller):
            yield

    @contextmanager
    def running(self, caller: Caller) -> Iterator[None]:
        """A place among the requests that run, until the block ends.

        Raises:
            RateLimited: The caller has too much.
            Unavailable: All callers together have.
        """
        most = self._config.max_concurrent_requests
        if most and self._num_running >= most:
            metrics.refused.labels("total", caller.name).inc()
            raise Unavailable(f"{self._num_running} requests run already; try again in a second")
        with caller.running():
            self._num_running += 1
            try:
                yield
            finally:
                self._num_running -= 1

    def reload(self) -> None:
        """Reads the key file again if it has changed. One that cannot be read changes nothing."""
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
