"""Every benchmark can still be imported, with what it takes from packages and from the tests'
support, and says its flags.
"""

import importlib
import runpy
import sys
from pathlib import Path

import pytest

from foredraft.cli import stack

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))


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


@pytest.mark.parametrize(
    "name", [_module(path) for path in FILES if 'if __name__ == "__main__":' in path.read_text()]
)
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
