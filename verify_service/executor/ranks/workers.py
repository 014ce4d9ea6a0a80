"""Starts and ends the worker processes of ranks.

Rank 0 starts the workers of its host; on another host the verifier's process starts them. Workers
end when the process that started them ends.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from foredraft import __version__
from foredraft.attention.choice import device_for
from foredraft.config.options import flag_of
from foredraft.config.ranks import Nodes
from foredraft.config.services import VerifyConfig
from foredraft.errors import ConfigError
from foredraft.models.provenance import model_checksum
from foredraft.models.registry import resolve_model_path
from foredraft.rpc.lifetime import signal_name
from verify_service.executor.ranks import messages
from verify_service.executor.ranks.board import Board, Inbox
from verify_service.executor.ranks.group import ProcessGroup
from verify_service.executor.ranks.host_group import HostGroup
from verify_service.executor.ranks.stream import Streams
from verify_service.executor.ranks.watchdog import RankWatchdog

STOP_SECONDS = 5.0
# Seconds for all hosts to join; models are loaded after that.
JOIN_SECONDS = 600.0
# Address for ranks that are all on one machine.
HOST = "127.0.0.1"
STREAM_PORT = "foredraft/streams"  # key of the store
VARIABLES = {
    # Suppresses warnings about hosts without names.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # NVLink multicast needs a fabric manager that many machines lack, and no sum here gains by it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
ONE_HOST_VARIABLES = {"NCCL_SOCKET_IFNAME": "lo"}
# Flags that must have the same values on all hosts.
_ALIKE = (
    "tensor_parallel_size",
    "dtype",
    "load_format",
    "quantization",
    "quantization_group_size",
    "quantization_param_path",
    "kv_cache_dtype",
    "exactness",
    "attention_backend",
    "disable_cuda_graph",
)

logger = logging.getLogger(__name__)


def join_group(
    config: VerifyConfig, rank: int, num_local: int, store: TCPStore, inbox: Inbox, host: str
) -> ProcessGroup:
    """Joins the other ranks on the configured device, and waits until all have joined.

    Args:
        config: Configuration of the verifier.
        rank: Number of this rank.
        num_local: Number of ranks on each host.
        store: Store that ranks use to find each other.
        inbox: Board, or what replaces it on other hosts than rank 0's; records each collective.
        host: Address at which the others reach this host.
    """
    size = config.tensor_parallel_size
    if device_for(config.device).type == "cuda":
        from verify_service.executor.ranks.cuda_group import CudaGroup  # needs torch with CUDA

        return CudaGroup.join(rank, size, num_local, store, inbox, host)
    if isinstance(inbox, Board) and num_local == size:
        return HostGroup(rank, size, inbox.exchange, inbox)
    return ProcessGroup.join(rank, size, num_local, store, inbox, host)


def settings_of(config: VerifyConfig) -> dict[str, str]:
    """Returns the settings that the ranks of all hosts must share, by name."""
    found = {flag_of(name): str(getattr(config, name)) for name in _ALIKE}
    path = resolve_model_path(config.model_path, config.revision)
    return found | {
        "a model of checksum": model_checksum(path),
        "a device of type": device_for(config.device).type,
        "Foredraft": __version__,
        "torch": torch.__version__,
    }


@dataclass(frozen=True, slots=True)
class Join:
    """Start-up message for a worker process, which it reads from its standard input.

    Attributes:
        config: Configuration of the verifier.
        rank: Number of the worker.
        size: Number of ranks.
        num_local: Number of ranks on each host.
        host, port: Address of the store that ranks use to find each other.
        file, bells: Descriptors of the board; -1 and empty on other hosts than rank 0's.
        joined: Descriptor of the eventfd that counts the ranks that have joined.
        parent: Process id of whoever starts the worker.
    """

    config: VerifyConfig
    rank: int
    size: int
    num_local: int
    host: str
    port: int
    file: int
    bells: list[int]
    joined: int
    parent: int

    def text(self) -> str:
        """Returns the message as a line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def read(cls, text: str) -> "Join":
        """Reads the message from a line of JSON."""
        values = json.loads(text)
        config: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.pop("config").items()
        }
        return cls(config=VerifyConfig(**config), **values)


class Workers:
    """Holds the worker processes of this host.

    Attributes:
        module: Module to run; benchmarks wrap it.
        ranks: Number of each worker's rank, in the order of `processes`.
        processes: Process of each worker.
    """

    module = "verify_service.rank"

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._joined = os.eventfd(0, os.EFD_NONBLOCK)
        self._num_joined = 0

    def start(
        self,
        config: VerifyConfig,
        rank: int,
        num_local: int,
        meeting: tuple[str, int],
        board: Board | None,
    ) -> None:
        """Starts a rank's process.

        Args:
            config: Configuration of the verifier.
            rank: Number of the rank.
            num_local: Number of ranks on each host.
            meeting: Host and port of the store that ranks use to find each other.
            board: Board of rank 0; None on other hosts.
        """
        file, bells = (-1, []) if board is None else (board.file, board.bells)
        process = self.launch([self._joined, *bells, *([] if board is None else [file])])
        assert process.stdin is not None
        self.ranks.append(rank)
        self.processes.append(process)
        size = config.tensor_parallel_size
        host, port = meeting
        join = Join(
            config, rank, size, num_local, host, port, file, bells, self._joined, os.getpid()
        )
        with contextlib.suppress(BrokenPipeError):  # `ended` reports the process
            process.stdin.write(join.text().encode())
            process.stdin.flush()

    def launch(self, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
        """Starts a process that has these descriptors, and a pipe as its standard input; tests
        replace this method.
        """
        command = [sys.executable, "-m", self.module]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=descriptors)

    def have_joined(self) -> bool:
        """Returns whether all of them have joined the other ranks."""
        with contextlib.suppress(BlockingIOError):
            self._num_joined += os.eventfd_read(self._joined)
        return self._num_joined >= len(self.processes)

    def ended(self) -> tuple[int, str] | None:
        """Returns the rank of a process that has ended, and how it ended; None while all run."""
        for rank, process in zip(self.ranks, self.processes, strict=True):
            status = process.poll()
            if status is not None:
                how = f"ended with status {status}"
                if status < 0:
                    how = f"was ended by {signal_name(-status)}"
                return rank, how
        return None

    def pid(self, rank: int) -> int | None:
        """Returns the process id of a rank; None for a rank of another host."""
        return self.processes[self.ranks.index(rank)].pid if rank in self.ranks else None

    def kill(self) -> None:
        """Kills all of them."""
        for process in self.processes:
            process.kill()

    def wait(self) -> None:
        """Waits until all processes, which have been told to stop, have ended; kills slow ones."""
        for process in self.processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()


class Ranks:
    """Holds rank 0's connections to the running workers.

    Attributes:
        board: Board that sends them messages.
        group: Group of all ranks, for the layers of rank 0's share of the model.
        watchdog: Watchdog of the ranks.
    """

    def __init__(
        self, board: Board, group: ProcessGroup, workers: Workers, watchdog: RankWatchdog
    ) -> None:
        self.board, self.group, self.watchdog = board, group, watchdog
        self._workers = workers

    @classmethod
    def start(cls, config: VerifyConfig) -> "Ranks":
        """Starts this host's workers, and waits until all ranks have joined.

        Raises:
            ConfigError: --dist-init-addr is no address of this host, or the ranks of another host
                have not connected or have other settings.
        """
        size, nodes = config.tensor_parallel_size, config.nodes()
        num_local = config.ranks_per_host()
        board = Board.create(size, num_local)
        os.environ.update(VARIABLES | (ONE_HOST_VARIABLES if nodes.count == 1 else {}))
        host = HOST if nodes.count == 1 else _address(nodes)
        try:
            streams = None if nodes.count == 1 else Streams(host, settings_of(config))
            store = TCPStore(host, nodes.port, size, is_master=True, wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            why = str(error).split("\n")[0]
            raise ConfigError(
                f"--dist-init-addr {nodes.host}:{nodes.port} cannot be listened on: {why}; host 0"
                " needs an address and a free port of its own"
            ) from error
        workers = Workers()
        watchdog = RankWatchdog(board, workers)
        try:
            for rank in range(1, num_local):
                workers.start(config, rank, num_local, (host, store.port), board)
            watchdog.start()
            if streams is not None:
                store.set(STREAM_PORT, str(streams.port))
                logger.info(
                    "waiting for %d ranks of %d other hosts at %s:%d",
                    size - num_local,
                    nodes.count - 1,
                    host,
                    nodes.port,
                )
                streams.take(set(range(num_local, size)), board, JOIN_SECONDS)
        except BaseException:
            watchdog.close()
            workers.kill()
            workers.wait()
            for stream in board.streams:
                stream.close()
            raise
        group = join_group(config, 0, num_local, store, board, host)
        board.group = group
        watchdog.watch_group(group)
        others = [f"pid {process.pid}" for process in workers.processes]
        others += [stream.name for stream in board.streams]
        logger.info("%d ranks have joined; the others: %s", size, ", ".join(others))
        return cls(board, group, workers, watchdog)

    def close(self) -> None:
        """Ends the workers, and waits until this host's have ended."""
        self.watchdog.close()
        if any(process.poll() is None for process in self._workers.processes) or self.board.streams:
            self.board.write(messages.stop())
        self.group.close()  # the other ranks close theirs at the same time
        self._workers.wait()
        for stream in self.board.streams:
            stream.wait(STOP_SECONDS)
            stream.close()


def start_further(config: VerifyConfig, nodes: Nodes) -> Workers:
    """Starts the ranks of a host other than rank 0's; they connect to rank 0 themselves."""
    os.environ.update(VARIABLES)
    num_local = config.ranks_per_host()
    workers = Workers()
    for rank in range(nodes.rank * num_local, (nodes.rank + 1) * num_local):
        workers.start(config, rank, num_local, (nodes.host, nodes.port), None)
    return workers


def _address(nodes: Nodes) -> str:
    """Returns the IP address of host 0."""
    try:
        found = socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--dist-init-addr {nodes.host}: {error.strerror}") from error
    return str(found[0][4][0])
