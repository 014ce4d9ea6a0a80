"""Certificates for gRPC: read, checked, and followed as they change.

Says nothing about who may do what.
"""

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from foredraft.config.common import ServiceTlsConfig
from foredraft.config.services import GatewayConfig
from foredraft.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Version = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate with its key, and the authorities that it trusts.

    Attributes:
        certificate: PEM file with the chain.
        key: PEM file with the private key, without a password.
        authorities: PEM file of the authorities that sign peers' certificates; empty trusts no
            client, so that none is asked for a certificate.
        name: Name that servers' certificates must have, instead of the address they are reached by.
    """

    certificate: str
    key: str
    authorities: str = ""
    name: str = ""

    def check(self, flags: str) -> None:
        """Raises ConfigError, naming the flags, for files that are missing or do not fit
        together.
        """
        for file in (self.certificate, self.key, self.authorities):
            try:
                if file:
                    Path(file).read_bytes()
            except OSError as error:
                raise ConfigError(f"{flags} {file}: {error.strerror}") from None
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # A key with a password must not stop the start with a question.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            files = f"{self.certificate} and {self.key}"
            raise ConfigError(f"{flags} {files}: {_mismatch(error)}") from None
        try:
            if self.authorities:
                context.load_verify_locations(self.authorities)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{flags} {self.authorities}: {error}") from None

    def version(self) -> _Version | None:
        """Returns a value that changes when one of the files does; None while one is gone."""
        files = [Path(file) for file in (self.certificate, self.key, self.authorities) if file]
        try:
            stats = [file.stat() for file in files]
        except OSError:
            return None
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials for a client that shows this certificate; reads the files again each
        time.
        """
        return grpc.ssl_channel_credentials(
            Path(self.authorities).read_bytes(),
            Path(self.key).read_bytes(),
            Path(self.certificate).read_bytes(),
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials for a server.

        Clients must show a certificate where there are authorities.

        Changes of the files take effect without a restart.
        """
        follower = Follower(self, "TLS")
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(),
            lambda: follower.changed(self._server_configuration),  # before every handshake
            bool(self.authorities),
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        chain = [(Path(self.key).read_bytes(), Path(self.certificate).read_bytes())]
        authorities = Path(self.authorities).read_bytes() if self.authorities else None
        return grpc.ssl_server_certificate_configuration(chain, authorities)


def service_identity(config: ServiceTlsConfig) -> Identity | None:
    """Returns the certificate that a service shows other services; None where their TLS is off.

    Raises:
        ConfigError: A file is missing, or they do not fit together.
    """
    files = (config.service_tls_cert, config.service_tls_key, config.service_tls_ca)
    if not any(files):
        return None
    if not all(files):
        raise ConfigError(
            "--service-tls-cert, --service-tls-key and --service-tls-ca are needed together"
        )
    identity = Identity(*files, name=config.service_tls_name)
    identity.check("--service-tls-*")
    return identity


def public_identity(config: GatewayConfig) -> Identity | None:
    """Returns the certificate that the gateway shows its clients; None where it speaks no TLS.

    Raises:
        ConfigError: A file is missing, or they do not fit together.
    """
    if not (config.ssl_certfile or config.ssl_keyfile or config.ssl_ca_certs):
        return None
    if not (config.ssl_certfile and config.ssl_keyfile):
        raise ConfigError("--ssl-certfile and --ssl-keyfile are needed together")
    identity = Identity(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    identity.check("--ssl-*")
    return identity


def _mismatch(error: Exception) -> str:
    """Returns in words what is wrong with a certificate and a key; OpenSSL says little."""
    text = str(error)
    if "KEY_VALUES_MISMATCH" in text:
        return "the key belongs to another certificate"
    if "PEM lib" in text:
        return "one of them is not what it should be in PEM form, or the key has a password"
    return text


class Follower:
    """Reads the files of an identity again when they have changed.

    Args:
        identity: The files; they have been read, or will be right away.
        flags: Flags that a message about the files names.
        what: Name of the certificate in the log.
    """

    def __init__(self, identity: Identity, flags: str, what: str = "TLS certificate") -> None:
        self._identity, self._flags, self._what = identity, flags, what
        self._version = identity.version()
        self._told: tuple[_Version | None, str] | None = None  # the failure that the log has

    def changed(self, read: Callable[[], T]) -> T | None:
        """Returns what `read` makes of changed files; None while they are as they were.

        Files that do not fit together, or change meanwhile, are as they were. They are read again
        every time, and a failure is logged once.
        """
        version = self._identity.version()
        if version == self._version:
            self._told = None
            return None
        try:
            # A certificate may have been replaced, and its key not yet.
            self._identity.check(self._flags)
            made = read()
        except (ConfigError, OSError) as error:
            failure = version, str(error)
            if failure != self._told:
                logger.error("the %s stays as it was: %s", self._what, error)
            self._told = failure
            return None
        self._version, self._told = version, None
        logger.info("read the %s %s again", self._what, self._identity.certificate)
        return made
