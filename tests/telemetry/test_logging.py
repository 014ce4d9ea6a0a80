"""Lines of the log as text and as JSON, with the request that they belong to."""

import asyncio
import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from foredraft.telemetry.logging import bind_request_id, new_request_id, request_id, setup


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers), root.level, sys.excepthook, threading.excepthook
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    sys.excepthook, threading.excepthook = before[2:]
    logging.captureWarnings(False)


def test_a_text_line_has_service_level_message_and_request() -> None:
    stream = io.StringIO()
    setup("verify", stream=stream)
    with bind_request_id("r7"):
        logging.getLogger("engine").warning(
            "draft is %s", "gone", extra={"slot": 3, "color_message": "\x1b[36m"}
        )
    logging.getLogger("engine").debug("not shown")
    [line] = stream.getvalue().splitlines()
    assert line.endswith("WARNING verify: draft is gone [request=r7 slot=3]")


def test_a_json_line_is_an_object() -> None:
    stream = io.StringIO()
    setup("draft", level="debug", format="json", stream=stream)
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("drafters").exception("failed\nbadly", extra={"step": 4})
    with bind_request_id("r8"):
        logging.getLogger("drafters").debug("fine")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["service"] == "draft"
    assert first["level"] == "error"
    assert first["message"] == "failed\nbadly"
    assert first["step"] == 4
    assert "KeyError: 'lost'" in first["exception"]
    assert "request_id" not in first
    assert second["request_id"] == "r8"
    assert second["time"].endswith("Z")


def test_setting_up_twice_writes_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup("gateway", stream=first)
    setup("gateway", stream=second)
    logging.getLogger("x").info("hello")
    assert first.getvalue() == ""
    assert second.getvalue().count("hello") == 1


def test_requests_that_run_together_keep_their_ids() -> None:
    async def handle(name: str) -> str:
        with bind_request_id(name):
            await asyncio.sleep(0)
            return request_id()

    async def main() -> list[str]:
        return await asyncio.gather(*(handle(f"r{i}") for i in range(5)))

    assert asyncio.run(main()) == [f"r{i}" for i in range(5)]
    assert request_id() == ""


def test_uncaught_exceptions_and_warnings_reach_the_log() -> None:
    stream = io.StringIO()
    setup("verify", stream=stream)
    thread = threading.Thread(target=lambda: 1 / 0, name="engine")
    thread.start()
    thread.join()
    try:
        raise RuntimeError("broken")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    text = stream.getvalue()
    assert "uncaught ZeroDivisionError in thread engine" in text
    assert "uncaught RuntimeError" in text
    assert "DeprecationWarning: old" in text


def test_new_ids_differ() -> None:
    assert len({new_request_id() for _ in range(100)}) == 100
