"""Launches of Triton kernels against the kernels' own parameters: mypy does not see these, and
without a GPU some of them are never made.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("foredraft", "verify_service", "draft_service")
# What Triton's launcher takes for itself.
OPTIONS = {"num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion"}


@cache
def trees() -> dict[Path, ast.Module]:
    """Every module of the rooms."""
    return {
        path: ast.parse(path.read_text()) for room in ROOMS for path in (ROOT / room).rglob("*.py")
    }


@cache
def functions() -> list[ast.FunctionDef]:
    """Every function of the rooms, and every method."""
    nodes = (node for tree in trees().values() for node in ast.walk(tree))
    return [node for node in nodes if isinstance(node, ast.FunctionDef)]


@dataclass(frozen=True)
class Kernel:
    """Parameters of a kernel: those that are arguments, then those that it is compiled for; and
    which of them need not be given.
    """

    arguments: tuple[str, ...]
    constants: tuple[str, ...]
    optional: tuple[str, ...] = ()


def kernels_of(trees: dict[Path, ast.Module]) -> dict[tuple[str, str], Kernel]:
    """By the names of their module and their own."""
    found = {}
    for path, tree in trees.items():
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            if any(
                ast.unparse(each).startswith(("triton.jit", "gluon.jit"))
                for each in node.decorator_list
            ):
                constants = tuple(each.arg for each in node.args.args if _is_constexpr(each))
                names = tuple(each.arg for each in node.args.args if each.arg not in constants)
                count = len(node.args.defaults)
                optional = tuple(each.arg for each in node.args.args[-count:] if count)
                found[path.stem, node.name] = Kernel(names, constants, optional)
    return found


def _is_constexpr(argument: ast.arg) -> bool:
    return argument.annotation is not None and ast.unparse(argument.annotation) == "tl.constexpr"


def launches_of(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Call, str]]:
    """(function around it, launch, name of the kernel) of `module.kernel[grid](...)`."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                yield function, call, ast.unparse(call.func.value)


class Splat(Exception):
    """Raised where the content of `*` or `**` is not known."""


def keys_in(value: ast.expr, function: ast.AST, tree: ast.Module) -> set[str]:
    """The keys of a dictionary that is given as `**value`."""
    if isinstance(value, ast.Dict):
        own = {key.value for key in value.keys if isinstance(key, ast.Constant)}
        rest = [each for key, each in zip(value.keys, value.values, strict=True) if key is None]
        return own.union(*(keys_in(each, function, tree) for each in rest))
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return keys_in(value.left, function, tree) | keys_in(value.right, function, tree)
    if isinstance(value, ast.BoolOp):  # options or {}
        return keys_in(value.values[0], function, tree)
    if isinstance(value, ast.Name) and value.id == "launch":  # what `overlapped` gave a caller
        return {"launch_pdl", "DEPENDENT"}
    if isinstance(value, ast.Name):
        return keys_in(assigned(value.id, function), function, tree)
    if isinstance(value, ast.Attribute):
        return keys_in(assigned(ast.unparse(value), tree), function, tree)
    if isinstance(value, ast.Call):
        return keys_from_call(value, tree)
    raise Splat(ast.unparse(value))


def keys_from_call(call: ast.Call, tree: ast.Module) -> set[str]:
    """Returns the keys of a dictionary that a function returns."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "constants":
        names = set()
        for argument in call.args:
            if isinstance(argument, ast.Starred):
                names |= set(layout_columns(ast.unparse(argument.value)))
            else:
                names.add(ast.literal_eval(argument))
        return {name.upper() for name in names}
    name = ast.unparse(call.func)
    for module in (tree, *trees().values()):
        for function in module.body:
            if isinstance(function, ast.FunctionDef) and function.name == name:
                returned = [
                    node.value for node in ast.walk(function) if isinstance(node, ast.Return)
                ]
                return set().union(
                    *(keys_in(value, function, module) for value in returned if value is not None)
                )
    raise Splat(name)


def layout_columns(name: str) -> tuple[str, ...]:
    """The columns of `ADJUSTMENT.names`."""
    from verify_service.executor import records

    layout, _, names = name.partition(".")
    assert names == "names"
    return getattr(records, layout).names


def assigned(name: str, function: ast.AST) -> ast.expr:
    """Returns the expression that is assigned to a name, once."""
    values = []
    for node in ast.walk(function):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        if any(ast.unparse(target) == name for target in targets):
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            values.append(node.value)
    if len(values) != 1 or values[0] is None:
        raise Splat(name)
    return values[0]


def count_positional(call: ast.Call, function: ast.AST) -> int:
    """Arguments without a name, those of `*tuple` too."""
    return sum(
        count_in(argument.value, function) if isinstance(argument, ast.Starred) else 1
        for argument in call.args
    )


def count_in(value: ast.expr, function: ast.AST) -> int:
    """Elements of a tuple: as it is, by its name, or as a property returns it."""
    if isinstance(value, ast.Name):
        value = assigned(value.id, function)
    if isinstance(value, ast.Attribute):
        name = value.attr
        [value] = [
            node.body[-1].value
            for node in functions()
            if node.name == name
            and isinstance(node.body[-1], ast.Return)
            and isinstance(node.body[-1].value, ast.Tuple)
        ]
    if not isinstance(value, ast.Tuple):
        raise Splat(ast.unparse(value))
    return sum(
        count_in(each.value, function) if isinstance(each, ast.Starred) else 1
        for each in value.elts
    )


def faults(call: ast.Call, function: ast.AST, tree: ast.Module, kernel: Kernel) -> list[str]:
    """Returns the problems of a launch."""
    named: list[str] = []
    for keyword in call.keywords:
        named += [keyword.arg] if keyword.arg else sorted(keys_in(keyword.value, function, tree))
    found = [f"{name} twice" for name in set(named) if named.count(name) > 1]
    parameters = (*kernel.arguments, *kernel.constants)
    positional = count_positional(call, function)
    given = (*parameters[:positional], *named)
    found += [f"{name} twice" for name in named if name in parameters[:positional]]
    found += [f"no {name}" for name in parameters if name not in (*given, *kernel.optional)]
    found += [f"{name} is no parameter" for name in set(named) - set(parameters) - OPTIONS]
    if positional > len(kernel.arguments):
        found.append(f"{positional} arguments for {len(kernel.arguments)}")
    return sorted(found)


@cache
def kernels() -> dict[tuple[str, str], Kernel]:
    """Every kernel of the rooms, by the names of its module and its own."""
    return kernels_of(trees())


def kernel_of(name: str, path: Path, function: ast.AST, tree: ast.Module) -> Kernel | None:
    """The kernel that a launch in a function names; None for what is none."""
    module, _, own = name.rpartition(".")
    if not module:
        return kernels().get((path.stem, own))
    modules = {module for module, _ in kernels()}
    for node in (*ast.walk(function), *tree.body):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if module == (alias.asname or alias.name) and alias.name in modules:
                    return kernels().get((alias.name, own), Kernel((), ("a kernel of this name",)))
    return None


def test_launches_give_kernels_what_they_take():
    found, launched = {}, set()
    for path, tree in trees().items():
        for function, call, name in launches_of(tree):
            kernel = kernel_of(name, path, function, tree)
            if kernel is not None:
                found[path.stem, name, call.lineno] = faults(call, function, tree, kernel)
                launched.add(name.rpartition(".")[2])
    assert {where: wrong for where, wrong in found.items() if wrong} == {}
    assert len(found) >= 30
    assert {"attend", "fold", "multiply_fp8", "multiply_blocks", "begin", "walk"} <= launched


@pytest.mark.parametrize(
    ("launch", "fault"),
    [
        ("kernel[grid](x, 3, SIZE=1, num_warps=4)", []),
        ("kernel[grid](x, SIZE=1)", ["no rows"]),
        ("kernel[grid](x, 3)", ["no SIZE"]),
        ("kernel[grid](x, 3, 4, SIZE=1)", ["3 arguments for 2", "SIZE twice"]),
        ("kernel[grid](x, 3, SIZE=1, SIZES=2)", ["SIZES is no parameter"]),
        ("kernel[grid](*both, **options)", []),
        ("kernel[grid](*both, SIZE=1, **options)", ["SIZE twice"]),
        ("kernel[grid](x, rows=3, SIZE=1)", []),
    ],
)
def test_faults_of_launches_are_found(launch, fault):
    tree = ast.parse(
        "@triton.jit\ndef kernel(x, rows, SIZE: tl.constexpr): pass\n"
        f"def launch(x):\n    both = (x, 3)\n    options = {{'SIZE': 1}} | {{}}\n    {launch}\n"
    )
    kernel = kernels_of({Path("made.py"): tree})["made", "kernel"]
    [(function, call, _)] = launches_of(tree)
    assert faults(call, function, tree, kernel) == fault
