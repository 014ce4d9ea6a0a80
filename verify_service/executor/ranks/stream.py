"""Takes rank 0's messages to ranks of other hosts over TCP, and reports of their progress back.

Ranks of rank 0's own host use the board instead.
"""

import contextlib
import json
import logging
import math
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from foredraft.errors import ConfigError
from verify_service.executor.ranks import messages
from verify_service.executor.ranks.board import PROGRESS_COLUMNS, Board, Progress
from verify_service.executor.ranks.messages import Kind

# Version of the protocol; other versions are refused.
PROTOCOL = 1
# Each message follows its length; the length _ALIVE, without a message, is rank 0's sign of life.
_LENGTH = struct.Struct("<i")
_ALIVE = -1
MAX_MESSAGE_BYTES = 64 << 20
MAX_HELLO_BYTES = 1 << 16
# Seconds in which a connection must say which rank it is, and seconds between signs of life.
HELLO_SECONDS = 10.0
BEAT_SECONDS = 0.5
# A rank ends itself after this long without a sign of life from rank 0.
SILENT_SECONDS = 8.0
_PROGRESS = struct.Struct(f"<{PROGRESS_COLUMNS}q")

logger = logging.getLogger(__name__)


class RankStream:
    """Rank 0's end of a connection to a rank of another host.

    Args:
        connection: Connection of a rank whose hello has been accepted.
        hello: The rank's hello: `rank`, `pid` and `settings`.
        board: Board that takes the rank's progress, for the watchdog.

    Attributes:
        rank: Number of the rank.
        name: Its process and host, for log messages.
        lost: Reason for which the connection was lost; empty while it works.
        lost_at: Time of `time.monotonic` at which it was lost; infinite while it works.
    """

    def __init__(self, connection: socket.socket, hello: Mapping[str, Any], board: Board) -> None:
        self.rank: int = hello["rank"]
        self.name = f"pid {hello['pid']} on {connection.getpeername()[0]}"
        self.lost, self.lost_at = "", math.inf
        self._connection, self._board = connection, board
        self._lock = threading.Lock()
        self._is_closed = False
        name = f"rank-{self.rank}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, name=name, daemon=True).start()

    def send(self, message: bytes) -> None:
        """Sends a message. A lost connection raises no error here; the watchdog sees it."""
        self._send(_LENGTH.pack(len(message)) + message)

    def wait(self, seconds: float) -> None:
        """Waits until the rank, which has been told to stop, has ended, at most `seconds`."""
        self._is_closed = True
        self._reader.join(seconds)

    def close(self) -> None:
        """Closes the connection, which ends the rank."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _send(self, data: bytes) -> None:
        try:
            with self._lock:
                self._connection.sendall(data)
        except OSError as error:
            self._lose(error)

    def _beat(self) -> None:
        while not self.lost and not self._is_closed:
            self._send(_LENGTH.pack(_ALIVE))
            time.sleep(BEAT_SECONDS)

    def _read(self) -> None:
        try:
            while True:
                progress = _received(self._connection, _PROGRESS.size)
                self._board.note(self.rank, _PROGRESS.unpack(progress))
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if not self._is_closed and not self.lost:
            self.lost_at = time.monotonic()
            self.lost = f"has closed its connection ({error})"


class StreamBoard:
    """A rank's end of its connection to rank 0; replaces the board on other hosts.

    Args:
        address: Host and port of rank 0's `Streams`.
        rank: Number of this rank.
        pid: Process id of this rank.
        settings: Settings that all ranks must share, by name.
        on_lost: Called from a thread, with a sentence, when rank 0 is gone or silent.

    Raises:
        ConfigError: Rank 0 refuses this rank; the error gives its reason.
        OSError: There is no such host, or nothing listens there.
    """

    def __init__(
        self,
        address: tuple[str, int],
        rank: int,
        pid: int,
        settings: Mapping[str, str],
        on_lost: Callable[[str], None],
    ) -> None:
        self.rank, self._on_lost = rank, on_lost
        self._connection = socket.create_connection(address, HELLO_SECONDS)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.own_host: str = self._connection.getsockname()[0]
        hello = {"protocol": PROTOCOL, "rank": rank, "pid": pid, "settings": dict(settings)}
        _send_json(self._connection, hello)
        if refusal := _received_json(self._connection).get("refusal"):
            raise ConfigError(str(refusal))
        self._connection.settimeout(SILENT_SECONDS)
        self._progress = Progress(0, 0, 0)
        self._begun = 0
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._num_beats = 0
        threading.Thread(target=self._receive, name="rank-0", daemon=True).start()

    def read(self) -> bytes:
        """Waits for the next message and returns it."""
        return self._messages.get()

    def begin(self) -> None:
        """See Inbox."""
        self._begun = time.monotonic_ns()
        self._progress = self._progress._replace(collectives=self._progress.collectives + 1)

    def end(self) -> None:
        """See Inbox. All of the time counts as moving, since other ranks' starts are unknown."""
        moving = self._progress.moving + time.monotonic_ns() - self._begun
        self._progress = self._progress._replace(moving=moving)

    def worked(self, nanoseconds: int) -> None:
        """See Inbox."""
        self._progress = self._progress._replace(busy=self._progress.busy + nanoseconds)

    def beat(self) -> None:
        """Sends this rank's progress to rank 0."""
        self._num_beats += 1
        with contextlib.suppress(OSError):  # the reading thread notices a lost connection
            self._connection.sendall(
                _PROGRESS.pack(*self._progress._replace(beats=self._num_beats))
            )

    def _receive(self) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(_received(self._connection, _LENGTH.size))
                if length == _ALIVE:
                    continue
                if not 0 <= length <= MAX_MESSAGE_BYTES:
                    raise ConnectionError(f"a message of {length} bytes")
                message = _received(self._connection, length)
                self._messages.put(message)
                if messages.kind_of(message) is Kind.STOP:
                    return
        except TimeoutError:
            self._on_lost(f"rank 0 has shown no sign of life for {SILENT_SECONDS:g} s")
        except OSError as error:
            self._on_lost(f"rank 0 is gone ({error})")


class Streams:
    """Waits for the ranks of other hosts, and accepts those that have this verifier's settings.

    Args:
        host: Own address, which they connect to.
        settings: Settings that all ranks must share, by name.
    """

    def __init__(self, host: str, settings: Mapping[str, str]) -> None:
        self._settings = dict(settings)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        self.port: int = self._server.getsockname()[1]

    def take(self, wanted: set[int], board: Board, seconds: float) -> None:
        """Accepts connections, and adds the streams of all wanted ranks to the board.

        Args:
            wanted: Numbers of the ranks to wait for.
            board: Board of rank 0.
            seconds: Seconds in which all of them must connect.

        Raises:
            ConfigError: A rank has other settings, or some have not connected in time.
        """
        until = time.monotonic() + seconds
        while missing := wanted - {stream.rank for stream in board.streams}:
            self._server.settimeout(max(0.01, until - time.monotonic()))
            try:
                connection, peer = self._server.accept()
            except TimeoutError:
                names = ", ".join(map(str, sorted(missing)))
                raise ConfigError(
                    f"ranks {names} of other hosts have not come within {seconds:g} s: start those"
                    " hosts with the same --dist-init-addr and their own --node-rank"
                ) from None
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                hello = _received_json(connection, time.monotonic() + HELLO_SECONDS)
                refusal = self._refusal(hello, missing)
                _send_json(connection, {"refusal": refusal})
            except (OSError, ValueError) as error:
                logger.warning("a stranger at %s is no rank: %s", peer[0], error)
                connection.close()
                continue
            if refusal:
                connection.close()
                raise ConfigError(f"{peer[0]}: {refusal}")
            connection.settimeout(None)
            board.streams.append(RankStream(connection, hello, board))
            board.streams.sort(key=lambda stream: stream.rank)
        self._server.close()

    def _refusal(self, hello: Mapping[str, Any], missing: set[int]) -> str:
        rank, settings = hello.get("rank"), hello.get("settings")
        if not isinstance(rank, int) or not isinstance(settings, dict) or "pid" not in hello:
            raise ValueError("it does not say who it is")
        if hello.get("protocol") != PROTOCOL:
            return f"rank {rank} speaks another protocol: run one version on all hosts"
        if rank not in missing:
            return f"rank {rank} is not awaited: is --node-rank given twice?"
        for name, own in self._settings.items():
            if settings.get(name) != own:
                return f"rank {rank} has {name} {settings.get(name)}, and rank 0 has {own}"
        return ""


def _received(connection: socket.socket, length: int, until: float = math.inf) -> bytes:
    """Waits for `length` bytes.

    Args:
        until: Time of `time.monotonic` at which they must have come; infinite for each part to
            take as long as the connection's own timeout.
    """
    data = bytearray()
    while len(data) < length:
        if until < math.inf:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("it has ended")
        data += part
    return bytes(data)


def _send_json(connection: socket.socket, value: Mapping[str, Any]) -> None:
    data = json.dumps(value).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _received_json(connection: socket.socket, until: float = math.inf) -> dict[str, Any]:
    """Reads a JSON object of at most MAX_HELLO_BYTES bytes; raises ValueError for anything else.

    Args:
        until: See `_received`.
    """
    (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size, until))
    if not 0 < length <= MAX_HELLO_BYTES:
        raise ValueError(f"a message of {length} bytes")
    try:
        value = json.loads(_received(connection, length, until))
    except RecursionError:
        raise ValueError("JSON of too many levels") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value
