"""Triton's compiler takes a variable for unchanged by a loop whose new value is the very object
that it was before the loop, as that of `a` in `b = a; while ...: a = b; b = ...`. The interpreter
does not, so no test without a GPU would see it.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def copies_in_loops(source: str) -> list[str]:
    """Plain copies `a = b` inside loops, also as parts of tuples, in kernels."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if not any(
            ast.unparse(each).startswith(("triton.jit", "gluon.jit"))
            for each in function.decorator_list
        ):
            continue
        for loop in ast.walk(function):
            if isinstance(loop, (ast.For, ast.While)):
                found |= {
                    f"{function.name}: {each}" for each in copies(loop, bound(function, loop))
                }
    return sorted(found)


def bound(function: ast.FunctionDef, loop: ast.For | ast.While) -> set[str]:
    """Names that have a value before a loop."""
    arguments = {argument.arg for argument in function.args.args}
    stored = {
        name.id
        for name in ast.walk(function)
        if isinstance(name, ast.Name)
        and isinstance(name.ctx, ast.Store)
        and name.lineno < loop.lineno
    }
    return arguments | stored


def copies(loop: ast.For | ast.While, before: set[str]) -> set[str]:
    """The assignments in a loop that give one name the value of another, where both have been there
    before it.
    """
    found = set()
    for assignment in ast.walk(loop):
        if not isinstance(assignment, ast.Assign):
            continue
        for target in assignment.targets:
            pairs = [(target, assignment.value)]
            if isinstance(target, ast.Tuple) and isinstance(assignment.value, ast.Tuple):
                pairs = list(zip(target.elts, assignment.value.elts, strict=True))
            for to, value in pairs:
                value = copied(value)
                if isinstance(to, ast.Name) and {to.id, value} <= before:
                    found.add(f"{to.id} = {value}")
    return found


def copied(value: ast.expr) -> str:
    """The name that an expression is, or may be: a cast to the type that it has gives the same
    object.
    """
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "to"
    ):
        value = value.func.value
    return value.id if isinstance(value, ast.Name) else ""


def test_finds_the_copy_that_the_compiler_loses():
    source = """
@triton.jit
def kernel(p, other):
    a = tl.load(p)
    b = a
    while b >= 0:
        c = b
        a, d = b, c
        p = b.to(tl.int32)
        b = tl.load(other + a)
"""
    assert copies_in_loops(source) == ["kernel: a = b", "kernel: p = b"]


KERNELS = [
    path
    for room in ("foredraft", "verify_service", "draft_service")
    for path in (ROOT / room).rglob("*.py")
    if "@triton.jit" in path.read_text()
]


def test_kernels_are_found():
    assert len(KERNELS) >= 10


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_no_kernel_copies_a_variable_in_a_loop(path):
    assert copies_in_loops(path.read_text()) == []
