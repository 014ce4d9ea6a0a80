"""Draft services that wait to take a killed one's place at once, which a process that has yet to load cannot."""

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
    """In place of a `DraftProcess`: the address that the verifier knows is a link to the socket of the one that serves.

    Attributes:
        module: What is run.
        num_spares: Processes that wait.
    """

    module = "draft_service"
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
        """Lets the spare that has waited longest serve, once it has loaded if asked so, and launches another."""
        self._launch()
        draft = self._current = self._spares.popleft()
        if ready:
            draft.wait_ready(120)
        link = self._folder / "next"
        os.symlink(draft.target.removeprefix("unix:"), link)
        os.replace(link, self._folder / "draft.sock")

    def kill(self) -> None:
        """SIGKILL."""
        assert self._current is not None
        self._current.__exit__(None, None, None)
        self._current = None

    def pause(self) -> None:
        """SIGSTOP."""
        assert self._current is not None
        self._current.pause()

    def resume(self) -> None:
        """SIGCONT."""
        assert self._current is not None
        self._current.resume()

    @property
    def pid(self) -> int:
        """Of the one that serves."""
        assert self._current is not None
        return self._current.pid

    @property
    def has_spare(self) -> bool:
        """Whether the one that takes its place has loaded."""
        return check_health(self._spares[0].target) == "SERVING"

    @property
    def next_pid(self) -> int:
        """Of the one that takes its place."""
        return self._spares[0].pid

    def wait(self, timeout: float) -> int:
        """The exit status, once it has ended by itself.

        Raises:
            subprocess.TimeoutExpired: It does not.
        """
        assert self._current is not None
        assert self._current.process is not None
        return self._current.process.wait(timeout)

    def _launch(self) -> None:
        draft = DraftProcess(*self._flags)
        draft.module = self.module
        draft.start(ready=False)
        self._spares.append(draft)
