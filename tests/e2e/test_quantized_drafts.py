"""Quantised drafts, and heads of quantised targets: speculation changes no token, and what may cost
acceptance is said.
"""

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from foredraft.types import SamplingParams
from testing.draft_heads import TinyHead, save_head
from testing.engines import Job, running_engine
from testing.quantized_checkpoints import FORMATS, write
from testing.quantized_heads import quantized
from testing.stack import eventually, running_stack
from testing.tools import ROOT

MODELS = ROOT / "models"
TARGET, HEAD = MODELS / "foredraft-demo", MODELS / "foredraft-demo-eagle3"
SHAPE = {"max_running_requests": 4, "chunked_prefill_size": 24, "draft_step_timeout": 20.0}


def copied(source: Path, directory: Path) -> Path:
    """A folder with what belongs to a model beside its weights and config.json."""
    directory.mkdir()
    for file in (*source.glob("tokenizer*"), *source.glob("generation_config.json")):
        shutil.copy(file, directory)
    return directory


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = copied(TARGET, tmp_path_factory.mktemp("targets") / "demo-FP8")
    write(TARGET, directory, FORMATS["float-channel"])
    return directory


@pytest.fixture(scope="module")
def w4a16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled head with 4 bits, made for the plain target by its config.json."""
    raw = json.loads((HEAD / "config.json").read_text())
    raw["speculators_config"] = {"verifier": {"name_or_path": "organisation/demo"}}
    head = TinyHead("EAGLE3", raw, load_file(HEAD / "model.safetensors"), 3)
    stored, _ = quantized(head, FORMATS["packed-64"])
    return save_head(stored, tmp_path_factory.mktemp("heads") / "demo-eagle3-w4a16")


def jobs() -> list[Job]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    ids = tokenizer.encode((ROOT / "docs" / "operations.md").read_text()).ids
    return [
        Job(
            ids[60 * number : 60 * number + 40],
            SamplingParams(temperature=0.8 * (number % 3 == 2), seed=number, max_new_tokens=32),
        )
        for number in range(6)
    ]


def check(target: Path, *drafts: tuple[str, Path]) -> None:
    """Texts with each draft are plain decoding's, and some of its tokens are accepted."""
    with running_engine(target, "NONE", **SHAPE) as engine:
        plain = [result.tokens for result in engine.run(jobs())]
    for algorithm, path in drafts:
        draft = {"speculative_draft_model_path": str(path)}
        with running_engine(target, algorithm, **SHAPE, **draft) as engine:
            results = engine.run(jobs())
        assert [result.tokens for result in results] == plain
        assert sum(result.finish.accepted_tokens for result in results if result.finish) > 0


def test_quantised_drafts_of_an_fp8_target(fp8: Path, w4a16: Path, tmp_path: Path) -> None:
    small = copied(MODELS / "foredraft-demo-draft", tmp_path / "small")
    write(MODELS / "foredraft-demo-draft", small, FORMATS["awq-64"])
    check(fp8, ("EAGLE3", w4a16), ("STANDALONE", small))


def test_a_head_of_a_target_with_a_quantised_embedding_and_lm_head(tmp_path: Path) -> None:
    """As those of GGUF files are."""
    target = copied(TARGET, tmp_path / "demo-q8_0")
    write(TARGET, target, FORMATS["packed-int8-32"], has_vocabulary=True)
    check(target, ("EAGLE3", HEAD))


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def test_services_say_that_a_head_was_made_for_another_quantisation(fp8: Path, w4a16: Path) -> None:
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    texts: list[str] = []
    lines: list[str] = []
    for algorithm in ("NONE", "EAGLE3"):
        flags: dict[str, Any] = {"speculative_algorithm": algorithm}
        if algorithm == "EAGLE3":
            flags |= {"speculative_draft_model_path": str(w4a16), "draft_step_timeout": 10.0}
            flags["draft_wait"] = 110.0
        with running_stack(fp8, lines, **flags) as stack:
            url = stack.urls["http"]
            eventually(lambda url=url: ask(f"{url}/health")["status"] == "ok")
            if algorithm == "EAGLE3":
                eventually(lambda: any("made for organisation/demo" in line for line in lines))
            texts.append(ask(f"{url}/v1/completions", body)["choices"][0]["text"])
            info = ask(f"{url}/get_server_info")
    assert texts[0] == texts[1]
    assert info["quantization"] == "compressed-tensors fp8 (one scale an output)"
    (draft,) = info["drafts"]
    assert draft["quantization"] == "compressed-tensors int4 (groups of 64)"
    assert draft["trained_for"] == "organisation/demo"
    assert draft["note"] == (
        "made for organisation/demo with plain weights, by its name or files; this target's are"
        " fp8: that may cost acceptance, never text"
    )
    assert any(f"draft: {draft['note']}" in line for line in lines)
