"""An engine over a toy target that is stepped by hand, and a draft on its device that knows the
text.
"""

import random
from collections.abc import Iterable, Sequence

import torch

from foredraft.trees.draft_tree import DraftTree
from foredraft.types import FinishReason, SamplingParams
from testing.scheduling import scheduler_of
from testing.toy_target import END, ToyGrammar, ToyTarget, decode
from verify_service.controller.controller import Controller
from verify_service.controller.messages import Candidate, DraftKind, Plan
from verify_service.drafts.capabilities import DraftCapabilities
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.proposals import DeviceRequest, Drafted, DraftRequest, Trial
from verify_service.engine.engine import Engine, EngineLimits
from verify_service.engine.live_requests import EngineRequest
from verify_service.executor.base import DeviceOutcome
from verify_service.metrics import SpeculationMetrics
from verify_service.outputs import Load, StepOutput
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.prefix_tree import PrefixTree
from verify_service.scheduler.request import Sequence as RequestSequence

VOCAB, NODES, PAGE = 50, 5, 4


class OracleDraft:
    """The engine's view of a draft on the device that knows the text, and is wrong as often as it
    is told to be.
    """

    states = None
    must_sync = False
    usual_seconds = 0.0
    depth = NODES

    def __init__(
        self, rng: random.Random, target: ToyTarget, name: str = "", is_host: bool = False
    ) -> None:
        self.name = name
        self.capabilities = DraftCapabilities(follows_on_device=not is_host, is_free=is_host)
        self._rng, self._target = rng, target
        self.epoch, self.known_epoch = 1, 1
        self.answers: dict[int, list[int]] = {}  # prompt and continuation by request
        self._rows: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._told: dict[int, int] = {}
        self._proposed: dict[int, Drafted] = {}
        self._trials: list[Trial] = []
        self.num_followed = self.num_asked = self.num_tried = 0

    @property
    def is_stale(self) -> bool:
        return self.epoch != self.known_epoch

    def lag(self, sequence: RequestSequence) -> int:
        return 1

    def suspend(self, is_suspended: bool, keeps_states: bool = True) -> None:
        pass

    def refresh(self) -> None:
        if self.is_stale:
            self._told.clear()
        self.known_epoch = self.epoch

    def release(self, slots: Iterable[int]) -> None:
        pass

    def preempted(self, sequence: RequestSequence) -> None:
        self._told.pop(sequence.request_id, None)

    def forget(self, sequence: RequestSequence) -> None:
        self._told.pop(sequence.request_id, None)

    def close(self) -> None:
        pass

    def ask(self, requests: Sequence[DraftRequest], extending: Sequence[RequestSequence]) -> None:
        self._proposed = {}
        if not self.epoch:
            return
        for one in requests:
            sequence, position = one.sequence, len(one.sequence.tokens)
            if one.is_trial:
                if one.max_nodes:
                    tree = self._tree(sequence.request_id, position).first(one.max_nodes)
                    self._trials.append(Trial(sequence, position, Drafted(tree, 0)))
                    self.num_tried += 1
                continue
            if not one.max_nodes and self.is_left_out():
                continue
            self._told[sequence.request_id] = position
            if one.max_nodes and self._rng.random() < 0.9:
                tree = self._tree(sequence.request_id, position).first(one.max_nodes)
                self._proposed[sequence.request_id] = Drafted(tree, 0)
                self.num_asked += 1

    def is_left_out(self) -> bool:
        """Whether the draft is not told of a sequence that no tree is requested for."""
        return False

    def collect(self) -> dict[int, Drafted]:
        return self._proposed

    def take_trials(self) -> list[Trial]:
        trials, self._trials = self._trials, []
        return trials

    def can_follow(self, sequences: Iterable[RequestSequence]) -> bool:
        is_known = all(self._told.get(s.request_id) == len(s.tokens) for s in sequences)
        return self.capabilities.follows_on_device and is_known

    def follow(
        self, requests: Sequence[DeviceRequest], outcome: DeviceOutcome
    ) -> "OracleDraft | None":
        if self._rng.random() < 0.03:
            self.epoch = 0
            return None
        self._rows = {one.row: one.sequence.request_id for one in requests}
        self._slots = {one.row: int(outcome.accepted[one.row]) for one in requests}
        self.num_followed += 1
        return self

    def fetch(self, trees: torch.Tensor) -> None:
        trees[:, 1] = -2
        for row, request in self._rows.items():
            num_keys, _ = self._target.standing[self._slots[row]]
            tree = self._tree(request, num_keys + 1)
            if self._rng.random() < 0.1:  # nonsense
                trees[row] = torch.randint(-5, 2 * VOCAB, trees[row].shape)
                continue
            trees[row, 0, : len(tree)] = torch.tensor(tree.tokens)
            trees[row, 1, : len(tree)] = torch.tensor(tree.parents)

    def followed(self, sequence: RequestSequence, start: int) -> None:
        self._told[sequence.request_id] = len(sequence.tokens)

    def is_late(self, waiting: float) -> bool:
        return False

    def abandon(self) -> None:
        raise AssertionError("its trees are never late")

    def _tree(self, request: int, num_tokens: int) -> DraftTree:
        """A chain of the text, partly wrong, and a sibling."""
        text = self.answers[request][num_tokens : num_tokens + NODES - 1]
        tokens = [
            token if self._rng.random() < 0.8 else self._rng.randrange(VOCAB) for token in text
        ]
        parents = list(range(-1, len(tokens) - 1))
        if tokens:
            tokens.append((tokens[0] + 1) % VOCAB)
            parents.append(-1)
        return DraftTree(tuple(tokens), tuple(parents))


class FickleController(Controller):
    """Changes its choice in every step."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(None, [DraftKind(NODES, NODES)])
        self._rng = rng

    def plan(
        self, candidates: Sequence[Candidate], other_rows: int = 0, is_ahead: bool = False
    ) -> Plan:
        rows = 1 + self._rng.choice([0, 0, 1, 2, NODES])
        if rows == 1:
            return Plan([0] * len(candidates), 1)
        nodes = [
            min(one.limits[0], self._rng.choice([0, rows - 1, rows - 1])) for one in candidates
        ]
        return Plan(nodes, rows)


class Run:
    """Steps an engine by hand, and records its outputs."""

    def __init__(self, seed: int, has_draft: bool) -> None:
        rng = self.rng = random.Random(seed)
        pages = rng.choice([12, 20, 60])
        self.pool = PagePool(pages, PAGE)
        self.scheduler = scheduler_of(
            self.pool,
            PrefixTree(self.pool) if rng.random() < 0.8 else None,
            max_running_requests=rng.choice([1, 3, 5]),
            chunked_prefill_size=rng.choice([4, 8, 32]),
            admission_headroom=rng.choice([0, 8]),
            context_length=40,
        )
        self.target = ToyTarget(PAGE, VOCAB, NODES + 1)
        self.draft = OracleDraft(rng, self.target) if has_draft else None
        limits = EngineLimits(VOCAB, 40, pages, PAGE, 5, frozenset({7}), NODES)
        self.engine = Engine(
            self.target,
            self.scheduler,
            Drafts([self.draft] if self.draft is not None else []),  # type: ignore[list-item]
            FickleController(rng)
            if rng.random() < 0.5
            else Controller(None, [DraftKind(NODES, NODES)]),
            limits,
            SpeculationMetrics("EAGLE3"),
        )
        self.share_of_grammars = rng.choice([0.0, 0.3, 1.0])
        self.tokens: dict[int, list[int]] = {}
        self.wanted: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.cancelled: set[int] = set()

    def join(self) -> None:
        rng, tag = self.rng, len(self.wanted)
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        num_tokens = rng.randrange(1, 22)
        grammar = None
        if rng.random() < self.share_of_grammars:
            grammar = ToyGrammar(VOCAB, rng.choice([0, 2, 100]))
        text = decode(prompt, 60, VOCAB, grammar.allows if grammar else lambda output, token: True)
        stops = {7, END} if grammar else {7}
        end = next((i for i, token in enumerate(text) if token in stops), 60) + 1
        end = min(end, num_tokens)
        self.wanted[tag], self.tokens[tag] = text[:end], []
        sampling = SamplingParams(
            temperature=0.0,
            max_new_tokens=num_tokens,
            min_p=0.1 if rng.random() < 0.1 else 0.0,  # cannot be started ahead
        )
        request = EngineRequest(tag, prompt, sampling, self._take, grammar=grammar)  # type: ignore[arg-type]
        number = self.engine.submit(request)
        if self.draft is not None:
            self.draft.answers[number] = prompt + text

    def step(self) -> None:
        self.engine._take_inbox()
        if self.engine._steps.has_work:
            self.engine._steps.run()
        self.engine._emit()

    def _take(self, outputs: list[StepOutput], load: Load) -> None:
        for output in outputs:
            self.tokens[output.tag] += output.tokens
            if output.finish is not None:
                assert output.tag not in self.ends
                self.ends[output.tag] = output.finish.reason

    def finish(self) -> None:
        """Steps until all requests have ended."""
        for _ in range(3000):
            self.step()
            if self.engine.is_idle and not self.engine._steps.has_work:
                return

    def check(self) -> None:
        assert set(self.ends) == set(self.wanted)
        for tag, want in self.wanted.items():
            got = self.tokens[tag]
            assert got == want[: len(got)]
            if tag not in self.cancelled:
                assert got == want
        self.scheduler.check_integrity()
        assert self.pool.num_free + self.pool.num_idle == self.pool.num_pages
        assert not self.engine._steps.is_in_flight
