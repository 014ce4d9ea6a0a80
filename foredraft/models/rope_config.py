"""Rotary position embedding as config.json describes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.models.config_reader import MAX_SIZE, Reader

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
# Numbers without which a type would have to be guessed.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "finetuned",  # a note in YaRN's first checkpoints
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of some layers.

    Attributes:
        theta: Base of the frequencies.
        kind: One of ROPE_TYPES.
        factor: Stretched context length divided by the original one.
        original_max_positions: Context length of pretraining (linear, dynamic, llama3, yarn).
        low_freq_factor, high_freq_factor: Limits of llama3's ramp; 0 for other types.
        beta_fast, beta_slow, truncate: Limits of yarn's ramp.
        attention_factor: Factor of cosine and sine.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @property
    def max_positions(self) -> int:
        """Context length that this was made for; 0 where it is unknown (llama3's is
        `max_position_embeddings`).
        """
        if self.kind not in ("linear", "dynamic", "yarn"):
            return 0
        return int(self.original_max_positions * self.factor)


def read_rope(
    parameters: Reader,
    theta: float,
    max_positions: int,
    raw: Mapping[str, Any],
    is_stretched: bool = False,
) -> RopeConfig:
    """Reads one layer type's parameters.

    Args:
        parameters: The layer type's rope_parameters or rope_scaling.
        theta: Base of the frequencies, where the parameters have none.
        max_positions: Context length of the model.
        raw: The whole of config.json.
        is_stretched: Whether `max_positions` is the stretched length whatever the type (Gemma 3).

    Raises:
        CheckpointError: They are wrong, or of a kind that is not supported.
    """
    kind = parameters.raw.get("rope_type") or parameters.raw.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise parameters.fail(
            f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    unknown = sorted(key for key, value in parameters.raw.items() if value and key not in _KNOWN)
    if unknown:
        raise parameters.fail(
            f"{unknown[0]} of the rotary embedding is not supported; known:"
            f" {', '.join(sorted(_KNOWN))}"
        )
    if parameters.number("partial_rotary_factor", 1.0) != 1.0 or raw.get(
        "partial_rotary_factor", 1.0
    ) not in (None, 1, 1.0):
        raise parameters.fail("partial_rotary_factor other than 1 is not supported")
    theta = parameters.number("rope_theta", theta)
    if theta <= 1:
        raise parameters.fail(f"rope_theta must be above 1, not {theta}")
    if kind == "default":
        return RopeConfig(theta)
    for key in _REQUIRED[kind]:
        if parameters.raw.get(key) is None:
            raise parameters.fail(f"rope type {kind} has no {key}")
    factor = parameters.positive("factor", 1.0)
    original = _original_length(parameters, kind, max_positions, raw)
    if kind == "linear" and is_stretched:
        original = 0
    low, high = (parameters.number(f"{end}_freq_factor", 0.0) for end in ("low", "high"))
    if kind == "llama3" and not 0 < low < high:
        raise parameters.fail(
            f"low_freq_factor must be above 0 and below high_freq_factor, not {low} and {high}"
        )
    attention_factor = 1.0
    if kind == "yarn":
        attention_factor = _yarn_attention_factor(parameters, factor)
    rope = RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=_limit(parameters, "beta_fast", 32.0),
        beta_slow=_limit(parameters, "beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
        attention_factor=attention_factor,
    )
    if original * factor > MAX_SIZE:
        raise parameters.fail(f"factor {factor:g} stretches {original} positions beyond {MAX_SIZE}")
    return rope


def _limit(parameters: Reader, key: str, default: float) -> float:
    """Returns a limit of yarn's ramp in turns; 0 stands for the default, as in transformers."""
    return parameters.positive(key, default) if parameters.raw.get(key) != 0 else default


def _original_length(
    parameters: Reader, kind: str, max_positions: int, raw: Mapping[str, Any]
) -> int:
    """Returns the context length of pretraining, which config.json has in one of two places or
    not at all.
    """
    if kind == "dynamic":  # transformers begins to stretch there, whatever the key says
        return max_positions
    key = "original_max_position_embeddings"
    inner, outer = (Reader(one, parameters.where).size(key, 0) for one in (parameters.raw, raw))
    if inner and outer and inner != outer:
        raise parameters.fail(f"{key} is {inner} of the rotary embedding and {outer} of the model")
    if kind == "llama3" and not inner and not outer:
        raise parameters.fail(f"rope type llama3 has no {key}")
    return inner or outer or max_positions


def _yarn_attention_factor(parameters: Reader, factor: float) -> float:
    """Computes the factor of cosine and sine by YaRN, section 3.4, equation 22, and DeepSeek's
    mscale keys.
    """

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.raw.get("attention_factor") is not None:
        return parameters.positive("attention_factor", 1.0)
    weight, weight_all = (
        parameters.positive(key, 1.0) if parameters.raw.get(key) else 0.0
        for key in ("mscale", "mscale_all_dim")
    )
    return mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)
