"""What the playground says of runs, and what it lets one take away, in a real Chromium."""

import itertools
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from foredraft.cli.stack import LocalStack
from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from gateway.pages import load_assets
from testing.browsers import Browser
from testing.playground import PROMPT, fill, output, run

# Two runs as `compare` sees them. The plain one brings 50 tokens a second.
COMPARE = """async (given) => {
  const {compare, LoadWatch} = await import('/web/verdict.js');
  const transcript = (about) => ({
    ids: [1, 2, 3], numTokens: 3, text: 'abc', account: null, acceptLength: 2.5, drafted: 100, accepted: 60, isBunched: false,
    first: {time: 0, tokens: 1}, last: 10, speed: () => about.rate, between: () => about.rate, ...about,
  });
  const load = (count) => { const watch = new LoadWatch(); watch.note(1 + count, 1); return watch; };
  return compare(
    [transcript({rate: 100, ...given.drafted}), transcript({rate: 50, ...given.plain})],
    {mode: 'turns', stopped: false, repeated: false, server: {dtype: 'float32'}, why: 'WHY.', ...given.about,
     loads: (given.loads ?? [0, 0]).map(load)},
  );
}"""  # noqa: E501


@pytest.mark.parametrize(
    ("given", "state", "words"),
    [
        ({}, "equal", "2.00"),
        ({"drafted": {"rate": 45}}, "slower", "slower: 0.90"),
        ({"drafted": {"rate": 45}}, "slower", "Drafting did not pay here: 60 of 100"),
        ({"drafted": {"rate": 49.9}}, "even", "same speed"),
        ({"drafted": {"rate": 51}}, "even", "same speed"),
        ({"drafted": {"drafted": 19}}, "even", "Too few drafts to compare: 19 tokens were drafted. WHY."),  # noqa: E501
        ({"drafted": {"drafted": 0, "rate": 90}}, "even", "no tokens were drafted"),
        ({"loads": [0, 2]}, "even", "other requests ran beside one"),
        ({"loads": [1, 1]}, "equal", "2.00"),
        ({"about": {"mode": "together"}, "loads": [0, 3]}, "equal", "while both ran, in one batch"),
        ({"plain": {"ids": [1, 9, 3]}}, "differs", "part at token 2"),
        (
            {"plain": {"ids": [1, 9, 3]}, "about": {"server": {"dtype": "bfloat16"}}},
            "parted",
            "computes in bfloat16",
        ),
        (
            {
                "plain": {"ids": [1, 9, 3]},
                "about": {"server": {"dtype": "bfloat16", "exactness": {"level": "strict"}}},
            },
            "differs",
            "--exactness strict",
        ),
        ({"drafted": {"rate": 150}}, "even", "something else on the machine slowed the plain run"),
        ({"plain": {"rate": None}}, "even", "Too short to time"),
    ],
)  # fmt: skip
def test_verdicts(
    stack: LocalStack, chrome: Browser, given: dict[str, Any], state: str, words: str
) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        told = page.evaluate(COMPARE, given)
        assert told["state"] == state
        assert words in f"{told['title']} {told['detail']}"
        if state != "equal":
            assert "✓" not in told["title"]


# What runs show as their speeds, given the milliseconds at which their passes of one token came.
SPEEDS = """async (runs) => {
  const {Transcript} = await import('/web/transcript.js');
  let now;
  performance.now = () => now;
  return runs.map((times) => {
    const panel = document.getElementById('panel').content.firstElementChild.cloneNode(true);
    now = 0;
    const transcript = new Transcript(panel, {title: 'A', note: '', prompt: '', label: 'A', onSelect: () => {}});
    for (now of times) {
      const step = {tokens: 1, drafted: [], accepted: []};
      transcript.add({steps: [step], provenance: [{id: 1, text: 'x', drafted: false}], text: 'x'});
    }
    return panel.querySelector('[data-stat=speed]').textContent;
  });
}"""  # noqa: E501


def test_a_speed_is_shown_where_arrivals_tell_it(stack: LocalStack, chrome: Browser) -> None:
    bunched = [
        [100, *[101] * 5],  # 5 tokens in a millisecond are no speed
        [100, 120, *[121] * 4],
        [100, 120, 140],
        [100 + 20 * (i // 5) for i in range(40)],
    ]
    told = [
        [100, 120, 140, 160],
        [100, 120, 140, 160, 160, 180],
        [100 + 20 * (i // 4) for i in range(40)],
    ]
    with chrome.page(stack.urls["http"] + "/") as page:
        assert page.evaluate(SPEEDS, bunched) == ["\N{EN DASH}"] * 4
        assert page.evaluate(SPEEDS, told) == ["50.0", "62.5", "217"]


def test_a_slower_run_is_never_green(stack: LocalStack, chrome: Browser) -> None:
    """Of all states only that of a faster run has the colour of success."""
    with chrome.page(stack.urls["http"] + "/") as page:
        colours = page.evaluate(
            """() => Object.fromEntries(['equal', 'slower', 'even', 'differs', 'parted', 'idle'].map(state => {
                const verdict = document.getElementById('verdict');
                verdict.dataset.state = state;
                return [state, getComputedStyle(verdict).boxShadow];
            }))"""  # noqa: E501
        )
        green = colours.pop("equal")
        assert green not in colours.values()
        assert colours["slower"] != colours["differs"]


def test_an_example_is_shown_before_the_first_run(stack: LocalStack, chrome: Browser) -> None:
    recorded = json.loads(load_assets()["example.json"].body)
    with chrome.page(stack.urls["http"] + "/") as page:
        page.wait_for_selector("#tree svg")
        assert "recorded" in page.inner_text(".panel h2")
        assert output(page, 0).replace("↵", "") == recorded["choices"][0]["text"]
        assert page.locator(".output .token.drafted").count() > 20
        assert (
            page.locator(".timed:visible").count() == 0
        )  # its times would say nothing of this machine
        assert page.input_value("#prompt") == recorded["prompt"]
        run(page, mode="single", max_tokens=8)
        assert "recorded" not in page.inner_text(".panel h2")
        assert page.locator(".timed:visible").count() == 2


def test_the_recorded_example_is_of_the_bundled_model() -> None:
    recorded = json.loads(load_assets()["example.json"].body)
    [choice] = recorded["choices"]
    tokenizer = Tokenizer.from_dir(str(resolve_model_path(recorded["model"])), None)
    tokens = [token["id"] for token in choice["provenance"]]
    assert tokenizer.decode(tokens) == choice["text"]
    assert sum(step["tokens"] for step in choice["steps"]) == len(tokens)
    assert choice["speculation"]["accepted_tokens"] == sum(
        token["drafted"] for token in choice["provenance"]
    )


def test_numbers_agree_after_the_end_token(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        fill(page, mode="single", max_tokens=100)
        page.check("input[name=kind][value=chat]", force=True)
        page.fill("#prompt", "Hello, how are you?")
        page.click("#run")
        page.wait_for_selector("body[data-runs='1']")
        stats = {
            name: page.inner_text(f"[data-stat={name}]")
            for name in ("tokens", "passes", "accepted", "length")
        }
        tokens, passes = int(stats["tokens"]), int(stats["passes"])
        accepted = int(stats["accepted"].split()[0]) if " of " in stats["accepted"] else 0
        assert page.locator(".output .end-sign").count() == 1
        assert page.locator(".output .token").count() == tokens < 100
        assert page.locator(".output .token.drafted").count() == accepted
        # The prompt's pass gave one token, each other pass one of the model's own, unless the text
        # ended in a draft.
        assert 0 <= 1 + passes + accepted - tokens <= 1
        assert float(stats["length"]) == pytest.approx((tokens - 1) / passes, abs=0.005)
        assert f"{tokens} tokens" in page.inner_text("#verdict_title")
        page.locator(".output .step").last.click()
        assert "end" in page.inner_text("#inspector_text")


def test_nothing_jumps_while_text_streams(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        fill(page, mode="turns", max_tokens=64)
        page.evaluate("""() => {
                window.places = new Set();
                const look = () => {
                    if (document.body.dataset.running === 'true') {
                        const boxes = [...document.querySelectorAll('.output, #inspector, .stats')];
                        places.add(JSON.stringify(boxes.map(e => [e.offsetTop, e.offsetHeight])));
                    }
                    requestAnimationFrame(look);
                };
                look();
            }""")
        for number in itertools.count(1):
            page.click("#run")
            page.wait_for_selector(f"body[data-runs='{number}']")
            if page.evaluate("places.size"):
                break  # else a busy browser drew nothing while it ran
        assert page.evaluate("places.size") == 1


def copied_by(page: Any, button: str) -> str:
    """Presses a button that copies; returns what is in the clipboard then."""
    page.evaluate("navigator.clipboard.writeText('')")
    press = "button => { button.click(); return button.textContent; }"
    assert page.locator(button).evaluate(press) == "Copied"  # it says so for a moment
    page.wait_for_function("async () => await navigator.clipboard.readText() !== ''")
    return str(page.evaluate("navigator.clipboard.readText()"))


def test_text_and_requests_can_be_taken_away(stack: LocalStack, chrome: Browser) -> None:
    """The code that is shown runs as it is, and gives the text of the page."""
    with chrome.page(stack.urls["http"] + "/") as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        run(page, mode="single", max_tokens=24, temperature=0.7, seed=11)
        text = copied_by(page, ".panel .copy")
        assert text == output(page, 0).replace("↵", "")
        page.click("#code summary")
        page.wait_for_selector("#snippet:has-text('curl')")
        curl = subprocess.run(
            ["bash", "-c", page.inner_text("#snippet")], capture_output=True, check=True, timeout=60
        ).stdout.decode()
        pieces = [
            json.loads(piece) for piece in re.findall(r"^data: (\{.*\})$", curl, re.MULTILINE)
        ]
        assert "".join(choice["text"] for one in pieces for choice in one["choices"]) == text
        page.check("input[name=language][value=python]", force=True)
        code = copied_by(page, "#copy_code")
        pytest.importorskip("openai")
        python = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, timeout=120
        )
        assert python.stdout.decode() == text


def test_chat_goes_on_for_several_turns(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        fill(page, mode="turns", max_tokens=16)
        page.check("input[name=kind][value=chat]", force=True)
        assert page.input_value("#prompt") == ""
        page.fill("#prompt", "Hello!")
        page.click("#run")
        page.wait_for_selector("body[data-runs='1']")
        said = output(page, 0)
        assert page.input_value("#prompt") == ""
        assert "Next message" in page.inner_text("#prompt_label")
        page.fill("#prompt", "And then?")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("#run")
        messages = asked.value.post_data_json["messages"]
        assert [one["role"] for one in messages] == ["user", "assistant", "user"]
        assert messages[1]["content"] == said.replace("↵", "")
        page.wait_for_selector("body[data-runs='2']")
        turns = page.locator(".panel").first.locator(".turn").all_text_contents()
        assert turns[0] == "Hello!"
        assert turns[2] == "And then?"
        assert output(page, 0) == output(page, 1)
        page.click("#new_chat")
        page.fill("#prompt", "Hi")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("#run")
        assert len(asked.value.post_data_json["messages"]) == 1
        page.wait_for_selector("body[data-runs='3']")
        page.check("input[name=kind][value=text]", force=True)
        assert page.input_value("#prompt") == PROMPT


def test_coarse_arithmetic_is_told_beforehand(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/") as page:
        page.wait_for_selector("#model:has-text('float32')")
        assert page.locator("#equality").is_hidden()

        def answer(route: Any) -> None:
            route.fulfill(json={**route.fetch().json(), "exactness": {"level": "off"}})

        page.route("**/get_server_info", answer)
        page.reload()
        page.wait_for_selector("#equality:visible")
        assert "may part" in page.inner_text("#equality")


def test_on_a_phone_the_output_comes_into_view(stack: LocalStack, chrome: Browser) -> None:
    with chrome.page(stack.urls["http"] + "/", width=390, height=844) as page:
        page.wait_for_selector("#health[data-state=ok]")
        page.wait_for_selector("#tree svg")
        assert page.locator("#temperature").is_hidden()  # parameters fold
        small = page.locator("button:visible, nav a:visible, summary, .segments span:visible")
        heights = small.evaluate_all("all => all.map(e => e.getBoundingClientRect().height)")
        assert min(heights) >= 44
        top = "document.getElementById('results').getBoundingClientRect().top"
        assert page.evaluate(top) > 400
        page.check("input[name=mode][value=single]", force=True)
        page.click("#run")
        page.wait_for_selector("body[data-runs='1']")
        assert -1 <= page.evaluate(top) < 100
        assert page.locator("#hide").is_visible() or page.locator("#inspector").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
