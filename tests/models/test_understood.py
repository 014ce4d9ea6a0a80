"""Checkpoints of many kinds, written by transformers: each is served with transformers' logits, or
refused by name.
"""

import json
import logging
import random

import pytest
import torch
import transformers

from foredraft.attention.cpu import CpuAttention
from foredraft.errors import CheckpointError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LENGTH = 40
# The architecture that a transformers type is served as.
SERVED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
# Other types, most of them a Llama but for one thing, with settings that make the thing matter.
OTHERS = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"sliding_window": 8},
    "cwm": {"sliding_window": 8},
    "diffllama": {},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "glm": {},
    "gpt_oss": {},
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 8**-0.5,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "granite_swa": {},
    "hyperclovax": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "ministral": {"head_dim": 8, "sliding_window": 8},
    "ministral3": {},
    "mixtral": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "phi": {},
    "phi3": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {"use_parallel_residual": True},
    "starcoder2": {"sliding_window": 8},
    "vaultgemma": {},
}
# Under another name these leave no trace: the files say nothing of what tells them from a Llama.
WITHOUT_TRACE = {"gemma", "ernie4_5"}


def build(directory, model_type, **changes):
    """Writes a random checkpoint; its config.json's content and transformers' logits of some
    tokens.
    """
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**BASE | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.eval().named_parameters():
            is_norm = parameter.dim() == 1 and key.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.3)
    model.save_pretrained(directory)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens()])).logits[0]
    return json.loads((directory / "config.json").read_text()), logits


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 97, (LENGTH,), generator=generator).tolist()


def served(directory, raw):
    """Computes with a checkpoint whose config.json is `raw`.

    Raises:
        CheckpointError: The checkpoint is refused.
    """
    (directory / "config.json").write_text(json.dumps(raw))
    model = load_model(directory, torch.float32)
    kv = PagedKV.for_model(model.config, 8, 8, torch.float32, "cpu")
    longest = model.config.dynamic_from
    reach = LENGTH if longest is not None and longest < LENGTH else 0
    rows = SequenceRows.chunk(list(range(8)), 0, tokens(), "all", reach)
    return ModelRunner(model, kv, CpuAttention()).forward([rows]).logits


def check_equal(got, want):
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model_type", OTHERS)
def test_another_model_is_not_taken_for_a_llama(tmp_path, model_type):
    """With the architecture of another alone it is refused; with its type too, unless it is the
    same arithmetic.
    """
    raw, want = build(tmp_path, model_type, **OTHERS[model_type])
    for name, architecture in SERVED.items():
        with pytest.raises(CheckpointError, match=r"config\.json: .*(model_type|not supported)"):
            served(tmp_path, raw | {"architectures": [architecture]})
        disguised = raw | {"architectures": [architecture], "model_type": name}
        try:
            got = served(tmp_path, disguised)
        except CheckpointError:
            continue
        if model_type not in WITHOUT_TRACE:
            check_equal(got, want)


def random_changes(model_type, choose):
    """Settings of a model that is supported, a few of them unusual."""
    head_dim = choose([8, 16])
    changes = {
        "hidden_act": choose(["silu", "silu", "gelu", "gelu_pytorch_tanh"]),
        "num_key_value_heads": choose([1, 2, 4]),
        "tie_word_embeddings": choose([False, True]),
        "head_dim": head_dim,
        "rms_norm_eps": choose([1e-6, 1e-2]),
        "rope_parameters": choose(
            [
                {"rope_type": "default", "rope_theta": 500.0},
                {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
                {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "low_freq_factor": 1.5,
                    "high_freq_factor": 3.0,
                    "original_max_position_embeddings": 16,
                },
                {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 32,
                    "attention_factor": choose([None, 1.1]),
                },
                {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * (head_dim // 2),
                    "long_factor": [2.0] * (head_dim // 2),
                    "original_max_position_embeddings": 16,
                },
            ]
        ),
        "max_position_embeddings": choose([24, 64]),
        "sliding_window": choose([None, 8, 64]),
    }
    if model_type == "llama":
        changes |= {"attention_bias": choose([False, True]), "mlp_bias": choose([False, True])}
    if model_type in ("qwen2", "qwen3"):
        changes |= {
            "use_sliding_window": choose([False, True]),
            "max_window_layers": choose([0, 2, 28]),
        }
        changes["sliding_window"] = changes["sliding_window"] or 4096
    if model_type == "gemma3_text":
        changes["hidden_activation"] = changes.pop("hidden_act")
        changes["sliding_window"] = changes["sliding_window"] or 4096
        changes["query_pre_attn_scalar"] = choose([8, 24])
        changes["final_logit_softcapping"] = choose([None, 3.0])
        changes["attn_logit_softcapping"] = choose([None, None, None, 5.0])
        full, local = changes["rope_parameters"], {"rope_type": "default", "rope_theta": 100.0}
        changes["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return changes


@pytest.mark.parametrize("model_type", SERVED)
def test_what_is_accepted_is_computed_as_by_transformers(tmp_path, model_type):
    draw = random.Random(model_type)
    num_accepted = 0
    for index in range(12):
        directory = tmp_path / str(index)
        raw, want = build(directory, model_type, **random_changes(model_type, draw.choice))
        try:
            got = served(directory, raw)
        except CheckpointError:
            continue
        check_equal(got, want)
        num_accepted += 1
    assert num_accepted >= 5


@pytest.mark.parametrize("model_type", SERVED)
def test_transformers_own_keys_are_known(caplog, model_type):
    """All that a configuration class of transformers writes is read or known to change nothing."""
    config = transformers.CONFIG_MAPPING[model_type](**BASE | {"head_dim": 8})
    raw = config.to_dict() | {"architectures": [SERVED[model_type]]}
    with caplog.at_level(logging.WARNING):
        ModelConfig.from_dict(raw, where=f"of {model_type}")
    assert caplog.text == ""
