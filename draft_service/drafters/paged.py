"""What drafts that keep KV on the verifier's pages share: sizes and checks of an attach, and the rhythm of a step."""

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from draft_service.drafters.base import Drafter, Proposer
from draft_service.drafters.beam_drafting import BeamDrafter, LevelRunner, Scratch, Wish
from draft_service.drafters.graph_drafting import GraphDrafting, GraphSettings, wait
from draft_service.drafters.paged_sequences import Extension, PagedSequence, PagedSequences
from foredraft.api.draft.v1 import draft_pb2
from foredraft.attention.choice import attention_for, device_for
from foredraft.config.services import DraftConfig
from foredraft.errors import AttachRefused, InvalidRequest
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.runner.batch import SequenceRows
from foredraft.runner.warm_up import Reach, forwards_to_run
from foredraft.transport import cuda
from foredraft.trees.draft_tree import DraftTree
from foredraft.trees.tree_building import Ordering

# Rows of one forward while catching up, over all sequences: enough to be worth launching, few enough to have memory for.
CHUNK_ROWS, GPU_CHUNK_ROWS = 512, 1024

# Of estimates of an attach's memory.
PAGE_SLACK = 16
TYPICAL_BATCH = 48
LOGITS_COPIES = 3
GRAPH_BYTES = 96 << 20

Limits = tuple[int, int, int]

logger = logging.getLogger(__name__)


def device_of(config: DraftConfig) -> torch.device:
    """Where the draft runs; on the CPU with as many threads as configured.

    Raises:
        ConfigError: A flag asks for what this machine does not have.
    """
    device = device_for(config.device)
    if device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(config.num_threads or os.cpu_count() or 1)
    return device


def graph_settings(config: DraftConfig, device: torch.device) -> GraphSettings | None:
    """How steps of fixed shape run on a device; None on the CPU, where they would only add padding."""
    if device.type == "cpu":
        return None
    return GraphSettings(config.cuda_graph_max_bs, captures=not config.disable_cuda_graph)


def weight_bytes(*modules: torch.nn.Module) -> int:
    """Bytes of all weights, shared ones counted once."""
    weights = {weight for module in modules for weight in module.parameters()}
    return sum(weight.numel() * weight.element_size() for weight in weights)


class PagedDrafter(Drafter):
    """Base of the drafters of one model with KV of its own, for one verifier at a time.

    Args:
        config: Of the model, or of a head's layers.
        dtype: Of its KV.
        device: Where it lies.
        fingerprint: Of the tokenizer; empty when there is none.
        limits: (steps, topk, draft tokens) where a verifier does not say.

    Attributes:
        attention: For its device.
        graphs: How steps of fixed shape run; None for none such, where shapes cost nothing.
        has_device_steps: Whether these can stay on a GPU.
    """

    max_sessions = 1
    has_device_steps = True

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        fingerprint: str,
        limits: Limits,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self.device = self._kv_device = device
        self.attention = attention_for(device)
        self.graphs: GraphSettings | None = None
        self._fingerprint = fingerprint
        self._limits = limits

    @property
    def tree_limits(self) -> draft_pb2.TreeLimits:
        """The largest trees."""
        steps, topk, tokens = self._limits
        return draft_pb2.TreeLimits(num_steps=steps, topk=topk, num_draft_tokens=tokens)

    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        """Allocates KV for the verifier's pages, and scratch."""
        self._check(request)
        asked = request.limits
        steps, topk, tokens = self._limits
        limits = (
            asked.num_steps or steps,
            asked.topk or topk,
            (asked.num_draft_tokens or tokens) - 1,
        )
        self._check_limits(limits)
        scratch = Scratch(
            request.num_pages,
            request.page_size,
            max(1, (limits[0] - 1) * limits[1]),
            # One slot more takes what padding rows write.
            request.max_batch + (self.graphs is not None),
        )
        try:
            kv = PagedKV.for_model(
                self._config,
                request.num_pages,
                request.page_size,
                self._dtype,
                self._kv_device,
                num_scratch_pages=scratch.num_pages,
            )
        except (RuntimeError, MemoryError) as error:
            raise AttachRefused(
                "num_pages",
                f"no memory for {request.num_pages} pages; lower --mem-fraction-static: {error}",
            ) from error
        kv_bytes = kv.bytes_per_page() * (request.num_pages + scratch.num_pages)
        proposer = self._proposer(kv, request, limits, scratch)
        return proposer, draft_pb2.AttachResponse(kv_bytes=kv_bytes)

    def add_memory(self, info: draft_pb2.GetDraftInfoResponse, vocab: int) -> None:
        """Says what an attach will take on a GPU.

        Args:
            info: With kv_bytes_per_token.
            vocab: Columns of the logits.
        """
        settings = self.graphs
        if self._kv_device.type == "cpu" or settings is None:
            return
        info.device_uuid = cuda.uuid_of(self._kv_device)
        info.device_steps = self.has_device_steps
        steps, topk, _ = self._limits
        # Scratch is whole pages.
        info.bytes_per_sequence = info.kv_bytes_per_token * ((steps - 1) * topk + PAGE_SLACK)
        batch = settings.limit or TYPICAL_BATCH
        # Logits of a level, their top, their noise; of the roots once more.
        info.workspace_bytes = 4 * vocab * batch * (1 + LOGITS_COPIES * topk) + GRAPH_BYTES
        # What a row of a long extension takes: the stream, the target's states and their copies, and the MLP's inner ones.
        numbers = 16 * self._config.hidden_size + 4 * self._config.intermediate_size
        info.workspace_bytes += GPU_CHUNK_ROWS * numbers * self._dtype.itemsize

    @abstractmethod
    def _proposer(
        self, kv: PagedKV, attach: draft_pb2.AttachRequest, limits: Limits, scratch: Scratch
    ) -> Proposer:
        """What drafts for the verifier that attaches."""

    @abstractmethod
    def _check_target(self, request: draft_pb2.AttachRequest) -> None:
        """Raises AttachRefused when the draft is for another target."""

    def _check_limits(self, limits: Limits) -> None:
        """Raises AttachRefused when no such trees can be built; limits are (steps, topk, nodes)."""
        if limits[2] < 1:
            raise AttachRefused("limits.num_draft_tokens", "must be at least 2, the root included")

    def _check(self, request: draft_pb2.AttachRequest) -> None:
        self._check_target(request)
        if not request.tokenizer_fingerprint or not self._fingerprint:
            logger.warning("no tokenizer files on one side; taking the tokenizers to be the same")
        elif request.tokenizer_fingerprint != self._fingerprint:
            raise AttachRefused(
                "tokenizer_fingerprint",
                "the tokenizers of target and draft give tokens different ids; a draft model needs the target's tokenizer",
            )
        if request.draft_sampling not in ("topk", "coupled"):
            raise AttachRefused(
                "draft_sampling", f"must be topk or coupled, not {request.draft_sampling!r}"
            )
        for name in ("page_size", "num_pages", "max_batch", "max_context"):
            if not getattr(request, name):
                raise AttachRefused(name, "must be at least 1")


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of consecutive keys of one sequence.

    Attributes:
        start: Key index of the first.
        is_wanted: Whether the last row's logits are.
    """

    sequence: PagedSequence
    start: int
    tokens: Sequence[int]
    is_wanted: bool

    def rows(self, first: int, end: int) -> SequenceRows:
        """Rows [first, end) of it."""
        start = self.start + first
        is_wanted = self.is_wanted and end == len(self.tokens)
        return SequenceRows(
            tokens=self.tokens[first:end],
            positions=range(start, self.start + end),
            pages=self.sequence.pages,
            prefix_len=start,
            write_index=start,
            prefix_start=min(self.sequence.valid_from, start),
            logits="last" if is_wanted else "none",
        )


def forwards(runs: Sequence[Run], most_rows: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cuts runs into as few forwards of at most so many rows as will do, none of which is much smaller than the others.

    Yields:
        In order: (index of the run, first row, end row).
    """
    num_rows = sum(len(run.tokens) for run in runs)
    most_rows = -(-num_rows // max(1, -(-num_rows // most_rows)))
    parts: list[tuple[int, int, int]] = []
    room = most_rows
    for index, run in enumerate(runs):
        done = 0
        while done < len(run.tokens):
            end = min(len(run.tokens), done + room)
            parts.append((index, done, end))
            room -= end - done
            done = end
            if room == 0:
                yield parts
                parts, room = [], most_rows
    if parts:
        yield parts


class PagedProposer(Proposer):
    """Drafts trees for one verifier.

    Args:
        runner: Of the draft model; its KV includes the scratch pages.
        config: Of the model, or of a head's layers.
        attach: The verifier's sizes.
        limits: (steps, topk, nodes) of the largest tree.
        shift: See `PagedSequences`.
        device: Where the model runs.
    """

    def __init__(
        self,
        runner: LevelRunner,
        config: ModelConfig,
        attach: draft_pb2.AttachRequest,
        limits: Limits,
        scratch: Scratch,
        device: torch.device,
        shift: int = 0,
    ) -> None:
        self._runner, self._config = runner, config
        self._attach, self._limits, self._device = attach, limits, device
        self._most_rows = CHUNK_ROWS if device.type == "cpu" else GPU_CHUNK_ROWS
        self._fast: GraphDrafting | None = None
        self._sequences = PagedSequences(attach, limits, shift)
        self._ordering: Ordering = "coupled" if attach.draft_sampling == "coupled" else "topk"
        self._drafter = BeamDrafter(runner, scratch, attach.page_size, self._ordering)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures the steps' graphs, and has the kernels of long extensions compiled."""
        try:
            self._fast = self._make_fast()
            if self._device.type == "cuda":
                self._warm_up()
        except torch.OutOfMemoryError as error:
            raise AttachRefused(
                "max_batch",
                f"no memory for the draft's steps; lower --cuda-graph-max-bs: {error}",
            ) from error
        if self._fast is not None:
            self._sequences.on_pages = self._fast.graphs.set_pages

    def is_brief(self, request: draft_pb2.StepRequest) -> bool:
        """See Proposer: the graphs of a step take less time than two changes of thread."""
        return self._fast is not None and self._fast.is_brief(request)

    @torch.inference_mode()
    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        """Computes the KV of what was committed, then drafts."""
        started, fast = time.perf_counter_ns(), self._fast
        if request.sequences and request.sequences[0].HasField("device_row"):
            if fast is None or not fast.can_continue:
                raise InvalidRequest("device_row", "this attach has no exchange on a GPU")
            fast.proceed(request.step, self._sequences.proceed(request))
            return draft_pb2.StepResponse()
        extensions = self._sequences.apply(request)
        if fast is not None and extensions:
            fast.settle()
        if self.hidden is not None and extensions:
            self.hidden.expect(request.step)
        response = draft_pb2.StepResponse()
        if fast is not None and fast.fits(extensions):
            fast.step(extensions, response)
            response.draft_microseconds = (time.perf_counter_ns() - started) // 1000
            return response
        self._wait_for_rows()
        wishes = self._extend(extensions)
        extended = time.perf_counter_ns()
        if fast is not None:
            fast.draft(wishes, response)
        else:
            for wish, tree in zip(wishes, self._draft(wishes), strict=True):
                if tree.tokens:
                    response.proposals.add(
                        slot=wish.sequence.slot, tokens=tree.tokens, parents=tree.parents
                    )
        self._wait_for_rows()
        response.extend_microseconds = (extended - started) // 1000
        response.draft_microseconds = (time.perf_counter_ns() - extended) // 1000
        return response

    def close(self) -> None:
        """Drops the KV."""
        if self._fast is not None:
            self._fast.close()
            self._fast = None
        del self._runner, self._drafter

    def _make_fast(self) -> GraphDrafting | None:
        """Steps of fixed shape; None where there are none such."""
        return None

    def _warm_up(self) -> None:
        """Compiles the kernels of all extensions that go through no graph, and writes to the first page."""
        started = time.monotonic()
        attach, config = self._attach, self._config
        reach = Reach(self._most_rows, attach.max_batch, attach.max_context, cut_keys=False)
        group_size = config.num_heads // config.num_kv_heads
        for rows in forwards_to_run(reach, self._runner.kv, group_size):
            num_rows = sum(len(sequence.tokens) for sequence in rows)
            self._runner.run(rows, self._blank_features(num_rows))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        logger.info("ran what no graph takes in %.1f s", time.monotonic() - started)

    def _wait_for_rows(self) -> None:
        """Until hidden states have come to a GPU, or have been read there: the answer gives their places back."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            wait(event.query, self.hidden)

    def _extend(self, extensions: Sequence[Extension]) -> list[Wish]:
        """Computes the KV of committed tokens, in order; gives what is to be continued."""
        runs = [
            Run(extension.sequence, extension.start, extension.tokens, extension.limits is not None)
            for extension in extensions
        ]
        states = [self._states(extension) for extension in extensions]
        wishes: list[Wish] = []
        for parts in forwards(runs, self._most_rows):
            read = [
                part[first:end]
                for index, first, end in parts
                if (part := states[index]) is not None
            ]
            logits, following = self._runner.run(
                [runs[index].rows(first, end) for index, first, end in parts],
                self._fuse(torch.cat(read)) if read else None,
            )
            ending = [i for i, _, end in parts if runs[i].is_wanted and end == len(runs[i].tokens)]
            for row, index in enumerate(ending):
                extension = extensions[index]
                assert extension.limits is not None
                feature = following[row] if following is not None else None
                wishes.append(Wish(extension.sequence, extension.limits, logits[row], feature))
        return wishes

    def _states(self, extension: Extension) -> torch.Tensor | None:
        """[n, width]: the target's hidden states that the rows of an extension read beside their tokens; None for none."""
        return None

    def _fuse(self, states: torch.Tensor) -> torch.Tensor:
        """[n, H]: what the model makes of them."""
        raise NotImplementedError

    def _blank_features(self, num_rows: int) -> torch.Tensor | None:
        """[n, H] without meaning, as rows read them; None for a model that reads tokens alone."""
        return None

    def _draft(self, wishes: Sequence[Wish]) -> list[DraftTree]:
        """Trees in the order of the wishes."""
        return self._drafter.draft(wishes)
