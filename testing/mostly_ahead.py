"""`draft_service` that drafts ahead whatever it costs, but not in every step:
`python -m testing.mostly_ahead --listen ...`.
"""

import runpy

from draft_service.drafters.ahead_policy import AheadPolicy


def is_ahead(policy: AheadPolicy, step: int, batch: int) -> bool:
    return step % 8 > 0


if __name__ == "__main__":
    AheadPolicy.is_ahead = is_ahead  # type: ignore[method-assign]
    runpy.run_module("draft_service", run_name="__main__")
