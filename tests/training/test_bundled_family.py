"""The files of the bundled family: sums, sizes, and that every head fits its target."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from draft_service.models.shared_weights import read_token_map
from training.draft.blocks import BlockShape, load_block_head, spread_layers
from training.draft.heads import HeadShape, default_aux_layers, load_head
from training.lm.loading import load_model
from training.lm.model import LlamaShape

MODELS = Path(__file__).parents[2] / "models"
FAMILY = sorted(path.name for path in MODELS.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", FAMILY)
def test_the_files_are_those_that_were_released(name: str) -> None:
    folder = MODELS / name
    listed = {}
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, _, file = line.partition("  ")
        listed[file] = digest
    files = {path.name: path for path in folder.iterdir() if path.name != "SHA256SUMS"}
    assert set(listed) == set(files)
    for file, path in files.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == listed[file], file
        assert path.stat().st_size < 16 * 2**20, file


def test_the_family_fits_in_eighty_mebibytes() -> None:
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) < 80 * 2**20


@pytest.mark.parametrize(
    ("algorithm", "name"), [("EAGLE3", "eagle3"), ("EAGLE", "eagle"), ("MTP", "mtp")]
)
def test_every_head_fits_the_target(algorithm: str, name: str) -> None:
    target = LlamaShape.from_dir(MODELS / "foredraft-demo")
    folder = MODELS / f"foredraft-demo-{name}"
    config = json.loads((folder / "config.json").read_text())
    layer = dataclasses.replace(target, num_layers=1)
    shape = HeadShape(algorithm, layer)
    if algorithm == "EAGLE3":
        layers = default_aux_layers(target.num_layers)
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in layers]
        shape = HeadShape(algorithm, layer, layers, config["draft_vocab_size"])
    load_head(folder, shape)


def test_the_block_drafter_fits_the_target() -> None:
    target = LlamaShape.from_dir(MODELS / "foredraft-demo")
    folder = MODELS / "foredraft-demo-dspark"
    config = json.loads((folder / "config.json").read_text())
    layer = dataclasses.replace(target, num_layers=config["num_hidden_layers"])
    streams = tuple(number + 1 for number in config["target_layer_ids"])
    assert streams == spread_layers(target.num_layers, len(streams))
    shape = BlockShape(
        "DSPARK",
        layer,
        streams,
        target.num_layers,
        config["block_size"],
        config["mask_token_id"],
        config["markov_rank"],
    )
    head = load_block_head(folder, shape)
    assert sum(parameter.numel() for parameter in head.parameters()) * 2 < 8e6


def test_target_draft_and_token_map_share_a_vocabulary() -> None:
    target, draft = MODELS / "foredraft-demo", MODELS / "foredraft-demo-draft"
    assert (target / "tokenizer.json").read_bytes() == (draft / "tokenizer.json").read_bytes()
    vocab = load_model(target, "cpu").shape.vocab_size
    assert load_model(draft, "cpu").shape.vocab_size == vocab
    ids, same = (
        read_token_map(MODELS / "foredraft-demo-token-map" / name, vocab).tolist()
        for name in ("token_map.pt", "token_map.safetensors")
    )
    assert 0 in ids
    assert same == ids
