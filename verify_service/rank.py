"""`python -m verify_service.rank`: a worker process of a verifier whose target several ranks share.

Rank 0 starts it, tells it through standard input who it is, and sends one message for each part of
a step. It ends when rank 0 says so, or is gone.
"""

# ruff: noqa: E402
import gc

gc.disable()  # imports, of torch above all, take a sixth longer with it

import logging
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import TCPStore

from foredraft.attention.choice import device_for
from foredraft.errors import ConfigError, ForedraftError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.rpc import lifetime
from foredraft.runner.model_runner import ModelRunner
from foredraft.telemetry import logging as telemetry_logging
from verify_service.executor.ranks import messages
from verify_service.executor.ranks.board import Board, Inbox, timed
from verify_service.executor.ranks.choice import LocalLogits
from verify_service.executor.ranks.group import ProcessGroup
from verify_service.executor.ranks.messages import Kind
from verify_service.executor.ranks.stream import BEAT_SECONDS, StreamBoard
from verify_service.executor.ranks.watchdog import RANK_LOST, LeaderWatch
from verify_service.executor.ranks.workers import (
    JOIN_SECONDS,
    STREAM_PORT,
    Join,
    join_group,
    settings_of,
)
from verify_service.kv_type import kv_scales, kv_type
from verify_service.memory import least_free_bytes
from verify_service.target import Target, load_share

if TYPE_CHECKING:  # needs triton
    from verify_service.executor.ranks.graphs import GraphFollower

# A collection of all that was imported stops a step for a sixth of a second.
gc.freeze()
gc.enable()

# A GPU's steps follow each other faster than a process wakes up; on a CPU whoever spins takes the
# others' time.
SPIN_SECONDS = 0.01
EAGER = (Kind.FORWARD, Kind.MOVE, Kind.LOGITS, Kind.CHOICE, Kind.GATHER)

logger = logging.getLogger(__name__)


def main() -> int:
    """Computes rank 0's requests until it says stop; the exit status is 1 when that failed."""
    # Rank 0 ends this process in its own time, also where a terminal signals all of them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    join = Join.read(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    config = join.config
    telemetry_logging.setup(f"verify rank {join.rank}", config.log_level, config.log_format)
    try:
        store = _store(join)
        inbox, host = _inbox(join, store)
        threading.Thread(target=_beat, args=(inbox,), name="heartbeat", daemon=True).start()
        group = join_group(config, join.rank, join.num_local, store, inbox, host)
        if isinstance(inbox, Board):
            inbox.group = group
        os.eventfd_write(join.joined, 1)
        Worker(join, load_share(config, group), inbox, group).run()
    except ForedraftError as error:
        logger.error("cannot start: %s", error)
        return 1
    group.close()
    return 0


class Worker:
    """Computes its part of each forward.

    Args:
        target: This rank's share.
    """

    def __init__(self, join: Join, target: Target, inbox: Inbox, group: ProcessGroup) -> None:
        self._config, self._target, self._inbox = join.config, target, inbox
        self._group = group
        self._runner: ModelRunner | None = None
        self._local = LocalLogits(target.model.lm_head)
        self._follower: GraphFollower | None = None
        # One rank is enough, and says it once.
        self._watches = join.rank == 1
        self._parent = join.parent

    @torch.inference_mode()
    def run(self) -> None:
        """Handles messages until one says stop."""
        while True:
            message = self._inbox.read()
            kind = messages.kind_of(message)
            if kind is Kind.STOP:
                if self._follower is not None:
                    self._follower.close()
                return
            if kind is Kind.MEMORY:
                least_free_bytes(self._target.device, self._group)
            elif kind is Kind.SETUP:
                self._set_up(*messages.read_setup(message))
                self._watch_rank_0()
            elif self._follower is not None and kind not in EAGER:
                self._follower.follow(kind, message)
            else:
                assert self._runner is not None, "nothing was set up"
                with timed(self._inbox):
                    self._follow(self._runner, kind, message)

    def _follow(self, runner: ModelRunner, kind: Kind, message: bytes) -> None:
        if kind is Kind.FORWARD:
            asked = messages.read_forward(message)
            rows, capture, all_hidden = asked.rows, asked.capture, asked.all_hidden
            self._local.logits = runner.forward(rows, capture, all_hidden=all_hidden).logits
        elif kind is Kind.CHOICE:
            self._local.choose(*messages.read_choice(message))
        elif kind is Kind.GATHER:
            self._local.gather(messages.read_gather(message))
        elif kind is Kind.LOGITS:
            self._logits(runner, messages.read_logits(message))
        else:
            runner.commit_paths(messages.read_move(message))

    def _logits(self, runner: ModelRunner, num_rows: int) -> None:
        """Computes its part of the logits of hidden states that rank 0 has chosen."""
        model = self._target.model
        hidden = torch.empty(
            num_rows, model.config.hidden_size, dtype=model.dtype, device=model.device
        )
        logits = runner.logits(self._group.broadcast(hidden))
        if not model.lm_head.gathers:
            model.lm_head.gather(logits)

    def _watch_rank_0(self) -> None:
        """Watches rank 0 from now on, when it has loaded the model."""
        if self._watches and isinstance(self._inbox, Board):
            LeaderWatch(self._inbox, self._parent).start()

    def _set_up(self, cache: tuple[int, int, int], sizes: list[int]) -> None:
        num_pages, page_size, num_scratch = cache
        target, model = self._target, self._target.model
        dtype, attention = kv_type(self._config, target.dtype), target.attention
        kv = PagedKV.for_model(
            model.config,
            num_pages,
            page_size,
            dtype,
            target.device,
            num_scratch,
            kv_scales(self._config, model, dtype),
            model.num_kv_heads,
        )
        self._runner = ModelRunner(model, kv, attention)
        model.lm_head.gathers = target.device.type == "cuda" or bool(sizes)
        if sizes:
            from verify_service.executor.ranks.graphs import GraphFollower, GraphSizes, captured

            both = captured(model, kv, attention, GraphSizes.of(sizes), self._group)
            self._follower = GraphFollower(*both)
        gc.freeze()  # what was imported and made since then, too


def _store(join: Join) -> TCPStore:
    """Returns the store where ranks meet; waits for rank 0, which may not have been started yet."""
    until = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            socket.create_connection((join.host, join.port), 5.0).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise ConfigError(
                    f"--dist-init-addr {join.host}:{join.port}: nobody answers there within"
                    f" {JOIN_SECONDS:g} s ({error}); start host 0, or correct the address"
                ) from error
            time.sleep(0.2)
    seconds = timedelta(seconds=JOIN_SECONDS)
    return TCPStore(join.host, join.port, join.size, is_master=False, timeout=seconds)


def _inbox(join: Join, store: TCPStore) -> tuple[Inbox, str]:
    """Returns the inbox of rank 0's messages, and this host's address."""
    if join.file >= 0:
        on_gpu = device_for(join.config.device).type == "cuda"
        spin = SPIN_SECONDS if on_gpu else 0.0
        board = Board(join.file, join.bells, join.rank, join.size, join.num_local, spin)
        return board, join.host

    def end(why: str) -> None:
        logger.error("rank %d of %d: %s: ending this rank", join.rank, join.size, why)
        lifetime.end_at_once(RANK_LOST)

    address = (join.host, int(store.get(STREAM_PORT)))
    stream = StreamBoard(address, join.rank, os.getpid(), settings_of(join.config), end)
    return stream, stream.own_host


def _beat(inbox: Inbox) -> None:
    while True:
        inbox.beat()
        time.sleep(BEAT_SECONDS)


def _end_with_parent() -> None:
    """Ends this process with rank 0's: the pipe is closed when its process is gone, for
    whatever reason.
    """
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
