"""A gateway's stream, where it goes otherwise than requests and answers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from foredraft.api.verify.v1 import verify_pb2
from verify_service.outputs import Load
from verify_service.service import VerifyService


class BrokenEngine:
    """Fails in a way that nobody foresaw."""

    def load(self) -> Load:
        return Load(waiting=0, running=0, free_pages=1, total_pages=1, draft_available=False)

    def submit(self, request: object) -> int:
        raise ZeroDivisionError("a defect")


def test_a_stream_whose_requests_are_not_read_any_more_ends() -> None:
    service = VerifyService()
    service.open(BrokenEngine(), None, None)  # type: ignore[arg-type]

    async def requests() -> AsyncIterator[verify_pb2.RunRequest]:
        yield verify_pb2.RunRequest(submit=verify_pb2.SubmitRequest(id=1, prompt=[1]))
        await asyncio.Event().wait()

    async def main() -> None:
        context: Any = None
        async with asyncio.timeout(20):
            async for message in service.Run(requests(), context):
                assert message.load.total_pages == 1

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
