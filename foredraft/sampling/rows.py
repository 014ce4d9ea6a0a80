"""The sampling parameters of the rows of a batch, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.sampling.seeds import to_int64
from foredraft.types import SamplingParams

# Float32 numbers in 16 bytes: a kernel is compiled anew for tensors that begin elsewhere.
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
        position: int64 [R]; the index of the token being chosen (prompt and output counted together, from 0).
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
        """One row for each pair of parameters and position."""
        # Two copies to a device, not six.
        count = len(params)
        floats = np.zeros((3, -(-count // _ALIGNED) * _ALIGNED), dtype=np.float32)
        ints = np.zeros(floats.shape, dtype=np.int64)
        for row, name in enumerate(("temperature", "top_p", "min_p")):
            floats[row, :count] = [getattr(p, name) for p in params]
        ints[:, :count] = (
            [p.top_k for p in params],
            [to_int64(p.seed) for p in params],
            positions,
        )
        temperature, top_p, min_p = _send(floats, device)[:, :count]
        top_k, seed, position = _send(ints, device)[:, :count]
        sampled = [p for p in params if p.temperature > 0]
        any_ranked = any(p.top_k > 0 or p.top_p < 1 for p in sampled)
        return cls(
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            top_k=top_k,
            seed=seed,
            position=position,
            any_sampled=bool(sampled),
            any_ranked=any_ranked,
            any_filtered=any_ranked or any(p.min_p > 0 for p in sampled),
        )

    def __len__(self) -> int:
        return self.seed.shape[0]

    def take(self, index: torch.Tensor) -> "SamplingRows":
        """The rows that `index` (int64 or bool) picks."""
        return SamplingRows(
            self.temperature[index],
            self.top_p[index],
            self.min_p[index],
            self.top_k[index],
            self.seed[index],
            self.position[index],
            self.any_sampled,
            self.any_ranked,
            self.any_filtered,
        )


def _send(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """To a device; a GPU that is busy is not waited for."""
    sent = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return sent
    return sent.pin_memory().to(device, non_blocking=True)
