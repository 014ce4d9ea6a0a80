"""The OpenAPI document tells what the gateway takes; whatever fits it, or nearly does, gets an
answer that is no defect.
"""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import requests
import schemathesis
from schemathesis.pytest.lazy import get_all_tests

from foredraft.cli.stack import LocalStack
from testing.rounds import rounds
from testing.stack import eventually, is_idle

PATH = Path(__file__).parents[2] / "docs" / "openapi.json"
DOCUMENT: dict[str, Any] = json.loads(PATH.read_text())
# A fuzzed deadline may pass, and a name that nobody serves be asked for.
ANSWERS = {200, 400, 404, 405, 413, 504}


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_what_is_served_is_what_is_documented(http: httpx.Client) -> None:
    # tests/docs holds the file against the code.
    assert http.get("/openapi.json").json() == DOCUMENT


def test_references_resolve() -> None:
    schemas = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert references(DOCUMENT) <= schemas


def test_every_route_with_a_body_describes_it_and_every_route_its_errors() -> None:
    operations = [
        (method, operation)
        for operations in DOCUMENT["paths"].values()
        for method, operation in operations.items()
    ]
    names = [operation["operationId"] for _, operation in operations]
    assert len(set(names)) == len(names)
    for method, operation in operations:
        assert "default" in operation["responses"]
        assert "422" not in operation["responses"]
        if method in ("post", "put") and "flush_cache" not in operation["operationId"]:
            assert "requestBody" in operation


@pytest.mark.parametrize(
    "path",
    [
        path
        for path, methods in DOCUMENT["paths"].items()
        if "requestBody" in methods.get("post", {})
    ],
)
def test_an_empty_body_gets_the_documented_error(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 400
    responses = DOCUMENT["paths"][path]["post"]["responses"]
    reference = responses["default"]["content"]["application/json"]["schema"]["$ref"]
    schema = DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]
    assert set(answer.json()) == set(schema["required"])
    shape = schema["properties"]["error"]
    assert set(answer.json()["error"]) == set(shape["required"])


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """Keeps its connections: new ones for all cases take a tenth of the time."""
    with requests.Session() as made:
        made.trust_env = False  # which would look for proxies each time
        yield made


def check(case: schemathesis.Case, stack: LocalStack, session: requests.Session) -> None:
    if isinstance(case.body, dict):
        # So that more than the first check is reached, and nothing runs for long.
        if isinstance(case.body.get("model"), str):
            del case.body["model"]
        if case.path == "/v1/responses" and case.body.get("max_output_tokens") is None:
            # Almost any text is a whole request there, which would run to the end of the context.
            case.body["max_output_tokens"] = 4
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(case.body.get(field), int):
                case.body[field] %= 9
    answer = case.call(base_url=stack.urls["http"], session=session, timeout=60)
    assert answer.status_code in ANSWERS, answer.text
    if answer.status_code >= 400 and case.method != "HEAD":
        error = answer.json()["error"]
        assert error["message"]
        assert error.get("code") != "internal_error"
        assert error["type"] != "api_error"


@functools.cache
def schema() -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_path(PATH)


def fuzzed(method: str, path: str) -> Callable[[LocalStack, requests.Session], None]:
    """The test of one operation. Its cases are made as it begins: made for `parametrize`, every
    worker would make those of all operations.
    """
    settings = hypothesis.settings(
        max_examples=rounds(10, 25),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @pytest.mark.slow
    def test(stack: LocalStack, session: requests.Session) -> None:
        described = schema().include(method=method.upper(), path=path)
        [made] = get_all_tests(
            schema=described, test_func=check, settings=settings, given_kwargs=None
        )
        _, run = made.ok()
        run(stack=stack, session=session)

    return test


# Each has a name of its own: of tests with one id xdist runs a single one.
for route, operations in DOCUMENT["paths"].items():
    for verb, described in operations.items():
        globals()[f"test_fuzzed_{described['operationId']}"] = fuzzed(verb, route)


@pytest.mark.slow
def test_nothing_is_left_after_the_fuzzing(http: httpx.Client) -> None:
    eventually(lambda: is_idle(http))
    assert http.get("/health").json()["status"] == "ok"
