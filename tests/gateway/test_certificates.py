"""The HTTP port's certificate while its files change, and the task that follows files."""

import asyncio
import contextlib
import logging
import shutil
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foredraft.rpc.tls import Identity
from gateway import __main__ as gateway_main
from gateway.security.certificates import HttpContext
from testing.certificates import Authority, Certificate


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def server(authority: Authority) -> Certificate:
    return authority.sign("server")


def serial(server: ssl.SSLContext, trusted: Path, own: Certificate | None = None) -> Any:
    """Returns the number of the certificate that a client sees."""
    asking = ssl.create_default_context(cafile=str(trusted))
    if own is not None:
        asking.load_cert_chain(own.file, own.key)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(back, there, server_hostname="localhost")
    ends = (client, server.wrap_bio(there, back, server_side=True))
    for _ in range(3):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return client.getpeercert()["serialNumber"]  # type: ignore[index]


@dataclass(frozen=True)
class Rotated(Identity):
    """An identity whose key file is replaced right after it was checked."""

    next_key: str = ""

    def check(self, flags: str) -> None:
        super().check(flags)
        shutil.copyfile(self.next_key, self.key)


def test_files_that_change_while_they_are_read(
    authority: Authority, server: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    other = authority.sign("other")
    context = HttpContext(Rotated(str(server.file), str(server.key), next_key=str(other.key)))
    before = serial(context.current(), authority.file)
    authority.sign("server")
    context.reload()  # the right key was checked, the wrong one is loaded
    assert "stays as it was" in caplog.text
    assert serial(context.current(), authority.file) == before
    shutil.copyfile(other.file, server.file)
    context.reload()
    assert serial(context.current(), authority.file) == serial_of(other, authority)


def serial_of(certificate: Certificate, authority: Authority) -> Any:
    plain = HttpContext(Identity(str(certificate.file), str(certificate.key)))
    return serial(plain.current(), authority.file)


def test_a_failure_is_told_once(
    authority: Authority, server: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> int:
        context.reload()
        return sum(record.levelno == logging.ERROR for record in caplog.records)

    context = HttpContext(Identity(str(server.file), str(server.key)))
    away = server.file.rename(server.file.with_suffix(".away"))
    assert [told() for _ in range(3)] == [1, 1, 1]
    assert f"{server.file}: No such file" in caplog.text
    server.file.write_bytes(authority.sign("other").file.read_bytes())
    assert [told() for _ in range(3)] == [2, 2, 2]
    away.rename(server.file)
    assert told() == 2
    server.file.unlink()
    assert told() == 3


def test_an_authority_that_is_taken_out_is_trusted_no_more(
    tmp_path: Path, authority: Authority, server: Certificate
) -> None:
    older = Authority(tmp_path, "older")
    client = older.sign("client")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.file.read_bytes() + older.file.read_bytes())
    context = HttpContext(Identity(str(server.file), str(server.key), str(trusted)))
    assert serial(context.current(), authority.file, client)
    trusted.write_bytes(authority.file.read_bytes())
    context.reload()
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        serial(context.current(), authority.file, client)
    assert serial(context.current(), authority.file, authority.sign("newer"))


def test_following_goes_on_after_an_exception(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway_main, "FILES_SECONDS", 0.0)

    async def follow() -> None:
        seconds = asyncio.Queue[None]()

        def fail() -> None:
            raise ZeroDivisionError("a defect")

        task = asyncio.create_task(
            gateway_main._follow_files([fail, lambda: seconds.put_nowait(None)])
        )
        for _ in range(2):
            await asyncio.wait_for(seconds.get(), 60)
        task.cancel()

    asyncio.run(follow())
    assert "a defect" in caplog.text
