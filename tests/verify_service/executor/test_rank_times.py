"""Tests the times of ranks, as the board counts them and as metrics show them."""

from types import SimpleNamespace

import pytest

from foredraft.telemetry.metrics import value
from verify_service.executor.ranks import board
from verify_service.executor.ranks.board import Board, Progress, timed
from verify_service.executor.ranks.times import RankTimes


def test_the_rank_that_comes_first_waits_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times one computes for 50 and the other for 200, and the collective takes 30."""
    now = 1000
    monkeypatch.setattr(board.time, "monotonic_ns", lambda: now)
    first = Board.create(2)
    second = Board(first.file, first.bells, 1, 2)
    for _ in range(3):  # of even and of odd number
        with timed(first), timed(second):
            now += 50
            first.begin()
            now += 150
            second.begin()
            now += 30
            second.end()
            first.end()
            now += 7
    found = [(one.collectives, one.busy, one.waiting, one.moving) for one in first.progress()]
    assert found == [(3, 3 * 237, 3 * 150, 3 * 30), (3, 3 * 237, 0, 3 * 30)]


def test_what_a_device_counts_is_told_instead_of_the_hosts_time() -> None:
    own = Board.create(2)
    own.group = SimpleNamespace(nanoseconds=None)
    own.worked(7)
    own.beat()
    assert own.progress()[0].busy == 7
    own.group = SimpleNamespace(nanoseconds=(20, 300))
    own.beat()
    own.worked(7)
    told = own.progress()[0]
    assert (told.busy, told.moving, told.waiting) == (320, 20, 0)


def test_what_is_published_adds_up() -> None:
    def read() -> list[float]:
        name = "foredraft_rank_seconds_total"
        parts = ("products", "all_reduce", "waiting")
        return [value(name, rank="1", part=part) for part in parts]

    before, times, none = read(), RankTimes(2), Progress(0, 0, 0)
    for busy, waiting, moving in ((4, 1, 2), (4, 2, 3), (10, 2, 3)):
        own = Progress(0, 0, 0, int(busy * 1e9), int(waiting * 1e9), int(moving * 1e9))
        times.publish([none, own])
    found = [after - each for after, each in zip(read(), before, strict=True)]
    assert found == pytest.approx([5, 3, 2])
