"""TLS of the HTTP port; reads the certificate again when its files change."""

import ssl

from foredraft.rpc.tls import Follower, Identity


class HttpContext:
    """A server's context for HTTP/1.1 over TLS 1.2 or newer.

    Args:
        identity: The certificate, and the authorities for clients' certificates if these are
            required.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._follower = Follower(identity, "--ssl-*")
        self._context = self._read()

    def current(self) -> ssl.SSLContext:
        """Returns the context for a new connection."""
        return self._context

    def reload(self) -> None:
        """Uses changed files for new connections; see `Follower`."""
        self._context = self._follower.changed(self._read) or self._context

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._identity.certificate, self._identity.key)
        if self._identity.authorities:
            context.load_verify_locations(self._identity.authorities)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
