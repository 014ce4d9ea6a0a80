"""Child processes are started in order, watched, replaced, and never outlive their supervisor."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import supervisor as supervisor_module
from foredraft.cli.supervisor import Service, ServiceFailed, Supervisor, describe_exit
from foredraft.rpc.channel import HealthProbe
from foredraft.rpc.lifetime import PARENT_VARIABLE
from testing.chaos.processes import is_alive
from testing.stack import eventually

CHILD = Path(__file__).with_name("child.py")
ROOT = CHILD.parents[2]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Service]:
    def make_service(name: str, *flags: str, **settings: Any) -> Service:
        listen = f"unix:{tmp_path}/{name}.sock"
        command = (sys.executable, str(CHILD), "--listen", listen, "--name", name, *flags)
        return Service(name=name, command=command, health=listen, **settings)

    return make_service


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def pid_of(supervisor: Supervisor, name: str) -> int:
    pid = next(state.pid for state in supervisor.states() if state.name == name)
    assert pid
    return pid


def test_children_get_healthy_and_stop_in_order(
    make: Callable[..., Service], tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    lines: list[tuple[str, str]] = []
    seen: list[int] = []
    services = [
        make("front", "--journal", str(journal)),
        make("back", "--journal", str(journal), "--delay", "0.5"),
    ]
    before = threading.active_count()
    with Supervisor(services, on_line=lambda *line: lines.append(line)) as supervisor:
        supervisor.wait_healthy(
            120, on_progress=lambda states: seen.append(sum(state.healthy for state in states))
        )
        pids = [pid_of(supervisor, name) for name in ("front", "back")]
        assert all(state.healthy for state in supervisor.states())
        eventually(lambda: ("front", f"pid {pids[0]}") in lines)
    assert 0 in seen
    assert journal.read_text().split() == ["front", "back"]
    assert not any(map(is_alive, pids))
    assert all(state.pid is None for state in supervisor.states())
    eventually(lambda: threading.active_count() <= before)


def test_a_failure_to_start_is_told_at_once(make: Callable[..., Service]) -> None:
    with (
        Supervisor([make("front"), make("back", "--fail")]) as supervisor,
        pytest.raises(ServiceFailed) as failed,
    ):
        supervisor.wait_healthy(120)
    assert "back exited with status 3 while starting" in str(failed.value)
    assert "cannot find the weights" in str(failed.value)


def test_a_program_that_is_missing_is_a_failure_to_start(tmp_path: Path) -> None:
    service = Service(
        name="none", command=(str(tmp_path / "none"),), health=f"unix:{tmp_path}/none.sock"
    )
    with Supervisor([service]) as supervisor, pytest.raises(ServiceFailed, match="could not be"):
        supervisor.wait_healthy(120)


def test_a_child_that_never_gets_healthy_is_named(make: Callable[..., Service]) -> None:
    with (
        Supervisor([make("slow", "--delay", "3600")]) as supervisor,
        pytest.raises(ServiceFailed, match=r"not healthy after 1\.5 s: slow"),
    ):
        supervisor.wait_healthy(1.5)


def test_a_killed_child_comes_back(make: Callable[..., Service]) -> None:
    with Supervisor([make("draft", max_deaths=None)]) as supervisor:
        supervisor.wait_healthy(120)
        for number in (1, 2):
            old = pid_of(supervisor, "draft")
            os.kill(old, signal.SIGKILL)
            eventually(lambda number=number: supervisor.states()[0].num_restarts == number)
            supervisor.wait_healthy(120)
            assert pid_of(supervisor, "draft") != old
        supervisor.wait(_soon())


def test_a_child_that_keeps_dying_is_given_up(make: Callable[..., Service]) -> None:
    service = make("verify", max_deaths=1, backoff_seconds=0.01)
    with Supervisor([service]) as supervisor:
        supervisor.wait_healthy(120)
        os.kill(pid_of(supervisor, "verify"), signal.SIGUSR2)
        eventually(lambda: supervisor.states()[0].num_restarts == 1)
        supervisor.wait_healthy(120)
        os.kill(pid_of(supervisor, "verify"), signal.SIGUSR2)
        with pytest.raises(ServiceFailed, match="exited with status 7; it died 2 times"):
            supervisor.wait(threading.Event())


def test_a_child_that_hangs_is_replaced(make: Callable[..., Service]) -> None:
    with Supervisor([make("draft", max_deaths=None, hang_checks=1)]) as supervisor:
        supervisor.wait_healthy(120)
        old = pid_of(supervisor, "draft")
        os.kill(old, signal.SIGUSR1)
        eventually(lambda: supervisor.states()[0].num_restarts >= 1)
        supervisor.wait_healthy(120)
        assert not is_alive(old)


def test_a_check_that_is_late_itself_kills_nothing(
    make: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_late = 0

    class LateProbe(HealthProbe):
        """Runs out of its deadline, and of CPU time, once the child is up."""

        def check(self, timeout: float = 2.0) -> str:
            nonlocal num_late
            if super().check(timeout) != "SERVING":
                return "UNREACHABLE"
            num_late += 1
            if num_late == 1:
                return "SERVING"
            time.sleep(2 * timeout)
            return "UNREACHABLE"

    monkeypatch.setattr(supervisor_module, "HealthProbe", LateProbe)
    monkeypatch.setattr(supervisor_module, "_HEALTH_SECONDS", 0.2)
    monkeypatch.setattr(supervisor_module, "_LATE_SECONDS", 0.3)
    with Supervisor([make("front", hang_checks=2)]) as supervisor:
        supervisor.wait_healthy(120)
        pid = pid_of(supervisor, "front")
        eventually(lambda: num_late > 5)
        assert pid_of(supervisor, "front") == pid


def test_a_child_that_ignores_sigterm_is_killed(make: Callable[..., Service]) -> None:
    supervisor = Supervisor([make("deaf", "--stubborn", stop_seconds=0.2)])
    supervisor.start()
    supervisor.wait_healthy(120)
    pid = pid_of(supervisor, "deaf")
    supervisor.stop()
    assert not is_alive(pid)


def test_killing_ends_a_stop_that_waits(make: Callable[..., Service]) -> None:
    supervisor = Supervisor([make("deaf", "--stubborn", stop_seconds=3600)])
    supervisor.start()
    supervisor.wait_healthy(120)
    stopping = threading.Thread(target=supervisor.stop)
    stopping.start()
    supervisor.kill()
    stopping.join(120)
    assert not stopping.is_alive()


@pytest.fixture
def orphan(make: Callable[..., Service]) -> Iterator[tuple[Supervisor, int]]:
    """A supervised draft, and a process that it has started and does not end."""
    lines: list[str] = []
    with Supervisor(
        [make("draft", "--orphan")], on_line=lambda name, line: lines.append(line)
    ) as supervisor:
        supervisor.wait_healthy(120)
        found = eventually(lambda: [line for line in lines if line.startswith("orphan")])
        yield supervisor, int(found[0].split()[1])


def test_what_a_child_started_goes_with_it(orphan: tuple[Supervisor, int]) -> None:
    supervisor, pid = orphan
    assert is_alive(pid)
    os.kill(pid_of(supervisor, "draft"), signal.SIGKILL)
    eventually(lambda: not is_alive(pid))


@pytest.fixture
def adopting() -> Iterator[None]:
    """Makes this process the parent of its children's orphans, as PID 1 of a container is."""
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl, 36
    assert prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    prctl(set_child_subreaper, 0, 0, 0, 0)


@pytest.mark.usefixtures("adopting")
def test_adopted_orphans_are_reaped(orphan: tuple[Supervisor, int]) -> None:
    supervisor, pid = orphan
    os.kill(pid_of(supervisor, "draft"), signal.SIGKILL)
    eventually(lambda: supervisor.states()[0].num_restarts == 1)
    assert not Path(f"/proc/{pid}").exists()


def test_nothing_survives_a_killed_supervisor(make: Callable[..., Service], tmp_path: Path) -> None:
    service = make("draft")
    script = f"""
import threading
from foredraft.cli import supervisor as supervisor_module
from foredraft.cli.supervisor import Service, Supervisor
supervisor = Supervisor([Service(name="draft", command={service.command!r}, health={service.health!r})])
# The thread that starts a supervisor may end long before it.
starter = threading.Thread(target=supervisor.start)
starter.start()
starter.join()
supervisor.wait_healthy(120)
print(supervisor.states()[0].pid, flush=True)
supervisor.wait(threading.Event())
"""  # noqa: E501
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process, process.stdout:
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
    eventually(lambda: not is_alive(pid))


def test_a_child_whose_parent_is_gone_does_not_start(tmp_path: Path) -> None:
    environment = {**os.environ, PARENT_VARIABLE: "1"}
    command = [sys.executable, str(CHILD), "--listen", f"unix:{tmp_path}/a.sock"]
    result = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert result.returncode == 1
    assert result.stdout == b""


def test_a_service_alone_needs_no_parent(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != PARENT_VARIABLE}
    command = [sys.executable, str(CHILD), "--listen", f"unix:{tmp_path}/a.sock", "--fail"]
    result = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert result.returncode == 3


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with status 0"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-99, "was killed by signal 99"),
    ],
)
def test_exits_are_described(code: int, text: str) -> None:
    assert describe_exit(code) == text


def _soon() -> threading.Event:
    event = threading.Event()
    event.set()
    return event
