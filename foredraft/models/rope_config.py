"""Rotary position embedding as config.json describes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.models.config_reader import Reader

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of some layers.

    Attributes:
        theta: Base of the frequencies.
        kind: One of ROPE_TYPES.
        factor: By how much the context is stretched.
        original_max_positions: Context length of pretraining (dynamic, llama3, yarn).
        low_freq_factor, high_freq_factor: Limits of llama3's ramp.
        beta_fast, beta_slow, truncate: Limits of yarn's ramp.
        attention_factor: What cosine and sine are multiplied by.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @property
    def max_positions(self) -> int:
        """Context length that this was made for; 0 where it does not tell."""
        return int(self.original_max_positions * self.factor) if self.kind == "yarn" else 0


def read_rope(
    parameters: Reader, theta: float, max_positions: int, raw: Mapping[str, Any]
) -> RopeConfig:
    """Reads one layer type's parameters.

    Args:
        parameters: Its rope_parameters or rope_scaling.
        theta: Where those have none.
        max_positions: Context length of the model.
        raw: The whole of config.json.

    Raises:
        CheckpointError: They are wrong, or of a kind that is not supported.
    """
    kind = parameters.raw.get("rope_type") or parameters.raw.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise parameters.fail(
            f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
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
    original = parameters.size(
        "original_max_position_embeddings",
        raw.get("original_max_position_embeddings") or max_positions,
    )
    if kind == "dynamic":
        original = max_positions
    if kind != "yarn" and "factor" not in parameters.raw:
        raise parameters.fail(f"rope type {kind} has no factor")
    factor = parameters.number("factor", max_positions / original)
    if factor <= 0:
        raise parameters.fail(f"factor must be above 0, not {factor}")
    attention_factor = 1.0
    if kind == "yarn":
        attention_factor = _yarn_attention_factor(parameters, factor)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=parameters.number("low_freq_factor", 1.0),
        high_freq_factor=parameters.number("high_freq_factor", 4.0),
        beta_fast=parameters.number("beta_fast", 32.0) or 32.0,
        beta_slow=parameters.number("beta_slow", 1.0) or 1.0,
        truncate=parameters.flag("truncate", True),
        attention_factor=attention_factor,
    )


def _yarn_attention_factor(parameters: Reader, factor: float) -> float:
    """YaRN, section 3.4, equation 22, and DeepSeek's mscale keys."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.raw.get("attention_factor") is not None:
        return parameters.number("attention_factor", 1.0)
    weight, weight_all = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    return mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)
