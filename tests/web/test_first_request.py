"""The README's first requests, as they stand there, on the bundled model."""

import json
import re
import subprocess
import sys
from pathlib import Path

from foredraft.cli.serve import FIRST_PROMPT
from foredraft.cli.stack import LocalStack

README = Path(__file__).parents[2] / "README.md"


def command(start: str, stack: LocalStack) -> str:
    """A block of shell in the README, asking this server."""
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL)
    [block] = [block for block in blocks if block.startswith(start)]
    found = block.replace("http://127.0.0.1:30000", stack.urls["http"])
    return found.replace(".venv/bin/foredraft", f"{sys.executable} -m foredraft.cli.main")


def shell(text: str) -> str:
    return subprocess.run(
        ["bash", "-c", text], capture_output=True, check=True, text=True, timeout=120
    ).stdout


def test_the_first_answer_is_drafted_visibly(stack: LocalStack) -> None:
    request = command("curl", stack)
    assert json.dumps(FIRST_PROMPT) in request  # as `serve` prints it
    answer = json.loads(shell(request))
    assert answer["choices"][0]["text"].startswith("        return self._y\n")
    usage = answer["usage"]
    assert usage["completion_tokens"] == 64
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] >= 50


def test_generate_shows_the_same_text(stack: LocalStack) -> None:
    text = json.loads(shell(command("curl", stack)))["choices"][0]["text"]
    assert text in shell(command(".venv/bin/foredraft generate", stack))
