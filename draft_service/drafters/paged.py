"""Base class of drafters that keep KV on the verifier's page numbers: the sizes and checks of an
attach.

`paged_proposer` has the order of work in a step.
"""

import logging
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import torch

from draft_service.drafters.base import Drafter
from draft_service.drafters.beam_drafting import Scratch
from draft_service.drafters.extending import GPU_CHUNK_ROWS
from draft_service.drafters.graph_drafting import GraphSettings
from draft_service.drafters.method import DraftMethod
from draft_service.drafters.ngram_override import NgramOverride, OverrideSettings
from draft_service.drafters.paged_proposer import PagedProposer
from draft_service.drafters.tree_limits import TreeLimits
from foredraft.api.draft.v1 import draft_pb2
from foredraft.attention.choice import attention_for, device_for
from foredraft.config.services import DraftConfig
from foredraft.cpu.threads import num_cores, use_threads
from foredraft.errors import AttachRefused, ConfigError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.models.provenance import checksum, trained_for
from foredraft.models.quantization_config import Quantization
from foredraft.transport import cuda

# Values for estimates of an attach's memory.
PAGE_SLACK = 16
TYPICAL_BATCH = 48
LOGITS_COPIES = 3
GRAPH_BYTES = 96 << 20

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
    return GraphSettings(
        config.cuda_graph_max_bs,
        captures=not config.disable_cuda_graph,
        drafts_ahead=bool(config.speculative_draft_ahead),
    )


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """How a drafter's model was loaded, and how its steps run.

    Attributes:
        source: Origin of the weights, see `source_of`; empty for a model that was not loaded from
            files.
        graphs: Settings of fixed-shape steps; None where steps have no fixed shape.
        ngrams: Settings of n-grams that replace the model's proposals; None for no n-grams.
        is_converted: Whether a flag had the model's matrices quantised.
    """

    source: draft_pb2.GetDraftInfoResponse = field(default_factory=draft_pb2.GetDraftInfoResponse)
    graphs: GraphSettings | None = None
    ngrams: OverrideSettings | None = None
    is_converted: bool = False

    @classmethod
    def of(
        cls, config: DraftConfig, path: Path, stored: Quantization | None, device: torch.device
    ) -> "DrafterOptions":
        """Returns the options that the flags give to a model from files.

        Args:
            config: The draft service's flags.
            path: Directory of the checkpoint.
            stored: Quantisation of the checkpoint; None for plain weights.
            device: Device that the draft runs on.
        """
        flag = config.speculative_draft_model_quantization
        return cls(
            source_of(path, flag, stored),
            graph_settings(config, device),
            OverrideSettings.from_config(config),
            is_converted=flag != "unquant",
        )


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
        limits: Limits of trees, used where a verifier sets none.
        options: How the model was loaded, and how its steps run.

    Attributes:
        attention: Attention backend of the device.
        graphs: See `DrafterOptions`.
        has_fixed_steps: Whether steps on a GPU have a fixed shape.
    """

    max_sessions = 1
    has_fixed_steps = True

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        fingerprint: str,
        limits: TreeLimits,
        options: DrafterOptions,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self.device = self._kv_device = device
        self.attention = attention_for(device)
        self.graphs = options.graphs
        self._source, self._ngrams = options.source, options.ngrams
        self._fingerprint, self._limits = fingerprint, limits

    @property
    def proposes(self) -> draft_pb2.ProposalShape:
        """Returns the shape of proposals of a drafter that works level by level."""
        is_chain = self._limits.topk == 1
        return draft_pb2.PROPOSAL_SHAPE_CHAINS if is_chain else draft_pb2.PROPOSAL_SHAPE_TREES

    def attach(
        self, request: draft_pb2.AttachRequest
    ) -> tuple[PagedProposer, draft_pb2.AttachResponse]:
        """Checks that the draft fits the verifier, and allocates its memory."""
        self._check(request)
        return self._allocate(request)

    def _allocate(
        self, request: draft_pb2.AttachRequest
    ) -> tuple[PagedProposer, draft_pb2.AttachResponse]:
        """Allocates KV for the verifier's pages, and scratch."""
        limits = self._limits.asked(request.limits)
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
        graphs = self.graphs if self.has_fixed_steps else None
        proposer = PagedProposer(self._method(kv, request, scratch), request, limits, graphs)
        if self._ngrams is not None:
            proposer.override = NgramOverride(self._ngrams)
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
        info.device_steps = self.has_fixed_steps and self._ngrams is None
        topk = self._limits.topk
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
    def _method(
        self, kv: PagedKV, attach: draft_pb2.AttachRequest, scratch: Scratch
    ) -> DraftMethod:
        """Creates what computes the steps of a verifier that attaches."""

    @abstractmethod
    def _check_target(self, request: draft_pb2.AttachRequest) -> None:
        """Raises AttachRefused if the draft is for another target."""

    def _scratch_rows(self, limits: TreeLimits) -> int:
        """Returns the number of drafted tokens of one sequence that need KV."""
        return max(1, (limits.steps - 1) * limits.topk)

    def _check_limits(self, limits: TreeLimits) -> None:
        """Raises AttachRefused if no trees of these limits can be built."""
        if limits.nodes < 1:
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
