"""The stack under test, started as users start it, with the suite's link before its draft."""

import asyncio
import random
import sys
import tempfile
import time
import uuid
from asyncio.subprocess import Process
from pathlib import Path

import httpx

from foredraft.config.options import to_flags
from foredraft.rpc.channel import check_health
from foredraft.rpc.lifetime import child_environment
from testing.chaos import processes
from testing.chaos.liar import Liar
from testing.chaos.link import Link
from testing.chaos.room import Room
from testing.chaos.serve import LINK_VARIABLE
from testing.stack import free_port

MARK = "FOREDRAFT_CHAOS_MARK"
SERVICES = ("gateway", "verify", "draft")
DRAFTS = {"STANDALONE": "foredraft-demo-draft", "EAGLE3": "foredraft-demo-eagle3"}
START_SECONDS = 120.0
_POLL_SECONDS = 0.2


class NotHealthy(Exception):
    """Raised where the stack did not become healthy in time."""


class Rig:
    """Runs one `foredraft serve` and its surroundings.

    Args:
        algorithm: NGRAM, STANDALONE or EAGLE3.
        room: Room in which it may fill file systems.
        log: File that gets all its lines in the end.
        deadline: Value of --request-timeout.
        num_threads: Number of threads of each model.
        rng: Random numbers of the link and the liar.
    """

    def __init__(
        self,
        algorithm: str,
        room: Room,
        log: Path,
        deadline: float,
        num_threads: int,
        rng: random.Random,
    ) -> None:
        self.algorithm = algorithm
        self.room = room
        self._log = log
        self._own = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.link = Link(self._own / "link.sock", lambda: self.upstream(), rng)
        self.liar = Liar(self._own / "liar.sock", self.draft_socket, rng)
        self.upstream = self.draft_socket
        self.mark = uuid.uuid4().hex
        http, grpc, verify, draft = (free_port() for _ in range(4))
        self.http, self.grpc = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self._pages = {"gateway": http, "verify": verify, "draft": draft}
        flags = {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": DRAFTS.get(algorithm, ""),
            "device": "cpu",
            "num_threads": num_threads,
            "max_total_tokens": 4096,
            "port": http,
            "grpc_port": grpc,
            "verify_metrics_port": verify,
            "draft_metrics_port": draft,
            "request_timeout": deadline,
            "drain_timeout": deadline,
        }
        module = "testing.chaos.serve"
        self._command = [sys.executable, "-m", module, *to_flags(flags)]
        self.process: Process | None = None

    @property
    def pid(self) -> int:
        """Pid of `foredraft serve`."""
        assert self.process is not None
        return self.process.pid

    def draft_socket(self) -> Path:
        """Path of the socket that the draft listens on."""
        found = list(self.room.disk.glob("foredraft-*/draft.sock"))
        return found[0] if found else self.room.disk / "none"

    async def start(self) -> None:
        """Starts the stack; `wait_healthy` waits for it."""
        if self.process is None:
            await self.link.start()
        environment = child_environment()
        environment |= {
            MARK: self.mark,
            LINK_VARIABLE: str(self.link.listen),
            # Its sockets and its log go to the small disk.
            "XDG_RUNTIME_DIR": str(self.room.disk),
            "TMPDIR": str(self.room.disk),
            "COLUMNS": "200",
        }
        with (self.room.disk / "serve.log").open("ab") as lines:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, env=environment, stdout=lines, stderr=lines
            )

    async def stop(self) -> int:
        """Stops it as Ctrl-C does; returns its exit status."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
        return await self.process.wait()

    async def close(self) -> None:
        """Ends everything."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await self.link.stop()
        self._own.rmdir()
        self.keep_log()

    def pids(self) -> dict[str, int]:
        """Returns pids of live services by name."""
        found: dict[str, int] = {}
        for pid in processes.descendants(self.pid):
            name = processes.service_of(pid)
            if name in SERVICES and processes.is_alive(pid):
                found[name] = pid
        return found

    async def page(self, service: str) -> dict[str, float]:
        """Returns samples of a service's metrics, summed over labels; empty where it does not
        answer.
        """
        url = f"http://127.0.0.1:{self._pages[service]}/metrics"
        try:
            async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
                text = (await client.get(url)).text
        except httpx.HTTPError:
            return {}
        sums: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("foredraft_"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    async def is_healthy(self) -> bool:
        """Returns whether all three services serve and the draft is attached, by the gateway
        and each service.
        """
        if len(self.pids()) < len(SERVICES):
            return False
        try:
            async with httpx.AsyncClient(timeout=1, trust_env=False) as client:
                answer = await client.get(f"{self.http}/health")
        except httpx.HTTPError:
            return False
        if answer.status_code != 200 or answer.json()["status"] != "ok":
            return False
        sockets = [self.draft_socket(), self.draft_socket().with_name("verify.sock")]
        addresses = [self.grpc, *(f"unix:{path}" for path in sockets)]
        states = [
            await asyncio.to_thread(check_health, address, timeout=1) for address in addresses
        ]
        return all(state == "SERVING" for state in states)

    async def wait_healthy(self, seconds: float) -> None:
        """Waits until the stack is healthy.

        Raises:
            NotHealthy: It was not within `seconds`, or `foredraft serve` ended.
        """
        deadline = time.monotonic() + seconds
        while not await self.is_healthy():
            if self.process is not None and self.process.returncode is not None:
                raise NotHealthy(f"foredraft serve ended with status {self.process.returncode}")
            if time.monotonic() > deadline:
                raise NotHealthy(f"not healthy after {seconds:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    def keep_log(self) -> None:
        """Moves the lines from the small disk to the log."""
        small = self.room.disk / "serve.log"
        if small.exists():
            with self._log.open("ab") as log:
                log.write(small.read_bytes())
            with small.open("wb"):
                pass
