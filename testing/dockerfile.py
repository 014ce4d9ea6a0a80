"""Runs the steps of a Dockerfile's stage on this machine, with the image's root mapped to a
directory.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Stage:
    """A stage `FROM ... AS name` and its instructions, with line continuations joined."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages(path: Path) -> dict[str, Stage]:
    """Reads a Dockerfile of the kind that this repository has: every stage is named."""
    found: dict[str, Stage] = {}
    stage: Stage | None = None
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = found[name] = Stage(base, name)
        elif keyword and stage is not None:
            stage.steps.append((keyword, rest.strip()))
    return found


class NativeBuild:
    """Builds stages in directories under `root`, each mapped to `/` of its stage.

    A path of the image in a RUN step is replaced by its directory's path. Steps that need root or
    a distribution (apt-get, useradd) are left out: what they install is there already where tests
    run.

    Args:
        context: The build's context; only what .dockerignore lets through is copied.
        arguments: Values of ARGs.
    """

    # The image's directories that RUN steps name.
    MAPPED = ("/opt/foredraft", "/wheels", "/src")
    SKIPPED = ("apt-get", "groupadd")

    def __init__(self, path: Path, context: Path, root: Path, arguments: dict[str, str]) -> None:
        self._stages = stages(path)
        self._context = context
        self._root = root
        self._arguments = arguments
        self._built: dict[str, Path] = {}

    def build(self, name: str) -> Path:
        """Builds a stage and those it needs; returns the directory that is its root."""
        if name in self._built:
            return self._built[name]
        stage = self._stages[name]
        directory = self._root / name
        directory.mkdir()
        self._built[name] = directory
        if stage.base in self._stages:
            inherited = self.build(stage.base)
            shutil.copytree(inherited, directory, dirs_exist_ok=True, symlinks=True)
        variables: dict[str, str] = {}
        for keyword, rest in stage.steps:
            if keyword == "ARG":
                key, _, default = rest.partition("=")
                variables[key] = self._arguments.get(key, default)
            elif keyword == "COPY":
                self._copy(rest, directory)
            elif keyword == "RUN" and not rest.startswith(self.SKIPPED):
                self._run(rest, directory, variables)
        return directory

    def _copy(self, rest: str, directory: Path) -> None:
        if match := re.fullmatch(r"--from=(\S+) (\S+) (\S+)", rest):
            source, target = (
                self.build(match[1]) / match[2].lstrip("/"),
                directory / match[3].lstrip("/"),
            )
            # An environment cannot be moved; stages that only copy it are not run here.
            shutil.copytree(source, target, symlinks=True)
            return
        assert rest == ". .", f"COPY {rest}"
        copy_context(self._context, directory / "src")

    def _run(self, command: str, directory: Path, variables: dict[str, str]) -> None:
        for path in self.MAPPED:
            command = re.sub(rf"(?<![\w/]){path}\b", str(directory / path.lstrip("/")), command)
        workdir = directory / "src"
        environment = {**os.environ, **variables, "PYTHONPATH": ""}
        result = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=workdir if workdir.is_dir() else directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, (
            f"RUN {command}\n{result.stderr[-4000:]}{result.stdout[-2000:]}"
        )


def copy_context(context: Path, target: Path) -> None:
    """Copies the files that `.dockerignore` lets through, for the form `*`, `!name`...,
    `**/pattern`...
    """
    lines = [
        line
        for line in (context / ".dockerignore").read_text().splitlines()
        if line and line[0] != "#"
    ]
    assert lines[0] == "*"
    kept = [line[1:] for line in lines if line.startswith("!")]
    patterns = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    assert len(kept) + len(patterns) + 1 == len(lines)
    target.mkdir(parents=True)
    for name in kept:
        source = context / name
        if source.is_dir():
            shutil.copytree(
                source, target / name, symlinks=True, ignore=shutil.ignore_patterns(*patterns)
            )
        else:
            shutil.copy2(source, target / name)
