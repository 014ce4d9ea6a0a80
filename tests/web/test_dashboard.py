"""The dashboard in a real Chromium, on the real services."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.stack import LocalStack
from testing import stack as stacks
from testing.browsers import Browser
from testing.stack import free_port, running_gateway, running_stack

KEY = "a-secret-of-the-test"
PROMPT = "def add(a, b):\n    return a + b\n\n\n" * 4 + "def"


def complete(stack: LocalStack, **fields: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 64, "temperature": 0, **fields}
    request = urllib.request.Request(
        stack.urls["http"] + "/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=60).read()


def read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def open_dashboard(page: Any) -> None:
    page.wait_for_selector("#figures[data-state=live]")


def test_numbers_move(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/dashboard") as page:
        open_dashboard(page)
        assert page.locator("#partial").is_hidden()
        assert "NGRAM" in page.inner_text("#drafts")
        before = page.inner_text("#speed_foot")
        complete(stack)
        page.wait_for_function(
            "before => document.getElementById('speed_foot').textContent !== before", arg=before
        )
        page.wait_for_function("Number(document.getElementById('length').textContent) >= 1")
        page.wait_for_selector("#drafts .pill:has-text('Drafting')")
        # The first numbers may be of the middle of the request.
        page.wait_for_selector("#ended:has-text('reached their token limit')")
        assert page.inner_text("#health") == "drafting"
        assert "steps" in page.inner_text("#step_foot")
        assert page.locator("#depth div").count() > 0
        assert "ms" in page.inner_text("#split_keys")
        for cell in ("first_50", "first_95", "inter_50", "inter_95", "whole_50", "whole_95"):
            assert page.inner_text(f"#{cell}").endswith("s")


def test_pages_in_use_and_cached_are_told_apart(stack: LocalStack, chrome: Browser) -> None:
    complete(stack)
    with chrome.page(stack.urls["http"] + "/dashboard") as page:
        open_dashboard(page)
        page.wait_for_function("Number(document.getElementById('kv_cached').textContent) > 0")
        # All of one moment: the page may show newer numbers at the next look.
        shown = page.evaluate(
            "() => ['#kv_keys b', '#kv_total', '#kv', '#kv_cached']"
            ".map(at => [...document.querySelectorAll(at)].map(e => e.innerText))"
        )
        used, cached, free = (int(text.split(" ")[0]) for text in shown[0])
        total = int(shown[1][0].split()[1])
        assert used + cached + free == total
        assert shown[2:] == [[str(used)], [str(cached)]]
        # Each part of the bar is as wide as it is large, but for the gaps.
        widths = page.locator("#kv_split i").evaluate_all("parts => parts.map(p => p.offsetWidth)")
        width = page.locator("#kv_split").evaluate("bar => bar.offsetWidth")
        assert sum(widths) >= width - 2 * len(widths)
        assert abs(widths[-1] / width - free / total) < 0.05


def test_charts_are_full_at_first_sight_and_tell_values(stack: LocalStack, chrome: Browser) -> None:
    """With the server's rows of ten minutes, spaced as it keeps them: 20 tokens a second, then
    40.
    """
    with chrome.page(stack.urls["http"] + "/icon") as page:

        def answer(route: Any) -> None:
            history = route.fetch().json()
            names, now = history["columns"], history["now"]
            rows = []
            for index in range(121):
                row = dict.fromkeys(names, 0)
                row |= {"time": now - 600 + 5 * index, "running": index % 3}
                tokens = 100 * index + 100 * max(0, index - 60)
                row |= {"tokens": tokens, "emitted": tokens, "verifies": tokens / 2}
                rows.append([row[name] for name in names])
            route.fulfill(json={**history, "rows": rows})

        page.route("**/dashboard/history", answer)
        page.goto(stack.urls["http"] + "/dashboard")
        open_dashboard(page)
        chart = page.locator("#speed_chart")
        path = chart.locator(".line").first.get_attribute("d")
        assert path.count("L") >= 118
        box = chart.bounding_box()
        line = chart.locator(".line").bounding_box()
        assert line["width"] > 0.85 * box["width"]
        texts = chart.locator("text").all_text_contents()
        clocks = [text for text in texts if ":" in text]
        assert len(clocks) >= 3
        assert [text for text in texts if ":" not in text][:2] == ["0", "10"]
        assert chart.locator(".grid").count() >= len(clocks) + 3

        def told(part: float) -> list[str]:
            page.mouse.move(box["x"] + part * box["width"], box["y"] + 40)
            return page.locator(".chart .tip:visible").all_text_contents()

        early, late = told(0.3), told(0.8)
        assert len(early) == len(late) == 3  # one cursor for all charts
        assert early[0].endswith("20 tokens/s")
        assert late[0].endswith("40 tokens/s")
        assert early[1].endswith("2 tokens per pass")
        page.mouse.move(1, 1)
        assert page.locator(".chart .tip:visible").count() == 0
        chart.focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator(".chart .tip:visible").count() == 3


@pytest.mark.parametrize(
    ("draft", "word", "why"),
    [
        ({"state": "suspended", "tokens_per_tree": 1.4}, "Suspended", "Plain decoding is faster"),
        ({"state": "suspended"}, "Suspended", "cost more than they bring"),
        ({"state": "loading", "attached": 0}, "Loading", "not attached yet"),
        ({"state": "lost", "attached": 0}, "Lost", "decoded plainly"),
        ({"state": "unmatched"}, "Nothing to draft", "n-grams draft when text repeats"),
        ({"state": "idle", "attached": 1, "verifiers": 2}, "Ready", "1 of 2 verifiers"),
    ],
)
def test_states_have_a_word_each(
    stack: LocalStack, chrome: Browser, draft: dict[str, Any], word: str, why: str
) -> None:
    with chrome.page(stack.urls["http"] + "/icon") as page:

        def answer(route: Any) -> None:
            figures = route.fetch().json()
            figures["drafts"] = [{**figures["drafts"][0], **draft}]
            if "tokens_per_tree" not in draft:
                figures["drafts"][0].pop("tokens_per_tree", None)
            route.fulfill(json=figures)

        page.route("**/dashboard/figures", answer)
        page.goto(stack.urls["http"] + "/dashboard")
        open_dashboard(page)
        assert page.inner_text("#drafts .pill") == word
        assert why in page.inner_text("#drafts")
        if draft["state"] in ("loading", "lost", "suspended"):
            assert draft["state"] in page.inner_text("#health")


def test_a_draft_loads_and_is_lost(chrome: Browser, tmp_path: Path) -> None:
    """The words follow real processes: a verifier whose draft comes late and dies."""
    model = stacks.make_model(tmp_path / "model")
    verify, draft = f"unix:{tmp_path}/verify.sock", f"unix:{tmp_path}/draft.sock"
    metrics = free_port()
    common = ["--model-path", str(model), "--device", "cpu", "--num-threads", "1"]
    verifier = [sys.executable, "-m", "verify_service", *common, "--listen", verify]
    verifier += ["--draft", draft, "--max-total-tokens", "1024", "--metrics-port", str(metrics)]
    verifier += ["--draft-wait", "0"]
    drafter = [sys.executable, "-m", "draft_service", *common, "--listen", draft]
    with (
        subprocess.Popen(verifier) as verifying,
        running_gateway(verify, dashboard_metrics=f"127.0.0.1:{metrics}") as (http, _),
    ):
        try:
            with chrome.page(f"{http}/dashboard") as page:
                page.wait_for_selector("#health:has-text('loading')")
                page.wait_for_selector("#drafts .pill:has-text('Loading')")
                with subprocess.Popen(drafter) as drafting:
                    page.wait_for_selector("#drafts .pill:has-text('Ready')")
                    drafting.kill()
                page.wait_for_selector("#drafts .pill:has-text('Lost')")
                assert "draft lost" in page.inner_text("#health")
                verifying.terminate()
                page.wait_for_selector("#health:has-text('verifier lost')")
        finally:
            verifying.terminate()


def test_a_server_with_keys_asks_for_one(chrome: Browser, tmp_path: Path) -> None:
    model = stacks.make_model(tmp_path / "model")
    with (
        running_stack(model, api_key=KEY, protect_metrics=True) as guarded,
        chrome.page(guarded.urls["http"] + "/dashboard") as page,
    ):
        page.wait_for_selector("#key_form:not([hidden])")
        assert page.locator("#figures").is_hidden()
        assert page.locator("#error").is_hidden()
        for path in ("figures", "history"):
            status = page.evaluate(f"fetch('/dashboard/{path}').then(answer => answer.status)")
            assert status == 401
        page.fill("#key", "ключ")  # which no header holds
        page.keyboard.press("Enter")
        page.wait_for_selector("#key_refused:has-text('not known')")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        open_dashboard(page)
        assert page.locator("#key_form").is_hidden()
        assert page.locator("#figures").is_visible()
        kept = page.evaluate(
            "[JSON.stringify({...localStorage}), JSON.stringify({...sessionStorage})]"
        )
        assert (KEY in kept[0], KEY in kept[1]) == (False, True)
        page.reload()
        open_dashboard(page)  # the tab has the key still


def test_a_phone_shows_all(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/dashboard", width=360, height=740) as page:
        open_dashboard(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        small = page.locator("button:visible, nav a:visible").evaluate_all(
            "all => all.filter(e => e.getBoundingClientRect().height < 44).map(e => e.textContent)"
        )
        assert not small
