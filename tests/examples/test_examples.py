"""The programs of examples/ run as they stand, against one stack."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from foredraft.cli.stack import LocalStack
from testing.stack import make_model, running_stack
from testing.tools import ROOT

FOLDER = ROOT / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("examples") / "model")


@pytest.fixture(scope="module")
def stack(model: Path) -> Iterator[LocalStack]:
    with running_stack(model) as running:
        yield running


def run(name: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(FOLDER / name), *map(str, arguments)]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_openai_chat(stack: LocalStack) -> None:
    assert re.search(r"^[1-9]\d* tokens$", run("openai_chat.py", stack.urls["http"]), re.MULTILINE)


def test_native_generate(stack: LocalStack) -> None:
    output = run("native_generate.py", stack.urls["http"])
    found = re.search(r"(\d+) of (\d+) tokens drafted, ([\d.]+) tokens a pass", output)
    assert found
    # A random model soon repeats itself at temperature 0, which n-grams see.
    assert 0 < int(found[1]) < int(found[2])
    assert float(found[3]) > 1


def test_structured_output(stack: LocalStack) -> None:
    output = run("structured_output.py", stack.urls["http"])
    assert re.fullmatch(r"\d\d? lines of (python|go|rust), typed: (True|False)\n", output)


def test_grpc_client(stack: LocalStack) -> None:
    output = run("grpc_client.py", stack.urls["grpc"])
    expected = httpx.post(
        f"{stack.urls['http']}/generate",
        json={
            "text": "def add(a, b):\n",
            "sampling_params": {"temperature": 0, "max_new_tokens": 48},
        },
        timeout=60,
    ).json()
    assert output.startswith(expected["text"])
    assert re.search(r"\d+ of \d+ drafted tokens accepted\n$", output)


def test_train_head(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "all.txt").write_text((ROOT / "README.md").read_text() * 4)
    out = tmp_path / "my head"
    sizes = ["--steps=4", "--windows=8", "--window=48"]
    texts = [f"--data={text}", f"--validation={text}"]
    output = run("train_head.py", f"--target={model}", *texts, f"--out={out}", *sizes)
    serve = shlex.split(output.partition("Serve it:")[2].replace("\\\n", ""))
    assert serve[1:4] == ["serve", "--model-path", str(model)]
    assert serve[4:6] == ["--speculative-algorithm", "EAGLE3"]
    assert serve[6:] == ["--speculative-draft-model-path", str(out)]
    measured = json.loads(output.splitlines()[0])
    assert measured["chain"]["txt"] >= 1
    assert measured["tree"]["txt"] >= 1
    assert (out / "model.safetensors").exists()
    assert json.loads((out / "config.json").read_text())["architectures"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--target=none", "--target none: no config.json; not a Hugging Face directory\n"),
        ("--window=3", "--window must be at least 4, not 3\n"),
    ],
)
def test_train_head_names_what_it_cannot_take(
    flag: str, message: str, model: Path, tmp_path: Path
) -> None:
    command = [sys.executable, str(FOLDER / "train_head.py"), f"--target={model}"]
    command += [f"--data={tmp_path}", f"--out={tmp_path / 'head'}", flag]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr.endswith(message)


def test_all_are_run_and_listed() -> None:
    names = {path.name for path in FOLDER.glob("*.py")}
    assert names == set(re.findall(r"run\(\s*\"(\w+\.py)\"", Path(__file__).read_text()))
    assert names == set(re.findall(r"^\| `(\w+\.py)`", (FOLDER / "README.md").read_text(), re.M))
