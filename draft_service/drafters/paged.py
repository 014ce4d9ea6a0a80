"""Base classes of drafts that keep KV on the verifier's page numbers.

They have the sizes and checks of an attach, and the order of work in a step.
"""

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch

from draft_service.drafters.base import Drafter, Proposer
from draft_service.drafters.beam_drafting import Scratch, Wish
from draft_service.drafters.graph_drafting import GraphDrafting, GraphSettings, wait
from draft_service.drafters.ngram_override import NgramOverride, OverrideSettings
from draft_service.drafters.paged_sequences import Extension, PagedSequences
from foredraft.api.draft.v1 import draft_pb2
from foredraft.attention.choice import attention_for, device_for
from foredraft.config.services import DraftConfig
from foredraft.cpu.threads import num_cores, use_threads
from foredraft.errors import AttachRefused, ConfigError, InvalidRequest
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.models.provenance import checksum, trained_for
from foredraft.models.quantization_config import Quantization
from foredraft.transport import cuda
from foredraft.trees.draft_tree import DraftTree
from foredraft.trees.tree_building import Ordering

# Maximum rows of one forward of long extensions, over all sequences: enough to use the device well,
# few enough to fit in memory.
CHUNK_ROWS, GPU_CHUNK_ROWS = 512, 1024

# Values for estimates of an attach's memory.
PAGE_SLACK = 16
TYPICAL_BATCH = 48
LOGITS_COPIES = 3
GRAPH_BYTES = 96 << 20

Limits = tuple[int, int, int]

logger = logging.getLogger(__name__)


def device_of(config: DraftConfig) -> torch.device:
    """Returns the device that the draft runs on; for the CPU also sets the number of threads.

    Raises:
        ConfigError: A flag asks for something that this machine does not have.
    """
    device = device_for(config.device)
    if device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    use_threads(config.num_threads or num_cores())
    return device


def graph_settings(config: DraftConfig, device: torch.device) -> GraphSettings | None:
    """Returns the settings of fixed-shape steps; None on the CPU, where they would only add
    padding.
    """
    if device.type == "cpu":
        return None
    return GraphSettings(config.cuda_graph_max_bs, captures=not config.disable_cuda_graph)


def source_of(path: Path, flag: str, stored: Quantization | None) -> draft_pb2.GetDraftInfoResponse:
    """Returns an info message with only the origin and quantisation of a draft's weights.

    Args:
        path: Directory of the checkpoint.
        flag: Value of --speculative-draft-model-quantization.
        stored: Quantisation of the checkpoint; None for plain weights.
    """
    return draft_pb2.GetDraftInfoResponse(
        checksum=checksum(path),
        quantization=flag if stored is None else str(stored),
        trained_for=trained_for(path),
    )


def check_plain(path: Path, flag: str, stored: Quantization | None) -> None:
    """Raises ConfigError where a flag would quantise weights that are quantised already.

    Args: see `source_of`.
    """
    if stored is not None and flag != "unquant":
        raise ConfigError(
            f"--speculative-draft-model-quantization {flag}: {path} is {stored} already; leave the"
            " flag out"
        )


def weight_bytes(*modules: torch.nn.Module) -> int:
    """Returns the bytes of all weights; shared weights count once."""
    weights = {weight for module in modules for weight in module.parameters()}
    return sum(weight.numel() * weight.element_size() for weight in weights)


class PagedDrafter(Drafter):
    """Base class of drafters with one model and its own KV, for one verifier at a time.

    Args:
        config: Configuration of the model, or of a head's layers.
        dtype: Data type of the KV.
        device: Device of the model and the KV.
        fingerprint: Fingerprint of the tokenizer; empty without one.
        limits: (steps, topk, draft tokens), used where a verifier sets none.

    Attributes:
        attention: Attention backend of the device.
        graphs: Settings of fixed-shape steps; None where steps have no fixed shape.
        has_device_steps: Whether fixed-shape steps can stay on a GPU.
        source: Origin of the weights, see `source_of`; empty for a model that was not loaded from
            files.
        ngrams: Settings of n-grams that replace the model's proposals; None for no n-grams.
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
        self.source = draft_pb2.GetDraftInfoResponse()
        self.ngrams: OverrideSettings | None = None
        self._fingerprint = fingerprint
        self._limits = limits

    @property
    def tree_limits(self) -> draft_pb2.TreeLimits:
        """Returns the limits of the largest trees."""
        steps, topk, tokens = self._limits
        return draft_pb2.TreeLimits(num_steps=steps, topk=topk, num_draft_tokens=tokens)

    @property
    def proposes(self) -> draft_pb2.ProposalShape:
        """Returns the shape of proposals of a drafter that works level by level."""
        is_chain = self._limits[1] == 1
        return draft_pb2.PROPOSAL_SHAPE_CHAINS if is_chain else draft_pb2.PROPOSAL_SHAPE_TREES

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
            self._scratch_rows(limits),
            # One more slot takes the KV of padding rows.
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
        if self.ngrams is not None:
            proposer.override = NgramOverride(self.ngrams)
        return proposer, draft_pb2.AttachResponse(kv_bytes=kv_bytes)

    def add_memory(self, info: draft_pb2.GetDraftInfoResponse, vocab: int) -> None:
        """Adds the memory that an attach takes on a GPU to a draft's info.

        Args:
            info: Info of the draft; its kv_bytes_per_token must be set.
            vocab: Number of columns of the logits.
        """
        settings = self.graphs
        if self._kv_device.type == "cpu" or settings is None:
            return
        info.device_uuid = cuda.uuid_of(self._kv_device)
        # N-grams are looked up on the host, which must know the tokens.
        info.device_steps = self.has_device_steps and self.ngrams is None
        topk = self._limits[1]
        # Scratch takes whole pages.
        num_rows = self._scratch_rows(self._limits) + PAGE_SLACK
        info.bytes_per_sequence = info.kv_bytes_per_token * num_rows
        batch = settings.limit or TYPICAL_BATCH
        # Logits of a level, their copies for top-k and noise, and the roots' logits.
        info.workspace_bytes = 4 * vocab * batch * (1 + LOGITS_COPIES * topk) + GRAPH_BYTES
        # Memory of a row of a long extension: the residual stream, the target's states and their
        # copies, and the inner activations of the MLP.
        numbers = 16 * self._config.hidden_size + 4 * self._config.intermediate_size
        info.workspace_bytes += GPU_CHUNK_ROWS * numbers * self._dtype.itemsize

    @abstractmethod
    def _proposer(
        self, kv: PagedKV, attach: draft_pb2.AttachRequest, limits: Limits, scratch: Scratch
    ) -> "PagedProposer":
        """Creates the proposer of a verifier that attaches."""

    @abstractmethod
    def _check_target(self, request: draft_pb2.AttachRequest) -> None:
        """Raises AttachRefused if the draft is for another target."""

    def _scratch_rows(self, limits: Limits) -> int:
        """Returns the number of drafted tokens of one sequence that need KV.

        Args:
            limits: (steps, topk, nodes) of the largest tree.
        """
        return max(1, (limits[0] - 1) * limits[1])

    def _check_limits(self, limits: Limits) -> None:
        """Raises AttachRefused if no trees of these limits (steps, topk, nodes) can be built."""
        if limits[2] < 1:
            raise AttachRefused("limits.num_draft_tokens", "must be at least 2, the root included")

    def _check(self, request: draft_pb2.AttachRequest) -> None:
        self._check_target(request)
        if not request.tokenizer_fingerprint or not self._fingerprint:
            logger.warning("no tokenizer files on one side; taking the tokenizers to be the same")
        elif request.tokenizer_fingerprint != self._fingerprint:
            raise AttachRefused(
                "tokenizer_fingerprint",
                "the tokenizers of target and draft give tokens different ids; a draft model needs"
                " the target's tokenizer",
            )
        if request.draft_sampling not in ("topk", "coupled"):
            raise AttachRefused(
                "draft_sampling", f"must be topk or coupled, not {request.draft_sampling!r}"
            )
        for name in ("page_size", "num_pages", "max_batch", "max_context"):
            if not getattr(request, name):
                raise AttachRefused(name, "must be at least 1")


class PagedProposer(Proposer):
    """Base class of proposers with KV: runs the steps of one verifier.

    Args:
        config: Configuration of the model, or of a head's layers.
        attach: The verifier's sizes.
        limits: (steps, topk, nodes) of the largest tree.
        device: Device that the model runs on.
        shift: See `PagedSequences`.

    Attributes:
        override: N-grams that replace the model's proposals; None for no n-grams.
    """

    override: NgramOverride | None = None

    def __init__(
        self,
        config: ModelConfig,
        attach: draft_pb2.AttachRequest,
        limits: Limits,
        device: torch.device,
        shift: int = 0,
    ) -> None:
        self._config = config
        self._attach, self._limits, self._device = attach, limits, device
        self._most_rows = CHUNK_ROWS if device.type == "cpu" else GPU_CHUNK_ROWS
        self._fast: GraphDrafting | None = None
        self._sequences = PagedSequences(attach, limits, shift)
        self._ordering: Ordering = "coupled" if attach.draft_sampling == "coupled" else "topk"

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures the graphs of steps, and compiles the kernels of long extensions."""
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
        """Returns whether the step is short: its graphs take less time than two thread switches."""
        return self._fast is not None and self._fast.is_brief(request)

    @torch.inference_mode()
    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        """Computes the KV of the committed tokens, then drafts."""
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
        if self.override is not None:
            self.override.read(request)
            self.override.propose(extensions, response)
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
        """Frees the graphs and the n-grams; the KV goes with the proposer."""
        if self.override is not None:
            self.override.close()
        if self._fast is not None:
            self._fast.close()
            self._fast = None

    def _make_fast(self) -> GraphDrafting | None:
        """Creates the fixed-shape steps; None for a draft without them."""
        return None

    def _wait_for_rows(self) -> None:
        """Waits, on a GPU, until hidden states have arrived or have been read.

        The answer to the step lets the verifier overwrite them.
        """
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            wait(event.query, self.hidden)

    @abstractmethod
    def _extend(self, extensions: Sequence[Extension]) -> list[Wish]:
        """Computes the KV of committed tokens, in order; returns the trees that are wanted."""

    @abstractmethod
    def _draft(self, wishes: Sequence[Wish]) -> list[DraftTree]:
        """Returns a tree for each wish, in their order."""

    def _warm_up(self) -> None:
        """Compiles the kernels that run outside of the graphs."""
