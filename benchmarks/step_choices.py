"""What each step of an engine on a CPU chose, expected and took: why speculation gains or loses there."""

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.support.engines import Harness
from verify_service.drafts.drafting import Drafting
from verify_service.drafts.proposals import Drafted
from verify_service.policy.policy import DraftPolicy
from verify_service.scheduling.request import Sequence as RequestSequence
from verify_service.scheduling.step_plan import PrefillChunk, StepPlan
from verify_service.target.chooser import VerifyRows
from verify_service.target.target_step import StepResult

KINDS = ("prompt", "plain", "trial", "drafted")


class Chosen(NamedTuple):
    """A step. Seconds, and tokens of all sequences; what was expected of it is behind what came.

    Attributes:
        kind: One of `KINDS`: with a prompt, or by what the policy chose.
        batch: Sequences that decode.
        plain: That a plain step was believed to take.
    """

    kind: str
    batch: int
    seconds: float
    draft: float
    target: float
    tokens: int
    expected_draft: float
    expected_target: float
    expected_tokens: float
    plain: float


class StepChoices:
    """Listens to an engine, from its own thread, where steps do not run ahead."""

    def __init__(self, harness: Harness) -> None:
        self.steps: list[Chosen] = []
        engine = harness.engine
        sizes, drafting, scheduler = engine._sizes, engine._drafting, engine._scheduler
        policy: DraftPolicy | None = getattr(sizes, "policy", None)
        choose, draft, run, ended = sizes.plan, engine._draft, engine._target.run, engine._ended
        now: dict[str, Any] = {}

        def planned(sequences: Sequence[RequestSequence], other_rows: int = 0) -> Any:
            chosen = choose(sequences, other_rows)
            now.update(nodes=chosen.nodes, trial=policy is not None and policy._is_trial)
            times = None if policy is None else policy._times
            if policy is None or times is None or not isinstance(drafting, Drafting):
                return chosen
            batch, asked = len(sequences), sum(map(bool, chosen.nodes))
            levels = min(max(chosen.nodes, default=0), policy._depth)
            acceptance, tokens = policy._acceptance, float(batch)
            for sequence, num_nodes in zip(sequences, chosen.nodes, strict=True):
                gains = acceptance.gains(drafting.history(sequence), 0, policy._probing.now)
                tokens += sum(gains[: acceptance.ladder.num_within(num_nodes)])
            now["expected"] = (
                policy._draft_times.steps(asked, levels) * times.seconds(1, 1),
                times.seconds(batch, batch + sum(chosen.nodes)),
                tokens,
                times.seconds(batch, batch),
            )
            return chosen

        def drafted(plan: StepPlan) -> dict[int, Drafted]:
            started = time.perf_counter()
            trees = draft(plan)
            now.update(draft=time.perf_counter() - started, prompt=bool(plan.prefill))
            return trees

        def ran(
            batch: Sequence[VerifyRows], chunks: Sequence[PrefillChunk], capture: Sequence[int]
        ) -> StepResult:
            started = time.perf_counter()
            result = run(batch, chunks, capture)
            tokens = sum(len(outcome.verified.tokens) for outcome in result.outcomes)
            now.update(target=time.perf_counter() - started, tokens=tokens)
            return result

        def has_ended(started: float) -> None:
            nodes = now.get("nodes", [])
            kind = "prompt" if now["prompt"] else "plain"
            if kind == "plain" and any(nodes):
                kind = "trial" if now["trial"] else "drafted"
            self.steps.append(
                Chosen(
                    kind,
                    len(nodes) or scheduler.num_running,
                    time.perf_counter() - started,
                    now["draft"],
                    now["target"],
                    now["tokens"],
                    *now.get("expected", (0.0, 0.0, 0.0, 0.0)),
                )
            )
            now.clear()
            ended(started)

        sizes.plan = planned  # type: ignore[method-assign]
        engine._draft = drafted  # type: ignore[method-assign]
        engine._target.run = ran  # type: ignore[method-assign]
        engine._ended = has_ended  # type: ignore[method-assign]


def report(name: str, steps: Sequence[Chosen]) -> None:
    """Prints means by batch and kind, what was expected behind each."""
    print(f"\n{name}: means of steps, in brackets what was expected of them")
    print(
        "| batch | kind | steps | seconds in all | draft ms | target ms | tokens | plain step ms |"
    )
    print("| --- " * 8 + "|")
    for batch in sorted({step.batch for step in steps}):
        for kind in KINDS:
            own = [step for step in steps if (step.batch, step.kind) == (batch, kind)]
            if not own:
                continue
            ms = {
                field: statistics.mean(getattr(step, field) for step in own)
                * (1 if "tokens" in field else 1e3)
                for field in Chosen._fields[2:]
            }
            print(
                f"| {batch} | {kind} | {len(own)} | {sum(step.seconds for step in own):.2f} "
                f"| {ms['draft']:.1f} ({ms['expected_draft']:.1f}) "
                f"| {ms['target']:.1f} ({ms['expected_target']:.1f}) "
                f"| {ms['tokens']:.2f} ({ms['expected_tokens']:.2f}) | ({ms['plain']:.1f}) |"
            )
