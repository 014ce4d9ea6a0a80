"""Operates the playground: fills its form, runs it, reads the results."""

from typing import Any

import pytest

PROMPT = "def add(a, b):\n    return a + b\n\n\n" * 4 + "def"
TOKENS = 64


def fill(page: Any, max_tokens: int = TOKENS, mode: str = "turns", **fields: object) -> None:
    page.wait_for_selector("#health[data-state=ok]")
    page.fill("#prompt", PROMPT)
    if not page.evaluate("document.getElementById('parameters').open"):
        page.click("#parameters summary")  # folded on a phone
    for name, value in {"max_tokens": max_tokens, "temperature": 0, **fields}.items():
        page.fill(f"#{name}", str(value))
    page.check(f"input[name=mode][value={mode}]", force=True)


def runs(page: Any) -> int:
    """Returns the number of runs that have ended: a short run may be over before its state is
    read.
    """
    return int(page.get_attribute("body", "data-runs") or 0)


def run(page: Any, **fields: object) -> None:
    fill(page, **fields)
    before = runs(page)
    page.click("#run")
    page.wait_for_selector(f"body[data-runs='{before + 1}']")


def tab_to(page: Any, condition: str) -> None:
    """Presses Tab until the focused element fulfils a JavaScript condition on `e`."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(f"(e => {condition})(document.activeElement)"):
            return
    pytest.fail(f"Tab does not reach {condition}")


def output(page: Any, index: int) -> str:
    """Returns the text of a run without its prompt, as it is copied."""
    return (
        page.locator(".output")
        .nth(index)
        .locator(".step")
        .evaluate_all("steps => steps.map(step => step.textContent).join('')")
    )
