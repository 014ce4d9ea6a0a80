"""Checks that resources are as before once a stack is quiet: processes, descriptors, threads,
segments, sockets, pages, the arena.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from testing.chaos import processes
from testing.chaos.processes import Footprint
from testing.chaos.rig import MARK, SERVICES, Rig

# A draft that reads hidden states is tried on prompts of the verifier's own once it is attached,
# which takes a while.
SETTLE_SECONDS = 60.0
_POLL_SECONDS = 0.1
# gRPC and thread pools open a few more when they are first needed; what leaks grows with every
# fault.
SLACK_DESCRIPTORS = 8
SLACK_THREADS = 8


@dataclass(slots=True)
class Baseline:
    """Resources of a quiet stack.

    Attributes:
        footprints: Footprints of each service and of "serve".
        arena_bytes: Size of the arena of the draft's attach.
        names: Number of processes by what they run; services may have helpers.
        sockets: Sockets in the directory of the stack.
    """

    footprints: dict[str, Footprint] = field(default_factory=dict)
    arena_bytes: float = 0.0
    names: Counter[str] = field(default_factory=Counter)
    sockets: list[str] = field(default_factory=list)


async def measure(rig: Rig) -> Baseline:
    """Takes the baseline of a stack that is healthy and quiet."""
    pids = {**rig.pids(), "serve": rig.pid}
    page = await rig.page("verify")
    return Baseline(
        {name: processes.footprint(pid) for name, pid in pids.items()},
        page.get("foredraft_arena_bytes", 0.0),
        _names(rig),
        _sockets(rig),
    )


async def check(rig: Rig, baseline: Baseline, seconds: float = SETTLE_SECONDS) -> list[str]:
    """Returns what is left over after some time to disappear."""
    deadline = time.monotonic() + seconds
    while found := await _look(rig, baseline):
        if time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_SECONDS)
    return []


async def _look(rig: Rig, baseline: Baseline) -> list[str]:
    pids = rig.pids()
    more = _names(rig) - baseline.names
    found = [f"{count} more of: {name or 'zombies'}" for name, count in more.items()]
    if missing := set(SERVICES) - pids.keys():
        found.append(f"not running: {', '.join(sorted(missing))}")
    for name, pid in {**pids, "serve": rig.pid}.items():
        found += _grown(name, pid, baseline)
    found += [f"segment {name}" for name in rig.room.segments()]
    folders = sorted(path.name for path in rig.room.disk.glob("foredraft-*"))
    if len(folders) != 1:
        found.append(f"directories of sockets: {folders}")
    if _sockets(rig) != baseline.sockets:
        found.append(f"sockets: {_sockets(rig)}")
    if rig.link.num_open != 1:
        found.append(f"{rig.link.num_open} connections to the draft")
    return found + await _held(rig, baseline)


def _names(rig: Rig) -> Counter[str]:
    """Returns all processes below the stack, and those it started that have lost their parent."""
    own = {*processes.descendants(rig.pid), *processes.marked(MARK, rig.mark)}
    return Counter(processes.service_of(pid) for pid in own)


def _sockets(rig: Rig) -> list[str]:
    return sorted(path.name for path in rig.room.disk.glob("foredraft-*/*"))


def _grown(name: str, pid: int, baseline: Baseline) -> list[str]:
    before = baseline.footprints[name]
    try:
        now = processes.footprint(pid)
    except OSError:
        return [f"{name} ended"]
    found: list[str] = []
    if now.descriptors > before.descriptors + SLACK_DESCRIPTORS:
        found.append(f"{name}: {now.descriptors} descriptors, {before.descriptors} before")
    if now.threads > before.threads + SLACK_THREADS:
        found.append(f"{name}: {now.threads} threads, {before.threads} before")
    if now.segments > before.segments:
        found.append(f"{name}: {now.segments} segments mapped, {before.segments} before")
    return found


async def _held(rig: Rig, baseline: Baseline) -> list[str]:
    """Returns problems in the services' own metrics."""
    verify, draft = await rig.page("verify"), await rig.page("draft")
    wanted = {
        "foredraft_kv_pages_used": 0.0,
        "foredraft_running_sequences": 0.0,
        "foredraft_queue_depth": 0.0,
        "foredraft_arena_bytes": baseline.arena_bytes,
        "foredraft_draft_available": 1.0,
    }
    found = [f"{name}: {verify.get(name)}" for name in wanted if verify.get(name) != wanted[name]]
    if draft.get("foredraft_drafter_sessions") != 1.0:
        found.append(f"foredraft_drafter_sessions: {draft.get('foredraft_drafter_sessions')}")
    gateway = await rig.page("gateway")
    idle = ("foredraft_gateway_running_requests", "foredraft_gateway_queued_requests")
    return found + [f"{name}: {gateway.get(name)}" for name in idle if gateway.get(name) != 0.0]
