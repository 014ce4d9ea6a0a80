"""The config.json of published heads, word for word where it matters, at their own sizes: what is
made of them.
"""

from typing import Any

import pytest

from foredraft.errors import CheckpointError
from foredraft.models.head_config import HeadConfig

# Llama 3 8B's sizes as its heads state them.
LLAMA = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "vocab_size": 128256,
}
# Says what the library made of a head for another model, with the keys it leaves null.
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "base_model_ep_plan": None,
    "draft_vocab_size": 32000,
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": None,
    "embed_requires_grad": False,
    "has_no_defaults_at_init": False,
    "norm_before_fc": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": [], "name_or_path": "some/model"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.5.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "head_dim": 128,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_cache": True,
        **LLAMA,
    },
}


def test_eagle_of_its_authors() -> None:
    """yuhuili/EAGLE-LLaMA3.1-Instruct-8B: the architecture is the target's, so the flag says what
    it is.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "pad_token_id": 0,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        **LLAMA,
    }
    head = HeadConfig.from_dict(config, "EAGLE")
    assert (head.algorithm, head.fc_bias, head.target_hidden_size) == ("EAGLE", False, 4096)
    assert head.layer.ropes[0].theta == 500000.0
    assert head.captured_layers(32) == ()
    with pytest.raises(CheckpointError, match="not a draft head"):
        HeadConfig.from_dict(config)


def test_eagle3_of_its_authors() -> None:
    """yuhuili/EAGLE3-*: only the draft vocabulary tells it from EAGLE-2; the layers are the usual
    three.
    """
    config = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000, **LLAMA}
    head = HeadConfig.from_dict(config, "EAGLE3")
    assert (head.draft_vocab_size, head.num_streams) == (32000, 3)
    assert head.captured_layers(32) == (2, 16, 29)
    with pytest.raises(CheckpointError, match="EAGLE3, not EAGLE"):
        HeadConfig.from_dict(config, "EAGLE")


def test_eagle3_of_sglang() -> None:
    """jamesliu1/sglang-EAGLE3-* and SpecForge: an architecture of their own, layer ids where the
    trainer chose them.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 32000,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 23, 44],
            "use_aux_hidden_state": True,
        },
        **LLAMA,
    }
    assert HeadConfig.from_dict(config).captured_layers(48) == (2, 24, 45)
    del config["eagle_config"]
    assert HeadConfig.from_dict(config).captured_layers(32) == (2, 16, 29)


@pytest.mark.parametrize("name", ["Eagle3LlamaForCausalLM", "Eagle3LLamaforCausalLM"])
def test_eagle3_of_angelslim(name: str) -> None:
    """Heads for small Qwen3 targets say that the LM head is tied, as their targets do, and bring
    one.
    """
    config = {
        "architectures": [name],
        "draft_vocab_size": 32000,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        **LLAMA,
    }
    head = HeadConfig.from_dict(config)
    assert (head.algorithm, head.draft_vocab_size) == ("EAGLE3", 32000)


def test_eagle3_on_the_last_state_alone() -> None:
    """NVIDIA's second head for gpt-oss-120b: no streams are fused."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 201088,
        "eagle_config": {"use_aux_hidden_state": False},
        **{**LLAMA, "hidden_size": 2880, "vocab_size": 201088, "head_dim": 64},
    }
    head = HeadConfig.from_dict(config)
    assert head.num_streams == 0
    assert head.captured_layers(36) == ()


def test_eagle3_of_the_speculators_library() -> None:
    head = HeadConfig.from_dict(SPECULATORS)
    assert (head.algorithm, head.draft_vocab_size) == ("EAGLE3", 32000)
    assert (head.norm_before_residual, head.norm_before_fc, head.num_streams) == (True, False, 3)
    assert head.layer.head_dim == 128
    assert head.captured_layers(36) == (2, 18, 33)
    older = SPECULATORS | {"architectures": ["Eagle3Speculator"], "norm_before_residual": False}
    assert HeadConfig.from_dict(older).norm_before_residual is False


def test_mimo() -> None:
    """XiaomiMiMo/MiMo-7B: the layers lie in the target's own checkpoint, whose config.json this
    is.
    """
    config = {
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 32768,
        "model_type": "mimo",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 640000,
        "tie_word_embeddings": False,
        "vocab_size": 151680,
    }
    head = HeadConfig.from_dict(config)
    assert (head.algorithm, head.layer.num_layers, head.layer.hidden_size) == ("MTP", 1, 4096)
    assert head.layer.attention_bias
