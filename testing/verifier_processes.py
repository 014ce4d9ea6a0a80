"""Verifiers and gateways as processes of their own, for tests with several of them.

Starts nothing by itself.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from foredraft.config.options import to_flags
from foredraft.rpc.channel import check_health
from foredraft.rpc.lifetime import child_environment
from testing.forked import ForkedModule
from testing.stack import eventually, free_port, is_listening


class ServiceProcess:
    """A service that can be killed and started again at the same address.

    Leaving its block ends it.

    Args:
        module: `verify_service`, `draft_service` or `gateway`.
        address: Address of its health service.
        program: Module to run instead of `module`.
        flags: Fields of its configuration.
    """

    def __init__(
        self, module: str, address: str, *, program: Sequence[str] = (), **flags: Any
    ) -> None:
        self.address = address
        self._program = program
        if flags.get("device") == "cuda":  # it must not be forked
            self._program = program or ("-m", module)
        self._module, self._flags = module, to_flags(flags)
        self._process: subprocess.Popen[bytes] | ForkedModule | None = None

    @property
    def pid(self) -> int:
        """Pid of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts it; `wait` returns when it serves."""
        environment = child_environment()
        if self._program:
            command = [sys.executable, *self._program, *self._flags]
            self._process = subprocess.Popen(command, env=environment)
        else:
            self._process = ForkedModule(self._module, *self._flags, environment=environment)

    def wait(self, seconds: float = 120.0) -> None:
        """Returns when it says SERVING."""
        eventually(lambda: check_health(self.address) == "SERVING", seconds)

    def stop(self, seconds: float = 60.0) -> int:
        """Sends SIGTERM; returns the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(seconds)

    def kill(self) -> None:
        """Sends SIGKILL; returns when it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


def verifier(model: Path, address: str, **flags: Any) -> ServiceProcess:
    """Returns a verifier on the CPU, without drafts unless flags say otherwise."""
    values = {
        "model_path": str(model),
        "served_model_name": "model",
        "device": "cpu",
        "num_threads": 1,
        "speculative_algorithm": "NONE",
        **flags,
    }
    return ServiceProcess("verify_service", address, listen=address, **values)


@contextlib.contextmanager
def gateway(verifiers: Sequence[str], **flags: Any) -> Iterator[tuple[ServiceProcess, str, str]]:
    """Starts a gateway before verifiers; yields it, its URL and the address of its gRPC once it
    listens.
    """
    http, grpc = free_port(), free_port()
    where, url = f"127.0.0.1:{grpc}", f"http://127.0.0.1:{http}"
    process = ServiceProcess(
        "gateway", where, verifier=tuple(verifiers), port=http, grpc_port=grpc, **flags
    )
    with process:
        eventually(lambda: is_listening(http) and is_listening(grpc))
        yield process, url, where


def usable(url: str) -> int:
    """Returns the verifiers that a gateway can use now."""
    answer = httpx.get(f"{url}/health", timeout=60)
    return int(answer.json()["verifiers"]["usable"]) if answer.status_code == 200 else 0
