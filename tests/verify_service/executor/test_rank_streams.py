"""The stream between rank 0 and a rank of another host: what arrives, who is refused, silence."""

import contextlib
import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from foredraft.config.services import VerifyConfig
from foredraft.errors import ConfigError
from testing.stack import eventually
from verify_service.executor.ranks import messages, stream
from verify_service.executor.ranks.board import Board
from verify_service.executor.ranks.messages import Kind
from verify_service.executor.ranks.stream import StreamBoard, Streams
from verify_service.executor.ranks.watchdog import RankWatchdog
from verify_service.executor.ranks.workers import Ranks, Workers

HOST = "127.0.0.1"
SETTINGS = {"--dtype": "float32", "Foredraft": "1"}
Lost = queue.SimpleQueue[str]


@pytest.fixture
def board() -> Iterator[Board]:
    """Rank 0's, of three ranks; 1 and 2 are on another host."""
    made = Board.create(3, 1)
    yield made
    for one in made.streams:
        one.close()


def joined(
    board: Board, settings: dict[int, dict[str, str]], seconds: float = 60.0
) -> list[Callable[[], tuple[StreamBoard, Lost]]]:
    """Ranks that come with these settings, while rank 0 takes them."""
    streams, pool = Streams(HOST, SETTINGS), ThreadPoolExecutor(3)

    def come(rank: int) -> tuple[StreamBoard, Lost]:
        lost: Lost = queue.SimpleQueue()
        own = settings[rank]
        return StreamBoard((HOST, streams.port), rank, 4711, own, lost.put), lost

    coming = [pool.submit(come, rank).result for rank in settings]
    try:
        streams.take({1, 2}, board, seconds)
    finally:
        pool.shutdown(wait=False)
    return coming


def test_messages_and_progress_arrive(board: Board) -> None:
    rng = random.Random(2)
    (one, _), (two, _) = [come() for come in joined(board, {1: SETTINGS, 2: SETTINGS})]
    assert [each.rank for each in board.streams] == [1, 2]
    sent = [messages.gather(range(rng.randrange(50_000))) for _ in range(40)]
    sent.append(messages.stop())
    writer = threading.Thread(target=lambda: [board.write(message) for message in sent])
    writer.start()
    for inbox in (one, two):
        assert [inbox.read() for _ in sent] == sent
    writer.join()
    one.begin()
    one.end()
    one.worked(10**10)
    one.beat()
    eventually(lambda: board.progress()[1].beats == 1)
    told = board.progress()[1]
    assert (told.collectives, told.busy, told.waiting) == (1, 10**10, 0)
    assert told.moving > 0
    assert board.progress()[2].beats == 0


def test_a_rank_with_other_settings_is_refused_on_both_ends(board: Board) -> None:
    settings = {1: SETTINGS | {"--dtype": "bfloat16"}}
    why = "rank 1 has --dtype bfloat16, and rank 0 has float32"
    streams, pool = Streams(HOST, SETTINGS), ThreadPoolExecutor(1)
    coming = pool.submit(StreamBoard, (HOST, streams.port), 1, 4711, settings[1], lambda why: None)
    with pytest.raises(ConfigError, match=why):
        streams.take({1}, board, 60)
    with pytest.raises(ConfigError, match=why):
        coming.result(60)
    assert not board.streams


def test_strangers_are_passed_over_and_missing_ranks_named(
    board: Board, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None of it is unpickled, and nobody holds the others up."""
    monkeypatch.setattr(stream, "HELLO_SECONDS", 0.1)
    streams = Streams(HOST, SETTINGS)
    strangers = []
    deep = (1 << 16).to_bytes(4, "little") + b"[" * (1 << 16)
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x05\x00\x00\x00[1,2]", b"\x80\x04N.", deep, b""):
        connection = socket.create_connection((HOST, streams.port))
        connection.sendall(said)
        strangers.append(connection)
    with pytest.raises(ConfigError, match=r"ranks 1, 2 of other hosts have not come within 3 s"):
        streams.take({1, 2}, board, 3.0)
    assert caplog.text.count("is no rank") == len(strangers)
    for connection in strangers:
        connection.close()


def test_a_stranger_that_says_little_at_a_time_holds_nobody_up(
    board: Board, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream, "HELLO_SECONDS", 0.3)
    streams, is_over = Streams(HOST, SETTINGS), threading.Event()
    stranger = socket.create_connection((HOST, streams.port))

    def drip() -> None:
        with stranger, contextlib.suppress(OSError):
            stranger.sendall((1 << 16).to_bytes(4, "little"))
            while not is_over.wait(0.05):
                stranger.sendall(b"[")

    dripping = threading.Thread(target=drip)
    dripping.start()
    end = threading.Timer(20.0, is_over.set)  # or a defect would never end
    end.start()
    with pytest.raises(ConfigError, match="ranks 1, 2 of other hosts have not come"):
        streams.take({1, 2}, board, 1.0)
    assert not is_over.is_set()
    assert "is no rank: timed out" in caplog.text
    is_over.set()
    end.cancel()
    dripping.join()


def test_a_silent_or_lost_rank_0_is_noticed(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SILENT_SECONDS", 3.0)
    (_, first), (_, second) = [come() for come in joined(board, {1: SETTINGS, 2: SETTINGS})]
    with pytest.raises(queue.Empty):
        first.get(timeout=4.0)  # it beats
    monkeypatch.setattr(stream, "BEAT_SECONDS", 60.0)
    assert first.get(timeout=60) == "rank 0 has shown no sign of life for 3 s"
    board.streams[1].close()
    assert second.get(timeout=60).startswith("rank 0 ")


def test_of_ranks_that_are_gone_the_first_is_named(board: Board) -> None:
    """When a rank dies, its host ends the others there."""
    ends = [come()[0] for come in joined(board, {1: SETTINGS, 2: SETTINGS})]
    watchdog = RankWatchdog(board, Workers())
    assert watchdog._dead() is None
    for end, stream_of in reversed(list(zip(ends, board.streams, strict=True))):
        end._connection.shutdown(socket.SHUT_RDWR)
        eventually(lambda: stream_of.lost)  # noqa: B023
    told = watchdog._dead()
    assert told is not None
    assert told.startswith("rank 2 of 3 (pid 4711 on 127.0.0.1) has closed its connection")


def test_a_rank_that_is_told_to_stop_is_not_lost(board: Board) -> None:
    (one, lost), _ = [come() for come in joined(board, {1: SETTINGS, 2: SETTINGS})]
    board.write(messages.stop())
    assert messages.kind_of(one.read()) is Kind.STOP
    for each in board.streams:
        each.close()
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.5)


def test_an_address_of_another_host_is_refused() -> None:
    config = VerifyConfig(
        device="cpu", tensor_parallel_size=2, nnodes=2, dist_init_addr="192.0.2.1:50054"
    )
    with pytest.raises(
        ConfigError, match=r"--dist-init-addr 192\.0\.2\.1:50054 cannot be listened"
    ):
        Ranks.start(config)
