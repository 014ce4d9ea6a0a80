"""Measures, by an independent reference, how near two tokens are where two texts part."""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from foredraft.sampling.noise import gumbel
from foredraft.types import SamplingParams


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the index where two texts part; None where one is the other's beginning, or equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


class Reference:
    """Runs a model in float64 on the CPU."""

    def __init__(self, path: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)

    def logits(self, before: list[int], tokens: list[int]) -> list[float]:
        """Computes the logits of some tokens after others."""
        with torch.no_grad():
            logits = self._model(torch.tensor([before])).logits[0, -1, tokens]
        return logits.tolist()

    def preferences(
        self, before: list[int], sampling: SamplingParams, tokens: list[int]
    ) -> list[float]:
        """Computes the scores that the rule compares, without filters and penalties."""
        values = torch.tensor(self.logits(before, tokens), dtype=torch.float64)
        if sampling.temperature > 0:
            seed, position = torch.tensor([sampling.seed]), torch.tensor([len(before)])
            noise = gumbel(seed, position, torch.tensor(tokens))[0].double()
            values = values / sampling.temperature + noise
        return values.tolist()


def gap_between(
    path: Path, before: list[int], sampling: SamplingParams, one: int, other: int
) -> float:
    """Returns by how much the rule prefers one token to another after others.

    Ignores filters and penalties.
    """
    first, second = Reference(path).preferences(before, sampling, [one, other])
    return abs(first - second)
