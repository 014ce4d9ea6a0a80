"""Tests the gateway's log of a verifier that has not started, has stopped, or never existed."""

import asyncio
import logging
import shutil
from pathlib import Path

import grpc
import pytest

from foredraft.api.verify.v1 import verify_pb2_grpc
from foredraft.rpc.tls import Identity
from gateway import verifier_connection
from gateway.verifier_pool import VerifierPool
from testing.bare_verifiers import Verifier, eventually
from testing.certificates import Authority
from testing.stack import free_port

LOGGER = verifier_connection.logger.name


def said(log: pytest.LogCaptureFixture, where: str) -> list[tuple[str, str]]:
    """Returns level and beginning of each line about a verifier."""
    records = [record for record in log.records if record.name == LOGGER]
    return [
        (record.levelname, record.getMessage().partition(where)[0].rstrip()) for record in records
    ]


def test_a_verifier_that_starts_beside_its_gateway_is_waited_for_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    where = f"127.0.0.1:{free_port()}"

    async def main() -> None:
        pool = VerifierPool([where])
        try:
            await eventually(lambda: said(caplog, where))
            server = grpc.aio.server()
            verify_pb2_grpc.add_VerifyServiceServicer_to_server(Verifier(), server)
            server.add_insecure_port(where)
            await server.start()
            await eventually(lambda: pool.num_usable)
            assert said(caplog, where) == [
                ("INFO", "waiting for the verifier at"),
                ("INFO", "connected to the verifier at"),
            ]
            await server.stop(0)
            await eventually(lambda: len(said(caplog, where)) >= 3)
            assert said(caplog, where)[2] == ("WARNING", "no verifier at")
        finally:
            await pool.close()

    asyncio.run(main())


def test_one_that_does_not_come_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_connection, "START_SECONDS", 0.05)
    where = f"127.0.0.1:{free_port()}"

    async def main() -> None:
        pool = VerifierPool([where])
        try:
            await eventually(lambda: ("WARNING", "no verifier at") in said(caplog, where))
        finally:
            await pool.close()

    asyncio.run(main())


def test_a_renewed_certificate_is_shown_when_it_connects_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path, "authority")
    own, renewed = Authority(tmp_path, "elsewhere").sign("gateway"), authority.sign("renewed")
    verifier = authority.sign("verifier")
    where = f"127.0.0.1:{free_port()}"

    async def serve() -> grpc.aio.Server:
        server = grpc.aio.server()
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(Verifier(), server)
        files = Identity(str(verifier.file), str(verifier.key), str(authority.file))
        server.add_secure_port(where, files.server_credentials())
        await server.start()
        return server

    async def main() -> None:
        server = await serve()
        mine = Identity(str(own.file), str(own.key), str(authority.file))
        pool = VerifierPool([where], mine)
        try:
            await eventually(lambda: bool(said(caplog, where)))
            assert not pool.num_usable
            own.key.unlink()
            shutil.copyfile(renewed.file, own.file)
            shutil.copyfile(renewed.key, own.key)
            await eventually(lambda: bool(pool.num_usable))
            shutil.copyfile(verifier.file, own.file)  # without its key: a renewal that stopped
            await server.stop(0)
            await eventually(lambda: not pool.num_usable)
            server = await serve()
            await eventually(lambda: bool(pool.num_usable))
            assert caplog.text.count("the certificate for the verifier stays as it was") == 1
        finally:
            await pool.close()
            await server.stop(0)

    caplog.set_level(logging.INFO, LOGGER)
    asyncio.run(main())
