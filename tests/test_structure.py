"""Holds the shape of the code: no import circles, who may import whom beside the arrows."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVICES = ("gateway", "verify_service", "draft_service", "training")


@cache
def modules() -> dict[str, Path]:
    """Every Python module in the repository, by its dotted name."""
    names = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    paths = [Path(name) for name in names if (ROOT / name).is_file()]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@cache
def imports(module: str) -> frozenset[str]:
    """The repository's modules that a module imports anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / modules()[module]).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() else node.module for name in whole}
    return frozenset(found & modules().keys()) - {module}


def circles(graph: dict[str, frozenset[str]]) -> list[list[str]]:
    """Modules that nothing but each other keeps from being imported first: what remains when leaves are taken away."""
    remaining = {name: set(targets) for name, targets in graph.items()}
    while leaves := [name for name, targets in remaining.items() if not targets & remaining.keys()]:
        for name in leaves:
            del remaining[name]
    users = {name: {user for user in remaining if name in remaining[user]} for name in remaining}
    while roots := [name for name in remaining if not users[name] & remaining.keys()]:
        for name in roots:
            del remaining[name]
    return [sorted(remaining)] if remaining else []


def test_a_planted_circle_is_found():
    planted = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("b"), "d": frozenset("a")}
    assert circles(planted) == [["b", "c"]]


def test_no_module_imports_itself_through_others():
    assert circles({name: imports(name) for name in modules()}) == []


def test_tests_and_benchmarks_do_not_import_each_other():
    crossing = {
        (user, name)
        for user in modules()
        for name in imports(user)
        if {user.partition(".")[0], name.partition(".")[0]} == {"tests", "benchmarks"}
    }
    assert crossing == set()


def test_no_product_code_imports_what_tests_share():
    product = ("foredraft", *SERVICES)
    users = {
        user
        for user in modules()
        if user.partition(".")[0] in product
        and any(
            name.partition(".")[0] in ("testing", "tests", "benchmarks") for name in imports(user)
        )
    }
    assert users == set()
