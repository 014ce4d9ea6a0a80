"""The controller and the drafts' room stay small, and all numbers of policy stand in one place."""

import ast
import io
import tokenize
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

import verify_service.controller
import verify_service.drafts
from verify_service.controller.config import ControllerConfig

MOST_NUMBERS, LONGEST_FILE = 20, 400
# Numbers that name something: kinds of steps, an empty track, what drafts may tell.
NAMES = {"PLAIN", "VERIFY", "NOTHING", "MOST_CONFIDENCE"}


def test_all_numbers_of_policy_are_in_its_configuration() -> None:
    assert len(fields(ControllerConfig)) <= MOST_NUMBERS
    described = (ControllerConfig.__doc__ or "").split("Attributes:")[1]
    for field in fields(ControllerConfig):
        assert f" {field.name}: " in described
    for path in _files(verify_service.controller):
        assert _numbers(ast.parse(path.read_text())) <= NAMES, path.name


@pytest.mark.parametrize(
    ("room", "most_lines"), [(verify_service.controller, 1200), (verify_service.drafts, 2000)]
)
def test_rooms_stay_small(room: ModuleType, most_lines: int) -> None:
    texts = [path.read_text() for path in _files(room)]
    assert max(len(text.splitlines()) for text in texts) <= LONGEST_FILE
    assert sum(map(_code_lines, texts)) <= most_lines


def _files(room: ModuleType) -> list[Path]:
    return sorted(Path(room.__path__[0]).glob("*.py"))


def _numbers(module: ast.Module) -> set[str]:
    """Names of constants of a module whose values are numbers."""
    found = set()
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            values = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            if any(isinstance(value, int | float) for value in values):
                found |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    return found


def _code_lines(text: str) -> int:
    """Lines that are neither blank, nor comments, nor docstrings."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)
