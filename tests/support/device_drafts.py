"""Steps of a draft that stay on the device, driven from one process: an exchange without a verifier, and a schedule of
sequences that may be told by values or through it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from draft_service.drafters.base import Proposer
from foredraft.api.draft.v1 import draft_pb2
from foredraft.transport.base import HiddenReader, check_rows
from foredraft.transport.device_exchange import DraftExchange, StepSizes

Tree = tuple[tuple[int, ...], tuple[int, ...]]
RING = 512


class LocalExchange(DraftExchange):
    """Tensors of this process; notes what was waited for and said."""

    def __init__(self, sizes: StepSizes, width: int, dtype: torch.dtype, device: str) -> None:
        specs = {spec.name: spec for spec in sizes.tensors(None)}
        # What no step wrote may be anything.
        self.accepted = torch.full(specs["accepted"].shape, -7, dtype=torch.int32, device=device)
        self.trees = torch.full(specs["trees"].shape, -7, dtype=torch.int32, device=device)
        self.hidden, self.first_row = None, 0
        if width:
            count = RING + sizes.max_batch * sizes.num_tokens
            self.hidden = torch.full((count, width), float("nan"), dtype=dtype, device=device)
            self.first_row = RING
        self.waits: list[int] = []
        self.published: list[int] = []

    def wait(self, step: int) -> None:
        self.waits.append(step)

    def publish(self, step: int) -> None:
        self.published.append(step)

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass

    def put(self, row: int, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        """What a verifier writes of one sequence."""
        self.accepted[row] = torch.randint(-(2**31), 2**31 - 1, self.accepted[row].shape)
        words = torch.tensor([len(tokens), *tokens], dtype=torch.int32)
        self.accepted[row, : len(words)] = words
        if self.hidden is not None and hidden is not None:
            num_tokens = self.accepted.shape[1] - 1
            first = self.first_row + row * num_tokens
            self.hidden[first : first + len(hidden)] = hidden.to(self.hidden)

    def tree(self, row: int) -> Tree:
        """What the verifier reads of one sequence."""
        tokens, parents = self.trees[row].tolist()
        size = sum(parent != -2 for parent in parents)
        assert all(parent == -2 for parent in parents[size:])
        return tuple(tokens[:size]), tuple(parents[:size])


class LocalReader(HiddenReader):
    """Reads the ring of such an exchange."""

    def __init__(self, exchange: LocalExchange) -> None:
        assert exchange.hidden is not None
        self.exchange, self.ring = exchange, exchange.hidden[:RING]

    def read(self, rows: draft_pb2.HiddenRows) -> torch.Tensor:
        assert self.ring is not None
        first, count = check_rows(rows, RING)
        return self.ring[(first + torch.arange(count)) % RING]


@dataclass
class Turn:
    """What one step tells: (slot, tokens, whether a tree is wanted) of each sequence, and which slots left before."""

    news: list[tuple[int, list[int], bool]]
    released: list[int]
    on_device: bool


def schedule(
    seed: int, num_turns: int, depth: int, vocab: int, longest: int, max_batch: int = 6
) -> list[Turn]:
    """Sequences that come, grow and leave. Steps in which none joins and none has more than a path are for the device,
    by stretches, with steps by value between them."""
    rng = random.Random(seed)
    lengths: dict[int, int] = {}
    turns = []
    calm = 0
    for _ in range(num_turns):
        on_device = bool(lengths) and calm > 0
        calm = calm - 1 if calm else rng.choice((0, 1, 4, 6))
        released = [slot for slot in lengths if rng.random() < 0.05 or lengths[slot] > longest]
        for slot in released:
            del lengths[slot]
        slots = sorted(lengths) if on_device else rng.sample(range(max_batch), max_batch - 1)
        if on_device and rng.random() < 0.3:
            slots = rng.sample(slots, len(slots))[: max(1, len(slots) - 1)]
        news = []
        for slot in slots:
            choices = (2, 3, 9, 21) if slot not in lengths else (1, 1, 2, depth + 1)
            if not on_device and slot in lengths:
                choices = (*choices, 7)  # now and then more than a step of fixed shape takes
            count = rng.choice(choices)
            lengths[slot] = lengths.get(slot, 0) + count
            tokens = [rng.randrange(2, vocab) for _ in range(count)]
            news.append((slot, tokens, rng.random() < 0.85))
        turns.append(Turn(news, released, on_device and bool(news)))
    return turns


@dataclass
class Driver:
    """Tells a proposer of a schedule.

    Args:
        width: Of hidden states; 0 for a draft that reads none.
        page_size: Tokens of a page.
        limits: Of the trees.
        samplings: Of slots, by turns.
    """

    proposer: Proposer
    exchange: LocalExchange
    width: int
    page_size: int
    limits: draft_pb2.TreeLimits
    samplings: Sequence[dict[str, Any]]
    num_pages: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)
    _step: int = 0
    _next_row: int = 0

    def run(
        self, turns: Sequence[Turn], by_device: Callable[[Turn], bool]
    ) -> list[dict[int, Tree]]:
        """The trees of every turn, by slot."""
        return [self._turn(turn, turn.on_device and by_device(turn)) for turn in turns]

    def hidden(self, slot: int, first: int, end: int) -> torch.Tensor | None:
        """The target's hidden states of positions of a slot."""
        if not self.width:
            return None
        generator = torch.Generator().manual_seed(100 + slot)
        return torch.randn(400, self.width, generator=generator)[first:end]

    def _turn(self, turn: Turn, by_device: bool) -> dict[int, Tree]:
        for slot in turn.released:
            del self.tokens[slot], self.pages[slot]
        self._step += 1
        request = draft_pb2.StepRequest(step=self._step, released_slots=turn.released)
        rows = random.Random(self._step).sample(range(len(self.exchange.accepted) - 1), k=6)
        for row, (slot, tokens, is_wanted) in zip(rows, turn.news, strict=False):
            message = request.sequences.add(slot=slot)
            if by_device:
                self._by_device(message, row, tokens)
            else:
                self._by_value(message, tokens)
            self._give_pages(message)
            if is_wanted:
                message.propose.CopyFrom(self.limits)
        response = self.proposer.step(request)
        if not by_device:
            return {p.slot: (tuple(p.tokens), tuple(p.parents)) for p in response.proposals}
        assert not response.proposals
        assert self.exchange.waits[-1] == self.exchange.published[-1] == self._step
        wanted = zip(rows, turn.news, strict=False)
        return {slot: self.exchange.tree(row) for row, (slot, _, is_wanted) in wanted if is_wanted}

    def _by_device(self, message: draft_pb2.SequenceStep, row: int, tokens: list[int]) -> None:
        known = self.tokens[message.slot]
        hidden = self.hidden(message.slot, len(known) - 1, len(known) + len(tokens) - 1)
        known += tokens
        message.device_row = row
        self.exchange.put(row, tokens, hidden)

    def _by_value(self, message: draft_pb2.SequenceStep, tokens: list[int]) -> None:
        slot = message.slot
        if slot not in self.tokens:
            message.begin.sampling.MergeFrom(
                draft_pb2.Sampling(**self.samplings[slot % len(self.samplings)])
            )
        known = self.tokens.setdefault(slot, [])
        message.position = len(known)
        message.tokens.extend(tokens)
        first = max(len(known) - 1, 0)
        known += tokens
        hidden = self.hidden(slot, first, len(known) - 1)
        if hidden is not None and len(hidden):
            assert self.exchange.hidden is not None
            message.hidden.arena_row, message.hidden.num_rows = self._next_row, len(hidden)
            places = (self._next_row + torch.arange(len(hidden))) % RING
            self.exchange.hidden[places] = hidden.to(self.exchange.hidden)
            self._next_row = (self._next_row + len(hidden)) % RING

    def _give_pages(self, message: draft_pb2.SequenceStep) -> None:
        """Enough for the longest outcome of the step after this, whatever was told how."""
        slot = message.slot
        pages = self.pages.setdefault(slot, [])
        message.first_page = len(pages)
        wanted = len(self.tokens[slot]) + 2 * (self.limits.num_steps + 1)
        while len(pages) * self.page_size < wanted:
            # Of each slot's own pages, every third from its number on: never in order of the pool.
            pages.append((len(pages) * 7 % 40) * 8 + slot)
            message.new_pages.append(pages[-1])
