"""Decodes texts plainly in a process of its own, beside an engine under test."""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from foredraft.types import SamplingParams
from testing.engines import Job, running_engine
from testing.ties import Reference

SECONDS = 1800.0  # for all texts, on a CPU too


class PlainTexts:
    """Decodes texts plainly, and computes how near tokens were to each other.

    Args:
        path: Path of the target.
        jobs: Jobs, one for each text.
        flags: Flags of the engine.
    """

    def __init__(self, path: Path, jobs: list[Job], flags: dict[str, Any]) -> None:
        self._path = path
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self._texts = self._pool.submit(_decode, path, jobs, flags)

    def __enter__(self) -> "PlainTexts":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def texts(self) -> list[list[int]]:
        """Waits for the texts and returns tokens by job."""
        return self._texts.result()

    def gap(self, before: list[int], sampling: SamplingParams, one: int, other: int) -> float:
        """Returns by how much the rule prefers one token to another, without filters and
        penalties.
        """
        return self._pool.submit(_gap, self._path, before, sampling, one, other).result()


def _decode(path: Path, jobs: list[Job], flags: dict[str, Any]) -> list[list[int]]:
    with running_engine(path, "NONE", **flags) as plain:
        return [result.tokens for result in plain.run(jobs, timeout=SECONDS)]


@functools.cache
def _reference(path: Path) -> Reference:
    return Reference(path)


def _gap(path: Path, before: list[int], sampling: SamplingParams, one: int, other: int) -> float:
    first, second = _reference(path).preferences(before, sampling, [one, other])
    return abs(first - second)
