"""Reads from a server's dashboard what its ranks did in a load's steps."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from foredraft.bench.http_client import ConnectionBroken, HttpClient

# So long after a step, figures that a gateway has kept are not from before it.
_FRESH_SECONDS = 1.2
# Parts of a rank's step, and what a line says of them.
_WORDS = {"products": "computes", "all_reduce": "sums", "waiting": "waits"}


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Totals since a server started.

    Attributes:
        num_steps: Number of steps.
        seconds: By rank and part.
    """

    num_steps: float
    seconds: Mapping[tuple[str, str], float]

    def since(self, before: "RankTimes") -> dict[str, dict[str, float]]:
        """Milliseconds of a step by rank and part, over the steps since then; empty for none."""
        num_steps = self.num_steps - before.num_steps
        found: dict[str, dict[str, float]] = {}
        for (rank, part), seconds in self.seconds.items():
            grown = seconds - before.seconds.get((rank, part), 0.0)
            if num_steps > 0 and grown >= 0:
                found.setdefault(rank, {})[part] = 1e3 * grown / num_steps
        return found


async def read(client: HttpClient) -> RankTimes | None:
    """Returns a server's step times by rank; None for a single rank, or if they cannot be read."""
    try:
        info = await client.get("/get_server_info")
        if info.status != 200 or info.json().get("tp_size", 1) < 2:
            return None
        await asyncio.sleep(_FRESH_SECONDS)
        response = await client.get("/dashboard/figures")
        if response.status != 200:
            return None
        metrics = response.json()["metrics"]
        totals = metrics.get("rank_seconds_total", {})
        seconds = {(key.split()[0], key.split()[1]): float(totals[key]) for key in totals}
        return RankTimes(float(metrics.get("step_seconds_count", 0)), seconds)
    except (ConnectionBroken, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def lines(milliseconds: Mapping[str, Mapping[str, float]]) -> str:
    """One line for each rank."""
    return "\n".join(
        f"rank {rank} in a step: "
        + ", ".join(f"{_WORDS.get(part, part)} {value:.2f} ms" for part, value in parts.items())
        for rank, parts in milliseconds.items()
    )
