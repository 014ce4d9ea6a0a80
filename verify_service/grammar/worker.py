"""`python -m verify_service.grammar.worker`: tries grammars out, each in a forked process with
bounds of time and memory.

Reads {"id", "kind", "text"} from stdin and writes {"id", "grammar", "bytes"} or {"id", "error",
"is_bound"} to stdout. A grammar that passes can be compiled again elsewhere with no more time and
memory than it took here.
"""

import contextlib
import itertools
import json
import os
import random
import re
import resource
import select
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from foredraft.rpc.lifetime import exit_with_parent
from foredraft.types import GrammarKind
from verify_service.grammar.source import to_llguidance
from verify_service.grammar.vocabulary import LIMITS, NO_TOKEN, load_vocabulary
from verify_service.grammar.wire import HEAD, pack

NUM_PROCESSES = 4  # grammars that are tried at a time; they are niced below everything else
TRIAL_TOKENS = 24  # number of tokens a trial follows: much of the automaton is built on the way
_PAGE = resource.getpagesize()


@dataclass(slots=True)
class _Trial:
    """A grammar that is being tried."""

    id: int
    pid: int
    pipe: int
    deadline: float
    answer: bytes = b""


def main(arguments: list[str]) -> int:
    """Runs the worker.

    Arguments: model directory, vocabulary size, end tokens (comma-separated), seconds and MiB of a
    trial.
    """
    exit_with_parent()
    # The verifier drains on these signals; it ends this process by closing stdin.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    path, vocab_size, eos, seconds, memory_mb = arguments
    eos_token_ids = frozenset(int(token) for token in eos.split(",") if token)
    vocabulary = load_vocabulary(Path(path), int(vocab_size), eos_token_ids)
    bounds = float(seconds), int(memory_mb)
    waiting: deque[dict[str, Any]] = deque()
    trials: dict[int, _Trial] = {}
    buffer = b""
    while True:
        while waiting and len(trials) < NUM_PROCESSES:
            trial = _begin(waiting.popleft(), vocabulary, *bounds)
            trials[trial.pipe] = trial
        first = min((trial.deadline for trial in trials.values()), default=None)
        timeout = None if first is None else max(0.0, first - time.monotonic())
        readable = select.select([0, *trials], [], [], timeout)[0]
        for pipe in readable:
            data = os.read(pipe, 1 << 16)
            if pipe == 0:
                if not data:
                    return 0
                requests, buffer = _split(buffer + data)
                waiting.extend(requests)
            elif data:
                trials[pipe].answer += data
            else:
                _end(trials.pop(pipe), bounds[1])
        now = time.monotonic()
        for pipe in [pipe for pipe, trial in trials.items() if trial.deadline <= now]:
            trial = trials.pop(pipe)
            os.kill(trial.pid, signal.SIGKILL)
            _reap(trial)
            _answer(trial.id, error=f"takes more than {bounds[0]:g} s to compile", is_bound=True)


def _split(buffer: bytes) -> tuple[list[dict[str, Any]], bytes]:
    requests = []
    while len(buffer) >= HEAD.size:
        end = HEAD.size + HEAD.unpack_from(buffer)[0]
        if len(buffer) < end:
            break
        requests.append(json.loads(buffer[HEAD.size : end]))
        buffer = buffer[end:]
    return requests, buffer


def _begin(
    request: dict[str, Any], vocabulary: llguidance.LLTokenizer, seconds: float, memory_mb: int
) -> _Trial:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        with contextlib.suppress(BaseException):
            _bound(seconds, memory_mb)
            with os.fdopen(theirs, "wb") as out:
                out.write(json.dumps(_try(request, vocabulary)).encode())
        os._exit(0)
    os.close(theirs)
    return _Trial(request["id"], pid, ours, time.monotonic() + seconds)


def _bound(seconds: float, memory_mb: int) -> None:
    os.nice(10)
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a crashing library must not print into the protocol
        os.dup2(devnull, descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The parent ends it well before; this is for a child whose parent was killed.
    most = int(2 * seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    if sys.platform == "linux":
        limit = _memory(0) + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _memory(column: int) -> int:
    """Returns bytes of this process, 0 reserved, 1 in use; 0 where the system does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[column]) * _PAGE if file.exists() else 0


def _try(request: dict[str, Any], vocabulary: llguidance.LLTokenizer) -> dict[str, Any]:
    kind = GrammarKind(request["kind"])
    try:
        grammar = to_llguidance(kind, request["text"])
    except RecursionError:
        return {"error": "nests too deep"}
    except MemoryError:
        raise  # no answer says it, however it came about
    except Exception as error:  # the converters raise many kinds
        return {"error": str(error)[:300]}
    before = _memory(1)
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        _follow(matcher, vocabulary.vocab_size)
    if matcher.is_error():
        return {"error": _message(matcher.get_error(), kind)}
    return {"grammar": grammar, "bytes": _memory(1) - before}


def _message(error: str, kind: GrammarKind) -> str:
    """Returns an error without excerpts of the translated grammar, which the client has not
    seen.

    The structure or the rule that is wrong is named.
    """
    if error.startswith(NO_TOKEN):  # already at the beginning
        return "no text matches it"
    place = re.match(r"(?:at (\d+)\(\d+\): )+", error)
    lines = error[place.end() if place else 0 :].splitlines()
    shown = itertools.takewhile(lambda line: not re.match(r"\s*\d+ \|", line), lines)
    told = " ".join(line.strip() for line in shown)
    told = told.replace(
        "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        'Use anyOf, or "x-guidance": {"coerce_one_of": true} in the schema',
    )
    if "Unimplemented keys: " in told or "Unknown format: " in told:
        told += '; leave it out, or give the schema "x-guidance": {"lenient": true} to ignore it'
    if place:
        rule = re.search(rf"^\s*{place[1]} \| (\w+):", error, re.M)
        if rule and kind is GrammarKind.EBNF:
            told = f"rule {rule[1]}: {told}"
        elif rule and rule[1].startswith("tag_"):
            told = f"structures.{rule[1][4:]}: {told}"
    return told[:300]


def _follow(matcher: llguidance.LLMatcher, vocab_size: int) -> None:
    """Follows a grammar by tokens chosen at random from those that it allows."""
    choose = random.Random(0).choice
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    for _ in range(TRIAL_TOKENS):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error() or matcher.is_stopped():
            return
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
        if not len(allowed) or not matcher.consume_token(int(choose(allowed))):
            return


def _end(trial: _Trial, memory_mb: int) -> None:
    _reap(trial)
    if trial.answer:
        _answer(trial.id, **json.loads(trial.answer))
    else:
        _answer(trial.id, error=f"takes more than {memory_mb} MiB to compile", is_bound=True)


def _reap(trial: _Trial) -> None:
    os.close(trial.pipe)
    os.waitpid(trial.pid, 0)


def _answer(number: int, **values: Any) -> None:
    sys.stdout.buffer.write(pack({"id": number, **values}))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
