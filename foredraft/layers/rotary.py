"""Rotary position embeddings, and the ways of stretching their context.

Rotary embeddings are by Su et al. 2021 (arXiv 2104.09864).
"""

import math
from typing import Protocol

import torch

from foredraft.layers.row_kernels import kernels_for


class RopeParameters(Protocol):
    """The fields of a configuration that `Rotary` reads; `foredraft.models.config.RopeConfig`
    describes them.
    """

    @property
    def theta(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def factor(self) -> float: ...
    @property
    def original_max_positions(self) -> int: ...
    @property
    def low_freq_factor(self) -> float: ...
    @property
    def high_freq_factor(self) -> float: ...
    @property
    def beta_fast(self) -> float: ...
    @property
    def beta_slow(self) -> float: ...
    @property
    def truncate(self) -> bool: ...
    @property
    def attention_factor(self) -> float: ...


class Rotary:
    """Computes the angles of one kind of layer.

    Args:
        config: Kind and numbers.
        head_dim: Even.
    """

    def __init__(self, config: RopeParameters, head_dim: int, device: torch.device) -> None:
        self._config = config
        self._head_dim = head_dim
        self._exponents = (
            torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        )
        self._frequencies = _frequencies(config, self._exponents)

    def angles(
        self, positions: torch.Tensor, dtype: torch.dtype, reaches: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes cosines and signed sines for `rotate`.

        Args:
            positions: int64 [num_rows].
            reaches: int64 [num_rows], for dynamic scaling: lengths that rows are stretched by where
                they are longer than the rows' own; None for their own.

        Returns:
            Two of [num_rows, 1, head_dim], of `dtype` or more precise.
        """
        kernels = kernels_for(self._frequencies, dtype=dtype)
        if kernels is not None and self._config.kind != "dynamic":
            return kernels.angles(positions, self._frequencies, self._config.attention_factor)
        angles = positions.unsqueeze(1).float() * self._frequencies_at(positions, reaches)
        cos, sin = angles.cos(), angles.sin()
        if self._config.attention_factor != 1.0:
            cos, sin = cos * self._config.attention_factor, sin * self._config.attention_factor
        cos, sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
        return cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)

    def _frequencies_at(
        self, positions: torch.Tensor, reaches: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns frequencies [head_dim / 2], or [num_rows, head_dim / 2] for dynamic scaling.

        Dynamic scaling stretches by the length that a forward reaches: the prompt's for all of its
        tokens, then each new token's own. That is said here and not taken from the rows of a step,
        so that a token's key does not depend on how its sequence was cut into forwards.
        """
        config = self._config
        if config.kind != "dynamic":
            return self._frequencies
        lengths = positions + 1 if reaches is None else torch.maximum(positions + 1, reaches)
        reached = lengths.clamp_min(config.original_max_positions).float()
        stretch = config.factor * reached / config.original_max_positions - (config.factor - 1)
        base = config.theta * stretch ** (self._head_dim / (self._head_dim - 2))
        return 1.0 / base.unsqueeze(1) ** self._exponents


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + head_dim / 2) of [num_rows, heads, head_dim]."""
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return swapped.mul_(signed_sin).addcmul_(x, cos)


def _frequencies(config: RopeParameters, exponents: torch.Tensor) -> torch.Tensor:
    frequencies = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    if config.kind == "yarn":
        return _yarn(config, frequencies)
    return frequencies


def _llama3(config: RopeParameters, frequencies: torch.Tensor) -> torch.Tensor:
    """Scales frequencies as Llama 3.1 does: long waves are stretched, short ones kept, those
    between interpolated.
    """
    wavelengths = 2 * math.pi / frequencies
    longest = config.original_max_positions / config.low_freq_factor
    shortest = config.original_max_positions / config.high_freq_factor
    share = (config.original_max_positions / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - share) * frequencies / config.factor + share * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / config.factor, between)
    return torch.where(wavelengths < shortest, frequencies, stretched)


def _yarn(config: RopeParameters, frequencies: torch.Tensor) -> torch.Tensor:
    """Scales frequencies by YaRN (Peng et al. 2023, arXiv 2309.00071), section 3.2."""
    head_dim = 2 * frequencies.shape[0]

    def dimension(rotations: float) -> float:
        turns = config.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(frequencies.shape[0], dtype=torch.float32, device=frequencies.device)
    kept = 1 - ((steps - low) / (high - low or 0.001)).clamp(0, 1)
    return frequencies / config.factor * (1 - kept) + frequencies * kept
