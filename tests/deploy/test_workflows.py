"""GitHub's workflows run targets that the Makefile has; the fast tests are there."""

import re
from pathlib import Path

import pytest
import yaml

from testing.tools import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_the_same_targets(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    called = {
        name for step in steps for name in re.findall(r"^make ([\w-]+)", step.get("run", ""), re.M)
    }
    assert called <= TARGETS
    assert called
    # No step runs a tool past the Makefile.
    tools = ("pytest", "ruff", "mypy", "mkdocs", "python")
    assert not [step for step in steps if step.get("run", "").startswith(tools)]


def test_every_target_is_phony() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(phony.split()) == TARGETS


def test_fast_tests_exist() -> None:
    (fast,) = re.findall(r"^FAST := (.*)$", MAKEFILE, re.MULTILINE)
    assert [name for name in fast.split() if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_are_whole(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
