"""The playground in a real Chromium, on the real services with the bundled model."""

import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.cli.stack import LocalStack
from foredraft.errors import Overloaded
from gateway import errors
from testing import stack as stacks
from testing.browsers import Browser
from testing.playground import TOKENS, fill, output, run, tab_to
from testing.stack import eventually, free_port, is_listening


@pytest.mark.parametrize(
    ("mode", "temperature", "seed"), [("turns", 0, 1), ("together", 0.8, 2**53 - 1)]
)
def test_both_runs_give_the_same_text(
    stack: LocalStack, chrome: Browser, mode: str, temperature: float, seed: int
) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        run(page, mode=mode, temperature=temperature, seed=seed)
        assert page.get_attribute("#verdict", "data-state") in ("equal", "slower", "even")
        assert "Same text" in page.inner_text("#verdict_title")
        assert page.locator("#error").is_hidden()
        assert output(page, 0) == output(page, 1) != ""
        assert page.locator(".panel").nth(1).locator(".token.drafted").count() == 0
        for panel in page.locator(".panel").all():
            assert panel.locator("[data-stat=tokens]").inner_text() == str(TOKENS)
            speed = panel.locator("[data-stat=speed]").inner_text()
            # A busy browser reads tokens in bunches.
            assert speed == "\N{EN DASH}" or float(speed) > 0
            assert float(panel.locator("[data-stat=length]").inner_text()) >= 1


def test_tokens_are_coloured_and_their_trees_drawn(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        run(page, mode="single")
        drafted = page.locator(".output .token.drafted")
        assert drafted.count() > 0
        assert page.locator(".output .token.added").count() > 0
        drafted.first.hover()
        step = page.locator(".step[data-selected]")
        num_tokens, num_drafted = (
            step.locator(".token").count(),
            step.locator(".token.drafted").count(),
        )
        assert num_tokens == num_drafted + 1
        tree = page.locator("#tree svg")
        assert tree.locator("g.accepted").count() == num_drafted
        assert tree.locator("g.added").count() == 1
        assert f"{num_drafted} accepted" in page.inner_text("#inspector_text")
        assert page.inner_text("#inspector_text") == tree.get_attribute("aria-label")
        # The path of the tree spells the step's own tokens.
        titles = tree.locator("g.accepted title, g.added title").all_text_contents()
        assert "".join(titles) == step.evaluate("step => step.textContent")

        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        before = page.inner_text("#inspector_title")
        page.click("#next")
        assert page.inner_text("#inspector_title") != before
        page.click("#previous")
        assert page.inner_text("#inspector_title") == before


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_contrast_and_a_second_cue(
    stack: LocalStack, chrome: Browser, scheme: str
) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        page.emulate_media(color_scheme=scheme)
        run(page, mode="single")
        looks = page.evaluate(CONTRAST)
        page.goto(stack.urls["http"] + "/dashboard")
        page.wait_for_selector("#health[data-state=ok]")
        looks |= page.evaluate(CONTRAST)
        assert all(ratio >= 4.5 for ratio in looks["contrasts"].values()), looks["contrasts"]
        assert (looks["page"] < 0.2) == (scheme == "dark")
        page.goto(stack.urls["http"] + "/")
        cues = page.evaluate("""() => ['drafted', 'added'].map(kind => {
                const style = getComputedStyle(document.querySelector(`.legend .${kind}`));
                return [style.backgroundColor, style.textDecorationLine + style.boxShadow.includes('inset')];
            })""")  # noqa: E501
        assert cues[0][0] != cues[1][0]
        assert cues[0][1] != cues[1][1]


# Contrast of text with what is behind it, by WCAG's formula, for each kind of element on the page.
CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgba(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) return luminance(colour);
    }
    return 1;
  };
  const contrasts = {};
  for (const element of document.body.querySelectorAll('*')) {
    const hasText = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!hasText || element.disabled || !element.checkVisibility() || element.closest('svg, noscript, .skip')) continue;
    const [a, b] = [luminance(rgba(getComputedStyle(element).color)), behind(element)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = `${element.tagName} ${element.className}`;
    contrasts[name] = Math.min(contrasts[name] ?? 99, ratio);
  }
  return {contrasts, page: behind(document.body)};
}"""  # noqa: E501


def test_everything_works_by_keyboard(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        fill(page, mode="single")
        page.evaluate("document.activeElement.blur()")
        tab_to(page, "e.id === 'prompt'")
        page.keyboard.press("Control+A")
        page.keyboard.type("x = [")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("body[data-runs='1']")
        assert page.locator(".output .prompt").inner_text() == "x = ["
        tab_to(page, "e.matches('.output, .step')")
        page.keyboard.press("Home")
        seen = []
        for _ in range(4):
            assert page.evaluate("document.activeElement.matches('.step[data-selected]')")
            assert page.evaluate("document.activeElement.getAttribute('aria-label')")
            seen.append(page.inner_text("#inspector_title"))
            page.keyboard.press("ArrowRight")
        assert len(set(seen)) == 4
        tab_to(page, "e.id === 'tree'")

        # Each control that a mouse can use has a name and can be reached.
        names = page.evaluate(
            "[...document.querySelectorAll('button, input, textarea')].filter(e =>"
            " e.checkVisibility()).map(e => e.labels?.[0]?.textContent ||"
            " e.getAttribute('aria-label') || e.textContent)"
        )
        assert all(name.strip() for name in names)


def test_a_run_can_be_stopped(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        fill(page, max_tokens=1900)  # this prompt's text does not end before
        page.click("#run")
        page.wait_for_selector(".output .token")
        page.keyboard.press("Escape")
        page.wait_for_selector("body[data-running=false]")
        assert "Stopped" in page.inner_text("#verdict_title")
        assert page.locator("#error").is_hidden()
        assert page.locator("#stop").is_disabled()
        page.wait_for_function(
            "async () => (await (await"
            " fetch('/dashboard/figures')).json()).metrics.gateway_running_requests === 0"
        )


def test_a_server_with_keys(chrome: Browser, tmp_path: Path) -> None:
    model = stacks.make_model(tmp_path / "model")
    with (
        stacks.running_stack(
            model, api_key="a-secret-of-the-test", protect_metrics=True
        ) as guarded,
        chrome.page(guarded.urls["http"] + "/") as page,
    ):
        page.wait_for_selector("#key_field:not([hidden])")
        fill(page, max_tokens=8, mode="single")
        page.click("#run")
        page.wait_for_selector("#error:not([hidden])")
        assert "API key" in page.inner_text("#error")
        page.fill("#key", "ключ")  # which no header holds
        page.keyboard.press("Tab")
        page.click("#run")
        page.wait_for_selector("body[data-runs='2']")
        assert "this API key is not known here" in page.inner_text("#error")
        page.fill("#key", "a-secret-of-the-test")
        page.keyboard.press("Tab")
        page.click("#run")
        page.wait_for_selector("body[data-runs='3']")
        assert page.locator(".output .token").count() > 0
        assert page.locator("#error").is_hidden()


def test_a_phone_shows_all(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/", width=360, height=740) as page:
        run(page, mode="turns")
        width = "document.documentElement.scrollWidth"
        assert page.evaluate(width) <= 360
        page.locator(".output .token").last.scroll_into_view_if_needed()
        page.locator(".output").first.locator(".token").first.click()
        box = page.locator("#inspector").bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 740
        page.click("#hide")
        assert page.locator(".step[data-selected]").count() == 0


def test_errors_are_told_kindly(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        fill(page)
        page.fill("#prompt", "word " * 3000)
        page.click("#run")
        page.wait_for_selector("#error:not([hidden])")
        assert "too long" in page.inner_text("#error")
        # One message, and nothing of the run before or of the recorded one.
        assert page.locator("#verdict").is_hidden()
        assert page.locator("#tree svg").count() == 0
        assert "Pass" not in page.inner_text("#inspector_title")
        assert page.locator("#next").is_disabled()

        full = Overloaded("the queue is full", retry_after_seconds=3)
        page.route(
            "**/v1/completions",
            lambda route: route.fulfill(
                status=429, json=errors.envelope(full), headers=errors.headers(full)
            ),
            times=1,
        )
        fill(page, mode="single")
        page.click("#run")
        page.wait_for_selector("#error:has-text('full right now')")
        assert "3 s" in page.inner_text("#error")
        page.click("#error button")
        page.wait_for_selector("#verdict_title:has-text('tokens')")
        assert page.locator("#error").is_hidden()


def test_a_gateway_without_a_verifier_says_so(chrome: Browser) -> None:
    port = free_port()
    command = [sys.executable, "-m", "gateway", "--port", str(port), "--grpc-port", "0"]
    command += ["--verifier", "unix:/nonexistent/verify.sock"]
    with subprocess.Popen(command) as process:
        try:
            eventually(lambda: is_listening(port))
            with chrome.page(f"http://127.0.0.1:{port}/") as page:
                page.wait_for_selector("#health:has-text('loading')")
                page.click("#run")
                page.wait_for_selector("#error:has-text('No model is ready')")
        finally:
            process.terminate()


def test_trees_are_laid_out_without_overlap(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        worst = page.evaluate("""async () => {
                const {layOut} = await import('/web/tree.js');
                let state = 1;
                const random = n => (state = (state * 48271) % 2147483647) % n;
                let faults = 0;
                for (let round = 0; round < 200; round++) {
                  const drafted = Array.from({length: random(40)}, (_, i) => ({text: 'x'.repeat(random(30)), parent: random(i + 1) - 1}));
                  const accepted = [];
                  for (let at = -1; ;) {
                    const next = drafted.findIndex(node => node.parent === at && random(3));
                    if (next < 0) break;
                    accepted.push(at = next);
                  }
                  const {nodes, width, height} = layOut({before: 'so far', drafted, accepted, added: 'y'});
                  for (const a of nodes) {
                    if (a.x < 0 || a.x + a.width > width || a.y + 25 > height) faults++;
                    if (a.parent !== null && a.x < nodes[a.parent].x + nodes[a.parent].width) faults++;
                    for (const b of nodes) {
                      if (a !== b && a.row === b.row && a.depth === b.depth) faults++;
                    }
                  }
                }
                return faults;
            }""")  # noqa: E501
        assert worst == 0
