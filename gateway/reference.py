"""Renders the page /docs from the OpenAPI document: every route and its fields.

It needs no script and nothing from other servers.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse, Response

from gateway.pages import HEADERS

_HEAD = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>Foredraft API</title>
  <link rel="icon" href="/web/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="/web/base.css">
  <link rel="stylesheet" href="/web/reference.css">
  <script src="/web/theme.js"></script>
</head>
<body>
  <header class="bar">
    <span class="brand"><img src="/web/icon.svg" alt="" width="22" height="22">Foredraft</span>
    <nav aria-label="Pages">
      <a href="/">Playground</a>
      <a href="/dashboard">Dashboard</a>
      <a href="/docs" aria-current="page">API</a>
    </nav>
    <button type="button" class="quiet" id="theme">Theme: auto</button>
  </header>
  <main>
  <h1>API</h1>
  <p>For programs: <a href="/openapi.json">/openapi.json</a>. A server with keys wants <code>Authorization: Bearer KEY</code>.</p>
  <nav class="contents" aria-label="Routes">
"""  # noqa: E501


def make_router(app: FastAPI) -> APIRouter:
    """Creates the route of the page that documents an application's routes."""
    router = APIRouter(include_in_schema=False)
    pages: list[str] = []

    @router.api_route("/docs", methods=["GET", "HEAD"])
    async def reference() -> Response:
        if not pages:
            pages.append(page(app.openapi()))
        return HTMLResponse(pages[0], headers=HEADERS)

    return router


def page(document: Mapping[str, Any]) -> str:
    """Renders an OpenAPI document as HTML."""
    schemas = document["components"]["schemas"]
    lines = [_HEAD]
    sections: list[str] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            name = f"{method.upper()} {path}"
            anchor = re.sub(r"\W+", "-", name).strip("-")
            lines.append(f'<a href="#{anchor}"><code>{escape(name)}</code></a>')
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            fields = () if body is None else _table(_named(body["schema"]), schemas)
            sections += _section(anchor, name, operation.get("description", ""), fields)
    sections.append("<h1>Objects</h1>")
    for name in sorted(_inner(document, schemas)):
        about = schemas[name].get("description", "")
        sections += _section(name, name, about, _table(name, schemas))
    return "\n".join([*lines, "</nav>", *sections, "</main></body></html>\n"])


def _section(anchor: str, name: str, about: str, table: Iterable[str]) -> Iterator[str]:
    yield f'<section class="card" id="{escape(anchor)}"><h2><code>{escape(name)}</code></h2>'
    if about:
        yield f"<p>{escape(about)}</p>"
    yield from table
    yield "</section>"


def _table(name: str, schemas: Mapping[str, Any]) -> Iterator[str]:
    """Yields the table of a schema's fields."""
    schema = schemas[name]
    required = schema.get("required", ())
    yield "<table><thead><tr><th>field</th><th>type</th><th>about</th></tr></thead><tbody>"
    for field, given in schema.get("properties", {}).items():
        about, default = given.get("description", ""), given.get("default")
        if field in required:
            about = f"Required. {about}"
        elif default not in (None, ""):
            about = f"{about} {json.dumps(default)} when absent."
        cells = (f"<code>{escape(field)}</code>", _type(given), escape(about.strip()))
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table>"


def _type(given: Mapping[str, Any]) -> str:
    if "$ref" in given:
        name = escape(_named(given))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in given:
        return " or ".join(_type(each) for each in given["anyOf"] if each.get("type") != "null")
    if "enum" in given or "const" in given:
        values = given.get("enum", [given.get("const")])
        return ", ".join(escape(repr(value)) for value in values)
    if given.get("type") == "array":
        return f"list of {_type(given.get('items', {}))}"
    return escape(str(given.get("type", "any")))


def _named(given: Mapping[str, Any]) -> str:
    return str(given["$ref"]).rpartition("/")[2]


def _inner(document: Mapping[str, Any], schemas: Mapping[str, Any]) -> set[str]:
    """Returns the names of object schemas that appear only inside bodies."""
    bodies = {
        _named(content["application/json"]["schema"])
        for operations in document["paths"].values()
        for operation in operations.values()
        if (content := operation.get("requestBody", {}).get("content"))
    }
    return {name for name in schemas if name not in bodies and "properties" in schemas[name]}
