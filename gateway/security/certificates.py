"""TLS of the HTTP port; reads the certificate again when its files change."""

import logging
import ssl

from foredraft.errors import ConfigError
from foredraft.rpc.tls import Identity, Version

logger = logging.getLogger(__name__)


class HttpContext:
    """A server's context for HTTP/1.1 over TLS 1.2 or newer.

    Args:
        identity: The certificate, and the authorities for clients' certificates if these are
            required.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._version = identity.version()
        self._context = self._read()
        self._told: tuple[Version | None, str] | None = None  # the failure that the log has

    def current(self) -> ssl.SSLContext:
        """Returns the context for a new connection."""
        return self._context

    def reload(self) -> None:
        """Uses changed files for new connections.

        Files that do not fit together change nothing. They are read again every time, and a
        failure is logged once.
        """
        version = self._identity.version()
        if version == self._version:
            self._told = None
            return
        try:
            self._identity.check("--ssl-*")
            self._context = self._read()
        except (ConfigError, OSError) as error:
            failure = (version, str(error))
            if failure != self._told:
                logger.error("the TLS certificate stays as it was: %s", error)
            self._told = failure
            return
        self._version, self._told = version, None
        logger.info("read the TLS certificate %s again", self._identity.certificate)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._identity.certificate, self._identity.key)
        if self._identity.authorities:
            context.load_verify_locations(self._identity.authorities)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
