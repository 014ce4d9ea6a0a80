"""Compiles the C sources side by side; everything else is in pyproject.toml."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildSideBySide(build_ext):
    """Compiles each source of an extension in a process of its own."""

    def build_extensions(self) -> None:
        """Builds all extensions."""
        compile_sources = self.compiler.compile

        def side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor() as threads:
                parts = threads.map(lambda one: compile_sources([one], **options), sources)
                return [name for part in parts for name in part]

        self.compiler.compile = side_by_side
        super().build_extensions()


setup(cmdclass={"build_ext": BuildSideBySide})
