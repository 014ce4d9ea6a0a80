"""A draft in this process that checks what it is sent.

It stores hidden states on the verifier's pages, as an EAGLE head stores its KV, and compares them
with those that transformers computes.
"""

import asyncio
import contextlib
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draft_service.drafters.base import Drafter, Proposer
from draft_service.service import SERVICE_NAME, DraftService
from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.draft.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.config.services import VerifyConfig
from foredraft.rpc.server import RpcServer
from testing.engines import Harness
from verify_service.attach.links import connect_drafts
from verify_service.metrics import speculation_metrics
from verify_service.startup import build_engine, load_target

TOLERANCE = 3e-4  # relative to the largest element of a state


@dataclass(slots=True)
class Slot:
    """The draft's state of a sequence."""

    valid_from: int
    num_tokens: int
    pages: list[int] = field(default_factory=list)


@dataclass(slots=True)
class View:
    """The slots that a draft's attention would read for one proposal, from `start` on.

    Each holds a hidden state and the next token, or only its own token; None where nothing was ever
    written.
    """

    start: int
    entries: list[tuple[torch.Tensor | None, int] | None]

    @property
    def tokens(self) -> list[int]:
        return [entry[1] for entry in self.entries if entry is not None]


class HiddenDrafter(Drafter):
    """Proposes from given texts, right tokens after wrong ones, and records what it read.

    Args:
        width: Width of a row.
        layers: Layers that it reads.
        skill: Share of the proposed levels that hold the right token.
        weight_bytes: Reported size of its weights; a draft without weights is taken to cost
            nothing.
        algorithm: Reported algorithm; STANDALONE reads only tokens.
    """

    max_sessions = 1

    def __init__(
        self,
        width: int,
        layers: Sequence[int] = (),
        skill: float = 0.8,
        weight_bytes: int = 0,
        algorithm: str = "EAGLE",
    ) -> None:
        self.algorithm = algorithm
        self.shift = int(algorithm != "STANDALONE")  # distance of a token from its slot
        self.weight_bytes = weight_bytes
        self.texts: list[list[int]] = []
        self.views: list[View] = []
        self.requests: list[draft_pb2.StepRequest] = []
        self.fail_in: int | None = None  # steps until the stream breaks
        self.num_attaches = 0
        self.skill = skill
        self.dtype = tensor_pb2.DATA_TYPE_FLOAT32
        self._width = width
        self._layers = tuple(layers)

    def info(self) -> draft_pb2.GetDraftInfoResponse:
        needs = draft_pb2.HiddenNeeds(layers=self._layers, width=self._width, dtype=self.dtype)
        return draft_pb2.GetDraftInfoResponse(
            algorithm=self.algorithm,
            weight_bytes=self.weight_bytes,
            hidden=needs if self.shift else None,
            uses_pages=True,
        )

    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        self.num_attaches += 1
        return _HiddenProposer(self, request), draft_pb2.AttachResponse()

    @torch.no_grad()
    def check(self, path: Path) -> int:
        """Asserts that every view equals one of the texts; returns the number of compared
        states.

        Args:
            path: The target's checkpoint.
        """
        for view in self.views:
            assert None not in view.entries, f"a slot was never filled: {view.start}"
        if not self.shift:
            for view in self.views:
                assert any(text[: len(view.tokens)] == view.tokens for text in self.texts)
            return sum(len(view.entries) for view in self.views)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        states = []
        for text in self.texts:
            hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states
            layers = self._layers or (-1,)
            states.append(torch.cat([hidden[layer][0] for layer in layers], dim=-1))
        compared = 0
        for view in self.views:
            rows = torch.stack([entry[0] for entry in view.entries if entry is not None])
            end = view.start + len(rows)
            gaps = [
                float((state[view.start : end] - rows).abs().max() / state.abs().max())
                for text, state in zip(self.texts, states, strict=True)
                if text[view.start + 1 : end + 1] == view.tokens
            ]
            assert gaps, "tokens that are in no text"
            assert min(gaps) < TOLERANCE, f"states differ by {min(gaps)}"
            compared += len(rows)
        return compared


class _HiddenProposer(Proposer):
    def __init__(self, drafter: HiddenDrafter, attach: draft_pb2.AttachRequest) -> None:
        self._drafter = drafter
        self._page_size = attach.page_size
        self._num_pages = attach.num_pages
        self._slots: dict[int, Slot] = {}
        self._memory: dict[int, tuple[torch.Tensor | None, int]] = {}
        self._random = random.Random(attach.epoch)

    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        drafter = self._drafter
        if drafter.fail_in is not None:
            drafter.fail_in -= 1
            if drafter.fail_in <= 0:
                drafter.fail_in = None
                raise RuntimeError("a defect, on purpose")
        drafter.requests.append(request)
        for slot in request.released_slots:
            self._slots.pop(slot, None)
        response = draft_pb2.StepResponse()
        for news in request.sequences:
            self._read(news)
        # Only now: as in a head of one layer, all of a step is written before anything is attended.
        for news in request.sequences:
            if news.HasField("propose"):
                tokens, parents = self._propose(self._slots[news.slot], news.propose)
                response.proposals.add(slot=news.slot, tokens=tokens, parents=parents)
        return response

    def _read(self, news: draft_pb2.SequenceStep) -> None:
        if news.HasField("begin"):
            self._slots[news.slot] = Slot(news.begin.valid_from, news.position)
        slot = self._slots[news.slot]
        assert news.position <= slot.num_tokens
        assert news.tokens or not self._drafter.shift, "news without tokens"
        assert news.first_page <= len(slot.pages) or not news.new_pages
        if news.new_pages:
            slot.pages[news.first_page :] = news.new_pages
        assert max(slot.pages, default=0) < self._num_pages
        shift = self._drafter.shift
        first = max(news.position - shift, 0)
        assert slot.valid_from <= first
        tokens = news.tokens if news.position else news.tokens[shift:]
        rows = self.hidden.read(news.hidden) if shift else [None] * len(tokens)
        assert len(rows) == len(tokens)
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            self._memory[self._place(slot, first + i)] = (row, token)
        slot.num_tokens = news.position + len(news.tokens)

    def _place(self, slot: Slot, index: int) -> int:
        return slot.pages[index // self._page_size] * self._page_size + index % self._page_size

    def _propose(self, slot: Slot, limits: draft_pb2.TreeLimits) -> tuple[list[int], list[int]]:
        shift = self._drafter.shift
        places = range(slot.valid_from, slot.num_tokens - shift)
        view = View(slot.valid_from, [self._memory.get(self._place(slot, i)) for i in places])
        self._drafter.views.append(view)
        known = view.tokens
        tokens: list[int] = []
        parents: list[int] = []
        for text in self._drafter.texts:
            if text[slot.valid_from + shift : slot.num_tokens] != known:
                continue
            parent = -1
            for right in text[slot.num_tokens :][: limits.num_steps]:
                wrong = (right + 1) % 128
                if self._random.random() > self._drafter.skill:
                    right = (right + 2) % 128
                tokens += [wrong, right]
                parents += [parent, parent]
                parent = len(tokens) - 1
            break
        room = limits.num_draft_tokens - 1
        return tokens[:room], parents[:room]

    def close(self) -> None:
        self._memory.clear()


class HiddenDraft:
    """Runs the service of a drafter in a thread."""

    def __init__(self, drafter: Drafter) -> None:
        self._folder = tempfile.mkdtemp(prefix="draft-")
        self.target = f"unix:{self._folder}/draft.sock"
        self._drafter = drafter
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "HiddenDraft":
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(120)
        shutil.rmtree(self._folder)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        with ThreadPoolExecutor(1) as worker:
            server = RpcServer(self.target)
            service = DraftService(worker)
            server.add(add_DraftServiceServicer_to_server, service, SERVICE_NAME)
            await server.start()
            service.open(self._drafter)
            await server.set_serving()
            self._ready.set()
            await self._stop.wait()
            await server.stop(0)


@contextlib.contextmanager
def engine_with(
    drafter: Drafter | Sequence[Drafter], model_path: Path, **flags: Any
) -> Iterator[Harness]:
    """Runs an engine on `model_path` whose draft is `drafter`, or whose drafts are these."""
    drafters = [drafter] if isinstance(drafter, Drafter) else drafter
    names = [one.info().algorithm for one in drafters]
    with contextlib.ExitStack() as stack:
        drafts = [stack.enter_context(HiddenDraft(drafter)) for drafter in drafters]
        addresses = tuple(f"{name}={one.target}" for name, one in zip(names, drafts, strict=True))
        models = ",".join(f"{name}=in-this-process" for name in names)
        config = VerifyConfig(
            **{
                "model_path": str(model_path),
                "speculative_algorithm": ",".join(names),
                "speculative_draft_model_path": models,
                "speculative_num_steps": 3,
                "speculative_eagle_topk": 2,
                "speculative_num_draft_tokens": 7,
                "device": "cpu",
                "num_threads": 1,
                "max_total_tokens": 4096,
                "draft_step_timeout": 20.0,
                "skip_draft_self_test": True,
                "draft": addresses,
                **flags,
            }
        )
        metrics = speculation_metrics(names)
        target = load_target(config)
        engine = build_engine(config, target, metrics, connect_drafts(config, target, metrics))
        engine.draft_everything()  # tests must not depend on this machine's speed
        engine.start()
        try:
            yield Harness(engine, None)
        finally:
            engine.stop()
        assert engine.failure is None
