"""The Dockerfile: linted, consistent, and its steps run on this machine.

No container engine is needed or used.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from foredraft.config.services import GatewayConfig
from testing import command_lines, tools
from testing.dockerfile import NativeBuild, copy_context, stages

DOCKERFILE = tools.ROOT / "Dockerfile"
TARGETS = ("gateway", "cpu", "cuda")


def test_hadolint_finds_nothing() -> None:
    assert tools.run("hadolint", "Dockerfile") == ""


def test_bases_are_pinned_and_users_are_not_root() -> None:
    assert re.search(r"^ARG BASE=python:3\.\d+\.\d+-slim-bookworm$", DOCKERFILE.read_text(), re.M)
    found = stages(DOCKERFILE)
    outside = {stage.base for stage in found.values()} - set(found)
    assert outside == {"${BASE}"}
    for runtime in ("runtime", "runtime-cuda"):
        users = [value for keyword, value in found[runtime].steps if keyword == "USER"]
        assert users[-1] == "10001:10001"
    assert found["runtime-cuda"].base == "runtime"
    for target in TARGETS:
        assert found[target].base == ("runtime-cuda" if target == "cuda" else "runtime")
        assert not {keyword for keyword, _ in found[target].steps} & {"USER", "RUN"}


def test_the_cuda_image_can_compile_kernels_and_keeps_them() -> None:
    steps = stages(DOCKERFILE)["runtime-cuda"].steps
    assert any(keyword == "RUN" and " gcc=" in value for keyword, value in steps)
    compose = yaml.safe_load((tools.ROOT / "docker-compose.yml").read_text())
    assert ("ENV", "TRITON_CACHE_DIR=/cache/triton") in steps
    for name in ("verifier-gpu", "draft-gpu"):
        assert "cache:/cache" in compose["services"][name]["volumes"]
    assert "cache" in compose["volumes"]


@pytest.mark.parametrize("target", TARGETS)
def test_images_start_what_exists_and_ask_its_health(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = dict(stages(DOCKERFILE)[target].steps)
    argv = [*json.loads(steps.get("ENTRYPOINT", "[]")), *json.loads(steps["CMD"])]
    config = command_lines.check(argv, {}, monkeypatch)
    assert isinstance(config, GatewayConfig)  # serve's is one too
    assert config.host == "0.0.0.0"
    assert steps["EXPOSE"] == f"{config.port} {config.grpc_port}"
    health = json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])
    assert health == ["python", "-m", "foredraft.rpc.healthcheck", f"127.0.0.1:{config.grpc_port}"]


def test_the_context_holds_what_the_build_reads(tmp_path: Path) -> None:
    copy_context(tools.ROOT, tmp_path / "context")
    project = (tmp_path / "context" / "pyproject.toml").read_text()
    for package in re.search(r"^include = \[(.*)\]$", project, re.M)[1].split(", "):
        assert (tmp_path / "context" / package.strip('"*')).is_dir()
    assert (tmp_path / "context/foredraft/bundled/foredraft-demo/config.json").is_file()
    assert not list((tmp_path / "context").rglob("*.so"))


@pytest.mark.slow
def test_the_gateway_image_has_no_torch_and_starts(tmp_path: Path) -> None:
    environment = _build(tmp_path, "install-gateway")
    assert _python(environment, "-m", "gateway", "--help").startswith("usage: python -m gateway")
    assert "usage:" in _python(environment, "-m", "foredraft.rpc.healthcheck", "--help")
    _python(environment, "-c", "import foredraft.cli.serve, gateway.__main__")
    absent = (
        "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ['torch',"
        " 'transformers'])))"
    )
    _python(environment, "-c", absent)
    size = sum(
        f.stat().st_size for f in environment.rglob("*") if f.is_file() and not f.is_symlink()
    )
    assert size < 300 * 2**20
    assert not list(environment.rglob("bundled/*/*.safetensors"))
    assert list(environment.rglob("bundled/*/tokenizer.json"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_cpu_image_loads_and_drafts(tmp_path: Path) -> None:
    environment = _build(tmp_path, "install-cpu")
    _python(environment, "-m", "verify_service", "--help")
    _python(environment, "-m", "draft_service", "--help")
    code = """
import torch
from foredraft.models.loader import load_model
from foredraft.models.registry import resolve_model_path
from draft_service.ngram.trie import NgramDrafter
load_model(resolve_model_path("foredraft-demo"), dtype=torch.float32, device=torch.device("cpu"))
"""
    _python(environment, "-c", code)


def _build(directory: Path, stage: str) -> Path:
    if not os.environ.get("FOREDRAFT_TEST_IMAGES"):
        pytest.skip(
            "installs everything anew, which takes minutes: set FOREDRAFT_TEST_IMAGES to run it"
        )
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the image has Python 3.11")
    arguments = {"TORCH_INDEX": ""}  # no other index than pip's own configuration
    build = NativeBuild(DOCKERFILE, tools.ROOT, directory, arguments)
    return build.build(stage) / "opt" / "foredraft"


def _python(environment: Path, *arguments: str) -> str:
    """Runs the environment's interpreter, away from the checkout."""
    result = subprocess.run(
        [environment / "bin" / "python", *arguments],
        cwd=environment,
        env={"PATH": os.environ["PATH"], "HOME": str(environment)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
