"""Publishes the times of ranks as metrics."""

from collections.abc import Sequence

from verify_service.executor.ranks.board import Progress
from verify_service.metrics import RANK_SECONDS

_SECOND = 1e9


class RankTimes:
    """Publishes the seconds that ranks compute, move sums and wait; rank 0 does so for all.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._published = [
            dict.fromkeys(("products", "all_reduce", "waiting"), 0) for _ in range(size)
        ]

    def publish(self, progress: Sequence[Progress]) -> None:
        """Adds the time since the last call to the metrics."""
        for rank, (one, published) in enumerate(zip(progress, self._published, strict=True)):
            found = {
                "products": one.busy - one.moving - one.waiting,
                "all_reduce": one.moving,
                "waiting": one.waiting,
            }
            # A rank updates these one after the other, so a difference may shrink for a moment.
            for part, total in found.items():
                if total > published[part]:
                    seconds = (total - published[part]) / _SECOND
                    RANK_SECONDS.labels(str(rank), part).inc(seconds)
                    published[part] = total
