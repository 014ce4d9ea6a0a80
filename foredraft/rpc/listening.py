"""Binds a gRPC server to a port or a Unix socket that nobody else listens on."""

import os
import socket
import stat
from pathlib import Path

import grpc

from foredraft.errors import ConfigError
from foredraft.rpc.address import Address
from foredraft.rpc.tls import Identity


def bind(server: grpc.aio.Server, where: Address, identity: Identity | None) -> Address:
    """Lets a server listen at an address; returns the address with the bound port.

    Args:
        server: A server that has not started.
        where: `host:port` (port 0: a free one), or a Unix socket, which gets mode 0600.
        identity: Certificate for TLS; not used for Unix sockets.

    Raises:
        ConfigError: The address cannot be had.
    """
    if where.is_unix:
        _prepare_socket(Path(where.path))
    # The socket is born private; a change of its mode alone would leave a moment in between.
    # Folders that other threads make meanwhile get the mask too, and stay usable.
    old_mask = os.umask(0o077)
    try:
        if identity is None or where.is_unix:
            port = server.add_insecure_port(where.target)
        else:
            port = server.add_secure_port(where.target, identity.server_credentials())
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {where}: the address is in use or not ours") from error
    finally:
        os.umask(old_mask)
    if where.is_unix:
        os.chmod(where.path, 0o600)
        return where
    return Address(host=where.host, port=port)


def _prepare_socket(path: Path) -> None:
    """Makes the directory (mode 0700) and removes the socket of a dead server."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen on unix:{path}: it exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        # Or a server that stands still, with many waiting, would hold this up.
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass  # it has just gone
        except BlockingIOError:
            raise ConfigError(
                f"cannot listen on unix:{path}: a server there takes none in"
            ) from None
        except OSError as error:  # not ours to take away
            raise ConfigError(f"cannot listen on unix:{path}: {error}") from error
        else:
            raise ConfigError(f"cannot listen on unix:{path}: a server listens there already")
