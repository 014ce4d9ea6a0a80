"""Drafts with a whole small model that has its own KV on the verifier's page numbers.

The KV of token i lies at key index i, without a shift, and is computed from tokens 0 .. i.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from draft_service.drafters.beam_drafting import BeamDrafter, Scratch, TreeRequest
from draft_service.drafters.extending import extend, most_rows, warm_up
from draft_service.drafters.hidden_source import HiddenSource
from draft_service.drafters.method import DraftMethod, MethodSizes, ordering_of
from draft_service.drafters.paged import (
    DrafterOptions,
    PagedDrafter,
    check_plain,
    device_of,
    weight_bytes,
)
from draft_service.drafters.paged_sequences import Extension
from draft_service.drafters.tree_limits import TreeLimits
from draft_service.models.shared_weights import read_token_map, reduce_vocabulary
from draft_service.steps.ahead_step import AheadStep, num_levels
from draft_service.steps.draft_step import StepOptions
from draft_service.steps.level_step import LevelStep
from foredraft import __version__
from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.attention.base import Batch
from foredraft.config.services import DraftConfig
from foredraft.config.speculation_checks import MOST_STEPS_AHEAD
from foredraft.errors import AttachRefused, ConfigError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.conversions import convert_linears
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.kept_fingerprints import kept_fingerprint
from foredraft.models.loader import load_model
from foredraft.models.registry import resolve_model_path
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.transport.base import HiddenReader
from foredraft.trees.draft_tree import DraftTree


class StandaloneDrafter(PagedDrafter):
    """Serves a loaded model to one verifier at a time.

    Args:
        model: The loaded draft model.
        name: Name of the draft model.
        fingerprint: Fingerprint of its tokenizer; empty without one.
        limits: See `PagedDrafter`.
        token_map: int64, token ids that the model's LM head is reduced to (FR-Spec); None for the
            whole vocabulary.
        options: See `PagedDrafter`.
    """

    def __init__(
        self,
        model: DecoderModel,
        name: str,
        fingerprint: str,
        limits: TreeLimits,
        token_map: torch.Tensor | None = None,
        options: DrafterOptions | None = None,
    ) -> None:
        options = options or DrafterOptions()
        super().__init__(model.config, model.dtype, model.device, fingerprint, limits, options)
        self._model = model
        self._name = name
        self._token_map = token_map

    @classmethod
    def load(cls, config: DraftConfig) -> "StandaloneDrafter":
        """Loads the configured draft model.

        Raises:
            CheckpointError: The path or the files cannot be used.
            ConfigError: A flag asks for something that this machine does not have.
        """
        device = device_of(config)
        if config.speculative_draft_ahead and device.type == "cpu":
            raise ConfigError("--speculative-draft-ahead needs a GPU")
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        if device.type == "cpu":
            dtype = dtype or torch.float32
        path = resolve_model_path(
            config.speculative_draft_model_path, config.speculative_draft_model_revision
        )
        flag = config.speculative_draft_model_quantization
        check_plain(path, flag, ModelConfig.from_dir(path).quantization)
        model = load_model(
            path, dtype=dtype, device=device, load_format=config.speculative_draft_load_format
        )
        token_map = None
        if config.speculative_token_map:
            token_map = read_token_map(config.speculative_token_map, model.config.vocab_size)
            token_map = token_map.to(device)
            model.lm_head = reduce_vocabulary(model.lm_head, token_map, model.dtype)
        convert_linears(model, flag, device)
        name = Path(config.speculative_draft_model_path).name.removesuffix(".gguf")
        options = DrafterOptions.of(config, path, model.config.quantization, device)
        limits = TreeLimits.of(config.tree_limits)
        return cls(model, name, kept_fingerprint(path), limits, token_map, options)

    def info(self) -> draft_pb2.GetDraftInfoResponse:
        """Describes the draft, which needs the target's tokenizer and no hidden states."""
        config = self._model.config
        info = draft_pb2.GetDraftInfoResponse(
            algorithm="STANDALONE",
            model=self._name,
            kv_bytes_per_token=config.kv_bytes_per_token(self._dtype.itemsize),
            weight_bytes=weight_bytes(self._model),
            transports=[tensor_pb2.TRANSPORT_INLINE],
            limits=self._limits.message,
            proposes=self.proposes,
            cost=draft_pb2.DRAFT_COST_PER_LEVEL,
            vocab_size=config.vocab_size,
            tokenizer_fingerprint=self._fingerprint,
            uses_pages=True,
            version=__version__,
        )
        info.MergeFrom(self._source)
        self.add_memory(info, self._model.config.vocab_size)
        return info

    def _method(
        self, kv: PagedKV, attach: draft_pb2.AttachRequest, scratch: Scratch
    ) -> DraftMethod:
        runner = ModelRunner(self._model, kv, self.attention, cut_keys=False)
        return ModelMethod(runner, self._token_map, attach, scratch, self._drafts_ahead)

    @property
    def _drafts_ahead(self) -> bool:
        return self.graphs is not None and self.graphs.drafts_ahead

    def _scratch_rows(self, limits: TreeLimits) -> int:
        return num_levels(limits.steps) if self._drafts_ahead else super()._scratch_rows(limits)

    def _check_limits(self, limits: TreeLimits) -> None:
        super()._check_limits(limits)
        steps, topk, nodes = limits
        is_short_chain = (topk, nodes) == (1, steps) and steps <= MOST_STEPS_AHEAD
        if self._drafts_ahead and not is_short_chain:
            raise AttachRefused(
                "limits",
                f"with --speculative-draft-ahead trees must be chains of at most {MOST_STEPS_AHEAD}"
                " tokens",
            )

    def _check_target(self, request: draft_pb2.AttachRequest) -> None:
        config = self._model.config
        # Models of one family share a tokenizer, but their embedding tables are padded to different
        # lengths (Qwen2.5: 151,936 and 152,064).
        has_same_tokens = (
            bool(self._fingerprint) and request.tokenizer_fingerprint == self._fingerprint
        )
        if request.vocab_size != config.vocab_size and not has_same_tokens:
            raise AttachRefused(
                "vocab_size",
                f"the target's is {request.vocab_size}, the draft's {config.vocab_size}; a target"
                " may have another one if its tokenizer is the draft's",
            )
        largest = -1 if self._token_map is None else int(self._token_map.max())
        if largest >= request.vocab_size:
            raise AttachRefused(
                "vocab_size",
                f"--speculative-token-map has token {largest}, the target's vocabulary ends with"
                f" {request.vocab_size - 1}",
            )
        self._model.embedding.takes_any_id = request.vocab_size > config.vocab_size
        if request.max_context > config.max_position_embeddings:
            raise AttachRefused(
                "max_context",
                f"the target's sequences have up to {request.max_context} tokens, the draft model "
                f"{config.max_position_embeddings} positions; lower --context-length",
            )


class ModelMethod(DraftMethod):
    """Drafts trees for one verifier with a whole model, level by level on scratch pages.

    Args:
        runner: Runs the model; its KV includes the scratch pages.
        token_map: See StandaloneDrafter.
        attach: The verifier's sizes.
        scratch: Pages for the KV of drafted tokens.
        drafts_ahead: See --speculative-draft-ahead.
    """

    def __init__(
        self,
        runner: ModelRunner,
        token_map: torch.Tensor | None,
        attach: draft_pb2.AttachRequest,
        scratch: Scratch,
        drafts_ahead: bool = False,
    ) -> None:
        model = runner.model
        columns = min(model.config.vocab_size, attach.vocab_size)
        if token_map is not None:
            columns = len(token_map)
        self.sizes = MethodSizes(model.config, model.dtype, model.device, columns)
        self._attach, self._levels = attach, _Levels(runner, token_map, columns)
        self._drafts_ahead = drafts_ahead
        self._most_rows, ordering = most_rows(model.device), ordering_of(attach)
        self._drafter = BeamDrafter(self._levels, scratch, attach.page_size, ordering)

    def extend(
        self, extensions: Sequence[Extension], reader: HiddenReader | None
    ) -> list[TreeRequest]:
        """See DraftMethod."""
        return extend(self._levels, extensions, self._most_rows)

    def draft(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """See DraftMethod."""
        return self._drafter.draft(requests)

    def warm_up(self) -> None:
        """See DraftMethod."""
        warm_up(self._levels, self.sizes, self._attach)

    def fixed_step(self, options: StepOptions, source: HiddenSource | None) -> LevelStep:
        """See DraftMethod."""
        levels = self._levels
        if self._drafts_ahead:
            return AheadStep(levels.forward, levels.kv, options, levels.token_map)
        return LevelStep(levels.forward, None, levels.kv, options, levels.token_map)


class _Levels:
    """Runs a whole model level by level; it reads no features.

    Args:
        columns: Number of logits' columns that are kept: the model may have more tokens than the
            target.
    """

    def __init__(self, runner: ModelRunner, token_map: torch.Tensor | None, columns: int) -> None:
        self._runner, self.kv, self.attention = runner, runner.kv, runner.attention
        self.token_map, self._columns = token_map, columns

    def run(
        self, rows: Sequence[SequenceRows], features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See LevelRunner."""
        output = self._runner.forward(rows, all_hidden=False)
        return output.logits[:, : self._columns], None

    def forward(
        self, batch: Batch, features: torch.Tensor | None, sources: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes one batch of a step of fixed shape; see `steps.level_step.Forward`."""
        logits = self._runner.model.forward(batch, self.kv, self.attention).logits
        return logits[:, : self._columns], None
