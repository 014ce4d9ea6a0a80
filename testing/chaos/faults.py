"""Faults: their effect on the stack, their duration, and what clients may notice."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from testing.chaos import processes
from testing.chaos.rig import MARK, Rig
from testing.chaos.room import SHM

# The supervisor replaces what answers no health check for so long (foredraft/cli/supervisor.py),
# and some more for a machine that is busy.
HANG_SECONDS = {"draft": 30.0, "verify": 60.0, "gateway": 60.0}
GONE_SECONDS = 10.0
STOP_SECONDS = 150.0  # maximum time of a stop, with a drain


@dataclass(slots=True)
class Outcome:
    """Effect of a fault.

    Attributes:
        replaced: Processes that must be gone, as pids by service.
        reattached: Whether the link was broken, so that the draft must be attached again.
        complaint: Problem while the fault was injected; empty without one.
    """

    replaced: dict[str, int]
    reattached: bool = False
    complaint: str = ""


Inject = Callable[[Rig, random.Random], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: Name of the process that it hits, and of the effect.
        inject: Function that injects the fault, waits, and undoes what does not end by itself.
        weight: Number of times that it comes in a round.
        allowed: Outcomes that a request may have beside "right".
        survivors: Earlier requests that must still be answered: "none", "unseen" (no token had been
            streamed) or "all".
        needs_room: Whether it fills a file system.
    """

    name: str
    inject: Inject
    weight: int
    allowed: frozenset[str] = frozenset()
    survivors: str = "all"
    needs_room: bool = False


def _signal(service: str, number: signal.Signals) -> Inject:
    async def inject(rig: Rig, rng: random.Random) -> Outcome:
        pid = rig.pids()[service]
        os.kill(pid, number)
        is_gone = await _gone(pid, STOP_SECONDS if number is signal.SIGTERM else GONE_SECONDS)
        return Outcome({service: pid}, complaint="" if is_gone else "it did not end")

    return inject


def _kill_together(*services: str) -> Inject:
    async def inject(rig: Rig, rng: random.Random) -> Outcome:
        pids = {name: pid for name, pid in rig.pids().items() if name in services}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in pids.values():
            await _gone(pid, GONE_SECONDS)
        return Outcome(pids)

    return inject


def _pause(service: str, longest: float) -> Inject:
    async def inject(rig: Rig, rng: random.Random) -> Outcome:
        pid = rig.pids()[service]
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(0.2, longest))
        finally:
            if processes.is_alive(pid):
                os.kill(pid, signal.SIGCONT)
        return Outcome({})

    return inject


def _hang(service: str) -> Inject:
    async def inject(rig: Rig, rng: random.Random) -> Outcome:
        pid = rig.pids()[service]
        os.kill(pid, signal.SIGSTOP)
        is_gone = await _gone(pid, HANG_SECONDS[service])
        if not is_gone:
            os.kill(pid, signal.SIGKILL)
        return Outcome({service: pid}, complaint="" if is_gone else "it was not replaced")

    return inject


def _descriptors(service: str) -> Inject:
    async def inject(rig: Rig, rng: random.Random) -> Outcome:
        pid = rig.pids()[service]
        processes.limit_descriptors(pid, processes.footprint(pid).descriptors + rng.randint(0, 2))
        try:
            # Connecting the two again fails, since one of them has no descriptor left.
            if service != "gateway":
                await rig.link.cut()
            await asyncio.sleep(rng.uniform(0.5, 3.0))
        finally:
            if processes.is_alive(pid):
                processes.limit_descriptors(pid, None)
        if service == "gateway":
            return Outcome({})
        # A draft that could not map shared memory was attached without; the next attach finds
        # descriptors again.
        await rig.link.cut()
        return Outcome({}, reattached=True)

    return inject


async def _cut(rig: Rig, rng: random.Random) -> Outcome:
    for _ in range(rng.choice((1, 1, 3))):
        await rig.link.cut()
        await asyncio.sleep(0.05)
    return Outcome({}, reattached=True)


async def _refuse(rig: Rig, rng: random.Random) -> Outcome:
    rig.link.refuses = True
    await rig.link.cut()
    await asyncio.sleep(rng.uniform(0.5, 3.0))
    rig.link.reset()
    return Outcome({}, reattached=True)


def _delay(shortest: float, longest: float) -> Inject:
    async def inject(rig: Rig, rng: random.Random) -> Outcome:
        rig.link.delay = rng.uniform(shortest, longest)
        await asyncio.sleep(rng.uniform(1.0, 3.0))
        rig.link.reset()
        return Outcome({})

    return inject


async def _stall(rig: Rig, rng: random.Random) -> Outcome:
    rig.link.stalls = True
    await asyncio.sleep(rng.uniform(0.3, 3.0))
    # Bytes were lost, so the following ones are meaningless.
    await rig.link.cut()
    rig.link.reset()
    return Outcome({}, reattached=True)


async def _garble(rig: Rig, rng: random.Random) -> Outcome:
    rig.link.garbles = rng.choice((0.02, 0.1, 0.5))
    await asyncio.sleep(rng.uniform(0.5, 2.5))
    await rig.link.cut()
    rig.link.reset()
    return Outcome({}, reattached=True)


async def _lie(rig: Rig, rng: random.Random) -> Outcome:
    await rig.liar.start()
    rig.upstream = lambda: rig.liar.listen
    await rig.link.cut()
    await asyncio.sleep(rng.uniform(1.0, 3.0))
    rig.upstream = rig.draft_socket
    await rig.link.cut()
    await rig.liar.stop()
    return Outcome({}, reattached=True)


async def _full_memory(rig: Rig, rng: random.Random) -> Outcome:
    rig.room.fill(SHM)
    try:
        await rig.link.cut()
        await asyncio.sleep(rng.uniform(0.5, 2.0))
    finally:
        rig.room.free(SHM)
    # A draft that was attached without shared memory is served as well; the next attach finds
    # memory again.
    await rig.link.cut()
    return Outcome({}, reattached=True)


def _full_disk(*services: str) -> Inject:
    async def inject(rig: Rig, rng: random.Random) -> Outcome:
        rig.room.fill(rig.room.disk)
        try:
            pids = {name: pid for name, pid in rig.pids().items() if name in services}
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            await rig.link.cut()
            await asyncio.sleep(rng.uniform(0.5, 3.0))
        finally:
            rig.room.free(rig.room.disk)
        return Outcome(pids)

    return inject


async def _stop_stack(rig: Rig, rng: random.Random) -> Outcome:
    pids = rig.pids()
    status = await rig.stop()
    left = await _left(rig)
    await rig.start()
    complaint = f"exit status {status}" if status else left
    return Outcome(pids, complaint=complaint)


async def _kill_supervisor(rig: Rig, rng: random.Random) -> Outcome:
    pids = rig.pids()
    assert rig.process is not None
    rig.process.kill()
    await rig.process.wait()
    left = await _left(rig)
    await rig.start()
    return Outcome(pids, complaint=left)


async def _left(rig: Rig) -> str:
    """Waits until all processes of an ended stack are gone; else returns a message about the
    survivors.
    """
    deadline = time.monotonic() + GONE_SECONDS
    while found := processes.marked(MARK, rig.mark):
        if time.monotonic() > deadline:
            return f"processes outlived it: {found}"
        await asyncio.sleep(0.05)
    return ""


async def _gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while processes.is_alive(pid):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


_LOST = frozenset({"unavailable"})
_BROKEN = frozenset({"unavailable", "broken"})

FAULTS: tuple[Fault, ...] = (
    Fault("draft killed", _signal("draft", signal.SIGKILL), 8),
    Fault("draft stopped, continued", _pause("draft", 4.0), 5),
    Fault("draft hangs", _hang("draft"), 2),
    Fault("draft SIGTERM", _signal("draft", signal.SIGTERM), 4),
    Fault("draft without descriptors", _descriptors("draft"), 3),
    Fault("link cut", _cut, 12),
    Fault("link refuses", _refuse, 4),
    Fault("link slow", _delay(0.02, 0.3), 4),
    Fault("link slower than the step timeout", _delay(1.1, 1.6), 4),
    Fault("link stalls", _stall, 4),
    Fault("link garbled", _garble, 12),
    Fault("draft lies", _lie, 14),
    Fault("verifier killed", _signal("verify", signal.SIGKILL), 8, _LOST, "unseen"),
    Fault("verifier stopped, continued", _pause("verify", 4.0), 4),
    Fault("verifier hangs", _hang("verify"), 1, _LOST, "unseen"),
    Fault("verifier SIGTERM", _signal("verify", signal.SIGTERM), 4, _LOST),
    Fault("verifier without descriptors", _descriptors("verify"), 3),
    Fault("gateway killed", _signal("gateway", signal.SIGKILL), 5, _BROKEN, "none"),
    Fault("gateway stopped, continued", _pause("gateway", 4.0), 4),
    Fault("gateway hangs", _hang("gateway"), 1, _BROKEN, "none"),
    Fault("gateway SIGTERM", _signal("gateway", signal.SIGTERM), 4, _BROKEN),
    Fault("gateway without descriptors", _descriptors("gateway"), 4, _BROKEN),
    Fault(
        "verifier and draft killed",
        _kill_together("verify", "draft"),
        3,
        _LOST,
        "unseen",
    ),
    Fault("all three killed", _kill_together("gateway", "verify", "draft"), 2, _BROKEN, "none"),
    Fault("foredraft serve SIGTERM", _stop_stack, 2, _BROKEN),
    Fault("foredraft serve killed", _kill_supervisor, 2, _BROKEN, "none"),
    Fault("/dev/shm full", _full_memory, 4, needs_room=True),
    Fault("disk full", _full_disk(), 2, needs_room=True),
    Fault("disk full, draft killed", _full_disk("draft"), 3, needs_room=True),
    Fault(
        "disk full, verifier killed",
        _full_disk("verify"),
        2,
        _LOST,
        "unseen",
        needs_room=True,
    ),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


def plan(names: Sequence[str] | None, count: int, seed: int) -> list[Fault]:
    """The faults of a run in order: rounds shuffled by the seed.

    Args:
        names: Faults that come once in a round; None for all, as often as their weights say.
    """
    if names is None:
        deck = [fault for fault in FAULTS for _ in range(fault.weight)]
    else:
        deck = [BY_NAME[name] for name in names]
    rng = random.Random(f"plan {seed}")
    chosen: list[Fault] = []
    while len(chosen) < count:
        rng.shuffle(deck)
        chosen += deck
    return chosen[:count]
