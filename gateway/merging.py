"""Merges several streams into one, with bounded buffers."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_BUFFERED = 64


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields the items of all streams, each with its stream's index; the first error ends all."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    items: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(MAX_BUFFERED)

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await items.put((index, item))
            await items.put(None)
        except Exception as error:
            await items.put(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        remaining = len(tasks)
        while remaining:
            news = await items.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                remaining -= 1
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
