"""Records the run that the playground shows before the first one: `python docs/record_example.py`,
after a change of the bundled model, its default draft or the first example.
"""

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

from foredraft.cli import serve_config, stack

WEB = Path(__file__).parent.parent / "gateway" / "web"
MAX_TOKENS = 112


def first_example() -> str:
    """The prompt that the playground begins with."""
    found = re.search(r"prompt: `(.*?[^\\])`", (WEB / "examples.js").read_text(), re.DOTALL)
    assert found is not None
    return found[1].replace("\\`", "`")


def record() -> dict[str, Any]:
    """A greedy run on a server that was started without flags."""
    values = serve_config.resolve_models({"port": 0, "grpc_port": 0, "device": "cpu"})
    prompt = first_example()
    body = {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_provenance": True,
    }
    with stack.make_supervisor(values) as services:
        services.wait_healthy()
        url = services.urls["http"]
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            [choice] = json.load(answer)["choices"]
        with urllib.request.urlopen(f"{url}/get_server_info", timeout=60) as answer:
            info = json.load(answer)
    kept = ("text", "provenance", "steps", "finish_reason", "speculation")
    return {
        "model": info["served_model_name"],
        "algorithm": info["speculative_algorithm"],
        "prompt": prompt,
        "choices": [{name: choice[name] for name in kept}],
    }


if __name__ == "__main__":
    (WEB / "example.json").write_text(json.dumps(record(), ensure_ascii=False) + "\n")
