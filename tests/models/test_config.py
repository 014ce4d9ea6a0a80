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

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


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
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
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
    for name in ("generation_config.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (6,)


@pytest.mark.parametrize("added", [None, 5, [5], [{"id": 3}], {"a": 1}])
def test_a_tokenizer_without_that_token_names_none(tmp_path, added):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": None}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    for eos in ("</s>", None):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert ModelConfig.from_dir(tmp_path).eos_token_ids == ()


def test_yarn_stretches_the_context():
    """Qwen's models are stretched by adding the scaling alone; other kinds' lengths are already the
    stretched ones.
    """
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8000}
    assert parse(rope_scaling=yarn).max_position_embeddings == 32000
    assert parse(rope_scaling=yarn, max_position_embeddings=40000).max_position_embeddings == 40000
    assert parse(rope_scaling=LLAMA3).max_position_embeddings == 8192


def test_other_scalings_stretch_the_context():
    for kind in ("linear", "dynamic"):
        config = parse(rope_scaling={"type": kind, "factor": 2.5})
        assert config.max_position_embeddings == 20480
    assert config.dynamic_from == 8192
    original = {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert parse(rope_scaling=original).max_position_embeddings == 8192
    gemma = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}
    linear = {"rope_type": "linear", "factor": 8.0}
    assert parse(**gemma, rope_scaling=linear).max_position_embeddings == 8192
    assert parse(**gemma, rope_scaling=linear).dynamic_from is None


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
    # As transformers: Gemma's activation has a key of its own, and scaling in the old key is the
    # full layers'.
    assert parse(**gemma, hidden_act="silu").activation == "gelu_tanh"
    assert parse(**gemma, hidden_activation="silu", hidden_act="gelu").activation == "silu"
    mixed = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert parse(**gemma, rope_parameters=mixed, rope_scaling=linear) == old


def test_num_parameters_counts_every_weight(variant):
    _, directory, model = variant
    config = ModelConfig.from_dir(directory)
    assert config.num_parameters == sum(p.numel() for p in model.parameters())


MEANT = {
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "mlp_multipliers": [1.0, 0.5],
    "use_qk_norm": True,
    "no_rope_layers": [1, 1, 1, 0],
    "no_rope_layer_interval": 4,
    "sliding_window": 4096,
    "attention_chunk_size": 4096,
    "attn_temperature_tuning": True,
    "query_pre_attn_scalar": 256,
    "clip_qkv": 8.0,
    "moe_intermediate_size": 768,
    "add_full_attention_sink_bias": True,
    "position_embedding_type": "nope",
    "hidden_activation": "gelu",
    "layer_norm_eps": 1e-5,
    "is_causal": False,
    "some_new_softcap": 3.0,
    "k_scale_factors": {"a": 2.0},
}


@pytest.mark.parametrize("key", MEANT)
def test_keys_that_mean_something_are_refused_by_name(key):
    without_norms = {"rms_norm_eps": None} if key == "layer_norm_eps" else {}
    with pytest.raises(CheckpointError, match=f"{key} is "):
        parse(**without_norms, **{key: MEANT[key]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, None) for key in MEANT),
        ("embedding_multiplier", 1),
        ("attention_multiplier", 8**-0.5),
        ("mlp_multipliers", [1.0, 1.0]),
        ("use_qk_norm", False),
        ("no_rope_layers", [1, 1, 1, 1]),
        ("no_rope_layer_interval", 5),
        ("sliding_window", 8192),
        ("query_pre_attn_scalar", 8),
        ("moe_intermediate_size", 0),
        ("position_embedding_type", "rope"),
        ("hidden_activation", "silu"),
        ("layer_norm_eps", 1e-5),
        ("some_new_multiplier", 1.0),
        ("num_experts", 0),
    ],
)
def test_values_that_switch_a_key_off_are_accepted(key, value, caplog):
    assert parse(**{"hidden_act": "silu", key: value}) == parse()
    assert parse(sliding_window=4096, use_sliding_window=False) == parse()


def test_unknown_keys_are_named_in_the_log(caplog):
    known = {"pad_token_id": 0, "use_cache": True, "pretraining_tp": 2, "unsloth_fixed": True}
    config = parse(**known, notes_of_a_trainer="x", nothing=None)
    assert config == parse()
    assert "not known and not read: notes_of_a_trainer;" in caplog.text


def test_the_type_must_be_the_architectures(tmp_path):
    assert parse(model_type="llama") == parse()
    qwen = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert parse(**qwen).architecture == "Qwen3ForCausalLM"
    for name in ("granite", "mistral", "smollm3", "deepseek_v3", 7):
        with pytest.raises(CheckpointError, match=f"LlamaForCausalLM and model_type '?{name}"):
            parse(model_type=name)
    own = {"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"}
    assert parse(auto_map=own) == parse()
    with pytest.raises(CheckpointError, match=r"auto_map 'modeling_x\.XForCausalLM'"):
        parse(auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})


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
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantized checkpoints \(hqq\)"),
        ({"compression_config": {"quant_method": "aqlm"}}, r"\(aqlm\)"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "factor must be above 0"),
        *(
            ({"rope_scaling": LLAMA3 | {key: None}}, f"rope type llama3 has no {key}")
            for key in LLAMA3
            if key != "rope_type"
        ),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "below high_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type yarn has no factor"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type dynamic has no factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}}, "alpha"),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096},
            "is 2048 of the rotary embedding and 4096",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "by layer type are for Gemma3ForCausalLM",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -2.0}}, "factor must be above 0"),
        ({"rope_theta": 0}, "rope_theta must be above 1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "above 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [2, None]}, "eos_token_id must be a token id"),
        ({"eos_token_id": 2**31}, "eos_token_id must be a token id"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_parameters": [1e4]}, "rope_parameters must be an object"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters must be by layer type",
        ),
        ({"text_config": {"vocab_size": 100}}, "multimodal.*text_config"),
        (
            {"layer_types": ["sliding_attention"] * 4},
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
        ({"layer_types": 4}, "layer_types must be a list of names"),
        ({"hidden_act": ["silu"]}, r"activation \['silu'\]"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must not be negative"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings must be at most"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most"),
        ({"rope_scaling": YARN | {"factor": 1e30}}, "factor 1e[+]30 stretches 2048 positions"),
        ({"rope_scaling": YARN | {"beta_fast": -1}}, "beta_fast must be above 0"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor must be above 0"),
        ({"rope_scaling": YARN | {"mscale": -1.0, "mscale_all_dim": 1.0}}, "mscale must be"),
        (
            {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "dynamic needs a head_dim above 2",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": -1},
            "query_pre_attn_scalar must be above 0",
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
    code = (
        "import sys, foredraft.models.config, foredraft.models.registry; print('torch' in"
        " sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
