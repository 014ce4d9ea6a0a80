"""Reading config.json: what transformers reads, and what is refused."""

import json
import subprocess
import sys

import pytest

from foredraft.errors import CheckpointError
from foredraft.models.config import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def parse(**changes):
    return ModelConfig.from_dict(LLAMA | changes)


def test_llama():
    config = parse(rope_theta=500000.0, torch_dtype="bfloat16")
    assert config.head_dim == 8
    assert config.attention_scale == 8**-0.5
    assert config.windows == (None,) * 4
    assert {rope.theta for rope in config.ropes} == {500000.0}
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (2,)
    assert not config.tie_word_embeddings


def test_old_and_new_rope_keys_agree():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    old = parse(rope_theta=5e5, rope_scaling=scaling | {"type": "llama3"})
    new = parse(rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 5e5})
    assert old == new
    assert old.ropes[0].kind == "llama3"
    assert old.ropes[0].original_max_positions == 2048
    assert old.fingerprint == new.fingerprint


def test_fingerprint_tells_models_apart():
    assert parse().fingerprint == parse(eos_token_id=[3, 4], dtype="float16").fingerprint
    for change in ({"rope_theta": 2.0}, {"vocab_size": 101}, {"tie_word_embeddings": True}):
        assert parse(**change).fingerprint != parse().fingerprint


def test_generation_config_names_the_eos_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (7, 9)


def test_the_tokenizer_names_the_eos_token_where_no_config_does(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": None}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == ()
    added = [{"id": 5, "content": "<s>"}, {"id": 6, "content": "</s>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    for eos, ids in (("</s>", (6,)), ({"content": "</s>"}, (6,)), (None, ()), ("other", ())):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert ModelConfig.from_dir(tmp_path).eos_token_ids == ids
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, -1]}')
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (7,)


def test_yarn_stretches_the_context():
    """Qwen's models are stretched by adding the scaling alone; other kinds' lengths are already the stretched ones."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8000}
    assert parse(rope_scaling=yarn).max_position_embeddings == 32000
    assert parse(rope_scaling=yarn, max_position_embeddings=40000).max_position_embeddings == 40000
    llama3 = yarn | {"rope_type": "llama3"}
    assert parse(rope_scaling=llama3).max_position_embeddings == 8192


def test_windows_of_mistral_and_qwen():
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert parse(**mistral, sliding_window=None).windows == (None,) * 4
    assert parse(**mistral, sliding_window=32).windows == (32,) * 4
    types = ["full_attention", *["sliding_attention"] * 3]  # Ministral's
    assert parse(**mistral, sliding_window=32, layer_types=types).windows == (None, 32, 32, 32)
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        qwen = {"architectures": [name], "sliding_window": 32, "max_window_layers": 3}
        assert parse(**qwen).windows == (None,) * 4
        assert parse(**qwen, use_sliding_window=True).windows == (None, None, None, 32)
        types = ["sliding_attention", "full_attention"] * 2
        explicit = parse(**qwen, use_sliding_window=True, layer_types=types)
        assert explicit.windows == (32, None, 32, None)


def test_gemma3_with_old_and_new_keys():
    gemma = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 512, "head_dim": 16}
    gemma |= {"num_hidden_layers": 7, "query_pre_attn_scalar": 25}
    linear = {"rope_type": "linear", "factor": 8.0}
    old = parse(**gemma, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=linear)
    new = parse(
        **gemma,
        layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": linear | {"rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert old == new
    assert old.windows == (512,) * 5 + (None, 512)
    assert [rope.theta for rope in old.ropes] == [1e4] * 5 + [1e6, 1e4]
    assert [rope.kind for rope in old.ropes] == ["default"] * 5 + ["linear", "default"]
    assert old.attention_scale == pytest.approx(0.2)
    assert old.tie_word_embeddings
    assert old.embedding_scale == 8.0
    assert old.activation == "gelu_tanh"
    # As transformers: Gemma's activation has a key of its own, and scaling in the old key is the full layers'.
    assert parse(**gemma, hidden_act="silu").activation == "gelu_tanh"
    assert parse(**gemma, hidden_activation="silu", hidden_act="gelu").activation == "silu"
    mixed = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert parse(**gemma, rope_parameters=mixed, rope_scaling=linear) == old


def test_num_parameters_counts_every_weight(variant):
    _, directory, model = variant
    config = ModelConfig.from_dir(directory)
    assert config.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            "FalconForCausalLM.*supported: LlamaForCausalLM",
        ),
        ({"architectures": None}, "architecture None"),
        ({"architectures": []}, r"architecture \[\]"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "mixture-of-experts"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "MLA"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"a": 1}},
            "vision",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized checkpoints \(awq\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"\(fp8\)"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 0}}, "factor must be above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -2.0}}, "factor must be above 0"),
        ({"rope_theta": 0}, "rope_theta must be above 1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "above 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [2, None]}, "eos_token_id must be a token id"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_parameters": [1e4]}, "rope_parameters must be an object"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters must be by layer type",
        ),
        ({"text_config": {"vocab_size": 100}}, "multimodal.*text_config"),
        (
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8},
            "layer_types: LlamaForCausalLM has no sliding_attention",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 7}, "odd"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"] * 4},
            "linear_attention",
        ),
    ],
)
def test_refusals_name_the_reason(changes, message):
    with pytest.raises(CheckpointError, match=message):
        parse(**changes)


def test_broken_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        ModelConfig.from_dir(tmp_path)


def test_torch_free():
    code = "import sys, foredraft.models.config, foredraft.models.registry; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
