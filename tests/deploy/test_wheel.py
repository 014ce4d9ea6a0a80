"""A wheel that is built from the sdist, installed where the repository is not, serves the bundled
model.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testing.stack import eventually, free_port
from testing.tools import ROOT

PROMPT = (
    "class Point:\n    @property\n    def x(self):\n        return self._x\n\n    @property\n   "
    " def y(self):\n"
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel alone; what it depends on is borrowed from this
    interpreter's.
    """
    folder = tmp_path_factory.mktemp("wheel")
    _copy_sources(folder / "source")
    # Neither optimised nor compressed, which takes a minute: the same files are in the wheel.
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {sysconfig.get_config_var("CC")} "$@" -O0 -g0\n')
    compiler.chmod(0o755)
    _run(
        *("env", f"CC={compiler}", sys.executable, "-m", "build", "--no-isolation"),
        *("-C=--build-option=--compression=stored", f"--outdir={folder}", folder / "source"),
    )
    (wheel,) = folder.glob("*.whl")
    assert len(list(folder.glob("*.tar.gz"))) == 1
    place = folder / "environment"
    _run(sys.executable, "-m", "venv", "--without-pip", place)
    python = place / "bin" / "python"
    _run(
        *(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"),
        *("install", "--quiet", "--no-deps", "--no-compile", "--no-index", wheel),
    )
    # A .pth file adds the folder, and not what editable installs in that folder add.
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place


@pytest.mark.slow
def test_an_installed_wheel_serves(environment: Path, tmp_path: Path) -> None:
    found = _run(
        *(environment / "bin" / "python", "-c"),
        "import foredraft, gateway, verify_service, draft_service.ngram._ngram as c; "
        "import foredraft.cpu._kernels as k; "
        "print(*(m.__file__ for m in (foredraft, gateway, verify_service, c, k)))",
        cwd=tmp_path,
    )
    assert all(path.startswith(str(environment)) for path in found.split())
    with _serving(environment, tmp_path) as http:
        answer = http.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 32, "temperature": 0}
        ).json()
        assert answer["choices"][0]["text"].lstrip().startswith("return self._y")
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        assert "<title>" in http.get("/").text  # pages are in the wheel, too


@contextlib.contextmanager
def _serving(environment: Path, folder: Path) -> Iterator[httpx.Client]:
    port, grpc_port = free_port(), free_port()
    command = [environment / "bin" / "foredraft", "serve", "--device=cpu", "--num-threads=1"]
    command += ["--no-speculative-adaptive"]  # drafts, however busy the machine is
    command += [f"--port={port}", f"--grpc-port={grpc_port}", "--max-total-tokens=4096"]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=_clean_environment(), stdout=output, stderr=output
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            eventually(lambda: process.poll() is not None or _is_healthy(http), seconds=300)
            yield http
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(120)
        print(log.read_text())
    assert status == 0


def _is_healthy(http: httpx.Client) -> bool:
    try:
        return bool(http.get("/health").json()["status"] == "ok")
    except (httpx.TransportError, KeyError, ValueError):
        return False


def _copy_sources(target: Path) -> None:
    """Copies what git knows or would take, so that no leftover of an earlier build gets into this
    one.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout")
    for name in filter(None, found.stdout.split("\0")):
        source = ROOT / name
        if source.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name, follow_symlinks=False)


def _clean_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("FOREDRAFT_")
    }


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    result = subprocess.run(
        command, cwd=cwd, env=_clean_environment(), capture_output=True, text=True, check=False
    )
    if result.returncode:
        pytest.fail(f"{command}:\n{result.stdout}{result.stderr}")
    return result.stdout
