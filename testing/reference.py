"""transformers as reference, and the test whether a difference from it is rounding."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from foredraft.sampling.noise import gumbel
from foredraft.sampling.seeds import to_int64
from foredraft.types import SamplingParams
from testing.speculation_reference import distribution, penalised

GROUP = 25  # sequences in a forward


class Reference:
    """Runs a checkpoint by transformers: `generate` in float32, and the rule itself in float64."""

    tie_gap = 1e-4

    def __init__(self, path: Path) -> None:
        self._float32 = self._load(path, torch.float32)
        self._float64 = self._load(path, torch.float64)
        self._ties: dict[str, int] = {}  # ties by text, since engines give the same texts again

    @staticmethod
    def _load(path: Path, dtype: torch.dtype) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        return model.eval()

    @torch.no_grad()
    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Returns the greedy continuation by transformers in float32; ends after an
        end-of-sequence token.
        """
        output = self._float32.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        return output[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Computes logits, float64 [len(tokens), vocab_size]."""
        return self._float64(torch.tensor([tokens])).logits[0]

    def check(
        self, prompt: list[int], output: list[int], params: SamplingParams, ends: frozenset[int]
    ) -> int:
        """Asserts that every token of `output` is the one that the rule gives after the tokens
        before it.

        By induction this is equality with generating token by token, at one forward per sequence.

        Returns:
            How many tokens were not the best in float64 but within `tie_gap` of it, or would have
            been but for a filter's edge that lies within rounding.
        """
        return self._check(self.logits(prompt + output), prompt, output, params, ends)

    @torch.no_grad()
    def check_all(
        self,
        cases: Sequence[tuple[list[int], list[int], SamplingParams]],
        ends: frozenset[int],
    ) -> int:
        """Checks many (prompt, output, parameters) like `check`, with one forward for every few
        of them.
        """
        new = [case for case in cases if repr((case, ends)) not in self._ties]
        new.sort(key=lambda case: len(case[0]) + len(case[1]))
        for start in range(0, len(new), GROUP):
            group = new[start : start + GROUP]
            # Causal attention does not see what fills the rows on their right.
            rows = [torch.tensor(prompt + output) for prompt, output, _ in group]
            logits = self._float64(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits
            for case, found in zip(group, logits, strict=True):
                self._ties[repr((case, ends))] = self._check(found, *case, ends)
        return sum(self._ties[repr((case, ends))] for case in cases)

    def _check(
        self,
        logits: torch.Tensor,
        prompt: list[int],
        output: list[int],
        params: SamplingParams,
        ends: frozenset[int],
    ) -> int:
        ties = 0
        for i, token in enumerate(output):
            row = logits[len(prompt) + i - 1].numpy()
            row = penalised(row, params, prompt, output[:i], set(ends))
            scores = self._scores(row, params, len(prompt) + i)
            gap = scores.max() - scores[token]
            if gap > 0:
                assert gap < self.tie_gap, (
                    f"token {i} is {token}, the rule gives {scores.argmax()}; the gap is {gap}"
                )
                ties += 1
        return ties

    @staticmethod
    def _scores(row: np.ndarray, params: SamplingParams, position: int) -> np.ndarray:
        if params.temperature == 0:
            return row
        probs = distribution(row, params)
        noise = gumbel(
            torch.tensor([to_int64(params.seed)]),
            torch.tensor([position]),
            torch.arange(len(row)),
        )[0].numpy()
        with np.errstate(divide="ignore"):
            return np.log(probs) + noise
