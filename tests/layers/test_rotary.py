"""Frequencies of every kind of rotary embedding against transformers, with some in each part of the
ramps.
"""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foredraft.layers.rotary import Rotary
from foredraft.models.config import ModelConfig

HEAD_DIM = 64
STRETCHED = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_theta": 10000.0, "factor": 8.0},
    "llama3": {**STRETCHED, "low_freq_factor": 1.0, "high_freq_factor": 8.0},
    "yarn": {**STRETCHED, "beta_fast": 16.0, "beta_slow": 1.5},
}


def frequencies(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and theirs, float32 [HEAD_DIM / 2]."""
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": kind, **KINDS[kind]},
    )
    parsed = ModelConfig.from_dict(config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    ours = Rotary(parsed.ropes[0], HEAD_DIM, torch.device("cpu"))._frequencies
    theirs, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert parsed.ropes[0].attention_factor == pytest.approx(scale)
    return ours, theirs


@pytest.mark.parametrize("kind", list(KINDS))
def test_frequencies_are_transformers(kind: str) -> None:
    ours, theirs = frequencies(kind)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_some_frequencies_are_kept_some_stretched_and_some_between(kind: str) -> None:
    """Without this the comparison above would say nothing of the ramp."""
    plain = 1.0 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    stretch = plain / frequencies(kind)[0]
    assert stretch[0] == pytest.approx(1.0)
    assert stretch[-1] == pytest.approx(8.0)
    assert ((stretch > 1.05) & (stretch < 7.95)).sum() >= 4
    assert (stretch.diff() >= -1e-4).all()
