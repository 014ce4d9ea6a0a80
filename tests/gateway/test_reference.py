"""The page of the API: whole, and from this server alone."""

import re
from html import escape
from html.parser import HTMLParser

import httpx


def test_every_route_and_field_is_on_the_page(http: httpx.Client) -> None:
    answer = http.get("/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    document = http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert f"<code>{method.upper()} {path}</code>" in answer.text
            # A heading alone says nothing to a reader.
            assert f"<p>{escape(operation['description'])}</p>" in answer.text, (method, path)
    for name in ("ChatBody", "GenerateBody", "NativeSampling"):
        for field in document["components"]["schemas"][name]["properties"]:
            assert f"<code>{field}</code>" in answer.text, (name, field)


def test_it_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            found.extend(value or "" for name, value in attributes if name in ("href", "src"))

    page = http.get("/docs").text
    Links().feed(page)
    anchors = set(re.findall(r'id="([^"]+)"', page))
    for link in set(found):
        if link.startswith("#"):
            assert link[1:] in anchors
        else:
            assert link.startswith("/"), link
            assert http.get(link).status_code == 200, link
