"""Verifiers that run no model, for tests of gateways before many of them."""

import asyncio
from collections.abc import AsyncIterator, Callable

from foredraft.api.verify.v1 import verify_pb2, verify_pb2_grpc


class Verifier(verify_pb2_grpc.VerifyServiceServicer):
    """Reports what it serves and its load, and does nothing else."""

    async def GetModelInfo(
        self, request: object, context: object
    ) -> verify_pb2.GetModelInfoResponse:
        return verify_pb2.GetModelInfoResponse(model="m", vocab_size=8)

    async def Run(self, requests: object, context: object) -> AsyncIterator[verify_pb2.RunResponse]:
        load = verify_pb2.Load(waiting=3, free_pages=25, total_pages=100)
        yield verify_pb2.RunResponse(load=load)
        await asyncio.Event().wait()


async def eventually(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)
