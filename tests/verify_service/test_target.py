"""Reports about a loaded target: its size, and what its texts depend on."""

import logging

import pytest
import torch

from foredraft.config.services import VerifyConfig
from foredraft.models.loader import load_model
from testing.checkpoints import ARCHITECTURES, make_checkpoint
from testing.quantized_checkpoints import tiny_llama
from verify_service.target import load_share


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("plain"))


def loaded(path, **flags):
    flags = {"device": "cpu", "num_threads": 1, "speculative_algorithm": "NONE", **flags}
    return load_share(VerifyConfig(model_path=str(path), **flags))


@pytest.mark.parametrize("kind", ["unquant", "int8", "int4"])
def test_parameters_are_counted_and_not_their_bytes(kind, plain, caplog):
    caplog.set_level(logging.INFO)
    loaded(plain, quantization=kind)
    total = sum(weight.numel() for weight in load_model(plain).parameters())
    [line] = [text for text in caplog.messages if text.startswith("loaded ")]
    assert f": {total / 1e6:.1f} M parameters" in line


def test_fingerprints_differ_with_the_model_and_with_what_it_is_made_of(plain, tmp_path):
    tiny_llama(tmp_path, vocab_size=98)
    found = {
        name: loaded(path, **flags).exactness
        for name, path, flags in (
            ("plain", plain, {}),
            ("int8", plain, {"quantization": "int8"}),
            ("int4", plain, {"quantization": "int4"}),
            ("small groups", plain, {"quantization": "int4", "quantization_group_size": "32"}),
            ("small keys", plain, {"kv_cache_dtype": "bfloat16"}),
            ("other model", tmp_path, {}),
        )
    }
    assert len({one.fingerprint for one in found.values()}) == len(found)
    assert found["plain"].fingerprint == loaded(plain).exactness.fingerprint
    names = {"model", "quantization", "kv_cache_dtype", "dtype", "cpu"}
    assert names <= found["plain"].depends_on.keys()
    assert found["int4"].depends_on["quantization"] == "--quantization int4 (groups of 128)"
    assert found["plain"].depends_on["kv_cache_dtype"] == "float32"
    levels = {name: one.level for name, one in found.items()}
    assert levels.pop("small keys") == "off"
    assert set(levels.values()) == {"float32"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_of_16_bits_are_not_taken_for_float32(architecture, tmp_path):
    """Gemma's norms are float32 beside them, which says nothing of what rows are rounded to."""
    target = loaded(make_checkpoint(tmp_path, architecture), dtype="bfloat16")
    assert target.dtype == torch.bfloat16
    assert target.exactness.level == "off"
    assert target.exactness.depends_on["kv_cache_dtype"] == "bfloat16"
