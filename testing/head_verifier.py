"""The verifier's end for a head in this process: sequences on pages, and hidden states inside
messages.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from draft_service.drafters.base import Proposer
from draft_service.drafters.heads import HeadDrafter
from foredraft.api.draft.v1 import draft_pb2
from foredraft.models.config import ModelConfig
from foredraft.transport import codec
from foredraft.transport.inline import InlineReader
from foredraft.transport.rows import RowFormat
from testing.draft_heads import VOCAB, Drafting, HeadReference, best_paths
from testing.drafts import attach_request

PAGE, NUM_PAGES = 4, 200


@contextmanager
def attached(
    drafter: HeadDrafter, target: Path, is_prepared: bool = False, **changes: Any
) -> Iterator["Verifier"]:
    """Creates a verifier's end whose hidden states travel inside messages.

    Args:
        is_prepared: Whether steps of fixed shape are made where the drafter has them.
    """
    proposer, _ = drafter.attach(request_of(target, **changes))
    row = RowFormat.of(drafter.info().hidden)
    proposer.hidden = InlineReader(row)
    if is_prepared:
        proposer.prepare()
    yield Verifier(proposer, row.width)
    proposer.close()


def request_of(target: Path, **changes: Any) -> draft_pb2.AttachRequest:
    config = ModelConfig.from_dir(target)
    sizes = {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "target_fingerprint": config.fingerprint,
        "page_size": PAGE,
        "num_pages": NUM_PAGES,
        "limits": draft_pb2.TreeLimits(num_steps=4, topk=3, num_draft_tokens=16),
    }
    return attach_request(**(sizes | changes))


class Verifier:
    """Sequences on pages that never lie in order, and the steps that describe them."""

    def __init__(self, proposer: Proposer, width: int, seed: int = 0) -> None:
        self.proposer = proposer
        self.width = width
        self.shift = 1  # tokens without a key
        self._free = list(range(NUM_PAGES))
        random.Random(seed).shuffle(self._free)
        self._hidden: dict[int, torch.Tensor] = {}
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}

    def hidden(self, slot: int) -> torch.Tensor:
        """Returns the target's hidden states of a slot's text, for all positions that it may
        ever have.
        """
        if slot not in self._hidden:
            generator = torch.Generator().manual_seed(100 + slot)
            self._hidden[slot] = torch.randn(200, self.width, generator=generator)
        return self._hidden[slot]

    def news(
        self,
        slot: int,
        tokens: list[int],
        limits: tuple[int, int, int] | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> draft_pb2.SequenceStep:
        """The next committed tokens; the first ones begin the sequence."""
        known = self.tokens.setdefault(slot, [])
        pages = self.pages.setdefault(slot, [])
        message = draft_pb2.SequenceStep(slot=slot, position=len(known), first_page=len(pages))
        if not known:
            message.begin.sampling.MergeFrom(draft_pb2.Sampling(**(sampling or {"top_p": 1})))
        message.tokens.extend(tokens)
        first = max(len(known) - 1, 0)
        known += tokens
        self.add_hidden(message, first, len(known) - 1)
        while len(pages) * PAGE < len(known) - self.shift:
            pages.append(self._free.pop())
            message.new_pages.append(pages[-1])
        ask(message, limits)
        return message

    def add_hidden(self, message: draft_pb2.SequenceStep, first: int, end: int) -> None:
        """Adds rows of positions [first, end)."""
        rows = self.hidden(message.slot)[first:end]
        if len(rows):
            message.hidden.inline.CopyFrom(codec.encode(rows))
            message.hidden.num_rows = len(rows)

    def step(self, *messages: draft_pb2.SequenceStep, released: tuple[int, ...] = ()) -> Any:
        request = draft_pb2.StepRequest(sequences=messages, released_slots=released)
        proposals = self.proposer.step(request).proposals
        return {p.slot: (tuple(p.tokens), tuple(p.parents)) for p in proposals}

    def release(self, slot: int) -> None:
        """Forgets a sequence; its pages may be given to others."""
        self._free += self.pages.pop(slot)
        del self.tokens[slot]

    def drafting(self, reference: HeadReference, slot: int, valid_from: int = 0) -> Drafting:
        tokens = list(self.tokens[slot])
        hidden = self.hidden(slot)[: len(tokens) - 1].double().numpy()
        return Drafting(reference, tokens, hidden, valid_from)

    def paths(
        self, reference: HeadReference, slot: int, limits: tuple[int, int, int], **options: Any
    ) -> set[tuple[int, ...]]:
        steps, topk, tokens = limits
        scores = self.drafting(reference, slot, **options).scores
        return best_paths(scores, min(steps, tokens - 1), topk, tokens - 1)


def ask(message: draft_pb2.SequenceStep, limits: tuple[int, int, int] | None) -> None:
    if limits is not None:
        steps, topk, tokens = limits
        message.propose.num_steps, message.propose.topk = steps, topk
        message.propose.num_draft_tokens = tokens


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]
