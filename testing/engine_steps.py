"""Records what each step of an engine chose, expected, took and gave, to explain the gain of
speculation.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from verify_service.controller.messages import Plan
from verify_service.drafts.proposals import Proposals
from verify_service.engine.engine import Engine
from verify_service.engine.overlap import StepInFlight
from verify_service.executor.base import StepResult
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import StepPlan

KINDS = ("prompt", "plain", "trial", "drafted")


class Expected(NamedTuple):
    """The policy's expectation of a step: seconds of draft and target, tokens, and seconds of a
    plain step.
    """

    draft: float
    target: float
    tokens: float
    plain: float


class Step(NamedTuple):
    """A step whose outcome is known.

    Attributes:
        kind: Kind of step, one of `KINDS`: with a prompt, or by the policy's choice.
        end: Seconds of decoding so far, this step included; steps with prompts count nothing.
        seconds: Time since the previous step ended, or since there was something to do.
        batch: Number of sequences that decoded.
        nodes: Number of nodes chosen to be drafted, of all sequences.
        rows: Number of rows with logits: of each sequence in an overlapped step, else of all.
        tokens: Number of tokens of all sequences.
        context: Number of committed tokens of all sequences.
        draft: Seconds that the host waited for the draft. Of a step started behind another none:
            there the device waits.
        target: Seconds of the target's run; in an overlapped step, those that the host waited for
            it.
        is_behind: Whether it was started before the previous outcome was known.
        expected: The policy's expectation; None where there is none.
    """

    kind: str
    end: float
    seconds: float
    batch: int
    nodes: int
    rows: int
    tokens: int
    context: int
    draft: float
    target: float
    is_behind: bool
    expected: Expected | None


@dataclass(slots=True)
class _Begun:
    """A step before its outcome is known."""

    kind: str = "plain"
    batch: int = 0
    nodes: int = 0
    draft: float = 0.0
    is_behind: bool = False
    expected: Expected | None = None


class EngineSteps:
    """Listens to a running engine, from its own thread.

    Args:
        expects: Whether to note what the policy expected, which takes some microseconds a sequence
            and step.
    """

    def __init__(self, engine: Engine, expects: bool = False) -> None:
        self.steps: list[Step] = []
        self.clock = 0.0
        self._engine = engine
        self._expects = expects
        self._last = 0.0
        self._planned = self._begun = _Begun()
        self._in_flight: dict[int, _Begun] = {}
        self._outcome = 0, 0, 0.0  # rows, tokens and seconds of the newest step's target
        self._listens = threading.Event()
        engine._inbox.put(self._listen)
        if not self._listens.wait(60):
            raise TimeoutError("the engine does not look at its inbox")

    def _listen(self) -> None:
        engine: Any = self._engine
        steps, sizes = engine._steps, engine._sizes
        ahead = steps._overlap
        sizes.plan = self._plan(sizes.plan)
        steps._draft = self._draft(steps._draft)
        steps._execute = self._run(steps._execute)
        ahead.start = self._start(ahead.start)
        ahead.start_behind = self._start_behind(ahead.start_behind)
        ahead.finish = self._finish(ahead.finish)
        steps._ended = self._ended(steps._ended)
        engine._wait_for_work = self._wait_for_work(engine._wait_for_work)
        self._last = time.perf_counter()
        self._listens.set()

    def _plan(self, plan: Callable[..., Plan]) -> Callable[..., Plan]:
        def planned(sequences: Sequence[RequestSequence], *args: int, **options: bool) -> Plan:
            chosen = plan(sequences, *args, **options)
            is_trial = not any(self._engine._sizes.controller.is_drafting)
            nodes = sum(chosen.nodes)
            kind = "plain" if not nodes else "trial" if is_trial else "drafted"
            expected = self._expectation(sequences, chosen) if self._expects else None
            self._planned = _Begun(kind, len(sequences), nodes, expected=expected)
            return chosen

        return planned

    def _expectation(self, sequences: Sequence[RequestSequence], chosen: Plan) -> Expected | None:
        controller = self._engine._sizes.controller
        if controller._costs is None or len(self._engine._drafts.each) != 1:
            return None
        costs, batch = controller._costs, len(sequences)
        acceptance, table = controller._acceptance[0], costs.table
        levels = min(max(chosen.nodes, default=0), controller.drafts[0].depth)
        asked, rows = sum(map(bool, chosen.nodes)), batch + sum(chosen.nodes)
        if table.is_padded:
            asked, rows = batch, chosen.rows if asked else 1
        tokens = float(batch)
        for sequence, num_nodes in zip(sequences, chosen.nodes, strict=True):
            if num_nodes:
                history = self._engine._sizes._histories.of(sequence)
                track, pool = acceptance.track(history, 0, 0), acceptance.pool(history, 0)
                gains = acceptance.gains([track], [pool])[0]
                tokens += float(gains[: acceptance.bins.num_within(num_nodes)].sum())
        draft = costs.draft(0, asked, levels, controller._switching.follows)
        return Expected(draft, costs.target(batch, rows), tokens, costs.plain(batch))

    def _draft(self, draft: Callable[[StepPlan], Proposals]) -> Callable[[StepPlan], Proposals]:
        def drafted(plan: StepPlan) -> Proposals:
            started = time.perf_counter()
            proposals = draft(plan)
            self._begun = self._planned if plan.decode else _Begun()
            self._begun.draft = time.perf_counter() - started
            if plan.prefill:
                self._begun.kind = "prompt"
            return proposals

        return drafted

    def _run(self, run: Callable[..., StepResult]) -> Callable[..., StepResult]:
        def ran(*args: Any) -> StepResult:
            started = time.perf_counter()
            result = run(*args)
            self._take(result, result.num_logit_rows, started)
            return result

        return ran

    def _start(self, start: Callable[..., StepInFlight]) -> Callable[..., StepInFlight]:
        def has_started(*args: Any) -> StepInFlight:
            running = start(*args)
            self._in_flight[id(running)] = self._begun
            return running

        return has_started

    def _start_behind(
        self, start: Callable[..., StepInFlight | None]
    ) -> Callable[..., StepInFlight | None]:
        def has_started(*args: Any) -> StepInFlight | None:
            running = start(*args)
            if running is not None:
                self._planned.is_behind = True
                self._in_flight[id(running)] = self._planned
            return running

        return has_started

    def _finish(self, finish: Callable[[StepInFlight], Any]) -> Callable[[StepInFlight], Any]:
        def finished(running: StepInFlight) -> Any:
            started = time.perf_counter()
            result = finish(running)
            self._begun = self._in_flight.pop(id(running), _Begun())
            self._begun.batch = len(running.sequences)
            self._take(result, running.started.num_rows, started)
            return result

        return finished

    def _take(self, result: StepResult, rows: int, started: float) -> None:
        tokens = sum(len(outcome.verified.tokens) for outcome in result.outcomes)
        self._outcome = rows, tokens, time.perf_counter() - started

    def _ended(self, ended: Callable[..., None]) -> Callable[..., None]:
        def has_ended(started: float, *chunks: Any, **kinds: Any) -> None:
            now, begun = time.perf_counter(), self._begun
            seconds, self._last = now - self._last, now
            if begun.kind != "prompt":
                self.clock += seconds
            rows, tokens, target = self._outcome
            context = sum(len(one.tokens) for one in self._engine._scheduler.running)
            self.steps.append(
                Step(
                    begun.kind, self.clock, seconds, begun.batch, begun.nodes, rows, tokens, context,  # noqa: E501
                    begun.draft, target, begun.is_behind, begun.expected,
                )
            )  # fmt: skip
            ended(started, *chunks, **kinds)

        return has_ended

    def _wait_for_work(self, wait: Callable[[], None]) -> Callable[[], None]:
        def waited() -> None:
            wait()
            self._last = time.perf_counter()

        return waited


def report(name: str, steps: Sequence[Step]) -> None:
    """Prints means by batch (by powers of two) and kind, with expected values in brackets."""
    print(f"\n{name}: means of steps, in brackets what was expected of them")
    print(
        "| batch | kind | steps | started behind another | seconds in all | ms | draft ms | target"
        " ms | tokens | plain step ms |"
    )
    print("| --- " * 10 + "|")
    for size in sorted({step.batch.bit_length() for step in steps}):
        for kind in KINDS:
            own = [s for s in steps if (s.batch.bit_length(), s.kind) == (size, kind)]
            if not own:
                continue
            first, last = (1 << size) // 2, (1 << size) - 1
            batch = f"{first}" if first >= last else f"{first}-{last}"
            believed = [step.expected for step in own if step.expected is not None]
            expected = (
                Expected(*map(statistics.mean, zip(*believed, strict=True))) if believed else None
            )
            total = sum(step.seconds for step in own)
            cells = [
                _cell(statistics.mean(getattr(step, field) for step in own), expected, field)
                for field in ("draft", "target", "tokens")
            ]
            plain = f"({expected.plain * 1e3:.2f})" if expected else ""
            behind = statistics.mean(step.is_behind for step in own)
            print(
                f"| {batch} | {kind} | {len(own)} | {behind:.0%} | {total:.2f} |"
                f" {total / len(own) * 1e3:.2f} | {' | '.join(cells)} | {plain} |"
            )


def _cell(mean: float, expected: Expected | None, field: str) -> str:
    unit = 1 if field == "tokens" else 1e3
    text = f"{mean * unit:.2f}"
    return text if expected is None else f"{text} ({getattr(expected, field) * unit:.2f})"
