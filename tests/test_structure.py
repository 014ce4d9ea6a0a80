"""Tests the structure of the code: no import circles, rules for imports beside the arrows, and
nothing in the library for one user.
"""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVICES = ("gateway", "verify_service", "draft_service", "training")
# The command and its benchmarks are one user each by nature; the stubs are generated; the keys are
# read by the gateway, and by the command before it starts anything.
EXEMPT = ("foredraft.api", "foredraft.bench", "foredraft.cli", "foredraft.config.api_keys")


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
    """Modules that nothing but each other keeps from being imported first: what remains when leaves
    are taken away.
    """
    remaining = {name: set(targets) for name, targets in graph.items()}
    while leaves := [name for name, targets in remaining.items() if not targets & remaining.keys()]:
        for name in leaves:
            del remaining[name]
    users = {name: {user for user in remaining if name in remaining[user]} for name in remaining}
    while roots := [name for name in remaining if not users[name] & remaining.keys()]:
        for name in roots:
            del remaining[name]
    return [sorted(remaining)] if remaining else []


@cache
def started(module: str) -> frozenset[str]:
    """The repository's programs that a module starts by name."""
    tree = ast.parse((ROOT / modules()[module]).read_text())
    named = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return frozenset(name for name in named & modules().keys() if is_entry_point(name))


def is_entry_point(module: str) -> bool:
    """Whether it is a program of its own, started by name."""
    return '__name__ == "__main__"' in (ROOT / modules()[module]).read_text()


def owners() -> dict[str, set[str]]:
    """For each module of the library the services that need it: by themselves, or through another
    module of the library.
    """
    shared = [name for name in modules() if name.startswith("foredraft.")]
    found = {
        name: {
            user.partition(".")[0]
            for user in modules()
            if user.partition(".")[0] in SERVICES and name in imports(user)
        }
        for name in shared
    }
    changed = True
    while changed:
        changed = False
        for user in shared:
            if user.startswith(EXEMPT):
                continue
            for name in imports(user) | started(user):
                if name in found and not found[user] <= found[name]:
                    found[name] |= found[user]
                    changed = True
    return found


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


def test_the_library_holds_only_what_two_services_need():
    single = {
        name: needed
        for name, needed in owners().items()
        if len(needed) < 2
        and not name.startswith(EXEMPT)
        and modules()[name].name != "__init__.py"
        and not is_entry_point(name)
    }
    assert single == {}
