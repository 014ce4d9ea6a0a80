"""Injects one fault of a draft at one point of its work into a running engine, and records the
effect.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft.transport import cuda
from testing.engines import Collector, Harness, Job
from testing.faulty_draft import ATTACHING, FaultFile
from testing.standby_drafts import StandbyDraft
from verify_service.outputs import Load, StepOutput

QUIET_SECONDS = 0.5
SMI = "nvidia-smi"


class TimedCollector(Collector):
    """Records the times of tokens."""

    def __init__(self, harness: Harness, num_requests: int) -> None:
        super().__init__(harness.engine, num_requests)
        self.times: list[float] = []

    def _take(self, outputs: list[StepOutput], load: Load) -> None:
        self.times.append(time.monotonic())
        super()._take(outputs, load)

    @property
    def longest_gap(self) -> float:
        """Returns the longest time without a token, from the first to the last."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


@dataclass
class Outcome:
    """Effect of a fault.

    Attributes:
        happened: Whether the draft reached the point.
        equal: Whether every text equals a run's without a draft.
        gap: Longest time without a token, in seconds.
        back: Seconds from the draft's return, as a process or by SIGCONT, until it was attached
            again.
        blocks: Number of GPU memory blocks that the verifier has for drafts after that.
        status: Exit status of a draft that ended by itself; None where it did not.
    """

    point: str
    action: str
    happened: bool
    equal: bool
    gap: float
    back: float
    blocks: int
    status: int | None

    def as_row(self) -> dict[str, Any]:
        """Returns the outcome for JSON."""
        return asdict(self)


class BlockCount:
    """Counts the blocks of GPU memory that this process has for drafts."""

    def __init__(self) -> None:
        self.num_alive = 0
        make, free = cuda.Block.__init__, cuda._free

        def counted(*args: Any) -> None:
            make(*args)
            self.num_alive += 1

        def freed(*args: Any) -> None:
            self.num_alive -= 1
            free(*args)

        cuda.Block.__init__ = counted  # type: ignore[method-assign]
        cuda._free = freed  # type: ignore[assignment]


class GraphCount:
    """Counts the CUDA graphs that this process captures."""

    def __init__(self) -> None:
        self.num_captured = 0
        leave = torch.cuda.graph.__exit__

        def left(*args: Any) -> None:
            self.num_captured += 1
            leave(*args)

        torch.cuda.graph.__exit__ = left  # type: ignore[method-assign]


class FaultyDraft(StandbyDraft):
    """Draft services with armed faults, and their replacements."""

    module = "testing.faulty_draft"


def do_fault(
    harness: Harness,
    point: str,
    action: str,
    work: Sequence[Job],
    expected: Sequence[Sequence[int]],
    blocks: BlockCount,
) -> Outcome:
    """Runs work while the draft, a FaultyDraft, fails, then waits until one is attached again."""
    draft: Any = harness.draft
    prefix = Path(os.environ["FAULT_FILE"])
    harness.wait_for_draft()
    if point in ATTACHING:
        faults = FaultFile(prefix, draft.next_pid)
        faults.arm(point, action)
        draft.kill()
        draft.start()
    else:
        faults = FaultFile(prefix, draft.pid)
        faults.arm(point, action)
    runs = [_run(harness, work)]
    # An attach takes longer than some texts, as may a draft's look at what is armed.
    deadline = time.monotonic() + 120
    while not faults.has_happened and time.monotonic() < deadline:
        runs.append(_run(harness, work))
    happened = faults.has_happened
    if point in ATTACHING:
        runs.append(_run(harness, work))
    faults.path.unlink(missing_ok=True)
    returned = time.monotonic()
    status = None
    if action == "SIGSTOP" and happened:
        draft.resume()
    else:
        if action == "FAULT" and happened:
            status = draft.wait(30)
        draft.kill()
        draft.start()
    _wait_until_attached_anew(harness, returned)
    back = time.monotonic() - returned
    runs.append(_run(harness, work))
    harness.check_nothing_left()
    return Outcome(
        point=point,
        action=action,
        happened=happened,
        equal=all(texts == list(map(list, expected)) for texts, _ in runs),
        gap=max(gap for _, gap in runs),
        back=back,
        blocks=blocks.num_alive,
        status=status,
    )


def _run(harness: Harness, work: Sequence[Job]) -> tuple[list[list[int]], float]:
    collector = TimedCollector(harness, len(work))
    results = collector.run(work, timeout=120)
    if harness.engine.failure is not None:
        raise harness.engine.failure
    return [result.tokens for result in results], collector.longest_gap


def _wait_until_attached_anew(harness: Harness, returned: float) -> None:
    """Waits until a draft is attached again.

    One that stood still may count as attached until it is missed.
    """
    time.sleep(max(0.0, returned + QUIET_SECONDS - time.monotonic()))
    harness.wait_for_draft()


def device_bytes() -> dict[int, int]:
    """Returns the GPU memory of processes by the driver's account, by pid; empty where it has
    none.
    """
    if shutil.which(SMI) is None:
        return {}
    asked = subprocess.run(
        [SMI, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    pairs = [line.partition(",")[::2] for line in asked.stdout.splitlines()]
    return {int(pid): int(used) << 20 for pid, used in pairs if used.strip().isdigit()}


def num_descriptors(pid: int | str = "self") -> int:
    """Returns the number of open files of a process."""
    return len(os.listdir(Path("/proc") / str(pid) / "fd"))
