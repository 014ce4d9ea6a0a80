"""Messages between ranks, and detection of a rank that fails the others;
`tests/e2e/test_ranks.py` kills real ones.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from foredraft.runner.batch import SequenceRows, StepRows
from foredraft.trees.draft_tree import DraftTree
from verify_service.executor.ranks import board as boards
from verify_service.executor.ranks import messages
from verify_service.executor.ranks import watchdog as watchdogs
from verify_service.executor.ranks.board import Board, Progress
from verify_service.executor.ranks.watchdog import (
    BEHIND_SECONDS,
    SILENT_SECONDS,
    LeaderWatch,
    RankWatchdog,
)
from verify_service.executor.ranks.workers import Workers


def test_every_rank_reads_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many times what the ring holds, of all lengths; one reader is slow."""
    monkeypatch.setattr(boards, "RING_BYTES", 4096)
    rng = random.Random(1)
    sent = [rng.randbytes(rng.choice([0, 1, 7, 8, 9, rng.randrange(2040)])) for _ in range(600)]
    writer = Board.create(3)
    found: dict[int, list[bytes]] = {1: [], 2: []}

    def read(rank: int) -> None:
        reader = Board(writer.file, writer.bells, rank, 3, spin_seconds=0.001 * (rank == 2))
        for i in range(len(sent)):
            if rank == 1 and i % 100 == 0:
                threading.Event().wait(0.02)
            found[rank].append(reader.read())

    threads = [threading.Thread(target=read, args=(rank,)) for rank in found]
    for thread in threads:
        thread.start()
    for message in sent:
        writer.write(message)
    for thread in threads:
        thread.join(120)
    assert found == {1: sent, 2: sent}
    with pytest.raises(ValueError, match="too long"):
        writer.write(bytes(2041))  # with its length, more than half of the ring


def rows(rng: random.Random) -> SequenceRows:
    """Returns rows of a prompt or of a tree."""
    pages = [rng.randrange(2**20) for _ in range(rng.randrange(1, 40))]
    start, count = rng.randrange(2**20), rng.randrange(1, 30)
    tokens = [rng.randrange(2**18) for _ in range(count)]
    if rng.random() < 0.5:
        logits = rng.choice(messages.LOGITS)
        return SequenceRows.chunk(pages, start, tokens, logits, rng.choice([0, start]))
    parents = [rng.randrange(-1, i) for i in range(count - 1)]
    return SequenceRows.tree(pages, start, tokens[0], DraftTree(tuple(tokens[1:]), tuple(parents)))


@pytest.mark.parametrize("seed", range(20))
def test_forwards_arrive_as_they_were_sent(seed: int) -> None:
    rng = random.Random(seed)
    sent = [rows(rng) for _ in range(rng.randrange(1, 9))]
    capture = tuple(rng.randrange(99) for _ in range(rng.randrange(4)))
    all_hidden = rng.random() < 0.5
    message = messages.forward(sent, capture, all_hidden)
    assert messages.kind_of(message) is messages.Kind.FORWARD
    found = messages.read_forward(message)
    assert (found.capture, found.all_hidden) == (capture, all_hidden)
    for one, other in zip(found.rows, sent, strict=True):
        for name in SequenceRows.__slots__:
            got, want = getattr(one, name), getattr(other, name)
            if name == "tail_mask":
                assert (got is None) == (want is None)
                assert got is None or torch.equal(got, want)
            elif isinstance(want, int | str | None):
                assert got == want, name
            else:
                assert list(got) == list(want), name


def test_moves_and_sizes_arrive_as_they_were_sent() -> None:
    paths = [([5, 6, 7], 40, [0, 2, 5]), ([9], 0, [0, 1]), ([1, 2], 17, [0])]
    message = messages.move(paths)
    assert messages.kind_of(message) is messages.Kind.MOVE
    assert messages.read_move(message) == paths
    assert messages.kind_of(messages.stop()) is messages.Kind.STOP
    for asked in (((123456, 32, 0), []), ((9, 16, 1), [7, 4, 3, 2, 1, 0, 1])):
        assert messages.read_setup(messages.setup(*asked)) == asked


def test_what_captured_steps_are_sent_arrives_as_it_was() -> None:
    updates = [(3, 0, [7, 8, 9]), (0, 12, []), (5, 1, [2**20])]
    assert messages.read_pages(messages.pages(updates)) == updates
    rows = [
        StepRows(2, 40, [5, 6, 7], None, "last", 9),
        StepRows(0, 7, [1, 2, 3], [-1, 0], "all"),
        StepRows(1, 0, [4], [], "none"),
    ]
    for capture in ([], [0, 3]):
        assert messages.read_mixed(messages.mixed(rows, capture)) == (rows, capture)
        for has_branches in (False, True):
            message = messages.mixed_warm_up(capture, has_branches)
            assert messages.read_mixed_warm_up(message) == (capture, has_branches)


@pytest.fixture
def watchdog() -> Iterator[RankWatchdog]:
    """The watchdog of three ranks; two have processes that do nothing."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    workers = Workers()
    workers.ranks = [1, 2]
    workers.processes = [subprocess.Popen(command) for _ in range(2)]
    yield RankWatchdog(Board.create(3), workers)
    for process in workers.processes:
        process.kill()
        process.wait()


def looked(
    watchdog: RankWatchdog, now: list[tuple[int, int, int]], later: list[tuple[int, int, int]]
) -> str | None:
    """Returns the watchdog's message when ranks change from one state to another and stay there
    for ten seconds.
    """
    before, after = ([Progress(*one) for one in state] for state in (now, later))
    found = watchdog._stuck(before, after, 0.2)
    for _ in range(50):
        found = found or watchdog._stuck(after, after, 0.2)
    return found


BEATING = [(0, 5, 0)] * 3  # who has not beaten yet still loads


def test_ranks_that_do_the_same_are_left_alone(watchdog: RankWatchdog) -> None:
    watchdog.watch_steps()
    assert looked(watchdog, BEATING, [(9, 6, 0)] * 3) is None
    assert watchdog._dead() is None


def test_a_rank_that_others_wait_for_is_named(watchdog: RankWatchdog) -> None:
    after = [(0, 6, 0), (0, 6, 0), (0, 5, 0)]
    assert looked(watchdog, BEATING, after) is None, "loading may take one longer than another"
    watchdog.watch_steps()
    pid = watchdog._workers.pid(2)
    assert looked(watchdog, BEATING, after) == (
        f"rank 2 of 3 (pid {pid}) has not reached collective 6, in which others have waited for "
        f"{BEHIND_SECONDS:g} s"
    )


def test_a_rank_without_a_heartbeat_is_named(watchdog: RankWatchdog) -> None:
    found = looked(watchdog, [(0, 0, 3), (0, 0, 3), (0, 0, 0)], [(0, 0, 4), (0, 0, 3), (0, 0, 0)])
    pid = watchdog._workers.pid(1)
    assert found == f"rank 1 of 3 (pid {pid}) has shown no sign of life for {SILENT_SECONDS:g} s"


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "signal 40")])
def test_a_rank_that_has_ended_is_named(watchdog: RankWatchdog, number: int, name: str) -> None:
    assert isinstance(watchdog._workers, Workers)
    process = watchdog._workers.processes[1]
    process.send_signal(number)
    process.wait()
    assert watchdog._dead() == f"rank 2 of 3 (pid {process.pid}) was ended by {name}"


def test_a_rank_whose_numbers_do_not_come_is_named(watchdog: RankWatchdog) -> None:
    group = SimpleNamespace(lost_rank=None)
    assert watchdog._lost() is None
    watchdog.watch_group(group)
    assert watchdog._lost() is None
    group.lost_rank = 1
    pid = watchdog._workers.pid(1)
    assert watchdog._lost() == (
        f"rank 1 of 3 (pid {pid}) has not sent its part of a sum, for which others wait"
    )


def stopped(program: str) -> subprocess.Popen[bytes]:
    """Starts a process, and stops it once it runs the program."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"print(1, flush=True); {program}"], stdout=-1
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    return process


def look_for_ten_seconds(watch: LeaderWatch) -> str | None:
    """Returns what a watch says within ten seconds, which take no time."""
    found = None
    for _ in range(20):
        found = found or watch.look(0.5)
    return found


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped, as rank 0."""
    process = stopped("import time; time.sleep(600)")
    yield process
    process.kill()
    process.wait()


def test_a_rank_0_that_stands_still_is_named(leader: subprocess.Popen[bytes]) -> None:
    board = Board.create(2)
    board.beat()
    watch = LeaderWatch(board, leader.pid)
    assert watch.look(0.5) is None
    assert look_for_ten_seconds(watch) == (
        f"rank 0 of 2 (pid {leader.pid}) has shown no sign of life for {SILENT_SECONDS:g} s"
    )


def test_a_pause_of_the_whole_machine_is_not_rank_0s_fault(
    leader: subprocess.Popen[bytes],
) -> None:
    board = Board.create(2)
    board.beat()
    watch = LeaderWatch(board, leader.pid)
    assert [watch.look(3600.0) for _ in range(8)] == [None] * 8


@pytest.mark.parametrize("kind", ["beats", "starts", "rests"])
def test_a_rank_0_that_beats_or_is_not_to_beat_is_left_alone(
    leader: subprocess.Popen[bytes], kind: str
) -> None:
    board = Board.create(2)
    watch = LeaderWatch(board, leader.pid)
    if kind == "rests":
        board.beat()
        watch.look(0.5)
        board.rest()
    for _ in range(40):
        if kind == "beats":
            board.beat()
        assert watch.look(0.5) is None


def test_a_rank_0_that_computes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may keep the interpreter to itself for as long as it likes."""
    board = Board.create(2)
    board.beat()
    uses = itertools.cycle([("R", 5), ("S", 6), ("D", 6), ("S", 6), ("S", 7)])
    state, ticks = "S", 0
    monkeypatch.setattr(watchdogs, "_idle_ticks", lambda pid: ticks if state == "S" else -1)
    watch = LeaderWatch(board, 1)
    for _ in range(100):
        state, more = next(uses)
        ticks += more
        assert watch.look(1.0) is None


def test_threads_that_run_are_not_idle(leader: subprocess.Popen[bytes]) -> None:
    assert watchdogs._idle_ticks(leader.pid) >= 0
    busy = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=-1
    )
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        assert watchdogs._idle_ticks(busy.pid) == -1
    finally:
        busy.kill()
        busy.wait()
    assert watchdogs._idle_ticks(busy.pid) == -1


def test_a_watchdog_that_is_closed_lets_nobody_watch_rank_0() -> None:
    board = Board.create(2)
    watchdog = RankWatchdog(board, Workers())
    watchdog.start()
    while not board.progress()[0].beats:
        threading.Event().wait(0.01)
    watchdog.close()
    assert board.progress()[0].beats == 0
