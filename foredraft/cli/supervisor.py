"""Keeps a set of child processes running: start, health, log lines, restarts, ordered stop.

Knows no service by name.
"""

import collections
import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from foredraft.errors import ForedraftError
from foredraft.rpc.channel import HealthProbe
from foredraft.rpc.lifetime import child_environment, signal_name

logger = logging.getLogger(__name__)

_TAIL_LINES = 20
_HEALTH_SECONDS = 2.0
# A check that takes longer than this says nothing of the child: the machine stood still.
_LATE_SECONDS = 1.5 * _HEALTH_SECONDS
_START_POLL_SECONDS = 0.2
# A child that ran so long starts again without waiting.
_STABLE_SECONDS = 60.0


class ServiceFailed(ForedraftError):
    """Raised where a child process could not start, or died too often.

    The message ends with its last lines.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A child process to keep alive.

    Attributes:
        name: Prefix of its lines.
        command: Program and arguments; it calls `foredraft.rpc.lifetime.exit_with_parent`.
        health: Address of its gRPC health service.
        max_deaths: Maximum number of deaths within `window_seconds` before the supervisor gives up;
            None never gives up.
        window_seconds: See `max_deaths`.
        backoff_seconds: Wait before the first restart; doubled up to `max_backoff_seconds`.
        max_backoff_seconds: See `backoff_seconds`.
        hang_checks: Number of unanswered health checks in a row, 2 s each, after which it is killed
            and restarted.
        stop_seconds: Time between SIGTERM and SIGKILL when everything stops.
        environment: Variables of this service only.
    """

    name: str
    command: tuple[str, ...]
    health: str
    max_deaths: int | None = 5
    window_seconds: float = 300.0
    backoff_seconds: float = 0.2
    max_backoff_seconds: float = 10.0
    hang_checks: int = 10
    stop_seconds: float = 35.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Child:
    service: Service
    process: subprocess.Popen[bytes] | None = None
    healthy: bool = False  # by its last answer
    is_up: bool = False  # whether this process was ever healthy
    was_up: bool = False  # whether any process of this service was
    misses: int = 0
    deaths: list[float] = field(default_factory=list)
    num_restarts: int = 0
    lines: collections.deque[str] = field(
        default_factory=lambda: collections.deque(maxlen=_TAIL_LINES)
    )
    ended: threading.Event = field(default_factory=threading.Event)
    wake: threading.Event = field(default_factory=threading.Event)  # look at its health now


@dataclass(frozen=True, slots=True)
class ChildState:
    """State of one child in `Supervisor.states`."""

    name: str
    pid: int | None
    healthy: bool
    num_restarts: int


class Supervisor:
    """Runs services until `stop`; usable from any thread, once.

    Each child is started and reaped by a thread of its own that lives as long as the child: the
    kernel ends a child with the thread that started it (`foredraft.rpc.lifetime`), so nothing
    outlives even a killed supervisor.

    Args:
        services: Services, in the order in which they are stopped.
        urls: URLs at which users reach the services; kept for callers.
        on_line: Called with (service name, line) for every line a child writes, from several
            threads.
        environment: Environment of the children; by default this process's own.
    """

    def __init__(
        self,
        services: Sequence[Service],
        *,
        urls: Mapping[str, str] | None = None,
        on_line: Callable[[str, str], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.services = tuple(services)
        self.urls = dict(urls or {})
        self._children = {service.name: _Child(service) for service in services}
        self._on_line = on_line or (lambda name, line: None)
        self._environment = child_environment(
            environment if environment is not None else os.environ
        )
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._failure: ServiceFailed | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Supervisor":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts every child and returns at once."""
        for child in self._children.values():
            self._spawn_thread(self._keep_running, child)
            self._spawn_thread(self._watch_health, child)

    def wait_healthy(
        self,
        timeout: float | None = None,
        on_progress: Callable[[list[ChildState]], None] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Waits until all children are healthy, or `stop` is set.

        `on_progress` gets the children's states about five times a second.

        Raises:
            ServiceFailed: One died before it ever was, or they were not within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not all(child.healthy for child in self._children.values()):
                self._raise_failure()
                if self._stopping.is_set() or (stop is not None and stop.is_set()):
                    return
                if deadline is not None and time.monotonic() > deadline:
                    late = [name for name, child in self._children.items() if not child.healthy]
                    tails = "".join(_tail(self._children[name].lines) for name in late)
                    raise ServiceFailed(
                        f"not healthy after {timeout:g} s: {', '.join(late)}{tails}"
                    )
                if on_progress:
                    on_progress(self.states())
                self._changed.wait(0.2)

    def wait(self, stop: threading.Event) -> None:
        """Waits until `stop` is set.

        Raises:
            ServiceFailed: A child died too often.
        """
        while not stop.wait(0.2):
            self._raise_failure()

    def states(self) -> list[ChildState]:
        """Returns a snapshot of the children."""
        return [
            ChildState(
                name,
                child.process.pid if child.process and child.process.poll() is None else None,
                child.healthy,
                child.num_restarts,
            )
            for name, child in self._children.items()
        ]

    def stop(self) -> None:
        """Ends the children one after the other: SIGTERM, time to drain, SIGKILL.

        Returns when all are gone.
        """
        self._stopping.set()
        for child in self._children.values() if self._threads else ():
            self._signal(child, signal.SIGTERM)
            if not child.ended.wait(child.service.stop_seconds):
                logger.warning("%s does not stop: killing it", child.service.name)
                self._signal(child, signal.SIGKILL)
                child.ended.wait()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def kill(self) -> None:
        """Ends all children at once, while `stop` runs in another thread or in the interrupted
        frame.
        """
        self._stopping.set()
        for child in self._children.values():
            self._signal(child, signal.SIGKILL)

    def _spawn_thread(self, target: Callable[[_Child], None], child: _Child) -> None:
        thread = threading.Thread(
            target=target,
            args=(child,),
            name=f"{target.__name__}-{child.service.name}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def _keep_running(self, child: _Child) -> None:
        try:
            while not self._stopping.is_set():
                started = time.monotonic()
                code = self._run_once(child)
                if self._stopping.is_set():
                    return
                wait = self._judge(child, code, time.monotonic() - started)
                if wait is None or self._stopping.wait(wait):
                    return
                child.num_restarts += 1
        finally:
            child.ended.set()
            child.wake.set()

    def _run_once(self, child: _Child) -> int | str:
        """Runs the process to its end; returns its exit status, or why it could not be started."""
        try:
            process = self.launch(
                child.service.command, {**self._environment, **child.service.environment}
            )
        except OSError as error:
            return f"could not be started: {error}"
        reader = threading.Thread(
            target=self._read_lines, args=(child, process), name=f"lines-{child.service.name}"
        )
        reader.start()
        child.process = process
        if self._stopping.is_set():
            self._signal(child, signal.SIGTERM)
        code = process.wait()
        # The child's own children are killed too, since they would hold its pipe open.
        _end_group(process.pid)
        reader.join()
        self._set_health(child, healthy=False)
        child.is_up = False
        child.wake.set()
        return code

    def launch(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Starts a process of a group of its own, whose output is a pipe; tests may replace it."""
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C in a terminal goes to the supervisor alone, which stops the children in order.
            process_group=0,
        )

    def _read_lines(self, child: _Child, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        with process.stdout as stream:
            for raw in stream:
                # Only the last state of a progress bar that overwrites itself.
                line = raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
                child.lines.append(line)
                self._on_line(child.service.name, line)

    def _judge(self, child: _Child, code: int | str, ran_seconds: float) -> float | None:
        """Returns the seconds to wait before the next start; None to give up."""
        service, now = child.service, time.monotonic()
        how = code if isinstance(code, str) else describe_exit(code)
        if not child.was_up:
            self._fail(f"{service.name} {how} while starting{_tail(child.lines)}")
            return None
        child.deaths = [died for died in child.deaths if now - died < service.window_seconds]
        child.deaths.append(now)
        if service.max_deaths is not None and len(child.deaths) > service.max_deaths:
            self._fail(
                f"{service.name} {how}; it died {len(child.deaths)} times within "
                f"{service.window_seconds:g} s: giving up{_tail(child.lines)}"
            )
            return None
        if ran_seconds > _STABLE_SECONDS:
            wait = service.backoff_seconds
        else:
            doublings = min(len(child.deaths) - 1, 16)
            wait = min(service.backoff_seconds * 2**doublings, service.max_backoff_seconds)
        logger.warning("%s %s; restarting it in %.1f s", service.name, how, wait)
        return wait

    def _fail(self, message: str) -> None:
        with self._changed:
            self._failure = self._failure or ServiceFailed(message)
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    def _watch_health(self, child: _Child) -> None:
        # The connection is made while the child starts, and kept: one that has no descriptors left,
        # because of what others send it, answers still.
        with contextlib.closing(HealthProbe(child.service.health)) as probe:
            spent = 0.0
            while not child.ended.is_set():
                # One check in 2 s, whether it is answered at once or not at all.
                pause = _HEALTH_SECONDS - spent if child.is_up else _START_POLL_SECONDS
                child.wake.wait(max(pause, 0.0))
                child.wake.clear()
                if self._stopping.is_set():
                    return
                process = child.process
                if process is None or process.poll() is not None:
                    child.misses = 0
                    probe.close()
                    continue
                started = time.monotonic()
                status = probe.check(_HEALTH_SECONDS)
                spent = time.monotonic() - started
                if child.process is not process or process.poll() is not None:
                    continue
                if status == "UNREACHABLE" and spent > _LATE_SECONDS:
                    continue
                self._note_health(child, status)

    def _note_health(self, child: _Child, status: str) -> None:
        if status == "UNREACHABLE":
            child.misses += 1
            if child.is_up and child.misses >= child.service.hang_checks:
                logger.warning("%s does not answer: killing it", child.service.name)
                self._signal(child, signal.SIGKILL)
            return
        child.misses = 0
        if status == "SERVING" and not child.is_up:
            child.is_up = child.was_up = True
            if child.num_restarts:
                logger.info("%s is back", child.service.name)
        self._set_health(child, healthy=status == "SERVING")

    def _set_health(self, child: _Child, *, healthy: bool) -> None:
        with self._changed:
            child.healthy = healthy
            self._changed.notify_all()

    def _signal(self, child: _Child, number: signal.Signals) -> None:
        process = child.process
        if process is not None and process.poll() is None:
            # A stopped process would see SIGTERM only when it is continued.
            for one in (number, signal.SIGCONT):
                process.send_signal(one)


def describe_exit(code: int) -> str:
    """Returns `exited with status 3` or `was killed by SIGSEGV`."""
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {signal_name(-code)}"


def _tail(lines: Sequence[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    # As PID 1 of a container this process is the parent of orphans, which stay until it reaps them.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-pid, 0)
