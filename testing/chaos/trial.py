"""Runs one fault from load to quiet, and checks answers, recovery time and leaks."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from testing.chaos import leaks, processes
from testing.chaos.cases import Asker, Case, Result, is_prefix
from testing.chaos.faults import Fault, Outcome
from testing.chaos.leaks import Baseline
from testing.chaos.load import Load
from testing.chaos.rig import START_SECONDS, NotHealthy, Rig

GRACE_SECONDS = 4.0  # time after a deadline until its end must be reported
_POLL_SECONDS = 0.05


@dataclass(slots=True)
class Report:
    """Results of one fault.

    Attributes:
        recovered: Seconds from the end of the fault until the stack was healthy and answered right;
            None if never.
        outcomes: Number of requests by outcome.
        lost: Number of requests with an error of a class that the fault allows.
        wrong: Answers that differ, errors of another class, and requests that should have survived.
        leaks: Resources that were left over.
        complaint: Other problem; empty without one.
        memory: MiB of each process afterwards.
    """

    number: int
    fault: str
    algorithm: str
    seconds: float = 0.0
    recovered: float | None = None
    outcomes: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    complaint: str = ""
    memory: dict[str, float] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether there was no problem."""
        return not (self.wrong or self.leaks or self.complaint) and self.recovered is not None

    def as_dict(self) -> dict[str, Any]:
        """Returns the report for JSON."""
        return asdict(self)


class Trial:
    """Runs faults on one rig.

    Args:
        rig: A healthy stack.
        asker: Sends requests to the stack.
        cases: Requests with their answers.
        baseline: Resources of the quiet stack.
        num_clients: Number of concurrent requests.
        margin: Seconds before a fault within which a new request may not have reached the service
            yet.
    """

    def __init__(
        self,
        rig: Rig,
        asker: Asker,
        cases: list[Case],
        baseline: Baseline,
        num_clients: int,
        margin: float,
    ) -> None:
        self._rig = rig
        self._asker = asker
        self._cases = cases
        self._baseline = baseline
        self._num_clients = num_clients
        self._margin = margin

    async def run(self, number: int, fault: Fault, rng: random.Random) -> Report:
        """Puts load on the stack, injects one fault at a random moment, and checks everything."""
        report = Report(number, fault.name, self._rig.algorithm)
        load = Load(self._asker, self._cases, rng, self._num_clients)
        attaches, pids = await self._attaches(), self._rig.pids()
        load.start()
        await asyncio.sleep(rng.uniform(0.3, 1.2))
        struck = time.monotonic()
        try:
            outcome = await fault.inject(self._rig, rng)
        except Exception as error:
            outcome = Outcome({}, complaint=f"{type(error).__name__}: {error}")
            self._rig.link.reset()
        report.complaint = outcome.complaint
        ended = time.monotonic()
        try:
            await self._recover(outcome, attaches, pids)
            report.recovered = time.monotonic() - ended
        except NotHealthy as error:
            report.complaint = f"{report.complaint} {error}".strip()
        results = await load.stop()
        report.seconds = time.monotonic() - struck
        report.outcomes = dict(Counter(result.outcome for result in results))
        report.lost, report.wrong = assess(
            fault, results, struck, self._asker.deadline, self._margin
        )
        if report.recovered is not None:
            report.leaks = await leaks.check(self._rig, self._baseline)
        report.memory = self._memory()
        self._rig.keep_log()
        return report

    async def _recover(self, outcome: Outcome, attaches: float, pids: dict[str, int]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            await self._rig.wait_healthy(max(0.0, deadline - time.monotonic()))
            now = self._rig.pids()
            is_new = all(now.get(name) not in (None, old) for name, old in outcome.replaced.items())
            # A verifier of its own counts attaches from 0.
            same_verifier = now.get("verify") == pids.get("verify")
            is_attached = (
                not outcome.reattached or not same_verifier or await self._attaches() > attaches
            )
            if is_new and is_attached and await self._answers():
                return
            if time.monotonic() > deadline:
                raise NotHealthy("healthy, but not what it was")
            await asyncio.sleep(_POLL_SECONDS)

    async def _answers(self) -> bool:
        case = min(self._cases, key=lambda case: case.num_tokens)
        for kind in ("grpc", "whole"):
            result = Result(kind, case, time.monotonic())
            await self._asker.ask(kind, case, result)
            if result.outcome != "right":
                return False
        return True

    async def _attaches(self) -> float:
        return (await self._rig.page("verify")).get("foredraft_draft_attaches_total", 0.0)

    def _memory(self) -> dict[str, float]:
        found = {}
        for name, pid in {**self._rig.pids(), "serve": self._rig.pid}.items():
            try:
                found[name] = round(processes.footprint(pid).memory_mib, 1)
            except OSError:
                continue
        return found


def assess(
    fault: Fault, results: list[Result], struck: float, deadline: float, margin: float
) -> tuple[int, list[str]]:
    """Returns the number of requests that the fault may cost, and forbidden results in words.

    Args:
        fault: The fault that was injected.
        results: Results of all requests around it.
        struck: Time of the fault by time.monotonic().
        deadline: Deadline of a request in seconds.
        margin: See `Trial`.
    """
    lost, wrong = 0, []
    for result in results:
        seconds = result.ended - result.started
        about = f"{result.kind} after {seconds:.1f} s"
        if not is_prefix(result) or result.outcome == "wrong":
            wrong.append(f"{about}: tokens differ")
        elif result.outcome == "right":
            continue
        elif fault.allowed and result.outcome == "deadline" and seconds > deadline - 1:
            # A request to a dead service waits until it is back, or until the deadline.
            lost += 1
        elif result.outcome not in fault.allowed:
            wrong.append(f"{about}: {result.outcome} {result.detail}".strip())
        elif result.outcome == "unavailable" and not result.is_retryable:
            wrong.append(f"{about}: unavailable, but not said to be retryable")
        elif _should_survive(fault, result, struck - margin, struck) and seconds < deadline - 1:
            wrong.append(f"{about}: {result.outcome}, but it began before. {result.detail}")
        else:
            lost += 1
    return lost, wrong


def _should_survive(fault: Fault, result: Result, by: float, struck: float) -> bool:
    """Returns whether the request reached the service before the fault, and the fault must not
    cost it.
    """
    if not (result.started < by and result.ended > struck):
        return False
    return fault.survivors == "all" or (fault.survivors == "unseen" and result.num_seen == 0)
