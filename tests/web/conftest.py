"""The real services with the bundled model, and a real Chromium, for all tests of the pages."""

from collections.abc import Iterator

import pytest

from foredraft.cli.stack import LocalStack, make_supervisor
from testing.browsers import Browser, browser, chromium
from testing.forked import forked


@pytest.fixture(scope="package")
def stack() -> Iterator[LocalStack]:
    chromium()  # skips before the services start
    stack = make_supervisor(
        {
            "port": 0,
            "grpc_port": 0,
            "device": "cpu",
            "num_threads": 1,
            "max_total_tokens": 8192,
            # Pages show drafts, however busy the machine is.
            "speculative_adaptive": False,
            "draft_step_timeout": 20.0,
        },
        on_line=lambda name, line: print(f"{name}: {line}"),
    )
    stack.launch = forked
    try:
        stack.start()
        stack.wait_healthy(timeout=300)
        yield stack
    finally:
        stack.stop()


# While it is open, its thread has an event loop and asyncio.run fails: no scope wider than a
# module.
@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
