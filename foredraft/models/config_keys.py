"""Classifies the keys of config.json: read, without effect, or unsupported arithmetic.

Keys that `config` reads, and keys that change nothing when text is generated (`INERT`), pass. A key
that means arithmetic which no model here does is refused by its name, unless its value switches it
off. An unknown key is refused where its name speaks of arithmetic, and named in the log where it
does not: trainers and converters leave notes in config.json, and a note must not keep a model from
being served.
"""

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from foredraft.models.config_reader import Reader

logger = logging.getLogger(__name__)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Kinds of models that are refused by name: a key that gives them away, and the kind.
REFUSED_KINDS = {
    "num_experts": "mixture-of-experts",
    "num_local_experts": "mixture-of-experts",
    "n_routed_experts": "mixture-of-experts",
    "moe_num_experts": "mixture-of-experts",
    "num_experts_per_tok": "mixture-of-experts",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "vision_config": "vision",
    "audio_config": "audio",
    "text_config": "multimodal",
    "is_encoder_decoder": "encoder-decoder",
}
# Read by `config` or `rope_config`; each family's own are below.
READ = _names(
    """architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps hidden_act rope_theta rope_scaling rope_parameters
    partial_rotary_factor original_max_position_embeddings layer_types attention_bias mlp_bias tie_word_embeddings
    quantization_config compression_config num_nextn_predict_layers dtype torch_dtype eos_token_id
    use_bidirectional_attention auto_map"""
)
# Known to change nothing: training, labels, caches, other kinds of decoding, notes of where a file
# comes from, and what the tensors say anyway (a bias is there or not).
INERT = _names(
    """_name_or_path name_or_path _attn_implementation _attn_implementation_autoset attn_implementation
    _attn_implementation_internal _experts_implementation _moe_implementation _flash_attn_2_enabled
    use_flash_attn use_flash_attention flash_attn _commit_hash transformers_version transformers_weights
    unsloth_version unsloth_fixed unsloth_optimized is_llama_config custom_pipelines tokenizer_class prefix
    bos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id
    image_token_id image_token_index boi_token_index eoi_token_index vision_start_token_id vision_end_token_id
    vision_token_id video_token_id eod_token_id
    initializer_range initializer_factor attention_dropout hidden_dropout hidden_dropout_prob classifier_dropout
    embd_pdrop resid_pdrop attn_pdrop residual_dropout embedding_dropout resid_dropout pretraining_tp
    gradient_checkpointing use_cache cache_implementation return_dict return_dict_in_generate output_attentions
    output_hidden_states output_scores torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder
    tie_encoder_decoder finetuning_task id2label label2id num_labels problem_type task_specific_params keys_to_ignore
    keys_to_ignore_at_inference max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    max_sequence_length max_seq_length max_seq_len seq_length model_max_length n_ctx n_positions
    max_window_layers use_sliding_window _sliding_window_pattern dual_chunk_attention_config
    qkv_bias use_qkv_bias use_bias bias add_bias_linear lm_head_bias attention_out_bias
    mlp_only_layers decoder_sparse_step norm_topk_prob output_router_logits router_aux_loss_coef aux_loss_coef
    router_jitter_noise tie_last_hidden_states"""
)
# Mean something that is not computed, unless they are null, false, zero or empty.
_OFF_WHEN_EMPTY = _names(
    """final_logit_softcapping attn_logit_softcapping output_logit_soft_cap logit_softcap gate_soft_cap
    use_qk_norm qk_norm qk_layernorm qk_layer_norm query_key_norm use_query_key_norm
    alibi use_alibi clip_qkv attn_temperature_tuning learned_pos_emb use_learned_position_embeddings
    use_parallel_residual parallel_attn parallel_residual apply_residual_connection_post_layernorm use_post_norm
    use_sandwich_norm rope_interleave rope_interleaved rotary_interleaved mrope_interleaved use_mrope
    attention_sinks attention_sink num_sink_tokens add_swa_attention_sink_bias add_full_attention_sink_bias
    use_attention_gate attention_value_scale swiglu_limit moe_intermediate_size shared_expert_intermediate_size
    n_shared_experts num_shared_experts moe_layer_freq interleave_moe_layer_step first_k_dense_replace is_moe
    q_lora_rank num_kv_shared_layers hidden_size_per_layer_input layer_rope_theta per_layer_config pruned_heads
    add_cross_attention cross_attention_hidden_size mup_enabled use_mup scale_embedding rescale_embeddings
    scale_attn_by_inverse_layer_idx"""
)
# Factors: nothing at 1, or at a list of ones.
_OFF_AT_ONE = _names(
    """embedding_multiplier residual_multiplier logits_scaling logit_scale output_multiplier_scale lm_head_multiplier
    attention_in_multiplier attention_out_multiplier key_multiplier mlp_multipliers embedding_scale scale_emb
    scale_depth mup_width_scale rotary_pct rotary_percent rope_ratio embedding_fraction"""
)
# Patterns of unknown keys: names that speak of arithmetic, and those that do so only for training.
_ARITHMETIC = re.compile(
    r"multiplier|soft_?cap|scale|scaling|rope|rotary|alibi|window|expert|(^|_)moe|sink|clip|clamp|residual|chunk"
    r"|parallel|position_bias|(^|_)mup|swiglu|qk_|norm_type|lora|mamba|(^|_)ssm|(^|_)conv|temperature_tuning"
)
_TRAINING = re.compile(
    r"loss|init|drop|jitter|train|dtype|fp32|tensor_parallel|sequence_parallel|_token"
)

_Neutral = Callable[[Any, Reader], bool]


def _is_empty(value: Any, _: Reader) -> bool:
    return not value


def _is_one(value: Any, _: Reader) -> bool:
    return value is None or all(
        not isinstance(part, bool) and part == 1
        for part in (value if isinstance(value, list) else [value])
    )


def _is_head_dim_scale(value: Any, reader: Reader) -> bool:
    """Returns whether the multiplier of scores is the usual one."""
    scale = _head_dim(reader) ** -0.5
    return value is None or abs(reader.number("attention_multiplier", scale) - scale) < 1e-9


def _is_head_dim(value: Any, reader: Reader) -> bool:
    return value is None or value == _head_dim(reader)


def _is_no_window(value: Any, reader: Reader) -> bool:
    """Returns whether every layer sees the whole context."""
    if not value or reader.raw.get("use_sliding_window") is False:
        return True
    positions = reader.raw.get("max_position_embeddings")
    return type(value) is int and type(positions) is int and value >= positions


def _is_every_layer(value: Any, _: Reader) -> bool:
    """Returns whether every layer has a rotary embedding, in a list of 1 for each that has."""
    return not value or (isinstance(value, list) and all(layer == 1 for layer in value))


def _is_interval_beyond(value: Any, reader: Reader) -> bool:
    if not value or reader.raw.get("no_rope_layers"):  # a list of layers takes precedence
        return True
    layers = reader.raw.get("num_hidden_layers")
    return type(value) is int and type(layers) is int and value > layers


def _is_activation(value: Any, reader: Reader) -> bool:
    return value is None or value == reader.raw.get("hidden_act")


def _is_rms_epsilon(value: Any, reader: Reader) -> bool:
    """Returns whether a LayerNorm epsilon is a leftover: a model with RMS norms names their own."""
    return value is None or reader.raw.get("rms_norm_eps") is not None


_NEUTRAL: dict[str, _Neutral] = {
    **dict.fromkeys(_OFF_WHEN_EMPTY, _is_empty),
    **dict.fromkeys(_OFF_AT_ONE, _is_one),
    "attention_multiplier": _is_head_dim_scale,
    "query_pre_attn_scalar": _is_head_dim,
    "rotary_dim": _is_head_dim,
    "sliding_window": _is_no_window,
    "attention_chunk_size": _is_no_window,
    "no_rope_layers": _is_every_layer,
    "no_rope_layer_interval": _is_interval_beyond,
    "hidden_activation": _is_activation,
    "activation_function": _is_activation,
    **dict.fromkeys(
        ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), _is_rms_epsilon
    ),
    "position_embedding_type": lambda value, _: value in (None, "rope", "rotary"),
    "norm_type": lambda value, _: value in (None, "rms_norm", "rmsnorm", "RMSNorm"),
    "is_causal": lambda value, _: value in (None, True),
}


def check_keys(reader: Reader, architecture: str, own: frozenset[str]) -> None:
    """Refuses keys for arithmetic that is not computed, and logs the names of unknown keys.

    Args:
        own: Keys that this architecture reads beside `READ`.

    Raises:
        CheckpointError: There is such a key; it is named.
    """
    unknown = []
    for key, value in reader.raw.items():
        if key in own or key in READ or key in REFUSED_KINDS:
            continue
        is_neutral = _NEUTRAL.get(key)
        if is_neutral is not None:
            if not is_neutral(value, reader):
                raise reader.fail(
                    f"{key} is {_short(value)}: {architecture} is not computed with it here"
                )
            continue
        if key in INERT or not value:
            continue
        if _ARITHMETIC.search(key) and not _TRAINING.search(key) and not _is_one(value, reader):
            raise reader.fail(
                f"{key} is {_short(value)}: not known, and by its name part of the computation; "
                "remove the key if it changes nothing"
            )
        unknown.append(key)
    if unknown:
        _warn(reader.where, ", ".join(sorted(unknown)))


def check_model_type(reader: Reader, architecture: str, expected: str) -> None:
    """Refuses a `model_type`, or the class of an own implementation, that belongs to another
    architecture.

    Raises:
        CheckpointError: They contradict each other.
    """
    given = reader.raw.get("model_type")
    if given not in (None, "", expected):
        raise reader.fail(
            f"architectures says {architecture} and model_type {given!r}, which is another model; "
            f"{architecture}'s is {expected!r}"
        )
    classes = reader.mapping("auto_map")
    own = classes.get("AutoModelForCausalLM")
    name = own.rpartition(".")[2] if isinstance(own, str) else None
    if name not in (None, architecture):
        raise reader.fail(
            f"architectures says {architecture} and auto_map {own!r}, which is another model"
        )


def _head_dim(reader: Reader) -> int:
    heads = reader.size("num_attention_heads")
    return reader.size("head_dim", reader.size("hidden_size") // heads)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@functools.cache  # a process may read a file several times
def _warn(where: str, keys: str) -> None:
    logger.warning(
        "%s: keys that are not known and not read: %s; if one of them changes what the model"
        " computes, its text is not the one that is served",
        where,
        keys,
    )
