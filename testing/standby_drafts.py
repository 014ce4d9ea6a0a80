"""Draft services that replace a killed one at once, without the time of loading."""

import contextlib
import os
import shutil
import tempfile
from collections import deque
from pathlib import Path
from types import TracebackType

from foredraft.rpc.channel import check_health
from testing.drafts import DraftProcess


class StandbyDraft:
    """Replaces a `DraftProcess`: the verifier's address is a link to the socket of the serving
    process.

    Attributes:
        module: Module to run.
        process: What starts a process of it.
        num_spares: Number of waiting processes.
    """

    module = "draft_service"
    process: type[DraftProcess] = DraftProcess
    num_spares = 2

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._folder = Path(tempfile.mkdtemp(prefix="drafts-"))
        self.target = f"unix:{self._folder}/draft.sock"
        self._spares: deque[DraftProcess] = deque()
        self._current: DraftProcess | None = None

    def __enter__(self) -> "StandbyDraft":
        for _ in range(self.num_spares):
            self._launch()
        # A verifier waits for its draft once it has loaded itself.
        self.start(ready=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self._folder)
            for draft in (self._current, *self._spares):
                if draft is not None:
                    stack.callback(draft.__exit__, None, None, None)

    def start(self, ready: bool = True) -> None:
        """Makes the longest waiting spare serve, once it has loaded if asked so, and launches
        another.
        """
        self._launch()
        draft = self._current = self._spares.popleft()
        if ready:
            draft.wait_ready(120)
        link = self._folder / "next"
        os.symlink(draft.target.removeprefix("unix:"), link)
        os.replace(link, self._folder / "draft.sock")

    def kill(self) -> None:
        """Sends SIGKILL."""
        assert self._current is not None
        self._current.__exit__(None, None, None)
        self._current = None

    def pause(self) -> None:
        """Sends SIGSTOP."""
        assert self._current is not None
        self._current.pause()

    def resume(self) -> None:
        """Sends SIGCONT."""
        assert self._current is not None
        self._current.resume()

    @property
    def pid(self) -> int:
        """Pid of the serving process."""
        assert self._current is not None
        return self._current.pid

    @property
    def has_spare(self) -> bool:
        """Returns whether the next process has loaded."""
        return check_health(self._spares[0].target) == "SERVING"

    @property
    def next_pid(self) -> int:
        """Pid of the process that serves next."""
        return self._spares[0].pid

    def wait(self, timeout: float) -> int:
        """Returns the exit status, once the process has ended by itself.

        Raises:
            subprocess.TimeoutExpired: It does not.
        """
        assert self._current is not None
        assert self._current.process is not None
        return self._current.process.wait(timeout)

    def _launch(self) -> None:
        draft = self.process(*self._flags)
        draft.module = self.module
        draft.start(ready=False)
        self._spares.append(draft)
