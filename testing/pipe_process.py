"""The draft's end of a transport, in a process of its own that takes commands by a pipe."""

import multiprocessing
from collections.abc import Callable
from typing import Any

from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.transport.process import Peer


class PipeProcess:
    """Runs `serve(pipe)`, which first sends its identity.

    Then it answers each (command, *arguments), or sends its exception.

    Attributes:
        identity: Identity of the process.
        peer: Watches whether it lives.
    """

    def __init__(self, serve: Callable[[Any], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        self.identity = tensor_pb2.Process.FromString(self._pipe.recv())
        self.peer = Peer(self.identity)

    def tell(self, what: str, *arguments: Any) -> None:
        self._pipe.send((what, *arguments))

    def hear(self, timeout: float = 60) -> Any:
        assert self._pipe.poll(timeout), "no answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, what: str, *arguments: Any) -> Any:
        self.tell(what, *arguments)
        return self.hear()
