"""Draft steps on the device: an exchange within one process, and schedules of sequences.

A schedule's sequences can be sent by value or through an exchange.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.transport.base import HiddenReader, check_rows
from foredraft.transport.device_exchange import DraftExchange, StepSizes

Tree = tuple[tuple[int, ...], tuple[int, ...]]
RING = 512


class VerifierEnd(Protocol):
    """The verifier's end of an arena, as far as a schedule's driver needs it."""

    num_rows: int

    def tell(self, message: draft_pb2.SequenceStep, hidden: torch.Tensor) -> None:
        """Names hidden states [n, width] in a message."""

    def put(self, row: int, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Writes the committed tokens of one sequence."""

    def send(self, step: int, by_device: bool) -> None:
        """Marks everything of a step as written."""

    def read_trees(self, step: int) -> list[tuple[list[int], list[int]]]:
        """Returns tokens and parents of all rows, once a step's trees are written."""


class LocalExchange(DraftExchange):
    """Both ends of an exchange in one process. Records the draft's waits and publications."""

    def __init__(self, sizes: StepSizes, width: int, dtype: torch.dtype) -> None:
        specs = {spec.name: spec for spec in sizes.tensors(None)}
        # Memory that no step wrote may hold anything.
        self.accepted = torch.full(specs["accepted"].shape, -7, dtype=torch.int32)
        self.trees = torch.full(specs["trees"].shape, -7, dtype=torch.int32)
        self.drafted = torch.zeros(1, dtype=torch.int32)
        self.hidden, self.first_row = None, 0
        if width:
            count = RING + sizes.max_batch * sizes.num_tokens
            self.hidden = torch.full((count, width), float("nan"), dtype=dtype)
            self.first_row = RING
        self.num_rows = sizes.max_batch
        self.waits: list[int] = []
        self.published: list[int] = []
        self.num_abandoned = 0
        self._next_row = 0

    def wait(self, step: int) -> None:
        self.waits.append(step)

    def publish(self, step: int) -> None:
        self.published.append(step)
        self.drafted.fill_(step)

    def abandon(self) -> None:
        self.num_abandoned += 1

    def close(self) -> None:
        pass

    def tell(self, message: draft_pb2.SequenceStep, hidden: torch.Tensor) -> None:
        assert self.hidden is not None
        message.hidden.arena_row, message.hidden.num_rows = self._next_row, len(hidden)
        self.hidden[(self._next_row + torch.arange(len(hidden))) % RING] = hidden.to(self.hidden)
        self._next_row = (self._next_row + len(hidden)) % RING

    def put(self, row: int, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        fill(self.accepted[row], tokens)
        if self.hidden is not None and hidden is not None:
            first = self.first_row + row * (self.accepted.shape[1] - 1)
            self.hidden[first : first + len(hidden)] = hidden.to(self.hidden)

    def send(self, step: int, by_device: bool) -> None:
        pass

    def read_trees(self, step: int) -> list[tuple[list[int], list[int]]]:
        assert self.waits[-1] == self.published[-1] == step
        return self.trees.tolist()


def fill(row: torch.Tensor, tokens: Sequence[int]) -> None:
    """Writes a row of "accepted": the number of tokens, the tokens, and then arbitrary values."""
    words = torch.randint(-(2**31), 2**31 - 1, row.shape, dtype=torch.int32)
    words[: 1 + len(tokens)] = torch.tensor([len(tokens), *tokens], dtype=torch.int32)
    row.copy_(words)


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
    """Contents of one step:

    (slot, tokens, whether a tree is requested) of each sequence, and the slots that left before.
    """

    news: list[tuple[int, list[int], bool]]
    released: list[int]
    on_device: bool


def schedule(
    seed: int, num_turns: int, depth: int, vocab: int, longest: int, max_batch: int = 6
) -> list[Turn]:
    """Yields turns of sequences that come, grow and leave.

    Steps in which none joins and none has more than a path are for the device, by stretches, with
    steps by value between them.
    """
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
    """Sends a schedule to a draft.

    Args:
        step: Function that returns a draft's answer.
        end: The verifier's end of its arena.
        width: Width of hidden states; 0 for a draft that reads none.
        page_size: Number of tokens of a page.
        limits: Limits of the trees.
        samplings: Sampling parameters that slots use by turns.
    """

    step: Callable[[draft_pb2.StepRequest], draft_pb2.StepResponse]
    end: VerifierEnd
    width: int
    page_size: int
    limits: draft_pb2.TreeLimits
    samplings: Sequence[dict[str, Any]]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)
    num_steps: int = 0

    def run(
        self, turns: Sequence[Turn], by_device: Callable[[Turn], bool]
    ) -> list[dict[int, Tree]]:
        """Returns the trees of every turn, by slot."""
        return [self.take(turn, turn.on_device and by_device(turn)) for turn in turns]

    def take(self, turn: Turn, by_device: bool) -> dict[int, Tree]:
        """Runs one turn; returns its trees by slot."""
        for slot in turn.released:
            del self.tokens[slot], self.pages[slot]
        self.num_steps += 1
        request = draft_pb2.StepRequest(step=self.num_steps, released_slots=turn.released)
        rows = random.Random(self.num_steps).sample(range(self.end.num_rows), k=len(turn.news))
        for row, (slot, tokens, is_wanted) in zip(rows, turn.news, strict=True):
            message = request.sequences.add(slot=slot)
            if by_device:
                self._by_device(message, row, tokens)
            else:
                self._by_value(message, tokens)
            self._give_pages(message)
            if is_wanted:
                message.propose.CopyFrom(self.limits)
        self.end.send(self.num_steps, by_device)
        response = self.step(request)
        if not by_device:
            return {p.slot: (tuple(p.tokens), tuple(p.parents)) for p in response.proposals}
        assert not response.proposals
        trees = self.end.read_trees(self.num_steps)
        wanted = zip(rows, turn.news, strict=True)
        return {slot: _nodes(*trees[row]) for row, (slot, _, is_wanted) in wanted if is_wanted}

    def hidden(self, slot: int, first: int, end: int) -> torch.Tensor | None:
        """Returns the target's hidden states of positions of a slot."""
        if not self.width:
            return None
        generator = torch.Generator().manual_seed(100 + slot)
        return torch.randn(200, self.width, generator=generator)[first:end]

    def _by_device(self, message: draft_pb2.SequenceStep, row: int, tokens: list[int]) -> None:
        known = self.tokens[message.slot]
        hidden = self.hidden(message.slot, len(known) - 1, len(known) + len(tokens) - 1)
        known += tokens
        message.device_row = row
        self.end.put(row, tokens, hidden)

    def _by_value(self, message: draft_pb2.SequenceStep, tokens: list[int]) -> None:
        slot = message.slot
        if slot not in self.tokens:
            sampling = self.samplings[slot % len(self.samplings)]
            message.begin.sampling.MergeFrom(draft_pb2.Sampling(**sampling))
        known = self.tokens.setdefault(slot, [])
        message.position = len(known)
        message.tokens.extend(tokens)
        first = max(len(known) - 1, 0)
        known += tokens
        hidden = self.hidden(slot, first, len(known) - 1)
        if hidden is not None and len(hidden):
            self.end.tell(message, hidden)

    def _give_pages(self, message: draft_pb2.SequenceStep) -> None:
        """Adds pages that suffice for the longest outcome of the step after this."""
        pages = self.pages.setdefault(message.slot, [])
        message.first_page = len(pages)
        wanted = len(self.tokens[message.slot]) + 2 * (self.limits.num_steps + 1)
        while len(pages) * self.page_size < wanted:
            # Pages of the slot alone, in another order than the pool's.
            pages.append((len(pages) * 7 % 40) * 8 + message.slot)
            message.new_pages.append(pages[-1])


def _nodes(tokens: Sequence[int], parents: Sequence[int]) -> Tree:
    size = sum(parent != -2 for parent in parents)
    assert all(parent == -2 for parent in parents[size:])
    return tuple(tokens[:size]), tuple(parents[:size])
