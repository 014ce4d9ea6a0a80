"""Tests how much is drafted on two small cores while requests come and go: hardly ever slower than
plain decoding.

In a model of such steps (`testing.cpu_load`), whose table of times is wrong as tables measured at
start have been.
"""

import pytest

from testing.cpu_load import Cpu, Request, arrivals, serve
from verify_service.controller.controller import Controller
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import DraftKind

SECONDS, SEEDS = 20.0, range(6)
CPUS = {
    "as measured": Cpu(),
    "rows seem free": Cpu(slope=0.25),
    "rows seem dear": Cpu(slope=2.0),
    "drafts slow the target": Cpu(aside=0.004),
    "all of that": Cpu(slope=0.25, aside=0.004, slow=1.4),
}


def ratios(
    cpu: Cpu, rate: float, greedy: float, sampled: float, share: float
) -> tuple[float, float]:
    """Tokens per second and time between tokens, of plain decoding: means of some loads."""

    def load(seed: int) -> list[Request]:
        return arrivals(rate, SECONDS, greedy, sampled, share, seed)

    rates, betweens = [], []
    for seed in SEEDS:
        plain = serve(cpu, None, load(seed))
        adaptive = serve(cpu, Controller(CostModel(cpu.times()), [DraftKind(5, 5)]), load(seed))
        rates.append(adaptive.rate / plain.rate)
        betweens.append(adaptive.between / plain.between)
    return sum(rates) / len(SEEDS), sum(betweens) / len(SEEDS)


@pytest.mark.parametrize("cpu", CPUS.values(), ids=CPUS)
@pytest.mark.parametrize("rate", [0.5, 2.8])  # of what is served: half, twice
@pytest.mark.parametrize(
    "acceptance", [(0.72, 0.55, 0.5), (0.6, 0.6, 1.0)], ids=["mixed", "sampled"]
)
def test_requests_that_come_and_go_lose_next_to_nothing(
    cpu: Cpu, rate: float, acceptance: tuple[float, float, float]
) -> None:
    speed, between = ratios(cpu, rate, *acceptance)
    assert speed > 0.97
    assert between < 1.05


def test_what_is_guessed_well_gains_where_few_run() -> None:
    for cpu in (Cpu(), Cpu(slope=0.25), Cpu(slow=1.4)):
        assert ratios(cpu, 0.5, 0.9, 0.4, 0.5)[0] > 1.02
        assert ratios(cpu, 0.5, 0.8, 0.8, 0.0)[0] > 1.02
