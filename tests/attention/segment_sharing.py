"""Runs tests of exact attention in each way to share out the segments of a sequence's keys."""

from typing import Any

import pytest

from foredraft.attention import exact_triton


def sharing_from(num_keys: int) -> Any:
    """Returns a fixture under which segments are shared out among programs: not, always, or where
    a sequence has so many keys or more.
    """
    # Programs that share out a block's segments, and keys of a sequence from which on they do.
    ways = {
        "together": (0, 0),
        "apart": (1 << 30, 0),
        f"apart from {num_keys} keys on": (1 << 30, num_keys),
    }

    @pytest.fixture(params=ways)
    def sharing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        programs, short = ways[request.param]
        monkeypatch.setattr(exact_triton, "_PROGRAMS_PER_UNIT", programs)
        monkeypatch.setattr(exact_triton, "_SHORT", short)

    return sharing
