"""Packages from the npm registry for tests of clients in another language."""

import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")


def node_path(cache: Path) -> Path:
    """Returns a node_modules with the packages, installed under `cache` once; without npm the
    test skips.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node and npm are not installed")
    done = cache / "-".join(PACKAGES).replace("/", "-")
    if not done.exists():
        flags = ("--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        subprocess.run([npm, "install", *flags, *PACKAGES], cwd=cache, check=True, timeout=240)
        done.touch()
    return cache / "node_modules"
