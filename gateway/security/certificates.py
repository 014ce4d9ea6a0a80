"""TLS of the HTTP port; reads the certificate again when its files change."""

import logging
import ssl

from foredraft.errors import ConfigError
from foredraft.rpc.tls import Identity

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
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.context.load_cert_chain(identity.certificate, identity.key)
        if identity.authorities:
            self.context.load_verify_locations(identity.authorities)
            self.context.verify_mode = ssl.CERT_REQUIRED

    def reload(self) -> None:
        """Uses a changed certificate from the next handshake on.

        Files that do not fit together change nothing.
        """
        try:
            version = self._identity.version()
            if version == self._version:
                return
            self._version = version
            self._identity.check("--ssl-*")
        except (ConfigError, OSError) as error:
            logger.error("the TLS certificate stays as it was: %s", error)
            return
        self.context.load_cert_chain(self._identity.certificate, self._identity.key)
        if self._identity.authorities:
            # Authorities are added, as an SSLContext cannot forget one.
            self.context.load_verify_locations(self._identity.authorities)
        logger.info("read the TLS certificate %s again", self._identity.certificate)
