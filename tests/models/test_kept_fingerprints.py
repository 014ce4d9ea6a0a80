"""Fingerprints of tokenizers are those of their files, kept or not."""

import json
from pathlib import Path

import pytest

from foredraft.models import kept_fingerprints
from foredraft.models.kept_fingerprints import kept_fingerprint
from foredraft.models.registry import cache_dir, resolve_model_path
from foredraft.text.tokenizer import tokenizer_fingerprint


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_fingerprints, "_LEAST_BYTES", 1)
    folder = tmp_path / "model"
    folder.mkdir()
    source = resolve_model_path("foredraft-demo") / "tokenizer.json"
    (folder / "tokenizer.json").write_bytes(source.read_bytes())
    return folder


def test_a_later_start_reads_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = tokenizer_fingerprint(folder)
    assert kept_fingerprint(folder) == want
    monkeypatch.delattr(kept_fingerprints, "tokenizer_fingerprint")
    assert kept_fingerprint(folder) == want


def test_other_files_have_another(folder: Path) -> None:
    before = kept_fingerprint(folder)
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    added = folder / "added_tokens.json"
    added.write_text(json.dumps({"<|more|>": size + 100}))
    with pytest.raises(Exception, match="should have id"):
        kept_fingerprint(folder)
    added.unlink()
    changed = json.loads((folder / "tokenizer.json").read_text())
    changed["added_tokens"].append(dict(changed["added_tokens"][0], id=size + 1, content="<more>"))
    (folder / "tokenizer.json").write_text(json.dumps(changed))
    assert kept_fingerprint(folder) == tokenizer_fingerprint(folder) != before


def test_without_a_place_to_keep_it(folder: Path) -> None:
    cache_dir().parent.mkdir(parents=True, exist_ok=True)
    cache_dir().write_text("no directory")
    assert kept_fingerprint(folder) == tokenizer_fingerprint(folder)


def test_small_ones_and_none_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    assert kept_fingerprint(folder) == tokenizer_fingerprint(folder)
    assert kept_fingerprint(folder.parent) == ""
    assert not cache_dir().exists()
