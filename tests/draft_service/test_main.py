"""Ends of a draft's process."""

import signal
from pathlib import Path

from testing.endless_loading import signalled_while_it_loads


def test_one_that_is_stopped_while_it_loads_ends_at_once(tmp_path: Path) -> None:
    socket = tmp_path / "draft.sock"
    status, last_line = signalled_while_it_loads(
        "draft_service", "create_drafter", socket, signal.SIGTERM
    )
    assert status == 0
    assert last_line.endswith("SIGTERM: stopping")
    assert not socket.exists()
