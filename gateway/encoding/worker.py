"""`python -m gateway.encoding.worker`: loads a tokenizer and forks processes that use it.

Each process has its own socket.

Started by `gateway.encoding.pool`, which sends a socket for every process it wants and reads back
its number. A process has a limit of memory; the pool kills it when its time is over.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidRequest
from foredraft.rpc.lifetime import exit_with_parent
from foredraft.text.tokenizer import Tokenizer
from gateway.encoding.wire import (
    REQUEST_HEAD,
    Verdict,
    pack_answer,
    pack_tokens,
)

READY = b"ready"
_PR_SET_PDEATHSIG = 1
_PAGE = resource.getpagesize()


def main(arguments: list[str]) -> int:
    """Forks a process for every socket received, until the control socket closes.

    Arguments are the control socket's descriptor, the tokenizer's directory, a template file or "",
    and the bytes of memory for a job.
    """
    exit_with_parent()
    # The gateway drains on these signals; it ends this process by closing the socket.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    control = socket.socket(fileno=int(arguments[0]))
    source = Path(arguments[2]).read_text(encoding="utf-8") if arguments[2] else None
    tokenizer = Tokenizer.from_dir(arguments[1], source)
    control.sendall(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return 0
        mine = socket.socket(fileno=descriptors[0])
        child = os.fork()
        if child == 0:
            control.close()
            _bound(int(arguments[3]))
            _serve(mine, tokenizer)
            os._exit(0)
        mine.close()
        control.sendall(child.to_bytes(8, "little"))


def _bound(memory: int) -> None:
    """Limits this process to `memory` more bytes, and has it end with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * _PAGE + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(connection: socket.socket, tokenizer: Tokenizer) -> None:
    while True:
        head = _read(connection, REQUEST_HEAD.size)
        if head is None:
            return
        body = _read(connection, REQUEST_HEAD.unpack(head)[0])
        if body is None:
            return
        connection.sendall(_answer(body, tokenizer))


def _answer(body: bytes, tokenizer: Tokenizer) -> bytes:
    try:
        operation, *arguments = json.loads(body)
        return pack_answer(Verdict.DONE, _run(tokenizer, operation, arguments))
    except InvalidRequest as error:
        refusal = json.dumps([error.field, error.message]).encode()
        return pack_answer(Verdict.REFUSED, refusal)
    except MemoryError:
        refusal = json.dumps(["", "takes too much memory"]).encode()
        return pack_answer(Verdict.REFUSED, refusal)
    except Exception as error:
        return pack_answer(Verdict.FAILED, f"{type(error).__name__}: {error}".encode())


def _run(tokenizer: Tokenizer, operation: str, arguments: list[Any]) -> bytes:
    if operation == "encode":
        text, add_special_tokens = arguments
        return pack_tokens(tokenizer.encode(text, add_special_tokens))
    if operation == "chat":
        messages, variables = arguments
        return pack_tokens(tokenizer.encode_chat(messages, **variables))
    tokens, skip_special_tokens = arguments
    return tokenizer.decode(tokens, skip_special_tokens).encode("utf-8", "surrogatepass")


def _read(connection: socket.socket, size: int) -> bytes | None:
    """Reads `size` bytes; returns None if the other side has closed."""
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
