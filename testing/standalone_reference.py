"""A draft model by transformers in float64, and a verifier's sequences that it drafts for."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from foredraft.api.draft.v1 import draft_pb2
from foredraft.sampling.noise import gumbel
from foredraft.sampling.seeds import to_int64
from foredraft.types import SamplingParams
from testing.checkpoints import VOCAB_SIZE
from testing.drafts import attach_request
from testing.speculation_reference import distribution

PAGE = 4
NUM_PAGES = 400
BUSHY = {"num_steps": 3, "topk": 3, "num_draft_tokens": 9}  # a tree


class Reference:
    """Runs the draft model by transformers in float64, one sequence at a time."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, tokens: list[int], valid_from: int = 0) -> np.ndarray:
        """Computes the logits after `tokens`; those before `valid_from` are not seen but
        counted.
        """
        key = (valid_from, *tokens)
        if key not in self._known:
            positions = torch.arange(valid_from, len(tokens))[None]
            with torch.no_grad():
                out = self._model(torch.tensor([tokens[valid_from:]]), position_ids=positions)
            self._known[key] = out.logits[0, -1].numpy()
        return self._known[key]

    def greedy(self, tokens: list[int], count: int, valid_from: int = 0) -> list[int]:
        out: list[int] = []
        for _ in range(count):
            out.append(int(self.logits(tokens + out, valid_from).argmax()))
        return out

    def chosen(self, tokens: list[int], count: int, params: SamplingParams) -> list[int]:
        """Returns the tokens that the sampling rule chooses with these weights."""
        out: list[int] = []
        for _ in range(count):
            probs = distribution(self.logits(tokens + out), params)
            noise = gumbel(
                torch.tensor([to_int64(params.seed)]),
                torch.tensor([len(tokens) + len(out)]),
                torch.arange(VOCAB_SIZE),
            )[0].numpy()
            with np.errstate(divide="ignore"):
                out.append(int((np.log(probs) + noise).argmax()))
        return out

    def paths(
        self, tokens: list[int], steps: int, topk: int, nodes: int, valid_from: int = 0
    ) -> set[tuple[int, ...]]:
        """Searches beams by cumulative probability, then the best nodes of all levels (EAGLE-2)."""
        beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        seen: list[tuple[float, tuple[int, ...]]] = []
        for _ in range(steps):
            grown = []
            for value, path in beams:
                row = self.logits([*tokens, *path], valid_from)
                row = row - row.max() - math.log(np.exp(row - row.max()).sum())
                best = np.argsort(-row, kind="stable")[:topk]
                grown += [(value + row[v], (*path, int(v))) for v in best]
            seen += grown
            beams = sorted(grown, key=lambda item: -item[0])[:topk]
        return {path for _, path in sorted(seen, key=lambda item: -item[0])[:nodes]}


class Sequences:
    """A verifier's sequences on pages that never lie in order."""

    def __init__(self, seed: int = 0) -> None:
        self._free = list(range(NUM_PAGES))
        random.Random(seed).shuffle(self._free)
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}

    def begin(
        self,
        slot: int,
        tokens: list[int],
        sampling: dict[str, Any] | None = None,
        **limits: int,
    ) -> draft_pb2.SequenceStep:
        self.tokens[slot], self.pages[slot] = [], []
        message = self.extend(slot, tokens, **limits)
        message.begin.sampling.MergeFrom(draft_pb2.Sampling(**(sampling or {"top_p": 1})))
        return message

    def extend(self, slot: int, tokens: list[int], **limits: int) -> draft_pb2.SequenceStep:
        known, pages = self.tokens[slot], self.pages[slot]
        message = draft_pb2.SequenceStep(
            slot=slot, position=len(known), tokens=tokens, first_page=len(pages)
        )
        known += tokens
        while len(pages) * PAGE < len(known):
            pages.append(self._free.pop())
            message.new_pages.append(pages[-1])
        if limits:
            message.propose.MergeFrom(draft_pb2.TreeLimits(**limits))
        return message


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]


def attach(steps: int = 3, topk: int = 2, tokens: int = 8, **changes: Any) -> Any:
    limits = draft_pb2.TreeLimits(num_steps=steps, topk=topk, num_draft_tokens=tokens)
    return attach_request(**{"limits": limits, "num_pages": NUM_PAGES, "page_size": PAGE} | changes)


def flags(path: Path) -> list[str]:
    return [
        *("--speculative-algorithm", "STANDALONE"),
        *("--speculative-draft-model-path", str(path), "--num-threads", "1"),
    ]
