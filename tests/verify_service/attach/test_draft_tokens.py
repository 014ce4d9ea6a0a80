"""A draft whose ids mean other tokens stops the start with one sentence, whichever end has its
files; one that fits is told apart by its checksum.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.cli.serve_config import resolve_models
from foredraft.config.services import VerifyConfig
from foredraft.errors import ConfigError
from foredraft.models.provenance import checksum, model_checksum, trained_for
from foredraft.models.speculation import resolve
from foredraft.types import SamplingParams
from testing import tiny_tokenizers
from testing.checkpoints import make_checkpoint
from testing.draft_heads import TinyHead, save_head, tiny_head
from testing.engines import Job, running_engine

Folders = dict[str, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A target, and drafts with its tokens, with other ones, with another number of them, and with
    more padding.
    """
    root = tmp_path_factory.mktemp("models")
    made = {name: make_checkpoint(root / name, seed=3) for name in ("target", "same", "other")}
    for name in ("more", "padded"):
        made[name] = make_checkpoint(root / name, seed=3, vocab_size=140)
    for name in ("target", "same", "padded"):
        tiny_tokenizers.save(tiny_tokenizers.byte_level(), made[name])
    tiny_tokenizers.save(tiny_tokenizers.metaspace(), made["other"])
    return made


WRONG = {
    "other": "has another tokenizer than the target",
    "more": "140 tokens and the target one of 128",
}


@pytest.mark.parametrize("name", WRONG)
def test_other_tokens_stop_the_start_before_anything_is_loaded(name: str, models: Folders) -> None:
    config = VerifyConfig(
        model_path=str(models["target"]),
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(models[name]),
        draft=("unix:/nowhere",),
    )
    with pytest.raises(ConfigError, match=WRONG[name]) as refused:
        resolve(config)
    assert "\n" not in str(refused.value)


HEAD = tiny_head("EAGLE3", 1)
LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 40]}}
UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "width": ("EAGLE3", {"target_hidden_size": 64}, "the head's is 64, the target's 48): take a"),
    "vocabulary": ("EAGLE3", {"vocab_size": 140}, "the head's is 140, the target's 128): take a"),
    "layers": ("EAGLE3", LAYERS, "the head reads the streams"),
    "head": ("STANDALONE", {}, "is a draft for --speculative-algorithm EAGLE3, not a whole model"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_head_of_another_model_stops_serve_before_anything_is_loaded(
    name: str, models: Folders, tmp_path: Path
) -> None:
    algorithm, changed, message = UNFIT[name]
    head = save_head(TinyHead("EAGLE3", {**HEAD.config, **changed}, HEAD.tensors), tmp_path)
    _refused(models, algorithm, head, message)


def test_a_whole_model_is_no_head(models: Folders) -> None:
    message = "is a whole model, not a head: draft with it by --speculative-algorithm STANDALONE"
    _refused(models, "EAGLE3", models["same"], message)


def _refused(models: Folders, algorithm: str, draft: Path, message: str) -> None:
    values = {
        "model_path": str(models["target"]),
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft),
    }
    with pytest.raises(ConfigError) as refused:
        resolve_models(values)
    assert str(refused.value).startswith(f"--speculative-draft-model-path {draft} ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", WRONG)
def test_other_tokens_stop_the_start_when_the_draft_says_them(
    name: str, models: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the draft's files are on another machine.
    monkeypatch.setattr("foredraft.models.speculation._check_standalone", lambda config: None)
    flags = {"speculative_draft_model_path": str(models[name])}
    with (
        pytest.raises(ConfigError, match=WRONG[name]),
        running_engine(models["target"], "STANDALONE", draft_wait=60.0, **flags),
    ):
        pass


def test_the_same_tokens_are_attached_and_described(
    models: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    flags = {"speculative_draft_model_path": str(models["same"])}
    with running_engine(models["target"], "STANDALONE", **flags):
        pass
    assert f"draft: STANDALONE same, checksum {checksum(models['same'])}" in caplog.text
    assert f"target target: checksum {model_checksum(models['target'])}" in caplog.text


def test_a_draft_with_more_padding_drafts_too(models: Folders) -> None:
    jobs = [
        Job([5, 6, 7, 8 + i], SamplingParams(temperature=0.8 * (i % 2), max_new_tokens=32, seed=i))
        for i in range(6)
    ]
    flags = {"speculative_draft_model_path": str(models["padded"])}
    resolve(
        VerifyConfig(model_path=str(models["target"]), speculative_algorithm="STANDALONE", **flags)
    )
    texts = []
    for algorithm, own in (("NONE", {}), ("STANDALONE", flags)):
        with running_engine(models["target"], algorithm, **own) as engine:
            results = engine.run(jobs)
        texts.append([result.tokens for result in results])
    assert sum(result.finish.drafted_tokens for result in results) > 0
    assert texts[0] == texts[1]


def test_a_checksum_tells_one_changed_weight_apart(models: Folders, tmp_path: Path) -> None:
    copy = shutil.copytree(models["same"], tmp_path / "copy")
    assert checksum(copy) == checksum(models["same"])
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] += torch.eye(48)[7]
    save_file(tensors, copy / "model.safetensors")
    assert checksum(copy) != checksum(models["same"])


def test_the_target_of_the_training_is_read(tmp_path: Path) -> None:
    folder = save_head(tiny_head("EAGLE3", 1), tmp_path)
    assert trained_for(folder) == ""
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"] = {"verifier": {"name_or_path": "organisation/target"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert trained_for(folder) == "organisation/target"
