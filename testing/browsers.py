"""A real Chromium with an empty profile, whose pages must neither log an error nor ask anything of
another host.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Chromium logs every answer above 399 as an error; those are the tests' own doing.
EXPECTED = "Failed to load resource: the server responded with a status of"


def chromium() -> str:
    """Returns the path of the browser; skips the test where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")


class Browser:
    """A Chromium that is closed by the fixture that opened it."""

    def __init__(self, context: object) -> None:
        self._context = context

    @contextlib.contextmanager
    def page(self, url: str, width: int = 1280, height: int = 900) -> Iterator[object]:
        """Opens a page; fails the test for an error on its console or a request to another host."""
        page = self._context.new_page()  # type: ignore[attr-defined]
        page.set_default_timeout(120_000)
        page.set_viewport_size({"width": width, "height": height})
        faults: list[str] = []
        host = urlsplit(url).netloc

        def on_request(request: object) -> None:
            asked = urlsplit(request.url)  # type: ignore[attr-defined]
            if asked.netloc != host:
                faults.append(f"asked {request.url}")  # type: ignore[attr-defined]

        def on_console(message: object) -> None:
            if message.type in ("error", "warning") and EXPECTED not in message.text:  # type: ignore[attr-defined]
                faults.append(f"console: {message.text}")  # type: ignore[attr-defined]

        page.on("request", on_request)
        page.on("console", on_console)
        page.on("pageerror", lambda error: faults.append(f"exception: {error}"))
        try:
            page.goto(url)
            yield page
        finally:
            # A handler of the test may still be answering.
            page.unroute_all(behavior="ignoreErrors")
            page.close()
        assert not faults


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Starts Chromium with `profile`, a new empty directory."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=chromium(),
            headless=True,
            args=list(FLAGS),
            timeout=120_000,
        )
        try:
            yield Browser(context)
        finally:
            context.close()
