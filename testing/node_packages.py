"""Packages from the npm registry for tests of clients in another language."""

import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")


def node_path(cache: Path) -> Path:
    """Returns a node_modules with the packages, installed under `cache` once; the test skips
    where there is no npm, or no way to its registry.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node and npm are not installed")
    done = cache / "-".join(PACKAGES).replace("/", "-")
    if not done.exists():
        flags = ("--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        command = [npm, "install", *flags, *PACKAGES]
        try:
            subprocess.run(command, cwd=cache, check=True, timeout=120)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"npm does not get the packages: {error}")
        done.touch()
    return cache / "node_modules"
