"""The page of the API in a real Chromium."""

from foredraft.cli.stack import LocalStack
from testing.browsers import Browser
from tests.web.test_pages import CONTRAST


def test_the_page_of_the_api(stack: LocalStack, chrome: Browser) -> None:
    """The browser fails for an error of a script, as where a page lacks what all have."""
    with chrome.page(stack.urls["http"] + "/", width=390, height=844) as page:
        page.emulate_media(reduced_motion="reduce")  # colours change at once
        page.click("nav a[href='/docs']")
        page.wait_for_url("**/docs")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.click("#theme")
        assert page.inner_text("#theme") == "Theme: light"
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.click(".contents a[href='#POST-v1-completions']")
        field = page.locator("#POST-v1-completions tr", has_text="top_p")
        assert field.is_visible()
        assert "1.0 when absent" in field.inner_text()
        for _ in range(2):  # light, then dark
            contrasts = page.evaluate(CONTRAST)["contrasts"]
            assert all(ratio >= 4.5 for ratio in contrasts.values()), contrasts
            page.click("#theme")
