"""Every benchmark can still be imported, with what it takes from packages and from the tests'
support, and says its flags; one for a GPU says so where there is none.
"""

import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foredraft.cli import stack

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
# The first says that the toolkit of CUDA is missing, the others hand their flags on to services.
TELL_IT_OTHERWISE = ("memcheck", "cold_start", "stages", "stamps")


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("name", [_module(path) for path in FILES])
def test_it_is_imported(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        pytest.skip("needs Triton")


PROGRAMS = [path for path in FILES if 'if __name__ == "__main__":' in path.read_text()]


@pytest.mark.parametrize("name", [_module(path) for path in PROGRAMS])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_it_says_its_flags(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    # The chaos suite's `serve` puts its own there, which tests after this one must not be given.
    monkeypatch.setattr(stack, "Service", stack.Service)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert not ended.value.code
    assert "usage:" in capfd.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    "name",
    [
        _module(path)
        for path in PROGRAMS
        if (path.parent.name == "gpu" and path.stem not in TELL_IT_OTHERWISE)
        or path.stem == "poisson_load"
    ],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_one_for_a_gpu_says_that_there_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        runpy.run_module(name, run_name="__main__")


@pytest.mark.parametrize(
    ("name", "argv", "said"),
    [
        ("adaptive", ["--tree", "5/8"], "--tree 5/8: not steps/topk/nodes"),
        ("adaptive", ["--table", "/no/such"], "--table /no/such: no such file"),
        ("http_load", ["--server", "ours"], "--server ours: not NAME=URL"),
        ("http_load", ["--server", "a=http://[::1]:9", "--requests", "0"], "must be at least 1"),
        ("gateway_routing", ["--turns", "1"], "--turns must be at least 2"),
        ("kv_rounding", ["--model-path", "/no/such", "README.md"], "/no/such: no such directory"),
        ("ngram_override", ["--prompts", "/no/such"], "--prompts /no/such: No such file"),
        ("ngram_override", ["--prompts", "README.md"], "README.md: not lines of JSON with `turns`"),
        ("weight_rounding", ["/no/such/text"], "/no/such/text: no such file"),
        (
            "ngram_trie",
            ["--out", "/dev/null/x"],
            "--out: /dev/null/x: no folder can be made: Not a",
        ),
        ("soak", ["--output", "/dev/null/x/soak"], "--output: /dev/null/x: no folder can be made"),
        ("chaos", ["--resume", "/no/such"], "--resume: /no/such: No such file"),
        ("chaos", ["--resume", "README.md"], "README.md: no report of benchmarks.chaos"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_mistakes_are_told_in_a_line(
    name: str,
    argv: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, *argv])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    code = ended.value.code
    last = code if isinstance(code, str) else capsys.readouterr().err.splitlines()[-1]
    assert said in last
    assert isinstance(code, str) or code in (1, 2)
    assert "\n" not in last


def test_what_its_processes_find_wrong_is_told_in_a_line() -> None:
    argv = ["--server", "a=http://[::1]:9", "--processes", "1"]
    command = [sys.executable, "-m", "benchmarks.http_load", *argv]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert failed.returncode in (1, 2)
    assert "no server to measure" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr
