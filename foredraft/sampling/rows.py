"""The sampling parameters of the rows of a batch, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
import torch

from foredraft.sampling.columns import FLOATS
from foredraft.sampling.seeds import to_int64
from foredraft.types import SamplingParams

_floats_of = attrgetter(*FLOATS)
# Float32 numbers in 16 bytes: unaligned tensors would need another variant of each kernel.
_ALIGNED = 4


@dataclass(slots=True)
class SamplingRows:
    """The sampling parameters of R rows of logits.

    Attributes:
        temperature: float32 [R]; 0 chooses greedily.
        top_p: float32 [R]; 1 keeps all.
        min_p: float32 [R]; 0 keeps all.
        top_k: int64 [R]; 0 or less keeps all.
        seed: int64 [R]; the bits of the 64-bit seed.
        position: int64 [R]; the index of the token being chosen (prompt and output counted
            together, from 0).
        any_sampled: False promises that every temperature is 0.
        any_ranked: False promises that no row has a top-k or top-p.
        any_filtered: False promises that no row has a top-k, top-p or min-p.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    any_sampled: bool = True
    any_ranked: bool = True
    any_filtered: bool = True

    @classmethod
    def from_params(
        cls,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> "SamplingRows":
        """Creates one row for each pair of parameters and position."""
        # All fields go to the device in two copies.
        count = len(params)
        floats = np.zeros((len(FLOATS), -(-count // _ALIGNED) * _ALIGNED), dtype=np.float32)
        ints = np.zeros((3, floats.shape[1]), dtype=np.int64)
        floats[:, :count] = list(zip(*map(_floats_of, params), strict=True))
        ints[:, :count] = (
            [p.top_k for p in params],
            [to_int64(p.seed) for p in params],
            positions,
        )
        different = {id(p): p for p in params}.values()  # a tree's rows share theirs
        top_k, seed, position = _send(ints, device)[:, :count]
        return cls(
            **dict(zip(FLOATS, _send(floats, device)[:, :count], strict=True)),
            top_k=top_k,
            seed=seed,
            position=position,
            any_sampled=any(p.is_sampled for p in different),
            any_ranked=any(p.is_ranked for p in different),
            any_filtered=any(p.is_filtered for p in different),
        )

    def __len__(self) -> int:
        return self.seed.shape[0]

    @property
    def filters(self) -> tuple[torch.Tensor, ...]:
        """Top-k, top-p and min-p, in the order that kernels take them."""
        return self.top_k, self.top_p, self.min_p

    def take(self, index: torch.Tensor | slice) -> "SamplingRows":
        """Selects the rows that `index` (int64, bool or a slice) picks."""
        values = (getattr(self, each.name) for each in fields(self))
        picked = (v[index] if isinstance(v, torch.Tensor) else v for v in values)
        return SamplingRows(*picked)  # type: ignore[arg-type]


def _send(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Copies to a device, without waiting for a busy GPU."""
    sent = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return sent
    return sent.pin_memory().to(device, non_blocking=True)
