"""Token maps: ranking, coverage, and the two file formats."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from draft_service.models.shared_weights import read_token_map
from foredraft.cli.main import main
from foredraft.errors import CheckpointError, ConfigError
from training.text_data import read_tokenizer
from training.token_map import count_tokens, select_tokens, write_token_map


def test_ids_are_ranked_by_count_and_the_named_ones_are_in() -> None:
    counts = np.array([0, 5, 9, 5, 1, 0])
    ids, coverage = select_tokens(counts, 3, always=[0])
    assert ids == [2, 1, 0]
    assert coverage == pytest.approx(14 / 20)
    assert select_tokens(counts, 3)[0] == [2, 1, 3]
    assert select_tokens(counts, 3, always=[4, 4, 0])[0] == [2, 4, 0]
    with pytest.raises(ConfigError, match="--size"):
        select_tokens(counts, 7)
    with pytest.raises(ConfigError, match="--size must be between 1 and 6, not 0"):
        select_tokens(counts, 0)
    for wrong in (6, -1):
        with pytest.raises(ConfigError, match=rf"--always must be in \[0, 5\], not {wrong}"):
            select_tokens(counts, 3, always=[wrong])


def test_both_files_hold_the_same_ids(tmp_path: Path) -> None:
    write_token_map([5, 0, 3], tmp_path / "map.pt")
    # What SGLang does with the file: torch.load gives ids that make a tensor.
    assert torch.tensor(torch.load(tmp_path / "map.pt", weights_only=True)).tolist() == [5, 0, 3]
    for name in ("map.pt", "map.safetensors"):
        assert read_token_map(tmp_path / name, 6).tolist() == [5, 0, 3]


def test_counting_matches_the_tokenizer() -> None:
    from training.text_data import Document, train_tokenizer

    documents = [Document("to be or not to be, that is the question. " * 5, "txt")]
    tokenizer = train_tokenizer(documents, 270, 10_000, {}, 1)
    counts = count_tokens(["to be"], tokenizer)
    ids = tokenizer.encode("to be", add_special_tokens=False).ids
    assert counts.sum() == len(ids)
    assert all(counts[token] >= 1 for token in ids)


def test_ids_may_have_gaps() -> None:
    tokenizer = Tokenizer(WordLevel({"unknown": 0, "word": 500}, unk_token="unknown"))
    counts = count_tokens(["word"], tokenizer)
    assert len(counts) == 501
    assert counts.nonzero()[0].tolist() == [500]


def test_a_map_needs_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    flags = [f"--data={tmp_path / 'empty.txt'}", "--size=9", f"--out={tmp_path / 'map.pt'}"]
    assert main(["train", "token-map", "--tokenizer=models/foredraft-demo", *flags]) == 2
    assert "--data: there is no text" in capsys.readouterr().err
    assert not (tmp_path / "map.pt").exists()


def test_the_command_names_its_files_and_takes_no_other_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be")
    (tmp_path / "folder.pt").mkdir()
    command = ["train", "token-map", "--tokenizer=models/foredraft-demo", "--size=9"]
    command.append(f"--data={tmp_path / 'text.txt'}")
    for name, message in (
        ("map.json", "must end with .pt"),
        ("map.v1", "must end with .pt"),
        ("folder.pt", "a folder; give a file in it, .pt"),
    ):
        assert main([*command, f"--out={tmp_path / name}"]) == 2
        assert f"--out {tmp_path / name}: {message}" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "folder.pt"}
    out = tmp_path / "map.v1.pt"
    assert main([*command, f"--out={out}"]) == 0
    assert f"wrote {out} and {tmp_path / 'map.v1.safetensors'}" in capsys.readouterr().out
    for path in (out, tmp_path / "map.v1.safetensors"):
        assert len(read_token_map(path, 8192)) == 9


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json in "):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        read_tokenizer(tmp_path)
